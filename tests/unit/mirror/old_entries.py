"""Messages of formats 0 and 1 as bytes, for tests: by hand, by the protocol's guide, and by kafka-python."""

from __future__ import annotations

import struct
import zlib

from kafka.record.legacy_records import LegacyRecordBatchBuilder

from millrace.broker.protocol.compression import GZIP

Content = tuple[int, bytes | None, bytes | None, int]
"""Offset, key, value, timestamp in ms (-1 in format 0)."""


def entry(
    offset: int, magic: int, key: bytes | None, value: bytes | None, at_ms: int = -1, *, attributes: int = 0
) -> bytes:
    """One message, by the layout of the protocol's guide."""

    def field(data: bytes | None) -> bytes:
        return struct.pack(">i", -1) if data is None else struct.pack(">i", len(data)) + data

    body = struct.pack(">bB", magic, attributes) + (struct.pack(">q", at_ms) if magic else b"")
    body += field(key) + field(value)
    return struct.pack(">qiI", offset, len(body) + 4, zlib.crc32(body)) + body


def packed(offset: int, magic: int, places: list[int]) -> bytes:
    """A compressed set at `offset` whose inner messages say `places`."""
    inner = b"".join(entry(place, magic, b"k", b"%d" % place, 5) for place in places)
    return entry(offset, magic, None, zlib.compress(inner, wbits=31), 5, attributes=GZIP)


def written(magic: int, codec: int, messages: list[Content]) -> bytes:
    """A message set by kafka-python; compressed sets get the broker's offset, the last inner one's."""
    builder = LegacyRecordBatchBuilder(magic=magic, compression_type=codec, batch_size=1 << 20)
    first = messages[0][0]
    for number, (offset, key, value, at_ms) in enumerate(messages):
        place = number if codec and magic else offset
        assert builder.append(place if codec else offset - first, at_ms if magic else None, key, value)
    data = bytearray(builder.build())
    position = 0
    while position < len(data):  # the offsets, which a broker gives
        offset, size = struct.unpack_from(">qi", data, position)
        given = messages[-1][0] if codec else first + offset
        struct.pack_into(">q", data, position, given)
        position += 12 + size
    return bytes(data)
