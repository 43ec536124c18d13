"""An exception out of `produce`: what it says of the record's number. No broker is needed for that."""

from __future__ import annotations

import sys
import threading
import time
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, Producer

from millrace.audit import producer as producer_module
from millrace.audit.clients import event_publisher, open_streams, recovery
from millrace.audit.clients.delivery_reports import DIGEST_SHIFT, DeliveryReports, Destination
from millrace.audit.clients.events_topic import TopicState
from millrace.audit.clients.session import StreamSession
from millrace.audit.clients.told_stream import ProducerIdentity
from millrace.audit.contract.content_digest import record_digest
from millrace.audit.contract.events import CountEvent, EventLedger, encode_event
from millrace.audit.contract.header import HEADER_KEY, identity_packer
from millrace.audit.producer import _NOT_TAKEN, AuditedProducer
from tests.unit.audit.interruptions import handled_by, interrupted_after, interrupting

STREAM = "00000000000000ab"


def stream_of():
    identity = ProducerIdentity("00000000000000cd", "AA")
    return StreamSession(identity, "flights", STREAM, window_ms=1000, lease_ms=5000)


def produce(stream, monkeypatch, outcome, lock=None):
    """One call on a producer whose client does `outcome`."""

    def client(self, *arguments):
        outcome()

    monkeypatch.setattr(producer_module, "_produce", client)
    fake = SimpleNamespace(
        _streams={"flights": stream}, _default_callback=None, _content=False,
        _does_more=lock is not None, _preparation=None, _transaction_lock=lock,
        _pack_identity=identity_packer(b""),
        _delivery_reports=DeliveryReports(None, sent_once=False),
        _number=lambda topic, timestamp: (stream, *stream.assign(timestamp), timestamp, b"12345 "),
        _new_destination=lambda *_: Destination(print, False),
    )  # fmt: skip
    AuditedProducer.produce(fake, "flights", b"value", timestamp=5)


def reported(stream):
    ledger = EventLedger()
    for event in stream.close(10):
        ledger.add(*encode_event(event))
    assert ledger.untrusted == []
    (report,) = ledger.facts(STREAM).windows.values()
    return report


@pytest.fixture
def small(monkeypatch):
    """A producer with room for two records, whose cluster cannot be reached."""
    monkeypatch.setattr(event_publisher, "ensure_events_topic", lambda *_: TopicState.UNREACHABLE)
    made = AuditedProducer(
        {"bootstrap.servers": "127.0.0.1:1", "log_level": 0, "queue.buffering.max.messages": 2},
        **{
            "millrace.report.interval.ms": 3_600_000,
            "millrace.window.ms": 7 * 24 * 3_600_000,
            "millrace.content.digest": True,
        },
    )
    yield made
    made.close(0)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"value": b"a third one"}, BufferError),
        ({"value": 5}, TypeError),
        ({"value": b"v", "headers": 5}, TypeError),
        ({"value": "\ud800"}, ValueError),
    ],
)
def test_the_number_of_a_record_that_the_client_refused_goes_to_the_next(small, given, error):
    taken = 2 if error is BufferError else 1
    for _ in range(taken):
        small.produce("flights", b"taken")
    with pytest.raises(error):
        small.produce("flights", **given)
    stream = small._streams["flights"]
    assert stream.assign(int(time.time() * 1000))[1] == taken + 1


def test_headers_that_can_be_read_once_are_sent_and_digested(small, monkeypatch):
    sent = []
    monkeypatch.setattr(producer_module, "_produce", lambda *given: sent.append(given))
    for headers in ([("a", b"1"), ("b", "2")], (pair for pair in [("a", b"1"), ("b", "2")])):
        small.produce("flights", b"v", headers=headers, timestamp=5)
    for number, given in enumerate(sent, 1):
        *own, (name, _) = given[-1]
        assert (own, name) == ([("a", b"1"), ("b", "2")], HEADER_KEY)
        told = given[5].__self__ >> DIGEST_SHIFT
        assert told == record_digest(number, None, b"v", [("a", b"1"), ("b", b"2")])


class Impatient(Exception):
    """Of an application's own, and each is a kind of what the client raises, too."""


AFTER_ALL = [type(f"Impatient{kind.__name__}", (Impatient, kind), {}) for kind in _NOT_TAKEN]


@pytest.fixture(params=AFTER_ALL)
def handler_raises(request, monkeypatch):
    """A signal arrives when the client has taken a record."""

    def raising():
        raise request.param(KafkaError(KafkaError._FAIL))

    monkeypatch.setattr(producer_module, "_produce", interrupted_after(Producer.produce))
    with handled_by(raising):
        yield


def test_a_number_is_not_given_away_because_a_handler_raises_what_the_client_raises(
    small, handler_raises, monkeypatch
):
    """Two records would bear it, and a loss of one of them would not be seen."""
    with pytest.raises(Impatient):
        small.produce("flights", b"taken")
    small.produce("flights", b"the next one")
    stream = small._streams["flights"]
    (window,) = stream.windows.values()
    assert (stream.last_assigned, set(window.ambiguous)) == (2, {1})


