"""What a data folder holds when a broker starts: its logs, opened side by side, and what is none of them.

Called by the log manager alone, for one folder after the other. Nothing of a log is opened twice, and a
directory that is not a log's is left as it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from uuid import UUID

from millrace.broker.errors import KafkaStorageError
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.storage.checkpoints import read_topic_id
from millrace.broker.storage.data_folder import DataFolder
from millrace.broker.storage.log import Log, parse_directory_name
from millrace.broker.storage.log_config import LogConfig

DELETE_SUFFIX = "-delete"
STRAY_SUFFIX = "-stray"
_IGNORED_SUFFIXES = ("-future", STRAY_SUFFIX)

_THREAD_COUNT = 8
"""For recovery, which waits for the disk."""
_CLEAN_THREAD_COUNT = 2
"""For opening what was closed cleanly: so short a work that 8 would mostly wait for each other."""

ConfigOf = Callable[[str, UUID | None], LogConfig | None]
"""The settings of the topic of this name and id (None: its log does not say which); None where nobody knows
them: then its logs may be of any kind, also compacted."""


@dataclass
class LoadedFolder:
    """What was found. `opened` has each partition with its directory and its log, or why there is none."""

    opened: list[tuple[TopicPartition, Path, Log | KafkaStorageError]] = field(default_factory=list)
    deleted: list[Path] = field(default_factory=list)
    """Directories of deleted logs, to be removed at leisure."""
    strays: list[Path] = field(default_factory=list)
    """Those of logs that were set aside."""
    notes: list[str] = field(default_factory=list)


def load_folder(folder: DataFolder, now_ms: int, config_of: ConfigOf, defaults: LogConfig) -> LoadedFolder:
    """Opens every log in a folder that was taken; recovers what was not closed cleanly. Raises OSError where
    the folder cannot be read."""
    found = LoadedFolder()
    with os.scandir(folder.path) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir())
    wanted = [(tp, folder.path / name) for name in names if (tp := _key_of(folder.path / name, found))]
    # Side by side: opening waits for the disk at a few places of each segment, recovery reads much.
    open_one = partial(_open, folder, now_ms, config_of, defaults)
    count = _CLEAN_THREAD_COUNT if folder.was_clean else _THREAD_COUNT
    with ThreadPoolExecutor(count, "open") as threads:
        for (tp, directory), opened in zip(wanted, threads.map(open_one, wanted), strict=True):
            found.opened.append((tp, directory, opened))
    if folder.had_failed_sync:
        _settle_failed_sync(folder, found)
    if found.strays:
        found.notes.append(
            f"{folder.path}: {len(found.strays)} logs that the cluster did not know are still set aside, "
            f"{found.strays[0].name} among them; look at them, and remove them or put them back"
        )
    return found


def _settle_failed_sync(folder: DataFolder, found: LoadedFolder) -> None:
    """Raises OSError."""
    unopened = sum(isinstance(opened, KafkaStorageError) for _, _, opened in found.opened)
    if unopened:
        found.notes.append(
            f"{folder.path}: a sync had failed before this start; of {unopened} partitions that cannot be "
            "opened it is not known what is on the disk, the others have been written again"
        )
        return
    folder.forget_failed_sync()
    found.notes.append(
        f"{folder.path}: a sync had failed before this start; what had not been flushed has been written "
        "again, and is on the disk now"
    )


def _key_of(directory: Path, found: LoadedFolder) -> TopicPartition | None:
    """The partition that a directory holds; None for one that is to be left alone, or removed."""
    name = directory.name
    if name.endswith(DELETE_SUFFIX):
        found.deleted.append(directory)
        return None
    if name.endswith(STRAY_SUFFIX):
        found.strays.append(directory)
    if name.endswith(_IGNORED_SUFFIXES):
        return None
    try:
        return parse_directory_name(name)
    except ValueError:
        found.notes.append(f"{directory}: not a partition's folder, left alone")
        return None


def _open(
    folder: DataFolder,
    now_ms: int,
    config_of: ConfigOf,
    defaults: LogConfig,
    wanted: tuple[TopicPartition, Path],
) -> Log | KafkaStorageError:
    tp, directory = wanted
    try:
        topic_id = read_topic_id(directory)
    except (OSError, ValueError):
        topic_id = None  # whoever opens it says what is wrong
    config = config_of(tp[0], topic_id or folder.announced(tp))
    try:
        return Log.open(
            directory,
            config or defaults,
            may_have_holes=config is None or folder.may_be_compacted,
            recovery_point=None if folder.was_clean else folder.recovery_points.get(tp, 0),
            start_offset=folder.start_offsets.get(tp, 0),
            announced_id=folder.announced(tp),
            is_anchored=folder.announced(tp) is None,
            cleaned_offset=folder.cleaned_offsets.get(tp),
            closed_offset=folder.recovery_points.get(tp, 0) if folder.was_clean else 0,
            closed_start=folder.start_offsets.get(tp) if folder.was_clean else None,
            is_as_left=folder.is_as_left,
            after_failed_sync=folder.had_failed_sync,
            now_ms=now_ms,
        )
    except KafkaStorageError as error:
        return error
