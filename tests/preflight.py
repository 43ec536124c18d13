"""What `make test` needs of the machine, looked at before anything starts: a line for each thing that is
missing or in the way, and what to do. Nothing is skipped because of it.

Called by `tests/suite.py` and `tests/long_suite.py`. What setting up can install, it has installed
(deploy/bootstrap.sh); this finds what was taken away since, and what a killed run has left.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from millrace.broker.errors import JavaMissing
from millrace.deploy.java import find_java
from tests import ports

LEAST_FREE_BYTES = 4 << 30
"""The gate's servers, Spark and Apache Kafka's jars write less than 2 GiB at a time."""
LEAST_FREE_PORTS = 1_000
"""One run of pytest takes some hundreds, and none of them twice."""
PORT_SAMPLES = 400

PROGRAMS: Mapping[str, tuple[str, ...]] = {
    "kcat": ("kcat",),
    "openssl": ("openssl",),
    "chromium": ("chromium", "chromium-browser", "google-chrome"),
    "maven": ("mvn",),
    "iproute2": ("ip",),
    "prometheus": ("promtool",),
    "burrow": ("Burrow",),
}
"""Debian's package → programs, any of which will do."""
ROOTS_PROGRAMS: Mapping[str, tuple[str, ...]] = {"e2fsprogs": ("mkfs.ext4",)}
"""The same for what only root can use."""

SERVERS = ("python", "java", "chrom", "Burrow", "prometheus")
"""How the programs' names begin that tests start: whoever looks at a log of theirs is none of them."""
_RUN = re.compile(r"/[^\s:=,]*/pytest-of-[^/\s]+/pytest-\d+(?=/)")

Find = Callable[[str], str | None]


def missing_programs(find: Find = shutil.which, *, is_root: bool = False) -> list[str]:
    """A line for each program that is not there."""
    wanted = {**PROGRAMS, **(ROOTS_PROGRAMS if is_root else {})}
    return [
        f"the tests need {programs[0]}: run  sudo apt-get install {package}"
        for package, programs in wanted.items()
        if not any(map(find, programs))
    ]


def missing_java(find: Callable[[], Path] = find_java) -> list[str]:
    """A line when there is no Java that ZooKeeper, Spark and Apache Kafka run on."""
    try:
        find()
    except JavaMissing as error:
        return [f"the tests need Java: {error}"]
    return []


def path_to_java(java: Path, path: str) -> str:
    """PATH, with this Java before any other: Apache Kafka, Maven and Spark's scripts take its first one."""
    if shutil.which("java", path=path) == str(java):
        return path
    return f"{java.parent}{os.pathsep}{path}"


def full_disk(folder: Path, free_bytes: int) -> list[str]:
    """A line when servers would run out of disk under the temporary folder."""
    if free_bytes >= LEAST_FREE_BYTES:
        return []
    return [
        f"{folder} has {free_bytes / (1 << 30):.1f} GiB free and the tests write up to "
        f"{LEAST_FREE_BYTES >> 30}: make room, or set TMPDIR to another folder"
    ]


def taken_ports(free_share: float, every: range) -> list[str]:
    """A line when hardly any port of one run's is left; `free_share` of a sample of them."""
    free = round(free_share * len(every))
    if free >= LEAST_FREE_PORTS:
        return []
    return [
        f"of the ports {every.start} to {every.stop - 1} about {free} are free and the tests' servers need "
        f"{LEAST_FREE_PORTS}: end what listens there (ss -ltnp shows it)"
    ]


def left_running(
    processes: Iterable[tuple[int, Sequence[str]]], was_killed: Callable[[Path], bool]
) -> list[str]:
    """A line when servers of a killed run go on; processes are (id, command line), a run is pytest's folder
    of temporary files, which its servers' command lines name."""
    found = [
        number
        for number, words in processes
        if words and Path(words[0]).name.startswith(SERVERS)
        if any(was_killed(Path(run)) for run in set(_RUN.findall(" ".join(words))))
    ]
    if not found:
        return []
    numbers = " ".join(map(str, sorted(found)))
    return [f"processes of a run that was killed go on: end them by  kill {numbers}"]


def was_killed(run: Path) -> bool:
    """Whether its pytest ended without putting its lock away."""
    try:
        return not psutil.pid_exists(int((run / ".lock").read_text()))
    except (OSError, ValueError):
        return False


def obstacles(runs: int = 1) -> list[str]:
    """What is missing or in the way on this machine, a line each; `runs` of pytest go side by side. The Java
    that was found is first on PATH afterwards."""
    no_java = missing_java()
    if not no_java:
        os.environ["PATH"] = path_to_java(find_java(), os.environ.get("PATH", ""))
    return [
        *missing_programs(is_root=sys.platform == "linux" and os.geteuid() == 0),
        *no_java,
        *_no_room(),
        *(line for share in ports.shares(runs) for line in taken_ports(_free_share(share), share)),
        *left_running(_processes(), was_killed),
    ]


def _no_room() -> list[str]:
    asked = os.environ.get("TMPDIR")
    try:
        folder: Path | None = Path(tempfile.gettempdir())  # the first that takes a file
    except FileNotFoundError:
        folder = None
    if folder is None or (asked and folder != Path(asked).absolute()):
        return [f"{asked or '/tmp'} takes no file: make room, or set TMPDIR to another folder"]
    return full_disk(folder, shutil.disk_usage(folder).free)


def _free_share(every: range) -> float:
    sample = every[:: max(1, len(every) // PORT_SAMPLES)]
    return sum(map(ports.is_free, sample)) / len(sample)


def _processes() -> Iterator[tuple[int, Sequence[str]]]:
    for process in psutil.process_iter(["cmdline"]):
        yield process.pid, process.info["cmdline"] or ()
