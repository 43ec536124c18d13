"""The heatmaps of windows: which square of the report stands for which windows, and what it says. Pure.

`Windows` sums the rows; `overview` is one picture of all of them: time from left to right, a
line for each topic and tier, so that a loss shows below the tier that still had the records. `heatmaps` shows
each topic and tier by itself: windows of a day lie as in a wall calendar (a column per week, a row per
weekday); shorter ones fold into lines of a natural length. `drawing` makes SVG of both.

However many windows there are, a heatmap has at most `MOST_SQUARES` squares and all together `MOST_OF_ALL`:
beyond that one square stands for several windows and shows the worst of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from millrace.audit.reconciliation.row_parts import Rows, parts_of
from millrace.audit.reconciliation.verdicts import Verdict
from millrace.audit.report.plain import is_calm, tier_column
from millrace.audit.report.text import utc
from millrace.audit.report.tier_states import RANK, tier_state

MOST_SQUARES = 2_000
MOST_OF_ALL = 12_000
MOST_MAPS = 120  # each has a drawing of its own
MOST_COLUMNS = 84  # of the overview
MOST_LINES = 120
LAST_MS = 253_402_300_799_000  # the end of the year 9999: later times are no calendar's
_MINUTE, _HOUR, _DAY = 60_000, 3_600_000, 86_400_000
# (longest square, length of a line): minutes fold into hours, hours into days, and so on.
_LINES = ((_MINUTE, _HOUR), (10 * _MINUTE, 6 * _HOUR), (_HOUR, _DAY))
_LINE_SQUARES = 48
_STEP_MINUTES = (1, 5, 10, 30, 60, 3 * 60, 6 * 60, 12 * 60, 24 * 60, 7 * 24 * 60, 28 * 24 * 60)
_READ = [
    "topic",
    "window_start_ms",
    "window_ms",
    "state",
    "verdict",
    "published",
    "consumed",
    "seen",
    "detail",
]
_LABEL_COLUMNS = 8  # squares that a time below the overview needs


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

    def add(self, state: str, published: int, consumed: int, missing: int, duplicates: int) -> None:
        if RANK[state] < RANK[self.state]:
            self.state = state
        self.published += published
        self.consumed += consumed
        self.missing += missing
        self.duplicates += duplicates

    def add_square(self, other: Square) -> None:
        self.add(other.state, other.published, other.consumed, other.missing, other.duplicates)


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


@dataclass(slots=True)
class Band:
    """One topic's lines in the overview, one for each tier."""

    topic: str
    lines: list[tuple[str, list[Square]]]


@dataclass(slots=True)
class Overview:
    """All topics over one time axis. `labels` are (column, text); `left_out` topics were all proven."""

    square_ms: int = 1
    width: int = 0
    bands: list[Band] = field(default_factory=list)
    labels: list[tuple[int, str]] = field(default_factory=list)
    left_out: int = 0


ByStart = dict[int, Square]
ByTier = dict[str, ByStart]


SQUARES = pa.schema(
    [
        ("topic", pa.string()),
        ("tier", pa.string()),
        ("window_start_ms", pa.int64()),
        ("published", pa.int64()),
        ("consumed", pa.int64()),
    ]
)
"""Windows that are settled and proven, as `Windows.squares` sums them up."""


