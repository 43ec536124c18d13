"""The audit on a standalone Spark cluster, whose workers know nothing of this project before it comes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.ports import free_port
from tests.spark.standalone import SPARK_HOME, StandaloneCluster
from tests.spark.test_connector import RealCluster
from tests.waiting import patience, until

pytestmark = pytest.mark.java
TIMEOUT_S = 400
SPARK = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.executor.memory": "512m",
    "spark.cores.max": "2",
}


@pytest.fixture(scope="module")
def standalone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneCluster]:
    with StandaloneCluster(tmp_path_factory.mktemp("standalone")) as cluster:
        yield cluster


def stream(source: str, producer: str, name: str) -> Any:
    return SimpleNamespace(
        source=source, producer=producer, stream=name, topic="flights", partition=0, sent=[]
    )


def environment(standalone: StandaloneCluster, **more: str) -> dict[str, str]:
    """A shell that names the workers' Python, as for a cluster whose machines differ from the driver's."""
    return {**os.environ, "PYSPARK_PYTHON": str(standalone.python), "SPARK_LOCAL_IP": "127.0.0.1", **more}


def write_config(world: Any, path: Path, **more: Any) -> Path:
    content = {
        "clusters": {
            name: {"bootstrap": [cluster.bootstrap], "tier": "aggregate" if name == "agg" else "source"}
            for name, cluster in world.clusters.items()
        },
        "topics": ["flights"],
        "window": "1d",
        "grace": "1s",
        "spark": SPARK,
        "state": f"file://{path.parent}/audit-state",
        **more,
    }
    path.write_text(yaml.safe_dump(content))
    return path


def completed(standalone: StandaloneCluster, name: str) -> dict[str, Any]:
    """The one application of that name, once the master has heard of its end."""
    (application,) = until(
        lambda: [each for each in standalone.state()["completedapps"] if name in each["name"]],
        lambda: f"the end of {name}; {standalone.state()}",
        within_s=TIMEOUT_S,
        every_s=0.1,
    )
    return dict(application)


# A few hundred records are planned as many would be: as several tasks.
FINE_TASKS = """
import sys
from millrace.audit.spark import task_plan
from millrace.deploy.cli import main

