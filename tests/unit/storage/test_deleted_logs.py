"""A deleted log touches no path: another topic of its name has files of the same names there, at once."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.broker.errors import KafkaError, KafkaStorageError
from millrace.broker.storage.checkpoints import sync_directory
from millrace.broker.storage.data_folder import FAILED_SYNC_MARKER
from millrace.broker.storage.log import Log
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.log_manager import LogManager
from tests.stored_batches import batches_of
from tests.waiting import patience

from .conftest import append

KEY = ("t", 0)
OLD, NEW = uuid.uuid4(), uuid.uuid4()
RECORDS = 5


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[LogManager]:
    made = LogManager([tmp_path / "data"], LogConfig(segment_bytes=150, index_interval_bytes=1))
    made.start(0)
    yield made
    made.close()


def first(manager: LogManager) -> Log:
    """The topic's log before it is deleted: several segments, all of them old."""
    log = manager.create(KEY, topic_id=OLD)
    for _ in range(7):
        append(log, leader_epoch=1)
    return log


def second(manager: LogManager) -> Log:
    """Deletes it, and makes the next topic of the name, with records that are acknowledged."""
    manager.delete(KEY)
    log = manager.create(KEY, topic_id=NEW)
    for _ in range(RECORDS):
        append(log, leader_epoch=2)
    return log


def files(log: Log) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in log.directory.iterdir()}


def assert_whole(manager: LogManager) -> None:
    """Also after a clean restart."""
    manager.close()
    again = LogManager([folder.path for folder in manager._folders], LogConfig())
    again.start(0)
    log = again.get(KEY)
    assert log is not None and log.topic_id == NEW, again.offline
    assert (len(list(batches_of(log))), log.leader_epochs.entries) == (RECORDS, [(2, 0)])
    assert again.notes == []
    again.close()


def test_housekeeping_on_a_deleted_log_leaves_the_next_of_its_name_alone(manager: LogManager) -> None:
    log = first(manager)
    log.config = LogConfig(retention_ms=1, segment_bytes=150, flush_ms=0)
    made: list[dict[str, bytes]] = []

    def deleted_meanwhile(_: Any) -> int:
        if not made:
            made.append(files(second(manager)))
        return 100

    manager.housekeeping(10**9, deleted_meanwhile)
    fresh = manager.get(KEY)
    assert fresh is not None
    assert files(fresh)[f"{0:020d}.log"] == made[0][f"{0:020d}.log"]
    assert_whole(manager)


WORK: dict[str, Callable[[Log], object]] = {
    "anchor": lambda log: log.anchor(),
    "append": append,
    "close": lambda log: log.close(0),
    "flush": lambda log: log.flush(0),
    "forget epochs": lambda log: log.forget_empty_epochs(),
    "move the start": lambda log: log.advance_start_offset(6),
    "read by a wrong index": lambda log: log.read(1, 1),
    "read by time": lambda log: log.offset_for_time(1000),
    "retention": lambda log: log.delete_old_segments(10**9, 100),
    "roll": lambda log: log.roll_if_due(10**12),
    "start anew": lambda log: log.start_anew(0, 0),
    "truncate": lambda log: log.truncate_to(1, 0),
}


@pytest.mark.parametrize("work", WORK)
def test_work_that_comes_late_to_a_deleted_log_changes_no_file(manager: LogManager, work: str) -> None:
    log = first(manager)
    log.config = LogConfig(retention_ms=1, segment_bytes=150)
    log.begin_epoch(9)
    fresh = second(manager)
    fresh.flush(0)
    before = files(fresh)
    try:
        WORK[work](log)
    except KafkaError as error:
        assert isinstance(error, KafkaStorageError)
    assert files(fresh) == before
    assert fresh.topic_id == NEW
    assert_whole(manager)


def test_log_that_failed_and_was_deleted_leaves_the_next_of_its_name_alone(manager: LogManager) -> None:
    log = first(manager)
    log.health.fail("a write could not be taken back", None)
    assert KEY in manager.offline
    manager.delete(KEY)
    before = files(second(manager))
    with pytest.raises(KafkaStorageError):
        log.delete_old_segments(10**9, 100)
    fresh = manager.get(KEY)
    assert fresh is not None and files(fresh) == before


def test_who_deletes_second_takes_nothing_of_the_next_of_its_name(
    manager: LogManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = first(manager)
    retire = log.retire

    def overtaken(reason: str, rename: Callable[[], None]) -> None:
        monkeypatch.setattr(log, "retire", retire)
        second(manager)
        retire(reason, rename)

    monkeypatch.setattr(log, "retire", overtaken)
    manager.delete(KEY)
    fresh = manager.get(KEY)
    assert fresh is not None and fresh.topic_id == NEW
    sync_directory(fresh.directory)
    assert_whole(manager)


@pytest.mark.safety
def test_a_slow_flush_holds_up_no_deletion_and_touches_nothing_of_the_next_of_its_name(
    manager: LogManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who deletes applies what the cluster has decided, of other topics too."""
    log = first(manager)
    began, goes_on = threading.Event(), threading.Event()
    fdatasync = os.fdatasync

    def slow(fd: int) -> None:
        if threading.current_thread() is flushing:
            began.set()
            assert goes_on.wait(patience())
        fdatasync(fd)

    refused: list[KafkaStorageError] = []

    def flush() -> None:
        try:
            log.flush(0)
        except KafkaStorageError as error:
            refused.append(error)

    flushing = threading.Thread(target=flush)
    monkeypatch.setattr(os, "fdatasync", slow)
    flushing.start()
    assert began.wait(patience())
    deleting = threading.Thread(target=manager.delete, args=(KEY,), daemon=True)
    deleting.start()
    deleting.join(patience(10))
    assert not deleting.is_alive(), "the deletion waits for the flush"
    fresh = second(manager)
    fresh.flush(0)
    before = files(fresh)
    goes_on.set()
    flushing.join()
    assert [str(error) for error in refused] == ["t-0 is deleted"]
    assert files(fresh) == before
    assert not (fresh.directory.parent / FAILED_SYNC_MARKER).exists()
    assert_whole(manager)
