"""One running broker for a module of tests, a raw client of it, librdkafka's in-memory cluster, and mirrors
to and from clusters that want TLS and logins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer

from tests.cluster.audited_topics import DEADLINE_S
from tests.cluster.mirror_process import MirrorProcess
from tests.cluster.one_broker import create
from tests.cluster.secured_mirrors import Section
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


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., MirrorProcess]]:
    """`launch(name, target, target_security, sources)` with sources {name: (address, topic, security)};
    further keys are each source's."""
    started: list[MirrorProcess] = []

    def make(
        name: str,
        target: str,
        target_security: Section | None,
        sources: dict[str, tuple[str, str, Section | None]],
        **each_source: object,
    ) -> MirrorProcess:
        mirror = MirrorProcess(tmp_path / name, target, {}, name=name)
        settings = mirror.settings
        if target_security is not None:
            settings["target"]["security"] = target_security
        settings["sources"] = [
            {"cluster": cluster, "bootstrap": [address], "topics": {"include": [topic]}}
            | each_source
            | ({"security": security} if security is not None else {})
            for cluster, (address, topic, security) in sources.items()
        ]
        mirror.rewrite()
        started.append(mirror)
        return mirror.start()

    yield make
    for mirror in started:
        mirror.kill()
