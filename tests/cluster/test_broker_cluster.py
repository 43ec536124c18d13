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
from millrace.broker.coordination.session import Node, NodeMissing, Session
from millrace.broker.errors import LeaderNotAvailable, NotLeaderOrFollower
from millrace.broker.protocol.frames import Api
from tests.cluster.transactional import create_topic
from tests.conftest import BrokerFactory
from tests.raw_client import RawClient, batch_of
from tests.servers import BrokerProcess, ZooKeeper
from tests.waiting import until, until_async

pytestmark = pytest.mark.java

DEADLINE_S = 120.0
BROKER_RESOURCE = 4


def eventually(probe: Callable[[], Any], what: str) -> Any:
    """The first true value of `probe`."""
    return until(probe, what, within_s=DEADLINE_S)


def metadata(broker: BrokerProcess, *topics: str) -> Any:
    with RawClient(broker.port) as client:
        return client.ask(
            Api.METADATA,
            12,
            topics=[{"name": name} for name in topics],
            allow_auto_topic_creation=False,
        )


def read_nodes(zookeeper_path: str, *wanted: str) -> dict[str, Node]:
    async def read() -> dict[str, Node]:
        session = Session(zookeeper_path, session_timeout_ms=5_000, connection_timeout_ms=30_000)
        await session.start()
        try:
            return {path: await session.get(path) for path in wanted}
        finally:
            await session.stop()

    return asyncio.run(read())


def read_znodes(zookeeper_path: str, *wanted: str) -> list[bytes]:
    return [node.data for node in read_nodes(zookeeper_path, *wanted).values()]


def test_a_state_that_cannot_be_read_keeps_no_other_partition_from_its_leader(
    broker_factory: BrokerFactory,
) -> None:
    broker = broker_factory()
    state = paths.state_path("damaged", 0)

    async def damage() -> None:
        session = Session(broker.zookeeper, session_timeout_ms=5_000, connection_timeout_ms=30_000)
        await session.start()
        await session.set(state, b"garbage{")
        await session.stop()

    def leaders(topic: str) -> list[int]:
        return [each.leader_id for each in metadata(broker, topic).topics[0].partitions]

    create_topic(broker, "damaged", 2)
    eventually(lambda: leaders("damaged") == [1, 1], "both have a leader")
    asyncio.run(damage())
    broker.stop()
    broker.start()
    eventually(lambda: leaders("damaged") == [-1, 1], "the other has its leader again")
    create_topic(broker, "later")
    assert read_znodes(broker.zookeeper, state) == [b"garbage{"]


def test_zookeeper_holds_the_layout_that_tools_know(broker_factory: BrokerFactory) -> None:
    """As Apache Kafka 3.x with ZooKeeper: every field, and what goes with the broker's session."""
    before_ms = int(time.time() * 1000)
    broker = broker_factory(transaction_state_log_num_partitions=1)
    rate = {"name": "leader.replication.throttled.rate", "config_operation": 0, "value": "7000"}
    wanted = {
        "name": "seen",
        "num_partitions": 1,
        "replication_factor": 1,
        "configs": [{"name": "retention.ms", "value": "5"}],
    }
    with RawClient(broker.port) as client:
        client.ask(Api.CREATE_TOPICS, 7, topics=[wanted], timeout=60_000)
        altered = {"resource_type": BROKER_RESOURCE, "resource_name": "1", "configs": [rate]}
        answer = client.ask(Api.INCREMENTAL_ALTER_CONFIGS, 1, resources=[altered], validate_only=False)
        assert [each.error_code for each in answer.responses] == [0]
        eventually(
            lambda: client.ask(Api.INIT_PRODUCER_ID, 4, producer_id=-1, producer_epoch=-1).error_code == 0,
            "producer ids are given",
        )
    after_ms = int(time.time() * 1000)
    nodes = read_nodes(
        broker.zookeeper,
        "/brokers/ids/1",
        "/brokers/topics/seen",
        "/brokers/topics/seen/partitions/0/state",
        "/controller",
        "/controller_epoch",
        "/config/topics/seen",
        "/config/brokers/1",
        "/latest_producer_id_block",
        "/cluster/id",
        "/admin/delete_topics",
    )
    owners = {path: node.owner for path, node in nodes.items()}
    assert {path for path, owner in owners.items() if owner} == {"/brokers/ids/1", "/controller"}
    assert owners["/brokers/ids/1"] == owners["/controller"], "both go when the broker's session goes"
    payloads = {path: json.loads(node.data) for path, node in nodes.items() if node.data}

    registered = payloads["/brokers/ids/1"]
    assert before_ms <= int(registered.pop("timestamp")) <= after_ms
    assert registered == {
        "version": 5,
        "host": "127.0.0.1",
        "port": broker.port,
        "endpoints": [f"PLAINTEXT://127.0.0.1:{broker.port}"],
        "listener_security_protocol_map": {"PLAINTEXT": "PLAINTEXT"},
        "jmx_port": -1,
        "features": {},
    }
    topic = payloads["/brokers/topics/seen"]
    assert len(topic.pop("topic_id")) == 22
    assert topic == {"version": 3, "partitions": {"0": [1]}, "adding_replicas": {}, "removing_replicas": {}}
    assert payloads["/brokers/topics/seen/partitions/0/state"] == {
        "controller_epoch": 1,
        "leader": 1,
        "version": 1,
        "leader_epoch": 0,
        "isr": [1],
    }
    controller = payloads["/controller"]
    assert before_ms <= int(controller.pop("timestamp")) <= after_ms
    assert controller == {"version": 1, "brokerid": 1}
    assert nodes["/controller_epoch"].data == b"1"
    assert payloads["/config/topics/seen"] == {"version": 1, "config": {"retention.ms": "5"}}
    assert payloads["/config/brokers/1"] == {"version": 1, "config": {rate["name"]: "7000"}}
    block = payloads["/latest_producer_id_block"]
    assert block == {"version": 1, "broker": 1, "block_start": "0", "block_end": str(BLOCK_SIZE - 1)}
    assert payloads["/cluster/id"] == {"version": "1", "id": metadata(broker).cluster_id}


