"""Opening the segments of a partition: after a clean close, and after a crash.

After a clean close the files are taken as they are, whatever their size: only the ends of the indexes are
compared with their logs, and rebuilt when they differ (an entry in the middle is checked by whoever uses it).
After a crash indexes are read whole, everything from the recovery point on (what was not yet flushed) is read
and every batch checked: CRC, lengths, and offsets that follow each other. The longest prefix of good batches
stays, the rest is cut off; indexes are rebuilt on the way. What lies below the recovery point is not read
again, whatever its size: the index leads to the point, and headers lead from there.

Below the recovery point (after a clean close: below the end as it was written down) a bad batch cannot be a
torn write, and none can be missing: the disk or someone else has changed data that was safe. Nothing is cut
then, and no offset given again; the partition stays closed with a reason, and a person decides. Only what
lies below the checkpointed start of the log may be gone: it had been deleted.

Offsets of a log have no holes unless compaction made them, here or on the leader that it was copied from;
then the partition has a marker file (`offset_holes.py`), which is durable before the first batch behind a
hole is written, and only the order is checked, and that each segment reaches the next. A sound batch beyond
the offset that is expected ends the prefix of a log without the marker. No torn write makes one, but its base
offset lies outside its CRC, so a flipped bit would move the log's end to offsets that nobody gave; and it may
be what a truncation had cut, on a page that was not written anew in time. Such a cut costs what is not
flushed, which the others have; taking the batch in would leave a replica that differs from them and does not
know it. Above the recovery point a segment ends where the next one begins, also there: compaction keeps the
last batch of what it replaces, and a loss of power may take the end of a segment and leave the one behind it.

Called by `Log.open`. Every failure is a KafkaStorageError whose text is one line. The state of producers is
restored by `producer_recovery.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from millrace.broker.errors import CorruptMessage, KafkaStorageError
from millrace.broker.protocol.batch import HEADER_SIZE, BatchHeader, parse_header, verify_crc
from millrace.broker.storage import segment_swap
from millrace.broker.storage.checkpoints import HOLES_MARKER
from millrace.broker.storage.disk_errors import is_no_room
from millrace.broker.storage.leader_epochs import NO_EPOCH, LeaderEpochCache
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.offset_holes import OffsetHoles
from millrace.broker.storage.segment import (
    DELETED_SUFFIX,
    LOG_SUFFIX,
    SIDE_SUFFIXES,
    TRANSACTION_INDEX_SUFFIX,
    Segment,
    newest_timestamp,
)

_WINDOW_SIZE = 1 << 20
_LEFTOVER_SUFFIXES = (DELETED_SUFFIX, ".tmp")


@dataclass
class OpenedSegments:
    """What was found. `notes` are lines for the operator's log: what was rebuilt and what was cut."""

    segments: list[Segment]
    end_offset: int
    holes: OffsetHoles
    notes: list[str] = field(default_factory=list)
    epochs: list[tuple[int, int]] = field(default_factory=list)  # of the batches that were read
    has_holes: bool = False
    met_hole: bool = False  # within a segment that was read
    is_as_left: bool = False


class _BadBatch(Exception):
    """Where the good prefix of a segment ends, and why."""

    def __init__(self, position: int, reason: str):
        super().__init__(reason)
        self.position = position


