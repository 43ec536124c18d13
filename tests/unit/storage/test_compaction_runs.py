"""Compaction beside crashes, readers, appends and truncations, and what the manager makes of it."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.broker.errors import OffsetOutOfRange
from millrace.broker.protocol.batch import iterate_batches
from millrace.broker.protocol.records import Record, build_batch, read_records
from millrace.broker.storage import checkpoints, log_check, producer_recovery, segment_swap
from millrace.broker.storage.cleaner import Cleaner, CleanerConfig, CleanResult
from millrace.broker.storage.log import Log
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.log_manager import LogManager
from millrace.broker.storage.log_reshaping import CompactionAbandoned
from millrace.broker.storage.segment import Segment
from tests import waiting
from tests.stored_batches import batches_of

from .compaction import (
    NOW_MS,
    clean,
    compacted_config,
    end,
    pairs,
    put,
    roll,
)
from .conftest import make_batch

# -- crashes


def _big_log(directory: Path) -> Log:
    log = Log.open(directory, compacted_config(index_interval_bytes=1), recovery_point=None, now_ms=NOW_MS)
    transaction = {"producer_id": 9, "producer_epoch": 0, "transactional": True}
    for number in range(4):
        put(
            log,
            ("same", str(number)),
            (f"own{number}", "1"),
            producer_id=5,
            producer_epoch=0,
            base_sequence=2 * number,
        )
        put(log, ("same", "no"), base_sequence=number, **transaction)
        end(log, 9, False)
        put(log, (f"own{number - 1}", None))
        roll(log)
    log.flush(NOW_MS)
    return log


@pytest.mark.parametrize("recovery_point", ["flushed", "zero"])
def test_crash_after_any_file_operation_leaves_one_of_both(tmp_path: Path, recovery_point: str) -> None:
    log = _big_log(tmp_path / "live" / "t-0")
    copies: list[Path] = []
    copying: list[bool] = []  # copytree makes such calls itself
    names = ("rename", "replace", "unlink", "pwrite", "ftruncate", "truncate", "utime")
    originals = {name: getattr(os, name) for name in names}

    def spied(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            result = originals[name](*arguments, **options)
            if not copying:
                copying.append(True)
                target = tmp_path / f"crash{len(copies)}" / "t-0"
                copies.append(target)
                shutil.copytree(log.directory, target)
                copying.clear()
            return result

        return call

    before = pairs(log)
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(os, name, spied(name))
        clean(log)
    after = pairs(log)
    assert len(after) < len(before)
    assert len(copies) > 20
    seen = set()
    for copy in copies:
        again = Log.open(
            copy,
            log.config,
            recovery_point=log.recovery_point if recovery_point == "flushed" else 0,
            is_as_left=True,
            now_ms=NOW_MS,
        )
        assert again.end_offset == log.end_offset
        assert pairs(again) in (before, after), copy
        seen.add(pairs(again) == after)
        assert {entry.last_sequence for entry in again.producers.entries.values()} == {7, 3}
        assert again.producers.first_unstable_offset is None
        assert not [name for name in os.listdir(copy) if name.endswith((".swap", ".cleaned"))]
        assert log_check.check_partition(copy, log_check.FolderFacts({}, {}, {}), log_check.Totals()) == []
        if pairs(again) == before or recovery_point == "flushed":
            assert again.aborted_transactions(0, 100) == ((9, 2), (9, 7), (9, 12), (9, 17))
    assert seen == {True, False}


def test_swap_left_by_apache_kafka_is_finished(tmp_path: Path) -> None:
    """There the log is renamed before its indexes, which then still have their old suffix."""
    log = _big_log(tmp_path / "t-0")
    expected = log.aborted_transactions(0, 100)
    cleaned = segment_swap.begin(log.directory, 0, NOW_MS)
    content = b"".join(segment.file.read(0, segment.size) for segment in log.segments[:2])
    cleaned.file.write(content, 0)
    cleaned.rename_log(".swap")
    again = Log.open(log.directory, log.config, recovery_point=0, now_ms=NOW_MS)
    assert len(again.segments) == len(log.segments) - 1
    assert pairs(again) == pairs(log)
    assert again.aborted_transactions(0, 100) == expected, "made anew by the replay"


# -- beside others


def test_reader_of_a_replaced_segment_finishes(log: Log) -> None:
    for number in range(6):
        put(log, ("same", str(number)), ("other", str(number)))
    roll(log)
    segment = log.segments[0]
    clean(log)
    assert segment not in log.segments
    for offset in range(12):
        at = log._segments.find(segment, offset)
        assert at is not None
        assert at.header.base_offset <= offset <= at.header.last_offset
        assert len(segment.file.read(at.position, at.header.size)) == at.header.size
    assert log.notes == [], "nothing of the new segment's was rebuilt"


@pytest.mark.parametrize("look", ["offset", "time"])
def test_reader_that_comes_while_files_are_renamed_rebuilds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    """It finds no index by the old name, and by the new one once the swap's last step is over."""
    log = Log.open(
        tmp_path / "t-0", compacted_config(index_interval_bytes=1), recovery_point=None, now_ms=NOW_MS
    )
    for number in range(6):
        put(log, (f"key{number}", "1"), ("same", str(number)))
    roll(log)
    put(log, ("last", "1"))
    swapped, has_asked = threading.Event(), threading.Event()
    rename, opened = Segment.rename_indexes, os.open
    found: list[object] = []
    missed: list[object] = []

    def slowly(segment: Segment, suffix: str) -> None:
        if not suffix:
            swapped.set()
            waiting.until(has_asked.is_set, "the reader has missed an index")
        rename(segment, suffix)

    def missing(path: Any, *args: Any, **kwargs: Any) -> int:
        if threading.current_thread() is reader and not has_asked.is_set() and str(path).endswith(".swap"):
            missed.append(path)
            has_asked.set()
            raise FileNotFoundError(errno.ENOENT, "renamed just then", str(path))
        return opened(path, *args, **kwargs)

    def read() -> None:
        waiting.until(swapped.is_set, "the swap is at its last step")
        segment = log._segments.all[0]
        try:
            if look == "offset":
                found.append(log._segments.find(segment, segment.next_offset - 1))
            else:
                found.append(log.offset_for_time(segment.max_timestamp))
        finally:
            has_asked.set()

    reader = threading.Thread(target=read)
    monkeypatch.setattr(Segment, "rename_indexes", slowly)
    monkeypatch.setattr(os, "open", missing)
    reader.start()
    clean(log)
    reader.join()
    assert missed
    assert found and found[0] is not None
    assert log.notes == []


