"""Byte rates of real clients under a quota: confluent-kafka against a real broker."""

from __future__ import annotations

import json
import select
import time
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from kazoo.client import KazooClient

from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.hot_fetch import FetchRequest, PartitionFetch, encode_request
from tests.conftest import BrokerFactory
from tests.raw_client import RawClient, batch_of
from tests.servers import BrokerProcess
from tests.waiting import until

pytestmark = pytest.mark.java

RATE = 400_000
VALUE_SIZE = 10_000
BURST_SECONDS = 2.0
SECONDS = 5.0
LEAST, MOST = 0.5, 1.4
"""Parts of the quota: a client that was held up catches up with what had gathered for it meanwhile, a slow
one stays behind. Without the quota it would be a hundred times as much."""


def alter(client: RawClient, name: str | None, **rates: float | None) -> Any:
    ops = [{"key": key, "value": value or 0.0, "remove": value is None} for key, value in rates.items()]
    entry = {"entity": [{"entity_type": "client-id", "entity_name": name}], "ops": ops}
    return client.ask(Api.ALTER_CLIENT_QUOTAS, 1, entries=[entry], validate_only=False).entries[0]


def describe(
    client: RawClient, *components: dict[str, Any], strict: bool = False
) -> dict[Any, dict[str, float]]:
    answer = client.ask(Api.DESCRIBE_CLIENT_QUOTAS, 1, components=list(components), strict=strict)
    assert answer.error_code == 0, answer
    return {
        entry.entity[0].entity_name: {value.key: value.value for value in entry.values}
        for entry in answer.entries
    }


def create(client: RawClient, name: str) -> None:
    wanted = {"name": name, "num_partitions": 1, "replication_factor": 1}
    assert client.ask(Api.CREATE_TOPICS, 7, topics=[wanted], timeout=60_000).topics[0].error_code == 0


@pytest.fixture
def broker_of_short_windows(broker_factory: BrokerFactory) -> BrokerProcess:
    """A second's worth may go at once instead of ten: the rate shows within seconds."""
    return broker_factory(quota_window_num=2)


def measured(arrivals: list[float]) -> float:
    """Bytes a second after the burst."""
    since = arrivals[0] + BURST_SECONDS
    later = [at for at in arrivals if since < at <= since + SECONDS]
    assert arrivals[-1] >= since + SECONDS - 2, "it came to an end too early"
    rate = len(later) * VALUE_SIZE / SECONDS
    print(f"measured {rate:,.0f} bytes a second, the quota is {RATE:,}")
    return rate


def most_throttled(statistics: list[dict[str, Any]]) -> float:
    """The largest throttle time in ms among a client's own statistics."""
    return max(broker["throttle"]["max"] for each in statistics for broker in each["brokers"].values())


def test_producer_keeps_its_rate_and_is_told_so(broker_of_short_windows: BrokerProcess) -> None:
    broker = broker_of_short_windows
    throttles: list[float] = []
    statistics: list[dict[str, Any]] = []
    with RawClient(broker.port) as admin:
        create(admin, "t")
        assert alter(admin, "limited", producer_byte_rate=RATE).error_code == 0
    producer = Producer(
        {
            "bootstrap.servers": broker.bootstrap,
            "client.id": "limited",
            "batch.size": 50_000,
            "statistics.interval.ms": 500,
            "stats_cb": lambda text: statistics.append(json.loads(text)),
            "throttle_cb": lambda event: throttles.append(event.throttle_time),
        }
    )
    delivered: list[float] = []

    def on_delivery(error: Any, _message: Any) -> None:
        if error is None:  # what is purged at the end is not
            delivered.append(time.monotonic())

    for _ in range(3_000):
        producer.produce("t", bytes(VALUE_SIZE), on_delivery=on_delivery)
    deadline = time.monotonic() + SECONDS + BURST_SECONDS + 1
    while time.monotonic() < deadline:
        producer.poll(0.05)
    producer.purge()
    producer.flush(5)
    assert LEAST * RATE < measured(delivered) < MOST * RATE
    assert max(throttles) > 0.02
    assert most_throttled(statistics) > 20