task_plan.LEAST_TASK_RECORDS = 100
sys.exit(main())
"""


def audit(
    config: Path, master: str, environment: dict[str, str], *, program: str = ""
) -> subprocess.CompletedProcess[str]:
    """The command line, or a program that runs it."""
    python = ["-c", program] if program else ["-m", "millrace.deploy.cli"]
    return subprocess.run(
        [sys.executable, *python, "audit", "run", "--config", str(config), "--master", master],
        env=environment,
        capture_output=True,
        text=True,
        timeout=patience(TIMEOUT_S),
        check=False,
    )


def noted(events: Path, kind: str) -> list[dict[str, Any]]:
    """What Spark noted itself, of a kind."""
    logs = [path.read_text() for path in events.rglob("[!.]*") if path.is_file()]  # beside their checksums
    return [json.loads(line) for log in logs for line in log.splitlines() if f'"{kind}"' in line]


def tasks_of_the_count(events: Path) -> int:
    """How many tasks the first stage had that wrote any rows."""
    written = [
        task["Stage ID"]
        for task in noted(events, "SparkListenerTaskEnd")
        if task["Task Metrics"]["Output Metrics"]["Records Written"]
    ]
    stages = {each["Stage Info"]["Stage ID"]: each for each in noted(events, "SparkListenerStageSubmitted")}
    return int(stages[min(written)]["Stage Info"]["Number of Tasks"])


def written_by(events: Path) -> dict[str, int]:
    """{executor: rows that its tasks wrote in the first stage that wrote any}."""
    rows: dict[int, dict[str, int]] = {}
    for task in noted(events, "SparkListenerTaskEnd"):
        written = task["Task Metrics"]["Output Metrics"]["Records Written"]
        if written:
            stage = rows.setdefault(task["Stage ID"], {})
            stage[task["Task Info"]["Executor ID"]] = stage.get(task["Task Info"]["Executor ID"], 0) + written
    return rows[min(rows)]


@pytest.mark.long
def test_the_whole_job_runs_on_workers_that_lack_our_package(standalone, world, tmp_path):
    from_ewr, from_jfk = (
        stream("ewr", "UA@ewr", "00000000000000aa"),
        stream("jfk", "B6@jfk", "ffffffffffffff01"),
    )
    world.send(from_ewr, range(1, 201))
    world.send(from_jfk, range(1, 101))
    for each in (from_ewr, from_jfk):
        world.report(each)
    world.carry(from_ewr, lose=[5, 17, 18], repeat=[33])
    world.carry(from_jfk)
    world.position("ewr", 200)
    world.position("jfk", 100)
    world.flush()
    events = tmp_path / "spark-events"
    events.mkdir()
    settings = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": events.as_uri(),
        "spark.eventLog.compress": "false",
        # Nothing runs before both executors are there, or one might have done it all by then.
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": f"{TIMEOUT_S}s",
    }
    config = write_config(world, tmp_path / "audit.yaml", spark={**SPARK, **settings})
    done = audit(config, standalone.master, environment(standalone), program=FINE_TASKS)
    assert (done.returncode, done.stderr) == (1, ""), done.stdout
    assert set(written_by(events)) == {"0", "1"}, "both executors counted"
    # So small a read is cut into no more tasks than the session has cores.
    assert tasks_of_the_count(events) == 2
    summary = json.loads((tmp_path / "audit-report" / "summary.json").read_text())
    named = [(each["producer"], each["sequences"], each["lost_between"]) for each in summary["losses"]]
    assert named == [("UA@ewr", [[5, 5]], ["ewr", "agg"]), ("UA@ewr", [[17, 18]], ["ewr", "agg"])]
    assert summary["counts"]["seen"] == {"ewr": 200, "jfk": 100, "agg": 297}
    application = completed(standalone, "audit")
    assert application["cores"] == 2
    # What ran there is the copy that travelled, kept for the next application.
    unpacked = list(standalone.home.glob(".cache/millrace-*/*/audit/scanning/counting.py"))
    assert len(unpacked) == 1
    assert list(unpacked[0].parent.glob("__pycache__/scan.*.nbi"))


SECRET = "no-one-reads-this"


@pytest.mark.long
def test_spark_submit_runs_it_with_the_packed_environment_and_no_secret_is_shown(standalone, world, tmp_path):
    """By an administrator's own command, with workers whose Python has no library at all."""
    sender = stream("ewr", "UA@ewr", "00000000000000aa")
    world.send(sender, range(1, 61))
    world.report(sender)
    world.report(stream("jfk", "B6@jfk", "ee" * 8))
    world.carry(sender, lose=[7])
    world.position("ewr", 60)
    world.flush()
    archive = tmp_path / "audit.tar.gz"
    millrace = [sys.executable, "-m", "millrace.deploy.cli"]
    packed = subprocess.run(
        [*millrace, "audit", "package", "-o", str(archive)], capture_output=True, text=True, check=True
    )
    assert f"spark.archives: {archive}#environment" in packed.stdout
    events = tmp_path / "spark-events"
    events.mkdir()
    given = {
        **SPARK,
        "spark.pyspark.python": "./environment/bin/python",
        "spark.pyspark.driver.python": sys.executable,
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": events.as_uri(),
        "spark.eventLog.compress": "false",
    }
    settings = [word for each in given.items() for word in ("--conf", "=".join(each))]
    secrets = {"spark.hadoop.fs.s3a.secret.key": SECRET}
    config = write_config(world, tmp_path / "audit.yaml", spark=secrets)
    command = [SPARK_HOME / "bin" / "spark-submit", "--master", standalone.master, "--name", "submitted"]
    done = subprocess.run(
        [
            *command,
            "--archives",
            f"{archive}#environment",
            *settings,
            tmp_path / "millrace-audit.py",
            "run",
            "--config",
            str(config),
        ],
        env={**environment(standalone), "PYSPARK_PYTHON": ""},
        capture_output=True,
        text=True,
        timeout=patience(TIMEOUT_S),
        check=False,
    )
    assert done.returncode == 1, f"{done.stdout[-3000:]}\n{done.stderr[:600]}\n{done.stderr[-300:]}"
    summary = json.loads((tmp_path / "audit-report" / "summary.json").read_text())
    assert [each["sequences"] for each in summary["losses"]] == [[[7, 7]]]
    assert completed(standalone, "submitted")["cores"] == 2  # and not what the audit calls itself
    written = [path for folder in (events, standalone.folder) for path in folder.rglob("*")]
    told = [path for path in written if path.is_file() and path.suffix in ("", ".log", ".crc")]
    assert any(path.name == "stderr" for path in told) and any(events in path.parents for path in told)
    for text in (done.stdout, done.stderr, *(path.read_text(errors="replace") for path in told)):
        assert SECRET not in text


