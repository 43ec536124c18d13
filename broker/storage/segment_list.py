"""The segments of one log in order, and how the list changes: rolled, shortened at either end, compacted.

The list is a tuple that is replaced as a whole, so readers take no lock; whoever changes it holds the log's
lock. Removing or replacing files also needs the log's shape lock, which `Log` takes first: a compaction that
is between two steps of its swap must not meet a truncation.

Called by the log and its reader. Invariants: base offsets ascend strictly, the last segment is the active
one, only the active one grows; a segment that has left the list is never changed again, its files may be
gone, and a reader that still holds it finishes on the open descriptor of its `.log`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from millrace.broker.errors import CorruptMessage, KafkaStorageError
from millrace.broker.protocol.batch import NO_TIMESTAMP
from millrace.broker.storage import retention
from millrace.broker.storage.disk_errors import WouldBlock
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.offset_index import ENTRY_SIZE as INDEX_ENTRY_SIZE
from millrace.broker.storage.segment import BatchAt, Segment, newest_timestamp_of

Found = TypeVar("Found")


class SegmentList:
    """See the module. `notes` are the log's. It knows nothing of the log, which would then be freed only by a
    full round of the garbage collector, with all its files."""

    def __init__(
        self,
        directory: Path,
        segments: Sequence[Segment],
        lock: threading.RLock,
        notes: list[str],
        config: LogConfig,
    ):
        self.directory = directory
        self._lock = lock
        self._notes = notes
        self.config = config
        """The log's, as it is now."""
        self.is_retired = False
        """The log is deleted: the names of its files are another's, or nobody's."""
        self.all: tuple[Segment, ...] = ()
        self.active: Segment
        self.aborting: tuple[Segment, ...] = ()
        """Those that hold the end of an aborted transaction: nearly always none."""
        self.put(segments)

    def put(self, segments: Sequence[Segment]) -> None:
        """Takes `segments` for the whole list; the last is the active one."""
        self.active, self.all = segments[-1], tuple(segments)
        self.aborting = tuple(segment for segment in segments if len(segment.aborted))

    @property
    def size(self) -> int:
        """Bytes of all batches."""
        return sum(segment.size for segment in self.all)

    def number_of(self, offset: int) -> int:
        """Number of the segment in which `offset` lies; the first for an offset below all."""
        return number_of(self.all, offset)

    # -- finding

    def find(self, segment: Segment, offset: int, *, may_block: bool = True) -> BatchAt | None:
        """The first batch of `segment` that ends at or after `offset`. An index that does not fit its log is
        rebuilt. Raises KafkaStorageError when it cannot be; with `may_block=False` WouldBlock rather than
        wait for the disk."""
        try:
            return segment.find(offset, may_block=may_block)
        except (CorruptMessage, FileNotFoundError) as error:
            if not may_block:
                raise WouldBlock(f"{segment.path}: its index has to be looked at: {error}") from None
            return self.look_again(
                segment,
                error,
                lambda: segment.find(offset),
                replaced=lambda: segment.find(offset, use_index=False),
            )

    def look_again(
        self,
        segment: Segment,
        error: CorruptMessage | FileNotFoundError,
        look: Callable[[], Found],
        *,
        replaced: Callable[[], Found],
    ) -> Found:
        """What `look` finds by an index of `segment` that gave `error` without the log's lock. The files may
        just have been renamed, and are there under it; if not, the indexes are rebuilt. `replaced` is asked
        where the segment is none of the log's any more: its indexes' names are another's by now. Raises
        KafkaStorageError."""
        with self._lock:
            if segment not in self.all or self.is_retired:
                return replaced()
            if isinstance(error, FileNotFoundError):
                try:
                    return look()
                except FileNotFoundError as missing:
                    error = CorruptMessage(f"{missing.filename} is gone")
            self.rebuild_indexes(segment, error)
            return look()

    def rebuild_indexes(self, segment: Segment, error: CorruptMessage) -> None:
        """Makes a segment's sparse indexes anew. Raises KafkaStorageError."""
        with self._lock:
            if segment not in self.all:
                return
            if self.is_retired:
                raise KafkaStorageError(f"{self.directory.name} is deleted")
            try:
                segment.rebuild_indexes(self.config.index_interval_bytes)
                if segment is not self.active:
                    segment.close_indexes()
            except (OSError, CorruptMessage) as failed:
                raise KafkaStorageError(f"{error}, and was not rebuilt: {failed}") from failed
            self._notes.append(f"{error}; the indexes of the segment have been rebuilt")

    # -- changing

    def must_roll(self, size: int, max_timestamp: int, last_offset: int, now_ms: int) -> bool:
        """Whether a batch of `size` bytes is to begin a new segment."""
        segment = self.active
        if segment.size == 0:
            return False
        if (
            segment.size + size > self.config.segment_bytes
            or segment.index_size + INDEX_ENTRY_SIZE > self.config.segment_index_bytes
            or not segment.can_hold(last_offset)
        ):
            return True
        # By the records' own time where they have one, as Apache Kafka does.
        if max_timestamp != NO_TIMESTAMP and segment.first_timestamp != NO_TIMESTAMP:
            return max_timestamp - segment.first_timestamp > self.config.roll_ms
        return now_ms - segment.created_ms > self.config.roll_ms

    def begin(self, segment: Segment) -> None:
        """Makes `segment` the active one, after all others."""
        self.put((*self.all, segment))

    def facts(self, end_offset: int) -> list[retention.SegmentFacts]:
        """What retention decides by."""
        segments = self.all
        nexts = [segment.base_offset for segment in segments[1:]] + [end_offset]
        return [
            retention.SegmentFacts(segment.size, newest_timestamp_of(segment), following)
            for segment, following in zip(segments, nexts, strict=True)
        ]

    def drop_first(self, count: int) -> tuple[Segment, ...]:
        """Takes the oldest `count` segments out and returns them; their files are still there."""
        dropped = self.all[:count]
        self.put(self.all[count:])
        return dropped

    def holds_run(self, segments: Sequence[Segment]) -> bool:
        """Whether `segments` still stand in the list, side by side, none of them active."""
        if not segments or segments[-1] is self.active:
            return False
        try:
            number = self.all.index(segments[0])
        except ValueError:
            return False
        return self.all[number : number + len(segments)] == tuple(segments)

    def replace(self, old: Sequence[Segment], new: Segment) -> None:
        """Puts `new` in the place of `old`, a run of segments of the list."""
        number = self.all.index(old[0])
        self.put((*self.all[:number], new, *self.all[number + len(old) :]))


def number_of(segments: Sequence[Segment], offset: int) -> int:
    """Number of the segment among `segments` in which `offset` lies; the first for an offset below all."""
    low, high = 0, len(segments)
    while low < high:
        middle = (low + high) // 2
        if segments[middle].base_offset <= offset:
            low = middle + 1
        else:
            high = middle
    return max(0, low - 1)


def remove_files(segments: Sequence[Segment]) -> None:
    """Removes the files of segments that have left the list, from the end on: a crash in between leaves a
    prefix. Raises OSError."""
    for segment in reversed(segments):
        for path in segment.mark_deleted():
            path.unlink(missing_ok=True)
