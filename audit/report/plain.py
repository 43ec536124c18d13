"""The plain reconciliation for the report: one row for each (topic, producer, window). Pure.

`fold` sums the streams of a producer (it has one for each start) with Arrow. `PlainRows` takes part after
part of them, and `table_data` is what the page's script pages and filters: the worst rows first, and of the
proven ones as many as fit `MOST_BYTES`; the others are told as one line for each producer, so that the sums
still agree with the summary. What is held is no more than can be shown, and a line for each producer and
state. Called by `html`. All rows are in producers.parquet (`by_producer`; called by `folder`), and the
streams' rows, which name the records, in reconciliation.parquet.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millrace.audit.reconciliation.row_parts import Rows, parts_of
from millrace.audit.reconciliation.verdict_rows import VERDICT_SCHEMA, iso_time
from millrace.audit.reconciliation.verdicts import GOOD, OPEN, STATES, VERDICTS, Verdict
from millrace.audit.report.text import visible

MOST_BYTES = 700_000  # of rows in the page
MOST_ROWS = MOST_BYTES // 16  # no row is told in fewer bytes
MOST_REST = 2_000  # lines for what did not fit
CONTENT = ("", "compared", "not compared", "differs")
COUNTS = ("missing", "duplicates", "in_flight", "unreported", "unknown", "explained")
# An open window is only that unless something was found in it already.
_OPEN = pa.scalar(STATES.index(OPEN), pa.int32())
_DUPLICATE = pa.scalar(STATES.index(str(Verdict.DUPLICATE)), pa.int32())
CALM = STATES.index(GOOD[-1])  # from here on nothing needs attention
_KEYS = ("topic", "producer", "window_start_ms", "window_ms")
_WORST_FIRST = [
    ("state", "ascending"),
    *((name, "ascending") for name in ("topic", "producer", "window_start_ms")),
]
FOLDED = [*_KEYS, "state", "verdict", "published", "consumed", *COUNTS, "content", "revision"]
"""What `fold` reads of rows."""

_REST_KEYS = ["state", "topic", "producer"]


def tier_names(rows: Rows, order: Sequence[str]) -> list[str]:
    """All tiers that any row counts, those of `order` first."""
    found: set[str] = set()
    for part in parts_of(rows, ["consumed"]):
        for chunk in part["consumed"].chunks:
            found.update(each for each in pc.unique(chunk.keys).to_pylist() if each is not None)
    return [*order, *sorted(found - set(order))]


def tier_column(rows: pa.Table, tier: str, name: str = "consumed") -> Any:
    """How many records the tier consumed (or `seen`), by row; null where the row says nothing of it."""
    kind = pa.int64()
    return pa.chunked_array([_of_tier(chunk, tier) for chunk in rows[name].chunks], kind)


def _of_tier(maps: pa.MapArray, tier: str) -> pa.Array:
    """Nearly always all rows tell of the same tiers in one order: then the counts stand at even distances,
    and no row is looked at; Arrow's own look takes nine times as long."""
    first, end = maps.offsets[0].as_py(), maps.offsets[-1].as_py()
    width, left = divmod(end - first, max(1, len(maps)))
    if width and not left and not maps.null_count and _are_even(maps.offsets, width):
        codes = maps.keys.slice(first, end - first).dictionary_encode()
        names = codes.indices.to_numpy().reshape(-1, width)
        if (names == names[0]).all():
            told = codes.dictionary.take(pa.array(names[0])).to_pylist()
            if tier not in told:
                return pa.nulls(len(maps), pa.int64())
            at = pa.array(np.arange(first + told.index(tier), end, width))
            return maps.items.take(at)
    return pc.map_lookup(maps, pa.scalar(tier, pa.string()), "first")


def _are_even(offsets: pa.Array, width: int) -> bool:
    return bool((np.diff(offsets.to_numpy()) == width).all())


def is_calm(rows: pa.Table) -> Any:
    """Rows that only count: settled, of a window, and proven or matched by count, so that every tier is as
    good as the row. They are nearly all of a large audit, and Arrow sums them."""
    proven = pc.is_in(rows["verdict"], value_set=pa.array(GOOD))
    settled = pc.equal(rows["state"], "SETTLED")
    return pc.and_(pc.and_(proven, settled), pc.is_valid(rows["window_start_ms"]))


