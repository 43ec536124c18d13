"""Apache Kafka, one KRaft node on free loopback ports, for tests and benchmarks.

`KafkaPeer` is a plain synchronous object: `start()`, `bootstrap`, `stop()`, and for the rougher tests
`kill()`, `restart(port=…)`, `launch()` with `wait_until_serving()` apart. The jars are gathered on first use
by Maven (see pom.xml beside this file) into `.peers/kafka/libs`; `python -m tests.peers.kafka` gathers them
ahead of time, and lays up what a JVM loads of them at each start (`CLASSES`, JEP 350): a server then starts
in 3 s of processor time where it takes 5. Without that, or with another Java, it loads from the jars.

One process for each peer, ended by its own process id and at the latest with the test session; data and logs
lie in the folder the caller gives.
"""

from __future__ import annotations

import base64
import signal
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path

from millrace.deploy.processes import spawn
from tests.peers.jars import ROOT, gather, pinned
from tests.ports import free_port
from tests.waiting import patience, until

POM = Path(__file__).with_name("pom.xml")
LIBS = ROOT / ".peers" / "kafka" / "libs"
CLASSES = LIBS.with_name("classes.jsa")
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0

# A short-lived test server: start-up time counts more than its peak speed.
TEST_JVM_OPTIONS = ("-Xms128M", "-Xmx512M", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")

_LOG4J = """\
rootLogger.level = {level}
rootLogger.appenderRef.stdout.ref = stdout
appender.stdout.type = Console
appender.stdout.name = stdout
appender.stdout.layout.type = PatternLayout
appender.stdout.layout.pattern = %d %p %c{{1}}: %m%n
logger.server.name = kafka.server.KafkaRaftServer
logger.server.level = info
"""


def kafka_version() -> str:
    """The version that pom.xml pins."""
    return pinned(POM, "kafka")


def gather_jars() -> Path:
    """Make sure the pinned version's jars are in `.peers/kafka/libs`; returns that folder."""
    return gather(POM, LIBS, f"kafka_2.13-{kafka_version()}.jar")


def class_options() -> tuple[str, ...]:
    """For a JVM that has the jars as its class path. One that the archive does not fit would say so on its
    standard output."""
    if not CLASSES.exists():
        return ()
    return f"-XX:SharedArchiveFile={CLASSES}", "-Xlog:disable", "-Xlog:all=warning,cds*=off:stderr"


def lay_up_classes() -> None:
    """What a server has loaded from its first start to its end."""
    gather_jars()
    if CLASSES.exists():
        return
    with tempfile.TemporaryDirectory(dir=CLASSES.parent) as folder:
        new = Path(folder, CLASSES.name)
        options = (*TEST_JVM_OPTIONS, f"-XX:ArchiveClassesAtExit={new}", "-Xlog:disable")
        KafkaPeer(Path(folder), jvm_options=options).start().stop()
        new.replace(CLASSES)


class KafkaPeer:
    """One Apache Kafka node, broker and controller in one process; with `joins` a further broker alone."""

    def __init__(
        self,
        directory: Path,
        *,
        settings: Mapping[str, str] | None = None,
        jvm_options: tuple[str, ...] = TEST_JVM_OPTIONS,
        log_level: str = "warn",
        joins: KafkaPeer | None = None,
        node_id: int = 1,
        listeners: Mapping[str, str] | None = None,
        format_arguments: tuple[str, ...] = (),
    ) -> None:
        """`listeners` are further ones by name, with their security protocols (`address(name)` says where);
        `format_arguments` go to the storage tool, as `--add-scram` does."""
        self.directory = directory
        self.node_id = node_id
        self._joins = joins
        self.settings = dict(settings or {})
        self._jvm_options = jvm_options
        self._log_level = log_level
        self._listeners = dict(listeners or {})
        self._format_arguments = format_arguments
        self._listener_ports = dict(zip(self._listeners, (free_port() for _ in self._listeners), strict=True))
        self._process: subprocess.Popen[bytes] | None = None
        self._host = "127.0.0.1"
        self._broker_port = 0
        self._controller_port = 0
        self._log_start = 0

    @property
    def bootstrap(self) -> str:
        """`host:port` of the broker's listener."""
        return f"{self._host}:{self._broker_port}"

    def address(self, listener: str) -> str:
        """`host:port` of one of the further listeners."""
        return f"127.0.0.1:{self._listener_ports[listener]}"

    @property
    def port(self) -> int:
        """Of the broker's listener."""
        return self._broker_port

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        return self._process

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def log_file(self) -> Path:
        return self.directory / "server.log"

    def start(self) -> KafkaPeer:
        """Format the storage (first time), start the server, and wait until it serves."""
        self.launch()
        self.wait_until_serving()
        return self

    def launch(self) -> None:
        """Format the storage (first time), start the server, and do not wait. What it joins serves by now."""
        libs = gather_jars()
        self.directory.mkdir(parents=True, exist_ok=True)
        if not self._broker_port:
            self._broker_port, self._controller_port = free_port(), free_port()
        (self.directory / "log4j2.properties").write_text(_LOG4J.format(level=self._log_level))
        properties = self._write_properties()
        if not (self.directory / "data" / "meta.properties").exists():
            self._format(libs, properties)
        self._launch(libs, properties)

    def wait_until_serving(self) -> None:
        """Raises RuntimeError with the end of the log when it ends instead, DeadlinePassed when it takes too
        long."""

        def is_serving() -> bool:
            if self._serves(self._log_start):
                return True
            if self._process is None or self._process.poll() is not None:
                raise RuntimeError(f"Kafka at {self.bootstrap} ended: {self._log_tail(self._log_start)}")
            return False

        try:
            what = f"Kafka at {self.bootstrap} serves"
            until(is_serving, what, within_s=START_TIMEOUT_S, logs_of=[self.log_file], every_s=0.05)
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """Controlled shutdown; falls back to SIGKILL when it takes too long."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        self._end(signal.SIGKILL)

    def restart(self, *, port: int | None = None, host: str | None = None) -> None:
        """Stop when running, then start with the same data; `port` and `host` move the broker's listener."""
        self.stop()
        self._host, self._broker_port = host or self._host, port or self._broker_port
        self.start()

    def __enter__(self) -> KafkaPeer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _write_properties(self) -> Path:
        broker, controller = self.bootstrap, f"127.0.0.1:{(self._joins or self)._controller_port}"
        further = "".join(f",{name}://{self.address(name)}" for name in self._listeners)
        protocols = "".join(f",{name}:{protocol}" for name, protocol in self._listeners.items())
        values = {
            "process.roles": "broker,controller",
            "node.id": str(self.node_id),
            "controller.quorum.bootstrap.servers": controller,
            "listeners": f"PLAINTEXT://{broker},CONTROLLER://{controller}{further}",
            "advertised.listeners": f"PLAINTEXT://{broker},CONTROLLER://{controller}{further}",
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "listener.security.protocol.map": f"CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT{protocols}",
            "log.dirs": str(self.directory / "data"),
            "offsets.topic.replication.factor": "1",
            "offsets.topic.num.partitions": "5",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "transaction.state.log.num.partitions": "5",
            "share.coordinator.state.topic.replication.factor": "1",
            "share.coordinator.state.topic.min.isr": "1",
            "group.initial.rebalance.delay.ms": "0",
            # A record each half second, on which nothing here depends: a quarter of what an idle one costs.
            "metadata.max.idle.interval.ms": "30000",
            **self.settings,
        }
        if self._joins is not None:
            values["process.roles"] = "broker"
            values["listeners"] = values["advertised.listeners"] = f"PLAINTEXT://{broker}{further}"
        path = self.directory / "server.properties"
        path.write_text("".join(f"{name}={value}\n" for name, value in values.items()))
        return path

    def _command(self, libs: Path, *arguments: str) -> list[str]:
        log4j = f"-Dlog4j2.configurationFile={self.directory / 'log4j2.properties'}"
        return ["java", *self._jvm_options, *class_options(), log4j, "-cp", f"{libs}/*", *arguments]

    def _format(self, libs: Path, properties: Path) -> None:
        if self._joins is not None:
            # A broker alone needs no more than to know whose it is: no JVM for that.
            kept = (self._joins.directory / "data" / "meta.properties").read_text()
            cluster_id = kept.split("cluster.id=")[1].split()[0]
            data = self.directory / "data"
            data.mkdir(exist_ok=True)
            (data / "meta.properties").write_text(
                f"version=1\ncluster.id={cluster_id}\nnode.id={self.node_id}\ndirectory.id={_new_id()}\n"
            )
            return
        words = ["format", "--standalone", *self._format_arguments, "-t", _new_id(), "-c", str(properties)]
        done = subprocess.run(
            self._command(libs, "kafka.tools.StorageTool", *words),
            capture_output=True,
            text=True,
            timeout=patience(),
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(
                f"formatting Kafka's storage failed: {done.stdout[-1000:]}{done.stderr[-1000:]}"
            )

    def _launch(self, libs: Path, properties: Path) -> None:
        self._log_start = self.log_file.stat().st_size if self.log_file.exists() else 0
        command = self._command(libs, "kafka.Kafka", str(properties))
        self._process = spawn(command, log=self.log_file, die_with_parent=True)

    def _serves(self, log_start: int) -> bool:
        with self.log_file.open("rb") as log:
            log.seek(log_start)
            if self._started() not in log.read():
                return False
        with socket.socket() as probe:
            return probe.connect_ex((self._host, self._broker_port)) == 0

    def _started(self) -> bytes:
        """What its log says when it serves."""
        return b"Kafka Server started"

    def _log_tail(self, log_start: int) -> str:
        return self.log_file.read_bytes()[log_start:][-2000:].decode(errors="replace")

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(how)
        try:
            process.wait(patience(STOP_TIMEOUT_S))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _new_id() -> str:
    """A UUID as Apache Kafka writes it; like its own, none that begins as an option would."""
    while (text := base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")).startswith("-"):
        pass
    return text


if __name__ == "__main__":
    print(gather_jars())
    lay_up_classes()
