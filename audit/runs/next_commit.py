"""The commit that a run makes: what of it the next run goes on from.

`job` calls these in the order in which they stand here: the state as the run found it (`next_commit`), then
its verdicts, with what is pruned and folded (`keep_verdicts`), both before anything is visible; and around
all of it `leaving_no_trace`, for a run that no commit names in the end.

Must stay true: whatever the commit names is written before it is made, under names that have the run's own,
so that no other run's files are touched.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import pyarrow as pa

from millrace.audit.config import AuditConfig
from millrace.audit.contract.events import event_to_keep
from millrace.audit.contract.group_counts import open_claims
from millrace.audit.contract.producer_names import MORE_PAIRS, MOST_PAIRS_NAMED, ONE_STREAM
from millrace.audit.keeping import uniting, upkeep
from millrace.audit.keeping.state import Commit, Resting
from millrace.audit.keeping.verdict_files import LINES, PRUNED, SPANS
from millrace.audit.reconciliation.row_digest import rows_digest
from millrace.audit.reconciliation.row_parts import View, parts_of
from millrace.audit.reconciliation.settled import (
    LINE_COLUMNS,
    SETTLED_SCHEMA,
    but,
    let_go,
    lines_but,
    lines_digest,
)
from millrace.audit.reconciliation.spans import SPAN_SCHEMA, outside, sum_up
from millrace.audit.report.plain import tier_names
from millrace.audit.report.resting_sums import Summing
from millrace.audit.runs import fact_rows, resting, resting_files
from millrace.audit.runs.capture import Capture
from millrace.audit.runs.event_reading import lost_counts, to_keep
from millrace.audit.runs.fact_rows import PrunedWindows
from millrace.audit.runs.reading_plan import read_until
from millrace.audit.runs.reconciling import streams_of, tiers_of
from millrace.audit.runs.run import Findings, Run
from millrace.audit.scanning.cell_notes import IN_CLUSTER, counts_of, unaudited_of, united_notes, unread_of
from millrace.audit.scanning.cell_rows import NOTE_UNAUDITED, NOTE_UNTRUSTED
from millrace.audit.spark.spark_cells import AGAIN, RunCells, is_folded
from millrace.broker.errors import MillraceError


def next_commit(run: Run, cells: RunCells) -> Commit:
    """The state as this run found it, but for its verdicts; not yet visible."""
    before = run.kept
    ledger = run.captured.ledger
    kept = {each for each in run.ranges if not each.tail}
    offsets = {**before.offsets, **read_until(run.captured, kept, before.offsets)}
    notes = cells.notes(tail=False)
    untrusted, ages = upkeep.aged(before.untrusted, before.untrusted_at, run.config.keep_ms, run.now_ms)
    found = Counter(counts_of(notes, NOTE_UNTRUSTED))
    found.update({f"{NOTE_UNAUDITED}/{tier}": n for tier, n in unaudited_of(notes).items()})
    found.update(run.late)
    found.update(lost_counts(run.captured.events_lost))
    for named, count in found.items():
        what = _named_or_counted(named, untrusted)
        untrusted[what] = untrusted.get(what, 0) + count
        ages[what] = run.now_ms
    learnt = any(each.size for each in kept)
    events = to_keep(run.captured.events, ledger)
    return Commit(
        number=run.number,
        at_ms=run.now_ms,
        window_ms=run.config.window_ms,
        cells=[*before.cells, *(cells.new_files() if learnt else ())],
        events=cells.facts,
        events_digest=fact_rows.digest(run.facts),
        offsets=offsets,
        unread=united_notes([*before.unread, *run.unread, *unread_of(notes, run.captured.vanished_ms)]),
        gaps=[event_to_keep(gap) for _, gap in sorted(ledger.gaps.items())],
        untrusted=untrusted,
        untrusted_at=ages,
        claims=[(*place, each) for place, each in sorted(open_claims(ledger, run.captured.claims).items())],
        clusters={**before.clusters, **{name: id_ for name, id_ in run.captured.cluster_ids.items() if id_}},
        answered=[(*place, count) for place, count in sorted(run.captured.answered.items())],
        verdicts=before.verdicts,
        verdicts_digest=before.verdicts_digest,
        folded_ms=before.folded_ms or run.now_ms,
        events_read=events.positions,
        events_ways=events.ways,
        events_doubted=events.doubts(),
        resting=[each.files for each in run.at_rest.asleep],
        resting_by=resting.judged_by(run.config),
    )


def _named_or_counted(what: str, untrusted: Mapping[str, int]) -> str:
    """The name under which the state keeps it: what is in the state stays, and whoever writes headers could
    name new producers in every run."""
    if not what.startswith(ONE_STREAM) or what in untrusted:
        return what
    place = what[what.rindex(IN_CLUSTER) :]
    named = sum(each.startswith(ONE_STREAM) and each.endswith(place) for each in untrusted)
    return what if named < MOST_PAIRS_NAMED else f"{MORE_PAIRS}{place}"


def keep_verdicts(run: Run, after: Commit, cells: RunCells, found: Findings) -> None:
    """Put the settled verdicts into the commit, and fold what may be folded."""
    config = run.config
    pruned, laid = SETTLED_SCHEMA.empty_table(), SPAN_SCHEMA.empty_table()
    loose = cells.loose_files()
    is_due = upkeep.is_due(run.before, len(loose), config.keep_ms, run.now_ms)
    if is_due:
        pruned, laid = _fold(run, after, cells, found, loose)
    after.claims = upkeep.claims_to_keep(
        after.claims, found.rows, config.grace_ms, config.keep_ms, run.now_ms
    )
    after.watermarks = {topic: at for topic, at in found.watermarks.items() if at is not None}
    earlier, owed, spans = but(run.pruned_lines, pruned), but(run.owed, pruned), run.spans
    if is_due:
        earlier, spans = sum_up(earlier, spans, run.now_ms)
    living = View(found.numbered, partial(outside, spans=laid), LINE_COLUMNS)
    of_rows = View(living, partial(lines_but, pruned=pruned), LINE_COLUMNS, makes=True)
    after.verdicts_digest = _digest(lines_digest(earlier, pruned, of_rows), spans)
    if after.verdicts_digest == run.before.verdicts_digest and run.before.verdicts:
        return
    folder = f"verdicts/{run.name}"
    after.verdicts = [*run.row_files, f"{folder}/{LINES}"]
    run.state.write_table(f"{folder}/{LINES}", pa.concat_tables([earlier, owed]))
    if pruned.num_rows:
        after.verdicts.append(f"{folder}/{PRUNED}")
        run.state.write_table(f"{folder}/{PRUNED}", pruned)
    if spans.num_rows:
        after.verdicts.append(f"{folder}/{SPANS}")
        run.state.write_table(f"{folder}/{SPANS}", spans)


def _digest(of_lines: str, spans: pa.Table) -> str:
    return of_lines + rows_digest([spans], SPAN_SCHEMA.names) if spans.num_rows else of_lines


def _fold(
    run: Run, after: Commit, cells: RunCells, found: Findings, loose: Sequence[str]
) -> tuple[pa.Table, pa.Table]:
    """Prune what the policy lets go, lay to rest what needs no look any more, unite cells of what is proven,
    and make the files of many runs few. Returns the lines of the windows that were pruned, and the windows
    that came to rest (SPAN_SCHEMA)."""
    config, ledger = run.config, run.captured.ledger
    pruned = {stream: each.copy() for stream, each in run.pruned.items()}
    lines = SETTLED_SCHEMA.empty_table()
    may_unite = uniting.may_unite(config, run.captured)
    ended = _end_rest(run, pruned)
    if config.keep_ms is not None:
        lines = upkeep.prune(
            found.numbered,
            run.pruned_lines,
            pruned,
            found.waived,
            cells.windows_of_tail,
            config.keep_ms,
            run.now_ms,
            config.window_ms,
            sources=config.sources(),
            places_decide=not may_unite,
        )
    laid = _lay(run, after, cells, found, lines)
    spans = SPAN_SCHEMA.empty_table() if laid is None else laid.spans
    is_to_unite = may_unite and not all(map(is_folded, loose))
    if not (lines.num_rows or ended or laid) and len(loose) < upkeep.FOLD_FILES and not is_to_unite:
        return lines, spans
    upkeep.forget_pruned(ledger, pruned, learn=True)
    # The fold goes by all that is pruned, also of streams that are forgotten now: no commit names this table.
    told = uniting.fold_plan(pruned)
    plan = f"events/{run.name}-plan.parquet" if told.num_rows else ""
    if plan:
        run.state.write_table(plan, told)
    proven = run.row_files if may_unite else ()
    # Cells of a window that goes or rests from now on may be in any file; of one that was pruned before, only
    # in loose ones.
    is_whole = lines.num_rows > 0 or laid is not None
    after.cells, resting_cells = cells.fold(
        plan, proven, whole=is_whole, resting=None if laid is None else laid.spans
    )
    if laid is not None:
        run.at_rest.asleep.append(_keep_resting(run, laid, resting_cells))
    after.resting = [each.files for each in run.at_rest.asleep]
    needed = upkeep.doubted_streams(found.rows, found.waived)
    needed |= upkeep.roster_streams(
        config.roster(), ledger, found.rows, config.grace_ms, run.now_ms, run.at_rest.start_ms
    )
    needed |= set(run.at_rest.left)
    upkeep.forget_streams(ledger, pruned, run.captured.told, needed, config.grace_ms, run.now_ms)
    facts = kept_facts(config, run.captured, pruned, run.at_rest.left)
    after.events, after.events_digest = f"events/{run.name}-folded.parquet", fact_rows.digest(facts)
    run.state.write_table(after.events, facts)
    after.folded_ms = run.now_ms
    for what, count in upkeep.late_to_keep(run.late, run.late_again).items():
        after.untrusted[what] = after.untrusted.get(what, 0) + count
        after.untrusted_at[what] = run.now_ms
    return lines, spans


def _end_rest(run: Run, pruned: dict[str, PrunedWindows]) -> bool:
    """Prune what has rested for as long as evidence is kept; whether anything has."""
    going = resting.old_enough(run.at_rest, run.config.keep_ms, run.now_ms)
    resting.prune(run.at_rest, going, run.state, pruned)
    for each in going:
        lines, spans = let_go(each.spans)
        run.pruned_lines = pa.concat_tables([run.pruned_lines, lines])
        run.spans = pa.concat_tables([run.spans, spans])
    return bool(going)


def _lay(run: Run, after: Commit, cells: RunCells, found: Findings, pruned: pa.Table) -> resting.Laid | None:
    """What comes to rest, of windows that were not pruned."""
    newest_ms = max((each.files.at_ms for each in run.at_rest.asleep), default=None)
    if newest_ms is not None and 0 <= run.now_ms - newest_ms < upkeep.FOLD_EVERY_MS:
        return None  # each time leaves some files, which every run asks
    count = sum(part.num_rows for part in parts_of(found.numbered, ["state"]))
    if count < resting.REST_ROWS or not resting.may_rest(run.config, run.captured):
        return None
    tiers = tiers_of(run.config)
    restless = resting.Restless(
        resting.made_anew(after.unread),
        resting.promised_until(streams_of(run.config, run.captured), run.config.grace_ms, run.now_ms),
        pruned,
        found.waived,
        cells.windows_of_tail,
    )
    names = tier_names(found.rows, [str(each["name"]) for each in tiers])
    summing = Summing(tiers, names, run.now_ms, run.config.grace_ms)
    return resting.lay(found.numbered, restless, run.config, run.captured.ledger, summing)


def _keep_resting(run: Run, laid: resting.Laid, cells: Sequence[str]) -> resting.Asleep:
    """Write what is laid to rest; the rows are this run's."""
    files = Resting(run.now_ms, f"verdicts/{run.name}", tuple(run.row_files), tuple(cells))
    reports = resting.lay_reports(laid.left, run.captured.ledger)
    for stream, windows in laid.left.items():
        run.at_rest.left.setdefault(stream, PrunedWindows(windows.window_ms)).add_all(windows)
    resting_files.write(run.state, files, reports, laid)
    return resting.Asleep(files, laid.spans)


