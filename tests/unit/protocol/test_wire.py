"""Primitive types at the lengths where their encoding changes, and cut off anywhere."""

from __future__ import annotations

import pytest

from millrace.broker.errors import ProtocolError
from millrace.broker.protocol import hot_produce, wire
from millrace.broker.protocol.frames import Api

SIZES = [0, 1, 125, 126, 127, 128, 16_382, 16_383, 16_384]
"""A varint of a length + 1 takes a byte more from 127 and 16,383 on."""


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("before", [0, 3])
def test_compact_strings_are_read_whole_or_not_at_all(size: int, before: int) -> None:
    text = "é" * (size // 2) + "t" * (size % 2)
    encoded = wire.compact_string(text)
    assert len(encoded) == size + (1 if size < 127 else 2 if size < 16_383 else 3)
    whole = memoryview(bytes(before) + encoded)
    assert wire.read_compact_string(memoryview(bytes(whole) + b"more"), before) == (text, len(whole))
    assert wire.read_compact_string(whole, before) == (text, len(whole))
    for end in {before, before + 1, len(whole) - 1} - {len(whole)}:
        with pytest.raises(ProtocolError):
            wire.read_compact_string(whole[:end], before)


def test_null_is_a_compact_string() -> None:
    assert wire.read_compact_string(memoryview(wire.compact_string(None)), 0) == (None, 1)


@pytest.mark.parametrize("flexible", [False, True])
@pytest.mark.parametrize("count", [-1, *SIZES])
def test_sizes_of_arrays_are_read_as_written_and_not_beyond_the_bytes(count: int, flexible: bool) -> None:
    encoded = wire.array_size(count, flexible)
    there = memoryview(encoded + bytes(max(0, count)))
    assert wire.read_array_size(there, 0, flexible) == (count, len(encoded))
    with pytest.raises(ProtocolError):
        wire.read_array_size(there[:-1], 0, flexible)


def test_tagged_fields_are_read_and_none_of_them_costs_a_byte() -> None:
    fields = b"\x02" + wire.tagged_field(0, b"a") + wire.tagged_field(200, b"")
    assert wire.read_tagged_fields(memoryview(fields + b"more"), 0) == ({0: b"a", 200: b""}, len(fields))
    assert wire.read_tagged_fields(memoryview(b"x\x00"), 1) == ({}, 2)
    for end in range(len(fields)):
        with pytest.raises(ProtocolError):
            wire.read_tagged_fields(memoryview(fields)[:end], 0)


@pytest.mark.parametrize("version", [3, 9])
def test_a_topic_without_a_name_is_refused_though_it_has_no_partitions(version: int) -> None:
    """In no version may it be null."""
    flexible = version >= hot_produce.FIRST_FLEXIBLE
    tags = b"\x00" if flexible else b""
    head = (wire.compact_string(None) if flexible else wire.string(None)) + b"\x00\x01" + bytes(4)
    name = wire.compact_string(None) if flexible else wire.string(None)
    topics = wire.array_size(1, flexible) + name + wire.array_size(0, flexible) + tags
    with pytest.raises(ProtocolError, match="topic name is null"):
        hot_produce.decode_request(memoryview(head + topics + tags), 0, version)
    answer = bytes(4) + tags + topics + bytes(4) + tags
    with pytest.raises(ProtocolError, match="topic name is null"):
        hot_produce.decode_response(memoryview(answer), version)


def test_requests_that_begin_alike_do_not_share_what_differs() -> None:
    """What they begin with is laid out once."""
    batches = {("flights", 0): b"batch"}
    first, second = (
        [bytes(part) for part in hot_produce.encode_request(9, number, "me", batches)] for number in (1, 2)
    )
    assert first[0][8:12] == b"\x00\x00\x00\x01" and second[0][8:12] == b"\x00\x00\x00\x02"
    assert first[0][12:] == second[0][12:] and first[1:] == second[1:]
    assert first[0][4:6] == bytes([0, Api.PRODUCE]) and sum(map(len, first)) == first[0][3] + 4
