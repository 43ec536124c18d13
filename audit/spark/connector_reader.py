"""Cells through Spark's own Kafka connector (`reader: spark-kafka`), instead of our reader.

Called by `job` in place of `spark_source.read_pinned`: the same options, the same rows. It is for clusters
whose administrators allow one Kafka client only, and a second opinion for everyone: the connector and the
Java client fetch, check and decompress, so which records there are is not our code's word alone. It needs
`spark-sql-kafka-0-10` of the Spark in use on the classpath (in audit.yaml `spark: {spark.jars.packages: …}`);
with Spark 4.3.0, for which none is published, that of 4.2.0 does the same.

What must stay true:

- offsets are those that the job pinned (startingOffsets, endingOffsets), `isolation.level` is read_committed;
- an offset that vanished since it was pinned fails the job (failOnDataLoss): no hole is passed over;
- a compacted topic is refused: the connector does not tell an offset that compaction took from one that a
  transaction's marker has, and a hole must not become a loss;
- what a task's rows say it went through is told: from its first one to its last, for the connector steps over
  what a transaction hides or ends with and says nothing of it. What no task went through is only such a hole
  where our reader finds no record in it either (`holding_records`);
- the rules of counting are those of the compiled scan (`row_records` gives it the rows as records);
- secrets stay references, resolved by the Java client where it runs (KIP-297): see `connector_security`.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import expr, lit

from millrace.audit.contract.header import HEADER_KEY
from millrace.audit.scanning.cell_rows import CELL_DDL, NOTE_READ, NoteRows, RowPlace, cell_batches
from millrace.audit.scanning.credentials import Section
from millrace.audit.spark.connector_security import client_settings
from millrace.audit.spark.read_meter import ReadMeter, Told
from millrace.audit.spark.read_options import ReadOptions, parse_options
from millrace.audit.spark.task_plan import OffsetRange
from millrace.broker.client.admin import describe_topics_configs
from millrace.broker.errors import ClusterUnreachable, ConfigError, KafkaError
from millrace.broker.protocol.topic_partition import TopicPartition

if TYPE_CHECKING:  # loaded by whoever reads
    from millrace.audit.scanning.range_reader import RangeReader

ROWS_PER_ARROW_BATCH = 10_000
HEADER_ROWS = f"filter(headers, header -> header.key = '{HEADER_KEY}')"
INSTALL = (
    "the Kafka connector on Spark's classpath: org.apache.spark:spark-sql-kafka-0-10_2.13 of Spark's own "
    "version (for 4.3.0, of which none is published, 4.2.0), by spark.jars or spark.jars.packages; "
    "or reader: millrace"
)

RangesAt = Mapping[TopicPartition, Sequence[OffsetRange]]
"""{(topic in the cluster, partition): the ranges read of it}"""


def read_through_connector(
    spark: SparkSession, options: Mapping[str, str], meter: ReadMeter | None = None
) -> DataFrame:
    """The rows that `spark_source.read_pinned` gives for the same options, which must hold `ranges`.

    Raises ConfigError without the connector, and for what it cannot do: compacted topics, some logins.
    """
    read = parse_options(options)
    ranges = [each for each in read.ranges or () if each.size > 0]
    if not ranges:
        return spark.createDataFrame([], CELL_DDL)
    by_cluster: dict[str, list[OffsetRange]] = {}
    for each in ranges:
        by_cluster.setdefault(each.cluster, []).append(each)
    asyncio.run(_refuse_compacted(read, by_cluster))
    total = sum(each.size for each in ranges)
    frames = []
    for name, held in by_cluster.items():
        tasks = max(1, round(read.tasks * sum(each.size for each in held) / total))
        frames.append(_read_cluster(spark, read, name, held, tasks, meter))
    return functools.reduce(DataFrame.unionByName, frames)


def _read_cluster(
    spark: SparkSession,
    read: ReadOptions,
    cluster: str,
    ranges: Sequence[OffsetRange],
    tasks: int,
    meter: ReadMeter | None,
) -> DataFrame:
    ranges_at: dict[TopicPartition, list[OffsetRange]] = {}
    for each in ranges:
        ranges_at.setdefault((each.topic_here, each.partition), []).append(each)
    given: dict[str, str] = {
        "kafka.bootstrap.servers": ",".join(read.bootstraps[cluster]),
        "kafka.isolation.level": "read_committed",
        "includeHeaders": "true",
        "failOnDataLoss": "true",
        "minPartitions": str(tasks),
        **offset_options(ranges_at),
        **client_settings(cluster, cast(Section, read.securities.get(cluster, {}))),
    }
    try:
        table = spark.read.format("kafka").options(**given).load()
    except AnalysisException as problem:
        if "find data source" in str(problem) or problem.getCondition() == "DATA_SOURCE_NOT_FOUND":
            raise ConfigError("reader", "spark-kafka", INSTALL) from problem
        raise
    content = read.digest
    rows = table.select(
        "topic",
        "partition",
        "offset",
        # A batch's append time where the broker stamps it; a creation time tells nothing about arrival.
        expr("CASE WHEN timestampType = 1 THEN unix_millis(timestamp) ELSE -1L END").alias("append_ms"),
        *(["key", "value"] if content else [lit(None).cast("binary").alias(n) for n in ("key", "value")]),
        expr("coalesce(octet_length(value), -1)").alias("value_size"),
        (expr("headers") if content else expr(HEADER_ROWS)).alias("headers"),
    )

    def count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return count_rows(batches, ranges_at, read, meter)

    return rows.mapInArrow(count, CELL_DDL)


def offset_options(ranges_at: RangesAt) -> dict[str, str]:
    """The connector's options that name partitions and offsets; ranges of one partition must touch."""
    assign: dict[str, list[int]] = {}
    starts: dict[str, dict[str, int]] = {}
    ends: dict[str, dict[str, int]] = {}
    for (topic, partition), ranges in sorted(ranges_at.items()):
        assign.setdefault(topic, []).append(partition)
        starts.setdefault(topic, {})[str(partition)] = min(each.first_offset for each in ranges)
        ends.setdefault(topic, {})[str(partition)] = max(each.end_offset for each in ranges)
    return {
        "assign": json.dumps(assign),
        "startingOffsets": json.dumps(starts),
        "endingOffsets": json.dumps(ends),
    }


