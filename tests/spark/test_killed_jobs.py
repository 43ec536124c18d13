"""The job dies at named points around its commit: no half of a commit is to be seen, the next run says
exactly what an undisturbed one says, and nothing is counted twice."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from millrace.audit import job
from millrace.audit.keeping.state import StateFolder
from millrace.deploy.processes import spawn
from tests.points.fault import Fault
from tests.points.launcher import DIED
from tests.spark.conftest import World
from tests.waiting import patience

pytestmark = pytest.mark.java

COMMITS = {
    "commit written aside, without its name": 0,
    "committed, nothing told": 1,
}


@pytest.mark.long
def test_a_job_that_died_around_its_commit_changes_nothing_of_what_the_next_one_says(
    spark: Any, world: World, tmp_path: Path
) -> None:
    stream = world.of_sixty()
    world.carry(stream, lose=[7, 8], repeat=[20])
    world.position("ewr", 55)
    world.flush()

    def audit(folder: Path) -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
        """Status, summary (but for its time) and rows of a run in the folder."""
        config = world.config.model_copy(update={"state": folder / "state", "report": folder / "report"})
        result = job.run(config, "local[2]")
        assert result.summary is not None, result.problem
        rows = pq.read_table(folder / "report" / "reconciliation.parquet").to_pylist()
        return result.exit_status, {**result.summary, "at": ""}, rows

    died = {name: Died(world, tmp_path / name, name) for name in COMMITS}
    undisturbed = audit(tmp_path / "undisturbed")
    status, summary, _ = undisturbed
    assert (status, summary["counts"]["missing"], summary["counts"]["duplicates"]) == (1, 2, 1)
    for name, child in died.items():
        child.wait()
        assert StateFolder.open(child.folder / "state").latest().number == COMMITS[name], name
        (left,) = (child.folder / "state" / "commits").iterdir()
        assert left.name.startswith(".") is (COMMITS[name] == 0), name
        assert not (child.folder / "report" / "summary.json").exists(), name
        assert audit(child.folder) == undisturbed, name
        assert StateFolder.open(child.folder / "state").latest().number == 1, name


class Died:
    """`millrace audit run` with a state of its own, which dies at the point."""

    def __init__(self, world: World, folder: Path, point: str) -> None:
        self.folder = folder
        self._fault = Fault(folder / "fault", point)
        config = {
            "clusters": {
                name: {
                    "bootstrap": [cluster.bootstrap],
                    "tier": "aggregate" if name == "agg" else "source",
                }
                for name, cluster in world.clusters.items()
            },
            "topics": ["flights"],
            "window": "1d",
            "grace": "1s",
            "state": str(folder / "state"),
            "report": str(folder / "report"),
        }
        path = folder / "audit.yaml"
        path.write_text(yaml.safe_dump(config))
        words = [sys.executable, *self._fault.program, "audit", "run", "--config", str(path)]
        self._log = folder / "audit.log"
        self._process = spawn([*words, "--master", "local[1]"], log=self._log, die_with_parent=True)

    def wait(self) -> None:
        self._process.wait(patience(240))
        self._fault.check()
        assert self._process.returncode == DIED, self._log.read_text()
