"""What strangers may write into the events topic: counted and shown, never raised, never believed."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap64

from millrace.audit.contract.event_json import FIELD_NAMES
from millrace.audit.contract.events import (
    CLOSED,
    CountEvent,
    EventLedger,
    GapEvent,
    InvalidEvent,
    StreamEvent,
    TierEvent,
    decode_event,
    encode_event,
)
from millrace.audit.contract.header import MAX_CREATED_MS, MAX_SEQUENCE
from millrace.audit.contract.window_reports import WindowReports
from millrace.audit.reconciliation.reconcile import TierReading, reconcile_stream
from millrace.audit.reconciliation.verdicts import Verdict
from millrace.audit.scanning.cells import SeenSet
from tests import seeds

STREAM = "00000000000000ab"
SESSION = "00000000000000cd"
VALID = {
    "stream": StreamEvent(
        "closed", STREAM, SESSION, "flights", "AA@ewr", "h", "a", "ewr", 1000, 9, 7, 5, 60_000, 8
    ),
    "count": CountEvent(
        STREAM, SESSION, "flights", "AA@ewr", 0, 1000, 1, 2, 9,
        BitMap64([1, 2]), BitMap64([3]), BitMap64(), 5, 77,
    ),
    "gap": GapEvent("m", "ewr", "flights", 3, 10, 20, "too_large", 5),
    "tier": TierEvent(
        "readers", STREAM, "flights", "AA", 0, 1000, 1, 5, 9, BitMap64([1, 2, 3]), 8, SESSION,
        BitMap64([2]), 1, 5, 6, 7, 5,
    ),
}  # fmt: skip
HOSTILE = [
    None, True, False, -1, 1 << 63, 1 << 64, 10**4000, 1.5, 1e300, "", "x" * 10_240, "a\x00b", "a\nb",
    "\ud800", "‮", "AB" * 8, [], [[2, 1]], [[-5, -1]], [[1, 1 << 63]], [[0, 1]], [[1, 2, 3]], [[1, 1 << 62]],
    {}, {"base": 0}, {"base": -1, "roaring": ""}, {"base": 0, "roaring": "OjAAAAE"}, [[[[[[[1]]]]]]],
]  # fmt: skip


def body(kind: str) -> dict:
    return json.loads(encode_event(VALID[kind])[1])


def holds(event) -> None:
    """Everything that readers rely on."""
    for name in FIELD_NAMES[next(kind for kind, value in VALID.items() if type(value) is type(event))]:
        value = getattr(event, {"bytes": "byte_count", "from": "from_offset", "to": "to_offset",
                                "class": "cause", "open": "has_open_end", "first_ms": "first_append_ms",
                                "last_ms": "last_append_ms"}.get(name, name))  # fmt: skip
        if isinstance(value, str):
            assert value.isprintable() and len(value.encode()) <= 1024
        elif isinstance(value, int) and name != "digest":
            assert type(value) is int or name in ("sequenced", "open")
            assert 0 <= value <= MAX_SEQUENCE
            assert not name.endswith("_ms") or value <= MAX_CREATED_MS
        elif isinstance(value, BitMap64):
            assert not value or value.min() >= 1
    assert decode_event(encode_event(event)[1]) == event


@pytest.mark.parametrize("kind", VALID)
def test_each_field_in_turn_takes_every_hostile_value_without_being_believed(kind):
    for name in ("version", "type", *FIELD_NAMES[kind]):
        for value in HOSTILE:
            if value == 10**4000:
                text = json.dumps({**body(kind), name: "HUGE"}).replace('"HUGE"', "9" * 5000)
            else:
                text = json.dumps({**body(kind), name: value})
            ledger = EventLedger()
            ledger.add(None, text.encode("utf-8", "surrogatepass"))
            try:
                event = decode_event(text.encode("utf-8", "surrogatepass"))
            except InvalidEvent as error:
                assert ledger.untrusted_count == 1 and "\n" not in str(error) and len(str(error)) < 300
            else:
                assert event is None or holds(event) is None


@pytest.mark.parametrize("kind", VALID)
def test_a_field_that_is_missing_is_named_or_has_its_documented_meaning(kind):
    for name in FIELD_NAMES[kind]:
        fields = body(kind)
        fields.pop(name, None)
        try:
            event = decode_event(json.dumps(fields).encode())
        except InvalidEvent as error:
            assert (
                name in str(error)
                or "count" in str(error)
                or "repeated" in str(error)
                or "span" in str(error)
            )
        else:
            holds(event)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"version":1,"version":1,"type":"gap"}', "twice"),
        ('{"version":1,"type":"gap","a":{"b":1,"b":2}}', "twice"),
        ('{"version":NaN}', "NaN"),
        ('{"version":1,"type":"count","count":Infinity}', "Infinity"),
        ('{"version":' + "9" * 5000 + "}", "not JSON"),
        ('{"a":' * 100_000, "not JSON"),
        ("[" * 5000 + "]" * 5000, "not"),
        ('{"version":true,"type":"gap"}', "version"),
        ('{"version":1.0,"type":"gap"}', "version"),
        ('{"version":"1","type":"gap"}', "version"),
        ('{"version":2,"type":"gap"}', "version 2"),
        ('{"version":1,"type":["gap"]}', "type"),
        ("", "not JSON"),
        ("null", "not a JSON object"),
        ('"text"', "not a JSON object"),
    ],
)
def test_texts_that_readers_could_disagree_about_are_refused(text, reason):
    with pytest.raises(InvalidEvent, match=reason):
        decode_event(text.encode())


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
def test_another_encoding_than_utf8_is_refused(encoding):
    with pytest.raises(InvalidEvent, match="not JSON"):
        decode_event(json.dumps(body("gap")).encode(encoding))


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(HOSTILE[:6]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


@settings(max_examples=seeds.examples(300))
@given(st.sampled_from(sorted(VALID)), st.data(), st.binary(max_size=40) | st.none())
def test_any_mutation_of_any_event_is_counted_or_believed_whole(kind, data, key):
    fields = body(kind)
    names = data.draw(st.lists(st.sampled_from(sorted(fields)), max_size=3, unique=True))
    for name in names:
        fields[name] = data.draw(anything)
    value = json.dumps(fields).encode("utf-8", "surrogatepass")
    if data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(value) - 1))
        value = value[:place] + data.draw(st.binary(max_size=3)) + value[place + 1 :]
    ledger = EventLedger()
    ledger.add(key, value, "agg offset 5")
    known = len(ledger.streams) + len(ledger.gaps) + len(ledger.tiers)
    assert known + ledger.untrusted_count <= 1
    for facts in ledger.streams.values():
        for report in facts.windows.values():
            holds(report)
    for event in (*ledger.gaps.values(), *ledger.tiers.values()):
        holds(event)


@given(st.binary(max_size=3000))
def test_any_key_is_taken_without_failing(key):
    ledger = EventLedger()
    ledger.add(key, b"{")
    ledger.add(b"tier/" + key, b"{")
    ledger.add(b"count/" + key, b"{")
    assert ledger.untrusted_count == 3 and all(len(text) < 500 for text in ledger.untrusted)


def test_an_unreadable_word_of_a_group_makes_the_group_doubtful_whatever_its_name():
    for group in ("readers", "a/b/c", "tier/x"):
        ledger = EventLedger()
        ledger.add(f"tier/{group}/{SESSION}/flights/{STREAM}/0".encode(), b'{"version":2}')
        assert ledger.distrusted_groups == {group: ["version 2, this reader knows 1"]}


def count(acknowledged, **changes) -> CountEvent:
    fields = {
        "stream": STREAM, "session": SESSION, "topic": "flights", "producer": "AA@ewr",
        "window_start_ms": 0, "window_ms": 1000, "report": 1, "count": len(acknowledged), "byte_count": 9,
        "acknowledged": BitMap64(acknowledged), "ambiguous": BitMap64(), "failed": BitMap64(), "at_ms": 5,
    }  # fmt: skip
    return CountEvent(**{**fields, **changes})


def closing(**changes) -> StreamEvent:
    fields = {
        "state": CLOSED, "stream": STREAM, "session": SESSION, "topic": "flights", "producer": "AA@ewr",
        "host": "h", "application": "a", "datacenter": "ewr", "window_ms": 1000, "last_assigned": 3,
        "last_settled": 3, "no_earlier_than_ms": None, "lease_ms": 1000, "at_ms": 5000,
    }  # fmt: skip
    return StreamEvent(**{**fields, **changes})


def worst(events) -> Verdict:
    """The verdict of what arrived in full, by these events in one order and in the other."""
    found = set()
    for order in (events, events[::-1]):
        ledger = EventLedger()
        ledger.learn_all(order)
        seen = {"source": {0: SeenSet.of([1, 2, 3])}}
        rows = reconcile_stream(
            ledger.streams[STREAM], seen, [TierReading("source")], window_ms=1000, grace_ms=0, now_ms=99_000
        )
        found.add(max(row.verdict for row in rows))
    (verdict,) = found
    return verdict


def test_a_sound_stream_is_proven_and_every_contradiction_is_not():
    sound = [count([1, 2, 3]), closing()]
    assert worst(sound) is Verdict.PROVEN
    other = {"session": "00000000000000ce"}
    for contradiction in (
        closing(**other),
        closing(producer="BB@jfk"),
        closing(topic="delays"),
        count([1, 2, 3], report=2, **other),
        count([1, 2], report=1, ambiguous=BitMap64([3])),
        count([1, 2], report=2, ambiguous=BitMap64([3])),
        count([1, 2, 3], report=2, window_ms=2000),
        count([], report=1, window_start_ms=2000, window_ms=2000),
        count([], report=2, count=3, sequenced=False),
        closing(state="heartbeat", at_ms=50_000, last_settled=3),
    ):
        assert worst([*sound, contradiction]) is Verdict.UNKNOWN, contradiction


def test_ever_so_many_contradictions_keep_a_few_sentences():
    ledger = EventLedger()
    for number in range(5000):
        ledger.learn(count([1], report=number))
        ledger.learn(count([2], report=number))
    assert 1 <= len(ledger.streams[STREAM].conflicts) <= 10


def test_learning_a_stream_of_many_windows_costs_each_window_once():
    """Two days of ten-second windows: looking through all known windows at each would take a minute."""
    ledger = EventLedger()
    visited = 0

    class Windows(WindowReports):
        def values(self):
            nonlocal visited
            visited += len(self)
            return super().values()

    facts = ledger.facts(STREAM)
    facts.windows = Windows()
    for number in range(17_280):
        ledger.learn(count([number + 1], window_start_ms=number * 1000))
    assert facts.sequenced and len(facts.windows) == 17_280 and visited == 0


@given(st.permutations(range(4)))
def test_gaps_and_tiers_merge_to_the_same_in_any_order(order):
    gap = GapEvent("m", "ewr", "flights", 3, 10, 20, "too_large", 5)
    tier = VALID["tier"]
    events = [
        gap,
        GapEvent("m", "ewr", "flights", 3, 10, 30, "too_large", 5),
        tier,
        TierEvent("readers", STREAM, "flights", "AA", 0, 1000, 2, 4, 9, BitMap64([1, 2, 3, 4]), 8, SESSION),
    ]
    ledger = EventLedger()
    ledger.learn_all(events[number] for number in order)
    assert list(ledger.gaps.values()) == [events[1]] and list(ledger.tiers.values()) == [events[3]]


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_of_a_gap_told_again_the_farthest_end_counts_whatever_clock_it_was_told_by(order):
    """A worker whose clock is an hour ahead tells of it and dies; the next sees that more is gone."""
    ahead = GapEvent("m", "ewr", "flights", 3, 10, 20, "recreated", 3_601_000)
    farther = GapEvent("m", "ewr", "flights", 3, 10, 30, "recreated", 61_000)
    ended = GapEvent("m", "ewr", "flights", 3, 10, 10, "recreated", 1_000, has_open_end=True)
    events = [ahead, farther, ended]
    ledger = EventLedger()
    for number in order:
        ledger.add(*encode_event(events[number]))
    assert list(ledger.gaps.values()) == [replace(farther, has_open_end=True)]
