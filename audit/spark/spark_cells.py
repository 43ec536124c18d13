"""The cells of one run on the state's file system: counted, made verdicts of, folded. Needs a running Spark.

Called by `job`. Every Spark action of a run that touches cells is here; each failed one becomes the one line
that its Python worker raised. Cells lie under `cells/<run>/`, folded ones under `cells/<run>-folded/`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, DataFrameWriter, Observation, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.functions import col, lit

from millrace.audit.config import AuditConfig
from millrace.audit.keeping.state import ROOMS, StateFolder
from millrace.audit.keeping.uniting import ASKED, PLAN_DDL, fold_plan, proven_windows
from millrace.audit.keeping.upkeep import PRUNED, late_row
from millrace.audit.keeping.verdict_files import RowFiles, line_files, pruned_files, row_files, span_files
from millrace.audit.reconciliation.reconcile import ClusterPartition, Passage
from millrace.audit.reconciliation.row_keys import WINDOW
from millrace.audit.reconciliation.settled import (
    LINE_SCHEMA,
    LINE_STATES,
    NUMBERED_DDL,
    REOPENED,
    SETTLED_DDL,
    SETTLED_SCHEMA,
    number_rows,
    unnumbered,
)
from millrace.audit.reconciliation.spans import DAY_MS, SPAN_DDL
from millrace.audit.reconciliation.verdict_rows import ROW_SCHEMA, Reconciler
from millrace.audit.runs.arrivals import arrival_passages
from millrace.audit.runs.at_rest import Asleep, AtRest
from millrace.audit.runs.copied_headers import FOREIGN, foreign_rows
from millrace.audit.runs.fact_rows import FACT_DDL, FACT_SCHEMA, PrunedWindows, left_of, resting_of
from millrace.audit.runs.partition_pins import PartitionPin
from millrace.audit.runs.waking import WAKING, waking_row
from millrace.audit.scanning.cell_notes import NOTE_SCHEMA, read_notes, uncounted
from millrace.audit.scanning.cell_rows import CELL_DDL
from millrace.audit.spark import connector_reader
from millrace.audit.spark.arrow_lists import with_lists
from millrace.audit.spark.read_meter import ReadMeter
from millrace.audit.spark.row_layout import by_day, spread, stretch_hours
from millrace.audit.spark.shared_state import CellsIncomplete, require_shared, rows_in
from millrace.audit.spark.spark_failures import UNREADABLE, one_line
from millrace.audit.spark.spark_session import is_elastic, session_cores
from millrace.audit.spark.spark_source import read_pinned
from millrace.audit.spark.task_plan import (
    OffsetRange,
    ParquetSize,
    folded_files_of,
    ranges_option,
    shuffle_count_of,
    task_count_of,
)
from millrace.broker.errors import DiskFull, MillraceError

AGAIN = "-again"
"""behind the name of a run's folder: rows made once more"""
_FOLDED = "-folded"
_RESTS = "/rests=true/"
_DISK_FULL = ("No space left on device", "Disk quota exceeded")
_WHOLE = {
    "ignoreCorruptFiles": False,
    "ignoreMissingFiles": False,
    "parquet.page.verify-checksum.enabled": True,
}
"""How the state's files are read."""


