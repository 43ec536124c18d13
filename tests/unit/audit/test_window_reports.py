"""A stream's reports in columns: the same as a dictionary of them, in a thirtieth of the room, and no rule
of the ledger's is passed over for it."""

from __future__ import annotations

import tracemalloc
import zlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap64

from millrace.audit.contract import event_ledger, window_reports
from millrace.audit.contract.events import (
    CLOSED,
    CountEvent,
    EventLedger,
    InvalidEvent,
    StreamEvent,
    encode_event,
)
from millrace.audit.contract.header import MAX_CREATED_MS, MAX_SEQUENCE
from millrace.audit.contract.sequence_set import from_ranges
from millrace.audit.contract.window_reports import Teller, WindowReports, read_plain
from tests import seeds

STREAM, SESSION = "00000000000000ab", "00000000000000cd"
WINDOW_MS = 1000
TELLER = Teller(STREAM, SESSION, "flights", "AA@ewr", WINDOW_MS)
NOTHING = BitMap64()


def report(start_ms, first=1, last=3, number=1, **changes):
    acknowledged = from_ranges(((first, last),))
    event = CountEvent(
        STREAM, SESSION, "flights", "AA@ewr", start_ms, WINDOW_MS, number, last - first + 1, 9,
        acknowledged, NOTHING, NOTHING, start_ms + 5,
    )  # fmt: skip
    return replace(event, **changes)


def with_ranges(start_ms, *ranges, **changes):
    told = from_ranges(ranges)
    return report(start_ms, acknowledged=told, count=len(told), **changes)


def only_counted(start_ms, count=3, **changes):
    return report(start_ms, acknowledged=NOTHING, count=count, sequenced=False, **changes)


OTHERS = (
    lambda start_ms: with_ranges(start_ms, (1, 2), (5, 5)),
    lambda start_ms: report(start_ms, ambiguous=BitMap64([9])),
    lambda start_ms: report(start_ms, failed=BitMap64([9])),
    lambda start_ms: report(start_ms, digest=0),
    lambda start_ms: with_ranges(start_ms),
    only_counted,
    lambda start_ms: only_counted(start_ms, ambiguous_count=2),
    lambda start_ms: report(start_ms, window_ms=500),
    lambda start_ms: report(start_ms, session="00000000000000ce"),
    lambda start_ms: report(start_ms, topic="hotels"),
    lambda start_ms: report(start_ms, producer="BB"),
    lambda start_ms: report(start_ms, number=1 << 32),
    lambda start_ms: report(start_ms, 1, 1 << 32),
)


def reports_of(*events):
    reports = WindowReports()
    reports.are_of(TELLER)
    for event in events:
        reports[event.window_start_ms] = event
    return reports


def again(reports):
    """As the next run has them."""
    packed, found = reports.pack(), WindowReports()
    found.are_of(TELLER)
    if packed:
        assert found.adopt(packed, STREAM) == TELLER
    for event in reports.others():
        found[event.window_start_ms] = event
    return found


@pytest.mark.parametrize("other", OTHERS)
def test_what_columns_do_not_say_stays_as_it_is(other):
    reports = reports_of(report(0), other(1000), report(2000))
    assert reports.others() == [other(1000)]
    for each in (reports, again(reports)):
        assert each == {0: report(0), 1000: other(1000), 2000: report(2000)}
        each[1000] = report(1000)
        each[0] = other(0)
        assert each == {0: other(0), 1000: report(1000), 2000: report(2000)}


bounds = st.integers(1, MAX_SEQUENCE - 200)
windows = st.integers(0, 120).map(lambda number: number * WINDOW_MS)
plain = st.builds(
    lambda start_ms, first, size, number, byte_count, at_ms: report(
        start_ms, first, first + size, number, byte_count=byte_count, at_ms=at_ms
    ),
    windows,
    bounds,
    st.integers(0, 100),
    st.integers(0, (1 << 32) - 1),
    st.integers(0, MAX_SEQUENCE),
    st.integers(0, MAX_CREATED_MS),
)
odd = st.builds(lambda other, start_ms: other(start_ms), st.sampled_from(OTHERS), windows)
steps = st.lists(
    st.tuples(st.just("put"), plain | odd) | st.tuples(st.sampled_from(("take", "pack", "again")), windows),
    max_size=200,
)


