"""Every log of a broker, over its data folders: start, look-up, creation, removal, housekeeping, end.

A data folder holds one directory per partition and the broker's checkpoints (`data_folder.py`):

    <topic>-<partition>/               a log (`log.py`)
    <topic>-<partition>.<hex>-delete/  a deleted one, removed at leisure
    <topic>-<partition>.<hex>-stray/   one that the cluster does not know: for a person to decide on

Called by the broker's start-up and its housekeeping threads, the replica manager, the topic handlers.
Invariants: a partition that cannot be opened is offline alone, with its reason in `offline`, and is never
created anew over what is there; a log that nobody has deleted is set aside and never removed; a folder whose
disk fails goes offline with all its partitions and the others serve on; a recovery point is checkpointed
after the flush that made it true, and lowered before anything else when a truncation begins.

Locks: a log's own locks come before the manager's, which comes before a folder's; nobody who holds a later
one may wait for an earlier. A log is deleted with all of them held, so no work on it is under way in a
directory that is another's a moment later. `on_folder_failure` and `on_log_failure` are called with a log's
locks held and must not take any.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from uuid import UUID

from millrace.broker.errors import DataFolderNotWritable, KafkaStorageError
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.storage import log_housekeeping
from millrace.broker.storage.cleaner import CleanerConfig
from millrace.broker.storage.cleaner_manager import CleanerManager
from millrace.broker.storage.data_folder import DataFolder
from millrace.broker.storage.departed_logs import DepartedLogs
from millrace.broker.storage.disk_errors import is_beyond_trust, is_no_room
from millrace.broker.storage.disk_room import DiskRoom, RoomChange
from millrace.broker.storage.log import Log, parse_directory_name
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.log_loading import DELETE_SUFFIX, STRAY_SUFFIX, ConfigOf, load_folder

_THREAD_COUNT = 8
"""For closing, which waits for the disk."""


class LogManager:
    """See the module."""

    def __init__(
        self,
        data_dirs: Sequence[Path],
        defaults: LogConfig,
        *,
        cleaner: CleanerConfig | None = None,
    ):
        self._folders = [DataFolder(Path(path)) for path in data_dirs]
        self._defaults = defaults
        self._opening = threading.Lock()
        self._has_opened = False
        self._is_unclean_end_settled = False
        self._is_closed = False
        self._logs: dict[TopicPartition, Log] = {}
        self._homes: dict[TopicPartition, DataFolder] = {}
        """Of every log, those that have gone included."""
        self._failed: dict[TopicPartition, Log] = {}
        """Logs that failed alone: work on them may still be under way when they are deleted."""
        self._lock = threading.RLock()
        self._departed = DepartedLogs()
        self._stopping = threading.Event()
        self.offline: dict[TopicPartition, str] = {}
        """Partitions that could not be opened or failed since, with the reason in one line."""
        self.failed_folders: dict[Path, str] = {}
        """Data folders that cannot be used (any more), with the reason in one line."""
        self.on_folder_failure: Callable[[Path, str, list[TopicPartition]], None] | None = None
        """Called once for a folder that fails, from any thread, with the partitions that were in it."""
        self.on_log_failure: Callable[[TopicPartition, str], None] | None = None
        """Called for a log that fails alone, from any thread; it is in `offline` then."""
        self.notes: list[str] = []
        """What had to be repaired or went wrong, one line each; take them out after logging."""
        self.cleaning = CleanerManager(
            cleaner or CleanerConfig(),
            logs_now=lambda: list(self._logs.items()),
            is_stopping=self._stopping.is_set,
            notes=self.notes,
            log_failed=self._note_failure,
            disk_failed=self.disk_failed,
        )

    # -- start and end

    def start(self, now_ms: int, config_of: ConfigOf | None = None) -> None:
        """As `take` and then `open`, where no cluster has to hear how the logs ended before."""
        self.take()
        self.open(now_ms, config_of)
        self.settle_unclean_end()

    def take(self) -> None:
        """Takes the data folders for this process, and changes nothing in them. A folder that cannot be used
        is in `failed_folders`, as long as another can.

        Raises DataFolderNotWritable when none can, DataFolderLocked when another process has one.
        """
        unusable: DataFolderNotWritable | None = None
        try:
            for folder in self._folders:
                try:
                    folder.take(self.notes)
                except DataFolderNotWritable as error:
                    unusable = unusable or error
                    self._fail_folder(folder, str(error))
            if unusable is not None and not self._healthy():
                raise unusable
        except BaseException:
            self._release()
            raise

    def topics(self) -> set[str]:
        """Topics of which a folder that was taken holds a partition. Raises nothing: a folder that cannot be
        read says so when it is opened."""
        found = set()
        for folder in self._healthy():
            with suppress(OSError):
                for name in os.listdir(folder.path):
                    with suppress(ValueError):
                        found.add(parse_directory_name(name)[0])
        return found

    def open(self, now_ms: int, config_of: ConfigOf | None = None) -> None:
        """Opens every log in the folders that were taken, by their topics' own settings (the defaults without
        `config_of`); recovers what was not closed cleanly. Raises DataFolderNotWritable when no folder can be
        used."""
        with self._opening:
            if self._is_closed:
                return
            try:
                for folder in self._healthy():
                    self._open_all(folder, now_ms, config_of or (lambda *_: self._defaults))
                if not self._healthy():
                    raise DataFolderNotWritable("; ".join(self.failed_folders.values()))
            except BaseException:
                self._release()
                raise
            self._has_opened = True

    def settle_unclean_end(self) -> None:
        """Nobody counts any more on what an unclean end may have taken: the broker has left the in-sync sets.
        Until then no folder that ended so is marked clean, or the next start would stay in sync with what
        it has, although this one ended before it could leave."""
        self._is_unclean_end_settled = True

    def _release(self) -> None:
        for folder in self._folders:
            folder.release()

    def _open_all(self, folder: DataFolder, now_ms: int, config_of: ConfigOf) -> None:
        try:
            found = load_folder(folder, now_ms, config_of, self._defaults)
            self.notes += found.notes
            self._departed.found(found.deleted, found.strays)
            for tp, directory, opened in found.opened:
                if folder.failure is None:
                    self._take_opened(folder, tp, directory, opened)
            # Later than the opening: a crash in the middle of it changes nothing about what is clean.
            if folder.failure is None:
                folder.forget_clean_end()
        except OSError as error:
            self._fail_folder(folder, f"data folder {folder.path} cannot be used: {error}")

    def _take_opened(
        self, folder: DataFolder, tp: TopicPartition, directory: Path, opened: Log | KafkaStorageError
    ) -> None:
        if tp in self._logs:
            name = directory.name
            self.offline[tp] = f"{directory} and {self._logs.pop(tp).directory} both hold partition {name}"
        elif isinstance(opened, KafkaStorageError):
            self.offline[tp] = str(opened)
            self._disk_failed(folder, str(opened), opened.__cause__)
        else:
            self.notes += opened.notes
            opened.notes.clear()
            self._add(tp, opened, folder)

    def _add(self, tp: TopicPartition, log: Log, folder: DataFolder) -> None:
        log.health.on_disk_failure = partial(self._fail_folder, folder)
        # Weakly: a log in a cycle would keep its files open after its deletion, until a full round of the
        # garbage collector, which would then close thousands of them in one go.
        log.health.on_failure = partial(self._fail_log, tp, weakref.ref(log))
        log.health.on_no_room = folder.room.refused
        log.health.on_failed_sync = partial(self._note_failed_sync, folder)
        log.before_truncation = partial(folder.lower, tp)
        self._homes[tp] = folder
        self._logs[tp] = log

    def close(self, now_ms: int = 0) -> None:
        """Closes every log. Folders whose logs all closed are marked clean, but not before an unclean end of
        before is settled; the rest recovers at the next start. Raises nothing: what failed is in
        `offline`."""
        self.stop_chores()
        with self._opening, self.cleaning.at_rest():
            self._is_closed = True
            for folder in self._folders:
                if folder.is_taken:
                    # Of a folder whose logs were never opened, this process has nothing to say.
                    if folder.failure is None and self._has_opened:
                        self._close_folder(folder, now_ms)
                    folder.release()
            self._logs.clear()

    def _close_folder(self, folder: DataFolder, now_ms: int) -> None:
        is_clean = not any(self._folder_holds(folder, tp) for tp in self.offline)

        def close(job: tuple[TopicPartition, Log]) -> bool:
            try:
                job[1].close(now_ms)
            except KafkaStorageError as error:
                self.offline[job[0]] = str(error)
                return False
            return True

        # Side by side: each log waits for the disk a few times, and a disk syncs many files in one go.
        with ThreadPoolExecutor(_THREAD_COUNT, "close") as threads:
            is_clean = all([is_clean, *threads.map(close, self._logs_in(folder))])
        try:
            folder.write_checkpoints(partial(self._logs_in, folder), self.offline)
            folder.settle(dict(self._logs_in(folder)), self.offline)
            if is_clean and (folder.was_clean or self._is_unclean_end_settled):
                folder.mark_clean()
        except OSError as error:
            self.notes.append(f"{folder.path}: not marked as cleanly shut down: {error}")

    def _folder_holds(self, folder: DataFolder, tp: TopicPartition) -> bool:
        return (folder.path / f"{tp[0]}-{tp[1]}").is_dir()

    def _logs_in(self, folder: DataFolder) -> Iterator[tuple[TopicPartition, Log]]:
        for tp, log in list(self._logs.items()):
            if self._homes[tp] is folder:
                yield tp, log

    def _healthy(self) -> list[DataFolder]:
        return [folder for folder in self._folders if folder.failure is None]

    def _fail_folder(self, folder: DataFolder, reason: str) -> None:
        """Takes a folder offline with everything in it. Once; later calls change nothing."""
        with self._lock:
            if folder.failure is not None:
                return
            folder.failure = reason
            self.failed_folders[folder.path] = reason
            logs = list(self._logs_in(folder))
            for tp, log in logs:
                if log.failure is None:
                    log.health.end(reason)
                self.offline[tp] = reason
                self._logs.pop(tp, None)
        if self.on_folder_failure is not None:
            self.on_folder_failure(folder.path, reason, [tp for tp, _ in logs])

    def disk_failed(self, path: Path, reason: str, error: OSError) -> None:
        """Somebody else's write into the data folder at `path` failed: it goes offline where the error says
        that its disk cannot be trusted."""
        for folder in self._healthy():
            if folder.path == path:
                self._disk_failed(folder, reason, error)

    def _disk_failed(self, folder: DataFolder, reason: str, error: BaseException | None) -> None:
        if not isinstance(error, OSError):
            return
        if is_beyond_trust(error):
            self._fail_folder(folder, reason)
        elif is_no_room(error):
            folder.room.refused(reason)

    def _note_failed_sync(self, folder: DataFolder) -> None:
        try:
            folder.note_failed_sync()
        except OSError as error:
            self.notes.append(
                f"{folder.path}: a sync has failed, and no mark of it can be left ({error}): before a broker "
                "uses this folder again, unmount its file system or restart the machine, so that what is "
                "read there is what the disk has"
            )

    def _fail_log(self, tp: TopicPartition, log: weakref.ref[Log], reason: str) -> None:
        """Takes a log that failed offline, alone: what its checkpoints say of it stays as it is."""
        with self._lock:
            known = self._logs.get(tp)
            if known is None or known is not log():
                return  # deleted meanwhile, or gone with its folder
            self.offline[tp] = reason
            self._failed[tp] = self._logs.pop(tp)
        if self.on_log_failure is not None:
            self.on_log_failure(tp, reason)

    # -- look-up

    @property
    def strays(self) -> list[Path]:
        """Logs that the cluster did not know, for a person to decide on; what has gone since is noticed by
        `housekeeping`."""
        return self._departed.strays

    @property
    def was_clean(self) -> bool:
        """Whether every data folder was closed in order before this start: nothing of it is missing."""
        return all(folder.was_clean for folder in self._folders)

    @property
    def healthy_folders(self) -> list[Path]:
        """The data folders that can be used; none: the broker has nothing left to serve."""
        return [folder.path for folder in self._healthy()]

    @property
    def rooms(self) -> dict[Path, DiskRoom]:
        """Of the data folders that can be used: what is free, and whether they refuse writes."""
        return {folder.path: folder.room for folder in self._healthy()}

    def get(self, tp: TopicPartition) -> Log | None:
        """The log of a partition; None when it is offline or not here."""
        return self._logs.get(tp)

    def partitions(self) -> set[TopicPartition]:
        """Every partition that is here, offline ones included."""
        return self._logs.keys() | self.offline.keys()

    def logs(self) -> Mapping[TopicPartition, Log]:
        """All open logs, as of now."""
        return dict(self._logs)

    def logs_by_folder(self) -> dict[Path, dict[TopicPartition, Log]]:
        """The logs of each data folder that can be used, for DescribeLogDirs."""
        return {folder.path: dict(self._logs_in(folder)) for folder in self._healthy()}

    # -- creation and removal

    def create(
        self,
        tp: TopicPartition,
        config: LogConfig | None = None,
        *,
        now_ms: int = 0,
        topic_id: UUID | None = None,
        is_new: bool = True,
    ) -> Log:
        """The log of a partition, made in the usable folder with the fewest when it is not there.

        A directory that belongs to another topic id (the topic was deleted and created again while this
        broker was away, or ZooKeeper is of an earlier time) is set aside first. A partition that is not new
        (this broker has had records of it) is not made while a folder is offline, where it may lie. Raises
        KafkaStorageError.
        """
        (made,) = self.create_all({tp: is_new}, config, now_ms=now_ms, topic_id=topic_id).values()
        if isinstance(made, KafkaStorageError):
            raise made
        return made

    def create_all(
        self,
        wanted: Mapping[TopicPartition, bool],
        config: LogConfig | None = None,
        *,
        now_ms: int = 0,
        topic_id: UUID | None = None,
    ) -> dict[TopicPartition, Log | KafkaStorageError]:
        """As `create`, of several partitions of one topic (with whether each is new), and each with its log
        or what is in its way. The disk is waited for once, not for each (`data_folder.py` says why that is
        enough). Raises nothing."""
        found: dict[TopicPartition, Log | KafkaStorageError] = {}
        for tp in wanted:
            log = self._logs.get(tp)
            if log is not None and _is_of_another(log, topic_id):
                try:
                    self.set_aside(tp, f"the cluster has another topic of this name, {topic_id}")
                except KafkaStorageError as error:
                    found[tp] = error
        with self._lock:
            missing: list[TopicPartition] = []
            for tp, is_new in wanted.items():
                if tp in found:
                    continue
                try:
                    log = self._present(tp, topic_id, is_new)
                except KafkaStorageError as error:
                    found[tp] = error
                else:
                    if log is None:
                        missing.append(tp)
                    else:
                        found[tp] = log
            for folder, partitions in self._places(missing).items():
                reason = self._announce(folder, partitions, topic_id)
                if reason:
                    found.update(dict.fromkeys(partitions, KafkaStorageError(reason)))
                    continue
                for tp in partitions:
                    try:
                        found[tp] = self._create(tp, folder, config or self._defaults, now_ms, topic_id)
                    except KafkaStorageError as error:
                        found[tp] = error
            for tp in wanted:
                if tp not in found:
                    found[tp] = KafkaStorageError("every data folder is offline")
            return found

    def announce(self, partitions: Sequence[TopicPartition], topic_id: UUID | None) -> None:
        """Of very many that `create_all` will be asked for, a few at a time: each usable folder, of which any
        may get each, is told of all of them here, in one go. By each few the disk would be told again of all
        that were made before. What goes wrong is told by `create_all`. Raises nothing."""
        with self._lock:
            for folder in self._healthy():
                try:
                    present = set(os.listdir(folder.path))
                except OSError:
                    continue
                # A directory that is here, for whatever reason, keeps what it was announced with.
                new = [tp for tp in partitions if f"{tp[0]}-{tp[1]}" not in present]
                self._announce(folder, new, topic_id)

    def _announce(
        self, folder: DataFolder, partitions: Sequence[TopicPartition], topic_id: UUID | None
    ) -> str:
        """Tells a folder's disk of partitions; what was in the way, or nothing."""
        if reason := self._forget_checkpoints(partitions):
            return reason
        try:
            folder.announce(partitions, topic_id)
        except OSError as error:
            reason = f"{folder.path}: new partitions were not made durable: {error}"
            self._disk_failed(folder, reason, error)
        return reason

    def _present(self, tp: TopicPartition, topic_id: UUID | None, is_new: bool) -> Log | None:
        """The partition's log; None when it is to be made. Raises KafkaStorageError."""
        if tp in self.offline:
            raise KafkaStorageError(self.offline[tp])
        log = self._logs.get(tp)
        if log is not None and _is_of_another(log, topic_id):
            raise KafkaStorageError(f"{log.directory} belongs to another topic of this name just now")
        if log is None and not is_new and self.failed_folders:
            self.offline[tp] = (
                f"{tp[0]}-{tp[1]} is not here, and may lie in a data folder that is offline: "
                + ", ".join(str(path) for path in self.failed_folders)
            )
            raise KafkaStorageError(self.offline[tp])
        if log is not None and topic_id is not None and log.topic_id is None:
            try:
                log.set_topic_id(topic_id)
            except OSError as error:
                raise KafkaStorageError(f"{log.directory}: no topic id written: {error}") from error
        return log

    def _places(self, partitions: Sequence[TopicPartition]) -> dict[DataFolder, list[TopicPartition]]:
        """Where new partitions go: each to the usable folder that has the fewest by then."""
        healthy = self._healthy()
        if len(healthy) == 1 and partitions:
            return {healthy[0]: list(partitions)}
        counts = {folder: sum(1 for _ in self._logs_in(folder)) for folder in healthy} if partitions else {}
        places: dict[DataFolder, list[TopicPartition]] = {}
        for tp in partitions if counts else ():
            folder = min(counts, key=lambda folder: (counts[folder], folder.path))
            counts[folder] += 1
            places.setdefault(folder, []).append(tp)
        return places

    def _create(
        self, tp: TopicPartition, folder: DataFolder, config: LogConfig, now_ms: int, topic_id: UUID | None
    ) -> Log:
        directory = folder.path / f"{tp[0]}-{tp[1]}"
        if folder.failure is not None:
            raise KafkaStorageError(folder.failure)
        try:
            log = Log.open(
                directory,
                config,
                recovery_point=None,
                now_ms=now_ms,
                announced_id=topic_id,
                is_anchored=False,
            )
        except KafkaStorageError as error:
            self._disk_failed(folder, str(error), error.__cause__)
            raise
        if _is_of_another(log, topic_id):
            raise KafkaStorageError(
                f"{directory} holds another topic of this name that could not be removed; move it away"
            )
        self._add(tp, log, folder)
        return log

    def _forget_checkpoints(self, partitions: Sequence[TopicPartition]) -> str:
        """Takes partitions that were here before out of the checkpoints; what was in the way, or nothing.
        After a crash they would cut the new log at the old one's start, which is to delete it."""
        for folder in self._healthy():
            if any(folder.knows(tp) for tp in partitions):
                try:
                    folder.write_checkpoints(partial(self._logs_in, folder), self.offline)
                except OSError as error:
                    reason = f"{folder.path}: checkpoints of partitions that were deleted stay: {error}"
                    self._disk_failed(folder, reason, error)
                    return reason
        return ""

    def delete(self, tp: TopicPartition) -> None:
        """Takes a partition away: its directory is renamed as soon as no work on it is under way, and removed
        by `look_at_room`.

        A partition that is not here is no error. Who calls this holds no lock. Raises KafkaStorageError.
        """
        with self._lock:
            log = self._logs.get(tp) or self._failed.get(tp)
            if log is None:
                self._forget(tp)
                for folder in self._healthy():
                    self._departed.rename(folder.path / f"{tp[0]}-{tp[1]}", DELETE_SUFFIX)
                return
        log.retire(f"{tp[0]}-{tp[1]} is deleted", partial(self._rename_log, tp, log, DELETE_SUFFIX))

    def set_aside(self, tp: TopicPartition, reason: str) -> None:
        """Takes a partition out of service that the cluster does not know, and keeps its directory under
        another name, which a note tells with `reason`: nobody has said that its records may go, and a
        ZooKeeper that was restored from an older state knows nothing of newer topics.

        A partition that is not open is no error. Who calls this holds no lock. Raises KafkaStorageError.
        """
        log = self._logs.get(tp)
        if log is None:
            return
        kept: list[Path] = []
        log.retire(
            f"{tp[0]}-{tp[1]} is set aside",
            lambda: kept.extend(self._rename_log(tp, log, STRAY_SUFFIX)),
        )
        self.notes += [
            f"{log.directory}: set aside as {path.name}, because {reason}; remove it if its topic was "
            f"deleted or moved; or, once ZooKeeper has the topic as it was (id {log.topic_id}), stop the "
            "broker and give the folder its name back"
            for path in kept
        ]

    def _rename_log(self, tp: TopicPartition, log: Log, kind: str) -> list[Path]:
        with self._lock:
            if log not in (self._logs.get(tp), self._failed.get(tp)):
                return []  # somebody else has done it meanwhile
            self._forget(tp)
            return self._departed.rename(log.directory, kind)

    def _forget(self, tp: TopicPartition) -> None:
        self._logs.pop(tp, None)
        self._failed.pop(tp, None)
        self.offline.pop(tp, None)
        self.cleaning.forget(tp)

    # -- housekeeping

    def housekeeping(
        self, now_ms: int, high_watermark: Callable[[TopicPartition], int | None] | None = None
    ) -> None:
        """Rolls, flushes and retires what is due, forgets silent producers, closes the files of idle logs,
        removes deleted directories, and writes the checkpoints. For a thread that may wait for the disk.
        Raises nothing; a log that fails goes offline alone."""
        log_housekeeping.keep(self, now_ms, high_watermark)

    def look_at_room(self, steady_ms: int) -> list[RoomChange]:
        """Removes what was deleted, and says which data folders began to refuse writes for want of room, or
        take them again; to be called every second, on a thread that may wait for the disk. Raises nothing."""
        self.notes.extend(self._departed.remove_deleted())
        changes: list[RoomChange] = []
        for folder in self._healthy():
            try:
                change = folder.look_at_room(steady_ms)
            except OSError as error:
                self._disk_failed(folder, f"{folder.path}: its free room is not known: {error}", error)
            else:
                changes += [change] if change is not None else []
        return changes

    def stop_chores(self) -> None:
        """Makes a compaction or a housekeeping that runs end soon, and none begin; for the broker's stop."""
        self._stopping.set()

    def _note_failure(self, tp: TopicPartition, log: Log, reason: str) -> None:
        with self._lock:
            if self._logs.get(tp) is not log:
                return  # deleted meanwhile, or offline with its reason
            self.notes.append(reason)

    def checkpoint(self) -> None:
        """Writes the checkpoints of every folder. A failure is noted: the old ones are still true."""
        log_housekeeping.checkpoint(self)


def _is_of_another(log: Log, topic_id: UUID | None) -> bool:
    return bool(topic_id and log.topic_id and log.topic_id != topic_id)
