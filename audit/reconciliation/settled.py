"""Settled verdicts from run to run: their revisions, and the one line that is left of a pruned window. Pure.

Kept in the state (`keeping.verdict_files`), read by the next run, `status` and `waivers`:

    topic, producer, stream, window_start_ms, window_ms, verdict, and the counts of `reconciliation.parquet`;
    window_start_ms is null in a stream's own row
    revision       1 for the first settled verdict of the window, +1 whenever late data changed it
    before         the verdict before the last revision; "" in the first one
    settled_ms     when this revision was made
    content        digest of what a revision compares (`said`): all that the row says of records, by name
    open           true: the window is open again, and has no settled verdict now; the line keeps the last one
                   for its number
    folded         true: the line of a whole topic and window whose evidence was pruned (`upkeep`): its counts
                   are sums over its streams, its verdict is their worst. What is left of them later: `spans`

A window is open again when its doubt is gone and its producer has not promised that it is complete, or has
come back after a silence.

`number_rows` is called where a stream's rows are made, in Spark's workers, with the stream's lines beside its
cells; for what the roster owes, which is no stream's, on the driver. Must stay true: nothing of another
stream changes a number, so it is the same whoever has which streams together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millrace.audit.reconciliation.row_digest import rows_digest
from millrace.audit.reconciliation.row_keys import WINDOW, Window, found, is_among, keys_of, numbers
from millrace.audit.reconciliation.row_parts import Rows, parts_of
from millrace.audit.reconciliation.spans import NO_SPANS, SPAN_SCHEMA, are_in, window_counts
from millrace.audit.reconciliation.verdict_rows import ROW_DDL, ROW_SCHEMA, iso_time
from millrace.audit.reconciliation.verdicts import COUNTS, VERDICTS, WindowState

SETTLED_SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("producer", pa.string()),
        ("stream", pa.string()),
        ("window_start_ms", pa.int64()),
        ("window_ms", pa.int64()),
        ("verdict", pa.string()),
        *((name, pa.int64()) for name in COUNTS),
        ("revision", pa.int32()),
        ("before", pa.string()),
        ("settled_ms", pa.int64()),
        ("content", pa.string()),
        ("folded", pa.bool_()),
        ("open", pa.bool_()),
    ]
)
SETTLED_DDL = (
    "topic string, producer string, stream string, window_start_ms bigint, window_ms bigint, verdict string, "
    f"{', '.join(f'{name} bigint' for name in COUNTS)}, revision int, before string, settled_ms bigint, "
    "content string, folded boolean, open boolean"
)

LINE_SCHEMA = SETTLED_SCHEMA.append(pa.field("pruned", pa.bool_()))
"""A line on its way to its stream's rows. `pruned`: its window has a line for the whole topic, or is in a
span."""

NUMBERED_SCHEMA = ROW_SCHEMA.append(pa.field("before", pa.string())).append(
    pa.field("settled_ms", pa.int64())
)
NUMBERED_DDL = f"{ROW_DDL}, before string, settled_ms bigint"
"""Rows with their revisions: `before` and `settled_ms` as in the lines, null in open ones."""

KEPT, REOPENED = "KEPT", "REOPENED"
"""The states of rows that carry an earlier line on: of a window that no row speaks of any more, and of one
that is open again. No such row is in the report."""

MOST_REVISED = 10_000  # revisions that the summary names

_NO_ROWS = NUMBERED_SCHEMA.empty_table()

LINE_COLUMNS = ["said", "state", *(each for each in SETTLED_SCHEMA.names if each in NUMBERED_SCHEMA.names)]
"""What `lines_of` reads of rows."""

_OF_ROWS = (str(WindowState.OPEN), str(WindowState.SETTLED))
LINE_STATES = (str(WindowState.SETTLED), KEPT, REOPENED)
_NOTHING: dict[str, Any] = {
    "window_start": None,
    "ambiguous": 0,
    "consumed": [],
    "seen": [],
    "content": "",
    "detail": "{}",
}
_ORDER = [(name, "ascending") for name in ("topic", "producer", "stream", "window_start_ms")]


def earlier_lines(
    before: pa.Table, topics: Collection[str], spans: pa.Table = NO_SPANS
) -> tuple[pa.Table, pa.Table]:
    """Of the lines that a run kept, beside its `spans`: (LINE_SCHEMA of the audited topics' windows,
    SETTLED_SCHEMA of those that were pruned)."""
    before = before.filter(pc.is_in(before["topic"], pa.array(list(topics), pa.string())))
    lines, folded = before.filter(pc.invert(before["folded"])), before.filter(before["folded"])
    windows = lines.select(WINDOW)
    is_pruned = pc.or_(is_among(windows, folded.select(WINDOW)), are_in(windows, spans))
    return lines.append_column("pruned", is_pruned), folded


def number_rows(rows: pa.Table, lines: pa.Table, now_ms: int) -> pa.Table:
    """The rows (`verdict_rows.ROW_SCHEMA`) with their revisions, in their order, and behind them the lines
    that stay (NUMBERED_SCHEMA). `lines` (LINE_SCHEMA) are all that there are of the rows' streams."""
    line_of = found(_keys(rows), _keys(lines))
    earlier = lines.select(["revision", "verdict", "before", "settled_ms", "content"]).take(line_of)
    settled = pc.equal(rows["state"], str(WindowState.SETTLED))
    same = pc.and_(settled, pc.fill_null(pc.equal(rows["said"], earlier["content"]), False))
    changed = pc.and_not(settled, same)
    revisions = pc.add(pc.fill_null(earlier["revision"], 0), changed.cast(pa.int32()))
    made_ms = pc.if_else(changed, pa.scalar(now_ms, pa.int64()), earlier["settled_ms"])
    before = pc.if_else(same, earlier["before"], pc.fill_null(earlier["verdict"], ""))
    told = {
        **{name: rows[name] for name in ROW_SCHEMA.names},
        "revision": revisions,
        "before": pc.if_else(settled, before, pa.scalar(None, pa.string())),
        "settled_ms": pc.if_else(settled, made_ms, pa.scalar(None, pa.int64())),
    }
    numbered = pa.table([told[name] for name in NUMBERED_SCHEMA.names], NUMBERED_SCHEMA)
    opened = lines.take(line_of.filter(pc.invert(settled)).drop_null())
    is_open = pa.repeat(True, opened.num_rows)
    left = _without_rows(lines, line_of)
    return pa.concat_tables([numbered, _carried(opened, is_open), _carried(left, left["open"])])


