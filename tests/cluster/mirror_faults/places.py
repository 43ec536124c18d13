"""The servers and the workers of a run, each at a place of its own in the network.

The pair says what the two sources and the target are: Millrace brokers on one real ZooKeeper, or Apache
Kafka. The target's data lie in a file system of their own where that is possible, so that it can run full.
`tend` starts again what ended when nobody meant it to (a service manager would), and counts it. Processes
are started from the main thread alone: the kernel ends them when the thread that started them is gone.
"""

from __future__ import annotations

import signal
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from millrace.broker.protocol.system_topics import AUDIT_TOPIC
from tests import forked
from tests.cluster.faults.cluster import ENVIRONMENT, ZOOKEEPER, ZooKeeperServer
from tests.cluster.faults.network import mount_memory
from tests.cluster.faults.timeline import Timeline
from tests.cluster.mirror_faults.links import SlowableNetwork
from tests.cluster.mirror_faults.plan import SESSION_TIMEOUT_MS, SOURCES, SPARED, TARGET, WORKERS
from tests.cluster.mirror_faults.records import ALL_TOPICS
from tests.cluster.mirror_process import MirrorProcess
from tests.peers.kafka import TEST_JVM_OPTIONS, KafkaPeer, gather_jars
from tests.ports import free_port
from tests.servers import BrokerProcess
from tests.waiting import Deadline

NODES = (*SOURCES, TARGET, *WORKERS, SPARED, ZOOKEEPER)
MIRROR = "aggregate"
SERVING_TIMEOUT_S = 120.0
SMALL_HEAP = tuple("-Xmx384M" if option.startswith("-Xmx") else option for option in TEST_JVM_OPTIONS)

SETTINGS: Mapping[str, Any] = {
    "group.initial.rebalance.delay.ms": 0,
    "group.min.session.timeout.ms": 1_000,
    "auto.create.topics.enable": "false",
    "log.retention.ms": -1,
    "log.segment.bytes": 8 << 20,
    "offsets.topic.num.partitions": 3,
    "transaction.state.log.num.partitions": 3,
    "log.cleaner.dedupe.buffer.size": 4 << 20,
}
_API_VERSIONS_V0 = struct.pack(">ihhih", 10, 18, 0, 1, -1)


class Server(Protocol):
    """A source or the target."""

    @property
    def bootstrap(self) -> str: ...

    @property
    def is_running(self) -> bool: ...

    @property
    def tail(self) -> list[str]: ...

    def launch_here(self) -> None:
        """Start the process and do not wait. At once after a kill, too."""
        ...

    @property
    def exit_status(self) -> int | None: ...

    def kill(self) -> None: ...


class MillraceServer(BrokerProcess):
    """A Millrace broker at its place."""

    def __init__(
        self, network: SlowableNetwork, node: str, folder: Path, data: Path, zookeeper: ZooKeeperServer
    ) -> None:
        super().__init__("", folder, settings={"zookeeper.session.timeout.ms": 2_500, **SETTINGS})
        self.data = data / "data"
        self._network, self._node, self._zookeeper = network, node, zookeeper
        self._endpoint = network.endpoint(node, self.port)

    @property
    def bootstrap(self) -> str:
        return self._endpoint.reached

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def tail(self) -> list[str]:
        return self.log.splitlines()

    def command(self) -> list[str]:
        self.zookeeper = f"{self._network.way(self._node, ZOOKEEPER)}/{self._node}"
        words = super().command()
        words[words.index("--listen") + 1] = self._endpoint.listen
        return self._network.command(self._node, [*words, "--advertised", self._endpoint.reached])

    @property
    def exit_status(self) -> int | None:
        return self.process.poll() if self.process is not None else None

    def launch_here(self) -> None:
        self.launch()
        assert self.process is not None
        self._network.runs(self._node, self.process.pid)


