"""Replicas of the topics that coordinators keep their state in: what settings want, what a cluster has."""

from __future__ import annotations

import pytest

from millrace.broker.config import BrokerSettings, parse_settings
from millrace.broker.coordination.controller_client import NewTopic
from millrace.broker.server.coordinator_topics import offsets_topic, transactions_topic

OFFSETS = "offsets.topic.replication.factor"
TRANSACTIONS = "transaction.state.log.replication.factor"
MIN_IN_SYNC = "transaction.state.log.min.isr"


def min_in_sync(topic: NewTopic) -> int:
    return int(topic.config["min.insync.replicas"])


@pytest.mark.parametrize(
    ("broker_count", "replicas", "in_sync"), [(0, 1, 1), (1, 1, 1), (2, 2, 1), (3, 3, 2), (9, 3, 2)]
)
def test_defaults_are_apache_kafkas_as_far_as_there_are_brokers(
    broker_count: int, replicas: int, in_sync: int
) -> None:
    settings = BrokerSettings()
    assert offsets_topic(settings, broker_count).replication_factor == replicas
    transactions = transactions_topic(settings, broker_count)
    assert (transactions.replication_factor, min_in_sync(transactions)) == (replicas, in_sync)


@pytest.mark.parametrize("broker_count", [0, 1, 3])
def test_what_is_set_by_name_is_taken_as_it_is(broker_count: int) -> None:
    """The value of the default, too: the topic is refused until there are as many brokers."""
    settings = parse_settings({OFFSETS: 3, TRANSACTIONS: "3", MIN_IN_SYNC: 2})
    for topic in (offsets_topic(settings, broker_count), transactions_topic(settings, broker_count)):
        assert topic.replication_factor == 3
        assert not topic.shortage
    assert min_in_sync(transactions_topic(settings, broker_count)) == 2


def test_defaults_follow_what_is_set_beside_them() -> None:
    one_replica = transactions_topic(parse_settings({TRANSACTIONS: 1}), 3)
    assert (one_replica.replication_factor, min_in_sync(one_replica)) == (1, 1)
    assert not one_replica.shortage
    four_in_sync = transactions_topic(parse_settings({MIN_IN_SYNC: 4}), 5)
    assert (four_in_sync.replication_factor, min_in_sync(four_in_sync)) == (3, 4)


def test_shortage_says_what_is_wanted_and_how_to_get_it() -> None:
    settings = BrokerSettings()
    assert not offsets_topic(settings, 3).shortage
    assert not transactions_topic(settings, 3).shortage
    assert offsets_topic(settings, 1).shortage == {
        "replicas": 1,
        "setting": "offsets.topic.replication.factor=3",
        "remedy": "with 3 brokers: millrace topics reassign __consumer_offsets --brokers ID,ID,… "
        "--replication-factor 3",
    }
    raised = "millrace topics configure __transaction_state min.insync.replicas=2"
    assert (
        transactions_topic(settings, 1)
        .shortage["remedy"]
        .endswith(f"--replication-factor 3 --wait; {raised}")
    )
    two_in_sync = transactions_topic(parse_settings({MIN_IN_SYNC: 2}), 2)
    assert two_in_sync.shortage["remedy"].endswith("--replication-factor 3")
