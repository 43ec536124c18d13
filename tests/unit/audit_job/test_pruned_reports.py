"""What is known of reports that were let go: no hole behind, no doubt forgotten, nothing proven by it."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace

import pyarrow as pa
import pytest
from pyroaring import BitMap64

from millrace.audit.contract.events import EventLedger
from millrace.audit.contract.window_reports import Teller, WindowReports
from millrace.audit.keeping import upkeep
from millrace.audit.reconciliation.reconcile import PRUNED_BEFORE
from millrace.audit.reconciliation.stream_case import TOLD_TWICE
from millrace.audit.reconciliation.verdict_rows import ClusterReading, Reconciler
from millrace.audit.runs.fact_rows import PrunedWindows, facts_of, facts_table, left_of, restore_pruned
from millrace.audit.scanning.cell_rows import CELL_SCHEMA
from millrace.audit.spark.spark_cells import verdicts_of
from tests.unit.audit_job.upkeep_stage import (
    STREAM,
    WINDOW_MS,
    cell,
    ledger_of,
    plain_report,
    pruned_at,
    pruned_at_0,
    verdict_table,
)


def test_pruned_reports_leave_no_hole_behind():
    ledger = ledger_of((0, [1, 2, 3]), (10, [4, 5, 6]))
    pruned = pruned_at_0(ledger)
    assert list(ledger.streams[STREAM].windows) == [10]
    assert pruned[STREAM].sequences == BitMap64([1, 2, 3])
    table = facts_table(ledger, {STREAM: {"ewr"}}, pruned)
    assert restore_pruned(table)[STREAM].has(5) and not restore_pruned(table)[STREAM].has(10)
    (row,) = table.to_pylist()
    facts = facts_of(row, left_of([row]))
    assert facts.accounted == BitMap64([1, 2, 3]) and not facts.windows[0].acknowledged


def test_of_many_streams_the_reports_of_one_are_unpacked_at_a_time():
    """With `keep` of a month they are gigabytes."""
    ledger, windows = ledger_of(), WindowReports()
    windows.are_of(Teller(STREAM, "0" * 16, "flights", "AA", WINDOW_MS))
    for number in range(1, 10_000):
        windows[number * WINDOW_MS] = plain_report(number * WINDOW_MS, number)
    packed = windows.pack()
    pruned = {}
    for number in range(100):
        ledger.facts(f"{number:016x}").adopt_reports(packed)
        pruned.setdefault(f"{number:016x}", PrunedWindows(WINDOW_MS)).add(0, WINDOW_MS)
    pruned["0" * 16].add(WINDOW_MS, WINDOW_MS)
    tracemalloc.start()
    upkeep.forget_pruned(ledger, pruned, learn=True)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    one = 9_999 * 40
    assert (held < 3 * one, peak < 8 * one) == (True, True), (held, peak)
    lengths = {len(ledger.streams[stream].windows) for stream in pruned if stream != "0" * 16}
    assert (len(ledger.streams["0" * 16].windows), lengths) == (9_998, {9_999})


def test_append_times_are_told_in_the_order_in_which_records_go():
    """Whether they came late is asked of the first: cells come in the order of clusters' names."""
    reconciler = Reconciler(
        clusters=[ClusterReading(name, name == "ewr", {"flights": "flights"}) for name in ("agg", "ewr")],
        passed={}, gaps={}, window_ms=WINDOW_MS, grace_ms=0, now_ms=10_000, topics=("flights",),
    )  # fmt: skip
    times = {"agg": 700, "ewr": 50}
    cells = [
        cell(0, [1, 2, 3]) | {"tier": name, "cluster": name, "first_append_ms": ms, "last_append_ms": ms}
        for name, ms in times.items()
    ]
    facts = facts_table(ledger_of((0, [1, 2, 3]), last=3), {STREAM: {"ewr"}})
    rows = verdicts_of(reconciler, pa.Table.from_pylist(cells, CELL_SCHEMA), facts)
    (detail,) = (json.loads(each) for each in rows["detail"].to_pylist() if "append_ms" in each)
    assert list(detail["append_ms"].items()) == [("ewr", [50, 50]), ("agg", [700, 700])]