USER_PROGRAM = """
import json, os, sys
from pyspark.sql import SparkSession
from millrace.audit.spark.spark_source import register

master, bootstrap = sys.argv[1:]
builder = SparkSession.builder.master(master).appName("user")
for name, value in json.loads(os.environ["SETTINGS"]).items():
    builder = builder.config(name, value)
spark = builder.getOrCreate()
register(spark)
table = spark.read.format("millrace").option("kafka.bootstrap.servers", bootstrap)
table = table.option("subscribe", "flights").option("minPartitions", "3")
cells = table.option("mode", "cells").load()
records = table.option("mode", "records").option("includeIdentity", "true").load()
counted = [row.asDict() for row in cells.select("note", "count").collect()]
shown = records.selectExpr("identity.sequence", "spark_partition_id() as part").collect()
found = {
    "cells": sum(row["count"] for row in counted if row["note"] is None),
    "records": sum(row["count"] for row in counted if row["note"] == "records"),
    "notes": sorted({row["note"] for row in counted if row["note"] is not None}),
    "sequences": sorted(row["sequence"] for row in shown),
    "parts": len({row["part"] for row in shown}),
}
print(json.dumps(found))
spark.stop()
"""


@pytest.mark.long
def test_a_users_program_reads_cells_and_records_there(standalone, world, tmp_path):
    sender = stream("ewr", "UA@ewr", "00000000000000aa")
    world.send(sender, range(1, 121))
    world.flush()
    program = tmp_path / "program.py"
    program.write_text(USER_PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program), standalone.master, world.clusters["ewr"].bootstrap],
        env=environment(standalone, SETTINGS=json.dumps({**SPARK, "spark.ui.enabled": "false"})),
        capture_output=True,
        text=True,
        timeout=patience(TIMEOUT_S),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["cells"], found["records"], found["notes"]) == (120, 120, ["read", "records"])
    assert found["sequences"] == list(range(1, 121)) and found["parts"] > 1


SHOW_PAGES = """
def show_pages(context):
    root = context.uiWebUrl
    api = f"{root}/api/v1/applications/{context.applicationId}"
    pages = [f"{api}/{name}" for name in ("jobs", "stages?details=true", "environment", "executors")]
    pages += [f"{api}/sql?details=true&planDescription=true"]
    pages += [f"{root}/{name}/" for name in ("jobs", "environment", "SQL", "executors")]
    pages += [f"{root}/SQL/execution/?id=0"]
    for page in pages:
        print(urllib.request.urlopen(page).read().decode())
"""

SECURED_PROGRAM = f"""
import json, os, sys, urllib.request
from pyspark.sql import SparkSession
from millrace.audit.spark.spark_source import register

builder = SparkSession.builder.master(sys.argv[1]).appName("secured")
for name, value in json.loads(os.environ["SETTINGS"]).items():
    builder = builder.config(name, value)
spark = builder.getOrCreate()
spark.sparkContext.setLogLevel("DEBUG")
register(spark)
spark.sparkContext.setJobDescription("THE-MARK")
table = spark.read.format("millrace").options(**json.loads(sys.argv[2])).load()
print(table.count())
table.explain("extended")
{SHOW_PAGES}
show_pages(spark.sparkContext)
spark.stop()
"""

