"""Records and events of windows that were let go: counted, and judged no more."""

from __future__ import annotations

import json

from millrace.audit.keeping import upkeep
from millrace.audit.reconciliation.settled import (
    rows_of,
)
from millrace.audit.runs.fact_rows import facts_table
from tests.unit.audit_job.upkeep_stage import STREAM, cell, ledger_of, pruned_at_0, verdict_table


def test_a_late_record_of_a_pruned_window_is_counted_and_makes_no_verdict():
    ledger = ledger_of((0, [1, 2, 3]), (10, [4, 5, 6]))
    pruned = pruned_at_0(ledger)
    table = facts_table(ledger, {STREAM: {"ewr"}}, pruned)
    told = verdict_table(table, [cell(10, [4, 5, 6]), cell(0, [2])])
    rows, late = rows_of(told), upkeep.late_counts(told)
    assert late == {f"{upkeep.LATE}, in ewr, topic flights": 1}
    assert [(each["window_start_ms"], each["verdict"]) for each in rows.to_pylist()] == [(10, "PROVEN")]


def test_a_late_record_fills_no_hole_in_the_reports():
    """It is counted, and its number is not kept: the next run would see the hole again."""
    ledger = ledger_of((0, [1, 2, 3]), (10, [5, 6]))
    table = facts_table(ledger, {STREAM: {"ewr"}}, pruned_at_0(ledger))
    told = verdict_table(table, [cell(0, [4]), cell(10, [5, 6])])
    assert upkeep.late_counts(told) == {f"{upkeep.LATE}, in ewr, topic flights": 1}
    holes = [json.loads(each["detail"]).get("unknown") for each in rows_of(told).to_pylist()]
    assert holes == [None, [[4, 4]]]


def test_late_records_where_topics_are_merged_are_counted_once_and_under_the_audited_topics_name():
    """The cluster is read for each of the topics, and shows each record under either; and the producer may
    call its topic by another name, of which no watermark would wait for them."""
    ledger = ledger_of((0, [1, 2, 3]))
    pruned = pruned_at_0(ledger)
    merged = [{**cell(0, [2]), "topic": f"{topic}@all"} for topic in ("flights", "hotels")]
    told = verdict_table(facts_table(ledger, {}, pruned), merged, names={"flights": "all", "hotels": "all"})
    assert upkeep.late_counts(told) == {f"{upkeep.LATE}, in ewr, topic flights": 1}
    ledger.streams[STREAM].topic = "ewr.hotels"
    renamed = [{**cell(0, [2]), "topic": "hotels"}]
    facts = facts_table(ledger, {STREAM: {"ewr"}}, pruned)
    told = verdict_table(facts, renamed, names={"hotels": "ewr.hotels"})
    assert upkeep.late_counts(told) == {f"{upkeep.LATE}, in ewr, topic hotels": 1}


def test_a_late_record_that_is_read_again_is_not_added_to_what_is_kept():
    """Above a mirror's position it is counted anew by the next run."""
    ledger = ledger_of((0, [1, 2, 3]))
    table = facts_table(ledger, {STREAM: {"ewr"}}, pruned_at_0(ledger))
    told = verdict_table(table, [cell(0, [2]), {**cell(0, [3]), "tail": True}])
    what = f"{upkeep.LATE}, in ewr, topic flights"
    late, again = upkeep.late_counts(told), upkeep.late_counts(told, again=True)
    assert (late, again) == ({what: 2}, {what: 1})
    reports = {f"{upkeep.LATE_REPORT}, topic flights": 1}  # these are in the commit already
    assert upkeep.late_to_keep({**late, **reports}, again) == {what: 1}
    assert upkeep.late_to_keep(again, again) == {}


def test_events_that_tell_a_pruned_window_again_are_dropped_and_a_longer_report_is_told():
    ledger = ledger_of((0, [1, 2, 3]))
    pruned = pruned_at_0(ledger)
    again = ledger_of((0, [1, 2, 3]))
    assert upkeep.forget_pruned(again, pruned) == {} and not again.streams[STREAM].windows
    longer = ledger_of((0, [1, 2, 3, 4]))
    assert upkeep.forget_pruned(longer, pruned, {STREAM: "hotels"}) == {
        f"{upkeep.LATE_REPORT}, topic hotels": 1
    }, "by the audited topic, whatever its producer calls it"
    assert upkeep.forget_pruned(ledger_of((0, [1, 2, 3, 4])), pruned) == {}, "told once"
