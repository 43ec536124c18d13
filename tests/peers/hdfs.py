"""HDFS, a name node and a data node on free loopback ports: where the audit's state can be kept.

`HdfsPeer` is a plain synchronous object: `start()`, `uri`, `stop()`, and for the rougher tests
`kill_name_node()` and `start_name_node()`. Both are Hadoop's own servers, from the jar that Hadoop makes for
such tests, beside the client's jars that PySpark brings. The jar is gathered on first use by Maven (see
hdfs.xml beside this file) into `.peers/hdfs/libs`; `python -m tests.peers.hdfs` gathers it ahead of time.

The superuser is `hdfs` and every file's replication 1; who runs the tests is an ordinary user, who may write
only where that one allows it. Each process is ended by its own id and at the latest with the test session;
data and logs lie in the folder the caller gives.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.request
from pathlib import Path

from millrace.deploy.processes import spawn
from tests.peers.hadoop import command, gather_jars, write_settings
from tests.ports import free_port
from tests.waiting import patience, until

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0
SUPERUSER = "hdfs"

_PACKAGE = "org.apache.hadoop.hdfs.server"


class HdfsPeer:
    """One name node and one data node. `host` is the address that both listen on."""

    def __init__(self, directory: Path, host: str = "127.0.0.1") -> None:
        self.directory = directory
        self._host = host
        self._port, self._web_port = free_port(), free_port()
        self._name_node: subprocess.Popen[bytes] | None = None
        self._data_node: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        return f"hdfs://{self._host}:{self._port}"

    @property
    def web_address(self) -> str:
        """The name node's, of this machine alone."""
        return f"http://127.0.0.1:{self._web_port}"

    def start(self) -> HdfsPeer:
        """Format the storage, start both servers, and wait until files can be written."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._configure()
        done = subprocess.run(
            self._command("namenode.NameNode", "-format", "-force", "-nonInteractive"),
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=patience(START_TIMEOUT_S),
            check=False,
        )
        if not (self.directory / "name" / "current" / "VERSION").exists():
            raise RuntimeError(f"formatting HDFS failed: {(done.stdout + done.stderr)[-2000:]}")
        self._data_node = self._spawn("datanode.DataNode")  # it waits for its name node
        self.start_name_node()
        return self

    def start_name_node(self) -> None:
        """Start it, and wait until it has left safe mode and knows its data node."""
        self._name_node = self._spawn("namenode.NameNode")

        def is_serving() -> bool:
            for process in (self._name_node, self._data_node):
                if process is None or process.poll() is not None:
                    raise RuntimeError(f"HDFS did not start: {self._log_tails()}")
            return self._serves()

        try:
            until(is_serving, lambda: f"HDFS serves: {self._log_tails()}", within_s=START_TIMEOUT_S)
        except BaseException:
            self.stop()
            raise

    def kill_name_node(self) -> None:
        """SIGKILL, as a crash would."""
        self._end(self._name_node)
        self._name_node = None

    def stop(self) -> None:
        """Nothing of it is needed afterwards, so nothing is said goodbye to."""
        for process in (self._name_node, self._data_node):
            self._end(process)
        self._name_node = self._data_node = None

    def __enter__(self) -> HdfsPeer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _configure(self) -> None:
        folder = self.directory
        core = {"fs.defaultFS": self.uri, "hadoop.tmp.dir": str(folder / "tmp")}
        hdfs = {
            "dfs.namenode.name.dir": (folder / "name").as_uri(),
            "dfs.datanode.data.dir": (folder / "data").as_uri(),
            "dfs.namenode.http-address": f"127.0.0.1:{self._web_port}",
            "dfs.datanode.address": f"{self._host}:0",
            "dfs.datanode.http.address": "127.0.0.1:0",
            "dfs.datanode.ipc.address": f"{self._host}:0",
            "dfs.datanode.hostname": self._host,
            "dfs.namenode.datanode.registration.ip-hostname-check": "false",
            "dfs.replication": "1",
            "dfs.permissions.superusergroup": SUPERUSER,
            "dfs.heartbeat.interval": "1",
            "dfs.namenode.safemode.extension": "0",
            "dfs.namenode.safemode.min.datanodes": "1",
            "dfs.blockreport.initialDelay": "0",
            "dfs.block.scanner.volume.bytes.per.second": "0",
        }
        write_settings(folder / "core-site.xml", core)
        write_settings(folder / "hdfs-site.xml", hdfs)

    @staticmethod
    def _environment() -> dict[str, str]:
        return {**os.environ, "HADOOP_USER_NAME": SUPERUSER}

    def _command(self, server: str, *arguments: str) -> list[str]:
        return command(self.directory, f"{_PACKAGE}.{server}", *arguments)

    def _spawn(self, server: str) -> subprocess.Popen[bytes]:
        log = self.directory / f"{server.partition('.')[0]}.log"
        return spawn(self._command(server), log=log, environment=self._environment(), die_with_parent=True)

    def _serves(self) -> bool:
        address = f"{self.web_address}/jmx?qry=Hadoop:service=NameNode,name=NameNodeInfo"
        try:
            with urllib.request.urlopen(address, timeout=patience(5)) as answer:
                (told,) = json.load(answer)["beans"]
        except (OSError, ValueError):
            return False
        return not told["Safemode"] and bool(json.loads(told["LiveNodes"]))

    def _log_tails(self) -> str:
        logs = sorted(self.directory.glob("*.log"))
        return " ".join(log.read_bytes()[-1500:].decode(errors="replace") for log in logs)

    @staticmethod
    def _end(process: subprocess.Popen[bytes] | None) -> None:
        if process is not None:
            process.send_signal(signal.SIGKILL)
            process.wait(patience(STOP_TIMEOUT_S))


if __name__ == "__main__":
    print(gather_jars())
