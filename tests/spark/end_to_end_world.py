"""Real clusters, a real mirror and foreign clients for the end-to-end tests of the audit.

`World` is started once for a module: `ewr` and `jfk` are sources, `agg` is the aggregate, each a broker of
ours (one ZooKeeper keeps them all) or Apache Kafka; one mirror carries everything. What is read here to know
the truth is read by librdkafka and by the words of EVENTS.md, never by the audit's own code. Everything that
waits polls with a deadline.
"""

from __future__ import annotations

import json
import re
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

from tests import waiting
from tests.cluster.mirror_process import MirrorProcess
from tests.kafka_fixture import JVM_OPTIONS, SAME_SETTINGS
from tests.peers.kafka import KafkaPeer
from tests.servers import BrokerProcess, ZooKeeper
from tests.waiting import Deadline, patience
from tests.watermarks import end_offset

T = TypeVar("T")
DEADLINE_S = 60.0
POLL_S = 0.03
SOURCES = ("ewr", "jfk")
AGGREGATE = "agg"
EVENTS_TOPIC = "millrace.audit"
POSITIONS_TOPIC = "millrace.positions.aggregate"
OF_ANY_TIME = {**SAME_SETTINGS, "log.message.timestamp.after.max.ms": str((1 << 63) - 1)}
"""Apache Kafka's since 4.0 refuses what comes from a clock more than an hour ahead."""


def until(condition: Callable[[], T], describe: Callable[[], str]) -> T:
    """What the condition gives as soon as it is true."""
    return waiting.until(condition, describe, within_s=DEADLINE_S, every_s=POLL_S)


ALIASES: dict[str, str] = {}
"""{stream: name} where a producer has two, so that a name stands for a stream all the same."""


@dataclass(frozen=True, slots=True)
class Logged:
    """One data record of a log as a foreign client reads it; `name` is the value's part before `|`. One whose
    header cannot be read has no producer; a second stream's has the name that `ALIASES` gives that."""

    partition: int
    offset: int
    producer: str
    sequence: int
    created_ms: int
    name: str


class Reader:
    """Reads whole topics of one cluster, committed records only."""

    def __init__(self, bootstrap: str) -> None:
        self._settings = {
            "bootstrap.servers": bootstrap,
            "group.id": "reads-the-truth",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
            "allow.auto.create.topics": False,
        }

    def messages(self, topic: str) -> list[Any]:
        consumer = Consumer(self._settings)
        try:
            partitions = self._partitions(consumer, topic)
            consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in partitions])
            found, ended = [], set()
            deadline = Deadline(f"{topic} is read to its end", within_s=DEADLINE_S)
            while len(ended) < len(partitions):
                deadline.check(ended)
                for message in consumer.consume(1000, 0.05):
                    if message.error() is None:
                        found.append(message)
                    else:
                        ended.add(message.partition())
            return found
        finally:
            consumer.close()

    def ends(self, topic: str) -> dict[int, int]:
        """End offsets by partition; {} while there is no such topic."""
        consumer = Consumer(self._settings)
        try:
            return {
                number: end_offset(consumer, topic, number, DEADLINE_S)
                for number in self._partitions(consumer, topic)
            }
        finally:
            consumer.close()

    def log(self, topic: str) -> list[Logged]:
        """The records, with the identity in their headers as EVENTS.md lays it out."""
        return [_logged(message) for message in self.messages(topic)]

    @staticmethod
    def _partitions(consumer: Consumer, topic: str) -> list[int]:
        described = consumer.list_topics(topic, timeout=patience(DEADLINE_S)).topics.get(topic)
        return [] if described is None or described.error else sorted(described.partitions)


def _logged(message: Any) -> Logged:
    header = dict(message.headers() or ()).get("_mr", b"")
    if len(header) < 23 or header[0] != 1 or header[9] > 127:
        header = bytes(23)
    return Logged(
        partition=message.partition(),
        offset=message.offset(),
        producer=ALIASES.get(header[1:9].hex(), header[23:].decode()),
        sequence=int.from_bytes(header[9:17], "big"),
        created_ms=int.from_bytes(header[17:23], "big"),
        name=message.value().partition(b"|")[0].decode("latin-1"),
    )


