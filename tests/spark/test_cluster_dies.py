"""A cluster dies while the job scans it: no verdict, no trace, and the next run is right."""

from __future__ import annotations

import json
import random
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.audit import job
from millrace.audit.config import parse_config
from tests.conftest import BrokerFactory
from tests.spark.end_to_end_scenario import OLD_MS
from tests.spark.end_to_end_senders import Sender
from tests.spark.end_to_end_truth import Truth
from tests.waiting import until

pytestmark = pytest.mark.java
TOPIC = "flights"
DEADLINE_S = 180.0


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.long
def test_a_cluster_that_dies_in_the_middle_of_a_run_is_one_line_and_the_next_run_is_right(
    spark: Any, broker_factory: BrokerFactory, tmp_path: Path
) -> None:
    brokers = {name: broker_factory(log_retention_ms=-1) for name in ("ewr", "jfk")}
    world: Any = SimpleNamespace(bootstrap=lambda name: brokers[name].bootstrap)
    config = parse_config(
        {
            "clusters": {
                name: {"bootstrap": [broker.bootstrap], "tier": "source"} for name, broker in brokers.items()
            },
            "topics": [TOPIC],
            "window": "1s",
            "grace": "0s",
            "state": str(tmp_path / "state"),
            "report": str(tmp_path / "report"),
        }
    )
    rng = random.Random(5)

    def publish(number: int) -> None:
        for name in brokers:
            sender = Sender(world, Truth(TOPIC), name, f"{number}@{name}", rng, start_ms=OLD_MS)
            sender.send(200, 1)
            sender.close()

    publish(1)
    first = job.run(config, "local[2]")
    assert first.exit_status == 0 and first.summary is not None
    assert first.summary["counts"]["seen"] == {"ewr": 200, "jfk": 200}
    before, told = contents(tmp_path / "state"), (tmp_path / "report" / "summary.json").read_text()
    publish(2)

    def die_during_the_scan() -> None:
        """jfk is frozen before a task asks it, so that none can be done with it when it is killed."""
        tracker = spark.sparkContext.statusTracker()

        def is_scanning() -> bool:
            stages = [tracker.getStageInfo(number) for number in tracker.getActiveStageIds()]
            return any(stage is not None and stage.numActiveTasks > 0 for stage in stages)

        try:
            until(is_scanning, within_s=DEADLINE_S)
        finally:  # or the job would wait for it
            brokers["jfk"].kill()

    killer = threading.Thread(target=die_during_the_scan)

    def progress(step: str) -> None:
        if step.startswith("counting") and killer.ident is None:  # it is said again while it lasts
            process = brokers["jfk"].process
            assert process is not None
            process.send_signal(signal.SIGSTOP)
            killer.start()

    result = job.run(config, "local[2]", progress=progress)
    killer.join()
    assert (result.exit_status, result.summary) == (job.JOB_FAILED, None)
    assert "jfk" in result.problem and "\n" not in result.problem
    assert contents(tmp_path / "state") == before
    assert (tmp_path / "report" / "summary.json").read_text() == told
    failure = json.loads((tmp_path / "report" / "last_failure.json").read_text())
    assert result.problem in failure["sentence"]
    page = (tmp_path / "report" / "index.html").read_text()
    assert 'id="failed"' in page and "jfk" in page[page.index('id="failed"') :].partition("</p>")[0]

    brokers["jfk"].start()
    after = job.run(config, "local[2]")
    assert after.exit_status == 0 and after.summary is not None, after.problem
    assert after.summary["counts"]["seen"] == {"ewr": 400, "jfk": 400}
    assert after.summary["counts"]["acknowledged"] == 800 and after.summary["counts"]["missing"] == 0
