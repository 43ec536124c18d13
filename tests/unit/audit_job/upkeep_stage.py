"""Ledgers, rows and cells that upkeep lets go of, and what is proven of what is left."""

from __future__ import annotations

import pyarrow as pa
from pyroaring import BitMap64

from millrace.audit.config import parse_config
from millrace.audit.contract.events import CLOSED, CountEvent, EventLedger, StreamEvent
from millrace.audit.keeping import upkeep
from millrace.audit.keeping.state import Commit
from millrace.audit.reconciliation.settled import (
    LINE_SCHEMA,
    SETTLED_SCHEMA,
    number_rows,
)
from millrace.audit.reconciliation.verdict_rows import ClusterReading, Reconciler, verdict_rows
from millrace.audit.reconciliation.verdicts import Verdict, WindowState, WindowVerdict
from millrace.audit.runs.fact_rows import PrunedWindows, facts_table
from millrace.audit.runs.run import Run
from millrace.audit.scanning.cell_rows import CELL_SCHEMA
from millrace.audit.spark.spark_cells import verdicts_of
from tests.settling import Windows

STREAM, KEEP_MS, WINDOW_MS = "00000000000000ab", 1000, 10


def row(start_ms, verdict=Verdict.PROVEN, state=WindowState.SETTLED, stream=STREAM, **more):
    return WindowVerdict(
        topic="flights", producer="AA", stream=stream, window_start_ms=start_ms, window_ms=WINDOW_MS,
        state=state, verdict=verdict, **more,
    )  # fmt: skip


class Asked(Windows):
    """Rows in parts, which notes the columns that were asked for."""

    def __init__(self, rows):
        super().__init__(rows, 3)
        self.columns = []

    def parts(self, columns=None):
        self.columns.append(columns)
        yield from super().parts(columns)


def pruned_of(*verdicts, waived=(), held_back=(), places_decide=False):
    """(what is pruned of each stream, the lines that are left of it, the rows with what was asked of them)"""
    rows, pruned = Asked(number_rows(verdict_rows(verdicts), LINE_SCHEMA.empty_table(), 0)), {}
    lines = upkeep.prune(
        rows, SETTLED_SCHEMA.empty_table(), pruned, set(waived), lambda: set(held_back), KEEP_MS, KEEP_MS,
        WINDOW_MS, places_decide=places_decide,
    )  # fmt: skip
    return pruned, lines.to_pylist(), rows


def ledger_of(*reports, last=6, sequenced=True, state=CLOSED):
    about = {
        "stream": STREAM,
        "session": "0" * 16,
        "topic": "flights",
        "producer": "AA",
        "window_ms": WINDOW_MS,
    }
    ledger = EventLedger()
    for start_ms, sequences in reports:
        ledger.learn(
            CountEvent(
                **about, window_start_ms=start_ms, report=1, count=len(sequences), byte_count=0, at_ms=1,
                acknowledged=BitMap64(sequences if sequenced else ()), ambiguous=BitMap64(),
                failed=BitMap64(), sequenced=sequenced,
            )
        )  # fmt: skip
    ledger.learn(
        StreamEvent(
            **about, state=state, host="", application="", datacenter="", last_assigned=last,
            last_settled=last, no_earlier_than_ms=None, lease_ms=60, at_ms=1,
        )
    )  # fmt: skip
    return ledger


def plain_report(start_ms, sequence):
    return CountEvent(
        stream=STREAM, session="0" * 16, topic="flights", producer="AA", window_ms=WINDOW_MS,
        window_start_ms=start_ms, report=1, count=1, byte_count=0, at_ms=1,
        acknowledged=BitMap64([sequence]), ambiguous=BitMap64(), failed=BitMap64(),
    )  # fmt: skip


def pruned_at(ledger, *starts_ms, stream=STREAM, window_ms=WINDOW_MS):
    """What is left of the stream when these windows are pruned."""
    pruned = {}
    for start_ms in starts_ms:
        pruned.setdefault(stream, PrunedWindows(window_ms)).add(start_ms, window_ms)
    upkeep.forget_pruned(ledger, pruned, learn=True)
    return pruned


def pruned_at_0(ledger):
    return pruned_at(ledger, 0)


def verdict_table(table, cells=(), groups=(), names=None):
    names = names or {"flights": "flights"}
    reconciler = Reconciler(
        clusters=[ClusterReading("ewr", True, {here: topic for topic, here in names.items()}, (), names)],
        passed={}, gaps={}, window_ms=WINDOW_MS, grace_ms=0, now_ms=10_000, topics=tuple(names),
        groups=groups,
    )  # fmt: skip
    return verdicts_of(reconciler, pa.Table.from_pylist(list(cells), CELL_SCHEMA), table)


def cell(start_ms, sequences, sequenced=True):
    empty = dict.fromkeys(CELL_SCHEMA.names)
    return {
        **empty, "tier": "ewr", "cluster": "ewr", "topic": "flights", "partition": 0, "stream": STREAM,
        "producer": "AA", "window_start_ms": start_ms, "chunk_start": 0, "count": len(sequences),
        "byte_count": 0, "first_offset": 0, "last_offset": 9, "first_append_ms": -1, "last_append_ms": -1,
        "base": 0, "bitmap": _bitmap(sequences) if sequenced else b"", "repeats": [],
        "unsequenced_count": 0 if sequenced else len(sequences), "tail": False,
    }  # fmt: skip


def _bitmap(sequences):
    import numpy as np

    from tests.cells import encode_bitmaps

    ((base, bitmap),) = encode_bitmaps(np.array(sequences, dtype=np.uint64))
    assert base == 0
    return bitmap


def run_of(state, captured, **changes):
    settings = parse_config(
        {
            "clusters": {"ewr": {"bootstrap": ["h:1"], "tier": "source"}},
            "topics": ["flights"],
            "window": "10ms",
        }
    )
    return Run(
        config=settings, state=state, before=Commit(number=1), captured=captured,
        now_ms=captured.taken_ms, number=2, name="00000002-run", ranges=[], unread=[],
        facts=facts_table(captured.ledger, captured.origins), **changes,
    )  # fmt: skip