SECURED_JOB = f"""
import sys, urllib.request
from millrace.audit.spark.spark_cells import RunCells
from millrace.deploy.cli import main
{SHOW_PAGES}
reconcile = RunCells.reconcile

def reconciled(self, *given):
    found = reconcile(self, *given)
    show_pages(self._spark.sparkContext)
    return found

RunCells.reconcile = reconciled
sys.exit(main())
"""


PASSWORD = "päss-ª=wörd"


@dataclass(frozen=True)
class Secured:
    """A topic of fifty records behind a login, what Spark is given to show everything, and where that is."""

    topic: str
    address: str
    section: dict[str, Any]
    settings: dict[str, str]
    events: Path
    key: str

    def shown_in(self, done: subprocess.CompletedProcess[bytes], standalone: StandaloneCluster) -> list[str]:
        """The places that have a secret; each is one where it would be found."""
        places = {
            "said": done.stdout,
            "logged": done.stderr,
            "master": json.dumps(standalone.state()).encode(),
        }
        for name, folder in (("events", self.events), ("workers", standalone.folder)):
            files = [
                path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".py", ".pem")
            ]
            places[name] = b"".join(path.read_bytes() for path in files if "python" not in path.parts)
        assert b"THE-MARK" in places["said"] and b"THE-MARK" in places["events"]
        assert b"Executor" in places["workers"]
        secrets = (PASSWORD, PASSWORD.encode("unicode_escape").decode(), self.key)
        return [name for name, told in places.items() if any(each.encode() in told for each in secrets)]


@pytest.fixture
def secured(secure_kafka, tmp_path) -> Secured:
    topic = f"secured-{tmp_path.name}"
    beside = RealCluster(secure_kafka.peer.bootstrap, "none")
    beside.create(topic)
    for number in range(50):
        beside.produce(topic, b"v%d" % number)
    beside.flush()
    own = secure_kafka.authority.issue("standalone-client")
    section = {
        "protocol": "SASL_SSL",
        "ssl": {**secure_kafka.tls(), "cert": str(own.cert), "key": str(own.key)},
        "sasl": {**secure_kafka.login("SCRAM-SHA-512"), "password": {"env": "AUDITOR_PASSWORD"}},
    }
    events = tmp_path / "spark-events"
    events.mkdir()
    settings = {
        **SPARK,
        "spark.ui.enabled": "true",
        "spark.ui.port": str(free_port()),
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": events.as_uri(),
        "spark.eventLog.compress": "false",
    }
    key = own.key.read_text().split("\n")[1]
    return Secured(topic, secure_kafka.address("SECURE"), section, settings, events, key)


@pytest.mark.long
@pytest.mark.kafka
def test_a_login_of_the_drivers_variables_and_files_reaches_executors_and_is_shown_nowhere(
    standalone, secured, tmp_path
):
    """The workers were started without the variable, and the file is gone before they are asked."""
    options = {
        "kafka.bootstrap.servers": secured.address,
        "subscribe": secured.topic,
        "security": json.dumps(secured.section),
    }
    program = tmp_path / "program.py"
    program.write_text(SECURED_PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program), standalone.master, json.dumps(options)],
        env=environment(standalone, SETTINGS=json.dumps(secured.settings), AUDITOR_PASSWORD=PASSWORD),
        capture_output=True,
        timeout=patience(TIMEOUT_S),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[0] == b"50"
    assert b"millrace" in done.stderr
    assert secured.shown_in(done, standalone) == []


