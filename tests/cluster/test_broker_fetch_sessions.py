"""Incremental fetches (KIP-227) as a client on the wire sees them, and as Kafka's own consumer uses them."""

from __future__ import annotations

import re
import subprocess
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from millrace.broker.protocol import hot_fetch
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.hot_fetch import FetchRequest, FetchResponse, PartitionFetch, Topic
from tests.peers.kafka import gather_jars
from tests.ports import free_port
from tests.raw_client import RawClient, batch_of
from tests.servers import BrokerProcess, ZooKeeper
from tests.waiting import patience, until

pytestmark = pytest.mark.java

VERSIONS = [7, 9, 12, 13, 17]


@pytest.fixture(scope="module")
def shared(zookeeper: ZooKeeper, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    settings = {"metrics.listen": f"127.0.0.1:{free_port()}", "max.incremental.fetch.session.cache.slots": 20}
    broker = BrokerProcess(zookeeper.chroot(), tmp_path_factory.mktemp("broker"), settings=settings)
    try:
        yield broker.start()
    finally:
        broker.kill()


@pytest.fixture
def client(shared: BrokerProcess) -> Iterator[RawClient]:
    with RawClient(shared.port) as connected:
        yield connected


class Reader:
    """Three partitions of a topic of its own, by name or by id as the version wants it."""

    def __init__(self, client: RawClient, version: int) -> None:
        name = f"topic-{time.time_ns()}"
        wanted = {"name": name, "num_partitions": 3, "replication_factor": 1}
        made = client.ask(Api.CREATE_TOPICS, 7, topics=[wanted], timeout=60_000).topics[0]
        assert made.error_code == 0
        self.name, self.id = name, made.topic_id
        self.topic: Topic = made.topic_id if version >= hot_fetch.FIRST_WITH_TOPIC_IDS else name
        self._client, self._version = client, version
        self.session = 0

    def produce(self, partition: int) -> None:
        assert self._client.produce({(self.name, partition): batch_of(b"value")})[0].error_code == 0

    def asked(self, partition: int, offset: int = 0) -> PartitionFetch:
        return PartitionFetch(self.topic, partition, offset, 1 << 20)

    def fetch(
        self,
        epoch: int,
        *partitions: PartitionFetch,
        forgotten: tuple[int, ...] = (),
        version: int | None = None,
        max_wait_ms: int = 0,
    ) -> FetchResponse:
        request = FetchRequest(
            max_wait_ms,
            1,
            1 << 20,
            False,
            partitions,
            self.session,
            epoch,
            tuple((self.topic, number) for number in forgotten),
        )
        version = version or self._version
        self._client.send(hot_fetch.encode_request(version, 1, "raw", request))
        return hot_fetch.decode_response(self._client.receive(), version)


def brief(response: FetchResponse) -> list[tuple[int, bool]]:
    """(partition, whether it carries records) of an answer without errors."""
    assert response.error_code == 0, response
    assert all(part.error_code == 0 for part in response.partitions), response
    return [(part.partition, len(part.records) > 0) for part in response.partitions]


@pytest.mark.parametrize("version", VERSIONS)
def test_session_sends_what_changed(client: RawClient, version: int) -> None:
    reader = Reader(client, version)
    reader.produce(1)
    full = reader.fetch(0, *(reader.asked(number) for number in range(3)))
    assert brief(full) == [(0, False), (1, True), (2, False)]
    assert full.session_id > 0
    reader.session = full.session_id
    # The reader goes on from what it got; nothing is new.
    assert brief(reader.fetch(1, reader.asked(1, offset=1))) == []
    assert brief(reader.fetch(2)) == []
    reader.produce(2)
    assert brief(reader.fetch(3)) == [(2, True)]
    reader.produce(0)
    assert brief(reader.fetch(4, reader.asked(2, offset=1), max_wait_ms=10_000)) == [(0, True)]
    # Forgotten partitions are not read, added ones are.
    reader.produce(1)
    assert brief(reader.fetch(5, reader.asked(0, offset=1), forgotten=(1,))) == []
    assert brief(reader.fetch(6, reader.asked(1, offset=1))) == [(1, True)]
    # The end: a last request without a new session, and the old one is gone.
    assert reader.fetch(-1).session_id == 0
    assert reader.fetch(7).error_code == 70


@pytest.mark.parametrize("version", VERSIONS)
def test_session_waits_for_any_of_its_partitions(
    shared: BrokerProcess, client: RawClient, version: int
) -> None:
    reader = Reader(client, version)
    reader.session = reader.fetch(0, *(reader.asked(number) for number in range(3))).session_id
    with RawClient(shared.port) as other:
        request = FetchRequest(3_600_000, 1, 1 << 20, False, (), reader.session, 1)
        client.send(hot_fetch.encode_request(version, 1, "raw", request))
        other.produce({(reader.name, 2): batch_of(b"value")})
        assert brief(hot_fetch.decode_response(client.receive(), version)) == [(2, True)]


def test_errors_of_sessions(client: RawClient) -> None:
    reader = Reader(client, 12)
    reader.session = 12_345
    assert reader.fetch(1).error_code == 70
    reader.session = 0
    reader.session = reader.fetch(0, reader.asked(0)).session_id
    wrong_epoch = reader.fetch(7)
    assert (wrong_epoch.error_code, wrong_epoch.session_id) == (71, 0)
    reader.topic = reader.id
    assert reader.fetch(1, version=13).error_code == 106
    reader.topic = reader.name
    assert brief(reader.fetch(1)) == []  # none of these did it any harm


def test_unknown_topic_id_is_an_error_in_the_session(client: RawClient) -> None:
    reader = Reader(client, 13)
    unknown = PartitionFetch(uuid.uuid4(), 0, 0, 100)
    full = reader.fetch(0, unknown, reader.asked(0))
    assert [part.error_code for part in full.partitions] == [100, 0]
    reader.session = full.session_id
    again = reader.fetch(1)
    assert [(part.topic, part.error_code) for part in again.partitions] == [(unknown.topic, 100)]


def test_full_cache_answers_in_full(client: RawClient) -> None:
    reader = Reader(client, 12)
    sessions = [reader.fetch(0, reader.asked(0)).session_id for _ in range(25)]
    assert 0 in sessions
    assert sessions[-1] == 0
    assert brief(reader.fetch(0, reader.asked(0))) == [(0, False)]


def metric(broker: BrokerProcess, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", broker.metrics(), re.M)
    return 0.0 if found is None else float(found[1])


@pytest.mark.java
def test_java_consumer_reads_in_a_session(broker_factory: Any) -> None:
    broker = broker_factory(metrics_listen=f"127.0.0.1:{free_port()}")
    with RawClient(broker.port) as client:
        wanted = {"name": "t", "num_partitions": 3, "replication_factor": 1}
        client.ask(Api.CREATE_TOPICS, 7, topics=[wanted], timeout=60_000)
        for number in range(3):
            client.produce({("t", number): batch_of(*(b"%d-%d" % (number, n) for n in range(100)))})
        command = ["java", "-Xmx128M", "-XX:TieredStopAtLevel=1", "-cp", f"{gather_jars()}/*"]
        command += ["org.apache.kafka.tools.consumer.ConsoleConsumer", "--bootstrap-server", broker.bootstrap]
        command += ["--topic", "t", "--from-beginning", "--max-messages", "330", "--timeout-ms", "120000"]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as consumer:
            assert consumer.stdout is not None
            lines = [consumer.stdout.readline().strip() for _ in range(300)]
            assert metric(broker, "millrace_broker_fetch_sessions") == 1
            until(lambda: metric(broker, "millrace_broker_fetch_session_partitions") == 3)
            for number in range(30):
                client.produce({("t", number % 3): batch_of(b"later-%d" % number)})
            lines += [line.strip() for line in consumer.stdout]
            assert consumer.wait(patience(120)) == 0
        expected = {f"{number}-{n}" for number in range(3) for n in range(100)}
        assert sorted(lines) == sorted(expected | {f"later-{n}" for n in range(30)})
        for code in (70, 71, 106):
            assert metric(broker, f'millrace_broker_errors_total{{code="{code}"}}') == 0
        # It says goodbye with a last full request, which ends its session.
        until(lambda: metric(broker, "millrace_broker_fetch_sessions") == 0)
