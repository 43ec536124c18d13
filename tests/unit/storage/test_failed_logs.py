"""A log that fails alone, leader epochs that a full disk did not take."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from millrace.broker.errors import KafkaStorageError
from millrace.broker.protocol.control_records import build_marker
from millrace.broker.storage import checkpoints, leader_epochs, log_durability
from millrace.broker.storage.checkpoints import (
    LEADER_EPOCH_CHECKPOINT,
    PARTITION_METADATA,
    RECOVERY_POINT_CHECKPOINT,
)
from millrace.broker.storage.data_folder import CLEAN_SHUTDOWN_MARKER, FAILED_SYNC_MARKER
from millrace.broker.storage.log import Log
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.log_manager import LogManager
from millrace.broker.storage.segment import LogFile

from .conftest import append

OpenLog = Callable[..., Log]
KEY = ("t", 0)
TOPIC_ID = UUID(int=1)


def _raise(number: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[LogManager]:
    made = LogManager([tmp_path / "data"], LogConfig(flush_ms=0))
    made.start(0)
    yield made
    made.close()


def _fails_by(name: str, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(KafkaStorageError):
        if name == "sync":
            patch.setattr(os, "fdatasync", _raise(errno.ENOSPC))
            log.flush(1)
        elif name == "write that cannot be taken back":
            patch.setattr(LogFile, "write", _raise(errno.ENOSPC))
            patch.setattr(os, "ftruncate", _raise(errno.ENOSPC))
            append(log)
        else:
            patch.setattr(os, "ftruncate", _raise(errno.ENOSPC))
            log.truncate_to(1, 1)


@pytest.mark.parametrize("name", ["sync", "write that cannot be taken back", "truncation"])
def test_log_that_fails_alone_is_told_and_offline(
    manager: LogManager, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    told: list[Any] = []
    manager.on_log_failure = lambda key, reason: told.append((key, reason))
    log, other = manager.create(KEY), manager.create(("t", 1))
    for each in (log, other):
        append(each, 3)
    _fails_by(name, log, monkeypatch)
    assert told == [(KEY, log.failure)]
    assert manager.offline == {KEY: log.failure}
    assert manager.get(KEY) is None
    with pytest.raises(KafkaStorageError):
        manager.create(KEY)
    assert not manager.failed_folders
    append(other)
    manager.housekeeping(10)
    assert len(told) == 1
    assert other.recovery_point == 4


def test_failed_log_is_never_called_flushed(manager: LogManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsync reports a lost page once: a second one succeeds and proves nothing."""
    log = manager.create(KEY)
    append(log)
    log.flush(0)
    manager.checkpoint()
    append(log)
    _fails_by("sync", log, monkeypatch)
    with pytest.raises(KafkaStorageError):
        log.flush(2)
    manager.housekeeping(3)
    assert log.recovery_point == 1
    manager.close(4)
    folder = log.directory.parent
    assert checkpoints.read_offsets(folder / RECOVERY_POINT_CHECKPOINT)[KEY] == 1
    assert not (folder / ".kafka_cleanshutdown").exists(), "the next start looks at what is there"


