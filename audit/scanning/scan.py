"""Counting the records of fetched batches, without a Python step per record.

A fetched partition is a run of v2 batches. `broker.protocol.batch_kernels` walks their headers and gives each
a row of an index, the caller decompresses them, and the kernel here walks the records: it finds the `_mr`
header, reads stream, sequence and creation time, and files the record under a *group* (stream, window, offset
chunk, upper half of the sequence). Within a group, consecutive sequences grow one *run* in place, so
interleaved producers cost no more than one producer alone. Runs become roaring bitmaps once per fold, not
once per record.

Where content is compared, the kernel also sums the records' digests (`record_digest`; `content_digest`
defines them and is the oracle).

Called through `counting.CellCounter`. Pure: bytes in, rows of integers out.

Invariants:
- a group's first name is kept, and every record that carries another is counted;
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

from millrace.audit.contract.header import (
    FIXED_SIZE,
    HEADER_KEY,
    HEADER_VERSION,
    MAX_CREATED_MS,
    SEQUENCE_AT,
    STREAM_AT,
)
from millrace.audit.scanning.xxh64 import le64, xxh64
from millrace.broker.protocol.batch_kernels import (
    B_ATTRIBUTES,
    B_BASE_OFFSET,
    B_COUNT,
    B_END,
    B_LAST_OFFSET,
    B_MAGIC,
    B_MAX_MS,
    B_RECORDS,
)

KEY_1, KEY_2, KEY_3 = HEADER_KEY.encode()

MALFORMED = -1
"""B_MAGIC of a batch whose records could not be followed to its end"""

# Columns of a group.
G_STREAM, G_WINDOW, G_CHUNK, G_HIGH, G_COUNT, G_BYTES, G_FIRST_OFFSET, G_LAST_OFFSET = range(8)
G_FIRST_APPEND, G_LAST_APPEND, G_LAST_RUN, G_NAME_POSITION, G_NAME_SIZE = range(8, 13)
G_DIGEST, G_NO_DIGEST = 13, 14  # the sum, as a signed number; how many records it could not be made of
# The first name in the group as three words (`file_name`), how many records carry another, and the first of
# those. A name's position is -1 once the caller has read it.
G_NAME_LAST, G_NAME_FIRST, G_NAME_MIDDLE, G_OTHERS, G_OTHER_POSITION, G_OTHER_SIZE = range(15, 21)
GROUP_COLUMNS = 21

# Columns of a run: its group, and the low halves of its first and its last sequence.
R_GROUP, R_FIRST, R_LAST = range(3)

# Counters of one range.
S_GROUPS, S_RUNS, S_RECORDS, S_UNAUDITED, S_BAD_VERSION, S_BAD_HEADER, S_MALFORMED = range(7)
S_NAMES = 7  # names met in groups that had been made before: the caller reads them and sets it to 0
STATE_SIZE = 8
SMALLEST_RECORD = 7  # bytes

COUNT_ONLY = -1  # in G_HIGH: the producer does not number its records


_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
_TABLE2 = types.Array(types.int64, 2, "C")
_INT64S = types.Array(types.int64, 1, "C")
_INT32S = types.Array(types.int32, 1, "C")
_GROUP = types.Array(types.int64, 1, "C")  # a row of the groups


@njit(inline="always")
def _be64(buffer, position):  # type: ignore[no-untyped-def]
    # Written out, the compiler makes one load of it.
    at = np.uint64(position)
    return np.int64(
        np.uint64(buffer[at]) << np.uint64(56)
        | np.uint64(buffer[at + np.uint64(1)]) << np.uint64(48)
        | np.uint64(buffer[at + np.uint64(2)]) << np.uint64(40)
        | np.uint64(buffer[at + np.uint64(3)]) << np.uint64(32)
        | np.uint64(buffer[at + np.uint64(4)]) << np.uint64(24)
        | np.uint64(buffer[at + np.uint64(5)]) << np.uint64(16)
        | np.uint64(buffer[at + np.uint64(6)]) << np.uint64(8)
        | np.uint64(buffer[at + np.uint64(7)])
    )


@njit(inline="always")
def _name_middle(buffer, start, end):  # type: ignore[no-untyped-def]
    """The bytes of a long name that are neither its first nor its last eight, as one word: up to 24 bytes the
    name itself, above that a hash."""
    middle = np.uint64(0)
    at = start + 8
    while at < end - 8:
        middle = (middle ^ le64(buffer, np.uint64(at))) * np.uint64(0x9E3779B97F4A7C15)
        middle ^= middle >> np.uint64(32)
        at += 8
    return np.int64(middle)


@njit(inline="always")
def _name_last(buffer, end, size):  # type: ignore[no-untyped-def]
    """The last eight bytes of a name, or all of a shorter one. The header's fixed part makes sure that there
    are eight bytes to read."""
    return np.int64(le64(buffer, np.uint64(end - 8)) >> np.uint64(max(8 - size, 0) << 3))


@njit([types.void(_BYTES, types.int64, types.int64, _GROUP, _INT64S)], cache=True, nogil=True)
def file_name(buffer, start, size, group, state):  # type: ignore[no-untyped-def]
    """Keep the first name of a group, as words that outlive the buffer, or count a record with another."""
    if group[G_NAME_SIZE] != 0:
        if group[G_OTHERS] == 0:
            group[G_OTHER_POSITION] = start
            group[G_OTHER_SIZE] = size
            state[S_NAMES] += 1
        group[G_OTHERS] += 1
        return
    end = start + size
    group[G_NAME_POSITION] = start
    group[G_NAME_SIZE] = size
    group[G_NAME_LAST] = _name_last(buffer, end, size)
    if size >= 8:
        group[G_NAME_FIRST] = np.int64(le64(buffer, np.uint64(start)))
    if size > 16:
        group[G_NAME_MIDDLE] = _name_middle(buffer, start, end)
    state[S_NAMES] += 1


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
            groups[group, G_STREAM] == stream
            and groups[group, G_WINDOW] == window
            and groups[group, G_CHUNK] == chunk
            and groups[group, G_HIGH] == high
        ):
            return np.int64(group)
        slot = (slot + np.uint64(1)) & mask
    made = state[S_GROUPS]
    state[S_GROUPS] = made + 1
    table[slot] = made
    groups[made, G_STREAM] = stream
    groups[made, G_WINDOW] = window
    groups[made, G_CHUNK] = chunk
    groups[made, G_HIGH] = high
    groups[made, G_COUNT] = 0
    groups[made, G_BYTES] = 0
    groups[made, G_LAST_RUN] = -1
    groups[made, G_DIGEST] = 0
    groups[made, G_NAME_SIZE] = 0
    groups[made, G_NO_DIGEST] = 0
    groups[made, G_OTHERS] = 0
    groups[made, G_OTHER_SIZE] = 0
    return made


@njit(inline="always")
def _is_identity(buffer, name, size):  # type: ignore[no-untyped-def]
    """Whether a header's key, whose bytes are there, is that of the identity."""
    return size == 3 and buffer[name] == KEY_1 and buffer[name + 1] == KEY_2 and buffer[name + 2] == KEY_3


