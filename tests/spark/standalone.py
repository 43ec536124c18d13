"""A standalone Spark cluster as an administrator starts it: a master and two workers of one core each.

From PySpark's own scripts, on free loopback ports, each process ended by its id. The workers' home is a
folder of the test's, and `python` an interpreter with this project's libraries but without the project: what
runs on the executors must have travelled there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import urllib.request
import venv
from pathlib import Path
from typing import Any

import pyspark

from millrace.deploy.processes import spawn
from tests.ports import free_port
from tests.waiting import patience, until

START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 60.0
WORKER_COUNT = 2
SPARK_HOME = Path(pyspark.__file__).parent


class StandaloneCluster:
    """`master` is its address; use as a context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.home.mkdir(parents=True)
        self.python = bare_python(folder / "python")
        self._port, self._web_port = free_port(), free_port()
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def master(self) -> str:
        return f"spark://127.0.0.1:{self._port}"

    def state(self) -> dict[str, Any]:
        """What the master's own page says, as JSON."""
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self._web_port}/json/", timeout=patience(30)
        ) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def __enter__(self) -> StandaloneCluster:
        self._start("Master", "master", "--port", str(self._port), "--webui-port", str(self._web_port))
        for number in range(WORKER_COUNT):
            words = ["--cores", "1", "--memory", "1g", "--webui-port", "0"]
            words += ["--work-dir", str(self.folder / f"work-{number}"), self.master]
            self._start("Worker", f"worker-{number}", *words)
        logs = sorted(self.folder.glob("*.log"))

        def are_alive() -> bool:
            if any(each.poll() is not None for each in self._processes):
                said = "\n".join(path.read_text()[-1500:] for path in logs)
                raise RuntimeError(f"the standalone cluster did not start: {said}")
            return self._alive_workers() == WORKER_COUNT

        try:
            until(are_alive, within_s=START_TIMEOUT_S, logs_of=logs, every_s=0.1)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            if process.poll() is None:
                process.terminate()
        for process in self._processes:
            try:
                process.wait(patience(STOP_TIMEOUT_S))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()

    def _alive_workers(self) -> int:
        try:
            return int(self.state()["aliveworkers"])
        except (OSError, ValueError):  # the page is there before what it shows
            return 0

    def _start(self, kind: str, name: str, *words: str) -> None:
        command = [str(SPARK_HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{kind.lower()}.{kind}"]
        environment = {
            "PYTHONPATH": "",
            "PYSPARK_PYTHON": "",
            "SPARK_HOME": str(SPARK_HOME),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "128m",
            "SPARK_DAEMON_JAVA_OPTS": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xshare:auto",
            "HOME": str(self.home),
        }
        process = spawn(
            [*command, "--host", "127.0.0.1", *words],
            log=self.folder / f"{name}.log",
            die_with_parent=True,
            environment=environment,
        )
        self._processes.append(process)


def bare_python(folder: Path) -> Path:
    """An interpreter that finds the libraries of this one, and not what is installed from a source tree."""
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    python = folder / "bin" / "python"
    found = subprocess.run(
        [python, "-c", "import numba, millrace"], capture_output=True, text=True, check=False
    )
    if "No module named 'millrace'" not in found.stderr:
        raise RuntimeError(f"{python} should have numba and lack millrace: {found.stderr or sys.version}")
    return python
