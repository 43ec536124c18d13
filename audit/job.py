"""The audit job: `run(config)` looks at the clusters once and says what is proven.

`run` reads as the list of its steps. Called by `millrace audit run`, `audit watch` and the demo.

- Cells are written once, as Parquet, and reconciled from what was written; a Python source would read the
  clusters again for each action.
- Cells below the mirrors' positions are committed together with the offsets; the *tail* above them is
  reconciled too, but read again next time, so that no kept cell lies across a position.
- A job that fails commits nothing and writes no report; the next one starts where the last good one ended.

Exit status: 0 all settled windows proven, 1 loss or duplicate found, 2 unknown or unreported, 3 the job
itself failed. Results: `summary.json` (schema in `report.summary`), `reconciliation.parquet` (schema in
`verdict_rows`), `index.html`, `metrics.prom`, all in the report folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.functions import col

from millrace.audit import fact_rows
from millrace.audit.capture import Capture, capture
from millrace.audit.cell_notes import counts_of, read_notes, unaudited_of, unread_of
from millrace.audit.cell_rows import CELL_DDL, NOTE_UNAUDITED, NOTE_UNTRUSTED
from millrace.audit.config import AuditConfig
from millrace.audit.events import EventLedger, decode_event, encode_event
from millrace.audit.planning import OffsetRange, ranges_option, task_count
from millrace.audit.reading_plan import hidden_by_transactions, passages, plan_ranges
from millrace.audit.reconcile import Gap, UnreadRange, roster_rows
from millrace.audit.report.folder import write_report
from millrace.audit.report.summary import exit_status, summarise
from millrace.audit.spark_session import LOCAL, SparkBeside, core_count, require_java
from millrace.audit.spark_source import read_pinned
from millrace.audit.state import Commit, ReadPosition, StateFolder, UnreadNote
from millrace.audit.verdict_rows import (
    VERDICT_DDL,
    VERDICT_SCHEMA,
    ClusterReading,
    Reconciler,
    verdict_rows,
)
from millrace.broker.errors import ConfigError, MillraceError

JOB_FAILED = 3


@dataclass(frozen=True, slots=True)
class JobResult:
    """What the caller needs: the exit status, the summary (None when the job failed), and the reason then."""

    exit_status: int
    summary: dict[str, Any] | None
    problem: str = ""


@dataclass(slots=True)
class Run:
    """One run's working values, handed from step to step."""

    config: AuditConfig
    master: str
    state: StateFolder
    before: Commit
    captured: Capture
    now_ms: int
    number: int
    name: str
    ranges: list[OffsetRange]
    unread: list[UnreadNote]
    facts: pa.Table


def run(
    config: AuditConfig,
    master: str | None = None,
    *,
    clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    progress: Callable[[str], None] = lambda step: None,
) -> JobResult:
    """Audit once. Expected failures come back as exit status 3 with one line; anything else raises."""
    try:
        return _run(config, master or LOCAL, clock_ms, progress)
    except MillraceError as problem:
        return JobResult(JOB_FAILED, None, str(problem))
    except OSError as problem:
        where = f" {problem.filename}" if problem.filename else ""
        return JobResult(JOB_FAILED, None, f"audit:{where} {problem.strerror or problem}")


def _run(
    config: AuditConfig, master: str, clock_ms: Callable[[], int], progress: Callable[[str], None]
) -> JobResult:
    require_java()
    state = StateFolder.open(config.state)
    config.report.mkdir(parents=True, exist_ok=True)
    before = state.latest()
    with _work_folder(config.state) as work, SparkBeside(master, work) as spark:
        progress("reading events and pinning offsets")  # while Spark starts
        job = _prepare(config, master, state, before, clock_ms)
        with _leaving_no_trace(job):
            session = spark.session()
            progress(f"counting {sum(each.size for each in job.ranges):,} records")
            _count(session, job)
            progress("reconciling")
            after = _next_commit(job)
            rows = _reconcile(session, job, after)
            spark.release()
            summary = _summary(job, after, rows)
            if not after.knows_as_much_as(before):
                state.commit(after)
        progress("writing the report")
        write_report(config.report, summary, rows)
    return JobResult(exit_status(summary), summary)