def test_consumer_keeps_its_rate_and_is_told_so(broker_of_short_windows: BrokerProcess) -> None:
    broker = broker_of_short_windows
    statistics: list[dict[str, Any]] = []
    with RawClient(broker.port) as admin:
        create(admin, "t")
        for _ in range(200):
            assert admin.produce({("t", 0): batch_of(*[bytes(VALUE_SIZE)] * 5)})[0].error_code == 0
        assert alter(admin, None, consumer_byte_rate=RATE).error_code == 0
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "client.id": "any",
            "group.id": "g",
            "enable.auto.commit": False,
            "fetch.message.max.bytes": 50_000,
            "statistics.interval.ms": 500,
            "stats_cb": lambda text: statistics.append(json.loads(text)),
        }
    )
    consumer.assign([TopicPartition("t", 0, 0)])
    arrived: list[float] = []
    deadline = time.monotonic() + SECONDS + BURST_SECONDS + 1
    try:
        while time.monotonic() < deadline:
            message = consumer.poll(0.1)
            if message is not None:
                assert message.error() is None
                arrived.append(time.monotonic())
    finally:
        consumer.close()
    assert LEAST * RATE < measured(arrived) < MOST * RATE
    assert most_throttled(statistics) > 20


def test_throttle_time_is_in_the_answer_and_holds_the_connection_only(broker: BrokerProcess) -> None:
    with (
        RawClient(broker.port) as limited,
        RawClient(broker.port) as held,
        RawClient(broker.port) as admin,
    ):
        create(limited, "t")
        assert alter(admin, "raw", producer_byte_rate=100_000.0).error_code == 0
        batch = batch_of(bytes(900_000))
        began = time.monotonic()  # before the first: what a pause gives back, it takes
        assert limited.produce({("t", 0): batch})[0].error_code == 0
        assert limited.produce({("t", 0): batch_of(bytes(500_000))})[0].error_code == 0  # 400 kB too much
        assert limited.ask(Api.API_VERSIONS, 0).error_code == 0
        assert time.monotonic() - began > 2.7
        # Minutes for one connection, and another of the same client id is answered before it.
        assert alter(admin, "raw", producer_byte_rate=1_000.0).error_code == 0
        assert held.produce({("t", 0): batch_of(bytes(500_000))})[0].error_code == 0
        held.send(encode_request(12, 1, "raw", FetchRequest(0, 1, 1, False, [PartitionFetch("t", 0, 0, 1)])))
        assert admin.ask(Api.API_VERSIONS, 0).error_code == 0
        assert not select.select([held.socket], [], [], 0)[0]
        # A fetch that is too much for its quota comes back empty, with a time, and then full.
        assert alter(admin, "raw", producer_byte_rate=None, consumer_byte_rate=50_000.0).error_code == 0
        asked = PartitionFetch("t", 0, 0, 1 << 20)
        given = limited.fetch(asked)
        assert given.throttle_ms > 5_000  # 900 kB where 500 may go at once
        assert given.partitions == []


