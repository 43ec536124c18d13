"""`audit explain <topic> <window>`: why a window has its verdict, from the state folder and the last report.

`run(config, topic, window)` gives the lines to print; nothing is read from any cluster. For each stream of
the window: what the producer acknowledged, what each tier saw, and for whatever is missing the last tier that
had it, the first that has not, and the offsets between which its neighbours lie. Offsets are those of cells:
a record's own offset is not kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

from millrace.audit.cell_rows import cells_of
from millrace.audit.cells import Cell
from millrace.audit.config import AuditConfig
from millrace.audit.sequence_set import to_ranges
from millrace.audit.state import StateFolder
from millrace.audit.verdict_rows import iso_time
from millrace.broker.errors import ConfigError

MOST_RANGES = 12


def run(config: AuditConfig, topic: str, window: str) -> list[str]:
    """The explanation, one line an element. Raises ConfigError for an unknown topic or window."""
    if topic not in config.topics:
        raise ConfigError("topic", topic, f"one of {', '.join(config.topics)}")
    start_ms = parse_window(window)
    rows = _rows(config.report / "reconciliation.parquet", topic, start_ms)
    if not rows:
        raise ConfigError("window", window, f"the start of a window of topic {topic} in the last report")
    streams = {row["stream"] for row in rows}
    cells = _cells(config.state, topic, start_ms, rows[0]["window_ms"], streams)
    lines = [f"{topic}, window {iso_time(start_ms)} of {rows[0]['window_ms'] / 1000:g} s"]
    for row in sorted(rows, key=lambda row: (row["producer"], row["stream"])):
        lines.append("")
        lines.extend(_explain(row, [cell for cell in cells if cell.stream == row["stream"]]))
    return lines


def parse_window(text: str) -> int:
    """A window's start: ISO 8601 (UTC unless it says otherwise) or milliseconds since 1970."""
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as problem:
        raise ConfigError("window", text, "a time such as 2013-01-01T00:00:00Z, or milliseconds") from problem
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return round(moment.timestamp() * 1000)


def _rows(path: Path, topic: str, start_ms: int) -> list[dict[str, Any]]:
    if not path.exists():
        raise ConfigError("report", str(path), "a report; run the audit first")
    wanted = (pc.field("topic") == topic) & (pc.field("window_start_ms") == start_ms)
    return pq.read_table(path, filters=wanted).to_pylist()


def _cells(state: Path, topic: str, start_ms: int, window_ms: int, streams: set[str]) -> list[Cell]:
    """The kept cells of the window (a row's window may span several of the audit's own)."""
    folder = StateFolder.open(state)
    wanted = (
        (pc.field("topic") == topic)
        & (pc.field("window_start_ms") >= start_ms)
        & (pc.field("window_start_ms") < start_ms + window_ms)
        & pc.field("stream").isin(sorted(streams))
        & ~pc.field("tail")
    )
    found: list[Cell] = []
    for name in folder.latest().cells:
        found.extend(cells_of(pq.ParquetFile(folder.root / name).read().filter(wanted)))
    return found


def _explain(row: dict[str, Any], cells: Sequence[Cell]) -> Iterator[str]:
    detail = json.loads(row["detail"])
    name = row["producer"] or "(no name)"
    yield f"producer {name}, stream {row['stream']}: {row['verdict']} ({row['state']})"
    yield f"  acknowledged  {row['published']:,}"
    seen = dict(row["seen"])
    for tier, count in row["consumed"]:
        here = [cell for cell in cells if cell.tier == tier]
        yield f"  {tier:<13} {count:,} records, {seen.get(tier, 0):,} distinct"
        for cell in sorted(here, key=lambda cell: (cell.partition, cell.first_offset)):
            yield (
                f"    partition {cell.partition}, offsets {cell.first_offset}-{cell.last_offset}: "
                f"{_text(to_ranges(cell.sequences()))}"
            )
    for lost in detail.get("missing", ()):
        yield from _explain_loss(lost, cells)
    for lost in detail.get("missing_count", ()):
        hop = " and ".join(lost["between"])
        yield f"  LOST {lost['count']:,} between {hop} (not numbered: cannot be named)"
    for tier, copies in detail.get("extra_copies", {}).items():
        named = _text(detail.get("duplicates", {}).get(tier, []))
        yield f"  TWICE in {tier}: {named} ({copies:,} extra copies)"
    for waiting in detail.get("in_flight", ()):
        yield f"  ON THE WAY from {' to '.join(waiting['between'])}: {_text(waiting['sequences'])}"
    for cause, ranges in detail.get("explained", {}).items():
        yield f"  EXPLAINED by {cause}: {_text(ranges)}"
    for name in ("unreported", "unknown"):
        if detail.get(name):
            yield f"  {name.upper()}: {_text(detail[name])}"
    for reason in detail.get("reasons", ()):
        yield f"  because {reason}"


def _explain_loss(lost: dict[str, Any], cells: Sequence[Cell]) -> Iterator[str]:
    upstream, downstream = lost["between"]
    yield f"  LOST between {upstream} and {downstream}: {_text(lost['sequences'])}"
    for first, last in lost["sequences"][:MOST_RANGES]:
        held = [cell for cell in cells if cell.tier == upstream and _touches(cell, first, last)]
        for cell in held:
            yield (
                f"    {_span(first, last)}: {upstream} has it in partition {cell.partition}, "
                f"offsets {cell.first_offset}-{cell.last_offset}"
            )
        yield f"    {_span(first, last)}: in {downstream}, {_neighbours(cells, downstream, first, last)}"


def _touches(cell: Cell, first: int, last: int) -> bool:
    return bool(cell.sequences().range_cardinality(first, last + 1))


def _neighbours(cells: Sequence[Cell], tier: str, first: int, last: int) -> str:
    """The nearest sequences that did arrive, with the offsets of their cells."""
    before: tuple[int, Cell] | None = None
    after: tuple[int, Cell] | None = None
    for cell in cells:
        if cell.tier != tier:
            continue
        for low, high in to_ranges(cell.sequences()):
            if high < first and (before is None or high > before[0]):
                before = (high, cell)
            if low > last and (after is None or low < after[0]):
                after = (low, cell)
    told = [
        f"{where} it {sequence} was seen (partition {cell.partition}, "
        f"offsets {cell.first_offset}-{cell.last_offset})"
        for where, neighbour in (("before", before), ("after", after))
        if neighbour is not None
        for sequence, cell in (neighbour,)
    ]
    return "; ".join(told) or "no neighbour of this window was seen"


def _span(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first}-{last}"


def _text(ranges: Sequence[Sequence[int]]) -> str:
    shown = ", ".join(_span(first, last) for first, last in ranges[:MOST_RANGES])
    rest = len(ranges) - MOST_RANGES
    return (shown or "nothing numbered") + (f" and {rest} more ranges" if rest > 0 else "")
