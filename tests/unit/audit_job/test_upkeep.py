"""What the state lets go, and what it must not: evidence of what is unproven, and of what may come again."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyroaring import BitMap64

from millrace.audit.config import parse_config
from millrace.audit.contract.events import CLOSED, CountEvent, EventLedger, StreamEvent, TierEvent
from millrace.audit.contract.group_counts import Claim, group_doubts
from millrace.audit.contract.window_reports import Teller, WindowReports
from millrace.audit.keeping import upkeep
from millrace.audit.keeping.state import Commit, StateFolder
from millrace.audit.keeping.verdict_files import SettledLines
from millrace.audit.keeping.waivers import Standing
from millrace.audit.reconciliation.online_tiers import OnlineGroup
from millrace.audit.reconciliation.reconcile import PRUNED_BEFORE
from millrace.audit.reconciliation.row_parts import parts_of
from millrace.audit.reconciliation.settled import (
    LINE_SCHEMA,
    SETTLED_SCHEMA,
    lines_of,
    number_rows,
    rows_of,
)
from millrace.audit.reconciliation.stream_case import TOLD_TWICE
from millrace.audit.reconciliation.verdict_rows import ClusterReading, Reconciler, verdict_rows
from millrace.audit.reconciliation.verdicts import Verdict, WindowState, WindowVerdict
from millrace.audit.reconciliation.watermark import Waiver
from millrace.audit.runs.capture import Capture
from millrace.audit.runs.fact_rows import PrunedWindows, facts_of, facts_table, restore_pruned
from millrace.audit.runs.next_commit import keep_verdicts, leaving_no_trace
from millrace.audit.runs.run import Findings, Run
from millrace.audit.scanning.cell_rows import CELL_SCHEMA
from millrace.audit.spark.spark_cells import folded, verdicts_of
from tests.settling import Windows, settle

STREAM, KEEP_MS, WINDOW_MS = "00000000000000ab", 1000, 10


def row(start_ms, verdict=Verdict.PROVEN, state=WindowState.SETTLED, stream=STREAM, **more):
    return WindowVerdict(
        topic="flights", producer="AA", stream=stream, window_start_ms=start_ms, window_ms=WINDOW_MS,
        state=state, verdict=verdict, **more,
    )  # fmt: skip


def prunable(*verdicts, waived=(), held_back=(), settled_ms=0, now_ms=KEEP_MS, before=None):
    rows = verdict_rows(verdicts)
    settled = settle(rows, before, ["flights"], settled_ms).table
    going = upkeep.prunable(settled, rows, set(waived), set(held_back), KEEP_MS, now_ms)
    found = {}
    for each in going.to_pylist():
        found.setdefault((each["topic"], each["window_start_ms"]), {})[each["stream"]] = each["window_ms"]
    return found


def test_only_what_is_proven_or_waived_for_long_enough_may_go():
    proven = {("flights", 0): {STREAM: WINDOW_MS}}
    assert prunable(row(0), row(10, Verdict.LOSS)) == proven
    assert prunable(row(0), now_ms=KEEP_MS - 1) == {}
    assert prunable(row(0, Verdict.LOSS), waived=[("flights", 0)]) == proven
    assert prunable(row(0, Verdict.COUNT_MATCH)) == proven
    assert prunable(row(0, Verdict.UNKNOWN)) == {}


def test_one_stream_that_is_not_done_keeps_the_whole_window():
    for other in (row(0, Verdict.LOSS, stream="02"), row(0, state=WindowState.OPEN, stream="02")):
        assert prunable(row(0), other) == {}


def test_a_window_whose_cells_are_read_again_stays():
    assert prunable(row(0), held_back=[(STREAM, 0)]) == {}


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


def test_rows_are_pruned_part_by_part_and_only_of_waived_ones_details_are_read():
    lost = row(20, Verdict.LOSS, published=3, missing={("a", "b"): ((7, 7),)})
    pruned, lines, asked = pruned_of(row(0, published=2), row(0, published=1, stream="02"), row(10), lost)
    assert {stream: list(left.windows) for stream, left in pruned.items()} == {STREAM: [0, 1], "02": [0]}
    assert [(each["window_start_ms"], each["published"]) for each in sorted(lines, key=str)] == [
        (0, 3),
        (10, 0),
    ]
    (columns,) = asked.columns
    assert "detail" not in columns and "seen" not in columns
    held, lines, _ = pruned_of(row(0), row(10), held_back=[(STREAM, 10)])
    assert list(held[STREAM].windows) == [0] and len(lines) == 1


def test_where_a_mirror_keeps_no_positions_a_topic_with_a_loss_keeps_what_arrived_later():
    """That is all that says of the lost record that it does not come any more."""
    lost = row(0, Verdict.LOSS, missing={("a", "b"): ((7, 7),)})
    elsewhere = replace(row(30), topic="orders")
    rows = (lost, row(10), row(20, stream="02"), elsewhere)

    def going(**more):
        return {stream: list(left.windows) for stream, left in pruned_of(*rows, **more)[0].items()}

    assert going() == {STREAM: [1, 3], "02": [2]}
    assert going(places_decide=True) == {STREAM: [3]}
    assert going(places_decide=True, waived=[("flights", 0)]) == {STREAM: [0, 1, 3], "02": [2]}
    young = row(40, Verdict.UNKNOWN, state=WindowState.OPEN)
    still_asked = replace(row(0, Verdict.UNKNOWN, stream=""), producer="BB")
    pruned, _, _ = pruned_of(row(10), young, still_asked, places_decide=True)
    assert list(pruned[STREAM].windows) == [1], (
        "what is open is younger, and the roster's rows have no records"
    )


def test_what_no_report_told_of_in_a_waived_window_is_accounted_for():
    """Else it would be a hole of the reports as soon as the window's row is gone."""
    unreported = row(0, Verdict.UNKNOWN, unreported=((4, 6),))
    other = row(10, Verdict.UNKNOWN, unreported=((8, 9),))
    pruned, lines, _ = pruned_of(unreported, other, waived=[("flights", 0)])
    assert (list(pruned[STREAM].windows), pruned[STREAM].sequences) == ([0], BitMap64([4, 5, 6]))
    assert [each["verdict"] for each in lines] == ["UNKNOWN"]