@settings(max_examples=seeds.examples(200), deadline=None)
@given(steps)
def test_it_is_the_dictionary_that_it_stands_for(steps):
    ours, theirs = reports_of(), {}
    for what, given_one in steps:
        if what == "put":
            ours[given_one.window_start_ms] = theirs[given_one.window_start_ms] = given_one
        elif what == "take":
            assert ours.pop(given_one, None) == theirs.pop(given_one, None)
        elif what == "pack":
            ours.pack()
        else:
            ours = again(ours)
        assert len(ours) == len(theirs)
    assert ours == theirs and set(ours) == set(theirs)
    assert ours.lengths() == {each.window_ms for each in theirs.values()}
    assert sorted(ours.spans()) == sorted((at, at + each.window_ms) for at, each in theirs.items())
    afresh = reports_of(*(theirs[at] for at in sorted(theirs)))
    assert (ours.pack(), ours.others()) == (afresh.pack(), afresh.others())


@pytest.mark.parametrize("order", [1, -1])
def test_many_out_of_order_are_sorted_in_a_few_times(order, monkeypatch):
    """Else a stranger who tells a day of seconds backwards has the audit move each of them each time."""
    sorted_in = []
    sort_in = WindowReports._sort_in
    monkeypatch.setattr(
        WindowReports, "_sort_in", lambda self: (sorted_in.append(len(self._late)), sort_in(self))
    )
    reports = reports_of(
        *(report(number * 1000, number + 1, number + 1) for number in range(20_000)[::order])
    )
    assert len(reports) == 20_000 and len(sorted_in) < 150
    assert [reports[at].acknowledged for at in (0, 19_999_000)] == [BitMap64([1]), BitMap64([20_000])]
    assert reports.pack() == again(reports).pack()


def test_a_plain_report_takes_less_than_a_hundred_bytes():
    texts = [encode_event(report(n * 1000, n * 3 + 1, n * 3 + 3)) for n in range(5000)]
    ledger = EventLedger()
    ledger.add(*texts[0])
    tracemalloc.start()
    for text in texts[1:]:
        ledger.add(*text)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(ledger.streams[STREAM].windows) == 5000 and held < 5000 * 100
    reports = ledger.streams[STREAM].windows
    assert len(reports.pack()) < 5000 * 2


def test_what_an_earlier_run_kept_stays_packed_for_a_new_window(monkeypatch):
    ledger, packed = EventLedger(), reports_of(*(report(number * 1000) for number in range(50))).pack()
    facts = ledger.facts(STREAM)
    facts.adopt_reports(packed)
    unpacked = []
    decompress = zlib.decompress
    monkeypatch.setattr(
        window_reports.zlib, "decompress", lambda text: (unpacked.append(1), decompress(text))[1]
    )
    ledger.add(*encode_event(report(50_000, 4, 6)))
    assert (len(facts.windows), facts.windows.lengths(), unpacked) == (51, {WINDOW_MS}, [])
    assert facts.windows.get(51_000) is None and unpacked == []
    assert facts.windows[49_000] == report(49_000) and unpacked == [1]
    assert facts.windows == {**{n * 1000: report(n * 1000) for n in range(50)}, 50_000: report(50_000, 4, 6)}


@pytest.mark.parametrize("damage", [b"", b"{}\nx", b"nothing", b"[]\n"])
def test_packed_reports_without_a_head_are_an_error_and_not_fewer_reports(damage):
    with pytest.raises(InvalidEvent):
        WindowReports().adopt(damage, STREAM)


def test_damaged_columns_are_an_error_and_not_other_numbers():
    packed = reports_of(report(0), report(1000)).pack()
    for damaged in (packed[:-3], packed[:-1] + b"\0", packed.replace(b'"reports":2', b'"reports":3')):
        reports = WindowReports()
        reports.adopt(damaged, STREAM)
        with pytest.raises(InvalidEvent):
            reports[0]


def heartbeat(**changes):
    event = StreamEvent(
        CLOSED, STREAM, SESSION, "flights", "AA@ewr", "h", "a", "ewr", WINDOW_MS, 9, 9, 5, 60_000, 8
    )
    return replace(event, **changes)


def texts_of(*told):
    return [encode_event(each) if not isinstance(each, tuple) else each for each in told]


def reworded(event, *pairs):
    key, value = encode_event(event)
    for old, new in pairs:
        assert old in value
        value = value.replace(old, new)
    return key, value


