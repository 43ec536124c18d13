"""Kafka-protocol clusters as a Spark table: `spark.read.format("millrace")`, a PySpark Python Data Source.

`register(spark)` makes the format known to a session. Without option `mode` it reads records, as
`format("kafka")` does: the same options (`kafka_options` has them all), the same columns (`record_rows`). In
mode `cells` it counts batches with the compiled scan and gives what the audit works with
(`cell_rows.CELL_DDL`). Offsets are pinned when Spark plans the read; each action plans anew, so write cells
once and work on what was written.

`read_pinned` gives the same cells without the source's planning; `job` uses it, for it pins ranges itself.

Everything here runs in Spark's Python workers as well as in the driver, so it pickles by reference and opens
its connections only inside `read` and `partitions`. Spark starts a Python process to find its sources,
another to make this one, a third to plan it, and then the tasks' own; the compiled scan and the client are
imported only where they are used, which saves the first three a second each.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from millrace.audit.scanning.cell_rows import CELL_DDL
from millrace.audit.scanning.credentials import carry
from millrace.audit.spark.kafka_options import SourceOptions, parse_source
from millrace.audit.spark.masters import is_elsewhere, is_local
from millrace.audit.spark.read_meter import ReadMeter
from millrace.audit.spark.read_options import CELLS, ReadOptions, parse_options
from millrace.audit.spark.task_plan import OffsetRange, plan_by_partition, plan_tasks
from millrace.broker.errors import ConfigError

FORMAT = "millrace"


def register(spark: SparkSession) -> None:
    """Make `format("millrace")` known to the session, and on a cluster to its executors.

    Local workers run the driver's own Python unless PYSPARK_PYTHON says otherwise (PySpark's own default is
    the first `python3` of the path, which may not have this package). Raises ConfigError where that one
    lacks millrace: Spark would tell of it in pages, and only when it reads.
    """
    context = spark.sparkContext if hasattr(spark, "_jsparkSession") else None
    master = "" if context is None else context.master or ""
    if context is None or not is_local(master):
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


def read_pinned(spark: SparkSession, options: Mapping[str, str], meter: ReadMeter | None = None) -> DataFrame:
    """The cells of ranges that the caller has pinned; `options` as in `read_options`.

    Nothing is left to plan then, and the three Python processes that Spark would start one after the other to
    find, make and plan the source are saved: several seconds, of a job that may take ten.
    """
    read = parse_options(options)
    if is_elsewhere(spark.sparkContext.master or ""):
        read = with_carried_logins(read)
    tasks = plan_tasks(read.ranges or (), read.tasks) or [()]

    def rows_of(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from millrace.audit.spark.task_reader import read_task

        for batch in numbers:
            for number in batch.column(0).to_pylist():
                yield from read_task(tasks[number], read, meter)

    return spark.range(0, len(tasks), 1, len(tasks)).mapInArrow(rows_of, CELL_DDL)


def with_carried_logins(read: ReadOptions) -> ReadOptions:
    """For executors on other machines, which have none of the files that this one has."""
    return replace(read, securities={name: carry(name, each) for name, each in read.securities.items()})


@dataclass
class ReadTask(InputPartition):
    """What one Spark task reads."""

    ranges: tuple[OffsetRange, ...]


class MillraceDataSource(DataSource):
    """The entry point that Spark calls."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        source = parse_source(self.options)
        if source.ignored:  # here, for Spark asks once a `load`, and for a reader with every action
            print(source.ignored_line(), file=sys.stderr, flush=True)
        read = source.read
        if read.mode == CELLS:
            return CELL_DDL
        from millrace.audit.spark.record_rows import record_ddl

        return record_ddl(read)

    def reader(self, schema: StructType) -> DataSourceReader:
        # What option `security` refers to travels with the tasks, inside the pickled reader: executors may
        # have none of the driver's files and variables. Which master it is, nobody knows in this process.
        source = parse_source(self.options)
        return MillraceReader(replace(source, read=with_carried_logins(source.read)))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        raise ConfigError("format millrace", "readStream", "read: this source reads in batches")


class MillraceReader(DataSourceReader):
    """Plans tasks and reads them; travels to the workers by pickle."""

    def __init__(self, source: SourceOptions) -> None:
        self._source = source

    def partitions(self) -> Sequence[InputPartition]:
        from millrace.audit.spark.pinning import pin_ranges

        source = self._source
        ranges = asyncio.run(pin_ranges(source))
        tasks = plan_by_partition(ranges, source.least_tasks, source.most_offsets)
        # Spark needs at least one task to know the schema of an empty read.
        return [ReadTask((each,)) for each in tasks] or [ReadTask(())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, ReadTask):
            raise TypeError(f"not a task of this source: {partition!r}")
        from millrace.audit.spark.task_reader import read_task

        yield from read_task(partition.ranges, self._source.read)
