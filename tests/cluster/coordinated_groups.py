"""Groups of real brokers whose coordinators die: the cluster, members of a foreign library, and members on a
bare socket."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition
from kio.schema.errors import ErrorCode

from millrace.broker.protocol.frames import Api
from tests.conftest import BrokerFactory
from tests.raw_client import RawClient
from tests.servers import BrokerProcess
from tests.waiting import patience, until

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