def kept_facts(
    config: AuditConfig,
    captured: Capture,
    pruned: Mapping[str, PrunedWindows],
    left: Mapping[str, PrunedWindows],
) -> pa.Table:
    """Every stream's facts as the state keeps them (`fact_rows.KEPT_SCHEMA`); `left` is that of windows at
    rest."""
    groups, told = config.group_names(), captured.events.told
    return fact_rows.facts_table(captured.ledger, captured.origins, pruned, groups, told, left)


@contextlib.contextmanager
def leaving_no_trace(run: Run) -> Iterator[None]:
    """Remove what the run wrote when no commit names it: it failed, or learnt nothing.

    What stays because the state cannot be reached is swept in a day, and hides neither why a run ended nor
    what a committed one found.
    """
    try:
        yield
    finally:
        with contextlib.suppress(MillraceError, OSError):
            _tidy(run)


def _tidy(run: Run) -> None:
    newest = run.state.latest()
    named = newest.rooms()
    for room, entry in (
        ("cells", run.name),
        ("cells", f"{run.name}-folded"),
        ("events", f"{run.name}.parquet"),
        ("events", f"{run.name}-folded.parquet"),
        ("events", f"{run.name}-plan.parquet"),
        *(("events", f"{run.name}{AGAIN * number}.parquet") for number in (1, 2)),
        *(("verdicts", f"{run.name}{AGAIN * number}") for number in range(3)),
    ):
        if (room, entry) not in named:
            run.state.files.remove(f"{room}/{entry}")
    run.state.sweep(newest)
