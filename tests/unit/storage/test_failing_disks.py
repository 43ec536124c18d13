"""Disks that are full, that fail, that come back with less than was promised."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from millrace.broker.errors import (
    DataFolderLocked,
    DataFolderNotWritable,
    KafkaStorageError,
    OutOfOrderSequence,
)
from millrace.broker.protocol.batch import parse_header
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.storage import checkpoints, data_folder, log_reshaping
from millrace.broker.storage.checkpoints import RECOVERY_POINT_CHECKPOINT
from millrace.broker.storage.data_folder import PROBE_FILE
from millrace.broker.storage.disk_room import QUIET_MS
from millrace.broker.storage.log import Log
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.log_manager import LogManager
from millrace.broker.storage.segment import LogFile, Segment
from tests import root_rights
from tests.stored_batches import batches_of

from .conftest import append, make_batch

OpenLog = Callable[..., Log]


def _started(*folders: Path, **config: Any) -> LogManager:
    manager = LogManager(folders, LogConfig(**config))
    manager.start(now_ms=0)
    return manager


def _raise(number: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


# -- one folder of two


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[LogManager, list[tuple[Path, str, list[TopicPartition]]]]]:
    """A manager of two folders with two logs in each, and what it told of failures."""
    manager = _started(tmp_path / "one", tmp_path / "two")
    for number in range(4):
        append(manager.create(("t", number)), 2)
    told: list[tuple[Path, str, list[TopicPartition]]] = []
    manager.on_folder_failure = lambda path, reason, keys: told.append((path, reason, sorted(keys)))
    yield manager, told
    manager.close()


def _fails_by(name: str, manager: LogManager, monkeypatch: pytest.MonkeyPatch) -> None:
    log = manager.logs()["t", 0]
    with monkeypatch.context() as patch, pytest.raises(KafkaStorageError):
        if name == "write":
            patch.setattr(LogFile, "write", _raise(errno.EIO))
            append(log)
        elif name == "read-only":
            patch.setattr(LogFile, "write", _raise(errno.EROFS))
            append(log)
        elif name == "fsync":
            patch.setattr(os, "fdatasync", _raise(errno.EINTR))
            log.flush(0)
        elif name == "read":
            patch.setattr(LogFile, "read", _raise(errno.EIO))
            log.read(0, 100)
        elif name == "search by time":
            patch.setattr(LogFile, "read", _raise(errno.EIO))
            log.offset_for_time(0)
        elif name == "newest record":
            patch.setattr(LogFile, "read", _raise(errno.EIO))
            log.max_timestamp()
        elif name == "roll":
            log.config = LogConfig(segment_bytes=150)
            patch.setattr(os, "open", _raise(errno.EIO))
            append(log)
        else:
            patch.setattr(os, "ftruncate", _raise(errno.EIO))
            log.truncate_to(1, 0)


@pytest.mark.parametrize(
    "name",
    ["write", "read-only", "fsync", "read", "search by time", "newest record", "roll", "truncate"],
)
def test_folder_whose_disk_fails_goes_offline_alone(
    two: tuple[LogManager, list[Any]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    manager, told = two
    logs = manager.logs()
    folder = logs["t", 0].directory.parent
    inside = sorted(key for key, log in logs.items() if log.directory.parent == folder)
    others = sorted(set(logs) - set(inside))
    assert len(inside) == 2
    _fails_by(name, manager, monkeypatch)
    assert [(path, keys) for path, _, keys in told] == [(folder, inside)]
    assert "\n" not in told[0][1]
    assert sorted(manager.offline) == inside
    assert manager.healthy_folders == list(manager.logs_by_folder()) != [folder]
    for key in inside:
        assert manager.get(key) is None
        with pytest.raises(KafkaStorageError):
            append(logs[key])
        with pytest.raises(KafkaStorageError):
            manager.create(key)
    for key in others:
        append(logs[key])
    for number in (7, 8):
        assert manager.create(("new", number)).directory.parent != folder
    with pytest.raises(KafkaStorageError, match="may lie in a data folder that is offline"):
        manager.create(("old", 1), is_new=False)
    assert ("old", 1) in manager.offline
    manager.housekeeping(0)
    assert len(told) == 1, "it is said once"
    manager.close()
    again = _started(folder, folder.with_name("two" if folder.name == "one" else "one"))
    assert sorted(again.logs()) == sorted([*inside, *others, ("new", 7), ("new", 8)])
    again.close()


def test_full_disk_leaves_the_folder_in_use(
    two: tuple[LogManager, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, told = two
    log = manager.logs()["t", 0]
    for number in (errno.ENOSPC, errno.EDQUOT):
        with monkeypatch.context() as patch:
            patch.setattr(LogFile, "write", _raise(number))
            with pytest.raises(KafkaStorageError) as caught:
                append(log)
        assert caught.value.retriable
    assert not told
    assert append(log).base_offset == 2


def test_folder_that_refuses_writes_is_told_once_and_when_it_takes_them_again(
    two: tuple[LogManager, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, _ = two
    log, later = (manager.logs()["t", number] for number in (0, 2))
    folder = log.directory.parent
    assert later.directory.parent == folder
    room = manager.rooms[folder]
    assert (manager.look_at_room(0), room.is_refusing) == ([], False)
    assert room.free_bytes is not None and room.free_bytes > 0
    with monkeypatch.context() as patch:
        patch.setattr(LogFile, "write", _raise(errno.ENOSPC))
        for each in (log, later):
            with pytest.raises(KafkaStorageError):
                append(each)
    (began,) = manager.look_at_room(1_000)
    assert (began.folder, began.is_refusing, began.refusals) == (folder, True, 2)
    assert "No space left on device" in began.reason and "\n" not in began.reason
    assert [one.is_refusing for one in manager.rooms.values()].count(True) == 1, "the other folder's disk"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", _raise(errno.EDQUOT))
        with pytest.raises(KafkaStorageError):
            later.flush(0)
    assert manager.look_at_room(2_000) == [], "it is said once"
    assert manager.look_at_room(2_000 + QUIET_MS - 1) == [], "producers may not have tried again yet"
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", _raise(errno.ENOSPC))
        assert manager.look_at_room(3_000 + QUIET_MS) == [], "that nobody writes is no sign of room"
    assert room.is_refusing
    (ended,) = manager.look_at_room(4_000 + QUIET_MS)
    assert (ended.folder, ended.is_refusing, ended.refusals) == (folder, False, 3)
    assert not (folder / PROBE_FILE).exists()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.os, "open", _raise(errno.ENOSPC))
        made = manager.create_all({("new", number): True for number in range(2)}, topic_id=uuid4())
    assert all(isinstance(each, KafkaStorageError) for each in made.values())
    assert {change.is_refusing for change in manager.look_at_room(20_000)} == {True}, "a new count begins"


def test_what_follows_a_refused_batch_of_a_producer_waits_for_it(
    two: tuple[LogManager, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pipelined batches: the first meets a full disk, the second finds room again. It would be out of order,
    which makes librdkafka send things again under a new epoch, elsewhere too."""
    log = two[0].logs()["t", 0]

    def send(sequence: int, producer_id: int = 7, epoch: int = 0) -> int:
        identity = {"producer_id": producer_id, "producer_epoch": epoch, "base_sequence": sequence}
        return append(log, **identity).base_offset

    for first in (0, 1):  # a producer that is not known yet, and one that is
        with monkeypatch.context() as patch:
            patch.setattr(LogFile, "write", _raise(errno.ENOSPC))
            for sequence in (first, first + 1):
                with pytest.raises(KafkaStorageError):
                    send(sequence)
        with pytest.raises(KafkaStorageError):
            send(first + 1)
        send(0, producer_id=8 + first)  # others are not held up
        send(first)
    assert send(1) == send(1), "a repeated batch is a repeated batch"
    assert send(2) > send(1)
    with pytest.raises(OutOfOrderSequence):
        send(4)
    with monkeypatch.context() as patch:
        patch.setattr(LogFile, "write", _raise(errno.ENOSPC))
        with pytest.raises(KafkaStorageError):
            send(3)
    send(0, epoch=1)  # who begins anew waits for nothing
    send(1, epoch=1)