def _prepare(
    config: AuditConfig, master: str, state: StateFolder, before: Commit, clock_ms: Callable[[], int]
) -> Run:
    """Look at the clusters, on top of what earlier runs knew, and decide what is to be read."""
    check_window(config, before)
    ledger = EventLedger()
    origins = {}
    if before.events:
        origins = fact_rows.restore(pq.read_table(state.root / before.events), ledger)
    for kept in [*before.gaps, *before.tiers]:
        event = decode_event(json.dumps(kept).encode())
        if event is not None:
            ledger.learn(event)
    captured = asyncio.run(capture(config, ledger, clock_ms))
    for stream, clusters in origins.items():
        captured.origins.setdefault(stream, set()).update(clusters)
    ranges, unread = plan_ranges(captured, config, before)
    number = before.number + 1
    return Run(
        config=config,
        master=master,
        state=state,
        before=before,
        captured=captured,
        now_ms=captured.taken_ms,
        number=number,
        name=f"{number:08d}-{uuid.uuid4().hex[:8]}",
        ranges=ranges,
        unread=unread,
        facts=fact_rows.facts_table(ledger, captured.origins),
    )


def check_window(config: AuditConfig, before: Commit) -> None:
    """Cells know their window, not the times in it: a state cannot be read in another length."""
    if before.number and before.window_ms != config.window_ms:
        raise ConfigError(
            "window",
            f"{config.window_ms} ms",
            f"{before.window_ms} ms, in which {config.state} was counted; "
            "for another window use another state",
        )


@contextlib.contextmanager
def _work_folder(state: Path) -> Iterator[Path]:
    folder = state / f".work-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _leaving_no_trace(job: Run) -> Iterator[None]:
    """Remove what the run wrote when no commit names it: it failed, or learnt nothing."""
    try:
        yield
    finally:
        named = job.state.latest()
        if not any(job.name in path for path in named.cells):
            shutil.rmtree(_cells_folder(job), ignore_errors=True)
        if job.name not in named.events:
            (job.state.root / "events" / f"{job.name}.parquet").unlink(missing_ok=True)
        job.state.sweep(named)


def _cells_folder(job: Run) -> Path:
    return job.state.root / "cells" / job.name


def _count(spark: SparkSession, job: Run) -> None:
    """Scan the pinned ranges into Parquet. Rows of the tail lie among the others, for this run only."""
    if not any(each.size for each in job.ranges):
        return
    clusters = {name: list(cluster.bootstrap) for name, cluster in job.config.clusters.items()}
    cells = read_pinned(
        spark,
        {
            "bootstraps": json.dumps(clusters),
            "ranges": ranges_option(job.ranges),
            "window": f"{job.config.window_ms}ms",
            "tasks": str(task_count(sum(each.size for each in job.ranges), core_count(job.master))),
        },
    )
    with _one_line(job):
        cells.write.parquet(_spark_path(_cells_folder(job)))


@contextlib.contextmanager
def _one_line(job: Run) -> Iterator[None]:
    """Turn a failed Spark action into the line that its Python worker raised."""
    try:
        yield
    except PySparkException as problem:
        for line in reversed(str(problem).splitlines()):
            for name in _WORKER_ERRORS:
                if f"{name}: " in line:
                    raise MillraceError(line.split(f"{name}: ", 1)[1].strip()) from problem
        raise


_WORKER_ERRORS = ("ClusterUnreachable", "ConfigError", "UnsupportedVersion")


def _spark_path(path: Path) -> str:
    """A local path for Spark, which takes a URI's text as it stands, unescaped."""
    return f"file://{path.absolute()}"


def _new_files(job: Run) -> list[Path]:
    return sorted(_cells_folder(job).glob("*.parquet"))


def _next_commit(job: Run) -> Commit:
    """The state as this run found it; not yet visible."""
    root, before = job.state.root, job.before
    ledger = job.captured.ledger
    facts_digest = fact_rows.digest(job.facts)
    events = before.events
    if facts_digest != before.events_digest or not events:
        events = f"events/{job.name}.parquet"
        pq.write_table(job.facts, root / events, compression="zstd")
    kept = {each for each in job.ranges if not each.tail}
    offsets = dict(before.offsets)
    for each in kept:
        key = f"{each.cluster}/{each.topic}/{each.partition}"
        offsets[key] = ReadPosition(each.end_offset, each.topic_id)
    notes = read_notes(_new_files(job), tail=False)
    untrusted = Counter(before.untrusted)
    untrusted.update(counts_of(notes, NOTE_UNTRUSTED))
    untrusted.update({f"{NOTE_UNAUDITED}/{tier}": n for tier, n in unaudited_of(notes).items()})
    learnt = any(each.size for each in kept)
    return Commit(
        number=job.number,
        at_ms=job.now_ms,
        window_ms=job.config.window_ms,
        cells=[*before.cells, *(str(path.relative_to(root)) for path in _new_files(job) if learnt)],
        events=events,
        events_digest=facts_digest,
        offsets=offsets,
        unread=[*before.unread, *job.unread, *unread_of(notes, job.now_ms)],
        gaps=[json.loads(encode_event(gap)[1]) for _, gap in sorted(ledger.gaps.items())],
        tiers=[json.loads(encode_event(tier)[1]) for _, tier in sorted(ledger.tiers.items())],
        untrusted=dict(untrusted),
    )


