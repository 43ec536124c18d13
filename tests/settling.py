"""A run's verdicts beside those of the run before, all streams together: workers do it stream by stream."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from millrace.audit.reconciliation.row_parts import parts_of
from millrace.audit.reconciliation.settled import (
    SETTLED_SCHEMA,
    earlier_lines,
    lines_of,
    number_rows,
    rows_of,
)
from millrace.audit.reconciliation.spans import NO_SPANS
from millrace.audit.reconciliation.verdict_rows import VERDICT_SCHEMA


def reported(rows: pa.Table) -> pa.Table:
    """Numbered rows as they stand in the report."""
    return rows.select(VERDICT_SCHEMA.names)


@dataclass(frozen=True)
class Settlement:
    """`table` (SETTLED_SCHEMA) is what the state keeps; `rows` those of the report, with `numbers`, their
    revisions, and `made_ms`, when each was made, null for an open one."""

    table: pa.Table
    rows: pa.Table
    numbers: pa.Array
    made_ms: pa.Array


def settle(
    rows: pa.Table, before: pa.Table | None, topics: Collection[str], now_ms: int, spans: pa.Table = NO_SPANS
) -> Settlement:
    """`rows` (ROW_SCHEMA) of all streams and of the roster; `before` is what the state had beside `spans`."""
    lines, folded = earlier_lines(SETTLED_SCHEMA.empty_table() if before is None else before, topics, spans)
    numbered = number_rows(rows, lines, now_ms)
    told = rows_of(numbered)
    return Settlement(
        pa.concat_tables([folded, lines_of(numbered)]).combine_chunks(),
        reported(told),
        told["revision"].combine_chunks(),
        told["settled_ms"].combine_chunks(),
    )


@dataclass(frozen=True)
class OnePart:
    """A table as the rows that executors wrote, in no files."""

    table: pa.Table
    files: tuple[str, ...] = ()

    def parts(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        yield from parts_of(self.table, columns)


class Windows:
    """Rows in parts of whole windows, the last first, and in the end those without a window."""

    def __init__(self, rows: pa.Table, count: int) -> None:
        starts = rows["window_start_ms"]
        known = sorted(set(starts.drop_null().to_pylist()), reverse=True)
        size = max(1, -(-len(known) // count))
        cuts = [known[first : first + size] for first in range(0, len(known), size)]
        self._parts = [rows.filter(pc.is_in(starts, pa.array(cut, pa.int64()))) for cut in cuts]
        self._parts.append(rows.filter(pc.is_null(starts)))

    def parts(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        for part in self._parts:
            yield part if columns is None else part.select(columns)
