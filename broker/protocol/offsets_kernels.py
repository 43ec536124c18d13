"""The compiled loop over the records of `__consumer_offsets` (numba), for whoever reads that log anew.

Called by `broker/groups/offsets_replay.py` alone, on a thread: it lets go of the interpreter's lock. The same
rules as in `record_kernels.py` hold: an explicit signature, no read outside the buffer whatever the bytes
say, nothing allocated. What it calls plain must be a commit that `groups/record_layout.py` reads as it stands
(a test holds it to that); of everything else it says that somebody has to look.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

from millrace.broker.protocol.record_kernels import (
    _BYTES,
    _INT64S,
    _int32_at,
    _nullable,
    _varint32,
    _varint64,
)

WHOLE = 0
"""The run has been gone through."""
MUST_LOOK = 1
"""The batch at the position is compressed, a marker, or not as it should be."""
FULL = 2
"""The columns hold no more; go on at the position."""

_HEADER_SIZE = 61
_COMPRESSED_OR_CONTROL = 0x27
_PLAIN_COMMIT, _OTHER = 1, 0


@njit(types.int64(_BYTES, types.int64), cache=True, nogil=True, inline="always")
def _int16_at(buffer: Any, position: int) -> Any:
    return np.int64(np.int16((np.uint16(buffer[position]) << np.uint16(8)) | np.uint16(buffer[position + 1])))


@njit(types.int64(_BYTES, types.int64), cache=True, nogil=True, inline="always")
def _int64_at(buffer: Any, position: int) -> Any:
    return (_int32_at(buffer, position) << 32) | (_int32_at(buffer, position + 4) & 0xFFFFFFFF)


@njit(types.int64(_BYTES, types.int64, types.int64), cache=True, nogil=True)
def _after_ascii(buffer: Any, position: int, end: int) -> Any:
    """The position after a text of ASCII with its size before it; -1 where there is none."""
    if end - position < 2:
        return -1
    size = _int16_at(buffer, position)
    position += 2
    if size < 0 or size > end - position:
        return -1
    for at in range(position, position + size):
        if buffer[at] >= 0x80:
            return -1
    return position + size


@njit(types.boolean(_BYTES, types.int64, types.int64), cache=True, nogil=True)
def _is_offset_key(buffer: Any, position: int, size: int) -> Any:
    end = position + size
    if size < 2 or _int16_at(buffer, position) != 1:
        return False
    position = _after_ascii(buffer, position + 2, end)
    if position < 0:
        return False
    position = _after_ascii(buffer, position, end)
    return position >= 0 and end - position == 4


@njit(types.boolean(_BYTES, types.int64, types.int64), cache=True, nogil=True)
def _is_offset_value(buffer: Any, position: int, size: int) -> Any:
    end = position + size
    if size < 2:
        return False
    version = _int16_at(buffer, position)
    if version == 3:
        before, after = 12, 8
    elif version == 1:
        before, after = 8, 16
    else:
        return False
    position += 2 + before
    if position > end:
        return False
    position = _after_ascii(buffer, position, end)
    return position >= 0 and end - position >= after


@njit(
    types.UniTuple(types.int64, 3)(
        _BYTES, types.int64, _INT64S, _INT64S, _INT64S, _INT64S, _INT64S, _INT64S, _INT64S
    ),
    cache=True,
    nogil=True,
)
def commits(
    buffer: Any,
    position: int,
    offset: Any,
    key_position: Any,
    key_end: Any,
    value_position: Any,
    value_end: Any,
    producer_id: Any,
    is_plain: Any,
) -> Any:
    """Fills the columns with the records of a run of whole batches from `position` on: (what it came to, how
    many records, the position of the batch that is next).

    Ends are -1 where a field is null; `producer_id` is -1 outside transactions. A batch is in the columns
    whole or not at all.
    """
    end = len(buffer)
    capacity = len(offset)
    count: Any = np.int64(0)
    while end - position >= _HEADER_SIZE:
        size = _int32_at(buffer, position + 8) + 12
        attributes = _int16_at(buffer, position + 21)
        record_count = _int32_at(buffer, position + 57)
        if size < _HEADER_SIZE or size > end - position or buffer[position + 16] != 2:
            return MUST_LOOK, count, position
        if attributes & _COMPRESSED_OR_CONTROL or record_count < 0:
            return MUST_LOOK, count, position
        if record_count > capacity - count:
            return (FULL if count else MUST_LOOK), count, position
        base_offset = _int64_at(buffer, position)
        producer = _int64_at(buffer, position + 43) if attributes & 0x10 else np.int64(-1)
        batch_end = position + size
        at: Any = position + _HEADER_SIZE
        number: Any = count
        for _ in range(record_count):
            length, at = _varint32(buffer, at, batch_end)
            if at < 0 or length < 1 or length > batch_end - at:
                return MUST_LOOK, count, position
            record_end = at + length
            _, at = _varint64(buffer, at + 1, record_end)
            if at < 0:
                return MUST_LOOK, count, position
            delta, at = _varint32(buffer, at, record_end)
            if at < 0:
                return MUST_LOOK, count, position
            key_size, at = _nullable(buffer, at, record_end)
            if at < 0:
                return MUST_LOOK, count, position
            key_position[number] = at
            key_end[number] = at + key_size if key_size >= 0 else -1
            at += max(key_size, 0)
            value_size, at = _nullable(buffer, at, record_end)
            if at < 0:
                return MUST_LOOK, count, position
            value_position[number] = at
            value_end[number] = at + value_size if value_size >= 0 else -1
            header_count, after = _varint32(buffer, at + max(value_size, 0), record_end)
            if header_count != 0 or after != record_end:
                return MUST_LOOK, count, position  # nobody writes headers there
            offset[number] = base_offset + delta
            producer_id[number] = producer
            is_plain[number] = _OTHER
            if (
                key_size >= 0
                and _is_offset_key(buffer, key_position[number], key_size)
                and (value_size < 0 or _is_offset_value(buffer, at, value_size))
            ):
                is_plain[number] = _PLAIN_COMMIT
            number += 1
            at = record_end
        if at != batch_end:
            return MUST_LOOK, count, position
        count = number
        position = batch_end
    return (WHOLE if position == end else MUST_LOOK), count, position
