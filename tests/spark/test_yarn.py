"""The audit on a YARN cluster: from the driver's machine, and as an application that is nobody's terminal's.

The cluster is of one machine, so that folders of it are shared; its containers run a Python of their own, or
what `millrace audit package` made.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.peers.yarn import YarnPeer, environment_of
from tests.spark.standalone import SPARK_HOME, bare_python
from tests.spark.test_standalone import stream, write_config
from tests.waiting import patience

pytestmark = [pytest.mark.java, pytest.mark.long]
TIMEOUT_S = 400
SPARK = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.executor.instances": "2",
    "spark.executor.memory": "512m",
    "spark.yarn.am.memory": "512m",
    # What every node has need not be brought along by each application.
    "spark.yarn.jars": f"local:{SPARK_HOME}/jars/*",
}


@pytest.fixture(scope="module")
def yarn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[YarnPeer]:
    with YarnPeer(tmp_path_factory.mktemp("yarn")) as peer:
        yield peer


def settings_of(yarn: YarnPeer) -> dict[str, str]:
    return {**SPARK, "spark.yarn.stagingDir": f"file://{yarn.directory}/staging"}


def lose_two(world: Any) -> None:
    sender = stream("ewr", "UA@ewr", "00000000000000aa")
    world.send(sender, range(1, 201))
    world.report(sender)
    world.report(stream("jfk", "B6@jfk", "ee" * 8))
    world.carry(sender, lose=[7, 8], repeat=[33])
    world.position("ewr", 200)
    world.flush()


def require_named(report: Path) -> None:
    summary = json.loads((report / "summary.json").read_text())
    assert [each["sequences"] for each in summary["losses"]] == [[[7, 8]]]
    assert [each["sequences"] for each in summary["duplicates"]] == [[[33, 33]]]
    assert summary["counts"]["seen"] == {"ewr": 200, "jfk": 0, "agg": 198}


def logs_of(yarn: YarnPeer) -> str:
    """The ends of what containers said, for a failure."""
    return "\n".join(path.read_text(errors="replace")[-1_500:] for path in yarn.logs.rglob("std*"))


def test_a_job_whose_executors_are_containers_that_lack_our_package(yarn: YarnPeer, world, tmp_path) -> None:
    lose_two(world)
    python = bare_python(tmp_path / "python")
    config = write_config(world, tmp_path / "audit.yaml", spark=settings_of(yarn))
    command = [sys.executable, "-m", "millrace.deploy.cli", "audit", "run", "--config", str(config)]
    done = subprocess.run(
        [*command, "--master", "yarn"],
        env={**environment_of(yarn), "PYSPARK_PYTHON": str(python), "SPARK_LOCAL_IP": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=patience(TIMEOUT_S),
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, ""), f"{done.stdout}\n{done.stderr}\n{logs_of(yarn)}"
    require_named(tmp_path / "audit-report")
    (application,) = (each for each in yarn.applications() if each["name"] == "millrace audit")
    assert application["finalStatus"] == "SUCCEEDED"


def test_an_application_of_the_packed_environment_whose_driver_is_a_container_too(
    yarn: YarnPeer, world, tmp_path
) -> None:
    lose_two(world)
    archive = tmp_path / "audit.tar.gz"
    millrace = [sys.executable, "-m", "millrace.deploy.cli"]
    packed = subprocess.run(
        [*millrace, "audit", "package", "-o", str(archive)], capture_output=True, text=True, check=True
    )
    given = {
        **{name: value for name, value in settings_of(yarn).items() if not name.startswith("spark.driver.")},
        "spark.pyspark.python": "./environment/bin/python",
        "spark.yarn.maxAppAttempts": "1",
    }
    (told,) = (line for line in packed.stdout.splitlines() if "--deploy-mode cluster" in line)
    assert all(f"--conf {name}={given[name]} " in told for name in list(given)[-2:])
    assert f"--archives {archive}#environment " in told
    config = write_config(world, tmp_path / "audit.yaml", spark={}, report=f"file://{tmp_path}/audit-report")
    settings = [word for each in given.items() for word in ("--conf", "=".join(each))]
    done = subprocess.run(
        [
            SPARK_HOME / "bin" / "spark-submit",
            *("--master", "yarn", "--deploy-mode", "cluster", "--name", "in a container"),
            *("--archives", f"{archive}#environment"),
            *settings,
            tmp_path / "millrace-audit.py",
            *("run", "--config", str(config)),
        ],
        env=environment_of(yarn),
        capture_output=True,
        text=True,
        timeout=patience(TIMEOUT_S),
        check=False,
    )
    (application,) = (each for each in yarn.applications() if each["name"] == "in a container")
    assert (tmp_path / "audit-report" / "summary.json").exists(), f"{done.stderr[-3000:]}\n{logs_of(yarn)}"
    require_named(tmp_path / "audit-report")
    # That a loss was found is how YARN tells it, too.
    assert application["finalStatus"] == "FAILED" and done.returncode != 0
    assert application["diagnostics"].strip() == "User application exited with status 1"
