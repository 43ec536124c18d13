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
from millrace.audit.clients.known_commits import KnownCommits
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
    assert consumer.told == [] and not consumer._commits and not consumer._stores


@pytest.mark.safety
def test_a_list_of_no_places_commits_none(consumer):
    """Not all that was got by then, of which the application may have finished nothing."""
    consumer.commit(offsets=[], asynchronous=False)
    assert consumer.told == [{"offsets": [], "asynchronous": False}]


def places(*offsets: int, epoch: int | None = None) -> list[TopicPartition]:
    """One of each partition from 0 on."""
    more = () if epoch is None else ("", epoch)
    return [TopicPartition("flights", number, offset, *more) for number, offset in enumerate(offsets)]


def got(consumer: AuditedConsumer, *offsets: int) -> None:
    consumer._positions.update(
        {("flights", each.partition): (each.offset, None) for each in places(*offsets)}
    )


def waiting(consumer: AuditedConsumer) -> list[list[tuple[int, int]]]:
    return [[(each.partition, each.offset) for each in offsets] for offsets in consumer._commits]


@pytest.mark.safety
def test_what_rests_behind_what_was_committed_is_not_committed_again(consumer):
    got(consumer, 3, 3)
    consumer._known(None, places(8, 2))
    consumer.commit()
    assert waiting(consumer) == [[(1, 3)]]


@pytest.mark.safety
def test_nor_what_rests_behind_a_commit_that_waits_for_its_report(consumer):
    got(consumer, 3)
    consumer.commit(offsets=places(8))
    consumer.commit()
    assert waiting(consumer) == [[(0, 8)]]
    consumer._under_way, consumer._commits = [({}, [], consumer._commits, "")], []
    consumer.commit()
    assert waiting(consumer) == [[]]


def test_what_is_at_once_committed_is_known(consumer):
    got(consumer, 3)
    consumer.commit(offsets=places(3), asynchronous=False)
    consumer.commit()
    assert waiting(consumer) == [[]]


def test_a_commit_of_nothing_is_told_by_the_client(consumer):
    consumer.commit()
    consumer._commit_behind(consumer._commits, "")
    assert consumer.told == [{"offsets": [], "asynchronous": True}]


def test_a_commit_without_places_is_the_clients_own(consumer):
    """It was told just now what is stored, and knows what it has committed."""
    consumer.commit(asynchronous=False)
    assert consumer.told == [{"asynchronous": False}]


def test_partitions_that_come_back_have_nothing_known_of_them(consumer):
    consumer._known(None, places(8, 8))
    consumer._let_go(places(8))
    got(consumer, 3, 3)
    consumer.commit()
    assert waiting(consumer) == [[(0, 3)]]


def test_commits_and_stores_that_wait_do_not_grow_with_the_calls(consumer):
    for offset in range(100):
        consumer.commit(offsets=places(offset))
        consumer.store_offsets(offsets=places(offset))
    assert waiting(consumer) == [[(0, 99)]]
    assert [[each.offset for each in offsets] for offsets in consumer._stores] == [[99]]


def test_nor_with_the_reports_that_fail(consumer, monkeypatch):
    consumer._counts = SimpleNamespace(
        is_told=True, report=lambda now_ms: [], session="", told_count=0, first_offsets={}
    )
    meanwhile = lambda *_: consumer._remember_commit(places(9)) is not None  # noqa: E731
    monkeypatch.setattr(consumer, "_publish", meanwhile)
    for _ in range(3):
        consumer.store_offsets(offsets=places(9))
        assert not consumer._publish_report(1)
    assert waiting(consumer) == [[(0, 9)]] and len(consumer._stores) == 1


def test_what_is_known_is_what_was_committed_and_the_application_hears_of_all():
    told = []
    known = KnownCommits(lambda *what: told.append(what))
    known("failed", places(8))
    assert known.beyond(places(3), []) == places(3)
    known(None, places(-1001))
    assert known.beyond(places(3), []) == places(3)
    known(None, places(8))
    assert known.beyond(places(8), []) == [] and known.beyond(places(9), []) == places(9)
    assert known.beyond(places(8), places(7)) == places(8), "which is going to set it back"
    assert [error for error, _ in told] == ["failed", None, None]


def test_a_place_in_a_later_epoch_is_beyond_a_higher_one_of_an_earlier():
    known = KnownCommits(None)
    known.note(places(8, epoch=1))
    assert known.beyond(places(3, epoch=2), []) == places(3, epoch=2)
    assert known.beyond(places(9, epoch=0), []) == []
    assert known.beyond(places(9), []) == places(9)


def test_new_credentials_reach_the_connection_of_the_reports_and_those_to_come(consumer, monkeypatch):
    told = []
    monkeypatch.setattr(
        consumer, "_events", SimpleNamespace(
            set_sasl_credentials=lambda *what: told.append(what), purge=bool, close=bool
        )
    )  # fmt: skip
    consumer.set_sasl_credentials("reader", "new")
    assert told == [("reader", "new")]
    assert consumer._config.client["sasl.password"] == "new"
