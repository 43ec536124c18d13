"""A question about many partitions: each leader is asked about its own, again while leaders move.

Called by `offsets` and `leader_epochs`, which bring the question and keep the answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

from millrace.broker.client.metadata import ClusterMetadata
from millrace.broker.errors import (
    KafkaError,
    LeaderNotAvailable,
    ProtocolError,
    UnknownTopicOrPartition,
    error_for_code,
)
from millrace.broker.protocol.topic_partition import TopicPartition

if TYPE_CHECKING:
    from millrace.broker.client.cluster import Cluster

T = TypeVar("T")


async def ask_leaders(
    cluster: Cluster,
    wanted: Mapping[TopicPartition, T],
    found: Container[TopicPartition],
    ask: Callable[[int, dict[TopicPartition, T]], Awaitable[None]],
    what: str,
) -> None:
    """Returns when every wanted partition is in `found`, which `ask` (node id, its part of `wanted`) fills.

    Retries for the cluster's request timeout. Raises the KafkaError of the first partition that cannot be
    answered (UnknownTopicOrPartition for one that does not exist), and ProtocolError where an answer leaves
    one out; `what` is the question, for its words.
    """

    async def attempt() -> None:
        missing = {key: value for key, value in wanted.items() if key not in found}
        view = await cluster.metadata(sorted({topic for topic, _ in missing}))
        groups = view.by_leader(missing)
        leaderless = groups.pop(None, [])
        asked = [
            ask(node_id, {key: missing[key] for key in keys})
            for node_id, keys in groups.items()
            if node_id is not None
        ]
        problems = [each for each in await asyncio.gather(*asked, return_exceptions=True) if each is not None]
        if leaderless:
            problems.append(_leaderless(cluster, view, leaderless, what))
        # What cannot be cured by trying again is worth more than what can.
        problems.sort(key=lambda error: isinstance(error, KafkaError) and error.retriable)
        if problems:
            raise problems[0]
        if left_out := [key for key in missing if key not in found]:
            topic, partition = min(left_out)
            raise ProtocolError(f"{cluster}: the answer leaves out the {what} of {topic}-{partition}")

    await cluster.retrying(attempt)


def refused(cluster: Cluster, key: TopicPartition, code: int, what: str) -> KafkaError:
    """The error of one partition's answer, with the place in its words."""
    return error_for_code(code, f"{cluster}: {what} of {key[0]}-{key[1]}: {error_for_code(code)}")


def _leaderless(
    cluster: Cluster, view: ClusterMetadata, keys: Iterable[TopicPartition], what: str
) -> KafkaError:
    topic, partition = min(keys)
    cluster.invalidate()
    if topic in view.topic_errors:
        return refused(cluster, (topic, partition), view.topic_errors[topic], what)
    if topic not in view.topics or partition not in view.topics[topic].partitions:
        return refused(cluster, (topic, partition), UnknownTopicOrPartition.code, what)
    return LeaderNotAvailable(f"{cluster}: {topic}-{partition} has no leader now")
