"""Data folders: clean and unclean ends, what is offline alone, locks, removal, checkpoints."""

from __future__ import annotations

import errno
import uuid
from pathlib import Path

import pytest

from millrace.broker.errors import DataFolderLocked, DataFolderNotWritable, InvalidConfig, KafkaStorageError
from millrace.broker.storage import checkpoints, departed_logs
from millrace.broker.storage.data_folder import CLEAN_SHUTDOWN_MARKER
from millrace.broker.storage.log_config import SETTINGS, LogConfig
from millrace.broker.storage.log_manager import LogManager

from .conftest import append, make_batch

TP = ("a-b.c", 3)


def _started(*folders: Path, config: LogConfig | None = None) -> LogManager:
    manager = LogManager(folders, config or LogConfig())
    manager.start(now_ms=0)
    return manager


def test_logs_come_back_after_a_clean_end(tmp_path: Path) -> None:
    manager = _started(tmp_path)
    topic_id = uuid.uuid4()
    append(manager.create(TP, topic_id=topic_id), 4)
    manager.close()
    assert (tmp_path / CLEAN_SHUTDOWN_MARKER).exists()
    again = _started(tmp_path)
    assert not (tmp_path / CLEAN_SHUTDOWN_MARKER).exists()
    log = again.get(TP)
    assert log is not None
    assert (log.end_offset, log.topic_id, again.notes) == (4, topic_id, [])
    again.close()


def _abandon(manager: LogManager) -> None:
    """What a kill leaves: nothing is closed, only the lock goes with the process."""
    for folder in manager._folders:
        folder.release()


def test_unclean_end_recovers_from_the_checkpoint(tmp_path: Path) -> None:
    manager = _started(tmp_path, config=LogConfig(flush_ms=0))
    log = manager.create(TP)
    append(log, 4)
    manager.housekeeping(now_ms=10)
    append(log, 2)
    with (log.directory / f"{0:020d}.log").open("ab") as file:
        file.write(b"torn")
    _abandon(manager)
    assert checkpoints.read_offsets(tmp_path / checkpoints.RECOVERY_POINT_CHECKPOINT) == {TP: 4}
    again = _started(tmp_path)
    recovered = again.get(TP)
    assert recovered is not None
    assert recovered.end_offset == 6
    assert any("4 bytes after offset 6" in note for note in again.notes)
    again.close()


@pytest.mark.parametrize("was_clean", [False, True])
@pytest.mark.parametrize("is_settled", [False, True])
def test_unclean_end_is_told_at_each_start_until_nobody_counts_on_what_it_took(
    tmp_path: Path, was_clean: bool, is_settled: bool
) -> None:
    """A broker may be stopped, or lose ZooKeeper, after it has recovered its logs and before it has left the
    in-sync sets."""
    before = _started(tmp_path)
    append(before.create(TP), 4)
    before.close() if was_clean else _abandon(before)
    manager = LogManager([tmp_path], LogConfig())
    manager.take()
    manager.open(0)
    if is_settled:
        manager.settle_unclean_end()
    manager.close()
    following = _started(tmp_path)
    assert following.was_clean is (was_clean or is_settled)
    following.close()


def test_damaged_partition_is_offline_alone_and_stays_untouched(tmp_path: Path) -> None:
    manager = _started(tmp_path, config=LogConfig(flush_ms=0))
    for partition in (0, 1):
        append(manager.create(("t", partition)), 4)
    manager.housekeeping(now_ms=10)
    path = tmp_path / "t-0" / f"{0:020d}.log"
    hurt = bytearray(path.read_bytes())
    hurt[16] ^= 1
    path.write_bytes(hurt)
    _abandon(manager)
    again = _started(tmp_path)
    assert ("t", 0) in again.offline
    assert "\n" not in again.offline["t", 0]
    assert again.get(("t", 0)) is None
    assert again.partitions() == {("t", 0), ("t", 1)}
    with pytest.raises(KafkaStorageError, match="damaged"):
        again.create(("t", 0))
    other = again.get(("t", 1))
    assert other is not None
    assert append(other).base_offset == 4
    again.close()
    assert not (tmp_path / CLEAN_SHUTDOWN_MARKER).exists(), "the damage must not be taken for clean"
    assert path.read_bytes() == hurt
    assert checkpoints.read_offsets(tmp_path / checkpoints.RECOVERY_POINT_CHECKPOINT)["t", 0] == 4


def test_data_folder_is_used_by_one_process(tmp_path: Path) -> None:
    manager = _started(tmp_path)
    with pytest.raises(DataFolderLocked, match="in use"):
        _started(tmp_path)
    manager.close()
    _started(tmp_path).close()