def test_log_that_fails_during_a_flush_is_not_called_flushed(
    manager: LogManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = manager.create(KEY)
    append(log)
    original = os.fdatasync

    def fdatasync(fd: int) -> None:
        original(fd)
        _fails_by("write that cannot be taken back", log, monkeypatch)

    with monkeypatch.context() as patch, pytest.raises(KafkaStorageError):
        patch.setattr(os, "fdatasync", fdatasync)
        log.flush(0)
    assert log.recovery_point == 0


def test_log_that_is_deleted_during_a_flush_is_gone_after_it(
    manager: LogManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the part of it that goes by names; the other waits for nobody (`test_deleted_logs.py`)."""
    log = manager.create(KEY)
    append(log)
    original = log_durability.sync_directory
    deleting = threading.Thread(target=manager.delete, args=(KEY,))

    def sync_directory(directory: Path) -> None:
        if not deleting.ident:
            deleting.start()
        original(directory)
        assert log.directory.exists(), "the flush writes there"

    with monkeypatch.context() as patch:
        patch.setattr(log_durability, "sync_directory", sync_directory)
        log.flush(0)
    deleting.join()
    assert manager.get(KEY) is None and not log.directory.exists()
    assert not manager.failed_folders
    assert not manager.offline


@pytest.mark.parametrize("is_made_anew", [True, False])
def test_log_that_was_deleted_and_fails_later_takes_nothing_offline(
    manager: LogManager, is_made_anew: bool
) -> None:
    health = manager.create(KEY).health
    manager.delete(KEY)
    successor = manager.create(KEY) if is_made_anew else None
    health.fail("t-0: lost", None)
    assert manager.get(KEY) is successor
    assert not manager.offline


# -- a flush that could not try


def _when_opened(name: str, number: int, patch: pytest.MonkeyPatch) -> None:
    """Opening a file or folder whose name ends like `name` fails."""
    original = os.open

    def open_(path: Any, *given: Any) -> int:
        if str(path).endswith(name):
            raise OSError(number, os.strerror(number), str(path))
        return original(path, *given)

    patch.setattr(os, "open", open_)


@pytest.fixture
def quiet(manager: LogManager) -> Iterator[LogManager]:
    """A manager of which no log and no folder goes offline until the end of the test, and no sync fails."""
    told: list[Any] = []
    manager.on_folder_failure = lambda *given: told.append(given)
    manager.on_log_failure = lambda *given: told.append(given)
    yield manager
    assert told == []
    assert not manager.failed_folders
    assert not manager.offline
    assert not list(manager.logs_by_folder().popitem()[0].glob(FAILED_SYNC_MARKER))


@pytest.mark.parametrize("name", [LEADER_EPOCH_CHECKPOINT, ".txnindex", "/t-0"])
def test_flush_without_a_free_descriptor_is_tried_again(
    quiet: LogManager, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Connections have taken them all: nothing was synced, so nothing is known to be lost."""
    log = quiet.create(KEY, topic_id=TOPIC_ID)
    append(log)
    log.flush(0)
    log.config = LogConfig(segment_ms=1)
    epoch = int(name == LEADER_EPOCH_CHECKPOINT)  # else its sync would sync the folder, too
    append(log, leader_epoch=epoch, producer_id=7, producer_epoch=0, base_sequence=0, transactional=True)
    marker = build_marker(7, 0, 0, committed=False, now_ms=0)
    log.append(memoryview(marker), leader_epoch=epoch, now_ms=0, origin="internal")
    assert log.roll_if_due(10**9)
    append(log, leader_epoch=epoch)
    with monkeypatch.context() as patch, pytest.raises(KafkaStorageError) as caught:
        _when_opened(name, errno.EMFILE, patch)
        log.flush(1)
    assert caught.value.retriable
    assert (log.recovery_point, log.failure) == (1, None)
    append(log, leader_epoch=epoch)
    synced: list[str] = []
    for function in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, function, lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    log.flush(2)
    assert log.recovery_point == log.end_offset == 5
    assert [path for path in synced if path.endswith(name)]
    assert str(log.directory) in synced, "the new segment's name"


@pytest.mark.parametrize("call", ["open", "fsync"])
def test_first_flush_that_has_no_room_for_the_topic_id_is_tried_again(
    quiet: LogManager, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    log = quiet.create(KEY, topic_id=TOPIC_ID)
    append(log)
    temporary = PARTITION_METADATA + ".tmp"
    original = os.fsync

    def fsync(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(temporary):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(fd)

    with monkeypatch.context() as patch, pytest.raises(KafkaStorageError):
        if call == "open":
            _when_opened(temporary, errno.ENOSPC, patch)
        else:
            patch.setattr(os, "fsync", fsync)
        log.flush(0)
    assert (log.recovery_point, log.failure, log.is_anchored) == (0, None, False)
    append(log)
    log.flush(1)
    assert (log.recovery_point, log.is_anchored) == (2, True)


def test_close_without_a_free_descriptor_is_not_clean_and_no_failed_sync(
    manager: LogManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = manager.create(KEY, topic_id=TOPIC_ID)
    append(log, leader_epoch=1)
    with monkeypatch.context() as patch:
        _when_opened(LEADER_EPOCH_CHECKPOINT, errno.EMFILE, patch)
        manager.close(1)
    folder = log.directory.parent
    assert not (folder / CLEAN_SHUTDOWN_MARKER).exists()
    assert not (folder / FAILED_SYNC_MARKER).exists()
    again = LogManager([folder], LogConfig())
    again.start(0)
    recovered = again.get(KEY)
    assert recovered is not None and recovered.end_offset == 1
    again.close()


# -- leader epochs


def _without_room(monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(leader_epochs, "write_epochs", _raise(errno.ENOSPC))
        work()


@pytest.mark.parametrize("earlier", [True, False])
def test_epoch_that_a_full_disk_did_not_take_is_durable_before_its_batches(
    manager: LogManager, monkeypatch: pytest.MonkeyPatch, earlier: bool, tmp_path: Path
) -> None:
    log = manager.create(KEY)
    if earlier:
        append(log, leader_epoch=1)
        log.flush(0)
    start = log.end_offset
    _without_room(monkeypatch, lambda: append(log, leader_epoch=3))
    log.flush(1)
    assert not manager.failed_folders
    assert log.recovery_point == start + 1
    manager.checkpoint()
    copy = tmp_path / "copy"
    shutil.copytree(log.directory.parent, copy)  # as after a kill
    written = checkpoints.read_epochs(copy / "t-0" / LEADER_EPOCH_CHECKPOINT)
    assert written == ([(1, 0)] if earlier else []) + [(3, start)]
    again = LogManager([copy], LogConfig())
    again.start(0)
    recovered = again.get(KEY)
    assert recovered is not None
    assert recovered.leader_epochs.entries == ([(1, 0)] if earlier else []) + [(3, start)]
    again.close()


def test_flush_waits_while_there_is_no_room_for_the_epochs(
    manager: LogManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = manager.create(KEY)

    def work() -> None:
        append(log, leader_epoch=3)
        with pytest.raises(KafkaStorageError) as caught:
            log.flush(1)
        assert caught.value.retriable

    _without_room(monkeypatch, work)
    assert (log.recovery_point, log.failure) == (0, None)
    assert append(log, leader_epoch=3).base_offset == 1
    log.flush(2)
    assert log.recovery_point == 2
    path = log.directory / LEADER_EPOCH_CHECKPOINT
    assert checkpoints.read_epochs(path) == [(3, 0)]


def test_start_on_a_full_disk_opens_the_log(open_log: OpenLog, monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_log()
    append(log, leader_epoch=3)
    (log.directory / LEADER_EPOCH_CHECKPOINT).unlink()
    opened: list[Log] = []
    _without_room(monkeypatch, lambda: opened.append(open_log(recovery_point=0)))
    assert opened[0].leader_epochs.entries == [(3, 0)]
    opened[0].flush(1)
    assert checkpoints.read_epochs(log.directory / LEADER_EPOCH_CHECKPOINT) == [(3, 0)]
