"""What `make test` needs of the machine, looked at before anything starts: a line for each thing that is
missing or in the way, and what to do. Nothing is skipped because of it.

Called by `tests/suite.py` and `tests/long_suite.py`. What setting up can install, it has installed
(deploy/bootstrap.sh); this finds what was taken away since.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from tests import ports

LEAST_FREE_BYTES = 4 << 30
"""The gate's servers, Spark and Apache Kafka's jars write less than 2 GiB at a time."""
LEAST_FREE_PORTS = 200
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

Find = Callable[[str], str | None]


def missing_programs(find: Find = shutil.which, java_homes: Iterable[Path] | None = None) -> list[str]:
    """A line for each program that is not there."""
    lines = [
        f"the tests need {programs[0]}: run  sudo apt-get install {package}"
        for package, programs in PROGRAMS.items()
        if not any(map(find, programs))
    ]
    if java_homes is None:
        java_homes = [Path(os.environ["JAVA_HOME"])] if "JAVA_HOME" in os.environ else []
        java_homes = [*java_homes, *Path("/usr/lib/jvm").glob("*")]
    if find("java") is None and not any(find(str(home / "bin" / "java")) for home in java_homes):
        lines.append("the tests need Java 17 or newer: run  sudo apt-get install default-jre-headless")
    return lines


def full_disk(folder: Path, free_bytes: int) -> list[str]:
    """A line when servers would run out of disk under the temporary folder."""
    if free_bytes >= LEAST_FREE_BYTES:
        return []
    return [
        f"{folder} has {free_bytes / (1 << 30):.1f} GiB free and the tests write up to "
        f"{LEAST_FREE_BYTES >> 30}: make room, or set TMPDIR to another folder"
    ]


def taken_ports(free_share: float, every: range) -> list[str]:
    """A line when hardly any port is left; `free_share` of a sample of `every`."""
    free = round(free_share * len(every))
    if free >= LEAST_FREE_PORTS:
        return []
    return [
        f"of the ports {every.start} to {every.stop - 1} about {free} are free and the tests' servers need "
        f"{LEAST_FREE_PORTS}: end what listens there (ss -ltnp shows it)"
    ]


def obstacles() -> list[str]:
    """What is missing or in the way on this machine, a line each."""
    folder = Path(tempfile.gettempdir())
    every = ports.all_ports()
    sample = every[:: max(1, len(every) // PORT_SAMPLES)]
    return [
        *missing_programs(),
        *full_disk(folder, shutil.disk_usage(folder).free),
        *taken_ports(sum(map(ports.is_free, sample)) / len(sample), every),
    ]