def test_appends_reads_and_compaction_run_side_by_side(tmp_path: Path) -> None:
    config = compacted_config(segment_bytes=2000, index_interval_bytes=100)
    log = Log.open(tmp_path / "t-0", config, recovery_point=None, now_ms=NOW_MS)
    failures: list[BaseException] = []
    done = threading.Event()

    def run(work: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                while not done.is_set():
                    work()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=guarded)
        thread.start()
        return thread

    def read() -> None:
        offset = 0
        while offset < log.end_offset:
            found = log.read(offset, 700)
            for position, header in iterate_batches(found.data):
                assert header.last_offset >= offset
                for record in read_records(found.data[position : position + header.size]):
                    assert record.value == b"%d" % record.offset
            offset = max(offset + 1, found.next_offset)
            if offset % 7 == 0:
                log.offset_for_time(offset)

    def compact() -> None:
        try:
            clean(log)
        except CompactionAbandoned:
            return

    threads = [run(read), run(read), run(compact)]
    for number in range(3000):
        record = Record(b"k%d" % (number % 50), b"%d" % number, (), number)
        log.append(build_batch([record]), leader_epoch=0, now_ms=NOW_MS)
    done.set()
    for thread in threads:
        thread.join()
    assert failures == []
    clean(log)
    assert len({key for _, key, _ in pairs(log)}) == 50
    assert log.size < 20_000
    assert log.notes == []


