"""Compiled loops over the records of a batch (numba): the only code on a hot path that sees records.

Called by `records.py` alone, which imports this module when it is first needed: numba and LLVM take
about 100 MB of address space and half a second, and processes that only move batches do without.

Invariants: a kernel never reads outside the buffer, whatever the bytes say (numba checks no index, so
every read here is behind a comparison); it accepts exactly what `plain_records.py` accepts, which a
property test holds it to; it never allocates. Signatures are explicit, so that importing the module
loads machine code from the cache and a call never compiles.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

# What a kernel returns instead of an exception.
OK = 0
BAD_VARINT = 1
BAD_LENGTH = 2
BAD_OFFSET_DELTA = 3
MISSING_KEY = 4  # said of a record that is whole, as the two at the end are
BAD_HEADER_COUNT = 5
MISSING_HEADER_KEY = 6
TRAILING_BYTES_IN_RECORD = 7
TRAILING_BYTES = 8
TOO_OLD = 9
TOO_NEW = 10

_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
_VARINT = types.UniTuple(types.int64, 2)


@njit(_VARINT(_BYTES, types.int64, types.int64), cache=True, nogil=True, inline="always")
def _varint32(buffer: Any, position: int, end: int) -> Any:
    """Zigzag varint of at most 32 bits: (value, next position), or (0, -1) when it is malformed."""
    value = np.uint64(0)
    shift = np.uint64(0)
    while position < end:
        byte = np.uint64(buffer[position])
        position += 1
        value |= (byte & np.uint64(0x7F)) << shift
        if byte < np.uint64(0x80):
            if value > np.uint64(0xFFFFFFFF):
                return 0, -1
            return np.int64(value >> np.uint64(1)) ^ -np.int64(value & np.uint64(1)), position
        shift += np.uint64(7)
        if shift >= np.uint64(32):
            return 0, -1
    return 0, -1


@njit(_VARINT(_BYTES, types.int64, types.int64), cache=True, nogil=True, inline="always")
def _varint64(buffer: Any, position: int, end: int) -> Any:
    """Zigzag varint of at most 64 bits: (value, next position), or (0, -1) when it is malformed."""
    value = np.uint64(0)
    shift = np.uint64(0)
    while position < end:
        byte = np.uint64(buffer[position])
        position += 1
        if shift == np.uint64(63) and byte > np.uint64(1):
            return 0, -1
        value |= (byte & np.uint64(0x7F)) << shift
        if byte < np.uint64(0x80):
            return np.int64(value >> np.uint64(1)) ^ -np.int64(value & np.uint64(1)), position
        shift += np.uint64(7)
    return 0, -1


@njit(_VARINT(_BYTES, types.int64, types.int64), cache=True, nogil=True, inline="always")
def _nullable(buffer: Any, position: int, end: int) -> Any:
    """A nullable field: (size or -1, position of its first byte), or (0, -1) when it is malformed."""
    size, position = _varint32(buffer, position, end)
    if position < 0 or size < -1 or size > end - position:
        return 0, -1
    return size, position


@njit(types.UniTuple(types.int64, 5)(_BYTES, types.int64), cache=True, nogil=True)
def validate(buffer: Any, record_count: int) -> Any:
    """Checks a plain records section: (status, index of the record, least and greatest timestamp delta, how
    many have no key)."""
    end = len(buffer)
    position = 0
    keyless = np.int64(0)
    least = np.int64(0x7FFFFFFFFFFFFFFF)
    greatest = np.int64(-0x7FFFFFFFFFFFFFFF - 1)
    for index in range(record_count):
        length, position = _varint32(buffer, position, end)
        if position < 0:
            return BAD_VARINT, index, least, greatest, keyless
        if length < 1 or length > end - position:
            return BAD_LENGTH, index, least, greatest, keyless
        record_end = position + length
        # The attributes byte is unused and free, as in Apache Kafka.
        timestamp_delta, position = _varint64(buffer, position + 1, record_end)
        if position < 0:
            return BAD_VARINT, index, least, greatest, keyless
        least = min(least, timestamp_delta)
        greatest = max(greatest, timestamp_delta)
        offset_delta, position = _varint32(buffer, position, record_end)
        if position < 0:
            return BAD_VARINT, index, least, greatest, keyless
        if offset_delta != index:
            return BAD_OFFSET_DELTA, index, least, greatest, keyless
        size, position = _nullable(buffer, position, record_end)
        if position < 0:
            return BAD_LENGTH, index, least, greatest, keyless
        if size >= 0:
            position += size
        else:
            keyless += 1
        size, position = _nullable(buffer, position, record_end)
        if position < 0:
            return BAD_LENGTH, index, least, greatest, keyless
        position += max(size, 0)
        header_count, position = _varint32(buffer, position, record_end)
        if position < 0 or header_count < 0:
            return BAD_HEADER_COUNT, index, least, greatest, keyless
        for _ in range(header_count):
            size, position = _nullable(buffer, position, record_end)
            if position < 0:
                return BAD_LENGTH, index, least, greatest, keyless
            if size < 0:
                return MISSING_HEADER_KEY, index, least, greatest, keyless
            position += size
            size, position = _nullable(buffer, position, record_end)
            if position < 0:
                return BAD_LENGTH, index, least, greatest, keyless
            position += max(size, 0)
        if position != record_end:
            return TRAILING_BYTES_IN_RECORD, index, least, greatest, keyless
    if position != end:
        return TRAILING_BYTES, record_count, least, greatest, keyless
    return OK, record_count, least, greatest, keyless


_INT32S = types.Array(types.int32, 1, "C")


@njit(
    types.int64(_BYTES, types.int64, types.boolean, types.int64, types.int64, types.int64, _INT32S, _INT32S),
    cache=True,
    nogil=True,
)
def find_refused(
    buffer: Any,
    record_count: int,
    keys_required: bool,
    least: int,
    greatest: int,
    unset: int,
    found: Any,
    reasons: Any,
) -> Any:
    """Which records of a section that `validate` has passed a topic does not take, and why; how many.

    A timestamp delta is taken from `least` to `greatest`, and if it is `unset`. `found` gets the places of
    the first records that are not taken, as many as it holds, and `reasons` a status for each.
    """
    end = len(buffer)
    position = 0
    count = 0
    for index in range(record_count):
        if count == len(found):
            return count
        length, position = _varint32(buffer, position, end)
        if position < 0 or length < 1 or length > end - position:
            return count
        record_end = position + length
        timestamp_delta, position = _varint64(buffer, position + 1, record_end)
        if position < 0:
            return count
        _, position = _varint32(buffer, position, record_end)
        if position < 0:
            return count
        key_size, position = _varint32(buffer, position, record_end)
        if position < 0:
            return count
        status = OK
        if keys_required and key_size < 0:
            status = MISSING_KEY
        elif timestamp_delta != unset and timestamp_delta < least:
            status = TOO_OLD
        elif timestamp_delta != unset and timestamp_delta > greatest:
            status = TOO_NEW
        if status != OK:
            found[count] = index
            reasons[count] = status
            count += 1
        position = record_end
    return count


_INT64S = types.Array(types.int64, 1, "C")


@njit(
    types.UniTuple(types.int64, 2)(
        _BYTES, _INT64S, _INT32S, _INT64S, _INT32S, _INT64S, _INT32S, _INT64S, _INT32S
    ),
    cache=True,
    nogil=True,
)
def scan(
    buffer: Any,
    timestamp_delta: Any,
    offset_delta: Any,
    key_position: Any,
    key_size: Any,
    value_position: Any,
    value_size: Any,
    headers_position: Any,
    headers_count: Any,
) -> Any:
    """Fills the columns, all of the record count's length: (status, index of the record).

    Offset deltas need not be dense (compaction leaves holes).
    """
    end = len(buffer)
    position = 0
    record_count = len(timestamp_delta)
    for index in range(record_count):
        length, position = _varint32(buffer, position, end)
        if position < 0:
            return BAD_VARINT, index
        if length < 1 or length > end - position:
            return BAD_LENGTH, index
        record_end = position + length
        timestamp_delta[index], position = _varint64(buffer, position + 1, record_end)
        if position < 0:
            return BAD_VARINT, index
        delta, position = _varint32(buffer, position, record_end)
        if position < 0:
            return BAD_VARINT, index
        offset_delta[index] = delta
        size, position = _nullable(buffer, position, record_end)
        if position < 0:
            return BAD_LENGTH, index
        key_size[index] = size
        key_position[index] = position
        position += max(size, 0)
        size, position = _nullable(buffer, position, record_end)
        if position < 0:
            return BAD_LENGTH, index
        value_size[index] = size
        value_position[index] = position
        position += max(size, 0)
        header_count, position = _varint32(buffer, position, record_end)
        if position < 0 or header_count < 0:
            return BAD_HEADER_COUNT, index
        headers_count[index] = header_count
        headers_position[index] = position
        for _ in range(header_count):
            size, position = _nullable(buffer, position, record_end)
            if position < 0:
                return BAD_LENGTH, index
            if size < 0:
                return MISSING_HEADER_KEY, index
            position += size
            size, position = _nullable(buffer, position, record_end)
            if position < 0:
                return BAD_LENGTH, index
            position += max(size, 0)
        if position != record_end:
            return TRAILING_BYTES_IN_RECORD, index
    if position != end:
        return TRAILING_BYTES, record_count
    return OK, record_count


@njit(types.int64(_BYTES, types.int64), cache=True, nogil=True, inline="always")
def _int32_at(buffer: Any, position: int) -> Any:
    value = (
        (np.uint32(buffer[position]) << np.uint32(24))
        | (np.uint32(buffer[position + 1]) << np.uint32(16))
        | (np.uint32(buffer[position + 2]) << np.uint32(8))
        | np.uint32(buffer[position + 3])
    )
    return np.int64(np.int32(value))


@njit(types.UniTuple(types.int64, 3)(_BYTES, types.int64), cache=True, nogil=True)
def whole_batches(buffer: Any, end_offset: int) -> Any:
    """The longest run of whole batches from the start of the buffer that begin below `end_offset`.

    Returns (its size in bytes, the offset after it or -1 when it is empty, size of the batch that follows
    it or 0 when its header is not in the buffer). A header whose length cannot be ends the run.
    """
    end = len(buffer)
    position: Any = 0
    next_offset: Any = np.int64(-1)
    while end - position >= 61:
        size = _int32_at(buffer, position + 8) + 12
        base_offset = (_int32_at(buffer, position) << 32) | (_int32_at(buffer, position + 4) & 0xFFFFFFFF)
        if size < 61 or base_offset >= end_offset:
            return position, next_offset, 0
        if size > end - position:
            return position, next_offset, size
        next_offset = base_offset + _int32_at(buffer, position + 23) + 1
        position += size
    return position, next_offset, 0
