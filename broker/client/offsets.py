"""ListOffsets: where partitions begin and end, and which offset belongs to a time.

Asked of each partition's leader, again while leaders move. Versions 4 to 8 are spoken (alike on the wire
but for the encoding); -3, the offset of the largest timestamp, needs a server with version 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from millrace.broker.client.connection import request_schema
from millrace.broker.client.leader_questions import ask_leaders, refused
from millrace.broker.errors import KafkaError, UnsupportedVersion
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.topic_partition import TopicPartition

if TYPE_CHECKING:
    from millrace.broker.client.cluster import Cluster

EARLIEST = -2
LATEST = -1
EARLIEST_LOCAL = -4
"""What lies before it the server has in a remote store alone (KIP-405); without one, the log's start."""

_VERSIONS = (4, 8)
_FIRST_WITH_EARLIEST_LOCAL = 8
_WHAT = "offsets"


class ListedOffset(NamedTuple):
    """`offset` is -1 where no record is as young as the time asked for."""

    offset: int
    timestamp: int
    leader_epoch: int


async def list_offsets(
    cluster: Cluster, timestamps: Mapping[TopicPartition, int], read_committed: bool = False
) -> dict[TopicPartition, ListedOffset]:
    """For each partition the first offset at or after a time in ms, or EARLIEST, EARLIEST_LOCAL, LATEST (the
    high watermark; the last stable offset where `read_committed`).

    Retries while leaders move, for the cluster's request timeout. Raises the KafkaError of the first
    partition that cannot be answered (UnknownTopicOrPartition for one that does not exist), and
    UnsupportedVersion for EARLIEST_LOCAL where a server is too old for remote stores.
    """
    found: dict[TopicPartition, ListedOffset] = {}

    async def ask(node_id: int, asked: Mapping[TopicPartition, int]) -> None:
        await _ask(cluster, node_id, asked, read_committed, found)

    await ask_leaders(cluster, timestamps, found, ask, _WHAT)
    return found


async def local_start(cluster: Cluster, key: TopicPartition) -> int:
    """Where what a partition's leader has on its own disk begins: only from there on is giving nothing a word
    of its log. Before it, it may be that its remote store is away (KIP-405). Raises KafkaError."""
    try:
        starts = await cluster.list_offsets({key: EARLIEST_LOCAL})
    except UnsupportedVersion:
        return 0  # it is older than remote stores
    return starts[key].offset


async def _ask(
    cluster: Cluster,
    node_id: int,
    timestamps: Mapping[TopicPartition, int],
    read_committed: bool,
    found: dict[TopicPartition, ListedOffset],
) -> None:
    """Ask one leader; answers go to `found`, the first error is raised at the end."""
    lowest, highest = _VERSIONS
    if EARLIEST_LOCAL in timestamps.values():
        lowest = _FIRST_WITH_EARLIEST_LOCAL
    version = await cluster.api_version(Api.LIST_OFFSETS, lowest, highest, node_id)
    schema = request_schema(Api.LIST_OFFSETS, version)
    by_topic: dict[str, list[Any]] = {}
    for (topic, partition), at in timestamps.items():
        part = schema.ListOffsetsPartition(partition_index=partition, current_leader_epoch=-1, timestamp=at)
        by_topic.setdefault(topic, []).append(part)
    request = schema.ListOffsetsRequest(
        replica_id=-1,
        isolation_level=1 if read_committed else 0,
        topics=tuple(
            schema.ListOffsetsTopic(name=topic, partitions=tuple(parts)) for topic, parts in by_topic.items()
        ),
    )
    answer = await cluster.request(request, node_id=node_id)
    problem: KafkaError | None = None
    for topic in answer.topics:
        for part in topic.partitions:
            key = (str(topic.name), int(part.partition_index))
            if part.error_code:
                cluster.observe(int(part.error_code))
                problem = problem or refused(cluster, key, int(part.error_code), _WHAT)
            else:
                found[key] = ListedOffset(int(part.offset), int(part.timestamp), int(part.leader_epoch))
    if problem is not None:
        raise problem
