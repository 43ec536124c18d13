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

from millrace.audit.reconciliation.row_parts import Rows, View
from millrace.audit.reconciliation.settled import NUMBERED_SCHEMA
from millrace.audit.reconciliation.verdicts import GOOD, WindowState

DEFAULT_HORIZON_MS = 30 * 86_400_000
_OF_FINDINGS = ["stream", "window_start_ms", "window_ms", "detail"]
_READ = [*_OF_FINDINGS, "state", "verdict", "settled_ms"]


def split_older(rows: Rows, since_ms: int | None) -> tuple[Rows, Rows]:
    """(the rows that decide, the findings that are older than `since_ms`), both as they were.

    `rows` are numbered (`settled.NUMBERED_SCHEMA`): `settled_ms` is when each one's verdict was made. What is
    proven is always among those that decide; so is what a producer of the roster owes, which is of today.
    """
    if since_ms is None:
        return rows, NUMBERED_SCHEMA.empty_table()

    def deciding(part: pa.Table) -> pa.Table:
        return part.filter(pa.array(~_are_older(part, since_ms)))

    def older(part: pa.Table) -> pa.Table:
        return part.filter(pa.array(_are_older(part, since_ms)))

    return View(rows, deciding, _READ), View(rows, older, _READ)


def _are_older(rows: pa.Table, since_ms: int) -> np.ndarray:
    told_long = pc.fill_null(pc.less(rows["settled_ms"], since_ms), False)
    settled = pc.equal(rows["state"], str(WindowState.SETTLED))
    finding = pc.invert(pc.is_in(rows["verdict"], value_set=pa.array(GOOD)))
    numbers = pc.indices_nonzero(pc.and_(pc.and_(told_long, settled), finding))
    told = rows.select(_OF_FINDINGS).take(numbers).to_pylist()
    older = np.zeros(rows.num_rows, bool)
    older[numbers.to_numpy()] = [_is_of_the_past(row, since_ms) for row in told]
    return older


def _is_of_the_past(row: Mapping[str, Any], since_ms: int) -> bool:
    """By its window; a stream's own row by the beginning of its doubt, where that is known, and of a silence
    beside it: a hole of long ago has no beginning, and who fell silent today is missed today."""
    if row["window_start_ms"] is not None:
        return bool(row["window_start_ms"] + row["window_ms"] <= since_ms)
    detail = json.loads(row["detail"])
    begun_ms = (detail.get(name) for name in ("not_before_ms", "silent_from_ms"))
    return bool(row["stream"]) and all(at_ms is None or at_ms < since_ms for at_ms in begun_ms)