def test_quotas_are_described_as_they_were_set(broker: BrokerProcess) -> None:
    odd = "a b/ü*~<default>"
    with RawClient(broker.port) as client:
        assert describe(client) == {}
        assert alter(client, odd, producer_byte_rate=1_000.0, consumer_byte_rate=5.0).error_code == 0
        assert alter(client, None, consumer_byte_rate=7.0).error_code == 0
        everything = {
            odd: {"producer_byte_rate": 1_000.0, "consumer_byte_rate": 5.0},
            None: {"consumer_byte_rate": 7.0},
        }
        assert describe(client) == everything
        of_type = {"entity_type": "client-id", "match_type": 2, "match": None}
        exact = {"entity_type": "client-id", "match_type": 0, "match": odd}
        default = {"entity_type": "client-id", "match_type": 1, "match": None}
        user = {"entity_type": "user", "match_type": 2, "match": None}
        assert describe(client, of_type, strict=True) == everything
        assert describe(client, exact) == {odd: everything[odd]}
        assert describe(client, default) == {None: everything[None]}
        assert (
            describe(client, user) == describe(client, user, of_type) == describe(client, strict=True) == {}
        )
        assert alter(client, odd, producer_byte_rate=None).error_code == 0
        assert describe(client, exact) == {odd: {"consumer_byte_rate": 5.0}}
        # Where ZooKeeper tools look for it.
        zookeeper = KazooClient(broker.zookeeper)
        zookeeper.start()
        try:
            assert "a%20b%2F%C3%BC%2A%7E%3Cdefault%3E" in zookeeper.get_children("/config/clients")
            data, _ = zookeeper.get("/config/clients/<default>")
            assert json.loads(data) == {"version": 1, "config": {"consumer_byte_rate": "7"}}
            zookeeper.set("/config/clients/<default>", b'{"version":1,"config":{"consumer_byte_rate":"9"}}')
            until(lambda: describe(client, default) == {None: {"consumer_byte_rate": 9.0}})
        finally:
            zookeeper.stop()


@pytest.mark.parametrize(
    ("entity", "op", "code"),
    [
        ([], {"key": "producer_byte_rate", "value": 1.0}, 42),
        ([("client-id", "")], {"key": "producer_byte_rate", "value": 1.0}, 42),
        ([("planet", "x")], {"key": "producer_byte_rate", "value": 1.0}, 42),
        ([("user", "x")], {"key": "producer_byte_rate", "value": 1.0}, 42),
        ([("client-id", "x")], {"key": "producer_byte_rate", "value": -1.0}, 42),
        ([("client-id", "x")], {"key": "producer_byte_rate", "value": 0.5}, 42),
        ([("client-id", "x")], {"key": "producer_byte_rate", "value": float("nan")}, 42),
        ([("client-id", "x")], {"key": "request_percentage", "value": 50.0}, 42),
        ([("client-id", "x")], {"key": "producer_byte_rate", "value": 1.0}, 0),
    ],
)
def test_wrong_quotas_are_refused(shared: RawClient, entity: Any, op: dict[str, Any], code: int) -> None:
    entry = {"entity": [{"entity_type": kind, "entity_name": name} for kind, name in entity], "ops": [op]}
    answer = shared.ask(Api.ALTER_CLIENT_QUOTAS, 1, entries=[entry], validate_only=True)
    assert answer.entries[0].error_code == code, answer
    assert describe(shared) == {}


@pytest.mark.parametrize(
    ("components", "code"),
    [
        ([("", 0, "x")], 42),
        ([("client-id", 0, None)], 42),
        ([("client-id", 1, "x")], 42),
        ([("client-id", 9, None)], 42),
        ([("client-id", 2, None)] * 2, 42),
        ([("client-id", 2, None), ("ip", 2, None)], 42),
        ([("planet", 2, None)], 35),
    ],
)
def test_wrong_questions_are_refused(shared: RawClient, components: Any, code: int) -> None:
    asked = [{"entity_type": kind, "match_type": match, "match": name} for kind, match, name in components]
    answer = shared.ask(Api.DESCRIBE_CLIENT_QUOTAS, 1, components=asked, strict=False)
    assert (answer.error_code, answer.entries) == (code, None)


@pytest.fixture(scope="module")
def shared(zookeeper: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    running = BrokerProcess(zookeeper.chroot(), tmp_path_factory.mktemp("broker"))
    try:
        running.start()
        with RawClient(running.port) as client:
            yield client
    finally:
        running.kill()


def test_defaults_of_the_broker_hold_from_the_start(broker_factory: BrokerFactory) -> None:
    broker = broker_factory(quota_producer_default=100_000)
    with RawClient(broker.port) as client:
        create(client, "t")
        began = time.monotonic()
        for _ in range(2):
            client.produce({("t", 0): batch_of(bytes(600_000))})
        client.ask(Api.API_VERSIONS, 0)
        assert time.monotonic() - began > 1.5