@njit(inline="always")
def _is_minimal(buffer, position, after):  # type: ignore[no-untyped-def]
    """Whether the varint [position, after) is as short as its value allows."""
    return after - position == 1 or buffer[np.uint64(after - 1)] != 0


@njit(
    [types.UniTuple(types.int64, 2)(_BYTES, types.int64, types.int64, types.int64, types.int64)],
    cache=True,
    nogil=True,
)
def record_digest(buffer, position, headers, end, sequence):  # type: ignore[no-untyped-def]
    """(digest, 1) of a record whose bytes the caller has checked; (0, 0) where there is none.

    `position` is that of the key's length, `headers` that of the header count. A record with lengths that are
    not written in the shortest way has none: whoever writes it again would write other bytes.
    """
    at = position
    for _ in range(2):
        size, after = _varint(buffer, at, end)
        if size < -1 or not _is_minimal(buffer, at, after):
            return np.int64(0), np.int64(0)
        at = after + max(size, 0)
    digest = xxh64(buffer, position, at, np.uint64(sequence))
    count, at = _varint(buffer, headers, end)
    for _ in range(count):
        name_size, name = _varint(buffer, at, end)
        size, content = _varint(buffer, name + name_size, end)
        after = content + max(size, 0)
        if not _is_identity(buffer, name, name_size):
            if (
                size < -1
                or not _is_minimal(buffer, at, name)
                or not _is_minimal(buffer, name + name_size, content)
            ):
                return np.int64(0), np.int64(0)
            digest = xxh64(buffer, at, after, digest)
        at = after
    return np.int64(digest), np.int64(1)


