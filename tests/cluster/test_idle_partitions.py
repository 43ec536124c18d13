"""Partitions that wake up one after the other: no follower's long poll for others holds one up."""

from __future__ import annotations

import pytest

from tests.cluster.three_brokers import ThreeBrokers
from tests.conftest import BrokerFactory
from tests.raw_client import RawClient, batch_of

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