def count_rows(
    batches: Iterable[pa.RecordBatch],
    ranges_at: RangesAt,
    read: ReadOptions,
    told: Told | None = None,
) -> Iterator[pa.RecordBatch]:
    """Count the connector's rows into the rows of cells; runs in Spark's workers. How many bytes they were in
    the log, the connector does not say: those of their values are told."""
    from millrace.audit.scanning.counting import CellCounter
    from millrace.audit.scanning.row_records import records_of

    counters: dict[OffsetRange, CellCounter] = {}
    notes = NoteRows()
    rows_of: dict[
        TopicPartition, tuple[int, int]
    ] = {}  # by partition: offsets from the first to behind the last
    for batch in batches:
        if told is not None:
            sizes = pc.sum(pc.max_element_wise(batch.column("value_size"), 0)).as_py()
            told.add(sizes or 0, batch.num_rows)
        for topic, partition, part in _by_partition(batch):
            records = records_of(part, content=read.digest)
            bounds = pc.min_max(part.column("offset")).as_py()
            first, end = rows_of.get((topic, partition), (bounds["min"], 0))
            rows_of[topic, partition] = (min(first, bounds["min"]), max(end, bounds["max"] + 1))
            for range_ in ranges_at[topic, partition]:
                counter = counters.get(range_)
                if counter is None:
                    counter = CellCounter(read.window_ms, read.chunk_offsets, read.digest)
                    counters[range_] = counter
                counter.count(records.buffer, records.index, range_.first_offset, range_.end_offset)
                if counter.is_full():
                    yield from _take(counter, range_, read)
    for range_, counter in counters.items():
        yield from _take(counter, range_, read)
        notes.add_totals(_place(range_), counter.totals())
    for at, (first, end) in rows_of.items():
        for range_ in ranges_at[at]:
            low, high = max(first, range_.first_offset), min(end, range_.end_offset)
            if low < high:
                notes.add_note(_place(range_), NOTE_READ, high - low, low, high - 1)
    if len(notes):
        yield notes.flush()


