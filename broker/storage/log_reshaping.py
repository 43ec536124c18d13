"""Changes to a log's segments: a new one begins, retention and DeleteRecords take the oldest, a truncation
takes the newest, compaction puts one in the place of several.

A part of `Log` in a module of its own; it works on the log's private state. What removes or replaces segments
holds the shape lock. Locks are taken in this order: `_flush_lock` (a truncation), `_shape_lock`, `_lock`.
Called by the log alone.

A truncation gives offsets anew, so it begins on the disk: the checkpoints are lowered first
(`Log.before_truncation`), then files are cut, then the state that went with them follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from millrace.broker.errors import KafkaStorageError, MillraceError
from millrace.broker.storage import producer_snapshot, retention, segment_swap
from millrace.broker.storage.checkpoints import HOLES_MARKER, sync_directory
from millrace.broker.storage.offset_holes import Hole
from millrace.broker.storage.producer_recovery import load_producers
from millrace.broker.storage.producer_state import ProducerState
from millrace.broker.storage.segment import Segment
from millrace.broker.storage.segment_list import remove_files
from millrace.broker.storage.transaction_index import AbortedTransaction

if TYPE_CHECKING:
    from millrace.broker.storage.log import Log


class CompactionAbandoned(MillraceError):
    """The segments that were being compacted are no longer the log's; nothing was changed."""


class BeforeCompaction(NamedTuple):
    """A log as a compaction of it finds it: its segments, the active one last, every aborted transaction,
    and how many truncations had been."""

    segments: tuple[Segment, ...]
    aborted: list[AbortedTransaction]
    truncation_count: int


def before_compaction(log: Log) -> BeforeCompaction:
    """As `Log.before_compaction`."""
    with log._shape_lock:
        segments = log._segments.all
        aborted = [transaction for segment in segments for transaction in segment.aborted.entries()]
        return BeforeCompaction(segments, aborted, log.truncation_count)


def replace_segments(log: Log, old: Sequence[Segment], compacted: Segment, truncation_count: int) -> None:
    """As `Log.replace_segments`."""
    with log._shape_lock:
        try:
            # The segments may be the log's again, written anew after they were cut.
            is_outdated = truncation_count != log.truncation_count
            if is_outdated or log.failure is not None or not log._segments.holds_run(old):
                raise CompactionAbandoned(f"{log.directory}: its segments have changed meanwhile")
            log._is_as_opened = False
            ends, reaches = compacted.next_offset, old[-1].next_offset
            # Others' compaction may have left empty segments; ours keeps the last batch that it finds.
            _write_holes(log, *([(ends, reaches)] if ends < reaches else ()))
            compacted.next_offset = reaches
            segment_swap.commit(compacted)
        except OSError as error:
            segment_swap.abandon(compacted)
            raise log.health.refused("compacted segments were not written", error) from error
        except MillraceError:
            segment_swap.abandon(compacted)
            raise
        try:
            with log._lock:
                log._segments.replace(old, compacted)
            segment_swap.remove_replaced(old)
            with log._lock:
                segment_swap.finish(compacted)
            sync_directory(log.directory)
            bases = {segment.base_offset for segment in log._segments.all}
            producer_snapshot.remove_between(log.directory, compacted.next_offset, bases)
        except OSError as error:
            log.health.fail(f"{log.directory} is offline, a compaction ended halfway: {error}", error)
            raise KafkaStorageError(log.failure or "") from error


def note_holes(log: Log) -> None:
    """Leaves word for recovery that offsets need not be dense, where that is not known. Raises
    KafkaStorageError."""
    if not log.holes.is_marked:
        _write_holes(log)


def _write_holes(log: Log, *between: Hole) -> None:
    try:
        log.holes.note(*between)
    except OSError as error:
        raise log.health.refused(f"{HOLES_MARKER} was not written", error) from error


def roll(log: Log, now_ms: int) -> None:
    """Closes the active segment and begins one at the end offset; the caller holds `_lock`. Raises OSError,
    nothing changed then."""
    log._is_as_opened = False
    segment = Segment(log.directory, log.end_offset, now_ms=now_ms, create=True)
    active = log._segments.active
    active.has_unsynced_indexes = True
    try:
        active.close_indexes()
        producer_snapshot.write(log.directory, log.producers)
    except OSError as error:
        # Both can be made anew from the log: what is missing costs time at the next start, no data.
        log.health.passed_over(f"{active.path.name} is closed without all of its indexes", error)
    active.next_offset = log.end_offset
    log._segments.begin(segment)
    log._snapshot_size = 0
    log._has_new_files = True


def delete_old_segments(log: Log, now_ms: int, high_watermark: int | None) -> list[Path]:
    """As `Log.delete_old_segments`."""
    try:
        with log._shape_lock:
            log.health.check()
            with log._lock:
                removed, files = _detach(log, now_ms, high_watermark)
            for path in files:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise log.health.refused("old segments stay", error) from error
    return removed


