"""A report that is larger than the events topic takes: it is avoided, or given up and told, and not sent for
ever."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from millrace.audit.clients import event_publisher, told_stream
from millrace.audit.clients.consumer_counts import SessionCounts
from millrace.audit.clients.event_publisher import OWN_CONNECTION, EventPublisher
from millrace.audit.clients.open_streams import OpenStreams
from millrace.audit.clients.producer_config import read_config
from millrace.audit.clients.session import StreamSession
from millrace.audit.clients.told_stream import LARGE_REPORT_BYTES, MAX_REFUSALS, ProducerIdentity
from millrace.audit.contract.event_json import MAX_UNTOLD
from millrace.audit.contract.events import (
    HEARTBEAT,
    CountEvent,
    EventLedger,
    InvalidEvent,
    StreamEvent,
    decode_event,
)
from millrace.audit.contract.header import HEADER_KEY, encode_identity, encode_prefix
from millrace.audit.reconciliation.reconcile import NOT_COVERED, TOO_LARGE_TO_TELL
from millrace.audit.reconciliation.verdicts import Verdict
from millrace.audit.report.reasons import advice
from millrace.audit.runs.fact_rows import decode_facts, encode_facts
from millrace.audit.stream_reporter import StreamReporter
from tests.unit.audit.test_reconcile import audit, cells, facts

TOO_LARGE = KafkaError(KafkaError.MSG_SIZE_TOO_LARGE, "on purpose")
STREAM = "00000000000000ab"
IDENTITY = ProducerIdentity("00000000000000cd", "AA")
REPORTS = 20


class Cluster:
    """Keeps events; takes no count of the windows `too_large`, as a client (`at_once`) or as a broker."""

    def __init__(self, *too_large: int, at_once: bool) -> None:
        self.too_large = {f"count/{STREAM}/{start_ms}" for start_ms in too_large}
        self.at_once = at_once
        self.tried: list[str] = []
        self.ledger = EventLedger()

    def produce(self, _client: Any, _topic: str, value: bytes, key: bytes, _to: int, told: Any) -> None:
        self.tried.append(key.decode())
        if key.decode() not in self.too_large:
            self.ledger.add(key, value)
            told(None, None)
        elif self.at_once:
            raise KafkaException(TOO_LARGE)
        else:
            told(TOO_LARGE, None)

    def tries_of(self, start_ms: int) -> int:
        return self.tried.count(f"count/{STREAM}/{start_ms}")


def publisher_to(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> EventPublisher:
    monkeypatch.setattr(event_publisher, "Producer", lambda *_, **__: SimpleNamespace())
    monkeypatch.setattr(event_publisher, "_produce", cluster.produce)
    publisher = EventPublisher("millrace.audit", {}, None)
    publisher.own_connection = SimpleNamespace()  # type: ignore[assignment]  # so that a try is one call
    return publisher


def stream_with(*starts_ms: int) -> StreamSession:
    stream = StreamSession(IDENTITY, "flights", STREAM, window_ms=1000, lease_ms=5000)
    for start_ms in starts_ms:
        send(stream, start_ms)
    return stream


def send(stream: StreamSession, created_ms: int) -> None:
    window, sequence = stream.assign(created_ms)
    window.acknowledge(sequence, 2)


@pytest.mark.parametrize("at_once", [True, False], ids=["refused by the client", "refused by the cluster"])
def test_a_report_that_is_always_too_large_is_given_up_once_and_the_audit_is_told(
    at_once: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster, stream = Cluster(1000, at_once=at_once), stream_with(0, 1000)
    publisher = publisher_to(cluster, monkeypatch)
    with caplog.at_level(logging.ERROR):
        for number in range(REPORTS):
            send(stream, 1500)  # the window goes on growing
            publisher.publish(SimpleNamespace(), stream, stream.report(2000 + number))  # type: ignore[arg-type]
    assert cluster.tries_of(1000) == MAX_REFUSALS
    assert cluster.tries_of(0) == 1, "the others are told"
    (line,) = caplog.messages
    assert f"count/{STREAM}/1000" in line and "max.message.bytes" in line
    send(stream, 2000)
    publisher.publish(SimpleNamespace(), stream, stream.close(5000))  # type: ignore[arg-type]
    assert (cluster.tries_of(1000), cluster.tries_of(2000)) == (MAX_REFUSALS, 1)
    told = cluster.ledger.streams[STREAM]
    assert (told.untold, told.last_settled, set(told.windows)) == ((1000,), REPORTS + 3, {0, 2000})
    assert not stream.is_told


def test_several_that_were_too_large_together_are_sent_each_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, stream = Cluster(0, 1000, at_once=False), stream_with(0, 1000)
    publisher = publisher_to(cluster, monkeypatch)
    publisher.own_connection = None
    publisher.publish(SimpleNamespace(), stream, stream.report(3000))  # type: ignore[arg-type]
    cluster.too_large.clear()
    publisher.publish(SimpleNamespace(), stream, stream.report(4000))  # type: ignore[arg-type]
    assert publisher.own_connection is not None and OWN_CONNECTION["batch.num.messages"] == 1
    assert stream.is_told and stream.untold == ()


def test_a_report_that_is_taken_after_all_is_no_refusal_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, stream = Cluster(0, at_once=False), stream_with(0)
    publisher = publisher_to(cluster, monkeypatch)
    for number in range(4):
        for _ in range(MAX_REFUSALS - 1):
            publisher.publish(SimpleNamespace(), stream, stream.report(number))  # type: ignore[arg-type]
        refused, cluster.too_large = cluster.too_large, set()
        publisher.publish(SimpleNamespace(), stream, stream.report(number))  # type: ignore[arg-type]
        assert stream.is_told and stream.untold == ()
        cluster.too_large = refused
        send(stream, 500)


def test_what_an_earlier_start_owes_is_tried_a_few_times_and_left_to_the_next(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster(0, at_once=False)
    publisher = publisher_to(cluster, monkeypatch)
    publisher._owed = {f"count/{STREAM}/0": "{}"}
    with caplog.at_level(logging.ERROR):
        for _ in range(REPORTS):
            publisher.publish_owed(SimpleNamespace())  # type: ignore[arg-type]
    assert cluster.tries_of(0) == MAX_REFUSALS and len(caplog.messages) == 1
    assert publisher.owes, "close says that not all was told"


def test_a_reporter_gives_it_up_for_whatever_client_it_reports_by(caplog: pytest.LogCaptureFixture) -> None:
    reporter = StreamReporter({"millrace.producer": "AA"}, clock_ms=lambda: 60_000)
    tries = 0
    with caplog.at_level(logging.ERROR):
        for _ in range(REPORTS):
            reporter.stamp("flights").acknowledged(1)
            for event in reporter.report():
                is_count = event.key.startswith(b"count/")
                tries += is_count
                event.too_large() if is_count else event.delivered()
    assert (tries, len(caplog.messages), reporter.has_untold) == (MAX_REFUSALS, 1, True)
    words = [decode_event(event.value) for event in reporter.close()]
    assert [word.untold for word in words if isinstance(word, StreamEvent)] == [(60_000,)]
    assert not any(isinstance(word, CountEvent) for word in words)


def test_what_was_never_told_is_unknown_for_that_reason() -> None:
    def untold(*starts_ms: int) -> list[Any]:
        told = facts({0: [1, 2]}, last=4, untold=starts_ms)
        return audit(told, cells("source", [1, 2]), cells("aggregate", [1, 2]))

    for starts_ms, reason in (((), NOT_COVERED), ((60_000,), TOO_LARGE_TO_TELL)):
        first, own = untold(*starts_ms)
        assert first.verdict is Verdict.PROVEN
        assert (own.verdict, own.unknown, own.reasons) == (Verdict.UNKNOWN, ((3, 4),), (reason,))
    assert "max.message.bytes" in advice(TOO_LARGE_TO_TELL)


def test_records_that_arrived_and_were_never_told_are_unknown_for_that_reason() -> None:
    told = facts({0: [1, 2]}, last=3, untold=(60_000,))
    here = [*cells("source", [1, 2]), *cells("source", [3], window=60_000, chunk=(2, None))]
    there = [*cells("aggregate", [1, 2]), *cells("aggregate", [3], window=60_000, chunk=(2, None))]
    first, second = audit(told, here, there)
    assert (first.verdict, second.verdict) == (Verdict.PROVEN, Verdict.UNKNOWN)
    assert second.unreported == ((3, 3),) and TOO_LARGE_TO_TELL in second.reasons


def test_the_audit_keeps_what_was_not_told() -> None:
    told = facts({0: [1]}, state=HEARTBEAT, last=2, untold=(60_000,))
    assert decode_facts(told.stream, encode_facts(told)).untold == (60_000,)


def test_a_list_of_what_was_not_told_has_an_end() -> None:
    events = stream_with().report(0)
    event = StreamSession.encoded(stream_with(), events[-1])[1]
    for count, is_taken in ((MAX_UNTOLD, True), (MAX_UNTOLD + 1, False)):
        value = event[:-1] + b',"untold":[' + b",".join([b"0"] * count) + b"]}"
        if is_taken:
            assert isinstance(decode_event(value), StreamEvent)
        else:
            with pytest.raises(InvalidEvent, match="untold"):
                decode_event(value)


# --- a stream ends before its reports are too large -----------------------------------------------


def scatter(numbers: int) -> range:
    """Sequences of which no two are neighbours."""
    return range(1, 2 * numbers, 2)


SCATTERED = 900_000
"""Of so many the set takes more than the bound and less than half of a mebibyte."""


def test_a_stream_whose_report_becomes_large_is_followed_by_another() -> None:
    streams = OpenStreams(IDENTITY, read_config({"millrace.producer": "AA"}), None)
    first = streams.open("flights", clocked=True)
    first.assign(5)[0].acknowledged.update(scatter(SCATTERED))
    first.current.changed = True
    for stream, events, _ in streams.reports(lambda: 10):
        sizes = [len(stream.encoded(event)[1]) for event in events]
        assert LARGE_REPORT_BYTES < max(sizes) < 1 << 20, "there is room for what is under way"
    list(streams.reports(lambda: 20))
    assert streams.open("flights", clocked=True) is not first


def test_so_is_a_reporters_and_a_consumers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told_stream, "LARGE_REPORT_BYTES", 300)
    monkeypatch.setattr("millrace.audit.clients.consumer_counts.LARGE_REPORT_BYTES", 300)
    reporter = StreamReporter({"millrace.producer": "AA"}, clock_ms=lambda: 60_000)
    before = reporter.stamp("flights")
    before.acknowledged(1)
    for _ in range(2):
        for event in reporter.report():
            event.delivered()
    after = reporter.stamp("flights")
    assert before._stream is not after._stream and after.sequence == 1
    session = SessionCounts("billing", "0" * 16, window_ms=60_000, content=False, now_ms=0)
    header = encode_identity(encode_prefix(STREAM), 1, 1_000, b"AA")
    session.take("flights", None, b"v", [(HEADER_KEY, header)], 0)
    assert not session.is_worn(10)
    for event in session.report(10):
        session.encoded(event)
    assert session.is_worn(10)
