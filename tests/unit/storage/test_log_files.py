"""Segments on disk: layout, rolls, retention, readers, recovery by hand-made damage."""

from __future__ import annotations

import errno
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from millrace.broker.errors import KafkaStorageError, OffsetOutOfRange
from millrace.broker.protocol.batch import (
    HEADER_SIZE,
    NO_TIMESTAMP,
    iterate_batches,
    pack_header,
    parse_header,
    seal,
    stamp_timestamps,
)
from millrace.broker.protocol.records import Record, build_batch
from millrace.broker.storage import segment
from millrace.broker.storage.disk_errors import WouldBlock
from millrace.broker.storage.log import Log
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.log_reader import LogRead
from millrace.broker.storage.segment import Segment
from tests.stored_batches import batches_of

from .conftest import append, make_batch

OpenLog = Callable[..., Log]
SIZE = len(make_batch(2))


def _log_file(log: Log, base: int = 0, suffix: str = ".log") -> Path:
    return log.directory / f"{base:020d}{suffix}"


def test_index_files_have_kafka_s_layout(open_log: OpenLog) -> None:
    log = open_log(index_interval_bytes=1)
    for number in range(3):
        append(log, 2, timestamp_ms=1000 + number)
    log.close()
    assert _log_file(log, suffix=".index").read_bytes() == struct.pack(">IIII", 3, SIZE, 5, 2 * SIZE)
    entries = struct.pack(">qIqI", 1001, 3, 1002, 5)
    assert _log_file(log, suffix=".timeindex").read_bytes() == entries


def test_segment_is_rolled_by_size_time_and_index(open_log: OpenLog) -> None:
    by_size = open_log(segment_bytes=3 * SIZE)
    for _ in range(7):
        append(by_size, 2)
    assert sorted(p.name for p in by_size.directory.glob("*.log")) == [
        f"{base:020d}.log" for base in (0, 6, 12)
    ]


def test_segment_is_rolled_by_the_records_time(open_log: OpenLog) -> None:
    log = open_log(segment_ms=100)
    for timestamp_ms in (1000, 1100, 1050, 1101, 1150):
        append(log, timestamp_ms=timestamp_ms)
    assert [base for base in range(5) if _log_file(log, base).exists()] == [0, 3]


def test_segment_is_rolled_when_its_index_is_full(open_log: OpenLog) -> None:
    log = open_log(index_interval_bytes=0, segment_index_bytes=16)
    for _ in range(6):
        append(log)
    assert len(log.segments) == 2


def test_empty_segment_is_never_rolled(open_log: OpenLog) -> None:
    log = open_log(segment_ms=100)
    assert append(log, now_ms=10**6).base_offset == 0
    assert len(log.segments) == 1


def test_quiet_segment_is_rolled_by_the_broker_s_clock(open_log: OpenLog) -> None:
    log = open_log(segment_ms=100)
    assert not log.roll_if_due(5000), "an empty segment stays"
    append(log)
    assert not log.roll_if_due(1100)
    assert log.roll_if_due(1101)
    assert len(log.segments) == 2


def test_read_returns_whole_batches_within_bounds(open_log: OpenLog) -> None:
    log = open_log()
    for _ in range(10):
        append(log, 2)
    read = log.read(5, 3 * SIZE + 10)
    assert (len(read.data), parse_header(read.data).base_offset, read.next_offset) == (3 * SIZE, 4, 10)
    assert len(log.read(5, 1).data) == SIZE, "the first batch always comes"
    assert not log.read(5, 1, at_least_one=False).data
    assert log.read(0, 10**6, end_offset=6).next_offset == 6
    assert not log.read(6, 10**6, end_offset=6).data
    assert not log.read(20, 100).data
    for offset in (-1, 21):
        with pytest.raises(OffsetOutOfRange):
            log.read(offset, 100)


def test_read_goes_on_in_the_next_segment(open_log: OpenLog) -> None:
    log = open_log(segment_bytes=2 * SIZE)
    for _ in range(5):
        append(log, 2)
    offset, bases = 0, []
    while offset < log.end_offset:
        read = log.read(offset, 10**6, may_block=False)
        bases += [header.base_offset for _, header in iterate_batches(read.data)]
        offset = read.next_offset
    assert bases == [0, 2, 4, 6, 8]


def test_batch_larger_than_a_scan_window_is_read_and_recovered(open_log: OpenLog) -> None:
    log = open_log(max_message_bytes=1 << 23)
    append(log)
    append(log, size=3 << 20)
    append(log)
    log = open_log(recovery_point=0)
    assert log.end_offset == 3
    assert len(log.read(1, 100).data) > 3 << 20
    assert log.read(2, 100).next_offset == 3


