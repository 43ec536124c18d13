"""What is on the disk, and not in the page cache alone, before something vouches for it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.broker.storage.checkpoints import LEADER_EPOCH_CHECKPOINT
from millrace.broker.storage.data_folder import CLEAN_SHUTDOWN_MARKER
from millrace.broker.storage.log import Log
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.log_manager import LogManager

from .compaction import NOW_MS, clean, end, put, roll

OF_A_TRANSACTION = {"producer_id": 7, "producer_epoch": 0, "base_sequence": 0, "transactional": True}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(what, name of the file) of each sync, renaming (its new name) and removal, in order."""
    noted: list[tuple[str, str]] = []

    def noting(what: str, name_of: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            noted.append((what, Path(name_of(*given)).name))
            return original(*given, **options)

        return call

    for function in ("fsync", "fdatasync"):
        file_of = lambda fd: os.readlink(f"/proc/self/fd/{fd}")  # noqa: E731
        monkeypatch.setattr(os, function, noting("sync", file_of, getattr(os, function)))
    for function in ("rename", "replace"):
        monkeypatch.setattr(os, function, noting("rename", lambda _, new: new, getattr(os, function)))
    monkeypatch.setattr(os, "unlink", noting("unlink", lambda path: path, os.unlink))
    return noted


def synced(calls: list[tuple[str, str]]) -> set[str]:
    return {name for what, name in calls if what == "sync"}


def place_of(call: tuple[str, str], calls: list[tuple[str, str]], behind: int = 0) -> int:
    assert call in calls[behind:]
    return calls.index(call, behind)


def test_flush_syncs_all_that_the_recovery_point_vouches_for(log: Log, calls: list[tuple[str, str]]) -> None:
    put(log, ("a", "1"), **OF_A_TRANSACTION)
    end(log, 7, False)
    log.flush(NOW_MS)
    first = f"{0:020d}"
    assert {f"{first}.log", f"{first}.txnindex", LEADER_EPOCH_CHECKPOINT, "t-0"} <= synced(calls)
    put(log, ("b", "2"))
    roll(log)
    put(log, ("c", "3"))
    calls.clear()
    log.flush(NOW_MS)
    second = f"{log.segments[-1].base_offset:020d}"
    files = {f"{first}.log", f"{first}.index", f"{first}.timeindex", f"{second}.log"}
    assert synced(calls) == {*files, "t-0"}, "the folder has a new file"


def test_indexes_of_a_segment_that_was_flushed_before_it_was_rolled_are_synced(
    log: Log, calls: list[tuple[str, str]]
) -> None:
    """Rolling writes their last entries, by which the segment's age is told."""
    put(log, ("a", "1"))
    put(log, ("b", "2"))
    log.flush(NOW_MS)
    roll(log)
    put(log, ("c", "3"))
    calls.clear()
    log.flush(NOW_MS)
    assert {f"{0:020d}.index", f"{0:020d}.timeindex"} <= synced(calls)
    calls.clear()
    put(log, ("d", "4"))
    log.flush(NOW_MS)
    assert synced(calls) == {f"{2:020d}.log"}, "once"


@pytest.mark.safety
@pytest.mark.parametrize("is_disk_full", [False, True], ids=["at once", "when there is room again"])
def test_aborted_transactions_that_a_start_has_made_anew_are_synced(
    log: Log, calls: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch, is_disk_full: bool
) -> None:
    """Their segment was flushed long ago; the next start goes by what has replaced the lost producers."""
    put(log, ("a", "1"), **OF_A_TRANSACTION)
    end(log, 7, False)
    roll(log)
    put(log, ("b", "2"))
    log.flush(NOW_MS)
    index = log.directory / f"{0:020d}.txnindex"
    expected = index.read_bytes()
    for path in log.directory.glob("*.snapshot"):
        path.unlink()

    def no_room(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        if is_disk_full:
            patched.setattr(os, "pwrite", no_room)
        again = Log.open(log.directory, log.config, recovery_point=log.end_offset, now_ms=NOW_MS)
    put(again, ("c", "3"))
    for synced_now in (True, False):
        calls.clear()
        again.flush(NOW_MS)
        assert (index.name in synced(calls)) is synced_now
        put(again, ("d", "4"))
    assert index.read_bytes() == expected


def test_compacted_segment_is_durable_before_it_counts_and_counts_before_the_old_ones_go(
    log: Log, calls: list[tuple[str, str]]
) -> None:
    for value in ("1", "2", "3"):
        put(log, ("a", value), ("b", value))
        roll(log)
    log.flush(NOW_MS)
    calls.clear()
    clean(log)
    name = f"{0:020d}.log"
    written = place_of(("sync", f"{name}.cleaned"), calls)
    counts = place_of(("rename", f"{name}.swap"), calls)
    known = place_of(("sync", "t-0"), calls, counts)
    removed = place_of(("unlink", name), calls)
    assert written < counts < known < removed


def test_mark_of_a_clean_end_is_gone_for_good_before_anything_is_written(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    """Brought back by a power loss, it would have torn writes taken for damage."""
    for _ in range(2):
        calls.clear()
        manager = LogManager([tmp_path / "data"], LogConfig())
        manager.start(0)
        started = list(calls)
        manager.close()
    place_of(("sync", "data"), started, place_of(("unlink", CLEAN_SHUTDOWN_MARKER), started))
