"""The audit as it runs, on a world's bytes: real capture, plan, scan, cells, facts, state, reconciliation,
watermark, summary and exit status. Only Spark and the sockets are left out.

`Audit.run` is one run of the job; it may die before it commits. What the capture sees is `audit_capture`'s,
what lies at rest `audit_shelf`'s.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap64

from millrace.audit.config import AuditConfig
from millrace.audit.contract.events import EventLedger, event_to_keep, kept_event
from millrace.audit.contract.group_counts import open_claims
from millrace.audit.keeping import upkeep
from millrace.audit.keeping.state import Commit
from millrace.audit.keeping.uniting import fold_plan, may_unite, proven_windows
from millrace.audit.keeping.waivers import give_waiver, standing_waivers
from millrace.audit.reconciliation import plain_windows
from millrace.audit.reconciliation.horizon import DEFAULT_HORIZON_MS, split_older
from millrace.audit.reconciliation.settled import (
    NUMBERED_SCHEMA,
    SETTLED_SCHEMA,
    but,
    earlier_lines,
    let_go,
    lines_but,
    lines_of,
    number_rows,
    rows_of,
    unnumbered,
)
from millrace.audit.reconciliation.spans import LOOKED_AT_MS, SPAN_SCHEMA, outside, sum_up
from millrace.audit.reconciliation.verdict_rows import ROW_SCHEMA, Reconciler, evident_rows, iso_time
from millrace.audit.reconciliation.verdicts import WindowVerdict
from millrace.audit.reconciliation.watermark import Waiver
from millrace.audit.report.plain import tier_names
from millrace.audit.report.resting_sums import Summing
from millrace.audit.report.summary import summarise
from millrace.audit.runs import resting
from millrace.audit.runs.arrivals import of_pinned, stream_passages
from millrace.audit.runs.at_rest import Asleep, AtRest, as_pruned
from millrace.audit.runs.capture import settle_claims
from millrace.audit.runs.event_reading import events_known, stream_of_key
from millrace.audit.runs.fact_rows import PrunedWindows, facts_table, left_of, restore, restore_pruned
from millrace.audit.runs.reading_plan import plan_ranges, read_until
from millrace.audit.runs.reconciling import reconciler_of, roster_of, streams_of, tiers_of
from millrace.audit.runs.run import Findings
from millrace.audit.runs.untrusted import doubts_of
from millrace.audit.runs.watermarks import watermarks_of
from millrace.audit.scanning import stream_cells
from millrace.audit.scanning.cell_notes import counts_of, unaudited_of, united_notes, unread_of
from millrace.audit.scanning.cell_rows import CELL_SCHEMA, NOTE_UNTRUSTED
from millrace.audit.scanning.stream_cells import StreamCells
from millrace.audit.spark.read_options import parse_options
from millrace.audit.spark.spark_cells import came_for_others, folded, laid_apart, unpruned
from millrace.audit.spark.task_plan import ranges_option
from millrace.audit.spark.task_reader import _read_cells
from tests.settling import Windows, reported, settle
from tests.simulation.audit_answers import Answers
from tests.simulation.audit_capture import WorldCapture, config_of
from tests.simulation.audit_clusters import EVENTS, Reader
from tests.simulation.audit_logs import WINDOW_MS
from tests.simulation.audit_result import Result
from tests.simulation.audit_shelf import Shelf, made_of
from tests.simulation.audit_waiving import WaivableState
from tests.simulation.audit_world import World

DAY_WINDOWS = 5
CHECKS = 1 / 3
"""Of the runs: their work is done a second time, in another way. What a run has learnt stays learnt, so that
one check speaks of the runs before it, too."""


def _is_pruned(row: WindowVerdict, pruned: PrunedWindows | None) -> bool:
    start_ms = row.window_start_ms
    return pruned is not None and start_ms is not None and pruned.has(start_ms)


def _held_back(tail: pa.Table) -> set[tuple[str, int]]:
    return set(zip(*(tail[name].to_pylist() for name in ("stream", "window_start_ms")), strict=True))


def _whole(tables: Sequence[pa.Table]) -> pa.Table:
    """In one chunk: every later step pays for each chunk, however few rows it has."""
    return pa.concat_tables(tables).combine_chunks()


@dataclass
class Audit:
    """An audit and what it keeps. Half of its runs fold that, which its own `luck` decides; `united_count` is
    how many united cells its runs have read."""

    world: World
    clusters: WorldCapture = field(init=False)
    commit: Commit = field(default_factory=Commit)
    kept: list[pa.Table] = field(default_factory=list)
    facts: pa.Table | None = None
    counted: pa.Table | None = None
    settled: pa.Table | None = None
    numbered: pa.Table | None = None
    spans: pa.Table = field(default_factory=SPAN_SCHEMA.empty_table)
    luck: Random = field(default_factory=lambda: Random(0))
    united_count: int = 0
    waivers: list[Waiver] = field(default_factory=list)

    asleep: list[Asleep] = field(default_factory=list)
    rested_by: str = ""
    shelf: Shelf = field(default_factory=Shelf)

    upkeep_luck: Random = field(default_factory=lambda: Random(1))
    rest_luck: Random = field(default_factory=lambda: Random(5))
    spans_luck: Random = field(default_factory=lambda: Random(4))
    check_luck: Random = field(default_factory=lambda: Random(2))

    def __post_init__(self) -> None:
        self.clusters = WorldCapture(self.world)

    def waive(self, targets: Collection[tuple[str, int]]) -> None:
        """A person goes on without the proof of these windows, by what the last run said of them."""
        state = WaivableState(self.numbered, self.settled)
        for topic, start_ms in targets:
            at_ms = self.world.now_ms + len(self.waivers)
            self.waivers.append(give_waiver(state, topic, start_ms, "the world", "by chance", at_ms))

    def run(
        self,
        *,
        dies: bool = False,
        between: Callable[[str], None] = lambda what: None,
        answers: Answers | None = None,
        horizon_ms: int | None = DEFAULT_HORIZON_MS,
    ) -> Result:
        """Look once. `dies`: killed after everything was counted, before the commit. `answers` takes down
        what the clusters answered; `horizon_ms` is the verdict's."""
        config = config_of(self.world)
        self.united_count += sum(pc.sum(pc.less(each["partition"], 0)).as_py() or 0 for each in self.kept)
        ledger, origins, told = self._known()
        pruned = {} if self.facts is None else restore_pruned(self.facts)
        answers = answers or Answers()
        captured = self._capture(
            config, ledger, self.commit, between, answers, events_known(config, self.commit, told)
        )
        answers.pinned_ms, answers.read_ms = captured.pinned_ms, self.world.now_ms
        for stream, clusters in origins.items():
            captured.origins.setdefault(stream, set()).update(clusters)
        checks = self.check_luck.random() < CHECKS
        at_rest = self._awake(config, captured)
        if checks:
            self._require_all_events(captured, pruned, at_rest)
        settle_claims(captured, self.commit)
        topic_of = {each.stream: each.topic for each in streams_of(config, captured)}
        late = Counter(upkeep.forget_pruned(captured.ledger, pruned, topic_of))
        ranges, lost = plan_ranges(captured, config, self.commit)
        new = self._count(config, ranges, answers)
        self.counted = new
        tail = new.filter(new["tail"])
        settled = new.filter(pc.invert(new["tail"]))
        offsets = {**self.commit.offsets, **read_until(captured, ranges)}
        notes = settled.filter(pc.is_valid(settled["note"]))
        commit = Commit(
            number=self.commit.number + 1,
            at_ms=captured.taken_ms,
            window_ms=WINDOW_MS,
            offsets=offsets,
            unread=united_notes([*self.commit.unread, *lost, *unread_of(notes, captured.vanished_ms)]),
            gaps=[event_to_keep(gap) for gap in ledger.gaps.values()],
            untrusted=dict(Counter(self.commit.untrusted) + Counter(counts_of(notes, NOTE_UNTRUSTED)) + late),
            events_read=captured.events.positions,
            events_ways=captured.events.ways,
            events_doubted=captured.events.doubts(),
            claims=[(*place, each) for place, each in sorted(open_claims(ledger, captured.claims).items())],
            answered=[(*place, count) for place, count in sorted(captured.answered.items())],
        )
        tail_notes = tail.filter(pc.is_valid(tail["note"]))
        unread = unread_of(tail_notes, captured.vanished_ms)
        while True:
            facts = self._facts(captured.ledger, captured, pruned, at_rest.left)
            kept = [*self.kept, *self.shelf.cells_of(at_rest.woke)]
            before = self._before(at_rest)
            evident, numbered, late_rows = self._reconcile(
                config, captured, commit, facts, _whole([*kept, new]), unread, before, at_rest
            )
            told = pa.concat_tables([numbered, unnumbered(late_rows)])
            hit = resting.hit_by(at_rest, told)
            if not hit:
                break
            self.world.note("woken by a record")
            resting.wake(at_rest, hit, self.shelf, captured.ledger)
        late += Counter(upkeep.late_counts(late_rows))
        lines = _whole([self._earlier(config)[1], lines_of(numbered)])
        if checks:
            self._require_settled(config, captured, evident, lines, rows_of(numbered), before)
        since_ms = None if horizon_ms is None else captured.taken_ms - horizon_ms
        found, summary = self._judge(
            config, captured, commit, numbered, lines, tail_notes, notes, late, since_ms, at_rest
        )
        asleep = list(at_rest.asleep)
        commit.claims = upkeep.claims_to_keep(
            commit.claims, found.rows, config.grace_ms, config.keep_ms, captured.taken_ms
        )
        commit.watermarks = {topic: at for topic, at in found.watermarks.items() if at is not None}
        going: list[tuple[str, int]] = []
        if not dies:
            self.commit, self.kept, self.facts = commit, [*kept, settled], facts
            self.settled, self.numbered = lines, numbered
            self.asleep, self.rested_by = list(at_rest.asleep), resting.judged_by(config)
            left, lines, going = self._prune(config, captured, found, tail, pruned, at_rest)
            is_folded = left is not pruned
            is_folded |= self._lay(config, captured, found, tail, left, lines, at_rest, evident)
            self._sum_up(captured.taken_ms)
            if may_unite(config, captured) and self.luck.random() < 0.5:
                self._fold(fold_plan(left, proven_windows(pa.concat_tables(found.rows.parts()))), tail)
                is_folded = True
            if is_folded:  # which takes cells of what is pruned, and with them of what came late for it
                kept = upkeep.late_to_keep(late, upkeep.late_counts(late_rows, again=True))
                self.commit.untrusted = dict(Counter(self.commit.untrusted) + Counter(kept))
        slept = [told for each in asleep for told in self.shelf.told[each.files.name]]
        made_ms = {(row.topic, row.stream, row.window_start_ms, row.producer): at_ms for row, at_ms in slept}
        return Result(
            rows=[*(row for row, *_ in evident), *(row for row, _ in slept)],
            watermarks=found.watermarks,
            now_ms=captured.taken_ms,
            untrusted={each.what: each.count for each in found.doubts.told()},
            exit_status=summary["exit_status"],
            summary=summary,
            since_ms=since_ms,
            made_ms={**made_of(numbered), **made_ms},
            pruned=going,
        )

    def _prune(
        self,
        config: AuditConfig,
        captured: Any,
        found: Findings,
        tail: pa.Table,
        before: dict[str, PrunedWindows],
        at_rest: AtRest,
    ) -> tuple[dict[str, PrunedWindows], pa.Table, list[tuple[str, int]]]:
        """As a run that folds and keeps no evidence for ever; returns what is pruned then, the lines and
        (stream, window) of what went."""
        nothing = SETTLED_SCHEMA.empty_table()
        if config.keep_ms is None or self.upkeep_luck.random() < 0.3:
            return before, nothing, []
        ledger, pruned = captured.ledger, {stream: left.copy() for stream, left in before.items()}
        ended = resting.old_enough(at_rest, config.keep_ms, captured.taken_ms)
        resting.prune(at_rest, ended, self.shelf, pruned)
        for each in ended:
            self.world.note("rested for as long as is kept")
            alone, spans = let_go(each.spans)
            self.settled, self.spans = _whole([self.settled, alone]), _whole([self.spans, spans])
        self.asleep = list(at_rest.asleep)
        earlier = self._earlier(config)[1]
        lines = upkeep.prune(
            Windows(found.numbered, 3),
            earlier,
            pruned,
            found.waived,
            lambda: _held_back(tail),
            config.keep_ms,
            captured.taken_ms,
            WINDOW_MS,
            sources=config.sources(),
            places_decide=not may_unite(config, captured),
        )
        if not lines.num_rows and not ended:
            return before, nothing, []
        upkeep.forget_pruned(ledger, pruned, learn=True)
        self._fold(fold_plan(pruned), tail)
        going = [
            (stream, start_ms * WINDOW_MS)
            for stream, left in pruned.items()
            for start_ms in left.windows - (before[stream].windows if stream in before else BitMap64())
        ]
        needed = upkeep.doubted_streams(found.rows, found.waived) | set(at_rest.left)
        needed |= upkeep.roster_streams(
            config.roster(), ledger, found.rows, config.grace_ms, captured.taken_ms, at_rest.start_ms
        )
        upkeep.forget_streams(ledger, pruned, captured.told, needed, config.grace_ms, captured.taken_ms)
        self.facts = self._facts(ledger, captured, pruned, at_rest.left)
        self.settled = _whole([but(earlier, lines), lines, lines_but(found.numbered, lines)])
        self.numbered = but(found.numbered, lines)
        return pruned, lines, going

    def _awake(self, config: AuditConfig, captured: Any) -> AtRest:
        """What is at rest, when whoever judges begins."""
        at_rest = AtRest(
            list(self.asleep), {} if self.facts is None else restore_pruned(self.facts, "resting")
        )
        _, lost = plan_ranges(captured, config, self.commit)
        waking = resting.to_wake(
            at_rest, self.shelf, config, captured, lost, self.rested_by, captured.taken_ms
        )
        self.world.kinds["woken by an event"] += bool(waking)
        resting.wake(at_rest, waking, self.shelf, captured.ledger)
        return at_rest

    def _before(self, at_rest: AtRest) -> pa.Table:
        """The lines that rows are numbered by, those of what woke among them."""
        woken = self.shelf.lines_of(at_rest.woke)
        return pa.concat_tables(
            [SETTLED_SCHEMA.empty_table() if self.settled is None else self.settled, *woken]
        )

    def _promised(self, config: AuditConfig, captured: Any) -> dict[str, int]:
        streams = streams_of(config, captured)
        return resting.promised_until(streams, config.grace_ms, captured.taken_ms)

    def _lay(
        self,
        config: AuditConfig,
        captured: Any,
        found: Findings,
        tail: pa.Table,
        pruned: Mapping[str, PrunedWindows],
        pruned_lines: pa.Table,
        at_rest: AtRest,
        evident: Sequence[tuple],
    ) -> bool:
        """As a run that has many rows, and lays those to rest that are proven; whether there are any."""
        if self.rest_luck.random() < 0.2 or not resting.may_rest(config, captured):
            return False
        tiers, ledger = tiers_of(config), captured.ledger
        names = tier_names(found.rows, [each["name"] for each in tiers])
        restless = resting.Restless(
            resting.made_anew(self.commit.unread),
            {} if self.rest_luck.random() < 0.5 else self._promised(config, captured),
            pruned_lines,
            found.waived,
            lambda: _held_back(tail),
        )
        summing = Summing(tiers, names, captured.taken_ms, config.grace_ms)
        laid = resting.lay(Windows(found.numbered, 3), restless, config, ledger, summing)
        if laid is None:
            return False
        self.world.note("laid to rest")
        plan = fold_plan(pruned, proven_windows(pa.concat_tables(found.rows.parts())), laid.spans)
        apart = self._folded(plan, tail, laid_apart)
        self.kept = [apart.filter(pc.invert(apart["rests"])).drop_columns("rests")]
        asleep = self.shelf.put(
            self.commit.number,
            captured.taken_ms,
            laid,
            ledger,
            apart.filter(apart["rests"]).drop_columns("rests"),
            found.numbered,
            [row for row, *_ in evident],
        )
        for stream, windows in laid.left.items():
            at_rest.left.setdefault(stream, PrunedWindows(WINDOW_MS)).add_all(windows)
        self.asleep = [*at_rest.asleep, asleep]
        self.facts = self._facts(ledger, captured, pruned, at_rest.left)
        assert self.settled is not None and self.numbered is not None
        folded = self.settled["folded"]
        living = outside(self.settled.filter(pc.invert(folded)), laid.spans)
        self.settled = _whole([self.settled.filter(folded), living])
        self.numbered = outside(self.numbered, laid.spans)
        return True

    def _sum_up(self, now_ms: int) -> None:
        """Lines of pruned windows become spans, in days of a few windows, over as soon as they end."""
        if self.settled is None or self.spans_luck.random() < 0.3:
            return
        folded = self.settled["folded"]
        lines, self.spans = sum_up(
            self.settled.filter(folded), self.spans, now_ms + LOOKED_AT_MS, DAY_WINDOWS * WINDOW_MS
        )
        self.settled = _whole([lines, self.settled.filter(pc.invert(folded))])
        if self.spans.num_rows:
            self.world.note("summed up")

    def _known(self) -> tuple[EventLedger, dict[str, set[str]], dict[str, dict[str, int]]]:
        """(a ledger of what the state tells, origins, where streams' newest events are)"""
        ledger = EventLedger()
        origins, told = ({}, {}) if self.facts is None else restore(self.facts, ledger)
        for kept in self.commit.gaps:
            event = kept_event(kept)
            assert event is not None
            ledger.learn(event)
        return ledger, origins, told

    def _facts(
        self,
        ledger: EventLedger,
        captured: Any,
        pruned: Mapping[str, PrunedWindows],
        left: Mapping[str, PrunedWindows],
    ) -> pa.Table:
        groups = {group.name for group in self.world.groups}
        return facts_table(ledger, captured.origins, pruned, groups, captured.events.told, left)

    def _require_all_events(
        self, captured: Any, pruned: Mapping[str, PrunedWindows], at_rest: AtRest
    ) -> None:
        """Whoever reads all events learns nothing that this run does not know."""
        ledger, _, _ = self._known()
        streams = set()
        for cluster, log in self.clusters.events.items():
            end = captured.events.positions[f"{cluster}/{EVENTS}/0"].next_offset
            pinned = set(log.records[:end])
            for key, value in filter(pinned.__contains__, self.clusters.whole[cluster]):
                ledger.add(key, value)
                streams.add(stream_of_key(key)[1])
        whole, ours = (
            self._without(pruned, at_rest, each, captured) for each in (ledger, deepcopy(captured.ledger))
        )
        assert whole == ours, "the facts"
        assert (ledger.untrusted, set(captured.told)) == (captured.ledger.untrusted, streams - {""})
        assert ledger.distrusted_groups == captured.ledger.distrusted_groups
        assert ledger.gaps.items() <= captured.ledger.gaps.items()

    def _without(
        self,
        pruned: Mapping[str, PrunedWindows],
        at_rest: AtRest,
        ledger: EventLedger,
        captured: Any,
    ) -> tuple[pa.Table, dict[str, int]]:
        left = {stream: each.copy() for stream, each in pruned.items()}
        late = upkeep.forget_pruned(ledger, left)
        resting.lay_reports({stream: each.copy() for stream, each in at_rest.left.items()}, ledger)
        return self._facts(ledger, captured, left, at_rest.left), late

    def _fold(self, plan: pa.Table, tail: pa.Table) -> None:
        """As a run that folds, stream by stream: cells of what is proven are united, of what is pruned go."""
        self.kept = [self._folded(plan, tail, folded)]

    def _folded(
        self, plan: pa.Table, tail: pa.Table, made: Callable[[pa.Table, pa.Table], pa.Table]
    ) -> pa.Table:
        kept = _whole([*self.kept, tail])
        kept = kept.filter(pc.is_null(kept["note"]))
        parts = []
        for stream in kept["stream"].unique().to_pylist():
            told = plan.filter(pc.equal(plan["stream"], stream))
            parts.append(made(kept.filter(pc.equal(kept["stream"], stream)), told))
        return pa.concat_tables([made(CELL_SCHEMA.empty_table(), plan.slice(0, 0)), *parts])

    def _judge(
        self,
        config: AuditConfig,
        captured: Any,
        commit: Commit,
        numbered: pa.Table,
        lines: pa.Table,
        tail_notes: pa.Table,
        notes: pa.Table,
        late: Mapping[str, int],
        since_ms: int | None,
        at_rest: AtRest,
    ) -> tuple[Findings, dict[str, Any]]:
        """As the job does after it has reconciled: doubts, settled verdicts, watermarks and the summary."""
        rows, now_ms = Windows(rows_of(numbered), 3), captured.taken_ms
        untrusted = counts_of(tail_notes, NOTE_UNTRUSTED)
        doubts = doubts_of(config, captured, commit, untrusted, late, rows, [], now_ms, since_ms)
        standing = standing_waivers(self.waivers, rows, self._earlier(config)[1])
        waivers = [each.waiver for each in standing if each.stands]
        watermarks = watermarks_of(
            rows,
            lines,
            streams_of(config, captured),
            waivers,
            config.topics,
            over_ms=captured.taken_ms - config.grace_ms,
            spans=pa.concat_tables([self.spans, at_rest.spans]),
        )
        watermarks = doubts.held(watermarks, self.commit.watermarks)
        deciding, older = split_older(rows, since_ms)
        found = Findings(rows, deciding, older, numbered, standing, watermarks, doubts)
        summary = summarise(
            deciding,
            waived=found.waived,
            waivers=[each.told() for each in standing],
            tiers=tiers_of(config),
            at_ms=now_ms,
            grace_ms=config.grace_ms,
            window_ms=config.window_ms,
            untrusted={each.what: each.count for each in doubts.told()},
            doubted=bool(doubts.deciding()),
            older=older,
            older_untrusted=doubts.older(),
            since_ms=since_ms,
            unaudited=Counter(unaudited_of(notes)) + Counter(unaudited_of(tail_notes)),
            watermarks={topic: iso_time(at) for topic, at in watermarks.items()},
            resting=[self.shelf.sums[each.files.name] for each in at_rest.asleep],
        )
        return found, summary

    def _capture(self, *given: Any) -> Any:
        return self.clusters.take(*given)

    def _count(self, config: AuditConfig, ranges: list[Any], answers: Answers) -> pa.Table:
        options = parse_options(
            {
                "ranges": ranges_option(ranges),
                "bootstraps": json.dumps({name: ["h:1"] for name in config.clusters}),
                "window": f"{WINDOW_MS}ms",
                "digest": str(self.world.content).lower(),
            }
        )
        read = [each for each in ranges if each.size > 0]
        batches: Iterator[pa.RecordBatch] = _read_cells(Reader(self.world, answers), read, options)
        return pa.Table.from_batches(batches, CELL_SCHEMA).combine_chunks()

    def _reconcile(
        self,
        config: AuditConfig,
        captured: Any,
        commit: Commit,
        facts: pa.Table,
        cells: pa.Table,
        doubts: Any,
        before: pa.Table,
        at_rest: AtRest,
    ) -> tuple[list[tuple], pa.Table, pa.Table]:
        """((verdict, evidence) of every row, the rows numbered stream by stream, with their lines, the rows
        that count what came for pruned windows)."""
        reconciler = self._reconciler(config, captured, commit, doubts, cells)
        cells = cells.filter(pc.is_null(cells["note"]))
        by_stream = {
            stream: cells.filter(pc.equal(cells["stream"], stream))
            for stream in cells["stream"].unique().to_pylist()
        }
        told = {row["stream"]: row for row in facts.to_pylist()}
        lines, _ = self._earlier(config, before)
        rows: list[tuple] = []
        late: list[dict[str, Any]] = []
        numbered = [NUMBERED_SCHEMA.empty_table()]

        def number(stream: str, own: list[tuple]) -> None:
            theirs = lines.filter(pc.equal(lines["stream"], stream))
            numbered.append(number_rows(evident_rows(own), theirs, captured.taken_ms))
            rows.extend(own)

        with mock.patch.object(stream_cells, "FEW_CELLS", 0):  # as of streams that have many
            for stream in sorted({*by_stream, *told, *lines["stream"].to_pylist()} - {""}):
                known = [told[stream]] if stream in told else []
                cells = by_stream.get(stream, CELL_SCHEMA.empty_table())
                pruned = left_of(known)
                cells, gone = unpruned(cells, pruned)
                own = list(reconciler.verdicts(cells, known)) if known or cells.num_rows else []
                if own:
                    with mock.patch.object(plain_windows, "FEW_WINDOWS", 1):  # as of streams that have many
                        assert reconciler.rows(cells, known, pruned).equals(evident_rows(own))
                if known:
                    late += came_for_others(reconciler, known[0], cells, gone, evident_rows(own))
                number(stream, [each for each in own if not _is_pruned(each[0], pruned)])
        left = as_pruned(restore_pruned(facts), at_rest)
        owed = roster_of(config, captured, _whole(numbered), left, captured.taken_ms, at_rest.spans)
        number("", [(row,) for row in owed])
        return rows, _whole(numbered), pa.Table.from_pylist(late, ROW_SCHEMA)

    def _earlier(self, config: AuditConfig, before: pa.Table | None = None) -> tuple[pa.Table, pa.Table]:
        before = self.settled if before is None else before
        before = SETTLED_SCHEMA.empty_table() if before is None else before
        return earlier_lines(before, config.topics, self.spans)

    def _require_settled(
        self,
        config: AuditConfig,
        captured: Any,
        evident: list[tuple],
        lines: pa.Table,
        rows: pa.Table,
        before: pa.Table,
    ) -> None:
        """What streams were numbered one by one is what they are together."""
        whole = settle(evident_rows(evident), before, config.topics, captured.taken_ms, self.spans)
        assert (whole.table, whole.rows) == (lines, reported(rows))

    def _reconciler(
        self, config: AuditConfig, captured: Any, commit: Commit, doubts: Any, cells: pa.Table
    ) -> Reconciler:
        """As the job puts it together."""
        arrivals = {}
        for name, cluster in config.aggregates().items():
            if cluster.mirror == "foreign":
                sources = set(config.sources())
                streams = cells["stream"].drop_null().unique().to_pylist()
                by_stream = [StreamCells(cells.filter(pc.equal(cells["stream"], each))) for each in streams]
                told = [each for own in by_stream if len(own) for each in stream_passages(own, sources, name)]
                arrivals[name] = of_pinned([pin for pin in captured.pins if pin.cluster in sources], told)
        return reconciler_of(config, captured, [*commit.unread, *doubts], captured.taken_ms, arrivals)
