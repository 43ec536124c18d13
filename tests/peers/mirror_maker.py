"""MirrorMaker 2 in dedicated mode, as its users run it: one process of Apache Kafka's own jars.

A topic of cluster `ewr` arrives in the target as `ewr.<topic>` (DefaultReplicationPolicy). Intervals are
short only where a test would wait for nothing; ended by its process id.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from millrace.deploy.processes import spawn
from tests.peers.kafka import TEST_JVM_OPTIONS, class_options, gather_jars
from tests.ports import free_port
from tests.waiting import patience

MAIN_CLASS = "org.apache.kafka.connect.mirror.MirrorMaker"
STOP_TIMEOUT_S = 30.0
_LOG4J = """\
rootLogger.level = warn
rootLogger.appenderRef.out.ref = out
appender.out.type = Console
appender.out.name = out
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = %d %p %c{1}: %m%n
"""


class MirrorMaker:
    """`sources` {name: bootstrap} into one target, called `target`."""

    def __init__(
        self,
        folder: Path,
        sources: Mapping[str, str],
        target: str,
        topics: str,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log_file = folder / "mm2.log"
        properties = folder / "mm2.properties"
        values = {**_settings(sources, target, topics), **(settings or {})}
        properties.write_text("".join(f"{name}={value}\n" for name, value in values.items()))
        logging = folder / "log4j2.properties"
        logging.write_text(_LOG4J)
        command = ["java", *TEST_JVM_OPTIONS, *class_options(), f"-Dlog4j2.configurationFile={logging}"]
        command += ["-cp", f"{gather_jars()}/*", MAIN_CLASS, str(properties)]
        self.process = spawn(command, log=self.log_file, die_with_parent=True)

    def stop(self) -> None:
        """SIGTERM: tasks end in order and write their offsets."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(patience(STOP_TIMEOUT_S))
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def tail(self) -> str:
        return self.log_file.read_text(errors="replace")[-2000:]


def _settings(sources: Mapping[str, str], target: str, topics: str) -> dict[str, str]:
    rest_port = free_port()
    values = {
        "clusters": ", ".join([*sources, "target"]),
        "target.bootstrap.servers": target,
        "listeners": f"http://127.0.0.1:{rest_port}",
        "tasks.max": "1",
        "offset.flush.interval.ms": "1000",
        "emit.heartbeats.enabled": "false",
        "emit.checkpoints.enabled": "false",
        "sync.topic.acls.enabled": "false",
        "sync.topic.configs.enabled": "false",
    }
    for kind in ("", "offset-syncs.topic.", "checkpoints.topic.", "heartbeats.topic."):
        values[f"{kind}replication.factor"] = "1"
    for kind in ("offset", "status", "config"):
        values[f"{kind}.storage.replication.factor"] = "1"
    for name, address in sources.items():
        values |= {
            f"{name}.bootstrap.servers": address,
            f"{name}->target.enabled": "true",
            f"{name}->target.topics": topics,
            f"{name}->target.refresh.topics.interval.seconds": "2",
            f"target->{name}.enabled": "false",
        }
    return values
