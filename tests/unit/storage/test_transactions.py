"""Transactions in a log: the aborted index, the last stable offset, markers, and what survives what."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.broker.errors import (
    InvalidProducerEpoch,
    InvalidRecord,
    InvalidTxnState,
    RecordListTooLarge,
    TransactionCoordinatorFenced,
)
from millrace.broker.protocol.batch import parse_header
from millrace.broker.protocol.control_records import Marker, build_marker, control_type, parse_marker
from millrace.broker.storage.log import Log
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.producer_state import _UNREPLICATED_COUNT, ProducerState
from tests.stored_batches import batches_of

from .conftest import append, make_batch

OpenLog = Callable[..., Log]
END = 2**62


def begin(log: Log, producer_id: int, sequence: int, count: int = 1, *, epoch: int = 0) -> int:
    """One transactional batch; its base offset."""
    batch = {"producer_id": producer_id, "producer_epoch": epoch, "base_sequence": sequence}
    return append(log, count, transactional=True, **batch).base_offset


def end(log: Log, producer_id: int, *, committed: bool, epoch: int = 0, coordinator: int = 0) -> int:
    marker = build_marker(producer_id, epoch, coordinator, committed, 1000)
    return log.append(marker, leader_epoch=0, now_ms=1000, origin="internal").base_offset


def test_marker_has_kafka_s_bytes() -> None:
    batch = build_marker(7, 3, 12, True, 5000)
    header = parse_header(batch)
    assert (header.attributes, header.base_sequence, header.record_count) == (0x30, -1, 1)
    assert (header.producer_id, header.producer_epoch, header.max_timestamp) == (7, 3, 5000)
    record = bytes([0, 0, 0, 8]) + struct.pack(">hh", 0, 1) + bytes([12]) + struct.pack(">hi", 0, 12) + b"\0"
    assert batch[61:] == bytes([2 * len(record)]) + record
    assert parse_marker(batch) == Marker(7, 3, 12, True)
    assert control_type(build_marker(7, 3, 12, False, 0)) == 0


def test_what_is_no_marker_is_refused() -> None:
    for batch in (make_batch(), make_batch(control=True)):
        with pytest.raises(InvalidRecord):
            parse_marker(batch)


def test_aborted_transactions_have_kafka_s_file(open_log: OpenLog) -> None:
    log = open_log()
    append(log, 2)
    begin(log, 7, 0)  # 2
    begin(log, 8, 0)  # 3
    end(log, 7, committed=False)  # 4
    end(log, 8, committed=False)  # 5
    begin(log, 7, 1)  # 6
    end(log, 7, committed=True)  # 7
    content = (log.directory / f"{0:020d}.txnindex").read_bytes()
    assert content == struct.pack(">hqqqq", 0, 7, 2, 4, 3) + struct.pack(">hqqqq", 0, 8, 3, 5, 6)
    assert log.aborted_transactions(0, END) == ((7, 2), (8, 3))
    assert log.aborted_transactions(5, END) == ((8, 3),)
    assert log.aborted_transactions(6, END) == ()
    assert log.aborted_transactions(0, 3) == ((7, 2),)
    assert log.aborted_transactions(0, 2) == ()


def test_marker_that_is_larger_than_a_segment_has_one_for_itself(open_log: OpenLog) -> None:
    log = open_log()
    begin(log, 7, 0)
    begin(log, 8, 0)
    log.config = LogConfig(segment_bytes=14)
    with pytest.raises(RecordListTooLarge):
        begin(log, 9, 0)
    try:
        markers = [end(log, 7, committed=False), end(log, 8, committed=True)]
    except RecordListTooLarge as error:
        pytest.fail(f"the transaction never ends: {error}")
    assert markers == [2, 3]
    assert log.last_stable_offset(4) == 4
    assert log.aborted_transactions(0, END) == ((7, 0),)
    assert [segment.base_offset for segment in log.segments] == [0, 2, 3]
    log.close()
    again = open_log(segment_bytes=14)
    assert (again.end_offset, again.last_stable_offset(4), again.notes) == (4, 4, [])
    assert [parse_header(batch).base_offset for batch in batches_of(again)] == [0, 1, 2, 3]


def test_search_for_aborts_goes_on_into_later_segments(open_log: OpenLog) -> None:
    log = open_log(segment_bytes=150)
    begin(log, 7, 0)
    for _ in range(6):
        append(log)
    end(log, 7, committed=False)
    assert len(log.segments) > 3
    assert log.aborted_transactions(0, 1) == ((7, 0),), "the marker is segments away"
    assert log.aborted_transactions(3, 4) == ((7, 0),)


def test_last_stable_offset_waits_for_the_marker_s_replication(open_log: OpenLog) -> None:
    log = open_log()
    append(log, 2)
    assert log.last_stable_offset(2) == 2
    begin(log, 7, 0, 2)  # 2, 3
    begin(log, 8, 0)  # 4
    assert log.last_stable_offset(5) == 2
    assert log.last_stable_offset(1) == 1
    marker = end(log, 7, committed=True)  # 5
    assert log.last_stable_offset(5) == 2, "the marker may still be lost with this leader"
    assert log.last_stable_offset(marker + 1) == 4
    end(log, 8, committed=False)
    assert log.last_stable_offset(log.end_offset) == log.end_offset
    assert log.last_stable_offset(3) == 3, "what was seen below the high watermark stays stable"


def test_follower_that_nobody_asks_does_not_remember_without_bound() -> None:
    state = ProducerState()
    for number in range(3 * _UNREPLICATED_COUNT):
        header = parse_header(
            make_batch(producer_id=1, producer_epoch=0, base_sequence=number, transactional=True)
        )
        state.note(header._replace(base_offset=2 * number), 0)
        marker = parse_header(build_marker(1, 0, 0, True, 0))._replace(base_offset=2 * number + 1)
        state.note(marker, 0, Marker(1, 0, 0, True))
    assert len(state._unreplicated) <= _UNREPLICATED_COUNT + 1
    offset = 2 * 3 * _UNREPLICATED_COUNT
    assert state.last_stable_offset(offset - 1) == offset - 2
    assert state.last_stable_offset(10) <= 10
    assert state.last_stable_offset(offset) == offset
    assert not state._unreplicated


def test_marker_of_an_older_producer_or_coordinator_is_refused(open_log: OpenLog) -> None:
    log = open_log()
    begin(log, 7, 0, epoch=3)
    size = log.size
    with pytest.raises(InvalidProducerEpoch):
        end(log, 7, committed=True, epoch=2)
    end(log, 7, committed=True, epoch=3, coordinator=5)
    begin(log, 7, 1, epoch=3)
    with pytest.raises(TransactionCoordinatorFenced):
        end(log, 7, committed=True, epoch=3, coordinator=4)
    assert log.producers.first_unstable_offset == 2
    end(log, 7, committed=False, epoch=4, coordinator=6)
    assert log.producers.entries[7].coordinator_epoch == 6
    with pytest.raises(InvalidProducerEpoch):
        begin(log, 7, 2, epoch=3)
    assert log.size > size


def test_marker_without_a_transaction_leaves_only_its_epochs(open_log: OpenLog) -> None:
    log = open_log()
    end(log, 7, committed=False, epoch=2, coordinator=1)
    assert log.aborted_transactions(0, END) == ()
    assert log.producers.entries[7].epoch == 2
    with pytest.raises(InvalidProducerEpoch):
        begin(log, 7, 0, epoch=1)


def test_plain_batch_within_a_transaction_is_refused(open_log: OpenLog) -> None:
    log = open_log()
    begin(log, 7, 0)
    with pytest.raises(InvalidTxnState):
        append(log, producer_id=7, producer_epoch=0, base_sequence=1)


def test_internal_batch_of_an_older_producer_is_refused(open_log: OpenLog) -> None:
    """A group's offsets in a transaction have no sequence numbers; the epoch fences all the same."""
    log = open_log()
    end(log, 7, committed=True, epoch=2)
    batch = make_batch(producer_id=7, producer_epoch=1, transactional=True)
    with pytest.raises(InvalidProducerEpoch):
        log.append(batch, leader_epoch=0, now_ms=0, origin="internal")
    batch = make_batch(producer_id=7, producer_epoch=2, transactional=True)
    log.append(batch, leader_epoch=0, now_ms=0, origin="internal")
    assert log.producers.first_unstable_offset == 1


