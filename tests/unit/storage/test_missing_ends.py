"""Flushed batches that are missing where one batch ends and the next would begin: every file reads well, and
the offsets of what is missing would be given again."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from millrace.broker.storage.checkpoints import HOLES_MARKER
from millrace.broker.storage.log import Log
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.log_manager import LogManager
from tests.stored_batches import batches_of

from .conftest import append, make_batch

KEY = ("t", 0)
SIZE = len(make_batch())
CONFIG = LogConfig(segment_bytes=4 * SIZE)
ENDS = 10
"""Segments begin at 0, 4 and 8."""


def started(folder: Path) -> LogManager:
    manager = LogManager([folder], CONFIG)
    manager.start(0)
    return manager


def end(manager: LogManager, *, clean: bool) -> None:
    """The broker is closed, or killed."""
    if clean:
        manager.close()
    for folder in manager._folders:
        folder.release()


def flushed(folder: Path, *, clean: bool) -> Log:
    """A log of ten batches, all flushed, by a broker that was closed or killed."""
    manager = started(folder)
    log = manager.create(KEY)
    for _ in range(ENDS):
        append(log)
    log.flush(0)
    manager.checkpoint()
    end(manager, clean=clean)
    return log


def segment(log: Log, base: int) -> Path:
    return log.directory / f"{base:020d}.log"


DAMAGE: dict[str, tuple[Callable[[Log], None], str]] = {
    "the active segment is cut": (lambda log: os.truncate(segment(log, 8), SIZE), "9 to 10"),
    "the active segment is empty": (lambda log: os.truncate(segment(log, 8), 0), "8 to 10"),
    "the last segment is gone": (lambda log: segment(log, 8).unlink(), "8 to 10"),
    "a segment in the middle is gone": (lambda log: segment(log, 4).unlink(), "4 to 8"),
    "a segment in the middle is cut": (lambda log: os.truncate(segment(log, 4), SIZE), "5 to 8"),
    "all segments are gone": (
        lambda log: [segment(log, base).unlink() for base in (0, 4, 8)] and None,
        "0 to 10",
    ),
}


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_flushed_batches_that_are_missing_close_the_partition(
    tmp_path: Path, damage: str, clean: bool
) -> None:
    log = flushed(tmp_path, clean=clean)
    spoil, missing = DAMAGE[damage]
    spoil(log)
    before = {path.name: path.stat().st_size for path in log.directory.glob("*.log")}
    manager = started(tmp_path)
    assert manager.get(KEY) is None
    assert f"offsets {missing} are missing" in manager.offline[KEY]
    assert "\n" not in manager.offline[KEY]
    assert {path.name: path.stat().st_size for path in log.directory.glob("*.log")} == before
    manager.close()


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
def test_what_had_been_deleted_is_not_missing(tmp_path: Path, clean: bool) -> None:
    manager = started(tmp_path)
    log = manager.create(KEY)
    for _ in range(ENDS):
        append(log)
    log.advance_start_offset(ENDS)
    log.flush(0)
    manager.checkpoint()
    end(manager, clean=clean)
    for base in (0, 4, 8):
        segment(log, base).unlink()
    again = started(tmp_path)
    recovered = again.get(KEY)
    assert recovered is not None, again.offline
    assert (recovered.start_offset, recovered.end_offset) == (ENDS, ENDS)
    again.close()


@pytest.mark.parametrize("left", [2, 3], ids=["all but the flushed", "some"])
def test_unflushed_batches_may_be_missing(tmp_path: Path, left: int) -> None:
    manager = started(tmp_path)
    log = manager.create(KEY)
    for number in range(ENDS):
        append(log)
        if number == 5:
            log.flush(0)
            manager.checkpoint()
    end(manager, clean=False)
    segment(log, 8).unlink()
    os.truncate(segment(log, 4), left * SIZE)
    again = started(tmp_path)
    recovered = again.get(KEY)
    assert recovered is not None, again.offline
    assert recovered.end_offset == 4 + left
    again.close()


@pytest.mark.safety
@pytest.mark.parametrize(
    ("bases", "cut", "kept"),
    [
        ((0, 10), 15, 10),
        ((0, 1, 2, 3, 20), 6, 4),
        ((0, 1, 2, 3, 20), 20, 4),
        ((0, 1, 2, 20, 30), 30, 30),
        ((7, 8, 9), 7, 0),
    ],
    ids=["within a batch", "in a hole", "behind a hole", "between two batches", "behind a hole at the begin"],
)
def test_log_that_was_cut_is_opened_after_a_kill_and_ends_there(
    tmp_path: Path, bases: tuple[int, ...], cut: int, kept: int
) -> None:
    """It ends before where it was to be cut: nothing was flushed up to there."""
    manager = LogManager([tmp_path], LogConfig())
    manager.start(0)
    log = manager.create(KEY)
    for base, following in pairwise((*bases, bases[-1] + 10)):
        batch = make_batch(10 if following - base == 10 else 1, leader_epoch=0)
        batch[:8] = base.to_bytes(8, "big")
        log.append_as_follower(batch, 0)
    log.flush(0)
    manager.checkpoint()
    log.truncate_to(cut, 0)
    assert log.end_offset == kept
    end(manager, clean=False)
    again = LogManager([tmp_path], LogConfig())
    again.start(0)
    recovered = again.get(KEY)
    assert recovered is not None, again.offline
    assert recovered.end_offset == kept
    again.close()


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
def test_log_that_was_cut_in_a_hole_ends_there_after_a_restart(tmp_path: Path, clean: bool) -> None:
    """Compaction by others may take the last batches of a segment; a follower may be told to cut there."""
    manager = started(tmp_path)
    log = manager.create(KEY)
    for base in (0, 1, 2, 3, 7):
        batch = make_batch(leader_epoch=0)
        batch[:8] = base.to_bytes(8, "big")
        log.append_as_follower(batch, 0)
    manager.close()
    assert (log.directory / HOLES_MARKER).exists()
    for path in log.directory.glob(f"{4:020d}.*"):
        path.rename(path.with_name(f"{7:020d}{path.suffix}"))
    manager = started(tmp_path)
    log = manager.logs()[KEY]
    log.truncate_to(6, 0)
    assert log.end_offset == 6
    log.flush(0)
    manager.checkpoint()
    end(manager, clean=clean)
    again = started(tmp_path)
    recovered = again.get(KEY)
    assert recovered is not None, again.offline
    assert (recovered.end_offset, len(list(batches_of(recovered)))) == (6, 4)
    again.close()
