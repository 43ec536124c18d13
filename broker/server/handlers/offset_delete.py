"""OffsetDelete, version 0: forget offsets of topics that a group no longer reads (KIP-496).

Called by dispatch; the rules are in `groups/coordinator.py`. As in Apache Kafka 3.9.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from kio.schema.errors import ErrorCode

from millrace.broker.groups.offsets import TopicPartition
from millrace.broker.protocol.frames import Api
from millrace.broker.server.answers import answer
from millrace.broker.server.context import RequestContext
from millrace.broker.server.group_requests import partition_exists

API = Api.OFFSET_DELETE
VERSIONS = range(1)


async def handle(request: Any, context: RequestContext) -> Any:
    version = context.head.version
    errors: dict[TopicPartition, ErrorCode] = {}
    wanted: list[TopicPartition] = []
    for topic in request.topics:
        for asked in topic.partitions:
            partition = (topic.name, asked.partition_index)
            if partition_exists(context, *partition):
                wanted.append(partition)
            else:
                errors[partition] = ErrorCode.unknown_topic_or_partition
    error, deleted = await context.broker.groups.delete_offsets(request.group_id, wanted)
    if error is not ErrorCode.none:
        return answer(API, version, error_code=error)
    topics: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for (name, index), outcome in (errors | deleted).items():
        topics[name].append({"partition_index": index, "error_code": outcome})
    return answer(
        API,
        version,
        topics=[{"name": topic, "partitions": partitions} for topic, partitions in topics.items()],
    )