def test_partitions_spread_over_brokers_and_survive_the_controllers_death(
    broker_factory: BrokerFactory,
) -> None:
    first = broker_factory(broker_id=1)
    second = broker_factory(zookeeper_path=first.zookeeper, broker_id=2)
    eventually(lambda: len(metadata(first).brokers) == 2, "the first broker sees the second")
    with RawClient(second.port) as client:  # not the controller: it takes the request all the same
        wanted = {"name": "spread", "num_partitions": 4, "replication_factor": 1}
        answer = client.ask(Api.CREATE_TOPICS, 7, topics=[wanted], timeout=60_000)
        assert answer.topics[0].error_code == 0

    def leaders(broker: BrokerProcess) -> dict[int, int]:
        parts = metadata(broker, "spread").topics[0].partitions
        return {part.partition_index: part.leader_id for part in parts}

    eventually(
        lambda: leaders(first) == leaders(second) and sorted(leaders(first).values()) == [1, 1, 2, 2],
        "both brokers know the same leaders",
    )
    of_second = next(number for number, leader in leaders(first).items() if leader == 2)
    of_first = next(number for number, leader in leaders(first).items() if leader == 1)
    with RawClient(first.port) as client:
        refused = client.produce({("spread", of_second): batch_of(b"x")})[0]
        assert refused.error_code == NotLeaderOrFollower.code
        eventually(
            lambda: client.produce({("spread", of_first): batch_of(b"x")})[0].error_code == 0,
            "the first broker knows its office",
        )

    eventually(lambda: metadata(second).controller_id == 1, "the second broker knows the controller")
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
        eventually(
            lambda: client.produce({("spread", of_second): batch_of(b"y")})[0].error_code == 0,
            "the second broker knows its office",
        )

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
    first.stop()
    with pytest.raises(NodeMissing):  # it has ended its session: nobody waits for the session's end
        read_nodes(second.zookeeper, paths.broker_path(1))
    eventually(
        lambda: (metadata(second).controller_id, len(metadata(second).brokers)) == (2, 1),
        "the second broker is controller and alone",
    )


def test_replaced_controller_cannot_write(zookeeper: ZooKeeper) -> None:
    async def scenario() -> None:
        session = Session(zookeeper.chroot(), session_timeout_ms=10_000, connection_timeout_ms=30_000)
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
            await until_async(
                lambda: not runner.in_office, "the replaced controller resigns", within_s=DEADLINE_S
            )
            assert not await session.exists(paths.state_path("t", 0))
        finally:
            await runner.stop()
            await watcher.stop()
            await session.stop()

    asyncio.run(scenario())


def test_producer_ids_of_two_brokers_never_meet(zookeeper: ZooKeeper) -> None:
    async def scenario() -> None:
        session = Session(zookeeper.chroot(), session_timeout_ms=10_000, connection_timeout_ms=30_000)
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
