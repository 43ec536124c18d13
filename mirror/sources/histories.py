"""Whether what was fetched is of the leader's history, at a source whose fetches do not say so (KIP-320).

Called by `source` before each fetch from Apache Kafka before 2.7. A leader is asked once under each of its
epochs, by OffsetForLeaderEpoch, and the fetch names the epoch that was compared with: under another one it is
refused, so nothing of another history is taken in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.leader_epochs import epoch_ends
from millrace.broker.client.raw_fetch import FetchPosition
from millrace.broker.errors import UnsupportedVersion
from millrace.broker.protocol.topic_partition import TopicPartition


class Compared(NamedTuple):
    """`ours`: positions of their leader's history, each with the leader epoch for which that is known.
    `parted`: of the others, the leader's newest (epoch, end offset) that is not above ours; None where it
    knows nothing of our epoch, though it knows its own."""

    ours: dict[TopicPartition, FetchPosition]
    parted: dict[TopicPartition, tuple[int, int] | None]


class Histories:
    """Of the partitions of one source cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._compared: dict[TopicPartition, int] = {}  # the leader epoch whose history is known to be ours

    def forget(self, key: TopicPartition) -> None:
        self._compared.pop(key, None)

    async def compare(
        self, positions: Mapping[TopicPartition, FetchPosition], now: Mapping[TopicPartition, int]
    ) -> Compared:
        """`now`: the leader epochs of today, -1 where they are not known. Raises what the cluster does."""
        doubtful = {
            key: at.last_fetched_epoch
            for key, at in positions.items()
            if at.last_fetched_epoch >= 0 and self._compared.get(key) != now[key]
        }
        try:
            ends = await epoch_ends(self._cluster, doubtful) if doubtful else {}
            unknown = {key: now[key] for key, (epoch, _) in ends.items() if epoch < 0 <= now[key]}
            # A leader that cannot tell of its own epoch keeps none, as for old message formats.
            own = await epoch_ends(self._cluster, unknown) if unknown else {}
            keeping = {key for key, (epoch, _) in own.items() if epoch >= 0}
        except UnsupportedVersion:
            ends, keeping = {}, set()
        found = Compared({}, {})
        for key, at in positions.items():
            epoch, end_offset = ends.get(key, (at.last_fetched_epoch, at.offset))
            if epoch < 0 and key not in keeping:
                epoch, end_offset = at.last_fetched_epoch, at.offset  # nothing to go by
            if epoch == at.last_fetched_epoch and (end_offset >= at.offset or epoch == now[key]):
                # Within the leader's own epoch no log becomes shorter. The fetch names that epoch: it is
                # out of range, or refused because the epoch is another by now (`SourceLogs.explain`).
                if key in doubtful:
                    self._compared[key] = now[key]
                found.ours[key] = at._replace(current_leader_epoch=now[key])
            else:
                found.parted[key] = None if epoch < 0 else (epoch, end_offset)
        return found