def test_what_is_left_after_pruning_is_proven_as_before():
    ledger = ledger_of((0, [1, 2, 3]), (10, [4, 5, 6]))
    pruned = pruned_at_0(ledger)
    rows = verdict_table(facts_table(ledger, {STREAM: {"ewr"}}, pruned), [cell(10, [4, 5, 6])]).to_pylist()
    assert [(each["window_start_ms"], each["verdict"]) for each in rows] == [(10, "PROVEN")]


def unsure_of(ledger, start_ms, *, ambiguous=(), failed=()):
    """The ledger, whose report tells of these as well."""
    report = ledger.streams[STREAM].windows[start_ms]
    sets = {"ambiguous": BitMap64(ambiguous), "failed": BitMap64(failed)}
    ledger.streams[STREAM].windows[start_ms] = replace(report, **sets)
    return ledger


def verdicts_beside(ledger, pruned, sequences):
    """Of the window at 10, where these are: (verdict, unreported, reasons)"""
    rows = verdict_table(facts_table(ledger, {STREAM: {"ewr"}}, pruned), [cell(10, sequences)]).to_pylist()
    return [
        (each["verdict"], each["unreported"], json.loads(each["detail"]).get("reasons"))
        for each in rows
        if each["window_start_ms"] == 10
    ]


def stream_verdicts(ledger, pruned, *cells):
    """{window: (verdict, reasons)}"""
    rows = verdict_table(facts_table(ledger, {STREAM: {"ewr"}}, pruned), cells).to_pylist()
    return {
        each["window_start_ms"]: (each["verdict"], json.loads(each["detail"]).get("reasons")) for each in rows
    }


def test_how_a_number_was_reported_in_a_pruned_window_still_counts_for_another_one():
    """A record of unknown fate may lie in another window than it was reported in; one that failed must not
    be there, and a late copy of one that was acknowledged is told as that."""

    def after_pruning():
        ledger = unsure_of(ledger_of((0, [1, 2]), (10, [5, 6])), 0, ambiguous=[3], failed=[4])
        return ledger, restore_pruned(facts_table(ledger, {}, pruned_at_0(ledger)))

    assert verdicts_beside(*after_pruning(), [3, 5, 6]) == [("PROVEN", 0, None)]
    denied = "records are there that the producer reported as never sent"
    assert verdicts_beside(*after_pruning(), [4, 5, 6]) == [("UNKNOWN", 1, [denied])]
    assert verdicts_beside(*after_pruning(), [2, 5, 6]) == [("UNKNOWN", 0, [PRUNED_BEFORE])]


def test_that_two_producers_used_one_stream_id_is_not_forgotten_with_the_reports_that_showed_it():
    def after_pruning(second):
        ledger = ledger_of((0, [1]), (10, second), (20, [3]), last=3)
        before = stream_verdicts(ledger, {}, cell(0, [1]), cell(10, second), cell(20, [3]))
        pruned = restore_pruned(facts_table(ledger, {}, pruned_at(ledger, 0, 10)))
        return before, stream_verdicts(ledger, pruned, cell(20, [3]))

    before, after = after_pruning([1, 2])
    doubt = ("UNKNOWN", [TOLD_TWICE])
    assert (before[20], before[None], after) == (doubt, doubt, {20: doubt, None: doubt})
    assert after_pruning([2])[1] == {20: ("PROVEN", None)}


def test_a_newer_report_of_a_pruned_window_knows_more():
    def kinds(left):
        return [set(each) for each in (left.certain, left.ambiguous, left.failed)]

    left = PrunedWindows(WINDOW_MS)
    first = unsure_of(ledger_of((0, [1, 2])), 0, ambiguous=[3, 4], failed=[5, 6]).streams[STREAM].windows[0]
    left.account_for(first)
    assert kinds(left) == [{1, 2}, {3, 4}, {5, 6}]
    left.account_for(replace(first, acknowledged=BitMap64([3, 5]), ambiguous=BitMap64([2, 6])))
    assert kinds(left) == [{1, 2, 3, 5}, {4, 6}, set()]
    assert kinds(PrunedWindows.decode(left.encode()).copy()) == kinds(left)