class Windows:
    """Every window of every topic and tier, summed over producers. `window_ms` is the longest window."""

    def __init__(self, tiers: Sequence[str]) -> None:
        self.tiers = list(tiers)
        self.window_ms = 1
        self.by_topic: dict[str, ByTier] = {}

    def add_all(self, rows: Rows) -> None:
        for part in parts_of(rows, _READ):
            self.add_part(part)

    def squares(self) -> pa.Table:
        """What `Windows` of other rows add (SQUARES); of rows that were settled and proven, all of them."""
        told = [
            (topic, tier, start_ms, square.published, square.consumed)
            for topic, tiers in self.by_topic.items()
            for tier, starts in tiers.items()
            for start_ms, square in starts.items()
        ]
        columns = zip(*told, strict=True) if told else ((),) * len(SQUARES)
        return pa.table([list(each) for each in columns], schema=SQUARES)

    def join(self, squares: pa.Table, window_ms: int) -> None:
        """Add what others have summed up, of windows of this length."""
        self.window_ms = max(self.window_ms, window_ms)
        proven = str(Verdict.PROVEN)
        for topic, tier, start_ms, published, consumed in zip(
            *(squares[name].to_pylist() for name in SQUARES.names), strict=True
        ):
            self._add(topic, tier, start_ms, proven, (published, consumed, 0, 0))

    def add_part(self, rows: pa.Table) -> None:
        start = rows["window_start_ms"]
        inside = pc.and_(pc.greater_equal(start, 0), pc.less(start, LAST_MS))
        rows = rows.filter(pc.fill_null(inside, False))
        self.window_ms = max(self.window_ms, pc.max(rows["window_ms"]).as_py() or 1)
        calm = is_calm(rows)
        self._add_calm(rows.filter(calm))
        for batch in rows.filter(pc.invert(calm)).to_batches(max_chunksize=10_000):
            self._add_told(batch.to_pylist())

    def _add_calm(self, rows: pa.Table) -> None:
        for tier in self.tiers:
            here = pa.table(
                {
                    "topic": rows["topic"],
                    "start": rows["window_start_ms"],
                    "state": rows["verdict"],
                    "published": rows["published"],
                    "consumed": tier_column(rows, tier),
                }
            )
            here = here.filter(pc.is_valid(here["consumed"]))
            sums = here.group_by(["topic", "start", "state"]).aggregate(
                [("published", "sum"), ("consumed", "sum")]
            )
            for row in sums.to_pylist():
                counts = (row["published_sum"], row["consumed_sum"], 0, 0)
                self._add(row["topic"], tier, row["start"], row["state"], counts)

    def _add_told(self, rows: Iterable[Mapping[str, Any]]) -> None:
        for row in rows:
            detail = json.loads(row["detail"])
            for tier, count in row["consumed"]:
                found = tier_state(row, detail, tier)
                counts = (row["published"], count, found.missing, found.duplicates)
                self._add(row["topic"], tier, row["window_start_ms"], found.state, counts)

    def _add(
        self, topic: str, tier: str, start_ms: int, state: str, counts: tuple[int, int, int, int]
    ) -> None:
        starts = self.by_topic.setdefault(topic, {}).setdefault(tier, {})
        square = starts.get(start_ms)
        if square is None:
            square = starts[start_ms] = Square(0, 0, start_ms, state)
        square.add(state, *counts)

    def bounds(self, topic: str | None = None) -> tuple[int, int]:
        """First and last start, of all tiers so that a topic's maps line up."""
        topics = self.by_topic.values() if topic is None else [self.by_topic[topic]]
        starts = [start for tiers in topics for by_start in tiers.values() for start in by_start]
        return min(starts), max(starts)

    def worst(self, topic: str) -> int:
        return min(
            RANK[square.state] for squares in self.by_topic[topic].values() for square in squares.values()
        )

    def tiers_of(self, topic: str) -> list[str]:
        return [tier for tier in self.tiers if tier in self.by_topic[topic]]


