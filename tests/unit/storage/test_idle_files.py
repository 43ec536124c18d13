"""Files that nobody uses are closed, and are what they were when somebody does again."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.broker.errors import KafkaStorageError
from millrace.broker.protocol.records import Record, build_batch, read_records
from millrace.broker.storage import segment_swap
from millrace.broker.storage.log import Log
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.log_manager import LogManager
from millrace.broker.storage.segment import LogFile, Segment, WouldBlock
from tests.stored_batches import batches_of

OpenLog = Callable[..., Log]
NOW_MS = 1_000


def write(log: Log, *values: bytes) -> None:
    for value in values:
        batch = build_batch([Record(b"k", value, (), NOW_MS)])
        log.append(batch, leader_epoch=0, now_ms=NOW_MS)


def values_of(log: Log) -> list[bytes | None]:
    return [record.value for batch in batches_of(log, log.start_offset) for record in read_records(batch)]


def open_files(folder: Path) -> list[str]:
    """Names of `.log` files below the folder that this process holds open."""
    names = []
    for number in os.listdir("/proc/self/fd"):
        try:
            target = Path(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:
            continue
        if target.suffix == ".log" and folder in target.parents:
            names.append(target.name)
    return names


def rested(log: Log) -> None:
    """Twice: the first time says that it was used up to now."""
    log.rest(NOW_MS)
    log.rest(NOW_MS)


def test_idle_log_is_flushed_and_closed_and_is_there_for_the_next_reader_and_writer(
    tmp_path: Path,
) -> None:
    manager = LogManager([tmp_path], LogConfig())
    manager.start(NOW_MS)
    idle, busy = manager.create(("idle", 0)), manager.create(("busy", 0))
    write(idle, b"one", b"two")
    for round_number in range(3):
        write(busy, b"%d" % round_number)
        manager.housekeeping(NOW_MS)
    assert len(open_files(tmp_path / "idle-0")) == 0
    assert len(open_files(tmp_path / "busy-0")) == 1
    assert idle.recovery_point == idle.end_offset == 2, "what is closed is flushed"
    assert busy.recovery_point == 0, "and nothing else is for that"
    assert values_of(idle) == [b"one", b"two"]
    assert len(open_files(tmp_path / "idle-0")) == 1
    manager.housekeeping(NOW_MS)
    manager.housekeeping(NOW_MS)
    assert not open_files(tmp_path / "idle-0")
    write(idle, b"three")
    assert values_of(idle) == [b"one", b"two", b"three"]
    manager.close(NOW_MS)


def test_closed_file_is_opened_where_the_disk_may_be_waited_for(open_log: OpenLog) -> None:
    log = open_log()
    write(log, b"one")
    rested(log)
    with pytest.raises(WouldBlock):
        log.read(0, 100, may_block=False)
    assert values_of(log) == [b"one"]
    assert len(log.read(0, 100, may_block=False).data)


def test_file_that_cannot_be_flushed_is_not_closed(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descriptor that is opened after a failed write-back may not hear of it."""
    log = open_log()
    write(log, b"one")
    log.rest(NOW_MS)

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(KafkaStorageError):
        log.rest(NOW_MS)
    assert log.failure is not None
    assert log.segments[0].file.is_open


def test_file_that_was_written_since_its_flush_is_not_closed(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log()
    write(log, b"one")
    log.rest(NOW_MS)
    flush = os.fdatasync

    def flush_and_write(number: int) -> None:
        flush(number)
        monkeypatch.setattr(os, "fdatasync", flush)
        write(log, b"two")

    monkeypatch.setattr(os, "fdatasync", flush_and_write)
    log.rest(NOW_MS)
    assert (log.recovery_point, log.end_offset) == (1, 2)
    assert log.segments[0].file.is_open


def delete(segment: Segment) -> None:
    segment.mark_deleted()


def replace(segment: Segment) -> None:
    segment_swap.remove_replaced([segment])


@pytest.mark.parametrize("give_away", [delete, replace], ids=["deleted", "compacted"])
def test_who_reads_a_closed_file_whose_name_goes_to_another_reads_the_first(
    open_log: OpenLog, give_away: Callable[[Segment], None]
) -> None:
    log = open_log()
    write(log, b"one")
    rested(log)
    (segment,) = log.segments
    assert not segment.file.is_open
    before = segment.path.read_bytes()
    path = segment.path
    give_away(segment)
    path.write_bytes(b"another")
    assert segment.file.read(0, 1_000) == before


def test_deleted_log_reads_its_own_closed_files_and_not_those_of_one_made_anew(
    open_log: OpenLog,
) -> None:
    log = open_log()
    write(log, b"one")
    rested(log)
    (segment,) = log.segments
    before, path = segment.path.read_bytes(), segment.path
    directory = path.parent

    def rename() -> None:
        directory.rename(directory.with_name("away"))

    log.retire("it is deleted", rename)
    directory.mkdir()
    path.write_bytes(b"another")
    assert segment.file.read(0, 1_000) == before


def test_closed_file_that_is_gone_is_never_taken_for_another_of_its_name(tmp_path: Path) -> None:
    path = tmp_path / f"{0:020d}.log"
    file = LogFile(path, create=True)
    file.write(b"one", 0)
    file.sync()
    file.was_used()
    file.rest()
    path.unlink()  # by somebody else
    file.hold()
    path.write_bytes(b"another")
    with pytest.raises(FileNotFoundError):
        file.read(0, 10)
    file.rest()
    with pytest.raises(FileNotFoundError):
        file.write(b"two", 0)
    assert path.read_bytes() == b"another"


def test_stop_waits_for_no_round_of_housekeeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may wait for the disk once for each log, where closing them does it for many at once."""
    manager = LogManager([tmp_path], LogConfig())
    manager.start(NOW_MS)
    logs = [manager.create(("t", number)) for number in range(5)]
    for log in logs:
        write(log, b"one")
    visited: list[Log] = []
    anchor = Log.anchor

    def visit(log: Log) -> None:
        anchor(log)
        visited.append(log)
        if len(visited) == 2:
            manager.stop_chores()

    monkeypatch.setattr(Log, "anchor", visit)
    manager.housekeeping(NOW_MS)
    assert visited == logs[:2]
    manager.close(NOW_MS)
    again = LogManager([tmp_path], LogConfig())
    again.start(NOW_MS)
    assert again.was_clean
    assert [values_of(again.create(("t", number))) for number in range(5)] == [[b"one"]] * 5
    again.close(NOW_MS)
