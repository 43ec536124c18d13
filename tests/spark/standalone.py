"""A standalone Spark cluster as an administrator starts it: a master and two workers of one core each.

From PySpark's own scripts, on free loopback ports, each process ended by its id. The workers' home is a
folder of the test's, and `python` an interpreter with this project's libraries but without the project: what
runs on the executors must have travelled there.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import sysconfig
import urllib.request
import venv
from pathlib import Path
from typing import Any

import psutil
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
        self.python = self.make_python()
        self._port, self._web_port = free_port(), free_port()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def spark_home(self) -> Path:
        """Where its servers find Spark."""
        return SPARK_HOME

    def make_python(self) -> Path:
        """The interpreter that executors start."""
        return bare_python(self.folder / "python")

    def host_of(self, name: str) -> str:
        """The address of a server, `master` or `worker-0`, …"""
        return "127.0.0.1"

    def command_of(self, name: str, words: list[str]) -> list[str]:
        """The command line that runs these words where that server is to run."""
        return words

    def environment_of(self, name: str) -> dict[str, str]:
        """What that server has in its environment beside this process's own."""
        return {"HOME": str(self.home)}

    @property
    def master(self) -> str:
        return f"spark://{self.host_of('master')}:{self._port}"

    def state(self) -> dict[str, Any]:
        """What the master's own page says, as JSON."""
        with urllib.request.urlopen(
            f"http://{self.host_of('master')}:{self._web_port}/json/", timeout=patience(30)
        ) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def __enter__(self) -> StandaloneCluster:
        self._start("Master", "master", "--port", str(self._port), "--webui-port", str(self._web_port))
        for number in range(WORKER_COUNT):
            self.start_worker(number)
        try:
            self.wait_until_whole()
        except BaseException:
            self.__exit__()
            raise
        return self

    def start_worker(self, number: int) -> None:
        name = f"worker-{number}"
        words = ["--cores", "1", "--memory", "1g", "--webui-port", "0"]
        self._start("Worker", name, *words, "--work-dir", str(self.work_folder(number)), self.master)

    def work_folder(self, number: int) -> Path:
        return self.folder / f"work-{number}"

    def kill_worker(self, number: int) -> None:
        """SIGKILL to the worker, its executors and their Python, as when the machine is gone."""
        process = self._processes.pop(f"worker-{number}")
        tree = psutil.Process(process.pid)
        for each in (tree, *tree.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait(patience(STOP_TIMEOUT_S))

    def python_seconds(self, number: int) -> float:
        """Processor time of the Python processes that this worker's executors have now."""
        found = 0.0
        process = self._processes.get(f"worker-{number}")
        if process is not None:
            for each in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if each.name().startswith("python"):
                        times = each.cpu_times()
                        found += times.user + times.system
        return found

    def wait_until_whole(self) -> None:
        """Until the master knows all its workers."""
        logs = sorted(self.folder.glob("*.log"))

        def are_alive() -> bool:
            if any(each.poll() is not None for each in self._processes.values()):
                said = "\n".join(path.read_text()[-1500:] for path in logs)
                raise RuntimeError(f"the standalone cluster did not start: {said}")
            return self._alive_workers() == WORKER_COUNT

        until(are_alive, within_s=START_TIMEOUT_S, logs_of=logs, every_s=0.1)

    def __exit__(self, *_: object) -> None:
        processes = list(self._processes.values())
        for process in reversed(processes):
            if process.poll() is None:
                process.terminate()
        for process in processes:
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
        command = [
            str(self.spark_home / "bin" / "spark-class"),
            f"org.apache.spark.deploy.{kind.lower()}.{kind}",
        ]
        environment = {
            "PYTHONPATH": "",
            "PYSPARK_PYTHON": "",
            "SPARK_HOME": str(self.spark_home),
            "SPARK_LOCAL_IP": self.host_of(name),
            "SPARK_DAEMON_MEMORY": "128m",
            "SPARK_DAEMON_JAVA_OPTS": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xshare:auto",
            **self.environment_of(name),
        }
        process = spawn(
            self.command_of(name, [*command, "--host", self.host_of(name), *words]),
            log=self.folder / f"{name}.log",
            die_with_parent=True,
            environment=environment,
        )
        self._processes[name] = process


def bare_python(folder: Path, interpreter: Path | None = None, libraries: Path | None = None) -> Path:
    """An interpreter that finds the libraries of this one, and not what is installed from a source tree; made
    of another interpreter of this version, and with the libraries found elsewhere, where those are given."""
    if interpreter is None:
        venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    else:
        subprocess.run([interpreter, "-m", "venv", "--without-pip", "--symlinks", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(f"{libraries or sysconfig.get_paths()['purelib']}\n")
    python = folder / "bin" / "python"
    found = subprocess.run(
        [python, "-c", "import numba, millrace"], capture_output=True, text=True, check=False
    )
    if "No module named 'millrace'" not in found.stderr:
        raise RuntimeError(f"{python} should have numba and lack millrace: {found.stderr or sys.version}")
    return python
