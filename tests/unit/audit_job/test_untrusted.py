"""What could not be believed: how far it holds the watermarks, and what a person's waiver does about it."""

from __future__ import annotations

import json
from dataclasses import replace

import pyarrow as pa
import pytest

from millrace.audit.contract.events import EventLedger, StreamFacts
from millrace.audit.keeping.state import StateDamaged, StateFolder
from millrace.audit.keeping.untrusted_waivers import Accepted, accept, read_accepted, standing_accepted
from millrace.audit.keeping.upkeep import LATE, aged, late_counts, late_row
from millrace.audit.keeping.waivers import read_waivers
from millrace.audit.reconciliation.verdict_rows import VERDICT_SCHEMA
from millrace.audit.report.console import console_lines
from millrace.audit.report.reasons import advice
from millrace.audit.report.sentences import sentence
from millrace.audit.runs.untrusted import Doubt, Doubts, conflicts_of, doubts_of_counts, doubts_of_events
from millrace.audit.scanning.cell_rows import NOTE_UNAUDITED
from millrace.broker.errors import ConfigError

HEADER = "header cut short or impossible, in ewr, topic flights"


def doubts(*found: Doubt, waivers=(), keep_ms=None, now_ms=0, since_ms=None) -> Doubts:
    standing = standing_accepted(waivers, {each.what: each.count for each in found})
    return Doubts(list(found), standing, keep_ms, now_ms, since_ms)


@pytest.mark.parametrize(
    ("topic", "expected"),
    [("flights", {"flights": 10, "orders": 40}), ("", {"flights": 10, "orders": 20}), ("other", None)],
)
def test_a_watermark_stays_where_a_doubt_could_belong_to_its_topic(topic, expected):
    now = {"flights": 30, "orders": 40}
    held = doubts(Doubt("what", 1, topic)).held(now, {"flights": 10, "orders": 20})
    assert held == (now if expected is None else expected)


def test_late_records_of_a_pruned_window_hold_back_the_topic_that_they_are_of():
    """One copy that comes years later must not end every other topic's proof."""
    cells = pa.table({"topic": ["flights"], "tier": ["agg"], "count": [1], "tail": [False]})
    row = late_row("flights", "00000000000000aa", cells)
    late = late_counts(pa.Table.from_pylist([row], VERDICT_SCHEMA))
    found = doubts(*doubts_of_counts(late, {}))
    assert found.held({"flights": 30, "orders": 40}, {"flights": 10}) == {"flights": 10, "orders": 40}
    nameless = late_row("", "00000000000000aa", cells)  # of a stream that no event tells of any more
    late = late_counts(pa.Table.from_pylist([nameless], VERDICT_SCHEMA))
    assert doubts(*doubts_of_counts(late, {})).held({"orders": 40}, {}) == {"orders": None}


def test_held_back_it_neither_begins_nor_jumps_and_may_still_move_back():
    one = doubts(Doubt("what", 1))
    assert one.held({"flights": 30}, {}) == {"flights": None}
    assert one.held({"flights": 5}, {"flights": 10}) == {"flights": 5}
    assert one.held({"flights": None}, {"flights": 10}) == {"flights": None}
    in_rows = doubts(Doubt("what", 1, "flights", in_rows=True))
    assert in_rows.held({"flights": 30}, {}) == {"flights": 30}, "its own rows decide"


def test_a_waiver_covers_what_there_was_and_nothing_that_came_since():
    waiver = Accepted("header", {HEADER: 3}, "ops", "a trial", 1)
    assert doubts(Doubt(HEADER, 3), waivers=[waiver]).holding() == []
    assert len(doubts(Doubt(HEADER, 4), waivers=[waiver]).holding()) == 1
    both = doubts(Doubt(HEADER, 3), Doubt("header of an unknown version, in agg", 1), waivers=[waiver])
    assert len(both.holding()) == 2 and not both.waivers[0].stands
    beside = doubts(Doubt(HEADER, 3), Doubt("malformed batch, in agg", 1), waivers=[waiver])
    assert [each.what for each in beside.holding()] == ["malformed batch, in agg"]


