"""What `millrace audit waive` says still holds the watermark: from files that a run has left."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import yaml

from millrace.audit.config import load_config
from millrace.audit.contract.events import HEARTBEAT, EventLedger, StreamFacts
from millrace.audit.explain import explain
from millrace.audit.keeping.state import Commit, StateFolder
from millrace.audit.keeping.untrusted_waivers import Accepted, standing_accepted
from millrace.audit.keeping.waivers import give_waiver
from millrace.audit.reconciliation.settled import without
from millrace.audit.reconciliation.verdict_rows import iso_time, verdict_rows
from millrace.audit.reconciliation.verdicts import FELL_SILENT, Verdict, WindowState, WindowVerdict
from millrace.audit.report.folder import write_report
from millrace.audit.report.summary import summarise
from millrace.audit.runs.fact_rows import facts_table
from millrace.audit.runs.untrusted import Doubt, Doubts
from millrace.audit.runs.watermark_holds import still_held
from millrace.deploy import cli
from tests.settling import settle

START_MS, HOUR_MS = 1_356_998_400_000, 3_600_000
AT_MS = START_MS + 6 * HOUR_MS
HEADER = "header of an unknown version, in ewr, topic flights"
STREAM = "00000000000000aa"
LOST = {("produced", "ewr"): ((1, 1),)}


def row(hour, verdict=Verdict.PROVEN, state=WindowState.SETTLED, **more):
    start_ms = None if hour is None else START_MS + hour * HOUR_MS
    missing = LOST if verdict is Verdict.LOSS else {}
    fields = {"topic": "flights", "producer": "AA@ewr", "stream": STREAM, "missing": missing} | more
    return WindowVerdict(window_start_ms=start_ms, window_ms=HOUR_MS, state=state, verdict=verdict, **fields)


def hour(number):
    return iso_time(START_MS + number * HOUR_MS)


@pytest.fixture
def left(tmp_path):
    """A function that leaves a report and a state as a run does; returns the config's path."""

    def leave(*rows, streams=(), untrusted=None, holds=None, watermarks=None):
        path = tmp_path / "audit.yaml"
        clusters = {"ewr": {"bootstrap": ["127.0.0.1:1"], "tier": "source"}}
        topics = ["flights", "orders"]
        path.write_text(
            yaml.safe_dump({"clusters": clusters, "topics": topics, "window": "1h", "grace": "10m"})
        )
        config, table = load_config(path), verdict_rows(rows)
        settled = settle(table, None, topics, 1)
        summary = summarise(
            settled.rows, tiers=["ewr"], at_ms=AT_MS, window_ms=HOUR_MS, untrusted=untrusted or {},
            unaudited={}, holds=holds,
        )  # fmt: skip
        (tmp_path / "audit-report").mkdir()
        write_report(tmp_path / "audit-report", summary, settled.rows)
        state, ledger = StateFolder.open(config.state), EventLedger()
        for facts in streams:
            ledger.adopt(facts)
        state.write_table("events/1.parquet", facts_table(ledger, {}))
        state.write_table("verdicts/1/lines.parquet", settled.table)
        state.commit(
            Commit(
                1, AT_MS, HOUR_MS, events="events/1.parquet", verdicts=["verdicts/1/lines.parquet"],
                watermarks=watermarks or {},
            )
        )  # fmt: skip
        return path

    return leave


@pytest.fixture
def waive(capsys):
    """What the command says after a waiver, beside that it was given."""

    def run(path, *what):
        assert cli.run(["audit", "waive", *what, "--why", "known", "--config", str(path)]) == 0
        first, *rest = capsys.readouterr().out.splitlines()
        assert first.startswith("waived: ")
        return [line.strip() for line in rest]

    return run


