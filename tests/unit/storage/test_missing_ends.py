"""Flushed batches that are missing where one batch ends and the next would begin: every file reads well, and
the offsets of what is missing would be given again."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from millrace.broker.storage import log_check
from millrace.broker.storage.checkpoints import HOLES_MARKER
from millrace.broker.storage.log import Log
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.log_manager import LogManager
from millrace.broker.storage.offset_holes import OffsetHoles
from tests.stored_batches import batches_of

from .compaction import NOW_MS, clean, compacted_config, pairs, put
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


@pytest.mark.parametrize(("gone", "missing"), [((0,), "0 to 4"), ((0, 4), "0 to 8")])
def test_what_a_log_began_with_when_it_was_closed_is_there_or_the_partition_stays_closed(
    tmp_path: Path, gone: tuple[int, ...], missing: str
) -> None:
    log = flushed(tmp_path, clean=True)
    for base in gone:
        segment(log, base).unlink()
    manager = started(tmp_path)
    assert manager.get(KEY) is None
    assert f"offsets {missing} are missing at the beginning" in manager.offline[KEY]
    manager.close()
    assert not (tmp_path / ".kafka_cleanshutdown").exists()


def test_a_start_that_nobody_wrote_down_is_where_the_first_segment_begins(tmp_path: Path) -> None:
    """As in a folder of Apache Kafka, which writes down no start that is a segment's."""
    log = flushed(tmp_path, clean=True)
    segment(log, 0).unlink()
    (tmp_path / "log-start-offset-checkpoint").unlink()
    manager = started(tmp_path)
    kept = manager.get(KEY)
    assert kept is not None and (kept.start_offset, kept.end_offset) == (4, ENDS)
    manager.close()


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize("start", [3, 4, 7, 8, 9])
def test_a_log_that_was_shortened_at_its_beginning_opens_as_it_was(
    tmp_path: Path, start: int, clean: bool
) -> None:
    manager = started(tmp_path)
    log = manager.create(KEY)
    for _ in range(ENDS):
        append(log)
    log.flush(0)
    manager.checkpoint()
    log.advance_start_offset(start)
    log.delete_old_segments(0)
    end(manager, clean=clean)
    again = started(tmp_path)
    kept = again.get(KEY)
    assert kept is not None, again.offline
    assert kept.end_offset == ENDS and kept.start_offset == (start if clean else start // 4 * 4)
    again.close()


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
    (tmp_path / "cleaner-offset-checkpoint").write_text("0\n1\nt 0 7\n")
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


# -- in the middle of a log that may have holes

COMPACTED = compacted_config(segment_bytes=200, index_interval_bytes=1)
MERGING = compacted_config(index_interval_bytes=1)


def started_compacted(folder: Path) -> LogManager:
    manager = LogManager([folder], COMPACTED)
    manager.start(0)
    return manager


def compacted(folder: Path, *, clean_end: bool) -> Log:
    """A log whose first segments have lost their middle, their last or most of their batches."""
    manager = started_compacted(folder)
    log = manager.create(KEY)
    for number in range(12):
        put(log, ("same" if number % 4 else f"own{number}", "v" * (10 + number)))
    clean(log)
    assert len(log.segments) > 4
    log.flush(0)
    manager.checkpoint()
    end(manager, clean=clean_end)
    return log


@pytest.mark.safety
@pytest.mark.parametrize("clean_end", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize("damage", ["gone", "empty"])
def test_a_segment_that_is_missing_in_the_middle_is_no_hole_of_a_compaction(
    tmp_path: Path, damage: str, clean_end: bool
) -> None:
    log = compacted(tmp_path, clean_end=clean_end)
    before = pairs(log)
    for number, lost in enumerate(log.segments[1:-1], start=1):
        kept = lost.path.read_bytes()
        os.truncate(lost.path, 0)
        if damage == "gone":
            lost.path.unlink()
        manager = started_compacted(tmp_path)
        assert manager.get(KEY) is None
        following = log.segments[number + 1].base_offset
        assert f"offsets {lost.base_offset} to {following} are missing" in manager.offline[KEY]
        facts, _ = log_check.FolderFacts.read(tmp_path)
        (problem,) = log_check.check_partition(log.directory, facts, log_check.Totals())
        assert f"offsets {lost.base_offset} to {following - 1} are missing" in problem
        lost.path.write_bytes(kept)
        end(manager, clean=False)
    manager = started_compacted(tmp_path)
    again = manager.get(KEY)
    assert again is not None and pairs(again) == before
    manager.close()


@pytest.mark.parametrize("by", ["another program", "nobody", "an earlier version"])
def test_a_hole_that_another_may_have_made_is_let_stand_from_then_on(tmp_path: Path, by: str) -> None:
    """Apache Kafka's compaction may take the last batches of a segment; or the folder is as old as that."""
    log = compacted(tmp_path, clean_end=True)
    lost = log.segments[2]
    lost.path.unlink()
    if by == "another program":
        (tmp_path / "cleaner-offset-checkpoint").write_text("0\n1\nt 0 12\n")
    elif by == "nobody":
        (tmp_path / "checkpoints-digest").unlink()
    else:
        os.truncate(log.directory / HOLES_MARKER, 0)
    for _ in range(2):
        manager = started_compacted(tmp_path)
        again = manager.get(KEY)
        assert again is not None, manager.offline
        assert again.end_offset == 12
        manager.close()


@pytest.mark.safety
@pytest.mark.parametrize("clean_end", [True, False], ids=["closed", "killed"])
def test_a_hole_that_a_truncation_leaves_between_segments_is_no_damage(
    tmp_path: Path, clean_end: bool
) -> None:
    """What the last batch held had been deleted: the log ends at its start, behind those that are left."""
    manager = started(tmp_path)
    log = manager.create(KEY)
    for base in (0, 1, 2, 20):
        batch = make_batch(leader_epoch=0)
        batch[:8] = base.to_bytes(8, "big")
        log.append_as_follower(batch, 0)
    log.advance_start_offset(10)
    log.truncate_to(20, 0)
    assert log.end_offset == 10
    for _ in range(3):
        append(log, 2)
    assert [each.base_offset for each in log.segments][:2] == [0, 10]
    log.flush(0)
    manager.checkpoint()
    again = log
    for _ in range(2):
        end(manager, clean=clean_end)
        manager = started(tmp_path)
        opened = manager.get(KEY)
        assert opened is not None, manager.offline
        again = opened
    assert (again.start_offset, again.end_offset) == (10, 16)
    manager.close()


def test_empty_segments_of_others_that_are_merged_leave_no_damage(tmp_path: Path) -> None:
    log = compacted(tmp_path, clean_end=True)
    others = log.segments[2:4]
    for each in others:
        os.truncate(each.path, 0)
    (tmp_path / "cleaner-offset-checkpoint").write_text("0\n1\nt 0 6\n")
    manager = started_compacted(tmp_path)
    log = manager.logs()[KEY]
    number = [segment.base_offset for segment in log.segments].index(others[-1].base_offset)
    following = log.segments[number + 1].base_offset
    log.config = MERGING
    clean(log, stable_offset=following)
    assert [segment.base_offset for segment in log.segments][:2] == [0, following]
    kept = pairs(log)
    for clean_end in (False, True):
        log.flush(NOW_MS)
        manager.checkpoint()
        end(manager, clean=clean_end)
        manager = started_compacted(tmp_path)
        again = manager.get(KEY)
        assert again is not None, manager.offline
        log = again
        assert pairs(log) == kept
    manager.close()


def test_holes_that_are_cut_off_are_not_told_of_any_more(tmp_path: Path) -> None:
    """Offsets are given again: a segment with those of the hole may be lost then."""
    holes = OffsetHoles(tmp_path)
    holes.note((4, 8), (10, 20), (30, 40))
    holes.cut(15)
    told = OffsetHoles.load(tmp_path, os.listdir(tmp_path), [])
    assert [told.found(hole, is_as_left=True) for hole in ((4, 8), (10, 15), (10, 20), (30, 40))] == [
        True,
        True,
        False,
        False,
    ]


def test_a_file_of_holes_that_cannot_be_read_tells_of_none(tmp_path: Path) -> None:
    (tmp_path / HOLES_MARKER).write_text("x")
    notes: list[str] = []
    holes = OffsetHoles.load(tmp_path, os.listdir(tmp_path), notes)
    assert holes.is_marked and holes.found((1, 2), is_as_left=True)
    assert len(notes) == 1 and HOLES_MARKER in notes[0]
