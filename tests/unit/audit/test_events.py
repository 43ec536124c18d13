import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap64

from millrace.audit.contract.events import (
    CLOSED,
    HEARTBEAT,
    OPENED,
    CountEvent,
    EventLedger,
    GapEvent,
    InvalidEvent,
    StreamEvent,
    TierEvent,
    decode_event,
    encode_event,
    event_to_keep,
    kept_event,
)

STREAM = "00000000000000ab"
SESSION = "00000000000000cd"
times = st.integers(0, (1 << 48) - 1)
sets = st.sets(st.integers(1, 300)).map(BitMap64)


def stream_event(**changes):
    fields = {
        "state": OPENED,
        "stream": STREAM,
        "session": SESSION,
        "topic": "flights",
        "producer": "AA@ewr",
        "host": "h",
        "application": "a",
        "datacenter": "ewr",
        "window_ms": 60_000,
        "last_assigned": 9,
        "last_settled": 7,
        "no_earlier_than_ms": None,
        "lease_ms": 60_000,
        "at_ms": 5,
    }
    return StreamEvent(**{**fields, **changes})


def count_event(acknowledged=(), **changes):
    fields = {
        "stream": STREAM,
        "session": SESSION,
        "topic": "flights",
        "producer": "AA@ewr",
        "window_start_ms": 60_000,
        "window_ms": 60_000,
        "report": 1,
        "count": len(set(acknowledged)),
        "byte_count": 10,
        "acknowledged": BitMap64(acknowledged),
        "ambiguous": BitMap64(),
        "failed": BitMap64(),
        "at_ms": 5,
    }
    return CountEvent(**{**fields, **changes})


@given(st.sampled_from([OPENED, HEARTBEAT, CLOSED]), times, times | st.none(), st.integers(0, 1 << 60))
def test_a_stream_event_comes_back(state, at_ms, promise, last):
    event = stream_event(
        state=state, at_ms=at_ms, no_earlier_than_ms=promise, last_assigned=last, last_settled=last // 2
    )
    assert decode_event(encode_event(event)[1]) == event


@given(sets, sets, sets, st.none() | st.integers(0, (1 << 64) - 1))
def test_a_count_event_comes_back(acknowledged, ambiguous, failed, digest):
    ambiguous -= acknowledged
    event = count_event(
        acknowledged, ambiguous=ambiguous, failed=failed - acknowledged - ambiguous, digest=digest
    )
    assert decode_event(encode_event(event)[1]) == event


def test_a_gap_and_a_tier_event_come_back():
    gap = GapEvent("m", "ewr", "flights", 3, 10, 20, "too_large", 5)
    tier = TierEvent("readers", STREAM, "flights", "AA", 0, 60_000, 2, 3, 30, BitMap64([1, 2, 3]), 9)
    for event in (gap, tier):
        assert decode_event(encode_event(event)[1]) == event


def test_gaps_are_read_under_both_their_keys_and_kept_with_the_one_they_came_under():
    """Under the older one, another's event may have been taken the place of."""
    new = GapEvent("m", "ewr", "flights", 3, 10, 20, "too_large", 5, topic_id="of-the-topic")
    key, value = encode_event(new)
    for read_under in (key, b"gap/m/ewr/flights/3/10"):
        ledger, again = EventLedger(), EventLedger()
        ledger.add(read_under, value)
        (gap,) = ledger.gaps.values()
        assert gap == replace(new, older_key=read_under != key) and not ledger.untrusted
        assert gap.key.encode() == read_under
        kept = json.loads(json.dumps(event_to_keep(gap)))
        again.learn(kept_event(kept))
        assert again.gaps == ledger.gaps
    del kept["key"]
    assert kept_event(kept).older_key, "kept before there were two"
    for wrong in (b"gap/m/ewr/flights/3/11", key + b"x", b"gap/m/ewr/flights/3/10/too_large"):
        ledger = EventLedger()
        ledger.add(wrong, value)
        assert not ledger.gaps and ledger.untrusted_count == 1
    tier = TierEvent("readers", STREAM, "flights", "AA", 0, 60_000, 2, 3, 30, BitMap64([1, 2, 3]), 9)
    assert kept_event(json.loads(json.dumps(event_to_keep(tier)))) == tier


def test_the_json_is_the_documented_contract():
    key, value = encode_event(count_event([1, 2, 3, 7], ambiguous=BitMap64([9])))
    assert key == f"count/{STREAM}/60000".encode()
    assert json.loads(value) == {
        "version": 1,
        "type": "count",
        "stream": STREAM,
        "session": SESSION,
        "topic": "flights",
        "producer": "AA@ewr",
        "window_start_ms": 60_000,
        "window_ms": 60_000,
        "report": 1,
        "count": 4,
        "bytes": 10,
        "acknowledged": [[1, 3], [7, 7]],
        "ambiguous": [[9, 9]],
        "failed": [],
        "digest": None,
        "at_ms": 5,
    }
    key, value = encode_event(stream_event())
    assert key == f"stream/{STREAM}".encode()
    assert json.loads(value) == {
        "version": 1,
        "type": "stream",
        "state": "opened",
        "stream": STREAM,
        "session": SESSION,
        "topic": "flights",
        "producer": "AA@ewr",
        "host": "h",
        "application": "a",
        "datacenter": "ewr",
        "window_ms": 60_000,
        "last_assigned": 9,
        "last_settled": 7,
        "no_earlier_than_ms": None,
        "lease_ms": 60_000,
        "at_ms": 5,
    }
    known = GapEvent("m", "ewr", "flights", 3, 10, 20, "too_large", 5, topic_id="of-the-topic")
    key, value = encode_event(known)
    assert key == b"gap/m/ewr/flights/3/10/too_large/of-the-topic"
    assert json.loads(value)["topic_id"] == "of-the-topic" and decode_event(value) == known
    key, value = encode_event(GapEvent("m", "ewr", "flights", 3, 10, 20, "too_large", 5))
    assert key == b"gap/m/ewr/flights/3/10/too_large"
    assert json.loads(value) == {
        "version": 1,
        "type": "gap",
        "mirror": "m",
        "source": "ewr",
        "topic": "flights",
        "partition": 3,
        "from": 10,
        "to": 20,
        "class": "too_large",
        "at_ms": 5,
    }


