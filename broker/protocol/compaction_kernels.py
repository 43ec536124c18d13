"""Compiled loops of log compaction (numba): hashing keys, finding what is outdated, copying what stays.

Called by `broker/storage/key_map.py` alone, on a thread: every kernel lets go of the interpreter's lock. The
same rules as in `record_kernels.py` hold: explicit signatures, no read outside the buffer whatever the bytes
say, nothing allocated.

A key is known by its SipHash-2-4 of 128 bits under a random 128-bit secret that changes with each run. Keys
that differ are taken for one with a probability of 2**-128 a pair, also when someone chooses keys on purpose;
for n keys in a map that is at most n**2 / 2**129, or 10**-26 for the four million keys of the default memory.
(Apache Kafka uses MD5 of the same width, without a secret.)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

from millrace.broker.protocol.record_kernels import (
    BAD_LENGTH,
    BAD_VARINT,
    OK,
    TRAILING_BYTES,
    _nullable,
    _varint32,
    _varint64,
)

FULL = 100
"""The map takes no more keys."""

_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
_OUT = types.Array(types.uint8, 1, "C")
_UINT64S = types.Array(types.uint64, 1, "C")
_INT64S = types.Array(types.int64, 1, "C")


@njit(types.uint64(types.uint64, types.uint64), cache=True, nogil=True)
def _rotate(value: Any, bits: Any) -> Any:
    return (value << bits) | (value >> (np.uint64(64) - bits))


@njit(
    types.UniTuple(types.uint64, 4)(types.uint64, types.uint64, types.uint64, types.uint64),
    cache=True,
    nogil=True,
)
def _round(v0: Any, v1: Any, v2: Any, v3: Any) -> Any:
    v0 += v1
    v1 = _rotate(v1, np.uint64(13)) ^ v0
    v0 = _rotate(v0, np.uint64(32))
    v2 += v3
    v3 = _rotate(v3, np.uint64(16)) ^ v2
    v0 += v3
    v3 = _rotate(v3, np.uint64(21)) ^ v0
    v2 += v1
    v1 = _rotate(v1, np.uint64(17)) ^ v2
    v2 = _rotate(v2, np.uint64(32))
    return v0, v1, v2, v3


@njit(
    types.UniTuple(types.uint64, 2)(_BYTES, types.int64, types.int64, types.uint64, types.uint64),
    cache=True,
    nogil=True,
)
def siphash128(buffer: Any, start: Any, size: Any, secret0: Any, secret1: Any) -> Any:
    """SipHash-2-4 with 128 bits of output, of `size` bytes from `start` on, which must be in the buffer."""
    v0 = secret0 ^ np.uint64(0x736F6D6570736575)
    v1 = secret1 ^ np.uint64(0x646F72616E646F6D) ^ np.uint64(0xEE)
    v2 = secret0 ^ np.uint64(0x6C7967656E657261)
    v3 = secret1 ^ np.uint64(0x7465646279746573)
    whole_end = start + (size & ~7)
    position = start
    while position < whole_end:
        word = np.uint64(0)
        for number in range(8):
            word |= np.uint64(buffer[position + number]) << np.uint64(8 * number)
        v3 ^= word
        v0, v1, v2, v3 = _round(v0, v1, v2, v3)
        v0, v1, v2, v3 = _round(v0, v1, v2, v3)
        v0 ^= word
        position += 8
    word = np.uint64(size & 0xFF) << np.uint64(56)
    for number in range(size & 7):
        word |= np.uint64(buffer[position + number]) << np.uint64(8 * number)
    v3 ^= word
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    v0 ^= word
    v2 ^= np.uint64(0xEE)
    for _ in range(4):
        v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    first = v0 ^ v1 ^ v2 ^ v3
    v1 ^= np.uint64(0xDD)
    for _ in range(4):
        v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    return first, v0 ^ v1 ^ v2 ^ v3


@njit(types.int64(_UINT64S, types.uint64, types.uint64), cache=True, nogil=True)
def _slot(table: Any, hash0: Any, hash1: Any) -> Any:
    """First word of the key's slot, or of the free slot (offset 0) where it would go. One slot at least is
    always free. A slot is three words, so that looking at one costs one cache miss or two."""
    size = len(table)
    slot: Any = np.int64(hash0 % np.uint64(size // 3)) * 3
    while table[slot + 2] != 0 and (table[slot] != hash0 or table[slot + 1] != hash1):
        slot += 3
        if slot == size:
            slot = 0
    return slot


@njit(
    types.UniTuple(types.int64, 2)(
        _BYTES, types.int64, types.int64, types.int64, _UINT64S, _UINT64S, _INT64S
    ),
    cache=True,
    nogil=True,
)
def put_keys(
    buffer: Any,
    record_count: Any,
    base_offset: Any,
    from_offset: Any,
    secret: Any,
    table: Any,
    counts: Any,
) -> Any:
    """Notes the offset of each record's key from `from_offset` on; (status, index of the record).

    The table holds offsets plus one, so that memory which was never touched reads as free slots. `counts` is
    (keys in the map, most keys it takes, greatest offset noted). Offsets only grow in a map.
    """
    end = len(buffer)
    position = 0
    for index in range(record_count):
        length, position = _varint32(buffer, position, end)
        if position < 0:
            return BAD_VARINT, index
        if length < 1 or length > end - position:
            return BAD_LENGTH, index
        record_end = position + length
        _, position = _varint64(buffer, position + 1, record_end)
        if position < 0:
            return BAD_VARINT, index
        delta, position = _varint32(buffer, position, record_end)
        if position < 0:
            return BAD_VARINT, index
        key_size, position = _nullable(buffer, position, record_end)
        if position < 0:
            return BAD_LENGTH, index
        offset = base_offset + delta
        if key_size >= 0 and offset >= from_offset:
            hash0, hash1 = siphash128(buffer, position, key_size, secret[0], secret[1])
            slot = _slot(table, hash0, hash1)
            if table[slot + 2] == 0:
                if counts[0] >= counts[1]:
                    return FULL, index
                counts[0] += 1
                table[slot] = hash0
                table[slot + 1] = hash1
            table[slot + 2] = max(table[slot + 2], np.uint64(offset + 1))
        if offset > counts[2]:
            counts[2] = offset
        position = record_end
    if position != end:
        return TRAILING_BYTES, record_count
    return OK, record_count


@njit(
    types.UniTuple(types.int64, 5)(
        _BYTES,
        types.int64,
        types.int64,
        types.int64,
        types.boolean,
        _UINT64S,
        _UINT64S,
        _OUT,
    ),
    cache=True,
    nogil=True,
)
def sift(
    buffer: Any,
    record_count: Any,
    base_offset: Any,
    latest_offset: Any,
    keep_tombstones: Any,
    secret: Any,
    table: Any,
    keep: Any,
) -> Any:
    """Decides on each record of a batch: `keep[index]` becomes 1 for those that stay.

    A record stays when it lies beyond `latest_offset` (the map's end), or when it is the last of its key and
    is no tombstone, or tombstones are kept. Records without a key go. Returns (status, index of the record,
    how many stay, how many tombstones stay, greatest timestamp delta of those that stay).
    """
    end = len(buffer)
    position = 0
    kept = np.int64(0)
    tombstones = np.int64(0)
    greatest = np.int64(-0x7FFFFFFFFFFFFFFF - 1)
    for index in range(record_count):
        length, position = _varint32(buffer, position, end)
        if position < 0:
            return BAD_VARINT, index, kept, tombstones, greatest
        if length < 1 or length > end - position:
            return BAD_LENGTH, index, kept, tombstones, greatest
        record_end = position + length
        timestamp_delta, position = _varint64(buffer, position + 1, record_end)
        if position < 0:
            return BAD_VARINT, index, kept, tombstones, greatest
        delta, position = _varint32(buffer, position, record_end)
        if position < 0:
            return BAD_VARINT, index, kept, tombstones, greatest
        key_size, position = _nullable(buffer, position, record_end)
        if position < 0:
            return BAD_LENGTH, index, kept, tombstones, greatest
        key_position = position
        position += max(key_size, 0)
        value_size, position = _nullable(buffer, position, record_end)
        if position < 0:
            return BAD_LENGTH, index, kept, tombstones, greatest
        offset = base_offset + delta
        stays = offset > latest_offset
        if not stays and key_size >= 0 and (value_size >= 0 or keep_tombstones):
            hash0, hash1 = siphash128(buffer, key_position, key_size, secret[0], secret[1])
            stays = np.uint64(offset + 1) >= table[_slot(table, hash0, hash1) + 2]
        if stays:
            keep[index] = 1
            kept += 1
            if value_size < 0:
                tombstones += 1
            if timestamp_delta > greatest:
                greatest = timestamp_delta
        else:
            keep[index] = 0
        position = record_end
    if position != end:
        return TRAILING_BYTES, record_count, kept, tombstones, greatest
    return OK, record_count, kept, tombstones, greatest


@njit(types.int64(types.int64), cache=True, nogil=True)
def _varint_size(value: Any) -> Any:
    rest = np.uint64((value << 1) ^ (value >> 63)) >> np.uint64(7)
    size = np.int64(1)
    while rest:
        size += 1
        rest >>= np.uint64(7)
    return size


@njit(types.int64(_OUT, types.int64, types.int64), cache=True, nogil=True)
def _put_varint(out: Any, position: Any, value: Any) -> Any:
    rest = np.uint64((value << 1) ^ (value >> 63))
    while rest >= np.uint64(0x80):
        out[position] = np.uint8((rest & np.uint64(0x7F)) | np.uint64(0x80))
        rest >>= np.uint64(7)
        position += 1
    out[position] = np.uint8(rest)
    return position + 1


@njit(
    types.UniTuple(types.int64, 2)(_BYTES, types.int64, _OUT, types.int64, _OUT),
    cache=True,
    nogil=True,
)
def copy_kept(buffer: Any, record_count: Any, keep: Any, shift: Any, out: Any) -> Any:
    """Copies the records that stay, `shift` added to their timestamp deltas; (status, bytes written).

    `out` must hold the buffer's size, and with a shift 16 bytes a record more. The buffer has been sifted,
    so that its lengths are known to be right; they are checked all the same.
    """
    end = len(buffer)
    position = 0
    written = np.int64(0)
    for index in range(record_count):
        start = position
        length, position = _varint32(buffer, position, end)
        if position < 0 or length < 1 or length > end - position:
            return BAD_LENGTH, written
        record_end = position + length
        if keep[index]:
            if shift != 0:
                attributes = buffer[position]
                delta, rest = _varint64(buffer, position + 1, record_end)
                if rest < 0:
                    return BAD_VARINT, written
                delta += shift
                written = _put_varint(out, written, 1 + _varint_size(delta) + record_end - rest)
                out[written] = attributes
                written = _put_varint(out, written + 1, delta)
                start = rest
            out[written : written + record_end - start] = buffer[start:record_end]
            written += record_end - start
        position = record_end
    return OK, written
