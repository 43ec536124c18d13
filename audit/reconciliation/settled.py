"""Settled verdicts from run to run: their revisions, and the one line that is left of a pruned window. Pure.

Kept by `job` as `verdicts/<run>.parquet`, read by the next run, `status` and `waivers`:

    topic, producer, stream, window_start_ms, window_ms, verdict, and the counts of `reconciliation.parquet`;
    window_start_ms is null in a stream's own row
    revision       1 for the first settled verdict of the window, +1 whenever late data changed it
    before         the verdict before the last revision; "" in the first one
    settled_ms     when this revision was made
    content        digest of what a revision compares (`said`): all that the row says of records, by name
    open           true: the window is open again, and has no settled verdict now; the line keeps the last one
                   for its number
    folded         true: the line of a whole topic and window whose evidence was pruned (`upkeep`): its counts
                   are sums over its streams, its verdict is their worst

A window is open again when its doubt is gone and its producer has not promised that it is complete, or has
come back after a silence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millrace.audit.reconciliation.row_keys import WINDOW, Window, found, is_among, keys_of, numbers
from millrace.audit.reconciliation.verdict_rows import VERDICT_SCHEMA, iso_time
from millrace.audit.reconciliation.verdicts import VERDICTS, WindowState

COUNTS = ("published", "missing", "duplicates", "in_flight", "unreported", "unknown", "explained")
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
_KEY = ("topic", "stream", "producer", "window_start_ms")
_DIGEST_ROWS = 1 << 16
_ORDER = [(name, "ascending") for name in ("topic", "producer", "stream", "window_start_ms")]


@dataclass(frozen=True, slots=True)
class Settlement:
    """`table` (SETTLED_SCHEMA) goes into the state; `numbers` has each row's revision, 0 for an open one that
    never settled, and `made_ms` when that was made, null for an open one."""

    table: pa.Table
    numbers: pa.Array
    made_ms: pa.Array

    def numbered(self, rows: pa.Table) -> pa.Table:
        """The rows as they stand in the report, with their revisions."""
        rows = rows.select(VERDICT_SCHEMA.names)
        return rows.set_column(VERDICT_SCHEMA.get_field_index("revision"), "revision", self.numbers)


def settle(rows: pa.Table, before: pa.Table | None, topics: Collection[str], now_ms: int) -> Settlement:
    """Put this run's verdicts (`verdict_rows.ROW_SCHEMA`) beside the settled ones of the run before."""
    known, folded = _earlier(before, topics)
    keys = _keys(rows)
    line_of = found(keys, _keys(known))
    earlier = known.select(["revision", "verdict", "before", "settled_ms", "content"]).take(line_of)
    settled = pc.equal(rows["state"], str(WindowState.SETTLED))
    same = pc.and_(settled, pc.fill_null(pc.equal(rows["said"], earlier["content"]), False))
    changed = pc.and_not(settled, same)
    revisions = pc.add(pc.fill_null(earlier["revision"], 0), changed.cast(pa.int32()))
    made_ms = pc.if_else(changed, pa.scalar(now_ms, pa.int64()), earlier["settled_ms"])
    made_ms = pc.if_else(settled, made_ms, pa.scalar(None, pa.int64()))
    last = _is_last(keys)  # a member of the roster may owe windows of two lengths that begin at one time
    told = {
        **{name: rows[name] for name in (*_KEY, "window_ms", "verdict", *COUNTS)},
        "revision": revisions,
        "before": pc.if_else(same, earlier["before"], pc.fill_null(earlier["verdict"], "")),
        "settled_ms": made_ms,
        "content": rows["said"],
        "folded": pa.repeat(False, rows.num_rows),
        "open": pa.repeat(False, rows.num_rows),
    }
    lines = pa.table([told[name] for name in SETTLED_SCHEMA.names], SETTLED_SCHEMA)
    lines = lines.filter(pc.and_(last, settled))
    opened = known.take(line_of.filter(pc.and_not(last, settled)).drop_null())
    opened = opened.set_column(
        SETTLED_SCHEMA.get_field_index("open"), "open", pa.repeat(True, opened.num_rows)
    )
    kept = pa.concat_tables([lines, opened, _without_rows(known, line_of, folded)])
    return Settlement(
        pa.concat_tables([folded, kept.sort_by(_ORDER)]).combine_chunks(),
        revisions.combine_chunks(),
        made_ms.combine_chunks(),
    )


