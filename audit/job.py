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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from millrace.audit import fact_rows
from millrace.audit.capture import Capture, PartitionPin, capture
from millrace.audit.cell_rows import CELL_DDL, CELL_SCHEMA, NOTE_UNAUDITED, NOTE_UNREAD, NOTE_UNTRUSTED
from millrace.audit.config import AuditConfig
from millrace.audit.events import EventLedger, decode_event, encode_event
from millrace.audit.metrics import metrics_text
from millrace.audit.planning import OffsetRange, ranges_option, task_count
from millrace.audit.reconcile import Gap, Passage, Place, UnreadRange, roster_rows
from millrace.audit.report.html import render
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
from millrace.broker.errors import MillraceError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.functions import col

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
        _write_report(config, summary, rows)
    return JobResult(exit_status(summary), summary)


def _prepare(
    config: AuditConfig, master: str, state: StateFolder, before: Commit, clock_ms: Callable[[], int]
) -> Run:
    """Look at the clusters, on top of what earlier runs knew, and decide what is to be read."""
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


def plan_ranges(
    captured: Capture, config: AuditConfig, before: Commit
) -> tuple[list[OffsetRange], list[UnreadNote]]:
    """What to read of each partition, and what can never be read any more.

    A source partition is cut at the mirrors' position: below it cells are kept, above it they are the tail.
    """
    positions = _furthest(captured)
    mirrored = {source for source, _, _ in positions}
    ranges: list[OffsetRange] = []
    unread: list[UnreadNote] = []
    for pin in captured.pins:
        first, lost = _resume(pin, before.offsets.get(pin.key), captured.taken_ms)
        unread.extend(lost)
        whole = OffsetRange(
            cluster=pin.cluster,
            tier=pin.cluster,
            topic=pin.topic,
            topic_here=pin.topic_here,
            partition=pin.partition,
            first_offset=first,
            end_offset=pin.end_offset,
            topic_id=pin.topic_id,
        )
        position = positions.get((pin.cluster, pin.topic, pin.partition))
        is_source = config.clusters[pin.cluster].tier == "source"
        cut = pin.end_offset
        if is_source and position is not None and position.topic_id in ("", pin.topic_id):
            cut = min(max(position.next_offset, first), pin.end_offset)
        elif is_source and pin.cluster in mirrored:
            cut = first  # its mirror keeps positions, and has none of this partition (or topic) yet
        ranges.append(replace(whole, end_offset=cut))
        if cut < pin.end_offset:
            ranges.append(replace(whole, first_offset=cut, tail=True))
    return ranges, unread


def _resume(pin: PartitionPin, known: ReadPosition | None, now_ms: int) -> tuple[int, list[UnreadNote]]:
    """Where reading goes on, and the offsets that were lost to the audit since it last looked."""
    if known is None:
        if pin.start_offset == 0:
            return 0, []
        return pin.start_offset, [_note(pin, 0, pin.start_offset, "expired", now_ms)]
    if known.topic_id and pin.topic_id and known.topic_id != pin.topic_id:
        # What the old topic still held is not known: its end is not known either.
        return pin.start_offset, [_note(pin, known.next_offset, known.next_offset, "recreated", now_ms)]
    if pin.end_offset < known.next_offset:
        return pin.end_offset, [_note(pin, pin.end_offset, known.next_offset, "truncated", now_ms)]
    if pin.start_offset > known.next_offset:
        return pin.start_offset, [_note(pin, known.next_offset, pin.start_offset, "expired", now_ms)]
    return known.next_offset, []


def _note(pin: PartitionPin, first: int, end: int, cause: str, now_ms: int) -> UnreadNote:
    return UnreadNote(pin.cluster, pin.topic, pin.partition, first, end, cause, now_ms)


def _furthest(captured: Capture) -> dict[Place, Passage]:
    """The least position of a source partition over all aggregates: below it, every aggregate has it."""
    by_aggregate = _passages(captured)
    least: dict[Place, Passage] = {}
    for passages in by_aggregate.values():
        for place, passage in passages.items():
            known = least.get(place)
            if known is None or passage.next_offset < known.next_offset:
                least[place] = passage
    return least


