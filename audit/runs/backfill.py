"""A backfill: the windows of a time range computed anew, beside the state and the last report. Pure.

Called by `job` and the command line. Windows are computed whole, so a range that begins or ends inside one is
widened to it, and the report says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from millrace.audit.config import AuditConfig
from millrace.audit.contract.events import EventLedger
from millrace.audit.report.text import utc
from millrace.audit.runs.fact_rows import PrunedWindows

TimeRange = tuple[int, int]
"""[from, until) in ms"""


def whole_windows(config: AuditConfig, only: TimeRange) -> TimeRange:
    """The range from the beginning of its first window to the end of its last."""
    return only[0] // config.window_ms * config.window_ms, -(-only[1] // config.window_ms) * config.window_ms


def report_folder(config: AuditConfig, only: TimeRange | None) -> Path | str:
    """Where the report of a run lies; a backfill's in a folder that is named by its windows' times."""
    if only is None:
        return config.report
    first, end = (utc(at_ms, "%Y%m%dT%H%M%SZ") for at_ms in whole_windows(config, only))
    name = f"backfill-{first}-{end}"
    return config.report / name if isinstance(config.report, Path) else f"{config.report}/{name}"


def left_pruned(
    pruned: Mapping[str, PrunedWindows], ledger: EventLedger, only: TimeRange
) -> dict[str, PrunedWindows]:
    """What stays pruned of each stream: no window of the range, and none whose report was read again.

    A record of the range may lie in another window, with a time that was changed: that one is looked at, too.
    The numbers of a report that is there again are not accounted for by what was pruned, or a loss of one
    would not show. Of a window whose report is gone nobody knows which numbers were its own.
    """
    for stream, left in pruned.items():
        facts = ledger.streams.get(stream)
        reports = {} if facts is None else facts.windows
        row_ms = math.lcm(left.window_ms, *(facts.windows.lengths() if facts is not None else ()))
        for first_ms, end_ms in (only, *((start_ms, start_ms + 1) for start_ms in reports)):
            first, end = (at // row_ms * row_ms for at in (first_ms, end_ms + row_ms - 1))
            left.windows.remove_range(first // left.window_ms, end // left.window_ms)
        for report in reports.values():
            told = report.acknowledged | report.ambiguous | report.failed
            left.sequences -= told
            left.ambiguous -= told
            left.failed -= told
        if left.told is not None:
            left.told = {start_ms: count for start_ms, count in left.told.items() if left.has(start_ms)}
    return {stream: left for stream, left in pruned.items() if left.windows}


READ = ["window_start_ms", "window_ms"]
"""What is read of rows to know which are in a range."""


def rows_between(rows: pa.Table, only: TimeRange) -> pa.Table:
    """The rows of windows that touch the range, and the streams' own, which no window is named for."""
    from_ms, until_ms = only
    starts = rows["window_start_ms"]
    touching = pc.and_(pc.less(starts, until_ms), pc.greater(pc.add(starts, rows["window_ms"]), from_ms))
    return rows.filter(pc.fill_null(touching, True))


def sentence(config: AuditConfig, only: TimeRange) -> str:
    """What it covers, and what was asked for where that is less."""
    whole = whole_windows(config, only)
    widened = "" if only == whole else f" (asked: {_span(only)}; windows are computed whole)"
    return f"backfill of the windows {_span(whole)}{widened}"


def _span(times_ms: TimeRange) -> str:
    first, end = (utc(at_ms, "%Y-%m-%dT%H:%M:%SZ") for at_ms in times_ms)
    return f"from {first} to {end}"