def shown_state(rows: pa.Table) -> Any:
    """Each row's index into STATES."""
    verdict = pc.index_in(rows["verdict"], value_set=pa.array(VERDICTS))
    state = pc.take(pa.array([STATES.index(word) for word in VERDICTS], pa.int32()), verdict)
    is_open = pc.and_(pc.equal(rows["state"], OPEN), pc.greater(state, _DUPLICATE))
    return pc.if_else(is_open, _OPEN, state)


def fold(rows: pa.Table, tiers: Sequence[str]) -> pa.Table:
    """The rows by topic, producer and window: sums, the worst state (index into STATES), worst first.

    Columns: topic, producer, window_start_ms, window_ms, state, published, COUNTS, content (index into
    CONTENT), revision, streams, open, verdict (index into VERDICTS, the worst), and one `tier.<number>` for
    each tier.
    """
    columns: dict[str, Any] = {name: rows[name] for name in (*_KEYS, "published", *COUNTS, "revision")}
    columns["state"] = shown_state(rows)
    columns["open"] = pc.equal(rows["state"], OPEN)
    columns["verdict"] = pc.index_in(rows["verdict"], value_set=pa.array(VERDICTS))
    columns["content"] = pc.index_in(rows["content"], value_set=pa.array(CONTENT))
    for number, tier in enumerate(tiers):
        columns[f"tier.{number}"] = tier_column(rows, tier)
    tier_columns = [f"tier.{number}" for number in range(len(tiers))]
    sums = ["published", *COUNTS, *tier_columns]
    grouped = (
        pa.table(columns)
        .group_by(list(_KEYS))
        .aggregate(
            [
                *((name, "sum") for name in sums),
                ("state", "min"),
                ("content", "max"),
                ("revision", "max"),
                ("state", "count"),
                ("open", "max"),
                ("verdict", "max"),
            ]
        )
    )
    names = {
        **{f"{name}_sum": name for name in sums},
        "state_min": "state",
        "content_max": "content",
        "revision_max": "revision",
        "state_count": "streams",
        "open_max": "open",
        "verdict_max": "verdict",
    }
    grouped = grouped.rename_columns([names.get(name, name) for name in grouped.column_names])
    return grouped.sort_by(_WORST_FIRST)


def by_producer(rows: pa.Table) -> pa.Table:
    """The same for programs: one row for each (topic, producer, window), in that order, with

    topic, producer, window_start, window_start_ms, window_ms (times as in `reconciliation.parquet`; without a
    window: what belongs to no window), streams (how many are summed), state (OPEN when one is), verdict (the
    worst), published, consumed {tier: records, repeats included}, and the sums of missing, duplicates,
    in_flight, unreported, unknown, explained.
    """
    tiers = tier_names(rows, [])
    folded = fold(rows, tiers).sort_by([(name, "ascending") for name in _KEYS])
    starts = folded["window_start_ms"]
    times = pc.unique(starts)  # a time of many rows is written once
    written = pa.array([iso_time(each) for each in times.to_pylist()], pa.string())
    told = {
        "topic": folded["topic"],
        "producer": folded["producer"],
        "window_start": written.take(pc.index_in(starts, value_set=times)),
        "window_start_ms": starts,
        "window_ms": folded["window_ms"],
        "streams": folded["streams"],
        "state": pc.if_else(folded["open"], "OPEN", "SETTLED"),
        "verdict": pc.take(pa.array(VERDICTS), folded["verdict"]),
        "published": folded["published"],
        "consumed": _consumed(folded, tiers),
        **{name: folded[name] for name in COUNTS},
    }
    return pa.table(told)


def _consumed(folded: pa.Table, tiers: Sequence[str]) -> pa.Array:
    """{tier: records} of each row, of the tiers that it tells of."""
    kind = pa.map_(pa.string(), pa.int64())
    if not tiers or not folded.num_rows:
        return pa.array([[] for _ in range(folded.num_rows)], kind)
    columns = [folded[f"tier.{number}"].combine_chunks() for number in range(len(tiers))]
    counts = np.stack([each.fill_null(-1).to_numpy() for each in columns], axis=1)
    told = counts >= 0
    ends = np.concatenate(([0], np.cumsum(told.sum(axis=1)))).astype(np.int32)
    names = np.tile(np.arange(len(tiers)), (len(counts), 1))[told]
    keys = pa.array(list(tiers), pa.string()).take(pa.array(names))
    return pa.MapArray.from_arrays(pa.array(ends), keys, pa.array(counts[told], pa.int64())).cast(kind)


