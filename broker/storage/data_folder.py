"""One data folder: its lock, its checkpoints, the mark of a clean end, and whether it can be used.

    recovery-point-offset-checkpoint   below these offsets all is flushed
    log-start-offset-checkpoint        below these offsets all is deleted
    cleaner-offset-checkpoint          below these offsets compaction has been
    checkpoints-digest                 of the checkpoints, as this program wrote them last
    new-partitions                     topic ids of partitions that need not be on the disk yet
    .kafka_cleanshutdown               written last at a clean end, removed first at a start
    failed-sync                        a sync has failed, and what it was for has not been written again
    .lock                              held while a process uses the folder
    .room                              written and removed, to see whether there is room again

Called by the log manager. Invariants: a recovery point is written after the flush that made it true, and
lowered before anything else when a truncation begins; a checkpoint is replaced as a whole or not at all.

A sync that failed is remembered for as long as the page cache is: the system takes the pages that it could
not write for written, shows them to whoever reads, and reports success to the next sync, another process's
too. So a start that finds `failed-sync` writes what it recovers beyond the recovery points once more, and
flushes it before anything is served (`Log.open`); Apache Kafka takes the page cache at its word there. The
mark need not outlive a loss of power: what is read after that is what the disk has.

A new partition waits for no disk of its own. Its topic id is announced in `new-partitions`, durably, once for
all that are made together, and only then is its directory made; that becomes durable with the log's first
flush, or in housekeeping (`Log.anchor`). So, after a loss of power:
- a directory that is there has a topic id: its own file's, or the announced one if that file is torn or
  missing. Records that survive are never taken for those of a topic that was made anew in the same name (the
  old one's directory is gone for good before the new one is announced);
- a directory that is not there had nothing flushed in it: it is made anew, as one whose unflushed tail is
  gone. No checkpoint speaks of it, because they leave out what is not anchored, so its records begin where
  the new log does.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from uuid import UUID

from millrace.broker.errors import DataFolderLocked, DataFolderNotWritable
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.storage.checkpoints import (
    CHECKPOINTS_DIGEST,
    CLEANER_CHECKPOINT,
    LOG_START_OFFSET_CHECKPOINT,
    NEW_PARTITIONS,
    RECOVERY_POINT_CHECKPOINT,
    digest,
    known_at_start,
    read_digest,
    read_new_partitions,
    read_offsets,
    replace_file,
    sync_directory,
    write_new_partitions,
    write_offsets,
)
from millrace.broker.storage.disk_room import DiskRoom, RoomChange
from millrace.broker.storage.log import Log

CLEAN_SHUTDOWN_MARKER = ".kafka_cleanshutdown"
FAILED_SYNC_MARKER = "failed-sync"
LOCK_FILE = ".lock"
PROBE_FILE = ".room"
_PROBE_SIZE = 64 << 10

Offsets = dict[TopicPartition, int]


class DataFolder:
    """See the module. Checkpoints in memory are what is on the disk."""

    def __init__(self, path: Path):
        self.path = path
        self.failure: str | None = None
        """Why nothing in it can be used; None while all is well."""
        self.room = DiskRoom(path)
        self.was_clean = False
        self.is_as_left = False
        """Whether no other program has used it since this one did: one that compacts logs, or follows their
        leaders, writes other checkpoints."""
        self.may_be_compacted = False
        """Whether any log may have been, after a crash: what was known of that is gone, and with it up to
        where a log was flushed, so a hole in it would be taken for its end."""
        self.had_failed_sync = False
        """Whether what a sync failed to make durable need not be on the disk yet."""
        self.recovery_points: Offsets = {}
        self.start_offsets: Offsets = {}
        self.cleaned_offsets: Offsets = {}
        self.new_partitions: dict[TopicPartition, UUID] = {}
        self._signed = b""
        self._lock_fd = -1
        self._lock = threading.Lock()

    @property
    def is_taken(self) -> bool:
        return self._lock_fd >= 0

    # -- use by one process

    def take(self, notes: list[str]) -> None:
        """Makes the folder where it is missing, locks it and reads its checkpoints. What is wrong with those
        goes to `notes`. Raises DataFolderNotWritable, DataFolderLocked."""
        path = self.path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock_fd = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self.had_failed_sync = (path / FAILED_SYNC_MARKER).exists()
            self.was_clean = (path / CLEAN_SHUTDOWN_MARKER).exists() and not self.had_failed_sync
            try:
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.release()
                raise DataFolderLocked(
                    f"data folder {path} is in use by another broker: stop that one, or name another folder"
                ) from None
            self.recovery_points = known_at_start(read_offsets, path / RECOVERY_POINT_CHECKPOINT, notes)
            self.start_offsets = known_at_start(read_offsets, path / LOG_START_OFFSET_CHECKPOINT, notes)
            note_count = len(notes)
            self.cleaned_offsets = known_at_start(read_offsets, path / CLEANER_CHECKPOINT, notes)
            is_forgotten = len(notes) > note_count and not self.recovery_points
            self.may_be_compacted = is_forgotten and not self.was_clean
            self._signed = read_digest(path)
            self.is_as_left = self._signed == self._digest()
            if not self.was_clean:  # all had become durable then
                self.new_partitions = known_at_start(read_new_partitions, path / NEW_PARTITIONS, notes)
        except OSError as error:
            self.release()
            raise DataFolderNotWritable(
                f"data folder {path} cannot be used ({error.strerror}): "
                "make it a folder that this user may write, or name another"
            ) from error

    def release(self) -> None:
        """Lets another process use the folder."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def forget_clean_end(self) -> None:
        """Removes the mark of a clean end, for good: one that a power loss brings back would have torn writes
        taken for damage. Raises OSError."""
        marker = self.path / CLEAN_SHUTDOWN_MARKER
        if marker.exists():
            marker.unlink()
            sync_directory(self.path)

    def mark_clean(self) -> None:
        """Says that every log was closed; not where a sync had failed. Raises OSError."""
        if self.had_failed_sync:
            return
        replace_file(self.path / CLEAN_SHUTDOWN_MARKER, b'{"version":0,"brokerEpoch":-1}', sync=True)

    # -- failed syncs

    def note_failed_sync(self) -> None:
        """From any thread; to be called before anything else is done about a sync that failed. Raises OSError
        where no mark can be left: only a machine or a mount that begins anew tells the truth then."""
        self.had_failed_sync = True
        (self.path / FAILED_SYNC_MARKER).touch()

    def forget_failed_sync(self) -> None:
        """All that is not below a recovery point has been written again and flushed. Raises OSError."""
        (self.path / FAILED_SYNC_MARKER).unlink(missing_ok=True)
        self.had_failed_sync = False

    # -- room

    def look_at_room(self, steady_ms: int) -> RoomChange | None:
        """As `DiskRoom.looked`, of what the file system says. Raises OSError."""
        stat = os.statvfs(self.path)
        return self.room.looked(stat.f_bavail * stat.f_frsize, steady_ms, self._has_room)

    def _has_room(self) -> bool:
        """By allocating, because a quota and a full disk are told apart by no figure."""
        path = self.path / PROBE_FILE
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.posix_fallocate(fd, 0, _PROBE_SIZE)
            finally:
                os.close(fd)
                path.unlink()
        except OSError:
            return False
        return True

    # -- new partitions

    def announced(self, tp: TopicPartition) -> UUID | None:
        """The topic id of a partition whose directory may not be on the disk whole; None of all others."""
        return None if self.knows(tp) else self.new_partitions.get(tp)

    def announce(self, partitions: Collection[TopicPartition], topic_id: UUID | None) -> None:
        """Says for good which topic the directories of these partitions are going to belong to. To be called
        before they are made. Raises OSError."""
        with self._lock:
            if all(self.new_partitions.get(tp) == topic_id for tp in partitions):
                return
            new = dict(self.new_partitions)
            for tp in partitions:
                if topic_id is None:
                    new.pop(tp, None)
                else:
                    new[tp] = topic_id
            write_new_partitions(self.path / NEW_PARTITIONS, new)
            self.new_partitions = new

    def settle(self, logs: Mapping[TopicPartition, Log], offline: Collection[TopicPartition]) -> None:
        """Forgets announced partitions that have become durable, are gone, or have not been made yet: those
        are announced again before they are. Nobody announces meanwhile.
        Raises OSError."""
        with self._lock:
            kept = {
                tp: topic_id
                for tp, topic_id in self.new_partitions.items()
                if tp in offline or (tp in logs and not logs[tp].is_anchored)
            }
            if kept == self.new_partitions:
                return
            if kept:
                write_new_partitions(self.path / NEW_PARTITIONS, kept)
            else:
                # Not synced: a file that comes back speaks of what has its own by now, or is gone.
                (self.path / NEW_PARTITIONS).unlink(missing_ok=True)
            self.new_partitions = kept

    # -- checkpoints

    def knows(self, tp: TopicPartition) -> bool:
        """Whether a checkpoint speaks of the partition."""
        return tp in self.recovery_points or tp in self.start_offsets or tp in self.cleaned_offsets

    def write_checkpoints(
        self,
        logs_now: Callable[[], Iterable[tuple[TopicPartition, Log]]],
        offline: Collection[TopicPartition],
    ) -> None:
        """Writes what has changed. `logs_now` gives the folder's logs, and is called when nobody else writes:
        a log that is gone by then is forgotten, one that is not anchored left out. What is known of
        partitions that are `offline` is kept.
        Raises OSError."""
        with self._lock:
            recovery = {tp: at for tp, at in self.recovery_points.items() if tp in offline}
            starts = {tp: at for tp, at in self.start_offsets.items() if tp in offline}
            cleaned = {tp: at for tp, at in self.cleaned_offsets.items() if tp in offline}
            for tp, log in logs_now():
                if not log.is_anchored:
                    continue
                recovery[tp] = log.recovery_point
                starts[tp] = log.start_offset  # 0, too: after a clean end it says that nothing was deleted
                if log.cleaned_offset > 0 or tp in self.cleaned_offsets:
                    cleaned[tp] = log.cleaned_offset
            self._store(recovery, starts, cleaned)
            if (signed := self._digest()) != self._signed:
                # Not synced: without it the next start believes less.
                replace_file(self.path / CHECKPOINTS_DIGEST, signed, sync=False)
                self._signed = signed

    def lower(self, tp: TopicPartition, offset: int, start_offset: int) -> None:
        """Sees to it that no checkpoint on the disk says that anything from `offset` on is flushed or
        compacted, nor that anything from `start_offset` on is deleted. Raises OSError."""
        with self._lock:
            self._store(
                _lowered(self.recovery_points, tp, offset),
                _lowered(self.start_offsets, tp, start_offset),
                _lowered(self.cleaned_offsets, tp, offset),
            )

    def _store(self, recovery: Offsets, starts: Offsets, cleaned: Offsets) -> None:
        if recovery != self.recovery_points:
            write_offsets(self.path / RECOVERY_POINT_CHECKPOINT, recovery)
            self.recovery_points = recovery
        if starts != self.start_offsets:
            write_offsets(self.path / LOG_START_OFFSET_CHECKPOINT, starts)
            self.start_offsets = starts
        if cleaned != self.cleaned_offsets:
            write_offsets(self.path / CLEANER_CHECKPOINT, cleaned)
            self.cleaned_offsets = cleaned

    def _digest(self) -> bytes:
        """Start offsets are not in it: they change without a hole being made."""
        return digest(self.recovery_points, self.cleaned_offsets)


def _lowered(offsets: Offsets, tp: TopicPartition, offset: int) -> Offsets:
    return {**offsets, tp: offset} if offsets.get(tp, offset) > offset else offsets
