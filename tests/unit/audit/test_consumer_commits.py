"""What an audited consumer commits: what confluent-kafka's own would, and nothing for it that nobody has got.

No broker is asked: the client under the consumer says what it was told to commit.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from millrace.audit import consumer as consumer_module
from millrace.audit.clients.events_topic import TopicState
from millrace.audit.consumer import AuditedConsumer


class Client(Consumer):
    def commit(self, **what: Any) -> list[TopicPartition]:
        self.told.append(what)
        return what.get("offsets") or []


class OverClient(AuditedConsumer, Client):
    """An audited consumer whose client is the one above."""


@pytest.fixture
def consumer(waking, monkeypatch):
    monkeypatch.setattr(consumer_module, "ensure_events_topic", lambda *_: TopicState.UNREACHABLE)
    monkeypatch.setattr(OverClient, "_report_now", lambda self: True)
    made = OverClient(
        {"bootstrap.servers": "127.0.0.1:1", "group.id": "readers", "log_level": 0},
        **{"millrace.report.interval.ms": 3_600_000, "millrace.report.timeout.ms": 1},
    )
    made.told = []
    yield made
    made.close()


@pytest.mark.safety
@pytest.mark.parametrize(
    "call",
    [
        lambda consumer, message: consumer.commit(message=message),
        lambda consumer, message: consumer.commit(message=message, asynchronous=False),
        lambda consumer, message: consumer.store_offsets(message),
    ],
    ids=["commit", "commit at once", "store"],
)
def test_the_end_of_a_partition_is_no_record_to_commit(consumer, call):
    """It has the offset of a record that is still to come: one behind it would pass that record over."""
    end = SimpleNamespace(
        error=lambda: KafkaError(KafkaError._PARTITION_EOF), topic=lambda: "flights", partition=lambda: 0,
        offset=lambda: 10, leader_epoch=lambda: 0,
    )  # fmt: skip
    with pytest.raises(KafkaException) as refused:
        call(consumer, end)
    assert refused.value.args[0].code() == KafkaError._INVALID_ARG
    assert consumer.told == [] and not consumer._to_commit()


@pytest.mark.safety
def test_a_list_of_no_places_commits_none(consumer):
    """Not all that was got by then, of which the application may have finished nothing."""
    consumer.commit(offsets=[], asynchronous=False)
    assert consumer.told == [{"offsets": [], "asynchronous": False}]
