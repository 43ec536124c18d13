"""Checkpoints that are empty: as Apache Kafka makes them long before it writes to them, or after a loss. A
start goes on as if they were not there, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.replication.high_watermarks import HIGH_WATERMARK_CHECKPOINT, HighWatermarkCheckpoints
from millrace.broker.storage import checkpoints
from millrace.broker.storage.checkpoints import (
    CHECKPOINTS_DIGEST,
    CLEANER_CHECKPOINT,
    HOLES_MARKER,
    LEADER_EPOCH_CHECKPOINT,
    LOG_START_OFFSET_CHECKPOINT,
    NEW_PARTITIONS,
    RECOVERY_POINT_CHECKPOINT,
)
from millrace.broker.storage.log import Log
from millrace.broker.storage.log_check import FolderFacts, Totals, check_partition
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.log_manager import LogManager

from .compaction import clean, compacted_config, pairs, put, roll
from .conftest import append

KEY: TopicPartition = ("t", 0)
OF_A_FOLDER = (RECOVERY_POINT_CHECKPOINT, LOG_START_OFFSET_CHECKPOINT, CLEANER_CHECKPOINT)


def started(folder: Path) -> LogManager:
    manager = LogManager([folder], LogConfig(flush_ms=0))
    manager.start(0)
    return manager


def killed(manager: LogManager) -> None:
    manager.checkpoint()
    for folder in manager._folders:
        folder.release()


def log_of(manager: LogManager) -> Log:
    log = manager.get(KEY)
    assert log is not None, manager.offline
    return log


def emptied(path: Path) -> str:
    """Empties the file; what a start says of it."""
    path.write_bytes(b"")
    return f"{path} is empty; taken as if it were not there"


@pytest.mark.parametrize("name", OF_A_FOLDER)
@pytest.mark.parametrize("is_clean", [True, False], ids=["closed", "killed"])
def test_no_record_is_lost_with_the_entries_of_a_folder(tmp_path: Path, name: str, is_clean: bool) -> None:
    manager = started(tmp_path)
    log = manager.create(KEY)
    for epoch in 1, 1, 4:
        append(log, leader_epoch=epoch)
    log.flush(0)
    if is_clean:
        manager.close()
    else:
        killed(manager)
    said = emptied(tmp_path / name)
    again = started(tmp_path)
    reopened = log_of(again)
    assert [note for note in again.notes if "checkpoint" in note] == [said]
    assert (reopened.start_offset, reopened.end_offset) == (0, 3)
    assert reopened.leader_epochs.entries == [(1, 0), (4, 2)]
    assert append(reopened, leader_epoch=4).base_offset == 3
    again.close()


def test_without_recovery_points_all_that_was_flushed_is_read(tmp_path: Path) -> None:
    """Offset 0 is not where the log was flushed to, but where looking begins."""
    manager = started(tmp_path)
    log = manager.create(KEY)
    append(log)
    append(log)
    log.flush(0)
    killed(manager)
    path = log.directory / f"{0:020d}.log"
    torn = path.read_bytes()[:-1]
    path.write_bytes(torn)
    emptied(tmp_path / RECOVERY_POINT_CHECKPOINT)
    again = started(tmp_path)
    assert log_of(again).end_offset == 1
    again.close()


@pytest.mark.parametrize("content", [b"", None], ids=["empty", "missing"])
def test_leader_epochs_come_from_the_batches_also_after_a_clean_end(
    tmp_path: Path, content: bytes | None
) -> None:
    """A clean end's batches are not read otherwise: the next epoch would be the first that is known, and a
    follower's history could be compared with none before it."""
    manager = started(tmp_path)
    log = manager.create(KEY)
    for epoch in 1, 1, 4:
        append(log, leader_epoch=epoch)
    manager.close()
    path = log.directory / LEADER_EPOCH_CHECKPOINT
    path.unlink() if content is None else path.write_bytes(content)
    again = started(tmp_path)
    assert [note for note in again.notes if "leader epochs" in note] == [
        f"{log.directory}: no leader epochs were on record; rebuilt from the log"
    ]
    assert log_of(again).leader_epochs.entries == checkpoints.read_epochs(path) == [(1, 0), (4, 2)]
    again.close()