def test_data_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataFolderNotWritable, match="name another"):
        _started(tmp_path / "file" / "data")


def test_deleted_partition_is_gone_at_once_and_removed_later(tmp_path: Path) -> None:
    manager = _started(tmp_path)
    log = manager.create(TP)
    append(log)
    manager.delete(TP)
    assert manager.get(TP) is None
    assert not (tmp_path / "a-b.c-3").exists()
    with pytest.raises(KafkaStorageError, match="deleted"):
        append(log)
    assert manager.create(TP).end_offset == 0, "the name is free at once"
    assert len(list(tmp_path.glob("*-delete"))) == 1
    manager.look_at_room(0)
    assert not list(tmp_path.glob("*-delete"))
    manager.close()


def test_what_is_in_the_way_of_a_removal_is_told_and_tried_again_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = _started(tmp_path)
    manager.create(TP)
    manager.delete(TP)

    def refused(_path: Path) -> None:
        raise PermissionError("not yours")

    with monkeypatch.context() as patch:
        patch.setattr(departed_logs.shutil, "rmtree", refused)
        for _ in range(3):
            manager.look_at_room(0)
        assert [note.partition(" is not removed yet: ")[2] for note in manager.notes] == ["not yours"]
        manager.housekeeping(0)
        assert len(manager.notes) == 2
    manager.look_at_room(0)
    assert len(list(tmp_path.glob("*-delete"))) == 1
    manager.housekeeping(0)
    assert not list(tmp_path.glob("*-delete"))
    manager.close()


def test_removal_that_a_crash_interrupted_is_finished(tmp_path: Path) -> None:
    manager = _started(tmp_path)
    manager.create(TP)
    manager.delete(TP)
    _abandon(manager)
    again = _started(tmp_path)
    assert again.get(TP) is None
    again.housekeeping(0)
    assert not list(tmp_path.glob("*-delete"))
    again.close()


def test_topic_made_again_does_not_get_the_old_topic_s_log(tmp_path: Path) -> None:
    manager = _started(tmp_path)
    append(manager.create(TP, topic_id=uuid.UUID(int=1)))
    assert manager.create(TP, topic_id=uuid.UUID(int=1)).end_offset == 1
    assert manager.create(TP, topic_id=uuid.UUID(int=2)).end_offset == 0
    manager.close()


def test_new_log_goes_to_the_folder_with_the_fewest(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    manager = _started(*folders)
    for partition in range(4):
        manager.create(("t", partition))
    assert [len(logs) for logs in manager.logs_by_folder().values()] == [2, 2]
    manager.close()
    (folders[1] / "t-0").mkdir(exist_ok=True)
    (folders[0] / "t-0").mkdir(exist_ok=True)
    again = _started(*folders)
    assert "both hold" in again.offline["t", 0]
    again.close()


def test_start_offset_survives_a_crash(tmp_path: Path) -> None:
    manager = _started(tmp_path)
    log = manager.create(TP)
    append(log, 2)
    append(log, 2)
    log.advance_start_offset(3)
    manager.checkpoint()
    _abandon(manager)
    again = _started(tmp_path)
    reopened = again.get(TP)
    assert reopened is not None
    assert (reopened.start_offset, reopened.end_offset) == (3, 4)
    again.close()


def test_damaged_checkpoint_is_taken_as_empty_and_said(tmp_path: Path) -> None:
    manager = _started(tmp_path)
    append(manager.create(TP), 2)
    _abandon(manager)
    (tmp_path / checkpoints.RECOVERY_POINT_CHECKPOINT).write_text("0\n7\nx")
    again = _started(tmp_path)
    log = again.get(TP)
    assert log is not None
    assert log.end_offset == 2
    assert any("announces 7 entries" in note for note in again.notes)
    again.close()


def test_strange_folders_are_left_alone(tmp_path: Path) -> None:
    for name in ("lost+found", "t-x", "t-1-future"):
        (tmp_path / name).mkdir()
    manager = _started(tmp_path)
    assert manager.partitions() == set()
    manager.close()
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"lost+found", "t-x", "t-1-future"}


def test_checkpoint_files_have_kafka_s_text(tmp_path: Path) -> None:
    path = tmp_path / "recovery-point-offset-checkpoint"
    checkpoints.write_offsets(path, {("b", 1): 5, ("a", 0): 7})
    assert path.read_text() == "0\n2\na 0 7\nb 1 5\n"
    checkpoints.write_epochs(tmp_path / "leader-epoch-checkpoint", [(0, 0), (2, 9)], sync=False)
    assert (tmp_path / "leader-epoch-checkpoint").read_text() == "0\n2\n0 0\n2 9\n"
    checkpoints.write_topic_id(tmp_path, uuid.UUID(int=255))
    assert (tmp_path / "partition.metadata").read_text() == "version: 0\ntopic_id: AAAAAAAAAAAAAAAAAAAA_w\n"
    assert checkpoints.read_topic_id(tmp_path) == uuid.UUID(int=255)


