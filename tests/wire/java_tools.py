"""The Java client, as the console tools of Apache Kafka.

A JVM costs a second or two to start. So what administrators ask and do, and the console's consumer
(`IN_ONE_JVM`), are run by one that stays, one `main` after the other (`java/ToolsHost.java`); all others have
a process of their own, and tests give one such call much to do. The jars are those that
`tests/peers/kafka.py` gathers for the server.
"""

from __future__ import annotations

import atexit
import base64
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.peers.kafka import class_options, gather_jars
from tests.waiting import patience

TIMEOUT_S = 240.0
SIDE_BY_SIDE = 2

# Short-lived: start-up counts more than peak speed. Errors only, and never between the lines of the output.
_JVM_OPTIONS = ("-Xmx128M", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")
_LOGGING = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %p %c{1}: %m%n
"""

MAIN_CLASSES = {
    "topics": "org.apache.kafka.tools.TopicCommand",
    "configs": "kafka.admin.ConfigCommand",
    "groups": "org.apache.kafka.tools.GroupsCommand",
    "consumer-groups": "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand",
    "console-producer": "org.apache.kafka.tools.ConsoleProducer",
    "console-consumer": "org.apache.kafka.tools.consumer.ConsoleConsumer",
    "get-offsets": "org.apache.kafka.tools.GetOffsetShell",
    "delete-records": "org.apache.kafka.tools.DeleteRecordsCommand",
    "log-dirs": "org.apache.kafka.tools.LogDirsCommand",
    "dump-log": "kafka.tools.DumpLogSegments",
    "leader-election": "org.apache.kafka.tools.LeaderElectionCommand",
    "reassign-partitions": "org.apache.kafka.tools.reassign.ReassignPartitionsCommand",
    "cluster": "org.apache.kafka.tools.ClusterTool",
    "broker-api-versions": "org.apache.kafka.tools.BrokerApiVersionsCommand",
    "transactions": "org.apache.kafka.tools.TransactionsCommand",
    "transactional-copier": "org.apache.kafka.tools.TransactionalMessageCopier",
    "verifiable-producer": "org.apache.kafka.tools.VerifiableProducer",
    "verifiable-consumer": "org.apache.kafka.tools.VerifiableConsumer",
    "compatibility": "org.apache.kafka.tools.ClientCompatibilityTest",
    "producer-performance": "org.apache.kafka.tools.ProducerPerformance",
    "consumer-performance": "org.apache.kafka.tools.ConsumerPerformance",
}
"""Names as the shell scripts of Apache Kafka have them, and what they start."""

IN_ONE_JVM = {
    *(
        "topics",
        "configs",
        "groups",
        "consumer-groups",
        "get-offsets",
        "delete-records",
        "log-dirs",
        "dump-log",
    ),
    *("leader-election", "reassign-partitions", "cluster", "broker-api-versions", "transactions"),
    "console-consumer",
}
HOST = Path(__file__).with_name("java") / "ToolsHost.java"


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.out.splitlines() if line.strip()]

    def checked(self) -> Outcome:
        assert self.status == 0, f"{self.out[-1500:]}\n{self.err[-3000:]}"
        return self


class JavaTools:
    """`run("topics", "--list")` runs a tool against the server; `raw` leaves the server's address out."""

    def __init__(self, bootstrap: str, folder: Path) -> None:
        self.bootstrap = bootstrap
        self._libs = gather_jars()
        self._logging = folder / "tools-log4j2.properties"
        self._logging.write_text(_LOGGING)

    def command(self, tool: str, *arguments: str) -> list[str]:
        return [*self.start(), MAIN_CLASSES[tool], *arguments]

    def start(self) -> list[str]:
        """The command of a JVM, without the class to run."""
        logging = f"-Dlog4j2.configurationFile={self._logging}"
        return ["java", *_JVM_OPTIONS, *class_options(), logging, "-cp", f"{self._libs}/*"]

    def raw(self, tool: str, *arguments: str, given: str = "") -> Outcome:
        if tool in IN_ONE_JVM and not given:
            return _host.run(self.start(), MAIN_CLASSES[tool], *arguments)
        done = subprocess.run(
            self.command(tool, *arguments),
            input=given,
            capture_output=True,
            text=True,
            errors="surrogateescape",  # the console shows any bytes
            timeout=patience(TIMEOUT_S),
            check=False,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    def run(self, tool: str, *arguments: str, given: str = "") -> Outcome:
        return self.raw(tool, "--bootstrap-server", self.bootstrap, *arguments, given=given)


class Host:
    """One JVM for tools, from the first run to the end of this process, which it does not outlive.

    One that has ended, by itself or because a tool took too long, is begun anew by the next run.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def run(
        self, start: Sequence[str], main_class: str, *arguments: str, within_s: float = TIMEOUT_S
    ) -> Outcome:
        """`start` begins the JVM where there is none."""
        # Nothing at all is said as "-", which is no base64: an empty word would be lost at the end of a line.
        asked = b" ".join(base64.b64encode(word.encode()) or b"-" for word in (main_class, *arguments))
        with self._lock:
            if self._process is None:
                self._process = subprocess.Popen(
                    [*start, str(HOST)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
                atexit.register(self.end)
            assert self._process.stdin is not None and self._process.stdout is not None
            late = threading.Timer(patience(within_s), self._process.kill)
            late.start()
            try:
                self._process.stdin.write(asked + b"\n")
                self._process.stdin.flush()
                answer = self._process.stdout.readline().split()
            except BrokenPipeError:
                answer = []
            finally:
                late.cancel()
            if len(answer) != 3:
                self._process.kill()
                self.end()
        assert len(answer) == 3, f"the JVM of the tools ended at {main_class} {' '.join(arguments)}"
        out, err = (base64.b64decode(said) if said != b"-" else b"" for said in answer[1:])
        return Outcome(int(answer[0]), *(said.decode(errors="surrogateescape") for said in (out, err)))

    def end(self) -> None:
        """Closes its standard input, at which it ends, and waits for that. Nothing where there is none."""
        if self._process is not None:
            atexit.unregister(self.end)
            process, self._process = self._process, None
            process.communicate()


_host = Host()


def together(calls: Mapping[str, Callable[[], Outcome]]) -> dict[str, Outcome]:
    """Run calls that do not depend on each other; their outcomes by the same names."""
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        running = {name: pool.submit(call) for name, call in calls.items()}
        return {name: future.result() for name, future in running.items()}


def words(lines: Sequence[str]) -> list[list[str]]:
    """A printed table without its spaces."""
    return [line.split() for line in lines]