def test_one_bad_header_decides_no_more_when_none_came_since_the_horizon():
    found = doubts(Doubt(HEADER, 3, "flights", last_ms=99), since_ms=100)
    assert found.deciding() == [] and found.older() == {HEADER}
    assert [each.what for each in found.told()] == [HEADER], "it stays in the report"
    assert found.held({"flights": 30}, {"flights": 10}) == {"flights": 10}, "and holds the watermark"
    for fresh in (Doubt(HEADER, 3, "flights", last_ms=100), Doubt(HEADER, 3, "flights")):
        assert doubts(fresh, since_ms=100).deciding() == [fresh]
    assert doubts(Doubt("conflict", 1, "flights", in_rows=True)).deciding() == [], "its own rows decide"


def test_only_what_was_accepted_is_ever_pruned_and_that_is_told():
    waiver = Accepted("header", {HEADER: 3}, "ops", "a trial", 1)
    old = Doubt(HEADER, 3, "flights", last_ms=0)
    assert doubts(old, keep_ms=100, now_ms=1000).told() == [old]
    assert doubts(old, waivers=[waiver], keep_ms=100, now_ms=99).told() == [old]
    pruned = doubts(old, waivers=[waiver], keep_ms=100, now_ms=100)
    (note,) = pruned.notes()
    assert pruned.told() == [] and note.startswith(
        f"{HEADER} (3) could not be trusted; ops accepted it (a trial)"
    )
    anew = Doubt("an event", 1)  # read again by every run: it has no age
    accepted = Accepted("event", {"an event": 1}, "ops", "why", 1)
    assert doubts(anew, waivers=[accepted], keep_ms=1, now_ms=10**9).told() == [anew]


def test_nothing_that_could_not_be_trusted_is_forgotten_for_its_age():
    """Only records without an identity are, which are no doubt; more of what was accepted brings all back."""
    unaudited = f"{NOTE_UNAUDITED}/ewr"
    counts = {HEADER: 101, unaudited: 5, f"{LATE}, in agg": 2}
    at_ms = dict.fromkeys(counts, 0)
    kept, ages = aged(counts, at_ms, 100, 10**12)
    assert kept == {HEADER: 101, f"{LATE}, in agg": 2} and set(ages) == set(kept)
    assert aged(counts, at_ms, 100, 99)[0] == counts == aged(counts, at_ms, None, 10**12)[0]
    first, second = (Accepted("header", {HEADER: n}, "ops", "a trial", 1) for n in (100, 101))
    found = Doubt(HEADER, 101, "flights", last_ms=0)
    assert doubts(found, waivers=[first], keep_ms=100, now_ms=10**12).told() == [found]
    assert doubts(found, waivers=[first, second], keep_ms=100, now_ms=10**12).told() == []
    more = replace(found, count=102, last_ms=10**12)
    assert doubts(more, waivers=[first, second], keep_ms=100, now_ms=10**12).holding() == [more]


def test_each_thing_names_the_topic_that_it_can_belong_to():
    counted = doubts_of_counts({HEADER: 2, "batch, in ewr": 1}, {HEADER: 7})
    assert [(each.topic, each.last_ms) for each in counted] == [("flights", 7), ("", None)]
    ledger = EventLedger()
    ledger.add(b"count/00000000000000aa/0", b"no", "in cluster ewr, partition 0, offset 1")
    ledger.add(b"count/00000000000000bb/0", b"no", "in cluster ewr, partition 0, offset 2")
    ledger.add(None, b"no", "in cluster ewr, partition 0, offset 3")
    found = doubts_of_events(ledger, {"00000000000000aa": "flights"}, ["flights"])
    assert [each.topic for each in found] == ["flights", "", ""]
    assert all(each.what.startswith("it is not JSON") or "JSON" in each.what[:40] for each in found)
    assert found[0].what.endswith("event 'count/00000000000000aa/0' in cluster ewr, partition 0, offset 1")