def _detach(log: Log, now_ms: int, high_watermark: int | None) -> tuple[list[Path], list[Path]]:
    segments = log._segments
    count = retention.droppable_count(
        segments.facts(log.end_offset),
        log.config,
        now_ms=now_ms,
        start_offset=log.start_offset,
        high_watermark=log.end_offset if high_watermark is None else high_watermark,
    )
    if count == 0:
        return [], []
    log._is_as_opened = False
    if count == len(segments.all):
        roll(log, now_ms)
    # Before they are gone: readers take no lock, and go by the start whether an offset is still there.
    log.start_offset = max(log.start_offset, segments.all[count].base_offset)
    dropped = segments.drop_first(count)
    # The start never lies below what is gone, not even after a crash in the middle of this.
    files: list[Path] = []
    for segment in dropped:
        files += segment.mark_deleted()
    log._reader.forget_positions()
    try:
        log.leader_epochs.truncate_from_start(log.start_offset)
        producer_snapshot.remove(log.directory, below=segments.all[0].base_offset)
    except OSError as error:
        # Old entries do no harm, and on a full disk the segments must go all the same.
        log.health.passed_over("what belongs to removed segments stays for now", error)
    return [segment.path for segment in dropped], files


def shorten(log: Log, offset: int, now_ms: int, *, anew: bool) -> None:
    """As `Log.truncate_to`, or with `anew` as `Log.start_anew`."""
    with log._flush_lock, log._shape_lock:
        log.health.check()
        try:
            # First of all: a crash after this and new writes must not find them taken for flushed, nor for
            # deleted. The flush lock keeps the recovery point where it is meanwhile; what writes checkpoints
            # beside this finds in the log what they are lowered to.
            start_offset = log.start_offset
            kept_offset = min(offset, start_offset) if anew else _surely_kept(log, offset)
            log.recovery_point = min(log.recovery_point, kept_offset)
            log.cleaned_offset = min(log.cleaned_offset, kept_offset)
            log.truncation_count += 1
            log._is_as_opened = False
            if offset < start_offset:
                log.start_offset = offset  # where it begins anew
            try:
                if log.before_truncation is not None:
                    log.before_truncation(kept_offset, log.start_offset)
                log.holes.cut(0 if anew else offset)  # now that nothing beyond is called flushed
            except OSError as error:
                log.start_offset = max(log.start_offset, start_offset)
                raise log.health.refused("checkpoints were not lowered, nothing is cut", error) from error
            with log._lock:
                if anew or offset <= log.start_offset:
                    _start_anew(log, offset, now_ms)
                else:
                    _cut(log, offset, now_ms)
        except OSError as error:
            log.health.fail(f"{log.directory} is offline, a truncation failed: {error}", error)
            raise KafkaStorageError(log.failure or "") from error


def _surely_kept(log: Log, offset: int) -> int:
    """Up to where a log that is cut at `offset` reaches at least: a batch that `offset` lies in goes as a
    whole, and behind a hole, or in one, the log may end with the batch before it."""
    segment = log._segments.all[log._segments.number_of(offset)]
    before = log._segments.find(segment, offset - 1)
    is_end = before is not None and before.header.next_offset == offset
    return offset if is_end else min(offset, segment.base_offset)


def _cut(log: Log, offset: int, now_ms: int) -> None:
    segments = log._segments
    count = segments.number_of(offset) + 1
    kept, dropped = segments.all[:count], segments.all[count:]
    active = kept[-1]
    at = segments.find(active, offset)
    if at is not None and at.header.base_offset < log.start_offset:
        # The batch that is cut holds the log's start; offsets below it must not be given again.
        _start_anew(log, log.start_offset, now_ms)
        return
    segments.put(kept)
    remove_files(dropped)
    if at is not None:
        active.truncate(at.position, log.config.index_interval_bytes)
    else:
        active.next_offset = min(active.next_offset, offset)  # a hole reaches beyond it
    if active.next_offset < log.start_offset:
        _write_holes(log, (active.next_offset, log.start_offset))
        active.next_offset = log.start_offset
    log.end_offset = active.next_offset
    log._reader.forget_positions()
    log.recovery_point = min(log.recovery_point, log.end_offset)
    log._snapshot_size = 0
    log._keep_epochs(lambda: log.leader_epochs.truncate_from_end(log.end_offset))
    log.producers = load_producers(
        log.directory,
        kept,
        start_offset=log.start_offset,
        end_offset=log.end_offset,
        now_ms=now_ms,
        notes=log.notes,
    )
    segments.put(kept)
    if at is None and active.size:
        # No batch reaches up to here: the next start is to see by the files where the log ends.
        roll(log, now_ms)
    sync_directory(log.directory)


def _start_anew(log: Log, offset: int, now_ms: int) -> None:
    segments = log._segments
    dropped = segments.all
    if any(segment.base_offset == offset for segment in dropped):
        remove_files(dropped)
        dropped = ()
    segments.put((Segment(log.directory, offset, now_ms=now_ms, create=True),))
    log._reader.forget_positions()
    remove_files(dropped)
    log.start_offset = log.end_offset = log.recovery_point = log.cleaned_offset = offset
    log._keep_epochs(log.leader_epochs.clear)
    producer_snapshot.remove(log.directory, above=-1)
    log.producers = ProducerState(end_offset=offset)
    log._snapshot_size = 0
    sync_directory(log.directory)
    log._has_new_files = True
