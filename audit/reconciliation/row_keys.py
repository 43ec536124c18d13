"""Rows found by their keys, by Arrow: no row becomes a Python object. Pure.

Called by `settled` and `keeping.upkeep`. A join never finds a null, so a key has none. A join costs some
milliseconds however little is joined, and a worker has a stream's few rows many times over: those are looked
up in a dictionary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

Window = tuple[str, int]
"""(topic, start in ms)"""

WINDOW = ["topic", "window_start_ms"]

FEW_ROWS = 500
"""keys and lines together, from which on a join is quicker"""


def found(keys: pa.Table, lines: pa.Table) -> pa.ChunkedArray:
    """Where each key stands among the lines, null where it does not; the last of equal ones counts."""
    if keys.num_rows + lines.num_rows <= FEW_ROWS:
        numbers_of = {key: number for number, key in enumerate(_tuples(lines, keys.column_names))}
        told = [numbers_of.get(key) for key in _tuples(keys, keys.column_names)]
        return pa.chunked_array([pa.array(told, pa.int64())])
    numbered = keys.append_column("row", numbers(keys))
    there = lines.append_column("line", numbers(lines)).group_by(lines.column_names)
    joined = numbered.join(
        there.aggregate([("line", "max")]), keys=keys.column_names, join_type="left outer"
    ).select(["row", "line_max"])
    return joined.sort_by("row")["line_max"]


def _tuples(table: pa.Table, names: list[str]) -> Iterator[tuple[Any, ...]]:
    return zip(*(table[name].to_pylist() for name in names), strict=True)


def is_among(keys: pa.Table, lines: pa.Table) -> pa.ChunkedArray:
    """Whether each key is one of the lines."""
    return pc.is_valid(found(keys, lines))


def numbers(table: pa.Table) -> pa.Array:
    """0, 1, 2, ... for the rows of a table."""
    return pa.array(np.arange(table.num_rows))


def keys_of(pairs: Collection[tuple[str, int]], names: list[str]) -> pa.Table:
    """A table of keys: of (topic or stream, start in ms)."""
    first = pa.array([each for each, _ in pairs], pa.string())
    return pa.table([first, pa.array([start_ms for _, start_ms in pairs], pa.int64())], names)