class RunCells:
    """What one run counts; `kept` are the files of earlier runs that its commit was to go on with, `work` is
    a folder of this machine for as long as the run lasts."""

    def __init__(
        self,
        spark: SparkSession,
        state: StateFolder,
        name: str,
        kept: Sequence[str],
        facts: str,
        work: Path | None = None,
    ) -> None:
        self._spark = spark
        self._state = state
        self._folder = f"cells/{name}"
        self._kept = list(kept)
        self.facts = facts
        self._work = work
        self._notes: pa.Table | None = None
        self._verdicts = f"verdicts/{name}"

    def again(self, room: str, ending: str) -> str:
        """The name in a room of a file that is made once more."""
        return f"{room}/{self._verdicts.partition('/')[2]}{AGAIN}{ending}"

    def go_on_from(self, kept: Sequence[str], facts: str) -> None:
        """Reconcile once more, beside these kept cells and facts."""
        self._kept, self.facts = list(kept), facts
        self._verdicts = self.again("verdicts", "")

    def count(
        self,
        config: AuditConfig,
        ranges: Sequence[OffsetRange],
        meter: ReadMeter | None = None,
    ) -> None:
        """Scan the pinned ranges into Parquet. Rows of the tail lie among the others, for this run only.

        What is found afterwards is compared with what executors wrote and with what was planned: cells that
        are not there would be missed for ever, since the next run goes on behind them. Raises ConfigError,
        CellsIncomplete.
        """
        if any(each.size for each in ranges):
            with self._spread(ParquetSize(0, 0)):  # a cluster's session is set to Spark's own 200 parts
                self._scan(config, ranges, meter)

    def _scan(self, config: AuditConfig, ranges: Sequence[OffsetRange], meter: ReadMeter | None) -> None:
        cores, elastic = session_cores(self._spark), is_elastic(self._spark)
        options = {
            **cluster_options(config),
            "ranges": ranges_option(ranges),
            "window": f"{config.window_ms}ms",
            "digest": "true" if config.content else "false",
            "tasks": str(task_count_of(ranges, cores, elastic=elastic)),
        }
        through_connector = config.reader == "spark-kafka"
        read = connector_reader.read_through_connector if through_connector else read_pinned
        self._write(read(self._spark, options, meter), self._folder)
        self._notes = None
        missing, too_many = uncounted(ranges, self.all_notes())
        if missing and through_connector:
            missing = connector_reader.holding_records(options, missing)
        if missing or too_many:
            planned, unread = (sum(each.size for each in some) for some in (ranges, missing))
            raise CellsIncomplete(self._state.where, planned, unread, too_many)

    def _write(
        self,
        rows: DataFrame,
        folder: str,
        what: str = "cells",
        laid: Callable[[DataFrame], DataFrameWriter] = lambda rows: rows.write,
    ) -> list[str]:
        """Write a folder of Parquet; returns its files when they hold every row that was written."""
        seen = Observation("rows")
        with failing_in_one_line(self._state):
            counted = rows.observe(seen, f.count(lit(1)).alias("rows"))
            laid(counted).parquet(self._state.files.uri(folder))
        files = self._state.files_in(folder)
        require_shared(self._state.where, seen.get["rows"], self._count_rows(files), what)
        self._state.files.flush(files)
        return files

    def new_files(self) -> list[str]:
        return self._state.files_in(self._folder)

    def notes(self, *, tail: bool) -> pa.Table:
        """The rows that are no cells: of the part to be kept, or of the tail."""
        notes = self.all_notes()
        return notes.filter(pc.equal(notes["tail"], tail))

    def all_notes(self) -> pa.Table:
        """Of both."""
        if self._notes is None:
            local = self._state.local_root
            files = self.new_files()
            if local is not None:
                self._notes = read_notes([local / name for name in files])
            elif files:
                with failing_in_one_line(self._state):
                    self._notes = (
                        self._read(files)
                        .filter(col("note").isNotNull())
                        .select(NOTE_SCHEMA.names)
                        .toArrow()
                        .cast(NOTE_SCHEMA)
                    )
            else:
                self._notes = NOTE_SCHEMA.empty_table()
        return self._notes

    def all(self) -> DataFrame:
        """Kept cells and new ones, the tail too; no notes."""
        new = self.new_files()
        cells = self._spark.createDataFrame([], CELL_DDL)
        if new:
            cells = self._read(new)
        if self._kept:
            earlier = self._read(self._kept).filter(~col("tail"))
            cells = cells.unionByName(earlier) if new else earlier
        return cells.filter(col("note").isNull())

    def _read(self, names: Sequence[str], ddl: str = CELL_DDL) -> DataFrame:
        """These files' rows, lists that are null as empty ones; all of them, also where Spark is set to pass
        over what it cannot read."""
        if not names:
            return self._spark.createDataFrame([], ddl)
        every = self._spark.read.options(**_WHOLE)
        return with_lists(every.schema(ddl).parquet(*(self._state.files.uri(name) for name in names)))

    def passages(
        self, pins: Iterable[PartitionPin], sources: Collection[str], aggregate: str
    ) -> dict[ClusterPartition, Passage]:
        """How far a mirror that keeps no positions has come, by what arrived in its `aggregate`."""
        with self._spread(self._size_of([*self._kept, *self.new_files()])), failing_in_one_line(self._state):
            return arrival_passages(self.all(), pins, sources, aggregate)

    def reconcile(
        self, reconciler: Reconciler, verdicts: Sequence[str] | None, at_rest: AtRest | None = None
    ) -> RowFiles:
        """Every stream's verdicts, from the cells on disk and the facts, with their revisions beside the
        `verdicts` of the run before (none in the first one); unnumbered where that is None, in a backfill.

        Executors write them (`keeping.verdict_files`): rows (NUMBERED_SCHEMA), and in states of their own the
        lines that are carried on (`settled`), late records of pruned windows (PRUNED), what came for those at
        rest (WAKING), and copies in other topics (FOREIGN).
        """

        is_numbered = verdicts is not None

        def rows_of(cells: pa.Table, told: pa.Table) -> pa.Table:
            # Spark counts arguments, and would count self.
            return numbered_verdicts(reconciler, cells, told, is_numbered)

        size = self._size_of([*self._kept, *self.new_files(), *row_files(verdicts or ())])
        with self._spread(size):
            with failing_in_one_line(self._state):
                told = self._told(reconciler.topics, verdicts or (), at_rest or AtRest())
                cells = self.all().groupBy("stream")
                rows = cells.cogroup(told.groupBy("stream")).applyInArrow(rows_of, NUMBERED_DDL)
                hours = stretch_hours(shuffle_count_of(size, 1), self._count_days)
                rows = spread(rows, hours)  # what is written is counted behind it, once
            laid = functools.partial(by_day, hours=hours)
            return RowFiles(self._state, self._write(rows, self._verdicts, "verdicts", laid), self._work)

    def _count_days(self) -> int:
        """On how many days windows with cells begin."""
        return self.all().select(f.expr(f"floor(window_start_ms / {DAY_MS})")).distinct().count()

    def _rows_before(self, verdicts: Sequence[str], at_rest: AtRest) -> DataFrame | None:
        """Rows of windows that are judged: of the run before, or of the one with which they came to rest."""
        wanted = col("state").isin(*LINE_STATES)
        found = []
        if row_files(verdicts):
            rows = self._read(row_files(verdicts), NUMBERED_DDL).filter(wanted)
            found.append(self._within(rows, at_rest.asleep, inside=False))
        for each in at_rest.woke:
            if not set(each.files.rows) <= set(verdicts):
                rows = self._read(each.files.rows, NUMBERED_DDL).filter(wanted)
                found.append(self._within(rows, [each], inside=True))
        return functools.reduce(DataFrame.unionByName, found) if found else None

    def _within(self, rows: DataFrame, windows: Sequence[Asleep], *, inside: bool) -> DataFrame:
        """Those of the rows whose window is one of these, or is none of them."""
        if not windows:
            return rows
        spans = self._read([each.files.spans for each in windows], SPAN_DDL)
        marked = in_spans(rows.withColumn("pruned", lit(False)), spans)
        return marked.filter(col("pruned") == inside).drop("pruned")

    def _told(self, topics: Sequence[str], verdicts: Sequence[str], at_rest: AtRest) -> DataFrame:
        """What is known of each stream beside its cells: rows of its facts, and of the lines that the run
        before kept of the audited topics, as a `line` (`settled.LINE_SCHEMA`)."""
        facts = self._read([self.facts], FACT_DDL)
        lines = self._read(line_files(verdicts), SETTLED_DDL)
        rows = self._rows_before(verdicts, at_rest)
        if rows is not None:
            of_rows = rows.withColumnsRenamed({"content": "compared", "said": "content"}).withColumns(
                {"folded": lit(False), "open": col("state") == REOPENED}
            )
            gone = self._read(pruned_files(verdicts), SETTLED_DDL).select(*WINDOW).distinct()
            of_rows = of_rows.join(f.broadcast(gone), WINDOW, "left_anti")
            lines = lines.unionByName(of_rows.select(*SETTLED_SCHEMA.names))
        lines = lines.filter(col("topic").isin(list(topics))).fillna(False, ["folded", "open"])
        pruned = lines.filter("folded").select(*WINDOW).distinct().withColumn("pruned", lit(True))
        lines = lines.filter(~col("folded") & (col("stream") != ""))
        lines = lines.join(f.broadcast(pruned), WINDOW, "left").fillna(False, ["pruned"])
        if span_files(verdicts):
            lines = in_spans(lines, self._read(span_files(verdicts), SPAN_DDL))
        line = f.struct(*LINE_SCHEMA.names).alias("line")
        return with_lists(facts.unionByName(lines.select("stream", line), allowMissingColumns=True))

    def _size_of(self, names: Sequence[str]) -> ParquetSize:
        row_count = 0
        with contextlib.suppress(OSError, pa.ArrowException):  # which file cannot be read, Spark will tell
            row_count = self._count_rows(names)
        return ParquetSize(self._bytes_of(names), row_count)

    def _bytes_of(self, names: Sequence[str]) -> int:
        """Bytes of the folders that these files are in, which go together."""
        return sum(
            entry.size
            for folder in {name.rpartition("/")[0] for name in names}
            for entry in self._state.files.entries(folder)
        )

    def _count_rows(self, names: Sequence[str]) -> int:
        """By what the files' ends tell."""
        local = self._state.local_root
        if local is not None:
            return rows_in([local / name for name in names])
        with failing_in_one_line(self._state):
            return self._read(names).count() if names else 0

    @contextlib.contextmanager
    def _spread(self, size: ParquetSize) -> Iterator[None]:
        """While it lasts Spark shuffles so much into as many parts as it needs, and never fewer than it is
        set to; then it is set as before, for the session may be a user's, who goes on with it."""
        setting, conf = "spark.sql.shuffle.partitions", self._spark.conf
        before = conf.getAll.get(setting)
        least = int(before) if before else session_cores(self._spark)
        conf.set(setting, str(shuffle_count_of(size, least, elastic=is_elastic(self._spark))))
        try:
            yield
        finally:
            if before:
                conf.set(setting, before)
            else:
                conf.unset(setting)

    def windows_of_tail(self) -> set[tuple[str, int]]:
        """{(stream, window start)} of cells that the next run reads again."""
        new = self.new_files()
        if not new:
            return set()
        tail = self._read(new).filter(col("tail") & col("note").isNull())
        with self._spread(self._size_of(new)), failing_in_one_line(self._state):
            found = tail.select("stream", "window_start_ms").distinct().toArrow().to_pylist()
        return {(row["stream"], row["window_start_ms"]) for row in found}

    def loose_files(self) -> list[str]:
        """Those that a fold puts together: all but the large ones that an earlier fold made, so that a fold
        costs what is new. The files of one fold are large or loose together, and go together."""
        names = [*self._kept, *self.new_files()]
        large: set[str] = set()
        for folder in {name.rpartition("/")[0] for name in names if is_folded(name)}:
            # Hadoop lays a checksum beside each file, and a mark of success.
            sizes = [
                entry.size
                for entry in self._state.files.entries(folder)
                if entry.name.endswith(".parquet") and not entry.name.startswith((".", "_"))
            ]
            there = self._size_of([name for name in names if name.rpartition("/")[0] == folder])
            if folded_files_of(there._replace(byte_count=sum(sizes))) >= len(sizes) / 2:
                large.add(folder)
        return [name for name in names if name.rpartition("/")[0] not in large]

    def fold(
        self, plan: str, rows: Sequence[str], *, whole: bool = False, resting: pa.Table | None = None
    ) -> tuple[list[str], list[str]]:
        """Write what is kept of all loose cells, or the `whole` of them, into few files; without those of
        windows that the plan (`uniting.fold_plan`, "" where there is none) calls pruned, and those that these
        files of this run's rows call proven united. Returns the files that there are then, and those of the
        windows that come to rest (SPAN_SCHEMA)."""
        new = self.new_files()
        sources = [*self._kept, *new] if whole else self.loose_files()
        left = [name for name in self._kept if name not in set(sources)]
        if not sources:
            return left, []
        parts = []
        kept = [name for name in self._kept if name in set(sources)]
        if kept:
            parts.append(self._read(kept).filter(~col("tail")))
        if new:
            parts.append(self._read(new))  # its tail holds windows back
        cells = functools.reduce(DataFrame.unionByName, parts).filter(col("note").isNull())
        if plan or rows:
            verdicts = self._read(rows, NUMBERED_DDL).select(*ASKED)
            told = self._read([plan] if plan else [], PLAN_DDL).unionByName(
                verdicts.mapInArrow(lambda batches: proven_of(batches, resting), PLAN_DDL)
            )
            made, ddl = (folded, CELL_DDL) if resting is None else (laid_apart, f"{CELL_DDL}, rests boolean")
            cells = cells.groupBy("stream").cogroup(told.groupBy("stream")).applyInArrow(made, ddl)
        else:
            cells = cells.filter(~col("tail"))
        size = self._size_of(sources)
        with self._spread(size):
            few = cells.coalesce(max(1, math.ceil(folded_files_of(size))))
            folder = f"{self._folder}{_FOLDED}"
            if resting is None:
                return [*left, *self._write(few, folder)], []
            files = self._write(few, folder, laid=lambda rows: rows.write.partitionBy("rests"))
            rest = [name for name in files if _RESTS in name]
            return [*left, *(name for name in files if _RESTS not in name)], rest


