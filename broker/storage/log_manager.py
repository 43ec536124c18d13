"""Every log of a broker, over its data folders: start, look-up, creation, removal, housekeeping, end.

A data folder holds one directory per partition and the broker's checkpoints:

    <topic>-<partition>/               a log (`log.py`)
    <topic>-<partition>.<hex>-delete/  a deleted one, removed at leisure
    recovery-point-offset-checkpoint   below these offsets all is flushed
    log-start-offset-checkpoint        below these offsets all is deleted
    .kafka_cleanshutdown               written last at a clean end, removed first at a start
    .lock                              held while a process uses the folder

Called by the broker's start-up and its housekeeping thread, the replica manager, the topic handlers.
Invariants: a partition that cannot be opened is offline alone, with its reason in `offline`, and is never
created anew over what is there; a recovery point is checkpointed after the flush that made it true, and
lowered before anything else after a truncation.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from uuid import UUID, uuid4

from millrace.broker.errors import (
    DataFolderLocked,
    DataFolderNotWritable,
    KafkaStorageError,
)
from millrace.broker.storage.checkpoints import (
    LOG_START_OFFSET_CHECKPOINT,
    RECOVERY_POINT_CHECKPOINT,
    TopicPartition,
    read_offsets,
    replace_file,
    sync_directory,
    write_offsets,
)
from millrace.broker.storage.log import Log, parse_directory_name
from millrace.broker.storage.log_config import LogConfig

CLEAN_SHUTDOWN_MARKER = ".kafka_cleanshutdown"
LOCK_FILE = ".lock"
_DELETE_SUFFIX = "-delete"
_IGNORED_SUFFIXES = ("-future", "-stray")
_MAX_DIRECTORY_NAME = 255


@dataclass
class _DataFolder:
    path: Path
    lock_fd: int = -1
    was_clean: bool = False
    recovery_points: dict[TopicPartition, int] = field(default_factory=dict)
    start_offsets: dict[TopicPartition, int] = field(default_factory=dict)


class LogManager:
    """See the module. `config_for` gives a topic's settings when its logs are opened at a start."""

    def __init__(
        self,
        data_dirs: Sequence[Path],
        defaults: LogConfig,
        *,
        config_for: Callable[[str], LogConfig] | None = None,
    ):
        self._folders = [_DataFolder(Path(path)) for path in data_dirs]
        self._defaults = defaults
        self._config_for = config_for or (lambda topic: defaults)
        self._logs: dict[TopicPartition, Log] = {}
        self._lock = threading.RLock()
        self._to_purge: list[Path] = []
        self.offline: dict[TopicPartition, str] = {}
        """Partitions that could not be opened or failed since, with the reason in one line."""
        self.notes: list[str] = []
        """What the start had to repair, one line each; take them out after logging."""

    # -- start and end

    def start(self, now_ms: int) -> None:
        """Takes the data folders and opens every log in them; recovers what was not closed cleanly.

        Raises DataFolderNotWritable, DataFolderLocked.
        """
        for folder in self._folders:
            self._take(folder)
        for folder in self._folders:
            for directory in sorted(folder.path.iterdir()):
                if directory.is_dir():
                    self._open_found(folder, directory, now_ms)
            # Later than the opening: a crash in the middle of it changes nothing about what is clean. Synced:
            # a marker that a power loss brings back would have torn writes taken for damage.
            if folder.was_clean:
                (folder.path / CLEAN_SHUTDOWN_MARKER).unlink(missing_ok=True)
                sync_directory(folder.path)

    def _take(self, folder: _DataFolder) -> None:
        path = folder.path
        try:
            path.mkdir(parents=True, exist_ok=True)
            folder.lock_fd = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            folder.was_clean = (path / CLEAN_SHUTDOWN_MARKER).exists()
        except OSError as error:
            raise DataFolderNotWritable(
                f"data folder {path} cannot be used ({error.strerror}): "
                "make it a folder that this user may write, or name another"
            ) from error
        try:
            fcntl.flock(folder.lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(folder.lock_fd)
            folder.lock_fd = -1
            raise DataFolderLocked(
                f"data folder {path} is in use by another broker: stop that one, or name another folder"
            ) from error
        folder.recovery_points = self._read_checkpoint(path / RECOVERY_POINT_CHECKPOINT)
        folder.start_offsets = self._read_checkpoint(path / LOG_START_OFFSET_CHECKPOINT)

    def _read_checkpoint(self, path: Path) -> dict[TopicPartition, int]:
        try:
            return read_offsets(path)
        except ValueError as error:
            # Without a recovery point everything is checked; without a start, all that is there is shown.
            self.notes.append(f"{error}; taken as empty")
            return {}

    def _open_found(self, folder: _DataFolder, directory: Path, now_ms: int) -> None:
        name = directory.name
        if name.endswith(_DELETE_SUFFIX):
            self._to_purge.append(directory)
            return
        if name.endswith(_IGNORED_SUFFIXES):
            return
        try:
            tp = parse_directory_name(name)
        except ValueError:
            self.notes.append(f"{directory}: not a partition's folder, left alone")
            return
        if tp in self._logs:
            self.offline[tp] = f"{directory} and {self._logs.pop(tp).directory} both hold partition {name}"
            return
        try:
            log = Log.open(
                directory,
                self._config_for(tp[0]),
                recovery_point=None if folder.was_clean else folder.recovery_points.get(tp, 0),
                start_offset=folder.start_offsets.get(tp, 0),
                now_ms=now_ms,
            )
        except KafkaStorageError as error:
            self.offline[tp] = str(error)
            return
        self.notes += log.notes
        log.notes.clear()
        self._logs[tp] = log

    def close(self, now_ms: int = 0) -> None:
        """Closes every log. Folders whose logs all closed are marked clean; the rest recovers at the next
        start. Raises nothing: what failed is in `offline`."""
        with self._lock:
            for folder in self._folders:
                if folder.lock_fd < 0:
                    continue
                self._close_folder(folder, now_ms)
                os.close(folder.lock_fd)
                folder.lock_fd = -1
            self._logs.clear()

    def _close_folder(self, folder: _DataFolder, now_ms: int) -> None:
        is_clean = not any(self._folder_holds(folder, tp) for tp in self.offline)
        for tp, log in self._logs_in(folder):
            try:
                log.close(now_ms)
            except KafkaStorageError as error:
                self.offline[tp] = str(error)
                is_clean = False
        try:
            self._write_checkpoints(folder)
            if is_clean:
                marker = b'{"version":0,"brokerEpoch":-1}'
                replace_file(folder.path / CLEAN_SHUTDOWN_MARKER, marker, sync=True)
        except OSError as error:
            self.notes.append(f"{folder.path}: not marked as cleanly shut down: {error}")

    def _folder_holds(self, folder: _DataFolder, tp: TopicPartition) -> bool:
        return (folder.path / f"{tp[0]}-{tp[1]}").is_dir()

    def _logs_in(self, folder: _DataFolder) -> Iterator[tuple[TopicPartition, Log]]:
        for tp, log in list(self._logs.items()):
            if log.directory.parent == folder.path:
                yield tp, log

    # -- look-up

    def get(self, tp: TopicPartition) -> Log | None:
        """The log of a partition; None when it is offline or not here."""
        return self._logs.get(tp)

    def is_offline(self, tp: TopicPartition) -> bool:
        """Whether the partition is here and cannot be used; `offline` says why."""
        return tp in self.offline

    def partitions(self) -> set[TopicPartition]:
        """Every partition that is here, offline ones included."""
        return self._logs.keys() | self.offline.keys()

    def logs(self) -> Mapping[TopicPartition, Log]:
        """All open logs, as of now."""
        return dict(self._logs)

    def logs_by_folder(self) -> dict[Path, dict[TopicPartition, Log]]:
        """The logs of each data folder, for DescribeLogDirs."""
        return {folder.path: dict(self._logs_in(folder)) for folder in self._folders}

    # -- creation and removal

    def create(
        self,
        tp: TopicPartition,
        config: LogConfig | None = None,
        *,
        now_ms: int = 0,
        topic_id: UUID | None = None,
    ) -> Log:
        """The log of a partition, made in the folder with the fewest when it is not there.

        A directory that belongs to another topic id (the topic was deleted and created again while this
        broker was away) is set aside for removal first. Raises KafkaStorageError.
        """
        with self._lock:
            if tp in self.offline:
                raise KafkaStorageError(self.offline[tp])
            log = self._logs.get(tp)
            if log is not None and topic_id and log.topic_id and log.topic_id != topic_id:
                self.delete(tp)
                log = None
            if log is None:
                log = self._create(tp, config or self._config_for(tp[0]), now_ms, topic_id)
            if topic_id is not None and log.topic_id is None:
                try:
                    log.set_topic_id(topic_id)
                except OSError as error:
                    raise KafkaStorageError(f"{log.directory}: no topic id written: {error}") from error
            return log

    def _create(self, tp: TopicPartition, config: LogConfig, now_ms: int, topic_id: UUID | None) -> Log:
        counts = [(sum(1 for _ in self._logs_in(folder)), folder.path) for folder in self._folders]
        directory = min(counts)[1] / f"{tp[0]}-{tp[1]}"
        try:
            self._forget_checkpoints(tp)
            log = Log.open(directory, config, recovery_point=None, now_ms=now_ms)
            sync_directory(directory.parent)
        except OSError as error:
            raise KafkaStorageError(f"{directory} was not made durable: {error}") from error
        if topic_id and log.topic_id and log.topic_id != topic_id:
            raise KafkaStorageError(
                f"{directory} holds another topic of this name that could not be removed; move it away"
            )
        self._logs[tp] = log
        return log

    def _forget_checkpoints(self, tp: TopicPartition) -> None:
        """Takes a partition that was here before out of the checkpoints. After a crash they would cut the
        new log at the old one's start, which is to delete it. Raises OSError."""
        for folder in self._folders:
            if tp in folder.recovery_points or tp in folder.start_offsets:
                self._write_checkpoints(folder)

    def set_config(self, topic: str, config: LogConfig) -> None:
        """Gives new settings to every log of a topic; they count from the next append on."""
        with self._lock:
            for (name, _), log in self._logs.items():
                if name == topic:
                    log.config = config

    def delete(self, tp: TopicPartition) -> None:
        """Takes a partition away at once: its directory is renamed, and removed by `housekeeping`.

        A partition that is not here is no error. Raises KafkaStorageError.
        """
        with self._lock:
            log = self._logs.pop(tp, None)
            self.offline.pop(tp, None)
            directories = (
                [log.directory]
                if log is not None
                else [folder.path / f"{tp[0]}-{tp[1]}" for folder in self._folders]
            )
            if log is not None:
                log.failure = f"{tp[0]}-{tp[1]} is deleted"
            for directory in directories:
                self._set_aside(directory)

    def _set_aside(self, directory: Path) -> None:
        suffix = f".{uuid4().hex}{_DELETE_SUFFIX}"
        target = directory.with_name(directory.name[: _MAX_DIRECTORY_NAME - len(suffix)] + suffix)
        try:
            os.rename(directory, target)
            sync_directory(directory.parent)
        except OSError as error:
            if error.errno == errno.ENOENT:
                return
            raise KafkaStorageError(f"{directory} cannot be removed: {error}") from error
        self._to_purge.append(target)

    # -- housekeeping

    def housekeeping(
        self, now_ms: int, high_watermark: Callable[[TopicPartition], int | None] | None = None
    ) -> None:
        """Rolls, flushes and retires what is due, forgets silent producers, removes deleted directories,
        and writes the checkpoints. For a thread that may wait for the disk. Raises nothing; a log that
        fails goes offline alone."""
        for tp, log in list(self._logs.items()):
            # One by one: on a full disk rolling and flushing fail, and retention is what makes room again.
            for chore in (
                partial(log.roll_if_due, now_ms),
                partial(self._flush_if_due, log, now_ms),
                partial(log.delete_old_segments, now_ms, high_watermark(tp) if high_watermark else None),
                partial(log.expire_producers, now_ms),
            ):
                try:
                    chore()
                except KafkaStorageError as error:
                    self._note_failure(tp, log, str(error))
            with self._lock:
                self.notes += log.notes
                log.notes.clear()
        self._purge()
        self.checkpoint()

    def _flush_if_due(self, log: Log, now_ms: int) -> None:
        if log.needs_flush(now_ms):
            log.flush(now_ms)

    def _note_failure(self, tp: TopicPartition, log: Log, reason: str) -> None:
        with self._lock:
            if self._logs.get(tp) is not log:
                return  # deleted meanwhile
            self.notes.append(reason)
            if log.failure is not None:
                self.offline[tp] = reason
                del self._logs[tp]

    def _purge(self) -> None:
        with self._lock:
            to_purge, self._to_purge = self._to_purge, []
        for path in to_purge:
            try:
                shutil.rmtree(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                self.notes.append(f"{path} is not removed yet: {error}")
                self._to_purge.append(path)

    def checkpoint(self) -> None:
        """Writes the checkpoints of every folder. A failure is noted: the old ones are still true."""
        with self._lock:
            for folder in self._folders:
                try:
                    self._write_checkpoints(folder)
                except OSError as error:
                    self.notes.append(f"{folder.path}: checkpoints not written: {error}")

    def _write_checkpoints(self, folder: _DataFolder) -> None:
        logs = dict(self._logs_in(folder))
        # What is known of a partition that is offline must not be forgotten.
        recovery = {tp: at for tp, at in folder.recovery_points.items() if tp in self.offline}
        starts = {tp: at for tp, at in folder.start_offsets.items() if tp in self.offline}
        recovery |= {tp: log.recovery_point for tp, log in logs.items()}
        starts |= {tp: log.start_offset for tp, log in logs.items() if log.start_offset > 0}
        if recovery != folder.recovery_points:
            write_offsets(folder.path / RECOVERY_POINT_CHECKPOINT, recovery)
            folder.recovery_points = recovery
        if starts != folder.start_offsets:
            write_offsets(folder.path / LOG_START_OFFSET_CHECKPOINT, starts)
            folder.start_offsets = starts
