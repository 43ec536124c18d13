"""An exception out of `produce`: what it says of the record's number. No broker is needed for that."""

from __future__ import annotations

import struct
from types import SimpleNamespace

import pytest

from millrace.audit import producer as producer_module
from millrace.audit.events import CountEvent, EventLedger, encode_event
from millrace.audit.producer import AuditedProducer
from millrace.audit.session import ProducerIdentity, StreamSession

STREAM = "00000000000000ab"


def stream_of(clock_ms=0):
    identity = ProducerIdentity("00000000000000cd", "AA")
    return StreamSession(identity, "flights", STREAM, window_ms=1000, lease_ms=5000, now_ms=clock_ms)


def produce(stream, monkeypatch, outcome):
    """One call on a producer whose client does `outcome`."""

    def client(self, *arguments):
        outcome()

    monkeypatch.setattr(producer_module, "_produce", client)
    fake = SimpleNamespace(
        _streams={"flights": stream}, _suffix=(-1, b""), _header_name=b"", _default_callback=None,
        _journal=None, _pack_identity=struct.Struct(">9sQ6s").pack,
    )  # fmt: skip
    AuditedProducer.produce(fake, "flights", b"value", timestamp=5)


def reported(stream):
    ledger = EventLedger()
    for event in stream.close(10):
        ledger.add(*encode_event(event))
    assert ledger.untrusted == []
    (report,) = ledger.facts(STREAM).windows.values()
    return report


@pytest.mark.parametrize("error", [BufferError, TypeError])
def test_the_number_of_a_record_that_the_client_refused_goes_to_the_next(monkeypatch, error):
    stream = stream_of()

    def refuse():
        raise error

    with pytest.raises(error):
        produce(stream, monkeypatch, refuse)
    produce(stream, monkeypatch, lambda: None)
    assert stream.last_assigned == 1


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
