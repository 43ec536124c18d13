"""One compiled walk over the headers of a fetch answer: which batch takes which path (numba).

Called by `coalesce.py` alone. It gives one *step* for what Python then handles at once: a batch that passes
through, one that is rebuilt, a stretch that is dropped, or a run of small neighbours that become one batch.
With it come one *section* (see `rewrite_kernels`) for each batch whose records may have to be read.

What `committed.py` says of committed data and `rebatch.choose_path` of paths is said here again for many
batches at a time; tests hold the two to each other. Nothing outside the buffer or the tables is touched.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

from millrace.broker.protocol.batch_kernels import (
    CRC_IN_KERNEL_BELOW,
    has_right_crc,
    int32_at,
    int64_at,
    unsigned_at,
)
from millrace.broker.protocol.record_kernels import _nullable, _varint32, _varint64
from millrace.broker.protocol.rewrite_kernels import (
    S_APPEND_MS,
    S_BASE_MS,
    S_BASE_OFFSET,
    S_END,
    S_FROM_OFFSET,
    S_IS_APPEND_TIME,
    S_LAST_OFFSET,
    S_RECORDS,
    S_START,
    SECTION_COLUMNS,
)

__all__ = ["CRC_IN_KERNEL_BELOW", "SECTION_COLUMNS", "S_FROM_OFFSET", "S_LAST_OFFSET", "S_START", "walk"]

# How a walk ended.
DONE = 0
AGAIN = 1  # a table is full: handle what is there, then go on
BAD_HEADER = 2  # at STATE_POSITION: too short, or of another format
BAD_CRC = 3
BAD_CONTROL = 4  # an end of a transaction that cannot be read
BEYOND_THE_END = 5  # at STATE_POSITION: it claims offsets that the log does not have
OUT_OF_ORDER = 6  # at STATE_POSITION: its offsets and those of its neighbours cannot all be right
ALONE = 7  # at STATE_POSITION: the first that is wanted is not believed, for what follows it is not here
EMPTIED = 8  # at STATE_POSITION: it claims no records and has compressed bytes, which may be none's

# What a step is. A rebuilt batch over the target's limit is a rebuild: its pieces tell.
PASS_THROUGH, REBUILD, COALESCE, DROP = range(4)

# Columns of a step. Fields of a run: of its first batch where that is said, otherwise of all of them.
T_KIND, T_START, T_END = range(3)  # start and end in bytes, of all its batches
T_NEXT_OFFSET, T_LEADER_EPOCH = range(3, 5)  # of the last batch
T_BASE_OFFSET, T_ATTRIBUTES, T_MAX_MS = range(5, 8)  # of the first batch of data
T_RECORDS, T_BATCHES, T_DROPPED = range(8, 11)  # batches: of data
T_SECTION, T_SECTION_END = range(11, 13)
T_CRC = 13  # what it has to be, or -1: it has been checked
STEP_COLUMNS = 14

# What goes on from one call to the next.
STATE_POSITION, STATE_OFFSET, STATE_NEXT_ABORTED, STATE_ABORTING, STATE_SECTIONS = range(5)
STATE_FROM_OFFSET = 5  # what was asked for
STATE_BEHIND = 6  # the offset behind the last batch, whether that was wanted or not
STATE_EMPTIED = 7  # where a batch lies whose compressed bytes were found to be no record's
STATE_SIZE = 8

# Limits; from L_BELOW on, one for each codec id.
L_MAX_BATCH_SIZE, L_MERGED_SIZE, L_CRC_BELOW, L_MOST_RECORDS = range(4)
L_LOG_END = 4  # no batch ends behind it; NO_END: not known, and there is no next answer
L_TRUST = 5  # what is believed of a batch that comes alone
L_BELOW = 6
LIMITS_SIZE = L_BELOW + 8

NO_END = (1 << 63) - 1
TRUSTS_NOTHING, TRUSTS_NO_HOLE, TRUSTS_ALL = range(3)

_HEADER_SIZE = 61
_UNKNOWN_BITS = ~0x7F & 0xFFFF

_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
_TABLE = types.Array(types.int64, 2, "C")
_INT64S = types.Array(types.int64, 1, "C")


@njit(types.int64(_BYTES, types.int64, types.int64, types.int64), cache=True, nogil=True)
def is_abort(buffer: Any, position: Any, end: Any, record_count: Any) -> Any:
    """Whether a control batch's records (in the clear) hold an abort marker: 1, 0, or -1 when malformed."""
    found = np.int64(0)
    for _ in range(record_count):
        length, position = _varint32(buffer, position, end)
        if position < 0 or length < 1 or length > end - position:
            return -1
        record_end = position + length
        _, position = _varint64(buffer, position + 1, record_end)
        if position < 0:
            return -1
        _, position = _varint32(buffer, position, record_end)
        if position < 0:
            return -1
        size, position = _nullable(buffer, position, record_end)
        if position < 0 or size < 4:
            return -1
        if unsigned_at(buffer, position + 2, 2) == 0:
            found = np.int64(1)
        position = record_end
    return found if position == end else -1


