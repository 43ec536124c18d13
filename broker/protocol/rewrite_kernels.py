"""The compiled loop that writes the records of one or several batches again, as one batch (numba).

Called by `rewrite.py` alone. It copies keys, values and headers as they are, numbers the records 0, 1, 2 …
and counts timestamps from the first of them. The same rules as in `record_kernels.py` hold: an explicit
signature, no read or write outside a buffer whatever the bytes say, nothing allocated.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from millrace.broker.protocol.record_kernels import (
    BAD_HEADER_COUNT,
    BAD_LENGTH,
    BAD_OFFSET_DELTA,
    BAD_VARINT,
    MISSING_HEADER_KEY,
    OK,
    TRAILING_BYTES,
    TRAILING_BYTES_IN_RECORD,
    _nullable,
    _varint32,
    _varint64,
)

# Further codes beside those of `record_kernels`; neither can come from what a batch says.
OUT_IS_FULL = 100
BAD_SECTION = 101

# A row for each batch whose records are read.
S_START, S_END, S_RECORDS, S_BASE_OFFSET, S_LAST_OFFSET = range(5)  # bytes in the buffer; header's fields
S_BASE_MS, S_APPEND_MS, S_IS_APPEND_TIME = range(5, 8)  # append time: every record has S_APPEND_MS
S_FROM_OFFSET = 8  # records before it are not wanted
SECTION_COLUMNS = 9

_intrinsic: Any = intrinsic  # what it makes is called inside kernels only, with one argument less

_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
_OUT = types.Array(types.uint8, 1, "C")
_TABLE = types.Array(types.int64, 2, "C")
_RESULT = types.UniTuple(types.int64, 8)


@_intrinsic
def _copy(_typing: Any, out: Any, out_start: Any, buffer: Any, start: Any, size: Any) -> Any:
    """memcpy; the caller has checked that both stretches are there. A loop over bytes takes ten times as
    long for records of a few hundred bytes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to = cgutils.create_struct_proxy(signature.args[0])(context, builder, arguments[0])
        source = cgutils.create_struct_proxy(signature.args[2])(context, builder, arguments[2])
        cgutils.raw_memcpy(
            builder,
            builder.gep(to.data, [arguments[1]]),
            builder.gep(source.data, [arguments[3]]),
            arguments[4],
            1,
        )
        return context.get_dummy_value()

    return types.void(out, types.int64, buffer, types.int64, types.int64), generate


@njit(types.int64(types.int64), cache=True, nogil=True, inline="always")
def _varint_size(value: Any) -> Any:
    rest = np.uint64((value << 1) ^ (value >> 63)) >> np.uint64(7)
    size = np.int64(1)
    while rest:
        size += 1
        rest >>= np.uint64(7)
    return size


@njit(types.int64(_OUT, types.int64, types.int64), cache=True, nogil=True, inline="always")
def _put_varint(out: Any, position: Any, value: Any) -> Any:
    rest = np.uint64((value << 1) ^ (value >> 63))
    while rest >= np.uint64(0x80):
        out[position] = np.uint8((rest & np.uint64(0x7F)) | np.uint64(0x80))
        rest >>= np.uint64(7)
        position += 1
    out[position] = np.uint8(rest)
    return position + 1


@njit(types.UniTuple(types.int64, 2)(_TABLE, types.int64), cache=True, nogil=True)
def measure(sections: Any, buffer_size: Any) -> Any:
    """(size of all records in bytes, number of records), or (-1, row) for a section that cannot be."""
    size = np.int64(0)
    record_count = np.int64(0)
    for section in range(sections.shape[0]):
        start = sections[section, S_START]
        end = sections[section, S_END]
        count = sections[section, S_RECORDS]
        if start < 0 or end < start or end > buffer_size or count < 0 or count > (end - start) // 7:
            return -1, section
        size += end - start
        record_count += count
    return size, record_count


