"""kill -9 at several points of the job's process: the next run says exactly what an undisturbed one says."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from millrace.audit import job
from millrace.audit.keeping.state import StateFolder

pytestmark = pytest.mark.java
NOW_MS = 1_356_998_400_000 + 400 * 86_400_000

CHILD = """
import json, os, signal, sys
from pathlib import Path
from millrace.audit import job
from millrace.audit.config import AuditConfig
from millrace.audit.spark.spark_cells import RunCells
from millrace.audit.keeping.state import StateFolder

config, point = AuditConfig.model_validate(json.loads(sys.argv[1])), sys.argv[2]
config = config.model_copy(update={"state": Path(sys.argv[3]), "report": Path(sys.argv[4])})

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def after(kind, name):
    original = getattr(kind, name)
    setattr(kind, name, lambda *given, **more: die(original(*given, **more)))

match point:
    case "cells are written":
        after(RunCells, "count")
    case "committed, nothing told":
        after(StateFolder, "commit")
job.run(config, "local[1]", clock_ms=lambda: int(sys.argv[5]))
"""
POINTS = ("cells are written", "committed, nothing told")


def test_a_job_that_was_killed_changes_nothing_of_what_the_next_one_says(spark, world, tmp_path):
    stream = world.of_sixty()
    world.carry(stream, lose=[7, 8], repeat=[20])
    world.position("ewr", 55)
    world.flush()

    def audit(state):
        world.config = world.config.model_copy(update={"state": state})
        return job.run(world.config, "local[2]", clock_ms=lambda: NOW_MS)

    settings = world.config.model_dump(mode="json", by_alias=True)
    for name in ("window", "grace", "keep"):
        settings[name] = f"{settings[name]}ms"
    del settings["zookeeper"]
    children = [
        subprocess.Popen(
            [
                sys.executable, "-c", CHILD, json.dumps(settings), point, str(tmp_path / point),
                str(tmp_path / f"report of {point}"), str(NOW_MS),
            ]
        )
        for point in POINTS
    ]  # fmt: skip
    undisturbed = audit(tmp_path / "undisturbed")
    assert undisturbed.exit_status == 1 and undisturbed.summary["counts"]["missing"] == 2
    for point, child in zip(POINTS, children, strict=True):
        assert child.wait(240) == -signal.SIGKILL, point
    for point in POINTS:
        known = StateFolder.open(tmp_path / point).latest().number
        assert known == (1 if point == "committed, nothing told" else 0)
        after = audit(tmp_path / point)
        assert (after.exit_status, after.summary) == (undisturbed.exit_status, undisturbed.summary), point
