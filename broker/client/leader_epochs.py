"""OffsetForLeaderEpoch: in which leader epochs a partition's log was written (KIP-101, KIP-279).

Asked of each partition's leader, as a reader (KIP-320), by who wants to know whether a log is still the one
that it read: two logs have the same record at an offset only if they have the same epoch there. One answer
tells the newest epoch that is not above the one asked for, and where it ended; asking again below each
answer gives the history of the newest epochs. Of an older one, whatever came after it, one question tells
where it ended (`older_ends`). Versions 2 to 4 are spoken.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from millrace.broker.client.connection import request_schema
from millrace.broker.client.leader_questions import ask_leaders, refused
from millrace.broker.errors import KafkaError, UnsupportedVersion
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.topic_partition import TopicPartition

if TYPE_CHECKING:
    from millrace.broker.client.cluster import Cluster

_VERSIONS = (2, 4)
_WHAT = "epochs"
_READER = -1  # "replica id" of who is no replica
MOST_EPOCHS = 64
"""so many of the newest epochs are asked for: each costs a question, and old ones are seldom in doubt"""

EpochStarts = tuple[tuple[int, int], ...]
"""(epoch, its first offset), ascending; below the first of them nothing is known"""
EpochEnds = tuple[tuple[int, int, int], ...]
"""(epoch that was asked for, the newest that is not above it, where that ended): answers of a leader"""


def is_partial(history: EpochStarts) -> bool:
    """Whether the leader may know of older epochs, for which it was not asked."""
    return len(history) >= MOST_EPOCHS


async def epoch_histories(
    cluster: Cluster, latest: Mapping[TopicPartition, tuple[int, int]]
) -> dict[TopicPartition, EpochStarts]:
    """Each partition's epochs from its log's start on; `latest` {partition: (its newest epoch, log start)}.

    A partition whose leader cannot say is absent: an old server, a log that was written before there were
    epochs. Retries while leaders move; raises the KafkaError of a partition that refuses for good.
    """
    walks = {key: Walk(epoch, start) for key, (epoch, start) in latest.items() if epoch >= 0}
    try:
        while asked := {key: walk.asks for key, walk in walks.items() if walk.asks is not None}:
            for key, (epoch, end) in (await epoch_ends(cluster, asked)).items():
                walks[key].learn(epoch, end)
    except UnsupportedVersion:
        return {}
    return {key: walk.found for key, walk in walks.items() if walk.found}


async def older_ends(
    cluster: Cluster,
    histories: Mapping[TopicPartition, EpochStarts],
    kept: Mapping[TopicPartition, EpochStarts],
) -> dict[TopicPartition, EpochEnds]:
    """What leaders answer for the epochs `kept` of logs that were read, where their `histories` do not go
    back so far: from the newest on, down to one that the leader has. Raises as `epoch_ends` does."""
    left = {
        key: [epoch for epoch, _ in kept.get(key, ()) if 0 <= epoch < history[0][0]]
        for key, history in histories.items()
        if is_partial(history)
    }
    found: dict[TopicPartition, EpochEnds] = {}
    while asked := {key: epochs.pop() for key, epochs in left.items() if epochs}:
        for key, (epoch, end) in (await epoch_ends(cluster, asked)).items():
            found[key] = (*found.get(key, ()), (asked[key], epoch, end))
            left[key] = [each for each in left[key] if each <= epoch] if epoch < asked[key] else []
    return found


class Walk:
    """The questions to one leader, from its newest epoch downwards, and what its answers give. Pure.

    `asks` is the epoch to ask for next, None at the end.
    """

    def __init__(self, newest: int, log_start: int) -> None:
        self.asks: int | None = newest
        self.found: EpochStarts = ()
        self._log_start = log_start
        self._epoch = -1  # the one whose first offset the next answer tells

    def learn(self, epoch: int, end: int) -> None:
        """The answer: `epoch` is the newest that is not above the asked one, and ends at `end`."""
        asked, self.asks = self.asks, None
        if epoch < 0 or end < 0:
            return
        if self._epoch < 0:
            # The newest epoch itself: where it ends is the log's end.
            if epoch != asked:
                return
        elif self.found and end >= self.found[0][1]:
            return  # nothing is left below: leaders answer so for an epoch older than all they know
        else:
            self.found = ((self._epoch, end), *self.found)
        if (self.found and self.found[0][1] <= self._log_start) or len(self.found) >= MOST_EPOCHS:
            return
        self._epoch = epoch
        if epoch == 0:  # there is none below
            self.found = ((0, self._log_start), *self.found)
        else:
            self.asks = epoch - 1


async def epoch_ends(
    cluster: Cluster, asked: Mapping[TopicPartition, int]
) -> dict[TopicPartition, tuple[int, int]]:
    """{partition: (its leader's newest epoch that is not above the one `asked` for, where that ends)}, -1 for
    what the leader does not know.

    Retries while leaders move; raises the KafkaError of a partition that refuses for good, and
    UnsupportedVersion where the server is older than these questions (Apache Kafka 2.0).
    """
    found: dict[TopicPartition, tuple[int, int]] = {}

    async def ask(node_id: int, here: Mapping[TopicPartition, int]) -> None:
        await _ask(cluster, node_id, here, found)

    await ask_leaders(cluster, asked, found, ask, _WHAT)
    return found


async def _ask(
    cluster: Cluster,
    node_id: int,
    asked: Mapping[TopicPartition, int],
    found: dict[TopicPartition, tuple[int, int]],
) -> None:
    """Ask one leader; answers go to `found`, the first error is raised at the end."""
    version = await cluster.api_version(Api.OFFSET_FOR_LEADER_EPOCH, *_VERSIONS, node_id)
    schema = request_schema(Api.OFFSET_FOR_LEADER_EPOCH, version)
    by_topic: dict[str, list[Any]] = {}
    for (topic, partition), epoch in asked.items():
        by_topic.setdefault(topic, []).append(
            schema.OffsetForLeaderPartition(partition=partition, current_leader_epoch=-1, leader_epoch=epoch)
        )
    topics = tuple(
        schema.OffsetForLeaderTopic(topic=topic, partitions=tuple(parts)) for topic, parts in by_topic.items()
    )
    reader = {"replica_id": _READER} if version >= 3 else {}
    answer = await cluster.request(
        schema.OffsetForLeaderEpochRequest(topics=topics, **reader), node_id=node_id
    )
    problem: KafkaError | None = None
    for topic in answer.topics:
        for part in topic.partitions:
            key = (str(topic.topic), int(part.partition))
            code = int(part.error_code)
            if code:
                cluster.observe(code)
                problem = problem or refused(cluster, key, code, _WHAT)
            else:
                found[key] = (int(part.leader_epoch), int(part.end_offset))
    if problem is not None:
        raise problem