@njit(
    types.UniTuple(types.int64, 2)(_BYTES, _INT64S, _TABLE, _INT64S, _INT64S, _TABLE, _TABLE),
    cache=True,
    nogil=True,
)
def walk(buffer: Any, state: Any, aborted: Any, aborting: Any, limits: Any, steps: Any, sections: Any) -> Any:
    """Fills `steps` and `sections` from STATE_POSITION on: (how it ended, number of steps).

    `aborted` has a row (producer id, first offset) for each aborted transaction, by first offset, and
    `aborting` room for as many producer ids. `state` goes on from call to call.
    """
    end = np.int64(len(buffer))
    position = state[STATE_POSITION]
    expected = state[STATE_OFFSET]
    next_aborted = state[STATE_NEXT_ABORTED]
    aborting_count = state[STATE_ABORTING]
    behind = state[STATE_BEHIND]
    step = np.int64(-1)
    section = np.int64(0)
    run_codec = np.int64(-1)  # of the step that may still grow; -1: none may
    run_size = np.int64(0)
    status = np.int64(DONE)
    while True:
        if end - position < _HEADER_SIZE:
            # Batches of the old formats can be shorter than this format's header.
            if end - position > 16 and buffer[position + 16] != 2:
                status = np.int64(BAD_HEADER)
            break
        if step + 1 >= steps.shape[0] or section >= sections.shape[0]:
            status = np.int64(AGAIN)
            break
        batch_length = int32_at(buffer, position + 8)
        if buffer[position + 16] != 2 or batch_length < _HEADER_SIZE - 12:
            status = np.int64(BAD_HEADER)
            break
        size = batch_length + 12
        if size > end - position:
            break
        last_delta = int32_at(buffer, position + 23)
        record_count = int32_at(buffer, position + 57)
        attributes = np.int64(unsigned_at(buffer, position + 21, 2))
        codec = attributes & 7
        has_lost_records = record_count == 0 and size > _HEADER_SIZE
        if last_delta < 0 or (has_lost_records and codec == 0):
            status = np.int64(BAD_HEADER)  # it would be passed over as one without records, or of before
            break
        if has_lost_records and state[STATE_EMPTIED] != position:
            status = np.int64(EMPTIED)
            break
        is_crc_unchecked = size >= limits[L_CRC_BELOW] and size >= limits[L_BELOW + codec]
        if not is_crc_unchecked and not has_right_crc(buffer, position, position + size):
            status = np.int64(BAD_CRC)
            break
        unchecked_crc = np.int64(unsigned_at(buffer, position + 17, 4)) if is_crc_unchecked else np.int64(-1)
        base_offset = int64_at(buffer, position)
        last_offset = base_offset + last_delta
        producer_id = int64_at(buffer, position + 43)
        is_control = attributes & 0x20 != 0

        # A batch's base offset is not under its checksum. What a wrong one would do is silent: the position
        # would pass over what lies between, or what follows would count as fetched before.
        if base_offset < behind:
            status = np.int64(OUT_OF_ORDER)
            break
        following = position + size
        is_last_here = end - following < 8 and limits[L_LOG_END] < NO_END
        is_first = expected == state[STATE_FROM_OFFSET] and last_offset >= expected
        if base_offset >= limits[L_LOG_END] - last_delta:  # their sum may not fit 64 bits
            status = np.int64(BEYOND_THE_END)
            break
        if is_last_here and is_first and limits[L_TRUST] == TRUSTS_NOTHING:
            status = np.int64(ALONE)
            break
        if base_offset != expected and end - following >= 8 and int64_at(buffer, following) <= last_offset:
            status = np.int64(OUT_OF_ORDER)
            break
        if is_last_here and base_offset > expected:
            if not is_first and last_offset + 1 < limits[L_LOG_END]:
                break  # the next answer has it together with what follows it
            if is_first and limits[L_TRUST] < TRUSTS_ALL:
                status = np.int64(ALONE)
                break

        # Committed or not, as in committed.py; also for what lies before the wanted offset.
        while next_aborted < aborted.shape[0] and aborted[next_aborted, 1] <= last_offset:
            known = False
            for number in range(aborting_count):
                if aborting[number] == aborted[next_aborted, 0]:
                    known = True
            if not known:
                aborting[aborting_count] = aborted[next_aborted, 0]
                aborting_count += 1
            next_aborted += 1
        place = np.int64(-1)
        if aborting_count > 0 and attributes & 0x30:
            for number in range(aborting_count):
                if aborting[number] == producer_id:
                    place = np.int64(number)
        is_data = record_count != 0 and not is_control
        if place >= 0:
            if is_control:
                ends = np.int64(-1)
                if codec == 0:
                    ends = is_abort(buffer, position + 61, position + size, record_count)
                if ends < 0:
                    status = np.int64(BAD_CONTROL)
                    break
                if ends > 0:
                    aborting_count -= 1
                    aborting[place] = aborting[aborting_count]
            elif attributes & 0x10:
                is_data = False

        start = position
        position += size
        behind = last_offset + 1
        if last_offset < expected:  # the source may begin before the offset that was asked for
            if is_crc_unchecked and not has_right_crc(buffer, start, position):
                position = start
                status = np.int64(BAD_CRC)
                break
            continue
        leader_epoch = int32_at(buffer, start + 12)

        if not is_data:
            # Never across leader epochs: where they begin is how a truncated source is told (`epochs`).
            if step >= 0 and not is_crc_unchecked and steps[step, T_LEADER_EPOCH] == leader_epoch:
                steps[step, T_NEXT_OFFSET] = last_offset + 1
                steps[step, T_DROPPED] += 1
            else:
                step += 1
                steps[step, T_KIND] = DROP
                steps[step, T_START] = start
                steps[step, T_END] = position
                steps[step, T_NEXT_OFFSET] = last_offset + 1
                steps[step, T_LEADER_EPOCH] = leader_epoch
                steps[step, T_BASE_OFFSET] = base_offset
                steps[step, T_ATTRIBUTES] = attributes
                steps[step, T_MAX_MS] = int64_at(buffer, start + 35)
                steps[step, T_RECORDS] = 0
                steps[step, T_BATCHES] = 0
                steps[step, T_DROPPED] = 1
                steps[step, T_SECTION] = section
                steps[step, T_SECTION_END] = section
                steps[step, T_CRC] = unchecked_crc
                run_codec = np.int64(-1)
            expected = last_offset + 1
            continue

        max_ms = int64_at(buffer, start + 35)
        sections[section, S_START] = start + 61
        sections[section, S_END] = position
        sections[section, S_RECORDS] = record_count
        sections[section, S_BASE_OFFSET] = base_offset
        sections[section, S_LAST_OFFSET] = last_offset
        sections[section, S_BASE_MS] = int64_at(buffer, start + 27)
        sections[section, S_APPEND_MS] = max_ms
        sections[section, S_IS_APPEND_TIME] = 1 if attributes & 0x08 else 0
        sections[section, S_FROM_OFFSET] = expected
        section += 1
        has_known_bits = attributes & _UNKNOWN_BITS == 0
        is_small = (
            size < limits[L_BELOW + codec]
            and record_count <= limits[L_MOST_RECORDS]
            and has_known_bits
            and base_offset >= expected
        )
        if (
            is_small
            and run_codec == codec
            and steps[step, T_LEADER_EPOCH] == leader_epoch
            and run_size + size - 61 <= limits[L_MERGED_SIZE]
        ):
            steps[step, T_KIND] = COALESCE
            steps[step, T_END] = position
            steps[step, T_NEXT_OFFSET] = last_offset + 1
            steps[step, T_RECORDS] += record_count
            steps[step, T_BATCHES] += 1
            steps[step, T_SECTION_END] = section
            run_size += size - 61
        else:
            is_plain = (
                last_offset - base_offset + 1 == record_count
                and attributes & 0x08 == 0
                and has_known_bits
                and base_offset >= expected
                and size <= limits[L_MAX_BATCH_SIZE]
            )
            step += 1
            steps[step, T_KIND] = PASS_THROUGH if is_plain else REBUILD
            steps[step, T_START] = start
            steps[step, T_END] = position
            steps[step, T_NEXT_OFFSET] = last_offset + 1
            steps[step, T_LEADER_EPOCH] = leader_epoch
            steps[step, T_BASE_OFFSET] = base_offset
            steps[step, T_ATTRIBUTES] = attributes
            steps[step, T_MAX_MS] = max_ms
            steps[step, T_RECORDS] = record_count
            steps[step, T_BATCHES] = 1
            steps[step, T_DROPPED] = 0
            steps[step, T_SECTION] = section - 1
            steps[step, T_SECTION_END] = section
            steps[step, T_CRC] = unchecked_crc
            run_codec = codec if is_small else np.int64(-1)
            run_size = size
        expected = last_offset + 1
    state[STATE_POSITION] = position
    state[STATE_OFFSET] = expected
    state[STATE_NEXT_ABORTED] = next_aborted
    state[STATE_ABORTING] = aborting_count
    state[STATE_BEHIND] = behind
    state[STATE_SECTIONS] = section
    return status, step + 1