def test_retention_by_size_keeps_the_newest_segments(open_log: OpenLog) -> None:
    log = open_log(segment_bytes=2 * SIZE, retention_bytes=5 * SIZE)
    for _ in range(10):
        append(log, 2)
    removed = log.delete_old_segments(1000)
    assert [path.name[:20].lstrip("0") or "0" for path in removed] == ["0", "4"]
    assert (log.start_offset, log.size) == (8, 6 * SIZE)
    assert log.delete_old_segments(1000) == []
    assert not list(log.directory.glob("*.deleted"))


def test_retention_by_time_takes_the_active_segment_too(open_log: OpenLog) -> None:
    log = open_log(segment_bytes=2 * SIZE, retention_ms=500)
    for number in range(4):
        append(log, 2, timestamp_ms=1000 + number)
    assert log.delete_old_segments(1501) == []
    assert len(log.delete_old_segments(1502)) == 1
    assert len(log.delete_old_segments(9000)) == 1
    assert (log.start_offset, log.end_offset, log.size) == (8, 8, 0)
    assert append(log, 2).base_offset == 8


def test_retention_stops_at_the_high_watermark_and_spares_compacted_topics(open_log: OpenLog) -> None:
    log = open_log(segment_bytes=2 * SIZE, retention_ms=1)
    for _ in range(6):
        append(log, 2)
    log.config = LogConfig(retention_ms=1, cleanup_policy=frozenset({"compact"}))
    assert log.delete_old_segments(10**9) == []
    log.config = LogConfig(segment_bytes=2 * SIZE, retention_ms=1)
    assert len(log.delete_old_segments(10**9, high_watermark=7)) == 1


def test_reader_finishes_while_retention_removes_its_segment(open_log: OpenLog) -> None:
    log = open_log(segment_bytes=2 * SIZE, retention_bytes=0)
    for _ in range(4):
        append(log, 2)
    segment = log.segments[0]
    log.delete_old_segments(0)
    assert not segment.path.exists()
    assert len(segment.file.read(0, 10**6)) == 2 * SIZE
    with pytest.raises(OffsetOutOfRange):
        log.read(0, 100)


def test_deleted_records_are_gone_at_once_and_their_segments_later(open_log: OpenLog) -> None:
    log = open_log(segment_bytes=2 * SIZE)
    for _ in range(5):
        append(log, 2)
    log.advance_start_offset(5)
    with pytest.raises(OffsetOutOfRange):
        log.read(4, 100)
    assert parse_header(log.read(5, 100).data).base_offset == 4
    assert len(log.delete_old_segments(0)) == 1
    with pytest.raises(OffsetOutOfRange):
        log.advance_start_offset(11)