def test_earlier_windows_that_nobody_waived_are_told_with_the_first_their_number_and_words(left, waive):
    path = left(row(0), *(row(n, Verdict.LOSS) for n in (1, 3, 4)), row(2, Verdict.UNKNOWN))
    assert waive(path, "flights", hour(3)) == [
        f"the watermark of flights does not pass {hour(3)} yet; by the run of {hour(6)} it is held by",
        f"2 windows, the first {hour(1)}, neither proven nor waived: 1 LOSS, 1 UNKNOWN",
    ]
    assert waive(path, "flights", hour(1)) == [], "nothing before it, whatever is behind it"
    assert waive(path, "flights", hour(4))[1:] == [f"window {hour(2)}, neither proven nor waived: UNKNOWN"]
    assert waive(path, "flights", hour(2)) == [], "the last one"


def test_a_window_that_is_open_is_told_with_its_end_or_with_what_is_not_promised(left, waive):
    rows = [row(n, state=WindowState.OPEN, stream="2") for n in (0, 5)]
    path = left(row(0), row(5, Verdict.LOSS), *rows)
    first, *told = waive(path, "flights", hour(5))
    assert "does not pass" in first
    assert told == [
        f"2 windows, the first {hour(0)}, still open, the first though over: "
        "not every producer has promised that it is complete"
    ]


def test_a_loss_is_told_first_where_a_row_of_its_window_is_open_too(left, waive):
    rows = [row(1, Verdict.LOSS), row(1, state=WindowState.OPEN, stream="2"), row(2, Verdict.LOSS)]
    path = left(row(0), *rows)
    assert waive(path, "flights", hour(2))[1:] == [f"window {hour(1)}, neither proven nor waived: LOSS"]
    assert "still open" in waive(path, "flights", hour(1))[1]


def test_an_open_row_in_the_waived_window_itself_holds_it_until_its_grace_is_over(left, waive):
    path = left(row(5, Verdict.LOSS), row(5, state=WindowState.OPEN, stream="2"))
    (_, told) = waive(path, "flights", hour(5))
    assert told == f"window {hour(5)}, still open, until 2013-01-01T06:10:00Z with its grace"


def test_a_waiver_that_the_report_has_outgrown_is_told_as_such(left, waive):
    path = left(row(1, Verdict.LOSS), row(1, Verdict.LOSS, WindowState.OPEN, stream="2"))
    told = waive(path, "flights", hour(1))
    assert told[1] == "itself: the report has more wrong in it than the waiver is for"


def test_a_streams_own_doubt_and_a_producer_of_the_roster_are_named(left, waive):
    silent = row(None, Verdict.UNKNOWN, not_before_ms=START_MS + HOUR_MS, reasons=(FELL_SILENT,))
    later = row(None, Verdict.UNKNOWN, not_before_ms=START_MS + 3 * HOUR_MS, stream="b" * 16)
    owed = row(None, Verdict.UNKNOWN, stream="", producer="UA@ewr", reasons=("a producer of the roster",))
    path = left(row(0), row(1), row(2, Verdict.LOSS), silent, later, owed)
    assert waive(path, "flights", hour(2))[1:] == [
        "producer UA@ewr, in doubt as a whole: a producer of the roster",
        f"stream {STREAM} of AA@ewr, in doubt from {hour(1)} on: {FELL_SILENT}",
    ]
    (head, *told) = waive(path, "flights", STREAM)
    assert head.startswith("the watermark of flights does not move on yet; ")
    assert [line.split(",")[0] for line in told] == ["producer UA@ewr", f"stream {'b' * 16} of AA@ewr"]


def test_a_living_streams_promise_is_named_when_it_is_what_holds(left, waive):
    living = StreamFacts(
        STREAM, topic="flights", producer="AA@ewr", session="1" * 16, state=HEARTBEAT, at_ms=AT_MS,
        lease_ms=1, no_earlier_than_ms=START_MS + HOUR_MS,
    )  # fmt: skip
    beyond = replace(living, stream="b" * 16, no_earlier_than_ms=START_MS + 9 * HOUR_MS)
    path = left(row(0), row(1, Verdict.LOSS), streams=[living, beyond])
    assert waive(path, "flights", hour(1))[1:] == [
        f"stream {STREAM} of AA@ewr, which may still write from {hour(1)} on"
    ]


