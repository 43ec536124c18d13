"""The table of the module's rules, row by row, and the snapshot's bytes."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from millrace.broker.errors import InvalidProducerEpoch, KafkaStorageError, OutOfOrderSequence
from millrace.broker.protocol.batch import BatchHeader, parse_header
from millrace.broker.protocol.checksum import crc32c
from millrace.broker.protocol.control_records import Marker
from millrace.broker.storage import producer_snapshot
from millrace.broker.storage.producer_state import ProducerState

from .conftest import make_batch

LAST = 2**31 - 1


def _header(sequence: int, *, epoch: int = 0, count: int = 1, offset: int = 0, **flags: bool) -> BatchHeader:
    batch = make_batch(
        count,
        producer_id=9,
        producer_epoch=epoch,
        base_sequence=sequence,
        base_offset=offset,
        timestamp_ms=500,
        **flags,
    )
    return parse_header(batch)


def _state(*headers: BatchHeader) -> ProducerState:
    state = ProducerState()
    for header in headers:
        assert state.check(header) is None
        state.note(header, now_ms=1000)
    return state


def test_next_sequence_is_appended() -> None:
    assert _state(_header(0, count=3)).check(_header(3)) is None


def test_the_disk_that_refuses_a_later_epoch_holds_back_what_follows_in_that_one() -> None:
    state = ProducerState()
    state.refused(_header(0, epoch=0))
    state.refused(_header(0, epoch=1))
    state.refused(_header(1, epoch=1))
    with pytest.raises(KafkaStorageError):
        state.check(_header(1, epoch=1))
    assert state.check(_header(0, epoch=1)) is None


def test_producers_of_whom_the_disk_has_taken_nothing_are_forgotten_in_time() -> None:
    state = ProducerState()
    state.refused(_header(0))
    state.expire(0, 1000)
    with pytest.raises(KafkaStorageError):
        state.check(_header(1))
    state.expire(0, 1000)
    assert state.check(_header(1)) is None


def test_sequence_wraps_to_zero() -> None:
    assert _state(_header(LAST)).check(_header(0)) is None
    assert _state(_header(LAST - 1, count=4)).check(_header(2)) is None


def test_unknown_producer_may_begin_anywhere() -> None:
    assert ProducerState().check(_header(77)) is None


def test_each_of_the_last_five_batches_is_a_duplicate_and_the_sixth_is_not() -> None:
    state = _state(*(_header(2 * n, count=2, offset=10 * n) for n in range(6)))
    for n in range(1, 6):
        stored = state.check(_header(2 * n, count=2))
        assert stored is not None
        assert (stored.first_offset, stored.last_offset) == (10 * n, 10 * n + 1)
    with pytest.raises(OutOfOrderSequence):
        state.check(_header(0, count=2))


@pytest.mark.parametrize(
    ("sequence", "count"), [(4, 1), (1, 1), (0, 2), (0, 4)], ids=["gap", "part", "part", "more"]
)
def test_other_sequences_are_refused(sequence: int, count: int) -> None:
    with pytest.raises(OutOfOrderSequence):
        _state(_header(0, count=3)).check(_header(sequence, count=count))


def test_newer_epoch_begins_at_zero_and_fences_the_older() -> None:
    state = _state(_header(0))
    with pytest.raises(OutOfOrderSequence):
        state.check(_header(1, epoch=1))
    begun = _header(0, epoch=1)
    assert state.check(begun) is None
    state.note(begun, 0)
    with pytest.raises(InvalidProducerEpoch):
        state.check(_header(1, epoch=0))
    assert state.check(_header(1, epoch=1)) is None


def test_open_transaction_is_remembered_until_its_marker() -> None:
    state = _state(_header(0, offset=5, transactional=True), _header(1, offset=6, transactional=True))
    assert state.first_unstable_offset == 5
    assert state.expire(10**9, 1) == 0, "an open transaction keeps its producer"
    state.note(_header(-1, offset=7, transactional=True, control=True), 1000, Marker(9, 0, 0, True))
    assert state.first_unstable_offset is None
    assert state.check(_header(2)) is None


def test_silent_producer_expires_by_when_it_was_heard() -> None:
    state = _state(_header(0))
    assert state.expire(1999, 1000) == 0
    assert state.expire(2000, 1000) == 1
    assert state.entries == {}


def test_snapshot_has_kafka_s_bytes() -> None:
    state = _state(_header(0, count=3, offset=40))
    entry = struct.pack(">qhiqiqiq", 9, 0, 2, 42, 2, 500, -1, -1)
    body = struct.pack(">i", 1) + entry
    assert producer_snapshot.encode(state) == struct.pack(">hI", 1, crc32c(body)) + body


def test_snapshot_reads_back_with_the_last_batch(tmp_path: Path) -> None:
    state = _state(_header(0), _header(1, offset=1))
    state.end_offset = 2
    producer_snapshot.write(tmp_path, state)
    again = producer_snapshot.load_newest(tmp_path, start_offset=0, end_offset=5, now_ms=7)
    assert again is not None
    assert again.end_offset == 2
    assert again.check(_header(1)) is not None
    assert again.check(_header(2)) is None
    assert again.entries[9].last_heard_ms == 7


def test_damaged_snapshot_is_passed_over_for_an_older(tmp_path: Path) -> None:
    state = _state(_header(0))
    for offset in (1, 2):
        state.end_offset = offset
        producer_snapshot.write(tmp_path, state)
    path = producer_snapshot.snapshot_path(tmp_path, 2)
    good = path.read_bytes()
    for hurt in (good[:-1], good[:3], good + b"\0", good[:20] + b"\xff" + good[21:], b"\x00\x02" + good[2:]):
        path.write_bytes(hurt)
        found = producer_snapshot.load_newest(tmp_path, start_offset=0, end_offset=9, now_ms=0)
        assert found is not None
        assert found.end_offset == 1
    assert producer_snapshot.load_newest(tmp_path, start_offset=0, end_offset=0, now_ms=0) is None