def open_segments(
    directory: Path,
    config: LogConfig,
    *,
    recovery_point: int | None,
    start_offset: int,
    now_ms: int,
    may_have_holes: bool = False,
    closed_offset: int = 0,
    closed_start: int | None = None,
    is_as_left: bool = False,
    write_again: bool = False,
) -> OpenedSegments:
    """Opens every segment of a partition, oldest first; at least one is there afterwards.

    `recovery_point` is the offset below which all was flushed; None after a clean close, when
    `closed_offset` is where the log ended, 0 where that is not known, and `closed_start` where it began, None
    where that is not known: Apache Kafka writes no start that is a segment's, and after a crash segments may
    have been deleted since it was written. `may_have_holes`: the log is known to
    have been compacted before, or it is not known whether its topic is compacted. `is_as_left`: no other
    program has used the folder since this one did. `write_again`: what is read beyond the recovery point need
    not be on the disk although the system says so, and is written once more.
    """
    flushed_offset = closed_offset if recovery_point is None else recovery_point
    names = os.listdir(directory)
    notes = segment_swap.resume(directory, names)
    if notes:
        names = os.listdir(directory)
    holes = OffsetHoles.load(directory, names, notes)
    has_holes = may_have_holes or config.is_compacted or holes.is_marked
    bases = _sweep(directory, names)
    known = set(names)
    if not bases:
        _check_end(directory / "*.log", start_offset, start_offset, flushed_offset)
        segment = Segment(directory, start_offset, now_ms=now_ms, create=True)
        return OpenedSegments([segment], start_offset, holes, notes)
    if closed_start is not None and bases[0] > closed_start:
        raise _damaged(
            directory / "*.log", f"offsets {closed_start} to {bases[0]} are missing at the beginning"
        )
    opened = OpenedSegments([], bases[0], holes, notes, has_holes=has_holes, is_as_left=is_as_left)
    for number, base in enumerate(bases):
        following = bases[number + 1] if number + 1 < len(bases) else None
        has_aborts = f"{base:020d}{TRANSACTION_INDEX_SUFFIX}" in known
        segment = Segment(directory, base, now_ms=now_ms, has_aborts=has_aborts)
        opened.segments.append(segment)
        if recovery_point is None or (following is not None and following <= recovery_point):
            _take_as_it_is(segment, config, opened, following, recovery_point)
            continue
        is_whole = _recover(segment, config, opened, recovery_point, write_again=write_again)
        if following is None:
            continue
        # Compaction leaves no hole there: it keeps the last batch of what it replaces.
        if not is_whole or segment.next_offset != following:
            _drop_rest(directory, bases[number + 1 :], segment, opened, recovery_point)
            break
    if opened.met_hole and not holes.is_marked:
        _mark(directory, opened)
    opened.end_offset = opened.segments[-1].next_offset
    _check_end(opened.segments[-1].path, opened.end_offset, start_offset, flushed_offset)
    if recovery_point is not None and opened.end_offset < start_offset:
        _start_anew(directory, opened, start_offset, now_ms)
    for segment in opened.segments[:-1]:
        segment.close_indexes()  # complete, where they have just been rebuilt
    return opened


def _sweep(directory: Path, names: list[str]) -> list[int]:
    """Removes what a crash may leave behind and returns the base offsets of the segments, ascending."""
    bases = set()
    sides = []
    for name in names:
        stem, suffix = os.path.splitext(name)
        if suffix in _LEFTOVER_SUFFIXES:
            (directory / name).unlink(missing_ok=True)
        elif stem.isdigit():
            if suffix == LOG_SUFFIX:
                bases.add(int(stem))
            elif suffix in SIDE_SUFFIXES:
                sides.append((int(stem), name))
    for base, name in sides:
        if base not in bases:
            (directory / name).unlink(missing_ok=True)
    return sorted(bases)


def _mark(directory: Path, opened: OpenedSegments) -> None:
    """Puts on record that there are holes: why one was let stand may not be known at the next start, which
    would cut the log there."""
    try:
        opened.holes.note()
    except OSError as error:
        opened.notes.append(f"{directory}: that its offsets have holes is not on record yet ({error})")


def _take_as_it_is(
    segment: Segment,
    config: LogConfig,
    opened: OpenedSegments,
    following: int | None,
    recovery_point: int | None,
) -> None:
    """Opens a segment whose log is trusted; indexes are checked, and rebuilt when they are wrong."""
    problem = None
    for index in segment.offset_index, segment.time_index:
        if problem is None and (found := index.problem(segment.size, every_entry=recovery_point is not None)):
            problem = f"{index.file.path.name}: {found}"
    # Its last entries are written when it is rolled, and synced with what comes next. No news to anybody.
    may_lack_entries = recovery_point is not None and following == recovery_point
    try:
        if problem is None and not may_lack_entries:
            try:
                segment.resume()
            except CorruptMessage as error:
                problem = str(error)
        if problem is not None or may_lack_entries:
            segment.rebuild_indexes(config.index_interval_bytes)
        if problem is not None:
            opened.notes.append(f"{segment.path}: its indexes were rebuilt ({problem})")
    except CorruptMessage as error:
        raise _damaged(segment.path, str(error)) from None
    if following is not None:
        if segment.next_offset > following:
            raise _damaged(
                segment.path, f"it reaches offset {segment.next_offset}, the next begins at {following}"
            )
        if segment.next_offset < following and not (
            opened.has_holes
            and opened.holes.found((segment.next_offset, following), is_as_left=opened.is_as_left)
        ):
            raise _damaged(
                segment.path,
                f"offsets {segment.next_offset} to {following} are missing; where a compaction took them, "
                f"an empty file {HOLES_MARKER} beside it says so",
            )
        segment.next_offset = following