def test_windows_that_have_numbers_in_common_go_together_or_not_at_all():
    """Whatever stays for one stream, stays for all, and with what these have in common with it."""
    together, further = {"shared": (0, 10, 2)}, {"shared": (10, 20, 2)}
    moved = [row(start_ms, Verdict.UNKNOWN, **together) for start_ms in (0, 10)]
    beside = [row(start_ms, Verdict.UNKNOWN, stream="02", **further) for start_ms in (10, 20)]
    alone = row(30, Verdict.UNKNOWN, reasons=('"shared":',), duplicates={"shared": ((1, 1),)})
    waived = [("flights", start_ms) for start_ms in (0, 10, 20, 30)]

    def going(*waived, **more):
        pruned = pruned_of(*moved, *beside, alone, waived=waived, **more)[0]
        return {stream: list(left.windows) for stream, left in pruned.items()}

    assert going(*waived) == {STREAM: [0, 1, 3], "02": [1, 2]}
    assert going(*waived[:2], waived[3]) == {STREAM: [3]}
    assert going(*waived[1:]) == {STREAM: [3]}
    assert going(*waived, held_back=[(STREAM, 0)]) == {STREAM: [3]}


def test_a_revision_begins_the_time_anew():
    before = settle(verdict_rows([row(0)]), None, ["flights"], 0).table
    changed = row(0, published=3)
    assert prunable(changed, before=before, settled_ms=500, now_ms=KEEP_MS) == {}
    assert prunable(changed, before=before, settled_ms=500, now_ms=KEEP_MS + 500)


