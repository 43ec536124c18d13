"""The completeness watermarks of one run: computed from its rows, told to downstream jobs.

`watermarks.json` in the report folder:

    {"version": 1, "at": "...", "run": 7, "watermarks": {"flights": {"watermark": "2013-01-02T00:00:00Z",
     "watermark_ms": 1357084800000}}}           both null while nothing is proven

Everything of the topic created before the watermark is proven, or waived by a person. It may move back only
when late data takes a proof away; the summary says so then (`watermark_steps_back`), and a downstream job
that read the later one has read something that is no longer proven. Called by `job`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from millrace.audit.contract.events import StreamFacts
from millrace.audit.reconciliation.verdict_rows import iso_time
from millrace.audit.reconciliation.verdicts import Verdict, WindowState, WindowVerdict
from millrace.audit.reconciliation.watermark import Waiver, completeness_watermark

FILE_NAME = "watermarks.json"
_COLUMNS = ["producer", "stream", "window_start_ms", "window_ms", "state", "verdict"]


def watermarks_of(
    rows: pa.Table,
    settled: pa.Table,
    streams: Iterable[StreamFacts],
    waivers: Iterable[Waiver],
    topics: Iterable[str],
) -> dict[str, int | None]:
    """{topic: ms or None}. `settled` has the lines of pruned windows, which were proven or waived; `waivers`
    are those that stand."""
    streams, waivers = list(streams), list(waivers)
    found = {}
    for topic in topics:
        lines = settled.filter(pc.and_(settled["folded"], pc.equal(settled["topic"], topic)))
        verdicts = [
            _verdict(topic, row, str(WindowState.SETTLED), Verdict.PROVEN) for row in lines.to_pylist()
        ]
        here = rows.filter(pc.equal(rows["topic"], topic))
        windows = here.filter(pc.is_valid(here["window_start_ms"])).select(_COLUMNS)
        verdicts += [
            _verdict(topic, row, row["state"], Verdict[row["verdict"]]) for row in windows.to_pylist()
        ]
        own = here.filter(pc.is_null(here["window_start_ms"])).select([*_COLUMNS, "detail"])
        for row in own.to_pylist():
            detail = json.loads(row["detail"])
            verdict = _verdict(topic, row, row["state"], Verdict[row["verdict"]])
            told = {"not_before_ms": detail.get("not_before_ms"), "reasons": tuple(detail.get("reasons", ()))}
            verdicts.append(replace(verdict, **told))
        found[topic] = completeness_watermark(topic, verdicts, streams, waivers)
    return found


def _verdict(topic: str, row: Mapping[str, Any], state: str, verdict: Verdict) -> WindowVerdict:
    return WindowVerdict(
        topic=topic,
        producer=row["producer"],
        stream=row["stream"],
        window_start_ms=row["window_start_ms"],
        window_ms=row["window_ms"],
        state=WindowState(state),
        verdict=verdict,
    )


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
