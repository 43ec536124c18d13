"""Settled verdicts from run to run: their revisions, and the one line that is left of a pruned window. Pure.

Kept by `job` as `verdicts/<run>.parquet`, read by the next run, `status` and `waivers`:

    topic, producer, stream, window_start_ms, window_ms, verdict, and the counts of `reconciliation.parquet`;
    window_start_ms is null in a stream's own row
    revision       1 for the first settled verdict of the window, +1 whenever late data changed it
    before         the verdict before the last revision; "" in the first one
    settled_ms     when this revision was made
    content        digest of what a revision compares: all that the row says of records, by name
    open           true: the window is open again, and has no settled verdict now; the line keeps the last one
                   for its number
    folded         true: the line of a whole topic and window whose evidence was pruned (`upkeep`): its counts
                   are sums over its streams, its verdict is their worst

A window is open again when its doubt is gone and its producer has not promised that it is complete, or has
come back after a silence.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from millrace.audit.reconciliation.verdict_rows import iso_time
from millrace.audit.reconciliation.verdicts import WindowState

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
_READ = (*_KEY, "window_ms", "state", "verdict", *COUNTS, "ambiguous", "consumed", "detail")
_NOT_COMPARED = ("reasons", "append_ms", "not_before_ms", "unpromised")
_BATCH_ROWS = 20_000

Key = tuple[str, str, str, int | None]


@dataclass(frozen=True, slots=True)
class Settlement:
    """`table` (SETTLED_SCHEMA) goes into the state; `numbers` has each row's revision, 0 for an open one that
    never settled, and `made_ms` when that was made, null for an open one."""

    table: pa.Table
    numbers: pa.Array
    made_ms: pa.Array


def settle(rows: pa.Table, before: pa.Table | None, topics: Collection[str], now_ms: int) -> Settlement:
    """Put this run's verdicts beside the settled ones of the run before."""
    known: dict[Key, dict[str, Any]] = {}
    folded: list[dict[str, Any]] = []
    for row in [] if before is None else before.to_pylist():
        if row["topic"] not in topics:
            continue
        if row["folded"]:
            folded.append(row)
        else:
            known[_key(row)] = row
    gone = {(row["topic"], row["window_start_ms"]) for row in folded}
    numbers: list[int] = []
    made_ms: list[int | None] = []
    kept: dict[Key, dict[str, Any]] = {}
    for batch in rows.select(list(_READ)).to_batches(max_chunksize=_BATCH_ROWS):
        for row in batch.to_pylist():
            key = _key(row)
            earlier = known.get(key)
            if row["state"] != WindowState.SETTLED:
                if earlier is not None:
                    kept[key] = {**earlier, "open": True}
                numbers.append(0 if earlier is None else earlier["revision"])
                made_ms.append(None)
                continue
            kept[key] = _settled(row, earlier, now_ms)
            numbers.append(kept[key]["revision"])
            made_ms.append(kept[key]["settled_ms"])
    for key, earlier in known.items():
        # A row of the roster (no stream) or of a stream itself (no window) is there as long as its doubt is.
        if key not in kept and key[1] and key[3] is not None and (key[0], key[3]) not in gone:
            kept[key] = earlier
    ordered = sorted(kept.values(), key=_order)
    return Settlement(
        pa.Table.from_pylist([*folded, *ordered], SETTLED_SCHEMA),
        pa.array(numbers, pa.int32()),
        pa.array(made_ms, pa.int64()),
    )


def _settled(row: Mapping[str, Any], earlier: Mapping[str, Any] | None, now_ms: int) -> dict[str, Any]:
    content = _content(row)
    told = {name: row[name] for name in (*_KEY, "window_ms", "verdict", *COUNTS)} | {"open": False}
    if earlier is not None and earlier["content"] == content:
        return {
            **told,
            **{name: earlier[name] for name in ("revision", "before", "settled_ms", "content", "folded")},
        }
    return {
        **told,
        "revision": 1 if earlier is None else earlier["revision"] + 1,
        "before": "" if earlier is None else earlier["verdict"],
        "settled_ms": now_ms,
        "content": content,
        "folded": False,
    }


def _content(row: Mapping[str, Any]) -> str:
    """Equal for rows that say the same of every record; reasons and times may differ."""
    said = {} if row["detail"] == "{}" else json.loads(row["detail"])
    for name in _NOT_COMPARED:
        said.pop(name, None)
    for lost in said.get("missing", ()):
        lost.pop("places", None)
    told = [row["verdict"], row["published"], row["ambiguous"], sorted(row["consumed"]), said]
    return hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=12).hexdigest()


def _key(row: Mapping[str, Any]) -> Key:
    return (row["topic"], row["stream"], row["producer"], row["window_start_ms"])


def _order(row: Mapping[str, Any]) -> tuple[Any, ...]:
    start_ms = row["window_start_ms"]
    return (row["topic"], row["producer"], row["stream"], start_ms is None, start_ms or 0)


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


def without(table: pa.Table, pruned: Iterable[tuple[str, int]]) -> pa.Table:
    """The table with all lines of these (topic, window) made one each."""
    from millrace.audit.reconciliation.verdicts import Verdict

    wanted = set(pruned)
    lines: dict[tuple[str, int], dict[str, Any]] = {}
    rest = []
    for row in table.to_pylist():
        key = (row["topic"], row["window_start_ms"])
        if key not in wanted:
            rest.append(row)
            continue
        line = lines.get(key)
        if line is None:
            blank = dict.fromkeys(("producer", "stream", "before", "content"), "")
            lines[key] = {**row, **blank, "revision": 1, "folded": True}
            continue
        for name in COUNTS:
            line[name] += row[name]
        line["verdict"] = max(line["verdict"], row["verdict"], key=lambda word: Verdict[word])
        line["window_ms"] = max(line["window_ms"], row["window_ms"])
        line["settled_ms"] = max(line["settled_ms"], row["settled_ms"])
    folded = [row for row in rest if row["folded"]]
    folded = sorted([*folded, *lines.values()], key=lambda row: (row["topic"], row["window_start_ms"]))
    return pa.Table.from_pylist([*folded, *(row for row in rest if not row["folded"])], SETTLED_SCHEMA)


def table_digest(table: pa.Table) -> str:
    """Equal for equal tables: tells whether anything was learnt."""
    content = hashlib.blake2b(digest_size=16)
    for column in table.combine_chunks().columns:
        for chunk in column.chunks:
            content.update(repr(chunk.to_pylist()).encode())
    return content.hexdigest()
