"""Sets of 32-bit numbers by the thousand, without a Python step for each: as runs, and as roaring bitmaps.

A set is a stretch of *runs*: rows (set, first, last) of an int64 table, in order of the set's number and of
`first`. `merge_runs` makes runs of any origin a set each and tells what came more than once; `set_sizes` and
`write_sets` give each set's portable 32-bit bitmap, `read_sets` takes small ones apart again. Called by
`counting` (which makes cells) and `stream_cells` (which adds them up); large sets are pyroaring's.

The portable format (github.com/RoaringBitmap/RoaringFormatSpec), little-endian:

    with a run container      u16 12347, u16 containers - 1, one bit a container: it holds runs
    without                   u32 12346, u32 containers
    each container            u16 upper half, u16 members - 1
    each container            u32 where it begins; left out below 4 containers with runs among them
    bodies                    runs: u16 runs, (u16 first, u16 length - 1) each; up to 4096 members: u16 each;
                              more: 8192 bytes of bits

Invariants: nothing outside a set's own bytes is read, whatever they say; what `read_sets` does not know for a
small set is left to the library, which judges it.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types

SET, FIRST, LAST = range(3)
RUN_COLUMNS = 3
KEY, MEMBERS, RUN_COUNT = range(3)
"""Columns of runs, and of what is known of a bitmap's containers (`_containers`)."""

SMALL_SET_BYTES = 512
"""A bitmap that `read_sets` takes apart; a larger one has so many members that a Python step is cheap."""
LEAST_RUN_BYTES = 2
"""of a bitmap for each of its runs: so many fit at most"""

_CONTAINERS = 1 << 16

_RUNS = types.Array(types.int64, 2, "C")
_BYTES = types.Array(types.uint8, 1, "C")
_READ_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
_INT64S = types.Array(types.int64, 1, "C")


@njit([types.UniTuple(types.int64, 2)(_RUNS, _RUNS)], cache=True, nogil=True)
def merge_runs(runs, again):  # type: ignore[no-untyped-def]
    """Make runs of one set that touch or overlap one, in place; what came once more goes to `again`.

    `runs` are in order of set and first; `again` has as many rows. Returns how many are left, and how many
    rows of `again` are filled: a number that came n times is in n - 1 of them.
    """
    kept = np.int64(0)
    found = np.int64(0)
    for row in range(runs.shape[0]):
        number = runs[row, SET]
        first = runs[row, FIRST]
        last = runs[row, LAST]
        if kept > 0 and runs[kept - 1, SET] == number and first - 1 <= runs[kept - 1, LAST]:
            top = runs[kept - 1, LAST]
            if first <= top:
                again[found, SET] = number
                again[found, FIRST] = first
                again[found, LAST] = min(last, top)
                found += 1
            if last > top:
                runs[kept - 1, LAST] = last
        else:
            runs[kept, SET] = number
            runs[kept, FIRST] = first
            runs[kept, LAST] = last
            kept += 1
    return kept, found


@njit(inline="always")
def _containers(runs, first_row, end_row, found):  # type: ignore[no-untyped-def]
    """Fill `found` with (upper half, members, runs) of each container of a set; returns how many."""
    count = 0
    for row in range(first_row, end_row):
        first = runs[row, FIRST]
        last = runs[row, LAST]
        while first <= last:
            key = first >> 16
            end = min(last, (key << 16) | 0xFFFF)
            if count == 0 or found[count - 1, KEY] != key:
                found[count, KEY] = key
                found[count, MEMBERS] = 0
                found[count, RUN_COUNT] = 0
                count += 1
            found[count - 1, MEMBERS] += end - first + 1
            found[count - 1, RUN_COUNT] += 1
            first = end + 1
    return count


@njit(inline="always")
def _plain_size(members):  # type: ignore[no-untyped-def]
    return 2 * members if members <= 4096 else 8192


@njit(inline="always")
def _surplus(members, run_count):  # type: ignore[no-untyped-def]
    """By how much a body of runs is larger than the other one."""
    return 2 + 4 * run_count - _plain_size(members)