def _recover(
    segment: Segment, config: LogConfig, opened: OpenedSegments, recovery_point: int, *, write_again: bool
) -> bool:
    """Reads a segment from the recovery point on, rebuilds its indexes from there and cuts it at its first
    bad batch; whether it was whole."""
    interval_size = config.index_interval_bytes
    try:
        start = _skip_flushed(segment, recovery_point, interval_size, opened)
        checked = _checked_batches(segment, start, dense=not opened.has_holes, write_again=write_again)
        for position, header in checked:
            opened.met_hole |= header.base_offset != segment.next_offset
            _note(segment, header, position, interval_size, opened)
    except _BadBatch as bad:
        if segment.next_offset < recovery_point:
            raise _damaged(segment.path, f"byte {bad.position}: {bad}") from None
        cut_size = segment.size - bad.position
        segment.truncate(bad.position, interval_size)
        opened.notes.append(
            f"{segment.path}: {cut_size} bytes after offset {segment.next_offset} were not whole "
            f"and have been cut ({bad})"
        )
        return False
    return True


def _note(
    segment: Segment, header: BatchHeader, position: int, interval_size: int, opened: OpenedSegments
) -> None:
    segment.note(newest_timestamp(header), header.last_offset, position, header.size, interval_size)
    if not opened.epochs or header.leader_epoch > opened.epochs[-1][0]:
        opened.epochs.append((header.leader_epoch, header.base_offset))


def _skip_flushed(segment: Segment, recovery_point: int, interval_size: int, opened: OpenedSegments) -> int:
    """The position of the first batch that is not below the recovery point, found without reading records.

    Index entries below it stay, those beyond are dropped. Raises _BadBatch.
    """
    position = 0
    expected = segment.base_offset
    if recovery_point <= expected or not segment.resume_below(recovery_point):
        segment.reset_indexes()
    else:
        expected = segment.next_offset
        position = segment.indexed_size
    try:
        for at, header in segment.headers(position):
            if header.base_offset < expected:
                raise _BadBatch(
                    at, f"a batch has offset {header.base_offset}, at least {expected} is expected"
                )
            if header.base_offset >= recovery_point:
                return at
            _note(segment, header, at, interval_size, opened)
            expected = header.next_offset
            position = at + header.size
    except CorruptMessage as error:
        if segment.next_offset < recovery_point:
            raise _BadBatch(position, str(error)) from None
    return position


def _checked_batches(
    segment: Segment, position: int, *, dense: bool, write_again: bool
) -> Iterator[tuple[int, BatchHeader]]:
    """Position and header of each good batch from `position` on. Raises _BadBatch at the first that is not.

    Offsets must follow without holes when `dense`; compaction makes holes. With `write_again` the very bytes
    that were checked are written: read another time, they may come from the disk, and be others.
    """
    expected = segment.next_offset
    while position < segment.size:
        window = segment.file.read(position, min(_WINDOW_SIZE, segment.size - position))
        consumed = 0
        while consumed < len(window):
            at = position + consumed
            try:
                header = parse_header(window, consumed)
            except CorruptMessage as error:
                if at + HEADER_SIZE <= segment.size and len(window) - consumed < HEADER_SIZE:
                    break  # the header goes on in the next window
                raise _BadBatch(at, str(error)) from None
            if header.size > segment.size - at:
                raise _BadBatch(at, f"a batch of {header.size} bytes is cut")
            if consumed + header.size > len(window):
                if consumed:
                    break
                window = segment.file.read(position, header.size)
            _check(segment, header, window, consumed, at, expected, dense)
            yield at, header
            if write_again:
                segment.file.write(window[consumed : consumed + header.size], at)
            expected = header.next_offset
            consumed += header.size
        position += consumed


