"""Opening the segments of a partition: after a clean close, and after a crash.

After a clean close the files are taken as they are; only indexes are compared with their logs, and rebuilt
when they differ. After a crash everything from the recovery point on (what was not yet flushed) is read
and every batch checked: CRC, lengths, and offsets that follow each other. The longest prefix of good batches
stays, the rest is cut off; indexes are rebuilt on the way.

Below the recovery point a bad batch cannot be a torn write: the disk or someone else has changed data that
was safe. Nothing is cut then; the partition stays closed with a reason, and a person decides.

Called by `Log.open`. Every failure is a KafkaStorageError whose text is one line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from millrace.broker.errors import CorruptMessage, KafkaStorageError
from millrace.broker.protocol.batch import HEADER_SIZE, BatchHeader, parse_header, verify_crc
from millrace.broker.storage import producer_snapshot
from millrace.broker.storage.leader_epochs import LeaderEpochCache
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.producer_state import ProducerState
from millrace.broker.storage.segment import (
    DELETED_SUFFIX,
    INDEX_SUFFIX,
    LOG_SUFFIX,
    TIME_INDEX_SUFFIX,
    Segment,
)

_WINDOW_SIZE = 1 << 20
_LEFTOVER_SUFFIXES = (DELETED_SUFFIX, ".cleaned", ".tmp")


@dataclass
class OpenedSegments:
    """What was found. `notes` are lines for the operator's log: what was rebuilt and what was cut."""

    segments: list[Segment]
    end_offset: int
    notes: list[str] = field(default_factory=list)
    epochs: list[tuple[int, int]] = field(default_factory=list)  # of the batches that were read
    cut_size: int = 0


class _BadBatch(Exception):
    """Where the good prefix of a segment ends, and why."""

    def __init__(self, position: int, reason: str):
        super().__init__(reason)
        self.position = position


def open_segments(
    directory: Path, config: LogConfig, *, recovery_point: int | None, start_offset: int, now_ms: int
) -> OpenedSegments:
    """Opens every segment of a partition, oldest first; at least one is there afterwards.

    `recovery_point` is the offset below which all was flushed; None after a clean close.
    """
    bases = _sweep(directory)
    if not bases:
        segment = Segment(directory, start_offset, now_ms=now_ms, create=True)
        return OpenedSegments([segment], start_offset)
    opened = OpenedSegments([], bases[0])
    for number, base in enumerate(bases):
        following = bases[number + 1] if number + 1 < len(bases) else None
        segment = Segment(directory, base, now_ms=now_ms)
        opened.segments.append(segment)
        if recovery_point is None or (following is not None and following <= recovery_point):
            _take_as_it_is(segment, config, opened, following)
            continue
        is_whole = _recover(segment, config, opened, recovery_point)
        if following is not None and (not is_whole or segment.next_offset != following):
            _drop_rest(directory, bases[number + 1 :], segment, opened, recovery_point)
            break
    opened.end_offset = opened.segments[-1].next_offset
    if recovery_point is not None and opened.end_offset < start_offset:
        _start_anew(directory, opened, start_offset, now_ms)
    for segment in opened.segments[:-1]:
        segment.close_indexes()  # complete, where they have just been rebuilt
    return opened


def _sweep(directory: Path) -> list[int]:
    """Removes what a crash may leave behind and returns the base offsets of the segments, ascending."""
    bases = set()
    for path in directory.iterdir():
        if path.suffix in _LEFTOVER_SUFFIXES:
            path.unlink()
        elif path.suffix == LOG_SUFFIX and path.stem.isdigit():
            bases.add(int(path.stem))
    for suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX):
        for path in directory.glob(f"*{suffix}"):
            if path.stem.isdigit() and int(path.stem) not in bases:
                path.unlink()
    return sorted(bases)


def _take_as_it_is(
    segment: Segment, config: LogConfig, opened: OpenedSegments, following: int | None
) -> None:
    """Opens a segment whose log is trusted; indexes are checked, and rebuilt when they are wrong."""
    problem = segment.offset_index.problem(segment.size) or segment.time_index.problem(segment.size)
    try:
        if problem is None:
            try:
                segment.resume()
            except CorruptMessage as error:
                problem = str(error)
        if problem is not None:
            segment.rebuild_indexes(config.index_interval_bytes)
            opened.notes.append(f"{segment.path.with_suffix('.index')}: rebuilt, {problem}")
    except CorruptMessage as error:
        raise _damaged(segment, str(error)) from None
    if following is not None:
        if segment.next_offset > following:
            raise _damaged(
                segment, f"it reaches offset {segment.next_offset}, the next begins at {following}"
            )
        segment.next_offset = following