class FaultyMirror(MirrorProcess):
    """The mirror of `end_to_end_mirror`; `faults` is its folder."""

    faults: Path

    def command(self) -> list[str]:
        script = Path(__file__).with_name("end_to_end_mirror.py")
        return [sys.executable, str(script), str(self.config_path), str(self.faults)]


class Positions:
    """Follows the positions that the mirror keeps in the aggregate, as any reader of committed data."""

    def __init__(self, bootstrap: str) -> None:
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "follows-positions",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "fetch.wait.max.ms": 20,
            }
        )
        self._assigned = False
        self._known: dict[tuple[str, str, int], tuple[int, str]] = {}

    def known(self) -> Mapping[tuple[str, str, int], tuple[int, str]]:
        """{(source, topic, partition): (next offset, topic id)} by now."""
        if not self._assigned:
            described = self._consumer.list_topics(POSITIONS_TOPIC, timeout=patience(DEADLINE_S))
            partitions = described.topics[POSITIONS_TOPIC].partitions
            if not partitions:
                return {}
            self._consumer.assign(
                [TopicPartition(POSITIONS_TOPIC, number, OFFSET_BEGINNING) for number in partitions]
            )
            self._assigned = True
        for message in self._consumer.consume(1000, 0.05):
            if message.error() is None and message.value() is not None:
                where, what = json.loads(message.key()), json.loads(message.value())
                key = (where["source"], where["topic"], where["partition"])
                self._known[key] = (what["next_offset"], what.get("topic_id") or "")
        return self._known

    def close(self) -> None:
        self._consumer.close()


