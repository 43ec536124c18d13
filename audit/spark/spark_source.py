"""Kafka-protocol clusters as a Spark table: `spark.read.format("millrace")`, a PySpark Python Data Source.

`register(spark)` makes the format known to a session. Modes:

- `cells` (default): the reader counts batches with the compiled scan and yields cells (`cell_rows.CELL_DDL`);
- `records`: one row a record (`RECORD_DDL`), for looking at single ones.

Options (all values are text; a wrong one is one `ConfigError` line when the read is planned):

    bootstrap       host:port,host:port of one cluster                         required without `ranges`
    topics          topic,topic                                                required without `ranges`
    cluster, tier   names for the rows                                         default: cluster, and its name
    ranges          JSON list of `OffsetRange`s, pinned by the caller          instead of bootstrap and topics
    bootstraps      JSON {cluster: [host:port, ...]}                           with `ranges`
    securities      JSON {cluster: its `security` section of audit.yaml}       default: none of them has one
    window          length of a window                                         default 60s
    tasks           how many tasks of even size to plan                        default 4
    chunk_offsets   offsets a cell may span                                    default 1048576
    fetch_max_bytes most bytes of one fetch                                    default 8388608
    digest          true: sum the records' content digests in cells            default false

Without `ranges`, offsets are pinned when Spark plans the read: from each partition's start to its last stable
offset. Each action plans anew, so write cells once and work on what was written.

`read_pinned` gives the same rows without the source's planning; `job` uses it, because it pins ranges itself.

Everything here runs in Spark's Python workers as well as in the driver, so it pickles by reference and opens
its connections only inside `read` and `partitions`. Spark starts a Python process to find its sources,
another to make this one, a third to plan it, and then the tasks' own; the compiled scan and the client are
imported only where they are used, which saves the first three a second each.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from millrace.audit.config import parse_addresses, parse_duration_ms
from millrace.audit.scanning.cell_rows import CELL_DDL
from millrace.audit.spark.task_plan import OffsetRange, plan_tasks
from millrace.broker.errors import ConfigError

FORMAT = "millrace"
CHUNK_OFFSETS = 1 << 20  # bounds what a gap or a mirror's position can leave undecided
FETCH_MAX_BYTES = 8 << 20  # large enough to hide a long round trip, small enough to hold two a worker

RECORD_DDL = (
    "cluster string, topic string, partition int, offset bigint, timestamp_ms bigint, key binary, "
    "value binary, headers array<struct<key: string, value: binary>>, stream string, sequence bigint, "
    "created_ms bigint, producer string"
)


def register(spark: SparkSession) -> None:
    """Make `format("millrace")` known to the session, and on a cluster to its executors.

    Local workers run the driver's own Python unless PYSPARK_PYTHON says otherwise (PySpark's own default is
    the first `python3` of the path, which may not have this package). Raises ConfigError where that one
    lacks millrace: Spark would tell of it in pages, and only when it reads.
    """
    context = spark.sparkContext if hasattr(spark, "_jsparkSession") else None
    master = "" if context is None else context.master or ""
    if context is None or not (master == "local" or master.startswith("local[")):
        from millrace.audit.spark.spark_package import ship_package

        ship_package(spark)
    elif "PYSPARK_PYTHON" not in os.environ:
        context.pythonExec = sys.executable
    elif not context._python_includes:  # what else is sent to the workers may be our package
        _require_package(context.pythonExec)
    spark.dataSource.register(MillraceDataSource)


def _require_package(python: str) -> None:
    if shutil.which(python) == sys.executable:
        return
    look = "from importlib.util import find_spec; raise SystemExit(not find_spec('millrace'))"
    try:
        lacks = subprocess.run([python, "-c", look], capture_output=True, check=False).returncode != 0
    except OSError:
        lacks = True
    if lacks:
        expected = (
            f"a Python that has millrace, for Spark's workers; set it to {sys.executable} before Spark starts"
        )
        raise ConfigError("PYSPARK_PYTHON", python, expected)


def read_pinned(spark: SparkSession, options: Mapping[str, str]) -> DataFrame:
    """The same rows as `format("millrace")` with option `ranges`, for a caller that has pinned them itself.

    Nothing is left to plan then, and the three Python processes that Spark would start one after the other to
    find, make and plan the source are saved: several seconds, of a job that may take ten.
    """
    read = parse_options(options)
    tasks = plan_tasks(read.ranges or (), read.tasks) or [()]

    def rows_of(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from millrace.audit.spark.task_reader import read_task

        for batch in numbers:
            for number in batch.column(0).to_pylist():
                yield from read_task(tasks[number], read)

    schema = RECORD_DDL if read.mode == "records" else CELL_DDL
    return spark.range(0, len(tasks), 1, len(tasks)).mapInArrow(rows_of, schema)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The checked options."""

    mode: str
    bootstraps: Mapping[str, Sequence[str]]
    ranges: tuple[OffsetRange, ...] | None
    topics: tuple[str, ...]
    tier: str
    window_ms: int
    tasks: int
    chunk_offsets: int
    fetch_max_bytes: int
    securities: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    digest: bool = False


_KNOWN = [
    "mode",
    "bootstrap",
    "topics",
    "cluster",
    "tier",
    "ranges",
    "bootstraps",
    "securities",
    "window",
    "tasks",
    "chunk_offsets",
    "fetch_max_bytes",
    "digest",
]


