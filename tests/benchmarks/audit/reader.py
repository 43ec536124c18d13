"""A process that counts a topic with Spark when it is told to, and says what that took.

    python -m tests.benchmarks.audit.reader millrace|connector FOLDER

Reads one JSON order a line from standard input and answers each with one line. Two of these run beside each
other, one for each system, each with a Spark of its own that has been warmed up; orders alternate, so that
both are measured in the same minutes. The connector's JVM has Java's usual settings, not those that the
audit chooses for its own short life.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

MASTER = "local[2]"
CORES = 2
WINDOW_MS = 60_000
_TICKS = os.sysconf("SC_CLK_TCK")

# What an administrator would set for throughput; the defaults are slower.
CONNECTOR_OPTIONS = {
    "includeHeaders": "true",
    "failOnDataLoss": "true",
    "kafka.max.partition.fetch.bytes": str(8 << 20),
    "kafka.fetch.max.bytes": str(32 << 20),
    "kafka.max.poll.records": "10000",
    "kafka.receive.buffer.bytes": str(1 << 20),
}
CONNECTOR_MEMORY = "8g"  # it keeps 64 consumers, each with what it has fetched: 2 GB are not enough
CONNECTOR_COUNT = f"""
    select decode(substring(identity, 24), 'UTF-8') as producer,
           floor(cast(conv(hex(substring(identity, 18, 6)), 16, 10) as bigint) / {WINDOW_MS}) * {WINDOW_MS}
           as window, count(*) as records
    from (select element_at(filter(headers, each -> each.key = '_mr'), -1).value as identity from source)
    group by 1, 2
"""


class Processes:
    """Processor time and memory of this process's children: the JVM, and Spark's Python below it.

    Spark keeps its Python workers for a minute and forks new ones when it needs them; one that is new
    counts from its beginning, one that ended meanwhile was idle.
    """

    def __init__(self) -> None:
        self._before = {pid: seconds for pid, _, seconds, _ in self._all()}

    @staticmethod
    def _all() -> Iterator[tuple[int, str, float, float]]:
        """(pid, kind, CPU seconds, the most ever resident in MB)."""
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(OSError, StopIteration, psutil.Error):
                kind = "jvm" if process.name() == "java" else "python"
                folder = Path(f"/proc/{process.pid}")
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                status = (folder / "status").read_text().splitlines()
                peak = next(line for line in status if line.startswith("VmHWM:"))
                seconds = (int(fields[11]) + int(fields[12])) / _TICKS
                yield process.pid, kind, seconds, int(peak.split()[1]) * 1024 / 1e6

    def finish(self) -> dict[str, float]:
        """CPU seconds since the beginning; the most that one process of a kind ever had resident, in MB."""
        figures = dict.fromkeys(("jvm_cpu_s", "python_cpu_s", "jvm_peak_mb", "python_peak_mb"), 0.0)
        for pid, kind, seconds, peak in self._all():
            figures[f"{kind}_cpu_s"] += seconds - self._before.get(pid, 0.0)
            figures[f"{kind}_peak_mb"] = max(figures[f"{kind}_peak_mb"], peak)
        return figures


def source_of(order: dict[str, Any]) -> Any:
    """What is read, as options of the Spark source."""
    from millrace.audit.spark.kafka_options import parse_source

    return parse_source({"kafka.bootstrap.servers": order["bootstrap"], "subscribe": order["topic"]})


class Millrace:
    """Cells mode, the way that the audit's job takes."""

    def __init__(self, folder: Path) -> None:
        from tests.spark_session import spark_session

        self._folder = folder
        self._stack = contextlib.ExitStack()
        self._spark = self._stack.enter_context(spark_session(MASTER, folder))

    def count(self, order: dict[str, Any]) -> dict[str, Any]:
        from millrace.audit.spark.pinning import pin_ranges
        from millrace.audit.spark.spark_source import read_pinned
        from millrace.audit.spark.task_plan import ranges_option, task_count_of

        target = self._folder / "cells"
        shutil.rmtree(target, ignore_errors=True)
        processes, begin = Processes(), time.perf_counter()
        ranges = asyncio.run(pin_ranges(source_of(order)))
        share = order.get("records", 1 << 60) // len(ranges)
        ranges = [
            replace(each, end_offset=min(each.end_offset, each.first_offset + share)) for each in ranges
        ]
        options = {
            "bootstraps": json.dumps({"cluster": [order["bootstrap"]]}),
            "ranges": ranges_option(ranges),
            "window": f"{WINDOW_MS}ms",
            "tasks": str(task_count_of(ranges, CORES)),
            "digest": str(order.get("digest", False)).lower(),
        }
        read_pinned(self._spark, options).write.parquet(f"file://{target}")
        seconds = time.perf_counter() - begin
        figures = processes.finish()
        files = sum(path.stat().st_size for path in target.glob("*.parquet"))
        cells = self._spark.read.parquet(f"file://{target}").filter("note is null")
        found = cells.selectExpr(
            "count(*)", "coalesce(sum(length(bitmap)), 0)", "sum(count)", "count(digest)"
        ).collect()[0]
        told = cells.selectExpr("producer", "window_start_ms", "count")
        rows = told.groupBy("producer", "window_start_ms").sum("count").collect()
        return figures | {
            "seconds": seconds,
            "records": sum(each.size for each in ranges),
            "counted": int(found[2] or 0),
            "cells": int(found[0]),
            "digests": int(found[3]),
            "bitmap_bytes": int(found[1]),
            "cell_bytes": files,
            "counts": {f"{row[0]} {row[1]}": int(row[2]) for row in rows},
        }

    def close(self) -> None:
        self._stack.close()


