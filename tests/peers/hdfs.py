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
import re
import signal
import subprocess
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import pyspark

from millrace.deploy.processes import spawn
from tests.peers.jars import ROOT, gather
from tests.ports import free_port
from tests.waiting import patience, until

POM = Path(__file__).with_name("hdfs.xml")
LIBS = ROOT / ".peers" / "hdfs" / "libs"
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0
SUPERUSER = "hdfs"

_JVM = ("-Xmx256M", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")
_PACKAGE = "org.apache.hadoop.hdfs.server"
_CLIENT_JARS = ("hadoop-client-*.jar", "log4j-*.jar", "slf4j-*.jar", "jcl-over-slf4j-*.jar")
_LOG4J = """\
rootLogger.level = warn
rootLogger.appenderRef.stdout.ref = stdout
appender.stdout.type = Console
appender.stdout.name = stdout
appender.stdout.layout.type = PatternLayout
appender.stdout.layout.pattern = %d %p %c{1}: %m%n
"""


def gather_jars() -> Path:
    """Make sure the pinned version's jar is in `.peers/hdfs/libs`; returns that folder."""
    found = re.search(r"<hadoop\.version>([^<]+)<", POM.read_text())
    if found is None:
        raise RuntimeError(f"{POM} pins no hadoop.version")
    return gather(POM, LIBS, f"hadoop-client-minicluster-{found.group(1)}.jar")


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
        (folder / "log4j2.properties").write_text(_LOG4J)
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
        _write_settings(folder / "core-site.xml", core)
        _write_settings(folder / "hdfs-site.xml", hdfs)

    @staticmethod
    def _environment() -> dict[str, str]:
        return {**os.environ, "HADOOP_USER_NAME": SUPERUSER}

    def _command(self, server: str, *arguments: str) -> list[str]:
        brought = Path(pyspark.__file__).parent / "jars"
        jars = [str(jar) for pattern in _CLIENT_JARS for jar in sorted(brought.glob(pattern))]
        path = ":".join([str(self.directory), *(str(jar) for jar in gather_jars().glob("*.jar")), *jars])
        return ["java", *_JVM, "-cp", path, f"{_PACKAGE}.{server}", *arguments]

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


def _write_settings(path: Path, settings: Mapping[str, str]) -> None:
    rows = "".join(
        f"<property><name>{name}</name><value>{value}</value></property>\n"
        for name, value in settings.items()
    )
    path.write_text(f"<configuration>\n{rows}</configuration>\n")


if __name__ == "__main__":
    print(gather_jars())
