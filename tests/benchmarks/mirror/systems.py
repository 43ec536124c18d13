"""The mirrors that are compared: each as its users run it, one process with everything in it.

MirrorMaker 2 in dedicated mode, with the heap that Apache Kafka's script gives to Connect. `default` has
only what it needs to run at all, and four tasks; `tuned` compresses, batches and polls in large pieces.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from millrace.deploy.processes import spawn
from tests.cluster.mirror_process import MirrorProcess
from tests.peers.kafka import gather_jars
from tests.ports import free_port

HEAP = ("-Xms256M", "-Xmx2G")
JVM_OPTIONS = (*HEAP, "-server", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20", "-Djava.awt.headless=true")
MAIN_CLASS = "org.apache.kafka.connect.mirror.MirrorMaker"
TASKS = 4
SESSION_TIMEOUT_MS = 180_000
"""Of every system: none is given up while it stands still."""

SYSTEMS = (
    "millrace-eos",
    "mm2-default-eos",
    "mm2-tuned-eos",
    "millrace-alo",
    "mm2-default-alo",
    "mm2-tuned-alo",
)
"""eos: exactly once, alo: at least once."""
VARIED = "@"
"""Between the name of ours and a setting of mirror.yaml: `millrace-eos@batches.coalesce_bytes=65536`."""

TUNED = {
    "dst.producer.compression.type": "lz4",
    "dst.producer.batch.size": "1048576",
    "dst.producer.linger.ms": "20",
    "dst.producer.buffer.memory": "134217728",
    "dst.producer.max.request.size": "10485760",
    "consumer.max.poll.records": "10000",
    "consumer.fetch.max.bytes": "52428800",
    "consumer.max.partition.fetch.bytes": "10485760",
}
"""`consumer.*` is set for each source cluster."""


class Mirror:
    """A running mirror; `pid` is the one process that is accounted."""

    pid = 0

    def stop(self) -> None:
        raise NotImplementedError

    def tail(self) -> str:
        raise NotImplementedError


class Millrace(Mirror):
    def __init__(
        self,
        folder: Path,
        name: str,
        target: str,
        sources: Mapping[str, str],
        topics: str,
        *,
        exactly_once: bool,
        **more: Any,
    ) -> None:
        self._process = MirrorProcess(
            folder,
            target,
            dict(sources),
            topics=[topics],
            target_name="dst",
            name=name,
            delivery="exactly_once" if exactly_once else "at_least_once",
            group={"session_timeout_ms": SESSION_TIMEOUT_MS, "rebalance_timeout_ms": 60_000},
            **more,
        ).start()
        assert self._process.process is not None
        self.pid = self._process.process.pid

    def stop(self) -> None:
        self._process.kill()

    def tail(self) -> str:
        return self._process.log[-1_500:]


class MirrorMaker(Mirror):
    def __init__(
        self,
        folder: Path,
        target: str,
        sources: Mapping[str, str],
        topics: str,
        *,
        tuned: bool,
        exactly_once: bool,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "mm2.log"
        properties = folder / "mm2.properties"
        lines = settings(target, sources, topics, tuned=tuned, exactly_once=exactly_once)
        properties.write_text("".join(f"{name}={value}\n" for name, value in lines.items()))
        logging = folder / "log4j2.properties"
        logging.write_text(
            "rootLogger.level = warn\nrootLogger.appenderRef.out.ref = out\nappender.out.type = Console\n"
            "appender.out.name = out\nappender.out.layout.type = PatternLayout\n"
            "appender.out.layout.pattern = %d %p %c{1}: %m%n\n"
        )
        command = ["java", *JVM_OPTIONS, f"-Dlog4j2.configurationFile={logging}", "-cp", f"{gather_jars()}/*"]
        self._process = spawn([*command, MAIN_CLASS, str(properties)], log=self._log, die_with_parent=True)
        self.pid = self._process.pid

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def tail(self) -> str:
        return self._log.read_text(errors="replace")[-1_500:]


def settings(
    target: str, sources: Mapping[str, str], topics: str, *, tuned: bool, exactly_once: bool
) -> dict[str, str]:
    """What mm2.properties holds."""
    found = {
        "clusters": ", ".join([*sources, "dst"]),
        "dst.bootstrap.servers": target,
        "replication.policy.class": "org.apache.kafka.connect.mirror.IdentityReplicationPolicy",
        "tasks.max": str(TASKS),
        "replication.factor": "1",
        "offset-syncs.topic.replication.factor": "1",
        "checkpoints.topic.replication.factor": "1",
        "heartbeats.topic.replication.factor": "1",
        "offset.storage.replication.factor": "1",
        "status.storage.replication.factor": "1",
        "config.storage.replication.factor": "1",
        "emit.heartbeats.enabled": "false",
        "sync.topic.acls.enabled": "false",
        "dst.session.timeout.ms": str(SESSION_TIMEOUT_MS),
        "listeners": f"http://127.0.0.1:{free_port()}",
    }
    for name, address in sources.items():
        found[f"{name}.bootstrap.servers"] = address
        found[f"{name}->dst.enabled"] = "true"
        found[f"{name}->dst.topics"] = topics
        found[f"{name}->dst.refresh.topics.interval.seconds"] = "5"
        found[f"dst->{name}.enabled"] = "false"
    if tuned:
        for key, value in TUNED.items():
            if key.startswith("consumer."):
                found |= {f"{name}.{key}": value for name in sources}
            else:
                found[key] = value
    if exactly_once:
        found["dst.exactly.once.source.support"] = "enabled"
        found["dedicated.mode.enable.internal.rest"] = "true"
        found |= {f"{name}.consumer.isolation.level": "read_committed" for name in sources}
    return found


def start(
    system: str, folder: Path, name: str, target: str, sources: Mapping[str, str], topics: str, **more: object
) -> Mirror:
    """One of SYSTEMS, or ours with a setting (VARIED). `name` is the mirror's own, `topics` a regular
    expression; `more` are keys of mirror.yaml."""
    system, _, setting = system.partition(VARIED)
    if setting:
        more |= _nested(setting)
    exactly_once = system.endswith("-eos")
    if system.startswith("millrace"):
        return Millrace(folder, name, target, sources, topics, exactly_once=exactly_once, **more)
    tuned = system.startswith("mm2-tuned")
    return MirrorMaker(folder, target, sources, topics, tuned=tuned, exactly_once=exactly_once)


def _nested(setting: str) -> dict[str, object]:
    """`a.b=1` as keys of mirror.yaml."""
    path, _, text = setting.partition("=")
    value: object = yaml.safe_load(text)
    for key in reversed(path.split(".")):
        value = {key: value}
    if not isinstance(value, dict):
        raise ValueError(f"{setting} is no key=value")
    return value
