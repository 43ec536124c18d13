"""Cells that an older program kept, as today's: what came more than once was a pair for each record. Pure.

Up to version 7 of the state, `repeats` had (sequence, extra copies) of each record that came again, 16 bytes
of Parquet and ninety of Python. Such cells are read as they are, never rewritten for it, and become bitmaps
(`again`) as soon as they are in memory: nobody else needs to know both forms. Called by `cell_rows` (one cell
after the other), `stream_cells` and `cell_union`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from millrace.audit.scanning.cell_columns import numbers_of
from millrace.audit.scanning.cells import BASE_STEP

PAIRS_AT_ONCE = 1 << 20
"""so many pairs are columns of numbers at one time, or those of one cell"""


def in_sets(rows: pa.Table) -> pa.Table:
    """Rows of cells with all that came again in `again`, and none in `repeats`; in an order of their own.

    Raises ValueError for a cell that repeats what it cannot hold.
    """
    pairs = rows["repeats"]
    if "again" not in rows.column_names:  # an old file, as it is
        rows = rows.append_column("again", pa.nulls(len(rows), pa.list_(pa.binary())))
    is_old = pc.fill_null(pc.greater(pc.list_value_length(pairs), 0), False)
    if not pc.any(is_old).as_py():
        return rows
    old = rows.filter(is_old)
    parts = [rows.filter(pc.invert(is_old))]
    parts += [_converted(old.slice(first, end - first)) for first, end in _stretches(old["repeats"])]
    return pa.concat_tables(parts)


def _stretches(pairs: pa.ChunkedArray) -> Iterator[tuple[int, int]]:
    """Rows (first, behind the last) that have PAIRS_AT_ONCE pairs together, or few more."""
    ends = np.cumsum(numbers_of(pc.list_value_length(pairs)), dtype=np.int64)
    cuts = np.flatnonzero(np.diff(ends // PAIRS_AT_ONCE)) + 1
    yield from zip([0, *cuts.tolist()], [*cuts.tolist(), len(ends)], strict=True)


def _converted(rows: pa.Table) -> pa.Table:
    # Compiled loops, which of those who read rows only those of an old state need.
    from millrace.audit.scanning.copy_ranges import COPY_COLUMNS, encode_copies, summed

    pairs = rows["repeats"].combine_chunks()
    sequences, copies = (each.to_numpy() for each in pairs.flatten().flatten())
    of_row = np.repeat(np.arange(len(rows)), pairs.value_lengths().to_numpy())
    numbers: NDArray[np.int64] = sequences - numbers_of(rows["base"])[of_row]
    if ((numbers < 0) | (numbers >= BASE_STEP)).any():
        raise ValueError("a cell of the state repeats sequences that it cannot hold")
    ranges = np.empty((len(numbers), COPY_COLUMNS), np.int64)
    for column, values in enumerate((of_row, numbers, numbers, copies)):
        ranges[:, column] = values
    again, bounds = encode_copies(summed(ranges), len(rows))
    values = {
        "again": pa.ListArray.from_arrays(pa.array(bounds, pa.int32()), again.to_column()),
        "repeats": pa.nulls(len(rows), pairs.type),
    }
    for name, column in values.items():
        at = rows.schema.get_field_index(name)
        kind = rows.schema.field(at)
        rows = rows.set_column(at, kind, column.cast(kind.type))
    return rows