def test_log_of_which_everything_is_deleted_has_no_leader_epochs_and_no_damage(tmp_path: Path) -> None:
    """Its batches are in its file still."""
    manager = started(tmp_path)
    log = manager.create(KEY)
    append(log, leader_epoch=3)
    log.advance_start_offset(1)
    manager.close()
    for _ in range(2):
        again = started(tmp_path)
        assert again.notes == []
        assert log_of(again).leader_epochs.entries == []
        again.close()
    facts, problems = FolderFacts.read(tmp_path)
    assert problems + check_partition(log.directory, facts, Totals()) == []


def test_empty_leader_epochs_of_a_log_without_batches_are_no_news(tmp_path: Path) -> None:
    manager = started(tmp_path)
    log = manager.create(KEY)
    manager.close()
    (log.directory / LEADER_EPOCH_CHECKPOINT).write_bytes(b"")
    again = started(tmp_path)
    assert (log_of(again).leader_epochs.entries, again.notes) == ([], [])
    again.close()


def test_hole_of_a_compaction_that_nobody_knows_of_any_more_ends_no_log(tmp_path: Path) -> None:
    """Apache Kafka's compaction leaves no mark beside the log. Where its topic is not compacted any more, the
    cleaner's checkpoint alone tells of it, and the recovery point that nothing is to be cut below."""
    manager = started(tmp_path)
    log = manager.create(KEY)
    log.config = compacted_config(index_interval_bytes=1)
    for value in "1234":
        put(log, ("a", value), ("b", value))
    roll(log)
    put(log, ("c", "1"))
    clean(log)
    log.flush(0)
    left, end_offset = pairs(log), log.end_offset
    killed(manager)
    (log.directory / HOLES_MARKER).unlink()
    (tmp_path / CHECKPOINTS_DIGEST).unlink(missing_ok=True)
    for name in OF_A_FOLDER:
        emptied(tmp_path / name)
    for _ in range(2):  # by the next start there may be recovery points again, below the hole
        again = started(tmp_path)
        assert (pairs(log_of(again)), log_of(again).end_offset) == (left, end_offset)
        assert (log.directory / HOLES_MARKER).exists()
        killed(again)


def test_log_without_holes_is_not_taken_for_one_that_may_have_some_by_the_next_start(tmp_path: Path) -> None:
    manager = started(tmp_path)
    log = manager.create(KEY)
    append(log)
    append(log)
    killed(manager)
    for name in OF_A_FOLDER:
        emptied(tmp_path / name)
    killed(started(tmp_path))
    assert not (log.directory / HOLES_MARKER).exists()


def test_segment_that_is_gone_after_a_clean_end_is_damage_though_nothing_is_known_of_compactions(
    tmp_path: Path,
) -> None:
    manager = started(tmp_path)
    log = manager.create(KEY)
    for _ in range(3):
        put(log, ("a", "1"))
        roll(log)
    gone = log.segments[1].path
    manager.close()
    for path in gone.parent.glob(f"{gone.stem}.*"):
        path.unlink()
    for name in OF_A_FOLDER:
        emptied(tmp_path / name)
    again = started(tmp_path)
    assert "offsets 1 to 2 are missing" in str(again.offline[KEY])
    again.close()


def test_batches_without_leader_epochs_need_none_on_record(tmp_path: Path) -> None:
    manager = started(tmp_path)
    log = manager.create(KEY)
    append(log, leader_epoch=-1)
    manager.close()
    facts, problems = FolderFacts.read(tmp_path)
    assert problems + check_partition(log.directory, facts, Totals()) == []


def test_empty_list_of_new_partitions_is_said(tmp_path: Path) -> None:
    killed(started(tmp_path))
    said = emptied(tmp_path / NEW_PARTITIONS)
    again = started(tmp_path)
    assert again.notes == [said]
    again.close()


def test_high_watermarks_that_are_not_there_are_0_until_others_tell_them(tmp_path: Path) -> None:
    said = emptied(tmp_path / HIGH_WATERMARK_CHECKPOINT)
    marks = HighWatermarkCheckpoints([tmp_path], lambda *_: None)
    assert (marks.get(tmp_path, KEY), marks.notes) == (0, [said])
