"""A call that an application gets wrong is refused to it, and changes nothing of what the audit is told: no
number stays pending, no report fails, and no promise stands still."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from kafka import KafkaProducer

from millrace.audit import stream_reporter as reporter_module
from millrace.audit.aiokafka_producer import AuditedAIOKafkaProducer
from millrace.audit.client_producer import AuditedClientProducer
from millrace.audit.clients.adapter_config import open_reporter
from millrace.audit.contract.events import CLOSED, EventLedger
from millrace.audit.kafka_python_producer import AuditedKafkaProducer
from millrace.audit.stream_reporter import StreamReporter
from millrace.broker.client.producer import Producer
from tests.unit.audit.interruptions import handled_by, interrupted_after

START_MS = 1_700_000_000_000


class Audit:
    """A reporter's clock, and what it told."""

    def __init__(self, reporter: StreamReporter) -> None:
        self.now_ms, self.reporter, self.ledger = START_MS, reporter, EventLedger()
        reporter._clock_ms = lambda: self.now_ms

    def publish(self, events: list[Any]) -> None:
        for event in events:
            self.ledger.add(event.key, event.value)
            event.delivered()

    def is_as_if_nothing_had_been(self) -> None:
        """Two records of the next minutes, and the end: all of it is told, and promised."""
        for _ in range(2):
            self.now_ms += 60_000
            self.reporter.stamp("flights").acknowledged(3)
            self.publish(self.reporter.report())
        (facts,) = self.ledger.streams.values()
        assert (facts.last_settled, facts.last_assigned) == (2, 2)
        assert (facts.no_earlier_than_ms or 0) > START_MS + 60_000
        self.publish(self.reporter.close())
        assert (facts.state, facts.conflicts, self.ledger.untrusted) == (CLOSED, [], [])


class Whole:
    """A whole number of another kind, as numpy's."""

    def __index__(self) -> int:
        return START_MS


@pytest.mark.parametrize(
    ("topic", "created_ms", "error"),
    [
        (b"flights", None, TypeError),
        (None, None, TypeError),
        ("my flights\n", None, ValueError),
        ("", None, ValueError),
        ("..", None, ValueError),
        ("f" * 250, None, ValueError),
        ("flights", START_MS + 0.5, TypeError),
        ("flights", str(START_MS), TypeError),
    ],
)
def test_what_is_no_topic_and_no_time_is_refused(topic: Any, created_ms: Any, error: type) -> None:
    audit = Audit(StreamReporter({"millrace.producer": "AA@ewr"}))
    with pytest.raises(error):
        audit.reporter.stamp(topic, created_ms)
    audit.is_as_if_nothing_had_been()


def test_a_time_of_another_kind_of_whole_number_is_taken() -> None:
    audit = Audit(StreamReporter({"millrace.producer": "AA@ewr"}))
    stamp = audit.reporter.stamp("flights", Whole())  # type: ignore[arg-type]
    stamp.acknowledged(1)
    assert type(stamp.created_ms) is int and stamp.created_ms == START_MS
    audit.publish(audit.reporter.close())
    (facts,) = audit.ledger.streams.values()
    assert set(facts.windows) == {START_MS - START_MS % 60_000}