def test_clean_open_reads_no_batch_and_keeps_everything(open_log: OpenLog) -> None:
    log = open_log(segment_bytes=3 * SIZE)
    for number in range(8):
        append(log, 2, timestamp_ms=1000 + number, leader_epoch=number // 4)
    log.close()
    again = open_log(segment_bytes=3 * SIZE)
    assert again.notes == []
    assert (again.end_offset, again.recovery_point) == (16, 16)
    assert again.leader_epochs.entries == [(0, 0), (1, 8)]
    assert again.max_timestamp() == (14, 1007)
    assert again.offset_for_time(1003) == (6, 1003)


def test_torn_tail_is_cut_and_said(open_log: OpenLog) -> None:
    log = open_log()
    append(log, 2)
    log.flush(0)
    append(log, 2)
    with _log_file(log).open("ab") as file:
        file.write(b"\x00" * 100)
    again = open_log(recovery_point=2)
    assert again.end_offset == 4
    assert "100 bytes after offset 4" in again.notes[0]
    assert os.path.getsize(_log_file(log)) == 2 * SIZE


def test_damage_below_the_recovery_point_closes_the_partition_and_changes_nothing(open_log: OpenLog) -> None:
    log = open_log()
    for _ in range(3):
        append(log, 2)
    content = bytearray(_log_file(log).read_bytes())
    content[SIZE + 16] ^= 1  # the magic: headers lead to the recovery point, records are not read again
    _log_file(log).write_bytes(content)
    with pytest.raises(KafkaStorageError, match="damaged where it had been flushed") as caught:
        open_log(recovery_point=5)
    assert "\n" not in str(caught.value)
    assert _log_file(log).read_bytes() == content
    assert open_log(recovery_point=2).end_offset == 2


def test_batch_that_does_not_follow_its_predecessor_ends_the_prefix(open_log: OpenLog) -> None:
    """The base offset lies outside the CRC: only its place gives a changed one away."""
    log = open_log()
    for _ in range(4):
        append(log, 2)
    content = bytearray(_log_file(log).read_bytes())
    content[2 * SIZE + 6] ^= 1  # offset 4 becomes 260
    _log_file(log).write_bytes(content)
    assert open_log(recovery_point=0).end_offset == 4


def test_hole_between_segments_ends_the_prefix(open_log: OpenLog) -> None:
    log = open_log(segment_bytes=2 * SIZE)
    for _ in range(6):
        append(log, 2)
    with _log_file(log, 4).open("r+b") as file:
        file.truncate(SIZE)
    assert open_log(recovery_point=0).end_offset == 6
    assert not _log_file(log, 8).exists()


@pytest.mark.parametrize("suffix", [".index", ".timeindex"])
def test_index_that_disagrees_is_rebuilt(open_log: OpenLog, suffix: str) -> None:
    log = open_log(index_interval_bytes=1)
    for number in range(5):
        append(log, 2, timestamp_ms=1000 + number)
    log.close()
    good = _log_file(log, suffix=suffix).read_bytes()
    for position in range(len(good)):
        hurt = bytearray(good)
        hurt[position] ^= 0x04
        _log_file(log, suffix=suffix).write_bytes(hurt)
        again = open_log(index_interval_bytes=1)
        for number in range(5):
            assert parse_header(again.read(2 * number, 100).data).base_offset == 2 * number
            assert again.offset_for_time(1000 + number) == (2 * number, 1000 + number)
        assert again.offset_for_time(1005) is None


def test_index_that_looks_sound_and_lies_is_found_out_in_use(open_log: OpenLog) -> None:
    log = open_log(index_interval_bytes=1)
    for number in range(5):
        append(log, 2, timestamp_ms=1000 + 100 * number)
    log.close()
    positions = struct.pack(">IIIIII", 3, 2 * SIZE, 7, 3 * SIZE, 9, 4 * SIZE)  # 3 is in the batch before
    _log_file(log, suffix=".index").write_bytes(positions)
    times = struct.pack(">qIqI", 1050, 5, 1400, 9)  # a record of 1100 lies before offset 5
    _log_file(log, suffix=".timeindex").write_bytes(times)
    again = open_log(index_interval_bytes=1)
    assert again.notes == []
    assert parse_header(again.read(3, 100).data).base_offset == 2
    assert "rebuilt" in again.notes[0]
    _log_file(log, suffix=".timeindex").write_bytes(times)
    assert open_log(index_interval_bytes=1).offset_for_time(1100) == (2, 1100)


def test_producer_state_survives_close_and_crash(open_log: OpenLog) -> None:
    log = open_log()
    for sequence in (0, 1):
        append(log, producer_id=5, producer_epoch=2, base_sequence=sequence)
    crashed = open_log(recovery_point=0)
    assert append(crashed, producer_id=5, producer_epoch=2, base_sequence=0).duplicate
    crashed.close()
    closed = open_log()
    assert append(closed, producer_id=5, producer_epoch=2, base_sequence=1) == (1, 1, -1, True)
    assert append(closed, producer_id=5, producer_epoch=2, base_sequence=2).base_offset == 2


def test_truncation_restores_producers_and_epochs(open_log: OpenLog) -> None:
    log = open_log(segment_bytes=2 * len(make_batch()))
    for sequence in range(5):
        append(log, producer_id=5, producer_epoch=0, base_sequence=sequence, leader_epoch=sequence)
    log.truncate_to(3, 0)
    assert (log.end_offset, log.leader_epochs.latest_epoch) == (3, 2)
    assert append(log, producer_id=5, producer_epoch=0, base_sequence=3) == (3, 3, -1, False)
    log.truncate_to(0, 0)
    assert (log.start_offset, log.end_offset, log.size) == (0, 0, 0)


def test_records_without_timestamps_have_no_newest(open_log: OpenLog) -> None:
    log = open_log()
    assert log.max_timestamp() is None
    append(log, timestamp_ms=-1)
    assert log.max_timestamp() is None
    assert log.offset_for_time(0) is None


@pytest.mark.parametrize("segment_bytes", [100, 1 << 20], ids=["its segment has gone", "its segment is here"])
def test_newest_record_is_one_that_was_not_deleted(open_log: OpenLog, segment_bytes: int) -> None:
    log = open_log(segment_bytes=segment_bytes)
    append(log, timestamp_ms=9000)
    records = [Record(b"k", b"v", timestamp_ms=at) for at in (8000, 3000, 2000)]
    log.append(memoryview(build_batch(records)), leader_epoch=0, now_ms=0)
    append(log, 2, timestamp_ms=4000)
    for start, newest in [(0, (0, 9000)), (1, (1, 8000)), (2, (4, 4000)), (4, (4, 4000)), (6, None)]:
        log.advance_start_offset(start)
        assert log.max_timestamp() == newest


def _emptied(base_offset: int, timestamp_ms: int) -> bytearray:
    """What compaction leaves of a batch that says where its producer is."""
    batch = bytearray(
        pack_header(
            size=HEADER_SIZE,
            attributes=0,
            last_offset_delta=0,
            base_timestamp=NO_TIMESTAMP,
            max_timestamp=timestamp_ms,
            record_count=0,
            base_offset=base_offset,
            producer_id=7,
            producer_epoch=0,
            base_sequence=0,
        )
    )
    seal(batch)
    return batch


def test_follower_counts_no_time_of_a_batch_without_records(open_log: OpenLog) -> None:
    """Nor does a recovery: by it retention goes, and who asks for the newest record."""
    log = open_log(index_interval_bytes=1)
    batches = [make_batch(timestamp_ms=1000), _emptied(1, 9000), make_batch(timestamp_ms=2000, base_offset=2)]
    log.append_as_follower(b"".join(batches), 0)
    assert (log.max_timestamp(), log.segments[0].max_timestamp) == ((2, 2000), 2000)
    again = open_log(recovery_point=0)
    assert (again.max_timestamp(), again.segments[0].max_timestamp) == ((2, 2000), 2000)


def test_newest_record_is_looked_for_below_a_time_that_no_record_has(open_log: OpenLog) -> None:
    """An index tells of a batch that has been emptied since, or a leader let a producer claim any time."""
    claiming = make_batch(timestamp_ms=2000, base_offset=1)
    stamp_timestamps(claiming, 8000, log_append_time=False)
    log = open_log(segment_bytes=len(claiming))
    batches = [make_batch(timestamp_ms=3000), claiming, _emptied(2, 9000)]
    log.append_as_follower(b"".join(batches), 0)
    log.close()
    _log_file(log, 2, ".timeindex").write_bytes(struct.pack(">qI", 9000, 0))
    again = open_log(segment_bytes=len(claiming))
    assert [segment.max_timestamp for segment in again.segments] == [3000, 8000, 9000]
    assert (again.max_timestamp(), again.notes) == ((0, 3000), [])
    again.advance_start_offset(1)
    assert again.max_timestamp() is None


def test_read_that_would_wait_says_so(open_log: OpenLog, monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_log()
    append(log)

    def cold(*_: object) -> int:
        raise BlockingIOError

    monkeypatch.setattr(os, "preadv", cold)
    with pytest.raises(WouldBlock):
        log.read(0, 100, may_block=False)
    assert log.read(0, 100).data


def test_what_is_removed_between_look_and_search_is_out_of_range_and_not_passed_over(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(segment_bytes=2 * SIZE, retention_bytes=2 * SIZE)
    for _ in range(6):
        append(log, 2)
    search, put = log._reader.read, log._segments.put

    def search_later(*arguments: Any) -> LogRead:
        assert log.delete_old_segments(0)
        return search(*arguments)

    def put_watched(segments: Sequence[Segment]) -> None:
        assert log.start_offset >= segments[0].base_offset, "who looks now would believe what is gone"
        put(segments)

    monkeypatch.setattr(log._reader, "read", search_later)
    monkeypatch.setattr(log._segments, "put", put_watched)
    with pytest.raises(OffsetOutOfRange):
        log.read(0, SIZE)


def test_appends_reads_flushes_and_retention_run_side_by_side(open_log: OpenLog) -> None:
    log = open_log(segment_bytes=20 * SIZE, retention_bytes=60 * SIZE, index_interval_bytes=100)
    failures: list[BaseException] = []
    done = threading.Event()

    def read() -> None:
        offset = 0
        while not done.is_set():
            try:
                found = log.read(offset, 7 * SIZE)
            except OffsetOutOfRange:
                offset = log.start_offset
                continue
            except BaseException as error:
                failures.append(error)
                return
            for _, header in iterate_batches(found.data):
                if not header.base_offset <= offset <= header.last_offset:
                    failures.append(AssertionError(f"{offset} is not in {header}"))
                    return
                offset = header.next_offset

    def keep_house() -> None:
        while not done.is_set():
            try:
                log.flush(0)
                log.delete_old_segments(0)
            except BaseException as error:
                failures.append(error)
                return

    threads = [threading.Thread(target=work) for work in (read, read, keep_house)]
    for thread in threads:
        thread.start()
    for _ in range(2000):
        append(log, 2)
    done.set()
    for thread in threads:
        thread.join()
    assert failures == []
    log.close()
    assert open_log().end_offset == 4000


KILLED = """
import sys
from pathlib import Path
from millrace.broker.protocol.records import Record, build_batch
from millrace.broker.storage.log import Log
from millrace.broker.storage.log_config import LogConfig
log = Log.open(Path(sys.argv[1]), LogConfig(segment_bytes=20_000), recovery_point=None, now_ms=0)
number = 0
while True:
    log.append(build_batch([Record(b"%d" % number, bytes(200), (), number)]), leader_epoch=0, now_ms=0)
    number += 1
    if number % 50 == 0:
        log.flush(0)
        print(log.recovery_point, flush=True)
"""


def test_log_of_a_killed_process_recovers_all_that_was_flushed(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path / "t-0")], stdout=subprocess.PIPE)
    assert process.stdout is not None
    flushed = 0
    while flushed < 1000:
        flushed = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    log = Log.open(tmp_path / "t-0", LogConfig(), recovery_point=flushed, now_ms=0)
    assert log.end_offset >= flushed
    keys = [parse_header(batch).max_timestamp for batch in batches_of(log)]
    assert keys == list(range(log.end_offset))


def test_full_disk_while_an_index_is_written_ends_no_log(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the log is in doubt then: with room on the disk again, it goes on."""
    log = open_log(index_interval_bytes=1)
    for _ in range(5):
        append(log)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("millrace.broker.storage.index_file.os.pwrite", full)
        with pytest.raises(KafkaStorageError, match="index"):
            log.flush(0)
        assert log.recovery_point == 0
    append(log)
    log.flush(0)
    assert log.recovery_point == 6


def test_search_in_a_closed_segment_is_left_to_a_thread(open_log: OpenLog) -> None:
    """It opens an index and reads the log at places that nobody has read for long."""
    log = open_log(segment_bytes=400, index_interval_bytes=1)
    for _ in range(12):
        append(log)
    assert len(log.segments) > 2
    with pytest.raises(WouldBlock):
        log.read(1, 1, may_block=False)
    following = log.read(1, 1).next_offset
    while following < log.end_offset:  # whoever goes on where a reader stopped needs no search
        following = log.read(following, 1, may_block=False).next_offset
    assert log.read(log.end_offset - 1, 1, may_block=False).next_offset == log.end_offset


def test_much_at_once_is_read_where_nobody_else_waits(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To copy it takes its time wherever it is: in the page cache, too."""
    log = open_log()
    for _ in range(4):
        append(log, 2)
    monkeypatch.setattr(segment, "LARGE_READ_SIZE", 2 * SIZE)
    assert len(log.read(0, 2 * SIZE, may_block=False).data) == 2 * SIZE
    with pytest.raises(WouldBlock):
        log.read(0, 3 * SIZE, may_block=False)
    assert len(log.read(0, 3 * SIZE).data) == 3 * SIZE
    monkeypatch.setattr(segment, "LARGE_READ_SIZE", SIZE - 1)
    with pytest.raises(WouldBlock):  # one batch that is larger than was asked for
        log.read(0, 1, may_block=False)


def test_search_in_the_active_segment_waits_for_no_disk(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its index has in memory is found there; the rest is left to a thread."""
    log = open_log(index_interval_bytes=1)
    for _ in range(12):
        append(log)

    def waits(*_: object) -> bytes:
        raise AssertionError("the event loop would wait for the disk")

    def found(offset: int) -> int:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pread", waits)
            patch.setattr("millrace.broker.storage.index_file.os.open", waits)
            return parse_header(log.read(offset, 1, may_block=False).data).base_offset

    assert [found(offset) for offset in (7, 3, 10)] == [7, 3, 10]
    log.flush(0)
    with pytest.raises(WouldBlock):
        found(5)
    append(log)
    append(log)
    assert found(13) == 13
    with pytest.raises(WouldBlock):
        found(5)


def test_index_that_does_not_fit_is_not_rebuilt_where_nobody_may_wait(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(index_interval_bytes=1)
    for _ in range(4):
        append(log)
    log.segments[-1].offset_index.append(3, 7)
    with pytest.raises(WouldBlock):
        log.read(3, 1, may_block=False)
