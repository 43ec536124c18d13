"""A backfill: the windows of a time range computed anew, beside the state and the last report. Pure.

Called by `job` and the command line. Windows are computed whole, so a range that begins or ends inside one is
widened to it, and the report says so.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from millrace.audit.config import AuditConfig
from millrace.audit.report.text import utc

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
