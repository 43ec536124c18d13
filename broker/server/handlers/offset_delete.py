"""OffsetDelete, version 0: forget offsets of topics that a group no longer reads (KIP-496).

Called by dispatch; the rules are in `groups/coordinator.py`. As in Apache Kafka 3.9.
"""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.server.answers import answer, answer_of, item_count
from millrace.broker.server.context import RequestContext
from millrace.broker.server.group_requests import errors_by_topic, partition_exists

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
    topics = errors_by_topic(errors | deleted)
    return await answer_of(item_count(topics), context.head, topics=topics)
