"""What a consumer counts, told by events, merged with those of others, and judged: without servers."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap64

from millrace.audit.clients.consumer_counts import MAX_REASONS, NO_IDENTITY, OTHER_REASONS, SessionCounts
from millrace.audit.consumer import AuditedConsumer
from millrace.audit.contract.content_digest import digest_sum, record_digest
from millrace.audit.contract.events import (
    CLOSED,
    CountEvent,
    EventLedger,
    InvalidEvent,
    StreamEvent,
    TierEvent,
    decode_event,
    encode_event,
)
from millrace.audit.contract.group_counts import (
    Claim,
    claim_of,
    commit_mark,
    group_doubts,
    open_claims,
    seen_by_group,
    tier_name,
    unanswered,
)
from millrace.audit.contract.header import HEADER_KEY, encode_identity, encode_prefix
from millrace.audit.reconciliation.reconcile import Passage, TierReading, reconcile_stream
from millrace.audit.scanning.cells import Cell, merge_cells
from millrace.audit.scanning.repeats import Repeats
from tests.cells import again_of, encode_bitmaps

STREAM, OTHER = "00000000000000ab", "00000000000000ac"
SESSIONS = ("00000000000000c1", "00000000000000c2")
WINDOW_MS = 1000


def header(sequence, created_ms=0, stream=STREAM, name=b"AA"):
    return (HEADER_KEY, encode_identity(encode_prefix(stream), sequence, created_ms, name))


def session(number=0, content=True, now_ms=0) -> SessionCounts:
    return SessionCounts("readers", SESSIONS[number], window_ms=WINDOW_MS, content=content, now_ms=now_ms)


def told(*events) -> EventLedger:
    ledger = EventLedger()
    for event in events:
        ledger.add(*encode_event(event))
    assert ledger.untrusted == []
    return ledger


def seen(ledger, stream=STREAM):
    return seen_by_group(ledger.tiers.values(), ["flights"])["readers"][stream]


deliveries = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 2), st.integers(0, 1)), max_size=80)


@settings(deadline=None)
@given(deliveries, st.randoms(use_true_random=False))
def test_the_groups_set_is_what_its_members_got_however_they_report(records, rng: random.Random):
    """`records`: (sequence, window, member). Reports come at any time, arrive in any order, several times."""
    members, events, truth = [session(0), session(1)], [], Counter()
    for number, window, member in records:
        sequence = number + 100 * window
        truth[window, sequence] += 1
        members[member].take("flights", b"k", b"v", [header(sequence, window * WINDOW_MS)], 5)
        if rng.random() < 0.3:
            events += members[member].report(10)
    for member in members:
        events += member.report(10)
        assert member.is_told
    rng.shuffle(events)
    ledger = told(*events, *events[: len(events) // 2])
    assert group_doubts(ledger) == {}
    found = seen(ledger) if records else {}
    assert set(found) == {window * WINDOW_MS for window, _ in truth}
    for start_ms, window in found.items():
        here = {
            sequence: count for (index, sequence), count in truth.items() if index * WINDOW_MS == start_ms
        }
        assert set(window.sequences) == set(here)
        assert window.count == sum(here.values()) and window.byte_count == window.count
        again = {sequence: count - 1 for sequence, count in here.items() if count > 1}
        assert set(window.repeats.sequences) == set(again)
        assert not window.repeats.beyond(Repeats.of(again))
        assert window.repeats.total + window.loose_copies == sum(again.values())
        assert window.loose_copies or window.repeats == Repeats.of(again)
        digest = digest_sum(record_digest(sequence, b"k", b"v") for sequence in here)
        assert window.digest == (None if window.repeats else digest)
        assert (window.first_append_ms, window.last_append_ms) == (5, 5)


def test_a_member_that_got_a_record_twice_digests_it_once():
    member = session()
    for sequence in (1, 2, 2, 1, 3):
        member.take("flights", b"k", b"v", [header(sequence)], 5)
    (event,) = member.report(9)
    assert event.digest == digest_sum(record_digest(sequence, b"k", b"v") for sequence in (1, 2, 3))
    assert (event.count, set(event.seen), set(event.repeats)) == (5, {1, 2, 3}, {1, 2})


def test_each_record_with_a_second_name_under_one_stream_is_counted_as_not_to_be_trusted():
    member = SessionCounts("readers", SESSIONS[0], window_ms=WINDOW_MS, content=False, now_ms=0)
    for sequence, name in enumerate((b"UA@ewr", b"", b"ZZ@lga", b"UA@ewr", b"ZZ@lga"), start=1):
        member.take("flights", None, b"v", [header(sequence, name=name)], 5)
    assert member.untrusted == {"two producers use one stream id: UA@ewr and ZZ@lga": 2}
    (event,) = member.report(10)
    assert (event.producer, event.count) == ("UA@ewr", 5)


def test_whoever_writes_headers_cannot_make_a_consumer_keep_them_all():
    member = session()
    for number in range(3 * MAX_REASONS):
        member.take("flights", None, b"v", [header((1 << 63) + number)], 5)
    assert len(member.untrusted) == MAX_REASONS + 1
    assert member.untrusted[OTHER_REASONS] == 2 * MAX_REASONS


def test_what_cannot_be_trusted_is_counted_and_only_a_bad_name_leaves_the_record_countable():
    member = session()
    whole = header(1)[1]
    for headers in (None, [], [("own", b"x")]):
        member.take("flights", None, b"v", headers, 5)
    for bad in (whole[:22], b"\x02" + whole[1:], None):
        member.take("flights", None, b"v", [(HEADER_KEY, bad)], 5)
    member.take("flights", None, b"v", [header(1, name=b"a\nb")], 5)
    member.take("flights", None, b"v", [header(2, stream=OTHER), header(2)], 5)
    (event,) = member.report(9)
    assert (event.stream, set(event.seen), event.producer) == (STREAM, {1, 2}, "AA")
    assert member.untrusted[NO_IDENTITY] == 3 and sum(member.untrusted.values()) == 7


def test_a_header_like_the_one_before_is_still_read_whole():
    """The short way for headers of one stream must see the window, the number's range, the size and name."""
    member = session()
    whole = header(1, 500)[1]
    plain = header(5, 500, name=b"")[1]
    records = [
        *(whole, header(2, 999)[1], header(3, 1000)[1], header(4, 0)[1], whole + b"X"),
        *(plain, plain[:22], plain[:9], whole[:9] + b"\x80" + whole[10:], header(6, 500, name=b"A\n")[1]),
    ]
    for record in records:
        member.take("flights", None, b"v", [(HEADER_KEY, record)], 5)
    member.take("delays", None, b"v", [(HEADER_KEY, whole)], 5)
    found = {(event.topic, event.window_start_ms): event for event in member.report(9)}
    assert {place: set(event.seen) for place, event in found.items()} == {
        ("flights", 0): {1, 2, 4, 5, 6},
        ("flights", 1000): {3},
        ("delays", 0): {1},
    }
    assert set(found["flights", 0].repeats) == {1}
    # Two cut short, an impossible number, a name that cannot be shown, another name under the stream's id.
    assert sum(member.untrusted.values()) == 5


