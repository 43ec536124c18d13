"""The Java client, as the console tools of Apache Kafka: each call is a process of its own.

A JVM costs a second or two to start, so tests give one call much to do, and run calls that do not depend on
each other side by side (`together`). The jars are those that `tests/peers/kafka.py` gathers for the server.
"""

from __future__ import annotations

import subprocess
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
        logging = f"-Dlog4j2.configurationFile={self._logging}"
        start = [
            "java",
            *_JVM_OPTIONS,
            *class_options(),
            logging,
            "-cp",
            f"{self._libs}/*",
            MAIN_CLASSES[tool],
        ]
        return [*start, *arguments]

    def raw(self, tool: str, *arguments: str, given: str = "") -> Outcome:
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


def together(calls: Mapping[str, Callable[[], Outcome]]) -> dict[str, Outcome]:
    """Run calls that do not depend on each other; their outcomes by the same names."""
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        running = {name: pool.submit(call) for name, call in calls.items()}
        return {name: future.result() for name, future in running.items()}


def words(lines: Sequence[str]) -> list[list[str]]:
    """A printed table without its spaces."""
    return [line.split() for line in lines]