def in_spans(lines: DataFrame, spans: DataFrame) -> DataFrame:
    """The lines, `pruned` those whose window is in one of the spans, too (`spans.are_in`). All windows of a
    span begin on one day."""
    day = f.floor(col("start_ms") / DAY_MS).alias("span_day")
    by_day = spans.groupBy(col("topic").alias("span_topic"), day).agg(
        f.collect_list(f.struct("start_ms", "end_ms", "window_ms")).alias("spans")
    )
    start = col("window_start_ms")
    there = (col("topic") == col("span_topic")) & (f.floor(start / DAY_MS) == col("span_day"))
    found = lines.join(f.broadcast(by_day), there, "left")
    is_in = f.exists(
        "spans",
        lambda span: (
            (start >= span["start_ms"])
            & (start < span["end_ms"])
            & ((start - span["start_ms"]) % span["window_ms"] == 0)
        ),
    )
    pruned = col("pruned") | f.coalesce(is_in, lit(False))
    return found.withColumn("pruned", pruned).drop("span_topic", "span_day", "spans")


def is_folded(name: str) -> bool:
    """Whether a fold has written this file of cells."""
    return any(part.endswith(_FOLDED) for part in name.split("/")[:-1])


def proven_of(batches: Iterator[pa.RecordBatch], resting: pa.Table | None = None) -> Iterator[pa.RecordBatch]:
    """The plan's rows of proven windows; runs in Spark's workers."""
    for batch in batches:
        yield from fold_plan({}, proven_windows(pa.Table.from_batches([batch])), resting).to_batches()


