"""What the libraries here read and Java's consumers do not: a batch of it must not be stored."""

from __future__ import annotations

import struct
from typing import Any

import cramjam
import lz4.frame
import pytest
import zstandard

from millrace.broker.errors import InvalidRecord
from millrace.broker.protocol import batch as batch_format
from millrace.broker.protocol.batch import HEADER_SIZE
from millrace.broker.protocol.compression import (
    GZIP,
    LZ4,
    SNAPPY,
    ZSTD,
    check_framing,
    compress,
    decompress,
)
from millrace.broker.protocol.records import Record, build_batch
from millrace.broker.storage.batch_validation import check_batch
from millrace.broker.storage.log_config import LogConfig

TEXT = b"a record of some words, and of some more words. " * 4000
FRAME = compress(LZ4, TEXT)
XERIAL = compress(SNAPPY, TEXT)


def lz4_of(data: bytes = TEXT, **options: Any) -> bytes:
    return bytes(lz4.frame.compress(data, block_linked=False, **options))


def with_window(exponent: int) -> bytes:
    """A zstd frame that holds little and declares a window of 2 to the power of this."""
    frame = bytearray(zstandard.ZstdCompressor(level=3).compress(TEXT * 20))
    assert not frame[4] & 0x20, "the frame declares a window"
    frame[5] = (exponent - 10) << 3
    return bytes(frame)


READ = {
    "gzip": (GZIP, compress(GZIP, TEXT)),
    "gzip and padding": (GZIP, compress(GZIP, TEXT) + bytes(8)),
    "snappy": (SNAPPY, XERIAL),
    "snappy in two streams": (SNAPPY, XERIAL * 2),
    "a raw block of snappy": (SNAPPY, bytes(cramjam.snappy.compress_raw(TEXT))),
    "lz4": (LZ4, FRAME),
    "lz4 of nothing": (LZ4, compress(LZ4, b"")),
    "lz4 with every checksum": (LZ4, lz4_of(block_checksum=True, content_checksum=True)),
    "lz4 with its size": (LZ4, lz4_of(store_size=True)),
    "lz4 without its size": (LZ4, lz4_of(store_size=False)),
    "lz4 that does not compress": (LZ4, lz4_of(bytes(range(256)) * 2, block_checksum=True)),
    "zstd": (ZSTD, compress(ZSTD, TEXT)),
    "zstd in two frames": (ZSTD, compress(ZSTD, TEXT) * 2),
    "zstd with a window of 128 MiB": (ZSTD, with_window(27)),
}

NOT_READ = {
    "lz4 of blocks that need each other": (LZ4, bytes(lz4.frame.compress(TEXT, block_linked=True))),
    "lz4 in two frames": (LZ4, FRAME * 2),
    "lz4 and an empty frame": (LZ4, FRAME + compress(LZ4, b"")),
    "lz4 and a frame to be skipped": (LZ4, FRAME + struct.pack("<II", 0x184D2A50, 4) + b"abcd"),
    "a frame to be skipped, and lz4": (LZ4, struct.pack("<II", 0x184D2A50, 4) + b"abcd" + FRAME),
    "lz4 with a checksum, in two frames": (LZ4, lz4_of(content_checksum=True) * 2),
    "zstd with a window of 256 MiB": (ZSTD, with_window(28)),
    "zstd with such a window in its second frame": (ZSTD, compress(ZSTD, TEXT) + with_window(28)),
    "snappy of an older framing": (SNAPPY, XERIAL[:8] + bytes(8) + XERIAL[16:]),
    "snappy of an older framing in its second stream": (SNAPPY, XERIAL + XERIAL[:8] + bytes(8) + XERIAL[16:]),
}


@pytest.mark.parametrize("name", READ)
def test_what_consumers_read_may_be_stored(name: str) -> None:
    codec, packed = READ[name]
    decompress(codec, packed, 1 << 26)
    check_framing(codec, packed)


@pytest.mark.parametrize("name", NOT_READ)
def test_what_java_consumers_do_not_read_is_no_batch(name: str) -> None:
    codec, packed = NOT_READ[name]
    with pytest.raises(InvalidRecord):
        check_framing(codec, packed)


@pytest.mark.parametrize("linked", [False, True])
def test_batch_that_java_consumers_do_not_read_is_not_stored(linked: bool) -> None:
    plain = build_batch([Record(b"k", TEXT, (), 1000)])
    header = batch_format.parse_header(plain)
    body = lz4.frame.compress(bytes(plain[HEADER_SIZE:]), block_linked=linked)
    batch = bytearray(
        batch_format.pack_header(
            size=HEADER_SIZE + len(body),
            attributes=LZ4,
            last_offset_delta=header.last_offset_delta,
            base_timestamp=header.base_timestamp,
            max_timestamp=header.max_timestamp,
            record_count=header.record_count,
        )
    )
    batch += body
    batch_format.seal(batch)
    if not linked:
        check_batch(batch, LogConfig(), now_ms=2000)
        return
    with pytest.raises(InvalidRecord, match="depend on each other"):
        check_batch(batch, LogConfig(), now_ms=2000)