def test_what_could_not_be_trusted_holds_the_topics_that_it_can_belong_to(left, waive):
    anywhere = "an event that could not be read"
    path = left(
        row(0), row(1, Verdict.LOSS), row(0, topic="orders"),
        untrusted={HEADER: 100, anywhere: 1},
        holds={HEADER: ["flights"], anywhere: ["flights", "orders"]},
        watermarks={"flights": START_MS + HOUR_MS, "orders": START_MS},
    )  # fmt: skip
    assert waive(path, "flights", hour(1))[1:] == [
        f"what could not be trusted: {anywhere} (1)",
        f"what could not be trusted: {HEADER} (100)",
    ]
    (head, told) = waive(path, "--untrusted", "unknown version")
    assert "of flights does not move on" in head and told == f"what could not be trusted: {anywhere} (1)"
    assert waive(path, "--untrusted", "an event") == []
    (replaced,) = waive(path, "flights", hour(1))
    assert replaced.startswith("replaces the waiver of ")


def test_a_run_tells_which_topics_a_doubt_holds_whoever_waived_it():
    found = [
        Doubt(HEADER, 3, "flights"),
        Doubt("an event", 1),
        Doubt("a conflict", 1, "orders", in_rows=True),
    ]
    waivers = standing_accepted([Accepted("event", {"an event": 1}, "ann", "why", 1)], {"an event": 1})
    told = Doubts(found, waivers).holds(["flights", "orders"])
    assert told == {HEADER: ["flights"], "an event": ["flights", "orders"]}


def test_what_cannot_be_read_is_said_and_the_waiver_is_kept_all_the_same(left, waive, tmp_path):
    path = left(row(0), row(1, Verdict.LOSS))
    (tmp_path / "audit-report" / "reconciliation.parquet").write_bytes(b"torn")
    (told,) = waive(path, "flights", hour(1))
    assert told.startswith("what else may hold the watermark cannot be told: ")
    (tmp_path / "audit-report" / "reconciliation.parquet").unlink()
    assert waive(path, "flights", hour(1))[-1].endswith(f"there is no report in {tmp_path}/audit-report")
    assert json.loads((tmp_path / "audit-report" / "summary.json").read_text())["verdict"] == "LOSS"


def test_a_waived_window_that_the_last_run_pruned_is_not_counted_twice(left, tmp_path):
    """Its line is in the state, and its rows are still in that run's report."""
    path = left(row(0, Verdict.LOSS), row(1, Verdict.LOSS))
    config = load_config(path)
    state = StateFolder.open(config.state)
    give_waiver(state, "flights", START_MS, "ann", "known", 5)
    before = state.latest()
    lines = state.read_table(before.verdicts[0])
    pruned = without(lines, [("flights", START_MS)])
    names = ["verdicts/2/lines.parquet", "verdicts/2/pruned.parquet"]
    state.write_table(names[0], lines.slice(0, 0))
    state.write_table(names[1], pruned.filter(pruned["folded"]))
    state.commit(replace(before, number=2, verdicts=names))
    (told,) = explain(config, "flights", hour(0))["waivers"]
    assert told["stands"] and still_held(config, state, ("flights", START_MS)) == []
    state.commit(replace(before, number=3, at_ms=AT_MS + 1, verdicts=names))
    (told,) = explain(config, "flights", hour(0))["waivers"]
    assert not told["stands"], "of a later run, the report's rows came since"


def test_a_silence_that_began_after_the_waiver_is_told_as_not_waived_wherever_it_is_asked(left):
    """The verdict and the counts of the stream's row are what they were."""
    silent = row(None, Verdict.UNKNOWN, reasons=(FELL_SILENT,), silent_from_ms=START_MS)
    path = left(row(0), silent)
    config = load_config(path)
    state = StateFolder.open(config.state)
    for at_ms, stands in ((START_MS - 1, False), (START_MS, True)):
        give_waiver(state, "flights", STREAM, "ann", "known", at_ms)
        (told,) = explain(config, "flights", STREAM)["waivers"]
        assert told["stands"] is stands
        lapsed = any("itself: " in line for line in still_held(config, state, ("flights", STREAM)))
        assert lapsed is not stands