@pytest.mark.long
@pytest.mark.kafka
def test_a_login_of_the_jobs_own_config_is_shown_nowhere(standalone, secured, tmp_path):
    cluster = {"bootstrap": [secured.address], "tier": "source", "security": secured.section}
    config = tmp_path / "audit.yaml"
    content = {
        "clusters": {"safe": cluster},
        "topics": [secured.topic],
        "state": f"file://{tmp_path}/audit-state",
        "spark": {**secured.settings, "spark.app.name": "THE-MARK"},
    }
    config.write_text(yaml.safe_dump(content))
    done = subprocess.run(
        [
            *(sys.executable, "-c", SECURED_JOB),
            *("audit", "run", "--config", str(config), "--master", standalone.master),
        ],
        env=environment(standalone, AUDITOR_PASSWORD=PASSWORD),
        capture_output=True,
        timeout=patience(TIMEOUT_S),
        check=False,
    )
    assert done.returncode == 2, done.stderr[-3000:]
    summary = json.loads((tmp_path / "audit-report" / "summary.json").read_text())
    assert summary["run"]["records"] == 50, summary
    assert secured.shown_in(done, standalone) == []


WITHOUT = """
import sys

class Gone:
    def find_spec(self, name, path=None, target=None):
        if name == "{0}":
            raise ModuleNotFoundError("No module named '{0}'", name=name)

sys.meta_path.insert(0, Gone())
"""


def python_with(standalone: StandaloneCluster, folder: Path, customized: str) -> Path:
    """The workers' Python, which runs this at its start."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(customized)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}:$PYTHONPATH" exec {standalone.python} "$@"\n')
    python.chmod(0o755)
    return python


def python_of_the_past(standalone: StandaloneCluster, folder: Path) -> Path:
    """Two hours behind."""
    late = "import time\nnow = time.time\ntime.time = lambda: now() - 7200\n"
    return python_with(standalone, folder / "past", late)


def python_without(standalone: StandaloneCluster, folder: Path, package: str) -> Path:
    return python_with(standalone, folder / "without", WITHOUT.format(package))


@pytest.mark.long
def test_what_a_cluster_lacks_is_said_in_one_line(standalone, world, tmp_path):
    sender = stream("ewr", "UA@ewr", "00000000000000aa")
    world.send(sender, range(1, 11))
    world.report(sender)
    world.flush()
    config = write_config(world, tmp_path / "audit.yaml")
    good = audit(config, standalone.master, environment(standalone))
    assert good.returncode == 2, good.stderr  # nothing has arrived yet
    state, verdict = tmp_path / "audit-state", (tmp_path / "audit-report" / "summary.json").read_bytes()
    kept = {path: path.read_bytes() for path in state.rglob("*") if path.is_file()}
    world.send(sender, range(11, 21))
    world.report(sender, report=2)
    world.flush()
    nobody = audit(config, f"spark://127.0.0.1:{free_port()}", environment(standalone))
    assert nobody.returncode == 3
    assert "millrace: Spark master spark://127.0.0.1:" in nobody.stderr
    assert "cannot be reached" in nobody.stderr and nobody.stderr.count("\n") == 1
    here = write_config(world, tmp_path / "here.yaml", state=str(tmp_path / "audit-state"))
    local = audit(here, standalone.master, environment(standalone))
    assert local.returncode == 3 and "share with this machine" in local.stderr, local.stderr
    assert local.stderr.count("\n") == 1 and "here.yaml:" in local.stderr
    for python, said in (
        (Path("/no/such/python"), "Spark's workers cannot start /no/such/python"),
        (python_of_the_past(standalone, tmp_path), " s behind the driver's; set both by NTP"),
        (
            python_without(standalone, tmp_path, "numba"),
            " lacks the Python package numba: install millrace's dependencies",
        ),
    ):
        lacking = audit(config, standalone.master, environment(standalone, PYSPARK_PYTHON=str(python)))
        assert lacking.returncode == 3, lacking.stderr
        assert said in lacking.stderr and lacking.stderr.count("\n") == 1
    assert {path: path.read_bytes() for path in state.rglob("*") if path.is_file()} == kept
    assert (tmp_path / "audit-report" / "summary.json").read_bytes() == verdict
