"""Whatever stops a run, what earlier runs kept and said stays as it is, byte for byte: one line and status 3.

A file that is missing or of a newer program is in test_state_places, a broker that is killed in mid-run in
test_cluster_dies, the same on executors of a real cluster in test_standalone and test_state_on_hdfs.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from millrace.audit import job
from millrace.audit.keeping.hadoop_files import FileSystemAway, HadoopFiles
from millrace.audit.scanning.cell_rows import CELL_DDL
from millrace.audit.spark import spark_cells
from millrace.audit.spark.workers import check_workers
from tests.spark.conftest import DAY_MS, NOW_MS, MockCluster, World

pytestmark = pytest.mark.java

Spoil = Callable[[World, pytest.MonkeyPatch, Any], None]
HOUR_S = 3_600


def contents(*places: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for place in places for path in place.rglob("*") if path.is_file()}


def audit(world: World) -> job.JobResult:
    world.flush()
    return job.run(world.config, "local[2]", clock_ms=lambda: NOW_MS)


def changed(world: World, **config: Any) -> None:
    world.config = world.config.model_copy(update=config)


def another_window(world: World, patch: pytest.MonkeyPatch, spark: Any) -> None:
    changed(world, window_ms=DAY_MS // 2)


def other_names(world: World, patch: pytest.MonkeyPatch, spark: Any) -> None:
    changed(world, clusters={f"other-{name}": each for name, each in world.config.clusters.items()})


def another_cluster_of_that_name(world: World, patch: pytest.MonkeyPatch, spark: Any) -> None:
    world.clusters["other"] = MockCluster()
    there = world.config.clusters["jfk"].model_copy(update={"bootstrap": [world.clusters["other"].bootstrap]})
    changed(world, clusters={**world.config.clusters, "jfk": there})


def worker_whose_clock_is_off(world: World, patch: pytest.MonkeyPatch, spark: Any) -> None:
    """The driver's is, which is the same to both."""
    patch.setattr(job, "is_elsewhere", lambda master: True)
    ahead = functools.partial(check_workers, clock_s=lambda: time.time() + 2 * HOUR_S)
    patch.setattr(job, "check_workers", ahead)


def executor_without_the_package(world: World, patch: pytest.MonkeyPatch, spark: Any) -> None:
    def lacks(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        raise ModuleNotFoundError("No module named 'millrace'", name="millrace")
        yield from batches

    patch.setattr(spark_cells, "read_pinned", lambda *_: spark.range(1).mapInArrow(lacks, CELL_DDL))


def file_system_that_goes_away(world: World, patch: pytest.MonkeyPatch, spark: Any) -> None:
    """When all is counted and made verdicts of, and the state is to be kept."""
    keep = job.keep_verdicts

    def away(*_: object) -> None:
        raise FileSystemAway("the name node cannot be reached")

    def keep_nothing(*given: Any) -> None:
        with patch.context() as until_then:
            until_then.setattr(HadoopFiles, "_put", away)
            keep(*given)

    patch.setattr(job, "keep_verdicts", keep_nothing)


CASES: dict[str, tuple[Spoil, str]] = {
    "another window": (another_window, "for another window use another state"),
    "other clusters": (other_names, "expected a state of this audit: it is of another"),
    "another cluster of that name": (another_cluster_of_that_name, "for another use another state"),
    "a worker whose clock is off": (worker_whose_clock_is_off, "behind the driver's; set both by NTP"),
    "an executor without the package": (executor_without_the_package, "millrace audit package"),
    "a file system that goes away": (file_system_that_goes_away, "the name node cannot be reached"),
}


def test_what_stops_a_run_leaves_the_state_and_the_verdict_as_they_were(spark, world, tmp_path):
    place = tmp_path / "kept"
    changed(world, state=f"file://{place}")
    stream = world.of_sixty()
    world.carry(stream, lose=[7, 8])
    world.position("ewr", 60)
    assert audit(world).exit_status == 1
    world.send(stream, [61])
    world.report(stream, report=2)  # there is something to read
    report = world.config.report
    kept, verdict, config = contents(place), (report / "summary.json").read_bytes(), world.config
    for case, (spoil, said) in CASES.items():
        with pytest.MonkeyPatch.context() as patch:
            spoil(world, patch, spark)
            failed = audit(world)
        assert (failed.exit_status, failed.summary) == (job.JOB_FAILED, None), case
        assert said in failed.problem and "\n" not in failed.problem, (case, failed.problem)
        assert contents(place) == kept, case
        assert (report / "summary.json").read_bytes() == verdict, case
        assert failed.problem in json.loads((report / "last_failure.json").read_text())["sentence"], case
        assert 'id="failed"' in (report / "index.html").read_text(), case
        world.config = config
    after = audit(world)
    assert after.exit_status == 1 and after.summary is not None, after.problem
    assert after.summary["counts"]["seen"] == {"ewr": 61, "jfk": 0, "agg": 58}
    assert not (report / "last_failure.json").exists()