def _earlier(before: pa.Table | None, topics: Collection[str]) -> tuple[pa.Table, pa.Table]:
    """The (windows' lines, lines of what was pruned) of the audited topics. An older program's table does not
    tell what is open."""
    if before is None:
        before = SETTLED_SCHEMA.empty_table()
    if "open" not in before.column_names:
        before = before.append_column("open", pa.nulls(before.num_rows, pa.bool_()))
    before = before.select(SETTLED_SCHEMA.names).cast(SETTLED_SCHEMA)
    before = before.filter(pc.is_in(before["topic"], pa.array(list(topics), pa.string())))
    is_folded = pc.fill_null(before["folded"], False)
    before = before.set_column(SETTLED_SCHEMA.get_field_index("folded"), "folded", is_folded)
    return before.filter(pc.invert(is_folded)), before.filter(is_folded)


def _without_rows(known: pa.Table, line_of: pa.ChunkedArray, folded: pa.Table) -> pa.Table:
    """Lines that no row speaks of any more and that stay. A row of the roster (no stream) or of a stream
    itself (no window) is there as long as its doubt is."""
    gone = np.ones(known.num_rows, bool)
    gone[line_of.drop_null().to_numpy()] = False
    left = known.filter(pa.array(gone))
    left = left.filter(pc.and_(pc.not_equal(left["stream"], ""), pc.is_valid(left["window_start_ms"])))
    return left.filter(pc.invert(is_among(left.select(WINDOW), folded.select(WINDOW))))


def _keys(table: pa.Table) -> pa.Table:
    """What a row is known by; a row without a window is one of its own, and a join never finds a null."""
    start_ms = table["window_start_ms"]
    columns = {name: table[name] for name in ("topic", "stream", "producer")}
    return pa.table(columns | {"start_ms": pc.fill_null(start_ms, 0), "is_own": pc.is_null(start_ms)})


def _is_last(keys: pa.Table) -> pa.ChunkedArray:
    """Whether no later row has the same key."""
    return pc.equal(found(keys, keys), numbers(keys))


def settled_now(table: pa.Table) -> pa.Table:
    """Without the lines of windows that are open again. An older program's table does not tell of any."""
    return (
        table.filter(pc.invert(pc.fill_null(table["open"], False))) if "open" in table.column_names else table
    )


def revisions_of(table: pa.Table) -> list[dict[str, Any]]:
    """For the summary: windows whose settled verdict was changed by late data, with the last change."""
    changed = table.filter(pc.greater(table["revision"], 1))
    return [
        {
            "topic": row["topic"],
            "producer": row["producer"],
            "window_start": iso_time(row["window_start_ms"]),
            "revision": row["revision"],
            "before": row["before"],
            "after": row["verdict"],
        }
        for row in changed.to_pylist()
        if row["window_start_ms"] is not None and not row["folded"]
    ]


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


def table_digest(table: pa.Table) -> str:
    """Equal for equal tables, however they lie in memory: tells whether anything was learnt."""
    content = hashlib.blake2b(digest_size=16)
    for first in range(0, table.num_rows, _DIGEST_ROWS):
        part = table.slice(first, _DIGEST_ROWS).combine_chunks()
        columns = [each for column in part.columns for each in _whole(column.combine_chunks())]
        content.update(pa.record_batch(columns, [str(number) for number in range(len(columns))]).serialize())
    return content.hexdigest()


def _whole(column: pa.Array) -> tuple[pa.Array, pa.Array]:
    """(its values, whether each is there) as bytes: what lies behind a null, or beside a bit, may differ."""
    values = column.cast(pa.uint8()) if pa.types.is_boolean(column.type) else column
    nothing = pa.scalar("" if pa.types.is_string(values.type) else 0, values.type)
    return pc.fill_null(values, nothing), pc.is_valid(column).cast(pa.uint8())