def _reconcile(spark: SparkSession, job: Run, after: Commit) -> pa.Table:
    """Every stream's verdicts, from the cells on disk and the facts."""
    root = job.state.root
    doubts = unread_of(read_notes(_new_files(job), tail=True), job.now_ms)
    reconciler = _reconciler(job, after, doubts)
    facts = spark.read.schema(fact_rows.FACT_DDL).parquet(_spark_path(root / after.events))
    new = [_spark_path(path) for path in _new_files(job)]
    kept = [_spark_path(root / name) for name in job.before.cells]
    cells = spark.createDataFrame([], CELL_DDL)
    if new:
        cells = spark.read.schema(CELL_DDL).parquet(*new)
    if kept:
        earlier = spark.read.schema(CELL_DDL).parquet(*kept).filter(~col("tail"))
        cells = cells.unionByName(earlier) if new else earlier
    cells = cells.filter(col("note").isNull())

    def rows_of(cells: pa.Table, facts: pa.Table) -> pa.Table:
        return reconciler.rows(cells, facts)  # Spark counts arguments, and would count a method's self

    with _one_line(job):
        rows = (
            cells.groupBy("stream")
            .cogroup(facts.groupBy("stream"))
            .applyInArrow(rows_of, VERDICT_DDL)
            .toArrow()
            .cast(VERDICT_SCHEMA)
        )
    roster = verdict_rows(
        row
        for topic in job.config.topics
        for row in roster_rows(
            job.config.producers, job.captured.ledger.streams.values(), topic, job.config.window_ms
        )
    )
    return pa.concat_tables([rows, roster]).sort_by(
        [
            ("topic", "ascending"),
            ("producer", "ascending"),
            ("stream", "ascending"),
            ("window_start_ms", "ascending"),
        ]
    )


def _reconciler(job: Run, after: Commit, doubts: Sequence[UnreadNote] = ()) -> Reconciler:
    """`doubts` are parts of the tail that could not be read: they are not kept, the tail is read again."""
    unread: dict[str, list[UnreadRange]] = {}
    for each in [*after.unread, *hidden_by_transactions(job.captured), *doubts]:
        unread.setdefault(each.cluster, []).append(
            UnreadRange(
                (each.cluster, each.topic, each.partition),
                each.first_offset,
                each.end_offset,
                each.cause,
                each.until_ms,
            )
        )
    config = job.config
    return Reconciler(
        clusters=[
            ClusterReading(
                name=name,
                is_source=cluster.tier == "source",
                topics={cluster.topic_here(topic): topic for topic in config.topics},
                unread=unread.get(name, ()),
                names={topic: cluster.topic_here(topic) for topic in config.topics},
            )
            for name, cluster in config.clusters.items()
        ],
        passed=passages(job.captured),
        gaps={name: _gaps(job) for name in config.aggregates()},
        window_ms=config.window_ms,
        grace_ms=config.grace_ms,
        now_ms=job.now_ms,
        topics=tuple(config.topics),
    )


def _gaps(job: Run) -> list[Gap]:
    """The mirrors' own gap events, by audited topic."""
    named = {
        (name, cluster.topic_here(topic)): topic
        for name, cluster in job.config.sources().items()
        for topic in job.config.topics
    }
    gaps = []
    for gap in job.captured.ledger.gaps.values():
        source = job.captured.source_names.get((gap.mirror, gap.source), gap.source)
        topic = named.get((source, gap.topic))
        if topic is not None:
            gaps.append(Gap((source, topic, gap.partition), gap.from_offset, gap.to_offset, gap.cause))
    return gaps


def _summary(job: Run, after: Commit, rows: pa.Table) -> dict[str, Any]:
    tail = read_notes(_new_files(job), tail=True)
    untrusted: Counter[str] = Counter()
    unaudited: Counter[str] = Counter(unaudited_of(tail))
    for what, count in after.untrusted.items():
        kind, _, tier = what.partition("/")
        if kind == NOTE_UNAUDITED:
            unaudited[tier] += count
        else:
            untrusted[what] += count
    untrusted.update(counts_of(tail, NOTE_UNTRUSTED))
    untrusted.update(_untrusted_events(job))
    return summarise(
        rows,
        tiers=list(job.config.clusters),
        at_ms=job.now_ms,
        window_ms=job.config.window_ms,
        untrusted=untrusted,
        unaudited=unaudited,
    )


def _untrusted_events(job: Run) -> Mapping[str, int]:
    ledger = job.captured.ledger
    found: Counter[str] = Counter([*ledger.untrusted, *job.captured.untrusted, *job.captured.silent_sources])
    rest = ledger.untrusted_count - len(ledger.untrusted)
    if rest > 0:
        found["more events that could not be read"] = rest
    return found