def test_a_stream_that_contradicts_itself_is_told_and_its_rows_decide():
    facts = StreamFacts("00000000000000aa", topic="flights", producer="UA@ewr")
    facts.conflict("two producers use one stream id")
    (told,) = conflicts_of([facts], ["flights"], {facts.stream})
    assert told.what == "two producers use one stream id: stream 00000000000000aa of UA@ewr, topic flights"
    assert told.in_rows and doubts(told).holding() == []
    (without_rows,) = conflicts_of([facts], ["flights"], set())
    assert doubts(without_rows).holding() == [without_rows]
    assert conflicts_of([facts], ["orders"], set()) == []


def test_a_waiver_is_kept_beside_those_of_windows_and_read_back(tmp_path):
    state = StateFolder.open(tmp_path)
    given = accept(state, "header", {HEADER: 3, "batch": 1}, " ann  b ", "a\ntrial", 5)
    assert given == Accepted("header", {HEADER: 3}, "ann b", "a trial", 5)
    again = accept(state, "header", {HEADER: 4}, "dana", "again", 6)
    assert read_accepted(state) == [given, again] and read_waivers(state) == []
    (standing,) = standing_accepted(read_accepted(state), {HEADER: 4})
    assert standing.stands and standing.waiver == again
    for named, why, who in (("nothing such", "why", "ann"), (" ", "why", "ann"), ("header", " ", "ann")):
        with pytest.raises(ConfigError):
            accept(state, named, {HEADER: 1, "a batch": 1}, who, why, 7)
    path = next(tmp_path.glob("waivers/*.untrusted"))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"crc32c": 0}))
    with pytest.raises(StateDamaged):
        read_accepted(state)


def test_the_waiver_that_was_given_last_counts_whatever_its_givers_clock(tmp_path):
    """Also where an earlier one of these words was damaged, and taken away as the line about it says."""
    state = StateFolder.open(tmp_path)
    accept(state, "header", {HEADER: 3}, "ahead", "a trial", 3_601_000)
    right = accept(state, "header", {HEADER: 5}, "right", "more came", 2_000)
    (standing,) = standing_accepted(read_accepted(state), {HEADER: 5})
    assert standing.stands and standing.waiver == right
    (first,) = tmp_path.glob("waivers/*.1.untrusted")
    first.unlink()
    again = accept(state, "header", {HEADER: 6}, "again", "more came", 1_000)
    assert read_accepted(state) == [right, again]


def test_an_unknown_audit_names_its_first_reason_and_what_to_do():
    reason = "the length of the windows changed under way: a stream keeps the one it began with"
    summary = {
        "verdict": "UNKNOWN",
        "windows": {"UNKNOWN": 1},
        "untrusted": [],
        "reasons": [{"reason": reason, "count": 1}],
        "counts": {
            "acknowledged": 5,
            **dict.fromkeys(("in_flight", "unreported", "explained", "unknown", "duplicates"), 0),
        },
    }
    assert reason in sentence(summary) and "no window is settled yet" not in sentence(summary)
    assert "start it anew" in advice(reason)


def test_the_console_tells_what_is_waived_and_what_has_lapsed():
    summary = {
        "verdict": "UNKNOWN",
        "sentence": "words.",
        "losses": [],
        "duplicates": [],
        "differing": [],
        "reasons": [],
        "untrusted": [{"what": HEADER, "count": 3, "waived": True}],
        "watermarks": {},
        "waivers": [],
        "untrusted_waivers": [{"stands": True}, {"stands": False}],
        "next": "",
    }
    told = "\n".join(console_lines(summary, "page", "audit.yaml", 0))
    assert f"{HEADER} (3, waived)" in told and "1 no longer stand: more came" in told
    assert "exit status  0, nothing is unproven but what 1 waiver covers" in told