@njit(
    _RESULT(_BYTES, _TABLE, types.int64, types.int64, _OUT, types.int64, _TABLE),
    cache=True,
    nogil=True,
)
def rewrite(buffer: Any, sections: Any, first: Any, last: Any, out: Any, out_start: Any, runs: Any) -> Any:
    """Writes the wanted records with places `[first, last)` to `out` from `out_start` on.

    All sections are read to their ends and checked, whatever is written. Offsets must ascend and lie within
    what their header says. `runs` gets the offsets of what was written: rows of (first offset, how many);
    it needs a row for each record at most.

    Returns (status, section and record that it is of, how many records were wanted, where the output ends,
    time of the first record written, greatest time, how many rows of `runs`).
    """
    wanted = np.int64(0)
    written = np.int64(out_start)
    run_count = np.int64(0)
    base_ms = np.int64(0)
    greatest_ms = np.int64(0)
    for section in range(sections.shape[0]):
        position = sections[section, S_START]
        end = sections[section, S_END]
        record_count = sections[section, S_RECORDS]
        if position < 0 or end < position or end > len(buffer):
            return BAD_SECTION, section, 0, wanted, written, base_ms, greatest_ms, run_count
        base_offset = sections[section, S_BASE_OFFSET]
        last_offset = sections[section, S_LAST_OFFSET]
        section_base_ms = sections[section, S_BASE_MS]
        append_ms = sections[section, S_APPEND_MS]
        is_append_time = sections[section, S_IS_APPEND_TIME] != 0
        from_offset = sections[section, S_FROM_OFFSET]
        least_offset = base_offset
        status = np.int64(OK)
        index = np.int64(0)
        if record_count < 0:
            status = np.int64(BAD_LENGTH)
        while status == OK and index < record_count:
            length, position = _varint32(buffer, position, end)
            if position < 0:
                status = np.int64(BAD_VARINT)
                break
            if length < 1 or length > end - position:
                status = np.int64(BAD_LENGTH)
                break
            record_end = position + length
            attributes = buffer[position]
            timestamp_delta, position = _varint64(buffer, position + 1, record_end)
            if position < 0:
                status = np.int64(BAD_VARINT)
                break
            offset_delta, position = _varint32(buffer, position, record_end)
            if position < 0:
                status = np.int64(BAD_VARINT)
                break
            offset = base_offset + offset_delta
            if offset < least_offset or offset > last_offset:
                status = np.int64(BAD_OFFSET_DELTA)
                break
            least_offset = offset + 1
            tail = position
            size, position = _nullable(buffer, position, record_end)
            if position < 0:
                status = np.int64(BAD_LENGTH)
                break
            position += max(size, 0)
            size, position = _nullable(buffer, position, record_end)
            if position < 0:
                status = np.int64(BAD_LENGTH)
                break
            position += max(size, 0)
            header_count, position = _varint32(buffer, position, record_end)
            if position < 0 or header_count < 0:
                status = np.int64(BAD_HEADER_COUNT)
                break
            for _ in range(header_count):
                size, position = _nullable(buffer, position, record_end)
                if position < 0:
                    status = np.int64(BAD_LENGTH)
                    break
                if size < 0:
                    status = np.int64(MISSING_HEADER_KEY)
                    break
                position += size
                size, position = _nullable(buffer, position, record_end)
                if position < 0:
                    status = np.int64(BAD_LENGTH)
                    break
                position += max(size, 0)
            if status != OK:
                break
            if position != record_end:
                status = np.int64(TRAILING_BYTES_IN_RECORD)
                break
            if offset >= from_offset:
                if first <= wanted and wanted < last:
                    timestamp = append_ms if is_append_time else section_base_ms + timestamp_delta
                    number = wanted - first
                    if number == 0:
                        base_ms = timestamp
                        greatest_ms = timestamp
                    elif timestamp > greatest_ms:
                        greatest_ms = timestamp
                    delta = timestamp - base_ms
                    tail_size = record_end - tail
                    body_size = 1 + _varint_size(delta) + _varint_size(number) + tail_size
                    if _varint_size(body_size) + body_size > len(out) - written:
                        status = np.int64(OUT_IS_FULL)
                        break
                    if run_count > 0 and runs[run_count - 1, 0] + runs[run_count - 1, 1] == offset:
                        runs[run_count - 1, 1] += 1
                    else:
                        if run_count == runs.shape[0]:
                            status = np.int64(OUT_IS_FULL)
                            break
                        runs[run_count, 0] = offset
                        runs[run_count, 1] = 1
                        run_count += 1
                    written = _put_varint(out, written, body_size)
                    out[written] = attributes
                    written = _put_varint(out, written + 1, delta)
                    written = _put_varint(out, written, number)
                    _copy(out, written, buffer, tail, tail_size)
                    written += tail_size
                wanted += 1
            index += 1
        if status == OK and position != end:
            status = np.int64(TRAILING_BYTES)
        if status != OK:
            return status, section, index, wanted, written, base_ms, greatest_ms, run_count
    return OK, sections.shape[0], 0, wanted, written, base_ms, greatest_ms, run_count
