"""What a request may hold: its bytes are bounded, but an item of two bytes costs a process hundreds."""

from __future__ import annotations

import struct
import tracemalloc
from uuid import UUID

import pytest

from millrace.broker.errors import ProtocolError
from millrace.broker.protocol import frames, hot_fetch, hot_produce, wire
from millrace.broker.protocol.frames import Api, decode_entity
from millrace.broker.server.answers import request_type

UNKNOWN_TAG = b"\x05\x00"
TWO_TAGS = b"\x02" + 2 * UNKNOWN_TAG
TOO_MANY = "too many items"


def produce(topics: bytes, flexible: bool = True) -> memoryview:
    head = (b"\x00" if flexible else b"\xff\xff") + struct.pack(">hi", 1, 1000)
    return memoryview(head + topics + (b"\x00" if flexible else b""))


def fetch(topics: bytes, forgotten: bytes = b"\x01") -> memoryview:
    return memoryview(struct.pack(">iiibii", 0, 0, 1, 0, 0, -1) + topics + forgotten + b"\x01\x00")


def asked(tags: bytes = b"\x00") -> bytes:
    return bytes(32) + tags


def test_tagged_fields_of_a_structure_are_bounded_and_none_is_kept() -> None:
    head = struct.pack(">hhih", Api.API_VERSIONS, 3, 1, -1)

    def header(count: int) -> memoryview:
        tags = b"".join(wire.uvarint(tag) + b"\x00" for tag in range(count))
        return memoryview(head + wire.uvarint(count) + tags)

    most = header(wire.MOST_TAGS)
    frames.decode_request(most)
    tracemalloc.start()
    try:
        assert frames.decode_request(most)[1] == len(most)
        assert tracemalloc.get_traced_memory()[1] < 8_000
    finally:
        tracemalloc.stop()
    with pytest.raises(ProtocolError, match="tagged fields"):
        frames.decode_request(header(wire.MOST_TAGS + 1))
    with pytest.raises(ProtocolError, match="tagged fields"):
        decode_entity(
            request_type(Api.METADATA, 12), b"\x00\x00\x00" + header(wire.MOST_TAGS + 1)[len(head) :], 0
        )


def test_unknown_tagged_fields_of_a_body_count_as_items() -> None:
    entity_type = request_type(Api.METADATA, 12)
    body = b"\x00\x00\x00\x03" + 3 * UNKNOWN_TAG
    decode_entity(entity_type, body, 0, most_items=3)
    with pytest.raises(ProtocolError, match=TOO_MANY):
        decode_entity(entity_type, body, 0, most_items=2)


@pytest.mark.parametrize(
    ("version", "body", "count"),
    [
        (9, produce(b"\x04" + 3 * b"\x02t\x01\x00"), 3),  # topics
        (9, produce(b"\x02\x02t\x04" + 3 * b"\x00\x00\x00\x00\x00\x00" + b"\x00"), 4),  # and partitions
        (9, produce(b"\x02\x02t\x02\x00\x00\x00\x00\x00" + TWO_TAGS + TWO_TAGS), 6),  # and tagged fields
        (8, produce(b"\x00\x00\x00\x03" + 3 * b"\x00\x01t\x00\x00\x00\x00", flexible=False), 3),
        (
            8,
            produce(
                b"\x00\x00\x00\x01\x00\x01t\x00\x00\x00\x03" + 3 * b"\x00\x00\x00\x00\xff\xff\xff\xff",
                flexible=False,
            ),
            4,
        ),
    ],
)
def test_items_of_a_produce_request_are_bounded(
    version: int, body: memoryview, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hot_produce, "MOST_ITEMS", count)
    hot_produce.decode_request(body, 0, version)
    monkeypatch.setattr(hot_produce, "MOST_ITEMS", count - 1)
    with pytest.raises(ProtocolError, match=TOO_MANY):
        hot_produce.decode_request(body, 0, version)


TOPIC = UUID(int=5).bytes


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (fetch(b"\x04" + 3 * (TOPIC + b"\x01\x00")), 3),  # topics
        (fetch(b"\x02" + TOPIC + b"\x04" + 3 * asked() + b"\x00"), 3),  # partitions
        (fetch(b"\x02" + TOPIC + b"\x02" + asked(TWO_TAGS) + TWO_TAGS), 5),  # and tagged fields
        (fetch(b"\x01", b"\x04" + 3 * (TOPIC + b"\x01\x00")), 3),  # topics with what is forgotten
        (fetch(b"\x01", b"\x02" + TOPIC + b"\x04" + bytes(12) + TWO_TAGS), 5),  # and partitions
    ],
)
def test_items_of_a_fetch_request_are_bounded(
    body: memoryview, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hot_fetch, "MOST_ITEMS", count)
    hot_fetch.decode_request(body, 0, 17)
    monkeypatch.setattr(hot_fetch, "MOST_ITEMS", count - 1)
    with pytest.raises(ProtocolError, match=TOO_MANY):
        hot_fetch.decode_request(body, 0, 17)


@pytest.mark.parametrize(
    ("version", "body"),
    [
        (9, produce(b"\x00")),
        (9, produce(b"\x02\x02t\x00\x00")),
        (8, produce(b"\xff\xff\xff\xff", flexible=False)),
        (8, produce(b"\x00\x00\x00\x01\x00\x01t\xff\xff\xff\xff", flexible=False)),
    ],
)
def test_null_topics_or_partitions_are_no_produce_request(version: int, body: memoryview) -> None:
    """An answer that names no partition would be taken for success."""
    with pytest.raises(ProtocolError, match="is null"):
        hot_produce.decode_request(body, 0, version)


@pytest.mark.parametrize(
    "body",
    [
        fetch(b"\x00"),
        fetch(b"\x02" + TOPIC + b"\x00\x00"),
        fetch(b"\x01", b"\x00"),
        fetch(b"\x01", b"\x02" + TOPIC + b"\x00\x00"),
    ],
)
def test_null_topics_or_partitions_are_no_fetch_request(body: memoryview) -> None:
    with pytest.raises(ProtocolError, match="is null"):
        hot_fetch.decode_request(body, 0, 17)