def unpruned(cells: pa.Table, pruned: PrunedWindows | None) -> tuple[pa.Table, pa.Table]:
    """(a stream's cells without, its cells of, windows that are pruned, or at rest)."""
    if pruned is None or not cells.num_rows:
        return cells, cells.slice(0, 0)
    starts = cells["window_start_ms"]
    gone = [start_ms for start_ms in starts.unique().to_pylist() if pruned.has(start_ms)]
    mask = pc.is_in(starts, value_set=pa.array(gone, pa.int64()))
    return cells.filter(pc.invert(mask)), cells.filter(mask)


def folded(cells: pa.Table, plan: pa.Table) -> pa.Table:
    """What is kept of one stream's cells, of which those of the tail only hold their windows back; runs in
    Spark's workers."""
    from millrace.audit.scanning.cell_union import unite

    living, _ = unpruned(cells, left_of(plan.filter(pc.is_valid(plan["pruned"])).to_pylist()))
    return unite(living, plan.filter(pc.is_valid(plan["window_start_ms"])))


def laid_apart(cells: pa.Table, plan: pa.Table) -> pa.Table:
    """What is kept of one stream's cells, and whether each comes to rest; runs in Spark's workers."""
    kept = folded(cells, plan)
    windows = plan.filter(pc.fill_null(plan["rests"], False)).sort_by("window_start_ms")
    firsts, starts = windows["window_start_ms"].to_numpy(), kept["window_start_ms"].to_numpy()
    ends = firsts + windows["window_ms"].to_numpy()
    at = np.searchsorted(firsts, starts, side="right") - 1
    rests = at >= 0
    rests[rests] = starts[rests] < ends[at[rests]]
    return kept.append_column("rests", pa.array(rests))


