"""A signal's handler that calls the consumer, the reporter or kafka-python's producer which it interrupted.

Each call would wait for a lock that its own thread holds, for ever. No broker is needed for that.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from millrace.audit import consumer as consumer_module
from millrace.audit import stream_reporter as reporter_module
from millrace.audit.clients.adapter_config import open_reporter
from millrace.audit.clients.consumer_counts import SessionCounts
from millrace.audit.clients.events_topic import TopicState
from millrace.audit.clients.session import StreamSession
from millrace.audit.consumer import AuditedConsumer
from millrace.audit.kafka_python_producer import AuditedKafkaProducer
from tests.unit.audit.interruptions import handled_by, interrupting


class Got:
    """A record as the consumer's client hands it out."""

    def __init__(self, offset):
        self._offset = offset

    def error(self):
        return None

    def topic(self):
        return "flights"

    def partition(self):
        return 0

    def offset(self):
        return self._offset

    def leader_epoch(self):
        return 0

    def key(self):
        return None

    def value(self):
        return b"value"

    def headers(self):
        return None


@pytest.fixture
def consumer(waking, monkeypatch):
    monkeypatch.setattr(consumer_module, "ensure_events_topic", lambda *_: TopicState.UNREACHABLE)
    made = AuditedConsumer(
        {"bootstrap.servers": "127.0.0.1:1", "group.id": "readers", "log_level": 0},
        **{"millrace.report.interval.ms": 3_600_000, "millrace.report.timeout.ms": 1},
    )
    yield made
    made.close()


def while_counting(consumer, patch):
    patch.setattr(SessionCounts, "take", interrupting(SessionCounts.take))
    consumer._count([Got(0)])


def while_it_looks_up(consumer, patch):
    patch.setattr(SessionCounts, "is_told", property(interrupting(lambda counts: True)))
    consumer.poll(0)


def while_it_reports(consumer, patch):
    patch.setattr(consumer, "_publish", interrupting(lambda events, deadline: True))
    consumer.report()


def while_it_takes_a_commit(consumer, patch):
    patch.setattr(consumer, "_resting_places", interrupting(list))
    consumer.commit()


def while_partitions_go(consumer, patch):
    patch.setattr(consumer, "_report_now", interrupting(lambda: True))
    consumer.unassign()


@pytest.mark.parametrize("call", ["close", "report", "commit", "untrusted", "store_offsets"])
@pytest.mark.parametrize(
    "where",
    [while_counting, while_it_looks_up, while_it_reports, while_it_takes_a_commit, while_partitions_go],
)
def test_a_consumers_calls_are_refused_in_the_middle_of_another(consumer, monkeypatch, call, where):
    with (
        handled_by(getattr(consumer, call)),
        monkeypatch.context() as patch,
        pytest.raises(RuntimeError, match=rf"{call}\(\) was called by a signal's handler"),
    ):
        where(consumer, patch)
    consumer._count([Got(1)])  # nothing is left locked
    consumer.report(0.01)
    assert consumer.untrusted()


def test_a_consumers_callback_may_call_it(consumer):
    """What tells of partitions that go runs after the report before them, not in its locked part."""
    told = []
    going = consumer._before(lambda *_: told.append((consumer.report(0.01), consumer.untrusted())))
    going(consumer, [])
    assert told == [(True, {})]


def new_reporter():
    return open_reporter({"millrace_producer": "AA@ewr"})


def while_a_stream_opens(reporter, patch):
    patch.setattr(reporter_module, "StreamSession", interrupting(StreamSession))
    reporter._kind = reporter_module.StreamSession
    reporter.stamp("flights")


def while_a_window_opens(reporter, patch):
    reporter.stamp("flights", 1)
    patch.setattr(StreamSession, "_leave_window", interrupting(StreamSession._leave_window))
    reporter.stamp("flights", 10_000_000)


def while_a_report_is_made(reporter, patch):
    reporter.stamp("flights")
    patch.setattr(reporter, "_take_owed", interrupting(list))
    reporter.report()


STAMPING = [while_a_stream_opens, while_a_window_opens, while_a_report_is_made]


@pytest.mark.parametrize("call", ["close", "report"])
@pytest.mark.parametrize("where", STAMPING)
@pytest.mark.usefixtures("waking")
def test_a_reporters_calls_are_refused_in_the_middle_of_another(monkeypatch, call, where):
    reporter = new_reporter()
    with (
        handled_by(getattr(reporter, call)),
        monkeypatch.context() as patch,
        pytest.raises(RuntimeError, match=rf"{call}\(\) was called by a signal's handler"),
    ):
        where(reporter, patch)
    reporter._kind = StreamSession
    reporter.stamp("flights", 20_000_000)
    assert reporter.report() and reporter.close()


@pytest.mark.parametrize("call", ["close", "report"])
@pytest.mark.parametrize("where", STAMPING[:2])
@pytest.mark.usefixtures("waking")
def test_the_producer_of_kafka_python_is_refused_before_anything_is_closed(monkeypatch, call, where):
    reporter = new_reporter()
    producer = SimpleNamespace(_reporter=reporter, config={}, _closed=False)
    with (
        handled_by(lambda: getattr(AuditedKafkaProducer, call)(producer)),
        monkeypatch.context() as patch,
        pytest.raises(RuntimeError, match=rf"{call}\(\) was called by a signal's handler"),
    ):
        where(reporter, patch)
    assert reporter.refusal is None


@pytest.mark.usefixtures("waking")
def test_a_report_of_kafka_pythons_producer_is_not_taken_for_its_own_interruption():
    reporter = new_reporter()
    told = []
    producer = SimpleNamespace(
        _reporter=reporter, _report_lock=threading.Lock(), _make_topic=lambda _: True, _publish=told.append
    )
    reporter.stamp("flights")
    AuditedKafkaProducer.report(producer)
    assert len(told) == 1 and told[0]
