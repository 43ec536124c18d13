"""One running broker for all the foreign clients, and a fresh topic for each test.

`MILLRACE_WIRE_BOOTSTRAP=host:port` points the whole folder at any other Kafka-protocol cluster instead:
what fails there too is the test's fault, not the broker's.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from tests.servers import BrokerProcess
from tests.wire.foreign_clients import CLIENTS, PATIENCE_S, ForeignClient

TopicFactory = Callable[..., str]
_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def bootstrap(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    given = os.environ.get("MILLRACE_WIRE_BOOTSTRAP")
    if given:
        yield given
        return
    zookeeper = request.getfixturevalue("zookeeper")
    broker = BrokerProcess(zookeeper.chroot(), tmp_path_factory.mktemp("wire-broker"))
    try:
        broker.start()
        yield broker.bootstrap
    finally:
        broker.kill()


@pytest.fixture(scope="session")
def admin(bootstrap: str) -> AdminClient:
    # Quiet: it outlives the broker by a moment, and would say so.
    return AdminClient({"bootstrap.servers": bootstrap, "log_level": 2})


@pytest.fixture
def fresh_name(request: pytest.FixtureRequest) -> Callable[[str], str]:
    """A name nobody has used, also when the same cluster serves several runs."""

    def make(kind: str) -> str:
        return f"{kind}-{next(_numbers)}-{time.time_ns() % 10**9}"

    return make


@pytest.fixture
def new_topic(admin: AdminClient, fresh_name: Callable[[str], str]) -> TopicFactory:
    """`new_topic(partitions=1, **configs)`: a topic that exists and has leaders."""

    def make(partitions: int = 1, **configs: object) -> str:
        topic = fresh_name("topic")
        settings = {name.replace("_", "."): str(value) for name, value in configs.items()}
        made = admin.create_topics([NewTopic(topic, partitions, 1, config=settings)])
        made[topic].result(PATIENCE_S)
        return topic

    return make


@pytest.fixture(params=CLIENTS, ids=lambda client: client.name)
def client(request: pytest.FixtureRequest, bootstrap: str) -> ForeignClient:
    return request.param(bootstrap)


@pytest.fixture
def readers(bootstrap: str) -> list[ForeignClient]:
    """Every client, to read what one of them has written."""
    return [make(bootstrap) for make in CLIENTS]
