"""FindCoordinator, versions 0-6: which broker keeps a group.

Called by dispatch. The coordinator of a group leads the group's partition of `__consumer_offsets`; the
first one to ask makes that topic, through the same door as any other. From version 4 one request asks for
several keys (KIP-699). Unlike Apache Kafka, this waits for the new topic's leaders, so that a first
consumer need not retry; and it has no transactions or share groups yet: their key types are refused with
INVALID_REQUEST rather than with an error that clients would retry for ever.
"""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from millrace.broker.coordination.controller_client import NewTopic
from millrace.broker.errors import KafkaError
from millrace.broker.groups.offsets import OFFSETS_TOPIC, partition_of_group
from millrace.broker.protocol.frames import Api
from millrace.broker.server.answers import answer
from millrace.broker.server.context import BrokerServices, RequestContext

API = Api.FIND_COORDINATOR
VERSIONS = range(7)

_KEY_TYPE_FROM = 1
_SEVERAL_KEYS_FROM = 4
_GROUP_KEY = 0

CREATE_TIMEOUT_MS = 10_000
"""Well below the request timeouts of the clients (30 s and more)."""


async def handle(request: Any, context: RequestContext) -> Any:
    version = context.head.version
    key_type = request.key_type if version >= _KEY_TYPE_FROM else _GROUP_KEY
    if version >= _SEVERAL_KEYS_FROM:
        keys = request.coordinator_keys
        coordinators = [{"key": key, **await _coordinator(key, key_type, context.broker)} for key in keys]
        return answer(API, version, coordinators=coordinators)
    return answer(API, version, **await _coordinator(request.key, key_type, context.broker))


async def _coordinator(key: str, key_type: int, broker: BrokerServices) -> dict[str, Any]:
    if key_type != _GROUP_KEY:
        return _nowhere(ErrorCode.invalid_request, "this broker coordinates groups only")
    settings = broker.config.settings
    offsets_topic = NewTopic(
        OFFSETS_TOPIC,
        settings.offsets_topic_num_partitions,
        settings.offsets_topic_replication_factor,
        config={
            "cleanup.policy": "compact",
            "compression.type": "producer",
            "segment.bytes": str(settings.offsets_topic_segment_bytes),
        },
    )
    try:
        topic = await broker.controller.ensure_topic(offsets_topic, CREATE_TIMEOUT_MS)
    except KafkaError as error:
        return _nowhere(ErrorCode.coordinator_not_available, str(error))
    # The topic's own width counts: it may have been made under another setting.
    partition = topic.partitions.get(partition_of_group(key, len(topic.partitions)))
    leader = broker.metadata_cache.brokers.get(partition.leader) if partition is not None else None
    if leader is None:
        return _nowhere(ErrorCode.coordinator_not_available, "the group's coordinator is being elected")
    return {
        "node_id": leader.broker_id,
        "host": leader.host,
        "port": leader.port,
        "error_code": ErrorCode.none,
        "error_message": "NONE",
    }


def _nowhere(error: ErrorCode, message: str) -> dict[str, Any]:
    return {"node_id": -1, "host": "", "port": -1, "error_code": error, "error_message": message}
