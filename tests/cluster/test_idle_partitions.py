"""Partitions that nobody uses for a while: they wake up at once, and hold no files meanwhile."""

from __future__ import annotations

import os
from contextlib import suppress

import pytest

from millrace.broker.protocol.batch import iterate_batches
from millrace.broker.protocol.hot_fetch import PartitionFetch
from tests.cluster.one_broker import create
from tests.cluster.three_brokers import ThreeBrokers
from tests.conftest import BrokerFactory
from tests.raw_client import RawClient, batch_of
from tests.servers import BrokerProcess
from tests.waiting import until

pytestmark = pytest.mark.java

ALL = -1
LONG_WAIT_MS = 30_000
"""A follower's poll that nobody ends lasts longer than a lagging follower stays in sync."""
PARTITIONS = 6


def test_partition_that_wakes_up_does_not_wait_for_a_poll_of_others(broker_factory: BrokerFactory) -> None:
    cluster = ThreeBrokers(broker_factory, count=1)
    cluster.add(replica_fetch_wait_max_ms=LONG_WAIT_MS)
    cluster.wait_for_brokers(1, 2)
    cluster.create_on("t", *[(1, 2)] * PARTITIONS)
    with RawClient(cluster.brokers[1].port) as client:
        for turn in range(3):
            for number in range(PARTITIONS):
                (answer,) = client.produce({("t", number): batch_of(b"v")}, acks=ALL)
                assert (answer.error_code, answer.base_offset) == (0, turn)
                # Had it waited, the follower would have been taken out of the in-sync set meanwhile.
                assert sorted(cluster.partitions("t")[number].isr_nodes) == [1, 2]


def open_logs(broker: BrokerProcess, topic: str) -> int:
    """How many of the topic's `.log` files the broker's process holds open."""
    assert broker.process is not None
    folder = f"/proc/{broker.process.pid}/fd"
    count = 0
    for number in os.listdir(folder):
        with suppress(FileNotFoundError):  # closed meanwhile
            path = os.readlink(f"{folder}/{number}")
            count += f"/{topic}-" in path and path.endswith(".log")
    return count


def test_files_of_idle_partitions_are_closed_and_opened_for_whoever_comes(
    broker_factory: BrokerFactory,
) -> None:
    broker = broker_factory(log_retention_check_interval_ms=100, log_retention_ms=-1)
    with RawClient(broker.port) as client:
        topic = create(client, PARTITIONS)
        places = [(topic, number) for number in range(PARTITIONS)]
        for turn in range(2):
            answers = client.produce({place: batch_of(b"v") for place in places})
            assert [(each.error_code, each.base_offset) for each in answers] == [(0, turn)] * PARTITIONS
            until(lambda: open_logs(broker, topic) == 0, "the files of idle partitions are closed")
        for number in range(PARTITIONS):
            (given,) = client.fetch(PartitionFetch(topic, number, 0, 1 << 20)).partitions
            offsets = [header.base_offset for _, header in iterate_batches(given.records)]
            assert (given.error_code, offsets) == (0, [0, 1])
