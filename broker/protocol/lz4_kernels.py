"""Decoding LZ4 frames without a Python step per batch, side by side into one buffer (numba).

Kafka's producers write each batch's records as one LZ4 frame (independent blocks, no checksums but the
header's). `unpack_frames` decodes such frames of a whole fetch in one call; what it does not know, or finds
fault with, it leaves to the library (`compression`), which alone says what is corrupt. So it may refuse a
frame that is good, but what it accepts conforms to the format (LZ4 Frame Format 1.6, LZ4 Block Format), and
the library is its oracle in the tests. Called by whoever reads many small batches at once: the mirror where
it merges them, the audit's reader.

Invariants: every read and write is bounds-checked; the copies of 16 bytes write up to 15 beyond what they
are for, so `target` has SLACK bytes that are never counted as room.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

SLACK = 32
UNKNOWN, NO_ROOM = -1, -2  # instead of an end: leave it to the library; not in what is left of the target

_LEAST_FRAME = 11  # magic, two bytes of descriptor, its checksum, end mark
_INDEPENDENT, _CONTENT_SIZE = 0x20, 0x08
_LAST_LITERALS, _MATCH_LIMIT = 5, 12  # of a block with matches: how it ends, where its last match may begin

_SOURCE = types.Array(types.uint8, 1, "C", readonly=True)
_TARGET = types.Array(types.uint8, 1, "C")
_TABLE = types.Array(types.int64, 2, "C")


def _copy16_intrinsic(_context: Any, target: Any, to: Any, source: Any, at: Any) -> Any:
    """target[to : to + 16] = source[at : at + 16], by one load and one store."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.VectorType(ir.IntType(8), 16)
        pointers = []
        for array, index in ((0, 1), (2, 3)):
            made = context.make_array(signature.args[array])(context, builder, arguments[array])
            pointers.append(builder.bitcast(builder.gep(made.data, [arguments[index]]), word.as_pointer()))
        builder.store(builder.load(pointers[1], align=1), pointers[0], align=1)
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64), generate


_copy16: Any = intrinsic(_copy16_intrinsic)


@njit(inline="always")
def _le32(source, at):  # type: ignore[no-untyped-def]
    return (
        np.int64(source[at])
        | np.int64(source[at + 1]) << 8
        | np.int64(source[at + 2]) << 16
        | np.int64(source[at + 3]) << 24
    )


@njit([types.int64(_SOURCE, types.int64, types.int64)], cache=True, nogil=True)
def _header_checksum(source, first, size):  # type: ignore[no-untyped-def]
    """The second byte of XXH32 (seed 0) of fewer than 16 bytes."""
    mask = np.uint64(0xFFFFFFFF)
    total = (np.uint64(0x165667B1) + np.uint64(size)) & mask
    at = first
    end = first + size
    while end - at >= 4:
        total = (total + np.uint64(_le32(source, at)) * np.uint64(0xC2B2AE3D)) & mask
        total = ((total << np.uint64(17) | total >> np.uint64(15)) & mask) * np.uint64(0x27D4EB2F) & mask
        at += 4
    while at < end:
        total = (total + np.uint64(source[at]) * np.uint64(0x165667B1)) & mask
        total = ((total << np.uint64(11) | total >> np.uint64(21)) & mask) * np.uint64(0x9E3779B1) & mask
        at += 1
    total = (total ^ total >> np.uint64(15)) * np.uint64(0x85EBCA77) & mask
    total = (total ^ total >> np.uint64(13)) * np.uint64(0xC2B2AE3D) & mask
    total ^= total >> np.uint64(16)
    return np.int64(total >> np.uint64(8)) & 255


