"""Bombs, cut streams, foreign framings."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib
from random import Random
from typing import Any

import cramjam
import lz4.frame
import pytest
import zstandard

from millrace.broker.errors import (
    CorruptMessage,
    KafkaError,
    RecordTooLarge,
    UnsupportedCompressionType,
)
from millrace.broker.protocol import compression
from millrace.broker.protocol.compression import GZIP, LZ4, NONE, SNAPPY, ZSTD, compress, decompress
from tests import seeds

TEXT = b"a record of some words, and of some more words. " * 400
MEBIBYTE = 1 << 20


@pytest.mark.parametrize("codec", [GZIP, SNAPPY, LZ4, ZSTD])
def test_bomb_is_refused_with_bounded_memory(codec: int) -> None:
    bomb = compress(codec, bytes(64 * MEBIBYTE))
    tracemalloc.start()
    try:
        with pytest.raises(RecordTooLarge, match="more than 1048576"):
            decompress(codec, bomb, MEBIBYTE)
        assert tracemalloc.get_traced_memory()[1] < 8 * MEBIBYTE
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("codec", [GZIP, LZ4, ZSTD])
@pytest.mark.parametrize(
    ("max_size", "cut", "error"), [(4 * MEBIBYTE, 0, RecordTooLarge), (64 * MEBIBYTE, 1, CorruptMessage)]
)
def test_whoever_holds_a_refusal_does_not_hold_what_was_decompressed_before_it(
    codec: int, max_size: int, cut: int, error: type[Exception]
) -> None:
    packed = compress(codec, bytes(8 * MEBIBYTE))
    packed = packed[: len(packed) - cut]
    tracemalloc.start()
    try:
        with pytest.raises(error) as refused:
            decompress(codec, packed, max_size)
        assert tracemalloc.get_traced_memory()[0] < MEBIBYTE, refused.value
    finally:
        tracemalloc.stop()


def test_what_is_not_compressed_is_read_whatever_its_size() -> None:
    """A broker stores plain batches of any size that a topic allows: they inflate to nothing."""
    assert decompress(NONE, TEXT, 10) == TEXT


def test_zstd_frame_that_claims_a_huge_size_is_bounded() -> None:
    bomb = zstandard.ZstdCompressor(write_content_size=True).compress(bytes(256 * MEBIBYTE))
    assert len(bomb) < 16_384
    with pytest.raises(RecordTooLarge):
        decompress(ZSTD, bomb, MEBIBYTE)


def test_small_zstd_frames_are_read_as_their_blocks_say_whatever_is_wrong_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The way for small ones looks at no block: it may say nothing that the other does not."""
    random = Random(seeds.given())

    def outcome(data: bytes) -> object:
        try:
            return bytes(decompress(ZSTD, memoryview(data), 20_000))
        except KafkaError as refused:
            return type(refused)

    for _ in range(600):
        plain = bytes(random.choices(b"abcdef", k=random.choice([0, 1, 70, 3_000, 30_000])))
        if random.random() < 0.1:
            plain = plain[:1] * len(plain)  # a block of one byte that is repeated
        compressor = zstandard.ZstdCompressor(
            level=random.choice([1, 3, 9]),
            write_content_size=random.random() < 0.8,
            write_checksum=random.random() < 0.5,
        )
        packed = bytearray()
        if random.random() < 0.5:
            packed += compressor.compress(plain)
        else:  # as Java does: flushed before it is closed, perhaps within
            stream, cut = compressor.compressobj(), random.randint(0, len(plain))
            for part in (plain[:cut], plain[cut:]):
                packed += stream.compress(part)
                if random.random() < 0.6:
                    packed += stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
            packed += stream.flush()
        match random.choice(["whole", "cut", "more", "twice", "flipped"]):
            case "cut":
                del packed[random.randrange(len(packed)) :]
            case "more":
                packed += random.randbytes(random.randint(1, 5))
            case "twice":
                packed += compress(ZSTD, TEXT[: random.randint(0, 400)])
            case "flipped":
                packed[random.randrange(len(packed))] ^= 1 << random.randrange(8)
        fast = outcome(bytes(packed))
        with monkeypatch.context() as slowly:
            slowly.setattr(compression, "_SMALL_ZSTD", -1)
            assert outcome(bytes(packed)) == fast, bytes(packed)


