"""The servers of a fault run: one ZooKeeper and three brokers, each at a place of its own in a network.

`Cluster.tend` starts again what ended when nobody meant it to (as a service manager would), and keeps what
it saw for the report; `missing` says what the cluster lacks to be whole. Processes are started from the main
thread alone: the kernel kills them when the thread that started them is gone.
"""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewTopic
from kazoo.client import KazooClient
from kazoo.exceptions import KazooException, NoNodeError
from kazoo.handlers.threading import KazooTimeoutError

from millrace.deploy import zookeeper
from millrace.deploy.processes import spawn
from tests.cluster.faults.network import Network, mount_memory
from tests.cluster.faults.timeline import Timeline
from tests.ports import free_port
from tests.servers import BrokerProcess
from tests.waiting import Deadline, patience, until

BROKERS = (1, 2, 3)
SESSION_TIMEOUT_MS = 2_500
LAG_MS = 2_500
POLL_S = 0.1
SMALL_DISK_MIB = 96
ZOOKEEPER = "zookeeper"
CHROOT = "/faults"
ENVIRONMENT = range(10, 21)
"""Exit statuses that speak of a broker's surroundings, such as a ZooKeeper that does not answer."""

SETTINGS: Mapping[str, object] = {
    "zookeeper.session.timeout.ms": SESSION_TIMEOUT_MS,
    "replica.lag.time.max.ms": LAG_MS,
    "default.replication.factor": 3,
    "min.insync.replicas": 2,
    "auto.create.topics.enable": "false",
    "offsets.topic.num.partitions": 3,
    "offsets.topic.replication.factor": 3,
    "transaction.state.log.num.partitions": 3,
    "transaction.state.log.replication.factor": 3,
    "transaction.state.log.min.isr": 2,
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": 1_000,
    "group.initial.rebalance.delay.ms": 0,
    # Everything that happens rarely happens often here.
    "log.segment.bytes": 1 << 20,
    "log.roll.ms": 20_000,
    "log.retention.ms": -1,
    "log.retention.check.interval.ms": 3_000,
    "log.flush.offset.checkpoint.interval.ms": 2_000,
    "replica.high.watermark.checkpoint.interval.ms": 1_000,
    "leader.imbalance.check.interval.seconds": 7,
    "offsets.topic.segment.bytes": 64 << 10,
    "transaction.state.log.segment.bytes": 64 << 10,
    "log.cleaner.backoff.ms": 3_000,
    "log.cleaner.dedupe.buffer.size": 1 << 20,
    "controlled.shutdown.max.retries": 1,
    "controlled.shutdown.retry.backoff.ms": 5_000,
}


def node_name(broker_id: int) -> str:
    return f"broker-{broker_id}"


NODES = (*(node_name(number) for number in BROKERS), ZOOKEEPER)


class Broker(BrokerProcess):
    """One broker at its place in the network. `meant_to_run` is False while a fault keeps it down."""

    def __init__(
        self, network: Network, folder: Path, broker_id: int, settings: Mapping[str, object]
    ) -> None:
        super().__init__("", folder, broker_id=broker_id, settings=settings)
        self.node = node_name(broker_id)
        self.meant_to_run = False
        self.stopping_since: float | None = None
        self.read_position = 0
        """How much of its log has been looked through."""
        self._network = network
        self._other_port = free_port()
        self.addresses = [network.endpoint(self.node, port).reached for port in (self._other_port, self.port)]
        """Where it may be found at any time."""
        self.endpoint = network.endpoint(self.node, self.port)

    @property
    def bootstrap(self) -> str:
        return self.endpoint.reached

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def move(self) -> None:
        """From its next start on it listens at its other port."""
        self.port, self._other_port = self._other_port, self.port
        self.endpoint = self._network.endpoint(self.node, self.port)

    def command(self) -> list[str]:
        self.zookeeper = self._network.way(self.node, ZOOKEEPER) + CHROOT
        words = super().command()
        words[words.index("--listen") + 1] = self.endpoint.listen
        return self._network.command(self.node, [*words, "--advertised", self.endpoint.reached])

    def launch(self) -> None:
        super().launch()
        assert self.process is not None
        self._network.runs(self.node, self.process.pid)

    def signal(self, number: int) -> None:
        if self.is_running:
            assert self.process is not None
            self.process.send_signal(number)


