"""Counting the records of fetched batches, without a Python step per record.

A fetched partition is a run of v2 batches. `index_batches` walks their headers, the caller verifies and
decompresses them, and the kernel here walks the records: it finds the `_mr` header, reads stream, sequence
and creation time, and files the record under a *group* (stream, window, offset chunk, upper half of the
sequence). Within a group, consecutive sequences grow one *run* in place, so interleaved producers cost no
more than one producer alone. Runs become roaring bitmaps once per fold, not once per record.

Called through `counting.CellCounter`. Pure: bytes in, rows of integers out.

Invariants:
- every read of the buffer is bounds-checked inside the kernel: a lying length ends the batch, counted as
  malformed, and never reads past the batch's own end;
- the kernel stops *before* a batch that could overflow its tables, so a batch is counted whole or not at all.

Record layout (KIP-98): varint length, int8 attributes, varlong timestamp delta, varint offset delta, varint
key size, key, varint value size, value, varint header count, {varint key size, key, varint value size,
value}. The `_mr` header's own layout is in `header`.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types

# Columns of the batch index written by `index_batches`.
B_POSITION, B_RECORDS, B_END, B_BASE_OFFSET, B_ATTRIBUTES, B_BASE_MS, B_MAX_MS = range(7)
B_PRODUCER_ID, B_COUNT, B_LAST_OFFSET, B_CRC, B_MAGIC = range(7, 12)
BATCH_COLUMNS = 12

# Columns of a group.
G_STREAM, G_WINDOW, G_CHUNK, G_HIGH, G_COUNT, G_BYTES, G_FIRST_OFFSET, G_LAST_OFFSET = range(8)
G_FIRST_APPEND, G_LAST_APPEND, G_LAST_RUN, G_NAME_POSITION, G_NAME_SIZE = range(8, 13)
GROUP_COLUMNS = 13

# Counters of one range.
S_GROUPS, S_RUNS, S_RECORDS, S_UNAUDITED, S_BAD_VERSION, S_BAD_HEADER, S_MALFORMED = range(7)
STATE_SIZE = 7

COUNT_ONLY = -1  # in G_HIGH: the producer does not number its records
NO_APPEND_TIME = -1  # the topic keeps creation times, the broker's append time is not in the log

HEADER_VERSION = 1
HEADER_FIXED_SIZE = 23  # version 1, stream 8, sequence 8, creation time 6; the name follows

_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
_TABLE2 = types.Array(types.int64, 2, "C")
_INT64S = types.Array(types.int64, 1, "C")
_INT32S = types.Array(types.int32, 1, "C")


@njit(inline="always")
def _be(buffer, position, size):  # type: ignore[no-untyped-def]
    # An unsigned index spares the test for a negative one at every byte.
    at = np.uint64(position)
    value = np.uint64(0)
    for i in range(size):
        value = (value << np.uint64(8)) | np.uint64(buffer[at + np.uint64(i)])
    return np.int64(value)


@njit(inline="always")
def _varint(buffer, position, end):  # type: ignore[no-untyped-def]
    """Zigzag varint at `position`: (value, next position), next position -1 when it does not fit."""
    if position < end:
        first = buffer[np.uint64(position)]
        if first < 128:
            return np.int64(first >> 1) ^ -np.int64(first & 1), position + 1
    raw = np.uint64(0)
    shift = np.uint64(0)
    while position < end and shift < 70:
        byte = buffer[np.uint64(position)]
        position += 1
        raw |= np.uint64(byte & 0x7F) << shift
        if byte < 128:
            return np.int64(raw >> np.uint64(1)) ^ -np.int64(raw & np.uint64(1)), position
        shift += np.uint64(7)
    return np.int64(0), np.int64(-1)


@njit([types.int64(_BYTES, _TABLE2)], cache=True, nogil=True)
def index_batches(buffer, index):  # type: ignore[no-untyped-def]
    """Fill `index` with one row per whole batch in `buffer`; returns how many.

    A trailing batch that a fetch cut off ends the walk. Old message sets (magic 0 and 1) get a row with their
    magic and nothing else: the caller counts them as untrusted.
    """
    position = np.int64(0)
    count = np.int64(0)
    size = np.int64(buffer.shape[0])
    while position + 61 <= size and count < index.shape[0]:
        length = _be(buffer, position + 8, 4)
        end = position + 12 + length
        if length < 49 or end > size:
            break
        base_offset = _be(buffer, position, 8)
        index[count, 0] = position
        index[count, 1] = position + 61
        index[count, 2] = end
        index[count, 3] = base_offset
        index[count, 4] = _be(buffer, position + 21, 2)
        index[count, 5] = _be(buffer, position + 27, 8)
        index[count, 6] = _be(buffer, position + 35, 8)
        index[count, 7] = _be(buffer, position + 43, 8)
        index[count, 8] = _be(buffer, position + 57, 4)
        index[count, 9] = base_offset + _be(buffer, position + 23, 4)
        index[count, 10] = _be(buffer, position + 17, 4)
        index[count, 11] = buffer[position + 16]
        count += 1
        position = end
    return count


@njit(inline="always")
def _mix(stream, window, chunk, high):  # type: ignore[no-untyped-def]
    mixed = np.uint64(stream) ^ (np.uint64(window) * np.uint64(0x9E3779B97F4A7C15))
    mixed ^= np.uint64(chunk) * np.uint64(0xC2B2AE3D27D4EB4F) ^ np.uint64(high) * np.uint64(
        0x165667B19E3779F9
    )
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return mixed ^ (mixed >> np.uint64(32))


@njit(inline="always")
def _find_group(groups, table, state, stream, window, chunk, high):  # type: ignore[no-untyped-def]
    """Index of the group, made (with G_COUNT 0) if it is new. The caller made sure that there is room."""
    mask = np.uint64(table.shape[0] - 1)
    slot = _mix(stream, window, chunk, high) & mask
    while True:
        group = table[slot]
        if group < 0:
            break
        if (
            groups[group, 0] == stream
            and groups[group, 1] == window
            and groups[group, 2] == chunk
            and groups[group, 3] == high
        ):
            return np.int64(group)
        slot = (slot + np.uint64(1)) & mask
    made = state[0]
    state[0] = made + 1
    table[slot] = made
    groups[made, 0] = stream
    groups[made, 1] = window
    groups[made, 2] = chunk
    groups[made, 3] = high
    groups[made, 4] = 0
    groups[made, 5] = 0
    groups[made, 10] = -1
    return made


@njit(
    [
        types.int64(
            _BYTES, _TABLE2, types.int64, types.int64, types.int64, types.int64, types.int64, types.int64,
            _INT32S, _TABLE2, _TABLE2, _INT64S,
        )
    ],
    cache=True,
    nogil=True,
)  # fmt: skip
def count_records(  # type: ignore[no-untyped-def]
    buffer, index, first_batch, last_batch, from_offset, to_offset, window_ms, chunk_offsets,
    table, groups, runs, state,
):  # fmt: skip
    """Count the records of batches [first_batch, last_batch) whose offset lies in [from_offset, to_offset).

    Returns the first batch not done: `last_batch`, or an earlier one when `groups` or `runs` could overflow
    within it (the caller folds or grows, then goes on). Batches whose B_MAGIC is not 2 are skipped.
    """
    last_group = np.int64(-1)
    last_stream = np.int64(0)
    last_high = np.int64(0)
    window_start = np.int64(0)
    window_end = np.int64(-1)  # an empty window: the first record computes its own
    chunk = np.int64(-1)
    chunk_end = np.int64(-1)
    for batch in range(first_batch, last_batch):
        if index[batch, 11] != 2:
            continue
        record_count = index[batch, 8]
        size_limit = (index[batch, 2] - index[batch, 1]) // 7 + 1  # no record is smaller than 7 bytes
        most = min(record_count, size_limit)
        if state[0] + most > groups.shape[0] or state[1] + most > runs.shape[0]:
            return np.int64(batch)
        position = index[batch, 1]
        batch_end = index[batch, 2]
        base_offset = index[batch, 3]
        append_ms = index[batch, 6] if index[batch, 4] & 8 else np.int64(-1)
        if index[batch, 9] < from_offset or base_offset >= to_offset:
            continue
        done = np.int64(0)
        while done < record_count:
            length, body = _varint(buffer, position, batch_end)
            if body < 0 or length < 6 or length > batch_end - body:
                break
            end = body + length
            _, p = _varint(buffer, body + 1, end)
            if p < 0:
                break
            offset_delta, p = _varint(buffer, p, end)
            if p < 0:
                break
            key_size, p = _varint(buffer, p, end)
            if p < 0 or key_size > end - p:
                break
            p += max(key_size, 0)
            value_size, p = _varint(buffer, p, end)
            if p < 0 or value_size > end - p:
                break
            p += max(value_size, 0)
            header_count, p = _varint(buffer, p, end)
            if p < 0 or header_count < 0:
                break
            found = np.int64(-1)
            found_size = np.int64(0)
            bad = False
            for _h in range(header_count):
                name_size, p = _varint(buffer, p, end)
                if p < 0 or name_size < 0 or name_size > end - p:
                    bad = True
                    break
                name = p
                p += name_size
                content_size, p = _varint(buffer, p, end)
                if p < 0 or content_size > end - p:
                    bad = True
                    break
                if (
                    name_size == 3
                    and buffer[name] == 95
                    and buffer[name + 1] == 109
                    and buffer[name + 2] == 114
                ):
                    found = p  # the last one wins: a re-publisher stamps behind the headers it copied
                    found_size = content_size
                p += max(content_size, 0)
            if bad or p != end:
                break
            position = end
            done += 1
            offset = base_offset + offset_delta
            if offset < from_offset or offset >= to_offset:
                continue
            state[2] += 1
            if found < 0:
                state[3] += 1
                continue
            if found_size < 1 or buffer[found] != 1:
                if found_size < 1:
                    state[5] += 1
                else:
                    state[4] += 1
                continue
            if found_size < 23:
                state[5] += 1
                continue
            stream = _be(buffer, found + 1, 8)
            sequence = _be(buffer, found + 9, 8)
            created_ms = _be(buffer, found + 17, 6)
            if sequence < 0:  # 2^63 and above: no producer counts that far
                state[5] += 1
                continue
            if created_ms < window_start or created_ms >= window_end:
                window_start = created_ms - created_ms % window_ms
                window_end = window_start + window_ms
                last_group = np.int64(-1)
            if offset >= chunk_end or offset < chunk * chunk_offsets:
                chunk = offset // chunk_offsets
                chunk_end = (chunk + 1) * chunk_offsets
                last_group = np.int64(-1)
            high = sequence >> np.int64(32) if sequence > 0 else np.int64(-1)
            if last_group < 0 or stream != last_stream or high != last_high:
                last_group = _find_group(groups, table, state, stream, window_start, chunk, high)
                last_stream = stream
                last_high = high
            group = groups[last_group]
            if group[4] == 0:
                group[6] = offset
                group[7] = offset
                group[8] = append_ms
                group[9] = append_ms
                group[11] = found + 23
                group[12] = found_size - 23
            elif append_ms > group[9]:
                group[9] = append_ms
            group[4] += 1
            group[5] += max(value_size, 0)
            if offset < group[6]:
                group[6] = offset
            if offset > group[7]:
                group[7] = offset
            if sequence == 0:
                continue
            low = sequence & np.int64(0xFFFFFFFF)
            run = group[10]
            if run >= 0 and runs[run, 2] + 1 == low:
                runs[run, 2] = low
            else:
                run = state[1]
                state[1] = run + 1
                runs[run, 0] = last_group
                runs[run, 1] = low
                runs[run, 2] = low
                group[10] = run
        if done < record_count or position != batch_end:
            state[6] += 1
    return np.int64(last_batch)


@njit([types.void(_TABLE2, types.int64, _INT32S)], cache=True, nogil=True)
def rebuild_table(groups, made, table):  # type: ignore[no-untyped-def]
    """Hash the first `made` groups into an emptied `table` (a power of two, at least twice as many slots)."""
    mask = np.uint64(table.shape[0] - 1)
    for group in range(made):
        slot = _mix(groups[group, 0], groups[group, 1], groups[group, 2], groups[group, 3]) & mask
        while table[slot] >= 0:
            slot = (slot + np.uint64(1)) & mask
        table[slot] = group


@njit(
    [types.void(_TABLE2, types.int64, types.int64, types.Array(types.uint32, 1, "C"))], cache=True, nogil=True
)
def expand_runs(runs, first, last, out):  # type: ignore[no-untyped-def]
    """Write every sequence of runs [first, last) to `out`, one after the other."""
    written = 0
    for row in range(first, last):
        for value in range(runs[row, 1], runs[row, 2] + 1):
            out[written] = value
            written += 1