A_DAY = [report(number * 1000, number * 3 + 1, number * 3 + 3) for number in range(5)]
LATER = report(9000, 30, 32)
CASES = {
    "what is known already": (*A_DAY, *A_DAY),
    "a newer report": (*A_DAY, report(2000, 7, 11, 2)),
    "an older report": (*A_DAY, report(4000, 13, 20, 3), report(4000, 13, 18, 2)),
    "a newer report that takes back": (*A_DAY, report(2000, 8, 9, 2)),
    "two reports of one number": (*A_DAY, report(2000, 7, 10)),
    "other bytes under one number": (*A_DAY, report(2000, 7, 9, byte_count=1)),
    "another session": (*A_DAY, replace(LATER, session="00000000000000ce")),
    "another topic": (*A_DAY, replace(LATER, topic="hotels")),
    "another producer": (*A_DAY, replace(LATER, producer="BB")),
    "another than its stream's word": (heartbeat(producer="BB"), *A_DAY, LATER),
    "another length": (*A_DAY, replace(LATER, window_ms=500)),
    "only counted before": (only_counted(0), *A_DAY[1:], LATER),
    "only counted since": (*A_DAY, only_counted(9000), report(10_000)),
    "another's key": (*A_DAY, (b"count/00000000000000aa/9000", encode_event(LATER)[1])),
    "another window's key": (*A_DAY, (b"count/00000000000000ab/8000", encode_event(LATER)[1])),
    "no key": (*A_DAY, (None, encode_event(LATER)[1])),
    "a count that the set is not": (*A_DAY, reworded(LATER, (b'"count":3', b'"count":4'))),
    "a range upside down": (*A_DAY, reworded(LATER, (b"[30,32]", b"[32,30]"))),
    "sequence 0": (*A_DAY, reworded(LATER, (b"[30,32]", b"[0,2]"))),
    "a sequence too large": (
        *A_DAY, reworded(LATER, (b"[30,32]", b"[9223372036854775806,9223372036854775808]")),
    ),
    "a window between windows": (
        *A_DAY,
        (b"count/00000000000000ab/9001", encode_event(LATER)[1].replace(b'_ms":9000', b'_ms":9001')),
    ),
    "a time too late": (*A_DAY, reworded(LATER, (b'"at_ms":9005', b'"at_ms":281474976710656'))),
    "bytes too many": (*A_DAY, reworded(LATER, (b'"bytes":9,', b'"bytes":9223372036854775808,'))),
    "a leading zero": (*A_DAY, reworded(LATER, (b'"bytes":9,', b'"bytes":09,'))),
    "a name with an escape": (
        *A_DAY, reworded(LATER, (b"AA@ewr", b"AA\\u0040ewr")),
    ),
    "a name not of UTF-8": (*A_DAY, reworded(LATER, (b"AA@ewr", b"AA\xffewr"))),
    "a field twice": (*A_DAY, reworded(LATER, (b'"bytes":9,', b'"bytes":9,"bytes":9,'))),
    "a name with quotes": tuple(replace(each, producer='A"B\\') for each in (*A_DAY, LATER)),
    "backwards": (*reversed(A_DAY), LATER, *A_DAY),
    "more records than a column takes": (*A_DAY, report(9000, 30, 30 + (1 << 32))),
    "more reports than a column takes": (*A_DAY, replace(LATER, report=1 << 32)),
}  # fmt: skip


def facts_told(ledger):
    return ledger.streams, ledger.untrusted, ledger.untrusted_streams, ledger.take_doubted()


@pytest.mark.parametrize("case", CASES)
def test_no_rule_is_passed_over_for_being_fast(case, monkeypatch):
    texts = texts_of(*CASES[case])
    ours, theirs = EventLedger(), EventLedger()
    for key, value in texts:
        ours.add(key, value, "here")
    monkeypatch.setattr(event_ledger, "read_plain", lambda key, value: None)
    for key, value in texts:
        theirs.add(key, value, "here")
    assert facts_told(ours) == facts_told(theirs)


@settings(max_examples=seeds.examples(300), deadline=None)
@given(
    st.lists(plain | odd | st.sampled_from((*A_DAY, heartbeat())), max_size=12),
    st.data(),
)
def test_whatever_is_told_is_learnt_as_by_the_rules_alone(events, data):
    texts = texts_of(*A_DAY, *events)
    key, value = data.draw(st.sampled_from(texts))
    place = data.draw(st.integers(0, len(value)))
    texts.append((key, value[:place] + data.draw(st.binary(max_size=2)) + value[place + 1 :]))
    ours, theirs = EventLedger(), EventLedger()
    for text in texts:
        ours.add(*text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_ledger, "read_plain", lambda key, value: None)
        for text in texts:
            theirs.add(*text)
    assert facts_told(ours) == facts_told(theirs)


def test_the_fast_way_is_the_way_of_our_own_producers(monkeypatch):
    """Whoever words events otherwise is read as truly, and slower."""
    ledger = EventLedger()
    ledger.add(*encode_event(A_DAY[0]))
    monkeypatch.setattr(event_ledger, "decode_event", lambda value: pytest.fail("decoded"))
    for event in (*A_DAY, LATER):
        assert read_plain(*encode_event(event)) is not None
        ledger.add(*encode_event(event))
    assert ledger.streams[STREAM].windows == {each.window_start_ms: each for each in (*A_DAY, LATER)}
