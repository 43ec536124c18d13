"""Compression of the records section of a batch: four codecs, and no way to be flooded by them.

`decompress` never produces more than `max_size` bytes and never trusts a size that the data claims for
itself; a bomb costs at most that many bytes of memory for the moment it takes to refuse it. Streams are
concatenated where the codec allows it (gzip members, zstd and lz4 frames, xerial's streams of snappy).

Codec ids are those of the batch attributes: 0 none, 1 gzip, 2 snappy, 3 lz4 (frame format), 4 zstd.
Kafka's snappy is a run of raw blocks in the framing of the `xerial` Java library: magic, two version
numbers, then (size i32, block) pairs; a few clients send one raw block without framing, which is read too.

Called by record validation at append, the record scan, and the rebuild path. Pure.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import zlib
from collections.abc import Callable, Iterator

import cramjam
import lz4.frame
import snappy
import zstandard

from millrace.broker.errors import CorruptMessage, InvalidRecord, RecordTooLarge, UnsupportedCompressionType
from millrace.broker.protocol.checksum import Buffer

NONE, GZIP, SNAPPY, LZ4, ZSTD = range(5)

CODEC_NAMES = {NONE: "none", GZIP: "gzip", SNAPPY: "snappy", LZ4: "lz4", ZSTD: "zstd"}
CODEC_IDS = {name: codec for codec, name in CODEC_NAMES.items()}

_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEADER = _XERIAL_MAGIC + struct.pack(">ii", 1, 1)
_XERIAL_BLOCK_SIZE = 32 * 1024
_GZIP_MAGIC = b"\x1f\x8b\x08"
_GZIP_WINDOW = 31  # zlib's 15 bits of window, plus 16 for the gzip wrapper
_GZIP_LEVEL = 6
_ZSTD_LEVEL = 3
_LARGEST_ZSTD_WINDOW = 1 << 27
_ZSTD_CHECKSUM = 0x04  # among a frame's flags
_ZSTD_RUN_LENGTH = 0x02  # a block's type, in its bits 1 and 2
_LZ4_MAGIC = b"\x04\x22\x4d\x18"
_LZ4_HEADER_SIZE = 7  # magic, flags, block descriptor, checksum of the header
_LZ4_BLOCK_SIZE = struct.Struct("<I")
_LZ4_VERSION_1, _LZ4_INDEPENDENT = 0x40, 0x20
_LZ4_FIXED_FLAGS = 0xC0 | _LZ4_INDEPENDENT | 0x03  # with the reserved bit and that of dictionaries
_LZ4_BLOCK_CHECKSUM, _LZ4_CONTENT_SIZE, _LZ4_CONTENT_CHECKSUM = 0x10, 0x08, 0x04
_FIRST_GUESS = 64 * 1024
_LATER_WINDOW = 512
_LARGE_SIZE = 1 << 20
_SMALL_ZSTD = 64 * 1024
"""Of a frame, and of what it says it holds: so much memory may be asked for by its word alone."""


def decompress(codec: int, data: Buffer, max_size: int) -> Buffer:
    """The plain bytes of `data`, at most `max_size` of them; what is not compressed is given back as it is,
    for nothing is inflated.

    Raises RecordTooLarge when there are more, CorruptMessage when the data is not of that codec or ends
    early, UnsupportedCompressionType for an unknown codec id.
    """
    if codec == NONE:
        return data
    decoder = _DECODERS.get(codec)
    if decoder is None:
        raise UnsupportedCompressionType(f"compression codec {codec} is not one of 0 to 4")
    try:
        return decoder(data, max_size)
    except (RecordTooLarge, CorruptMessage) as error:
        # Its frames hold all that the decoder had come to, and a thread that hands an error over may keep it
        # for longer than the answer takes, when the next bomb may be on its way.
        raise error.with_traceback(None) from None
    except _DECODING_ERRORS as error:
        error.__traceback__ = None
        raise CorruptMessage(
            f"{CODEC_NAMES[codec]} data cannot be decompressed: {str(error) or 'malformed'}"
        ) from None


def check_framing(codec: int, data: Buffer) -> None:
    """Whether consumers can read what `decompress` has read. Java's read less than the libraries here do, and
    they stop for good where a batch is stored that they cannot read. Raises InvalidRecord.

    lz4 is one frame of independent blocks to them (`Lz4BlockInputStream`); zstd has a window of 128 MiB at
    most, what the streaming decoder takes by default; snappy in xerial's framing is version 1 or later.
    """
    view = memoryview(data)
    if codec == LZ4:
        _check_lz4_framing(view)
    elif codec == ZSTD:
        for frame in _zstd_frames(view):
            if frame.window_size > _LARGEST_ZSTD_WINDOW:
                raise InvalidRecord(f"zstd needs a window of {frame.window_size} bytes; 128 MiB are allowed")
    elif codec == SNAPPY and _is_xerial_header(view, 0):
        _check_xerial_versions(view)


def _check_xerial_versions(view: memoryview) -> None:
    position = 0
    while position < len(view):
        if _is_xerial_header(view, position):
            (version,) = struct.unpack_from(">i", view, position + len(_XERIAL_MAGIC))
            if version < 1:
                raise InvalidRecord(f"snappy framing of version {version} is older than 1")
            position += len(_XERIAL_HEADER)
        else:
            position += 4 + int.from_bytes(view[position : position + 4], "big")


def _is_xerial_header(view: memoryview, position: int) -> bool:
    return bytes(view[position : position + len(_XERIAL_MAGIC)]) == _XERIAL_MAGIC


def _check_lz4_framing(view: memoryview) -> None:
    """Of data that has been decompressed, so that its frames are whole."""
    if bytes(view[: len(_LZ4_MAGIC)]) != _LZ4_MAGIC:
        raise InvalidRecord("lz4 data does not begin with an lz4 frame")
    flags = view[len(_LZ4_MAGIC)]
    if flags & _LZ4_FIXED_FLAGS != _LZ4_VERSION_1 | _LZ4_INDEPENDENT:
        raise InvalidRecord("lz4 blocks depend on each other, or the frame is not of version 1")
    position = _LZ4_HEADER_SIZE + (8 if flags & _LZ4_CONTENT_SIZE else 0)
    checksum_size = 4 if flags & _LZ4_BLOCK_CHECKSUM else 0
    while True:
        (announced,) = _LZ4_BLOCK_SIZE.unpack_from(view, position)
        position += _LZ4_BLOCK_SIZE.size
        if announced == 0:  # the end mark
            break
        position += (announced & 0x7FFFFFFF) + checksum_size
    position += 4 if flags & _LZ4_CONTENT_CHECKSUM else 0
    if position != len(view):
        raise InvalidRecord("lz4 data goes on behind its first frame")


def compress(codec: int, data: Buffer) -> bytes:
    """`data` compressed by `codec` at the codec's usual level."""
    if codec == NONE:
        return bytes(data)
    if codec == GZIP:
        compressor = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, _GZIP_WINDOW)
        return compressor.compress(data) + compressor.flush()
    if codec == SNAPPY:
        return _compress_snappy(data)
    if codec == LZ4:
        return bytes(lz4.frame.compress(data, block_linked=False))
    if codec == ZSTD:
        return zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(data)
    raise UnsupportedCompressionType(f"compression codec {codec} is not one of 0 to 4")


