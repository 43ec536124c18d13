"""A disk that failed once, wherever that shows: nothing of its logs advances any more, although every later
call succeeds. The system reports a page that it could not write once, and forgets it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from millrace.broker.errors import KafkaStorageError
from millrace.broker.storage import checkpoints, leader_epochs, producer_snapshot
from millrace.broker.storage.checkpoints import LEADER_EPOCH_CHECKPOINT, RECOVERY_POINT_CHECKPOINT
from millrace.broker.storage.data_folder import CLEAN_SHUTDOWN_MARKER
from millrace.broker.storage.index_file import IndexFile
from millrace.broker.storage.log import Log
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.log_manager import LogManager

from .conftest import append

KEY, OTHER = ("t", 0), ("t", 1)
FLUSHED = 3
"""Offsets below this are on the disk when it fails."""

Scene = tuple[LogManager, Log, pytest.MonkeyPatch]


def _fails(*_: Any, **__: Any) -> Any:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@contextmanager
def sync_fails(patch: pytest.MonkeyPatch, name: str) -> Iterator[None]:
    """Each sync of a file or folder whose name ends like this."""
    with patch.context() as within:
        for function in ("fsync", "fdatasync"):
            original = getattr(os, function)

            def sync(fd: int, original: Callable[[int], None] = original) -> None:
                if os.readlink(f"/proc/self/fd/{fd}").endswith(name):
                    _fails()
                original(fd)

            within.setattr(os, function, sync)
        yield


def flush(scene: Scene, name: str) -> None:
    _, log, patch = scene
    append(log)
    with sync_fails(patch, name):
        log.flush(1)


def append_that_flushes(scene: Scene) -> None:
    _, log, patch = scene
    log.config = LogConfig(flush_messages=1)
    with sync_fails(patch, ".log"):
        append(log)


def background_flush(scene: Scene) -> None:
    manager, log, patch = scene
    log.config = LogConfig(flush_ms=0)
    append(log)
    with sync_fails(patch, ".log"):
        manager.housekeeping(1)


def flush_of_a_new_epoch(scene: Scene) -> None:
    append(scene[1], leader_epoch=4)
    flush(scene, LEADER_EPOCH_CHECKPOINT)


def flush_of_a_closed_segment(scene: Scene) -> None:
    log = scene[1]
    append(log)
    log.config = LogConfig(segment_bytes=100)
    flush(scene, ".index")


def roll(scene: Scene, target: Any, name: str) -> None:
    _, log, patch = scene
    log.config = LogConfig(segment_bytes=100)
    with patch.context() as within:
        within.setattr(target, name, _fails)
        append(log)


def append_in_a_new_epoch(scene: Scene) -> None:
    with scene[2].context() as within:
        within.setattr(leader_epochs, "write_epochs", _fails)
        append(scene[1], leader_epoch=4)


def flush_that_writes_producers(scene: Scene) -> None:
    _, log, patch = scene
    for _ in range(5):
        append(log, size=1_000_000)
    with patch.context() as within:
        within.setattr(producer_snapshot, "write_content", _fails)
        log.flush(1)


def truncation(scene: Scene, name: str, offset: int = FLUSHED) -> None:
    _, log, patch = scene
    append(log)
    with sync_fails(patch, name):
        log.truncate_to(offset, 1)


def checkpoint(scene: Scene) -> None:
    manager, log, patch = scene
    append(log)
    log.flush(1)
    with sync_fails(patch, f"{RECOVERY_POINT_CHECKPOINT}.tmp"):
        manager.checkpoint()


def close(scene: Scene) -> None:
    _, log, patch = scene
    append(log)
    with sync_fails(patch, ".log"):
        log.close(1)


POINTS: dict[str, Callable[[Scene], None]] = {
    "append that flushes": append_that_flushes,
    "flush": lambda scene: flush(scene, ".log"),
    "background flush": background_flush,
    "flush of a new epoch": flush_of_a_new_epoch,
    "flush of a closed segment's index": flush_of_a_closed_segment,
    "flush that writes producers": flush_that_writes_producers,
    "roll, the index": lambda scene: roll(scene, IndexFile, "write_tail"),
    "roll, the producers": lambda scene: roll(scene, producer_snapshot, "write"),
    "append in a new epoch": append_in_a_new_epoch,
    "truncation": lambda scene: truncation(scene, "/t-0"),
    "truncation, the checkpoints": lambda scene: truncation(scene, f"{RECOVERY_POINT_CHECKPOINT}.tmp", 1),
    "checkpoint": checkpoint,
    "close": close,
}


@pytest.mark.parametrize("point", POINTS)
def test_after_a_disk_has_failed_once_nothing_of_its_logs_advances(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    manager = LogManager([tmp_path], LogConfig(index_interval_bytes=1))
    manager.start(0)
    log, other = manager.create(KEY), manager.create(OTHER)
    for each in (log, other):
        for _ in range(FLUSHED):
            append(each)
        each.flush(0)
    manager.checkpoint()
    with suppress(KafkaStorageError):
        POINTS[point]((manager, log, monkeypatch))
    recovery_point, end_offset = log.recovery_point, log.end_offset
    assert point == "checkpoint" or recovery_point <= FLUSHED
    with pytest.raises(KafkaStorageError):
        append(log)
    with pytest.raises(KafkaStorageError):
        log.flush(2)
    with pytest.raises(KafkaStorageError):
        log.truncate_to(1, 2)
    manager.housekeeping(3)
    manager.checkpoint()
    assert (log.recovery_point, log.end_offset) == (recovery_point, end_offset)
    if point != "close":  # the log is closed by itself there, the manager goes on
        assert set(manager.offline) == {KEY, OTHER} and list(manager.failed_folders) == [tmp_path]
        with pytest.raises(KafkaStorageError):
            append(other)
    manager.close(4)
    assert checkpoints.read_offsets(tmp_path / RECOVERY_POINT_CHECKPOINT)[KEY] == FLUSHED
    assert not (tmp_path / CLEAN_SHUTDOWN_MARKER).exists()


@pytest.mark.parametrize("step", ["cut", "indexes"])
def test_disk_that_fails_a_recovery_is_not_served_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    manager = LogManager([tmp_path / "a"], LogConfig())
    manager.start(0)
    log = manager.create(KEY)
    append(log, FLUSHED)
    log.flush(0)
    manager.checkpoint()
    with log.segments[0].path.open("ab") as file:
        file.write(b"torn")
    for folder in manager._folders:
        folder.release()
    good, failing = tmp_path / "good", tmp_path / "b"
    os.rename(tmp_path / "a", failing)
    again = LogManager([failing, good], LogConfig())
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate" if step == "cut" else "truncate", _fails)
        again.start(0)
    assert list(again.failed_folders) == [failing] and set(again.offline) == {KEY}
    assert again.get(KEY) is None
    again.close(0)
    assert checkpoints.read_offsets(failing / RECOVERY_POINT_CHECKPOINT)[KEY] == FLUSHED


def test_index_that_is_cut_while_its_log_is_open_is_made_anew(open_log: Callable[..., Log]) -> None:
    log = open_log(segment_bytes=2_000, index_interval_bytes=1)
    while len(log.segments) < 2:
        append(log)
    os.truncate(log.segments[0].path.with_suffix(".index"), 0)
    assert log.read(5, 1).next_offset == 6
    assert any("have been rebuilt" in note for note in log.notes)