def unnumbered(rows: pa.Table) -> pa.Table:
    """Rows that nobody numbers, of a backfill, in the shape of those that are (NUMBERED_SCHEMA)."""
    rows = rows.append_column("before", pa.nulls(rows.num_rows, pa.string()))
    return rows.append_column("settled_ms", pa.nulls(rows.num_rows, pa.int64()))


def _without_rows(lines: pa.Table, line_of: pa.ChunkedArray) -> pa.Table:
    """Lines that no row speaks of any more and that stay. A row of the roster (no stream) or of a stream
    itself (no window) is there as long as its doubt is; a line of a pruned window is in that of its topic."""
    gone = np.ones(lines.num_rows, bool)
    gone[line_of.drop_null().to_numpy()] = False
    left = lines.filter(pa.array(gone))
    left = left.filter(pc.and_(pc.not_equal(left["stream"], ""), pc.is_valid(left["window_start_ms"])))
    return left.filter(pc.invert(left["pruned"]))


def _carried(lines: pa.Table, is_open: Any) -> pa.Table:
    """Lines as rows (NUMBERED_SCHEMA), for `lines_of`."""
    if not lines.num_rows:
        return _NO_ROWS  # as of most streams, one after the other
    told: dict[str, Any] = {name: lines[name] for name in SETTLED_SCHEMA.names}
    told |= {"state": pc.if_else(is_open, REOPENED, KEPT), "said": lines["content"]}
    for name, value in _NOTHING.items():
        told[name] = pa.array([value] * lines.num_rows, NUMBERED_SCHEMA.field(name).type)
    return pa.table([told[name] for name in NUMBERED_SCHEMA.names], NUMBERED_SCHEMA)


def rows_of(numbered: pa.Table) -> pa.Table:
    """Without the lines that are carried on."""
    return numbered.filter(pc.is_in(numbered["state"], pa.array(_OF_ROWS)))


def lines_of(numbered: pa.Table) -> pa.Table:
    """What the state keeps of numbered rows (SETTLED_SCHEMA), in the order of their keys."""
    lines = numbered.filter(pc.is_in(numbered["state"], pa.array(LINE_STATES)))
    told = {
        **{name: lines[name] for name in SETTLED_SCHEMA.names if name in LINE_COLUMNS},
        "content": lines["said"],
        "folded": pa.repeat(False, lines.num_rows),
        "open": pc.equal(lines["state"], REOPENED),
    }
    table = pa.table([told[name] for name in SETTLED_SCHEMA.names], SETTLED_SCHEMA)
    of_roster = pc.equal(table["stream"], "")
    owed = table.filter(of_roster)
    # A member of the roster may owe windows of two lengths that begin at one time.
    owed = owed.filter(_is_last(_keys(owed)))
    return pa.concat_tables([table.filter(pc.invert(of_roster)), owed]).sort_by(_ORDER)


def lines_but(numbered: pa.Table, pruned: pa.Table) -> pa.Table:
    """Those of `lines_of` that are of none of these windows."""
    return but(lines_of(numbered), pruned)


def but(lines: pa.Table, pruned: pa.Table) -> pa.Table:
    """Those of the lines that are of none of these windows."""
    return lines.filter(pc.invert(is_among(lines.select(WINDOW), pruned.select(WINDOW))))


def _keys(table: pa.Table) -> pa.Table:
    """What a row is known by; a row without a window is one of its own, and a join never finds a null."""
    start_ms = table["window_start_ms"]
    columns = {name: table[name] for name in ("topic", "stream", "producer")}
    return pa.table(columns | {"start_ms": pc.fill_null(start_ms, 0), "is_own": pc.is_null(start_ms)})


