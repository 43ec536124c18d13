"""Reading a log: batches from an offset on, the record of a time, the transactions that readers leave out.

Readers take no lock (see `segment_list.py`). A search goes by the list of segments and the sparse index; a
reader that goes on where another stopped is found without any, by a small memory of positions.

Called by the log, which checks the bounds. Offsets may have holes: whoever asks for one that is not there
gets the next batch.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from millrace.broker.errors import CorruptMessage, KafkaStorageError
from millrace.broker.protocol.batch import HEADER_SIZE, NO_TIMESTAMP, parse_header
from millrace.broker.protocol.records import read_records, whole_batches
from millrace.broker.storage.disk_errors import WouldBlock
from millrace.broker.storage.segment import Segment, newest_timestamp
from millrace.broker.storage.segment_list import SegmentList, number_of

_REMEMBERED_READ_COUNT = 64
_EMPTY = memoryview(b"")


class LogRead(NamedTuple):
    """Whole batches; the first may begin below the offset asked for. `next_offset` is where to go on.

    `position` is the first byte's place in its segment.
    """

    data: memoryview
    next_offset: int
    position: int


class LogReader:
    """Reads the segments of one log."""

    def __init__(self, segments: SegmentList):
        self._segments = segments
        self._positions: dict[int, tuple[Segment, int]] = {}

    def read(
        self,
        offset: int,
        max_bytes: int,
        end_offset: int,
        at_least_one: bool,
        may_block: bool,
    ) -> LogRead:
        """As `Log.read`; `end_offset` is not beyond the log's end. Raises WouldBlock, CorruptMessage,
        OSError."""
        positions = self._positions
        found = self._locate(offset, may_block) if offset < end_offset else None
        if found is None:
            active = self._segments.active
            return LogRead(_EMPTY, offset, active.size)
        return self._read_at(positions, *found, offset, max_bytes, end_offset, at_least_one, may_block)

    def _read_at(
        self,
        positions: dict[int, tuple[Segment, int]],
        segment: Segment,
        position: int,
        offset: int,
        max_bytes: int,
        end_offset: int,
        at_least_one: bool,
        may_block: bool,
    ) -> LogRead:
        """`positions` is the memory from before the place was looked for."""
        read = segment.file.read if may_block else segment.file.read_cached
        available = segment.size - position
        data = read(position, min(max(max_bytes, HEADER_SIZE), available))
        if positions is not self._positions:
            # Truncated between the search and the read: other batches may stand there by now.
            return self.read(offset, max_bytes, end_offset, at_least_one, may_block)
        size, next_offset, following = whole_batches(data, end_offset)
        # The segment's size was looked at before: its next offset is not older than that.
        if size == 0 and parse_header(data).base_offset >= max(end_offset, segment.next_offset):
            behind = _behind_misplaced(segment, position, offset, may_block)
            return self._read_at(
                positions, segment, behind, offset, max_bytes, end_offset, at_least_one, may_block
            )
        if size == 0 or size > max_bytes:
            following = following or parse_header(data).size
            if not at_least_one or parse_header(data).base_offset >= end_offset:
                return LogRead(_EMPTY, offset, position)
            if len(data) < following:
                data = read(position, following)
                if positions is not self._positions:
                    return self.read(offset, max_bytes, end_offset, at_least_one, may_block)
            size, next_offset, _ = whole_batches(memoryview(data)[:following], end_offset)
            if size == 0:
                raise CorruptMessage(f"{segment.path}: no whole batch at byte {position}")
        _remember(positions, next_offset, segment, position + size)
        return LogRead(memoryview(data)[:size], next_offset, position)

    def forget_positions(self) -> None:
        """To be called when offsets may be given anew (a truncation: after the files are cut, before anything
        is appended), or segments are gone. A read that is under way notices, and what it has learnt goes to
        the memory that it began with, which nobody looks into any more."""
        self._positions = {}

    def _locate(self, offset: int, may_block: bool) -> tuple[Segment, int] | None:
        """Segment and position of the first batch that ends at or after `offset`.

        A search in a closed segment opens and reads files that may be cold, and so does one in the active
        segment for what its index no longer has in memory. Raises WouldBlock rather.
        """
        segments = self._segments.all
        number = number_of(segments, offset)
        remembered = self._positions.get(offset)
        if remembered is not None and remembered[0] is segments[number]:
            segment, position = remembered
            if position < segment.size:
                return remembered
        if not may_block and number < len(segments) - 1 and offset != segments[number].base_offset:
            raise WouldBlock(f"{segments[number].path} has to be searched for offset {offset}")
        for segment in segments[number:]:
            if offset <= segment.base_offset and segment.size:
                return segment, 0
            at = self._segments.find(segment, offset, may_block=may_block)
            if at is not None:
                return segment, at.position
        return None

    # -- time

    def offset_for_time(self, timestamp_ms: int, start_offset: int) -> tuple[int, int] | None:
        """(offset, timestamp) of the first record from `start_offset` on that is at least as new."""
        for segment in self._segments.all:
            if segment.max_timestamp < timestamp_ms or segment.next_offset <= start_offset:
                continue
            try:
                found = _first_record_since(segment, timestamp_ms, start_offset)
            except (CorruptMessage, FileNotFoundError) as error:
                found = self._segments.look_again(
                    segment,
                    error,
                    partial(_first_record_since, segment, timestamp_ms, start_offset),
                    replaced=partial(self._offset_for_time_anew, timestamp_ms, start_offset),
                )
            if found is not None:
                return found
        return None

    def _offset_for_time_anew(self, timestamp_ms: int, start_offset: int) -> tuple[int, int] | None:
        if self._segments.is_retired:
            raise KafkaStorageError(f"{self._segments.directory.name} is deleted")
        return self.offset_for_time(timestamp_ms, start_offset)

    def max_timestamp(self, start_offset: int) -> tuple[int, int] | None:
        """(offset, timestamp) of the newest record, the first of them if several are; None when there is
        none with a timestamp."""
        newest_of = {s: s.max_timestamp for s in self._segments.all if s.next_offset > start_offset}
        unread = set(newest_of)
        while (newest := max(newest_of.values(), default=NO_TIMESTAMP)) != NO_TIMESTAMP:
            found = self.offset_for_time(newest, start_offset)
            if found is not None:
                return found
            # It lies below the start, or was in a batch of which compaction has left no record.
            for segment in [segment for segment, time_ms in newest_of.items() if time_ms == newest]:
                is_read = segment not in unread
                newest_of[segment] = NO_TIMESTAMP if is_read else self._newest_from(segment, start_offset)
                unread.discard(segment)
        return None

    def _newest_from(self, segment: Segment, from_offset: int) -> int:
        look = partial(_newest_from, segment, from_offset)
        try:
            return look()
        except (CorruptMessage, FileNotFoundError) as error:
            # What takes the place of a segment has other records, and none that are newer.
            return self._segments.look_again(segment, error, look, replaced=lambda: segment.max_timestamp)

    # -- transactions

    def aborted(self, from_offset: int, end_offset: int) -> tuple[tuple[int, int], ...]:
        """(producer id, first offset) of aborted transactions that touch the range, by their markers."""
        found: list[tuple[int, int]] = []
        for segment in self._segments.aborting:
            transactions, is_complete = segment.aborted.collect(from_offset, end_offset)
            found += [(transaction.producer_id, transaction.first_offset) for transaction in transactions]
            if is_complete:
                break
        return tuple(found)


def _behind_misplaced(segment: Segment, position: int, offset: int, may_block: bool) -> int:
    """Where to read `offset` on, behind a batch that claims to lie where its segment does not reach: a bit of
    its header was flipped, and no checksum is over that. Raises CorruptMessage where the offset may be in
    that batch, because an answer without it, and without an error, would be a hole, or the log's end.

    A batch behind it that begins at or below the offset says that it is not.
    """
    if not may_block:
        raise WouldBlock(f"{segment.path} has to be searched for offset {offset}")
    is_behind = False
    for at in segment.headers(position):
        header = at.header
        if header.base_offset >= segment.next_offset:
            is_behind = False
            continue
        is_behind |= header.base_offset <= offset
        if header.last_offset >= offset:
            if is_behind:
                return at.position
            break
    raise CorruptMessage(f"{segment.path}: the batch at byte {position} claims offsets beyond its segment's")


def _remember(
    positions: dict[int, tuple[Segment, int]], next_offset: int, segment: Segment, position: int
) -> None:
    """Where a reader that goes on at `next_offset` will find it, without a search."""
    if len(positions) >= _REMEMBERED_READ_COUNT:
        try:
            positions.pop(next(iter(positions)), None)
        except (RuntimeError, StopIteration):
            positions.clear()  # another reader changed it just then; searching anew costs little
    positions[next_offset] = (segment, position)


def _first_record_since(segment: Segment, timestamp_ms: int, from_offset: int) -> tuple[int, int] | None:
    """(offset, timestamp) of a segment's first record from `from_offset` on that is new enough."""
    for at in segment.find_time(timestamp_ms, from_offset):
        for record in read_records(segment.file.read(at.position, at.header.size)):
            if record.timestamp_ms >= timestamp_ms and record.offset >= from_offset:
                return record.offset, record.timestamp_ms
    return None


def _newest_from(segment: Segment, from_offset: int) -> int:
    """The timestamp of a segment's newest record from `from_offset` on. Reads the records of the batch that
    holds the offset, and the headers of those behind it."""
    newest = NO_TIMESTAMP
    first = segment.find(from_offset)
    for at in () if first is None else segment.headers(first.position):
        if at.header.base_offset >= from_offset:
            newest = max(newest, newest_timestamp(at.header))
            continue
        records = read_records(segment.file.read(at.position, at.header.size))
        newest = max([newest, *(each.timestamp_ms for each in records if each.offset >= from_offset)])
    return newest
