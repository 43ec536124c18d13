"""Groups whose coordinator dies, moves or restarts: real brokers, foreign clients, and a bare socket.

What must survive: the generation (members that heartbeat in time are not made to rebalance), who holds what,
fencing, every commit that was acknowledged, and offsets in open transactions.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from kio.schema.errors import ErrorCode

from millrace.broker.protocol.frames import Api
from tests.conftest import BrokerFactory
from tests.raw_client import RawClient
from tests.servers import BrokerProcess
from tests.waiting import patience, until

pytestmark = pytest.mark.java

PATIENCE_S = 120.0
PARTITIONS = 4
SESSION_MS = 45_000
SHORT_SESSION_MS = 5_000
ELSEWHERE = {
    ErrorCode.coordinator_not_available,
    ErrorCode.coordinator_load_in_progress,
    ErrorCode.not_coordinator,
}
AWAY = (OSError, EOFError)


def eventually(probe: Callable[[], Any], what: str) -> Any:
    """The first true value of `probe`; a broker that is just away is no answer."""
    return until(probe, what, within_s=PATIENCE_S, retry=AWAY)


class Cluster:
    """One broker or three; coordinators' topics (by default) and topic `t` with four partitions on all of
    them."""

    def __init__(self, factory: BrokerFactory, size: int, **more: Any) -> None:
        settings = {
            **more,
            "transaction_state_log_num_partitions": 3,
            "default_replication_factor": size,
            "min_insync_replicas": min(size, 2),
            "replica_lag_time_max_ms": 2_000,
            "group_min_session_timeout_ms": 100,
        }
        first = factory(broker_id=1, **settings)
        others = [
            factory(broker_id=number, zookeeper_path=first.zookeeper, start=False, **settings)
            for number in range(2, size + 1)
        ]
        for other in others:
            other.launch()
        for other in others:
            other.wait_until_serving()
        self.brokers = {broker.id: broker for broker in (first, *others)}
        eventually(self._know_each_other, "all brokers know each other")
        wanted = {"name": "t", "num_partitions": PARTITIONS, "replication_factor": size}
        created = self.ask(Api.CREATE_TOPICS, 5, topics=[wanted], timeout=30_000)
        assert created.topics[0].error_code is ErrorCode.none, created

    def _know_each_other(self) -> bool:
        """A broker makes coordinators' topics with as many replicas as it knows brokers."""
        for broker in self.brokers.values():
            with RawClient(broker.port) as client:
                if len(client.ask(Api.METADATA, 9, topics=[]).brokers) < len(self.brokers):
                    return False
        return True

    @property
    def bootstrap(self) -> str:
        return ",".join(broker.bootstrap for broker in self.brokers.values())

    @property
    def alive(self) -> list[BrokerProcess]:
        return [b for b in self.brokers.values() if b.process is not None and b.process.poll() is None]

    def ask(self, api: Api, version: int, **fields: Any) -> Any:
        with RawClient(self.alive[0].port) as client:
            return client.ask(api, version, **fields)

    def coordinator(self, key: str, kind: int = 0) -> BrokerProcess:
        """The living broker that coordinates a group, or a transactional id (kind 1)."""

        def found() -> BrokerProcess | None:
            answer = self.ask(Api.FIND_COORDINATOR, 3, key=key, key_type=kind)
            broker = self.brokers.get(answer.node_id)
            return broker if broker in self.alive else None

        return eventually(found, f"a coordinator of {key}")

    def ask_group(
        self, group: str, api: Api, version: int, *, code: Callable[[Any], Any], **fields: Any
    ) -> Any:
        """Ask the group's coordinator, again while it moves; `code` finds the error in an answer."""

        def settled() -> Any:
            with RawClient(self.coordinator(group).port) as client:
                answer = client.ask(api, version, **fields)
            return None if code(answer) in ELSEWHERE else answer

        return eventually(settled, f"{api.name} of {group}")

    def described(self, group: str) -> Any:
        answer = self.ask_group(
            group, Api.DESCRIBE_GROUPS, 5, code=lambda a: a.groups[0].error_code, groups=[group]
        )
        return answer.groups[0]

    def committed(self, group: str, partition: int = 0, *, stable: bool = False) -> int | ErrorCode:
        answer = self.ask_group(
            group,
            Api.OFFSET_FETCH,
            7,
            code=lambda a: a.error_code,
            group_id=group,
            topics=[{"name": "t", "partition_indexes": [partition]}],
            require_stable=stable,
        )
        (found,) = answer.topics[0].partitions
        return found.committed_offset if found.error_code is ErrorCode.none else found.error_code

    def in_sync(self) -> bool:
        """Every partition of every topic has a leader and all its replicas in sync."""
        topics = self.ask(Api.METADATA, 9, topics=None).topics
        return all(
            part.leader_id >= 0 and len(part.isr_nodes) == len(part.replica_nodes)
            for topic in topics
            for part in topic.partitions
        )

    def produce(self, numbers: range) -> None:
        producer = Producer({"bootstrap.servers": self.bootstrap, "enable.idempotence": True})
        for number in numbers:
            producer.produce("t", b"%d" % number, partition=number % PARTITIONS)
        assert producer.flush(patience(PATIENCE_S)) == 0


@pytest.fixture
def cluster(broker_factory) -> Cluster:
    return Cluster(broker_factory, 3)


# -- members of a foreign library ---------------------------------------------------------------------


