"""What is left of a day of proven windows: one line for all that follow one another. Pure.

A window whose evidence was pruned leaves a line (`settled`, `folded`). There is one for each topic and
window, 1,440 a day, and none of them ever ends; so those of days that are over become *spans*:

    topic, window_ms, verdict           of each of its windows, which were proven or matched by count
    start_ms, end_ms                    of the first and of the last one, in one day and without a gap
    published, missing, …               sums over all of them, as in a line
    settled_ms                          when the last one of them was settled

What was waived keeps a line of its own: a waiver is for one window. Where something comes late for a window
in a span and is proven or waived in its turn, that leaves a line beside it, as of a window that was never
pruned; the span stays as it is.

Made by `next_commit` when the state is folded, kept by `verdict_files`, asked by `settled`, `watermarks`,
`explain`, `status` and, as columns of Spark, by `spark_cells`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millrace.audit.reconciliation.row_keys import WINDOW, is_among
from millrace.audit.reconciliation.verdicts import COUNTS, GOOD

DAY_MS = 86_400_000
LOOKED_AT_MS = DAY_MS
"""so long after its end a day still has a line for each window"""

_KIND = ["topic", "window_ms", "verdict"]
SPAN_SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("window_ms", pa.int64()),
        ("verdict", pa.string()),
        ("start_ms", pa.int64()),
        ("end_ms", pa.int64()),
        *((name, pa.int64()) for name in COUNTS),
        ("settled_ms", pa.int64()),
    ]
)
SPAN_DDL = (
    "topic string, window_ms bigint, verdict string, start_ms bigint, end_ms bigint, "
    f"{', '.join(f'{name} bigint' for name in COUNTS)}, settled_ms bigint"
)
NO_SPANS = SPAN_SCHEMA.empty_table()


def sum_up(lines: pa.Table, spans: pa.Table, now_ms: int, day_ms: int = DAY_MS) -> tuple[pa.Table, pa.Table]:
    """(the lines that stay, in the order of their windows; all spans): what `lines` (SETTLED_SCHEMA) has
    of days that are long over, added to the `spans` that there are. Done again it changes nothing."""
    ends_ms = pc.multiply(pc.add(pc.divide(lines["window_start_ms"], day_ms), 1), day_ms)
    is_over = pc.less_equal(ends_ms, now_ms - LOOKED_AT_MS)
    is_good = pc.and_not(pc.is_in(lines["verdict"], value_set=pa.array(GOOD)), lines["open"])
    is_late = are_in(lines.select(WINDOW), spans)
    going = pc.and_not(pc.and_(pc.and_(is_over, is_good), lines["folded"]), is_late)
    going = pc.fill_null(going, False)
    if not pc.any(going).as_py():
        return lines, spans
    loose = lines.filter(going)
    made = joined(pa.concat_tables([spans, _pieces(loose)]), day_ms)
    is_one = pc.equal(window_counts(made), 1)
    alone = made.filter(is_one).select(["topic", "start_ms"]).rename_columns(WINDOW)
    left = loose.filter(is_among(loose.select(WINDOW), alone))
    left = pa.concat_tables([lines.filter(pc.invert(going)), left])
    return left.sort_by([(name, "ascending") for name in WINDOW]), made.filter(pc.invert(is_one))


def joined(pieces: pa.Table, day_ms: int = DAY_MS) -> pa.Table:
    """The spans made one where they follow one another (SPAN_SCHEMA)."""
    if not pieces.num_rows:
        return pieces
    pieces = pieces.sort_by([(name, "ascending") for name in (*_KIND, "start_ms", "end_ms")])
    grouped = pieces.append_column("group", pa.array(_groups(pieces, day_ms))).group_by(
        ["group", *_KIND], use_threads=False
    )
    bounds = [("start_ms", "min"), ("end_ms", "max"), ("settled_ms", "max")]
    sums = grouped.aggregate([*bounds, *((name, "sum") for name in COUNTS)])
    found = {name: sums[name] for name in _KIND}
    found |= {"start_ms": sums["start_ms_min"], "end_ms": sums["end_ms_max"]}
    found |= {name: sums[f"{name}_sum"] for name in COUNTS} | {"settled_ms": sums["settled_ms_max"]}
    return pa.table([found[name] for name in SPAN_SCHEMA.names], SPAN_SCHEMA)


def _pieces(lines: pa.Table) -> pa.Table:
    """Each line as a span of one window."""
    start_ms = lines["window_start_ms"]
    told = {name: lines[name] for name in (*_KIND, *COUNTS, "settled_ms")}
    told |= {"start_ms": start_ms, "end_ms": pc.add(start_ms, lines["window_ms"])}
    return pa.table([told[name] for name in SPAN_SCHEMA.names], SPAN_SCHEMA)


def _groups(pieces: pa.Table, day_ms: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """A number for each piece of the sorted ones: that of the one before, where it goes on from it."""
    goes_on = np.ones(max(0, pieces.num_rows - 1), bool)
    for name in _KIND:
        codes = pieces[name].combine_chunks().dictionary_encode().indices.to_numpy()
        goes_on &= codes[1:] == codes[:-1]
    starts, ends = pieces["start_ms"].to_numpy(), pieces["end_ms"].to_numpy()
    goes_on &= (starts[1:] == ends[:-1]) & (starts[1:] // day_ms == starts[:-1] // day_ms)
    return np.cumsum(np.concatenate(([0], ~goes_on)))


def window_counts(spans: pa.Table) -> pa.ChunkedArray:
    """How many windows each of them has."""
    return pc.divide(pc.subtract(spans["end_ms"], spans["start_ms"]), spans["window_ms"])


def are_in(windows: pa.Table, spans: pa.Table) -> pa.ChunkedArray:
    """Whether each of these (topic, window_start_ms) is a window of a span."""
    inside = np.zeros(windows.num_rows, bool)
    starts_ms = pc.fill_null(windows["window_start_ms"], -1).to_numpy()
    for kind in spans.group_by(["topic", "window_ms"]).aggregate([]).to_pylist():
        topic, window_ms = kind["topic"], kind["window_ms"]
        is_theirs = pc.and_(pc.equal(spans["topic"], topic), pc.equal(spans["window_ms"], window_ms))
        theirs = spans.filter(is_theirs).sort_by("start_ms")
        begins, ends = theirs["start_ms"].to_numpy(), np.maximum.accumulate(theirs["end_ms"].to_numpy())
        before = np.searchsorted(begins, starts_ms, "right") - 1
        at = np.maximum(before, 0)
        is_there = (before >= 0) & (starts_ms < ends[at]) & ((starts_ms - begins[at]) % window_ms == 0)
        inside |= is_there & pc.equal(windows["topic"], topic).to_numpy()
    return pa.chunked_array([pa.array(inside)])


def outside(rows: pa.Table, spans: pa.Table) -> pa.Table:
    """The rows whose window is in none of the spans."""
    return rows.filter(pc.invert(are_in(rows.select(WINDOW), spans))) if spans.num_rows else rows


def inside(rows: pa.Table, spans: pa.Table) -> pa.Table:
    """The rows whose window is in one of the spans."""
    return rows.filter(are_in(rows.select(WINDOW), spans))
