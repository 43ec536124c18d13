"""Secrets among Spark's settings reach its JVM, and nobody sees them who lists the machine's processes or
reads what Spark tells of itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.waiting import patience

pytestmark = pytest.mark.java

PROGRAM = """
import os, sys
from pathlib import Path
from millrace.audit.spark.spark_session import SparkBeside

names = (
    "spark.hadoop.fs.s3a.secret.key",
    "spark.hadoop.fs.s3a.access.key",
    "spark.hadoop.fs.azure.account.key.ours.dfs.core.windows.net",
    "spark.hadoop.fs.azure.sas.fixed.token.container.ours.dfs.core.windows.net",
    "spark.hadoop.fs.gs.auth.service.account.private.key",
    "spark.ssl.keyPassword",
)
settings = dict.fromkeys(names, "no-one-reads-this")
settings["spark.sql.session.timeZone"] = "UTC"
logs = Path(sys.argv[1]) / "logs"
logs.mkdir()
settings |= {"spark.eventLog.enabled": "true", "spark.eventLog.dir": logs.as_uri()}
settings["spark.eventLog.compress"] = "false"
with SparkBeside("local[1]", Path(sys.argv[1]), settings) as spark:
    session = spark.session()
    context = session.sparkContext
    children = [
        child
        for task in Path(f"/proc/{os.getpid()}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    lines = [Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\\0", b" ").decode() for child in children]
    (java,) = [line for line in lines if "spark" in line and "java" in line]
    assert "spark.sql.session.timeZone=UTC" in java, java
    assert "no-one-reads-this" not in java, "a secret stands on the command line"
    assert context._jsc.hadoopConfiguration().get("fs.s3a.secret.key") == "no-one-reads-this"
    assert context.getConf().get("spark.ssl.keyPassword") == "no-one-reads-this"
    session.range(3).collect()
told = b"".join(path.read_bytes() for path in logs.rglob("*") if path.is_file())
assert all(name.encode() in told for name in names), "Spark tells its settings"
assert b"no-one-reads-this" not in told, "a secret stands in the event log"
"""


def test_secrets_are_on_no_command_line_and_in_no_event_log(tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=patience(240),
        check=False,
    )
    assert done.returncode == 0, done.stderr
