"""AlterClientQuotas, versions 0 and 1: set or remove byte rates of client ids.

Each entry succeeds or fails for itself. `producer_byte_rate` and `consumer_byte_rate` of an id or of the
default are taken; what Apache Kafka limits besides (shares of request time, the rate of topic changes, users,
addresses) is refused with INVALID_REQUEST rather than taken and not kept.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from millrace.broker.errors import InvalidRequest, KafkaError
from millrace.broker.protocol.frames import Api
from millrace.broker.server.answers import NO_ERROR, answer_of
from millrace.broker.server.context import BrokerServices, RequestContext
from millrace.broker.server.handlers.describe_client_quotas import CLIENT_ID, ENTITY_TYPES
from millrace.broker.server.quotas import QUOTA_KEYS, UNLIMITED

API = Api.ALTER_CLIENT_QUOTAS
VERSIONS = range(2)

FRACTION = 1e-6


async def handle(request: Any, context: RequestContext) -> Any:
    entities = [tuple((part.entity_type, part.entity_name) for part in e.entity) for e in request.entries]
    times = Counter(entities)
    entries = []
    for entry, entity in zip(request.entries, entities, strict=True):
        result: dict[str, Any] = {
            "error_code": NO_ERROR,
            "error_message": None,
            "entity": [{"entity_type": kind, "entity_name": name} for kind, name in entity],
        }
        try:
            if times[entity] > 1:
                raise InvalidRequest("the entity is named more than once")
            await _alter(entity, entry.ops, context.broker, validate_only=request.validate_only)
        except KafkaError as error:
            result |= {"error_code": error.code, "error_message": str(error)}
        entries.append(result)
    return await answer_of(len(entries), context.head, entries=entries)


async def _alter(
    entity: tuple[tuple[str, str | None], ...], ops: Any, broker: BrokerServices, *, validate_only: bool
) -> None:
    client_id = client_id_of(entity)
    changes = read_changes(ops)
    if not validate_only:
        await broker.quota_store.alter(client_id, changes)


def client_id_of(entity: tuple[tuple[str, str | None], ...]) -> str | None:
    """The client id that an entity names; None for the default. Raises InvalidRequest."""
    kinds = [kind for kind, _ in entity]
    if not entity:
        raise InvalidRequest("the entity is empty")
    if len(set(kinds)) < len(kinds):
        raise InvalidRequest("an entity type is named more than once")
    for kind in kinds:
        if kind not in ENTITY_TYPES:
            raise InvalidRequest(f"entity type {kind} is not known")
    if kinds != [CLIENT_ID]:
        raise InvalidRequest("this broker keeps quotas of client ids only")
    name = entity[0][1]
    if name == "":
        raise InvalidRequest("the client id is empty")
    return name


def read_changes(ops: Any) -> dict[str, float | None]:
    """Quota key -> bytes a second, None to remove it. Raises InvalidRequest."""
    changes: dict[str, float | None] = {}
    for op in ops:
        if op.key in changes:
            raise InvalidRequest(f"{op.key} is named more than once")
        if op.key not in QUOTA_KEYS:
            raise InvalidRequest(
                f"{op.key} is not a quota of this broker; it keeps {' and '.join(QUOTA_KEYS)}"
            )
        changes[op.key] = None if op.remove else _checked(op.key, op.value)
    return changes


def _checked(key: str, value: float) -> float:
    if not 0 < value <= UNLIMITED:  # also refuses what is not a number
        raise InvalidRequest(f"{key} is {value}; expected a rate above 0")
    if math.fmod(value, 1.0) > FRACTION:
        raise InvalidRequest(f"{key} is {value}; expected a whole number of bytes a second")
    return float(int(value))
