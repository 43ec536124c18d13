"""Which batches are committed data (KIP-98), against small logs written out by hand."""

from __future__ import annotations

import struct

import pytest

from millrace.broker.client.committed import committed_batches
from millrace.broker.errors import CorruptMessage
from millrace.broker.protocol.records import Record, build_batch

ABORT, COMMIT = 0, 1


def data(offset: int, producer_id: int = -1, *, count: int = 1, transactional: bool = True) -> bytes:
    records = [Record(b"k", b"v", (), 1) for _ in range(count)]
    if producer_id < 0:
        return bytes(build_batch(records, base_offset=offset))
    return bytes(
        build_batch(
            records,
            base_offset=offset,
            producer_id=producer_id,
            producer_epoch=0,
            base_sequence=0,
            transactional=transactional,
        )
    )


def marker(offset: int, producer_id: int, kind: int) -> bytes:
    record = Record(struct.pack(">hh", 0, kind), b"", (), 1)
    return bytes(
        build_batch(
            [record],
            base_offset=offset,
            producer_id=producer_id,
            producer_epoch=0,
            transactional=True,
            control=True,
        )
    )


def visible(log: list[bytes], aborted: list[tuple[int, int]]) -> list[int]:
    """The base offsets of the batches that are data."""
    batches = list(committed_batches(memoryview(b"".join(log)), aborted))
    assert [bytes(batch) for batch, _, _ in batches] == log
    return [header.base_offset for _, header, is_data in batches if is_data]


def test_without_aborted_transactions_all_but_markers_is_data() -> None:
    assert visible([data(0), data(1, 7), marker(2, 7, COMMIT), data(3)], []) == [0, 1, 3]


def test_aborted_data_goes_until_its_marker_and_not_after() -> None:
    log = [data(0, 7), data(1, 8), data(2, 7), marker(3, 7, ABORT), data(4, 7), marker(5, 8, COMMIT)]
    assert visible(log, [(7, 0)]) == [1, 4]


def test_one_producer_aborting_twice_keeps_what_it_committed_between() -> None:
    log = [
        *(data(0, 7), marker(1, 7, ABORT)),
        *(data(2, 7), marker(3, 7, COMMIT)),
        *(data(4, 7), marker(5, 7, ABORT)),
    ]
    assert visible(log, [(7, 4), (7, 0)]) == [2]


def test_transaction_that_began_before_the_answer_is_dropped_too() -> None:
    assert visible([data(10, 7), marker(11, 7, ABORT), data(12, 7)], [(7, 3)]) == [12]


def test_transaction_beginning_within_a_batch_is_dropped_with_it() -> None:
    assert visible([data(10, 7, count=5), marker(15, 7, ABORT)], [(7, 12)]) == []


def test_plain_data_of_an_aborting_producer_id_stays() -> None:
    assert visible([data(0, 7, transactional=False), data(1)], [(7, 0)]) == [0, 1]


def test_commit_marker_does_not_end_an_abort() -> None:
    assert visible([data(0, 7), marker(1, 7, COMMIT), data(2, 7), marker(3, 7, ABORT)], [(7, 0)]) == []


def test_cut_batch_at_the_end_is_left_out() -> None:
    log = data(0) + data(1)[:-1]
    assert [header.base_offset for _, header, _ in committed_batches(memoryview(log), [])] == [0]


@pytest.mark.parametrize("key", [None, b"", b"\0\0\0", struct.pack(">hh", -1, ABORT)])
def test_end_of_a_transaction_that_cannot_be_read_is_damage(key: bytes | None) -> None:
    """Its checksum is right. Nobody who reads a topic may end by it."""
    batch = build_batch(
        [Record(key, b"", (), 1)],
        base_offset=1,
        producer_id=7,
        producer_epoch=0,
        transactional=True,
        control=True,
    )
    with pytest.raises(CorruptMessage, match="the end of a transaction cannot be read"):
        visible([data(0, 7), bytes(batch)], [(7, 0)])
    assert visible([data(0, 7), bytes(batch)], []) == [0], "it ends nothing that is in question"


def test_damaged_end_of_a_transaction_is_told_by_its_checksum() -> None:
    """It may say anything: looked at first, a commit would be taken for an abort."""
    damaged = bytearray(marker(1, 7, COMMIT))
    damaged[-5] ^= 1
    with pytest.raises(CorruptMessage, match="has CRC"):
        visible([data(0, 7), bytes(damaged)], [(7, 0)])
