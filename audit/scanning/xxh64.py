"""XXH64, compiled: 64-bit hashes of stretches of a buffer, for the scan's content digests.

The algorithm is that of the public specification (xxHash, "XXH64 Algorithm Description"); the known answers
of `content_digest` and the library `xxhash` are its oracles in the tests. Called by `scan` inside its
kernel.

The caller has checked that [first, end) lies within the buffer. Words are put together byte by byte, which
compilers turn into one load and which is right on machines of either byte order.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types

_PRIME_1 = np.uint64(0x9E3779B185EBCA87)
_PRIME_2 = np.uint64(0xC2B2AE3D27D4EB4F)
_PRIME_3 = np.uint64(0x165667B19E3779F9)
_PRIME_4 = np.uint64(0x85EBCA77C2B2AE63)
_PRIME_5 = np.uint64(0x27D4EB2F165667C5)

_BYTES = types.Array(types.uint8, 1, "C", readonly=True)


@njit(inline="always")
def le64(buffer, at):  # type: ignore[no-untyped-def]
    return (
        np.uint64(buffer[at])
        | np.uint64(buffer[at + np.uint64(1)]) << np.uint64(8)
        | np.uint64(buffer[at + np.uint64(2)]) << np.uint64(16)
        | np.uint64(buffer[at + np.uint64(3)]) << np.uint64(24)
        | np.uint64(buffer[at + np.uint64(4)]) << np.uint64(32)
        | np.uint64(buffer[at + np.uint64(5)]) << np.uint64(40)
        | np.uint64(buffer[at + np.uint64(6)]) << np.uint64(48)
        | np.uint64(buffer[at + np.uint64(7)]) << np.uint64(56)
    )


@njit(inline="always")
def _le32(buffer, at):  # type: ignore[no-untyped-def]
    return (
        np.uint64(buffer[at])
        | np.uint64(buffer[at + np.uint64(1)]) << np.uint64(8)
        | np.uint64(buffer[at + np.uint64(2)]) << np.uint64(16)
        | np.uint64(buffer[at + np.uint64(3)]) << np.uint64(24)
    )


@njit(inline="always")
def _turn(word, bits):  # type: ignore[no-untyped-def]
    return (word << np.uint64(bits)) | (word >> np.uint64(64 - bits))


@njit(inline="always")
def _round(lane, word):  # type: ignore[no-untyped-def]
    return _turn(lane + word * _PRIME_2, 31) * _PRIME_1


@njit([types.uint64(_BYTES, types.int64, types.int64, types.uint64)], cache=True, nogil=True)
def xxh64(buffer, first, end, seed):  # type: ignore[no-untyped-def]
    """The hash of buffer[first:end]."""
    at = np.uint64(first)
    last = np.uint64(end)
    if end - first >= 32:
        lane_1 = seed + _PRIME_1 + _PRIME_2
        lane_2 = seed + _PRIME_2
        lane_3 = seed
        lane_4 = seed - _PRIME_1
        while last - at >= np.uint64(32):
            lane_1 = _round(lane_1, le64(buffer, at))
            lane_2 = _round(lane_2, le64(buffer, at + np.uint64(8)))
            lane_3 = _round(lane_3, le64(buffer, at + np.uint64(16)))
            lane_4 = _round(lane_4, le64(buffer, at + np.uint64(24)))
            at += np.uint64(32)
        total = _turn(lane_1, 1) + _turn(lane_2, 7) + _turn(lane_3, 12) + _turn(lane_4, 18)
        zero = np.uint64(0)
        total = (total ^ _round(zero, lane_1)) * _PRIME_1 + _PRIME_4
        total = (total ^ _round(zero, lane_2)) * _PRIME_1 + _PRIME_4
        total = (total ^ _round(zero, lane_3)) * _PRIME_1 + _PRIME_4
        total = (total ^ _round(zero, lane_4)) * _PRIME_1 + _PRIME_4
    else:
        total = seed + _PRIME_5
    total += np.uint64(end - first)
    while last - at >= np.uint64(8):
        total = _turn(total ^ _round(np.uint64(0), le64(buffer, at)), 27) * _PRIME_1 + _PRIME_4
        at += np.uint64(8)
    if last - at >= np.uint64(4):
        total = _turn(total ^ (_le32(buffer, at) * _PRIME_1), 23) * _PRIME_2 + _PRIME_3
        at += np.uint64(4)
    while at < last:
        total = _turn(total ^ (np.uint64(buffer[at]) * _PRIME_5), 11) * _PRIME_1
        at += np.uint64(1)
    total = (total ^ (total >> np.uint64(33))) * _PRIME_2
    total = (total ^ (total >> np.uint64(29))) * _PRIME_3
    return total ^ (total >> np.uint64(32))
