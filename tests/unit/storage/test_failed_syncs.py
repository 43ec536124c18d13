"""A start after a sync that failed: the page cache shows what the disk does not have, and no later sync says
so. A loss of power then tells what was on the disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.broker.errors import DataFolderNotWritable, KafkaStorageError
from millrace.broker.protocol.control_records import build_marker
from millrace.broker.storage.checkpoints import (
    LEADER_EPOCH_CHECKPOINT,
    RECOVERY_POINT_CHECKPOINT,
    read_offsets,
)
from millrace.broker.storage.data_folder import CLEAN_SHUTDOWN_MARKER, FAILED_SYNC_MARKER
from millrace.broker.storage.log import Log
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.log_manager import LogManager

from .conftest import append

KEY, OTHER = ("t", 0), ("t", 1)
PAGE_SIZE = 4096


class Disk:
    """What is on the disk of the files of a folder's logs, page by page: what was written since the last sync
    is in the page cache alone, and after a sync that failed the system takes it for written. A file that took
    another's place is the old one on the disk, until it is synced."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._dirty: dict[Path, set[int]] = {}
        self._pages: dict[Path, dict[int, bytes]] = {}
        self.failing = ""
        """Syncs of files whose names end like this fail, once each for what was written so far."""
        write, replace = os.pwrite, os.replace
        syncs = {name: getattr(os, name) for name in ("fsync", "fdatasync")}

        def pwrite(fd: int, data: Any, position: int) -> int:
            count = write(fd, data, position)
            pages = range(position // PAGE_SIZE, (position + count - 1) // PAGE_SIZE + 1)
            self._dirty.setdefault(_path_of(fd), set()).update(pages)
            return count

        def put_in_place(source: Path, target: Path) -> None:
            replace(source, target)
            self._dirty[target] = set(range(target.stat().st_size // PAGE_SIZE + 1))

        patch.setattr(os, "pwrite", pwrite)
        patch.setattr(os, "replace", put_in_place)
        for name, original in syncs.items():
            patch.setattr(os, name, lambda fd, original=original: self._sync(fd, original))

    def _sync(self, fd: int, original: Callable[[int], None]) -> None:
        path = _path_of(fd)
        dirty = self._dirty.pop(path, set())
        if self.failing and path.name.endswith(self.failing):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if path.is_file():
            content = path.read_bytes()
            for page in dirty:
                at = page * PAGE_SIZE
                self._pages.setdefault(path, {})[page] = content[at : at + PAGE_SIZE]
        original(fd)

    def lose_power(self) -> None:
        """Files have what the disk has; where a page was never written, zeros."""
        for path in self._folder.glob("t-*/*"):
            pages = self._pages.get(path, {})
            content = bytearray(
                max((page * PAGE_SIZE + len(data) for page, data in pages.items()), default=0)
            )
            for page, data in pages.items():
                content[page * PAGE_SIZE : page * PAGE_SIZE + len(data)] = data
            path.write_bytes(content)


def _path_of(fd: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{fd}"))


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(tmp_path, monkeypatch)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[[], LogManager]]:
    """Starts a broker's logs; the ones that were started before are killed."""
    managers: list[LogManager] = []

    def start() -> LogManager:
        for manager in managers:
            kill(manager)
        managers.append(LogManager([tmp_path], LogConfig(index_interval_bytes=1)))
        managers[-1].start(0)
        return managers[-1]

    yield start
    for manager in managers:
        kill(manager)


def abort(log: Log, producer_id: int) -> None:
    """Two records: one in a transaction, and the marker that aborts it."""
    append(log, producer_id=producer_id, producer_epoch=0, base_sequence=0, transactional=True)
    marker = build_marker(producer_id, 0, 0, committed=False, now_ms=0)
    log.append(memoryview(marker), leader_epoch=0, now_ms=0, origin="internal")


def kill(manager: LogManager) -> None:
    for folder in manager._folders:
        folder.release()


def fill(log: Log, count: int = 3) -> None:
    for _ in range(count):
        append(log, size=3000)


def fail_a_flush(manager: LogManager, disk: Disk, key: tuple[str, int], name: str) -> None:
    log = manager.get(key)
    assert log is not None
    disk.failing = name
    with pytest.raises(KafkaStorageError):
        log.flush(1)
    disk.failing = ""


@pytest.mark.safety
@pytest.mark.parametrize("name", [".log", LEADER_EPOCH_CHECKPOINT, ".txnindex"])
def test_what_is_recovered_after_a_failed_sync_is_on_the_disk_once_a_flush_says_so(
    disk: Disk, started: Callable[[], LogManager], name: str
) -> None:
    manager = started()
    log = manager.create(KEY)
    abort(log, producer_id=6)
    fill(log)
    log.flush(0)
    manager.checkpoint()
    fill(log)
    abort(log, producer_id=7)
    append(log, leader_epoch=3)
    fail_a_flush(manager, disk, KEY, name)

    after = started()
    again = after.get(KEY)
    assert again is not None and (again.recovery_point, again.end_offset) == (11, 11)
    again.config = LogConfig(segment_bytes=4000)  # it is rolled: the next start reads it no more
    fill(again, 2)
    again.flush(1)
    after.checkpoint()

    disk.lose_power()
    last = started().get(KEY)
    assert last is not None, "flushed records are missing"
    assert (last.end_offset, last.leader_epochs.entries) == (13, [(0, 0), (3, 10)])
    assert last.aborted_transactions(0, 13) == ((6, 0), (7, 8))


def test_mark_of_a_failed_sync_stays_until_all_is_on_the_disk_and_no_end_is_clean_meanwhile(
    tmp_path: Path, disk: Disk, started: Callable[[], LogManager]
) -> None:
    manager = started()
    for key in (KEY, OTHER):
        fill(manager.create(key))
    fail_a_flush(manager, disk, KEY, ".log")
    assert (tmp_path / FAILED_SYNC_MARKER).exists()
    manager.close()
    assert not (tmp_path / CLEAN_SHUTDOWN_MARKER).exists()

    disk.failing = ".log"  # still
    with pytest.raises(DataFolderNotWritable):
        started()
    assert (tmp_path / FAILED_SYNC_MARKER).exists()
    disk.failing = ""

    better = started()
    assert not better.was_clean
    assert [log.recovery_point for log in better.logs().values()] == [3, 3]
    assert any("a sync had failed before this start" in note for note in better.notes)
    assert not (tmp_path / FAILED_SYNC_MARKER).exists()
    better.close()
    assert read_offsets(tmp_path / RECOVERY_POINT_CHECKPOINT) == {KEY: 3, OTHER: 3}
    assert started().was_clean


def test_mark_stays_while_a_partition_cannot_be_opened(
    tmp_path: Path, disk: Disk, started: Callable[[], LogManager]
) -> None:
    manager = started()
    for key in (KEY, OTHER):
        fill(manager.create(key))
    fail_a_flush(manager, disk, KEY, ".log")
    os.rename(tmp_path / "t-1", tmp_path / "elsewhere")
    (tmp_path / "t-1").mkdir()
    (tmp_path / "t-1" / "partition.metadata").write_text("nonsense")
    assert set(started().offline) == {OTHER}
    assert (tmp_path / FAILED_SYNC_MARKER).exists()


def test_a_close_whose_sync_fails_leaves_the_mark(
    tmp_path: Path, disk: Disk, started: Callable[[], LogManager]
) -> None:
    manager = started()
    fill(manager.create(KEY))
    disk.failing = ".log"
    manager.close()
    assert (tmp_path / FAILED_SYNC_MARKER).exists()
    assert not (tmp_path / CLEAN_SHUTDOWN_MARKER).exists()


def test_where_no_mark_can_be_left_the_operator_is_told_what_to_do(
    tmp_path: Path, disk: Disk, started: Callable[[], LogManager], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = started()
    fill(manager.create(KEY))

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "touch", fails)
    fail_a_flush(manager, disk, KEY, ".log")
    (note,) = manager.notes
    assert str(tmp_path) in note and "unmount its file system" in note


def test_a_clean_end_of_another_program_is_not_believed_beside_the_mark(
    tmp_path: Path, disk: Disk, started: Callable[[], LogManager]
) -> None:
    """Apache Kafka, started on the folder in between, leaves its mark of a clean end and ours where it is."""
    manager = started()
    fill(manager.create(KEY))
    fail_a_flush(manager, disk, KEY, ".log")
    (tmp_path / CLEAN_SHUTDOWN_MARKER).touch()
    assert not started().was_clean
    assert not (tmp_path / CLEAN_SHUTDOWN_MARKER).exists()