def parse_options(options: Mapping[str, str]) -> ReadOptions:
    """Check what `.option(...)` was given; raises ConfigError."""
    given = {name.lower(): value for name, value in options.items()}
    for name in given:
        if name not in _KNOWN:
            # Its value is not shown: it may be the password of an option that another client has.
            raise ConfigError("option", name, f"one of {', '.join(_KNOWN)}")
    mode = given.get("mode", "cells")
    if mode not in ("cells", "records"):
        raise ConfigError("option mode", mode, "cells or records")
    cluster = given.get("cluster", "cluster")
    ranges: tuple[OffsetRange, ...] | None = None
    topics: tuple[str, ...] = ()
    if "ranges" in given:
        for name in ("bootstrap", "topics"):
            if name in given:
                raise ConfigError(f"option {name}", given[name], "no value beside ranges, which name all")
        bootstraps = _bootstraps(_json_option(given, "bootstraps", dict))
        ranges = _ranges(_json_option(given, "ranges", list), bootstraps)
    else:
        for name in ("bootstrap", "topics"):
            if not given.get(name):
                raise ConfigError(f"option {name}", given.get(name), "a value: it is required")
        bootstraps = {cluster: parse_addresses("option bootstrap", given["bootstrap"])}
        topics = tuple(topic.strip() for topic in given["topics"].split(",") if topic.strip())
        if not topics or len(set(topics)) != len(topics):
            raise ConfigError("option topics", given["topics"], "topics with commas, each once")
    securities = _json_option(given, "securities", dict) if "securities" in given else {}
    for name, section in securities.items():
        if name not in bootstraps or not isinstance(section, dict):
            known = ", ".join(bootstraps)
            raise ConfigError("option securities", name, f"a section for each of the clusters {known}")
    return ReadOptions(
        mode=mode,
        bootstraps=bootstraps,
        ranges=ranges,
        topics=topics,
        tier=given.get("tier", cluster),
        window_ms=parse_duration_ms("option window", given.get("window", "60s")),
        tasks=_count_option(given, "tasks", 4, 1, 100_000),
        chunk_offsets=_count_option(given, "chunk_offsets", CHUNK_OFFSETS, 1, 1 << 40),
        fetch_max_bytes=_count_option(given, "fetch_max_bytes", FETCH_MAX_BYTES, 1 << 10, 1 << 30),
        securities=securities,
        digest=_flag_option(given, "digest"),
    )


def _json_option(given: Mapping[str, str], name: str, kind: type) -> Any:
    text = given.get(name, "")
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, kind):
        # Of the security sections nothing is shown: a secret may stand where a reference belongs.
        shown = "text that is not shown" if name == "securities" else text[:80]
        raise ConfigError(f"option {name}", shown, f"a JSON {'list' if kind is list else 'object'}")
    return value


def _bootstraps(given: Mapping[str, Any]) -> dict[str, list[str]]:
    """{cluster: addresses}, checked."""
    found: dict[str, list[str]] = {}
    for name, addresses in given.items():
        if not isinstance(addresses, list) or not addresses or not all(type(a) is str for a in addresses):
            raise ConfigError(f"option bootstraps, {name}", addresses, "a list of host:port")
        found[name] = [each for text in addresses for each in parse_addresses("option bootstraps", text)]
    return found


def _ranges(given: Sequence[Any], bootstraps: Mapping[str, Any]) -> tuple[OffsetRange, ...]:
    """Offset ranges of known clusters, checked."""
    ranges = []
    for number, each in enumerate(given):
        where = f"option ranges[{number}]"
        try:
            range_ = OffsetRange(**each)
        except TypeError as problem:
            expected = str(problem).replace("OffsetRange.__init__() ", "")
            raise ConfigError(
                where, str(each)[:80], f"the fields of an offset range ({expected})"
            ) from problem
        numbers = (range_.partition, range_.first_offset, range_.end_offset)
        if not all(type(n) is int and n >= 0 for n in numbers) or range_.first_offset > range_.end_offset:
            raise ConfigError(where, str(each)[:80], "partition, first_offset <= end_offset, from 0")
        if range_.cluster not in bootstraps:
            raise ConfigError(
                f"{where}.cluster", range_.cluster, f"one of bootstraps ({', '.join(bootstraps)})"
            )
        ranges.append(range_)
    return tuple(ranges)


def _flag_option(given: Mapping[str, str], name: str) -> bool:
    text = given.get(name, "false")
    if text.lower() not in ("true", "false"):
        raise ConfigError(f"option {name}", text, "true or false")
    return text.lower() == "true"


def _count_option(given: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    text = given.get(name, str(default))
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
        raise ConfigError(f"option {name}", text, f"a whole number from {least} to {most}")
    return int(text)


@dataclass
class ReadTask(InputPartition):
    """What one Spark task reads: a few ranges, about as many records as every other task."""

    ranges: tuple[OffsetRange, ...]


class MillraceDataSource(DataSource):
    """The entry point that Spark calls."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return RECORD_DDL if parse_options(self.options).mode == "records" else CELL_DDL

    def reader(self, schema: StructType) -> DataSourceReader:
        return MillraceReader(parse_options(self.options))


class MillraceReader(DataSourceReader):
    """Plans tasks and reads them; travels to the workers by pickle."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        options = self._options
        ranges: Sequence[OffsetRange]
        if options.ranges is not None:
            ranges = options.ranges
        else:
            from millrace.audit.spark.task_reader import pin_ranges

            ranges = asyncio.run(pin_ranges(options))
        # Spark needs at least one task to know the schema of an empty read.
        return [ReadTask(each) for each in plan_tasks(ranges, options.tasks)] or [ReadTask(())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, ReadTask):
            raise TypeError(f"not a task of this source: {partition!r}")
        from millrace.audit.spark.task_reader import read_task

        yield from read_task(partition.ranges, self._options)