class World:
    """Three clusters and their mirror; those of `of_kafka` are Apache Kafka's."""

    def __init__(self, zookeeper: ZooKeeper, folder: Path, of_kafka: Collection[str] = ()) -> None:
        self.folder = folder
        self.brokers: dict[str, BrokerProcess | KafkaPeer] = {}
        for name in (*SOURCES, AGGREGATE):
            if name in of_kafka:
                self.brokers[name] = KafkaPeer(folder / name, settings=OF_ANY_TIME, jvm_options=JVM_OPTIONS)
            else:
                keep = {"log.retention.ms": -1}  # some of the records are of 2013
                self.brokers[name] = BrokerProcess(zookeeper.chroot(), folder / name, settings=keep)
        self.faults = folder / "faults"
        self.faults.mkdir(parents=True)
        self._admins: dict[str, AdminClient] = {}
        self.readers: dict[str, Reader] = {}

    def start(self) -> World:
        for broker in self.brokers.values():
            broker.launch()
        for name, broker in self.brokers.items():
            broker.wait_until_serving()
            self._admins[name] = AdminClient({"bootstrap.servers": broker.bootstrap})
            self.readers[name] = Reader(broker.bootstrap)
        for name in SOURCES:
            settings = {"cleanup.policy": "compact,delete", "retention.ms": "7776000000"}
            self.create(name, EVENTS_TOPIC, 1, settings)
        self.mirror = FaultyMirror(
            self.folder / "mirror",
            self.bootstrap(AGGREGATE),
            {name: self.bootstrap(name) for name in SOURCES},
            topics=[r"e2e-.*", re.escape(EVENTS_TOPIC)],
            discovery_interval_ms=200,
            gaps={"default": "skip"},
            partition_counts="widest",
            config_sync={"enabled": False},
        )
        self.mirror.faults = self.faults
        self.mirror.start()
        self.positions = Positions(self.bootstrap(AGGREGATE))
        return self

    def stop(self) -> None:
        if hasattr(self, "positions"):
            self.positions.close()
            self.mirror.kill()
        for broker in self.brokers.values():
            broker.kill()

    def bootstrap(self, cluster: str) -> str:
        return self.brokers[cluster].bootstrap

    # --- topics ----------------------------------------------------------------------------------

    def create(
        self, cluster: str, topic: str, partitions: int, settings: Mapping[str, str] | None = None
    ) -> None:
        """Also right after it was deleted: until the cluster takes it."""
        told: list[str] = []

        def made() -> bool:
            new = NewTopic(topic, partitions, 1, config=dict(settings or {}))
            try:
                self._admins[cluster].create_topics([new])[topic].result(patience(DEADLINE_S))
            except KafkaException as error:
                told.append(str(error))
                return False
            return True

        until(made, lambda: told[-1])
        until(lambda: len(self.readers[cluster].ends(topic)) == partitions, lambda: f"{topic} in {cluster}")

    def recreate(self, cluster: str, topic: str, partitions: int) -> None:
        self._admins[cluster].delete_topics([topic])[topic].result(patience(DEADLINE_S))
        until(lambda: not self.readers[cluster].ends(topic), lambda: f"{topic} is still in {cluster}")
        self.create(cluster, topic, partitions)

    def widen(self, cluster: str, topic: str, partitions: int) -> None:
        self._admins[cluster].create_partitions([NewPartitions(topic, partitions)])[topic].result(
            patience(DEADLINE_S)
        )
        until(lambda: len(self.readers[cluster].ends(topic)) == partitions, lambda: f"{topic} in {cluster}")

    def expire(self, cluster: str, topic: str, partition: int, before: int) -> None:
        """Delete the records below an offset, as retention does."""
        place = TopicPartition(topic, partition, before)
        self._admins[cluster].delete_records([place])[place].result(patience(DEADLINE_S))

    def events(self, cluster: str) -> dict[str, Any]:
        """The newest event of every key."""
        return {
            message.key().decode(): json.loads(message.value())
            for message in self.readers[cluster].messages(EVENTS_TOPIC)
            if message.value() is not None
        }

    # --- the mirror ------------------------------------------------------------------------------

    def harm(self, topic: str, **faults: Any) -> None:
        """What the mirror shall do to which records; before they are sent."""
        path = self.faults / f"{topic}.json"
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(faults))
        temporary.replace(path)

    def pause(self, topic: str, sources: Iterable[str]) -> None:
        """Until all of the topic's pipelines stand still."""
        sources = set(sources)
        for source in sources:
            self._call("/pause", source=source, topic=topic)

        def stands_still() -> bool:
            states = [
                each["state"]
                for each in self.mirror.status().get("partitions", ())
                if each["topic"] == topic and each["source"] in sources
            ]
            return bool(states) and set(states) == {"paused"}

        until(stands_still, lambda: f"{topic} is not paused: {self.mirror.status()}")

    def resume(self, topic: str, sources: Iterable[str]) -> None:
        for source in sources:
            self._call("/resume", source=source, topic=topic)

    def _call(self, path: str, **body: Any) -> None:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.mirror.port}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )

        def answered() -> bool:
            try:
                with urllib.request.urlopen(request, timeout=patience(10)) as answer:
                    return bool(answer.status == 200)
            except urllib.error.HTTPError:
                return False  # the mirror has not found the topic yet

        until(answered, lambda: f"{path} {body}: {self.mirror.log[-2000:]}")

    def wait_until_carried(
        self, topic: str, sources: Iterable[str], old_ids: Mapping[tuple[str, int], str] | None = None
    ) -> None:
        """Until the positions of the topic are at the sources' ends. `old_ids` {(source, partition): topic
        id} are of deleted topics of that name."""
        wanted = {
            (source, n): end for source in sources for n, end in self.readers[source].ends(topic).items()
        }

        def carried() -> bool:
            known = self.positions.known()
            for (source, number), end in wanted.items():
                position, topic_id = known.get((source, topic, number), (0, ""))
                old = (old_ids or {}).get((source, number))
                if end and (position < end or (old is not None and topic_id == old)):
                    return False
            return True

        def told() -> str:
            known = {k: v for k, v in self.positions.known().items() if k[1] == topic}
            return f"{topic}: {known} of {wanted}; {self.mirror.log[-2000:]}"

        until(carried, told)

    def copies(self, topic: str) -> Counter[str]:
        """{name: how often it is in the aggregate}"""
        return Counter(record.name for record in self.readers[AGGREGATE].log(topic))
