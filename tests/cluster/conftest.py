"""One running broker for a module of tests, a raw client of it, and librdkafka's in-memory cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from confluent_kafka import Producer

from tests.cluster.audited_topics import DEADLINE_S
from tests.cluster.one_broker import create
from tests.raw_client import RawClient
from tests.servers import BrokerProcess, ZooKeeper
from tests.waiting import patience


@pytest.fixture(scope="module")
def shared_broker(zookeeper: ZooKeeper, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """One broker for a module; its tests keep apart by topic."""
    broker = BrokerProcess(zookeeper.chroot(), tmp_path_factory.mktemp("broker"))
    try:
        yield broker.start()
    finally:
        broker.kill()


@pytest.fixture
def client(shared_broker: BrokerProcess) -> Iterator[RawClient]:
    with RawClient(shared_broker.port) as raw:
        yield raw


@pytest.fixture
def topic(client: RawClient) -> str:
    """A new topic with one partition."""
    return create(client)


@pytest.fixture
def mock_cluster() -> Iterator[str]:
    """A broker inside this process; lives as long as the client that hosts it."""
    host = Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "unused", "log_level": 0})
    # This cluster creates topics when it is asked for them, but knows no request for it.
    (broker,) = host.list_topics("millrace.audit", timeout=patience(DEADLINE_S)).brokers.values()
    yield f"{broker.host}:{broker.port}"
    host.close()
