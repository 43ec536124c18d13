"""`index.html`: the audit for people, one self-contained file. Pure: summary and verdict rows in, text out.

Nothing is fetched when it is opened: style and script are inlined, the heatmaps are SVG made here. Everything
that a producer or topic may have named is escaped by the template engine. Called by `job`.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import pyarrow as pa
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from millrace.audit.report.heatmap import describe, heatmaps
from millrace.audit.verdict_rows import iso_time

MOST_ROWS = 200  # of losses or duplicates; all of them are in summary.json
MOST_RANGES = 8  # of one row
_TITLES = {
    "PROVEN": "Proven",
    "COUNT_MATCH": "The counts agree",
    "LOSS": "Records were lost",
    "DUPLICATE": "Records arrived twice",
    "UNKNOWN": "Not proven yet",
}


def render(summary: Mapping[str, Any], rows: pa.Table) -> str:
    """The whole page."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(count=_count, ranges=_ranges, day=_day, span=describe, time=iso_time)
    folder = files("millrace.audit.report")
    return environment.from_string(_text(folder, "index.html.jinja")).render(
        summary=summary,
        title=_TITLES[summary["verdict"]],
        tiers=list(summary["counts"]["seen"]),
        heatmaps=heatmaps(rows, list(summary["counts"]["seen"])),
        latencies=latencies(rows),
        style=Markup(_text(folder, "style.css")),
        script=Markup(_text(folder, "report.js")),
        most=MOST_ROWS,
    )


def _text(folder: Any, name: str) -> str:
    return str(folder.joinpath(name).read_text("utf-8"))


def latencies(rows: pa.Table) -> list[dict[str, Any]]:
    """Per topic and hop: how much later the last record of a window was appended downstream.

    Known only where both brokers stamp append times; windows of one producer each give one sample.
    """
    samples: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for topic, text in zip(rows["topic"].to_pylist(), rows["detail"].to_pylist(), strict=True):
        if '"append_ms"' not in text:
            continue
        tiers = list(json.loads(text)["append_ms"].items())
        for (upstream, (_, before)), (downstream, (_, after)) in itertools.pairwise(tiers):
            samples[topic, upstream, downstream].append(after - before)
    return [
        {
            "topic": topic,
            "between": [upstream, downstream],
            "windows": len(each),
            "median_ms": statistics.median(each),
            "worst_ms": max(each),
        }
        for (topic, upstream, downstream), each in sorted(samples.items())
    ]


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _day(window_start: str | None) -> str:
    """A window's start, without what every window of a day shares."""
    if window_start is None:
        return "no window known"
    return window_start.removesuffix("T00:00:00Z").replace("T", " ").removesuffix("Z")


def _ranges(sequences: list[list[int]]) -> str:
    """`3, 7-9, …`: as many as a reader can take in."""
    if not sequences:
        return "not numbered"
    shown = [f"{first}" if first == last else f"{first}–{last}" for first, last in sequences[:MOST_RANGES]]
    rest = len(sequences) - len(shown)
    return ", ".join(shown) + (f" and {rest} more ranges" if rest else "")
