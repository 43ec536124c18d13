"""Several brokers of one cluster, and what stands in ZooKeeper."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from millrace.broker.coordination import paths
from millrace.broker.coordination.broker_registry import prepare_cluster
from millrace.broker.coordination.cluster_watcher import ClusterWatcher
from millrace.broker.coordination.controller_runner import ControllerRunner
from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.coordination.producer_ids import BLOCK_SIZE, ProducerIds
from millrace.broker.coordination.session import Session
from millrace.broker.errors import LeaderNotAvailable, NotLeaderOrFollower
from millrace.broker.protocol.frames import Api
from tests.conftest import BrokerFactory
from tests.raw_client import RawClient, batch_of
from tests.servers import BrokerProcess, ZooKeeper

pytestmark = pytest.mark.java

DEADLINE_S = 30.0


def eventually(probe: Callable[[], Any], what: str) -> Any:
    """The first true value of `probe`."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        value = probe()
        if value:
            return value
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def metadata(broker: BrokerProcess, *topics: str) -> Any:
    with RawClient(broker.port) as client:
        return client.ask(
            Api.METADATA,
            12,
            topics=[{"name": name} for name in topics],
            allow_auto_topic_creation=False,
        )


def read_znodes(zookeeper_path: str, *wanted: str) -> list[bytes]:
    async def read() -> list[bytes]:
        session = Session(zookeeper_path, session_timeout_ms=5_000, connection_timeout_ms=5_000)
        await session.start()
        try:
            return [(await session.get(path)).data for path in wanted]
        finally:
            await session.stop()

    return asyncio.run(read())


def test_zookeeper_holds_the_layout_that_tools_know(broker: BrokerProcess) -> None:
    with RawClient(broker.port) as client:
        wanted = {
            "name": "seen",
            "num_partitions": 1,
            "replication_factor": 1,
            "configs": [{"name": "retention.ms", "value": "5"}],
        }
        client.ask(Api.CREATE_TOPICS, 7, topics=[wanted], timeout=20_000)
    registration, topic, state, controller, epoch, config, cluster = read_znodes(
        broker.zookeeper,
        "/brokers/ids/1",
        "/brokers/topics/seen",
        "/brokers/topics/seen/partitions/0/state",
        "/controller",
        "/controller_epoch",
        "/config/topics/seen",
        "/cluster/id",
    )
    registered = json.loads(registration)
    assert (registered["host"], registered["port"]) == ("127.0.0.1", broker.port)
    assert registered["endpoints"] == [f"PLAINTEXT://127.0.0.1:{broker.port}"]
    assert json.loads(topic)["partitions"] == {"0": [1]}
    assert len(json.loads(topic)["topic_id"]) == 22
    assert json.loads(state) == {
        "controller_epoch": 1,
        "leader": 1,
        "version": 1,
        "leader_epoch": 0,
        "isr": [1],
    }
    assert json.loads(controller)["brokerid"] == 1
    assert epoch == b"1"
    assert json.loads(config) == {"version": 1, "config": {"retention.ms": "5"}}
    assert json.loads(cluster)["id"] == metadata(broker).cluster_id


