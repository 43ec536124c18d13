"""Which windows come to rest, what wakes them, and that they are then as they were."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyroaring import BitMap64

from millrace.audit.config import parse_config
from millrace.audit.contract.event_ledger import says
from millrace.audit.contract.events import CLOSED, HEARTBEAT, CountEvent, EventLedger, StreamEvent
from millrace.audit.keeping.state import Commit, Resting, StateFolder, UnreadNote
from millrace.audit.reconciliation.reconcile import PRUNED_BEFORE
from millrace.audit.reconciliation.settled import LINE_SCHEMA, SETTLED_SCHEMA, let_go, number_rows
from millrace.audit.reconciliation.verdict_rows import counting_row, verdict_rows
from millrace.audit.reconciliation.verdicts import Verdict, WindowState
from millrace.audit.report.resting_sums import Summing
from millrace.audit.runs import resting
from millrace.audit.runs.at_rest import Asleep, AtRest, as_pruned
from millrace.audit.runs.capture import Capture
from millrace.audit.runs.fact_rows import PrunedWindows, facts_table, left_of, restore_pruned
from millrace.audit.runs.waking import MOST_NAMED, WAKING, waking_row
from millrace.audit.scanning.cell_rows import CELL_SCHEMA
from tests.settling import Windows
from tests.unit.audit_job.upkeep_stage import STREAM, WINDOW_MS, cell, plain_report, row

NOW_MS = 10_000
CONFIG = parse_config(
    {
        "clusters": {"ewr": {"bootstrap": ["h:1"], "tier": "source"}},
        "topics": ["flights", "orders"],
        "window": f"{WINDOW_MS}ms",
        "grace": "1ms",
    }
)
TIERS = [{"name": "ewr", "upstream": []}]


def word(state=CLOSED, at_ms=100, until_ms=None, stream=STREAM):
    return StreamEvent(
        stream=stream, session="0" * 16, topic="flights", producer="AA", window_ms=WINDOW_MS, state=state,
        host="", application="", datacenter="", last_assigned=9, last_settled=9, no_earlier_than_ms=until_ms,
        lease_ms=60, at_ms=at_ms,
    )  # fmt: skip


def told(*events):
    ledger = EventLedger()
    ledger.learn_all(events)
    return ledger


def ledger_of_three():
    """Windows 0, 10 and 20, with number 1, 2 and 3."""
    return told(*(plain_report(10 * number, number + 1) for number in range(3)), word())


def numbered(*verdicts):
    return number_rows(verdict_rows(verdicts), LINE_SCHEMA.empty_table(), 7)


def proven(start_ms, **more):
    return row(start_ms, published=1, consumed={"ewr": 1}, seen={"ewr": 1}, **more)


def lay(*verdicts, ledger=None, held_back=(), waived=(), pruned=None, restless=(), promised=None):
    rows = verdicts[0] if isinstance(verdicts[0], pa.Table) else numbered(*verdicts)
    pruned = SETTLED_SCHEMA.empty_table() if pruned is None else pruned
    others = resting.Restless(restless, promised or {}, pruned, set(waived), lambda: set(held_back))
    summing = Summing(TIERS, ["ewr"], NOW_MS, CONFIG.grace_ms)
    return resting.lay(Windows(rows, 2), others, CONFIG, ledger or EventLedger(), summing)


def starts(*verdicts, **more):
    laid = lay(*verdicts, **more)
    spans = [] if laid is None else laid.spans.to_pylist()
    return [
        (each["topic"], at)
        for each in spans
        for at in range(each["start_ms"], each["end_ms"], each["window_ms"])
    ]


class Night:
    """Three windows of a stream, laid to rest; then a run that begins."""

    def __init__(self):
        self.ledger = ledger_of_three()
        self.before = ledger_of_three()
        laid = lay(*(proven(start_ms) for start_ms in (0, 10, 20)), ledger=self.ledger)
        self.files = Resting(NOW_MS, "verdicts/7-ab", ("rows",), ("cells",))
        self.tables = {self.files.facts: resting.lay_reports(laid.left, self.ledger)}
        self.at_rest = AtRest([Asleep(self.files, laid.spans)], laid.left)
        self.by, self.config = resting.judged_by(CONFIG), CONFIG

    def read_table(self, name, wanted=None):
        table = self.tables[name]
        return table if wanted is None else table.filter(wanted)

    def waking(self, *events, unread=(), now_ms=NOW_MS):
        self.ledger.learn_all(events)
        return resting.to_wake(
            self.at_rest, self, self.config, Capture(now_ms, self.ledger), unread, self.by, now_ms
        )

    def wake(self):
        resting.wake(self.at_rest, self.at_rest.asleep, self, self.ledger)


def facts_of(ledger, at_rest=None):
    return facts_table(ledger, {}, {}, (), {}, {} if at_rest is None else at_rest.left)


def test_what_is_proven_of_a_whole_topic_comes_to_rest():
    assert starts(proven(0), proven(10), proven(0, stream="02")) == [("flights", 0), ("flights", 10)]
    for other in (
        row(0, Verdict.LOSS, stream="02"),
        row(0, Verdict.COUNT_MATCH, stream="02"),
        row(0, state=WindowState.OPEN, stream="02"),
        row(0, stream=""),
        replace(row(0, stream="02"), window_ms=2 * WINDOW_MS),
    ):
        assert starts(proven(0), other, proven(10)) == [("flights", 10)], other
    assert starts(proven(0), row(None, Verdict.UNKNOWN)) == [("flights", 0)]
    assert lay(row(0, Verdict.UNKNOWN)) is None


def test_what_else_may_be_asked_of_a_window_keeps_it_awake():
    rows = (proven(0), proven(10))
    assert starts(*rows, held_back=[(STREAM, 0)]) == [("flights", 10)]
    assert starts(*rows, waived=[("flights", 0), ("flights", STREAM)]) == [("flights", 10)]
    gone = pa.Table.from_pylist([{"topic": "flights", "window_start_ms": 10}], SETTLED_SCHEMA)
    assert starts(*rows, pruned=gone) == [("flights", 0)]
    assert starts(*rows, replace(proven(0), topic="orders"), restless=["flights"]) == [("orders", 0)]
    for more in ({"ambiguous": BitMap64([9])}, {"failed": BitMap64([9])}):
        ledger = told(plain_report(0, 1), replace(plain_report(10, 2), **more), word())
        assert starts(*rows, ledger=ledger) == [("flights", 0)]
    carried_on = numbered(proven(0)).set_column(6, "state", [["KEPT"]])
    assert starts(pa.concat_tables([carried_on, numbered(proven(0, stream="02"), proven(10))])) == [
        ("flights", 10)
    ]


def test_nothing_rests_of_the_time_that_a_living_stream_may_still_write_in():
    """Who was cut off for hours comes back with their records."""
    rows = (proven(0), proven(10), replace(proven(10), topic="orders"))
    assert starts(*rows, promised={"flights": 10, "hotels": 0}) == [("flights", 0), ("orders", 10)]
    one, two = (f"{number:016x}" for number in (1, 2))
    words = (
        word(HEARTBEAT, at_ms=990, until_ms=30, stream=one),
        word(HEARTBEAT, at_ms=990, until_ms=20, stream=two),
    )
    assert resting.promised_until(told(*words).streams.values(), 1, 1_000) == {"flights": 20}
    assert resting.promised_until(told(*words).streams.values(), 1, 2_000) == {}, "nobody lives"
    closed = told(*words, word(at_ms=991, stream=two)).streams.values()
    assert resting.promised_until(closed, 1, 1_000) == {"flights": 30}
    assert resting.promised_until(told(word(HEARTBEAT, at_ms=990)).streams.values(), 1, 1_000) == {}


def test_what_is_left_of_windows_at_rest_stands_for_their_numbers():
    night = Night()
    assert list(night.ledger.streams[STREAM].windows) == []
    (known,) = facts_of(night.ledger, night.at_rest).to_pylist()
    assert known["pruned"] is None and not known["reports"]
    left = left_of([known])
    assert (list(left.windows), left.certain) == ([0, 1, 2], BitMap64([1, 2, 3]))
    assert (left.sources, left.topic, left.first_report_ms) == ({"ewr"}, "flights", 0)
    restored = restore_pruned(facts_of(night.ledger, night.at_rest), "resting")
    assert restored == night.at_rest.left
    pruned = {STREAM: PrunedWindows(WINDOW_MS, BitMap64([7]), BitMap64([8, 9]), failed=BitMap64([9]))}
    both = as_pruned(pruned, night.at_rest)[STREAM]
    assert (list(both.windows), both.certain) == ([0, 1, 2, 7], BitMap64([1, 2, 3, 8]))
    assert list(pruned[STREAM].windows) == [7]


def test_who_wakes_is_as_if_he_had_never_slept():
    night = Night()
    night.wake()
    assert night.at_rest.left == {} and night.at_rest.asleep == []
    assert [each.files for each in night.at_rest.woke] == [night.files]
    assert facts_of(night.ledger) == facts_of(night.before)
    beside = Night()  # with a report of another window, and a newer one of a window that slept
    newer = replace(plain_report(10, 2), report=2, byte_count=7)
    for each in (beside.ledger, beside.before):
        each.learn_all([plain_report(30, 4), newer])
    beside.wake()
    assert facts_of(beside.ledger) == facts_of(beside.before)


def test_a_report_with_holes_sleeps_and_wakes_as_it_is():
    holes = replace(plain_report(10, 2), count=2, acknowledged=BitMap64([2, 9]))
    ledger, before = told(plain_report(0, 1), holes, word()), told(plain_report(0, 1), holes, word())
    laid = lay(proven(0), proven(10), ledger=ledger)
    table = resting.lay_reports(laid.left, ledger)
    assert laid.left[STREAM].certain == BitMap64([1, 2, 9]) and list(ledger.streams[STREAM].windows) == []
    files = Resting(0, "verdicts/1", (), ())
    at_rest = AtRest([Asleep(files, laid.spans)], laid.left)
    resting.wake(at_rest, at_rest.asleep, SimpleNamespace(read_table=lambda *_: table), ledger)
    assert facts_of(ledger) == facts_of(before)


def test_nothing_wakes_of_itself_nor_of_what_is_known():
    assert Night().waking() == []
    night = Night()
    assert night.waking(plain_report(10, 2), replace(plain_report(20, 3), report=2), word()) == []
    assert list(night.ledger.streams[STREAM].windows) == [], "the reports are forgotten again"
    assert Night().waking(plain_report(30, 4)) == [], "of another window"


@pytest.mark.parametrize(
    "event",
    [
        replace(plain_report(10, 2), report=2, count=2, acknowledged=BitMap64([2, 4])),
        replace(plain_report(10, 2), ambiguous=BitMap64([4]), report=2),
        replace(plain_report(10, 2), failed=BitMap64([4]), report=2),
        replace(plain_report(10, 2), session="1" * 16),
        word(HEARTBEAT, at_ms=10_000),
    ],
    ids=["more records", "perhaps more", "one that failed", "another producer", "alive after its end"],
)
def test_an_event_that_says_something_else_wakes(event):
    night = Night()
    assert night.waking(event) == night.at_rest.asleep
    night.wake()
    night.before.learn(event)
    now, before = (each.streams[STREAM] for each in (night.ledger, night.before))
    assert {at: says(each) for at, each in now.windows.items()} == {
        at: says(each) for at, each in before.windows.items()
    }
    assert (now.conflicts, now.state, now.at_ms) == (before.conflicts, before.state, before.at_ms)


def test_a_stream_that_promises_less_than_its_windows_end_wakes_them():
    """It was silent for so long that nothing more was to come, and speaks again."""
    night = Night()
    night.ledger = told(word(HEARTBEAT, at_ms=9_990, until_ms=20))
    assert night.waking() == night.at_rest.asleep
    night.ledger = told(word(HEARTBEAT, at_ms=9_990, until_ms=30))
    assert night.waking() == []
    assert night.waking(now_ms=30) == night.at_rest.asleep, "or a clock that was set back"
    night.ledger = EventLedger()
    assert night.waking() == night.at_rest.asleep, "or nobody knows it any more"


def test_another_configuration_wakes_all():
    night = Night()
    for more in (
        {"grace_ms": 2},
        {"topics": ["flights"]},
        {"producers": [SimpleNamespace(name="BB", since_ms=0)]},
        {"content": True},
        {"groups": {"ewr": [SimpleNamespace(name="g", topics=None)]}},
        {"clusters": {**CONFIG.clusters, "jfk": CONFIG.clusters["ewr"]}},
    ):
        night.config = CONFIG.model_copy(update=more)
        assert night.waking() == night.at_rest.asleep, more
    night.config = CONFIG.model_copy(update={"keep_ms": 5})
    assert night.waking() == [], "what is kept how long decides no verdict"


def test_a_topic_that_was_made_anew_wakes_what_is_of_it():
    def note(topic, cause):
        return UnreadNote("ewr", topic, 0, 0, 5, cause, 0)

    night = Night()
    assert night.waking(unread=[note("flights@ewr.flights", "recreated")]) == night.at_rest.asleep
    assert night.waking(unread=[note("orders", "recreated"), note("flights", "truncated")]) == []


def test_rows_say_what_came_and_what_is_owed():
    night = Night()

    def hit(*rows):
        table = pa.concat_tables([numbered(proven(40)), *(numbered(each) for each in rows)])
        return resting.hit_by(night.at_rest, Windows(table, 2))

    def came(windows, topic="flights"):
        told = {**counting_row(WAKING, topic, STREAM, {}), "detail": f'{{"windows":{windows}}}'}
        rows = pa.Table.from_pylist([told], numbered(proven(40)).schema)
        return resting.hit_by(night.at_rest, Windows(pa.concat_tables([numbered(proven(40)), rows]), 2))

    assert hit() == [] and hit(row(30, Verdict.UNKNOWN, stream="")) == []
    assert hit(row(20, Verdict.UNKNOWN, stream="")) == night.at_rest.asleep
    assert hit(proven(20, stream="02")) == night.at_rest.asleep
    assert hit(row(None, Verdict.UNKNOWN, stream="02")) == []
    assert came("[10,50]") == night.at_rest.asleep and came("null", "orders") == night.at_rest.asleep
    assert came("[50]") == [] and came("[10]", "orders") == []


def test_a_stream_tells_of_its_records_for_windows_at_rest():
    night = Night()
    (known,) = facts_of(night.ledger, night.at_rest).to_pylist()
    left, nothing = night.at_rest.left[STREAM], pa.Table.from_pylist([], CELL_SCHEMA)

    def said(*verdicts, living=(), others=()):
        tables = [pa.Table.from_pylist(list(each), CELL_SCHEMA) for each in (living, others)]
        found = waking_row("flights", known, left, *tables, verdict_rows(verdicts))
        return None if found is None else (found["state"], found["topic"], found["detail"])

    assert said(proven(30), living=[cell(30, [4])]) is None
    assert said(others=[cell(50, [4])]) is None, "of a window that is pruned"
    assert said(others=[cell(10, [4]), cell(20, [5])]) == (WAKING, "flights", '{"windows":[10,20]}')
    moved = row(30, Verdict.UNKNOWN, reasons=(PRUNED_BEFORE,))
    assert said(moved, living=[cell(30, [2])]) == (WAKING, "flights", '{"windows":null}')
    assert said(moved, living=[cell(30, [9])]) is None, "the number of one that is pruned"
    assert said(row(None, Verdict.UNKNOWN, reasons=("no report covers these sequences",))) is None
    assert said(row(None, Verdict.UNKNOWN, reasons=("two producers use one stream id",))) is not None
    night.ledger.learn(plain_report(40, 3))
    (known,) = facts_of(night.ledger, night.at_rest).to_pylist()
    assert said(moved) == (WAKING, "flights", '{"windows":null}'), "a report has one of their numbers"
    many = PrunedWindows(WINDOW_MS, BitMap64(range(MOST_NAMED + 1)))
    cells = pa.Table.from_pylist([cell(10 * each, [9]) for each in range(MOST_NAMED + 1)], CELL_SCHEMA)
    told = waking_row("flights", known, many, nothing, cells, verdict_rows([]))
    assert told is not None and told["detail"] == '{"windows":null}'


def test_what_has_rested_for_long_enough_is_pruned():
    night, pruned = Night(), {}
    assert resting.old_enough(night.at_rest, None, NOW_MS + 10**9) == []
    assert resting.old_enough(night.at_rest, 5, NOW_MS + 4) == []
    (going,) = resting.old_enough(night.at_rest, 5, NOW_MS + 5)
    left = night.at_rest.left[STREAM].copy()
    resting.prune(night.at_rest, [going], night, pruned)
    assert (night.at_rest.asleep, night.at_rest.left, pruned) == ([], {}, {STREAM: left})
    lines, spans = let_go(going.spans)
    assert lines.num_rows == 0 and spans.to_pylist()[0]["published"] == 3
    lines, spans = let_go(lay(proven(0), proven(20)).spans)
    assert spans.num_rows == 0 and lines.schema == SETTLED_SCHEMA
    assert [(each["window_start_ms"], each["folded"], each["published"]) for each in lines.to_pylist()] == [
        (0, True, 1),
        (20, True, 1),
    ]


def test_a_commit_names_all_that_rests(tmp_path):
    state = StateFolder.open(tmp_path)
    files = Resting(
        7, "verdicts/1-ab", ("verdicts/1-ab/day=all/a.parquet",), ("cells/1-ab-folded/b.parquet",)
    )
    state.commit(Commit(number=1, resting=[files], resting_by="x"))
    found = state.latest()
    assert found == Commit(number=1, resting=[files], resting_by="x")
    assert set(files.files()) <= set(found.files()) and len(files.files()) == 7
    assert found.rooms() == {("verdicts", "1-ab"), ("cells", "1-ab-folded")}
    assert not found.knows_as_much_as(replace(found, resting=[]))


def test_counts_of_a_report_are_no_part_of_what_rests():
    """A producer that only counts has no numbers that could stand for its records."""
    counted = CountEvent(
        stream=STREAM, session="0" * 16, topic="flights", producer="AA", window_ms=WINDOW_MS,
        window_start_ms=0, report=1, count=3, byte_count=0, at_ms=1, acknowledged=BitMap64(),
        ambiguous=BitMap64(), failed=BitMap64(), sequenced=False,
    )  # fmt: skip
    assert starts(proven(0), proven(10), ledger=told(counted, word())) == [("flights", 10)]
