"""The records section of a batch, read in plain Python, one record at a time.

It serves control paths (positions, events, group offsets), where there are few records and the compiled
kernels' memory would not pay. The kernels of `record_kernels.py` accept exactly the same bytes, and are
tested against it. Pure.

Layout of a record; every varint is zigzag-coded:

    length varint (of what follows) · attributes i8 · timestamp delta varlong · offset delta varint
    key size varint (-1 null) · key · value size varint (-1 null) · value
    header count varint · each header: key size varint · key · value size varint (-1 null) · value
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from millrace.broker.errors import InvalidRecord
from millrace.broker.protocol.checksum import Buffer


class RawRecord(NamedTuple):
    """One record as it is in the buffer; deltas count from the batch header's base values."""

    attributes: int
    timestamp_delta: int
    offset_delta: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


def read_varint(buffer: Buffer, position: int, end: int, bits: int) -> tuple[int, int]:
    """A zigzag varint of at most `bits` bits that ends before `end`; (value, next position)."""
    value = shift = 0
    while True:
        if position >= end:
            raise InvalidRecord("record ends inside a varint")
        byte = buffer[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
        if shift >= bits:
            raise InvalidRecord(f"varint is longer than {bits} bits")
    if value >> bits:
        raise InvalidRecord(f"varint is longer than {bits} bits")
    return (value >> 1) ^ -(value & 1), position


def iterate_records(records: Buffer, record_count: int) -> Iterator[RawRecord]:
    """Each record of a plain (decompressed) records section.

    Raises InvalidRecord, possibly after some records, when the section does not hold exactly
    `record_count` well-formed records.
    """
    end = len(records)
    position = 0
    for _ in range(record_count):
        record, position = _read_record(records, position, end)
        yield record
    if position != end:
        raise InvalidRecord(f"{end - position} bytes follow the last of {record_count} records")


def _read_record(buffer: Buffer, position: int, end: int) -> tuple[RawRecord, int]:
    length, position = read_varint(buffer, position, end, 32)
    if length < 0 or length > end - position:
        raise InvalidRecord(f"record announces {length} bytes, {end - position} are there")
    end = position + length
    if length == 0:
        raise InvalidRecord("record is empty")
    attributes = buffer[position]
    timestamp_delta, position = read_varint(buffer, position + 1, end, 64)
    offset_delta, position = read_varint(buffer, position, end, 32)
    key, position = _read_nullable(buffer, position, end)
    value, position = _read_nullable(buffer, position, end)
    header_count, position = read_varint(buffer, position, end, 32)
    if header_count < 0:
        raise InvalidRecord(f"record announces {header_count} headers")
    headers = []
    for _ in range(header_count):
        name, position = _read_nullable(buffer, position, end)
        if name is None:
            raise InvalidRecord("record header has no key")
        header_value, position = _read_nullable(buffer, position, end)
        headers.append((name.decode("utf-8", "surrogateescape"), header_value))
    if position != end:
        raise InvalidRecord(f"record holds {end - position} bytes more than its fields")
    return RawRecord(attributes, timestamp_delta, offset_delta, key, value, tuple(headers)), position


def _read_nullable(buffer: Buffer, position: int, end: int) -> tuple[bytes | None, int]:
    size, position = read_varint(buffer, position, end, 32)
    if size == -1:
        return None, position
    if size < 0 or size > end - position:
        raise InvalidRecord(f"field announces {size} bytes, {end - position} are there")
    return bytes(buffer[position : position + size]), position + size
