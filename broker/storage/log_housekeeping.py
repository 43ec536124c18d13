"""What is done with every log now and then: what is due is rolled, flushed, retired and forgotten, idle files
are closed, deleted directories go, and the checkpoints are written.

A part of `LogManager` in a module of its own; it works on the manager's private state and is called by the
manager alone, on a thread that may wait for the disk. Nothing here raises: a log that fails goes offline
alone, what else fails is noted and tried again the next time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from millrace.broker.errors import KafkaStorageError
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.storage.log import Log

if TYPE_CHECKING:
    from millrace.broker.storage.log_manager import LogManager


def keep(
    manager: LogManager, now_ms: int, high_watermark: Callable[[TopicPartition], int | None] | None
) -> None:
    """As `LogManager.housekeeping`."""
    for tp, log in list(manager._logs.items()):
        if manager._stopping.is_set():
            return  # what closes the logs does all that lasts, on more threads
        # One by one: on a full disk rolling and flushing fail, and retention is what makes room again.
        for chore in (
            log.anchor,
            partial(log.roll_if_due, now_ms),
            partial(_flush_if_due, log, now_ms),
            partial(log.delete_old_segments, now_ms, high_watermark(tp) if high_watermark else None),
            partial(log.expire_producers, now_ms),
        ):
            try:
                chore()
            except KafkaStorageError as error:
                manager._note_failure(tp, log, str(error))
        with manager._lock:
            manager.notes += log.notes
            log.notes.clear()
    manager.notes += manager._departed.purge()
    checkpoint(manager)
    settle(manager)
    _rest(manager, now_ms)


def _flush_if_due(log: Log, now_ms: int) -> None:
    if log.needs_flush(now_ms):
        log.flush(now_ms)


def checkpoint(manager: LogManager) -> None:
    """As `LogManager.checkpoint`."""
    for log in list(manager._logs.values()):
        if not log.is_anchored and (log.start_offset > 0 or log.cleaned_offset > 0):
            try:
                log.anchor()  # there is something to be said of it
            except KafkaStorageError as error:
                manager.notes.append(str(error))
    for folder in manager._healthy():
        try:
            folder.write_checkpoints(partial(manager._logs_in, folder), manager.offline)
        except OSError as error:
            reason = f"{folder.path}: checkpoints not written: {error}"
            manager.notes.append(reason)
            manager.disk_failed(folder.path, reason, error)


def settle(manager: LogManager) -> None:
    """As `DataFolder.settle`, of every folder."""
    with manager._lock:  # nobody makes logs meanwhile
        for folder in manager._healthy():
            try:
                folder.settle(dict(manager._logs_in(folder)), manager.offline)
            except OSError as error:
                manager.notes.append(f"{folder.path}: new partitions stay announced: {error}")


def _rest(manager: LogManager, now_ms: int) -> None:
    """Last of all: it may flush one idle log after the other, and nothing waits for it."""
    for tp, log in list(manager._logs.items()):
        if manager._stopping.is_set():
            return
        try:
            log.rest(now_ms)
        except KafkaStorageError as error:
            manager._note_failure(tp, log, str(error))
