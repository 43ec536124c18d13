"""The servers that are compared, each as its makers ship it, on loopback with a folder of its own.

Durability is alike: every server writes to the page cache and leaves the flush to the kernel (RabbitMQ's and
ActiveMQ's messages are persistent; ActiveMQ's journal is told not to sync). RabbitMQ and ActiveMQ are
Debian's packages, Apache Kafka comes from Maven (tests/peers/kafka.py). Heaps are printed with the figures.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from millrace.deploy.processes import spawn
from tests.benchmarks.peers.usage import begin_peak_anew, peak_memory_mb, processor_seconds
from tests.peers.kafka import KafkaPeer
from tests.ports import free_port
from tests.servers import BrokerProcess, ZooKeeper

HEAP = "1G"
START_TIMEOUT_S = 90.0
# What Apache Kafka's own start script passes to Java, but for logging.
KAFKA_JVM_OPTIONS = (
    f"-Xms{HEAP}",
    f"-Xmx{HEAP}",
    "-server",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
    "-XX:+ExplicitGCInvokesConcurrent",
    "-Djava.awt.headless=true",
)
ACTIVEMQ_HOME = Path("/usr/share/activemq")
RABBITMQ = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")


class Server:
    """A running server: `pid` leads its processes, `address` is where clients go."""

    name = ""
    pid = 0
    port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def processor_seconds(self) -> float:
        return processor_seconds(self.pid)

    def peak_memory_mb(self) -> float:
        return peak_memory_mb(self.pid)

    def begin_peak_anew(self) -> None:
        begin_peak_anew(self.pid)

    def stop(self) -> None:
        raise NotImplementedError


class Millrace(Server):
    """One broker, or several of one cluster on this host; ZooKeeper belongs to none of them."""

    name = "millrace"

    def __init__(
        self, folder: Path, *, broker_id: int = 1, zookeeper_path: str = "", **settings: object
    ) -> None:
        self._zookeeper = None if zookeeper_path else ZooKeeper(folder / "zookeeper").start()
        path = zookeeper_path or (self._zookeeper.chroot() if self._zookeeper else "")
        named = {name.replace("_", "."): value for name, value in settings.items()}
        self.broker = BrokerProcess(
            path,
            folder / f"broker-{broker_id}",
            broker_id=broker_id,
            settings={"zookeeper.session.timeout.ms": 18_000, **named},
        )
        self.broker.start()
        self.port = self.broker.port
        self.pid = self.broker.process.pid if self.broker.process else 0

    def log_size(self, topic: str, partition: int = 0) -> int:
        return sum(path.stat().st_size for path in (self.broker.data / f"{topic}-{partition}").glob("*.log"))

    def stop(self) -> None:
        self.broker.kill()
        if self._zookeeper is not None:
            self._zookeeper.stop()


class Kafka(Server):
    """Apache Kafka, one KRaft node."""

    name = "kafka"

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "kafka"
        self._peer = KafkaPeer(self._folder, jvm_options=KAFKA_JVM_OPTIONS).start()
        self.port = int(self._peer.bootstrap.rpartition(":")[2])
        self.pid = self._peer.pid or 0

    def log_size(self, topic: str, partition: int = 0) -> int:
        log = self._folder / "data" / f"{topic}-{partition}"
        return sum(path.stat().st_size for path in log.glob("*.log"))

    def stop(self) -> None:
        self._peer.kill()


class _Spawned(Server):
    """A server that is one command."""

    def _launch(self, command: list[str], folder: Path, ready: Callable[[], bool]) -> None:
        self._process = spawn(command, log=folder / "server.log", die_with_parent=True)
        self.pid = self._process.pid
        deadline = time.monotonic() + START_TIMEOUT_S
        while not ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                tail = (folder / "server.log").read_text(errors="replace")[-1500:]
                self.stop()
                raise RuntimeError(f"{self.name} did not start: {tail}")
            time.sleep(0.1)

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


class RabbitMq(_Spawned):
    """Debian's RabbitMQ: a node, and a port mapper (epmd), of its own."""

    name = "rabbitmq"

    def __init__(self, folder: Path) -> None:
        if not RABBITMQ.exists():
            raise RuntimeError("RabbitMQ is missing: apt install rabbitmq-server (make setup-peers)")
        here = folder / "rabbitmq"
        here.mkdir(parents=True)
        self.port, distribution, mapper = free_port(), free_port(), free_port()
        (here / "rabbit.conf").write_text(f"listeners.tcp.1 = 127.0.0.1:{self.port}\n")
        # Mnesia's folder and the cookie lie in `here`, so that no other node on this machine is met.
        self._environment = {
            "HOME": str(here),
            "RABBITMQ_NODENAME": f"bench{self.port}@localhost",
            "RABBITMQ_MNESIA_BASE": str(here / "mnesia"),
            "RABBITMQ_LOG_BASE": str(here / "log"),
            "RABBITMQ_CONFIG_FILE": str(here / "rabbit"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(here / "plugins"),
            "RABBITMQ_PID_FILE": str(here / "pid"),
            "RABBITMQ_DIST_PORT": str(distribution),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            "ERL_EPMD_PORT": str(mapper),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
        }
        command = ["env", *(f"{key}={value}" for key, value in self._environment.items()), str(RABBITMQ)]
        self._launch(command, here, self._listens)

    def stop(self) -> None:
        super().stop()
        epmd = shutil.which("epmd")
        if epmd is not None:
            environment = {**os.environ, **self._environment}
            subprocess.run([epmd, "-kill"], env=environment, capture_output=True, check=False)


_ACTIVEMQ_CONFIG = """\
<beans xmlns="http://www.springframework.org/schema/beans"
       xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance"
       xsi:schemaLocation="http://www.springframework.org/schema/beans
         http://www.springframework.org/schema/beans/spring-beans.xsd
         http://activemq.apache.org/schema/core http://activemq.apache.org/schema/core/activemq-core.xsd">
  <broker xmlns="http://activemq.apache.org/schema/core" useJmx="false" brokerName="bench"
          dataDirectory="{folder}/data">
    <persistenceAdapter>
      <kahaDB directory="{folder}/data/kahadb" journalDiskSyncStrategy="never"/>
    </persistenceAdapter>
    <systemUsage><systemUsage>
      <memoryUsage><memoryUsage percentOfJvmHeap="70"/></memoryUsage>
      <storeUsage><storeUsage limit="40 gb"/></storeUsage>
      <tempUsage><tempUsage limit="1 gb"/></tempUsage>
    </systemUsage></systemUsage>
    <transportConnectors>
      <transportConnector name="stomp" uri="stomp://127.0.0.1:{port}"/>
    </transportConnectors>
  </broker>
</beans>
"""


class ActiveMq(_Spawned):
    """Debian's ActiveMQ with its usual store (KahaDB), reached by STOMP."""

    name = "activemq"

    def __init__(self, folder: Path) -> None:
        starter = ACTIVEMQ_HOME / "bin" / "activemq.jar"
        if not starter.exists():
            raise RuntimeError("ActiveMQ is missing: apt install activemq (make setup-peers)")
        here = folder / "activemq"
        (here / "conf").mkdir(parents=True)
        self.port = free_port()
        config = here / "conf" / "activemq.xml"
        config.write_text(_ACTIVEMQ_CONFIG.format(folder=here, port=self.port))
        command = ["java", f"-Xms{HEAP}", f"-Xmx{HEAP}", f"-Dactivemq.home={ACTIVEMQ_HOME}"]
        command += [f"-Dactivemq.base={here}", f"-Dactivemq.conf={here / 'conf'}"]
        command += [f"-Dactivemq.data={here / 'data'}", "-jar", str(starter), "start", f"xbean:file:{config}"]
        self._launch(command, here, self._listens)
