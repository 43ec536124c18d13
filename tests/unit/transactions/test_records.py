"""The layout of `__transaction_state`, byte by byte."""

from __future__ import annotations

import contextlib
import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.broker.errors import UnreadableRecord
from millrace.broker.transactions.records import (
    decode_key,
    decode_value,
    encode_key,
    encode_value,
)
from millrace.broker.transactions.values import TransactionRecord, TransactionState

State = TransactionState

ONGOING = TransactionRecord(
    1_000,
    3,
    60_000,
    State.ONGOING,
    frozenset({("b", 2), ("a", 1), ("a", 0)}),
    started_ms=1_700_000_000_000,
    updated_ms=1_700_000_000_500,
)


def test_key():
    key = b"\x00\x00" + b"\x00\x06orders"
    assert encode_key("orders") == key
    assert decode_key(key) == "orders"


def test_a_key_of_a_newer_version_is_skipped():
    assert decode_key(b"\x00\x01\x00\x01x") is None


def test_value_version_0():
    value = (
        struct.pack(">hqhib", 0, 1_000, 3, 60_000, 1)
        + struct.pack(">i", 2)
        + b"\x00\x01a"
        + struct.pack(">iii", 2, 0, 1)
        + b"\x00\x01b"
        + struct.pack(">ii", 1, 2)
        + struct.pack(">qq", 1_700_000_000_500, 1_700_000_000_000)
    )
    assert encode_value(ONGOING) == value
    assert decode_value(value) == ONGOING


def test_an_empty_transaction_has_null_partitions():
    record = TransactionRecord(1, 0, 1, State.EMPTY, updated_ms=5)
    value = struct.pack(">hqhib", 0, 1, 0, 1, 0) + b"\xff\xff\xff\xff" + struct.pack(">qq", 5, -1)
    assert encode_value(record) == value
    assert decode_value(value) == record


def test_a_complete_transaction_has_no_partitions_but_not_null():
    value = encode_value(TransactionRecord(1, 0, 1, State.COMPLETE_COMMIT, updated_ms=5, started_ms=4))
    assert value[17:21] == b"\x00\x00\x00\x00"


def test_value_version_1_with_tags():
    value = (
        struct.pack(">hqhib", 1, 1_000, 3, 60_000, 2)
        + b"\x02"  # one topic
        + b"\x02a\x03"
        + struct.pack(">ii", 0, 1)
        + b"\x00"
        + struct.pack(">qq", 7, 6)
        + b"\x03"
        + b"\x00\x08"
        + struct.pack(">q", 999)
        + b"\x01\x08"
        + struct.pack(">q", 1_001)
        + b"\x02\x02\x00\x02"
    )
    record = decode_value(value)
    assert record == TransactionRecord(
        1_000,
        3,
        60_000,
        State.PREPARE_COMMIT,
        frozenset({("a", 0), ("a", 1)}),
        started_ms=6,
        updated_ms=7,
        previous_producer_id=999,
        next_producer_id=1_001,
        client_version=2,
    )
    assert encode_value(record, 1) == value


@pytest.mark.parametrize(
    "tags",
    [
        b"\x02\x01\x08" + struct.pack(">q", 1_001) + b"\x02\x02\x00\x02",
        b"\x03\x00\x08"
        + struct.pack(">q", 999)
        + b"\x01\x08"
        + struct.pack(">q", 1_001)
        + b"\x02\x02\x00\x02",
        b"\x02\x00\x08" + struct.pack(">q", 1_000) + b"\x02\x02\x00\x02",
        b"\x01\x01\x08" + struct.pack(">q", 1_001),
        b"\x01\x02\x02\x00\x01",
    ],
)
def test_a_record_that_kafka_4_left_is_written_again_as_it_is(tags):
    """Its successor and its rule (KIP-890) have no room in version 0."""
    head = struct.pack(">hqhib", 1, 1_000, 32_767, 60_000, 2)
    value = head + b"\x02\x02a\x02" + struct.pack(">i", 0) + b"\x00" + struct.pack(">qq", 7, 6) + tags
    assert encode_value(decode_value(value)) == value


def test_a_record_that_needs_no_newer_version_is_one_that_kafka_3_reads():
    """A former producer id alone is what memory keeps of every transaction."""
    assert encode_value(replace(ONGOING, previous_producer_id=1_000)) == encode_value(ONGOING)


def test_states_have_kafkas_codes():
    assert [state.code for state in State] == list(range(8))
    assert [State.from_code(code).value for code in range(8)] == [
        "Empty",
        "Ongoing",
        "PrepareCommit",
        "PrepareAbort",
        "CompleteCommit",
        "CompleteAbort",
        "Dead",
        "PrepareEpochFence",
    ]


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\x00",
        struct.pack(">hqhib", 2, 1, 0, 1, 0) + bytes(20),  # a newer version
        struct.pack(">hqhib", 0, 1, 0, 1, 9) + bytes(20),  # no such state
        struct.pack(">hqhib", 0, 1, 0, 1, 1) + b"\x7f\xff\xff\xff",  # more topics than bytes
        struct.pack(">hqhib", 0, 1, 0, 1, 1) + struct.pack(">ih", 1, 1) + b"\xff" + bytes(20),  # no UTF-8
        struct.pack(">hqhib", 1, 1, 0, 1, 1) + b"\xff\xff\xff\xff\xff\xff",  # a varint without end
        encode_value(ONGOING)[:-1],
    ],
)
def test_what_cannot_be_read_is_refused(value):
    with pytest.raises(UnreadableRecord):
        decode_value(value)


def test_a_record_without_a_key_is_refused():
    with pytest.raises(UnreadableRecord):
        decode_key(None)


@given(st.binary(max_size=80))
def test_no_bytes_crash_the_decoder(data):
    for decode in (decode_key, decode_value):
        with contextlib.suppress(UnreadableRecord):
            decode(data)


@st.composite
def records(draw):
    state = draw(st.sampled_from(State))
    partitions = draw(
        st.frozensets(st.tuples(st.text(min_size=1, max_size=9), st.integers(0, 2**31 - 1)), max_size=6)
    )
    return TransactionRecord(
        draw(st.integers(0, 2**63 - 1)),
        draw(st.integers(0, 32_767)),
        draw(st.integers(1, 2**31 - 1)),
        state,
        frozenset() if state is State.EMPTY else partitions,
        started_ms=draw(st.integers(-1, 2**62)),
        updated_ms=draw(st.integers(-1, 2**62)),
    )


@given(records(), st.integers(-1, 2**62), st.integers(-1, 2**62), st.integers(0, 2))
def test_what_is_written_is_read(record, previous_id, next_id, client_version):
    assert decode_value(encode_value(record)) == record
    newer = replace(
        record, previous_producer_id=previous_id, next_producer_id=next_id, client_version=client_version
    )
    assert decode_value(encode_value(newer, 1)) == newer
    if next_id >= 0 or client_version:
        assert decode_value(encode_value(newer)) == newer
