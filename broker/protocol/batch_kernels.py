"""Reading the headers of many batches inside compiled loops, their checksums with them (numba).

Called by `batch_index.py`, and by the mirror's walk (`coalesce_kernels`), which makes more of a header than a
row. A step of Python's a batch costs a microsecond: nothing for a batch of 64 KB, three times all the rest
where a batch has one record.

Invariant: nothing outside the buffer is read, whatever a length says.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

from millrace.broker.protocol.crc_kernels import crc32c_within

# Columns of an index of batches: bytes in the buffer, fields of the header.
B_POSITION, B_RECORDS, B_END, B_BASE_OFFSET, B_ATTRIBUTES, B_BASE_MS, B_MAX_MS = range(7)
B_PRODUCER_ID, B_COUNT, B_LAST_OFFSET, B_CRC, B_MAGIC = range(7, 12)
B_CHECK = 12
BATCH_COLUMNS = 13

# What is known of a batch's checksum.
CRC_RIGHT, CRC_WRONG, CRC_UNCHECKED = range(3)

CRC_IN_KERNEL_BELOW = 4096
"""Bytes of a batch. From here on one call of the library is cheaper than one stream of the kernel's."""

_HEADER_SIZE = 61
_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
_TABLE = types.Array(types.int64, 2, "C")


@njit(inline="always")
def unsigned_at(buffer, position, size):  # type: ignore[no-untyped-def]
    at = np.uint64(position)  # spares the test for a negative index at every byte
    value = np.uint64(0)
    for number in range(size):
        value = (value << np.uint64(8)) | np.uint64(buffer[at + np.uint64(number)])
    return value


@njit(inline="always")
def int32_at(buffer, position):  # type: ignore[no-untyped-def]
    return np.int64(np.int32(np.uint32(unsigned_at(buffer, position, 4))))


@njit(inline="always")
def int64_at(buffer, position):  # type: ignore[no-untyped-def]
    return np.int64(unsigned_at(buffer, position, 8))


@njit(inline="always")
def has_right_crc(buffer, position, end):  # type: ignore[no-untyped-def]
    """Of the whole batch `[position, end)`, which lies in the buffer."""
    return np.uint64(crc32c_within(buffer, position + 21, end)) == unsigned_at(buffer, position + 17, 4)


@njit([types.int64(_BYTES, _TABLE)], cache=True, nogil=True)
def index_batches(buffer: Any, index: Any) -> Any:
    """Fills `index` with one row for each whole batch in `buffer`; gives how many.

    A trailing batch that a fetch cut off ends the walk, and so does a length that cannot be. Entries of the
    old formats get a row with their magic, of which nothing else means anything. Checksums of batches from
    CRC_IN_KERNEL_BELOW on are left to the caller.
    """
    position = np.int64(0)
    count = np.int64(0)
    size = np.int64(buffer.shape[0])
    while size - position >= _HEADER_SIZE and count < index.shape[0]:
        length = int32_at(buffer, position + 8)
        if length < _HEADER_SIZE - 12 or length + 12 > size - position:
            break
        end = position + 12 + length
        base_offset = int64_at(buffer, position)
        magic = np.int64(buffer[position + 16])
        index[count, B_POSITION] = position
        index[count, B_RECORDS] = position + _HEADER_SIZE
        index[count, B_END] = end
        index[count, B_BASE_OFFSET] = base_offset
        index[count, B_ATTRIBUTES] = np.int64(unsigned_at(buffer, position + 21, 2))
        index[count, B_BASE_MS] = int64_at(buffer, position + 27)
        index[count, B_MAX_MS] = int64_at(buffer, position + 35)
        index[count, B_PRODUCER_ID] = int64_at(buffer, position + 43)
        index[count, B_COUNT] = np.int64(unsigned_at(buffer, position + 57, 4))
        index[count, B_LAST_OFFSET] = base_offset + np.int64(unsigned_at(buffer, position + 23, 4))
        index[count, B_CRC] = np.int64(unsigned_at(buffer, position + 17, 4))
        index[count, B_MAGIC] = magic
        if magic == 2 and length + 12 >= CRC_IN_KERNEL_BELOW:
            index[count, B_CHECK] = CRC_UNCHECKED
        elif magic == 2 and not has_right_crc(buffer, position, end):
            index[count, B_CHECK] = CRC_WRONG
        else:
            index[count, B_CHECK] = CRC_RIGHT
        count += 1
        position = end
    return count