def _check(
    segment: Segment,
    header: BatchHeader,
    window: bytes,
    consumed: int,
    at: int,
    expected: int,
    dense: bool,
) -> None:
    try:
        verify_crc(window, consumed, header)
    except CorruptMessage as error:
        raise _BadBatch(at, str(error)) from None
    # Base offset and leader epoch lie outside the CRC.
    is_in_place = header.base_offset == expected if dense else header.base_offset >= expected
    if not is_in_place or header.last_offset_delta < 0 or not segment.can_hold(header.last_offset):
        raise _BadBatch(at, f"a batch has offset {header.base_offset}, {expected} is expected")


def _drop_rest(
    directory: Path, bases: list[int], segment: Segment, opened: OpenedSegments, recovery_point: int
) -> None:
    """Removes the segments after a cut: with a hole before them they are no part of the prefix."""
    if segment.next_offset < recovery_point:
        raise _damaged(segment.path, f"offsets {segment.next_offset} to {bases[0]} are missing")
    for base in bases:
        for suffix in (LOG_SUFFIX, *SIDE_SUFFIXES):
            path = directory / f"{base:020d}{suffix}"
            path.unlink(missing_ok=True)
    opened.notes.append(
        f"{directory}: {len(bases)} segments from offset {bases[0]} on removed, "
        f"because the one before them ends at {segment.next_offset}"
    )


def _start_anew(directory: Path, opened: OpenedSegments, start_offset: int, now_ms: int) -> None:
    """Begins an empty log at the checkpointed start: all that is left had been deleted, and offsets that
    were given once must not be given again."""
    for segment in reversed(opened.segments):
        for path in segment.mark_deleted():
            path.unlink()
    opened.notes.append(
        f"{directory}: begins anew at offset {start_offset}, what was left ended at {opened.end_offset}"
    )
    opened.segments[:] = [Segment(directory, start_offset, now_ms=now_ms, create=True)]
    opened.end_offset = start_offset


def _check_end(path: Path, end_offset: int, start_offset: int, flushed_offset: int) -> None:
    """Raises KafkaStorageError where flushed batches are missing at the end, none of them deleted."""
    first_missing = max(end_offset, start_offset)
    if first_missing < flushed_offset:
        raise _damaged(path, f"offsets {first_missing} to {flushed_offset} are missing at the end")


def _damaged(path: Path, reason: str) -> KafkaStorageError:
    return KafkaStorageError(
        f"{path} is damaged where it had been flushed ({reason}); nothing was changed: "
        "restore the file, or move the partition's folder away to start it empty"
    )


def load_epochs(
    directory: Path, opened: OpenedSegments, start_offset: int, notes: list[str]
) -> LeaderEpochCache:
    """The leader epochs of a partition: its checkpoint, brought in line with the batches. A log of which
    everything lies below `start_offset` is deleted, and has none on record."""
    try:
        epochs = LeaderEpochCache.load(directory)
        seen = opened.epochs
        if not epochs.entries and opened.end_offset > start_offset:  # missing or empty
            seen = _epochs_of(opened.segments)
            if seen:
                notes.append(f"{directory}: no leader epochs were on record; rebuilt from the log")
    except ValueError as error:
        notes.append(f"{error}; rebuilt from the log")
        epochs = LeaderEpochCache(directory)
        seen = _epochs_of(opened.segments)
    changes = [lambda: epochs.truncate_from_end(opened.end_offset)]
    changes += [partial(epochs.assign, epoch, start_offset) for epoch, start_offset in seen]
    for change in changes:
        try:
            change()
        except OSError as error:
            if not is_no_room(error):
                raise
            notes.append(f"{directory}: leader epochs wait for room to be written: {error}")
    return epochs


def _epochs_of(segments: list[Segment]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for segment in segments:
        for _, header in segment.batches():
            if header.leader_epoch > (found[-1][0] if found else NO_EPOCH):
                found.append((header.leader_epoch, header.base_offset))
    return found