class KafkaServer(KafkaPeer):
    """Apache Kafka at its place."""

    def __init__(self, network: SlowableNetwork, node: str, folder: Path, data: Path) -> None:
        self._endpoint = network.endpoint(node, free_port())
        self._network, self._node = network, node
        named = {key: str(value) for key, value in SETTINGS.items()} | {"log.dirs": str(data)}
        super().__init__(folder, settings=named, jvm_options=SMALL_HEAP)
        self._broker_port = int(self._endpoint.listen.rpartition(":")[2])
        self._controller_port = free_port()
        self._data = data

    @property
    def bootstrap(self) -> str:
        return self._endpoint.reached

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def tail(self) -> list[str]:
        return self.log_file.read_text(errors="replace").splitlines() if self.log_file.exists() else []

    def _write_properties(self) -> Path:
        controller = f"127.0.0.1:{self._controller_port}"
        self.settings |= {
            "listeners": f"PLAINTEXT://{self._endpoint.listen},CONTROLLER://{controller}",
            "advertised.listeners": f"PLAINTEXT://{self._endpoint.reached},CONTROLLER://{controller}",
        }
        return super()._write_properties()

    def _command(self, libs: Path, *arguments: str) -> list[str]:
        return self._network.command(self._node, super()._command(libs, *arguments))

    def _format(self, libs: Path, properties: Path) -> None:
        if not (self._data / "meta.properties").exists():
            super()._format(libs, properties)

    @property
    def exit_status(self) -> int | None:
        return self._process.poll() if self._process is not None else None

    def launch_here(self) -> None:
        if self.pid is None and not (self._data / "meta.properties").exists():
            self.start()
        else:
            super()._launch(gather_jars(), self._write_properties())
        assert self.pid is not None
        self._network.runs(self._node, self.pid)

    def _serves(self, log_start: int) -> bool:
        return True  # whoever waits for it asks `Places`


class Worker(MirrorProcess):
    """A mirror worker at its place. `sabotage` makes it one that loses or repeats (see `sabotage.py`)."""

    def __init__(
        self,
        network: SlowableNetwork,
        node: str,
        folder: Path,
        target: str,
        sources: dict[str, str],
        delivery: str,
        sabotage: str | None,
    ) -> None:
        super().__init__(
            folder,
            target,
            sources,
            topics=[*ALL_TOPICS, AUDIT_TOPIC],
            name=MIRROR,
            delivery=delivery,
            gaps={"recreated": "skip"},
            group={"session_timeout_ms": SESSION_TIMEOUT_MS, "rebalance_timeout_ms": 10_000},
        )
        self.node = node
        self.meant_to_run = True
        self._log_start = 0
        self._network, self._sabotage = network, sabotage

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def has_joined(self) -> bool:
        """Whether it has said, since its last start, that it has a share."""
        return "assigned" in self.log[self._log_start :]

    def start(self) -> Worker:
        self._log_start = len(self.log)
        words = self.command()
        if self._sabotage is not None:
            at = words.index("millrace.deploy.cli")
            words[at : at + 3] = ["tests.cluster.mirror_faults.sabotage", self._sabotage]
        self.process = forked.start(self._network.command(self.node, words), log=self.log_path)
        self._network.runs(self.node, self.process.pid)
        return self

    def signal(self, number: int) -> None:
        if self.is_running:
            assert self.process is not None
            self.process.send_signal(number)

    def memory_mb(self) -> float:
        """Resident now; 0.0 while it does not run."""
        if not self.is_running:
            return 0.0
        assert self.process is not None
        try:
            status = Path(f"/proc/{self.process.pid}/status").read_text()
        except OSError:
            return 0.0
        line = next((line for line in status.splitlines() if line.startswith("VmRSS:")), "VmRSS: 0 kB")
        return int(line.split()[1]) * 1024 / 1e6


