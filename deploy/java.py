"""Finds a Java that can run ZooKeeper and Spark.

Called by `deploy.zookeeper` before it starts a server and by the commands that start Spark. Order: JAVA_HOME,
then PATH, then the folder where Debian and Ubuntu keep their runtimes. A Java that is too old is passed over,
so an old one on PATH does not hide a new one beside it. Nothing is kept between processes: a
`java -version` costs a few tens of milliseconds and is asked only by commands that need Java.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from millrace.broker.errors import JavaMissing

MINIMUM_VERSION = 17
SYSTEM_JVM_FOLDER = Path("/usr/lib/jvm")

_VERSION = re.compile(r'version "(\d+)(?:\.(\d+))?')


def find_java(environment: Mapping[str, str] | None = None, jvm_folder: Path = SYSTEM_JVM_FOLDER) -> Path:
    """The first Java of version 17 or newer; raises JavaMissing with what was found and what to install."""
    too_old: list[str] = []
    for candidate in _candidates(os.environ if environment is None else environment, jvm_folder):
        version = java_version(candidate)
        if version is None:
            continue
        if version >= MINIMUM_VERSION:
            return candidate
        too_old.append(f"{candidate} is version {version}")
    found = f"; {', '.join(too_old)}" if too_old else ""
    raise JavaMissing(
        f"no Java {MINIMUM_VERSION} or newer on JAVA_HOME or PATH{found}: "
        "install one, on Debian and Ubuntu with: apt-get install default-jre-headless"
    )


def java_home(java: Path) -> Path:
    """The JAVA_HOME that belongs to a `java` program: what PySpark's launcher wants to be told."""
    return java.resolve().parent.parent


def java_version(java: Path) -> int | None:
    """Major version of a `java` program (8 for the old "1.8" form); None when it does not run."""
    try:
        answer = subprocess.run(
            [str(java), "-version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = _VERSION.search(answer.stderr + answer.stdout)
    if match is None:
        return None
    major, minor = int(match[1]), match[2]
    return int(minor) if major == 1 and minor else major


def _candidates(environment: Mapping[str, str], jvm_folder: Path) -> Iterator[Path]:
    home = environment.get("JAVA_HOME")
    if home:
        yield Path(home) / "bin" / "java"
    on_path = shutil.which("java", path=environment.get("PATH", ""))
    if on_path:
        yield Path(on_path)
    if jvm_folder.is_dir():
        yield from sorted(jvm_folder.glob("*/bin/java"), reverse=True)
