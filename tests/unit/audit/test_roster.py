"""Who must tell of every window, and of which windows nobody did."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyroaring import BitMap64

from millrace.audit.contract.events import CLOSED, HEARTBEAT, CountEvent, EventLedger, StreamFacts
from millrace.audit.keeping import upkeep
from millrace.audit.reconciliation.horizon import DEFAULT_HORIZON_MS
from millrace.audit.reconciliation.roster import roster_rows
from millrace.audit.reconciliation.verdict_rows import verdict_rows
from millrace.audit.reconciliation.verdicts import Verdict, WindowState, WindowVerdict
from millrace.audit.runs.fact_rows import PrunedWindows
from tests.unit.audit.trap_scene import Scene, Stream, row
from tests.verdicts import overall_verdict

YEAR_MS = 365 * 86_400_000
WINDOWS = [(start, start + 10) for start in range(0, 100, 10)]
NOT_BACK = "a producer of the roster closed and has not come back"
FELL_SILENT = "a producer of the roster fell silent and has not come back"
NOTHING = "a producer of the roster told nothing of this window"


def stream(opened_ms, until_ms=None, name="AA", topic="flights", **more):
    state = HEARTBEAT if until_ms is None else CLOSED
    at_ms = opened_ms if until_ms is None else until_ms
    times = {"opened_at_ms": opened_ms, "at_ms": at_ms, "state": state, "lease_ms": 10**6}
    return StreamFacts(f"{opened_ms:016x}", topic=topic, producer=name, **{**times, **more})


def reporting(facts, *starts_ms):
    for start_ms in starts_ms:
        facts.windows[start_ms] = report(start_ms)
    return facts


def report(start_ms):
    nothing = BitMap64()
    return CountEvent(
        "s", "s", "flights", "AA", start_ms, 10, 1, 0, 0, nothing, nothing, nothing, at_ms=start_ms
    )


def silent(*streams, grace_ms=0, since_ms=0, pruned_reports=None, now_ms=1000):
    rows = roster_rows(
        {"AA": since_ms},
        streams,
        "flights",
        10,
        windows=WINDOWS,
        pruned_reports=pruned_reports,
        grace_ms=grace_ms,
        now_ms=now_ms,
    )
    assert {(each.producer, each.verdict) for each in rows} <= {("AA", Verdict.UNKNOWN)}
    since = f" from {rows[-1].not_before_ms}" if rows else ""
    told = {NOTHING: "", NOT_BACK: since, FELL_SILENT: f" silent{since}"}
    return [f"{each.window_start_ms}{told[reason]}" for each in rows for reason in each.reasons]


def test_a_member_is_asked_for_every_window_and_not_for_any():
    assert silent(stream(5)) == []
    assert silent(stream(5, 35), stream(62)) == ["40", "50"], "it was silent between two starts"
    assert silent(stream(25)) == ["0", "10"], "it came late"
    assert silent(stream(5, 35)) == ["None from 35"]
    assert silent(stream(5, 12), stream(42, 44)) == ["20", "30", "None from 44"]
    assert silent(stream(5, 35), stream(30)) == [], "one stream for another"


def test_a_member_with_a_beginning_is_asked_for_what_came_after_it():
    assert silent(stream(25), since_ms=20) == [], "what was before is not its"
    assert silent(stream(25), since_ms=19) == ["10"], "a window that reaches beyond the beginning is its"
    assert silent(stream(25, 35), stream(62), since_ms=20) == ["40", "50"], "what it owes since it owes"
    assert silent(stream(5, 12), since_ms=50) == ["None from 50"], "an end of before is no excuse"


def test_a_member_that_never_reported_is_missed_from_its_beginning_on():
    for since_ms, is_missed in ((0, True), (50, True), (99, True), (100, False), (10**15, False)):
        rows = roster_rows({"AA": since_ms}, [], "flights", 10, windows=WINDOWS, now_ms=1000)
        assert bool(rows) is is_missed, since_ms


def test_a_member_that_was_killed_speaks_for_no_more_than_its_lease():
    """Whether its silence was waived, is older than the horizon, or came before other starts of it."""
    killed = stream(5, lease_ms=20)
    assert silent(killed, now_ms=25) == [], "its lease runs"
    assert silent(killed, now_ms=27, grace_ms=2) == [], "by its own clock"
    assert silent(killed, now_ms=26) == ["None silent from 25"]
    assert silent(killed, stream(42, 64)) == ["30", "None from 64"], "closed since, and for good"
    assert silent(killed, stream(42)) == ["30"], "it lives again"
    assert silent(stream(2, 12), stream(42, lease_ms=10)) == ["20", "30", "None silent from 52"]
    assert silent(reporting(stream(5, lease_ms=20), 40)) == ["None silent from 25"]
    assert silent(killed, since_ms=50) == ["None silent from 50"]


def test_clocks_may_differ_by_the_grace():
    assert silent(stream(5, 35), stream(62), grace_ms=3) == ["40"], "the end of the other may be its own"
    assert silent(stream(5, 35), stream(67), grace_ms=6) == ["50"]
    assert silent(stream(5, 85), grace_ms=5) == ["None from 85"]


def test_another_topic_of_the_member_says_nothing_of_this_one():
    assert silent(stream(5, 35), stream(36, topic="hotels")) == ["None from 35"]


def test_a_report_speaks_for_its_window_whenever_it_was_made():
    """A producer may set creation times itself."""
    late = reporting(stream(95, 99), 20)
    assert silent(late) == [str(start) for start in range(0, 90, 10) if start != 20]


def test_an_opening_that_is_gone_is_not_later_than_the_first_report():
    assert silent(reporting(stream(35, opened_at_ms=None), 20)) == ["0", "10"]


def test_an_opening_that_is_gone_is_not_later_than_a_report_that_was_pruned():
    closed = reporting(stream(1, 62, opened_at_ms=None), 40)
    assert silent(closed) == ["0", "10", "20", "30", "None from 62"]
    assert silent(closed, pruned_reports={closed.stream: 20}) == ["0", "10", "None from 62"]


@pytest.mark.parametrize("oldest_ms", [None, 70, 60, 40, 30, 0])
def test_the_roster_says_the_same_when_what_may_be_forgotten_is(oldest_ms):
    """Of members whose windows are pruned and whose events are gone. The last stream of each tells since when
    it is away, the others for which windows it spoke."""
    ended = [stream(5, 34), stream(40, 64), stream(41, lease_ms=20), stream(6, 99, name="BB")]
    ledger, pruned = EventLedger(), {}
    for facts in ended:
        ledger.adopt(facts)
        pruned[facts.stream] = PrunedWindows(10, BitMap64([facts.opened_at_ms // 10]))
    windows = [each for each in WINDOWS if oldest_ms is not None and each[0] >= oldest_ms]
    other = [
        WindowVerdict("flights", "CC", "cc", at, 10, WindowState.SETTLED, Verdict.PROVEN) for at, _ in windows
    ]

    def told():
        streams = ledger.streams.values()
        return roster_rows({"AA": 1}, streams, "flights", 10, windows=windows, grace_ms=1, now_ms=1000)

    before = told()
    needed = upkeep.roster_streams({"AA"}, ledger, verdict_rows(other), 1, 1000)
    upkeep.forget_streams(ledger, pruned, (), needed, 1, 1000)
    assert told() == before
    left = {facts.opened_at_ms for facts in ledger.streams.values()}
    assert left == {40} | ({5} if windows and windows[0][0] <= 35 else set()) | (
        {41} if windows and windows[0][0] <= 62 else set()
    )
    assert upkeep.roster_streams((), ledger, verdict_rows(other), 1, 1000) == set()


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_a_member_that_was_silent_for_a_year_is_no_proof_of_that_year(scene):
    member, other = Stream(scene), Stream(scene)
    member.send(1)
    member.close()
    scene.later(YEAR_MS)
    other.send(1)
    other.report()
    scene.later(YEAR_MS)
    back = Stream(scene, name=member.name)
    for each in (other, back):
        each.send(1)
        each.close()
    scene.carry()
    scene.later()
    assert overall_verdict(scene.audit()) is Verdict.PROVEN
    scene.roster = [member.name]
    rows = scene.audit()
    assert overall_verdict(rows) is Verdict.UNKNOWN
    (found,) = (each for each in rows if not each.stream)
    between = row(rows, other)
    assert (found.producer, found.window_start_ms) == (member.name, between.window_start_ms)


def test_a_member_that_was_killed_long_ago_is_missed_though_its_silence_decides_no_more(scene):
    """Its own row is older than the horizon; whoever put it on the roster waits for it all the same."""
    killed, other = Stream(scene), Stream(scene)
    for each in (killed, other):
        each.send(1)
    scene.later()
    for each in (killed, other):
        each.report()
    scene.roster = [killed.name]
    for by_ms in (100_000, DEFAULT_HORIZON_MS + 86_400_000):
        scene.carry()
        scene.audit()
        scene.later(by_ms)
        other.send(1)
        scene.later()
        other.report()
    scene.carry()
    rows = scene.audit()
    assert scene.result.summary["older"]["streams"], "what it was killed with is history"
    (found,) = (each for each in rows if not each.stream)
    assert (found.producer, found.reasons, found.window_start_ms) == (killed.name, (FELL_SILENT,), None)
    assert found.not_before_ms is not None and found.not_before_ms < scene.now_ms - DEFAULT_HORIZON_MS