class ZooKeeperServer:
    """One ZooKeeper; `stop` and `start` keep its data."""

    def __init__(self, network: Network, folder: Path, port: int) -> None:
        self.port = port
        self.log_path = folder / "zookeeper.log"
        self._folder = folder
        self._network = network
        self._process: subprocess.Popen[bytes] | None = None
        self._listen = network.endpoint(ZOOKEEPER, port).listen
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def address(self) -> str:
        return self._network.way("", ZOOKEEPER)

    def launch(self) -> None:
        host = self._listen.rpartition(":")[0]
        # What is asked for is looked at in this network, which may have no such address.
        host = host if host == "127.0.0.1" else "0.0.0.0"
        words = zookeeper.launch_command(self.port, self._folder / "data", host=host, heap_mib=128)
        command = self._network.command(ZOOKEEPER, words)
        self._process = spawn(command, log=self.log_path, die_with_parent=True)
        self._network.runs(ZOOKEEPER, self._process.pid)

    def wait_until_serving(self) -> None:
        host, _, port = self.address.rpartition(":")
        until(lambda: zookeeper.is_serving(int(port), host), "ZooKeeper answers", logs_of=[self.log_path])

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def signal(self, number: int) -> None:
        if self.is_running:
            assert self._process is not None
            self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(patience(20))