@pytest.mark.parametrize("sequenced", [True, False])
def test_whatever_ends_a_stamp_its_number_goes_to_the_next(
    sequenced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = Audit(StreamReporter({"millrace.producer": "AA@ewr"}, sequenced=sequenced))
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(reporter_module, "encode_identity", lambda *_: 1 / 0)
        audit.reporter.stamp("flights")
    audit.is_as_if_nothing_had_been()


@pytest.mark.parametrize("last", [False, True])
def test_a_stream_that_cannot_be_reported_keeps_no_other_one_back(
    last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And tells its own the next time."""
    audit = Audit(StreamReporter({"millrace.producer": "AA@ewr"}))
    reporter = audit.reporter
    for topic in ("broken", "flights"):
        reporter.stamp(topic).acknowledged(1)
    broken = reporter._streams["broken"]
    monkeypatch.setattr(broken, "encoded", lambda _: 1 / 0)
    audit.publish(reporter.close() if last else reporter.report())
    (facts,) = audit.ledger.streams.values()
    assert facts.topic == "flights" and facts.windows
    assert reporter.has_untold is last
    monkeypatch.undo()
    audit.publish(reporter.close())
    assert sorted(each.topic for each in audit.ledger.streams.values() if each.windows) == (
        ["flights"] if last else ["broken", "flights"]
    )


# --- the producers of other clients -------------------------------------------------------------------


def of_aiokafka() -> tuple[Any, list[dict[str, Any]]]:
    producer = AuditedAIOKafkaProducer(
        bootstrap_servers="127.0.0.1:1", millrace_content_digest=True, value_serializer=lambda value: value[0]
    )
    producer._closed = True  # it was never started: nothing is to be stopped
    return producer, [{"value": (b"v",), "headers": 5}, {"value": {}}, {"value": None}, {"value": ("text",)}]


def of_our_client() -> tuple[Any, list[dict[str, Any]]]:
    producer = AuditedClientProducer(SimpleNamespace(), millrace_content_digest=True)  # type: ignore[arg-type]
    producer._reports.begin = lambda: None  # type: ignore[method-assign]
    return producer, [{"key": None, "value": "text"}, {"key": None, "value": b"v", "headers": 5}]


@pytest.mark.parametrize("make", [of_aiokafka, of_our_client])
def test_a_call_that_is_refused_leaves_no_number_pending(
    make: Callable[[], tuple[Any, list[dict[str, Any]]]],
) -> None:
    async def story() -> None:
        producer, calls = make()
        audit = Audit(producer._reporter)
        for call in calls:
            with pytest.raises((TypeError, KeyError, AssertionError, AttributeError)):
                await producer.send("flights", **call)
        audit.is_as_if_nothing_had_been()

    asyncio.run(story())


def test_nor_with_kafka_python(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = object.__new__(AuditedKafkaProducer)
    made._closed = True
    made._reporter = open_reporter({"millrace_content_digest": True})
    audit = Audit(made._reporter)
    with pytest.raises(TypeError):
        made.send("flights", b"v", headers=5)
    audit.is_as_if_nothing_had_been()


def test_a_record_of_kafka_python_that_was_sent_and_not_digested_is_in_doubt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: Any = object.__new__(AuditedKafkaProducer)
    made._closed = True
    made._reporter = open_reporter({"millrace_content_digest": True})
    made.config = {"key_serializer": None, "value_serializer": None}
    audit = Audit(made._reporter)
    monkeypatch.setattr(KafkaProducer, "send", lambda *_: SimpleNamespace())
    with pytest.raises(TypeError):
        made.send("flights", "text")
    audit.publish(made._reporter.report())
    (facts,) = audit.ledger.streams.values()
    (report,) = facts.windows.values()
    assert set(report.ambiguous) == {1}


# --- what a signal's handler raises -------------------------------------------------------------------


def numbers_in_doubt(reporter: StreamReporter) -> set[int]:
    audit = Audit(reporter)
    audit.publish(reporter.report())
    (facts,) = audit.ledger.streams.values()
    (report,) = facts.windows.values()
    return set(report.ambiguous)


def refuse() -> None:
    raise ValueError("as the client's own")


def test_kafka_python_may_have_taken_the_record_that_a_handler_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it raises is what the client raises, too, before it takes a record."""
    made: Any = object.__new__(AuditedKafkaProducer)
    made._closed = True
    made._reporter = open_reporter({})
    taken = interrupted_after(lambda *_: SimpleNamespace())
    monkeypatch.setattr(KafkaProducer, "send", taken)
    with handled_by(refuse), pytest.raises(ValueError, match="own"):
        made.send("flights", b"v")
    assert numbers_in_doubt(made._reporter) == {1}


class Broken:
    """A serializer that has no word for it."""

    def serialize(self, *_: object) -> bytes:
        raise ValueError("no such value")


def test_what_a_serializer_of_kafka_python_refuses_was_not_taken() -> None:
    made: Any = object.__new__(AuditedKafkaProducer)
    made._closed = False
    made._reporter = open_reporter({})
    made.config = {**KafkaProducer.DEFAULT_CONFIG, "value_serializer": Broken(), "api_version": (2, 6)}
    audit = Audit(made._reporter)
    try:
        with pytest.raises(ValueError, match="no such value"):
            made.send("flights", {})
    finally:
        made._closed = True  # there is nothing to be closed
    audit.is_as_if_nothing_had_been()


@pytest.mark.parametrize(("make", "client"), [(of_aiokafka, AIOKafkaProducer), (of_our_client, Producer)])
def test_nor_do_the_others_know_what_became_of_it(
    make: Callable[[], tuple[Any, list[dict[str, Any]]]], client: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def taken(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGUSR1)

    async def story() -> None:
        producer, _ = make()
        monkeypatch.setattr(client, "send", taken)
        with handled_by(refuse), pytest.raises(ValueError, match="own"):
            await producer.send("flights", key=b"k", value=[b"v"] if client is AIOKafkaProducer else b"v")
        assert numbers_in_doubt(producer._reporter) == {1}

    asyncio.run(story())