def test_log_is_cut_on_a_full_disk(
    two: tuple[LogManager, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A follower on a full disk that learns of another history: its log must not be lost for that."""
    manager, told = two
    log = manager.logs()["t", 0]
    log.config = LogConfig(index_interval_bytes=1)
    for _ in range(9):
        append(log)
    with monkeypatch.context() as patch:
        for call in ("write", "pwrite", "pwritev"):
            patch.setattr(os, call, _raise(errno.ENOSPC))
        log.truncate_to(7, 0)
    assert (log.end_offset, log.failure, told) == (7, None, [])
    assert append(log).base_offset == 7
    for offset in range(2, 8):
        assert parse_header(log.read(offset, 1).data).base_offset == offset
    manager.close()


def test_sync_that_fails_for_want_of_room_takes_one_log(
    two: tuple[LogManager, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was promised to this file is gone, so it cannot go on; nothing speaks against the others."""
    manager, told = two
    log = manager.logs()["t", 0]
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", _raise(errno.ENOSPC))
        with pytest.raises(KafkaStorageError):
            log.flush(0)
    with pytest.raises(KafkaStorageError):
        append(log)
    assert not told
    assert not manager.failed_folders
    for number in (1, 2, 3):
        append(manager.logs()["t", number])


def test_folder_that_cannot_be_used_does_not_stop_the_others(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    manager = _started(tmp_path / "file" / "data", tmp_path / "good")
    assert list(manager.failed_folders) == [tmp_path / "file" / "data"]
    assert manager.create(("t", 0)).directory.parent == tmp_path / "good"
    with pytest.raises(KafkaStorageError):
        manager.create(("t", 1), is_new=False)
    manager.close()
    with pytest.raises(DataFolderNotWritable):
        _started(tmp_path / "file" / "a", tmp_path / "file" / "b")


def test_folder_of_another_process_stops_the_start_and_frees_the_others(tmp_path: Path) -> None:
    first = _started(tmp_path / "one")
    with pytest.raises(DataFolderLocked):
        _started(tmp_path / "two", tmp_path / "one")
    _started(tmp_path / "two").close()
    first.close()


def test_folder_that_fails_while_it_is_opened_goes_offline_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = (tmp_path / "one", tmp_path / "two")
    manager = _started(*folders)
    for number in range(4):
        append(manager.create(("t", number)))
    manager.close()
    original = os.listdir

    def listdir(path: Any) -> list[str]:
        if Path(path).parent == folders[0]:
            raise OSError(errno.EIO, "Input/output error")
        return original(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", listdir)
        again = _started(*folders)
    assert list(again.failed_folders) == [folders[0]]
    assert len(again.logs()) == 2
    again.close()


# -- a disk without room


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 400 KB."""
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode != 0:
        root_rights.lacks(f"no tmpfs can be mounted here: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_writes_are_refused_while_a_real_disk_is_full(small_disk: Path) -> None:
    manager = _started(small_disk, segment_bytes=50_000, index_interval_bytes=1000, flush_ms=0)
    log = manager.create(("t", 0))
    refusals = 0
    stored = []
    for number in range(2000):
        try:
            stored.append(append(log, size=500, timestamp_ms=number).base_offset)
        except KafkaStorageError as error:
            assert error.retriable
            assert "\n" not in str(error)
            refusals += 1
        if number % 100 == 0:
            manager.housekeeping(number)
    assert refusals > 100
    assert stored == list(range(len(stored)))
    assert not manager.failed_folders
    assert not manager.offline
    assert len(list(batches_of(log))) == len(stored), "nothing half-written is visible"
    log.config = LogConfig(segment_bytes=50_000, retention_bytes=100_000)
    manager.housekeeping(3000)
    assert append(log, size=500).base_offset == len(stored), "there is room again"
    log.flush(3000)
    assert log.recovery_point == log.end_offset
    manager.notes.clear()
    manager.close(3000)
    again = _started(small_disk)
    reopened = again.get(("t", 0))
    assert reopened is not None
    assert (reopened.end_offset, again.notes) == (len(stored) + 1, [])
    assert len(list(batches_of(reopened))) == reopened.end_offset - reopened.start_offset
    again.close()


# -- truncation and power loss


def test_checkpoint_is_lowered_before_a_truncation_cuts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = _started(tmp_path)
    log = manager.create(("t", 0))
    for _ in range(10):
        append(log)
    log.flush(0)
    manager.checkpoint()
    seen = []
    original = os.ftruncate

    def ftruncate(fd: int, size: int) -> None:
        seen.append(checkpoints.read_offsets(tmp_path / RECOVERY_POINT_CHECKPOINT))
        original(fd, size)

    monkeypatch.setattr(os, "ftruncate", ftruncate)
    log.truncate_to(4, 0)
    assert seen == [{("t", 0): 4}]
    manager.close()


def test_crash_after_truncation_and_new_writes_trusts_nothing_unflushed(tmp_path: Path) -> None:
    manager = _started(tmp_path / "a")
    log = manager.create(("t", 0))
    for _ in range(10):
        append(log)
    log.flush(0)
    manager.checkpoint()
    log.truncate_to(4, 0)
    for _ in range(6):
        append(log, leader_epoch=2)
    # Power is lost: of what was written after the truncation, a block did not get to the disk.
    size = len(make_batch())
    copy = tmp_path / "b"
    shutil.copytree(tmp_path / "a", copy)
    path = copy / "t-0" / f"{0:020d}.log"
    content = bytearray(path.read_bytes())
    content[7 * size : 8 * size] = bytes(size)
    path.write_bytes(content)
    again = _started(copy)
    recovered = again.get(("t", 0))
    assert recovered is not None, again.offline
    assert recovered.end_offset == 7
    again.close()
    manager.close()


@pytest.mark.safety
@pytest.mark.parametrize("cut", [Log.start_anew, Log.truncate_to], ids=["begun anew", "cut below its start"])
def test_log_that_begins_at_a_lower_offset_lowers_every_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: Callable[[Log, int, int], None]
) -> None:
    """Checkpoints that are written beside it, by another thread, say nothing else either."""
    manager = _started(tmp_path / "a")
    log = manager.create(("t", 0))
    for _ in range(10):
        append(log)
    log.advance_start_offset(8)
    log.flush(0)
    manager.checkpoint()
    original = log_reshaping.remove_files

    def remove_files(segments: Sequence[Segment]) -> None:
        manager.checkpoint()
        original(segments)

    monkeypatch.setattr(log_reshaping, "remove_files", remove_files)
    cut(log, 3, 0)
    for _ in range(2):
        append(log)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    again = _started(tmp_path / "b")
    recovered = again.get(("t", 0))
    assert recovered is not None
    assert (recovered.start_offset, recovered.end_offset) == (3, 5)
    again.close()
    manager.close()


def test_log_whose_checkpoints_cannot_be_lowered_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = _started(tmp_path)
    log = manager.create(("t", 0))
    for _ in range(10):
        append(log)
    log.advance_start_offset(8)
    log.flush(0)
    manager.checkpoint()
    with monkeypatch.context() as patched:
        patched.setattr(data_folder, "write_offsets", _raise(errno.ENOSPC))
        with pytest.raises(KafkaStorageError, match="nothing is cut"):
            log.truncate_to(3, 0)
    assert (log.start_offset, log.end_offset, log.failure) == (8, 10, None)
    manager.close()


@pytest.mark.safety
@pytest.mark.parametrize(
    ("start", "cut", "end"),
    [(50, 82, 80), (50, 55, 55), (52, 53, 52), (52, 55, 55), (50, 50, 50)],
    ids=["within a batch", "between two", "in the batch of the start", "behind it", "at the start"],
)
def test_truncation_brings_no_deleted_record_back(tmp_path: Path, start: int, cut: int, end: int) -> None:
    manager = _started(tmp_path / "a")
    log = manager.create(("t", 0))
    for _ in range(20):
        append(log, 5)
    log.advance_start_offset(start)
    log.flush(0)
    manager.checkpoint()
    log.truncate_to(cut, 0)
    assert (log.start_offset, log.end_offset) == (start, end)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    again = _started(tmp_path / "b")
    recovered = again.get(("t", 0))
    assert recovered is not None, again.offline
    assert (recovered.start_offset, recovered.end_offset) == (start, end)
    again.close()
    manager.close()


def test_recovery_reads_only_what_is_past_the_recovery_point(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log()
    for _ in range(300):
        append(log, size=20_000)
    log.flush(0)
    flushed = log.end_offset
    for _ in range(20):
        append(log, size=20_000)
    counted = [0, 0]
    original = LogFile.read

    def read(file: LogFile, position: int, size: int) -> bytes:
        data = original(file, position, size)
        counted[0] += len(data)
        counted[1] += 1
        return data

    monkeypatch.setattr(LogFile, "read", read)
    again = open_log(recovery_point=flushed)
    assert again.end_offset == 320
    assert counted[0] < 21 * 20_100 + 64 * 1024, f"{counted} of {again.size} bytes"
    assert counted[1] < 100, "the index leads to the recovery point"
    assert [parse_header(batch).base_offset for batch in batches_of(again, 318)] == [318, 319]


def test_index_below_the_recovery_point_is_kept_and_right(open_log: OpenLog) -> None:
    log = open_log(index_interval_bytes=500)
    for number in range(200):
        append(log, timestamp_ms=1000 + number)
        if number == 120:
            log.flush(0)
    log.close()
    expected = {path.name: path.read_bytes() for path in log.directory.glob("*index")}
    again = open_log(recovery_point=121, index_interval_bytes=500)
    again.close()
    assert {path.name: path.read_bytes() for path in log.directory.glob("*index")} == expected
