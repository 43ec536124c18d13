"""ListOffsets: where partitions begin and end, and which offset belongs to a time.

Asked of each partition's leader, again while leaders move. Versions 4 to 7 are spoken (alike on the wire
but for the encoding); -3, the offset of the largest timestamp, needs a server with version 7.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from millrace.broker.client.connection import request_schema
from millrace.broker.client.metadata import ClusterMetadata, TopicPartition
from millrace.broker.errors import KafkaError, LeaderNotAvailable, UnknownTopicOrPartition, error_for_code
from millrace.broker.protocol.frames import Api

if TYPE_CHECKING:
    from millrace.broker.client.cluster import Cluster

EARLIEST = -2
LATEST = -1
LARGEST_TIMESTAMP = -3

_VERSIONS = (4, 7)


class ListedOffset(NamedTuple):
    """`offset` is -1 where no record is as young as the time asked for."""

    offset: int
    timestamp: int
    leader_epoch: int


async def list_offsets(
    cluster: Cluster, timestamps: Mapping[TopicPartition, int], read_committed: bool = False
) -> dict[TopicPartition, ListedOffset]:
    """For each partition the first offset at or after a time in ms, or EARLIEST, LATEST (the high
    watermark; the last stable offset where `read_committed`).

    Retries while leaders move, for the cluster's request timeout. Raises the KafkaError of the first
    partition that cannot be answered (UnknownTopicOrPartition for one that does not exist).
    """
    found: dict[TopicPartition, ListedOffset] = {}

    async def attempt() -> None:
        missing = {key: at for key, at in timestamps.items() if key not in found}
        view = await cluster.metadata(sorted({topic for topic, _ in missing}))
        groups = view.by_leader(missing)
        leaderless = groups.pop(None, [])
        asked = [
            _ask(cluster, node_id, {key: missing[key] for key in keys}, read_committed, found)
            for node_id, keys in groups.items()
            if node_id is not None
        ]
        problems = [each for each in await asyncio.gather(*asked, return_exceptions=True) if each is not None]
        if leaderless:
            problems.append(_leaderless(cluster, view, leaderless))
        # What cannot be cured by trying again is worth more than what can.
        problems.sort(key=lambda error: isinstance(error, KafkaError) and error.retriable)
        if problems:
            raise problems[0]

    await cluster.retrying(attempt)
    return found


async def _ask(
    cluster: Cluster,
    node_id: int,
    timestamps: Mapping[TopicPartition, int],
    read_committed: bool,
    found: dict[TopicPartition, ListedOffset],
) -> None:
    """Ask one leader; answers go to `found`, the first error is raised at the end."""
    schema = request_schema(
        Api.LIST_OFFSETS, await cluster.api_version(Api.LIST_OFFSETS, *_VERSIONS, node_id)
    )
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
                problem = problem or _refused(cluster, key, int(part.error_code))
            else:
                found[key] = ListedOffset(int(part.offset), int(part.timestamp), int(part.leader_epoch))
    if problem is not None:
        raise problem


def _refused(cluster: Cluster, key: TopicPartition, code: int) -> KafkaError:
    plain = error_for_code(code)
    return error_for_code(code, f"{cluster}: offsets of {key[0]}-{key[1]}: {plain}")


def _leaderless(cluster: Cluster, view: ClusterMetadata, keys: Iterable[TopicPartition]) -> KafkaError:
    topic, partition = min(keys)
    cluster.invalidate()
    if topic in view.topic_errors:
        return _refused(cluster, (topic, partition), view.topic_errors[topic])
    if topic not in view.topics or partition not in view.topics[topic].partitions:
        return _refused(cluster, (topic, partition), UnknownTopicOrPartition.code)
    return LeaderNotAvailable(f"{cluster}: {topic}-{partition} has no leader now")
