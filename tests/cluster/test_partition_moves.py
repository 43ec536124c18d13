"""Three real brokers: where replicas are placed, how they move, and what a broker may be told meanwhile."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer

from millrace.broker.errors import (
    InvalidReplicaAssignment,
    InvalidReplicationFactor,
    InvalidRequest,
    NoReassignmentInProgress,
    UnknownTopicOrPartition,
)
from millrace.broker.protocol.frames import Api
from tests.cluster.three_brokers import (
    TIMEOUT_MS,
    Load,
    ThreeBrokers,
    eventually,
    folders,
    millrace,
    produce_numbers,
    read_all,
    throttle_of,
)
from tests.conftest import BrokerFactory
from tests.ports import free_port
from tests.servers import BrokerProcess

pytestmark = pytest.mark.java


@pytest.fixture
def three(broker_factory: BrokerFactory) -> ThreeBrokers:
    return ThreeBrokers(broker_factory)


def test_topic_moves_to_other_brokers_with_its_data(three: ThreeBrokers, tmp_path: Path) -> None:
    fourth = three.add()
    three.wait_for_brokers(1, 2, 3, 4)
    three.create_on("t", (1, 2), (2, 3), (3, 1))
    for number, members in enumerate(((1, 2), (2, 3), (3, 1))):
        three.wait_in_sync("t", number, *members)
    produce_numbers(three.bootstrap, "t", 3_000, partitions=3, size=200)
    assert folders(fourth, "t") == []

    said = millrace("topics", "reassign", "t", "--brokers", "3,4", "--dry-run", bootstrap=three.bootstrap)
    assert "ADDING" in said
    assert three.moving() == {}
    plan = millrace(
        "topics", "reassign", "t", "--brokers", "3,4", "--dry-run", "-o", "json", bootstrap=three.bootstrap
    )
    (tmp_path / "plan.json").write_text(plan)
    assert {len(one["replicas"]) for one in json.loads(plan)["partitions"]} == {2}

    said = millrace(
        *("topics", "reassign", "--plan", str(tmp_path / "plan.json")),
        *("--throttle", "50000000", "--wait"),
        bootstrap=three.bootstrap,
    )
    assert "moved 3 partitions" in said
    for number in range(3):
        three.wait_for(
            "t",
            number,
            "is on brokers 3 and 4",
            lambda part: (
                set(part.replica_nodes) == set(part.isr_nodes) == {3, 4} and part.leader_id in (3, 4)
            ),
        )
    assert sorted(part.replica_nodes[0] for part in three.partitions("t").values()) in ([3, 3, 4], [3, 4, 4])
    for number in (1, 2):
        eventually(lambda number=number: folders(three.brokers[number], "t") == [], "the old logs are gone")
    assert folders(fourth, "t") == ["t-0", "t-1", "t-2"]
    assert sorted(read_all(three.bootstrap, "t", 3)) == list(range(3_000))
    # The throttle is gone, here and there.
    topic = three.ask(
        Api.DESCRIBE_CONFIGS,
        4,
        resources=[{"resource_type": 2, "resource_name": "t", "configuration_keys": None}],
    )
    assert not [one.name for one in topic.results[0].configs if int(one.config_source) == 1]
    eventually(lambda: throttle_of(three, 4) == (5, str(2**63 - 1)), "no rate is left")
    said = millrace("topics", "reassign", "t", "--brokers", "3,4", bootstrap=three.bootstrap)
    assert "every partition is where it should be" in said


def test_throttled_move_is_slow_can_be_listed_and_called_off(three: ThreeBrokers) -> None:
    three.create_on("t", (1,))
    produce_numbers(three.bootstrap, "t", 10_000, size=1_000)
    said = millrace(
        *("topics", "reassign", "t", "--brokers", "2,3", "-r", "2", "--throttle", "300000"),
        bootstrap=three.bootstrap,
    )
    assert "the throttle stays until" in said
    eventually(lambda: throttle_of(three, 2)[0] == 2, "broker 2 has its rate")
    held, begun = held_by(three.brokers[2], "t"), time.monotonic()
    replicas, adding, removing = three.moving()["t", 0]
    assert (set(replicas), set(adding), removing) == ({1, 2, 3}, {2, 3}, (1,))
    assert "2,3" in millrace("topics", "reassign", "--list", bootstrap=three.bootstrap)
    # 10 MB at 300 KB/s take 33 s, and twice that for two from one leader: it is still under way, and serves.
    produce_numbers(three.bootstrap, "t", 1)
    assert three.partitions("t")[0].leader_id == 1
    assert three.reassign("t", {0: (1, 1)}) == {0: InvalidReplicaAssignment.code}
    assert three.reassign("t", {0: (1, 9), 7: (1,)}) == {
        0: InvalidReplicaAssignment.code,
        7: UnknownTopicOrPartition.code,
    }
    eventually(lambda: held_by(three.brokers[2], "t") > held, "some of it comes")
    # A bucket may hold a second's worth, and an answer of `replica.fetch.max.bytes` may overdraw it.
    most = 300_000 * (time.monotonic() - begun + 2) + (1 << 20)
    assert held_by(three.brokers[2], "t") - held <= most < 10_000_000
    assert "called off 1 partition" in millrace("topics", "reassign", "--cancel", bootstrap=three.bootstrap)
    eventually(lambda: three.moving() == {}, "nothing moves any more")
    three.wait_for(
        "t",
        0,
        "is where it was",
        lambda part: (tuple(part.replica_nodes), part.leader_id, tuple(part.isr_nodes)) == ((1,), 1, (1,)),
    )
    assert three.reassign("t", {0: None}) == {0: NoReassignmentInProgress.code}
    eventually(lambda: throttle_of(three, 2)[0] == 5, "the rate is gone")
    for number in (2, 3):
        eventually(lambda number=number: folders(three.brokers[number], "t") == [], "no half of a log stays")
    assert len(read_all(three.bootstrap, "t")) == 10_001


def test_leader_gives_no_more_than_its_rate_to_all_that_move_from_it(three: ThreeBrokers) -> None:
    """Two new replicas, neither of which has a rate of its own."""
    three.create_on("t", (1,))
    produce_numbers(three.bootstrap, "t", 3_000, size=1_000)
    size, rate = held_by(three.brokers[1], "t"), 1_000_000
    limits = {4: ("1", "rate", str(rate)), 2: ("t", "replicas", "0:1")}
    resources = [
        {
            "resource_type": kind,
            "resource_name": name,
            "configs": [
                {"name": f"leader.replication.throttled.{what}", "config_operation": 0, "value": value}
            ],
        }
        for kind, (name, what, value) in limits.items()
    ]
    answer = three.ask(Api.INCREMENTAL_ALTER_CONFIGS, 1, resources=resources)
    assert [int(response.error_code) for response in answer.responses] == [0, 0]
    eventually(lambda: throttle_of(three, 1, "leader")[1] == str(rate), "broker 1 has its rate")
    begun = time.monotonic()
    assert three.reassign("t", {0: (1, 2, 3)}) == {0: 0}
    three.wait_in_sync("t", 0, 1, 2, 3)
    # Waited for was all but a second's worth, and what the last answer overdrew (`replica.fetch.max.bytes`).
    assert time.monotonic() - begun > (2 * size - (1 << 20)) / rate - 1
    produce_numbers(three.bootstrap, "t", 1_000, size=1_000)
    assert len(read_all(three.bootstrap, "t")) == 4_000


def held_by(broker: BrokerProcess, topic: str) -> int:
    """Bytes of partition 0's log on this broker's disk."""
    return sum(path.stat().st_size for path in (broker.data / f"{topic}-0").glob("*.log"))


def test_move_survives_the_controllers_death(three: ThreeBrokers) -> None:
    controller = three.metadata().controller_id
    others = [number for number in three.brokers if number != controller]
    three.create_on("t", (others[0],))
    produce_numbers(three.bootstrap, "t", 2_000, size=1_000)
    follower = {"name": "follower.replication.throttled.rate", "config_operation": 0, "value": "20000"}
    throttled = {"name": "follower.replication.throttled.replicas", "config_operation": 0, "value": "*"}
    answer = three.ask(
        Api.INCREMENTAL_ALTER_CONFIGS,
        1,
        resources=[
            {"resource_type": 4, "resource_name": "", "configs": [follower]},
            {"resource_type": 2, "resource_name": "t", "configs": [throttled]},
        ],
    )
    assert [int(response.error_code) for response in answer.responses] == [0, 0]
    assert three.reassign("t", {0: (others[1],)}) == {0: 0}
    three.brokers[controller].kill()
    eventually(lambda: three.metadata(at=others[0]).controller_id in others, "another one is in office")
    assert three.ask(
        Api.LIST_PARTITION_REASSIGNMENTS, 0, at=others[0], topics=None, timeout=TIMEOUT_MS
    ).topics, "it is still under way: 2 MB at 20 kB/s"
    quick = {"resource_type": 4, "resource_name": "", "configs": [follower | {"value": "100000000"}]}
    answer = three.ask(Api.INCREMENTAL_ALTER_CONFIGS, 1, at=others[0], resources=[quick])
    assert [int(response.error_code) for response in answer.responses] == [0]
    millrace("topics", "reassign", "t", "--wait", bootstrap=three.brokers[others[0]].bootstrap)
    eventually(
        lambda: (
            [
                (part.leader_id, tuple(part.replica_nodes))
                for part in three.partitions("t", at=others[0]).values()
            ]
            == [(others[1], (others[1],))]
        ),
        "it is where it should be",
    )
    assert len(read_all(three.bootstrap, "t")) == 2_000


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_broker_that_returns_at_another_address_is_followed(three: ThreeBrokers, host: str) -> None:
    three.create_on("t", (1, 2), (2, 1))
    three.wait_in_sync("t", 0, 1, 2)
    # A client that asks every five minutes may go on at the old address for as long as that.
    often = {"topic.metadata.refresh.interval.ms": 1_000, "reconnect.backoff.max.ms": 1_000}
    consumer = Consumer(
        {
            "bootstrap.servers": three.bootstrap,
            "group.id": "g",
            "auto.offset.reset": "earliest",
            **often,
        }
    )
    consumer.subscribe(["t"])
    seen: list[int] = []

    def consume() -> int:
        messages = consumer.consume(1_000, 0.1)
        seen.extend(int(message.value()) for message in messages if message.error() is None)
        return len(seen)

    with Load(three.bootstrap, "t", **often) as load:
        eventually(lambda: consume() > 100, "the consumer reads")
        moved = three.brokers[1]
        moved.stop()
        moved.port, moved.advertised_host = free_port(), host
        moved.start()
        three.wait_for_brokers(1, 2, 3)
        three.wait_in_sync("t", 0, 1, 2)
        three.elect_in_the_end("t", 0)
        three.wait_led("t", 0, 1)
        eventually(
            lambda: (host, moved.port) in {(known.host, known.port) for known in three.metadata().brokers},
            "its new address is told",
        )
        written = len(load.acknowledged)
        eventually(lambda: len(load.acknowledged) > written + 500, "the producer found it")
    assert load.errors == []
    eventually(lambda: consume() >= len(load.acknowledged), "the consumer found it")
    consumer.close()
    assert sorted(seen) == sorted(load.acknowledged)


def test_added_broker_takes_its_share_of_what_is_new(three: ThreeBrokers) -> None:
    three.create("old", 8, 2)
    three.add()
    three.wait_for_brokers(1, 2, 3, 4)
    three.create("new", 8, 2)
    held = [broker for part in three.partitions("new").values() for broker in part.replica_nodes]
    assert sorted(held.count(broker) for broker in (1, 2, 3, 4)) == [4, 4, 4, 4]
    assert 4 not in {broker for part in three.partitions("old").values() for broker in part.replica_nodes}
    answer = three.ask(
        Api.CREATE_PARTITIONS,
        3,
        topics=[{"name": "old", "count": 12, "assignments": None}],
        timeout=TIMEOUT_MS,
    )
    assert answer.results[0].error_code == 0
    added = {number: part for number, part in three.partitions("old").items() if number >= 8}
    assert all(len(part.replica_nodes) == 2 for part in added.values())
    assert 4 in {broker for part in added.values() for broker in part.replica_nodes}


def test_racks_are_spread_over_and_shown(broker_factory: BrokerFactory) -> None:
    racks = {1: "a", 2: "a", 3: "b"}
    path = None
    cluster = ThreeBrokers(broker_factory, 0)
    for number, rack in racks.items():
        broker = broker_factory(zookeeper_path=path, broker_id=number, start=False)
        path = broker.zookeeper
        broker.rack = rack
        cluster.brokers[number] = broker.start()
    cluster.wait_for_brokers(1, 2, 3)
    cluster.create("t", 12, 2)
    for part in cluster.partitions("t").values():
        assert {racks[broker] for broker in part.replica_nodes} == {"a", "b"}
    assert {known.node_id: known.rack for known in cluster.metadata().brokers} == racks
    described = cluster.ask(Api.DESCRIBE_CLUSTER, 1, endpoint_type=1)
    assert {known.broker_id: known.rack for known in described.brokers} == racks


def test_impossible_placements_are_refused(three: ThreeBrokers) -> None:
    def create(**topic: Any) -> int:
        asked = {"name": "t", "num_partitions": -1, "replication_factor": -1, **topic}
        answer = three.ask(Api.CREATE_TOPICS, 7, topics=[asked], timeout=TIMEOUT_MS, validate_only=True)
        return int(answer.topics[0].error_code)

    def on(*assignment: tuple[int, ...]) -> list[dict[str, Any]]:
        return [{"partition_index": number, "broker_ids": ids} for number, ids in enumerate(assignment)]

    assert create(num_partitions=1, replication_factor=4) == InvalidReplicationFactor.code
    assert create(num_partitions=1, replication_factor=0) == InvalidReplicationFactor.code
    assert create(assignments=on((1, 1))) == InvalidReplicaAssignment.code
    assert create(assignments=on((1, 7))) == InvalidReplicaAssignment.code
    assert create(assignments=on((1, 2), (3,))) == InvalidReplicaAssignment.code
    assert create(assignments=on((1, 2), (3, 1))) == 0


def test_settings_of_running_brokers(three: ThreeBrokers) -> None:
    def alter(name: str, setting: str, value: str) -> tuple[int, str]:
        config = {"name": setting, "config_operation": 0, "value": value}
        resource = {"resource_type": 4, "resource_name": name, "configs": [config]}
        answer = three.ask(Api.INCREMENTAL_ALTER_CONFIGS, 1, resources=[resource])
        return int(answer.responses[0].error_code), answer.responses[0].error_message or ""

    rate = "follower.replication.throttled.rate"
    assert alter("", rate, "500") == (0, "")
    assert alter("2", rate, "700") == (0, "")
    eventually(lambda: throttle_of(three, 3) == (3, "500"), "broker 3 has what all have")
    eventually(lambda: throttle_of(three, 2) == (2, "700"), "broker 2 has its own")
    code, said = alter("2", "num.partitions", "9")
    assert code == InvalidRequest.code
    assert "cannot be changed while a broker runs: num.partitions" in said
    assert alter("2", rate, "quick")[0] == InvalidRequest.code


def test_topics_are_described_page_by_page(three: ThreeBrokers) -> None:
    three.create("a", 3, 1)
    three.create("b", 4, 2)
    seen: list[tuple[str, int]] = []
    cursor = None
    pages = 0
    while True:
        page = three.ask(
            Api.DESCRIBE_TOPIC_PARTITIONS, 0, topics=[], response_partition_limit=2, cursor=cursor
        )
        pages += 1
        for topic in page.topics:
            assert topic.error_code == 0
            seen += [(str(topic.name), int(part.partition_index)) for part in topic.partitions]
        if page.next_cursor is None:
            break
        cursor = {
            "topic_name": page.next_cursor.topic_name,
            "partition_index": page.next_cursor.partition_index,
        }
    assert seen == [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1), ("b", 2), ("b", 3)]
    assert pages == 4
    unknown = three.ask(Api.DESCRIBE_TOPIC_PARTITIONS, 0, topics=[{"name": "c"}], response_partition_limit=2)
    assert unknown.topics[0].error_code == UnknownTopicOrPartition.code
