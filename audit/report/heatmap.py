"""The heatmap of windows: which square of the report stands for which windows, and what it says. Pure.

`heatmaps(rows)` gives one `Heatmap` per topic and tier; `html` draws them as SVG. Windows of a day lie as in
a wall calendar (a column per week, a row per weekday); shorter ones fold into lines of a natural length.
However many windows there are, a heatmap has at most `MOST_SQUARES` squares: beyond that one square stands
for several windows and shows the worst of them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

from millrace.audit.verdict_rows import iso_time

MOST_SQUARES = 2_000
_MINUTE, _HOUR, _DAY = 60_000, 3_600_000, 86_400_000
# (longest square, length of a line): minutes fold into hours, hours into days, and so on.
_LINES = ((_MINUTE, _HOUR), (10 * _MINUTE, 6 * _HOUR), (_HOUR, _DAY))
_LINE_SQUARES = 48
_STEP_MINUTES = (1, 5, 10, 30, 60, 6 * 60, 24 * 60, 7 * 24 * 60, 28 * 24 * 60)

# Worst first; what a square shows is the first that any of its windows has.
STATES = ("LOSS", "DUPLICATE", "UNKNOWN", "OPEN", "PROVEN")


@dataclass(slots=True)
class Square:
    """Some windows of one topic in one tier. `x` and `y` count squares."""

    x: int
    y: int
    start_ms: int
    state: str
    published: int = 0
    consumed: int = 0
    missing: int = 0
    duplicates: int = 0


@dataclass(slots=True)
class Heatmap:
    """One topic in one tier. `columns` and `lines` label x and y; a square covers `square_ms`."""

    topic: str
    tier: str
    square_ms: int
    width: int
    height: int
    squares: list[Square] = field(default_factory=list)
    columns: list[tuple[int, str]] = field(default_factory=list)
    lines: list[tuple[int, str]] = field(default_factory=list)

    def label_end(self, column_size: int, letter_size: int) -> int:
        """Where the column labels end: a month that begins in the last column reaches beyond the squares."""
        return max((x * column_size + len(label) * letter_size for x, label in self.columns), default=0)


def heatmaps(rows: pa.Table, tiers: list[str]) -> list[Heatmap]:
    """Heatmaps of all verdict rows, topics in order, tiers in the order given."""
    found: dict[str, dict[str, list[tuple[int, dict[str, Any]]]]] = defaultdict(lambda: defaultdict(list))
    window_ms = 1
    for row in rows.to_pylist():
        if row["window_start_ms"] is None or iso_time(row["window_start_ms"]) is None:
            continue
        window_ms = max(window_ms, row["window_ms"])
        detail = json.loads(row["detail"])
        for tier, count in row["consumed"]:
            found[row["topic"]][tier].append((row["window_start_ms"], _tier_view(row, detail, tier, count)))
    maps = []
    for topic, by_tier in sorted(found.items()):
        starts = [start for views in by_tier.values() for start, _ in views]
        bounds = (min(starts), max(starts))  # of all tiers, so that a topic's maps line up
        for tier in [*tiers, *sorted(set(by_tier) - set(tiers))]:
            if tier in by_tier:
                maps.append(_lay_out(topic, tier, by_tier[tier], window_ms, bounds))
    return maps


def _tier_view(row: Mapping[str, Any], detail: Mapping[str, Any], tier: str, count: int) -> dict[str, Any]:
    """What the row says of one tier: a loss shows in the first tier without the records."""
    missing = sum(
        last - first + 1
        for lost in detail.get("missing", ())
        if lost["between"][1] == tier
        for first, last in lost["sequences"]
    ) + sum(lost["count"] for lost in detail.get("missing_count", ()) if lost["between"][1] == tier)
    copies = detail.get("extra_copies", {}).get(tier, 0)
    waiting = any(held["between"][1] == tier for held in detail.get("in_flight", ()))
    doubtful = row["verdict"] == "UNKNOWN" and (waiting or not detail.get("in_flight"))
    if missing:
        state = "LOSS"
    elif copies:
        state = "DUPLICATE"
    elif row["state"] == "OPEN":
        state = "OPEN"
    elif waiting or doubtful or detail.get("unreported"):
        state = "UNKNOWN"
    else:
        state = "PROVEN"
    return {
        "state": state,
        "published": row["published"],
        "consumed": count,
        "missing": missing,
        "duplicates": copies,
    }


def _lay_out(
    topic: str, tier: str, views: list[tuple[int, dict[str, Any]]], window_ms: int, bounds: tuple[int, int]
) -> Heatmap:
    first_ms, last_ms = bounds
    square_ms = window_ms
    for step_ms in (minutes * _MINUTE for minutes in _STEP_MINUTES):
        if (last_ms - first_ms) // square_ms < MOST_SQUARES:
            break
        if step_ms > square_ms and step_ms % window_ms == 0:
            square_ms = step_ms
    while (last_ms - first_ms) // square_ms >= MOST_SQUARES:
        square_ms *= 2
    squares: dict[int, Square] = {}
    for start_ms, view in views:
        at_ms = start_ms - start_ms % square_ms
        square = squares.get(at_ms)
        if square is None:
            square = squares[at_ms] = Square(0, 0, at_ms, view["state"])
        elif STATES.index(view["state"]) < STATES.index(square.state):
            square.state = view["state"]
        for name in ("published", "consumed", "missing", "duplicates"):
            setattr(square, name, getattr(square, name) + view[name])
    ordered = [squares[at_ms] for at_ms in sorted(squares)]
    heatmap = Heatmap(topic, tier, square_ms, 0, 0, ordered)
    if square_ms == _DAY:
        _as_calendar(heatmap, first_ms - first_ms % _DAY, last_ms)
    else:
        _as_lines(heatmap)
    heatmap.width = max(square.x for square in ordered) + 1
    heatmap.height = max(square.y for square in ordered) + 1
    return heatmap


def _as_calendar(heatmap: Heatmap, first_ms: int, last_ms: int) -> None:
    """Weeks from left to right, Monday on top; months are named above."""
    first = _moment(first_ms)
    monday = first - timedelta(days=first.weekday())
    months_seen: set[tuple[int, int]] = set()
    for square in heatmap.squares:
        day = _moment(square.start_ms)
        square.x, square.y = divmod((day - monday).days, 7)
    for x in range((_moment(last_ms) - monday).days // 7 + 1):
        # The column that holds a month's first day carries its name.
        day = min(monday + timedelta(days=7 * x + 6), _moment(last_ms))
        month = (day.year, day.month)
        if month not in months_seen:
            months_seen.add(month)
            label = day.strftime("%b %Y") if day.month == 1 or len(months_seen) == 1 else day.strftime("%b")
            heatmap.columns.append((x, label))
    heatmap.lines = [(0, "Mon"), (2, "Wed"), (4, "Fri")]


def _as_lines(heatmap: Heatmap) -> None:
    """Lines of a natural length, each labelled with its first moment; empty lines are left out."""
    line_ms = next(
        (line for longest, line in _LINES if heatmap.square_ms <= longest), heatmap.square_ms * _LINE_SQUARES
    )
    if heatmap.square_ms < _MINUTE and line_ms // heatmap.square_ms > 2 * _LINE_SQUARES:
        line_ms = heatmap.square_ms * _LINE_SQUARES
    starts = sorted({square.start_ms - square.start_ms % line_ms for square in heatmap.squares})
    numbers = {start: number for number, start in enumerate(starts)}
    for square in heatmap.squares:
        start = square.start_ms - square.start_ms % line_ms
        square.y = numbers[start]
        square.x = (square.start_ms - start) // heatmap.square_ms
    spec = "%Y-%m-%d" if line_ms % _DAY == 0 else "%Y-%m-%d %H:%M"
    step = max(1, len(starts) // 40)
    heatmap.lines = [(number, _moment(start).strftime(spec)) for start, number in numbers.items()][::step]


def _moment(at_ms: int) -> datetime:
    return datetime.fromtimestamp(at_ms / 1000, UTC)


def describe(square_ms: int) -> str:
    """`1 day`, `10 minutes`: for the legend."""
    for size, name in _units():
        if square_ms % size == 0:
            count = square_ms // size
            return f"{count} {name}{'' if count == 1 else 's'}"
    return f"{square_ms} milliseconds"


def _units() -> Iterator[tuple[int, str]]:
    yield from ((_DAY, "day"), (_HOUR, "hour"), (_MINUTE, "minute"), (1000, "second"))