@pytest.mark.parametrize("write_checksum", [False, True])
@pytest.mark.parametrize("plain", [b"k", TEXT, b"k" * 3_000])
@pytest.mark.parametrize("flushes", [False, True])
def test_what_streaming_clients_write_takes_the_way_for_small_frames(
    plain: bytes, write_checksum: bool, flushes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def walk(data: bytes) -> Any:
        raise AssertionError("walked over its blocks")

    stream = zstandard.ZstdCompressor(write_checksum=write_checksum).compressobj()
    packed = b""
    for part in (plain[:70], plain[70:]):
        packed += stream.compress(part)
        if flushes:  # Java does so before it closes
            packed += stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    packed += stream.flush()
    assert zstandard.frame_content_size(packed) < 0
    monkeypatch.setattr(compression, "_zstd_frames", walk)
    assert bytes(decompress(ZSTD, packed, MEBIBYTE)) == plain


@pytest.mark.parametrize("codec", [GZIP, SNAPPY, LZ4, ZSTD])
def test_cut_stream_is_refused(codec: int) -> None:
    packed = compress(codec, TEXT)
    for cut in (1, 5, len(packed) // 2):
        with pytest.raises(CorruptMessage):
            decompress(codec, packed[:-cut], MEBIBYTE)


@pytest.mark.parametrize("codec", [GZIP, SNAPPY, LZ4, ZSTD])
def test_joined_streams_are_read_as_one(codec: int) -> None:
    joined = compress(codec, TEXT) + compress(codec, b"more")
    assert bytes(decompress(codec, joined, MEBIBYTE)) == TEXT + b"more"


def test_padding_behind_gzip_is_passed_over_as_java_s_reader_does() -> None:
    packed = compress(GZIP, TEXT)
    for padding in (bytes(1), bytes(100), b"\x1f\x00 not a member"):
        assert decompress(GZIP, packed + padding, MEBIBYTE) == TEXT
    with pytest.raises(CorruptMessage):
        decompress(GZIP, bytes(8) + packed, MEBIBYTE)
    with pytest.raises(CorruptMessage):
        decompress(GZIP, packed + packed[:-3], MEBIBYTE)


def test_streams_of_other_writers_are_read() -> None:
    assert decompress(GZIP, gzip.compress(TEXT), MEBIBYTE) == TEXT
    unsized = zstandard.ZstdCompressor(write_content_size=False, write_checksum=True).compress(TEXT)
    assert bytes(decompress(ZSTD, unsized, MEBIBYTE)) == TEXT
    linked = lz4.frame.compress(TEXT, block_linked=True, content_checksum=True, store_size=False)
    assert decompress(LZ4, linked, MEBIBYTE) == TEXT


def test_plain_snappy_block_without_framing_is_read() -> None:
    assert decompress(SNAPPY, bytes(cramjam.snappy.compress_raw(TEXT)), MEBIBYTE) == TEXT


@pytest.mark.parametrize("stream", [b"", compress(SNAPPY, TEXT)], ids=["first", "second"])
def test_snappy_header_that_is_cut_is_refused(stream: bytes) -> None:
    for size in (8, 15):
        with pytest.raises(CorruptMessage):
            decompress(SNAPPY, stream + compress(SNAPPY, TEXT)[:size], MEBIBYTE)


def test_snappy_is_written_in_xerial_frames_of_many_blocks() -> None:
    data = TEXT * 10
    packed = compress(SNAPPY, data)
    assert packed.startswith(b"\x82SNAPPY\x00\x00\x00\x00\x01\x00\x00\x00\x01")
    assert decompress(SNAPPY, packed, len(data)) == data


@pytest.mark.parametrize("codec", [5, 6, 7])
def test_unknown_codec_is_refused(codec: int) -> None:
    with pytest.raises(UnsupportedCompressionType):
        decompress(codec, b"x", 10)
    with pytest.raises(UnsupportedCompressionType):
        compress(codec, b"x")


def test_names_and_ids_are_each_other_s_inverse() -> None:
    assert {compression.CODEC_NAMES[codec]: codec for codec in range(5)} == compression.CODEC_IDS


@pytest.mark.parametrize("codec", [GZIP, LZ4, ZSTD])
def test_streams_of_any_size_behind_each_other_are_read(codec: int) -> None:
    """Also those that end within the first bytes a decoder is given, and those that need many."""
    sizes = (0, 1, 3000, 0, 200_000, 511, 512, 513, 0)
    parts = [(TEXT * 12)[:size] for size in sizes]
    joined = b"".join(compress(codec, part) for part in parts)
    assert bytes(decompress(codec, joined, MEBIBYTE)) == b"".join(parts)
    with pytest.raises(CorruptMessage):
        decompress(codec, joined[:-3], MEBIBYTE)


@pytest.mark.parametrize(
    ("codec", "module", "decoder"),
    [(GZIP, zlib, "decompressobj"), (LZ4, lz4.frame, "LZ4FrameDecompressor")],
)
def test_many_short_streams_cost_no_more_than_their_bytes(
    codec: int, module: Any, decoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a decoder is given beyond its stream it copies: all of the rest, for each of 50,000."""
    given = 0
    make = getattr(module, decoder)

    class Counting:
        def __init__(self, *options: Any) -> None:
            self._decoder = make(*options)

        def decompress(self, data: Any, *limits: Any, **more: Any) -> bytes:
            nonlocal given
            given += len(data)
            part: bytes = self._decoder.decompress(data, *limits, **more)
            return part

        def __getattr__(self, name: str) -> Any:
            return getattr(self._decoder, name)

    monkeypatch.setattr(module, decoder, Counting)
    stream = compress(codec, b"")
    count = 2_000
    assert decompress(codec, stream * count, MEBIBYTE) == b""
    assert given < count * (len(stream) + 600)