def overview(windows: Windows) -> Overview:
    """Topics in order, of too many the worst."""
    if not windows.by_topic:
        return Overview()
    first_ms, last_ms = windows.bounds()
    square_ms = _square_ms(windows.window_ms, first_ms, last_ms, MOST_COLUMNS)
    origin_ms = _floor(first_ms, square_ms)
    topics = sorted(windows.by_topic, key=lambda topic: (windows.worst(topic), topic))
    most = max(1, MOST_LINES // max(1, len(windows.tiers)))
    told = Overview(square_ms, left_out=max(0, len(topics) - most))
    for topic in sorted(topics[:most]):
        lines = []
        for tier in windows.tiers_of(topic):
            squares = _summed(windows.by_topic[topic][tier], square_ms)
            for square in squares:
                square.x = (square.start_ms - origin_ms) // square_ms
            lines.append((tier, squares))
        told.bands.append(Band(topic, lines))
    told.width = (last_ms - origin_ms) // square_ms + 1
    told.labels = _time_labels(origin_ms, square_ms, told.width)
    return told


def _time_labels(origin_ms: int, square_ms: int, width: int) -> list[tuple[int, str]]:
    """Times for every few columns: days where squares are long, hours with the date where it changes."""
    labels: list[tuple[int, str]] = []
    before = ""
    for x in range(0, max(1, width - _LABEL_COLUMNS // 2), _LABEL_COLUMNS):
        at_ms = origin_ms + x * square_ms
        date = utc(at_ms, "%Y") if square_ms >= _DAY else utc(at_ms, "%-d %b")
        spec = "%-d %b" if square_ms >= _DAY else "%H:%M" if square_ms >= _MINUTE else "%H:%M:%S"
        text = utc(at_ms, spec)
        if date != before:
            text = f"{text} {date}" if square_ms >= _DAY else f"{date} {text}"
        labels.append((x, text))
        before = date
    return labels


def heatmaps(windows: Windows) -> list[Heatmap]:
    """A heatmap for each topic and tier, topics in order, as many as `MOST_OF_ALL` allows: the worst."""
    maps: list[Heatmap] = []
    room = MOST_OF_ALL
    for topic in sorted(windows.by_topic, key=lambda topic: (windows.worst(topic), topic)):
        bounds = windows.bounds(topic)
        tiers = windows.tiers_of(topic)
        # A topic with many tiers gets fewer squares for each, so that none of them is left out.
        most = min(MOST_SQUARES, MOST_OF_ALL // max(1, len(tiers)))
        drawn = [
            _lay_out(topic, tier, windows.by_topic[topic][tier], windows.window_ms, bounds, most)
            for tier in tiers
        ]
        room -= sum(len(each.squares) for each in drawn)
        if room < 0 or len(maps) + len(drawn) > MOST_MAPS:
            break
        maps.extend(drawn)
    return sorted(maps, key=lambda each: (each.topic, windows.tiers.index(each.tier)))


def _summed(by_start: ByStart, square_ms: int) -> list[Square]:
    """Squares of `square_ms`, ascending."""
    squares: dict[int, Square] = {}
    for start_ms, window in by_start.items():
        at_ms = _floor(start_ms, square_ms)
        square = squares.get(at_ms)
        if square is None:
            square = squares[at_ms] = Square(0, 0, at_ms, window.state)
        square.add_square(window)
    return [squares[at_ms] for at_ms in sorted(squares)]


def _floor(start_ms: int, square_ms: int) -> int:
    """The start of the square that a window lies in; weeks begin on Mondays (1970 began on a Thursday)."""
    shift_ms = 4 * _DAY if square_ms % (7 * _DAY) == 0 else 0
    return start_ms - (start_ms - shift_ms) % square_ms


def _square_ms(window_ms: int, first_ms: int, last_ms: int, most: int) -> int:
    """The shortest natural length with at most `most` squares from first to last."""
    square_ms = window_ms
    for step_ms in (minutes * _MINUTE for minutes in _STEP_MINUTES):
        if (last_ms - first_ms) // square_ms < most:
            break
        if step_ms > square_ms and step_ms % window_ms == 0:
            square_ms = step_ms
    while (last_ms - first_ms) // square_ms >= most:
        square_ms *= 2
    return square_ms


def _lay_out(
    topic: str, tier: str, by_start: ByStart, window_ms: int, bounds: tuple[int, int], most: int
) -> Heatmap:
    first_ms, last_ms = bounds
    square_ms = _square_ms(window_ms, first_ms, last_ms, most)
    ordered = _summed(by_start, square_ms)
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
        day = monday + min(timedelta(days=7 * x + 6), _moment(last_ms) - monday)  # the calendar may end in it
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
