"""A report that its client refuses (larger than a request may be) is told again, and keeps no other one back;
`close` says what became of it, each time it is asked."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from kafka import KafkaProducer
from kafka.errors import MessageSizeTooLargeError

from millrace.audit.clients import event_publisher
from millrace.audit.clients.event_publisher import EventPublisher
from millrace.audit.clients.loop_reports import LoopReports
from millrace.audit.clients.session import StreamSession
from millrace.audit.clients.told_stream import ProducerIdentity
from millrace.audit.kafka_python_producer import AuditedKafkaProducer
from millrace.audit.producer import AuditedProducer

TOO_LARGE = KafkaException(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE, "on purpose"))
STREAM = "00000000000000ab"


class Wire:
    """What became of events: `refused` are the beginnings of keys that no client takes."""

    def __init__(self, *refused: str) -> None:
        self.refused = refused
        self.sent: list[str] = []

    def produce(self, client: Any, topic: str, value: bytes, key: bytes, partition: int, told: Any) -> None:
        if key.decode().startswith(self.refused):
            raise TOO_LARGE
        self.sent.append(key.decode())
        told(None, None)

    def take(self) -> list[str]:
        sent, self.sent = self.sent, []
        return sent


@pytest.fixture
def publisher(monkeypatch: pytest.MonkeyPatch) -> EventPublisher:
    monkeypatch.setattr(event_publisher, "Producer", lambda *_, **__: SimpleNamespace())
    return EventPublisher("millrace.audit", {}, None)


def stream_of_two_windows() -> StreamSession:
    identity = ProducerIdentity("00000000000000cd", "AA")
    stream = StreamSession(identity, "flights", STREAM, window_ms=1000, lease_ms=5000)
    for created_ms in (5, 1005):
        window, sequence = stream.assign(created_ms)
        window.acknowledge(sequence, 2)
    return stream


def test_a_report_that_is_refused_keeps_no_other_one_back(publisher, monkeypatch):
    wire, stream, client = Wire(f"count/{STREAM}/0"), stream_of_two_windows(), Any
    monkeypatch.setattr(event_publisher, "_produce", wire.produce)
    publisher.publish(client, stream, stream.report(2000))
    assert wire.take() == [f"count/{STREAM}/1000", f"stream/{STREAM}"]
    assert list(publisher.take_undelivered()) == [stream] and not stream.is_told
    wire.refused = ("none",)
    publisher.publish(client, stream, stream.report(3000))
    assert wire.take() == [f"count/{STREAM}/0", f"stream/{STREAM}"] and stream.is_told


def test_what_an_earlier_session_owes_is_sent_but_for_what_is_refused(publisher, monkeypatch):
    wire = Wire("count/a")
    monkeypatch.setattr(event_publisher, "_produce", wire.produce)
    publisher._owed = {"count/a/0": "{}", "count/b/0": "{}", "stream/b": "{}"}
    publisher.publish_owed(Any)
    assert wire.take() == ["count/b/0", "stream/b"] and publisher._owed == {"count/a/0": "{}"}


@pytest.mark.parametrize("refused", [True, False])
def test_close_says_each_time_whether_all_was_told_and_closes_every_stream(monkeypatch, refused):
    host = Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "unused", "log_level": 0})
    (broker,) = host.list_topics(timeout=10).brokers.values()
    made = AuditedProducer(
        {
            "bootstrap.servers": f"{broker.host}:{broker.port}",
            "log_level": 0,
            "millrace.report.interval.ms": 3_600_000,
        }
    )
    made._publisher._topic_ready = True
    for topic in ("flights", "hotels"):
        made.produce(topic, b"v")
    streams = {topic: stream.stream for topic, stream in made._streams.items()}
    wire = Wire(f"count/{streams['flights']}" if refused else "none")
    monkeypatch.setattr(event_publisher, "_produce", wire.produce)
    monkeypatch.setattr(made._publisher, "_connect", lambda: None)
    assert [made.close(), made.close()] == [not refused] * 2
    assert {f"stream/{stream}" for stream in streams.values()} <= set(wire.sent)


class Outgoing:
    def __init__(self, name: str) -> None:
        self.key, self.value, self.fate = name.encode(), b"", ""

    def delivered(self) -> None:
        self.fate = "delivered"

    def failed(self) -> None:
        self.fate = "failed"

    def too_large(self) -> None:
        self.fate = "too large"


def test_in_an_event_loop_it_keeps_none_back_either():
    events: Any = [Outgoing("large"), Outgoing("small")]

    async def send(event: Any) -> Any:
        if event.key == b"large":
            raise MessageSizeTooLargeError
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        future.set_result(None)
        return future

    async def story() -> None:
        given: Any = SimpleNamespace(report=lambda: events)
        ready: Any = lambda: asyncio.sleep(0, True)  # noqa: E731
        log = logging.getLogger()
        reports = LoopReports(
            given, send, ready, not_taken=Exception, too_large=MessageSizeTooLargeError, log=log
        )
        await reports.report()
        await asyncio.sleep(0)

    asyncio.run(story())
    assert [each.fate for each in events] == ["too large", "delivered"]


def test_nor_with_kafka_python(monkeypatch):
    class Future:
        def add_callback(self, told: Any) -> None:
            told(None)

        def add_errback(self, told: Any) -> None: ...

    def send(self: Any, topic: str, value: bytes, key: bytes, partition: int) -> Future:
        if key == b"large":
            raise MessageSizeTooLargeError
        return Future()

    monkeypatch.setattr(KafkaProducer, "send", send)
    made: Any = object.__new__(AuditedKafkaProducer)
    made._reporter = SimpleNamespace(events_topic="millrace.audit", refusal="never opened")
    made._as_they_are = lambda key, value: (key, value)
    events: Any = [Outgoing("large"), Outgoing("small")]
    futures = made._publish(events)
    assert [each.fate for each in events] == ["too large", "delivered"] and futures[0] is None


# --- the connection of their own ----------------------------------------------------------------------

FATAL = KafkaException(KafkaError(KafkaError._FATAL, "on purpose", fatal=True))


class Client:
    """A client that takes events while it has room and no fatal error; what it took waits to be served."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.room, self.is_broken = 100, False
        self.waiting: list[Any] = []
        self.served: list[str] = []

    def produce(self, topic: str, value: bytes, key: bytes, partition: int, told: Any) -> None:
        if self.is_broken:
            raise FATAL
        if len(self.waiting) >= self.room:
            raise BufferError
        self.waiting.append((key.decode(), told))

    def poll(self, _timeout: float) -> int:
        if self.is_broken:
            raise FATAL
        while self.waiting:
            key, told = self.waiting.pop(0)
            self.served.append(key)
            told(None, None)
        return 0

    def purge(self) -> None: ...

    def flush(self, _timeout: float) -> int:
        while self.waiting:
            self.waiting.pop(0)[1](FATAL.args[0], None)
        return 0


