"""DescribeClientQuotas, versions 0 and 1: the byte rates set for client ids.

Filters as in Apache Kafka: an exact name, the default entity, or any entity of a type; `strict` leaves out
entities that have a type which was not asked for. Users and addresses can be asked for and have no quotas.
"""

from __future__ import annotations

from typing import Any

from millrace.broker.errors import InvalidRequest, KafkaError, UnsupportedVersion
from millrace.broker.protocol.frames import Api
from millrace.broker.server.answers import NO_ERROR, answer
from millrace.broker.server.context import RequestContext

API = Api.DESCRIBE_CLIENT_QUOTAS
VERSIONS = range(2)

CLIENT_ID = "client-id"
ENTITY_TYPES = ("user", CLIENT_ID, "ip")
EXACT, DEFAULT, ANY = range(3)


async def handle(request: Any, context: RequestContext) -> Any:
    version = context.head.version
    try:
        filters = read_filters(request.components)
    except KafkaError as error:
        return answer(API, version, error_code=error.code, error_message=str(error), entries=None)
    entries = [
        {
            "entity": [{"entity_type": CLIENT_ID, "entity_name": name}],
            "values": [{"key": key, "value": value} for key, value in values.items()],
        }
        for name, values in context.broker.quotas.limits.items()
        if matches(filters, name, strict=request.strict)
    ]
    return answer(API, version, error_code=NO_ERROR, error_message=None, entries=entries)


def read_filters(components: Any) -> dict[str, tuple[int, str | None]]:
    """Entity type -> (match type, name). Raises InvalidRequest, UnsupportedVersion."""
    filters: dict[str, tuple[int, str | None]] = {}
    for component in components:
        kind, match_type, name = component.entity_type, component.match_type, component.match
        if not kind:
            raise InvalidRequest("an entity type is empty")
        if kind in filters:
            raise InvalidRequest(f"entity type {kind} is named more than once")
        if kind not in ENTITY_TYPES:
            raise UnsupportedVersion(f"entity type {kind} is not known; expected user, client-id or ip")
        if match_type not in (EXACT, DEFAULT, ANY):
            raise InvalidRequest(f"match type {match_type} is not known")
        if (name is None) == (match_type == EXACT):
            raise InvalidRequest(f"match type {match_type} of {kind} and name {name!r} do not fit")
        filters[kind] = (match_type, name)
    if "ip" in filters and len(filters) > 1:
        raise InvalidRequest("a filter for addresses cannot be combined with others")
    return filters


def matches(filters: dict[str, tuple[int, str | None]], name: str | None, *, strict: bool) -> bool:
    """Whether the entity of this client id (None: the default) is asked for."""
    if CLIENT_ID not in filters:
        return not filters and not strict
    if len(filters) > 1:
        return False
    match_type, wanted = filters[CLIENT_ID]
    return match_type == ANY or name == wanted