class Cluster:
    """All servers, and the topics of the run."""

    def __init__(self, network: Network, folder: Path, timeline: Timeline, *, small_disk: bool) -> None:
        self.network = network
        self.timeline = timeline
        self.small_disk: Path | None = None
        self.problems: list[str] = []
        """Brokers that ended when nobody meant them to, for another reason than their surroundings."""
        self.ended_count = 0
        self.zookeeper = ZooKeeperServer(network, folder / ZOOKEEPER, free_port())
        self.brokers = {
            number: Broker(network, folder / node_name(number), number, SETTINGS) for number in BROKERS
        }
        if small_disk:
            owner = self.brokers[BROKERS[-1]]
            self.small_disk = owner.data.parent / "disk"
            owner.data = self.small_disk / "data"
            mount_memory(self.small_disk, SMALL_DISK_MIB)
        self._zookeeper_client: KazooClient | None = None

    @property
    def bootstrap(self) -> str:
        """For clients that live as long as the run: every address that a broker may ever have."""
        return ",".join(address for broker in self.brokers.values() for address in broker.addresses)

    # -- running -------------------------------------------------------------------------------------

    def start(self) -> None:
        self.zookeeper.launch()
        self.zookeeper.wait_until_serving()
        for broker in self.brokers.values():
            self.launch(broker)
        quiet = logging.getLogger("kazoo.client")
        quiet.setLevel(logging.CRITICAL)
        self._zookeeper_client = KazooClient(self.zookeeper.address, timeout=10, logger=quiet)
        self._zookeeper_client.start(30)

    def launch(self, broker: Broker) -> None:
        broker.meant_to_run = True
        broker.stopping_since = None
        broker.launch()

    def tend(self) -> None:
        """Start again who ended unasked."""
        for broker in self.brokers.values():
            if broker.meant_to_run and not broker.is_running:
                assert broker.process is not None
                status = broker.process.returncode
                said = (broker.log.strip().splitlines() or [""])[-1]
                text = f"broker {broker.id} ended with {status}: {said}"
                self.timeline.note(text)
                self.ended_count += 1
                if status not in ENVIRONMENT:
                    self.problems.append(text)
                self.launch(broker)

    def stop(self) -> None:
        if self._zookeeper_client is not None:
            self._zookeeper_client.stop()
            self._zookeeper_client.close()
        for broker in self.brokers.values():
            broker.meant_to_run = False
            broker.kill()
        self.zookeeper.kill()
        self.network.close()

    def create_topics(self, topics: Mapping[str, int]) -> None:
        """Topics and their numbers of partitions, three replicas each."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        wanted = [NewTopic(name, count, replication_factor=3) for name, count in topics.items()]
        for created in admin.create_topics(wanted, operation_timeout=30).values():
            created.result(patience())

    # -- what it lacks -------------------------------------------------------------------------------

    def wait_until_whole(self, timeout_s: float) -> list[str]:
        """What is still missing when the time is up; nothing, as a rule."""
        deadline = Deadline("the cluster is whole", within_s=timeout_s)
        while True:
            is_last = deadline.has_passed
            self.tend()
            missing = self.missing()
            if not missing or is_last:
                return missing
            time.sleep(POLL_S)

    def missing(self) -> list[str]:
        """Brokers that are away, partitions without a leader or with replicas out of sync: first as
        ZooKeeper has it, then as each broker tells it."""
        try:
            missing = self._missing_in_zookeeper()
        except (KazooException, KazooTimeoutError) as error:
            return [f"ZooKeeper does not answer: {error!r}"]
        if missing:
            return missing
        for broker in self.brokers.values():
            missing += self._missing_as_told_by(broker)
        return missing

    def _missing_in_zookeeper(self) -> list[str]:
        assert self._zookeeper_client is not None
        read = self._zookeeper_client.retry
        client = self._zookeeper_client
        registered = {int(each) for each in read(client.get_children, CHROOT + "/brokers/ids")}
        missing = [f"broker {number} is not registered" for number in BROKERS if number not in registered]
        for topic in read(client.get_children, CHROOT + "/brokers/topics"):
            assigned = json.loads(read(client.get, f"{CHROOT}/brokers/topics/{topic}")[0])["partitions"]
            for number in assigned:
                try:
                    path = f"{CHROOT}/brokers/topics/{topic}/partitions/{number}/state"
                    state = json.loads(read(client.get, path)[0])
                except NoNodeError:
                    missing.append(f"{topic}-{number} has no state")
                    continue
                if state["leader"] < 0 or len(state["isr"]) < len(BROKERS):
                    missing.append(f"{topic}-{number}: leader {state['leader']}, in sync {state['isr']}")
        return missing

    def _missing_as_told_by(self, broker: Broker) -> list[str]:
        admin = AdminClient(
            {"bootstrap.servers": broker.bootstrap, "socket.timeout.ms": 5_000, "log_level": 1}
        )
        try:
            known = admin.list_topics(timeout=5)
        except KafkaException as error:
            return [f"broker {broker.id} does not answer: {error}"]
        missing = []
        if set(known.brokers) != set(BROKERS):
            missing.append(f"broker {broker.id} knows brokers {sorted(known.brokers)}")
        for name, topic in known.topics.items():
            for number, part in topic.partitions.items():
                if part.leader < 0 or len(part.isrs) < len(BROKERS):
                    missing.append(
                        f"broker {broker.id} says {name}-{number}: leader {part.leader}, in sync {part.isrs}"
                    )
        return missing

    def states(self) -> dict[str, Any]:
        """What stands in ZooKeeper for every partition, for the report."""
        client = self._zookeeper_client
        assert client is not None
        found: dict[str, Any] = {}
        for topic in client.get_children(CHROOT + "/brokers/topics"):
            for number in client.get_children(f"{CHROOT}/brokers/topics/{topic}/partitions"):
                data = client.get(f"{CHROOT}/brokers/topics/{topic}/partitions/{number}/state")[0]
                found[f"{topic}-{number}"] = json.loads(data)
        return found

    def tails(self, lines: int) -> Sequence[str]:
        """The ends of the brokers' logs, for the report."""
        found = []
        for broker in self.brokers.values():
            found.append(f"---- the log of broker {broker.id} ({broker.log_path}) ends with")
            found += broker.log.splitlines()[-lines:]
        return found


def freeze(process: Broker | ZooKeeperServer) -> None:
    process.signal(signal.SIGSTOP)


def thaw(process: Broker | ZooKeeperServer) -> None:
    process.signal(signal.SIGCONT)