class Applications(Client):
    """The application's, which it alone may serve."""

    def poll(self, _timeout: float) -> int:
        raise AssertionError("callbacks of the application's would run here")


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[Client]:
    made: list[Client] = []

    def connect(*settings: Any, **extras: Any) -> Client:
        made.append(Client())
        return made[-1]

    monkeypatch.setattr(event_publisher, "Producer", connect)
    monkeypatch.setattr(event_publisher, "_produce", lambda client, *event: client.produce(*event))
    return made


@pytest.mark.parametrize("deadline", [None, 1e12])
def test_reports_of_an_application_that_keeps_its_queue_full_go_past_it(connections, deadline):
    """And serve nothing of it, whoever waits for the last ones."""
    publisher, stream = EventPublisher("millrace.audit", {}, None), stream_of_two_windows()
    application: Any = Applications()
    application.room = 1
    publisher.publish(application, stream, stream.report(2000), deadline)
    (own,) = connections
    publisher.serve()
    assert own.served == [f"count/{STREAM}/1000", f"stream/{STREAM}"]
    assert publisher.take_undelivered() == {}


def test_last_reports_wait_for_room_in_the_connection_of_their_own(connections):
    publisher, stream = (
        EventPublisher("millrace.audit", {}, None, transactional=True),
        stream_of_two_windows(),
    )
    publisher._connect()
    connections[0].room = 1
    publisher.publish(Applications(), stream, stream.close(2000), 1e12)  # type: ignore[arg-type]
    publisher.serve()
    assert len(connections[0].served) == 3 and stream.is_told


@pytest.mark.parametrize("told_by", ["produce", "poll"])
def test_a_connection_of_their_own_that_broke_is_followed_by_another(connections, told_by):
    publisher, stream = (
        EventPublisher("millrace.audit", {}, None, transactional=True),
        stream_of_two_windows(),
    )
    application: Any = Applications()
    publisher.publish(application, stream, stream.report(2000))
    connections[0].is_broken = True
    if told_by == "poll":
        publisher.serve()
    publisher.publish(application, stream, stream.report(3000))
    assert publisher.take_undelivered(), "what the broken one had is told again"
    publisher.publish(application, stream, stream.report(4000))
    assert len(connections) == 2 and connections[0].served == []
    publisher.serve()
    assert {f"count/{STREAM}/0", f"count/{STREAM}/1000"} <= set(connections[1].served)
    assert stream.is_told