class PlainRows:
    """Rows of `fold`, taken part by part. `worst` are the first ones of all, as many as can be shown, `total`
    how many there are; `doubtful` has of each topic and window that is not good the worst state, with the
    first producer that it is of; what is behind the worst is summed by producer and state."""

    def __init__(self, tiers: Sequence[str]) -> None:
        self.tiers = list(tiers)
        self.total = 0
        self.starts: pa.Array = pa.array([], pa.int64())
        self.lengths: set[int] = set()
        self.worst = fold(VERDICT_SCHEMA.empty_table(), tiers)
        self.rest = self._sums(_one_by_one(self.worst))
        self._doubtful: list[pa.Table] = []

    def add(self, folded: pa.Table) -> None:
        """A part that has whole windows."""
        self.total += folded.num_rows
        starts = pc.unique(folded["window_start_ms"].drop_null())
        self.starts = pc.unique(pa.concat_arrays([self.starts, starts]))
        self.lengths.update(each for each in pc.unique(folded["window_ms"]).to_pylist() if each)
        self._doubtful.append(_doubtful(folded))
        ordered = pa.concat_tables([self.worst, folded]).sort_by(_WORST_FIRST)
        self.worst = ordered.slice(0, MOST_ROWS).combine_chunks()
        if ordered.num_rows > MOST_ROWS:
            behind = _one_by_one(ordered.slice(MOST_ROWS))
            self.rest = self._sums(pa.concat_tables([self.rest, behind]))

    def sum_up(self, folded: pa.Table) -> None:
        """A part of which no row is to be shown: `rest` has them all."""
        self.rest = self._sums(pa.concat_tables([self.rest, _one_by_one(folded)]))

    def join(self, sums: pa.Table, tiers: Sequence[str], window_ms: int) -> None:
        """Add the `rest` of others of these `tiers`. All their windows are of one length, and begin at
        multiples of it."""
        if not sums.num_rows:
            return
        self.total += pc.sum(sums["windows"]).as_py()
        self.starts = pc.unique(pa.concat_arrays([self.starts, pc.unique(sums["first"])]))
        self.lengths.add(window_ms)
        columns = {name: sums[name] for name in sums.column_names if not name.startswith("tier.")}
        for number, tier in enumerate(self.tiers):
            at = f"tier.{tiers.index(tier)}" if tier in tiers else ""
            columns[f"tier.{number}"] = sums[at] if at else pa.nulls(sums.num_rows, pa.int64())
        theirs = pa.table(columns).select(self.rest.column_names).cast(self.rest.schema)
        self.rest = self._sums(pa.concat_tables([self.rest, theirs]))

    @property
    def doubtful(self) -> pa.Table:
        return pa.concat_tables([_doubtful(self.worst.slice(0, 0)), *self._doubtful])

    def behind(self, shown: int) -> pa.Table:
        """What is behind the first `shown` rows, by state, topic and producer, or by state and topic."""
        lines = self._sums(pa.concat_tables([self.rest, _one_by_one(self.worst.slice(shown))]))
        if lines.num_rows > MOST_REST:
            lines = self._sums(lines.set_column(2, "producer", pa.nulls(lines.num_rows, pa.string())))
        return lines

    def _sums(self, lines: pa.Table) -> pa.Table:
        sums = ["windows", "published", *(f"tier.{number}" for number in range(len(self.tiers)))]
        grouped = lines.group_by(_REST_KEYS).aggregate(
            [("first", "min"), ("last", "max"), *((name, "sum") for name in sums)]
        )
        names = [*_REST_KEYS, "first", "last", *sums]
        found = grouped.select([*_REST_KEYS, "first_min", "last_max", *(f"{name}_sum" for name in sums)])
        return found.rename_columns(names).sort_by([(name, "ascending") for name in _REST_KEYS])


def _one_by_one(folded: pa.Table) -> pa.Table:
    """Rows as lines of what is behind the worst: state, topic, producer, first and last window, windows,
    published, tiers."""
    starts = folded["window_start_ms"]
    columns: dict[str, Any] = {name: folded[name] for name in _REST_KEYS}
    columns |= {"first": starts, "last": starts, "windows": pa.array(np.ones(folded.num_rows, np.int64))}
    tiers = (name for name in folded.column_names if name.startswith("tier."))
    return pa.table(columns | {name: folded[name] for name in ("published", *tiers)})


def _doubtful(folded: pa.Table) -> pa.Table:
    names = ["topic", "window_start_ms", "state", "producer"]
    rows = folded.select(names).filter(pc.less_equal(folded["state"], _OPEN))
    order = ("window_start_ms", "state", "producer")
    grouped = rows.sort_by([(name, "ascending") for name in order]).group_by(names[:2], use_threads=False)
    found = grouped.aggregate([("state", "first"), ("producer", "first")])
    return found.select([*names[:2], "state_first", "producer_first"]).rename_columns(names)