def test_it_is_looked_at_from_time_to_time_or_when_files_are_many():
    before = Commit(number=3, folded_ms=100)
    assert not upkeep.is_due(before, 3, 300, 109)
    assert upkeep.is_due(before, 3, 300, 110)
    assert upkeep.is_due(before, upkeep.FOLD_FILES, None, 100)
    assert upkeep.is_due(before, 3, None, 100 + upkeep.FOLD_EVERY_MS), "whatever is kept for ever, too"
    assert not upkeep.is_due(before, 3, None, 99 + upkeep.FOLD_EVERY_MS)
    assert upkeep.is_due(before, 3, 10**15, 100 + upkeep.FOLD_EVERY_MS), "and for long"


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


def test_pruned_reports_leave_no_hole_behind():
    ledger = ledger_of((0, [1, 2, 3]), (10, [4, 5, 6]))
    pruned = pruned_at_0(ledger)
    assert list(ledger.streams[STREAM].windows) == [10]
    assert pruned[STREAM].sequences == BitMap64([1, 2, 3])
    table = facts_table(ledger, {STREAM: {"ewr"}}, pruned)
    assert restore_pruned(table)[STREAM].has(5) and not restore_pruned(table)[STREAM].has(10)
    facts = facts_of(table.to_pylist()[0])
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


def verdict_table(table, cells=(), groups=(), names=None):
    names = names or {"flights": "flights"}
    reconciler = Reconciler(
        clusters=[ClusterReading("ewr", True, {here: topic for topic, here in names.items()}, (), names)],
        passed={}, gaps={}, window_ms=WINDOW_MS, grace_ms=0, now_ms=10_000, topics=tuple(names),
        groups=groups,
    )  # fmt: skip
    return verdicts_of(reconciler, pa.Table.from_pylist(list(cells), CELL_SCHEMA), table)


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


class Cells:
    """A run's, of which none is of the tail."""

    def windows_of_tail(self):
        return set()

    def loose_files(self):
        return ["cells/new"]

    def fold(self, plan, rows, *, whole):
        return ["cells/folded"]


def test_what_the_roster_owes_of_a_pruned_window_is_in_its_line_and_nowhere_else(tmp_path):
    """Counted twice, it would be more than the window was waived for."""
    state = StateFolder.open(tmp_path)
    owed = verdict_rows([row(at, Verdict.UNKNOWN, stream="", unreported=((1, 2),)) for at in (0, 10)])
    rows = pa.concat_tables([verdict_rows([row(0)]), owed])
    numbered, nothing = number_rows(rows, LINE_SCHEMA.empty_table(), 0), rows.slice(0, 0)
    waived = [Standing(Waiver("flights", 0, "ops", "known", 1), stands=True)]
    findings = Findings(numbered, numbered, nothing, numbered, waived, {})
    captured = Capture(10**12, ledger_of((0, [1, 2, 3]), last=3))
    of_roster = lines_of(number_rows(owed, LINE_SCHEMA.empty_table(), 0))
    after = Commit(number=2, cells=["cells/new"])
    keep_verdicts(run_of(state, captured, owed=of_roster), after, Cells(), findings)
    kept = pa.concat_tables(parts_of(SettledLines(state, after.verdicts), ["window_start_ms", "folded"]))
    assert [tuple(line.values()) for line in kept.to_pylist()] == [(10, False), (0, True)]