def numbered_verdicts(
    reconciler: Reconciler, cells: pa.Table, told: pa.Table, is_numbered: bool = True
) -> pa.Table:
    """One stream's rows (NUMBERED_SCHEMA) with what is carried on of it; runs in Spark's workers. `told` are
    its facts and the lines of the run before (`RunCells._told`)."""
    is_line = pc.is_valid(told["line"])
    facts = told.filter(pc.invert(is_line)).select(FACT_SCHEMA.names)
    rows = verdicts_of(reconciler, cells, facts)
    if not is_numbered:
        return unnumbered(rows)
    lines = pa.Table.from_struct_array(told.filter(is_line)["line"]).cast(LINE_SCHEMA)
    is_counting = pc.is_in(rows["state"], value_set=pa.array([PRUNED, FOREIGN, WAKING]))
    numbered = number_rows(rows.filter(pc.invert(is_counting)), lines, reconciler.now_ms)
    return pa.concat_tables([numbered, unnumbered(rows.filter(is_counting))])


def verdicts_of(reconciler: Reconciler, cells: pa.Table, facts: pa.Table) -> pa.Table:
    """One stream's rows (ROW_SCHEMA); none of one of which only lines are left."""
    if not cells.num_rows and not facts.num_rows:
        return ROW_SCHEMA.empty_table()
    known = facts.to_pylist()
    cells, foreign = reconciler.own_cells(cells, known)
    rows = _own_rows(reconciler, cells, known)
    if not foreign:
        return rows
    copied = foreign_rows(known[0]["stream"], foreign)
    return pa.concat_tables([rows, pa.Table.from_pylist(copied, ROW_SCHEMA)])