def _recover(segment: Segment, config: LogConfig, opened: OpenedSegments, recovery_point: int) -> bool:
    """Reads all of a segment, rebuilds its indexes and cuts it at its first bad batch; whether it was
    whole."""
    segment.reset_indexes()
    position = 0
    try:
        for position, header in _checked_batches(segment, dense=not config.is_compacted):
            segment.note(
                header.max_timestamp,
                header.last_offset,
                position,
                header.size,
                config.index_interval_bytes,
            )
            position += header.size
            if not opened.epochs or header.leader_epoch > opened.epochs[-1][0]:
                opened.epochs.append((header.leader_epoch, header.base_offset))
    except _BadBatch as bad:
        if segment.next_offset < recovery_point:
            raise _damaged(segment, f"byte {bad.position}: {bad}") from None
        cut_size = segment.size - bad.position
        segment.truncate(bad.position, config.index_interval_bytes)
        opened.cut_size += cut_size
        opened.notes.append(
            f"{segment.path}: {cut_size} bytes after offset {segment.next_offset} were not whole "
            f"and have been cut ({bad})"
        )
        return False
    return True


def _checked_batches(segment: Segment, *, dense: bool) -> Iterator[tuple[int, BatchHeader]]:
    """Position and header of each good batch from the start. Raises _BadBatch at the first that is not.

    Offsets must follow without holes when `dense`; compaction makes holes.
    """
    expected = segment.base_offset
    position = 0
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
            _check(header, window, consumed, at, expected, dense)
            yield at, header
            expected = header.next_offset
            consumed += header.size
        position += consumed


def _check(header: BatchHeader, window: bytes, consumed: int, at: int, expected: int, dense: bool) -> None:
    try:
        verify_crc(window, consumed, header)
    except CorruptMessage as error:
        raise _BadBatch(at, str(error)) from None
    # Base offset and leader epoch lie outside the CRC.
    is_in_place = header.base_offset == expected if dense else header.base_offset >= expected
    if not is_in_place or header.last_offset_delta < 0:
        raise _BadBatch(at, f"a batch has offset {header.base_offset}, {expected} is expected")


def _drop_rest(
    directory: Path, bases: list[int], segment: Segment, opened: OpenedSegments, recovery_point: int
) -> None:
    """Removes the segments after a cut: with a hole before them they are no part of the prefix."""
    if segment.next_offset < recovery_point:
        raise _damaged(segment, f"offsets {segment.next_offset} to {bases[0]} are missing")
    for base in bases:
        for suffix in (LOG_SUFFIX, INDEX_SUFFIX, TIME_INDEX_SUFFIX):
            path = directory / f"{base:020d}{suffix}"
            if suffix == LOG_SUFFIX:
                opened.cut_size += path.stat().st_size
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


def _damaged(segment: Segment, reason: str) -> KafkaStorageError:
    return KafkaStorageError(
        f"{segment.path} is damaged where it had been flushed ({reason}); nothing was changed: "
        "restore the file, or move the partition's folder away to start it empty"
    )


def load_epochs(directory: Path, opened: OpenedSegments, notes: list[str]) -> LeaderEpochCache:
    """The leader epochs of a partition: its checkpoint, brought in line with the batches."""
    try:
        epochs = LeaderEpochCache.load(directory)
        seen = opened.epochs
    except ValueError as error:
        notes.append(f"{error}; rebuilt from the log")
        epochs = LeaderEpochCache(directory)
        seen = _epochs_of(opened.segments)
    epochs.truncate_from_end(opened.end_offset)
    for epoch, start_offset in seen:
        epochs.assign(epoch, start_offset)
    return epochs


def _epochs_of(segments: list[Segment]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for segment in segments:
        for _, header in segment.batches():
            if not found or header.leader_epoch > found[-1][0]:
                found.append((header.leader_epoch, header.base_offset))
    return found


def load_producers(
    directory: Path, segments: list[Segment], *, start_offset: int, end_offset: int, now_ms: int
) -> ProducerState:
    """The producer state at `end_offset`: the newest snapshot, and the batches after it."""
    producer_snapshot.remove(directory, above=end_offset)
    state = producer_snapshot.load_newest(
        directory, start_offset=start_offset, end_offset=end_offset, now_ms=now_ms
    )
    if state is None:
        state = ProducerState(end_offset=start_offset)
    for segment in segments:
        if segment.next_offset <= state.end_offset:
            continue
        first = segment.find(state.end_offset)
        if first is None:
            continue
        for _, header in segment.batches(first.position):
            if header.producer_id >= 0:
                state.note(header, now_ms)
    state.end_offset = end_offset
    return state
