"""A cluster of real brokers for tests: questions to it, a load on it, and what it holds."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition

from millrace.broker.errors import ElectionNotNeeded, TopicAlreadyExists
from millrace.broker.protocol.frames import Api
from tests.conftest import BrokerFactory
from tests.raw_client import RawClient
from tests.servers import BrokerProcess
from tests.waiting import Deadline, patience, until

DEADLINE_S = 120.0
TIMEOUT_MS = 60_000


def eventually(probe: Callable[[], Any], what: str, logs_of: Iterable[BrokerProcess] = ()) -> Any:
    """The first true value of `probe`."""
    return until(probe, what, within_s=DEADLINE_S, logs_of=logs_of)


class ThreeBrokers:
    """A cluster of brokers 1, 2, ... and questions to it."""

    def __init__(self, make: BrokerFactory, count: int = 3, zookeeper_path: str | None = None) -> None:
        self._make = make
        self.brokers: dict[int, BrokerProcess] = {}
        self._zookeeper_path = zookeeper_path
        for _ in range(count):
            self.add(start=False)
        for broker in self.brokers.values():
            broker.launch()
        for broker in self.brokers.values():
            broker.wait_until_serving()
        self.wait_for_brokers(*self.brokers)

    def add(self, *, start: bool = True, **settings: object) -> BrokerProcess:
        number = len(self.brokers) + 1
        broker = self._make(
            zookeeper_path=self._zookeeper_path,
            broker_id=number,
            start=start,
            replica_lag_time_max_ms=5_000,
            leader_imbalance_check_interval_seconds=3_600,
            **settings,
        )
        self._zookeeper_path = broker.zookeeper
        self.brokers[number] = broker
        return broker

    @property
    def bootstrap(self) -> str:
        return ",".join(broker.bootstrap for broker in self.brokers.values())

    def running(self) -> BrokerProcess:
        return next(
            broker
            for broker in self.brokers.values()
            if broker.process is not None and broker.process.poll() is None
        )

    def ask(self, api: int, version: int, *, at: int | None = None, **fields: Any) -> Any:
        broker = self.running() if at is None else self.brokers[at]
        with RawClient(broker.port) as client:
            return client.ask(api, version, **fields)

    def metadata(self, *topics: str, at: int | None = None) -> Any:
        names = [{"name": name} for name in topics]
        return self.ask(Api.METADATA, 12, at=at, topics=names, allow_auto_topic_creation=False)

    def wait_for_brokers(self, *ids: int) -> None:
        def seen() -> bool:
            return all(
                {known.node_id for known in self.metadata(at=number).brokers} == set(ids) for number in ids
            )

        eventually(seen, f"brokers {ids} know each other", self.brokers.values())

    def create(self, name: str, partitions: int = 1, factor: int = 3, **configs: str) -> None:
        answer = self._create(name, partitions, factor, configs)
        assert answer.error_code == 0, answer

    def create_again(self, name: str, partitions: int = 1, factor: int = 3, **configs: str) -> None:
        """Ask until the topic is there: the broker that is asked may just be losing its session."""

        def is_there() -> bool:
            code = self._create(name, partitions, factor, configs).error_code
            return code in (0, TopicAlreadyExists.code)

        eventually(is_there, f"{name} is created", self.brokers.values())

    def _create(self, name: str, partitions: int, factor: int, configs: Mapping[str, str]) -> Any:
        topic = {
            "name": name,
            "num_partitions": partitions,
            "replication_factor": factor,
            "configs": [{"name": key.replace("_", "."), "value": value} for key, value in configs.items()],
        }
        return self.ask(Api.CREATE_TOPICS, 7, topics=[topic], timeout=TIMEOUT_MS).topics[0]

    def create_on(self, name: str, *assignment: tuple[int, ...], **configs: str) -> None:
        topic = {
            "name": name,
            "num_partitions": -1,
            "replication_factor": -1,
            "assignments": [
                {"partition_index": number, "broker_ids": replicas}
                for number, replicas in enumerate(assignment)
            ],
            "configs": [{"name": key.replace("_", "."), "value": value} for key, value in configs.items()],
        }
        answer = self.ask(Api.CREATE_TOPICS, 7, topics=[topic], timeout=TIMEOUT_MS)
        assert answer.topics[0].error_code == 0, answer.topics[0]

    def partitions(self, topic: str, at: int | None = None) -> dict[int, Any]:
        parts = self.metadata(topic, at=at).topics[0].partitions
        return {int(part.partition_index): part for part in parts}

    def wait_for(self, topic: str, number: int, what: str, holds: Callable[[Any], bool]) -> Any:
        def found() -> Any:
            part = self.partitions(topic).get(number)
            return part if part is not None and holds(part) else None

        return eventually(found, f"{topic}-{number}: {what}", self.brokers.values())

    def wait_in_sync(self, topic: str, number: int, *members: int) -> Any:
        return self.wait_for(
            topic, number, f"{members} are in sync", lambda part: set(part.isr_nodes) == set(members)
        )

    def wait_led(self, topic: str, number: int, leader: int) -> Any:
        return self.wait_for(
            topic, number, f"{leader} leads", lambda part: part.leader_id == leader and not part.error_code
        )

    def elect(self, topic: str, *numbers: int, kind: int = 0, at: int | None = None) -> dict[int, int]:
        answer = self.ask(
            Api.ELECT_LEADERS,
            2,
            at=at,
            election_type=kind,
            topic_partitions=[{"topic": topic, "partitions": numbers}],
            timeout=TIMEOUT_MS,
        )
        assert answer.error_code == 0
        return {
            int(part.partition_id): int(part.error_code)
            for result in answer.replica_election_results
            for part in result.partition_result
        }

    def elect_in_the_end(self, topic: str, *numbers: int, kind: int = 0, at: int | None = None) -> None:
        """The controller may hear of what the election depends on a moment later than who was asked."""
        eventually(
            lambda: (
                set(self.elect(topic, *numbers, kind=kind, at=at).values()) <= {0, ElectionNotNeeded.code}
            ),
            f"{topic}-{numbers}: leaders are elected",
            self.brokers.values(),
        )

    def reassign(self, topic: str, targets: dict[int, tuple[int, ...] | None]) -> dict[int, int]:
        wanted = [{"partition_index": number, "replicas": target} for number, target in targets.items()]
        answer = self.ask(
            Api.ALTER_PARTITION_REASSIGNMENTS,
            0,
            topics=[{"name": topic, "partitions": wanted}],
            timeout=TIMEOUT_MS,
        )
        parts = answer.responses[0].partitions
        return {int(part.partition_index): int(part.error_code) for part in parts}

    def moving(self) -> dict[tuple[str, int], tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
        answer = self.ask(Api.LIST_PARTITION_REASSIGNMENTS, 0, topics=None, timeout=TIMEOUT_MS)
        return {
            (str(topic.name), int(part.partition_index)): (
                tuple(part.replicas),
                tuple(part.adding_replicas),
                tuple(part.removing_replicas),
            )
            for topic in answer.topics
            for part in topic.partitions
        }


class Load:
    """A producer on a thread that writes numbered records until it is told to stop; it keeps what was
    acknowledged and every error that the application would have seen."""

    def __init__(self, bootstrap: str, topic: str, **config: Any) -> None:
        self.acknowledged: list[int] = []
        self.errors: list[KafkaError] = []
        self._topic = topic
        self._stop = threading.Event()
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "acks": "all",
                "linger.ms": 5,
                "retry.backoff.ms": 50,
                "message.timeout.ms": 120_000,
                **config,
            }
        )
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Load:
        self._thread.start()
        eventually(lambda: self.acknowledged, "the load is under way")
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        number = 0
        while not self._stop.is_set():
            self._producer.produce(self._topic, str(number).encode(), on_delivery=self._settled(number))
            number += 1
            self._producer.poll(0.002)
        assert self._producer.flush(patience(DEADLINE_S)) == 0

    def _settled(self, number: int) -> Callable[[KafkaError | None, Any], None]:
        def settled(error: KafkaError | None, _message: Any) -> None:
            if error is None:
                self.acknowledged.append(number)
            else:
                self.errors.append(error)

        return settled


def read_all(bootstrap: str, topic: str, partitions: int = 1) -> list[int]:
    """The numbers of every record, in order, from the start to where the topic ends now."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "r", "enable.partition.eof": True})
    consumer.assign([TopicPartition(topic, number, 0) for number in range(partitions)])
    numbers: list[int] = []
    ended = 0
    deadline = Deadline(lambda: f"the end of {topic}; {len(numbers)} records were read", within_s=DEADLINE_S)
    while ended < partitions:
        deadline.check()
        message = consumer.poll(0.5)
        if message is None:
            continue
        if message.error() is None:
            numbers.append(int(message.value()))
        elif message.error().code() == KafkaError._PARTITION_EOF:
            ended += 1
    consumer.close()
    return numbers


