"""What must not keep an audited client's reports, its end, or another client's end from coming about."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from millrace.audit import consumer as consumer_module
from millrace.audit import kafka_python_producer
from millrace.audit.clients import consumer_counts, producer_life
from millrace.audit.clients.consumer_counts import SessionCounts
from millrace.audit.clients.loop_reports import LoopReports
from millrace.audit.consumer import LOOK_UP_S, AuditedConsumer
from millrace.audit.contract.header import HEADER_KEY, encode_identity, encode_prefix
from tests.waiting import patience

FATAL = KafkaException(KafkaError(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, "on purpose", fatal=True))


# --- a consumer's reports -----------------------------------------------------------------------------


class Connection:
    """A client for events, which delivers what it is given or has a fatal error."""

    def __init__(self, error: KafkaException | None = None, too_large: bytes = b"none") -> None:
        self._error, self._too_large = error, too_large
        self.events: list[bytes] = []
        self._waiting: list[Callable[[Any, Any], None]] = []

    def produce(self, _topic: str, value: bytes, _key: bytes, _partition: int, on_delivery: Any) -> None:
        if self._too_large in _key:
            raise KafkaException(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE, "on purpose"))
        self.events.append(value)
        self._waiting.append(on_delivery)

    def flush(self, _timeout: float) -> int:
        if self._error is not None:
            raise self._error
        while self._waiting:
            self._waiting.pop()(None, None)
        return 0

    def purge(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def consumer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One that never finds a cluster; its reporting thread rests."""
    made = AuditedConsumer(
        {
            "bootstrap.servers": "127.0.0.1:1",
            "group.id": "billing",
            "log_level": 0,
            "millrace.report.interval.ms": 3_600_000,
        }
    )
    made._topic_ready, made._events = True, Connection()
    monkeypatch.setattr(consumer_module, "Producer", lambda *_: Connection())
    yield made
    made.close()


def got(consumer: AuditedConsumer, sequence: int, stream: str = "00000000000000aa") -> None:
    header = encode_identity(encode_prefix(stream), sequence, 1_000, b"AA")
    message: Any = SimpleNamespace(
        error=lambda: None,
        topic=lambda: "flights",
        partition=lambda: 0,
        offset=lambda: sequence,
        leader_epoch=lambda: None,
        key=lambda: None,
        value=lambda: b"v",
        headers=lambda: [(HEADER_KEY, header)],
    )
    consumer._count([message])


def test_consumer_whose_connection_had_a_fatal_error_reports_and_commits_again(consumer: Any) -> None:
    broken = consumer._events = Connection(FATAL)
    got(consumer, 1)
    consumer.store_offsets(offsets=[TopicPartition("flights", 0, 2)])
    assert not consumer._publish_report(1.0)
    assert consumer._stores, "they wait for the next report"
    assert consumer._publish_report(1.0)
    assert len(broken.events) == len(consumer._events.events) == 1, "what was not delivered is told again"
    ((_, stores, _, _),) = consumer._reported
    assert [place.offset for places in stores for place in places] == [2]


def test_a_report_that_is_too_large_keeps_no_other_one_back(consumer: Any) -> None:
    """Nor does it let the offsets pass that wait for it."""
    consumer._events = Connection(too_large=b"00000000000000aa")
    for stream in ("00000000000000aa", "00000000000000bb"):
        got(consumer, 1, stream)
    consumer.store_offsets(offsets=[TopicPartition("flights", 0, 2)])
    assert not consumer._publish_report(1.0) and consumer._stores
    assert [b"00000000000000bb" in event for event in consumer._events.events] == [True]


def test_whatever_ends_a_report_what_waited_for_it_waits_for_the_next_one(
    consumer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer._events = Connection()
    got(consumer, 1)
    consumer.store_offsets(offsets=[TopicPartition("flights", 0, 2)])
    with monkeypatch.context() as patch:
        patch.setattr(consumer_counts, "encode_event", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            consumer._publish_report(1.0)
    assert consumer._publish_report(1.0)
    assert len(consumer._events.events) == 1
    assert consumer._reported[0][1]


def test_poll_looks_up_for_the_report_of_a_session_that_was_retired(consumer: Any) -> None:
    assert consumer._patience_s(math.inf) > LOOK_UP_S
    retired = SessionCounts("billing", "0" * 16, window_ms=60_000, content=False, now_ms=0)
    header = encode_identity(encode_prefix("00000000000000aa"), 1, 1_000, b"AA")
    retired.take("flights", None, b"v", [(HEADER_KEY, header)], 0)
    consumer._retired.append(retired)
    assert consumer._patience_s(math.inf) == LOOK_UP_S


# --- the end ------------------------------------------------------------------------------------------


class Living:
    """What is left to close when the interpreter ends."""

    _reporter = SimpleNamespace(refusal=None)

    def __init__(self, ended: list[object], *, is_broken: bool) -> None:
        self._ended, self._is_broken = ended, is_broken

    def close(self, _timeout: float) -> None:
        self._ended.append(self)
        if self._is_broken:
            raise ValueError("an error of the application's callback")

    _publish_report = close


@pytest.mark.parametrize(
    ("module", "at_exit"),
    [
        (producer_life, "_close_at_exit"),
        (kafka_python_producer, "_close_at_exit"),
        (consumer_module, "_report_at_exit"),
    ],
)
def test_each_is_closed_at_exit_whatever_the_others_raise(
    module: Any, at_exit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[object] = []
    monkeypatch.setattr(module, "_living", [Living(ended, is_broken=broken) for broken in (True, False)])
    getattr(module, at_exit)()
    assert len(ended) == 2


@pytest.mark.parametrize("turns", range(4))
def test_close_that_is_given_up_ends_whenever_that_comes(turns: int) -> None:
    """The task that reports is ended by it first: one end must not be taken for the other."""

    async def story() -> None:
        reporter: Any = SimpleNamespace(interval_ms=3_600_000, refusal=None, close=list)
        unused: Any = None
        reports = LoopReports(
            reporter, unused, unused, not_taken=Exception, too_large=KeyError, log=logging.getLogger()
        )
        reports.begin()
        await asyncio.sleep(0)
        closing = asyncio.create_task(reports.end(asyncio.Event().wait))  # type: ignore[arg-type]
        for _ in range(turns):
            await asyncio.sleep(0)
        closing.cancel()
        async with asyncio.timeout(patience()):
            await asyncio.wait([closing])
        assert closing.cancelled()

    asyncio.run(story())