@pytest.mark.parametrize("change", ["truncate", "anew", "retention"])
def test_compaction_that_others_overtake_changes_nothing(
    log: Log, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    for number in range(4):
        put(log, ("same", str(number)))
        roll(log)
    put(log, ("same", "4"))

    def overtake(*_: Any, **__: Any) -> None:
        monkeypatch.undo()
        if change == "truncate":
            log.truncate_to(2, NOW_MS)
        elif change == "anew":
            log.start_anew(70, NOW_MS)
        else:
            log.advance_start_offset(2)
            log.delete_old_segments(NOW_MS)

    monkeypatch.setattr(os, "utime", overtake)
    with pytest.raises(CompactionAbandoned):
        clean(log)
    left = {"truncate": [0, 1], "anew": [], "retention": [2, 3, 4]}[change]
    assert [offset for offset, _, _ in pairs(log)] == left
    assert not [name for name in os.listdir(log.directory) if name.endswith((".swap", ".cleaned"))]
    assert log.cleaned_offset <= log.end_offset


def test_segment_that_was_cut_and_filled_anew_is_not_replaced(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the log's again by then, and closed: only that a truncation has been tells it from before."""
    put(log, ("same", "0"))
    put(log, ("same", "1"))
    put(log, ("cut", "2"))
    roll(log)
    put(log, ("cut", "3"))

    def overtake(*_: Any, **__: Any) -> None:
        monkeypatch.undo()
        log.truncate_to(2, NOW_MS)
        put(log, ("new", "2"))
        roll(log)
        put(log, ("new", "3"))

    monkeypatch.setattr(os, "utime", overtake)
    with pytest.raises(CompactionAbandoned):
        clean(log)
    assert pairs(log) == [(0, "same", "0"), (1, "same", "1"), (2, "new", "2"), (3, "new", "3")]
    clean(log)
    assert pairs(log) == [(1, "same", "1"), (2, "new", "2"), (3, "new", "3")]


class _ToldOf:
    """A lock that says when one thread is about to wait for it."""

    def __init__(self, lock: Any, waits: Callable[[], None]) -> None:
        self._lock, self._waits = lock, waits

    def __enter__(self) -> None:
        self._waits()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_compaction_during_a_truncation_knows_of_every_aborted_transaction(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replay drops an index's entries before it writes them anew: an aborted record of "k" would count as
    its newest until then, and in the end neither would be left."""
    put(log, ("k", "committed"))
    put(log, ("k", "aborted"), producer_id=7, producer_epoch=0, base_sequence=0, transactional=True)
    roll(log)
    end(log, 7, False)
    put(log, ("x", "1"))
    put(log, ("cut", "1"))
    is_replaying, may_go_on = threading.Event(), threading.Event()
    marker_at, map_keys = producer_recovery._marker_at, Cleaner._map_keys

    def slow_marker_at(*given: Any) -> Any:
        is_replaying.set()
        waiting.until(may_go_on.is_set, "the compaction waits for the truncation, or knows its keys")
        return marker_at(*given)

    def mapped(*given: Any) -> Any:
        keys = map_keys(*given)
        may_go_on.set()
        return keys

    def waits() -> None:
        if threading.current_thread() is compacting:
            may_go_on.set()

    monkeypatch.setattr(producer_recovery, "_marker_at", slow_marker_at)
    monkeypatch.setattr(Cleaner, "_map_keys", mapped)
    monkeypatch.setattr(log, "_shape_lock", _ToldOf(log._shape_lock, waits))
    truncating = threading.Thread(target=log.truncate_to, args=(4, NOW_MS))
    compacting = threading.Thread(target=clean, args=(log,), kwargs={"stable_offset": 4})
    truncating.start()
    waiting.until(is_replaying.is_set, "the truncation has dropped what it is to write anew")
    compacting.start()
    truncating.join()
    compacting.join()
    assert pairs(log) == [(0, "k", "committed"), (3, "x", "1")]


# -- the manager's part


def _manager(folder: Path, **settings: Any) -> LogManager:
    manager = LogManager([folder], compacted_config(**settings))
    manager.start(NOW_MS)
    return manager


def _fill(log: Log, count: int = 6) -> None:
    for number in range(count):
        put(log, ("same", str(number)))
        roll(log)


def test_nothing_is_compacted_while_the_cleaner_is_off(tmp_path: Path) -> None:
    """`log.cleaner.enable=false`, as in Apache Kafka: compacted topics are taken, and grow."""
    manager = LogManager([tmp_path], compacted_config(), cleaner=CleanerConfig(enabled=False))
    manager.start(NOW_MS)
    log = manager.create(("t", 0))
    _fill(log)
    manager.cleaning.compact_due(NOW_MS, lambda tp: log.end_offset)
    manager.housekeeping(NOW_MS)
    assert len(pairs(log)) == 6
    manager.cleaning.set_config(CleanerConfig())
    manager.cleaning.compact_due(NOW_MS, lambda tp: log.end_offset)
    assert len(pairs(log)) == 1
    manager.close(NOW_MS)


def test_due_logs_are_compacted_and_checkpointed(tmp_path: Path) -> None:
    manager = _manager(tmp_path)
    log = manager.create(("t", 0))
    _fill(log)
    manager.cleaning.compact_due(NOW_MS, lambda tp: None)
    assert len(pairs(log)) == 6, "not while its stable offset is not known"
    manager.cleaning.compact_due(NOW_MS, lambda tp: log.end_offset)
    assert pairs(log) == [(5, "same", "5")]
    assert [tp for tp, _ in manager.cleaning.compactions] == [("t", 0)]
    assert isinstance(manager.cleaning.compactions[0][1], CleanResult)
    manager.checkpoint()
    assert (tmp_path / "cleaner-offset-checkpoint").read_text() == "0\n1\nt 0 6\n"
    manager.close(NOW_MS)
    again = _manager(tmp_path)
    reopened = again.get(("t", 0))
    assert reopened is not None
    assert reopened.cleaned_offset == 6
    reopened.truncate_to(3, NOW_MS)
    assert reopened.end_offset == 0, "in the hole that the compaction has left"
    assert checkpoints.read_offsets(tmp_path / "cleaner-offset-checkpoint") == {("t", 0): 0}
    again.close()


def test_log_with_a_damaged_batch_is_left_alone_and_said_once(tmp_path: Path) -> None:
    manager = _manager(tmp_path)
    logs = [manager.create(("t", number)) for number in (0, 1)]
    for log in logs:
        _fill(log)
    path = logs[0].segments[0].path
    content = bytearray(path.read_bytes())
    content[70] ^= 1
    path.write_bytes(content)
    for _ in range(2):
        manager.cleaning.compact_due(NOW_MS, lambda tp: 100)
    assert [note for note in manager.notes if "cannot be compacted" in note] == [manager.notes[0]]
    assert "t-0" in manager.notes[0]
    assert manager.cleaning.uncleanable.keys() == {("t", 0)}
    assert len(list(logs[0].directory.glob("*.log"))) == 7
    assert pairs(logs[1]) == [(5, "same", "5")]
    assert not manager.offline, "it is served on"
    manager.close()


def test_log_that_makes_a_compaction_fail_in_a_way_of_its_own_ends_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = _manager(tmp_path)
    logs = [manager.create(("t", number)) for number in (0, 1)]
    for log in logs:
        _fill(log)
    clean = Cleaner.clean

    def overflowing(self: Cleaner, log: Log, *rest: Any) -> CleanResult:
        if log is logs[0]:
            raise OverflowError("of a number that nobody has thought of")
        return clean(self, log, *rest)

    monkeypatch.setattr(Cleaner, "clean", overflowing)
    manager.cleaning.compact_due(NOW_MS, lambda tp: 100)
    assert manager.cleaning.uncleanable.keys() == {("t", 0)}
    assert pairs(logs[1]) == [(5, "same", "5")]
    manager.close()


def test_full_disk_stops_a_compaction_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = _manager(tmp_path)
    log = manager.create(("t", 0))
    _fill(log)

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        manager.cleaning.compact_due(NOW_MS, lambda tp: 100)
    assert "not compacted this time" in manager.notes[0]
    assert len(pairs(log)) == 6
    assert not list(log.directory.glob("*.cleaned"))
    manager.cleaning.compact_due(NOW_MS, lambda tp: 100)
    assert len(pairs(log)) == 1
    manager.close()


def test_stop_ends_a_compaction(tmp_path: Path) -> None:
    manager = _manager(tmp_path)
    log = manager.create(("t", 0))
    _fill(log)
    manager.stop_chores()
    manager.cleaning.compact_due(NOW_MS, lambda tp: 100)
    assert len(pairs(log)) == 6
    manager.close()


def test_policy_is_changed_both_ways_while_running(tmp_path: Path) -> None:
    """A topic that was compacted has holes for ever: neither reading nor recovery may stumble over them."""
    manager = LogManager([tmp_path], LogConfig(index_interval_bytes=1))
    manager.start(NOW_MS)
    log = manager.create(("t", 0))
    for number in range(6):
        put(log, ("same", str(number)), (f"own{number}", "1"))
        put(log, ("same", "whole batches go"))
    log.config = compacted_config(segment_ms=1, index_interval_bytes=1)
    log.roll_if_due(10**12)
    manager.cleaning.compact_due(NOW_MS, lambda tp: 100)
    kept = pairs(log)
    assert len(kept) == 7
    log.config = LogConfig(retention_ms=-1)
    put(log, ("same", "x"))
    manager.cleaning.compact_due(NOW_MS, lambda tp: 100)
    assert len(pairs(log)) == 8
    for recovery_point in (0, log.end_offset):
        (tmp_path / "copy").mkdir()
        copy = shutil.copytree(log.directory, tmp_path / "copy" / "t-0")
        again = Log.open(copy, LogConfig(retention_ms=-1), recovery_point=recovery_point, now_ms=NOW_MS)
        assert pairs(again) == pairs(log), recovery_point
        assert not again.notes
        shutil.rmtree(tmp_path / "copy")
    log.config = LogConfig(retention_ms=0, retention_bytes=0)
    log.delete_old_segments(10**12)
    assert log.start_offset == log.end_offset
    with pytest.raises(OffsetOutOfRange):
        log.read(0, 100)
    manager.close()


def test_follower_of_a_compacted_log_keeps_its_holes(tmp_path: Path, log: Log) -> None:
    for number in range(6):
        put(log, ("same", str(number)), (f"own{number}", "1"))
        put(log, ("same", "whole batches go"))
    roll(log)
    put(log, ("same", "7"))
    clean(log)
    follower = Log.open(tmp_path / "f" / "t-0", LogConfig(), recovery_point=None, now_ms=NOW_MS)
    follower.append_as_follower(b"".join(bytes(batch) for batch in batches_of(log)), NOW_MS)
    assert pairs(follower) == pairs(log)
    again = Log.open(follower.directory, LogConfig(), recovery_point=0, now_ms=NOW_MS)
    assert (pairs(again), again.notes) == (pairs(log), [])
    again.truncate_to(9, NOW_MS)
    assert again.end_offset <= 9


@pytest.mark.safety
def test_follower_whose_first_batch_lies_behind_a_hole_is_recovered_whole(tmp_path: Path) -> None:
    """The leader's log begins at 0, where compaction has left nothing, and is not compacted any more."""
    follower = Log.open(tmp_path / "t-0", LogConfig(), recovery_point=None, now_ms=NOW_MS)
    follower.append_as_follower(make_batch(2, base_offset=5) + make_batch(2, base_offset=7), NOW_MS)
    again = Log.open(follower.directory, LogConfig(), recovery_point=0, now_ms=NOW_MS)
    assert (again.start_offset, again.end_offset, again.notes) == (0, 9, [])
    assert len(list(batches_of(again))) == 2


@pytest.mark.parametrize("begin", ["anew", "where all is deleted"])
def test_hole_behind_a_log_without_records_is_noted_and_a_log_without_holes_is_not(
    tmp_path: Path, begin: str
) -> None:
    log = Log.open(tmp_path / "t-0", LogConfig(), recovery_point=None, now_ms=NOW_MS)
    if begin == "anew":
        log.start_anew(5, NOW_MS)
    else:
        log.append_as_follower(make_batch(5), NOW_MS)
        log.advance_start_offset(5)
    log.append_as_follower(make_batch(2, base_offset=5), NOW_MS)
    assert not (log.directory / checkpoints.HOLES_MARKER).exists()
    log.advance_start_offset(7)
    log.append_as_follower(make_batch(1, base_offset=9), NOW_MS)
    assert (log.directory / checkpoints.HOLES_MARKER).exists()
    again = Log.open(log.directory, LogConfig(), recovery_point=0, start_offset=7, now_ms=NOW_MS)
    assert (again.start_offset, again.end_offset, again.notes) == (7, 10, [])
