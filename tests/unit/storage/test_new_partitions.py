"""Logs that are made many at a time: what the disk is waited for, and what a loss of power leaves of them."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest

from millrace.broker.errors import KafkaStorageError
from millrace.broker.storage import checkpoints, data_folder, log_housekeeping
from millrace.broker.storage.checkpoints import NEW_PARTITIONS, PARTITION_METADATA, RECOVERY_POINT_CHECKPOINT
from millrace.broker.storage.log import Log
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.log_manager import LogManager

from .conftest import append

KEY = ("t", 0)
OLD, NEW = UUID(int=1), UUID(int=2)


def _started(folder: Path) -> LogManager:
    manager = LogManager([folder], LogConfig())
    manager.start(0)
    return manager


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[LogManager]:
    made = _started(tmp_path / "data")
    yield made
    made.close()


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what has been synced, in order."""
    names: list[str] = []
    for function in ("fsync", "fdatasync"):
        original = getattr(os, function)

        def sync(fd: int, original: object = original) -> None:
            names.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
            original(fd)  # type: ignore[operator]

        monkeypatch.setattr(os, function, sync)
    return names


def _after_power_loss(folder: Path, to: Path, lost: str) -> LogManager:
    """The folder as a loss of power may leave it, when `t-0` was never flushed."""
    shutil.copytree(folder, to)
    if lost == "directory":
        shutil.rmtree(to / "t-0")
    elif lost == "name":
        (to / "t-0" / PARTITION_METADATA).unlink()
    else:
        (to / "t-0" / PARTITION_METADATA).write_bytes(b"")
    return _started(to)


def test_disk_is_waited_for_once_for_many_logs(manager: LogManager, synced: list[str]) -> None:
    made = manager.create_all({("t", number): True for number in range(50)}, topic_id=NEW)
    assert synced == [NEW_PARTITIONS + ".tmp", "data"]
    assert all(isinstance(log, Log) and log.topic_id == NEW for log in made.values())
    assert checkpoints.read_topic_id(manager.logs()[KEY].directory) == NEW


def test_disk_is_waited_for_once_for_very_many_that_are_made_a_few_at_a_time(
    manager: LogManager, synced: list[str]
) -> None:
    keys = [("t", number) for number in range(50)]
    manager.announce(keys, NEW)
    for start in range(0, 50, 10):
        manager.create_all(dict.fromkeys(keys[start : start + 10], True), topic_id=NEW)
    assert synced == [NEW_PARTITIONS + ".tmp", "data"]
    assert {log.topic_id for log in manager.logs().values()} == {NEW}
    manager.create_all({("t", 50): True}, topic_id=NEW)
    assert synced == [NEW_PARTITIONS + ".tmp", "data"] * 2, "of one more the disk has not been told"


def test_what_has_a_directory_keeps_the_announcement_that_it_was_made_under(
    manager: LogManager, tmp_path: Path
) -> None:
    append(manager.create(KEY, topic_id=OLD))
    manager.announce([KEY, ("t", 1)], NEW)
    told = checkpoints.read_new_partitions(tmp_path / "data" / NEW_PARTITIONS)
    assert told == {KEY: OLD, ("t", 1): NEW}
    manager.create(KEY, topic_id=NEW)
    assert checkpoints.read_new_partitions(tmp_path / "data" / NEW_PARTITIONS)[KEY] == NEW


def test_the_folder_that_fails_is_taken_out_of_service_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / "b", tmp_path / "a"]
    manager = LogManager(folders, LogConfig())
    manager.start(0)
    failing = next(folder for folder in manager._folders if folder.path.name == "a")
    failing.recovery_points[KEY] = 7  # of a topic that was deleted

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(failing, "write_checkpoints", fail)
    manager.announce([KEY, ("t", 1)], NEW)
    assert set(manager.failed_folders) == {tmp_path / "a"}
    log = manager.create(KEY, topic_id=NEW)
    assert log.directory.parent == tmp_path / "b"
    manager.close()