@pytest.mark.parametrize(
    ("loose", "may_unite", "is_folded"),
    [
        (["cells/a-folded/1", "cells/b/1"], True, True),
        (["cells/a-folded/1", "cells/b-folded/1"], True, False),
        (["cells/a/1", "cells/b/1"], False, False),
        (["cells/a/1"] * upkeep.FOLD_FILES, False, True),
        ([], True, False),
    ],
    ids=["new cells", "folded already", "places decide", "many files", "none"],
)
def test_cells_of_proven_windows_are_united_once_a_day(tmp_path, monkeypatch, loose, may_unite, is_folded):
    """They may be one for each record; but what a fold has made stays as it is until there is more."""
    monkeypatch.setattr("millrace.audit.keeping.uniting.may_unite", lambda *_: may_unite)

    class OfSomeDays(Cells):
        def loose_files(self):
            return loose

    state = StateFolder.open(tmp_path)
    captured = Capture(10**12, ledger_of((10**12 - 20, [1, 2, 3]), last=3))
    rows = verdict_rows([row(10**12 - 20)])
    numbered = number_rows(rows, LINE_SCHEMA.empty_table(), 10**12)
    findings = Findings(rows, rows, rows.slice(0, 0), numbered, [], {})
    after = Commit(cells=["cells/new"])
    keep_verdicts(run_of(state, captured), after, OfSomeDays(), findings)
    assert after.cells == (["cells/folded"] if is_folded else ["cells/new"])
    assert (after.folded_ms == 10**12) is is_folded
    assert state.files.entries("verdicts") or not is_folded


def test_the_cells_of_a_stream_that_is_forgotten_go_with_it(tmp_path):
    """Pruned and forgotten in one fold: what stays of its cells would come back as a stranger's."""
    state = StateFolder.open(tmp_path)
    cells = pa.Table.from_pylist([cell(0, [1, 2, 3])], CELL_SCHEMA)
    left = []

    class Folded(Cells):
        def fold(self, plan, rows, *, whole):
            assert whole, "the window may have cells anywhere"
            table = state.read_table(plan)
            left.append(folded(cells, table.filter(pc.equal(table["stream"], STREAM))))
            return super().fold(plan, rows, whole=whole)

    captured = Capture(10**12, ledger_of((0, [1, 2, 3]), last=3))
    rows = verdict_rows([row(0)])
    numbered = number_rows(rows, LINE_SCHEMA.empty_table(), 0)
    findings = Findings(rows, rows, rows.slice(0, 0), numbered, [], {})
    job, after = run_of(state, captured), Commit(cells=["cells/new"])
    ended, lasting = (("billing", "0" * 16, Claim(5, 0, at_ms)) for at_ms in (-(10**9), 10**12))
    after.claims = [ended, lasting]
    keep_verdicts(job, after, Folded(), findings)
    assert [each.num_rows for each in left] == [0] and after.claims == [lasting]
    assert after.cells == ["cells/folded"] and state.read_table(after.events).num_rows == 0
    with leaving_no_trace(job):
        state.commit(replace(after, number=2))
    assert len(list((tmp_path / "events").iterdir())) == 1


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


def test_old_counts_of_unaudited_records_end_and_doubts_never_do():
    old, new, strange = (f"unaudited/{name}" for name in ("old", "new", "strange"))
    before = {old: 1, new: 2, strange: 3, "malformed batch, in ewr": 4}
    counts, ages = upkeep.aged(before, {old: 0, new: 900, "malformed batch, in ewr": 0}, KEEP_MS, KEEP_MS)
    assert counts == {new: 2, strange: 3, "malformed batch, in ewr": 4}
    assert ages == {new: 900, strange: KEEP_MS, "malformed batch, in ewr": 0}
    assert upkeep.aged({old: 1}, {old: 0}, None, 10**15)[0] == {old: 1}


def test_pruned_windows_are_read_back_as_they_were():
    left = PrunedWindows(10, BitMap64([0, 7]), BitMap64(range(1, 100_000)), True)
    back = PrunedWindows.decode(left.encode())
    assert (back.window_ms, back.windows, back.sequences, back.counted) == (
        10,
        left.windows,
        left.sequences,
        True,
    )
    left.add(20, 25)
    assert left.windows == BitMap64([0, 2, 3, 4, 7])
