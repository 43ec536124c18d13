"""What a JVM of Spark loads at each start, laid up once (JEP 350): a job then starts with a third less of a
processor's time.

`python -m tests.peers.spark_classes` lays it up, by a small job of everything that the audit's jobs do; tests
tell Spark of it by its launcher's own variable (`conftest.py`). An archive that another Java has written is
passed over by the JVM in silence.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from tests.peers.jars import ROOT

CLASSES = ROOT / ".peers" / f"spark-{version('pyspark')}-classes.jsa"
VARIABLE = "SPARK_SUBMIT_OPTS"
_SILENT = "-Xlog:disable -Xlog:all=warning,cds*=off:stderr"
_DUMP_TIMEOUT_S = 300.0

_JOB = """
import pathlib, sys, time
import pyspark.sql.functions as sql
from pyspark.sql import Window
from tests.spark_session import spark_session

folder = pathlib.Path(sys.argv[1])
with spark_session("local[2]", folder) as session:
    rows = session.range(2000).selectExpr("id", "id % 7 as number", "encode(string(id), 'utf-8') as content")
    rows.repartition(3).write.partitionBy("number").parquet(str(folder / "rows"))
    read = session.read.parquet(str(folder / "rows"))
    mapped = read.mapInArrow(lambda batches: batches, read.schema)
    joined = mapped.join(read.groupBy("number").agg(sql.count("*"), sql.max("id")), "number")
    ranked = joined.withColumn("rank", sql.row_number().over(Window.partitionBy("number").orderBy("id")))
    assert len(ranked.where("rank < 3").orderBy("id").toArrow()) == 14
    assert mapped.groupBy("number").applyInArrow(lambda table: table, read.schema).count() == 2000
    print(session.sparkContext._gateway.proc.pid)
"""


def options() -> str | None:
    """For Spark's launcher; None where nothing is laid up."""
    return f"-XX:SharedArchiveFile={CLASSES} {_SILENT}" if CLASSES.exists() else None


def lay_up() -> None:
    """Once. The JVM writes the archive at its end, after the program that it was for."""
    if CLASSES.exists():
        return
    CLASSES.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CLASSES.parent) as folder:
        new = Path(folder, CLASSES.name)
        dumping = f"-XX:ArchiveClassesAtExit={new} -Xlog:disable"
        environment = {**os.environ, VARIABLE: dumping}
        words = [sys.executable, "-c", _JOB, folder]
        told = subprocess.run(words, stdout=subprocess.PIPE, check=True, cwd=ROOT, env=environment).stdout
        _wait_for_end(int(told))
        new.replace(CLASSES)


def _wait_for_end(pid: int) -> None:
    try:
        jvm = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(jvm, select.POLLIN)
        if not poll.poll(_DUMP_TIMEOUT_S * 1000):
            raise TimeoutError(f"Spark's JVM has not ended within {_DUMP_TIMEOUT_S:.0f} s")
    finally:
        os.close(jvm)


if __name__ == "__main__":
    lay_up()
