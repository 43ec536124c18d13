"""FindCoordinator, versions 0-6: which broker keeps a group, or a transactional id.

Called by dispatch. The coordinator of a group leads the group's partition of `__consumer_offsets`, that of a
transactional id its partition of `__transaction_state`; the first one to ask makes the topic, through the
same door as any other. From version 4 one request asks for several keys (KIP-699). Unlike Apache Kafka, this
waits for a new topic's leaders, so that a first client need not retry; and it has no share groups: their key
type is refused with INVALID_REQUEST rather than with an error that clients would retry for ever.
"""

from __future__ import annotations

import asyncio
from enum import IntEnum
from typing import Any

from kio.schema.errors import ErrorCode

from millrace.broker.coordination.metadata_cache import takers_of_replicas
from millrace.broker.errors import KafkaError
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.java_hash import coordinator_partition
from millrace.broker.replication.partition import NO_LEADER
from millrace.broker.server.answers import answer
from millrace.broker.server.context import BrokerServices, RequestContext
from millrace.broker.server.coordinator_topics import offsets_topic, partition_leader, transactions_topic

API = Api.FIND_COORDINATOR
VERSIONS = range(7)

_KEY_TYPE_FROM = 1
_SEVERAL_KEYS_FROM = 4

CREATE_TIMEOUT_MS = 10_000
"""Well below the request timeouts of the clients (30 s and more)."""

ELECTION_WAIT_MS = 1_000
"""For a topic that is just being made; a client whose coordinator is gone should hear that soon."""


class KeyType(IntEnum):
    GROUP = 0
    TRANSACTION = 1


async def handle(request: Any, context: RequestContext) -> Any:
    version = context.head.version
    key_type = request.key_type if version >= _KEY_TYPE_FROM else KeyType.GROUP
    if version >= _SEVERAL_KEYS_FROM:
        keys = request.coordinator_keys
        # The first may have to make the topic; the others go side by side, as each may wait for an election.
        found = [await _coordinator(key, key_type, context.broker) for key in keys[:1]]
        found += await asyncio.gather(*(_coordinator(key, key_type, context.broker) for key in keys[1:]))
        coordinators = [{"key": key, **each} for key, each in zip(keys, found, strict=True)]
        return answer(API, version, coordinators=coordinators)
    return answer(API, version, **await _coordinator(request.key, key_type, context.broker))


async def _coordinator(key: str, key_type: int, broker: BrokerServices) -> dict[str, Any]:
    settings, cache = broker.config.settings, broker.metadata_cache
    broker_count = len(takers_of_replicas(cache.brokers))
    match key_type:
        case KeyType.GROUP:
            wanted = offsets_topic(settings, broker_count)
        case KeyType.TRANSACTION:
            wanted = transactions_topic(settings, broker_count)
        case _:
            return _nowhere(ErrorCode.invalid_request, "this broker coordinates groups and transactions only")
    try:
        topic = cache.topic(wanted.name) or await broker.controller.ensure_topic(wanted, CREATE_TIMEOUT_MS)
    except KafkaError as error:
        return _nowhere(ErrorCode.coordinator_not_available, str(error))
    # The topic's own width counts: it may have been made under another setting.
    number = coordinator_partition(key, len(topic.partitions))

    def is_led() -> bool:
        return partition_leader(cache, wanted.name, number) not in (None, NO_LEADER)

    await cache.changed(is_led, ELECTION_WAIT_MS)
    leader_id = partition_leader(cache, wanted.name, number)
    leader = None if leader_id is None else cache.brokers.get(leader_id)
    if leader is None:
        return _nowhere(ErrorCode.coordinator_not_available, "the coordinator is being elected")
    return {
        "node_id": leader.broker_id,
        "host": leader.host,
        "port": leader.port,
        "error_code": ErrorCode.none,
        "error_message": "NONE",
    }


def _nowhere(error: ErrorCode, message: str) -> dict[str, Any]:
    return {"node_id": -1, "host": "", "port": -1, "error_code": error, "error_message": message}
