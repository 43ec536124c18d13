"""OffsetCommit, versions 2-9: remember how far a group has read.

Called by dispatch; the rules are in `groups/membership.py` (who may commit) and `groups/coordinator.py`.
A retention time (versions 2-4) becomes an explicit expiry; the leader epoch comes with version 6, static
members with version 7. A topic or partition that does not exist is refused by itself, the rest goes on.
From version 9 a member of a group that does not exist hears so (GROUP_ID_NOT_FOUND), before that
ILLEGAL_GENERATION, as in Apache Kafka 4.
Versions 0 and 1, which Apache Kafka 3.9 still speaks, are not spoken (no schema, no living client).
"""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from millrace.broker.groups.values import CommitRequest, OffsetToCommit
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.server.answers import answer_of, item_count
from millrace.broker.server.context import RequestContext
from millrace.broker.server.group_requests import (
    errors_by_topic,
    instance_id_of,
    milliseconds,
    partition_exists,
)

API = Api.OFFSET_COMMIT
VERSIONS = range(2, 10)

_GROUP_NOT_FOUND_FROM = 9


async def handle(request: Any, context: RequestContext) -> Any:
    expire_timestamp_ms = _expiry(request, context)
    errors: dict[TopicPartition, ErrorCode] = {}
    offsets: dict[TopicPartition, OffsetToCommit] = {}
    for topic in request.topics:
        for wanted in topic.partitions:
            partition = (topic.name, wanted.partition_index)
            if partition_exists(context, *partition):
                offsets[partition] = OffsetToCommit(
                    wanted.committed_offset,
                    getattr(wanted, "committed_leader_epoch", -1),
                    wanted.committed_metadata or "",
                    expire_timestamp_ms,
                )
            else:
                errors[partition] = ErrorCode.unknown_topic_or_partition
    errors |= await context.broker.groups.commit(
        request.group_id,
        CommitRequest(
            request.member_id, instance_id_of(request), request.generation_id_or_member_epoch, offsets
        ),
        no_such_group=ErrorCode.group_id_not_found
        if context.head.version >= _GROUP_NOT_FOUND_FROM
        else ErrorCode.illegal_generation,
    )
    topics = errors_by_topic(errors)
    return await answer_of(item_count(topics), context.head, topics=topics)


def _expiry(request: Any, context: RequestContext) -> int | None:
    retention = getattr(request, "retention_time", None)
    if retention is None or milliseconds(retention) < 0:
        return None
    return context.broker.clock.now_ms() + milliseconds(retention)
