"""Compaction, case by case: what a batch keeps, tombstones, transactions, crashes, readers, the manager."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millrace.broker.protocol import compaction_kernels
from millrace.broker.protocol.batch import HEADER_SIZE, iterate_batches, pack_header, parse_header, seal
from millrace.broker.protocol.control_records import control_type
from millrace.broker.protocol.records import Record, build_batch, read_records
from millrace.broker.protocol.wire import zigzag
from millrace.broker.storage.batch_validation import check_batch
from millrace.broker.storage.compaction_plan import SegmentView, group_segments, plan_log
from millrace.broker.storage.key_map import KeyMap
from millrace.broker.storage.log import Log
from millrace.broker.storage.log_config import LogConfig
from tests.stored_batches import batches_of

from .compaction import (
    COMPACT,
    NOW_MS,
    RETENTION_MS,
    OpenLog,
    clean,
    compacted_config,
    end,
    pairs,
    put,
    roll,
)
from .conftest import append

# -- records and batches


@pytest.mark.parametrize("compression", [0, 1, 2, 3, 4])
def test_last_record_of_each_key_stays_as_it_was(log: Log, compression: int) -> None:
    put(log, ("a", "1"), ("b", "1"), ("c", "1"), compression=compression)
    put(log, ("b", "2"), ("b", "3"), compression=compression)
    roll(log)
    before = {record.offset: record for batch in batches_of(log) for record in read_records(batch)}
    old_headers = [parse_header(batch) for batch in batches_of(log)]
    clean(log)
    assert pairs(log) == [(0, "a", "1"), (2, "c", "1"), (4, "b", "3")]
    for batch, old in zip(batches_of(log), old_headers, strict=True):
        header = parse_header(batch)
        kept = ("base_offset", "last_offset", "leader_epoch", "compression", "base_timestamp", "producer_id")
        assert [getattr(header, name) for name in kept] == [getattr(old, name) for name in kept]
        for record in read_records(batch):
            assert record == before[record.offset]
        assert header.max_timestamp == max(record.timestamp_ms for record in read_records(batch))
    assert len(log.segments) == 2
    assert log.end_offset == 5


def test_untouched_batch_is_copied_as_bytes(log: Log) -> None:
    put(log, ("a", "1"), ("b", "1"), compression=4)
    put(log, ("a", "2"))
    put(log, ("c", "2"), ("d", "4"), compression=3)
    roll(log)
    third = bytes(list(batches_of(log))[2])
    clean(log)
    assert bytes(list(batches_of(log))[2]) == third


def test_log_append_time_stays(tmp_path: Path) -> None:
    config = compacted_config(timestamp_type="LogAppendTime")
    log = Log.open(tmp_path / "t-0", config, recovery_point=None, now_ms=0)
    put(log, ("a", "1"), ("b", "1"), now_ms=77_000, compression=4)
    put(log, ("b", "2"), now_ms=78_000)
    log.config = compacted_config(segment_ms=1)
    log.roll_if_due(10**9)
    clean(log)
    times = [(r.offset, r.timestamp_ms) for batch in batches_of(log) for r in read_records(batch)]
    assert times == [(0, 77_000), (2, 78_000)]


def test_records_without_key_go_when_a_topic_becomes_compacted(tmp_path: Path) -> None:
    log = Log.open(tmp_path / "t-0", LogConfig(), recovery_point=None, now_ms=0)
    log.append(build_batch([Record(None, b"x", (), 5), Record(b"k", b"y", (), 6)]), leader_epoch=0, now_ms=0)
    log.config = compacted_config(segment_ms=1)
    log.roll_if_due(10**9)
    clean(log)
    assert pairs(log) == [(1, "k", "y")]


def test_tombstone_stays_its_time_and_then_goes(log: Log) -> None:
    put(log, ("a", "1"), ("b", "1"))
    put(log, ("a", None), ("c", "1"))
    roll(log)
    clean(log, NOW_MS)
    batch = list(batches_of(log))[1]
    header = parse_header(batch)
    assert header.has_delete_horizon
    assert header.base_timestamp == NOW_MS + RETENTION_MS, "KIP-534"
    assert [record.timestamp_ms for record in read_records(batch)] == [NOW_MS, NOW_MS + 1]
    put(log, ("x", "1"))
    roll(log)
    clean(log, NOW_MS + RETENTION_MS - 1)
    assert (2, "a", None) in pairs(log)
    put(log, ("x", "2"))
    roll(log)
    clean(log, NOW_MS + RETENTION_MS)
    assert pairs(log) == [(1, "b", "1"), (3, "c", "1"), (5, "x", "2")]


def hostile_tombstone(key: bytes) -> bytearray:
    """Of 2001, by a base and a delta that are each beyond any time."""
    delta = 2**63 - 1
    body = b"\0" + zigzag(delta) + zigzag(0) + zigzag(len(key)) + key + zigzag(-1) + zigzag(0)
    record = zigzag(len(body)) + body
    header = pack_header(
        size=HEADER_SIZE + len(record),
        attributes=0,
        last_offset_delta=0,
        base_timestamp=-(2**63) + 10**12,
        max_timestamp=10**12 - 1,
        record_count=1,
    )
    batch = bytearray(header) + record
    seal(batch)
    return batch


def test_times_and_horizons_at_the_edge_of_64_bits_stop_no_compaction(log: Log) -> None:
    put(log, ("a", "1"), ("b", "1"))
    check_batch(hostile_tombstone(b"a"), log.config, now_ms=NOW_MS)
    log.append(hostile_tombstone(b"a"), leader_epoch=3, now_ms=NOW_MS)
    put(log, ("b", None))
    roll(log)
    log.config = replace(log.config, delete_retention_ms=2**63 - 1)
    clean(log)
    assert pairs(log) == [(2, "a", None), (3, "b", None)]
    batches = [batch for batch in batches_of(log) if parse_header(batch).record_count]
    assert {parse_header(batch).base_timestamp for batch in batches} == {2**63 - 1}
    assert [record.timestamp_ms for batch in batches for record in read_records(batch)] == [
        10**12 - 1,
        NOW_MS,
    ]


def test_last_batch_of_a_producer_stays_as_a_header(log: Log) -> None:
    put(log, ("a", "1"), producer_id=5, producer_epoch=1, base_sequence=0)
    put(log, ("a", "2"), ("b", "2"), producer_id=5, producer_epoch=1, base_sequence=1)
    put(log, ("a", "3"), ("b", "3"), producer_id=6, producer_epoch=0, base_sequence=0)
    put(log, ("a", "4"), ("b", "4"))
    roll(log)
    clean(log)
    headers = [parse_header(batch) for batch in batches_of(log)]
    assert [(h.producer_id, h.base_sequence, h.last_sequence, h.record_count) for h in headers] == [
        (5, 1, 2, 0),
        (6, 0, 1, 0),
        (-1, -1, -1, 2),
    ]
    again = Log.open(log.directory, log.config, recovery_point=0, now_ms=NOW_MS)
    result = again.append(
        build_batch([Record(b"z", b"z", (), 5)], producer_id=5, producer_epoch=1, base_sequence=3),
        leader_epoch=3,
        now_ms=NOW_MS,
    )
    assert not result.duplicate


# -- transactions


def test_aborted_records_go_at_once_and_the_marker_later(log: Log) -> None:
    transaction = {"producer_id": 9, "producer_epoch": 0, "transactional": True}
    put(log, ("a", "1"))
    put(log, ("a", "2"), ("b", "2"), base_sequence=0, **transaction)
    end(log, 9, False)
    put(log, ("c", "2"), base_sequence=2, **transaction)
    end(log, 9, True)
    roll(log)
    assert log.aborted_transactions(0, 10) == ((9, 1),)
    clean(log)
    assert pairs(log) == [(0, "a", "1"), (4, "c", "2")]
    assert log.aborted_transactions(0, 10) == ((9, 1),), "a reader of the old segment may still need it"
    kinds = [control_type(batch) for batch in batches_of(log) if parse_header(batch).is_control]
    assert kinds == [0, 1]
    put(log, ("x", "1"))
    roll(log)
    clean(log)
    assert log.aborted_transactions(0, 10) == ()
    markers = [parse_header(batch) for batch in batches_of(log) if parse_header(batch).is_control]
    assert [marker.has_delete_horizon for marker in markers] == [True, False]
    put(log, ("x", "2"))
    roll(log)
    clean(log, NOW_MS + RETENTION_MS - 1)
    kinds = [control_type(batch) for batch in batches_of(log) if parse_header(batch).is_control]
    assert kinds == [0, 1], "for readers that have met its records"
    put(log, ("x", "2"))
    roll(log)
    clean(log, NOW_MS + RETENTION_MS)
    kinds = [control_type(batch) for batch in batches_of(log) if parse_header(batch).is_control]
    assert kinds == [1], "the commit's record is still there"
    put(log, ("x", "3"), ("c", "3"))
    roll(log)
    for wait_ms in (0, RETENTION_MS):
        clean(log, NOW_MS + RETENTION_MS + wait_ms)
        put(log, ("x", "4"))
        roll(log)
    again = Log.open(log.directory, log.config, recovery_point=0, now_ms=NOW_MS)
    assert again.producers.first_unstable_offset is None
    assert again.producers.entries[9].last_sequence == 2


def test_nothing_at_or_above_the_last_stable_offset_is_touched(log: Log) -> None:
    put(log, ("a", "1"))
    put(log, ("a", "2"))
    roll(log)
    opened = put(log, ("a", "3"), producer_id=9, producer_epoch=0, base_sequence=0, transactional=True)
    put(log, ("a", "4"))
    roll(log)
    assert log.last_stable_offset(log.end_offset) == opened
    assert clean(log, stable_offset=opened) == opened
    assert pairs(log) == [(1, "a", "2"), (2, "a", "3"), (3, "a", "4")]


# -- what is compacted, and when


def _views(*sizes: int, first_ms: int = 100) -> list[SegmentView]:
    return [
        SegmentView(10 * n, 10 * n + 10, size, 8, first_ms + n, first_ms + n) for n, size in enumerate(sizes)
    ]


def _plan(
    views: list[SegmentView], *, cleaned: int = 0, stable: int = 1000, now_ms: int = 200, **config: Any
):
    return plan_log(
        views,
        LogConfig(cleanup_policy=COMPACT, **config),
        cleaned_offset=cleaned,
        start_offset=0,
        stable_offset=stable,
        now_ms=now_ms,
    )


def test_plan_ends_before_the_active_segment_and_the_stable_offset() -> None:
    views = _views(10, 10, 10, 10)
    assert _plan(views).first_uncleanable == 30
    assert _plan(views, stable=29).first_uncleanable == 20
    assert _plan(views, stable=30).first_uncleanable == 30
    assert not _plan(views, stable=9).is_due


def test_plan_waits_for_the_dirty_ratio_or_the_longest_lag() -> None:
    views = _views(10, 10, 10, 10)
    assert _plan(views, cleaned=20).dirty_ratio == pytest.approx(1 / 3)
    assert not _plan(views, cleaned=20, min_cleanable_dirty_ratio=0.34).is_due
    assert _plan(views, cleaned=20, min_cleanable_dirty_ratio=0.33).is_due
    assert not _plan(views, cleaned=20, max_compaction_lag_ms=98).is_due
    assert _plan(views, cleaned=20, max_compaction_lag_ms=97).is_due, "the record of 102 is 98 ms old"
    assert not _plan(views, cleaned=30, max_compaction_lag_ms=1).is_due, "nothing is dirty"


def test_plan_leaves_young_records_alone() -> None:
    views = _views(10, 10, 10, 10)
    assert _plan(views, min_compaction_lag_ms=100).first_uncleanable == 10
    assert _plan(views, min_compaction_lag_ms=99).first_uncleanable == 20


def test_compacted_segment_is_rolled_within_the_longest_lag(open_log: OpenLog) -> None:
    log = open_log(cleanup_policy=COMPACT, max_compaction_lag_ms=100)
    append(log, timestamp_ms=1000)
    assert log.roll_if_due(1101)
    append(log, timestamp_ms=2000)
    append(log, timestamp_ms=2101)
    assert len(log.segments) == 3


def test_small_segments_merge() -> None:
    assert group_segments(_views(4, 4, 4, 9, 1), max_size=10, max_index_size=1000) == [(0, 2), (2, 1), (3, 2)]
    assert group_segments(_views(1, 1, 1), max_size=10, max_index_size=16) == [(0, 2), (2, 1)]
    far = [SegmentView(0, 5, 1, 8, 0, 0), SegmentView(5, 2**31 + 1, 1, 8, 0, 0)]
    assert group_segments(far, max_size=10, max_index_size=100) == [(0, 1), (1, 1)]
    assert group_segments([], max_size=10, max_index_size=100) == []


def test_merged_log_is_found_and_read_over_holes(log: Log) -> None:
    for number in range(12):
        put(log, ("same", str(number)), (f"own{number}", "1"))
        roll(log)
    clean(log)
    assert len(log.segments) == 2
    assert len(pairs(log)) == 13
    for offset in range(log.end_offset):
        found = log.read(offset, 1)
        header = next(iterate_batches(found.data))[1]
        expected = next(at for at, _, _ in pairs(log) if at >= offset)
        assert header.last_offset >= expected >= header.base_offset
    assert log.offset_for_time(NOW_MS) == (1, NOW_MS + 1)
    log.close(NOW_MS)
    again = Log.open(log.directory, log.config, recovery_point=None, now_ms=NOW_MS)
    assert again.notes == []
    assert pairs(again) == pairs(log)


def test_map_that_is_too_small_goes_as_far_as_it_can(log: Log) -> None:
    for number in range(100):
        put(log, (f"k{number % 90}", str(number)))
    roll(log)
    ends = [clean(log, map_size=64 * 24)]
    while ends[-1] < 100:
        ends.append(clean(log, map_size=64 * 24))
        assert ends[-1] > ends[-2]
    assert ends[0] == 48, "three quarters of 64"
    assert len(pairs(log)) == 90
    assert sorted(int(value or 0) for _, _, value in pairs(log)) == list(range(10, 100))


def test_kernel_hash_is_siphash() -> None:
    """The first of the 128-bit vectors of the reference implementation: key 00 to 0f, no input."""
    import numpy

    secret = numpy.frombuffer(bytes(range(16)), "<u8")
    data = numpy.frombuffer(memoryview(b"\0\1\2").toreadonly(), "u1")
    hashes = [compaction_kernels.siphash128(data, 0, size, secret[0], secret[1]) for size in (0, 1)]
    texts = [(int(a).to_bytes(8, "little") + int(b).to_bytes(8, "little")).hex() for a, b in hashes]
    assert texts == ["a3817f04ba25a8e66df67214c7550293", "da87c1d86b99af44347659119b22fc45"]


def test_keys_that_share_a_slot_are_told_apart() -> None:
    keys = KeyMap(40, 64 * 24)
    batch = build_batch([Record(b"%d" % n, b"", (), 0) for n in range(40)])
    assert keys.add(memoryview(batch)[61:], parse_header(batch), 0)
    assert len(keys) == 40
    sifted = keys.sift(memoryview(batch)[61:], parse_header(batch), keep_tombstones=False)
    assert sifted.kept_count == 40
