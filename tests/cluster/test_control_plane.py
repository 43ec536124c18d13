"""Three real brokers and ZooKeeper: elections, shutdowns, restarts, and controllers that were replaced."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.broker.coordination import paths
from millrace.broker.coordination.broker_registry import prepare_cluster, register
from millrace.broker.coordination.cluster_watcher import ClusterWatcher
from millrace.broker.coordination.controller_runner import ControllerRunner
from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.coordination.session import Session
from millrace.broker.errors import (
    CoordinatorNotAvailable,
    ElectionNotNeeded,
    InvalidReplicationFactor,
    LeaderNotAvailable,
    PreferredLeaderNotAvailable,
    UnknownTopicOrPartition,
)
from millrace.broker.protocol.frames import Api
from tests.cluster.three_brokers import (
    TIMEOUT_MS,
    Load,
    ThreeBrokers,
    eventually,
    folders,
    produce_numbers,
    read_all,
)
from tests.conftest import BrokerFactory
from tests.raw_client import RawClient, batch_of
from tests.servers import ZooKeeper

pytestmark = pytest.mark.java


@pytest.fixture
def three(broker_factory: BrokerFactory) -> ThreeBrokers:
    return ThreeBrokers(broker_factory)


def test_killed_leader_is_replaced_and_leads_again_by_election(three: ThreeBrokers) -> None:
    three.create_on("t", (1, 2, 3), (2, 3, 1), min_insync_replicas="2")
    three.wait_in_sync("t", 0, 1, 2, 3)
    before = three.partitions("t")[0]
    with RawClient(three.brokers[1].port) as client:
        assert client.produce({("t", 0): batch_of(b"0")}, acks=-1)[0].error_code == 0
    assert three.elect("t", 0, 5) == {0: ElectionNotNeeded.code, 5: UnknownTopicOrPartition.code}

    three.brokers[1].kill()
    after = three.wait_led("t", 0, 2)
    assert after.leader_epoch > before.leader_epoch
    assert set(after.isr_nodes) == {2, 3}
    eventually(lambda: three.partitions("t")[0].offline_replicas == (1,), "broker 1 is shown as offline")
    # As a follower it leaves the in-sync set too, although its leader never went away.
    three.wait_in_sync("t", 1, 2, 3)
    with RawClient(three.brokers[2].port) as client:

        def stored() -> list[int]:
            answers = client.produce({("t", 0): batch_of(b"1")}, acks=-1)
            return [answer.base_offset for answer in answers if answer.error_code == 0]

        assert eventually(stored, "broker 2 knows its office") == [1]
    assert three.elect("t", 0) == {0: PreferredLeaderNotAvailable.code}

    three.brokers[1].start()
    three.wait_in_sync("t", 0, 1, 2, 3)
    assert three.partitions("t")[0].leader_id == 2  # not by itself, but when asked
    three.elect_in_the_end("t", 0, at=3)
    assert three.wait_led("t", 0, 1).isr_nodes
    assert read_all(three.bootstrap, "t") == [0, 1]


def test_preferred_leaders_take_over_by_themselves_where_that_is_on(broker_factory: BrokerFactory) -> None:
    options = {"leader_imbalance_check_interval_seconds": 1, "replica_lag_time_max_ms": 5_000}
    first = broker_factory(broker_id=1, **options)
    broker_factory(zookeeper_path=first.zookeeper, broker_id=2, **options)
    cluster = ThreeBrokers(broker_factory, 0)
    cluster.brokers[1] = first
    eventually(lambda: len(cluster.metadata().brokers) == 2, "both brokers are there")
    cluster.create_on("t", (1, 2))
    cluster.wait_in_sync("t", 0, 1, 2)
    first.stop()
    first.start()
    cluster.wait_in_sync("t", 0, 1, 2)
    cluster.wait_led("t", 0, 1)


def test_controlled_shutdown_under_load_shows_no_error(three: ThreeBrokers) -> None:
    three.create_on("t", (1, 2, 3), min_insync_replicas="2")
    three.wait_in_sync("t", 0, 1, 2, 3)
    with Load(three.bootstrap, "t") as load:
        for number in (1, 2, 3):
            written = len(load.acknowledged)
            assert three.brokers[number].stop() == 0
            said = three.brokers[number].log
            assert "handed over" in said and "not everything was handed over" not in said
            eventually(lambda seen=written: len(load.acknowledged) > seen + 100, "the load goes on")
            three.brokers[number].start()
            three.wait_in_sync("t", 0, 1, 2, 3)
    assert load.errors == []
    # Idempotent: nothing missing, nothing twice, in order.
    assert read_all(three.bootstrap, "t") == sorted(load.acknowledged)


def test_lone_broker_stops_without_waiting(broker_factory: BrokerFactory) -> None:
    lone = ThreeBrokers(broker_factory, 1)
    lone.create("t", 4, 1)
    assert lone.brokers[1].stop() == 0
    assert "handing over" not in lone.brokers[1].log


def test_partition_without_in_sync_replica_waits_unless_unclean_election_is_asked_for(
    three: ThreeBrokers,
) -> None:
    three.create_on("t", (1, 2))
    three.wait_in_sync("t", 0, 1, 2)
    three.brokers[2].kill()
    three.wait_in_sync("t", 0, 1)
    with RawClient(three.brokers[1].port) as client:
        assert client.produce({("t", 0): batch_of(b"0")}, acks=-1)[0].error_code == 0
    three.brokers[1].kill()
    three.brokers[2].start()
    lost = three.wait_for(
        "t",
        0,
        "has no leader, and broker 1 is away",
        lambda part: (part.leader_id, tuple(part.offline_replicas)) == (-1, (1,)),
    )
    assert (lost.error_code, tuple(lost.isr_nodes)) == (LeaderNotAvailable.code, (1,))
    described = three.ask(
        Api.DESCRIBE_TOPIC_PARTITIONS, 0, topics=[{"name": "t"}], response_partition_limit=10
    )
    (part,) = described.topics[0].partitions
    assert (int(part.error_code), part.leader_id, tuple(part.offline_replicas)) == (
        LeaderNotAvailable.code,
        -1,
        (1,),
    )
    three.elect_in_the_end("t", 0, kind=1)
    unclean = three.wait_led("t", 0, 2)
    assert tuple(unclean.isr_nodes) == (2,)
    assert three.elect("t", 0, kind=1) == {0: ElectionNotNeeded.code}
    three.brokers[1].start()
    three.wait_in_sync("t", 0, 1, 2)
    assert read_all(three.bootstrap, "t") == []  # what only broker 1 had is the price


def test_setting_of_a_topic_allows_unclean_elections(three: ThreeBrokers) -> None:
    three.create_on("t", (1, 2), unclean_leader_election_enable="true")
    three.wait_in_sync("t", 0, 1, 2)
    three.brokers[2].kill()
    three.wait_in_sync("t", 0, 1)
    three.brokers[1].kill()
    three.brokers[2].start()
    three.wait_led("t", 0, 2)


def test_logs_of_a_topic_that_was_deleted_meanwhile_vanish(three: ThreeBrokers) -> None:
    three.create_on("t", (1, 2, 3))
    # Replicas of a new topic count as in sync before each broker has made its log.
    eventually(lambda: folders(three.brokers[3], "t") == ["t-0"], "broker 3 has made its log")
    three.brokers[3].kill()
    answer = three.ask(Api.DELETE_TOPICS, 5, topic_names=["t"], timeout=TIMEOUT_MS)
    assert answer.responses[0].error_code == 0
    assert folders(three.brokers[3], "t") == ["t-0"]
    three.brokers[3].start()
    eventually(lambda: folders(three.brokers[3], "t") == [], "the log that nobody wants goes")


def test_frozen_controller_comes_back_as_an_ordinary_broker(three: ThreeBrokers) -> None:
    old = three.metadata().controller_id
    others = [number for number in three.brokers if number != old]
    three.create_on("t", (old, *others), min_insync_replicas="2")
    three.wait_in_sync("t", 0, 1, 2, 3)
    frozen = three.brokers[old].process
    assert frozen is not None
    # A frozen server keeps its connections: only time tells a client that there will be no answer.
    patience = {"request.timeout.ms": 3_000, "socket.timeout.ms": 3_000}
    bootstrap = ",".join(three.brokers[number].bootstrap for number in others)
    with Load(bootstrap, "t", **patience) as load:
        os.kill(frozen.pid, signal.SIGSTOP)
        try:
            eventually(
                lambda: three.metadata(at=others[0]).controller_id in others, "another controller is elected"
            )
            part = eventually(
                lambda: next(
                    (
                        part
                        for part in three.partitions("t", at=others[0]).values()
                        if part.leader_id in others
                    ),
                    None,
                ),
                "another leader is elected",
            )
            assert old not in part.isr_nodes
            written = len(load.acknowledged)
            eventually(lambda: len(load.acknowledged) > written + 200, "the load goes on")
        finally:
            os.kill(frozen.pid, signal.SIGCONT)
        three.wait_for_brokers(1, 2, 3)
        three.wait_in_sync("t", 0, 1, 2, 3)
        # Its first answers may still be of before: it was away.
        eventually(
            lambda: three.metadata(at=old).controller_id in others, "the old controller knows the new one"
        )
    assert load.errors == []
    assert read_all(three.bootstrap, "t") == sorted(load.acknowledged)
    eventually(
        lambda: "no longer the controller" in three.brokers[old].log, "the old controller gives up its office"
    )


@pytest.fixture
def own_zookeeper(tmp_path: Path) -> Iterator[ZooKeeper]:
    server = ZooKeeper(tmp_path / "zookeeper")
    try:
        yield server.start()
    finally:
        server.stop()


def test_cluster_outlives_a_restart_of_zookeeper(
    broker_factory: BrokerFactory, own_zookeeper: ZooKeeper
) -> None:
    three = ThreeBrokers(broker_factory, 3, own_zookeeper.chroot())
    three.create_on("t", (1, 2, 3), min_insync_replicas="2")
    three.wait_in_sync("t", 0, 1, 2, 3)
    with Load(three.bootstrap, "t") as load:
        own_zookeeper.stop()
        written = len(load.acknowledged)
        eventually(lambda: len(load.acknowledged) > written + 200, "it serves without ZooKeeper")
        own_zookeeper.start()
        three.wait_for_brokers(1, 2, 3)
        three.create_again("after", 3, 3)
        three.brokers[1].kill()
        three.wait_for("t", 0, "has another leader", lambda part: part.leader_id in (2, 3))
        three.brokers[1].start()
        three.wait_in_sync("t", 0, 1, 2, 3)
    assert load.errors == []
    assert read_all(three.bootstrap, "t") == sorted(load.acknowledged)


def test_cluster_that_was_killed_as_a_whole_has_everything_again(three: ThreeBrokers) -> None:
    three.create_on("t", (1, 2, 3), (2, 3, 1), (3, 1, 2), min_insync_replicas="2")
    for number in range(3):
        three.wait_in_sync("t", number, 1, 2, 3)
    produce_numbers(three.bootstrap, "t", 3_000, partitions=3)
    epochs = {number: part.leader_epoch for number, part in three.partitions("t").items()}
    for broker in three.brokers.values():
        assert broker.process is not None
        broker.process.kill()
    for broker in three.brokers.values():
        broker.kill()
    for broker in three.brokers.values():
        broker.launch()
    for broker in three.brokers.values():
        broker.wait_until_serving()
    for number in range(3):
        assert three.wait_in_sync("t", number, 1, 2, 3).leader_epoch > epochs[number]
    assert sorted(read_all(three.bootstrap, "t", 3)) == list(range(3_000))
    assert any("partitions left or begun anew" in broker.log for broker in three.brokers.values())


def test_replica_that_cannot_be_opened_is_shown_and_led_by_others(three: ThreeBrokers) -> None:
    three.create_on("t", (1, 2), (1, 2))
    for number in (0, 1):
        three.wait_in_sync("t", number, 1, 2)
    produce_numbers(three.bootstrap, "t", 10, partitions=2)
    three.brokers[1].stop()
    epochs = three.brokers[1].data / "t-0" / "leader-epoch-checkpoint"
    epochs.unlink()
    epochs.mkdir()
    three.brokers[1].start()
    three.wait_in_sync("t", 1, 1, 2)
    three.wait_for(
        "t",
        0,
        "is offline at 1, and 2 leads alone",
        lambda part: (tuple(part.offline_replicas), part.leader_id, tuple(part.isr_nodes)) == ((1,), 2, (2,)),
    )
    assert tuple(three.partitions("t")[1].offline_replicas) == ()
    three.elect_in_the_end("t", 1)
    assert three.elect("t", 0) == {0: PreferredLeaderNotAvailable.code}
    assert {known.node_id for known in three.metadata().brokers} == {1, 2, 3}


def test_group_coordinator_waits_for_enough_brokers(broker_factory: BrokerFactory) -> None:
    options = {"offsets_topic_replication_factor": 2, "default_replication_factor": 2}
    first = broker_factory(broker_id=1, **options)

    def coordinator() -> int:
        with RawClient(first.port) as client:
            answer = client.ask(Api.FIND_COORDINATOR, 4, key_type=0, coordinator_keys=["g"])
            return int(answer.coordinators[0].error_code)

    def created() -> int:
        with RawClient(first.port) as client:
            named = [{"name": "auto"}]
            answer = client.ask(Api.METADATA, 12, topics=named, allow_auto_topic_creation=True)
            return int(answer.topics[0].error_code)

    assert coordinator() == CoordinatorNotAvailable.code
    assert created() == InvalidReplicationFactor.code
    broker_factory(zookeeper_path=first.zookeeper, broker_id=2, **options)
    eventually(lambda: coordinator() == 0, "there is a coordinator")
    eventually(lambda: created() == 0, "the topic is made")


def test_deletion_that_was_interrupted_is_finished_by_the_next_controller(zookeeper: ZooKeeper) -> None:
    async def scenario() -> None:
        session = Session(zookeeper.chroot(), session_timeout_ms=20_000, connection_timeout_ms=30_000)
        await session.start()
        cache = MetadataCache()
        runner = ControllerRunner(session, cache, 1, lambda: 0)
        watcher = ClusterWatcher(session, cache, lambda _changes: runner.wake())
        try:
            await prepare_cluster(session)
            await register(session, paths.BrokerRegistration(1, "h", 1), 0)
            assignment = paths.TopicAssignment(paths.decode_uuid("A" * 22), {0: (1,), 1: (1,)})
            await session.create(paths.topic_path("t"), paths.encode_topic(assignment))
            # The mark, and half of the topic: one partition is gone, another has lost its state.
            await session.create(paths.delete_topic_path("t"))
            await session.create(paths.partitions_path("t"))
            await session.create(paths.partition_path("t", 1))
            await watcher.start()
            runner.start()
            assert await cache.changed(lambda: "t" not in cache.topics and not cache.deleting, 60_000)
            assert not await session.exists(paths.topic_path("t"))
        finally:
            await runner.stop()
            await watcher.stop()
            await session.stop()

    asyncio.run(scenario())
