"""An older Apache Kafka, one broker whose coordinator is a real ZooKeeper: what operators still have.

`OlderKafkaPeer` is used as `KafkaPeer` is. Its version (`kafka_version()`, older_kafka.xml) is of the oldest
line that speaks what exactly once wants of a target: commits fenced by the group's generation (KIP-447). It
knows no topic ids, and a fetch (version 11) does not tell where histories part. The jars (30 MB) are gathered
on first use by Maven into `.peers/older-kafka/libs`; `python -m tests.peers.older_kafka` gathers them before.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kazoo.client import KazooClient

from tests.peers.jars import ROOT, gather, pinned
from tests.peers.kafka import TEST_JVM_OPTIONS, KafkaPeer
from tests.ports import free_port
from tests.waiting import until

POM = Path(__file__).with_name("older_kafka.xml")
LIBS = ROOT / ".peers" / "older-kafka" / "libs"

SESSION_TIMEOUT_MS = 2_000
LOGGING = ("defaultLogLevel=warn", "log.kafka.server.KafkaServer=info", "showDateTime=true")


def kafka_version() -> str:
    """The version that older_kafka.xml pins."""
    return pinned(POM, "kafka")


def gather_jars() -> Path:
    """Make sure the pinned version's jars are in `.peers/older-kafka/libs`; returns that folder."""
    return gather(POM, LIBS, f"kafka_2.13-{kafka_version()}.jar")


class OlderKafkaPeer(KafkaPeer):
    """One broker. `zookeeper` is `host:port/chroot`, the same for the brokers of one cluster."""

    def __init__(
        self, directory: Path, zookeeper: str, *, settings: Mapping[str, str] | None = None, node_id: int = 1
    ) -> None:
        super().__init__(directory, settings=settings, jvm_options=TEST_JVM_OPTIONS, node_id=node_id)
        self._zookeeper = zookeeper

    def launch(self) -> None:
        """Start the server and do not wait for it; after a kill, first until ZooKeeper has forgotten it: a
        server whose id is taken ends."""
        libs = gather_jars()
        self._wait_until_forgotten()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._broker_port = self._broker_port or free_port()
        self._launch(libs, self._write_properties())

    def _wait_until_forgotten(self) -> None:
        hosts, _, chroot = self._zookeeper.partition("/")
        zookeeper = KazooClient(hosts)
        zookeeper.start()
        try:
            until(
                lambda: not zookeeper.exists(f"/{chroot}/brokers/ids/{self.node_id}"),
                f"the end of the session of Kafka at {self.bootstrap}",
                logs_of=[self.log_file],
            )
        finally:
            zookeeper.stop()
            zookeeper.close()

    def _write_properties(self) -> Path:
        values = {
            "broker.id": str(self.node_id),
            "zookeeper.connect": self._zookeeper,
            "zookeeper.session.timeout.ms": str(SESSION_TIMEOUT_MS),
            "listeners": f"PLAINTEXT://{self.bootstrap}",
            "log.dirs": str(self.directory / "data"),
            "offsets.topic.replication.factor": "1",
            "offsets.topic.num.partitions": "5",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "transaction.state.log.num.partitions": "5",
            "group.initial.rebalance.delay.ms": "0",
            **self.settings,
        }
        path = self.directory / "server.properties"
        path.write_text("".join(f"{name}={value}\n" for name, value in values.items()))
        return path

    def _command(self, libs: Path, *arguments: str) -> list[str]:
        logging = [f"-Dorg.slf4j.simpleLogger.{each}" for each in LOGGING]
        return ["java", *self._jvm_options, *logging, "-cp", f"{libs}/*", *arguments]

    def _started(self) -> bytes:
        return f"[KafkaServer id={self.node_id}] started".encode()


if __name__ == "__main__":
    print(gather_jars())