def _too_large(codec: int, max_size: int) -> RecordTooLarge:
    return RecordTooLarge(f"{CODEC_NAMES[codec]} records hold more than {max_size} bytes when decompressed")


def _decompress_gzip(data: Buffer, max_size: int) -> bytes:
    view = memoryview(data)
    parts: list[bytes] = []
    size = position = 0
    while position < len(view):
        if position and bytes(view[position : position + len(_GZIP_MAGIC)]) != _GZIP_MAGIC:
            break  # Java's readers pass over what is no member
        member = zlib.decompressobj(_GZIP_WINDOW)
        window = _first_window(view, position)
        while not member.eof:
            if position >= len(view):
                raise CorruptMessage("gzip data ends early")
            taken = view[position : position + window]
            part = member.decompress(taken, max_size - size + 1)
            position += len(taken)
            size += len(part)
            if size > max_size:
                raise _too_large(GZIP, max_size)
            parts.append(part)
            window *= 2
        position -= len(member.unused_data)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _first_window(view: memoryview, position: int) -> int:
    """How much the decoder of a stream that begins at `position` is given first. Nearly always the first
    stream is the only one. What a decoder has no use for it copies, so that of many short streams behind each
    other the rest would be copied with each of them."""
    return _LATER_WINDOW if position else len(view)


