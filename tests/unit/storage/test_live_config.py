"""A log's settings are replaced while it runs: each counts from the next append, roll or housekeeping on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from millrace.broker.errors import InvalidRecord, InvalidTimestamp, RecordListTooLarge, RecordTooLarge
from millrace.broker.protocol.batch import parse_header, verify_crc
from millrace.broker.protocol.records import Record, build_batch, read_records
from millrace.broker.storage.log import Log
from tests.stored_batches import batches_of

from .conftest import append, make_batch

OpenLog = Callable[..., Log]


def change(log: Log, **settings: Any) -> None:
    log.config = replace(log.config, **settings)


def last(log: Log) -> memoryview:
    return list(batches_of(log))[-1]


def test_sizes(open_log: OpenLog) -> None:
    log = open_log()
    append(log, size=300)
    change(log, max_message_bytes=200)
    with pytest.raises(RecordTooLarge):
        append(log, size=300)
    change(log, max_message_bytes=10_000, segment_bytes=200)
    with pytest.raises(RecordListTooLarge):
        append(log, size=300)
    append(log)
    assert len(log.segments) == 2
    change(log, segment_bytes=1 << 20, segment_index_bytes=4)
    append(log)
    assert len(log.segments) == 3


def test_times_of_segments(open_log: OpenLog) -> None:
    log = open_log()
    append(log, timestamp_ms=1000)
    append(log, timestamp_ms=5000)
    assert len(log.segments) == 1
    change(log, segment_ms=100)
    append(log, timestamp_ms=5001)
    assert len(log.segments) == 2
    assert log.roll_if_due(100_000)


def test_index_interval(open_log: OpenLog) -> None:
    log = open_log(index_interval_bytes=1 << 20)
    for _ in range(5):
        append(log)
    assert log.segments[0].index_size == 0
    change(log, index_interval_bytes=1)
    append(log)
    assert log.segments[0].index_size == 8


def test_retention(open_log: OpenLog) -> None:
    log = open_log(segment_bytes=200, retention_ms=-1)
    for number in range(10):
        append(log, timestamp_ms=1000 + number)
    assert log.delete_old_segments(10**9) == []
    change(log, retention_bytes=400)
    before = len(log.segments)
    assert 0 < len(log.delete_old_segments(10**9)) < before
    change(log, retention_bytes=-1, retention_ms=100)
    log.delete_old_segments(10**9)
    assert log.start_offset == 10


def test_timestamp_type_and_bounds(open_log: OpenLog) -> None:
    log = open_log()
    assert append(log, timestamp_ms=1000, now_ms=9000).log_append_time_ms == -1
    change(log, timestamp_type="LogAppendTime")
    for compression in range(5):
        sent = make_batch(3, timestamp_ms=1000, compression=compression)
        body = bytes(sent[61:])
        result = log.append(sent, leader_epoch=0, now_ms=9000 + compression)
        stored = last(log)
        verify_crc(stored, 0, parse_header(stored))
        assert result.log_append_time_ms == 9000 + compression
        assert bytes(stored[61:]) == body, "the records are not even unpacked"
        assert {record.timestamp_ms for record in read_records(stored)} == {9000 + compression}
    change(log, timestamp_type="CreateTime", timestamp_before_max_ms=500, timestamp_after_max_ms=500)
    for timestamp_ms in (8499, 9501):
        with pytest.raises(InvalidTimestamp):
            append(log, timestamp_ms=timestamp_ms, now_ms=9000)
    for timestamp_ms in (8500, 9500, -1):
        append(log, timestamp_ms=timestamp_ms, now_ms=9000)
    change(log, timestamp_type="LogAppendTime")
    append(log, timestamp_ms=1, now_ms=9000)
    assert parse_header(last(log)).max_timestamp == 9000, "bounds are not about the broker's own clock"


def test_duplicate_under_log_append_time_has_the_time_of_the_first(open_log: OpenLog) -> None:
    log = open_log(timestamp_type="LogAppendTime")
    producer = {"producer_id": 5, "producer_epoch": 0, "base_sequence": 0}
    first = append(log, now_ms=7000, **producer)
    again = append(log, now_ms=8000, **producer)
    assert again == (first.base_offset, first.last_offset, 7000, True)
    assert log.end_offset == 1


def test_compression(open_log: OpenLog) -> None:
    log = open_log()
    for kind, codec in (("gzip", 1), ("producer", 3), ("uncompressed", 0), ("zstd", 4)):
        change(log, compression_type=kind)
        append(log, 3, compression=3, timestamp_ms=2000)
        header = parse_header(last(log))
        assert header.compression == codec
        assert header.max_timestamp == 2000
        assert len(read_records(last(log))) == 3
    change(log, timestamp_type="LogAppendTime", compression_type="snappy")
    append(log, 3, compression=3, now_ms=5000)
    assert {record.timestamp_ms for record in read_records(last(log))} == {5000}


def test_keys_are_required_from_when_a_topic_is_compacted(open_log: OpenLog) -> None:
    log = open_log()
    keyless = build_batch([Record(None, b"v", (), 0)])
    log.append(keyless, leader_epoch=0, now_ms=0)
    change(log, cleanup_policy=frozenset({"compact"}))
    with pytest.raises(InvalidRecord):
        log.append(build_batch([Record(None, b"v", (), 0)]), leader_epoch=0, now_ms=0)
    change(log, cleanup_policy=frozenset({"delete"}))
    log.append(build_batch([Record(None, b"v", (), 0)]), leader_epoch=0, now_ms=0)
    assert log.end_offset == 2


def test_flushing(open_log: OpenLog) -> None:
    log = open_log()
    append(log)
    assert log.recovery_point == 0
    change(log, flush_messages=1)
    append(log)
    assert log.recovery_point == 2
    change(log, flush_messages=10**9, flush_ms=10)
    append(log)
    assert log.needs_flush(10**6)
