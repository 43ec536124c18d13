"""What the log refuses, what it changes, and that a refused write leaves no trace."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from typing import Any

import pytest

from millrace.broker import errors
from millrace.broker.protocol.batch import parse_header, seal, verify_crc
from millrace.broker.protocol.control_records import build_marker
from millrace.broker.protocol.records import Record, build_batch, read_records
from millrace.broker.storage.log import Log
from millrace.broker.storage.segment import LogFile
from tests.stored_batches import batches_of

from .conftest import append, make_batch

OpenLog = Callable[..., Log]


def test_offsets_and_epoch_are_stamped_in_place(open_log: OpenLog) -> None:
    log = open_log()
    append(log, 3)
    batch = make_batch(2)
    result = log.append(memoryview(batch), leader_epoch=7, now_ms=1000)
    assert result == (3, 4, -1, False)
    header = parse_header(batch)
    assert (header.base_offset, header.leader_epoch) == (3, 7)
    assert bytes(log.read(3, 1000).data) == batch
    verify_crc(batch, 0, header)


def test_read_only_batch_is_copied(open_log: OpenLog) -> None:
    log = open_log()
    batch = bytes(make_batch())
    log.append(batch, leader_epoch=1, now_ms=0)
    assert parse_header(batch).leader_epoch == -1
    assert parse_header(log.read(0, 100).data).leader_epoch == 1


def _with(batch: bytearray, position: int, value: bytes, *, sealed: bool = True) -> bytearray:
    batch[position : position + len(value)] = value
    if sealed:
        seal(batch)
    return batch


REFUSED: dict[str, tuple[Callable[[], bytes | bytearray], type[errors.KafkaError]]] = {
    "empty": (lambda: b"", errors.InvalidRecord),
    "magic 1": (lambda: _with(make_batch(), 16, b"\x01"), errors.InvalidRecord),
    "cut": (lambda: make_batch()[:-1], errors.InvalidRecord),
    "two batches": (lambda: make_batch() + make_batch(), errors.InvalidRecord),
    "wrong CRC": (lambda: _with(make_batch(), 65, b"\xff", sealed=False), errors.CorruptMessage),
    # Records that can be read all the same: nothing but the CRC tells.
    "wrong CRC of a value": (
        lambda: _with(make_batch(timestamp_ms=200_000), -2, b"w", sealed=False),
        errors.CorruptMessage,
    ),
    "count that lies": (lambda: _with(make_batch(), 57, b"\0\0\0\2"), errors.InvalidRecord),
    "count and delta that lie": (
        lambda: _with(_with(make_batch(), 57, b"\0\0\0\2"), 23, b"\0\0\0\1"),
        errors.InvalidRecord,
    ),
    "no records": (lambda: _with(make_batch(), 57, b"\0\0\0\0"), errors.InvalidRecord),
    "control batch": (lambda: make_batch(control=True), errors.InvalidRecord),
    "log append time": (lambda: _with(make_batch(), 21, b"\0\x08"), errors.InvalidTimestamp),
    "codec 5": (lambda: _with(make_batch(), 21, b"\0\x05"), errors.UnsupportedCompressionType),
    "not gzip": (lambda: _with(make_batch(), 21, b"\0\x01"), errors.CorruptMessage),
    "producer without sequence": (lambda: make_batch(producer_id=1), errors.InvalidRecord),
    "transaction without producer": (lambda: make_batch(transactional=True), errors.InvalidRecord),
    "larger than max.message.bytes": (lambda: make_batch(size=5000), errors.RecordTooLarge),
    "timestamp in the future": (lambda: make_batch(timestamp_ms=10**9), errors.InvalidTimestamp),
    "timestamp of the past": (lambda: make_batch(timestamp_ms=1), errors.InvalidTimestamp),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_batch_is_refused_and_leaves_no_trace(open_log: OpenLog, name: str) -> None:
    log = open_log(max_message_bytes=4000, timestamp_before_max_ms=100_000, timestamp_after_max_ms=3_600_000)
    make, error = REFUSED[name]
    with pytest.raises(error):
        log.append(make(), leader_epoch=0, now_ms=200_000)
    assert (log.end_offset, log.size, log.failure) == (0, 0, None)


def test_batch_larger_than_a_segment_is_refused(open_log: OpenLog) -> None:
    with pytest.raises(errors.RecordListTooLarge):
        append(open_log(segment_bytes=200), size=300)


def test_compacted_topic_refuses_records_without_key(open_log: OpenLog) -> None:
    log = open_log(cleanup_policy=frozenset({"compact"}))
    with pytest.raises(errors.InvalidRecord, match="no key"):
        log.append(build_batch([Record(None, b"v")]), leader_epoch=0, now_ms=0)


@pytest.mark.parametrize("compression", [0, 3], ids=["plain", "lz4"])
def test_refused_batch_names_the_records_at_fault_and_no_others(open_log: OpenLog, compression: int) -> None:
    log = open_log(
        cleanup_policy=frozenset({"compact"}), timestamp_before_max_ms=100, timestamp_after_max_ms=50
    )
    now_ms = 10_000

    def refusal_of(*records: Record) -> errors.KafkaError:
        with pytest.raises((errors.InvalidRecord, errors.InvalidTimestamp)) as refused:
            log.append(build_batch(records, compression=compression), leader_epoch=0, now_ms=now_ms)
        assert log.end_offset == 0
        error: errors.KafkaError = refused.value
        return error

    good = Record(b"k", b"v", (), now_ms)
    keyless = Record(None, b"v", (), now_ms)
    error = refusal_of(good, keyless, good, keyless)
    assert isinstance(error, errors.InvalidRecord)
    assert [place for place, _ in error.record_errors] == [1, 3]
    assert error.record_errors[0][1] == "record 1: it has no key, and the topic is compacted"
    assert "1 more" in str(error)

    # As in Apache Kafka, one record with a wrong time gives the batch that error.
    error = refusal_of(
        Record(b"k", b"v", (), now_ms - 101), keyless, good, Record(b"k", b"v", (), now_ms + 51)
    )
    assert isinstance(error, errors.InvalidTimestamp)
    assert [place for place, _ in error.record_errors] == [0, 1, 3]
    assert "message.timestamp.before.max.ms = 100" in error.record_errors[0][1]
    assert "message.timestamp.after.max.ms = 50" in error.record_errors[2][1]

    in_time = [Record(b"k", b"v", (), now_ms - 100), good, Record(b"k", b"v", (), now_ms + 50)]
    log.append(build_batch(in_time, compression=compression), leader_epoch=0, now_ms=now_ms)
    assert log.end_offset == 3


def test_broker_that_stamps_times_itself_refuses_none_for_its_own(open_log: OpenLog) -> None:
    log = open_log(
        cleanup_policy=frozenset({"compact"}), timestamp_type="LogAppendTime", timestamp_after_max_ms=50
    )
    late = [Record(b"k", b"v", (), 10**6), Record(None, b"v", (), 0)]
    with pytest.raises(errors.InvalidRecord) as refused:
        log.append(build_batch(late), leader_epoch=0, now_ms=0)
    assert [place for place, _ in refused.value.record_errors] == [1]
    log.append(build_batch(late[:1]), leader_epoch=0, now_ms=0)


def test_header_validation_takes_records_as_they_are(open_log: OpenLog) -> None:
    batch = _with(make_batch(), 64, b"\x02")
    log = open_log()
    with pytest.raises(errors.InvalidRecord):
        log.append(bytes(batch), leader_epoch=0, now_ms=0)
    assert log.append(bytes(batch), leader_epoch=0, now_ms=0, validation="header").base_offset == 0


def test_internal_origin_may_write_control_batches(open_log: OpenLog) -> None:
    log = open_log()
    begun = make_batch(transactional=True, producer_id=4, producer_epoch=0, base_sequence=0)
    log.append(begun, leader_epoch=0, now_ms=0)
    assert log.producers.first_unstable_offset == 0
    log.append(build_marker(4, 0, 0, True, 0), leader_epoch=0, now_ms=0, origin="internal")
    assert log.producers.first_unstable_offset is None


def test_log_append_time_stamps_the_broker_s_clock(open_log: OpenLog) -> None:
    log = open_log(timestamp_type="LogAppendTime")
    result = append(log, 2, now_ms=77_000, compression=4)
    assert result.log_append_time_ms == 77_000
    stored = log.read(0, 1000).data
    verify_crc(stored, 0, parse_header(stored))
    assert [record.timestamp_ms for record in read_records(stored)] == [77_000, 77_000]


def test_maximum_timestamp_that_lies_is_put_right(open_log: OpenLog) -> None:
    log = open_log()
    log.append(_with(make_batch(timestamp_ms=500), 35, (9000).to_bytes(8)), leader_epoch=0, now_ms=0)
    stored = log.read(0, 1000).data
    assert parse_header(stored).max_timestamp == 500
    verify_crc(stored, 0, parse_header(stored))


@pytest.mark.parametrize(("kind", "codec"), [("uncompressed", 0), ("gzip", 1), ("snappy", 2), ("zstd", 4)])
def test_topic_s_codec_is_enforced(open_log: OpenLog, kind: str, codec: int) -> None:
    log = open_log(compression_type=kind)
    append(log, 3, compression=3)
    append(log, 3)
    for batch in batches_of(log):
        header = parse_header(batch)
        verify_crc(batch, 0, header)
        assert header.compression == codec
        assert len(read_records(batch)) == 3


def test_flush_messages_flushes_within_the_append(open_log: OpenLog) -> None:
    log = open_log(flush_messages=3)
    append(log, 2)
    assert log.recovery_point == 0
    append(log, 1)
    assert log.recovery_point == 3


def test_without_a_time_for_flushes_a_clock_that_was_set_back_makes_none_due(open_log: OpenLog) -> None:
    log = open_log()
    append(log)
    log.flush(10_000)
    append(log)
    assert not log.needs_flush(9_999)


def test_flush_is_due_after_flush_ms_and_after_a_roll(open_log: OpenLog) -> None:
    log = open_log(flush_ms=500, segment_bytes=200)
    assert not log.needs_flush(10_000), "nothing to flush"
    append(log, size=100)
    assert not log.needs_flush(1499)
    assert log.needs_flush(1500)
    log.flush(1500)
    append(log, size=100)
    assert not log.needs_flush(1999)
    assert log.needs_flush(1499), "the clock was set back: nobody knows how long ago the last one was"
    append(log, size=100)
    assert log.needs_flush(1501), "a segment was completed since"


def test_partial_write_is_taken_back(open_log: OpenLog) -> None:
    """A real one: the process may not write beyond a file size that lies within the next batch."""
    log = open_log()
    append(log)
    size = log.size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 30, limits[1]))
    try:
        with pytest.raises(errors.KafkaStorageError, match="not written") as caught:
            append(log)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.retriable
    assert (log.end_offset, os.path.getsize(log.directory / f"{0:020d}.log")) == (1, size)
    assert append(log).base_offset == 1
    assert len(list(batches_of(log))) == 2


def test_log_whose_partial_write_stays_refuses_all_appends(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log()

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(LogFile, "write", fail)
        patched.setattr(os, "ftruncate", fail)
        with pytest.raises(errors.KafkaStorageError):
            append(log)
    with pytest.raises(errors.KafkaStorageError, match="partial write"):
        append(log)


def test_failed_flush_takes_the_log_offline(open_log: OpenLog, monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_log()
    append(log)

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", fail)
        with pytest.raises(errors.KafkaStorageError, match="flush failed"):
            log.flush(0)
    assert log.recovery_point == 0
    with pytest.raises(errors.KafkaStorageError, match="flush failed"):
        append(log)


def test_follower_keeps_the_leader_s_offsets_and_epochs(open_log: OpenLog) -> None:
    log = open_log()
    first = make_batch(2, base_offset=10, leader_epoch=4)
    second = make_batch(1, base_offset=15, leader_epoch=5, producer_id=3, producer_epoch=0, base_sequence=0)
    log.append_as_follower(memoryview(bytes(first + second)), now_ms=0)
    assert log.end_offset == 16
    assert log.leader_epochs.entries == [(4, 10), (5, 15)]
    assert log.producers.entries[3].last_sequence == 0
    with pytest.raises(errors.OffsetOutOfRange):
        log.append_as_follower(first, now_ms=0)
    damaged = make_batch(base_offset=16)
    damaged[-1] ^= 1
    with pytest.raises(errors.CorruptMessage):
        log.append_as_follower(damaged, now_ms=0)
    assert log.end_offset == 16
