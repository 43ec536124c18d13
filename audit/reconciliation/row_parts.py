"""Rows of a run, all at once or part by part, so that whoever walks them need not hold them all. Pure.

Everything on the driver that asks rows takes `Rows`: a table, or something that has `parts`. Must stay true:
a part has whole windows. All rows of a topic and window, of whatever stream, are in one part; those without a
window are in one, too. So what is asked of windows can be asked part by part.

`View` is rows made of rows (`keep`): those of the report, those that decide, the lines of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc


class Parted(Protocol):
    """Rows that are read part by part, as often as anybody asks."""

    def parts(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """The parts, with all columns or with these."""


Rows: TypeAlias = pa.Table | Parted


def parts_of(rows: Rows, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """The parts of rows, of which a table is one, with all columns or with these."""
    if isinstance(rows, pa.Table):
        yield rows if columns is None else rows.select(list(columns))
    else:
        yield from rows.parts(columns)


ORDER = ("topic", "producer", "stream", "window_start_ms")
"""How rows are ordered within a part."""


def in_order(rows: pa.Table) -> pa.Table:
    """The rows in order, where they have the columns for it."""
    if not set(ORDER) <= set(rows.column_names):
        return rows
    return rows.sort_by([(name, "ascending") for name in ORDER])


@dataclass(frozen=True, slots=True)
class Beside:
    """Rows, and those of a small table in the parts that their windows are in."""

    rows: Rows
    table: pa.Table

    def parts(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        wanted = None if columns is None else list(dict.fromkeys([*columns, "window_start_ms"]))
        left = self.table if wanted is None else self.table.select(wanted)
        for part in parts_of(self.rows, wanted):
            if left.num_rows:
                theirs = pc.is_in(left["window_start_ms"], value_set=pc.unique(part["window_start_ms"]))
                part = in_order(pa.concat_tables([part, left.filter(theirs)]))
                left = left.filter(pc.invert(theirs))
            yield part if columns is None else part.select(list(columns))
            del part
        if left.num_rows:
            yield left if columns is None else left.select(list(columns))


@dataclass(frozen=True, slots=True)
class View:
    """What `keep` makes of each part of `rows`; it reads the columns `reads`, and may take rows away, never
    windows apart. It `makes` other columns of what it reads alone, or leaves all as they are."""

    rows: Rows
    keep: Callable[[pa.Table], pa.Table]
    reads: Sequence[str]
    makes: bool = False

    def parts(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        wanted: list[str] | None = list(self.reads)
        if not self.makes:
            wanted = None if columns is None else list(dict.fromkeys([*columns, *self.reads]))
        for part in parts_of(self.rows, wanted):
            kept = self.keep(part)
            del part  # the next one is read before this name is given to it
            if columns is not None:
                kept = kept.select(list(columns))
            yield kept
            del kept
