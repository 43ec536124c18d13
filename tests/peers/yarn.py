"""YARN, a resource manager and a node manager on free loopback ports: a cluster that runs the audit's Spark.

`YarnPeer` is a plain synchronous object: `start()`, `configuration` (what HADOOP_CONF_DIR names), `stop()`.
Both are Hadoop's own servers, from the jar that `hadoop.py` beside this file gathers, and one that yarn.xml
names. There is no HDFS: what an
application brings is staged in a local folder, which is the same on every machine of this cluster of one.

Containers are processes of the node manager's user; their logs lie under `logs`. Each server is ended by its
own id, with its containers, and at the latest with the test session.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from millrace.deploy.processes import spawn
from tests.peers.hadoop import command, write_settings
from tests.peers.jars import ROOT, gather, pinned
from tests.ports import free_port
from tests.waiting import patience, until

POM = Path(__file__).with_name("yarn.xml")
LIBS = ROOT / ".peers" / "yarn" / "libs"
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0
MEMORY_MB = 4_096
_SERVERS = "org.apache.hadoop.yarn.server"


def gather_jars() -> Path:
    """Make sure that what YARN needs beside HDFS's jar is in `.peers/yarn/libs`; returns that folder."""
    return gather(POM, LIBS, f"bcprov-jdk18on-{pinned(POM, 'bouncycastle')}.jar")


class YarnPeer:
    """One resource manager and one node manager with so many cores."""

    def __init__(self, directory: Path, cores: int = 4) -> None:
        self.directory = directory
        self.configuration = directory / "conf"
        self.logs = directory / "logs"
        self._cores = cores
        self._ports = {
            name: free_port()
            for name in ("client", "scheduler", "tracker", "admin", "web", "node", "localizer")
        }
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> YarnPeer:
        """Start both, and wait until the one knows the other."""
        for folder in (self.configuration, self.logs, self.directory / "local", self.directory / "staging"):
            folder.mkdir(parents=True, exist_ok=True)
        self._configure()
        beside = sorted(gather_jars().glob("*.jar"))
        for server in ("resourcemanager.ResourceManager", "nodemanager.NodeManager"):
            log = self.directory / f"{server.partition('.')[0]}.log"
            words = command(self.configuration, f"{_SERVERS}.{server}", beside=beside)
            self._processes.append(spawn(words, log=log, die_with_parent=True))

        def is_serving() -> bool:
            if any(each.poll() is not None for each in self._processes):
                raise RuntimeError(f"YARN did not start: {self._log_tails()}")
            with contextlib.suppress(OSError, ValueError):
                return bool(self._asked("metrics")["clusterMetrics"]["activeNodes"])
            return False

        try:
            until(is_serving, lambda: f"YARN serves: {self._log_tails()}", within_s=START_TIMEOUT_S)
        except BaseException:
            self.stop()
            raise
        return self

    def applications(self) -> list[dict[str, Any]]:
        """What the resource manager tells of each, by its REST interface."""
        return list((self._asked("apps").get("apps") or {}).get("app", ()))

    def stop(self) -> None:
        """Nothing of it is needed afterwards, so nothing is said goodbye to."""
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                tree = psutil.Process(process.pid)
                for each in (*tree.children(recursive=True), tree):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.kill()
            process.wait(patience(STOP_TIMEOUT_S))
        self._processes.clear()

    def __enter__(self) -> YarnPeer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _asked(self, what: str) -> dict[str, Any]:
        address = f"http://127.0.0.1:{self._ports['web']}/ws/v1/cluster/{what}"
        request = urllib.request.Request(address, headers={"Accept": "application/json"})
        with urllib.request.urlopen(request, timeout=patience(10)) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def _configure(self) -> None:
        at = {name: f"127.0.0.1:{port}" for name, port in self._ports.items()}
        write_settings(
            self.configuration / "core-site.xml",
            {"fs.defaultFS": "file:///", "hadoop.tmp.dir": str(self.directory / "tmp")},
        )
        write_settings(
            self.configuration / "capacity-scheduler.xml",
            {
                "yarn.scheduler.capacity.root.queues": "default",
                "yarn.scheduler.capacity.root.default.capacity": "100",
                "yarn.scheduler.capacity.maximum-am-resource-percent": "1.0",
            },
        )
        write_settings(
            self.configuration / "yarn-site.xml",
            {
                "yarn.resourcemanager.hostname": "127.0.0.1",
                "yarn.resourcemanager.address": at["client"],
                "yarn.resourcemanager.scheduler.address": at["scheduler"],
                "yarn.resourcemanager.resource-tracker.address": at["tracker"],
                "yarn.resourcemanager.admin.address": at["admin"],
                "yarn.resourcemanager.webapp.address": at["web"],
                "yarn.nodemanager.hostname": "127.0.0.1",
                "yarn.nodemanager.address": at["node"],
                "yarn.nodemanager.localizer.address": at["localizer"],
                "yarn.nodemanager.webapp.address": "127.0.0.1:0",
                "yarn.nodemanager.local-dirs": str(self.directory / "local"),
                "yarn.nodemanager.log-dirs": str(self.logs),
                "yarn.nodemanager.resource.memory-mb": str(MEMORY_MB),
                "yarn.nodemanager.resource.cpu-vcores": str(self._cores),
                "yarn.nodemanager.delete.debug-delay-sec": "600",
                "yarn.nodemanager.vmem-check-enabled": "false",
                "yarn.nodemanager.pmem-check-enabled": "false",
                "yarn.nodemanager.disk-health-checker.enable": "false",
                "yarn.scheduler.minimum-allocation-mb": "256",
                # Each step of an application waits for one, and by default that is a second.
                "yarn.resourcemanager.nodemanagers.heartbeat-interval-ms": "200",
                "yarn.client.nodemanager-connect.max-wait-ms": "10000",
                "yarn.resourcemanager.connect.max-wait.ms": "10000",
            },
        )

    def _log_tails(self) -> str:
        logs = sorted(self.directory.glob("*.log"))
        return " ".join(log.read_bytes()[-1500:].decode(errors="replace") for log in logs)


def environment_of(peer: YarnPeer) -> dict[str, str]:
    """What a shell has that submits to it."""
    return {
        **os.environ,
        "HADOOP_CONF_DIR": str(peer.configuration),
        "YARN_CONF_DIR": str(peer.configuration),
    }


if __name__ == "__main__":
    print(gather_jars())