def _passages(captured: Capture) -> dict[str, dict[Place, Passage]]:
    """Positions by aggregate; of several mirrors into one, the furthest tells how much was carried."""
    found: dict[str, dict[Place, Passage]] = {}
    for position in captured.positions:
        place = (position.source, position.topic, position.partition)
        passages = found.setdefault(position.aggregate, {})
        known = passages.get(place)
        if known is None or position.next_offset > known.next_offset:
            passages[place] = Passage(position.next_offset, position.topic_id)
    return found


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
    notes = _notes(_new_files(job), tail=False)
    untrusted = Counter(before.untrusted)
    untrusted.update(_count_notes(notes, NOTE_UNTRUSTED))
    untrusted.update({f"{NOTE_UNAUDITED}/{tier}": n for tier, n in _unaudited(notes).items()})
    learnt = any(each.size for each in kept)
    return Commit(
        number=job.number,
        at_ms=job.now_ms,
        window_ms=job.config.window_ms,
        cells=[*before.cells, *(str(path.relative_to(root)) for path in _new_files(job) if learnt)],
        events=events,
        events_digest=facts_digest,
        offsets=offsets,
        unread=[*before.unread, *job.unread, *_unread_notes(notes, job.now_ms)],
        gaps=[json.loads(encode_event(gap)[1]) for _, gap in sorted(ledger.gaps.items())],
        tiers=[json.loads(encode_event(tier)[1]) for _, tier in sorted(ledger.tiers.items())],
        untrusted=dict(untrusted),
    )


def _notes(files: Sequence[Path], *, tail: bool) -> pa.Table:
    """Rows that are no cells, of the part to be kept or of the tail."""
    wanted = pc.is_valid(pc.field("note")) & (pc.field("tail") == tail)
    tables = [pq.ParquetFile(path).read().filter(wanted) for path in files]
    return pa.concat_tables(tables) if tables else CELL_SCHEMA.empty_table()


def _count_notes(notes: pa.Table, prefix: str) -> dict[str, int]:
    found: Counter[str] = Counter()
    for row in notes.select(["note", "count", "cluster"]).to_pylist():
        if row["note"].startswith(prefix):
            found[f"{row['note'].removeprefix(prefix)}, in {row['cluster']}"] += row["count"]
    return dict(found)


def _unaudited(notes: pa.Table) -> dict[str, int]:
    found: Counter[str] = Counter()
    for row in notes.select(["note", "count", "tier"]).to_pylist():
        if row["note"] == NOTE_UNAUDITED:
            found[row["tier"]] += row["count"]
    return dict(found)


def _unread_notes(notes: pa.Table, now_ms: int) -> list[UnreadNote]:
    return [
        UnreadNote(
            row["cluster"],
            row["topic"],
            row["partition"],
            row["first_offset"],
            row["last_offset"] + 1,
            row["note"].removeprefix(NOTE_UNREAD),
            now_ms,
        )
        for row in notes.to_pylist()
        if row["note"].startswith(NOTE_UNREAD)
    ]


def _reconcile(spark: SparkSession, job: Run, after: Commit) -> pa.Table:
    """Every stream's verdicts, from the cells on disk and the facts."""
    root = job.state.root
    reconciler = _reconciler(job, after)
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


def _reconciler(job: Run, after: Commit) -> Reconciler:
    unread: dict[str, list[UnreadRange]] = {}
    for each in after.unread:
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
            )
            for name, cluster in config.clusters.items()
        ],
        passed=_passages(job.captured),
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
    return [
        Gap(
            (gap.source, named[gap.source, gap.topic], gap.partition),
            gap.from_offset,
            gap.to_offset,
            gap.cause,
        )
        for gap in job.captured.ledger.gaps.values()
        if (gap.source, gap.topic) in named
    ]


def _summary(job: Run, after: Commit, rows: pa.Table) -> dict[str, Any]:
    tail = _notes(_new_files(job), tail=True)
    untrusted: Counter[str] = Counter()
    unaudited: Counter[str] = Counter(_unaudited(tail))
    for what, count in after.untrusted.items():
        kind, _, tier = what.partition("/")
        if kind == NOTE_UNAUDITED:
            unaudited[tier] += count
        else:
            untrusted[what] += count
    untrusted.update(_count_notes(tail, NOTE_UNTRUSTED))
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
    found: Counter[str] = Counter([*ledger.untrusted, *job.captured.untrusted])
    rest = ledger.untrusted_count - len(ledger.untrusted)
    if rest > 0:
        found["more events that could not be read"] = rest
    return found


def _write_report(config: AuditConfig, summary: Mapping[str, Any], rows: pa.Table) -> None:
    """Each file is replaced whole, the summary last: who sees a new summary sees the rest of it too."""
    _replace(
        config.report / "reconciliation.parquet", lambda path: pq.write_table(rows, path, compression="zstd")
    )
    _replace(config.report / "index.html", lambda path: path.write_text(render(summary, rows), "utf-8"))
    _replace(config.report / "metrics.prom", lambda path: path.write_text(metrics_text(summary), "utf-8"))
    text = json.dumps(summary, indent=2, ensure_ascii=False) + "\n"
    _replace(config.report / "summary.json", lambda path: path.write_text(text, "utf-8"))


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
