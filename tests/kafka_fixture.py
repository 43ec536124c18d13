"""The pytest fixture of a real Apache Kafka node, one for the whole test session.

`conftest.py` imports `kafka_peer`. A test that stops, kills or moves the node makes a `KafkaPeer` of its
own: this one is shared, so tests use topic and group names of their own and leave it running.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.peers.kafka import TEST_JVM_OPTIONS, KafkaPeer

SAME_SETTINGS = {
    "group.initial.rebalance.delay.ms": "0",
    "log.cleaner.backoff.ms": "200",
    "log.retention.check.interval.ms": "1000",
    "log.retention.ms": "-1",
    "offsets.topic.num.partitions": "5",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "200",
    "transaction.state.log.num.partitions": "5",
}
"""What `tests/wire` gives to Apache Kafka and to Millrace alike: background work within seconds, few internal
partitions, and old timestamps do no harm."""

# The defaults of a short-lived test server with less heap: it shares two cores with everything else.
JVM_OPTIONS = tuple("-Xmx384M" if option.startswith("-Xmx") else option for option in TEST_JVM_OPTIONS)


@pytest.fixture(scope="session")
def kafka_peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaPeer]:
    directory = tmp_path_factory.mktemp("kafka")
    with KafkaPeer(directory, settings=SAME_SETTINGS, jvm_options=JVM_OPTIONS) as peer:
        yield peer
