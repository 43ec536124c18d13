"""Where a partition's log begins and ends as a run finds it, and in which leader epochs it was written.

Called by `capture` for the audited topics and by `event_reading` for the events topics. `PartitionPin` is a
value; the rest asks clusters.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.leader_epochs import EpochEnds, EpochStarts, epoch_histories, older_ends
from millrace.broker.client.metadata import NO_TOPIC_ID, ClusterMetadata
from millrace.broker.client.offsets import EARLIEST, LATEST, ListedOffset
from millrace.broker.errors import (
    ClusterUnreachable,
    KafkaError,
    UnknownTopicOrPartition,
    error_for_code,
)
from millrace.broker.protocol.topic_partition import TopicPartition

MAX_PINNINGS = 5


@dataclass(frozen=True, slots=True)
class PartitionPin:
    """One partition as it was when pinned: readable offsets are [start_offset, end_offset). `topic` is that
    of its place (`ClusterConfig.places`), `topic_here` its name in the cluster.

    A `high_watermark` above the end tells of acknowledged records that an open transaction keeps back.
    `epochs` are the newest leader epochs of its log, () where its leader does not tell them; `older_ends` is
    what it answered for older ones in which the log was read.
    """

    cluster: str
    topic: str
    topic_here: str
    partition: int
    topic_id: str
    start_offset: int
    end_offset: int
    high_watermark: int = -1
    bytes_per_offset: float = 0.0
    epochs: EpochStarts = ()
    older_ends: EpochEnds = ()

    @property
    def key(self) -> str:
        """`cluster/topic/partition`, the key of committed offsets."""
        return f"{self.cluster}/{self.topic}/{self.partition}"


def refusal(metadata: ClusterMetadata, name: str) -> KafkaError | None:
    """Why the cluster does not tell of a topic that it did not describe; None where it says that there is
    none. A topic that the auditor may not see is not an empty one."""
    code = metadata.topic_errors.get(name, UnknownTopicOrPartition.code)
    return None if code == UnknownTopicOrPartition.code else error_for_code(code)


_Offsets = Mapping[TopicPartition, ListedOffset]
_Epochs = Mapping[TopicPartition, EpochStarts]


async def ends_and_epochs(
    cluster: Cluster, keys: Sequence[TopicPartition], kept: _Epochs
) -> tuple[_Offsets, _Offsets, _Offsets, _Epochs, Mapping[TopicPartition, EpochEnds]]:
    """(starts, high watermarks, last stable offsets, epochs, ends of older epochs) of one and the same logs;
    `kept` are the epochs in which they were read.

    A log is shortened only by a new leader, which begins an epoch: the epochs that were told from the one
    before on would not have it. So where a leader changed under way, all is asked again. Raises
    ClusterUnreachable where they do not come to rest.
    """
    if not keys:
        return {}, {}, {}, {}, {}
    latest = dict.fromkeys(keys, LATEST)
    for _ in range(MAX_PINNINGS):
        starts = await cluster.list_offsets(dict.fromkeys(keys, EARLIEST))
        # The high watermark first: what is written between the two calls is not held back by anybody.
        marks = await cluster.list_offsets(latest)
        ends = await cluster.list_offsets(latest, read_committed=True)
        newest = {key: (marks[key].leader_epoch, starts[key].offset) for key in keys}
        histories = await epoch_histories(cluster, newest)
        older = await older_ends(cluster, histories, kept)
        again = await cluster.list_offsets(latest)
        if all(again[key].leader_epoch == marks[key].leader_epoch for key in keys):
            return starts, marks, ends, histories, older
    raise ClusterUnreachable(cluster.name, "its partitions get new leaders again and again; run it later")


def topic_id_of(topic_id: uuid.UUID) -> str:
    return "" if topic_id == NO_TOPIC_ID else str(topic_id)


@contextlib.contextmanager
def naming(cluster: Cluster, what: str) -> Iterator[None]:
    """Give a broker's refusal the name of the cluster and the topic it was about."""
    try:
        yield
    except KafkaError as error:
        raise ClusterUnreachable(cluster.name, f"{what} cannot be read: {error}") from error