def body(event=None, **changes):
    value = json.loads(encode_event(event or count_event([1, 2]))[1])
    value.update(changes)
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "not a JSON object"),
        (body(version=2), "version 2"),
        (body(type=None), "type"),
        (body(stream="xyz"), "stream"),
        (body(stream="AB" * 8), "stream"),
        (body(topic="a\x00b"), "topic"),
        (body(producer="p" * 10_240), "producer"),
        (body(count=3), "count is 3"),
        (body(count=True), "count"),
        (body(acknowledged=[[2, 1]]), "acknowledged"),
        (body(acknowledged=[[1, 1 << 63]]), "acknowledged"),
        (body(ambiguous=[[2, 3]]), "at once"),
        (body(window_ms=0), "window_ms"),
        (body(window_start_ms=60_001), "multiple"),
        (body(window_start_ms=-60_000), "window_start_ms"),
        (body(at_ms=1 << 50), "at_ms"),
        (body(digest="xyz"), "digest"),
        (body(stream_event(), state="asleep"), "state"),
        (body(stream_event(), last_settled=10), "last_settled"),
        (body(GapEvent("m", "s", "t", 0, 5, 6, "c", 1), to=4), "to"),
    ],
)
def test_a_wrong_event_is_refused_with_the_field(value, reason):
    with pytest.raises(InvalidEvent, match=reason):
        decode_event(value)


any_json = st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps).map(str.encode)


@given(st.binary(max_size=100) | any_json)
def test_the_ledger_takes_any_bytes_without_failing(value):
    EventLedger().add(b"count/x/1", value)


@given(st.permutations(range(5)))
def test_the_newest_report_wins_in_any_order_of_reading(order):
    events = [count_event(range(1, number + 2), report=number) for number in range(5)]
    ledger = EventLedger()
    for number in order:
        ledger.add(*encode_event(events[number]))
    (facts,) = ledger.streams.values()
    assert facts.windows == {60_000: events[4]}
    assert facts.conflicts == []


@given(st.permutations(range(4)))
def test_stream_events_merge_to_the_same_facts_in_any_order(order):
    events = [
        stream_event(at_ms=10),
        stream_event(state=HEARTBEAT, at_ms=20, last_assigned=20, last_settled=15, no_earlier_than_ms=5),
        stream_event(state=CLOSED, at_ms=30, last_assigned=25, last_settled=25),
        stream_event(state=HEARTBEAT, at_ms=40, last_assigned=22, last_settled=20, lease_ms=7),
    ]
    ledger = EventLedger()
    ledger.learn_all(events[number] for number in order)
    facts = ledger.streams[STREAM]
    assert (facts.state, facts.last_assigned, facts.last_settled) == (CLOSED, 25, 25)
    assert (facts.no_earlier_than_ms, facts.at_ms, facts.lease_ms, facts.opened_at_ms) == (5, 40, 7, 10)


def test_two_different_reports_of_one_number_are_a_conflict():
    ledger = EventLedger()
    ledger.learn_all([count_event([1]), count_event([1]), count_event([2])])
    assert ledger.streams[STREAM].conflicts == ["two different reports with number 1 for one window"]


def test_two_producers_on_one_stream_are_a_conflict():
    ledger = EventLedger()
    ledger.learn_all([stream_event(), stream_event(session="00000000000000ce")])
    assert ledger.streams[STREAM].conflicts == ["two producers use one stream id"]


def test_what_cannot_be_trusted_is_counted_and_named():
    ledger = EventLedger()
    ledger.add(b"count/x", b"{", "agg offset 5")
    ledger.add(b"count/other", body())
    ledger.add(b"count/x", None)
    ledger.add(b"later/x", b'{"version":1,"type":"later"}')
    assert ledger.untrusted_count == 2
    assert "agg offset 5" in ledger.untrusted[0] and f"count/{STREAM}/60000" in ledger.untrusted[1]
    assert ledger.streams == {}


@pytest.mark.parametrize("before", [True, False])
def test_a_stream_learns_of_its_unreadable_report_in_any_order(before):
    ledger = EventLedger()
    if before:
        ledger.learn(count_event([1]))
    ledger.add(f"count/{STREAM}/60000".encode(), b"{")
    ledger.learn(count_event([1]))
    assert ledger.streams[STREAM].distrusted == ["not JSON"]