def table_data(rows: PlainRows, waived: Collection[tuple[str, int]] = ()) -> dict[str, Any]:
    """The page's data, ready for JSON:

    {topics, producers, tiers: names; base_ms, unit_ms; rows: [[topic, producer, window, state, length,
    published, [tiers], [counts], content, revision, streams, waived], ...] with trailing zeros left out;
    rest: [[topic, producer, first window, last window, windows, state, published, [tiers]], ...]; total}

    A window is a number of `unit_ms` after `base_ms`, or null; `length` is in `unit_ms`.
    """
    writer = _Writer(rows, waived)
    shown: list[list[Any]] = []
    size = 0
    for batch in rows.worst.to_batches(max_chunksize=5_000):
        if size >= MOST_BYTES:
            break
        for row in batch.to_pylist():
            told = writer.row(row)
            size += len(json.dumps(told, separators=(",", ":"))) + 1
            if size + writer.topics.size + writer.producers.size >= MOST_BYTES:
                size = MOST_BYTES
                break
            shown.append(told)
    return {
        "topics": writer.topics.names,
        "producers": writer.producers.names,
        "tiers": [visible(tier) for tier in rows.tiers],
        "base_ms": writer.base_ms,
        "unit_ms": writer.unit_ms,
        "rows": shown,
        "rest": _rest(rows.behind(len(shown)), writer),
        "total": rows.total,
    }


class _Names:
    """Names in the order in which they are first met."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.size = 0  # bytes in the page
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self.names)
            self.names.append(visible(name))
            self.size += len(json.dumps(self.names[-1])) + 1
        return number


class _Writer:
    def __init__(self, rows: PlainRows, waived: Collection[tuple[str, int]]) -> None:
        self.topics, self.producers = _Names(), _Names()
        self._tiers = [f"tier.{number}" for number in range(len(rows.tiers))]
        self._waived = waived
        self.base_ms = pc.min(rows.starts).as_py() if len(rows.starts) else 0
        unit_ms = min(rows.lengths, default=1)
        whole = all(each % unit_ms == 0 for each in rows.lengths) and not _any_off_grid(
            rows.starts, self.base_ms, unit_ms
        )
        self.unit_ms = unit_ms if whole else 1

    def window(self, start_ms: int | None) -> int | None:
        return None if start_ms is None else (start_ms - self.base_ms) // self.unit_ms

    def row(self, row: Mapping[str, Any]) -> list[Any]:
        told = [
            self.topics.number(row["topic"]),
            self.producers.number(row["producer"]),
            self.window(row["window_start_ms"]),
            row["state"],
            row["window_ms"] // self.unit_ms,
            row["published"],
            [row[name] for name in self._tiers],
            _trimmed([row[name] for name in COUNTS]),
            row["content"] or 0,
            row["revision"] if row["revision"] > 1 else 0,
            row["streams"] if row["streams"] != 1 else 0,
            int(row["state"] < CALM and (row["topic"], row["window_start_ms"]) in self._waived),
        ]
        while told[-1] in (0, []):
            told.pop()
        return told


def _trimmed(values: list[int]) -> list[int]:
    while values and values[-1] == 0:
        values.pop()
    return values


def _any_off_grid(starts: Any, base_ms: int, unit_ms: int) -> bool:
    if not len(starts):
        return False
    offsets = pc.subtract(starts, pa.scalar(base_ms, pa.int64()))
    unit = pa.scalar(unit_ms, pa.int64())
    return bool(pc.any(pc.not_equal(offsets, pc.multiply(pc.divide(offsets, unit), unit))).as_py())


def _rest(lines: pa.Table, writer: _Writer) -> list[list[Any]]:
    """What did not fit, as one line for each topic, producer and state; then for each topic and state."""
    tiers = [name for name in lines.column_names if name.startswith("tier.")]
    return [
        [
            writer.topics.number(row["topic"]),
            None if row["producer"] is None else writer.producers.number(row["producer"]),
            writer.window(row["first"]),
            writer.window(row["last"]),
            row["windows"],
            row["state"],
            row["published"],
            [row[name] for name in tiers],
        ]
        for row in lines.to_pylist()
    ]


def script_json(data: Mapping[str, Any]) -> str:
    """JSON that may stand inside a script element: nothing in it can end the element or begin a comment."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
