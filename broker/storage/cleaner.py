"""Compaction of one log: keeps the last record of each key, and little of transactions that were aborted.

Two passes. The first reads the dirty part and notes the last offset of each key (`key_map.py`); the second
reads everything below that, clean part included, and writes what stays into new segments, which then take
the old ones' place (`segment_swap.py`). Neighbours that have become small are merged.

What a batch keeps: its offsets (so there are holes), producer id, epoch and sequence, leader epoch, codec,
timestamps and headers of its records. A batch of which everything stays is copied as bytes. One of which
nothing stays goes, except as an empty header where it is the last of its producer (its sequence number must
be remembered) or the last of what is replaced (its end must be known to recovery).

A tombstone stays `delete.retention.ms` after it was first met, so that readers learn of the deletion: the
batch then gets bit 6 of its attributes and the time as its base timestamp (KIP-534), and so does a marker
whose transaction is gone.

Called by the log manager on a thread; reads hold no lock. Invariants: a batch is read only after its CRC was
checked; a log in which one is damaged is left as it is; which transactions were aborted is known before the
first batch is read, and nothing is replaced once a truncation has come after that. Raises CorruptMessage,
RecordTooLarge (a decompression bomb), CompactionAbandoned, KafkaStorageError, OSError.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from millrace.broker.errors import CorruptMessage
from millrace.broker.protocol.batch import (
    CONTROL_BIT,
    DELETE_HORIZON_BIT,
    HEADER_SIZE,
    LOG_APPEND_TIME_BIT,
    NO_TIMESTAMP,
    TRANSACTIONAL_BIT,
    BatchHeader,
    iterate_batches,
    pack_header,
    parse_header,
    seal,
    verify_crc,
)
from millrace.broker.protocol.checksum import Buffer
from millrace.broker.protocol.compression import compress
from millrace.broker.protocol.records import records_section
from millrace.broker.storage import segment_swap
from millrace.broker.storage.compaction_plan import (
    Plan,
    SegmentView,
    TransactionFilter,
    group_segments,
)
from millrace.broker.storage.key_map import KeyMap, Sifted, copy_records
from millrace.broker.storage.log import Log
from millrace.broker.storage.log_reshaping import BeforeCompaction, CompactionAbandoned
from millrace.broker.storage.producer_recovery import read_marker
from millrace.broker.storage.segment import Segment, newest_timestamp, newest_timestamp_of
from millrace.broker.storage.transaction_index import AbortedTransaction

MIN_LONG, MAX_LONG = -(2**63), 2**63 - 1

_WINDOW_SIZE = 1 << 20
_WRITE_SIZE = 1 << 20
_NO_LIMIT = 1 << 40
_WORK_S, _REST_S = 0.002, 0.0002
"""A thread that waits for the interpreter's lock gets it only when it is free for a while: without a rest,
the event loop would stand still for 5 ms at a time."""


@dataclass(frozen=True)
class CleanerConfig:
    """`log.cleaner.*`. Sizes are bytes; `max_bytes_per_second` counts what is read and written."""

    enabled: bool = True
    map_size: int = 128 << 20
    max_bytes_per_second: int = 2**63 - 1


@dataclass
class CleanResult:
    """What a run did. `end_offset` is where the next one begins."""

    end_offset: int = 0
    read_size: int = 0
    written_size: int = 0
    record_count: int = 0
    kept_record_count: int = 0
    segments_before: int = 0
    segments_after: int = 0


def view_segments(segments: Sequence[Segment], end_offset: int) -> list[SegmentView]:
    """Neighbouring segments as the plan wants them; the last ends at `end_offset`."""
    nexts = [segment.base_offset for segment in segments[1:]] + [end_offset]
    return [
        SegmentView(
            segment.base_offset,
            following,
            segment.size,
            segment.index_size,
            segment.first_timestamp,
            newest_timestamp_of(segment),
        )
        for segment, following in zip(segments, nexts, strict=True)
    ]


class Cleaner:
    """Compacts logs, one at a time. `should_stop` is asked often; True abandons the run."""

    def __init__(self, config: CleanerConfig, should_stop: Callable[[], bool] = lambda: False):
        self.config = config
        self._should_stop = should_stop
        self._paced_size = 0
        self._paced_since = 0.0
        self._rested_at = 0.0

    def clean(self, log: Log, plan: Plan, now_ms: int) -> CleanResult:
        """Compacts what the plan says; see the module for what is raised."""
        self._paced_size, self._paced_since = 0, time.monotonic()
        found = log.before_compaction()
        result = CleanResult()
        segments = [s for s in found.segments[:-1] if s.base_offset < plan.first_uncleanable]
        if not segments or segments[-1].next_offset > plan.first_uncleanable:
            raise CompactionAbandoned(f"{log.directory}: its segments have changed meanwhile")
        keys = self._map_keys(log, segments, plan, found.aborted)
        result.end_offset = keys.latest_offset + 1
        segments = [s for s in segments if s.base_offset < result.end_offset]
        groups = group_segments(
            view_segments(segments, segments[-1].next_offset),
            max_size=log.config.segment_bytes,
            max_index_size=log.config.segment_index_bytes,
        )
        transactions = TransactionFilter()
        for start, count in groups:
            group = segments[start : start + count]
            _Rewrite(self, log, found, group, keys, transactions, now_ms, result).run()
        result.segments_before, result.segments_after = len(segments), len(groups)
        log.note_cleaned(result.end_offset, found.truncation_count)
        return result

    def _map_keys(
        self, log: Log, segments: Sequence[Segment], plan: Plan, aborted: Sequence[AbortedTransaction]
    ) -> KeyMap:
        dirty = [segment for segment in segments if segment.next_offset > plan.first_dirty]
        span = plan.first_uncleanable - plan.first_dirty
        keys = KeyMap(span, self.config.map_size)
        keys.reach(plan.first_dirty - 1)
        transactions = TransactionFilter()
        transactions.expect(aborted)
        for segment in dirty:
            for batch, header in self.batches(log, segment, _position_of(segment, plan.first_dirty)):
                if header.is_control:
                    transactions.discards_marker(header, read_marker(batch))
                elif (
                    not transactions.discards(header)
                    and header.record_count
                    and not keys.add(records_section(batch, header), header, plan.first_dirty)
                ):
                    return keys
                keys.reach(header.last_offset)
            keys.reach(segment.next_offset - 1)
        return keys

    def batches(
        self, log: Log, segment: Segment, position: int = 0
    ) -> Iterator[tuple[memoryview, BatchHeader]]:
        """Each batch of a closed segment, its CRC checked."""
        while position < segment.size:
            if self._should_stop() or log.failure is not None:
                raise CompactionAbandoned(f"{log.directory}: the compaction was stopped")
            window = segment.file.read(position, min(_WINDOW_SIZE, segment.size - position))
            size = parse_header(window).size
            if size > len(window):
                window = segment.file.read(position, size)
            view = memoryview(window)
            consumed = 0
            for at, header in iterate_batches(window):
                verify_crc(window, at, header)
                consumed = at + header.size
                yield view[at:consumed], header
                if time.perf_counter() - self._rested_at > _WORK_S:
                    time.sleep(_REST_S)
                    self._rested_at = time.perf_counter()
            if consumed == 0:
                raise CorruptMessage(f"{segment.path}: the batch at byte {position} is cut")
            position += consumed
            self.pace(consumed)

    def pace(self, size: int) -> None:
        """Waits as the limit of bytes a second wants it."""
        limit = self.config.max_bytes_per_second
        if limit >= _NO_LIMIT:
            return
        self._paced_size += size
        early = self._paced_size / limit - (time.monotonic() - self._paced_since)
        while early > 0 and not self._should_stop():
            time.sleep(min(early, 0.2))
            early = self._paced_size / limit - (time.monotonic() - self._paced_since)


def _as_long(value: int) -> int:
    """In 64 bits, as arithmetic of that width has it."""
    return (value - MIN_LONG) % (1 << 64) + MIN_LONG


class _Rewrite:
    """Writes what stays of a group of segments into one, and puts it in their place."""

    def __init__(
        self,
        cleaner: Cleaner,
        log: Log,
        found: BeforeCompaction,
        group: Sequence[Segment],
        keys: KeyMap,
        transactions: TransactionFilter,
        now_ms: int,
        result: CleanResult,
    ):
        self._cleaner = cleaner
        self._log = log
        self._found = found
        self._group = group
        self._keys = keys
        self._transactions = transactions
        self._now_ms = now_ms
        self._result = result
        self._last_batches = log.last_batches()
        self._pending = bytearray()
        self._is_changed = len(group) > 1

    def run(self) -> None:
        group, transactions = self._group, self._transactions
        if self._log.failure is not None:
            raise CompactionAbandoned(f"{self._log.directory}: it is offline or deleted meanwhile")
        self._target = segment_swap.begin(self._log.directory, group[0].base_offset, self._now_ms)
        try:
            base_offset, end_offset = group[0].base_offset, group[-1].next_offset
            transactions.expect(
                transaction
                for transaction in self._found.aborted
                if transaction.first_offset < end_offset and transaction.last_offset >= base_offset
            )
            last_offset = _last_offset(group)
            for segment in group:
                for batch, header in self._cleaner.batches(self._log, segment):
                    self._take(batch, header, header.last_offset == last_offset)
            self._write_pending()
            for transaction in transactions.kept_aborts:
                self._target.aborted.append(transaction)
            transactions.kept_aborts.clear()
            if not self._is_changed:
                segment_swap.abandon(self._target)
                return
            modified_ns = group[-1].file.stat().st_mtime_ns
            os.utime(self._target.path, ns=(modified_ns, modified_ns))
        except BaseException:
            segment_swap.abandon(self._target)
            raise
        self._log.replace_segments(group, self._target, self._found.truncation_count)

    def _take(self, batch: memoryview, header: BatchHeader, is_last_of_group: bool) -> None:
        result = self._result
        result.read_size += len(batch)
        result.record_count += header.record_count
        if header.is_control:
            kept: Buffer | None = self._keep_marker(batch, header)
        else:
            kept = self._keep_data(batch, header)
        if kept is None:
            if not (is_last_of_group or self._is_last_of_producer(header)):
                self._is_changed = True
                return
            # An empty header says which offsets and sequence numbers were here.
            kept = batch if header.record_count == 0 else _empty(header)
        if kept is not batch:
            self._is_changed = True
            header = parse_header(kept)
        result.kept_record_count += header.record_count
        position = self._target.size + len(self._pending)
        self._pending += kept
        self._target.note(
            newest_timestamp(header),
            header.last_offset,
            position,
            header.size,
            self._log.config.index_interval_bytes,
        )
        if len(self._pending) >= _WRITE_SIZE:
            self._write_pending()

    def _write_pending(self) -> None:
        target = self._target
        target.file.write(self._pending, target.size)
        target.size += len(self._pending)
        self._result.written_size += len(self._pending)
        self._cleaner.pace(len(self._pending))
        self._pending = bytearray()

    def _keep_marker(self, batch: memoryview, header: BatchHeader) -> Buffer | None:
        may_go = self._transactions.discards_marker(header, read_marker(batch))
        if header.record_count == 0:
            return None
        if not may_go:
            return batch
        if not header.has_delete_horizon:
            return self._rebuild(batch, header, None, self._horizon_ms())
        return batch if self._now_ms < header.base_timestamp else None

    def _keep_data(self, batch: memoryview, header: BatchHeader) -> Buffer | None:
        if self._transactions.discards(header) or header.record_count == 0:
            return None
        if header.base_offset > self._keys.latest_offset and header.has_delete_horizon:
            return batch
        section = records_section(batch, header)
        keeps_tombstones = not header.has_delete_horizon or self._now_ms < header.base_timestamp
        sifted = self._keys.sift(section, header, keep_tombstones=keeps_tombstones)
        if sifted.kept_count == 0:
            return None
        needs_horizon = sifted.tombstone_count > 0 and not header.has_delete_horizon
        if needs_horizon:
            return self._rebuild(batch, header, sifted, self._horizon_ms(), section)
        if sifted.kept_count == header.record_count:
            return batch
        return self._rebuild(batch, header, sifted, None, section)

    def _horizon_ms(self) -> int:
        return min(self._now_ms + self._log.config.delete_retention_ms, MAX_LONG)

    def _is_last_of_producer(self, header: BatchHeader) -> bool:
        last = self._last_batches.get(header.producer_id) if header.producer_id >= 0 else None
        if last is None:
            return False
        last_offset, epoch = last
        if last_offset is None:  # only a marker is known of it
            return header.is_control and header.producer_epoch == epoch
        return header.last_offset == last_offset

    def _rebuild(
        self,
        batch: Buffer,
        header: BatchHeader,
        sifted: Sifted | None,
        horizon_ms: int | None,
        section: Buffer | None = None,
    ) -> bytearray:
        """A batch of the records that stay (all, where nothing was sifted), with a delete horizon if given;
        `section` are its records, where they have been decompressed already."""
        if section is None:
            section = records_section(batch, header)
        attributes, base_timestamp = header.attributes, header.base_timestamp
        if horizon_ms is not None:
            attributes, base_timestamp = attributes | DELETE_HORIZON_BIT, horizon_ms
        keep, count, max_timestamp = None, header.record_count, header.max_timestamp
        if sifted is not None:
            keep, count = sifted.keep, sifted.kept_count
            if not header.is_log_append_time:
                max_timestamp = _as_long(header.base_timestamp + sifted.greatest_timestamp_delta)
        # A producer's base and deltas may each be beyond any time, as long as their sums are none.
        shift = _as_long(header.base_timestamp - base_timestamp)
        records: Buffer = copy_records(section, keep, header.record_count, shift)
        if header.compression:
            records = compress(header.compression, records)
        rebuilt = bytearray(
            pack_header(
                size=HEADER_SIZE + len(records),
                attributes=attributes,
                last_offset_delta=header.last_offset_delta,
                base_timestamp=base_timestamp,
                max_timestamp=max_timestamp,
                record_count=count,
                base_offset=header.base_offset,
                leader_epoch=header.leader_epoch,
                producer_id=header.producer_id,
                producer_epoch=header.producer_epoch,
                base_sequence=header.base_sequence,
            )
        )
        rebuilt += records
        seal(rebuilt)
        return rebuilt


def _empty(header: BatchHeader) -> bytearray:
    """The header of a batch of which no record stays."""
    empty = bytearray(
        pack_header(
            size=HEADER_SIZE,
            attributes=header.attributes & (LOG_APPEND_TIME_BIT | TRANSACTIONAL_BIT | CONTROL_BIT),
            last_offset_delta=header.last_offset_delta,
            base_timestamp=NO_TIMESTAMP,
            max_timestamp=header.max_timestamp,
            record_count=0,
            base_offset=header.base_offset,
            leader_epoch=header.leader_epoch,
            producer_id=header.producer_id,
            producer_epoch=header.producer_epoch,
            base_sequence=header.base_sequence,
        )
    )
    seal(empty)
    return empty


def _last_offset(group: Sequence[Segment]) -> int:
    """Last offset of the last batch in a group of segments; -1 when they are empty."""
    for segment in reversed(group):
        last = -1
        at = None
        entry = segment.offset_index.last()
        for at in segment.headers(0 if entry is None else entry.position):
            last = at.header.last_offset
        if at is not None:
            return last
    return -1


def _position_of(segment: Segment, offset: int) -> int:
    if offset <= segment.base_offset:
        return 0
    try:
        at = segment.find(offset)
    except (CorruptMessage, FileNotFoundError):
        at = segment.find(offset, use_index=False)
    return segment.size if at is None else at.position