def _take(counter, range_: OffsetRange, read: ReadOptions) -> Iterator[pa.RecordBatch]:  # type: ignore[no-untyped-def]
    return cell_batches(_place(range_), counter.take(), read.chunk_offsets, ROWS_PER_ARROW_BATCH)


def _place(range_: OffsetRange) -> RowPlace:
    return RowPlace(
        range_.tier, range_.cluster, range_.topic, range_.topic_id, range_.partition, range_.tail
    )  # fmt: skip


def _by_partition(batch: pa.RecordBatch) -> Iterator[tuple[str, int, pa.RecordBatch]]:
    """The batch's runs of one partition; Spark's tasks read one each, so it is nearly always one run."""
    topics = batch.column("topic").dictionary_encode()
    numbers = topics.indices.to_numpy(zero_copy_only=False)
    partitions = batch.column("partition").to_numpy(zero_copy_only=False)
    changes = ((numbers[1:] != numbers[:-1]) | (partitions[1:] != partitions[:-1])).nonzero()[0] + 1
    for first, end in itertools.pairwise([0, *changes.tolist(), batch.num_rows]):
        if end > first:
            topic = topics.dictionary[int(numbers[first])].as_py()
            yield topic, int(partitions[first]), batch.slice(first, end - first)


def holding_records(options: Mapping[str, str], stretches: Sequence[OffsetRange]) -> list[OffsetRange]:
    """Those of these stretches, of which the connector gave no record, in which our own reader finds one, or
    cannot say: the others are what a transaction left there (its marker, or all of it where it was aborted).
    They are few and short, between two tasks and at the ends, unless a task's rows are not there."""
    from millrace.audit.scanning.range_reader import RangeReader

    read = parse_options(options)
    with RangeReader(read.bootstraps, read.fetch_max_bytes, read.securities) as reader:
        return [each for each in stretches if _holds_records(reader, each, read)]


def _holds_records(reader: RangeReader, stretch: OffsetRange, read: ReadOptions) -> bool:
    from millrace.audit.scanning.counting import CellCounter
    from millrace.audit.scanning.range_reader import COMPACTED
    from millrace.audit.spark.task_reader import count_batches

    counter = CellCounter(read.window_ms, read.chunk_offsets)
    gone: list[str] = []

    def unread(first_offset: int, end_offset: int, cause: str) -> None:
        if cause != COMPACTED and first_offset < stretch.end_offset and end_offset > stretch.first_offset:
            gone.append(cause)

    for batches in reader.read(stretch, lambda _: None, unread):
        count_batches(counter, batches, stretch.first_offset, stretch.end_offset, unread=unread)
        if gone or counter.totals().records:
            return True
    return bool(gone)


async def _refuse_compacted(read: ReadOptions, by_cluster: Mapping[str, Sequence[OffsetRange]]) -> None:
    from millrace.audit.scanning.range_reader import connect

    for name, ranges in by_cluster.items():
        topics = sorted({each.topic_here for each in ranges})
        async with connect(name, read.bootstraps[name], read.securities) as cluster:
            found = await describe_topics_configs(cluster, topics, ["cleanup.policy"])
        for topic, settings in found.items():
            if isinstance(settings, KafkaError):
                raise ClusterUnreachable(name, f"settings of topic {topic} cannot be read: {settings}")
            policy = settings["cleanup.policy"].value or "" if "cleanup.policy" in settings else ""
            if "compact" in policy:
                raise ConfigError(
                    "reader",
                    "spark-kafka",
                    f"millrace: topic {topic} of cluster {name} is compacted, and Spark's connector does not "
                    "tell a record that compaction took from one that was lost",
                )
