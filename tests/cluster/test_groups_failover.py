"""Groups whose coordinator dies, moves or restarts: real brokers, foreign clients, and a bare socket.

What must survive: the generation (members that heartbeat in time are not made to rebalance), who holds what,
fencing, every commit that was acknowledged, and offsets in open transactions.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from kio.schema.errors import ErrorCode

from millrace.broker.protocol.frames import Api
from tests.cluster.coordinated_groups import (
    AWAY,
    PARTITIONS,
    PATIENCE_S,
    SHORT_SESSION_MS,
    Cluster,
    Member,
    Readers,
    eventually,
)
from tests.raw_client import RawClient
from tests.servers import BrokerProcess
from tests.waiting import patience

pytestmark = pytest.mark.java


@pytest.fixture
def cluster(broker_factory) -> Cluster:
    return Cluster(broker_factory, 3)


@pytest.fixture
def readers(cluster) -> Iterator[Readers]:
    readers = Readers(cluster)
    try:
        yield readers
    finally:
        readers.close_all()


EAGER = {"partition.assignment.strategy": "range"}
COOPERATIVE = {"partition.assignment.strategy": "cooperative-sticky"}


def test_groups_of_every_kind_live_through_the_death_of_their_coordinators(cluster, readers):
    """Eager, cooperative and static members: no needless rebalance, then joins, leaves and restarts."""
    for kind, settings in (("eager", EAGER), ("cooperative", COOPERATIVE)):
        readers.join(kind, **settings)
        readers.join(kind, **settings)
    readers.join("static", instance="one", **EAGER)
    two = readers.join("static", instance="two", **EAGER)
    readers.wait_for_shares()
    cluster.produce(range(100))
    readers.wait_for(range(100))
    groups = {group: {m.member_id for m in cluster.described(group).members} for group in readers.of}
    shares, events = readers.shares(), readers.events()
    (kept,) = cluster.ask(Api.METADATA, 9, topics=[{"name": "__consumer_offsets"}]).topics
    assert {len(part.replica_nodes) for part in kept.partitions} == {3}

    killed = []
    for group, how in (("cooperative", "kill"), ("static", "stop")):
        coordinator = cluster.coordinator(group)
        getattr(coordinator, how)()
        killed.append(coordinator.id)
        last = 100 * (len(killed) + 1)
        cluster.produce(range(last - 100, last))
        readers.wait_for(range(last - 100, last))
        for kind, members in groups.items():
            shown = cluster.described(kind)
            assert ({m.member_id for m in shown.members}, shown.group_state) == (members, "Stable"), kind
        assert readers.shares() == shares
        assert readers.events() == events, "nobody had to rebalance"
        coordinator.start()
        eventually(cluster.in_sync, "all replicas are in sync again")

    for kind, settings in (("eager", EAGER), ("cooperative", COOPERATIVE)):
        readers.join(kind, **settings)
    before = readers.events()["static"]
    readers.close("static", two)  # a static member says nothing when it goes
    readers.join("static", instance="two", **EAGER)
    readers.wait_for_shares()
    assert readers.shares()["static"] == shares["static"]
    assert readers.events()["static"][0] == before[0], "the other static member was left alone"
    for kind in ("eager", "cooperative"):
        readers.close(kind, readers.of[kind][0])
    readers.wait_for_shares()
    cluster.produce(range(300, 400))
    readers.wait_for(range(300, 400))
    for group in groups:
        eventually(
            lambda group=group: all(cluster.committed(group, number) == 100 for number in range(PARTITIONS)),
            f"everything is committed in {group}",
        )


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.long), 3])
def test_generation_assignment_and_fencing_survive_the_coordinator(broker_factory, size):
    cluster = Cluster(broker_factory, size)
    dynamic, static = Member(cluster, "g"), Member(cluster, "s", instance="host-1")
    for member in (dynamic, static):
        member.join()
        assert member.sync(**{member.id: b"all of it"}) == b"all of it"
        assert member.commit(11) is ErrorCode.none
    replaced = static.id
    static.id = ""
    assert static.join().generation_id == 1, "a static member comes back without a rebalance"
    assert static.sync() == b"all of it"

    for group in ("g", "s"):
        coordinator = cluster.coordinator(group)
        coordinator.kill()
        if size == 1:
            coordinator.start()

        for member in (dynamic, static):
            # Asked first: it waits for the groups to be loaded, where a heartbeat and a sync have answers of
            # their own before that.
            assert cluster.committed(member.group) == 11
            assert member.heartbeat() is ErrorCode.none, "the same generation"
            assert member.sync() == b"all of it"
            assert member.heartbeat(generation_id=0) is ErrorCode.illegal_generation
            assert member.commit(5, generation_id_or_member_epoch=0) is ErrorCode.illegal_generation
        assert static.heartbeat(member_id=replaced) is ErrorCode.fenced_instance_id
        assert static.commit(12, member_id=replaced) is ErrorCode.fenced_instance_id
        assert (
            dynamic.commit(5, member_id="", generation_id_or_member_epoch=-1) is ErrorCode.unknown_member_id
        )
        if size > 1:
            coordinator.start()
            eventually(cluster.in_sync, "all replicas are in sync again")

    old_id, static.id = static.id, ""
    joined = static.join()
    assert (joined.generation_id, static.id != old_id) == (1, True)
    assert static.sync() == b"all of it"
    assert static.heartbeat(member_id=old_id) is ErrorCode.fenced_instance_id


def test_member_that_does_not_come_back_to_the_next_coordinator_expires(cluster):
    stays, goes = (Member(cluster, "g", session_ms=SHORT_SESSION_MS) for _ in range(2))
    stays.join()
    stays.sync(**{stays.id: b"all"})
    threads = [threading.Thread(target=goes.join)]
    threads[0].start()
    eventually(
        lambda: stays.heartbeat() is ErrorCode.rebalance_in_progress, "the second member is waited for"
    )
    stays.join()
    threads[0].join(patience(PATIENCE_S))
    assert stays.sync(**{stays.id: b"half", goes.id: b"half"}) == goes.sync() == b"half"
    cluster.coordinator("g").kill()

    assert stays.heartbeat() is goes.heartbeat() is ErrorCode.none
    eventually(lambda: stays.heartbeat() is ErrorCode.rebalance_in_progress, "the silent member has expired")
    assert stays.join().generation_id == 3
    stays.sync(**{stays.id: b"all"})
    assert [member.member_id for member in cluster.described("g").members] == [stays.id]
    assert goes.heartbeat() is ErrorCode.unknown_member_id


def test_acknowledged_commits_survive_and_never_go_back(cluster):
    """Through two deaths of the coordinator while commits are made one after the other."""
    committer = Member(cluster, "g")
    acknowledged = attempted = 0
    for _ in range(2):
        coordinator = cluster.coordinator("g")
        client = RawClient(coordinator.port)
        killer = threading.Timer(0.1, coordinator.kill)
        count = 0
        part = {"partition_index": 0, "committed_leader_epoch": -1}
        try:
            while True:
                attempted += 1
                answer = client.ask(
                    Api.OFFSET_COMMIT,
                    8,
                    group_id="g",
                    generation_id_or_member_epoch=-1,
                    topics=[{"name": "t", "partitions": [part | {"committed_offset": attempted}]}],
                )
                if answer.topics[0].partitions[0].error_code is ErrorCode.none:
                    acknowledged = attempted
                    count += 1
                    if count == 20:
                        killer.start()
        except AWAY:
            killer.join()
        found = cluster.committed("g")
        assert acknowledged <= found <= attempted
        assert found > 0
        assert committer.commit(attempted + 1) is ErrorCode.none
        acknowledged = attempted = attempted + 1
        assert cluster.committed("g") == acknowledged
        coordinator.start()
        eventually(cluster.in_sync, "all replicas are in sync again")
    assert cluster.committed("g") == acknowledged


def test_offsets_of_open_transactions_survive_the_coordinator(cluster):
    """One is committed afterwards, one aborted; both stay what they are at the coordinator after that."""
    outcomes = {"to-commit": 50, "to-abort": 1}
    producers, consumers = {}, []
    for group in outcomes:
        assert Member(cluster, group).commit(1) is ErrorCode.none
        consumers.append(Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": group}))
        producers[group] = producer = Producer(
            {
                "bootstrap.servers": cluster.bootstrap,
                "transactional.id": f"tx-{group}",
                "transaction.timeout.ms": 120_000,
            }
        )
        producer.init_transactions(patience(PATIENCE_S))
        producer.begin_transaction()
        metadata = consumers[-1].consumer_group_metadata()
        producer.send_offsets_to_transaction([TopicPartition("t", 0, 50)], metadata, PATIENCE_S)

    def all_open() -> bool:
        return all(
            cluster.committed(group) == 1
            and cluster.committed(group, stable=True) is ErrorCode.unstable_offset_commit
            for group in outcomes
        )

    assert all_open()
    for group in outcomes:
        coordinator = cluster.coordinator(group)
        coordinator.kill()
        assert all_open()
        coordinator.start()
        eventually(cluster.in_sync, "all replicas are in sync again")
    producers["to-commit"].commit_transaction(patience(PATIENCE_S))
    producers["to-abort"].abort_transaction(patience(PATIENCE_S))
    for group, expected in outcomes.items():
        eventually(
            lambda group=group, expected=expected: cluster.committed(group, stable=True) == expected,
            f"the marker has decided about {group}",
        )
    cluster.coordinator("to-commit").kill()
    for group, expected in outcomes.items():
        # The last marker may not have been everywhere yet, and is written again then.
        eventually(
            lambda group=group: cluster.committed(group, stable=True) is not ErrorCode.unstable_offset_commit,
            f"the next coordinator has the marker for {group}",
        )
        assert cluster.committed(group, stable=True) == cluster.committed(group) == expected
    for consumer in consumers:
        consumer.close()


def test_groups_are_read_back_from_a_log_that_was_compacted(broker_factory):
    """By coordinators that were followers, and cleaned their own copies: the newest commits, no older ones,
    nothing of what was deleted, and who is a member of what generation."""
    cluster = Cluster(
        broker_factory,
        3,
        offsets_topic_num_partitions=1,
        offsets_topic_segment_bytes=4096,
        log_cleaner_backoff_ms=100,
        log_cleaner_min_cleanable_ratio=0.01,
        log_cleaner_delete_retention_ms=0,
    )
    member = Member(cluster, "lives")
    member.join()
    member.sync(**{member.id: b"all of it"})
    idle = {f"idle-{number}": Member(cluster, f"idle-{number}") for number in range(5)}
    for number in range(1, 101):
        assert member.commit(number) is ErrorCode.none
        assert member.commit(1000 + number, partition=1) is ErrorCode.none
        for group, each in idle.items():
            assert each.commit(number, partition=len(group) % PARTITIONS) is ErrorCode.none
    gone = cluster.ask_group(
        "idle-0",
        Api.DELETE_GROUPS,
        2,
        code=lambda a: a.results[0].error_code,
        groups_names=["idle-0"],
    )
    assert gone.results[0].error_code is ErrorCode.none
    assert member.commit(101) is ErrorCode.none

    for broker in cluster.brokers.values():
        eventually(
            lambda broker=broker: kept_of_offsets(broker) < 200, f"broker {broker.id} has compacted its copy"
        )
    for _ in range(2):
        coordinator = cluster.coordinator("lives")
        coordinator.kill()
        assert (cluster.committed("lives"), cluster.committed("lives", 1)) == (101, 1100)
        assert cluster.committed("idle-0", len("idle-0") % PARTITIONS) == -1
        for number in range(1, 5):
            assert cluster.committed(f"idle-{number}", len("idle-0") % PARTITIONS) == 100
        assert member.heartbeat() is ErrorCode.none, "the same generation"
        assert member.sync() == b"all of it"
        coordinator.start()
        eventually(cluster.in_sync, "all replicas are in sync again")
    listed = cluster.ask_group("lives", Api.LIST_GROUPS, 4, code=lambda a: a.error_code)
    assert {each.group_id for each in listed.groups} == {"lives", *sorted(idle)[1:]}


def kept_of_offsets(broker: BrokerProcess) -> int:
    """How many batches of the log of groups are in this broker's files; each commit was one."""
    folder = next(broker.data.rglob("__consumer_offsets-0"))
    count = 0
    for path in folder.glob("*.log"):
        with contextlib.suppress(FileNotFoundError):  # swapped meanwhile
            data = path.read_bytes()
            at = 0
            while at + 12 <= len(data):
                at += 12 + int.from_bytes(data[at + 8 : at + 12], "big")
                count += 1
    return count
