"""A data folder that fails under leaders which have followers, at named points of its log's work."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.broker.protocol.frames import Api
from tests.cluster.three_brokers import Load, ThreeBrokers, eventually, read_all
from tests.conftest import BrokerFactory
from tests.points.fault import Fault, FaultAt
from tests.raw_client import RawClient
from tests.servers import BrokerProcess

pytestmark = [pytest.mark.java, pytest.mark.safety]

TOPIC, PARTITIONS = "t", 4
EVERYONE = (1, 2, 3)
OTHERS = {2, 3}


def end_offset(cluster: ThreeBrokers, number: int) -> int:
    """As its leader says; -1 while it has none."""
    leader = cluster.partitions(TOPIC)[number].leader_id
    if leader not in cluster.brokers:
        return -1
    with RawClient(cluster.brokers[leader].port) as client:
        asked = {"partition_index": number, "timestamp": -1, "current_leader_epoch": -1}
        topics = [{"name": TOPIC, "partitions": [asked]}]
        answer = client.ask(Api.LIST_OFFSETS, 7, replica_id=-1, isolation_level=0, topics=topics)
    part = answer.topics[0].partitions[0]
    return int(part.offset) if part.error_code == 0 else -1


def in_folder(folder: Path) -> list[int]:
    return [number for number in range(PARTITIONS) if (folder / f"{TOPIC}-{number}").is_dir()]


@pytest.mark.parametrize("point", ["batch written, its disk failed", "batches replicated, not synced"])
def test_leaders_in_a_folder_that_fails_are_succeeded_and_the_other_folder_s_stay(
    broker_factory: BrokerFactory, fault_at: FaultAt, tmp_path: Path, point: str
) -> None:
    faults: list[Fault] = []
    folders = [tmp_path / "one", tmp_path / "two"]

    def make(**settings: object) -> BrokerProcess:
        broker = broker_factory(**settings)
        if broker.id == 1:
            broker.folders = folders
            faults.append(fault_at(broker, point, "fail"))
        return broker

    cluster = ThreeBrokers(make)
    first, (fault,) = cluster.brokers[1], faults
    # A flush for every twenty records: the folder is written to and synced all the while.
    settings = {"min_insync_replicas": "2", "flush_messages": "20"}
    cluster.create_on(TOPIC, *[EVERYONE] * PARTITIONS, **settings)
    for number in range(PARTITIONS):
        cluster.wait_led(TOPIC, number, 1)
    assert [len(in_folder(folder)) for folder in folders] == [2, 2]
    epochs = {number: part.leader_epoch for number, part in cluster.partitions(TOPIC).items()}

    with Load(cluster.bootstrap, TOPIC, partitioner="random", **{"sticky.partitioning.linger.ms": 0}) as load:
        fault.wait_until_reached()
        eventually(lambda: "a data folder is offline" in first.log, "the folder fails", [first])
        (failed,) = [folder for folder in folders if f"folder={folder}" in first.log]
        (sound,) = [folder for folder in folders if folder != failed]
        for number in in_folder(failed):
            part = cluster.wait_for(TOPIC, number, "another leads", lambda part: part.leader_id in OTHERS)
            assert part.leader_epoch > epochs[number]
            cluster.wait_in_sync(TOPIC, number, *OTHERS)
        # Who is said to lead may not have heard of it yet, and tell no end.
        before: dict[int, int] = {}

        def tell_their_ends() -> bool:
            before.update({number: end_offset(cluster, number) for number in range(PARTITIONS)})
            return min(before.values()) >= 0

        eventually(tell_their_ends, "every partition tells its end", cluster.brokers.values())
        eventually(
            lambda: all(end_offset(cluster, number) > before[number] for number in before),
            "every partition takes records",
            cluster.brokers.values(),
        )
    assert load.errors == []
    for number in in_folder(sound):
        part = cluster.wait_in_sync(TOPIC, number, *EVERYONE)
        assert (part.leader_id, part.leader_epoch) == (1, epochs[number]), "nothing has happened to it"
    written = read_all(cluster.bootstrap, TOPIC, PARTITIONS)
    assert sorted(written) == sorted(load.acknowledged) == list(range(len(written)))
    assert first.log.count("a data folder is offline") == 1

    # The disk is replaced, or was away for a moment: what the folder has of its own is cut and fetched.
    first.restart()
    for number in range(PARTITIONS):
        cluster.wait_in_sync(TOPIC, number, *EVERYONE)
    for other in OTHERS:
        cluster.brokers[other].stop()
    for number in range(PARTITIONS):
        cluster.wait_led(TOPIC, number, 1)
    assert sorted(read_all(first.bootstrap, TOPIC, PARTITIONS)) == sorted(written)
    for broker in cluster.brokers.values():
        assert "Traceback" not in broker.log
