"""The audit job: `run(config)` looks at the clusters once and says what is proven.

`run` reads as the list of its steps. Called by `millrace audit run`, `audit watch` and the demo.

- Cells are written once, as Parquet, and reconciled from what was written (`spark_cells`); a Python source
  would read the clusters again for each action.
- Cells below the mirrors' positions are committed together with the offsets; the *tail* above them is
  reconciled too, but read again next time, so that no kept cell lies across a position.
- A job that fails or is killed commits nothing (`runs.next_commit`); the next one starts where the last good
  one ended. What is written after the commit (report, watermarks) is written anew by every run.
- With `only`, a *backfill*: the windows of a time range are computed anew from what the clusters hold, as if
  there were no cells; the state is neither used for them nor changed, and the report lies in a folder of its
  own below the report's.

Exit status, of what is not older than the verdict's horizon: 0 all settled windows proven (or waived,
`waivers`), 1 loss or duplicate found, 2 unknown or
unreported, 3 the job itself failed. Results: `summary.json` (schema in `report.summary`),
`reconciliation.parquet` (schema in `verdict_rows`), `producers.parquet` (in `report.plain`), `index.html`,
`metrics.prom`, `watermarks.json`, all in the report folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from millrace.audit.config import AuditConfig
from millrace.audit.contract.events import EventLedger, kept_event
from millrace.audit.keeping import upkeep
from millrace.audit.keeping.state import Commit, StateFolder, UnreadNote
from millrace.audit.keeping.state_files import is_remote
from millrace.audit.keeping.untrusted_waivers import read_accepted
from millrace.audit.keeping.verdict_files import RowFiles, own_lines, read_spans
from millrace.audit.keeping.waivers import read_waivers, standing_waivers
from millrace.audit.keeping.work_folder import work_folder
from millrace.audit.reconciliation.horizon import DEFAULT_HORIZON_MS, split_older
from millrace.audit.reconciliation.reconcile import ClusterPartition, Passage
from millrace.audit.reconciliation.row_keys import WINDOW
from millrace.audit.reconciliation.row_parts import Beside, Rows, View
from millrace.audit.reconciliation.settled import (
    LINE_COLUMNS,
    NUMBERED_SCHEMA,
    lines_of,
    number_rows,
    revisions_of,
    rows_of,
    unnumbered,
)
from millrace.audit.reconciliation.spans import NO_SPANS, inside
from millrace.audit.reconciliation.verdict_rows import Reconciler, iso_time, verdict_rows
from millrace.audit.report import notes
from millrace.audit.report.failure import FILE_NAME as LAST_FAILURE
from millrace.audit.report.failure import system_sentence
from millrace.audit.report.folder import (
    TOLD_OF_FAILURE,
    RowsAtRest,
    note_failure,
    read_told,
    write_report,
)
from millrace.audit.report.place import Report, report_at
from millrace.audit.report.summary import Cost, exit_status, summarise
from millrace.audit.runs import backfill, fact_rows, resting
from millrace.audit.runs.at_rest import AtRest, as_pruned, restored
from millrace.audit.runs.backfill import TimeRange
from millrace.audit.runs.capture import capture, settle_claims
from millrace.audit.runs.copied_headers import foreign_counts, foreign_notes
from millrace.audit.runs.event_reading import Told, events_known
from millrace.audit.runs.fact_rows import PrunedWindows
from millrace.audit.runs.next_commit import keep_verdicts, kept_facts, leaving_no_trace, next_commit
from millrace.audit.runs.reading_plan import plan_backfill, plan_ranges
from millrace.audit.runs.reconciling import reconciler_of, roster_of, streams_of, tiers_of
from millrace.audit.runs.resting_files import read_sums
from millrace.audit.runs.run import Findings, Run
from millrace.audit.runs.state_checks import check_clusters, check_names, check_place, check_window
from millrace.audit.runs.untrusted import Doubts, doubts_of
from millrace.audit.runs.watermarks import FILE_NAME as WATERMARKS_FILE
from millrace.audit.runs.watermarks import document, last_told, steps_back, watermarks_of
from millrace.audit.scanning.cell_notes import counts_of, unaudited_of, unread_of
from millrace.audit.scanning.cell_rows import NOTE_UNTRUSTED
from millrace.audit.spark.masters import is_elsewhere
from millrace.audit.spark.read_meter import ReadMeter
from millrace.audit.spark.run_steps import RunSteps
from millrace.audit.spark.spark_cells import RunCells
from millrace.audit.spark.spark_session import (
    SparkBeside,
    chosen_master,
    require_java,
    require_master,
    submitted,
)
from millrace.audit.spark.workers import check_workers
from millrace.broker.errors import MillraceError, ZooKeeperUnreachable
from millrace.broker.telemetry.memory import trim_heap

JOB_FAILED = 3


@dataclass(frozen=True, slots=True)
class JobResult:
    """What the caller needs: the exit status, the summary (None when the job failed), and the reason then.

    A reason beside a summary tells of something that went wrong after the verdict. `cost` is what the run
    took, which `summary.json` has as `run` beside the findings, for another run over the same clusters finds
    the same and takes something else.
    """

    exit_status: int
    summary: dict[str, Any] | None
    problem: str = ""
    cost: Cost | None = None


def run(
    config: AuditConfig,
    master: str | None = None,
    *,
    clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    progress: Callable[[str], None] = lambda step: None,
    only: TimeRange | None = None,
    horizon_ms: int | None = DEFAULT_HORIZON_MS,
) -> JobResult:
    """Audit once. Expected failures come back as exit status 3 with one line; anything else raises.

    Findings that were told for `horizon_ms`, of windows that are over for as long, decide no more (None: all
    do, as in every backfill).
    """
    try:
        return _run(config, chosen_master(master), clock_ms, progress, only, horizon_ms)
    except MillraceError as problem:
        sentence = str(problem)
    except OSError as problem:
        sentence = system_sentence(problem)
    except Exception as problem:
        if only is None:
            _note_failure(config, clock_ms(), f"a defect: {type(problem).__name__}: {problem}")
        raise
    if only is None:
        _note_failure(config, clock_ms(), sentence)
    return JobResult(JOB_FAILED, None, sentence)


def _note_failure(config: AuditConfig, at_ms: int, sentence: str) -> None:
    """Never raises: the failure itself is what the operator must hear of."""
    with contextlib.suppress(MillraceError, OSError):
        place = report_at(config.report, {**submitted(), **config.spark})
        with place.staged(TOLD_OF_FAILURE) as folder:
            note_failure(folder, at_ms, sentence)


def _run(
    config: AuditConfig,
    master: str,
    clock_ms: Callable[[], int],
    progress: Callable[[str], None],
    only: TimeRange | None,
    horizon_ms: int | None,
) -> JobResult:
    begun_s = time.monotonic()
    require_java()
    require_master(master)
    check_place(config, master, in_cluster=submitted().get("spark.submit.deployMode") == "cluster")
    files = {**submitted(), **config.spark}
    remote = is_remote(config.state) or is_remote(config.report)
    if not is_remote(config.report):
        report_at(config.report).check()
    state = None if is_remote(config.state) else StateFolder.open(config.state)
    with (
        work_folder(config.state) as work,
        SparkBeside(master, work, config.spark) as spark,
        RunSteps(progress) as step,
    ):
        if remote:
            spark.session()  # its JVM reaches them
        report = report_at(backfill.report_folder(config, only), files)
        if is_remote(config.report):
            report.check()
        state = state or StateFolder.open(config.state)
        if is_elsewhere(master):
            check_workers(spark.session(), state)
        before = state.latest()
        state.require_files(before)
        if only is not None:
            step(backfill.sentence(config, only))
        step("reading events and pinning offsets")  # while Spark starts
        run = _prepare(config, state, before, clock_ms, only)
        trim_heap()  # of what reading the events took: they are packed
        run.since_ms = None if horizon_ms is None or only is not None else run.now_ms - horizon_ms
        with leaving_no_trace(run):
            session = spark.session()
            step(f"counting {sum(each.size for each in run.ranges):,} records")
            meter = ReadMeter(session, run.ranges, by_records=config.reader == "spark-kafka")
            with meter.telling(step.tell):
                cells = _count(session, run, meter, work)
            step("reconciling")
            after, rows = _reconciled(run, cells, step)
            run.resting = list(run.at_rest.asleep)
            run.sums = read_sums(state, [each.files for each in run.resting])
            tail = counts_of(cells.notes(tail=True), NOTE_UNTRUSTED)
            accepted, now_ms = read_accepted(state), run.now_ms
            doubts = doubts_of(
                config, run.captured, after, tail, run.late, rows, accepted, now_ms, run.since_ms
            )
            step("summing up the verdicts")
            with report.reading((WATERMARKS_FILE,)) as folder:
                run.told = last_told(read_told(folder, WATERMARKS_FILE), before.watermarks)
            found = _judge(run, rows, doubts)
            summary = _summary(run, after, cells, found)
            if only is None:
                step("keeping the state")
                keep_verdicts(run, after, cells, found)
            apart = _rows_at_rest(run, found)
            summary |= apart.told()
            read = meter.records, meter.bytes
            count, size = state.size(before if only is not None else after)
            spark.release()
            known = before.number
            if only is None and not after.knows_as_much_as(before):
                state.commit(after)
                known = after.number
            step("writing the report")  # of rows that go with the run, if it learnt nothing
            cost = Cost(*read, round(time.monotonic() - begun_s, 3), size, count)
            problem = _report(run, found, {**summary, "run": asdict(cost)}, report, known, apart)
    return JobResult(exit_status(summary), summary, problem, cost)


def _prepare(
    config: AuditConfig,
    state: StateFolder,
    before: Commit,
    clock_ms: Callable[[], int],
    only: TimeRange | None = None,
) -> Run:
    """Look at the clusters, on top of what earlier runs knew, and decide what is to be read."""
    check_window(config, before)
    check_names(config, before)
    ledger = EventLedger()
    origins: dict[str, set[str]] = {}
    told: Told = {}
    pruned: dict[str, PrunedWindows] = {}
    at_rest = AtRest()
    if before.events:
        facts = state.read_table(before.events)
        origins, told = fact_rows.restore(facts, ledger)
        pruned = fact_rows.restore_pruned(facts)
        at_rest = restored(before, state, fact_rows.restore_pruned(facts, "resting"))
    for kept in [*before.gaps, *before.tiers]:
        event = kept_event(kept)
        if event is not None:
            ledger.learn(event)
    # A backfill wants events again that were pruned since they were read.
    known = events_known(config, before, told) if only is None else None
    captured = asyncio.run(capture(config, ledger, clock_ms, before, known))
    check_clusters(config, before, captured.cluster_ids)
    for stream, clusters in origins.items():
        captured.origins.setdefault(stream, set()).update(clusters)
    if only is not None:  # which has no use for evidence that is kept
        pruned, at_rest = as_pruned(pruned, at_rest), AtRest()
        pruned = backfill.left_pruned(pruned, ledger, only)
    settle_claims(captured, before)
    topic_of = {facts.stream: facts.topic for facts in streams_of(config, captured)}
    late = upkeep.forget_pruned(ledger, pruned, topic_of)
    plan = plan_ranges if only is None else plan_backfill
    ranges, unread = plan(captured, config, before)
    waking = resting.to_wake(at_rest, state, config, captured, unread, before.resting_by, captured.taken_ms)
    resting.wake(at_rest, waking, state, ledger)
    number = before.number + 1
    return Run(
        config=config,
        state=state,
        before=before,
        captured=captured,
        now_ms=captured.taken_ms,
        number=number,
        name=f"{number:08d}-{uuid.uuid4().hex[:8]}",
        ranges=ranges,
        unread=unread,
        facts=kept_facts(config, captured, pruned, at_rest.left),
        pruned=pruned,
        late=late,
        only=only,
        at_rest=at_rest,
    )


def _count(spark: SparkSession, run: Run, meter: ReadMeter, work: Path) -> RunCells:
    """Write the facts and scan the pinned ranges into Parquet."""
    facts = run.before.events
    if fact_rows.digest(run.facts) != run.before.events_digest or not facts:
        facts = f"events/{run.name}.parquet"
        run.state.write_table(facts, run.facts)
    cells = RunCells(spark, run.state, run.name, run.kept.cells, facts, work)
    cells.count(run.config, run.ranges, meter)
    return cells


def _reconciled(run: Run, cells: RunCells, step: RunSteps) -> tuple[Commit, Rows]:
    """The state as the run found it, and every stream's verdicts: made once more where records came for what
    was at rest."""
    reports_late, is_again = run.late, False
    while True:
        run.late = dict(reports_late)
        after = next_commit(run, cells)
        rows = _reconcile(run, after, cells)
        hit = resting.hit_by(run.at_rest, rows)
        if not hit:
            return after, rows
        hit = list(run.at_rest.asleep) if is_again else hit  # or it might come to that once more
        is_again = True
        step("reconciling once more, for what came for windows at rest")
        resting.wake(run.at_rest, hit, run.state, run.captured.ledger)
        run.facts = kept_facts(run.config, run.captured, run.pruned, run.at_rest.left)
        facts = cells.again("events", ".parquet")
        run.state.write_table(facts, run.facts)
        cells.go_on_from(run.kept.cells, facts)


def _reconcile(run: Run, after: Commit, cells: RunCells) -> Rows:
    """Every stream's verdicts, from the cells on disk and the facts, and the roster's; with their revisions,
    and with the lines that are carried on. Executors write them; the driver reads what was written."""
    doubts = unread_of(cells.notes(tail=True), run.captured.vanished_ms)
    foreign = [name for name, each in run.config.aggregates().items() if each.mirror == "foreign"]
    sources = run.config.sources()
    arrivals = {name: cells.passages(run.captured.pins, sources, name) for name in foreign}
    before = run.before.verdicts if run.only is None else None
    rows = cells.reconcile(_reconciler(run, after, doubts, arrivals), before, run.at_rest)
    run.row_files = list(rows.files)
    run.foreign = foreign_counts(rows)
    late = upkeep.late_counts(rows) if run.only is None else {}  # a backfill reads all of it again
    run.late_again = upkeep.late_counts(rows, again=True) if late else {}
    for what, count in late.items():
        run.late[what] = run.late.get(what, 0) + count
    pruned = as_pruned(run.pruned, run.at_rest)
    roster = verdict_rows(roster_of(run.config, run.captured, rows, pruned, run.now_ms, run.at_rest.spans))
    if run.only is not None:
        return Beside(rows, unnumbered(roster))
    owed, run.pruned_lines = own_lines(run.state, run.before.verdicts, run.config.topics)
    run.spans = read_spans(run.state, run.before.verdicts, run.config.topics)
    numbered = number_rows(roster, owed, run.now_ms)
    run.owed = lines_of(numbered)
    return Beside(rows, numbered)


def _reconciler(
    run: Run,
    after: Commit,
    doubts: Sequence[UnreadNote] = (),
    arrivals: Mapping[str, Mapping[ClusterPartition, Passage]] | None = None,
) -> Reconciler:
    """`doubts` are parts of the tail that could not be read: they are not kept, the tail is read again. A
    backfill knows from the state, too, which topics were there once."""
    read = {**run.before.offsets, **after.offsets}
    return reconciler_of(run.config, run.captured, [*after.unread, *doubts], run.now_ms, arrivals, read)


def _judge(run: Run, numbered: Rows, doubts: Doubts) -> Findings:
    """Waivers and watermarks of the rows (`_reconcile`)."""
    nothing = NUMBERED_SCHEMA.empty_table()
    if run.only is not None:
        rows = View(numbered, partial(backfill.rows_between, only=run.only), backfill.READ)
        rows = View(rows, rows_of, ["state"])
        standing = standing_waivers(read_waivers(run.state), rows)
        return Findings(rows, rows, nothing, nothing, standing, {}, doubts)
    rows = View(numbered, rows_of, ["state"])
    standing = standing_waivers(read_waivers(run.state), rows, run.pruned_lines)
    watermarks = watermarks_of(
        rows,
        run.pruned_lines,
        streams_of(run.config, run.captured),
        [each.waiver for each in standing if each.stands],
        run.config.topics,
        over_ms=run.now_ms - run.config.grace_ms,
        spans=pa.concat_tables([run.spans, run.at_rest.spans]),
    )
    watermarks = doubts.held(watermarks, run.before.watermarks)
    deciding, older = split_older(rows, run.since_ms)
    return Findings(rows, deciding, older, numbered, standing, watermarks, doubts)


def _summary(run: Run, after: Commit, cells: RunCells, found: Findings) -> dict[str, Any]:
    unaudited = Counter(unaudited_of(cells.notes(tail=True)))
    for what, count in after.untrusted.items():
        if upkeep.is_unaudited(what):
            unaudited[what.partition("/")[2]] += count
    doubts = found.doubts
    waived = doubts.waived()
    lines = View(found.numbered, lines_of, LINE_COLUMNS, makes=True)
    told = [each.told for each in run.sums]
    revisions, revised_more = revisions_of(lines, [each["revised"] for each in told])
    summary = summarise(
        found.deciding,
        tiers=tiers_of(run.config),
        at_ms=run.now_ms,
        grace_ms=run.config.grace_ms,
        window_ms=run.config.window_ms,
        untrusted={each.what: each.count for each in doubts.told()},
        unaudited=unaudited,
        foreign=run.foreign,
        accepted=waived,
        waived=found.waived,
        doubted=bool(doubts.deciding()),
        in_doubt=any(each.what not in waived for each in doubts.deciding()),
        older=found.older,
        older_untrusted=doubts.older(),
        holds=doubts.holds(run.config.topics),
        since_ms=run.since_ms,
        untrusted_waivers=[each.told() for each in doubts.waivers],
        waivers=[each.told() for each in found.waivers],
        watermarks={topic: iso_time(at) for topic, at in found.watermarks.items()},
        revisions=revisions,
        revised_more=revised_more,
        notes=_notes(run, doubts),
        resting=[each["tally"] for each in told],
    )
    back = steps_back(run.told, found.watermarks)
    if back:
        summary["watermark_steps_back"] = back
    return summary


def _notes(run: Run, doubts: Doubts) -> list[str]:
    config, captured = run.config, run.captured
    told = [
        *notes.window_notes(streams_of(config, captured), config.topics, config.window_ms),
        *notes.absent_notes(captured.absent, captured.silent_sources),
        *foreign_notes(run.foreign),
        *doubts.notes(),
    ]
    if run.only is not None:
        told.append(backfill.sentence(config, run.only))
    return notes.told(told)


def _rows_at_rest(run: Run, found: Findings) -> RowsAtRest:
    """The files that the report has beside the rows that were judged. What has ended to rest with this run is
    told by it once more, as rows are that it has pruned; what came to rest with it, it has judged."""
    came = [each for each in run.at_rest.asleep if each not in run.resting]
    files: dict[str, Rows] = {}
    for each in run.resting:
        rows = RowFiles(run.state, each.files.rows)
        files[each.files.name] = View(rows, partial(inside, spans=each.spans), [*WINDOW, "state"])
    for each in came:
        files[each.files.name] = View(found.rows, partial(inside, spans=each.spans), WINDOW)
    leaving = pa.concat_tables([NO_SPANS, *(each.spans for each in came)])
    return RowsAtRest(run.sums, leaving, files)


def _report(
    run: Run,
    found: Findings,
    summary: Mapping[str, Any],
    report: Report,
    known: int,
    apart: RowsAtRest,
) -> str:
    """Tell what was found, unless a run that learnt more than commit `known` has told it meanwhile: its look
    is newer. Returns what went wrong with it."""
    latest = _newest(run, known)
    if latest > known:
        return f"run {latest} of another audit job has ended meanwhile; its report and watermarks stay"
    there = report.names()
    with report.staged((LAST_FAILURE,)) as folder:
        problem = _tell(run, found, summary, folder, apart, there)
    for name in apart.stale(there):
        report.remove(name)
    with contextlib.suppress(MillraceError, OSError):  # it is told, whatever becomes of the state
        latest = _newest(run, known)
    if latest > known:  # files of the two may have taken each other's place
        told = f"run {latest} of another audit job has ended while the report was written; run it again"
        return f"{problem}; {told}" if problem else told
    return problem


def _newest(run: Run, known: int) -> int:
    """The number of the newest commit; a backfill's report is its own, whatever is committed."""
    return run.state.latest().number if run.only is None else known


def _tell(
    run: Run,
    found: Findings,
    summary: Mapping[str, Any],
    folder: Path,
    apart: RowsAtRest,
    there: Collection[str],
) -> str:
    """Write the report and the watermarks; returns what went wrong with telling ZooKeeper."""
    if run.only is None:
        path = folder / WATERMARKS_FILE
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            temporary.write_text(document(found.watermarks, run.now_ms, run.number), "utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    write_report(folder, summary, found.rows, apart, there)
    if run.only is not None or run.config.zookeeper is None:
        return ""
    from millrace.audit.runs.watermark_znode import publish

    try:
        overtaken = publish(run.config.zookeeper, found.watermarks, run.now_ms, run.number)
    except ZooKeeperUnreachable as problem:
        return f"the watermarks were not told to {problem}"
    return f"a later run had told the watermark of {', '.join(overtaken)}" if overtaken else ""
