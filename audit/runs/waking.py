"""Which windows at rest something came for, by a stream's own cells. Pure; called inside Spark's workers.

What is at rest is not judged: whoever judges the rest of a stream says here what it saw that might change
that, and `resting` has these windows judged again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from millrace.audit.reconciliation.reconcile import OF_STREAM, PRUNED_BEFORE
from millrace.audit.reconciliation.verdict_rows import counting_row
from millrace.audit.runs.fact_rows import PrunedWindows, decode_facts
from millrace.audit.scanning.cells import decode_bitmap

WAKING = "WAKING"
"""The state of a row that says of which windows at rest something came; such rows never leave the job."""

MOST_NAMED = 1_000
"""windows of a stream; of more, all that is at rest wakes"""


def waking_row(
    topic: str,
    known: Mapping[str, Any],
    resting: PrunedWindows,
    living: pa.Table,
    others: pa.Table,
    rows: pa.Table,
) -> dict[str, Any] | None:
    """What came for windows at rest of the stream whose row of facts is `known`; None where nothing did.

    `living` are its cells in windows that are judged, `others` those in windows that are not (CELL_SCHEMA);
    `rows` what is said of it (ROW_SCHEMA). The row names windows, or none of them where any may be meant."""
    starts = others["window_start_ms"].unique().to_pylist()
    named = [each for each in starts if resting.has(each)]
    may_be_any = len(named) > MOST_NAMED or _contradicts_itself(rows)
    may_be_any = may_be_any or _has_a_number(known, resting, living, rows)
    if not named and not may_be_any:
        return None
    told = json.dumps({"windows": None if may_be_any else named}, separators=(",", ":"))
    return {**counting_row(WAKING, topic, known["stream"], {}), "detail": told}


def _contradicts_itself(rows: pa.Table) -> bool:
    """Whether no window of the stream is proven any more."""
    own = rows.filter(pc.is_null(rows["window_start_ms"]))["detail"].to_pylist()
    return any(not set(json.loads(detail).get("reasons", ())) <= OF_STREAM for detail in own)


def _has_a_number(known: Mapping[str, Any], resting: PrunedWindows, living: pa.Table, rows: pa.Table) -> bool:
    """Whether one of the numbers at rest is in a window that is judged, too."""
    if not pc.any(pc.match_substring(rows["detail"], PRUNED_BEFORE)).as_py():
        return False  # nor one that is pruned
    reports = decode_facts(known["stream"], known["facts"], known.get("reports")).windows
    if any(not resting.certain.isdisjoint(report.acknowledged) for report in reports.values()):
        return True
    return any(
        bitmap is not None and not resting.certain.isdisjoint(decode_bitmap(base, bitmap))
        for base, bitmap in zip(*(living[name].to_pylist() for name in ("base", "bitmap")), strict=True)
    )
