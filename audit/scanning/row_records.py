"""Rows of a table written back as the records that they were, so that one kernel counts both.

Called by `connector_reader` for what Spark's own Kafka connector yields. The counting rules (which header is
the identity, what cannot be trusted, the content digest) are in the compiled scan alone; a second set of
them over columns would drift. So the rows' columns become the bytes of v2 records again (KIP-98: varint
sizes, key, value, headers), at the cost of one copy, and the scan counts them like a fetched batch. Pure.

What must stay true: the bytes are those that a producer wrote, for the fields that are given. Without
`content` keys are left out and of a value only its size is true (the bytes are whatever the memory held):
counting without a digest looks at nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numba import njit, types
from numpy.typing import NDArray

from millrace.broker.protocol.batch_kernels import (
    B_ATTRIBUTES,
    B_BASE_OFFSET,
    B_COUNT,
    B_END,
    B_LAST_OFFSET,
    B_MAGIC,
    B_MAX_MS,
    B_POSITION,
    B_RECORDS,
    BATCH_COLUMNS,
)

LOG_APPEND_TIME = 8  # the bit of a batch's attributes
_MOST_DELTA = 1 << 31  # a record's offset delta is 32 bits wide
_RECORD_OVERHEAD = 40  # varints of one record at their longest: length, time, offset, sizes, header count
_HEADER_OVERHEAD = 10

_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
_OUT = types.Array(types.uint8, 1, "C")
_INT64S = types.Array(types.int64, 1, "C")


@dataclass(frozen=True, slots=True)
class RowRecords:
    """Records sections one after the other in `buffer`, described by `index` as in `batch_kernels`."""

    buffer: NDArray[np.uint8]
    index: NDArray[np.int64]


def records_of(rows: pa.RecordBatch, *, content: bool) -> RowRecords:
    """The rows of one partition, in the order of their offsets, as sections of records.

    Columns: offset, append_ms (-1 where the topic keeps creation times), key, value, value_size (-1 for
    null), headers (list of {key, value}). `content`: key and value are given, else only the value's size is.
    """
    offsets = _int64(rows.column("offset"))
    append_ms = _int64(rows.column("append_ms"))
    keys, values = (_Bytes.of(rows.column(name), len(offsets)) for name in ("key", "value"))
    value_sizes = values.sizes if content else _int64(rows.column("value_size"))
    firsts, names, contents = _headers(rows.column("headers"), len(offsets))
    given = len(keys.data) + len(names.data) + len(contents.data)
    room = given + int(np.maximum(value_sizes, 0).sum())
    room += len(offsets) * _RECORD_OVERHEAD + len(names.sizes) * _HEADER_OVERHEAD
    out = np.empty(room, np.uint8)
    starts = np.empty(len(offsets) + 1, np.int64)
    sections = _section_starts(offsets, append_ms)
    bases = np.repeat(offsets[sections[:-1]], np.diff(sections)) if len(offsets) else offsets
    written = write_records(
        offsets - bases, keys.sizes, keys.starts, keys.data, value_sizes, values.starts, values.data, content,
        firsts, names.sizes, names.starts, names.data, contents.sizes, contents.starts, contents.data,
        out, starts,
    )  # fmt: skip
    if written < 0:
        raise ValueError("rows do not fit the room that their sizes ask for")
    index = np.zeros((len(sections) - 1, BATCH_COLUMNS), np.int64)
    firsts_of, ends_of = sections[:-1], sections[1:]
    index[:, B_POSITION] = index[:, B_RECORDS] = starts[firsts_of]
    index[:, B_END] = starts[ends_of]
    index[:, B_BASE_OFFSET] = offsets[firsts_of]
    index[:, B_LAST_OFFSET] = offsets[ends_of - 1]
    index[:, B_ATTRIBUTES] = np.where(append_ms[firsts_of] >= 0, LOG_APPEND_TIME, 0)
    index[:, B_MAX_MS] = append_ms[firsts_of]
    index[:, B_COUNT] = ends_of - firsts_of
    index[:, B_MAGIC] = 2
    buffer = out[:written]
    buffer.flags.writeable = False
    return RowRecords(buffer, index)


def _section_starts(offsets: NDArray[np.int64], append_ms: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where a new batch begins: where the append time changes, which is one of the whole batch."""
    changes = np.flatnonzero(np.diff(append_ms) != 0) + 1
    starts = np.concatenate(([0], changes)) if len(offsets) else np.zeros(0, np.int64)
    wide = offsets[-1] - offsets[0] >= _MOST_DELTA if len(offsets) else False
    if wide:
        starts = np.arange(len(offsets))
    return np.append(starts, len(offsets)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class _Bytes:
    """A binary column as sizes (-1 for null), positions and one buffer."""

    sizes: NDArray[np.int64]
    starts: NDArray[np.int64]
    data: NDArray[np.uint8]

    @classmethod
    def of(cls, column: pa.Array, count: int) -> _Bytes:
        if len(column) != count or column.null_count == count:
            return cls(np.full(count, -1, np.int64), np.zeros(count, np.int64), np.zeros(0, np.uint8))
        column = column.cast(pa.large_binary())
        bounds = np.frombuffer(column.buffers()[1], np.int64)[column.offset :][: count + 1]
        held = column.buffers()[2]
        data = np.frombuffer(held, np.uint8) if held is not None else np.zeros(0, np.uint8)
        sizes = np.diff(bounds)
        if column.null_count:
            sizes = np.where(column.is_null().to_numpy(zero_copy_only=False), -1, sizes)
        starts, sizes = np.ascontiguousarray(bounds[:-1]), np.ascontiguousarray(sizes)
        data.flags.writeable = False
        return cls(sizes.astype(np.int64), starts.astype(np.int64), data)


def _headers(column: pa.ListArray, count: int) -> tuple[NDArray[np.int64], _Bytes, _Bytes]:
    """(the first header of each row, names, values); a null list is an empty one."""
    lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    firsts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    flat = column.flatten()
    names = _Bytes.of(flat.field("key"), int(firsts[-1]))
    return firsts, names, _Bytes.of(flat.field("value"), int(firsts[-1]))


def _int64(column: pa.Array) -> NDArray[np.int64]:
    values = column.fill_null(-1).to_numpy(zero_copy_only=False)
    return np.ascontiguousarray(values, np.int64)


@njit(inline="always")
def _varint_size(value):  # type: ignore[no-untyped-def]
    raw = (np.uint64(value) << np.uint64(1)) ^ np.uint64(value >> np.int64(63))
    size = np.int64(1)
    while raw >= np.uint64(128):
        raw >>= np.uint64(7)
        size += 1
    return size


@njit(inline="always")
def _write_varint(out, position, value):  # type: ignore[no-untyped-def]
    """Zigzag varint; returns the next position. The caller made sure that there is room."""
    raw = (np.uint64(value) << np.uint64(1)) ^ np.uint64(value >> np.int64(63))
    while raw >= np.uint64(128):
        out[position] = np.uint8((raw & np.uint64(127)) | np.uint64(128))
        raw >>= np.uint64(7)
        position += 1
    out[position] = np.uint8(raw)
    return position + 1


@njit(inline="always")
def _write_bytes(out, position, data, start, size):  # type: ignore[no-untyped-def]
    for i in range(size):
        out[position + i] = data[start + i]
    return position + size


@njit(
    [
        types.int64(
            _INT64S, _INT64S, _INT64S, _BYTES, _INT64S, _INT64S, _BYTES, types.boolean,
            _INT64S, _INT64S, _INT64S, _BYTES, _INT64S, _INT64S, _BYTES, _OUT, _INT64S,
        )
    ],
    cache=True,
    nogil=True,
)  # fmt: skip
def write_records(  # type: ignore[no-untyped-def]
    deltas, key_sizes, key_starts, keys, value_sizes, value_starts, values, content,
    header_firsts, name_sizes, name_starts, names, held_sizes, held_starts, held,
    out, starts,
):  # fmt: skip
    """Write one record a row into `out`, its position into `starts` (one more than rows).

    Returns the bytes written, or -1 where sizes and positions do not fit the buffers.
    """
    position = np.int64(0)
    for row in range(deltas.shape[0]):
        starts[row] = position
        first, last = header_firsts[row], header_firsts[row + 1]
        key_size, value_size = key_sizes[row], value_sizes[row]
        if not content:
            key_size = np.int64(-1)
        size = np.int64(2) + _varint_size(deltas[row])  # attributes, and a time that nobody reads
        size += _varint_size(key_size) + max(key_size, 0) + _varint_size(value_size) + max(value_size, 0)
        size += _varint_size(last - first)
        if key_size > 0 and key_starts[row] + key_size > keys.shape[0]:
            return np.int64(-1)
        if content and value_size > 0 and value_starts[row] + value_size > values.shape[0]:
            return np.int64(-1)
        for h in range(first, last):
            size += _varint_size(name_sizes[h]) + max(name_sizes[h], 0)
            size += _varint_size(held_sizes[h]) + max(held_sizes[h], 0)
            if name_sizes[h] > 0 and name_starts[h] + name_sizes[h] > names.shape[0]:
                return np.int64(-1)
            if held_sizes[h] > 0 and held_starts[h] + held_sizes[h] > held.shape[0]:
                return np.int64(-1)
        if position + _varint_size(size) + size > out.shape[0]:
            return np.int64(-1)
        position = _write_varint(out, position, size)
        out[position] = 0
        out[position + 1] = 0
        position = _write_varint(out, position + 2, deltas[row])
        position = _write_varint(out, position, key_size)
        if key_size > 0:
            position = _write_bytes(out, position, keys, key_starts[row], key_size)
        position = _write_varint(out, position, value_size)
        if content and value_size > 0:
            position = _write_bytes(out, position, values, value_starts[row], value_size)
        else:
            position += max(value_size, 0)
        position = _write_varint(out, position, last - first)
        for h in range(first, last):
            position = _write_varint(out, position, name_sizes[h])
            position = _write_bytes(out, position, names, name_starts[h], max(name_sizes[h], 0))
            position = _write_varint(out, position, held_sizes[h])
            if held_sizes[h] > 0:
                position = _write_bytes(out, position, held, held_starts[h], held_sizes[h])
    starts[deltas.shape[0]] = position
    return position