class Places:
    """All of them. `servers` by name: the sources and the target."""

    def __init__(
        self,
        network: SlowableNetwork,
        folder: Path,
        pair: str,
        timeline: Timeline,
        *,
        delivery: str,
        small_disk_mib: int | None,
        sabotage: str | None = None,
        spares: bool = False,
    ) -> None:
        """`spares`: a further worker, whom nothing befalls."""
        self.network, self.timeline = network, timeline
        self.ended_count = 0
        self.problems: list[str] = []
        self.meant_to_run: set[str] = set()
        source_kind, target_kind = pair.split("-")
        self.kinds = dict.fromkeys(SOURCES, source_kind) | {TARGET: target_kind}
        self._zookeeper: ZooKeeperServer | None = None
        if "millrace" in self.kinds.values():
            self._zookeeper = ZooKeeperServer(network, folder / ZOOKEEPER, free_port())
        self.disk = folder / TARGET / "disk" if small_disk_mib else None
        if self.disk is not None and small_disk_mib:
            mount_memory(self.disk, small_disk_mib)
        self.servers: dict[str, Server] = {name: self._server(name, folder / name) for name in self.kinds}
        sources = {name: self.servers[name].bootstrap for name in SOURCES}
        target = self.servers[TARGET].bootstrap
        self.workers = {
            name: Worker(network, name, folder / name, target, sources, delivery, sabotage)
            for name in (*WORKERS, *([SPARED] if spares else []))
        }

    def _server(self, name: str, folder: Path) -> Server:
        data = self.disk if name == TARGET and self.disk is not None else folder / "disk"
        data.mkdir(parents=True, exist_ok=True)
        if self.kinds[name] == "kafka":
            return KafkaServer(self.network, name, folder, data / "kafka")
        assert self._zookeeper is not None
        return MillraceServer(self.network, name, folder, data, self._zookeeper)

    def start_servers(self) -> None:
        if self._zookeeper is not None:
            self._zookeeper.launch()
            self._zookeeper.wait_until_serving()
        for name in self.servers:
            self.start_server(name)
        self.wait_until_serving()

    def start_server(self, name: str) -> None:
        """Does not wait: other events have their time."""
        self.servers[name].launch_here()
        self.meant_to_run.add(name)

    def wait_until_serving(self) -> None:
        """Until every server answers; raises RuntimeError with the end of a log."""
        deadline = Deadline("every server answers", within_s=SERVING_TIMEOUT_S)
        while missing := [name for name, server in self.servers.items() if not _answers(server.bootstrap)]:
            self.tend()
            if deadline.has_passed:
                said = "\n".join(self.servers[missing[0]].tail[-10:])
                raise RuntimeError(f"{missing} do not answer; the first says:\n{said}")
            time.sleep(0.05)

    def start_worker(self, name: str) -> None:
        self.workers[name].meant_to_run = True
        self.workers[name].start()

    def kill_server(self, name: str) -> None:
        self.meant_to_run.discard(name)
        self.servers[name].kill()

    def kill_worker(self, name: str) -> None:
        self.workers[name].meant_to_run = False
        self.workers[name].kill()

    def tend(self) -> None:
        """Start again who ended unasked. A worker never ends by itself, whatever happens to its clusters."""
        for name in sorted(self.meant_to_run):
            server = self.servers[name]
            if not server.is_running:
                # A Millrace broker that finds its id still taken in ZooKeeper says so by its status.
                if server.exit_status not in ENVIRONMENT:
                    self.ended_count += 1
                    self.timeline.note(
                        f"{name} has ended ({server.exit_status}): {' '.join(server.tail[-1:])[:200]}"
                    )
                self.start_server(name)
        for name, worker in self.workers.items():
            if worker.meant_to_run and worker.process is not None and not worker.is_running:
                said = " / ".join(worker.log.splitlines()[-3:])
                self.problems.append(f"{name} has ended with {worker.process.returncode}: {said}")
                self.start_worker(name)

    def stop(self) -> None:
        for worker in self.workers.values():
            worker.signal(signal.SIGCONT)
            worker.kill()
        for name, server in self.servers.items():
            self.meant_to_run.discard(name)
            server.kill()
        if self._zookeeper is not None:
            self._zookeeper.kill()
        self.network.close()

    def tails(self, lines: int) -> Sequence[str]:
        """The ends of all logs, for the report."""
        found = []
        for name, said in [
            *((name, server.tail) for name, server in self.servers.items()),
            *((name, worker.log.splitlines()) for name, worker in self.workers.items()),
        ]:
            found.append(f"---- the log of {name} ends with")
            found += said[-lines:]
        return found


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=0.5) as connection:
            connection.settimeout(2.0)
            connection.sendall(_API_VERSIONS_V0)
            return len(connection.recv(8)) == 8
    except OSError:
        return False