def millrace(*words: str, bootstrap: str, expect: int = 0) -> str:
    """What the command line says; it must end with `expect`."""
    command = [sys.executable, "-m", "millrace.deploy.cli", *words, "--bootstrap", bootstrap]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(120), check=False)
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


def produce_numbers(bootstrap: str, topic: str, count: int, partitions: int = 1, size: int = 1) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all", "linger.ms": 20})
    for number in range(count):
        producer.produce(topic, str(number).rjust(size, "0").encode(), partition=number % partitions)
        producer.poll(0)
    assert producer.flush(patience(DEADLINE_S)) == 0


def folders(broker: BrokerProcess, topic: str) -> list[str]:
    """Directories of a topic's partitions; what waits for its removal does not count."""
    return sorted(
        path.name for path in broker.data.glob(f"{topic}-*") if path.name[len(topic) + 1 :].isdigit()
    )


def throttle_of(cluster: ThreeBrokers, number: int, side: str = "follower") -> tuple[int, str]:
    """Source and value of the rate at which a broker may follow what moves."""
    name = f"{side}.replication.throttled.rate"
    resource = {"resource_type": 4, "resource_name": str(number), "configuration_keys": [name]}
    answer = cluster.ask(Api.DESCRIBE_CONFIGS, 4, at=number, resources=[resource])
    (found,) = answer.results[0].configs
    return int(found.config_source), found.value
