"""The protocol's primitive types, for the few messages that are written by hand.

Every other message goes through `kio`. What is here serves `frames.py`, `hot_produce.py` and
`hot_fetch.py`, which must cost a few microseconds, and record building (zigzag varints).

Readers take a buffer and a position and return (value, next position). They raise ProtocolError when the
bytes end early or a length cannot be true; nothing is allocated from a length that was not checked against
the bytes that are there. Pure.
"""

from __future__ import annotations

import struct

from millrace.broker.errors import ProtocolError
from millrace.broker.protocol.checksum import Buffer

_INT16 = struct.Struct(">h")
_INT32 = struct.Struct(">i")

UUID_SIZE = 16

MOST_TAGS = 1_000
"""Tagged fields of one structure."""


def read_uvarint(buffer: Buffer, position: int) -> tuple[int, int]:
    """An unsigned varint of at most 32 bits (5 bytes)."""
    try:
        byte = buffer[position]
        if byte < 0x80:  # nearly always
            return byte, position + 1
        value = byte & 0x7F
        for shift in (7, 14, 21, 28):
            position += 1
            byte = buffer[position]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, position + 1
    except IndexError:
        raise ProtocolError("message ends inside a varint") from None
    raise ProtocolError("varint is longer than 5 bytes")


def read_bytes(buffer: memoryview, position: int, size: int) -> tuple[memoryview, int]:
    """A view of `size` bytes."""
    end = position + size
    if size < 0 or end > len(buffer):
        raise ProtocolError(f"message announces {size} bytes, {len(buffer) - position} are there")
    return buffer[position:end], end


def read_string(buffer: memoryview, position: int) -> tuple[str | None, int]:
    """A string with a 16-bit length; -1 is null."""
    try:
        (size,) = _INT16.unpack_from(buffer, position)
    except struct.error:
        raise ProtocolError("message ends inside a string's length") from None
    if size == -1:
        return None, position + 2
    return _decode(buffer, position + 2, size)


def read_compact_string(buffer: memoryview, position: int) -> tuple[str | None, int]:
    """A string of the flexible versions: varint of length + 1; 0 is null."""
    if position < len(buffer) and 0 < (size := buffer[position]) < 0x80:  # nearly always
        end = position + size
        if end <= len(buffer):
            return str(buffer[position + 1 : end], "utf-8", "replace"), end
    size, position = read_uvarint(buffer, position)
    if size == 0:
        return None, position
    return _decode(buffer, position, size - 1)


def _decode(buffer: memoryview, position: int, size: int) -> tuple[str, int]:
    """What is not UTF-8 is replaced, as Apache Kafka does: it names no topic, and an error code says so."""
    view, position = read_bytes(buffer, position, size)
    return str(view, "utf-8", "replace"), position


def read_array_size(buffer: memoryview, position: int, flexible: bool) -> tuple[int, int]:
    """Number of items of an array, -1 for null. Each item is at least a byte, so a number that exceeds the
    bytes that are left is a lie."""
    if flexible:
        if position < len(buffer) and buffer[position] < 0x80:  # nearly always
            count, position = buffer[position] - 1, position + 1
        else:
            count, position = read_uvarint(buffer, position)
            count -= 1
    else:
        try:
            (count,) = _INT32.unpack_from(buffer, position)
        except struct.error:
            raise ProtocolError("message ends inside an array's size") from None
        position += 4
    if count < -1 or count > len(buffer) - position:
        raise ProtocolError(f"array announces {count} items in {len(buffer) - position} bytes")
    return count, position


class ItemBudget:
    """How many array items and tagged fields a message may still hold: each costs a process far more memory
    and time than its bytes did."""

    __slots__ = ("left",)

    def __init__(self, most: int) -> None:
        self.left = most

    def take(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise ProtocolError("message holds too many items")


def read_items_size(buffer: memoryview, position: int, flexible: bool, budget: ItemBudget) -> tuple[int, int]:
    """Number of items of an array that cannot be null, taken from the budget."""
    if flexible and position < len(buffer):
        count = buffer[position] - 1
        if 0 <= count < 0x7F and count < len(buffer) - position and count <= budget.left:  # nearly always
            budget.left -= count
            return count, position + 1
    count, position = read_array_size(buffer, position, flexible)
    if count < 0:
        raise ProtocolError("an array is null where none may be")
    budget.take(count)
    return count, position


def read_tag_count(buffer: memoryview, position: int) -> tuple[int, int]:
    """How many tagged fields follow. No structure of the protocol has more than a few."""
    count, position = read_uvarint(buffer, position)
    if count > MOST_TAGS:
        raise ProtocolError(f"a structure of {count} tagged fields, more than {MOST_TAGS}")
    return count, position


def read_tagged_fields(buffer: memoryview, position: int) -> tuple[dict[int, memoryview], int]:
    """The tagged fields of a flexible structure by tag; most carry none."""
    if position < len(buffer) and buffer[position] == 0:
        return {}, position + 1
    count, position = read_tag_count(buffer, position)
    fields: dict[int, memoryview] = {}
    for _ in range(count):
        tag, position = read_uvarint(buffer, position)
        size, position = read_uvarint(buffer, position)
        fields[tag], position = read_bytes(buffer, position, size)
    return fields, position


def skip_tagged_fields(buffer: memoryview, position: int, budget: ItemBudget | None = None) -> int:
    """The position after the tagged fields, which are taken from the budget; most structures carry none."""
    if position < len(buffer) and buffer[position] == 0:
        return position + 1
    count, position = read_tag_count(buffer, position)
    if budget is not None:
        budget.take(count)
    for _ in range(count):
        _, position = read_uvarint(buffer, position)
        size, position = read_uvarint(buffer, position)
        position += size
        if position > len(buffer):
            raise ProtocolError(f"message ends inside a tagged field of {size} bytes")
    return position


def uvarint(value: int) -> bytes:
    """Encodes an unsigned varint."""
    if value < 0x80:
        return _ONE_BYTE[value]
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


_ONE_BYTE = [bytes([value]) for value in range(0x80)]


def zigzag(value: int) -> bytes:
    """Encodes a signed varint of up to 64 bits, as in records."""
    return uvarint((value << 1) ^ (value >> 63))


def string(value: str | None) -> bytes:
    """Encodes a string with a 16-bit length."""
    if value is None:
        return b"\xff\xff"
    encoded = value.encode()
    return _INT16.pack(len(encoded)) + encoded


def compact_string(value: str | None) -> bytes:
    """Encodes a string of the flexible versions."""
    if value is None:
        return b"\x00"
    encoded = value.encode()
    return uvarint(len(encoded) + 1) + encoded


def array_size(count: int, flexible: bool) -> bytes:
    """Encodes the number of items of an array."""
    if not flexible:
        return _INT32.pack(count)
    return _ONE_BYTE[count + 1] if -1 <= count < 0x7F else uvarint(count + 1)


def tagged_field(tag: int, value: bytes) -> bytes:
    """Encodes one tagged field (the count of fields goes before the first)."""
    return uvarint(tag) + uvarint(len(value)) + value