def test_records_without_numbers_are_counted_apart():
    member = session()
    for sequence in (0, 0, 1):
        member.take("flights", None, b"v", [header(sequence)], 5)
    ledger = told(*member.report(9))
    window = seen(ledger)[0]
    assert (window.count, window.unsequenced_count, set(window.sequences)) == (3, 2, {1})


def test_a_lost_event_makes_the_group_doubtful_and_a_later_one_heals_it():
    member, events = session(), []
    for window in range(3):
        member.take("flights", None, b"v", [header(window + 1, window * WINDOW_MS)], 5)
        events += member.report(9)
    assert group_doubts(told(*events)) == group_doubts(told(*events[:2])) == {}
    for lost in range(2):
        (doubt,) = group_doubts(told(*events[:lost], *events[lost + 1 :]))["readers"]
        assert "1 records" in doubt.sentence and SESSIONS[0] in doubt.sentence
    member.take("flights", None, b"v", [header(9, 0)], 5)
    assert group_doubts(told(*events[1:], *member.report(9))) == {}


def test_a_last_report_that_was_lost_shows_by_what_was_committed_behind_it():
    """No later one tells of it: the consumer is gone."""
    member, events = session(), []
    for window in range(3):
        member.take("flights", None, b"v", [header(window + 1, window * WINDOW_MS)], 5)
        events += member.report(9)
    claims = {("readers", SESSIONS[0]): Claim(3)}
    assert claim_of(commit_mark(SESSIONS[0], member.told_count)) == (SESSIONS[0], 3)
    assert group_doubts(told(*events), claims) == {} and open_claims(told(*events), claims) == {}
    (doubt,) = group_doubts(told(*events[:2]), claims)["readers"]
    assert "1 records" in doubt.sentence and SESSIONS[0] in doubt.sentence
    assert open_claims(told(*events[:2]), claims) == claims