def test_which_pruned_window_was_reported_first_is_kept():
    """Of windows that hold records alone nobody knows that their producer told of what came after them."""
    ledger = ledger_of((20, [1]), (10, [2]))
    pruned = pruned_at(ledger, 0, 10, 20)
    assert pruned[STREAM].windows.min() == 0
    left = PrunedWindows.decode(pruned[STREAM].encode())
    assert left.first_report_ms == left.copy().first_report_ms == 10
    assert pruned_at(ledger_of((20, [1])), 0)[STREAM].first_report_ms is None


@pytest.mark.parametrize("step", [1, 3], ids=["as one range", "as many"])
def test_a_stream_of_months_is_pruned_and_read_again(step, monkeypatch):
    """What anybody may claim in an event has bounds that a long stream goes beyond."""
    monkeypatch.setattr("millrace.audit.contract.sequence_set.MAX_READ_RANGES", 100)
    left = PrunedWindows(WINDOW_MS)
    left.sequences.add_range(1, (1 << 33) + 3)
    left.ambiguous = BitMap64(range((1 << 33) + 3, (1 << 33) + 3 + 200 * step, step))
    left.failed = BitMap64(range(1, 200, 2)) | BitMap64([1 << 34])
    pruned = restore_pruned(facts_table(EventLedger(), {}, {STREAM: left}))
    assert pruned == {STREAM: left}


def test_of_numbers_that_an_older_program_pruned_none_is_taken_for_one_that_may_be_there():
    ledger = ledger_of((0, [1, 2]), (10, [5, 6]))
    body = json.loads(pruned_at_0(ledger)[STREAM].encode())
    del body["ambiguous"], body["failed"]
    pruned = {STREAM: PrunedWindows.decode(json.dumps(body).encode())}
    ((verdict, unreported, _),) = verdicts_beside(ledger, pruned, [2, 5, 6])
    assert (verdict, unreported) == ("UNKNOWN", 1)


def test_a_lost_report_of_a_producer_that_only_counts_shows_when_other_windows_are_pruned():
    """Its total is all that tells of one: what was pruned is taken off, and the rest must be told of."""

    def judged(last):
        ledger = ledger_of((0, [0] * 5), (10, [0] * 4), last=last, sequenced=False)
        pruned = restore_pruned(facts_table(ledger, {}, pruned_at_0(ledger)))
        again = ledger_of((0, [0] * 5), (10, [0] * 4), last=last, sequenced=False)
        upkeep.forget_pruned(again, pruned)  # the next run: events tell it again
        table = facts_table(again, {STREAM: {"ewr"}}, pruned)
        rows = verdict_table(table, [cell(10, [0] * 4, sequenced=False)]).to_pylist()
        return [(each["window_start_ms"], each["verdict"]) for each in rows]

    assert judged(last=9) == [(10, "COUNT_MATCH")]
    assert (None, "UNKNOWN") in judged(last=12)


def test_what_an_older_program_pruned_of_a_producer_that_only_counts_is_no_hole():
    ledger = ledger_of((10, [0] * 4), last=9, sequenced=False)
    left = PrunedWindows(WINDOW_MS, BitMap64([0]), BitMap64(), True)
    body = json.loads(left.encode())
    del body["told"]
    left = PrunedWindows.decode(json.dumps(body).encode())
    assert left.told is None and PrunedWindows.decode(left.encode()).told is None
    table = facts_table(ledger, {STREAM: {"ewr"}}, {STREAM: left})
    rows = verdict_table(table, [cell(10, [0] * 4, sequenced=False)]).to_pylist()
    assert [(each["window_start_ms"], each["verdict"]) for each in rows] == [(10, "COUNT_MATCH")]
