"""Which leader epoch began at which offset of a partition.

The cache answers OffsetForLeaderEpoch, by which a follower or a client finds where its history parts from
the leader's. It is kept in `leader-epoch-checkpoint` and in memory. Called by the log alone.

Whoever changes it or writes it holds the log's lock; `sync` and look-ups need none.

Invariants: epochs and start offsets both ascend strictly. An epoch whose first batch would begin at or
before an older one's start replaces it (nothing was written in between). What a full disk did not take is
right in memory, and never called durable: `write_behind` comes before the `sync` of a flush. The file knows
every epoch that has batches; one that has none yet may be in memory alone (`begin`).
"""

from __future__ import annotations

import os
from bisect import bisect_right
from itertools import pairwise
from pathlib import Path

from millrace.broker.storage.checkpoints import (
    LEADER_EPOCH_CHECKPOINT,
    read_epochs,
    sync_directory,
    write_epochs,
)
from millrace.broker.storage.disk_errors import syncing

NO_EPOCH = -1
NO_OFFSET = -1


class LeaderEpochCache:
    """The epochs of the partition in `directory`."""

    def __init__(self, directory: Path, entries: list[tuple[int, int]] | None = None):
        self._path = directory / LEADER_EPOCH_CHECKPOINT
        self._entries: list[tuple[int, int]] = entries or []
        # What the file has, or is to have when there is room: all but an epoch that was only begun.
        self._filed = self._entries
        self.latest_epoch = self._entries[-1][0] if self._entries else NO_EPOCH
        # What the entries are counted by: in memory, in the file, and on the disk for good. What an earlier
        # process wrote need not be on the disk.
        self._version = self._written = 1 if self._entries else 0
        self._synced = 0

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

    def begin(self, epoch: int, start_offset: int) -> None:
        """Notes that a leader begins `epoch` at `start_offset`, the log's end: in memory alone. Nothing need
        outlive the process of an epoch without batches, and a start with a thousand partitions begins a
        thousand; the first batch writes it (`assign`), because `latest_epoch` is still the one before."""
        if epoch < 0 or (self._entries and epoch <= self._entries[-1][0]):
            return
        kept = [entry for entry in self._entries if entry[1] < start_offset]
        self._entries = [*kept, (epoch, start_offset)]

    def end_offset_for(self, epoch: int, log_end_offset: int) -> tuple[int, int]:
        """The greatest epoch not above `epoch`, and the offset at which it ended: the start of the next
        one, or the log's end for the latest. (-1, -1) when the epoch is not known or is in the future."""
        entries = self._entries  # as of now: another thread may put others in their place
        if epoch < 0 or not entries or epoch > entries[-1][0]:
            return NO_EPOCH, NO_OFFSET
        if epoch == entries[-1][0]:
            return epoch, log_end_offset
        number = bisect_right(entries, epoch, key=lambda entry: entry[0])
        if number == 0:
            # Older than all that is left: its records, if any, ended where the oldest known begins.
            return epoch, entries[0][1]
        return entries[number - 1][0], entries[number][1]

    def epoch_at(self, offset: int) -> int:
        """The epoch in which `offset` was or will be written; -1 when it is not known."""
        entries = self._entries
        number = bisect_right(entries, offset, key=lambda entry: entry[1])
        return entries[number - 1][0] if number else NO_EPOCH

    def truncate_from_end(self, end_offset: int) -> None:
        """Forgets epochs that began at or after `end_offset`."""
        kept = [entry for entry in self._entries if entry[1] < end_offset]
        if kept == self._filed:
            self._entries = kept  # at most one that was begun in vain is gone
        else:
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
        """Makes durable what has been written, if that has changed since the last time. From any thread: what
        is written meanwhile is left to the next call. Raises SyncFailed, OSError."""
        written = self._written
        if written == self._synced:
            return
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with syncing():
                os.fsync(fd)
        finally:
            os.close(fd)
        sync_directory(self._path.parent)
        self._synced = written

    def write_behind(self) -> None:
        """Writes the entries if the file could not take them when they changed. Raises OSError."""
        if self._written != self._version:
            write_epochs(self._path, self._filed, sync=False)
            self._written = self._version

    def write_again(self) -> None:
        """Writes the entries into a file of their own once more. Raises OSError."""
        if self._filed:
            self._version += 1
            self.write_behind()

    def _store(self, entries: list[tuple[int, int]]) -> None:
        self._entries = self._filed = entries
        self.latest_epoch = entries[-1][0] if entries else NO_EPOCH
        self._version += 1
        # Not synced here: `sync` comes before the recovery point passes the batches that carry the epochs.
        self.write_behind()