@njit(inline="always")
def _allowed(found, containers):  # type: ignore[no-untyped-def]
    """Up to which surplus a container's body is runs. Where no body gains by them, they still spare up to
    three containers the table of where bodies begin."""
    for i in range(containers):
        if _surplus(found[i, MEMBERS], found[i, RUN_COUNT]) < 0:
            return -1
    return 4 if containers < 4 else -1


@njit(inline="always")
def _head_size(containers, has_runs):  # type: ignore[no-untyped-def]
    if not has_runs:
        return 8 + 8 * containers
    return 4 + (containers + 7) // 8 + 4 * containers + (4 * containers if containers >= 4 else 0)


@njit([types.void(_RUNS, _INT64S, _INT64S)], cache=True, nogil=True)
def set_sizes(runs, bounds, sizes):  # type: ignore[no-untyped-def]
    """How many bytes each set's bitmap takes, 0 of an empty one. Set i is the rows bounds[i] to bounds[i + 1]
    of merged `runs`, of numbers below 2^32."""
    found = np.empty((_CONTAINERS, 3), np.int64)
    for each in range(sizes.shape[0]):
        containers = _containers(runs, bounds[each], bounds[each + 1], found)
        allowed = _allowed(found, containers)
        size = 0
        has_runs = False
        for i in range(containers):
            if _surplus(found[i, MEMBERS], found[i, RUN_COUNT]) <= allowed:
                has_runs = True
                size += 2 + 4 * found[i, RUN_COUNT]
            else:
                size += _plain_size(found[i, MEMBERS])
        sizes[each] = size + _head_size(containers, has_runs) if containers else 0


@njit(inline="always")
def _put(out, at, value, size):  # type: ignore[no-untyped-def]
    for i in range(size):
        out[at + i] = (value >> (8 * i)) & 0xFF


