"""Logs that the cluster does not know are kept; what is not known of a topic costs none of its records."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest

from millrace.broker.coordination.topic_configs import TopicSettings, recovery_config
from millrace.broker.errors import DataFolderLocked
from millrace.broker.storage import checkpoints
from millrace.broker.storage.data_folder import CLEAN_SHUTDOWN_MARKER
from millrace.broker.storage.log_config import UNREADABLE, LogConfig
from millrace.broker.storage.log_manager import LogManager

from .conftest import append, make_batch

KEY = ("t", 0)
OLD, NEW = UUID(int=1), UUID(int=2)
COMPACTED = {"cleanup.policy": "compact"}


def _started(folder: Path, settings: dict[str, str] | None = None) -> LogManager:
    manager = LogManager([folder], LogConfig())
    manager.start(0, lambda *_: LogConfig.for_recovery(settings, LogConfig()))
    return manager


def _stray(folder: Path) -> Path:
    found = sorted(folder.glob("t-0.*-stray"))
    assert len(found) == 1, sorted(folder.iterdir())
    return found[0]


def test_a_log_set_aside_is_kept_named_and_told_again_at_each_start(tmp_path: Path) -> None:
    manager = _started(tmp_path)
    append(manager.create(KEY, topic_id=OLD), 3)
    manager.set_aside(KEY, "the cluster has no such topic")
    stray = _stray(tmp_path)
    assert manager.strays == [stray]
    (note,) = manager.notes
    assert stray.name in note and str(OLD) in note and "remove it if" in note
    assert manager.partitions() == set()
    manager.housekeeping(now_ms=10)
    manager.close()

    again = _started(tmp_path)
    again.housekeeping(now_ms=10)
    assert again.partitions() == set()
    assert any(stray.name in note for note in again.notes)
    assert again.strays == [stray]
    elsewhere = stray.rename(tmp_path / "elsewhere")
    again.housekeeping(now_ms=20)
    assert again.strays == []
    again.close()

    elsewhere.rename(tmp_path / "t-0")
    back = _started(tmp_path)
    log = back.get(KEY)
    assert log is not None and (log.end_offset, log.topic_id) == (3, OLD)
    back.close()


def test_a_topic_of_another_id_does_not_cost_the_records_of_the_one_that_is_there(tmp_path: Path) -> None:
    """ZooKeeper may be the older of the two."""
    manager = _started(tmp_path)
    append(manager.create(KEY, topic_id=NEW), 3)
    made = manager.create(KEY, topic_id=OLD)
    manager.housekeeping(now_ms=10)
    stray = _stray(tmp_path)
    assert (made.end_offset, made.topic_id) == (0, OLD)
    assert (stray / f"{0:020d}.log").stat().st_size == len(make_batch(3))
    manager.close()


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        (COMPACTED, 8),
        (None, 8),
        ({UNREADABLE: "no JSON"}, 8),
        ({"cleanup.policy": "shred"}, 8),
        ({"retention.ms": "soon", **COMPACTED}, 8),
        ({}, 2),
    ],
    ids=["compacted", "unknown", "unreadable", "unusable", "another unusable", "not compacted"],
)
def test_holes_cost_records_only_where_the_topic_is_known_not_to_be_compacted(
    tmp_path: Path, settings: dict[str, str] | None, kept: int
) -> None:
    directory = tmp_path / "t-0"
    directory.mkdir()
    batches = make_batch(2) + make_batch(2, base_offset=6)
    (directory / f"{0:020d}.log").write_bytes(batches)
    manager = _started(tmp_path, settings)
    log = manager.get(KEY)
    assert log is not None and log.end_offset == kept
    manager.close()


@pytest.mark.safety
@pytest.mark.parametrize(
    ("of_the_log", "of_the_topic", "kept"),
    [(OLD, NEW, 8), (OLD, None, 8), (OLD, OLD, 2), (None, NEW, 2)],
    ids=["another's", "not known", "its own", "it does not say"],
)
def test_a_log_is_not_cut_at_its_holes_by_the_settings_of_another_topic_of_its_name(
    tmp_path: Path, of_the_log: UUID | None, of_the_topic: UUID | None, kept: int
) -> None:
    """The compacted topic was deleted, and one that is not compacted made in its name, while this broker was
    away; a folder of Apache Kafka's has no mark of its holes. The log is about to be set aside."""
    directory = tmp_path / "t-0"
    directory.mkdir()
    (directory / f"{0:020d}.log").write_bytes(make_batch(2) + make_batch(2, base_offset=6))
    if of_the_log is not None:
        checkpoints.write_topic_id(directory, of_the_log)
    known = {"t": TopicSettings(of_the_topic, {})}
    manager = LogManager([tmp_path], LogConfig())
    manager.start(0, lambda topic, topic_id: recovery_config(known, topic, topic_id, LogConfig()))
    log = manager.get(KEY)
    assert log is not None and log.end_offset == kept
    manager.close()


def test_folders_that_were_only_taken_are_left_as_they_were(tmp_path: Path) -> None:
    """A broker that is refused between taking its folders and opening its logs must not speak for them."""
    manager = _started(tmp_path)
    log = manager.create(KEY, topic_id=OLD)
    append(log, 3)
    log.flush(0)
    manager.checkpoint()
    for folder in manager._folders:
        folder.release()  # as a kill does
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}

    refused = LogManager([tmp_path], LogConfig())
    refused.take()
    with pytest.raises(DataFolderLocked):
        LogManager([tmp_path], LogConfig()).take()
    assert refused.topics() == {"t"}
    refused.close()
    refused.open(0)  # a thread that came late
    assert refused.partitions() == set()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
    assert not (tmp_path / CLEAN_SHUTDOWN_MARKER).exists()