class _Zstd(threading.local):
    """A context a thread: making one takes longer than decompressing a small batch."""

    def __init__(self) -> None:
        self.decompressor = zstandard.ZstdDecompressor()


_zstd = _Zstd()


def _decompress_zstd(data: Buffer, max_size: int) -> Buffer:
    if len(data) <= _SMALL_ZSTD:
        with contextlib.suppress(zstandard.ZstdError):  # what it is that is wrong is told below
            claimed, limit = zstandard.frame_content_size(data), min(_SMALL_ZSTD, max_size)
            # One whole frame, or an error: its blocks need no look of ours, which costs as much again.
            if 0 < claimed <= limit:
                return _zstd.decompressor.decompress(data, allow_extra_data=False)
            # Java's clients and librdkafka write as a stream, without the size. What is behind such a frame
            # the library passes over in silence, and what is in it may turn out too large.
            if claimed < 0 < limit and _is_streamed_frame(data):
                return _zstd.decompressor.decompress(data, max_output_size=limit)
    frame_count = sum(1 for _ in _zstd_frames(data))
    # The frame's own content size is a hint for the first buffer, never an allocation that it commands.
    claimed = zstandard.frame_content_size(data)
    if claimed > max_size:
        raise _too_large(ZSTD, max_size)  # a frame that holds less than it claims is no frame
    if frame_count == 1 and _LARGE_SIZE < claimed <= max_size:
        # Into memory that nobody touches before the decoder: on a thread, growing a buffer would keep the
        # interpreter, and with it the event loop, for as long as the decoding itself takes without it.
        return _zstd.decompressor.decompress(data)
    guess = claimed if claimed > 0 else max(_FIRST_GUESS, 4 * len(data))
    out = bytearray(min(guess, max_size, 256 * len(data)) + 1)
    size = 0
    with _zstd.decompressor.stream_reader(data, read_across_frames=True) as stream:
        while True:
            count = stream.readinto(memoryview(out)[size:])
            if count == 0:
                break
            size += count
            if size > max_size:
                raise _too_large(ZSTD, max_size)
            if size == len(out):
                grown = bytearray(min(max_size + 1, 2 * len(out)))
                grown[:size] = out
                out = grown
    return memoryview(out)[:size]


def _is_streamed_frame(data: Buffer) -> bool:
    """Whether data with zstd's magic is one frame to its last byte, and its header the two bytes that streams
    have: flags, and of these none but that of a checksum, and the window (RFC 8878, 3.1.1.1)."""
    flags, position, is_last_block = data[4], 6, False
    if flags & ~_ZSTD_CHECKSUM:
        return False
    while not is_last_block:
        if position + 3 > len(data):
            return False
        block = data[position] | data[position + 1] << 8 | data[position + 2] << 16
        is_last_block = bool(block & 1)
        position += 4 if block & 6 == _ZSTD_RUN_LENGTH else 3 + (block >> 3)
    return position + (4 if flags else 0) == len(data)