def test_what_stays_in_a_folder_keeps_the_announcement_that_it_was_made_under(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its directory could not be taken away with its topic; the next of the name may go elsewhere."""
    manager = LogManager([tmp_path / "a", tmp_path / "b"], LogConfig())
    manager.start(0)
    append(manager.create(KEY, topic_id=OLD))

    def fail(*_: object) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch, pytest.raises(KafkaStorageError):
        patch.setattr(os, "rename", fail)
        manager.delete(KEY)
    manager.announce([KEY], NEW)
    assert checkpoints.read_new_partitions(tmp_path / "a" / NEW_PARTITIONS) == {KEY: OLD}
    assert checkpoints.read_new_partitions(tmp_path / "b" / NEW_PARTITIONS) == {KEY: NEW}
    manager.close()


def test_disk_that_fails_at_an_announcement_is_taken_out_of_service(
    manager: LogManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(data_folder, "write_new_partitions", fail)
        manager.announce([KEY], NEW)
    with pytest.raises(KafkaStorageError):
        manager.create(KEY, topic_id=NEW)


def test_first_flush_makes_the_directory_durable(
    manager: LogManager, synced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = manager.create(KEY, topic_id=NEW)
    append(log)
    synced.clear()
    log.flush(0)
    assert {PARTITION_METADATA + ".tmp", "t-0", "data"} <= set(synced)
    synced.clear()
    append(log)
    log.flush(0)
    assert synced == [f"{0:020d}.log"], "later ones wait for the batches only"
    other = manager.create(("t", 1), topic_id=NEW)
    append(other)

    def fail(directory: Path, topic_id: UUID) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(KafkaStorageError):
        patch.setattr("millrace.broker.storage.log_durability.write_topic_id", fail)
        other.flush(0)
    assert other.recovery_point == 0


@pytest.mark.parametrize("lost", ["name", "content"])
def test_directory_without_its_topic_id_has_the_announced_one(
    manager: LogManager, tmp_path: Path, lost: str
) -> None:
    append(manager.create(KEY, topic_id=OLD))
    manager.checkpoint()
    again = _after_power_loss(tmp_path / "data", tmp_path / "copy", lost)
    log = again.get(KEY)
    assert log is not None, again.offline
    assert (log.topic_id, log.end_offset) == (OLD, 1)
    log = again.create(KEY, topic_id=NEW)  # while the broker was away, the topic was made anew
    assert (log.topic_id, log.end_offset) == (NEW, 0)
    again.close()


def test_directory_that_is_gone_is_made_anew_and_no_checkpoint_speaks_of_it(
    manager: LogManager, tmp_path: Path
) -> None:
    log = manager.create(KEY, topic_id=OLD)
    append(log)
    manager.create(("other", 0))
    manager.checkpoint()
    assert KEY not in checkpoints.read_offsets(tmp_path / "data" / RECOVERY_POINT_CHECKPOINT)
    again = _after_power_loss(tmp_path / "data", tmp_path / "copy", "directory")
    assert KEY not in again.offline
    log = again.create(KEY, topic_id=OLD, is_new=False)
    assert (log.start_offset, log.end_offset, log.topic_id) == (0, 0, OLD)
    again.close()


def test_old_directory_is_gone_before_the_new_one_is_announced(
    manager: LogManager, monkeypatch: pytest.MonkeyPatch, synced: list[str]
) -> None:
    """Else the records of the old topic, whose own id is lost, would be taken for the new one's."""
    directory = manager.create(KEY, topic_id=OLD).directory
    synced.clear()
    original = data_folder.write_new_partitions

    def write(path: Path, topic_ids: dict[tuple[str, int], UUID]) -> None:
        assert not directory.exists()
        assert synced == ["data"], "the removal is on the disk"
        original(path, topic_ids)

    with monkeypatch.context() as patch:
        patch.setattr(data_folder, "write_new_partitions", write)
        assert manager.create(KEY, topic_id=NEW).topic_id == NEW
    path = directory.parent / NEW_PARTITIONS
    assert checkpoints.read_new_partitions(path) == {KEY: NEW}
    manager.delete(KEY)
    manager.create(KEY)
    assert checkpoints.read_new_partitions(path) == {}, "of no topic id: nobody's is taken for its own"


def test_announcements_go_when_the_logs_are_durable(manager: LogManager, tmp_path: Path) -> None:
    manager.create_all({("t", number): True for number in range(3)}, topic_id=NEW)
    path = tmp_path / "data" / NEW_PARTITIONS
    append(manager.logs()[KEY])
    manager.logs()[KEY].flush(0)
    manager.delete(("t", 1))
    log_housekeeping.settle(manager)
    assert checkpoints.read_new_partitions(path) == {("t", 2): NEW}
    manager.housekeeping(0)
    assert not path.exists()
    again = _after_power_loss(tmp_path / "data", tmp_path / "copy", "name")
    log = again.get(KEY)
    assert log is not None
    assert log.topic_id is None, "(which a disk that keeps its word does not do)"
    again.close()


def test_start_offset_is_kept_only_of_what_is_durable(manager: LogManager, tmp_path: Path) -> None:
    log = manager.create(KEY, topic_id=NEW)
    append(log, 5)
    log.advance_start_offset(3)
    assert not log.is_anchored
    manager.checkpoint()
    assert log.is_anchored
    again = _after_power_loss(tmp_path / "data", tmp_path / "copy", "none of it")
    assert KEY in again.offline, "its topic id was durable: that is damage"
    again.close()


def test_folder_without_room_for_the_announcement_makes_nothing(
    manager: LogManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(data_folder, "write_new_partitions", fail)
        made = manager.create_all({KEY: True, ("t", 1): True}, topic_id=NEW)
    assert all(isinstance(error, KafkaStorageError) for error in made.values())
    assert manager.partitions() == set()
    assert manager.healthy_folders
    assert manager.create(KEY, topic_id=NEW).topic_id == NEW
