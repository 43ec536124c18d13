"""Rows summed over their streams: what a topic's window comes to, and each stream's own row. Pure.

Watermarks and waivers ask for windows of topics. There are as many of them as of minutes, however many
streams there are, and Arrow sums them up. Each column is a sum or a maximum.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from millrace.audit.reconciliation.verdicts import DIFFERS, VERDICTS, Verdict, WindowState

DOUBTS = ("in_flight", "unreported", "unknown", "explained")
COLUMNS = ["topic", "stream", "window_start_ms", "window_ms", "verdict", "missing", "duplicates", *DOUBTS]
COLUMNS += ["content"]
"""What is read of a row, beside its `state`."""

_KEY = ["topic", "stream", "window_start_ms"]
_SUMS = ("open", "telling", "missing", "duplicates", "doubtful", "differing")
_WORST = ("window_ms", "worst", "worst_told")
_FINDINGS = pa.array([str(Verdict.LOSS), str(Verdict.DUPLICATE)])


def window_totals(rows: pa.Table) -> pa.Table:
    """A line for each of

    topic, stream, window_start_ms    the stream is "" but in its own row, which has no window
    window_ms                         the longest
    open, telling                     rows that are not settled; those that say something by now: settled
                                      ones, and losses and duplicates wherever they are
    worst, worst_told                 the worst verdict (index into VERDICTS) of all rows, of the telling ones
    missing, duplicates, doubtful     sums over the telling ones
    differing                         in how many of these contents differ

    Rows without a `state` are all settled: lines of the state, whose `content` tells nothing of that.
    """
    rank = pc.index_in(rows["verdict"], value_set=pa.array(VERDICTS))
    settled = _settled(rows)
    telling = pc.or_(settled, pc.is_in(rows["verdict"], value_set=_FINDINGS))
    doubtful = rows[DOUBTS[0]]
    for name in DOUBTS[1:]:
        doubtful = pc.add(doubtful, rows[name])
    said = telling.cast(pa.int64())
    columns: dict[str, Any] = {
        "topic": rows["topic"],
        "stream": pc.if_else(pc.is_null(rows["window_start_ms"]), rows["stream"], ""),
        "window_start_ms": rows["window_start_ms"],
        "window_ms": rows["window_ms"],
        "open": pc.invert(settled).cast(pa.int64()),
        "telling": said,
        "worst": rank,
        "worst_told": pc.if_else(telling, rank, pa.scalar(0, rank.type)),
        "missing": pc.multiply(rows["missing"], said),
        "duplicates": pc.multiply(rows["duplicates"], said),
        "doubtful": pc.multiply(doubtful, said),
        "differing": pc.multiply(pc.equal(rows["content"], DIFFERS).cast(pa.int64()), said),
    }
    sums = [*((name, "sum") for name in _SUMS), *((name, "max") for name in _WORST)]
    grouped = pa.table(columns).group_by(_KEY).aggregate(sums)
    return grouped.rename_columns(
        [name.removesuffix("_sum").removesuffix("_max") for name in grouped.column_names]
    )


def _settled(rows: pa.Table) -> Any:
    if "state" not in rows.column_names:
        return pa.repeat(True, rows.num_rows)
    return pc.equal(rows["state"], str(WindowState.SETTLED))
