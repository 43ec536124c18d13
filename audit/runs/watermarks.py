"""The completeness watermarks of one run: computed from its rows, told to downstream jobs.

`watermarks.json` in the report folder:

    {"version": 1, "at": "...", "run": 7, "watermarks": {"flights": {"watermark": "2013-01-02T00:00:00Z",
     "watermark_ms": 1357084800000}}}           both null while nothing is proven

Everything of the topic created before the watermark is proven, or waived by a person. It may move back only
when late data takes a proof away; the summary says so then (`watermark_steps_back`), and a downstream job
that read the later one has read something that is no longer proven. Called by `job` and `watermark_holds`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from millrace.audit.contract.events import StreamFacts
from millrace.audit.reconciliation.row_parts import Rows, parts_of
from millrace.audit.reconciliation.spans import NO_SPANS
from millrace.audit.reconciliation.verdict_rows import iso_time
from millrace.audit.reconciliation.verdicts import VERDICTS, Verdict, WindowState, WindowVerdict
from millrace.audit.reconciliation.watermark import Completeness, Waiver, completeness
from millrace.audit.reconciliation.window_totals import COLUMNS, window_totals

FILE_NAME = "watermarks.json"
_OWN = ["topic", "producer", "stream", "window_ms", "state", "verdict", "detail"]


def watermarks_of(
    rows: Rows,
    settled: pa.Table,
    streams: Iterable[StreamFacts],
    waivers: Iterable[Waiver],
    topics: Iterable[str],
    *,
    over_ms: int,
    spans: pa.Table = NO_SPANS,
) -> dict[str, int | None]:
    """{topic: ms or None}, as `completeness_of` finds them."""
    found = completeness_of(rows, settled, streams, waivers, topics, over_ms=over_ms, spans=spans)
    return {topic: each.watermark_ms for topic, each in found.items()}


def completeness_of(
    rows: Rows,
    settled: pa.Table,
    streams: Iterable[StreamFacts],
    waivers: Iterable[Waiver],
    topics: Iterable[str],
    *,
    over_ms: int,
    spans: pa.Table = NO_SPANS,
) -> dict[str, Completeness]:
    """By topic. `settled` has the lines of pruned windows, which were proven or waived, and `spans` those
    that were summed up; `waivers` are those
    that stand; windows that end after `over_ms` are not over. What is held is a verdict or two a topic and
    window, and rows without a window."""
    streams, waivers = list(streams), list(waivers)
    verdicts: dict[str, list[WindowVerdict]] = {topic: [] for topic in topics}
    for part in parts_of(rows, list(dict.fromkeys([*COLUMNS, *_OWN]))):
        has_window = pc.is_valid(part["window_start_ms"])
        for window in _windows(part.filter(has_window)):
            if window.topic in verdicts:
                verdicts[window.topic].append(window)
        for row in part.select(_OWN).filter(pc.invert(has_window)).to_pylist():
            if row["topic"] in verdicts:
                verdicts[row["topic"]].append(_own(row))
    for window in _pruned(settled):
        if window.topic in verdicts:
            verdicts[window.topic].append(window)
    proven: dict[str, list[tuple[int, int, int]]] = {}
    for span in spans.select(["topic", "start_ms", "end_ms", "window_ms"]).to_pylist():
        proven.setdefault(span["topic"], []).append((span["start_ms"], span["end_ms"], span["window_ms"]))
    return {
        topic: completeness(topic, found, streams, waivers, over_ms=over_ms, spans=proven.get(topic, ()))
        for topic, found in verdicts.items()
    }


def _windows(rows: pa.Table) -> Iterator[WindowVerdict]:
    """What the rows of each window come to: one that is settled and good, as long as all of them are. One
    with an open row is open, and what is found in it by now is beside that."""
    for window in window_totals(rows).to_pylist():
        state = WindowState.OPEN if window["open"] else WindowState.SETTLED
        yield _window(window, Verdict[VERDICTS[window["worst"]]], state)
        if window["open"] and window["worst_told"] > Verdict.COUNT_MATCH:
            yield _window(window, Verdict[VERDICTS[window["worst_told"]]])


def _pruned(settled: pa.Table) -> Iterator[WindowVerdict]:
    """The lines of windows that were proven or waived when they were pruned."""
    lines = settled.filter(settled["folded"]).select(["topic", "window_start_ms", "window_ms"])
    for line in lines.to_pylist():
        yield _window(line, Verdict.PROVEN)


def _window(
    told: Mapping[str, Any], verdict: Verdict, state: WindowState = WindowState.SETTLED
) -> WindowVerdict:
    start_ms, window_ms = told["window_start_ms"], told["window_ms"]
    return WindowVerdict(told["topic"], "", "", start_ms, window_ms, state, verdict)


def _own(row: Mapping[str, Any]) -> WindowVerdict:
    """A stream's own row, which says from when on it is in doubt."""
    detail = json.loads(row["detail"])
    return WindowVerdict(
        topic=row["topic"],
        producer=row["producer"],
        stream=row["stream"],
        window_start_ms=None,
        window_ms=row["window_ms"],
        state=WindowState(row["state"]),
        verdict=Verdict[row["verdict"]],
        not_before_ms=detail.get("not_before_ms"),
        reasons=tuple(detail.get("reasons", ())),
    )


def last_told(document: Mapping[str, Any], committed: Mapping[str, int]) -> dict[str, int]:
    """The latest watermark of each topic that anybody may go by: the last commit's, or that of the report's
    `watermarks.json`, of which a run that died behind its commit has told no step back."""
    told = dict(committed)
    for topic, each in _dictionary(document.get("watermarks")).items():
        at_ms = _dictionary(each).get("watermark_ms")
        if isinstance(at_ms, int):
            told[topic] = max(at_ms, told.get(topic, at_ms))
    return told


def _dictionary(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def steps_back(before: Mapping[str, int], now: Mapping[str, int | None]) -> list[dict[str, Any]]:
    """Topics whose watermark is earlier than the last one told."""
    return [
        {"topic": topic, "before": iso_time(before[topic]), "after": iso_time(at_ms)}
        for topic, at_ms in sorted(now.items())
        if topic in before and (at_ms is None or at_ms < before[topic])
    ]


def document(watermarks: Mapping[str, int | None], at_ms: int, run: int) -> str:
    """The text of `watermarks.json`."""
    told = {
        topic: {"watermark": iso_time(at), "watermark_ms": at} for topic, at in sorted(watermarks.items())
    }
    body = {"version": 1, "at": iso_time(at_ms), "run": run, "watermarks": told}
    return json.dumps(body, indent=2) + "\n"