def _own_rows(reconciler: Reconciler, cells: pa.Table, known: Sequence[Mapping[str, Any]]) -> pa.Table:
    left = left_of(known)
    living, others = unpruned(cells, left)
    rows = reconciler.rows(living, known, left)
    if left is None:
        return rows
    counting = came_for_others(reconciler, known[0], living, others, rows)
    rows = rows.filter(pc.invert(starts_in(rows, left)))
    return pa.concat_tables([rows, pa.Table.from_pylist(counting, ROW_SCHEMA)]) if counting else rows


def came_for_others(
    reconciler: Reconciler, known: Mapping[str, Any], living: pa.Table, others: pa.Table, rows: pa.Table
) -> list[dict[str, Any]]:
    """What came for windows of a stream that are not judged: rows that count it, or wake those at rest.
    `living` are its cells in windows that are judged, `others` those in others, `rows` what is said of it."""
    topic, told, resting = reconciler.told_topic([known]) or "", [], resting_of(known)
    if resting is not None:
        told.append(waking_row(topic, known, resting, living, others, rows))
        others = others.filter(pc.invert(starts_in(others, resting)))
    if others.num_rows:
        told.append(late_row(topic, known["stream"], others))
    return [row for row in told if row is not None]


def starts_in(rows: pa.Table, windows: PrunedWindows) -> pa.Array:
    """Whether each row's window is one of these."""
    starts = rows["window_start_ms"].to_pylist()
    return pa.array([start is not None and windows.has(start) for start in starts], pa.bool_())


def cluster_options(config: AuditConfig) -> dict[str, str]:
    """The options of the Spark source that say where the clusters are and how to be let in: with references
    to secrets, never secrets; each worker reads its own files."""
    clusters = config.clusters.items()
    securities = {
        name: cluster.security.model_dump(mode="json", exclude_defaults=True) for name, cluster in clusters
    }
    return {
        "bootstraps": json.dumps({name: list(cluster.bootstrap) for name, cluster in clusters}),
        "securities": json.dumps({name: security for name, security in securities.items() if security}),
    }


def _name_of(uri: str) -> str:
    """Of a file of the state, as Spark names it."""
    path = unquote(uri)
    return path[max(path.rfind(f"/{room}/") for room in ROOMS) + 1 :]


@contextlib.contextmanager
def failing_in_one_line(state: StateFolder | None = None) -> Iterator[None]:
    """Turn a failed Spark action into the line that its Python worker raised; for a file of the `state` that
    Spark could not read, with the way back."""
    try:
        yield
    except (PySparkException, Py4JJavaError) as problem:
        if any(sign in str(problem) for sign in _DISK_FULL):
            raise DiskFull(
                "no room is left for the audit's state or for Spark's work; make room and run it again, "
                "the last good state is as it was"
            ) from problem
        line = one_line(problem)
        if line is None:
            raise
        if state is not None and line.endswith(UNREADABLE):
            line = f"{line}; {state.way_back(_name_of(line.removesuffix(UNREADABLE)))}"
        raise MillraceError(line) from problem