def _zstd_frames(data: Buffer) -> Iterator[zstandard.FrameParameters]:
    """Raises CorruptMessage when a frame lacks its last block or its checksum (RFC 8878, 3.1.1).

    The streaming decoder takes an early end for the end; a consumer's decoder does not, and a batch that
    consumers choke on must never be stored.
    """
    position = 0
    while position < len(data):
        frame = memoryview(data)[position:]
        parameters = zstandard.get_frame_parameters(frame)
        position += zstandard.frame_header_size(frame)
        is_last_block = False
        while not is_last_block:
            if position + 3 > len(data):
                raise CorruptMessage("zstd data ends early")
            block = data[position] | data[position + 1] << 8 | data[position + 2] << 16
            is_last_block = bool(block & 1)
            position += 4 if block & 6 == _ZSTD_RUN_LENGTH else 3 + (block >> 3)
        if parameters.has_checksum:
            position += 4
        if position > len(data):
            raise CorruptMessage("zstd data ends early")
        yield parameters


def _decompress_lz4(data: Buffer, max_size: int) -> bytes:
    view = memoryview(data)
    parts: list[bytes] = []
    size = position = 0
    while position < len(view):
        frame = lz4.frame.LZ4FrameDecompressor()
        window = _first_window(view, position)
        # Small steps first: the decoder allocates as much as it is allowed to give.
        step = 4 * window if position else max(_FIRST_GUESS, 4 * window)
        while not frame.eof:
            taken = view[position : position + window] if frame.needs_input else view[:0]
            if frame.needs_input and not taken:
                raise CorruptMessage("lz4 data ends early")
            part = frame.decompress(taken, max_length=min(step, max_size - size + 1))
            step *= 2
            position += len(taken)
            size += len(part)
            if size > max_size:
                raise _too_large(LZ4, max_size)
            if part:
                parts.append(part)
            if taken:
                window *= 2
        position -= len(frame.unused_data or b"")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _decompress_snappy(data: Buffer, max_size: int) -> bytes:
    view = memoryview(data)
    if not _is_xerial_header(view, 0):
        return _decompress_snappy_block(view, max_size, max_size)
    parts: list[bytes] = []
    size = position = 0
    while position < len(view):
        if _is_xerial_header(view, position):  # Java's readers go on with a second stream, too
            position += len(_XERIAL_HEADER)
            if position > len(view):
                raise CorruptMessage("snappy header is cut")
            continue
        (block_size,) = struct.unpack_from(">i", view, position)
        position += 4
        if block_size < 0 or position + block_size > len(view):
            raise CorruptMessage(f"snappy block of {block_size} bytes is cut")
        part = _decompress_snappy_block(view[position : position + block_size], max_size - size, max_size)
        size += len(part)
        parts.append(part)
        position += block_size
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _decompress_snappy_block(block: memoryview, remaining_size: int, max_size: int) -> bytes:
    # A raw block begins with its plain size, and the decoder allocates it at once: look before.
    if cramjam.snappy.decompress_raw_len(block) > remaining_size:
        raise _too_large(SNAPPY, max_size)
    return bytes(snappy.uncompress(block))


def _compress_snappy(data: Buffer) -> bytes:
    view = memoryview(data)
    out = bytearray(_XERIAL_HEADER)
    for start in range(0, len(view), _XERIAL_BLOCK_SIZE):
        block = bytes(snappy.compress(view[start : start + _XERIAL_BLOCK_SIZE]))
        out += struct.pack(">i", len(block))
        out += block
    return bytes(out)


_DECODERS: dict[int, Callable[[Buffer, int], Buffer]] = {
    GZIP: _decompress_gzip,
    SNAPPY: _decompress_snappy,
    LZ4: _decompress_lz4,
    ZSTD: _decompress_zstd,
}

_DECODING_ERRORS = (
    zlib.error,
    zstandard.ZstdError,
    RuntimeError,  # lz4
    struct.error,
    cramjam.DecompressionError,
    snappy.UncompressError,
)
