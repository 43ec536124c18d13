"""Real servers for tests: ZooKeeper from PySpark's jars, and broker processes as a user starts them, but for
what `forked.py` spares them.

`conftest.py` makes fixtures of these. Every process dies with the test session, even when that is killed;
ports are free ones, data lies in folders that the caller gives.
"""

from __future__ import annotations

import itertools
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from kazoo.client import KazooClient

from millrace.deploy import zookeeper
from millrace.deploy.processes import spawn
from tests import forked
from tests.ports import free_port
from tests.waiting import patience, until

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0

SESSION_TIMEOUT_MS = 2_000
"""Short, so that a killed broker's id is free again soon; long enough for two busy cores."""

PROGRAM: Sequence[str] = ("-m", "millrace.deploy.cli")
"""How Python is told to run `millrace`; `tests/points` puts a launcher in its place."""

_API_VERSIONS_V0 = struct.pack(">ihhih", 10, 18, 0, 1, -1)


class ZooKeeper:
    """A standalone ZooKeeper; `chroot()` names a fresh path for one cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count(1)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def chroot(self) -> str:
        """`host:port/path` of a cluster of its own."""
        return f"{self.address}/cluster-{next(self._numbers)}"

    def start(self) -> ZooKeeper:
        command = zookeeper.launch_command(self.port, self.folder / "data", heap_mib=128)
        process = spawn(command, log=self.folder / "zookeeper.log", die_with_parent=True)
        self._process = process
        log_path = self.folder / "zookeeper.log"

        def is_serving() -> bool:
            if process.poll() is not None:
                raise RuntimeError(f"ZooKeeper ended with {process.returncode}: {log_path} says why")
            return zookeeper.is_serving(self.port)

        until(is_serving, "ZooKeeper answers", within_s=START_TIMEOUT_S, logs_of=[log_path])
        return self

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(patience(STOP_TIMEOUT_S))
            self._process = None

    def pause(self) -> None:
        """Freeze the server: clients see silence, not a closed connection."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


class BrokerProcess:
    """A broker as `millrace broker run` starts it. `restart` keeps id, address and data."""

    def __init__(
        self,
        zookeeper_path: str,
        folder: Path,
        *,
        broker_id: int = 1,
        port: int | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        self.id = broker_id
        self.zookeeper = zookeeper_path
        self.data = folder / "data"
        self.folders: list[Path] = []
        """Data folders in the place of `data`, where a test wants several."""
        self.log_path = folder / "broker.log"
        self.program = PROGRAM
        self.port = port or free_port()
        self.rack: str | None = None
        self.advertised_host: str | None = None
        self.settings = {
            "zookeeper.session.timeout.ms": SESSION_TIMEOUT_MS,
            "group.initial.rebalance.delay.ms": 0,
            "offsets.topic.num.partitions": 5,
            **(settings or {}),
        }
        self.process: forked.Process | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """Everything the process has said so far."""
        return self.log_path.read_text() if self.log_path.exists() else ""

    def command(self) -> list[str]:
        words = [sys.executable, *self.program, "broker", "run", "--id", str(self.id)]
        words += ["--zookeeper", self.zookeeper]
        words += [word for folder in self.folders or [self.data] for word in ("--data", str(folder))]
        if self.advertised_host is None:
            words += ["--listen", self.bootstrap]
        else:
            words += ["--listen", f"0.0.0.0:{self.port}"]
            words += ["--advertised", f"{self.advertised_host}:{self.port}"]
        words += ["--rack", self.rack] if self.rack else []
        for key, value in self.settings.items():
            words += ["--set", f"{key}={value}"]
        return words

    def launch(self) -> None:
        """Start the process and do not wait."""
        self.process = forked.start(self.command(), log=self.log_path)

    def start(self) -> BrokerProcess:
        self.launch()
        self.wait_until_serving()
        return self

    def wait_until_serving(self) -> None:
        """Until it answers a request; raises with the log's end when it does not."""

        def is_serving() -> bool:
            assert self.process is not None
            if self.process.poll() is not None:
                raise RuntimeError(f"the broker ended with {self.process.returncode}:\n{self.log[-2000:]}")
            return answers(self.port)

        until(is_serving, f"broker {self.id} answers", within_s=START_TIMEOUT_S, logs_of=[self])

    def resident_mib(self) -> float:
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    def metrics(self) -> str:
        """What it tells at `metrics.listen`."""
        host, _, port = str(self.settings["metrics.listen"]).rpartition(":")
        with socket.create_connection((host, int(port)), timeout=patience(30)) as connection:
            connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            text = b""
            while chunk := connection.recv(65_536):
                text += chunk
        return text.decode()

    @contextmanager
    def most_memory(self, mib: float) -> Iterator[None]:
        """At no moment of what happens inside has the broker `mib` MiB more in memory than before."""
        assert self.process is not None
        kept = Path(f"/proc/{self.process.pid}")
        (kept / "clear_refs").write_text("5")  # the peak begins anew: proc(5)
        before = self.resident_mib()
        yield
        peak = int((kept / "status").read_text().split("VmHWM:")[1].split()[0]) / 1024
        assert peak < before + mib, f"{peak - before:.0f} MiB more"

    def wait_until_ended(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """The exit status."""
        assert self.process is not None
        return self.process.wait(patience(timeout_s))

    def kill(self) -> None:
        """SIGKILL: no flush, no marker, no goodbye to ZooKeeper."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(patience(STOP_TIMEOUT_S))

    def end_session(self) -> None:
        """What ZooKeeper does two seconds after the process has died, now: its next start waits for that."""
        client = KazooClient(self.zookeeper)
        client.start(patience(STOP_TIMEOUT_S))
        try:
            registered = client.exists(f"/brokers/ids/{self.id}")
            if registered is not None:
                of_session = client.transaction()
                of_session.delete(f"/brokers/ids/{self.id}")
                controller = client.exists("/controller")
                if controller is not None and controller.ephemeralOwner == registered.ephemeralOwner:
                    of_session.delete("/controller")
                of_session.commit()
        finally:
            client.stop()
            client.close()

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        if self.process is None:
            return 0
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(patience(STOP_TIMEOUT_S))
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def restart(self) -> None:
        """Stop if it still runs, and start again."""
        self.stop()
        self.start()


def answers(port: int) -> bool:
    """Whether a broker on this port answers ApiVersions."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=patience(5.0)) as connection:
            connection.settimeout(patience(10.0))
            connection.sendall(_API_VERSIONS_V0)
            return len(connection.recv(8)) == 8
    except OSError:
        return False
