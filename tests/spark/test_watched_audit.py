"""`millrace audit watch` as a user runs it: the real command line, real runs, clusters in memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.spark.conftest import DAY_MS, Stream
from tests.waiting import patience

pytestmark = pytest.mark.java


def test_watch_audits_and_tells_how_it_went(world, tmp_path: Path):
    """That it goes on after a run, good or failed: `tests/unit/audit_job/test_watch.py`."""
    stream = Stream("ewr", "UA@ewr", "00000000000000aa")
    world.send(stream, range(1, 41))
    world.report(stream)
    world.report(Stream("jfk", "B6@jfk", "ee" * 8))
    world.carry(stream)
    world.position("ewr", 1000)
    world.flush()
    config = tmp_path / "audit.yaml"
    body = {
        "clusters": {
            name: {"bootstrap": [each.bootstrap], "tier": world.config.clusters[name].tier}
            for name, each in world.clusters.items()
        },
        "topics": ["flights"],
        "window": f"{DAY_MS // 3_600_000}h",
        "grace": "1s",
    }
    config.write_text(yaml.safe_dump(body))
    command = [sys.executable, "-m", "millrace.deploy.cli", "audit", "watch", "--every", "1s", "--runs", "1"]
    done = subprocess.run(
        [*command, "--config", str(config), "--master", "local[1]"],
        capture_output=True,
        text=True,
        timeout=patience(180),
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PROVEN   All 40 records") == 1, done.stdout + done.stderr
    report = tmp_path / "audit-report"
    summary = json.loads((report / "summary.json").read_text())
    assert summary["verdict"] == "PROVEN" and summary["watermarks"] == {"flights": "2013-01-05T00:00:00Z"}
    told = (report / "watch.prom").read_text()
    assert "millrace_audit_watch_last_run_status 0.0" in told
    assert "millrace_audit_watch_runs_total 1.0" in told
    assert "millrace_audit_watch_failed_runs_total 0.0" in told
    assert sorted(each.name for each in (tmp_path / "audit-state" / "commits").iterdir()) == ["00000001.json"]