def test_so_does_the_only_report_of_a_session():
    """Nothing is left of it but what its commit says: what nobody tells of is unknown then, not lost."""
    claims = {("readers", SESSIONS[0]): Claim(3)}
    (doubt,) = group_doubts(told(), claims)["readers"]
    assert "3 records" in doubt.sentence and SESSIONS[0] in doubt.sentence
    assert open_claims(told(), claims) == claims
    assert unanswered(claims, {("readers", SESSIONS[0]): 3}) == {}, "it was answered, and pruned since"
    assert unanswered(claims, {("readers", SESSIONS[0]): 2}) == claims


def test_where_a_session_began_is_told_with_a_window_of_the_topic_and_stays_there():
    member = session()
    member.begin("flights", 0, 7)
    assert member.report(9) == [], "no record of the topic could be counted yet"
    member.take("flights", None, b"v", [header(1)], 5)
    (event,) = member.report(9)
    assert event.began == ((0, 7),) and decode_event(encode_event(event)[1]) == event
    member.take("flights", None, b"v", [header(2, WINDOW_MS)], 5)
    member.begin("flights", 1, 3)
    (other,) = member.report(9)
    assert other.began == ((1, 3),)
    member.take("flights", None, b"v", [header(3)], 5)
    (event,) = member.report(9)
    assert event.began == ((0, 7),), "the newest report of a window takes the place of the older"
    member.begin("flights", 1, 2)
    member.take("flights", None, b"v", [header(4, WINDOW_MS)], 5)
    (other,) = member.report(9)
    assert other.began == ((1, 2),) and member.first_offsets == {("flights", 0): 7, ("flights", 1): 2}


def test_who_looks_back_does_not_answer_for_what_lies_between():
    """It began at 9, looked at 2, and went on: what it passed before it began was not its to get."""

    def got(offset):
        told = {"error": None, "topic": "flights", "partition": 0, "offset": offset}
        told |= {"key": None, "value": b"v", "headers": [header(offset)], "leader_epoch": 4}
        return SimpleNamespace(**{name: lambda each=each: each for name, each in told.items()})

    reader = SimpleNamespace(_lock=threading.Lock(), _counts=session(), _positions={})
    for offset in (9, 2, 10):
        AuditedConsumer._count(reader, [got(offset)])
    (event,) = reader._counts.report(9)
    assert event.began == ((0, 9),) and reader._positions == {("flights", 0): (11, 4)}


@pytest.mark.parametrize(
    "began", [7, [7], [[0]], [[0, -1]], [[-1, 0]], [[0, 1], [0, 2]], [["0", 1]], [[0, True]]]
)
def test_a_begin_that_is_none_is_refused(began):
    value = json.loads(encode_event(TierEvent("g", "0" * 16, "t", "p", 0, 10, 1, 0, 0, BitMap64(), 5))[1])
    with pytest.raises(InvalidEvent, match="began"):
        decode_event(json.dumps({**value, "began": began}).encode())


def test_metadata_that_is_somebody_elses_claims_nothing():
    assert commit_mark(SESSIONS[0], 0) == ""
    mark = commit_mark(SESSIONS[0], 7)
    for other in ("", "mine", mark.upper(), mark + "x", mark[:-2], mark.replace(" ", "", 1), mark + "1" * 20):
        assert claim_of(other) is None, other


def test_an_event_that_was_not_delivered_is_said_again_with_what_came_since():
    member = session()
    member.take("flights", None, b"v", [header(1)], 5)
    (lost,) = member.report(9)
    assert member.report(9) == []
    member.report_again(lost)
    member.take("flights", None, b"v", [header(2)], 5)
    (event,) = member.report(9)
    assert (event.report, set(event.seen), event.session_count) == (2, {1, 2}, 2)


def test_a_session_is_worn_by_age_and_by_windows():
    member = session(now_ms=1000)
    assert not member.is_worn(1000) and member.is_worn(1000 + 25 * 3_600_000)
    for number in range(10_001):
        member.take("flights", None, b"v", [header(number + 1, number * WINDOW_MS)], 5)
    assert member.is_worn(1000)


def test_very_many_repeats_are_named_without_a_number_for_each():
    """What a stranger can claim in a hundred bytes must not cost a dictionary of thousands of millions."""
    everything, size = BitMap64(), 1 << 31
    everything.add_range(1, size + 1)
    events = [
        TierEvent("readers", STREAM, "flights", "", 0, WINDOW_MS, 1, size, 0, everything, 5, session=name)
        for name in SESSIONS
    ]
    window = seen(told(*events))[0]
    assert window.repeats.sequences == everything and window.repeats.total == size
    assert window.loose_copies == len(window.loose) == 0


def test_only_the_asked_topics_are_merged_and_window_lengths_are_told():
    member = session()
    member.take("flights", None, b"v", [header(1)], 5)
    member.take("delays", None, b"v", [header(2)], 5)
    ledger = told(*member.report(9))
    assert set(seen(ledger)[0].sequences) == {1}
    assert seen_by_group(ledger.tiers.values(), []) == {}
    assert tier_name("readers") == "group:readers"