def test_nor_in_a_batch(small, handler_raises):
    small._does_more = small._content = False  # without content, a batch has its numbers in a row
    small._open_stream("flights", clocked=True).assign(int(time.time() * 1000))
    with pytest.raises(Impatient):
        small.produce_batch("flights", [{"value": b"taken"}, {"value": b"not sent"}])
    stream = small._streams["flights"]
    (window,) = stream.windows.values()
    assert set(window.ambiguous) == {2}
    assert stream.assign(window.start_ms)[1] == 3


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, TimeoutError])
def test_an_interrupt_after_the_client_took_the_record_does_not_give_its_number_away(
    monkeypatch, interruption
):
    """A signal's handler raises between the client's answer and the end of the call."""
    stream = stream_of()

    def take_and_interrupt():
        raise interruption

    with pytest.raises(interruption):
        produce(stream, monkeypatch, take_and_interrupt)
    produce(stream, monkeypatch, lambda: None)
    assert stream.last_assigned == 2
    (window,) = stream.windows.values()
    window.acknowledge(1, 5)
    report = reported(stream)
    assert (set(report.acknowledged), set(report.ambiguous)) == ({1}, {2})


def test_a_record_in_doubt_that_is_delivered_after_all_is_acknowledged():
    stream = stream_of()
    window, sequence = stream.assign(5)
    stream.mark_ambiguous(window, sequence)
    first = next(event for event in stream.report(6) if isinstance(event, CountEvent))
    assert set(first.ambiguous) == {sequence}
    window.acknowledge(sequence, 5)
    assert stream.pending_count == 0
    report = reported(stream)
    assert (set(report.acknowledged), set(report.ambiguous)) == ({sequence}, set())


def test_an_interrupt_right_after_a_lock_was_taken_leaves_it_free(monkeypatch):
    """Ctrl-C in a loop of sends: the end of the program would wait for the lock."""
    stream, lock = stream_of(), threading.RLock()

    def interrupt(frame, event, called):
        if event == "c_return" and getattr(called, "__name__", "") == "acquire":
            raise KeyboardInterrupt

    for call in (lambda: stream.assign(5), lambda: produce(stream, monkeypatch, lambda: None, lock)):
        sys.setprofile(interrupt)
        try:
            call()
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
    assert not stream._lock.locked()
    assert not lock._is_owned()


@pytest.fixture
def producer(waking, tmp_path, monkeypatch, request):
    """One with a journal whose cluster cannot be reached; a signal's handler calls `request.param` of it."""
    monkeypatch.setattr(event_publisher, "ensure_events_topic", lambda *_: TopicState.UNREACHABLE)
    made = AuditedProducer(
        {"bootstrap.servers": "127.0.0.1:1", "log_level": 0},
        **{"millrace.journal": str(tmp_path / "journal"), "millrace.report.interval.ms": 3_600_000},
    )
    told = {"close": lambda: made.close(0), "flush": lambda: made.flush(0), "report": made.report}
    with handled_by(told[request.param]):
        yield made
    made.close(0)


def in_a_new_stream(producer, patch):
    patch.setattr(open_streams, "StreamSession", interrupting(StreamSession))
    producer.produce("flights", b"value")


def in_a_new_window(producer, patch):
    producer.produce("flights", b"value", timestamp=1)
    patch.setattr(StreamSession, "_leave_window", interrupting(StreamSession._leave_window))
    producer.produce("flights", b"value", timestamp=10_000_000)


def in_the_journal(producer, patch):
    patch.setattr(recovery, "_limit_block", interrupting(recovery._limit_block))
    producer.produce("flights", b"value")


def in_a_report(producer, patch):
    patch.setattr(producer._publisher, "prepare_topic", interrupting(lambda timeout_s: False))
    producer.report()


@pytest.mark.parametrize("producer", ["close", "flush", "report"], indirect=True)
@pytest.mark.parametrize("where", [in_a_new_stream, in_a_new_window, in_the_journal, in_a_report])
def test_a_handler_that_would_wait_for_what_it_interrupted_is_refused(producer, monkeypatch, where):
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="would wait for itself"):
        where(producer, patch)
    # Nothing is left locked, and no number is told to be anything that it is not.
    producer.produce("flights", b"value", timestamp=20_000_000)
    producer.report()
    assert producer.flush(0) > 0
    stream = producer._streams["flights"]
    assert stream.last_assigned > 0
    ended = {event.window_start_ms: event for event in stream.close(1) if isinstance(event, CountEvent)}
    told = [number for event in ended.values() for number in (*event.ambiguous, *event.failed)]
    assert sorted(told) == list(range(1, stream.last_assigned + 1))


@pytest.mark.parametrize("producer", ["close"], indirect=True)
def test_a_handler_may_close_a_producer_that_holds_no_lock(producer, monkeypatch):
    """The record that was being handed over has a number already: whether it was sent, nobody knows."""
    monkeypatch.setattr(producer, "_new_suffix", interrupting(producer._new_suffix))
    with pytest.raises(RuntimeError):
        producer.produce("flights", b"value", timestamp=1)
    assert producer.refusal == "this producer is closed"
