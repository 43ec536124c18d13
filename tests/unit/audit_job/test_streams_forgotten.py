"""When a stream as a whole is forgotten, and what keeps it."""

from __future__ import annotations

import json

import pyarrow.compute as pc
from pyroaring import BitMap64

from millrace.audit.contract.events import EventLedger, TierEvent
from millrace.audit.contract.group_counts import group_doubts
from millrace.audit.keeping import upkeep
from millrace.audit.reconciliation.online_tiers import OnlineGroup
from millrace.audit.reconciliation.verdict_rows import verdict_rows
from millrace.audit.reconciliation.verdicts import Verdict
from millrace.audit.runs.fact_rows import PrunedWindows, facts_table, restore_pruned
from tests.unit.audit_job.upkeep_stage import (
    STREAM,
    WINDOW_MS,
    ledger_of,
    pruned_at_0,
    pruned_of,
    row,
    verdict_table,
)


def group_event(stream, start_ms, sequence):
    return TierEvent(
        "billing", stream, "flights", "AA", start_ms, WINDOW_MS, 1, 1, 0, BitMap64([sequence]), 5,
        session="0" * 16, session_count=2,
    )  # fmt: skip


def test_what_a_group_told_of_a_pruned_window_stays_while_its_session_tells_of_others():
    """The session's total needs it: else the group would look as if it had lost events, and a loss on its way
    to the group would be a doubt."""
    ledger = ledger_of((0, [1, 2, 3]))
    ledger.learn_all([group_event(STREAM, 0, 1), group_event("02", 0, 1)])
    pruned = pruned_at_0(ledger)
    assert len(ledger.tiers) == 2 and group_doubts(ledger) == {}
    pruned["02"] = PrunedWindows(WINDOW_MS, BitMap64([0]))
    upkeep.forget_pruned(ledger, pruned)
    assert ledger.tiers == {} and group_doubts(ledger) == {}


def test_a_stream_in_doubt_that_nobody_waived_is_not_forgotten():
    """Its windows may be waived and pruned, and its events gone: the doubt is another finding."""
    rows = verdict_rows([row(10), row(None, Verdict.UNKNOWN), row(None, Verdict.UNKNOWN, stream="02")])
    doubted = upkeep.doubted_streams(rows, {("flights", "02"), ("flights", 10)})
    assert doubted == {STREAM}
    ledger = ledger_of((0, [1, 2, 3]), last=3)
    pruned = pruned_at_0(ledger)
    upkeep.forget_streams(ledger, pruned, set(), doubted, 0, 10**9)
    assert STREAM in pruned and STREAM in ledger.streams
    upkeep.forget_streams(ledger, pruned, set(), set(), 0, 10**9)
    assert STREAM not in pruned and STREAM not in ledger.streams


def test_a_stream_that_no_event_tells_of_keeps_its_doubt_when_its_windows_are_pruned():
    """Which topic it is of, only its cells told; its sequence 1 is nowhere."""
    unreported = row(0, Verdict.UNKNOWN, unreported=((2, 4),))
    pruned, _, _ = pruned_of(unreported, waived=[("flights", 0)])
    table = facts_table(EventLedger(), {}, pruned)
    rows = verdict_table(table).to_pylist()
    told = [(each["topic"], each["stream"], each["window_start_ms"], each["verdict"]) for each in rows]
    assert told == [("flights", STREAM, None, "UNKNOWN")]
    assert json.loads(rows[0]["detail"])["unknown"] == [[1, 1]]
    assert restore_pruned(table)[STREAM].copy().topic == "flights"


def test_a_stream_is_not_forgotten_while_a_group_tells_of_it_and_has_no_rows():
    ledger = ledger_of((0, [1, 2, 3]), last=3)
    ledger.learn_all([group_event(STREAM, 0, 1), group_event("02", 0, 1)])
    pruned = pruned_at_0(ledger)
    upkeep.forget_streams(ledger, pruned, set(), set(), 0, 10**9)
    assert STREAM in pruned and STREAM in ledger.streams
    table = facts_table(ledger, {}, pruned, {"billing"})
    table = table.filter(pc.equal(table["stream"], STREAM))
    groups = [OnlineGroup("billing", "ewr", {}, 0)]
    assert verdict_table(table, groups=groups).num_rows == 0


def test_a_stream_is_forgotten_only_when_no_event_can_bring_it_back():
    ledger = ledger_of((0, [1, 2, 3]), last=3)
    pruned = pruned_at_0(ledger)
    upkeep.forget_streams(ledger, pruned, {STREAM}, set(), 0, 10**9)
    assert STREAM in pruned and STREAM in ledger.streams
    upkeep.forget_streams(ledger, pruned, set(), set(), 0, 10**9)
    assert pruned == {} and ledger.streams == {}


def test_a_stream_with_a_lost_tail_is_not_forgotten():
    ledger = ledger_of((0, [1, 2, 3]), last=9)
    pruned = pruned_at_0(ledger)
    upkeep.forget_streams(ledger, pruned, set(), set(), 0, 10**9)
    assert STREAM in pruned
