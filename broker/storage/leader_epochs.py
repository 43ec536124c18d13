"""Which leader epoch began at which offset of a partition.

The cache answers OffsetForLeaderEpoch, by which a follower or a client finds where its history parts from
the leader's. It is kept in `leader-epoch-checkpoint` and in memory. Called by the log alone.

Invariant: epochs and start offsets both ascend strictly. An epoch whose first batch would begin at or
before an older one's start replaces it (nothing was written in between).
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from pathlib import Path

from millrace.broker.storage.checkpoints import (
    LEADER_EPOCH_CHECKPOINT,
    read_epochs,
    write_epochs,
)

NO_EPOCH = -1
NO_OFFSET = -1


class LeaderEpochCache:
    """The epochs of the partition in `directory`."""

    def __init__(self, directory: Path, entries: list[tuple[int, int]] | None = None):
        self._path = directory / LEADER_EPOCH_CHECKPOINT
        self._entries: list[tuple[int, int]] = entries or []
        self.latest_epoch = self._entries[-1][0] if self._entries else NO_EPOCH

    @classmethod
    def load(cls, directory: Path) -> LeaderEpochCache:
        """Reads the checkpoint. Raises ValueError when it is damaged; the log then rebuilds it."""
        entries = read_epochs(directory / LEADER_EPOCH_CHECKPOINT)
        for before, after in pairwise(entries):
            if before[0] >= after[0] or before[1] >= after[1]:
                raise ValueError(f"{directory / LEADER_EPOCH_CHECKPOINT}: epochs and offsets do not ascend")
        return cls(directory, entries)

    @property
    def entries(self) -> list[tuple[int, int]]:
        """(epoch, start offset), ascending."""
        return list(self._entries)

    def assign(self, epoch: int, start_offset: int) -> None:
        """Notes that `epoch` began at `start_offset`. An epoch that is not newer changes nothing."""
        if epoch <= self.latest_epoch or epoch < 0:
            return
        kept = [entry for entry in self._entries if entry[1] < start_offset]
        self._store([*kept, (epoch, start_offset)])

    def end_offset_for(self, epoch: int, log_end_offset: int) -> tuple[int, int]:
        """The greatest epoch not above `epoch`, and the offset at which it ended: the start of the next
        one, or the log's end for the latest. (-1, -1) when the epoch is not known or is in the future."""
        if epoch < 0 or not self._entries or epoch > self.latest_epoch:
            return NO_EPOCH, NO_OFFSET
        if epoch == self.latest_epoch:
            return epoch, log_end_offset
        number = bisect_right(self._entries, epoch, key=lambda entry: entry[0])
        if number == 0:
            # Older than all that is left: its records, if any, ended where the oldest known begins.
            return epoch, self._entries[0][1]
        return self._entries[number - 1][0], self._entries[number][1]

    def epoch_at(self, offset: int) -> int:
        """The epoch in which `offset` was or will be written; -1 when it is not known."""
        number = bisect_right(self._entries, offset, key=lambda entry: entry[1])
        return self._entries[number - 1][0] if number else NO_EPOCH

    def truncate_from_end(self, end_offset: int) -> None:
        """Forgets epochs that began at or after `end_offset`."""
        kept = [entry for entry in self._entries if entry[1] < end_offset]
        if len(kept) != len(self._entries):
            self._store(kept)

    def truncate_from_start(self, start_offset: int) -> None:
        """Forgets epochs that ended at or before `start_offset`; the one that spans it begins there now."""
        number = bisect_right(self._entries, start_offset, key=lambda entry: entry[1])
        if number == 0 or (number == 1 and self._entries[0][1] == start_offset):
            return
        spanning = (self._entries[number - 1][0], start_offset)
        self._store([spanning, *self._entries[number:]])

    def clear(self) -> None:
        """Forgets all."""
        self._store([])

    def sync(self) -> None:
        """Makes the checkpoint durable."""
        write_epochs(self._path, self._entries, sync=True)

    def _store(self, entries: list[tuple[int, int]]) -> None:
        self._entries = entries
        self.latest_epoch = entries[-1][0] if entries else NO_EPOCH
        # Not synced: after a power loss the epochs come back from the batches themselves.
        write_epochs(self._path, entries, sync=False)
