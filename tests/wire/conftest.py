"""Every test here runs against Millrace and against Apache Kafka, on one server each for the whole session.

In `make test` against Millrace alone: what Apache Kafka does changes with the tests, not with the product,
so its runs are marked `long`. `MILLRACE_WIRE_SERVERS=kafka` (or `millrace`, or both as `millrace,kafka`)
chooses: what fails against Apache Kafka is the test's fault, not Millrace's.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from millrace.broker.protocol.frames import Api
from tests.kafka_fixture import JVM_OPTIONS, SAME_SETTINGS
from tests.peers.kafka import KafkaPeer
from tests.raw_client import RawClient, is_served
from tests.servers import BrokerProcess, ZooKeeper
from tests.waiting import patience
from tests.wire.client_face import MEMBERS
from tests.wire.foreign_clients import CLIENTS, PATIENCE_S, ForeignClient, wait_until
from tests.wire.java_tools import JavaTools
from tests.wire.kcat import Kcat
from tests.wire.subjects import KAFKA, MILLRACE, PARAMETERS, Subject, millrace_settings

TopicFactory = Callable[..., str]
_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def millrace_broker(
    zookeeper: ZooKeeper, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BrokerProcess]:
    folder = tmp_path_factory.mktemp("wire-broker")
    broker = BrokerProcess(zookeeper.chroot(), folder, settings=millrace_settings())
    try:
        yield broker.start()
    finally:
        broker.kill()


@pytest.fixture(scope="session", params=PARAMETERS)
def server(request: pytest.FixtureRequest) -> Subject:
    if request.param == MILLRACE:
        broker = request.getfixturevalue("millrace_broker")
        return Subject(MILLRACE, broker.bootstrap, broker.data)
    peer = request.getfixturevalue("kafka_peer")
    return Subject(KAFKA, peer.bootstrap, peer.directory / "data")


Mortal = BrokerProcess | KafkaPeer

# A killed broker is let in again when its session is over, which is 9 s otherwise.
MORTAL_KAFKA = {**SAME_SETTINGS, "broker.session.timeout.ms": "3000", "broker.heartbeat.interval.ms": "300"}


@pytest.fixture(scope="module", params=PARAMETERS)
def mortal_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mortal]:
    """A server of the module's own, to be killed and started again (`kill`, `start`, `bootstrap`)."""
    folder = tmp_path_factory.mktemp("mortal")
    mortal: Mortal
    if request.param == MILLRACE:
        zookeeper = request.getfixturevalue("zookeeper")
        mortal = BrokerProcess(zookeeper.chroot(), folder, settings=millrace_settings())
    else:
        mortal = KafkaPeer(folder, settings=MORTAL_KAFKA, jvm_options=JVM_OPTIONS)
    try:
        yield mortal.start()
    finally:
        mortal.kill()


@pytest.fixture(params=PARAMETERS)
def mortal_pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Mortal, Mortal]]:
    """A cluster of two brokers, 1 and 2. Of Apache Kafka's the first is the controller: kill the second."""
    pair: list[Mortal] = []
    if request.param == MILLRACE:
        path = request.getfixturevalue("zookeeper").chroot()
        for number in (1, 2):
            folder = tmp_path / f"broker-{number}"
            pair.append(BrokerProcess(path, folder, broker_id=number, settings=millrace_settings()))
    else:
        first = KafkaPeer(tmp_path / "first", settings=MORTAL_KAFKA, jvm_options=JVM_OPTIONS)
        second = KafkaPeer(
            tmp_path / "second", settings=MORTAL_KAFKA, jvm_options=JVM_OPTIONS, joins=first, node_id=2
        )
        pair += [first, second]
    try:
        for broker in pair:
            broker.start()
        yield pair[0], pair[1]
    finally:
        for broker in reversed(pair):
            broker.kill()


@pytest.fixture(scope="session")
def bootstrap(server: Subject) -> str:
    return server.bootstrap


@pytest.fixture(scope="session")
def admin(bootstrap: str) -> AdminClient:
    # Quiet: it outlives the broker by a moment, and would say so.
    return AdminClient({"bootstrap.servers": bootstrap, "log_level": 2})


@pytest.fixture(autouse=True)
def _no_member_is_left() -> Iterator[None]:
    """A member that a failed test left running would cost the tests after it."""
    yield
    for member in MEMBERS:
        if member.is_running:
            member.abandon()
    MEMBERS.clear()


@pytest.fixture
def fresh_name() -> Callable[[str], str]:
    """A name nobody has used."""

    def make(kind: str) -> str:
        return f"{kind}-{next(_numbers)}-{time.time_ns() % 10**9}"

    return make


@pytest.fixture
def new_topic(server: Subject, admin: AdminClient, fresh_name: Callable[[str], str]) -> TopicFactory:
    """`new_topic(partitions=1, **configs)`: a topic that exists and has leaders."""

    def make(partitions: int = 1, **configs: object) -> str:
        topic = fresh_name("topic")
        settings = {name.replace("_", "."): str(value) for name, value in configs.items()}
        made = admin.create_topics([NewTopic(topic, partitions, 1, config=settings)])
        made[topic].result(patience(PATIENCE_S))
        wait_until(lambda: is_served(server.port, topic, partitions), f"every partition of {topic} is served")
        return topic

    return make


@pytest.fixture(params=CLIENTS, ids=lambda client: client.name)
def client(request: pytest.FixtureRequest, bootstrap: str) -> ForeignClient:
    return request.param(bootstrap)


@pytest.fixture
def readers(bootstrap: str) -> list[ForeignClient]:
    """Every client, to read what one of them has written."""
    return [make(bootstrap) for make in CLIENTS]


@pytest.fixture(scope="session")
def java(server: Subject, tmp_path_factory: pytest.TempPathFactory) -> JavaTools:
    return JavaTools(server.bootstrap, tmp_path_factory.mktemp("java-tools"))


@pytest.fixture(scope="session")
def kcat(bootstrap: str) -> Kcat:
    return Kcat(bootstrap)


@pytest.fixture(scope="session")
def coordinators(server: Subject) -> None:
    """The brokers' own topics exist: the first client that looks for a coordinator makes them."""
    with RawClient(server.port) as raw:
        for key_type in (0, 1):

            def found(key_type: int = key_type) -> bool:
                answer = raw.ask(Api.FIND_COORDINATOR, 4, key_type=key_type, coordinator_keys=["any"])
                return bool(answer.coordinators[0].error_code == 0)

            wait_until(found, f"a coordinator of type {key_type}")


@pytest.fixture
def raw(server: Subject) -> Iterator[RawClient]:
    """A connection without a client library in between."""
    with RawClient(server.port) as connection:
        yield connection
