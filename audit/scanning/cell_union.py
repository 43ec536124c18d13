"""Cells of proven windows made one, without their places: what is left of a window that lacks nothing.

Called by `spark_cells` inside Spark's workers when cells are folded. A cell's partition and offsets decide
only what became of a record that one tier has and the next one has not. In a window that is proven there is
none, so its sets, counts and digests are all that any later run can ask for; with keys that are hashed over
partitions, a hundred cells become two.

What must stay true:

- the sums of a window are the same before and after, in every tier and of every place (cluster, topic and its
  id) and name: what comes later for it, a copy or a new record, is judged as it would have been;
- only what is in no doubt is united: sets that are apart, as many records as sequences, no part of the tail
  (it is read again) and none of its window;
- nobody takes a united cell for one with a place (`Cell.has_place`): should something of it be missing after
  all (from a tier that was configured later), what became of it is UNKNOWN.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyroaring import BitMap

from millrace.audit.scanning.cell_columns import (
    codes_of,
    column_of,
    decimals,
    digest_sums,
    earliest,
    latest,
    numbers_of,
)
from millrace.audit.scanning.cell_rows import CELL_SCHEMA
from millrace.audit.scanning.cells import BASE_STEP, NO_PLACE
from millrace.audit.scanning.old_repeats import in_sets
from millrace.audit.scanning.set_kernels import SMALL_SET_BYTES
from millrace.audit.scanning.united_sets import Bitmaps, unite_sets

_NAMES = ("tier", "cluster", "topic", "topic_id", "producer")
_UNKNOWN_SIZE = -1


def unite(cells: pa.Table, windows: pa.Table) -> pa.Table:
    """A stream's kept cells, those of the proven `windows` (columns window_start_ms, window_ms) united, and
    those of an older program in today's form.

    `cells` are rows of `CELL_SCHEMA` without notes; those of the tail hold their windows back, and are left
    out.
    """
    cells = in_sets(cells)
    in_tail = pc.fill_null(cells["tail"], False)
    kept = cells.filter(pc.invert(in_tail))
    if not windows.num_rows or kept.num_rows < 2:
        return kept
    held_back = numbers_of(cells.filter(in_tail)["window_start_ms"])
    chosen = _in_windows(numbers_of(kept["window_start_ms"]), windows, held_back) & _is_plain(kept)
    numbers = np.flatnonzero(chosen)
    if len(numbers) < 2:
        return kept
    united, rows_used = _united(kept.take(pa.array(numbers)))
    chosen[numbers[~rows_used]] = False
    return pa.concat_tables([kept.filter(pa.array(~chosen)), united])


def _in_windows(
    starts: NDArray[np.int64], windows: pa.Table, held_back: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Which of the starts lie in one of the windows that hold nothing that is held back. A window may be
    several of the audit's own."""
    windows = windows.sort_by("window_start_ms")
    firsts = numbers_of(windows["window_start_ms"])
    ends = firsts + numbers_of(windows["window_ms"])
    stays = np.ones(len(firsts), np.bool_)
    at = np.searchsorted(firsts, held_back, side="right") - 1
    stays[at[(at >= 0) & (held_back < ends[at])]] = False
    at = np.searchsorted(firsts, starts, side="right") - 1
    return (at >= 0) & (starts < ends[at]) & stays[at]


def _is_plain(rows: pa.Table) -> NDArray[np.bool_]:
    """Cells of numbered records that came once."""
    no_repeats = pc.equal(pc.fill_null(pc.list_value_length(rows["again"]), 0), 0)
    has_set = pc.fill_null(pc.greater(pc.binary_length(rows["bitmap"]), 0), False)
    is_plain = pc.and_(no_repeats, has_set).to_numpy()
    is_numbered = (numbers_of(rows["unsequenced_count"]) == 0) & (numbers_of(rows["base"]) % BASE_STEP == 0)
    return np.asarray(is_plain & is_numbered)


def _united(rows: pa.Table) -> tuple[pa.Table, NDArray[np.bool_]]:
    """(a row for each group of rows that can be united, which rows those groups have)."""
    keys = [
        *(codes_of(rows[name])[0] for name in _NAMES),
        numbers_of(rows["window_start_ms"]),
        numbers_of(rows["base"]),
    ]
    order = np.lexsort(keys)
    sets, rows = Bitmaps.of_column(rows["bitmap"]), _without_sets(rows).take(pa.array(order))
    changes = np.zeros(len(order) - 1, np.bool_)
    for key in keys:
        changes |= np.diff(key[order]) != 0
    starts = np.flatnonzero(np.concatenate(([True], changes)))
    ends = np.append(starts[1:], len(order))
    groups = np.repeat(np.arange(len(starts)), ends - starts)
    bitmaps, sizes = _union_of_sets(sets, order, groups, starts, ends)
    counts = np.add.reduceat(numbers_of(rows["count"]), starts)
    good = (sizes == counts) & (ends - starts > 1)
    used = np.zeros(len(order), np.bool_)
    used[order] = good[groups]
    sums, known = digest_sums(rows["digest"], starts)
    values = {
        **dict.fromkeys(("partition", "chunk_start", "first_offset", "last_offset"), NO_PLACE),
        "count": counts,
        "byte_count": np.add.reduceat(numbers_of(rows["byte_count"]), starts),
        "first_append_ms": earliest(rows["first_append_ms"], starts),
        "last_append_ms": latest(rows["last_append_ms"], starts),
        "bitmap": bitmaps,
        "digest": decimals(sums, known),
    }
    united = rows.take(pa.array(starts))
    for name, value in values.items():
        at = CELL_SCHEMA.get_field_index(name)
        united = united.set_column(
            at, CELL_SCHEMA.field(at), column_of(value, CELL_SCHEMA.field(at).type, len(starts))
        )
    return united.filter(pa.array(good)), used


def _without_sets(rows: pa.Table) -> pa.Table:
    """Of many small cells the sets are nearly all bytes: they are not put in order."""
    at = rows.schema.get_field_index("bitmap")
    field = rows.schema.field(at)
    return rows.set_column(at, field, pa.nulls(rows.num_rows, field.type))


def _union_of_sets(
    sets: Bitmaps,
    order: NDArray[np.int64],
    groups: NDArray[np.int64],
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
) -> tuple[list[bytes], NDArray[np.int64]]:
    """(each group's union, how many members it has). Groups are of the sets in this order. One whose sets are
    not apart has fewer members than its sets together, one of which a set cannot be read has _UNKNOWN_SIZE.
    """
    count = len(starts)
    by_library = np.maximum.reduceat(sets.sizes[order], starts) > SMALL_SET_BYTES
    small = np.flatnonzero(~by_library[groups])
    united = unite_sets(sets, order[small], groups[small], count)
    sizes = united.sizes.copy()
    sizes[groups[small[united.unread]]] = _UNKNOWN_SIZE
    bitmaps = [united.bitmaps[number] for number in range(count)]
    for number in np.flatnonzero(by_library).tolist():
        total = BitMap()
        for row in range(starts[number], ends[number]):
            total |= BitMap.deserialize(sets[order[row]])
        total.run_optimize()
        bitmaps[number], sizes[number] = total.serialize(), len(total)
    return bitmaps, sizes
