"""Apache Kafka, one KRaft node on free loopback ports, for tests and benchmarks.

`KafkaPeer` is a plain synchronous object: `start()`, `bootstrap`, `stop()`, and for the rougher tests
`kill()`, `restart(port=…)`. The jars are gathered on first use by Maven (see pom.xml beside this
file) into `.peers/kafka/libs`; `python -m tests.peers.kafka` gathers them ahead of time.

One process for each peer, ended by its own process id and at the latest with the test session; data and logs
lie in the folder the caller gives.
"""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from millrace.deploy.processes import spawn

ROOT = Path(__file__).resolve().parents[2]
POM = Path(__file__).with_name("pom.xml")
LIBS = ROOT / ".peers" / "kafka" / "libs"
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 20.0
MAVEN_TIMEOUT_S = 600.0

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
    found = re.search(r"<kafka\.version>([^<]+)<", POM.read_text())
    if found is None:
        raise RuntimeError(f"{POM} pins no kafka.version")
    return found.group(1)


def gather_jars() -> Path:
    """Make sure the pinned version's jars are in `.peers/kafka/libs`; returns that folder.

    Maven writes beside the final folder and a rename publishes the result, so an interrupted download
    never looks complete.
    """
    if (LIBS / f"kafka_2.13-{kafka_version()}.jar").exists():
        return LIBS
    maven = shutil.which("mvn")
    if maven is None:
        raise RuntimeError("Apache Kafka's jars are missing and Maven is not installed: apt install maven")
    LIBS.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix="libs-", dir=LIBS.parent))
    try:
        command = [maven, "-B", "-q", "-f", str(POM), "dependency:copy-dependencies"]
        command += ["-DincludeScope=runtime", f"-DoutputDirectory={staging}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=MAVEN_TIMEOUT_S, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"Maven could not gather Kafka's jars: {(done.stdout + done.stderr)[-2000:]}")
        if LIBS.exists():
            shutil.rmtree(LIBS)
        staging.rename(LIBS)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return LIBS


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago; all are held open until all are chosen, so they differ."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


class KafkaPeer:
    """One Apache Kafka node, broker and controller in one process."""

    def __init__(
        self,
        directory: Path,
        *,
        settings: Mapping[str, str] | None = None,
        jvm_options: tuple[str, ...] = TEST_JVM_OPTIONS,
        log_level: str = "warn",
    ) -> None:
        self.directory = directory
        self.settings = dict(settings or {})
        self._jvm_options = jvm_options
        self._log_level = log_level
        self._process: subprocess.Popen[bytes] | None = None
        self._broker_port = 0
        self._controller_port = 0

    @property
    def bootstrap(self) -> str:
        """`host:port` of the broker's listener."""
        return f"127.0.0.1:{self._broker_port}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def log_file(self) -> Path:
        return self.directory / "server.log"

    def start(self) -> KafkaPeer:
        """Format the storage (first time), start the server, and wait until it serves."""
        libs = gather_jars()
        self.directory.mkdir(parents=True, exist_ok=True)
        if not self._broker_port:
            self._broker_port, self._controller_port = free_ports(2)
        (self.directory / "log4j2.properties").write_text(_LOG4J.format(level=self._log_level))
        properties = self._write_properties()
        if not (self.directory / "data" / "meta.properties").exists():
            self._format(libs, properties)
        self._launch(libs, properties)
        return self

    def stop(self) -> None:
        """Controlled shutdown; falls back to SIGKILL when it takes too long."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        self._end(signal.SIGKILL)

    def restart(self, *, port: int | None = None) -> None:
        """Stop when running, then start with the same data; `port` moves the broker's listener."""
        self.stop()
        self._broker_port = port or self._broker_port
        self.start()

    def __enter__(self) -> KafkaPeer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _write_properties(self) -> Path:
        broker, controller = self.bootstrap, f"127.0.0.1:{self._controller_port}"
        values = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.bootstrap.servers": controller,
            "listeners": f"PLAINTEXT://{broker},CONTROLLER://{controller}",
            "advertised.listeners": f"PLAINTEXT://{broker},CONTROLLER://{controller}",
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
            "log.dirs": str(self.directory / "data"),
            "offsets.topic.replication.factor": "1",
            "offsets.topic.num.partitions": "5",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "transaction.state.log.num.partitions": "5",
            "share.coordinator.state.topic.replication.factor": "1",
            "share.coordinator.state.topic.min.isr": "1",
            "group.initial.rebalance.delay.ms": "0",
            **self.settings,
        }
        path = self.directory / "server.properties"
        path.write_text("".join(f"{name}={value}\n" for name, value in values.items()))
        return path

    def _command(self, libs: Path, *arguments: str) -> list[str]:
        log4j = f"-Dlog4j2.configurationFile={self.directory / 'log4j2.properties'}"
        return ["java", *self._jvm_options, log4j, "-cp", f"{libs}/*", *arguments]

    def _format(self, libs: Path, properties: Path) -> None:
        tool = "kafka.tools.StorageTool"
        made = subprocess.run(
            self._command(libs, tool, "random-uuid"), capture_output=True, text=True, timeout=60, check=True
        )
        cluster_id = made.stdout.strip().splitlines()[-1]
        done = subprocess.run(
            self._command(libs, tool, "format", "--standalone", "-t", cluster_id, "-c", str(properties)),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(
                f"formatting Kafka's storage failed: {done.stdout[-1000:]}{done.stderr[-1000:]}"
            )

    def _launch(self, libs: Path, properties: Path) -> None:
        log_start = self.log_file.stat().st_size if self.log_file.exists() else 0
        command = self._command(libs, "kafka.Kafka", str(properties))
        self._process = spawn(command, log=self.log_file, die_with_parent=True)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._serves(log_start):
            ended = self._process.poll() is not None
            if ended or time.monotonic() > deadline:
                self.kill()
                reason = "ended" if ended else f"did not serve within {START_TIMEOUT_S:.0f} s"
                raise RuntimeError(f"Kafka at {self.bootstrap} {reason}: {self._log_tail(log_start)}")
            time.sleep(0.05)

    def _serves(self, log_start: int) -> bool:
        with self.log_file.open("rb") as log:
            log.seek(log_start)
            if b"Kafka Server started" not in log.read():
                return False
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._broker_port)) == 0

    def _log_tail(self, log_start: int) -> str:
        return self.log_file.read_bytes()[log_start:][-2000:].decode(errors="replace")

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(how)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    print(gather_jars())
