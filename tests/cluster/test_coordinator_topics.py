"""The topics of coordinators in clusters of fewer brokers than their settings want: real brokers."""

from __future__ import annotations

import re
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from millrace.broker.protocol.frames import Api
from tests.cluster.three_brokers import ThreeBrokers, eventually, millrace
from tests.conftest import BrokerFactory
from tests.servers import BrokerProcess

pytestmark = pytest.mark.java

OFFSETS, TRANSACTIONS = "__consumer_offsets", "__transaction_state"
GROUP, TRANSACTION = 0, 1


def coordinator(cluster: ThreeBrokers, kind: int) -> Any:
    return cluster.ask(Api.FIND_COORDINATOR, 3, key="orders", key_type=kind)


def told(broker: BrokerProcess, topic: str) -> str:
    """The one line about a topic's missing replicas."""
    (line,) = (line for line in broker.log.splitlines() if "fewer replicas" in line and topic in line)
    return line


def test_one_broker_coordinates_and_says_how_to_replicate_it_later(broker_factory: BrokerFactory) -> None:
    """And what it says works: the commands of its log raise the replicas once there are more brokers."""
    cluster = ThreeBrokers(
        lambda **more: broker_factory(transaction_state_log_num_partitions=5, **more), count=1
    )
    for kind, topic in ((GROUP, OFFSETS), (TRANSACTION, TRANSACTIONS)):
        assert coordinator(cluster, kind).error_code is ErrorCode.none
        assert {tuple(part.replica_nodes) for part in cluster.partitions(topic).values()} == {(1,)}
    line = told(cluster.brokers[1], TRANSACTIONS)
    assert "transaction.state.log.replication.factor=3" in line
    assert "WARNING" in line

    for _ in range(2):
        cluster.add()
    cluster.wait_for_brokers(1, 2, 3)
    for topic in (OFFSETS, TRANSACTIONS):
        line = told(cluster.brokers[1], topic)
        assert coordinator(cluster, TRANSACTION).error_code is ErrorCode.none
        for command in re.findall(r"millrace ([^;'\"]+)", line[line.index("with 3 brokers") :]):
            words = command.replace("ID,ID,…", "1,2,3").split()
            millrace(*words, bootstrap=cluster.bootstrap)
        for number in range(5):
            cluster.wait_in_sync(topic, number, 1, 2, 3)
    described = millrace("topics", "describe", TRANSACTIONS, bootstrap=cluster.bootstrap)
    assert re.search(r"min\.insync\.replicas\W+2\b", described), described


def test_a_factor_that_was_set_waits_for_the_brokers_it_needs(broker_factory: BrokerFactory) -> None:
    """As Apache Kafka does: nobody who asks for two copies gets one."""
    cluster = ThreeBrokers(
        lambda **more: broker_factory(
            offsets_topic_replication_factor=2, transaction_state_log_replication_factor=2, **more
        ),
        count=1,
    )
    for kind in (GROUP, TRANSACTION):
        assert coordinator(cluster, kind).error_code is ErrorCode.coordinator_not_available
    assert cluster.metadata(OFFSETS).topics[0].error_code == ErrorCode.unknown_topic_or_partition
    cluster.add()
    cluster.wait_for_brokers(1, 2)
    for kind, topic in ((GROUP, OFFSETS), (TRANSACTION, TRANSACTIONS)):
        eventually(lambda kind=kind: coordinator(cluster, kind).error_code is ErrorCode.none, topic)
        assert {len(part.replica_nodes) for part in cluster.partitions(topic).values()} == {2}