def _filled(open_log: OpenLog) -> Log:
    """Aborts of producers 7 and 8 in different segments; 9 is open at the end."""
    log = open_log(segment_bytes=400)
    for number in range(4):
        begin(log, 7, number)
        append(log)
        begin(log, 8, number)
        end(log, 7, committed=number == 2)
        end(log, 8, committed=False)
    begin(log, 9, 0)
    return log


ABORTED = ((7, 0), (8, 2), (7, 5), (8, 7), (8, 12), (7, 15), (8, 17))


def test_follower_has_the_same_aborts_and_the_same_files(open_log: OpenLog, tmp_path: Path) -> None:
    leader = _filled(open_log)
    assert leader.aborted_transactions(0, END) == ABORTED
    follower = Log.open(tmp_path / "f" / "t-0", leader.config, recovery_point=None, now_ms=0)
    follower.append_as_follower(b"".join(bytes(batch) for batch in batches_of(leader)), 0)
    assert follower.aborted_transactions(0, END) == ABORTED
    assert follower.last_stable_offset(follower.end_offset) == 20
    for path in leader.directory.glob("*.txnindex"):
        assert (follower.directory / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("recovery_point", [None, 0, 8, 21])
def test_aborts_and_open_transactions_survive(open_log: OpenLog, recovery_point: int | None) -> None:
    log = _filled(open_log)
    files = {path.name: path.read_bytes() for path in log.directory.glob("*.txnindex")}
    if recovery_point is None:
        log.close()
    again = open_log(segment_bytes=400, recovery_point=recovery_point)
    assert again.aborted_transactions(0, END) == ABORTED
    assert again.producers.first_unstable_offset == 20
    assert {path.name: path.read_bytes() for path in log.directory.glob("*.txnindex")} == files
    assert end(again, 9, committed=False) == 21
    assert again.aborted_transactions(20, END) == ((9, 20),)


@pytest.mark.parametrize("damage", ["cut", "garbage", "lost", "longer"])
def test_index_that_a_crash_has_hurt_is_made_anew(open_log: OpenLog, damage: str) -> None:
    log = _filled(open_log)
    paths = sorted(log.directory.glob("*.txnindex"))
    for path in paths:
        content = path.read_bytes()
        if damage == "lost":
            path.unlink()
        else:
            path.write_bytes(
                {"cut": content[:-5], "garbage": b"\xff" * len(content), "longer": content * 2}[damage]
            )
    for snapshot in log.directory.glob("*.snapshot"):
        if damage == "lost":
            snapshot.unlink()  # a file that is gone is missed only by the replay of its batches
    again = open_log(segment_bytes=400, recovery_point=0)
    assert again.aborted_transactions(0, END) == ABORTED
    assert len(again.notes) == (0 if damage == "lost" else len(paths))


@pytest.mark.parametrize("offset", range(1, 21))
def test_truncation_takes_aborts_and_reopens_transactions(open_log: OpenLog, offset: int) -> None:
    log = _filled(open_log)
    batches = [bytes(batch) for batch in batches_of(log)]
    log.truncate_to(offset, 0)
    again = Log.open(log.directory.parent / "x" / "t-0", log.config, recovery_point=None, now_ms=0)
    again.append_as_follower(b"".join(b for b in batches if parse_header(b).last_offset < offset), 0)
    assert log.end_offset == again.end_offset == offset
    assert log.aborted_transactions(0, END) == again.aborted_transactions(0, END)
    assert log.producers.first_unstable_offset == again.producers.first_unstable_offset
    assert log.last_stable_offset(offset) == again.last_stable_offset(offset)


def test_retention_takes_the_index_along(open_log: OpenLog) -> None:
    log = _filled(open_log)
    log.advance_start_offset(log.end_offset)
    log.delete_old_segments(0)
    assert {path.stem for path in log.directory.glob("*.txnindex")} <= {
        path.stem for path in log.directory.glob("*.log")
    }
    log.start_anew(50, 0)
    assert not list(log.directory.glob("*.txnindex"))
    assert log.aborted_transactions(0, END) == ()
    assert log.producers.first_unstable_offset is None
    assert (log.start_offset, log.end_offset) == (50, 50)
    assert append(log).base_offset == 50
