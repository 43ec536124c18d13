"""Batches for the counting tests, built field by field from the format's own description.

Not by the project's own encoder: what reads a batch must agree with the specification, not with our writer.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pytest

from millrace.broker.protocol.checksum import crc32c_reference

Header = tuple[bytes, bytes | None]


def varint(value: int) -> bytes:
    raw = (value << 1) ^ (value >> 63)
    out = bytearray()
    while raw >= 0x80:
        out.append(raw & 0x7F | 0x80)
        raw >>= 7
    out.append(raw)
    return bytes(out)


def identity(
    stream: int, sequence: int, created_ms: int, name: bytes = b"feed@host", version: int = 1
) -> bytes:
    return struct.pack(">BQQ", version, stream, sequence) + created_ms.to_bytes(6, "big") + name


def record(
    delta: int, headers: Sequence[Header] = (), value: bytes | None = b"value", key: bytes | None = None
) -> bytes:
    def sized(content: bytes | None) -> bytes:
        return varint(-1) if content is None else varint(len(content)) + content

    body = b"\0" + varint(0) + varint(delta) + sized(key) + sized(value) + varint(len(headers))
    body += b"".join(sized(name) + sized(content) for name, content in headers)
    return varint(len(body)) + body


def batch(
    base_offset: int, records: Sequence[bytes], *, attributes: int = 0, max_ms: int = 0, producer_id: int = -1
) -> bytes:
    tail = struct.pack(
        ">hiqqqhii", attributes, len(records) - 1, 0, max_ms, producer_id, 0, -1, len(records)
    ) + b"".join(records)
    return struct.pack(">qiibI", base_offset, len(tail) + 9, -1, 2, crc32c_reference(tail)) + tail


class Builder:
    """The functions above under one name, since tests cannot import one another."""

    varint = staticmethod(varint)
    identity = staticmethod(identity)
    record = staticmethod(record)
    batch = staticmethod(batch)

    def stamped(
        self, delta: int, stream: int, sequence: int, created_ms: int = 1000, **more: object
    ) -> bytes:
        return record(delta, [(b"_mr", identity(stream, sequence, created_ms))], **more)  # type: ignore[arg-type]


@pytest.fixture
def build() -> Builder:
    return Builder()