@njit(
    [types.int64(_SOURCE, types.int64, types.int64, _TARGET, types.int64, types.int64, types.int64)],
    cache=True,
    nogil=True,
)
def _decode_block(source, position, end, target, history, out, limit):  # type: ignore[no-untyped-def]
    """Decode the block [position, end) to target[out:]: where it ends there, or UNKNOWN or NO_ROOM.

    Matches reach back to `history` at most; nothing is decoded beyond `limit`.
    """
    source_size = np.int64(source.shape[0])
    last_match = np.int64(-1)
    while True:
        if position >= end:
            return np.int64(UNKNOWN)
        token = np.int64(source[np.uint64(position)])
        position += 1
        literals = token >> 4
        if literals < 15 and end - position >= 32 and limit - out >= 32:
            # Most sequences: few literals, a short match that does not overlap itself. No loops, four tests.
            near = position + literals
            begin = out + literals
            distance = np.int64(source[np.uint64(near)]) | np.int64(source[np.uint64(near + 1)]) << 8
            size = (token & 15) + 4
            if 16 <= distance <= begin - history and size < 19:
                _copy16(target, out, source, position)
                _copy16(target, begin, target, begin - distance)
                if size > 16:
                    _copy16(target, begin + 16, target, begin + 16 - distance)
                last_match = begin
                out = begin + size
                position = near + 2
                continue
        if literals == 15:
            while True:
                if position >= end:
                    return np.int64(UNKNOWN)
                more = np.int64(source[np.uint64(position)])
                position += 1
                literals += more
                if more != 255:
                    break
        if literals > end - position:
            return np.int64(UNKNOWN)
        if literals > limit - out:
            return np.int64(NO_ROOM)
        if position + literals + 16 <= source_size:
            _copy16(target, out, source, position)
            done = np.int64(16)
            while done < literals:
                _copy16(target, out + done, source, position + done)
                done += 16
        else:
            for i in range(literals):
                target[np.uint64(out + i)] = source[np.uint64(position + i)]
        out += literals
        position += literals
        if position == end:
            if last_match >= 0 and (literals < _LAST_LITERALS or out - last_match < _MATCH_LIMIT):
                return np.int64(UNKNOWN)
            return out
        if end - position < 2:
            return np.int64(UNKNOWN)
        distance = np.int64(source[np.uint64(position)]) | np.int64(source[np.uint64(position + 1)]) << 8
        position += 2
        if distance == 0 or distance > out - history:
            return np.int64(UNKNOWN)
        size = (token & 15) + 4
        if size == 19:
            while True:
                if position >= end:
                    return np.int64(UNKNOWN)
                more = np.int64(source[np.uint64(position)])
                position += 1
                size += more
                if more != 255:
                    break
        if size > limit - out:
            return np.int64(NO_ROOM)
        last_match = out
        done = np.int64(0)
        if distance < 16:
            # What repeats after `distance` bytes also repeats after a multiple of it that is 16 or more.
            wide = distance * ((15 + distance) // distance)
            first = min(size, wide - distance)
            while done < first:
                target[np.uint64(out + done)] = target[np.uint64(out + done - distance)]
                done += 1
            distance = wide
        while done < size:
            _copy16(target, out + done, target, out + done - distance)
            done += 16
        out += size


@njit([types.int64(_SOURCE, types.int64, types.int64, _TARGET, types.int64)], cache=True, nogil=True)
def decode_frame(source, position, end, target, out):  # type: ignore[no-untyped-def]
    """Decode the one frame that [position, end) is to target[out:]: where it ends, or UNKNOWN or NO_ROOM."""
    room = np.int64(target.shape[0]) - SLACK
    if end - position < _LEAST_FRAME or end > source.shape[0] or position < 0 or out < 0 or out > room:
        return np.int64(UNKNOWN)
    if _le32(source, position) != 0x184D2204:
        return np.int64(UNKNOWN)
    flags = np.int64(source[position + 4])
    sizes = np.int64(source[position + 5])
    if flags & ~(_INDEPENDENT | _CONTENT_SIZE) != 0x40 or sizes & 0x8F or sizes < 0x40:
        return np.int64(UNKNOWN)
    descriptor = np.int64(2)
    content_size = np.int64(-1)
    if flags & _CONTENT_SIZE:
        descriptor = np.int64(10)
        if end - position < _LEAST_FRAME + 8 or _le32(source, position + 10) != 0:
            return np.int64(UNKNOWN)
        content_size = _le32(source, position + 6)
    if _header_checksum(source, position + 4, descriptor) != source[position + 4 + descriptor]:
        return np.int64(UNKNOWN)
    most = np.int64(1) << (8 + 2 * (sizes >> 4))
    position += 5 + descriptor
    begin = out
    while True:
        if end - position < 4:
            return np.int64(UNKNOWN)
        size = _le32(source, position)
        position += 4
        if size == 0:
            break
        plain = size >> 31
        size &= 0x7FFFFFFF
        if size > most or size > end - position:
            return np.int64(UNKNOWN)
        if plain:
            if size > room - out:
                return np.int64(NO_ROOM)
            for i in range(size):
                target[out + i] = source[position + i]
            out += size
        else:
            limit = min(room, out + most)
            history = out if flags & _INDEPENDENT else begin
            block_end = _decode_block(source, position, position + size, target, history, out, limit)
            if block_end < 0:
                # More than a block may hold is the library's to judge; more than there is room for is not.
                return np.int64(UNKNOWN) if block_end == NO_ROOM and limit < room else block_end
            out = block_end
        position += size
    if position != end or (content_size >= 0 and out - begin != content_size):
        return np.int64(UNKNOWN)
    return out


@njit(
    [types.UniTuple(types.int64, 2)(_SOURCE, _TABLE, types.int64, types.int64, _TARGET, types.int64)],
    cache=True,
    nogil=True,
)
def unpack_frames(source, table, column, first, target, out):  # type: ignore[no-untyped-def]
    """Decode the frames of rows `first` and after, one behind the other, from target[out] on.

    A row's frame lies at [start, end) of `source`, in columns `column` and `column` + 1; where it is done,
    these say where its bytes are in `target`. Gives the first row that is not done, and where the output
    ends, or why that row was not done (UNKNOWN or NO_ROOM).
    """
    for row in range(first, table.shape[0]):
        end = decode_frame(source, table[row, column], table[row, column + 1], target, out)
        if end < 0:
            return np.int64(row), end
        table[row, column] = out
        table[row, column + 1] = end
        out = end
    return np.int64(table.shape[0]), out
