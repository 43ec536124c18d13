"""The heatmaps as SVG paths and as data for the page's script. Pure; called by `html`.

All squares of one state are one path, so that a picture of two thousand squares takes some thirty kilobytes
and no element for each. A state has a colour and a mark, never a colour alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.audit.reconciliation.verdicts import GOOD, OPEN, OPEN_TOLD, STATES, Verdict
from millrace.audit.report.heatmap import Heatmap, Overview, Square
from millrace.audit.report.text import length, utc, visible

PITCH = 14  # from square to square
_LETTER = 6.4
MARKS = {
    "LOSS": "m3.5 3.5l5 5m0 -5l-5 5",
    "DUPLICATE": "m6 3v6m-3 -3h6",
    "UNKNOWN": "m3 6h6",
    "COUNT_MATCH": "m3.5 4.5h5m-5 3h5",
}
"""Drawn over a square, from its corner on: colours alone tell not everybody."""
WORDS_OF_MANY = {state: OPEN_TOLD if state == OPEN else Verdict[state].told_of_many for state in STATES}


@dataclass(frozen=True, slots=True)
class Text:
    x: float
    y: float
    text: str
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Layer:
    """All squares of one state: their outlines and their marks."""

    state: str
    squares: str
    marks: str


@dataclass(frozen=True, slots=True)
class Picture:
    """One SVG. `label` says in words what it shows."""

    number: int
    width: int
    height: int
    left: int
    top: int
    layers: list[Layer]
    texts: list[Text]
    waived: str
    label: str


class Drawings:
    """Makes pictures and keeps the data of all of them: `data[picture.number]`, ready for JSON.

    {left, top, line (height of a line), square_ms, base_ms, names: [[topic, tier], ...], squares: [[x, y,
    start, state, name, published, seen, missing, duplicates], ...]}; `start` counts `square_ms` from
    `base_ms`, `name` is an index into `names`, trailing zeros are left out.
    """

    def __init__(
        self, waived: Iterable[tuple[str, int]] = (), standing: Iterable[tuple[str, int]] = ()
    ) -> None:
        """`waived` and `standing`: windows, as (topic, start in ms), that a person has accepted, and those in
        doubt that nobody has. A square of several windows is marked as waived when it has none of these."""
        self.data: list[dict[str, Any]] = []
        self._waived = _by_topic(waived)
        self._standing = _by_topic(standing)

    def overview(self, overview: Overview) -> Picture:
        names = [(band.topic, tier) for band in overview.bands for tier, _ in band.lines]
        left = 12 + round(min(16, max((len(visible(tier, 16)) for _, tier in names), default=4)) * _LETTER)
        top = 20
        texts = [Text(left + x * PITCH, 12, text) for x, text in overview.labels]
        squares: list[tuple[int, Square]] = []
        y, line = top, 0
        for band in overview.bands:
            texts.append(Text(0, y + 13, visible(band.topic, 60), "topic"))
            y += 20
            for tier, held in band.lines:
                texts.append(Text(left - 8, y + 10, visible(tier, 16), "tier"))
                for square in held:
                    square.y = y
                    squares.append((line, square))
                y += PITCH
                line += 1
            y += 8
        end = max((text.x + len(text.text) * 7 for text in texts if text.kind != "tier"), default=0)
        return self._picture(
            squares,
            names,
            overview.square_ms,
            left=left,
            top=0,
            line_pitch=1,
            width=max(left + overview.width * PITCH, round(end)),
            height=y,
            texts=texts,
            label=f"{len(overview.bands)} topics, a square is {length(overview.square_ms)}",
        )

    def heatmap(self, heatmap: Heatmap) -> Picture:
        left = 12 + round(max((len(label) for _, label in heatmap.lines), default=0) * _LETTER)
        top = 18 if heatmap.columns else 2
        texts = [Text(left + x * PITCH, 11, label) for x, label in heatmap.columns]
        texts += [Text(0, top + 10 + y * PITCH, label) for y, label in heatmap.lines]
        return self._picture(
            [(0, square) for square in heatmap.squares],
            [(heatmap.topic, heatmap.tier)],
            heatmap.square_ms,
            left=left,
            top=top,
            line_pitch=PITCH,
            width=left + max(heatmap.width * PITCH, heatmap.label_end(PITCH, 7)),
            height=top + heatmap.height * PITCH,
            texts=texts,
            label=f"{visible(heatmap.topic)} in {visible(heatmap.tier)}",
        )

    def _picture(
        self,
        squares: Sequence[tuple[int, Square]],
        names: Sequence[tuple[str, str]],
        square_ms: int,
        *,
        left: int,
        top: int,
        line_pitch: int,
        width: int,
        height: int,
        texts: list[Text],
        label: str,
    ) -> Picture:
        base_ms = min((square.start_ms for _, square in squares), default=0)
        waived = []
        by_state: dict[str, list[tuple[int, int]]] = {}
        for line, square in squares:
            at = (left + square.x * PITCH, top + square.y * line_pitch)
            by_state.setdefault(square.state, []).append(at)
            calm = square.state in GOOD
            if not calm and self._is_waived(names[line][0], square.start_ms, square_ms):
                waived.append(at)
        number = len(self.data)
        self.data.append(
            {
                "left": left,
                "top": top,
                "line": line_pitch,
                "square_ms": square_ms,
                "base_ms": base_ms,
                "names": [[visible(topic), visible(tier)] for topic, tier in names],
                "squares": [_values(line, square, base_ms, square_ms) for line, square in squares],
            }
        )
        return Picture(
            number,
            width,
            height,
            left,
            top,
            [
                Layer(state, _outlines(by_state[state]), _marks(state, by_state[state]))
                for state in STATES
                if state in by_state
            ],
            texts,
            _rings(waived),
            f"{label}: {_in_words([square for _, square in squares])}",
        )

    def _is_waived(self, topic: str, start_ms: int, square_ms: int) -> bool:
        within = (start_ms, start_ms + square_ms)
        return _any(self._waived.get(topic), *within) and not _any(self._standing.get(topic), *within)


def _by_topic(windows: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    starts: dict[str, list[int]] = {}
    for topic, start_ms in windows:
        starts.setdefault(topic, []).append(start_ms)
    return {topic: sorted(of_it) for topic, of_it in starts.items()}


def _any(starts: Sequence[int] | None, from_ms: int, before_ms: int) -> bool:
    if not starts:
        return False
    at = bisect_left(starts, from_ms)
    return at < len(starts) and starts[at] < before_ms


def _values(line: int, square: Square, base_ms: int, square_ms: int) -> list[int]:
    values = [square.x, square.y, (square.start_ms - base_ms) // square_ms, STATES.index(square.state), line]
    values += [square.published, square.consumed, square.missing, square.duplicates]
    while values[-1] == 0 and len(values) > 5:
        values.pop()
    return values


def _outlines(places: Iterable[tuple[int, int]]) -> str:
    return "".join(f"M{x + 1} {y + 1}h10v10h-10z" for x, y in places)


def _rings(places: Iterable[tuple[int, int]]) -> str:
    return "".join(f"M{x - 0.5} {y - 0.5}h13v13h-13z" for x, y in places)


def _marks(state: str, places: Iterable[tuple[int, int]]) -> str:
    mark = MARKS.get(state)
    return "" if mark is None else "".join(f"M{x} {y}{mark}" for x, y in places)


def _in_words(squares: Sequence[Square]) -> str:
    """`365 squares: 2 with losses, 363 proven; the first loss in 2013-01-04 00:00`."""
    counts = [(state, sum(square.state == state for square in squares)) for state in STATES]
    told = ", ".join(f"{number:,} {WORDS_OF_MANY[state]}" for state, number in counts if number)
    first = min((square.start_ms for square in squares if square.state == "LOSS"), default=None)
    loss = "" if first is None else f"; the first loss {utc(first, '%Y-%m-%d %H:%M')} UTC"
    return f"{len(squares):,} squares, {told}{loss}" if told else "no windows"