@njit([types.void(_RUNS, _INT64S, _INT64S, _BYTES)], cache=True, nogil=True)
def write_sets(runs, bounds, offsets, out):  # type: ignore[no-untyped-def]
    """Write each set's bitmap to out[offsets[i]:offsets[i + 1]], whose sizes are those of `set_sizes`."""
    found = np.empty((_CONTAINERS, 3), np.int64)
    for each in range(bounds.shape[0] - 1):
        containers = _containers(runs, bounds[each], bounds[each + 1], found)
        if containers == 0:
            continue
        allowed = _allowed(found, containers)
        has_runs = False
        for i in range(containers):
            has_runs = has_runs or _surplus(found[i, MEMBERS], found[i, RUN_COUNT]) <= allowed
        start = offsets[each]
        at = start
        if has_runs:
            _put(out, at, 12347 | ((containers - 1) << 16), 4)
            at += 4
            for i in range((containers + 7) // 8):
                out[at + i] = 0
            for i in range(containers):
                if _surplus(found[i, MEMBERS], found[i, RUN_COUNT]) <= allowed:
                    out[at + i // 8] |= np.uint8(1 << (i % 8))
            at += (containers + 7) // 8
        else:
            _put(out, at, 12346, 4)
            _put(out, at + 4, containers, 4)
            at += 8
        for i in range(containers):
            _put(out, at, found[i, KEY], 2)
            _put(out, at + 2, found[i, MEMBERS] - 1, 2)
            at += 4
        body = start + _head_size(containers, has_runs)
        if not has_runs or containers >= 4:
            begin = body
            for i in range(containers):
                _put(out, at, begin - start, 4)
                at += 4
                if _surplus(found[i, MEMBERS], found[i, RUN_COUNT]) <= allowed:
                    begin += 2 + 4 * found[i, RUN_COUNT]
                else:
                    begin += _plain_size(found[i, MEMBERS])
        number = -1
        for row in range(bounds[each], bounds[each + 1]):
            first = runs[row, FIRST]
            last = runs[row, LAST]
            while first <= last:
                end = min(last, first | 0xFFFF)
                if number < 0 or found[number, KEY] != first >> 16:
                    number += 1
                    holds_runs = _surplus(found[number, MEMBERS], found[number, RUN_COUNT]) <= allowed
                    at = body
                    if holds_runs:
                        _put(out, at, found[number, RUN_COUNT], 2)
                        at += 2
                        body += 2 + 4 * found[number, RUN_COUNT]
                    else:
                        body += _plain_size(found[number, MEMBERS])
                        if found[number, MEMBERS] > 4096:
                            for i in range(8192):
                                out[at + i] = 0
                low = first & 0xFFFF
                if holds_runs:
                    _put(out, at, low, 2)
                    _put(out, at + 2, end - first, 2)
                    at += 4
                elif found[number, MEMBERS] <= 4096:
                    for value in range(low, low + end - first + 1):
                        _put(out, at, value, 2)
                        at += 2
                else:
                    for value in range(low, low + end - first + 1):
                        out[at + value // 8] |= np.uint8(1 << (value % 8))
                first = end + 1


@njit(inline="always")
def _get(data, at, size):  # type: ignore[no-untyped-def]
    value = np.int64(0)
    for i in range(size):
        value |= np.int64(data[at + i]) << (8 * i)
    return value


@njit(inline="always")
def _read_set(data, start, end, number, runs, made):  # type: ignore[no-untyped-def]
    """Append the runs of the bitmap in data[start:end]; returns how many rows there are then, -1 where it is
    none that is known here."""
    if end - start < 8:
        return -1
    cookie = _get(data, start, 4)
    flags = np.int64(-1)
    if cookie == 12346:
        containers = _get(data, start + 4, 4)
        at = start + 8
    elif cookie & 0xFFFF == 12347:
        containers = (cookie >> 16) + 1
        flags = start + 4
        at = flags + (containers + 7) // 8
    else:
        return -1
    if containers < 1 or containers > _CONTAINERS or at + 4 * containers > end:
        return -1
    head = at
    at += 4 * containers
    if flags < 0 or containers >= 4:
        at += 4 * containers
    before = np.int64(-1)  # the last number that was read
    for i in range(containers):
        base = _get(data, head + 4 * i, 2) << 16
        members = _get(data, head + 4 * i + 2, 2) + 1
        if flags >= 0 and (data[flags + i // 8] >> (i % 8)) & 1:
            if at + 2 > end:
                return -1
            run_count = _get(data, at, 2)
            at += 2
            if at + 4 * run_count > end:
                return -1
            for _ in range(run_count):
                low = _get(data, at, 2)
                length = _get(data, at + 2, 2)
                at += 4
                members -= length + 1
                if base + low <= before or low + length > 0xFFFF or made >= runs.shape[0]:
                    return -1
                runs[made, SET] = number
                runs[made, FIRST] = base + low
                runs[made, LAST] = before = base + low + length
                made += 1
            if members != 0:
                return -1
        else:
            if members > 4096 or at + 2 * members > end:
                return -1
            for member in range(members):
                value = base + _get(data, at, 2)
                at += 2
                if value <= before:
                    return -1
                if member > 0 and value == before + 1:
                    runs[made - 1, LAST] = value
                else:
                    if made >= runs.shape[0]:
                        return -1
                    runs[made, SET] = number
                    runs[made, FIRST] = value
                    runs[made, LAST] = value
                    made += 1
                before = value
    return made if at == end else -1


@njit([types.int64(_READ_BYTES, _INT64S, _INT64S, _INT64S, _RUNS, _INT64S)], cache=True, nogil=True)
def read_sets(data, begins, ends, numbers, runs, unread):  # type: ignore[no-untyped-def]
    """Write the runs of bitmaps data[begins[i]:ends[i]] to `runs`, each under its number; returns how many.

    `runs` has room for a row for each LEAST_RUN_BYTES of the bitmaps. unread[i] is made 1 where the bytes are
    no bitmap that is known here; none of its runs is written.
    """
    made = np.int64(0)
    for each in range(begins.shape[0]):
        if begins[each] < 0 or ends[each] > data.shape[0]:
            unread[each] = 1
            continue
        found = _read_set(data, begins[each], ends[each], numbers[each], runs, made)
        if found < 0:
            unread[each] = 1
        else:
            made = found
    return made
