"""Jars gathered by Maven into the git-ignored `.peers/`, once; called by each peer for its own POM.

What must stay true: an interrupted download never looks complete, and two that gather at once both end with
the same folder.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.waiting import patience

ROOT = Path(__file__).resolve().parents[2]
MAVEN_TIMEOUT_S = 600.0


def pinned(pom: Path, name: str) -> str:
    """The version that this POM has of it. Raises RuntimeError for one that has none."""
    found = re.search(rf"<{name}\.version>([^<]+)<", pom.read_text())
    if found is None:
        raise RuntimeError(f"{pom} pins no {name}.version")
    return found.group(1)


def gather(pom: Path, libs: Path, newest: str, only: Sequence[str] = ()) -> Path:
    """Make sure that the POM's jars are in `libs`; returns that folder.

    `newest` is a jar whose presence shows that they are; `only` are the artifacts wanted, all of the POM's
    without it. Raises RuntimeError with what Maven said.
    """
    if (libs / newest).exists():
        return libs
    maven = shutil.which("mvn")
    if maven is None:
        raise RuntimeError(f"{newest} is missing and Maven is not installed: apt install maven")
    libs.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix="libs-", dir=libs.parent))
    try:
        command = [maven, "-B", "-q", "-f", str(pom), "dependency:copy-dependencies"]
        command += ["-DincludeScope=runtime", f"-DoutputDirectory={staging}"]
        command += [f"-DincludeArtifactIds={','.join(only)}"] if only else []
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=patience(MAVEN_TIMEOUT_S), check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"Maven could not gather {newest}: {(done.stdout + done.stderr)[-2000:]}")
        _publish(staging, libs, newest)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return libs


def _publish(staging: Path, libs: Path, newest: str) -> None:
    """Put a complete folder in place of an older one; the same, gathered meanwhile, is left alone."""
    if libs.exists() and not (libs / newest).exists():
        shutil.rmtree(libs, ignore_errors=True)
    try:
        staging.rename(libs)
    except OSError:
        if not (libs / newest).exists():
            raise