def test_partitions_spread_over_brokers_and_survive_the_controllers_death(
    broker_factory: BrokerFactory,
) -> None:
    first = broker_factory(broker_id=1)
    second = broker_factory(zookeeper_path=first.zookeeper, broker_id=2)
    eventually(lambda: len(metadata(first).brokers) == 2, "the first broker sees the second")
    with RawClient(second.port) as client:  # not the controller: it takes the request all the same
        wanted = {"name": "spread", "num_partitions": 4, "replication_factor": 1}
        answer = client.ask(Api.CREATE_TOPICS, 7, topics=[wanted], timeout=20_000)
        assert answer.topics[0].error_code == 0

    def leaders(broker: BrokerProcess) -> dict[int, int]:
        parts = metadata(broker, "spread").topics[0].partitions
        return {part.partition_index: part.leader_id for part in parts}

    eventually(lambda: leaders(first) == leaders(second), "both brokers know the same leaders")
    assert sorted(leaders(first).values()) == [1, 1, 2, 2]
    of_second = next(number for number, leader in leaders(first).items() if leader == 2)
    of_first = next(number for number, leader in leaders(first).items() if leader == 1)
    with RawClient(first.port) as client:
        refused = client.produce({("spread", of_second): batch_of(b"x")})[0]
        assert refused.error_code == NotLeaderOrFollower.code
        assert client.produce({("spread", of_first): batch_of(b"x")})[0].error_code == 0

    assert metadata(second).controller_id == 1
    first.kill()
    eventually(lambda: metadata(second).controller_id == 2, "the second broker becomes controller")
    assert read_znodes(first.zookeeper, "/controller_epoch") == [b"2"]

    def leaderless() -> bool:
        parts = metadata(second, "spread").topics[0].partitions
        return next(part for part in parts if part.partition_index == of_first).leader_id == -1

    eventually(leaderless, "the dead broker's partitions have no leader")
    parts = metadata(second, "spread").topics[0].partitions
    lost = next(part for part in parts if part.partition_index == of_first)
    assert (lost.error_code, lost.isr_nodes) == (LeaderNotAvailable.code, (1,))
    with RawClient(second.port) as client:
        assert client.produce({("spread", of_second): batch_of(b"y")})[0].error_code == 0

    first.start()
    eventually(lambda: leaders(second)[of_first] == 1, "the returned broker leads again")
    with RawClient(first.port) as client:
        stored = eventually(
            lambda: [
                answer
                for answer in client.produce({("spread", of_first): batch_of(b"z")})
                if answer.error_code == 0
            ],
            "the returned broker accepts records",
        )
        assert stored[0].base_offset == 1


def test_stopped_controller_hands_over_at_once(broker_factory: BrokerFactory) -> None:
    first = broker_factory(broker_id=1, zookeeper_session_timeout_ms=30_000)
    second = broker_factory(zookeeper_path=first.zookeeper, broker_id=2, zookeeper_session_timeout_ms=30_000)
    started = time.monotonic()
    first.stop()
    eventually(
        lambda: (metadata(second).controller_id, len(metadata(second).brokers)) == (2, 1),
        "the second broker is controller and alone",
    )
    assert time.monotonic() - started < 15  # no session had to expire


def test_replaced_controller_cannot_write(zookeeper: ZooKeeper) -> None:
    async def scenario() -> None:
        session = Session(zookeeper.chroot(), session_timeout_ms=10_000, connection_timeout_ms=5_000)
        await session.start()
        cache = MetadataCache()
        runner = ControllerRunner(session, cache, 1, lambda: 0)
        watcher = ClusterWatcher(session, cache, lambda _changes: runner.wake())
        try:
            await prepare_cluster(session)
            await session.create(
                paths.broker_path(1),
                paths.encode_broker(paths.BrokerRegistration(1, "h", 1), 0),
                ephemeral=True,
            )
            await watcher.start()
            runner.start()
            assert await cache.changed(lambda: runner.in_office, 10_000)
            # Another controller was elected while this one slept: only the epoch tells.
            node = await session.get(paths.CONTROLLER_EPOCH)
            await session.set(paths.CONTROLLER_EPOCH, b"7", node.version)
            await session.create(
                paths.topic_path("t"),
                paths.encode_topic(paths.TopicAssignment(paths.decode_uuid("A" * 22), {0: (1,)})),
            )
            deadline = time.monotonic() + DEADLINE_S
            while runner.in_office:
                assert time.monotonic() < deadline, "the replaced controller resigns"
                await asyncio.sleep(0.02)
            assert not await session.exists(paths.state_path("t", 0))
        finally:
            await runner.stop()
            await watcher.stop()
            await session.stop()

    asyncio.run(scenario())


def test_producer_ids_of_two_brokers_never_meet(zookeeper: ZooKeeper) -> None:
    async def scenario() -> None:
        session = Session(zookeeper.chroot(), session_timeout_ms=10_000, connection_timeout_ms=5_000)
        await session.start()
        try:
            allocators = [ProducerIds(session, number) for number in (1, 2)]
            taken = await asyncio.gather(
                *(allocators[number % 2].take() for number in range(2 * BLOCK_SIZE + 10))
            )
            assert len(set(taken)) == len(taken)
        finally:
            await session.stop()

    asyncio.run(scenario())