class Reader:
    """A confluent-kafka consumer in a thread of its own; `events` counts what rebalances did to it."""

    def __init__(self, cluster: Cluster, group: str, instance: str | None = None, **settings: Any) -> None:
        self.seen: Counter[int] = Counter()
        self.held: set[int] = set()
        self.events: Counter[str] = Counter()
        self.failure: str | None = None
        self._settings = {
            "bootstrap.servers": cluster.bootstrap,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "auto.commit.interval.ms": 200,
            "session.timeout.ms": 30_000,
            "heartbeat.interval.ms": 500,
            "reconnect.backoff.max.ms": 500,
            **({"group.instance.id": instance} if instance else {}),
            **settings,
        }
        self._incremental = settings.get("partition.assignment.strategy") == "cooperative-sticky"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        consumer = Consumer(self._settings)
        consumer.subscribe(["t"], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost)
        while not self._ended.is_set():
            message = consumer.poll(0.1)
            if message is None:
                continue
            if message.error() is None:
                self.seen[int(message.value())] += 1
            elif message.error().fatal():
                self.failure = str(message.error())
                break
        consumer.close()

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        numbers = {each.partition for each in partitions}
        self.held = self.held | numbers if self._incremental else numbers
        self.events["assigned"] += 1

    def _revoked(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self.held = self.held - {each.partition for each in partitions}
        self.events["revoked"] += 1

    def _lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self.held = self.held - {each.partition for each in partitions}
        self.events["lost"] += 1

    def close(self) -> None:
        """A dynamic member leaves the group by this, a static one does not."""
        self._ended.set()
        self._thread.join(patience(PATIENCE_S))


class Readers:
    """All readers of a test, closed at its end."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.of: dict[str, list[Reader]] = {}

    def join(self, group: str, **settings: Any) -> Reader:
        reader = Reader(self._cluster, group, **settings)
        self.of.setdefault(group, []).append(reader)
        return reader

    def close(self, group: str, reader: Reader) -> None:
        self.of[group].remove(reader)
        reader.close()

    def close_all(self) -> None:
        for readers in self.of.values():
            for reader in readers:
                reader.close()

    def all(self) -> list[Reader]:
        return [reader for readers in self.of.values() for reader in readers]

    def wait_for_shares(self) -> None:
        def shared() -> bool:
            return all(
                sorted(number for reader in readers for number in reader.held) == list(range(PARTITIONS))
                and all(reader.held for reader in readers)
                for readers in self.of.values()
            )

        eventually(shared, f"every group shares {PARTITIONS} partitions among its members")

    def wait_for(self, numbers: range) -> None:
        for group, readers in self.of.items():
            eventually(
                lambda readers=readers: set(numbers) <= set().union(*(reader.seen for reader in readers)),
                f"the records {numbers} at the members of {group}",
            )
        assert [reader.failure for reader in self.all() if reader.failure] == []

    def shares(self) -> dict[str, list[set[int]]]:
        return {group: [set(reader.held) for reader in readers] for group, readers in self.of.items()}

    def events(self) -> dict[str, list[Counter[str]]]:
        return {group: [Counter(reader.events) for reader in readers] for group, readers in self.of.items()}


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


# -- members on a bare socket -------------------------------------------------------------------------


class Member:
    """A member that does nothing by itself. Every request goes to whoever coordinates the group now."""

    def __init__(
        self, cluster: Cluster, group: str, instance: str | None = None, session_ms: int = SESSION_MS
    ) -> None:
        self.cluster, self.group, self.instance, self.session_ms = cluster, group, instance, session_ms
        self.id, self.generation = "", -1

    def join(self) -> Any:
        fields = {
            "group_id": self.group,
            "session_timeout": self.session_ms,
            "rebalance_timeout": self.session_ms,
            "group_instance_id": self.instance,
            "protocol_type": "consumer",
            "protocols": [{"name": "range", "metadata": bytes.fromhex("0001 00000001 0001 74 ffffffff")}],
        }
        joined = self._ask(Api.JOIN_GROUP, 9, **fields, member_id=self.id)
        if joined.error_code is ErrorCode.member_id_required:
            joined = self._ask(Api.JOIN_GROUP, 9, **fields, member_id=joined.member_id)
        self.id, self.generation = joined.member_id, joined.generation_id
        return joined

    def sync(self, **assignments: bytes) -> bytes:
        synced = self._ask(
            Api.SYNC_GROUP,
            5,
            group_id=self.group,
            generation_id=self.generation,
            member_id=self.id,
            group_instance_id=self.instance,
            protocol_type="consumer",
            protocol_name="range",
            assignments=[{"member_id": key, "assignment": value} for key, value in assignments.items()],
        )
        assert synced.error_code is ErrorCode.none, synced
        return synced.assignment

    def heartbeat(self, **changes: Any) -> ErrorCode:
        fields = {
            "group_id": self.group,
            "generation_id": self.generation,
            "member_id": self.id,
            "group_instance_id": self.instance,
        }
        return self._ask(Api.HEARTBEAT, 4, **fields | changes).error_code

    def commit(self, offset: int, partition: int = 0, **changes: Any) -> ErrorCode:
        part = {"partition_index": partition, "committed_offset": offset, "committed_leader_epoch": -1}
        fields = {
            "group_id": self.group,
            "generation_id_or_member_epoch": self.generation,
            "member_id": self.id,
            "group_instance_id": self.instance,
            "topics": [{"name": "t", "partitions": [part]}],
        }
        answer = self.cluster.ask_group(
            self.group,
            Api.OFFSET_COMMIT,
            8,
            code=lambda a: a.topics[0].partitions[0].error_code,
            **fields | changes,
        )
        return answer.topics[0].partitions[0].error_code

    def _ask(self, api: Api, version: int, **fields: Any) -> Any:
        return self.cluster.ask_group(self.group, api, version, code=lambda a: a.error_code, **fields)


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
