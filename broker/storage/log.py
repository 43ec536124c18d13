"""The log of one partition: the directory `<topic>-<partition>` with its segments and what goes with them.

    <base offset>.log .index .timeindex .txnindex   segments (`segment.py`)
    <offset>.snapshot                               producer state (`producer_snapshot.py`)
    leader-epoch-checkpoint                         leader epochs (`leader_epochs.py`)
    partition.metadata                              topic id
    offset-holes                                    that offsets may have holes (`offset_holes.py`)

Called by the replica manager (append, read) and the log manager (open, housekeeping, close). Synchronous.
Three parts of the log have modules of their own: what of it is on the disk (`log_durability.py`), changes to
its segments (`log_reshaping.py`), and whether it can be used (`log_health.py`).

Invariants:
- one appends at a time; every change of structure (append, roll, truncate, delete) holds `_lock`; what
  removes or replaces segments holds `_shape_lock` as well, taken before `_lock` and after `_flush_lock`; what
  a flush does by files' names holds `_name_lock`, taken after `_shape_lock` and before `_lock`;
- reads take no lock (`log_reader.py`);
- a batch is in the log whole or not at all: a failed write is taken back, and when even that fails the log
  refuses every further append;
- offsets below `recovery_point` are on the disk, with their leader epochs and aborted transactions; fsync
  runs outside `_lock`, and in the appending caller only where `flush.messages` demands it;
- before offsets are given anew (a truncation), no checkpoint on the disk calls them flushed or deleted;
- a deleted log touches no path: the next topic of its name has files of the same names there (`retire`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from uuid import UUID

from millrace.broker.errors import CorruptMessage, KafkaStorageError, OffsetOutOfRange
from millrace.broker.protocol.batch import (
    MAX_LEADER_EPOCH,
    NO_TIMESTAMP,
    BatchHeader,
    iterate_batches,
    stamp_offset_and_epoch,
    verify_crc,
)
from millrace.broker.protocol.checksum import Buffer
from millrace.broker.protocol.control_records import Marker, parse_marker
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.storage import log_durability, log_reshaping, producer_snapshot
from millrace.broker.storage.batch_validation import (
    Budget,
    CheckedBatch,
    Origin,
    Validation,
    as_of,
    check_batch,
)
from millrace.broker.storage.checkpoints import own_topic_id, write_topic_id
from millrace.broker.storage.leader_epochs import LeaderEpochCache
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.log_health import LogHealth
from millrace.broker.storage.log_reader import LogRead, LogReader
from millrace.broker.storage.offset_holes import OffsetHoles
from millrace.broker.storage.producer_recovery import load_producers, read_marker
from millrace.broker.storage.producer_state import ProducerState
from millrace.broker.storage.recovery import load_epochs, open_segments
from millrace.broker.storage.segment import Segment
from millrace.broker.storage.segment_list import SegmentList

_MAX_OFFSET = 2**63 - 1


class AppendResult(NamedTuple):
    """Where a batch is. `duplicate`: it was stored before, and these are its offsets then."""

    base_offset: int
    last_offset: int
    log_append_time_ms: int = NO_TIMESTAMP
    duplicate: bool = False


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
        holes: OffsetHoles | None = None,
        cleaned_offset: int = 0,
    ):
        self.directory = directory
        self.topic, self.partition = parse_directory_name(directory.name)
        self.producers = producers
        self.leader_epochs = leader_epochs
        self.start_offset = start_offset
        self.end_offset = end_offset
        self.recovery_point = recovery_point
        self.cleaned_offset = cleaned_offset
        """Compaction has been through below this offset."""
        self.truncation_count = 0
        """Grows with every truncation: what was learnt before one may not be true after it."""
        self.before_truncation: Callable[[int, int], None] | None = None
        """Called before offsets from the first one given on may be written anew, with where the log starts
        then; makes the checkpoints on the disk say no more. Raises OSError."""
        self.notes = notes
        """What had to be repaired, one line each, for the operator's log."""
        self.health = LogHealth(directory, notes)
        self._lock = threading.RLock()
        self._shape_lock = threading.RLock()
        self._flush_lock = threading.Lock()
        self._name_lock = threading.Lock()
        self._segments = SegmentList(directory, segments, self._lock, notes, config)
        self._reader = LogReader(self._segments)
        self._last_flush_ms = now_ms
        self._has_new_files = True
        self.holes = holes or OffsetHoles(directory)
        self._snapshot_size = 0  # of the active segment, when the producers were last written
        self._is_as_opened = False  # after a clean close: nothing was written since
        self._topic_id: UUID | None = None
        self.is_at_rest = False
        """Whether the next append may have to open a file, and to wait for the disk; `wake` does that."""
        self.is_anchored = True
        """Whether the directory and its topic id are on the disk (`data_folder.py`)."""

    @classmethod
    def open(
        cls,
        directory: Path,
        config: LogConfig,
        *,
        recovery_point: int | None,
        now_ms: int,
        start_offset: int = 0,
        cleaned_offset: int | None = None,
        closed_offset: int = 0,
        closed_start: int | None = None,
        announced_id: UUID | None = None,
        is_anchored: bool = True,
        may_have_holes: bool = False,
        is_as_left: bool = False,
        after_failed_sync: bool = False,
    ) -> Log:
        """Opens or creates the log in `directory`.

        `recovery_point` is the offset below which all had been flushed, None after a clean close, of which
        `closed_offset` is the end that was written down (0: not known), `closed_start` the start (None: not
        known); `start_offset` is the checkpointed log start (records below it are deleted), `cleaned_offset`
        where compaction stopped, None if it never ran. `announced_id` is the topic id of a directory that has
        none, or whose own did not survive; `is_anchored`: the directory is known to be on the disk;
        `may_have_holes`: nobody knows whether the topic is compacted; `is_as_left`: no other program has used
        the folder since; `after_failed_sync`: what is recovered need not be on the disk, whatever a sync
        says, and is written again and flushed here. Raises KafkaStorageError with one line when the
        partition cannot be opened; other partitions can. Its cause is the OSError, if there was one.
        """
        try:
            if not os.path.isdir(directory):
                directory.mkdir(parents=True, exist_ok=True)
            opened = open_segments(
                directory,
                config,
                recovery_point=recovery_point,
                start_offset=start_offset,
                now_ms=now_ms,
                may_have_holes=may_have_holes or cleaned_offset is not None,
                closed_offset=closed_offset,
                closed_start=closed_start,
                is_as_left=is_as_left,
                write_again=after_failed_sync,
            )
            end_offset = opened.end_offset
            start_offset = min(max(start_offset, opened.segments[0].base_offset), end_offset)
            epochs = load_epochs(directory, opened, start_offset, opened.notes)
            producers = load_producers(
                directory,
                opened.segments,
                start_offset=start_offset,
                end_offset=end_offset,
                now_ms=now_ms,
                trusted_offset=recovery_point,
                notes=opened.notes,
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
                holes=opened.holes,
                cleaned_offset=min(cleaned_offset or 0, end_offset),
            )
            log.is_anchored = is_anchored
            log._topic_id = own_topic_id(directory, announced_id, opened.notes)
            log._is_as_opened = (
                recovery_point is None
                and not opened.notes
                and producer_snapshot.snapshot_path(directory, end_offset).exists()
            )
            if after_failed_sync:
                log_durability.confirm(log, now_ms)
        except (OSError, ValueError, CorruptMessage) as error:
            raise KafkaStorageError(f"partition {directory} cannot be opened: {error}") from error
        return log

    # -- what it is

    @property
    def config(self) -> LogConfig:
        """As it is now; whoever manages the log may set another."""
        return self._segments.config

    @config.setter
    def config(self, config: LogConfig) -> None:
        self._segments.config = config

    @property
    def failure(self) -> str | None:
        """Why the log takes no more appends; None while all is well."""
        return self.health.failure

    @property
    def topic_id(self) -> UUID | None:
        """From `partition.metadata`; None where there is none."""
        return self._topic_id

    def set_topic_id(self, topic_id: UUID) -> None:
        """Writes `partition.metadata`; called while the log cannot be deleted. Raises OSError."""
        write_topic_id(self.directory, topic_id)
        self._topic_id = topic_id

    def anchor(self) -> None:
        """Makes the directory and its topic id durable, where they are not yet. Raises KafkaStorageError."""
        log_durability.anchor(self)

    @property
    def size(self) -> int:
        """Bytes of all batches."""
        return self._segments.size

    @property
    def segments(self) -> tuple[Segment, ...]:
        """As they are now, oldest first, the active one last; for the cleaner and for figures."""
        return self._segments.all

    def last_stable_offset(self, high_watermark: int) -> int:
        """Readers of committed data see up to here: never beyond the high watermark, nor beyond the first
        record of a transaction that is open or whose end is not below the high watermark yet."""
        return self.producers.last_stable_offset(high_watermark)

    def aborted_transactions(self, from_offset: int, end_offset: int) -> tuple[tuple[int, int], ...]:
        """(producer id, first offset) of each aborted transaction with records from `from_offset` up to
        `end_offset`, for readers of committed data to leave out."""
        return self._reader.aborted(from_offset, end_offset) if self._segments.aborting else ()

    @property
    def is_retired(self) -> bool:
        """Whether it was deleted, or set aside."""
        return self._segments.is_retired

    # -- append

    def wake(self) -> None:
        """Does what an append would wait for, where the disk may be waited for. Raises nothing: what is wrong
        the append says."""
        if self.is_at_rest:
            with suppress(OSError):
                self._segments.active.file.wake()
            self.is_at_rest = False

    def append(
        self,
        batch: bytes | bytearray | memoryview,
        *,
        leader_epoch: int,
        now_ms: int,
        origin: Origin = "client",
        validation: Validation = "full",
        budget: Budget | None = None,
        checked: CheckedBatch | None = None,
    ) -> AppendResult:
        """Checks one batch (`batch_validation.py`; `checked` is what that has made of it before), gives it
        offsets and an epoch, and writes it.

        A writable buffer is stamped in place, and must be the log's until this returns. Batches of internal
        origin may be markers (`control_records.py`), which end their producer's transaction here. Raises
        what `check_batch` raises, OutOfOrderSequence, InvalidProducerEpoch, InvalidTxnState,
        TransactionCoordinatorFenced, and KafkaStorageError when the disk refuses; the log is then as it was
        before.
        """
        found = (
            check_batch(
                batch, self.config, now_ms=now_ms, origin=origin, validation=validation, budget=budget
            )
            if checked is None
            else as_of(checked, now_ms)
        )
        stamped_batch, header, append_time_ms = found
        with self._lock:
            self.health.check()
            has_producer = header.producer_id >= 0
            marker: Marker | None = None
            if has_producer:
                if origin == "client":
                    stored = self.producers.check(header)
                    if stored is not None:
                        time_ms = stored.timestamp_ms if append_time_ms >= 0 else NO_TIMESTAMP
                        return AppendResult(stored.first_offset, stored.last_offset, time_ms, True)
                elif header.is_control:
                    marker = parse_marker(stamped_batch)
                    self.producers.check_marker(marker)
                else:
                    self.producers.check_epoch(header)
            base_offset = self.end_offset
            last_offset = base_offset + header.last_offset_delta
            stamp_offset_and_epoch(stamped_batch, base_offset, leader_epoch)
            try:
                self._write(stamped_batch, header, last_offset, now_ms)
            except KafkaStorageError:
                if has_producer and origin == "client":
                    self.producers.refused(header)
                raise
            if leader_epoch > self.leader_epochs.latest_epoch:
                self._assign_epoch(leader_epoch, base_offset)
            if has_producer:
                stamped = header._replace(base_offset=base_offset, leader_epoch=leader_epoch)
                self._note_producer(stamped, now_ms, marker)
            self.health.check()
            self.producers.end_offset = self.end_offset = last_offset + 1
            must_flush = self.end_offset - self.recovery_point >= self.config.flush_messages
        if must_flush:
            self.flush(now_ms)
        return AppendResult(base_offset, last_offset, append_time_ms)

    def append_as_follower(self, batches: Buffer, now_ms: int, leader_epoch: int = MAX_LEADER_EPOCH) -> None:
        """Appends batches that a leader has checked and stamped, offsets and epochs as they are. It leads in
        `leader_epoch`: a batch of a later one is not its own, and is left with all behind it.

        Raises CorruptMessage when one is damaged, OffsetOutOfRange when one does not lie beyond the end;
        batches before it are in the log then.
        """
        view = memoryview(batches)
        with self._lock:
            self.health.check()
            for position, header in iterate_batches(view):
                verify_crc(view, position, header)
                if header.leader_epoch > leader_epoch:
                    return
                if header.base_offset < self.end_offset:
                    raise OffsetOutOfRange(
                        f"{self.directory.name}: a batch at offset {header.base_offset} does not follow "
                        f"the log's end {self.end_offset}"
                    )
                if header.base_offset > self.end_offset:
                    # Also before the first batch: the file's name says where it begins.
                    log_reshaping.note_holes(self)
                batch = view[position : position + header.size]
                marker = read_marker(batch) if header.is_control else None
                self._write(batch, header, header.last_offset, now_ms)
                if header.leader_epoch > self.leader_epochs.latest_epoch:
                    self._assign_epoch(header.leader_epoch, header.base_offset)
                if header.producer_id >= 0:
                    self._note_producer(header, now_ms, marker)
                self.health.check()
                self.producers.end_offset = self.end_offset = header.next_offset

    def _write(self, batch: Buffer, header: BatchHeader, last_offset: int, now_ms: int) -> None:
        self._is_as_opened = False
        try:
            if self._segments.must_roll(len(batch), header.max_timestamp, last_offset, now_ms):
                log_reshaping.roll(self, now_ms)
                self.health.check()
            self._segments.active.append(batch, header, last_offset, self.config.index_interval_bytes)
        except KafkaStorageError as error:
            self.health.fail(str(error), error.__cause__)
            raise
        except OSError as error:
            raise self.health.refused("the batch was not written", error) from error

    def _note_producer(self, header: BatchHeader, now_ms: int, marker: Marker | None) -> None:
        aborted = self.producers.note(header, now_ms, marker)
        if aborted is not None:
            active = self._segments.active
            active.aborted.append(aborted)
            self._segments.put(self._segments.all)

    def _assign_epoch(self, epoch: int, start_offset: int) -> None:
        try:
            self.leader_epochs.assign(epoch, start_offset)
        except OSError as error:
            # The next flush writes it, before it calls the epoch's batches durable.
            self.health.passed_over(f"leader epoch {epoch} was not checkpointed", error)

    def begin_epoch(self, epoch: int) -> None:
        """A leader begins an epoch at the log's end. Its first batch writes that down."""
        with self._lock:
            self.leader_epochs.begin(epoch, self.end_offset)

    def forget_empty_epochs(self) -> None:
        """Forgets epochs in which nothing was written: they say nothing of this log's history. Raises
        nothing."""
        with self._lock:
            self._keep_epochs(lambda: self.leader_epochs.truncate_from_end(self.end_offset))

    def _keep_epochs(self, change: Callable[[], None]) -> None:
        if self.failure is not None:
            return  # the file may be another log's by now
        try:
            change()
        except OSError as error:
            # In memory they are right, the next flush writes them, and a start cuts them at the log's ends.
            self.health.passed_over("leader epochs were not written", error)

    # -- segments

    def roll_if_due(self, now_ms: int) -> bool:
        """Begins a new segment when the active one has been open for `segment.ms` by the broker's clock."""
        with self._lock:
            active = self._segments.active
            is_due = active.size > 0 and now_ms - active.created_ms > self.config.roll_ms
            if is_due and self.failure is None:
                try:
                    log_reshaping.roll(self, now_ms)
                except OSError as error:
                    raise self.health.refused("no new segment", error) from error
            return is_due

    def before_compaction(self) -> log_reshaping.BeforeCompaction:
        """What a compaction goes by. Waits for a truncation under way: while that replays the producers,
        aborted transactions are missing from the indexes, and their records would count as committed."""
        return log_reshaping.before_compaction(self)

    def note_cleaned(self, offset: int, truncation_count: int) -> None:
        """Compaction has been through below `offset`; says nothing when the log was truncated meanwhile."""
        with self._shape_lock:
            if truncation_count == self.truncation_count:
                self.cleaned_offset = max(self.cleaned_offset, min(offset, self.end_offset))

    def last_batches(self) -> dict[int, tuple[int | None, int]]:
        """As `ProducerState.last_batches`."""
        with self._lock:
            return self.producers.last_batches()

    def replace_segments(self, old: Sequence[Segment], compacted: Segment, truncation_count: int) -> None:
        """Puts a compacted segment in the place of `old`, for good when this returns (`segment_swap.py`).

        Raises CompactionAbandoned when they are not the log's any more (retention came first) or the log was
        truncated since `truncation_count` was read, and KafkaStorageError when the disk fails; the log is
        offline then if it failed halfway. Where nothing was replaced, the compacted segment is removed.
        """
        log_reshaping.replace_segments(self, old, compacted, truncation_count)

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
        `end_offset` (the high watermark or the last stable offset). Where compaction left a hole at `offset`,
        the first is the next one after it.

        With `at_least_one` the first batch is returned however large it is. `data` is empty when there is
        nothing yet. With `may_block=False` raises WouldBlock instead of waiting for the disk. Raises
        OffsetOutOfRange below the log's start and beyond its end, KafkaStorageError when the disk fails.
        """
        log_end_offset = self.end_offset
        if not self.start_offset <= offset <= log_end_offset:
            raise OffsetOutOfRange(
                f"{self.directory.name}: offset {offset} is not within "
                f"{self.start_offset} to {log_end_offset}"
            )
        try:
            found = self._reader.read(
                offset, max_bytes, min(end_offset, log_end_offset), at_least_one, may_block
            )
        except OSError as error:
            raise self.health.refused(f"offset {offset} cannot be read", error) from error
        if offset < self.start_offset:
            # Removed between the first look and the search, which would have found what came after it.
            raise OffsetOutOfRange(f"{self.directory.name}: offset {offset} was removed just now")
        return found

    def offset_for_time(self, timestamp_ms: int) -> tuple[int, int] | None:
        """(offset, timestamp) of the first record that is at least as new as `timestamp_ms`; None if none
        is. Raises KafkaStorageError."""
        try:
            return self._reader.offset_for_time(timestamp_ms, self.start_offset)
        except OSError as error:
            raise self.health.refused(f"timestamp {timestamp_ms} cannot be looked for", error) from error

    def max_timestamp(self) -> tuple[int, int] | None:
        """(offset, timestamp) of the newest record, the first of them if several are; None when empty. Raises
        KafkaStorageError."""
        try:
            return self._reader.max_timestamp(self.start_offset)
        except OSError as error:
            raise self.health.refused("the newest record cannot be looked for", error) from error

    # -- flush

    def needs_flush(self, now_ms: int) -> bool:
        """Whether a flush is due: `flush.ms` is over, or a segment was completed since the last."""
        return log_durability.is_due(self, now_ms)

    def flush(self, now_ms: int) -> None:
        """Makes all that has been appended durable. May be called from any thread; appends go on
        meanwhile. Raises KafkaStorageError; after a failed fsync the log takes no more appends and is not
        flushed again, because nobody knows then what is on the disk: the system reports a lost page once."""
        log_durability.flush(self, now_ms)

    # -- remove

    def delete_old_segments(self, now_ms: int, high_watermark: int | None = None) -> list[Path]:
        """Removes segments that retention or DeleteRecords has given up; returns their `.log` files.

        Readers of a removed segment finish undisturbed. Raises KafkaStorageError.
        """
        return log_reshaping.delete_old_segments(self, now_ms, high_watermark)

    def advance_start_offset(self, offset: int) -> None:
        """Deletes the records below `offset`; their segments go with the next `delete_old_segments`.

        An offset at or below the start changes nothing. Raises OffsetOutOfRange beyond the end,
        KafkaStorageError.
        """
        with self._lock:
            self.health.check()
            if offset > self.end_offset:
                raise OffsetOutOfRange(
                    f"{self.directory.name}: offset {offset} is beyond the end {self.end_offset}"
                )
            if offset > self.start_offset:
                self.start_offset = offset
                self._keep_epochs(lambda: self.leader_epochs.truncate_from_start(offset))

    def truncate_to(self, offset: int, now_ms: int) -> None:
        """Removes every batch that reaches `offset` or beyond. At or below the log's start the log becomes
        empty and begins at `offset`. Raises KafkaStorageError."""
        if offset < self.end_offset:
            log_reshaping.shorten(self, offset, now_ms, anew=False)

    def start_anew(self, offset: int, now_ms: int) -> None:
        """Removes everything; the log is empty and begins at `offset`, wherever that is (a follower whose
        end lies outside its leader's log). Raises KafkaStorageError."""
        log_reshaping.shorten(self, offset, now_ms, anew=True)

    def expire_producers(self, now_ms: int) -> int:
        """Forgets producers that were silent for `producer.id.expiration.ms`; returns how many."""
        with self._lock:
            return self.producers.expire(now_ms, self.config.producer_id_expiration_ms)

    def rest(self, now_ms: int) -> None:
        """Closes the files that nobody has used since this was called last, once they are flushed; whoever
        needs one opens it again. Raises KafkaStorageError."""
        log_durability.rest(self, now_ms)

    # -- end

    def close(self, now_ms: int = 0) -> None:
        """Flushes everything, so that the next start needs no recovery; of a log to which nothing was written
        there is nothing to do. Raises KafkaStorageError."""
        log_durability.close(self, now_ms)

    def retire(self, reason: str, rename: Callable[[], object]) -> None:
        """The directory is renamed by `rename` and the log, offline for `reason` from now on, touches no path
        any more: one that takes its name has files of the same names. Waits for work under way to end, but
        not for a flush to sync what is open: whoever follows the cluster's decisions waits for this. Raises
        what `rename` raises."""
        with self._shape_lock, self._name_lock, self._lock:
            self.health.end(reason)
            self._segments.is_retired = True
            for segment in self._segments.all:
                segment.file.hold()
            rename()
