"""The log of one partition: the directory `<topic>-<partition>` with its segments and what goes with them.

    <base offset>.log .index .timeindex   segments (`segment.py`)
    <offset>.snapshot                     producer state (`producer_snapshot.py`)
    leader-epoch-checkpoint               leader epochs (`leader_epochs.py`)
    partition.metadata                    topic id

Called by the replica manager (append, read) and the log manager (open, housekeeping, close). Synchronous.

Invariants:
- one appends at a time; every change of structure (append, roll, truncate, delete) holds `_lock`;
- reads take no lock: they see a tuple of segments that is replaced as a whole, and a segment's size that
  grows only after its bytes are written;
- a batch is in the log whole or not at all: a failed write is taken back, and when even that fails the log
  refuses every further append;
- offsets below `recovery_point` are on the disk; fsync runs outside the lock, and in the appending caller
  only where `flush.messages` demands it.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from uuid import UUID

from millrace.broker.errors import (
    CorruptMessage,
    KafkaStorageError,
    OffsetOutOfRange,
)
from millrace.broker.protocol.batch import (
    HEADER_SIZE,
    NO_TIMESTAMP,
    BatchHeader,
    iterate_batches,
    parse_header,
    stamp_offset_and_epoch,
    verify_crc,
)
from millrace.broker.protocol.checksum import Buffer
from millrace.broker.protocol.records import read_records, whole_batches
from millrace.broker.storage import producer_snapshot, retention
from millrace.broker.storage.batch_validation import Origin, Validation, check_batch
from millrace.broker.storage.checkpoints import (
    TopicPartition,
    read_topic_id,
    sync_directory,
    write_topic_id,
)
from millrace.broker.storage.leader_epochs import LeaderEpochCache
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.offset_index import ENTRY_SIZE as INDEX_ENTRY_SIZE
from millrace.broker.storage.producer_state import ProducerState
from millrace.broker.storage.recovery import load_epochs, load_producers, open_segments
from millrace.broker.storage.segment import BatchAt, Segment, WouldBlock

_REMEMBERED_READ_COUNT = 64
_MAX_OFFSET = 2**63 - 1


class AppendResult(NamedTuple):
    """Where a batch is. `duplicate`: it was stored before, and these are its offsets then."""

    base_offset: int
    last_offset: int
    log_append_time_ms: int = NO_TIMESTAMP
    duplicate: bool = False


class LogRead(NamedTuple):
    """Whole batches; the first may begin below the offset asked for. `next_offset` is where to go on.

    `position` is the first byte's place in the segment that begins at `segment_base_offset`.
    """

    data: memoryview
    next_offset: int
    segment_base_offset: int
    position: int


_EMPTY = memoryview(b"")


def parse_directory_name(name: str) -> TopicPartition:
    """`flights-3` -> ("flights", 3). Raises ValueError."""
    topic, dash, number = name.rpartition("-")
    if not dash or not topic or not number.isdigit():
        raise ValueError(f"{name!r} is not <topic>-<partition>")
    return topic, int(number)


class Log:
    """See the module. Made by `Log.open`."""

    def __init__(
        self,
        directory: Path,
        config: LogConfig,
        segments: list[Segment],
        producers: ProducerState,
        leader_epochs: LeaderEpochCache,
        *,
        start_offset: int,
        end_offset: int,
        recovery_point: int,
        now_ms: int,
        notes: list[str],
    ):
        self.directory = directory
        self.topic, self.partition = parse_directory_name(directory.name)
        self.config = config
        self.producers = producers
        self.leader_epochs = leader_epochs
        self.start_offset = start_offset
        self.end_offset = end_offset
        self.recovery_point = recovery_point
        self.failure: str | None = None
        """Why the log takes no more appends; None while all is well."""
        self.notes = notes
        """What opening had to repair, one line each, for the operator's log."""
        self._segments: tuple[Segment, ...] = tuple(segments)
        self._active = segments[-1]
        self._lock = threading.RLock()
        self._flush_lock = threading.Lock()
        self._last_flush_ms = now_ms
        self._has_new_files = True
        self._read_positions: dict[int, tuple[Segment, int]] = {}
        self._topic_id: UUID | None = None

    @classmethod
    def open(
        cls,
        directory: Path,
        config: LogConfig,
        *,
        recovery_point: int | None,
        now_ms: int,
        start_offset: int = 0,
    ) -> Log:
        """Opens or creates the log in `directory`.

        `recovery_point` is the offset below which all had been flushed, None after a clean close;
        `start_offset` is the checkpointed log start (records below it are deleted). Raises
        KafkaStorageError with one line when the partition cannot be opened; other partitions can.
        """
        try:
            directory.mkdir(parents=True, exist_ok=True)
            opened = open_segments(
                directory, config, recovery_point=recovery_point, start_offset=start_offset, now_ms=now_ms
            )
            end_offset = opened.end_offset
            start_offset = min(max(start_offset, opened.segments[0].base_offset), end_offset)
            epochs = load_epochs(directory, opened, opened.notes)
            producers = load_producers(
                directory, opened.segments, start_offset=start_offset, end_offset=end_offset, now_ms=now_ms
            )
            log = cls(
                directory,
                config,
                opened.segments,
                producers,
                epochs,
                start_offset=start_offset,
                end_offset=end_offset,
                recovery_point=end_offset if recovery_point is None else min(recovery_point, end_offset),
                now_ms=now_ms,
                notes=opened.notes,
            )
            log._topic_id = read_topic_id(directory)
        except (OSError, ValueError, CorruptMessage) as error:
            raise KafkaStorageError(f"partition {directory} cannot be opened: {error}") from error
        return log

    # -- what it is

    @property
    def topic_partition(self) -> TopicPartition:
        return self.topic, self.partition

    @property
    def topic_id(self) -> UUID | None:
        """From `partition.metadata`; None where there is none."""
        return self._topic_id

    def set_topic_id(self, topic_id: UUID) -> None:
        """Writes `partition.metadata`. Raises OSError."""
        write_topic_id(self.directory, topic_id)
        self._topic_id = topic_id

    @property
    def size(self) -> int:
        """Bytes of all batches."""
        return sum(segment.size for segment in self._segments)

    @property
    def segment_count(self) -> int:
        return len(self._segments)

    @property
    def first_unstable_offset(self) -> int | None:
        """Where the oldest open transaction began; the last stable offset stops there."""
        return self.producers.first_unstable_offset

    # -- append

    def append(
        self,
        batch: bytes | bytearray | memoryview,
        *,
        leader_epoch: int,
        now_ms: int,
        origin: Origin = "client",
        validation: Validation = "full",
    ) -> AppendResult:
        """Checks one batch (`batch_validation.py`), gives it offsets and an epoch, and writes it.

        A writable buffer is stamped in place, and must be the log's until this returns. Raises what
        `check_batch` raises, OutOfOrderSequence, InvalidProducerEpoch, and KafkaStorageError when the disk
        refuses; the log is then as it was before.
        """
        checked, header, append_time_ms = check_batch(
            batch, self.config, now_ms=now_ms, origin=origin, validation=validation
        )
        with self._lock:
            if self.failure is not None:
                raise KafkaStorageError(self.failure)
            has_producer = header.producer_id >= 0
            if has_producer and origin == "client":
                stored = self.producers.check(header)
                if stored is not None:
                    time_ms = stored.timestamp_ms if append_time_ms >= 0 else NO_TIMESTAMP
                    return AppendResult(stored.first_offset, stored.last_offset, time_ms, True)
            base_offset = self.end_offset
            last_offset = base_offset + header.last_offset_delta
            stamp_offset_and_epoch(checked, base_offset, leader_epoch)
            self._write(checked, header, last_offset, now_ms)
            if leader_epoch > self.leader_epochs.latest_epoch:
                self._assign_epoch(leader_epoch, base_offset)
            if has_producer:
                stamped = header._replace(base_offset=base_offset, leader_epoch=leader_epoch)
                self.producers.note(stamped, now_ms)
            self.producers.end_offset = self.end_offset = last_offset + 1
            must_flush = self.end_offset - self.recovery_point >= self.config.flush_messages
        if must_flush:
            self.flush(now_ms)
        return AppendResult(base_offset, last_offset, append_time_ms)

    def append_as_follower(self, batches: Buffer, now_ms: int) -> None:
        """Appends batches that a leader has checked and stamped, offsets and epochs as they are.

        Raises CorruptMessage when one is damaged, OffsetOutOfRange when one does not lie beyond the end;
        batches before it are in the log then.
        """
        view = memoryview(batches)
        with self._lock:
            if self.failure is not None:
                raise KafkaStorageError(self.failure)
            for position, header in iterate_batches(view):
                verify_crc(view, position, header)
                if header.base_offset < self.end_offset:
                    raise OffsetOutOfRange(
                        f"{self.directory.name}: a batch at offset {header.base_offset} does not follow "
                        f"the log's end {self.end_offset}"
                    )
                batch = view[position : position + header.size]
                self._write(batch, header, header.last_offset, now_ms)
                if header.leader_epoch > self.leader_epochs.latest_epoch:
                    self._assign_epoch(header.leader_epoch, header.base_offset)
                if header.producer_id >= 0:
                    self.producers.note(header, now_ms)
                self.producers.end_offset = self.end_offset = header.next_offset

    def _write(self, batch: Buffer, header: BatchHeader, last_offset: int, now_ms: int) -> None:
        try:
            if self._must_roll(len(batch), header.max_timestamp, last_offset, now_ms):
                self._roll(now_ms)
            self._active.append(batch, header, last_offset, self.config.index_interval_bytes)
        except KafkaStorageError as error:
            self.failure = str(error)
            raise
        except OSError as error:
            raise KafkaStorageError(f"{self.directory}: the batch was not written: {error}") from error

    def _assign_epoch(self, epoch: int, start_offset: int) -> None:
        try:
            self.leader_epochs.assign(epoch, start_offset)
        except OSError as error:
            # The batch is in the log and carries the epoch: a later start finds it there.
            self.notes.append(f"{self.directory}: leader epoch {epoch} was not checkpointed: {error}")

    # -- segments

    def _must_roll(self, size: int, max_timestamp: int, last_offset: int, now_ms: int) -> bool:
        segment, config = self._active, self.config
        if segment.size == 0:
            return False
        if (
            segment.size + size > config.segment_bytes
            or segment.index_size + INDEX_ENTRY_SIZE > config.segment_index_bytes
            or not segment.can_hold(last_offset)
        ):
            return True
        # By the records' own time where they have one, as Apache Kafka does.
        if max_timestamp != NO_TIMESTAMP and segment.first_timestamp != NO_TIMESTAMP:
            return max_timestamp - segment.first_timestamp > config.segment_ms
        return now_ms - segment.created_ms > config.segment_ms

    def _roll(self, now_ms: int) -> None:
        """Closes the active segment and begins one at the end offset. Raises OSError, nothing changed."""
        segment = Segment(self.directory, self.end_offset, now_ms=now_ms, create=True)
        try:
            self._active.close_indexes()
            producer_snapshot.write(self.directory, self.producers)
        except OSError as error:
            # Both can be made anew from the log: what is missing costs time at the next start, no data.
            self.notes.append(f"{self._active.path}: closed without all of its indexes: {error}")
        self._active = segment
        self._segments = (*self._segments, segment)
        self._has_new_files = True

    def roll_if_due(self, now_ms: int) -> bool:
        """Begins a new segment when the active one has been open for `segment.ms` by the broker's clock."""
        with self._lock:
            is_due = self._active.size > 0 and now_ms - self._active.created_ms > self.config.segment_ms
            if is_due and self.failure is None:
                try:
                    self._roll(now_ms)
                except OSError as error:
                    raise KafkaStorageError(f"{self.directory}: no new segment: {error}") from error
            return is_due

    def _segment_for(self, offset: int) -> int:
        """Number of the segment in which `offset` lies, in the tuple of segments at hand."""
        segments = self._segments
        low, high = 0, len(segments)
        while low < high:
            middle = (low + high) // 2
            if segments[middle].base_offset <= offset:
                low = middle + 1
            else:
                high = middle
        return max(0, low - 1)

    # -- read

    def read(
        self,
        offset: int,
        max_bytes: int,
        *,
        end_offset: int = _MAX_OFFSET,
        at_least_one: bool = True,
        may_block: bool = True,
    ) -> LogRead:
        """Whole batches from the one that holds `offset` on, at most `max_bytes`, all beginning below
        `end_offset` (the high watermark or the last stable offset).

        With `at_least_one` the first batch is returned however large it is. `data` is empty when there is
        nothing yet. With `may_block=False` raises WouldBlock instead of waiting for the disk. Raises
        OffsetOutOfRange below the log's start and beyond its end.
        """
        log_end_offset = self.end_offset
        if not self.start_offset <= offset <= log_end_offset:
            raise OffsetOutOfRange(
                f"{self.directory.name}: offset {offset} is not within "
                f"{self.start_offset} to {log_end_offset}"
            )
        end_offset = min(end_offset, log_end_offset)
        found = self._locate(offset, may_block) if offset < end_offset else None
        if found is None:
            return LogRead(_EMPTY, offset, self._active.base_offset, self._active.size)
        segment, position = found
        read = segment.file.read if may_block else segment.file.read_cached
        available = segment.size - position
        data = read(position, min(max(max_bytes, HEADER_SIZE), available))
        size, next_offset, following = whole_batches(data, end_offset)
        if size == 0 or size > max_bytes:
            following = following or parse_header(data).size
            if not at_least_one or parse_header(data).base_offset >= end_offset:
                return LogRead(_EMPTY, offset, segment.base_offset, position)
            if len(data) < following:
                data = read(position, following)
            size, next_offset, _ = whole_batches(memoryview(data)[:following], end_offset)
            if size == 0:
                raise CorruptMessage(f"{segment.path}: no whole batch at byte {position}")
        self._remember(next_offset, segment, position + size)
        return LogRead(memoryview(data)[:size], next_offset, segment.base_offset, position)

    def _locate(self, offset: int, may_block: bool = True) -> tuple[Segment, int] | None:
        """Segment and position of the first batch that ends at or after `offset`.

        A search in a closed segment opens and reads files that may be cold. Raises WouldBlock rather.
        """
        segments = self._segments
        number = self._segment_for(offset)
        remembered = self._read_positions.get(offset)
        if remembered is not None and number < len(segments) and remembered[0] is segments[number]:
            segment, position = remembered
            if position < segment.size:
                return remembered
        if not may_block and number < len(segments) - 1 and offset != segments[number].base_offset:
            raise WouldBlock(f"{segments[number].path} has to be searched for offset {offset}")
        for segment in segments[number:]:
            if offset <= segment.base_offset and segment.size:
                return segment, 0
            at = self._find(segment, offset)
            if at is not None:
                return segment, at.position
        return None

    def _find(self, segment: Segment, offset: int) -> BatchAt | None:
        try:
            return segment.find(offset)
        except CorruptMessage as error:
            self._rebuild_indexes(segment, error)
            return segment.find(offset)

    def _rebuild_indexes(self, segment: Segment, error: CorruptMessage) -> None:
        with self._lock:
            try:
                segment.rebuild_indexes(self.config.index_interval_bytes)
                if segment is not self._active:
                    segment.close_indexes()
            except (OSError, CorruptMessage) as failed:
                raise KafkaStorageError(f"{error}, and was not rebuilt: {failed}") from failed
            self.notes.append(f"{error}; the indexes of the segment have been rebuilt")

    def _remember(self, next_offset: int, segment: Segment, position: int) -> None:
        """Where a reader that goes on at `next_offset` will find it, without a search."""
        positions = self._read_positions
        if len(positions) >= _REMEMBERED_READ_COUNT:
            try:
                positions.pop(next(iter(positions)), None)
            except (RuntimeError, StopIteration):
                positions.clear()  # another reader changed it just then; searching anew costs little
        positions[next_offset] = (segment, position)

    def batches(self, from_offset: int | None = None) -> Iterator[memoryview]:
        """Each whole batch from `from_offset` (the log's start by default) to the end as it is now."""
        offset = self.start_offset if from_offset is None else from_offset
        end_offset = self.end_offset
        while offset < end_offset:
            found = self.read(offset, 1 << 20, end_offset=end_offset)
            if not found.data:
                return
            for position, header in iterate_batches(found.data):
                yield found.data[position : position + header.size]
            offset = found.next_offset

    # -- time

    def offset_for_time(self, timestamp_ms: int) -> tuple[int, int] | None:
        """(offset, timestamp) of the first record that is at least as new as `timestamp_ms`; None if none
        is."""
        start_offset = self.start_offset
        for segment in self._segments:
            if segment.max_timestamp < timestamp_ms or segment.next_offset <= start_offset:
                continue
            try:
                found = _first_record_since(segment, timestamp_ms, start_offset)
            except CorruptMessage as error:
                self._rebuild_indexes(segment, error)
                found = _first_record_since(segment, timestamp_ms, start_offset)
            if found is not None:
                return found
        return None

    def max_timestamp(self) -> tuple[int, int] | None:
        """(offset, timestamp) of the newest record, the first of them if several are; None when empty."""
        newest = max(self._segments, key=lambda segment: segment.max_timestamp)
        if newest.max_timestamp == NO_TIMESTAMP:
            return None
        return self.offset_for_time(newest.max_timestamp)

    # -- flush

    def needs_flush(self, now_ms: int) -> bool:
        """Whether a flush is due: `flush.ms` is over, or a segment was completed since the last."""
        if self.end_offset <= self.recovery_point:
            return False
        return (
            self._active.base_offset > self.recovery_point
            or self.end_offset - self.recovery_point >= self.config.flush_messages
            or now_ms - self._last_flush_ms >= self.config.flush_ms
        )

    def flush(self, now_ms: int) -> None:
        """Makes all that has been appended durable. May be called from any thread; appends go on
        meanwhile. Raises KafkaStorageError; after a failed fsync the log takes no more appends, because
        nobody knows then what is on the disk."""
        with self._flush_lock:
            try:
                self._flush(now_ms)
            except OSError as error:
                self.failure = f"{self.directory} is offline, a flush failed: {error}"
                raise KafkaStorageError(self.failure) from error

    def _flush(self, now_ms: int) -> None:
        with self._lock:
            end_offset = self.end_offset
            dirty = [s for s in self._segments if s.next_offset > self.recovery_point]
            active = self._active
            try:
                for segment in dirty:
                    segment.write_index_tails()
            except OSError as error:
                # A full disk. Nothing was synced, the entries are in memory: the next flush tries again.
                raise KafkaStorageError(f"{self.directory}: an index was not written: {error}") from error
            has_new_files, self._has_new_files = self._has_new_files, False
        for segment in dirty:
            # The active segment's indexes are rebuilt after a crash in any case.
            segment.sync(with_indexes=segment is not active)
        if has_new_files:
            sync_directory(self.directory)
        with self._lock:
            # A truncation may have passed by meanwhile.
            self.recovery_point = max(self.recovery_point, min(end_offset, self.end_offset))
            self._last_flush_ms = now_ms

    # -- remove

    def delete_old_segments(self, now_ms: int, high_watermark: int | None = None) -> list[Path]:
        """Removes segments that retention or DeleteRecords has given up; returns their `.log` files.

        Readers of a removed segment finish undisturbed. Raises KafkaStorageError.
        """
        try:
            with self._lock:
                removed, files = self._detach_old_segments(now_ms, high_watermark)
            for path in files:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise KafkaStorageError(f"{self.directory}: old segments stay: {error}") from error
        return removed

    def _detach_old_segments(self, now_ms: int, high_watermark: int | None) -> tuple[list[Path], list[Path]]:
        count = retention.droppable_count(
            self._facts(),
            self.config,
            now_ms=now_ms,
            start_offset=self.start_offset,
            high_watermark=self.end_offset if high_watermark is None else high_watermark,
        )
        if count == 0:
            return [], []
        if count == len(self._segments):
            self._roll(now_ms)
        dropped, self._segments = self._segments[:count], self._segments[count:]
        self.start_offset = max(self.start_offset, self._segments[0].base_offset)
        # The start never lies below what is gone, not even after a crash in the middle of this.
        files: list[Path] = []
        for segment in dropped:
            files += segment.mark_deleted()
        self._forget_before_start()
        return [segment.path for segment in dropped], files

    def _facts(self) -> list[retention.SegmentFacts]:
        segments = self._segments
        nexts = [segment.base_offset for segment in segments[1:]] + [self.end_offset]
        return [
            retention.SegmentFacts(
                segment.size,
                segment.modified_ms if segment.max_timestamp == NO_TIMESTAMP else segment.max_timestamp,
                following,
            )
            for segment, following in zip(segments, nexts, strict=True)
        ]

    def _forget_before_start(self) -> None:
        self._read_positions.clear()
        try:
            self.leader_epochs.truncate_from_start(self.start_offset)
            producer_snapshot.remove(self.directory, below=self._segments[0].base_offset)
        except OSError as error:
            # Old entries do no harm, and on a full disk the segments must go all the same.
            self.notes.append(f"{self.directory}: what belongs to removed segments stays for now: {error}")

    def advance_start_offset(self, offset: int) -> None:
        """Deletes the records below `offset`; their segments go with the next `delete_old_segments`.

        An offset at or below the start changes nothing. Raises OffsetOutOfRange beyond the end.
        """
        with self._lock:
            if offset > self.end_offset:
                raise OffsetOutOfRange(
                    f"{self.directory.name}: offset {offset} is beyond the end {self.end_offset}"
                )
            if offset > self.start_offset:
                self.start_offset = offset
                self.leader_epochs.truncate_from_start(offset)

    def truncate_to(self, offset: int, now_ms: int) -> None:
        """Removes every batch that reaches `offset` or beyond. At or below the log's start the log becomes
        empty and begins at `offset`. Raises KafkaStorageError."""
        with self._flush_lock, self._lock:
            if offset >= self.end_offset:
                return
            try:
                if offset <= self.start_offset:
                    self._start_anew(offset, now_ms)
                else:
                    self._cut(offset, now_ms)
            except OSError as error:
                self.failure = f"{self.directory} is offline, a truncation failed: {error}"
                raise KafkaStorageError(self.failure) from error

    def _cut(self, offset: int, now_ms: int) -> None:
        number = self._segment_for(offset)
        kept, dropped = self._segments[: number + 1], self._segments[number + 1 :]
        active = kept[-1]
        at = self._find(active, offset)
        if at is not None and at.header.base_offset < self.start_offset:
            # The batch that is cut holds the log's start; offsets below it must not be given again.
            self._start_anew(self.start_offset, now_ms)
            return
        self._active, self._segments = active, kept
        self._read_positions.clear()
        self._remove(dropped)
        if at is not None:
            active.truncate(at.position, self.config.index_interval_bytes)
        self.end_offset = active.next_offset
        self.recovery_point = min(self.recovery_point, self.end_offset)
        self.leader_epochs.truncate_from_end(self.end_offset)
        self.producers = load_producers(
            self.directory,
            list(kept),
            start_offset=self.start_offset,
            end_offset=self.end_offset,
            now_ms=now_ms,
        )

    def _start_anew(self, offset: int, now_ms: int) -> None:
        dropped = self._segments
        if any(segment.base_offset == offset for segment in dropped):
            self._remove(dropped)
            dropped = ()
        active = Segment(self.directory, offset, now_ms=now_ms, create=True)
        self._active, self._segments = active, (active,)
        self._read_positions.clear()
        self._remove(dropped)
        self.start_offset = self.end_offset = self.recovery_point = offset
        self.leader_epochs.clear()
        producer_snapshot.remove(self.directory, above=-1)
        self.producers = ProducerState(end_offset=offset)
        self._has_new_files = True

    def _remove(self, segments: tuple[Segment, ...]) -> None:
        # From the end on, so that a crash in between leaves a prefix.
        for segment in reversed(segments):
            for path in segment.mark_deleted():
                path.unlink(missing_ok=True)

    def expire_producers(self, now_ms: int) -> int:
        """Forgets producers that were silent for `producer.id.expiration.ms`; returns how many."""
        with self._lock:
            return self.producers.expire(now_ms, self.config.producer_id_expiration_ms)

    # -- end

    def close(self, now_ms: int = 0) -> None:
        """Flushes everything, so that the next start needs no recovery. Raises KafkaStorageError."""
        if self.failure is not None:
            raise KafkaStorageError(self.failure)
        try:
            with self._lock:
                self._active.close_indexes()
                producer_snapshot.write(self.directory, self.producers)
            with self._flush_lock:
                self._flush(now_ms)
            self._active.sync(with_indexes=True)
            self.leader_epochs.sync()
            sync_directory(self.directory)
        except OSError as error:
            raise KafkaStorageError(f"{self.directory} was not closed cleanly: {error}") from error
        self.failure = f"{self.directory} is closed"

    def delete(self) -> None:
        """Removes the directory and everything in it. Raises OSError."""
        with self._lock:
            self.failure = f"{self.directory} is deleted"
            shutil.rmtree(self.directory)


def _first_record_since(segment: Segment, timestamp_ms: int, from_offset: int) -> tuple[int, int] | None:
    """(offset, timestamp) of a segment's first record from `from_offset` on that is new enough."""
    for at in segment.find_time(timestamp_ms, from_offset):
        for record in read_records(segment.file.read(at.position, at.header.size)):
            if record.timestamp_ms >= timestamp_ms and record.offset >= from_offset:
                return record.offset, record.timestamp_ms
    return None
