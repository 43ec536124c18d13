"""Secrets among Spark's settings reach its JVM, and nobody who lists the machine's processes sees them."""

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

settings = {
    "spark.hadoop.fs.s3a.secret.key": "no-one-reads-this",
    "spark.ssl.keyPassword": "no-one-reads-this",
}
settings["spark.sql.session.timeZone"] = "UTC"
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
"""


def test_secrets_are_not_on_the_command_line(tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=patience(240),
        check=False,
    )
    assert done.returncode == 0, done.stderr
