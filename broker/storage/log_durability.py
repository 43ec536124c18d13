"""What of a log is on the disk: flushes, the anchoring of a new directory, the clean close.

A part of `Log` in a module of its own; it works on the log's private state and is called by the log alone.
A flush may run on any thread beside appends: it notes under `_lock` where the log ends, syncs without it,
and moves the recovery point under it again. What takes long, the batches, it syncs through open files: the
log may be deleted meanwhile. What it reaches by name comes after that, under `_name_lock`. Locks are taken in
this order: `_flush_lock`, `_shape_lock` (a close), `_name_lock`, `_lock`.

Invariants: the recovery point moves only after everything below it has been synced (batches, indexes of
closed segments, leader epochs, the directory where files are new); after a failed sync nothing is promised
any more, the log takes no appends, and the next start is told (`LogHealth.on_failed_sync`); a flush that
could not open or write a file has promised nothing, and is tried again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from millrace.broker.errors import KafkaStorageError
from millrace.broker.storage import producer_snapshot
from millrace.broker.storage.checkpoints import sync_directory, write_topic_id
from millrace.broker.storage.disk_errors import SyncFailed, is_beyond_trust, is_no_room

if TYPE_CHECKING:
    from millrace.broker.storage.log import Log

NEVER_MS = 2**63 - 1
"""`flush.ms` where the system alone decides when a log is flushed."""

_SNAPSHOT_INTERVAL_SIZE = 4 << 20
"""Bytes of log after which a flush writes the producers too, so that a recovery need not read far back."""


def is_due(log: Log, now_ms: int) -> bool:
    """As `Log.needs_flush`."""
    if log.end_offset <= log.recovery_point:
        return False
    return (
        log._segments.active.base_offset > log.recovery_point
        or log.end_offset - log.recovery_point >= log.config.flush_messages
        or _has_waited(now_ms - log._last_flush_ms, log.config.flush_ms)
    )


def _has_waited(since_ms: int, flush_ms: int) -> bool:
    """A clock that was set back makes it due, too, where there is a time at all: it would wait as long."""
    return flush_ms < NEVER_MS and not 0 <= since_ms < flush_ms


def flush(log: Log, now_ms: int) -> None:
    """As `Log.flush`."""
    with log._flush_lock:
        log.health.check()
        try:
            _flush(log, now_ms)
        except OSError as error:
            if log.failure is not None and not is_beyond_trust(error):
                # It is offline by another's hand already.
                raise KafkaStorageError(log.failure) from error
            if not _is_failed_sync(error):
                log._has_new_files = True  # the directory may not have been synced
                raise log.health.refused("not all could be synced", error) from error
            log.health.sync_failed()
            reason = f"{log.directory} is offline, a flush failed: {error}"
            # A full disk may take back what it had promised to this file; others may still be sound.
            log.health.fail(reason, error, folder=not is_no_room(error))
            raise KafkaStorageError(reason) from error


def _is_failed_sync(error: OSError) -> bool:
    """Whether what was to be synced may be lost. Where a file could not even be opened, or there was no room
    to write one, all is as before, and the next flush tries again."""
    return isinstance(error, SyncFailed) or is_beyond_trust(error)


def confirm(log: Log, now_ms: int) -> None:
    """For a log just opened, whose recovered batches have been written again, and their aborted transactions
    with them: a sync that says the truth. Raises KafkaStorageError, OSError."""
    log.leader_epochs.write_again()
    flush(log, now_ms)


def _flush(log: Log, now_ms: int) -> None:
    with log._lock:
        log.health.check()
        end_offset = log.end_offset
        active = log._segments.active
        dirty = [s for s in log._segments.all if s.next_offset > log.recovery_point]
        # One that was flushed while it was active, and rolled since, has its last entries in the cache alone;
        # so has one whose aborted transactions were made anew from batches that had been flushed.
        closed = log._segments.all[:-1]
        rewritten = [s for s in closed if s.has_unsynced_sides and s not in dirty]
        try:
            for segment in (*dirty, *rewritten):
                segment.write_index_tails()
            log.leader_epochs.write_behind()
        except OSError as error:
            # A full disk. Nothing was synced, the entries are in memory: the next flush tries again.
            raise log.health.refused("an index or the leader epochs were not written", error) from error
        has_new_files, log._has_new_files = log._has_new_files, False
        snapshot: bytes | None = None
        if active.size - log._snapshot_size >= _SNAPSHOT_INTERVAL_SIZE:
            log._snapshot_size = active.size
            snapshot = producer_snapshot.encode(log.producers)
    for segment in dirty:
        segment.file.sync()
    with log._name_lock:
        log.health.check()
        for segment in (*dirty, *rewritten):
            # The active segment's indexes are checked after a crash in any case.
            segment.sync_sides(with_indexes=segment is not active)
        log.leader_epochs.sync()
        if has_new_files:
            sync_directory(log.directory)
        _anchor(log)
        if snapshot is not None:
            _write_snapshot(log, end_offset, snapshot)
    with log._lock:
        log.health.check()  # offline by another's hand, meanwhile: nothing is promised
        # A truncation may have passed by meanwhile.
        log.recovery_point = max(log.recovery_point, min(end_offset, log.end_offset))
        log._last_flush_ms = now_ms


def _write_snapshot(log: Log, end_offset: int, content: bytes) -> None:
    """Producers as of a flush; the one of an earlier flush goes, those of segments stay."""
    try:
        producer_snapshot.write_content(log.directory, end_offset, content)
        bases = {segment.base_offset for segment in log._segments.all}
        producer_snapshot.remove_between(log.directory, end_offset, bases)
    except OSError as error:
        log.health.passed_over("producers were not written", error)


def rest(log: Log, now_ms: int) -> None:
    """As `Log.rest`."""
    idle = [s for s in log._segments.all if not s.file.was_used() and s.file.is_open]
    if not idle or log.failure is not None:
        return
    if any(segment.next_offset > log.recovery_point for segment in idle):
        # Of a file that is closed before it is synced nobody hears what went wrong in writing it back.
        flush(log, now_ms)
    with log._lock:  # nobody writes
        for segment in idle:
            segment.file.rest()
        log.is_at_rest = not log._segments.active.file.is_open


def anchor(log: Log) -> None:
    """As `Log.anchor`."""
    if log.is_anchored:
        return
    with log._flush_lock, log._name_lock:
        log.health.check()
        try:
            _anchor(log)
        except OSError as error:
            raise log.health.refused("the partition's folder is not durable yet", error) from error


def _anchor(log: Log) -> None:
    if not log.is_anchored:
        if log.topic_id is not None:
            # Written once more: of a file whose sync failed once, nobody knows what is on the disk.
            write_topic_id(log.directory, log.topic_id)
        sync_directory(log.directory)
        sync_directory(log.directory.parent)
        log.is_anchored = True


def close(log: Log, now_ms: int) -> None:
    """As `Log.close`."""
    log.health.check()
    if log._is_as_opened:
        log.health.end(f"{log.directory} is closed")
        return
    try:
        with log._flush_lock, log._shape_lock:
            with log._lock:
                log.health.check()
                log._segments.active.close_indexes()
                producer_snapshot.write(log.directory, log.producers)
            _flush(log, now_ms)
            log._segments.active.sync(with_indexes=True)
            sync_directory(log.directory)
    except OSError as error:
        if _is_failed_sync(error):
            log.health.sync_failed()
        reason = f"{log.directory} was not closed cleanly: {error}"
        log.health.end(reason)
        raise KafkaStorageError(reason) from error
    log.health.end(f"{log.directory} is closed")