class Connector:
    """Spark's own connector for Kafka, and a GROUP BY over the header's bytes."""

    def __init__(self, folder: Path) -> None:
        from pyspark.sql import SparkSession

        from tests.peers.spark_kafka import connector_jars

        self._spark = (
            SparkSession.builder.master(MASTER)
            .appName("connector")
            .config("spark.jars", connector_jars())
            .config("spark.ui.enabled", "false")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.driver.memory", CONNECTOR_MEMORY)
            .config("spark.sql.shuffle.partitions", str(CORES))
            .config("spark.local.dir", str(folder / "local"))
            .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
            .getOrCreate()
        )
        self._spark.sparkContext.setLogLevel("ERROR")

    def count(self, order: dict[str, Any]) -> dict[str, Any]:
        from millrace.audit.spark.pinning import pin_ranges

        topic = order["topic"]
        processes, begin = Processes(), time.perf_counter()
        ranges = asyncio.run(pin_ranges(source_of(order)))
        share = order.get("records", 1 << 60) // len(ranges)
        ends = {str(each.partition): min(each.end_offset, each.first_offset + share) for each in ranges}
        source = (
            self._spark.read.format("kafka")
            .options(**CONNECTOR_OPTIONS)
            .option("kafka.bootstrap.servers", order["bootstrap"])
            .option("subscribe", topic)
            .option("startingOffsets", "earliest")
            .option("endingOffsets", json.dumps({topic: ends}))
            .load()
        )
        source.createOrReplaceTempView("source")
        rows = self._spark.sql(CONNECTOR_COUNT).collect()
        seconds = time.perf_counter() - begin
        counts = {f"{row[0]} {row[1]}": int(row[2]) for row in rows}
        return processes.finish() | {
            "seconds": seconds,
            "records": sum(ends[str(each.partition)] - each.first_offset for each in ranges),
            "counted": sum(counts.values()),
            "counts": counts,
        }

    def close(self) -> None:
        self._spark.stop()


class Reader:
    """The other end: starts the process, gives it orders."""

    def __init__(self, system: str, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.system = system
        self._log = (folder / "reader.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.audit.reader", system, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=Path(__file__).resolve().parents[3],
        )

    def count(self, bootstrap: str, topic: str, **more: Any) -> dict[str, Any]:
        """Figures of one count. Raises RuntimeError when the reader failed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"bootstrap": bootstrap, "topic": topic, **more}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.system} ended; its log is {self._log.name}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self.system}: {answer['error']}")
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else may reach the answers
    kinds: dict[str, type[Millrace | Connector]] = {"millrace": Millrace, "connector": Connector}
    system = kinds[sys.argv[1]](Path(sys.argv[2]))
    for line in sys.stdin:
        try:
            answer = system.count(json.loads(line))
        except Exception as problem:  # the parent decides what to do about it
            answer = {"error": f"{type(problem).__name__}: {str(problem)[:500]}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    system.close()


if __name__ == "__main__":
    main()