def test_topic_settings_are_checked_by_name_and_value() -> None:
    config = LogConfig.from_topic_config(
        {"cleanup.policy": "compact,delete", "segment.bytes": " 1000 ", "preallocate": "true"}
    )
    assert config.is_compacted
    assert config.is_deleted_by_retention
    assert config.segment_bytes == 1000
    assert config.value_of("cleanup.policy") == "delete,compact"
    for settings in (
        {"retention.ms": "-2"},
        {"segment.bytes": "x"},
        {"cleanup.policy": "shred"},
        {"segment.bytes": "1_000"},
        {"nope": "1"},
    ):
        with pytest.raises(InvalidConfig, match=next(iter(settings))):
            LogConfig.from_topic_config(settings)
    assert LogConfig.from_broker_config({"log.retention.ms": "72", "other": "x"}).retention_ms == 72
    for name, setting in SETTINGS.items():
        assert setting.parse(setting.default) == getattr(LogConfig(), setting.field_name), name


def test_batch_reaches_its_log_by_the_manager(tmp_path: Path) -> None:
    manager = _started(tmp_path)
    manager.create(TP).append(make_batch(), leader_epoch=0, now_ms=0)
    log = manager.logs()[TP]
    log.config = LogConfig(max_message_bytes=10)
    with pytest.raises(Exception, match=r"max\.message\.bytes"):
        append(log)
    manager.close()


def test_topic_made_anew_does_not_inherit_checkpoints_after_a_kill(tmp_path: Path) -> None:
    """The old topic's log start would make the next start throw the new topic's records away."""
    manager = _started(tmp_path)
    old = manager.create(TP, topic_id=uuid.uuid4())
    append(old, 50)
    old.advance_start_offset(40)
    old.flush(0)
    manager.checkpoint()
    manager.delete(TP)
    new = manager.create(TP, topic_id=uuid.uuid4())
    append(new, 7)
    _abandon(manager)
    again = _started(tmp_path)
    recovered = again.get(TP)
    assert recovered is not None, again.offline
    assert (recovered.start_offset, recovered.end_offset) == (0, 7)
    assert not again.notes
    again.close()


def test_topic_made_anew_after_a_start_does_not_inherit_checkpoints(tmp_path: Path) -> None:
    manager = _started(tmp_path)
    old = manager.create(TP, topic_id=uuid.uuid4())
    append(old, 50)
    old.advance_start_offset(40)
    old.flush(0)
    manager.checkpoint()
    manager.delete(TP)
    _abandon(manager)  # before any checkpoint without it
    manager = _started(tmp_path)
    append(manager.create(TP, topic_id=uuid.uuid4()), 7)
    _abandon(manager)
    again = _started(tmp_path)
    recovered = again.get(TP)
    assert recovered is not None, again.offline
    assert (recovered.start_offset, recovered.end_offset) == (0, 7)
    again.close()


def test_directory_of_another_topic_that_could_not_be_removed_is_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = _started(tmp_path)
    append(manager.create(TP, topic_id=uuid.uuid4()), 5)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr("millrace.broker.storage.log_manager.os.rename", refuse)
        with pytest.raises(KafkaStorageError, match="cannot be renamed"):
            manager.delete(TP)
    with pytest.raises(KafkaStorageError, match="another topic"):
        manager.create(TP, topic_id=uuid.uuid4())
    manager.close()


def test_retention_makes_room_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = LogConfig(segment_bytes=400, retention_bytes=400, index_interval_bytes=1, flush_ms=0)
    manager = _started(tmp_path, config=config)
    log = manager.create(TP)
    for _ in range(18):
        append(log, leader_epoch=1)
    segment_count = len(log.segments)
    log.leader_epochs.assign(2, log.end_offset)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("millrace.broker.storage.index_file.os.pwrite", full)
        patch.setattr("millrace.broker.storage.checkpoints.os.write", full)
        manager.housekeeping(now_ms=10)
    assert log.recovery_point == 0, "the flush had to fail"
    assert len(log.segments) < segment_count
    assert len(list(log.directory.glob("*.log"))) == len(log.segments)
    assert not list(log.directory.glob("*.deleted"))
    assert not manager.offline
    append(log, leader_epoch=2)
    manager.close()