def facts(count):
    numbers = BitMap64(range(1, count + 1))
    ledger = EventLedger()
    about = (STREAM, SESSIONS[0], "flights", "AA")
    ledger.learn(CountEvent(*about, 0, WINDOW_MS, 1, count, count, numbers, BitMap64(), BitMap64(), 2000))
    ledger.learn(StreamEvent(CLOSED, *about, "h", "a", "ewr", WINDOW_MS, count, count, None, 1000, 2000))
    return ledger.streams[STREAM]


def cells(numbers, repeats=None):
    ((base, bitmap),) = encode_bitmaps(numbers)
    return merge_cells(
        [
            Cell(
                "ewr",
                "ewr",
                "flights",
                0,
                STREAM,
                "AA",
                0,
                0,
                len(numbers),
                len(numbers),
                0,
                99,
                base=base,
                bitmap=bitmap,
                again=again_of(repeats or {}),
            )
        ]
    )


@pytest.mark.parametrize(
    ("got", "named", "copies"),
    [
        ([1, 1, 1, 2, 2], (), 0),  # what its cluster has
        ([1, 1, 2, 2, 2], (), 0),  # its events do not tell this from the one above
        ([1, 1, 1, 1, 2, 2], (), 1),  # one of them came once more, and whose it is they do not tell
        ([1, 1, 1, 2, 2, 3, 3, 3], ((3, 3),), 2),
        ([1, 2, 2, 2], ((2, 2),), 1),
        ([3, 3, 4, 4, 4], ((3, 4),), 3),
    ],
)
def test_copies_that_a_groups_cluster_had_already_are_not_laid_to_the_group(got, named, copies):
    """The cluster has 1 three times and 2 twice. Events tell how many copies came, not of which record."""
    member = session(content=False)
    for sequence in [*got, *(set(range(1, 11)) - set(got))]:
        member.take("flights", None, b"v", [header(sequence)], 5)
    tiers = [
        TierReading("ewr"),
        TierReading("group:readers", upstream="ewr", passed={("ewr", "flights", 0): Passage(100)}),
    ]
    held = cells(np.arange(1, 11, dtype=np.uint64), repeats={1: 2, 2: 1})
    found = {**held, "group:readers": seen(told(*member.report(9)))}
    (row,) = reconcile_stream(facts(10), found, tiers, window_ms=WINDOW_MS, grace_ms=0, now_ms=99_000)
    assert row.verdict.name == "DUPLICATE" and row.duplicates["ewr"] == ((1, 2),)
    assert row.duplicates.get("group:readers", ()) == named
    assert row.extra_copies.get("group:readers", 0) == copies


def test_what_each_start_of_a_consumer_got_once_is_a_copy_of_that_record():
    """Sessions are told apart, so that a group which is given 1 three times and 2 twice says exactly that."""
    events = []
    for number, got in enumerate(([1, 2, 3], [1, 2], [1])):
        member = SessionCounts("readers", f"{number:016x}", window_ms=WINDOW_MS, content=False, now_ms=0)
        for sequence in got:
            member.take("flights", None, b"v", [header(sequence)], 5)
        events += member.report(9)
    window = seen(told(*events))[0]
    assert (window.repeats, window.loose_copies) == (Repeats.of({1: 2, 2: 1}), 0)


@pytest.mark.parametrize(
    ("passed", "got", "verdict", "missing"),
    [
        (100, range(1, 11), "PROVEN", ()),
        (100, [1, 2, 3, 5, 6, 7, 8, 10], "LOSS", ((4, 4), (9, 9))),
        (50, [1, 2, 3, 5, 6, 7, 8, 10], "UNKNOWN", ()),
        (100, [*range(1, 11), 3], "DUPLICATE", ()),
    ],
)
def test_the_audit_judges_a_group_by_what_it_got_and_committed(passed, got, verdict, missing):

    member = session(content=False)
    for sequence in got:
        member.take("flights", None, b"v", [header(sequence)], 5)
    tiers = [
        TierReading("ewr"),
        TierReading("group:readers", upstream="ewr", passed={("ewr", "flights", 0): Passage(passed)}),
    ]
    found = {**cells(np.arange(1, 11, dtype=np.uint64)), "group:readers": seen(told(*member.report(9)))}
    (row,) = reconcile_stream(facts(10), found, tiers, window_ms=WINDOW_MS, grace_ms=0, now_ms=99_000)
    assert row.verdict.name == verdict
    assert row.missing.get(("ewr", "group:readers"), ()) == missing
    assert row.consumed["group:readers"] == len(list(got))
