"""The verdict's horizon: from when on a finding that nobody mended or waived decides no more. Pure.

Called by `job`. A loss of last spring is as true as ever, but who looks at an exit status asks whether
something is wrong *now*: told for long enough, a finding is history. What is older than the horizon stays in
the report, by name, beside the verdict (`older` of the summary), and holds the watermark as before: only a
waiver lets that pass.

Must stay true: a finding decides until it has been told for as long as the horizon reaches back, however old
its window was when it was found (by an audit that had not run for months, or after late data), and one that
has changed since is told anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millrace.audit.reconciliation.verdicts import GOOD, WindowState

DEFAULT_HORIZON_MS = 30 * 86_400_000
_READ = ["stream", "window_start_ms", "window_ms", "detail"]


def split_older(rows: pa.Table, made_ms: pa.Array, since_ms: int | None) -> tuple[pa.Table, pa.Table]:
    """(the rows that decide, the findings that are older than `since_ms`), both as they were.

    `made_ms` is when each row's verdict was made, null for one that is not settled (`settled.settle`). What
    is proven is always among those that decide; so is what a producer of the roster owes, which is of today.
    """
    nothing = rows.slice(0, 0)
    if since_ms is None:
        return rows, nothing
    told_long = pc.fill_null(pc.less(made_ms, since_ms), False)
    settled = pc.equal(rows["state"], str(WindowState.SETTLED))
    finding = pc.invert(pc.is_in(rows["verdict"], value_set=pa.array(GOOD)))
    numbers = pc.indices_nonzero(pc.and_(pc.and_(told_long, settled), finding))
    told = rows.select(_READ).take(numbers).to_pylist()
    older = np.zeros(rows.num_rows, bool)
    older[numbers.to_numpy()] = [_is_of_the_past(row, since_ms) for row in told]
    if not older.any():
        return rows, nothing
    return rows.filter(pa.array(~older)), rows.filter(pa.array(older))


def _is_of_the_past(row: Mapping[str, Any], since_ms: int) -> bool:
    """By its window; a stream's own row by the beginning of its doubt, where that is known."""
    if row["window_start_ms"] is not None:
        return bool(row["window_start_ms"] + row["window_ms"] <= since_ms)
    not_before_ms = json.loads(row["detail"]).get("not_before_ms")
    return bool(row["stream"]) and (not_before_ms is None or not_before_ms < since_ms)