def _is_last(keys: pa.Table) -> pa.ChunkedArray:
    """Whether no later row has the same key."""
    return pc.equal(found(keys, keys), numbers(keys))


def settled_now(table: pa.Table) -> pa.Table:
    """Without the lines of windows that are open again."""
    return table.filter(pc.invert(table["open"]))


def revised(lines: Rows) -> tuple[pa.Table, int]:
    """(the lines of windows whose settled verdict was changed by late data, those `MOST_REVISED` that were
    changed last; how many there are of all)."""
    latest, count = SETTLED_SCHEMA.empty_table(), 0
    for part in parts_of(lines):
        is_told = pc.and_not(pc.is_valid(part["window_start_ms"]), part["folded"])
        changed = part.filter(pc.and_(is_told, pc.greater(part["revision"], 1)))
        count += changed.num_rows
        latest = _latest(pa.concat_tables([latest, changed]))
    return latest, count


def _latest(changed: pa.Table) -> pa.Table:
    return changed.sort_by([("settled_ms", "descending"), *_ORDER]).slice(0, MOST_REVISED)


def revisions_of(
    lines: Rows, resting: Iterable[tuple[Sequence[Mapping[str, Any]], int]] = ()
) -> tuple[list[dict[str, Any]], int]:
    """For the summary: windows whose settled verdict was changed by late data, with the last change; and how
    many there are beyond the `MOST_REVISED` that were changed last. `resting` are others' rows of `revised`,
    and how many there are of all."""
    latest, count = revised(lines)
    for rows, number in resting:
        latest = _latest(pa.concat_tables([latest, pa.Table.from_pylist(list(rows), SETTLED_SCHEMA)]))
        count += number
    told = [
        {
            "topic": row["topic"],
            "producer": row["producer"],
            "window_start": iso_time(row["window_start_ms"]),
            "revision": row["revision"],
            "before": row["before"],
            "after": row["verdict"],
        }
        for row in latest.sort_by(_ORDER).to_pylist()
    ]
    return told, count - len(told)


def without(table: pa.Table, pruned: Collection[Window]) -> pa.Table:
    """The table with all lines of these windows made one each."""
    going = is_among(table.select(WINDOW), keys_of(pruned, WINDOW))
    lines = table.filter(going)
    lines = lines.append_column("rank", pc.index_in(lines["verdict"], value_set=pa.array(VERDICTS)))
    sums = [(name, "sum") for name in COUNTS]
    worst = [(name, "max") for name in ("rank", "window_ms", "settled_ms")]
    first = ("open", "first", pc.ScalarAggregateOptions(skip_nulls=False))
    grouped = lines.group_by(WINDOW, use_threads=False).aggregate([*sums, *worst, first])
    line = {
        **{name: grouped[name] for name in WINDOW},
        **{name: grouped[f"{name}_sum"] for name in COUNTS},
        **{name: grouped[f"{name}_max"] for name in ("window_ms", "settled_ms")},
        **dict.fromkeys(("producer", "stream", "before", "content"), pa.repeat("", grouped.num_rows)),
        "verdict": pc.take(pa.array(VERDICTS), grouped["rank_max"]),
        "revision": pa.repeat(pa.scalar(1, pa.int32()), grouped.num_rows),
        "folded": pa.repeat(True, grouped.num_rows),
        "open": grouped["open_first"],
    }
    made = pa.table([line[name] for name in SETTLED_SCHEMA.names], SETTLED_SCHEMA)
    rest = table.filter(pc.invert(going))
    folded = pa.concat_tables([rest.filter(rest["folded"]), made])
    ordered = folded.sort_by([(name, "ascending") for name in WINDOW])
    return pa.concat_tables([ordered, rest.filter(pc.invert(rest["folded"]))])


def let_go(spans: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Windows at rest whose evidence goes, as what is left of pruned ones: (lines of those that stand alone,
    spans)."""
    is_one = pc.equal(window_counts(spans), 1)
    alone = spans.filter(is_one)
    told: dict[str, Any] = {name: alone[name] for name in SPAN_SCHEMA.names}
    told |= {"window_start_ms": alone["start_ms"], "revision": pa.repeat(1, alone.num_rows)}
    told |= dict.fromkeys(("producer", "stream", "before", "content"), pa.repeat("", alone.num_rows))
    told |= {"folded": pa.repeat(True, alone.num_rows), "open": pa.repeat(False, alone.num_rows)}
    lines = pa.table([told[name] for name in SETTLED_SCHEMA.names], names=SETTLED_SCHEMA.names)
    return lines.cast(SETTLED_SCHEMA), spans.filter(pc.invert(is_one))


def lines_digest(*lines: Rows) -> str:
    """Equal for equal lines, however they are ordered and cut: tells whether anything was learnt."""
    return rows_digest((part for each in lines for part in parts_of(each)), SETTLED_SCHEMA.names)