@njit(
    [
        types.int64(
            _BYTES, _TABLE2, types.int64, types.int64, types.int64, types.int64, types.int64, types.int64,
            types.boolean, _INT32S, _TABLE2, _TABLE2, _INT64S,
        )
    ],
    cache=True,
    nogil=True,
)  # fmt: skip
def count_records(  # type: ignore[no-untyped-def]
    buffer, index, first_batch, last_batch, from_offset, to_offset, window_ms, chunk_offsets,
    with_digest, table, groups, runs, state,
):  # fmt: skip
    """Count the records of batches [first_batch, last_batch) whose offset lies in [from_offset, to_offset).

    Returns the first batch not done: `last_batch`, or an earlier one when `groups` or `runs` could overflow
    within it (the caller folds or grows, then goes on). Batches whose B_MAGIC is not 2 are skipped; those
    that turn out to be malformed get B_MAGIC MALFORMED.
    `with_digest`: sum the content digests too.
    """
    last_group = np.int64(-1)
    last_stream = np.int64(0)
    last_high = np.int64(0)
    window_start = np.int64(0)
    window_end = np.int64(-1)  # an empty window: the first record computes its own
    chunk = np.int64(-1)
    chunk_end = np.int64(-1)
    for batch in range(first_batch, last_batch):
        if index[batch, B_MAGIC] != 2:
            continue
        record_count = index[batch, B_COUNT]
        size_limit = (index[batch, B_END] - index[batch, B_RECORDS]) // SMALLEST_RECORD + 1
        most = min(record_count, size_limit)
        if state[S_GROUPS] + most > groups.shape[0] or state[S_RUNS] + most > runs.shape[0]:
            return np.int64(batch)
        position = index[batch, B_RECORDS]
        batch_end = index[batch, B_END]
        base_offset = index[batch, B_BASE_OFFSET]
        append_ms = index[batch, B_MAX_MS] if index[batch, B_ATTRIBUTES] & 8 else np.int64(-1)
        if index[batch, B_LAST_OFFSET] < from_offset or base_offset >= to_offset:
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
            content_start = p
            key_size, p = _varint(buffer, p, end)
            if p < 0 or key_size > end - p:
                break
            p += max(key_size, 0)
            value_size, p = _varint(buffer, p, end)
            if p < 0 or value_size > end - p:
                break
            p += max(value_size, 0)
            headers_start = p
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
                if _is_identity(buffer, name, name_size):
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
            state[S_RECORDS] += 1
            if found < 0:
                state[S_UNAUDITED] += 1
                continue
            if found_size < 1 or buffer[found] != HEADER_VERSION:
                if found_size < 1:
                    state[S_BAD_HEADER] += 1
                else:
                    state[S_BAD_VERSION] += 1
                continue
            if found_size < FIXED_SIZE:
                state[S_BAD_HEADER] += 1
                continue
            stream = _be64(buffer, found + STREAM_AT)
            sequence = _be64(buffer, found + SEQUENCE_AT)
            created_ms = _be64(buffer, found + FIXED_SIZE - 8) & np.int64(MAX_CREATED_MS)
            if sequence < 0:  # 2^63 and above: no producer counts that far
                state[S_BAD_HEADER] += 1
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
            name_size = found_size - FIXED_SIZE
            if name_size != 0:  # none: `identity: compact`
                name = found + FIXED_SIZE
                same = (
                    name_size == group[G_NAME_SIZE]
                    and _name_last(buffer, name + name_size, name_size) == group[G_NAME_LAST]
                )
                if same and name_size > 8:
                    same = np.int64(le64(buffer, np.uint64(name))) == group[G_NAME_FIRST] and (
                        name_size <= 16
                        or _name_middle(buffer, name, name + name_size) == group[G_NAME_MIDDLE]
                    )
                if not same:
                    file_name(buffer, name, name_size, group, state)
            if group[G_COUNT] == 0:
                group[G_FIRST_OFFSET] = offset
                group[G_LAST_OFFSET] = offset
                group[G_FIRST_APPEND] = append_ms
                group[G_LAST_APPEND] = append_ms
            elif append_ms > group[G_LAST_APPEND]:
                group[G_LAST_APPEND] = append_ms
            elif 0 <= append_ms < group[G_FIRST_APPEND]:
                # Batches do not come in order: compressed ones come after the others.
                group[G_FIRST_APPEND] = append_ms
            group[G_COUNT] += 1
            group[G_BYTES] += max(value_size, 0)
            if offset < group[G_FIRST_OFFSET]:
                group[G_FIRST_OFFSET] = offset
            if offset > group[G_LAST_OFFSET]:
                group[G_LAST_OFFSET] = offset
            if with_digest:
                digest, known = record_digest(buffer, content_start, headers_start, end, sequence)
                group[G_DIGEST] += digest
                group[G_NO_DIGEST] += 1 - known
            if sequence == 0:
                continue
            low = sequence & np.int64(0xFFFFFFFF)
            run = group[G_LAST_RUN]
            if run >= 0 and runs[run, R_LAST] + 1 == low:
                runs[run, R_LAST] = low
            else:
                run = state[S_RUNS]
                state[S_RUNS] = run + 1
                runs[run, R_GROUP] = last_group
                runs[run, R_FIRST] = low
                runs[run, R_LAST] = low
                group[G_LAST_RUN] = run
        if done < record_count or position != batch_end:
            state[S_MALFORMED] += 1
            index[batch, B_MAGIC] = -1
    return np.int64(last_batch)


@njit([types.void(_TABLE2, types.int64, _INT32S)], cache=True, nogil=True)
def rebuild_table(groups, made, table):  # type: ignore[no-untyped-def]
    """Hash the first `made` groups into an emptied `table` (a power of two, at least twice as many slots)."""
    mask = np.uint64(table.shape[0] - 1)
    for group in range(made):
        slot = (
            _mix(
                groups[group, G_STREAM],
                groups[group, G_WINDOW],
                groups[group, G_CHUNK],
                groups[group, G_HIGH],
            )
            & mask
        )
        while table[slot] >= 0:
            slot = (slot + np.uint64(1)) & mask
        table[slot] = group
