"""Fixtures for all tests: real servers, started only when a test asks for one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog

# Tests share helper modules (`tests.servers`, `tests.peers`), also when pytest is started by its script.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.kafka_fixture import kafka_peer  # noqa: F401
from tests.servers import BrokerProcess, ZooKeeper

BrokerFactory = Callable[..., BrokerProcess]


@pytest.fixture(autouse=True)
def _logging_of_its_own() -> Iterator[None]:
    """A test that sets up logging binds it to the stderr that pytest captures for that test alone."""
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeper]:
    """One real ZooKeeper for the whole session; tests keep apart by chroot."""
    server = ZooKeeper(tmp_path_factory.mktemp("zookeeper"))
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture
def broker_factory(zookeeper: ZooKeeper, tmp_path: Path) -> Iterator[BrokerFactory]:
    """`broker_factory(**settings)` starts a broker, by default in a cluster of its own.

    Keyword `zookeeper_path` joins an existing cluster, `broker_id` names the broker, `start=False` leaves
    starting to the caller; dots in setting names are written as underscores.
    """
    brokers: list[BrokerProcess] = []

    def make(
        *, zookeeper_path: str | None = None, broker_id: int = 1, start: bool = True, **settings: object
    ) -> BrokerProcess:
        folder = tmp_path / f"broker-{len(brokers)}"
        named = {key.replace("_", "."): value for key, value in settings.items()}
        broker = BrokerProcess(
            zookeeper_path or zookeeper.chroot(), folder, broker_id=broker_id, settings=named
        )
        brokers.append(broker)
        return broker.start() if start else broker

    try:
        yield make
    finally:
        for broker in brokers:
            broker.kill()


@pytest.fixture
def broker(broker_factory: BrokerFactory) -> BrokerProcess:
    """One running broker in a cluster of its own."""
    return broker_factory()
