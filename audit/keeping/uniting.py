"""Which windows' cells lose their places when cells are folded (`cell_union` does it). Pure.

Called by `next_commit`. A window is united when its row of this very run is SETTLED and PROVEN: every record
that was acknowledged was seen once in every tier, and no more is to come as far as anybody promised. A mirror
that keeps no positions is judged by arrivals, for which the offsets of *all* cells count, so nothing is
united where such a mirror carries, nor while an aggregate has no positions at all.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

from millrace.audit.config import AuditConfig
from millrace.audit.reconciliation.row_keys import WINDOW
from millrace.audit.reconciliation.spans import are_in
from millrace.audit.reconciliation.verdicts import Verdict, WindowState
from millrace.audit.runs.capture import Capture
from millrace.audit.runs.fact_rows import PrunedWindows
from millrace.audit.runs.reading_plan import passages

PLAN_SCHEMA = pa.schema(
    [
        ("stream", pa.string()),
        ("pruned", pa.binary()),
        ("window_start_ms", pa.int64()),
        ("window_ms", pa.int64()),
        ("rests", pa.bool_()),
    ]
)
ASKED = ["topic", "stream", "window_start_ms", "window_ms", "state", "verdict"]
PLAN_DDL = "stream string, pruned binary, window_start_ms bigint, window_ms bigint, rests boolean"


def may_unite(config: AuditConfig, captured: Capture) -> bool:
    """Whether places of proven windows decide nothing in this configuration."""
    told = passages(captured)
    return all(each.mirror == "millrace" and told.get(name) for name, each in config.aggregates().items())


def proven_windows(rows: pa.Table) -> pa.Table:
    """(topic, stream, window_start_ms, window_ms) of those whose cells may be united; `rows` are this run's,
    with at least the columns `ASKED`."""
    is_proven = pc.and_(
        pc.equal(rows["state"], str(WindowState.SETTLED)), pc.equal(rows["verdict"], str(Verdict.PROVEN))
    )
    is_of_stream = pc.and_(pc.is_valid(rows["window_start_ms"]), pc.not_equal(rows["stream"], ""))
    return rows.filter(pc.and_(is_proven, is_of_stream)).select(ASKED[:4])


def fold_plan(
    pruned: Mapping[str, PrunedWindows], proven: pa.Table | None = None, resting: pa.Table | None = None
) -> pa.Table:
    """What a fold needs to know of each stream: a row with what is pruned of it, one for each window of it
    that is to be united (`proven_windows`), with whether it comes to rest (SPAN_SCHEMA). No commit names this
    table."""
    going = [{"stream": stream, "pruned": left.encode()} for stream, left in sorted(pruned.items())]
    told = pa.Table.from_pylist(going, PLAN_SCHEMA)
    if proven is None:
        return told
    rests = pa.repeat(False, len(proven))
    if resting is not None:
        rests = are_in(proven.select(WINDOW), resting)
    columns = [proven[name] for name in ("stream", "window_start_ms", "window_ms")]
    nothing = pa.nulls(len(proven), pa.binary())
    return pa.concat_tables([told, pa.table([columns[0], nothing, *columns[1:], rests], PLAN_SCHEMA)])
