"""What opening a log reads: little after a clean end, whatever its size; what may be torn after a crash."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.broker.errors import KafkaStorageError
from millrace.broker.protocol.batch import NO_TIMESTAMP
from millrace.broker.storage import log_check
from millrace.broker.storage.index_file import IndexFile
from millrace.broker.storage.log import Log
from millrace.broker.storage.segment import LogFile

from .conftest import append, make_batch

OpenLog = Callable[..., Log]
SIZE = len(make_batch(2))
LARGE = 100_000
ALL_INDEXED = {"index_interval_bytes": 1, "segment_bytes": 4 * SIZE}


def _write(log: Log, count: int = 8) -> None:
    for number in range(count):
        append(log, 2, timestamp_ms=1000 + number)


def _noting_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each read of a log gives from now on."""
    sizes: list[int] = []
    read = LogFile.read

    def noted(file: LogFile, position: int, size: int) -> bytes:
        data = read(file, position, size)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(LogFile, "read", noted)
    return sizes


def _scramble(path: Path, entry: str) -> None:
    """The first entry of an index is no neighbour of the others any more."""
    content = bytearray(path.read_bytes())
    content[: struct.calcsize(entry)] = struct.pack(entry, *[0x7FFFFFFF] * (len(entry) - 1))
    path.write_bytes(content)


@pytest.mark.parametrize("interval_size", [1, 1 << 30], ids=["indexed", "without an index"])
def test_clean_open_reads_headers_only(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch, interval_size: int
) -> None:
    settings = {"index_interval_bytes": interval_size, "segment_bytes": 4 * LARGE}
    log = open_log(**settings)
    for number in range(12):
        append(log, 1, size=LARGE, timestamp_ms=1000 + number)
    log.close()
    read_sizes = _noting_reads(monkeypatch)

    def whole(_index: IndexFile) -> bytes:
        raise AssertionError("an index was read whole")

    monkeypatch.setattr(IndexFile, "_content", whole)
    again = open_log(**settings)
    assert (again.end_offset, again.notes) == (12, [])
    assert sum(read_sizes) < len(again.segments) * 20_000
    assert again.max_timestamp() == (11, 1011)


@pytest.mark.parametrize("known", [0, 8, 10, 12])
def test_after_a_crash_only_what_is_past_the_recovery_point_is_read(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch, known: int
) -> None:
    """Of what is below it headers alone: what had been flushed was checked before it was acknowledged so."""
    settings = {"index_interval_bytes": 1, "segment_bytes": 4 * LARGE}
    log = open_log(**settings)
    for number in range(12):
        append(log, 1, size=LARGE, timestamp_ms=1000 + number)
    read_sizes = _noting_reads(monkeypatch)
    again = open_log(recovery_point=known, **settings)
    assert (again.end_offset, again.notes) == (12, [])
    behind = (12 - known) * LARGE
    assert behind <= sum(read_sizes) < behind + len(again.segments) * 30_000


def test_clean_open_after_a_clean_open_is_the_same(open_log: OpenLog) -> None:
    log = open_log(**ALL_INDEXED)
    _write(log)
    log.close()
    for _ in range(2):
        again = open_log(**ALL_INDEXED)
        assert (again.end_offset, again.notes, len(again.segments)) == (16, [], 2)
        assert again.offset_for_time(1005) == (10, 1005)
        assert [again.read(offset, 1).next_offset for offset in range(0, 16, 2)] == list(range(2, 18, 2))
        again.close()


def test_clean_open_of_records_without_timestamps_is_the_same(open_log: OpenLog) -> None:
    """No entry is due of them, and an index without any is one that was lost."""
    log = open_log(**ALL_INDEXED)
    for _ in range(8):
        append(log, 2, timestamp_ms=NO_TIMESTAMP)
    log.close()
    for _ in range(2):
        again = open_log(**ALL_INDEXED)
        assert (again.end_offset, again.notes, len(again.segments)) == (16, [], 2)
        assert (again.max_timestamp(), again.offset_for_time(0)) == (None, None)
        again.close()
    assert open_log(recovery_point=8, **ALL_INDEXED).notes == []
    facts, problems = log_check.FolderFacts.read(log.directory.parent)
    assert problems + log_check.check_partition(log.directory, facts, log_check.Totals()) == []
    again = open_log(**ALL_INDEXED)
    append(again, 2, timestamp_ms=1005)
    again.close()
    again = open_log(**ALL_INDEXED)
    assert (again.notes, again.max_timestamp(), again.offset_for_time(7)) == ([], (16, 1005), (16, 1005))


@pytest.mark.parametrize(("suffix", "entry"), [(".index", ">II"), (".timeindex", ">qI")])
def test_after_a_crash_indexes_below_the_recovery_point_are_read_whole(
    open_log: OpenLog, suffix: str, entry: str
) -> None:
    log = open_log(**ALL_INDEXED)
    _write(log)
    log.close()
    path = log.directory / f"{0:020d}{suffix}"
    good = path.read_bytes()
    _scramble(path, entry)
    assert "rebuilt" in open_log(recovery_point=16, **ALL_INDEXED).notes[0]
    assert path.read_bytes() == good


@pytest.mark.parametrize(("suffix", "entry"), [(".index", ">II"), (".timeindex", ">qI")])
def test_after_a_clean_end_a_wrong_entry_misleads_nobody(open_log: OpenLog, suffix: str, entry: str) -> None:
    log = open_log(**ALL_INDEXED)
    _write(log)
    log.close()
    _scramble(log.directory / f"{0:020d}{suffix}", entry)
    again = open_log(**ALL_INDEXED)
    for number in range(8):
        assert again.read(2 * number, 1).next_offset == 2 * number + 2
        assert again.offset_for_time(1000 + number) == (2 * number, 1000 + number)


@pytest.mark.parametrize("entry", [(99_999, 7), (1006, 7), (1005, 5)], ids=["newer", "older", "elsewhere"])
def test_last_time_of_a_segment_is_compared_with_its_batch(open_log: OpenLog, entry: tuple[int, int]) -> None:
    """By it a segment is kept or removed."""
    log = open_log(**ALL_INDEXED)
    _write(log)
    log.close()
    path = log.directory / f"{0:020d}.timeindex"
    path.write_bytes(path.read_bytes()[: -struct.calcsize(">qI")] + struct.pack(">qI", *entry))
    again = open_log(**ALL_INDEXED)
    assert "rebuilt" in again.notes[0]
    assert again.segments[0].max_timestamp == 1003


@pytest.mark.parametrize("suffix", [".index", ".timeindex"])
@pytest.mark.parametrize("base", [0, 8], ids=["closed", "active"])
def test_index_of_a_wrong_size_is_rebuilt_at_a_clean_open(open_log: OpenLog, suffix: str, base: int) -> None:
    log = open_log(**ALL_INDEXED)
    _write(log)
    log.close()
    path = log.directory / f"{base:020d}{suffix}"
    os.truncate(path, path.stat().st_size - 3)
    again = open_log(**ALL_INDEXED)
    assert "rebuilt" in again.notes[0]
    assert again.offset_for_time(1007) == (14, 1007)


def test_log_that_was_cut_after_a_clean_end_is_not_served(open_log: OpenLog) -> None:
    log = open_log()
    _write(log, 3)
    log.close()
    path = log.directory / f"{0:020d}.log"
    os.truncate(path, 3 * SIZE - 10)
    with pytest.raises(KafkaStorageError, match="is cut"):
        open_log()
    assert path.stat().st_size == 3 * SIZE - 10
