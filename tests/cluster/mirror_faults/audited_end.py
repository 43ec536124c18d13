"""What the product's own audit says of the audited part of a run that is over: `millrace audit run`.

Not in CI: a local Spark takes its half minute there. The judge of the run (`checks.py`) knows each record and
needs none of it; this is the proof that the audit comes to the same end by counts alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import yaml

from tests.cluster.mirror_faults.plan import SOURCES, TARGET
from tests.cluster.mirror_faults.records import AUDITED

TIMEOUT_S = 600.0


class Audited(NamedTuple):
    """`status` 0: all is proven. `acknowledged`, `arrived`: records, None without a report."""

    status: int
    said: str
    acknowledged: int | None
    arrived: int | None


def audit(folder: Path, bootstraps: Mapping[str, str]) -> Audited:
    """While the servers are up, after the producers and the mirror have ended in order."""
    folder.mkdir(exist_ok=True)
    config = folder / "audit.yaml"
    tiers = dict.fromkeys(SOURCES, "source") | {TARGET: "aggregate"}
    clusters = {name: {"bootstrap": [bootstraps[name]], "tier": tier} for name, tier in tiers.items()}
    config.write_text(
        yaml.safe_dump(
            {"clusters": clusters, "topics": [AUDITED], "window": "1s", "grace": "0s", "keep": "forever"}
        )
    )
    words = [sys.executable, "-m", "millrace.deploy.cli", "audit", "run", "--config", str(config)]
    done = subprocess.run(
        [*words, "--master", "local[2]"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        # The run's own network has no more than the loopback and its bridge.
        env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"},
    )
    said, summary = done.stdout + done.stderr, folder / "audit-report" / "summary.json"
    if not summary.exists():
        return Audited(done.returncode, said, None, None)
    counts = json.loads(summary.read_text())["counts"]
    return Audited(done.returncode, said, counts["acknowledged"], counts["seen"].get(TARGET))
