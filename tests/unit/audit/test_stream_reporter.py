"""The plain stream API and count-only streams: what they tell is what happened, whatever order it came in."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.audit.clients.count_stream import CountStream
from millrace.audit.clients.session import StreamClosed
from millrace.audit.clients.told_stream import ProducerIdentity
from millrace.audit.contract.events import CLOSED, HEARTBEAT, OPENED, CountEvent, EventLedger
from millrace.audit.contract.header import HEADER_KEY, decode_identity
from millrace.audit.reconciliation.reconcile import TierReading, reconcile_stream
from millrace.audit.reconciliation.verdicts import Verdict
from millrace.audit.scanning.cells import SeenSet
from millrace.audit.stream_reporter import ENDED, FORKED, StreamReporter
from millrace.broker.errors import ConfigError
from tests import seeds

OWN = {"millrace.producer": "AA@ewr", "millrace.window.ms": 1000}


class Clock:
    def __init__(self):
        self.now_ms = 1_700_000_000_000

    def __call__(self) -> int:
        return self.now_ms


def publish(events, ledger: EventLedger, lose=lambda: False) -> None:
    for event in events:
        if lose():
            event.failed()
        else:
            ledger.add(event.key, event.value)
            event.delivered()
    assert ledger.untrusted == []


fates = st.lists(st.tuples(st.sampled_from(["acknowledged", "ambiguous", "failed", "not_taken", "pending"]),
                           st.integers(0, 2500)), max_size=60)  # fmt: skip


@settings(max_examples=seeds.examples(150))
@given(fates, st.randoms(use_true_random=False), st.booleans())
def test_what_is_told_is_what_happened(records, rng, sequenced):
    clock, ledger = Clock(), EventLedger()
    reporter = StreamReporter(OWN, sequenced=sequenced, clock_ms=clock)
    truth: Counter[tuple[str, int]] = Counter()
    numbers, open_stamps, size = [], [], 0
    for fate, pause_ms in records:
        clock.now_ms += pause_ms
        stamp = reporter.stamp("flights")
        identity = decode_identity(stamp.header[1])
        assert stamp.header[0] == HEADER_KEY and identity.producer == "AA@ewr"
        assert (identity.sequence, identity.created_ms) == (stamp.sequence, stamp.created_ms)
        start_ms = stamp.created_ms - stamp.created_ms % 1000
        if fate == "acknowledged":
            stamp.acknowledged(7)
            size += 7
        elif fate != "pending":
            getattr(stamp, fate)()
        else:
            open_stamps.append(stamp)
        if fate != "not_taken":
            truth["ambiguous" if fate == "pending" else fate, start_ms] += 1
            numbers.append(stamp.sequence)
        stamp.ambiguous()  # only the first word counts
        if fate == "pending":
            truth["told", start_ms] += 1
        if rng.random() < 0.2:
            publish(reporter.report(), ledger, lose=lambda: rng.random() < 0.3)
    publish(reporter.close(), ledger)
    assert reporter.close() == reporter.report() == []
    with pytest.raises(RuntimeError, match=ENDED):
        reporter.stamp("flights")
    if not records:
        assert ledger.streams == {}
        return
    (facts,) = ledger.streams.values()
    assert (facts.state, facts.conflicts, facts.distrusted) == (CLOSED, [], [])
    assert sum(report.byte_count for report in facts.windows.values()) == size
    for start_ms, report in facts.windows.items():
        assert report.count == truth["acknowledged", start_ms]
        if sequenced:
            assert len(report.acknowledged) == report.count
        else:
            assert report.ambiguous_count == truth["ambiguous", start_ms] and not report.sequenced
    if sequenced:
        parts = [
            part
            for report in facts.windows.values()
            for part in (report.acknowledged, report.ambiguous, report.failed)
        ]
        told = [number for part in parts for number in part]
        assert sorted(told) == list(range(1, facts.last_assigned + 1))
        assert set(numbers) <= set(told)


def test_a_report_that_was_not_delivered_is_said_again():
    clock, ledger = Clock(), EventLedger()
    reporter = StreamReporter(OWN, clock_ms=clock)
    reporter.stamp("flights").acknowledged(1)
    publish(reporter.report(), EventLedger(), lose=lambda: True)
    clock.now_ms += 2000
    publish(reporter.report(), ledger)
    (facts,) = ledger.streams.values()
    (report,) = facts.windows.values()
    assert (facts.state, report.report, set(report.acknowledged)) == (HEARTBEAT, 2, {1})
    assert facts.no_earlier_than_ms == clock.now_ms - 1000


def test_a_topics_own_creation_times_end_the_promises():
    reporter, ledger = StreamReporter(OWN, clock_ms=Clock()), EventLedger()
    reporter.stamp("flights", 5).acknowledged(1)
    publish(reporter.report(), ledger)
    (facts,) = ledger.streams.values()
    assert facts.no_earlier_than_ms is None and set(facts.windows) == {0}
    for impossible in (-1, 1 << 48):
        with pytest.raises(ValueError, match="creation time"):
            reporter.stamp("flights", impossible)
    with pytest.raises(ValueError, match="own events"):
        reporter.stamp("millrace.audit")


@pytest.mark.parametrize("sequenced", [True, False])
def test_a_clock_that_was_set_back_opens_a_new_stream_and_changes_no_time(sequenced):
    clock, ledger = Clock(), EventLedger()
    reporter = StreamReporter(OWN, sequenced=sequenced, clock_ms=clock)
    right_ms = clock.now_ms
    for at_ms in (right_ms, right_ms + 3_600_000, right_ms + 5000, right_ms + 6000):
        clock.now_ms = at_ms
        stamp = reporter.stamp("flights")
        assert stamp.created_ms == at_ms
        stamp.acknowledged(1)
        publish(reporter.report(), ledger)
    publish(reporter.close(), ledger)
    assert [facts.state for facts in ledger.streams.values()] == [CLOSED, CLOSED]
    promised = [facts.no_earlier_than_ms for facts in ledger.streams.values()]
    assert sorted(promised) == [right_ms + 5000, right_ms + 3_599_000]


@pytest.mark.parametrize("sequenced", [True, False])
@pytest.mark.parametrize("own_times", [True, False])
def test_a_clock_that_was_set_back_far_does_not_make_two_producers_of_one(sequenced, own_times):
    """By more than the lease: the end of the stream would be older than its last sign of life."""
    clock, ledger = Clock(), EventLedger()
    reporter = StreamReporter(OWN, sequenced=sequenced, clock_ms=clock)
    for pause_ms in (10_000, 10_000, -3_600_000, 10_000):
        reporter.stamp("flights", clock.now_ms if own_times else None).acknowledged(1)
        publish(reporter.report(), ledger)
        clock.now_ms += pause_ms
    publish(reporter.close(), ledger)
    told = ledger.streams.values()
    assert {(facts.state, *facts.conflicts) for facts in told} == {(CLOSED,)}
    assert len(told) == (1 if own_times else 2)


def test_a_stream_of_very_many_windows_is_replaced_by_a_new_one():
    clock, ledger = Clock(), EventLedger()
    reporter = StreamReporter(OWN, clock_ms=clock)
    for _ in range(10_000):
        clock.now_ms += 1000
        reporter.stamp("flights").acknowledged(1)
    clock.now_ms += 1000
    last = reporter.stamp("flights")
    publish(reporter.report(), ledger)
    reporter.stamp("flights").acknowledged(1)
    publish(reporter.report(), ledger)
    assert sorted(facts.state for facts in ledger.streams.values()) == [HEARTBEAT, OPENED]
    last.acknowledged(1)
    publish(reporter.report(), EventLedger(), lose=lambda: True)
    publish(reporter.report(), ledger)
    assert sorted(facts.state for facts in ledger.streams.values()) == [CLOSED, HEARTBEAT]
    assert (
        sum(report.count for facts in ledger.streams.values() for report in facts.windows.values()) == 10_002
    )


def test_a_journal_tells_after_a_kill_what_was_not_reported(tmp_path):
    own = {**OWN, "millrace.journal": str(tmp_path / "journal")}
    ledger, truth = EventLedger(), set()
    killed = StreamReporter(own)
    for number in range(1, 3001):
        stamp = killed.stamp("flights")
        if number % 3:
            stamp.acknowledged(1)
            truth.add(stamp.sequence)
        elif number % 2:
            stamp.ambiguous()
    # As a kill leaves it: the file is let go, nothing is said.
    killed._journal._journal.close()
    heir = StreamReporter(own)
    publish(heir.report(), ledger)
    (facts,) = ledger.streams.values()
    told = {number for report in facts.windows.values() for number in report.acknowledged}
    unsure = {number for report in facts.windows.values() for number in report.ambiguous}
    assert facts.state == CLOSED and told <= truth and truth - told <= unsure
    assert len(truth) - len(told) <= 1024
    publish(heir.report(), EventLedger())
    heir.close()
    heir.finish()
    assert StreamReporter(own).report() == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_must_open_its_own():
    reporter = StreamReporter(OWN)
    reporter.stamp("flights").acknowledged(1)
    child = os.fork()
    if child == 0:
        try:
            reporter.stamp("flights")
        except RuntimeError as error:
            os._exit(0 if str(error) == FORKED and reporter.close() == [] else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(reporter.close()) == 2


@pytest.mark.parametrize(
    ("own", "sequenced", "named"),
    [
        ({"bootstrap.servers": "x"}, True, "bootstrap.servers"),
        ({"millrace.windw.ms": 5}, True, "millrace.windw.ms"),
        ({"millrace.producer": "a\nb"}, True, "millrace.producer"),
        ({"millrace.journal": "j"}, False, "millrace.journal"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(own, sequenced, named):
    with pytest.raises(ConfigError, match=named):
        StreamReporter(own, sequenced=sequenced)


def count_stream(acknowledged: int, ambiguous: int) -> EventLedger:
    stream = CountStream(
        ProducerIdentity("00000000000000cd", "gateway"), "flights", "00000000000000ab",
        window_ms=1000, lease_ms=1000,
    )  # fmt: skip
    window, number = stream.assign(5)
    stream.acknowledge(window, number, 9)
    for _ in range(acknowledged - 1):
        stream.acknowledge(*stream.assign(5), 9)
    for _ in range(ambiguous):
        stream.mark_ambiguous(*stream.assign(5))
    stream.mark_failed(*stream.assign(5))
    ledger = EventLedger()
    ledger.learn_all(stream.close(2000))
    with pytest.raises(StreamClosed):
        stream.assign(5)
    stream.acknowledge(window, number, 9)  # after the end: it was given up
    assert stream.report_again(CountEvent) is None
    return ledger


@pytest.mark.parametrize(
    ("ambiguous", "arrived", "verdict"),
    [
        (0, 10, Verdict.COUNT_MATCH),
        (0, 9, Verdict.LOSS),
        (0, 11, Verdict.DUPLICATE),
        (2, 9, Verdict.LOSS),
        (2, 10, Verdict.UNKNOWN),
        (2, 11, Verdict.UNKNOWN),
        (2, 12, Verdict.COUNT_MATCH),
        (2, 13, Verdict.DUPLICATE),
    ],
)
def test_records_of_unknown_fate_leave_the_count_open_between_two_numbers(ambiguous, arrived, verdict):
    (facts,) = count_stream(10, ambiguous).streams.values()
    seen = SeenSet(count=arrived, unsequenced_count=arrived)
    (row,) = reconcile_stream(
        facts, {"source": {0: seen}}, [TierReading("source")], window_ms=1000, grace_ms=0, now_ms=99_000
    )
    assert row.verdict is verdict
