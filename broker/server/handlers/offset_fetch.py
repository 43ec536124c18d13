"""OffsetFetch, versions 1-9: how far a group has read.

Called by dispatch. A partition or group without a committed offset answers offset -1 and no error, as in
Apache Kafka. From version 2 a null topic list asks for every offset and errors stand at the top; from
version 8 one request asks for several groups (KIP-709). From version 7 a reader may ask for stable offsets
only (KIP-447): a partition with an open transaction on it is answered UNSTABLE_OFFSET_COMMIT, to be asked
for again. Version 9's member id and epoch belong to groups of KIP-848, which this broker has none of: they
are not looked at. Version 0 (offsets in ZooKeeper) is not spoken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from kio.schema.errors import ErrorCode

from millrace.broker.groups.offsets import CommittedOffset
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.server.answers import answer_of
from millrace.broker.server.context import RequestContext

API = Api.OFFSET_FETCH
VERSIONS = range(1, 10)

_TOP_LEVEL_ERROR_FROM = 2
_SEVERAL_GROUPS_FROM = 8
NO_OFFSET = CommittedOffset(-1, -1, "", -1)


async def handle(request: Any, context: RequestContext) -> Any:
    version = context.head.version
    stable = getattr(request, "require_stable", False)
    if version >= _SEVERAL_GROUPS_FROM:
        groups = [_one_group(group.group_id, group.topics, stable, context) for group in request.groups]
        return await answer_of(sum(map(_item_count, groups)), context.head, groups=groups)
    fetched = _one_group(request.group_id, request.topics, stable, context)
    if version < _TOP_LEVEL_ERROR_FROM and fetched["error_code"] is not ErrorCode.none:
        fetched["topics"] = _with_error(request.topics, fetched["error_code"])
    return await answer_of(_item_count(fetched), context.head, **fetched)


def _item_count(group: dict[str, Any]) -> int:
    return 1 + sum(len(topic["partitions"]) for topic in group["topics"])


def _one_group(
    group_id: str, topics: Iterable[Any] | None, stable: bool, context: RequestContext
) -> dict[str, Any]:
    wanted = None
    if topics is not None:
        wanted = [(topic.name, partition) for topic in topics for partition in topic.partition_indexes]
    error, found = context.broker.groups.fetch_offsets(group_id, wanted, require_stable=stable)
    return {"group_id": group_id, "topics": _by_topic(found), "error_code": error}


def _by_topic(found: dict[TopicPartition, CommittedOffset | ErrorCode | None]) -> list[dict[str, Any]]:
    topics: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for (topic, partition), kept in found.items():
        if isinstance(kept, ErrorCode):
            topics[topic].append(_partition(partition, NO_OFFSET, kept))
        else:
            topics[topic].append(_partition(partition, kept or NO_OFFSET, ErrorCode.none))
    return [{"name": topic, "partitions": partitions} for topic, partitions in topics.items()]


def _with_error(topics: Iterable[Any], error: ErrorCode) -> list[dict[str, Any]]:
    return [
        {
            "name": topic.name,
            "partitions": [_partition(index, NO_OFFSET, error) for index in topic.partition_indexes],
        }
        for topic in topics
    ]


def _partition(index: int, committed: CommittedOffset, error: ErrorCode) -> dict[str, Any]:
    return {
        "partition_index": index,
        "committed_offset": committed.offset,
        "committed_leader_epoch": committed.leader_epoch,
        "metadata": committed.metadata,
        "error_code": error,
    }
