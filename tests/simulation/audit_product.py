"""The audit as it runs, on a world's bytes: real capture, plan, scan, cells, facts, state, reconciliation,
watermark, summary and exit status. Only Spark and the sockets are left out.

`Audit.run` is one run of the job; it may die before it commits. The seams are the cluster's client (metadata,
offsets, whole topics) and the fetch of one partition.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.compute as pc

from millrace.audit.config import AuditConfig, parse_config
from millrace.audit.contract.events import EventLedger, event_to_keep, kept_event
from millrace.audit.job import Findings
from millrace.audit.keeping.state import Commit, StateFolder
from millrace.audit.keeping.uniting import fold_plan, may_unite, proven_windows
from millrace.audit.keeping.waivers import give_waiver, standing_waivers
from millrace.audit.reconciliation.horizon import DEFAULT_HORIZON_MS, split_older
from millrace.audit.reconciliation.row_parts import View
from millrace.audit.reconciliation.settled import (
    NUMBERED_SCHEMA,
    SETTLED_SCHEMA,
    earlier_lines,
    lines_of,
    number_rows,
    rows_of,
)
from millrace.audit.reconciliation.verdict_rows import Reconciler, evident_rows, iso_time
from millrace.audit.reconciliation.verdicts import WindowVerdict
from millrace.audit.reconciliation.watermark import Waiver
from millrace.audit.report.summary import summarise
from millrace.audit.runs import capture as capture_module
from millrace.audit.runs import event_reading, partition_pins
from millrace.audit.runs.arrivals import of_pinned, stream_passages
from millrace.audit.runs.event_reading import EventsRead, events_known, stream_of_key
from millrace.audit.runs.fact_rows import facts_table, restore
from millrace.audit.runs.reading_plan import plan_ranges, read_until
from millrace.audit.runs.reconciling import reconciler_of, roster_of, streams_of, tiers_of
from millrace.audit.runs.untrusted import doubts_of
from millrace.audit.runs.watermarks import watermarks_of
from millrace.audit.scanning import stream_cells
from millrace.audit.scanning.cell_notes import counts_of, unaudited_of, unread_of
from millrace.audit.scanning.cell_rows import CELL_SCHEMA, NOTE_UNTRUSTED, cells_of
from millrace.audit.scanning.range_reader import RangeReader
from millrace.audit.spark.read_options import parse_options
from millrace.audit.spark.spark_cells import folded
from millrace.audit.spark.task_plan import ranges_option
from millrace.audit.spark.task_reader import _read_cells
from millrace.broker.client.metadata import NO_TOPIC_ID
from millrace.broker.client.offsets import EARLIEST
from tests.settling import Windows, reported, settle
from tests.simulation.audit_answers import Answers
from tests.simulation.audit_logs import GRACE_MS, WINDOW_MS
from tests.simulation.audit_world import World, positions_of, routes_of

_OUT_OF_RANGE = 1
EVENTS = "millrace.audit"


def config_of(world: World) -> AuditConfig:
    """The audit.yaml of this world."""
    clusters: dict[str, Any] = {}
    for number, name in enumerate([*world.sources, *world.aggregates]):
        cluster: dict[str, Any] = {"bootstrap": [f"h:{number + 1}"], "tier": "source"}
        if name in world.aggregates:
            cluster["tier"] = "aggregate"
            cluster["topics"] = dict(world.topics.renamed)
            cluster["mirror"] = "foreign" if world.foreign else "millrace"
        clusters[name] = cluster
    groups: dict[str, list[str]] = {}
    for group in world.groups:
        groups.setdefault(group.cluster, []).append(group.name)
    return parse_config(
        {
            "clusters": clusters,
            "topics": list(world.topics.audited),
            "window": f"{WINDOW_MS}ms",
            "grace": f"{GRACE_MS}ms",
            "groups": groups,
            "content": world.content,
            "producers": [{"name": name, "since": since} for name, since in world.members.items()],
        }
    )


class _Client:
    """A cluster as its client shows it. `between` is called at every question: the world goes on. What was
    answered is written down in `answers`."""

    def __init__(
        self,
        world: World,
        name: str,
        between: Callable[[str], None],
        answers: Answers,
        events: EventsLog,
    ):
        self.world, self.name, self.between, self.answers = world, name, between, answers
        self.events = events

    async def __aenter__(self) -> _Client:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def metadata(self, topics: list[str] | None = None, max_age_ms: int = 0) -> Any:
        names = [name for cluster, name in self.world.logs if cluster == self.name]
        names += [EVENTS]
        if self.name in self.world.aggregates and not self.world.foreign:
            names += [f"millrace.positions.m-{self.name}", f"millrace.routes.m-{self.name}"]
        wanted = names if topics is None else [name for name in topics if name in names]
        logs: dict[str, list] = {name: list(self.world.logs.get((self.name, name), ())) for name in wanted}
        logs |= {name: [self.events] for name in wanted if name == EVENTS}
        return SimpleNamespace(
            cluster_id=f"id-{self.name}",
            topics={
                name: SimpleNamespace(topic_id=of[0].topic_id if of else NO_TOPIC_ID)
                for name, of in logs.items()
            },
            topic_errors={},
            partitions=lambda name: [(name, log.partition) for log in logs.get(name, ())],
        )

    async def list_offsets(self, timestamps: dict, read_committed: bool = False) -> dict:
        if (EVENTS, 0) in timestamps:
            at_begin = timestamps[EVENTS, 0] == EARLIEST
            offset = self.events.start if at_begin else self.events.told_by(self.world)
            return {(EVENTS, 0): SimpleNamespace(offset=offset, leader_epoch=-1)}
        self.between("offsets")
        answers = {}
        for (name, partition), at in timestamps.items():
            log = self.world.logs[self.name, name][partition]
            offset = log.start if at == EARLIEST else log.end
            if read_committed:
                offset = log.stable_end
            self.answers.tell_offset(log, offset, start=at == EARLIEST, stable=read_committed)
            answers[name, partition] = SimpleNamespace(offset=max(offset, log.start), leader_epoch=-1)
        return answers


class EventsLog:
    """A cluster's events topic: what was told, in another order than it was, and some of it again."""

    partition, start = 0, 0

    def __init__(self, cluster: str, luck: Random):
        self.cluster, self._luck = cluster, luck
        self.topic_id = uuid.UUID(int=luck.getrandbits(128))
        self.records: list[tuple[bytes, bytes]] = []
        self._taken = 0

    def told_by(self, world: World) -> int:
        """The end, of what the world's programs have told by now."""
        new = world.told_in(self.cluster, self._taken)
        self._taken = len(world.sent)
        # Mirrors carry events of other clusters' topics, and carry some again.
        new += self._luck.sample(self.records, min(len(self.records), len(new) // 4))
        self._luck.shuffle(new)
        self.records += new
        return len(self.records)

    def make_anew(self) -> None:
        """The topic was deleted, and all that it had is told again."""
        self.topic_id = uuid.UUID(int=self._luck.getrandbits(128))
        self._luck.shuffle(self.records)


class _Reader(RangeReader):
    """The real range reader over a world's logs: answers of a few batches, from whole batches on."""

    def __init__(self, world: World, answers: Answers):
        self.world, self.answers = world, answers

    def _submit(self, work: Any) -> Any:
        try:
            work.send(None)
        except StopIteration as done:
            answer = done.value
            return SimpleNamespace(result=lambda: answer, cancel=lambda: None)
        raise AssertionError("a fetch here never waits")

    async def _fetch(self, range_: Any, offset: int) -> Any:
        log = self.world.logs[range_.cluster, range_.topic_here][range_.partition]
        if not log.start <= offset <= log.end:
            return SimpleNamespace(
                error_code=_OUT_OF_RANGE, log_start_offset=log.start, records=b"", aborted=[]
            )
        first = next(i for i, batch in enumerate(log.batches) if batch.last >= offset)
        self.answers.tell_batches(log, log.batches[first].base, range_.first_offset, range_.end_offset)
        data = b"".join(batch.data for batch in log.batches[first : first + 20])
        aborted = [(pid, start) for pid, start, end in log.aborted if end >= offset]
        return SimpleNamespace(error_code=0, log_start_offset=log.start, records=data, aborted=aborted)


@dataclass
class Result:
    """What one run said."""

    rows: list[WindowVerdict]
    watermarks: dict[str, int | None]
    now_ms: int
    untrusted: dict[str, int]
    exit_status: int
    summary: Mapping[str, Any]


@dataclass
class Audit:
    """An audit and what it keeps. Half of its runs fold that, which its own `luck` decides; `united_count` is
    how many united cells its runs have read, `skipped_count` how many events they knew and did not read."""

    world: World
    commit: Commit = field(default_factory=Commit)
    kept: list[pa.Table] = field(default_factory=list)
    facts: pa.Table | None = None
    counted: pa.Table | None = None
    settled: pa.Table | None = None
    luck: Random = field(default_factory=lambda: Random(0))
    united_count: int = 0
    skipped_count: int = 0
    events: dict[str, EventsLog] = field(default_factory=dict)
    whole: dict[str, list[tuple[bytes, bytes]]] = field(default_factory=dict)
    events_luck: Random = field(default_factory=lambda: Random(1))
    waivers: list[Waiver] = field(default_factory=list)

    def waive(self, topic: str, start_ms: int) -> None:
        """A person goes on without the proof of a window, by what the last run said of it."""
        state = StateFolder.open(self.world.folder / "said")
        number = state.latest().number + 1
        name = f"verdicts/{number}/lines.parquet"
        state.write_table(name, self.settled)
        state.commit(Commit(number=number, verdicts=[name]))
        at_ms = self.world.now_ms + number
        self.waivers.append(give_waiver(state, topic, start_ms, "the world", "by chance", at_ms))

    def run(
        self,
        *,
        dies: bool = False,
        between: Callable[[str], None] = lambda what: None,
        answers: Answers | None = None,
    ) -> Result:
        """Look once. `dies`: killed after everything was counted, before the commit. `answers` takes down
        what the clusters answered."""
        config = config_of(self.world)
        self.united_count += sum(pc.sum(pc.less(each["partition"], 0)).as_py() or 0 for each in self.kept)
        ledger, origins, told = self._known()
        answers = answers or Answers()
        captured = self._capture(config, ledger, between, answers, events_known(config, self.commit, told))
        answers.pinned_ms, answers.read_ms = captured.pinned_ms, self.world.now_ms
        for stream, clusters in origins.items():
            captured.origins.setdefault(stream, set()).update(clusters)
        self._require_all_events(captured)
        ranges, lost = plan_ranges(captured, config, self.commit)
        new = self._count(config, ranges, answers)
        self.counted = new
        tail = new.filter(new["tail"])
        settled = new.filter(pc.invert(new["tail"]))
        offsets = {**self.commit.offsets, **read_until(captured, ranges)}
        notes = settled.filter(pc.is_valid(settled["note"]))
        commit = Commit(
            number=self.commit.number + 1,
            window_ms=WINDOW_MS,
            offsets=offsets,
            unread=[*self.commit.unread, *lost, *unread_of(notes, captured.vanished_ms)],
            gaps=[event_to_keep(gap) for gap in ledger.gaps.values()],
            untrusted=dict(Counter(self.commit.untrusted) + Counter(counts_of(notes, NOTE_UNTRUSTED))),
            events_read=captured.events.positions,
            events_ways=captured.events.ways,
            events_doubted=captured.events.doubts(),
        )
        facts = self._facts(ledger, captured)
        tail_notes = tail.filter(pc.is_valid(tail["note"]))
        unread = unread_of(tail_notes, captured.vanished_ms)
        evident, numbered = self._reconcile(
            config, captured, commit, facts, pa.concat_tables([*self.kept, new]), unread
        )
        lines = pa.concat_tables([self._earlier(config)[1], lines_of(numbered)])
        self._require_settled(config, captured, evident, lines, rows_of(numbered))
        found, summary = self._judge(config, captured, commit, numbered, lines, tail_notes, notes)
        commit.watermarks = {topic: at for topic, at in found.watermarks.items() if at is not None}
        if not dies:
            self.commit, self.kept, self.facts = commit, [*self.kept, settled], facts
            self.settled = lines
            if may_unite(config, captured) and self.luck.random() < 0.5:
                self._fold(pa.concat_tables(found.rows.parts()), tail)
        return Result(
            rows=[row for row, *_ in evident],
            watermarks=found.watermarks,
            now_ms=captured.taken_ms,
            untrusted={each.what: each.count for each in found.doubts.told()},
            exit_status=summary["exit_status"],
            summary=summary,
        )

    def _known(self) -> tuple[EventLedger, dict[str, set[str]], dict[str, dict[str, int]]]:
        """(a ledger of what the state tells, origins, where streams' newest events are)"""
        ledger = EventLedger()
        origins, told = ({}, {}) if self.facts is None else restore(self.facts, ledger)
        for kept in self.commit.gaps:
            event = kept_event(kept)
            assert event is not None
            ledger.learn(event)
        return ledger, origins, told

    def _facts(self, ledger: EventLedger, captured: Any) -> pa.Table:
        groups = {group.name for group in self.world.groups}
        return facts_table(ledger, captured.origins, groups=groups, told=captured.events.told)

    def _require_all_events(self, captured: Any) -> None:
        """Whoever reads all events learns nothing that this run does not know."""
        ledger, _, _ = self._known()
        streams = set()
        for cluster, log in self.events.items():
            end = captured.events.positions[f"{cluster}/{EVENTS}/0"].next_offset
            pinned = set(log.records[:end])
            for key, value in filter(pinned.__contains__, self.whole[cluster]):
                ledger.add(key, value)
                streams.add(stream_of_key(key)[1])
        whole, ours = self._facts(ledger, captured), self._facts(captured.ledger, captured)
        assert whole == ours, "the facts"
        assert (ledger.untrusted, set(captured.told)) == (captured.ledger.untrusted, streams - {""})
        assert ledger.distrusted_groups == captured.ledger.distrusted_groups
        assert ledger.gaps.items() <= captured.ledger.gaps.items()

    def _fold(self, rows: pa.Table, tail: pa.Table) -> None:
        """As a run that folds: the cells of what is proven are united, stream by stream."""
        plan = fold_plan({}, proven_windows(rows))
        kept = pa.concat_tables([*self.kept, tail])
        kept = kept.filter(pc.is_null(kept["note"]))
        parts = []
        for stream in kept["stream"].unique().to_pylist():
            told = plan.filter(pc.equal(plan["stream"], stream))
            parts.append(folded(kept.filter(pc.equal(kept["stream"], stream)), told))
        self.kept = [pa.concat_tables(parts)] if parts else []

    def _judge(
        self,
        config: AuditConfig,
        captured: Any,
        commit: Commit,
        numbered: pa.Table,
        lines: pa.Table,
        tail_notes: pa.Table,
        notes: pa.Table,
    ) -> tuple[Findings, dict[str, Any]]:
        """As the job does after it has reconciled: doubts, settled verdicts, watermarks and the summary."""
        rows, now_ms = View(Windows(numbered, 3), rows_of, ["state"]), captured.taken_ms
        untrusted = counts_of(tail_notes, NOTE_UNTRUSTED)
        since_ms = now_ms - DEFAULT_HORIZON_MS
        doubts = doubts_of(config, captured, commit, untrusted, {}, rows, [], now_ms, since_ms)
        standing = standing_waivers(self.waivers, rows)
        waivers = [each.waiver for each in standing if each.stands]
        watermarks = watermarks_of(rows, lines, streams_of(config, captured), waivers, config.topics)
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
        )
        return found, summary

    def _capture(
        self,
        config: AuditConfig,
        ledger: EventLedger,
        between: Callable[[str], None],
        answers: Answers,
        known: EventsRead,
    ) -> Any:
        world = self.world
        for name in config.clusters:
            self.events.setdefault(name, EventsLog(name, self.events_luck))
            if self.events_luck.random() < 0.05:
                self.events[name].make_anew()

        async def read_to_end(cluster: _Client, topic: str, **options: Any) -> Any:
            is_again = "read_committed" in options
            between(f"{topic}, since" if is_again else topic)
            first = 0
            if topic == EVENTS:
                first = options["since"][0]
                end = cluster.events.told_by(world) if is_again else options["until"][0]
                if not is_again:
                    self.skipped_count += first
                    self.whole[cluster.name] = whole = world.told_in(cluster.name)
                    # Read from several clusters, or again.
                    whole += world.rng.sample(whole, len(whole) // 4)
                    world.rng.shuffle(whole)
                records = cluster.events.records[first:end]
            elif topic.startswith("millrace.positions"):
                records = positions_of(world, cluster.name)
                answers.tell_positions(world, cluster.name)
            else:
                records = routes_of(world, cluster.name)
            for offset, (key, value) in enumerate(records, first):
                yield SimpleNamespace(key=key, value=value, partition=0, offset=offset)

        async def committed(cluster: _Client, name: str) -> Any:
            between("group")
            (group,) = [group for group in world.groups if group.name == name]
            return {
                (log.name, log.partition): SimpleNamespace(
                    offset=group.committed[log.place],
                    leader_epoch=group.epochs.get(log.place, -1),
                    metadata=group.mark,
                )
                for log in world.cluster_logs(cluster.name)
                if log.place in group.committed
            }

        async def histories(cluster: _Client, newest: Any) -> dict:
            told = {
                key: world.logs[cluster.name, key[0]][key[1]].history() for key in newest if key[0] != EVENTS
            }
            return {key: history for key, history in told.items() if history}

        async def no_densities(cluster: _Client, bounds: Any) -> dict:
            return {}

        with (
            mock.patch.object(
                capture_module,
                "Cluster",
                lambda name, *_, **__: _Client(world, name, between, answers, self.events[name]),
            ),
            mock.patch.object(capture_module, "read_topic_to_end", read_to_end),
            mock.patch.object(event_reading, "read_topic_to_end", read_to_end),
            mock.patch.object(capture_module, "fetch_offsets", committed),
            mock.patch.object(capture_module, "bytes_per_offset", no_densities),
            mock.patch.object(partition_pins, "epoch_histories", histories),
        ):
            looking = capture_module.capture(config, ledger, lambda: world.now_ms, self.commit, known)
            return asyncio.run(looking)

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
        batches: Iterator[pa.RecordBatch] = _read_cells(_Reader(self.world, answers), read, options)
        # One chunk for each run; with one for each answer, a quarter of the time went into small chunks.
        return pa.Table.from_batches(batches, CELL_SCHEMA).combine_chunks()

    def _reconcile(
        self,
        config: AuditConfig,
        captured: Any,
        commit: Commit,
        facts: pa.Table,
        cells: pa.Table,
        doubts: Any,
    ) -> tuple[list[tuple], pa.Table]:
        """((verdict, evidence) of every row, the rows numbered stream by stream, with their lines)."""
        reconciler = self._reconciler(config, captured, commit, doubts, cells)
        cells = cells.filter(pc.is_null(cells["note"]))
        by_stream = {
            stream: cells.filter(pc.equal(cells["stream"], stream))
            for stream in cells["stream"].unique().to_pylist()
        }
        told = {row["stream"]: row for row in facts.to_pylist()}
        lines, _ = self._earlier(config)
        rows: list[tuple] = []
        numbered = [NUMBERED_SCHEMA.empty_table()]

        def number(stream: str, own: list[tuple]) -> None:
            theirs = lines.filter(pc.equal(lines["stream"], stream))
            numbered.append(number_rows(evident_rows(own), theirs, captured.taken_ms))
            rows.extend(own)

        with mock.patch.object(stream_cells, "FEW_CELLS", 0):  # as of streams that have many
            for stream in sorted({*by_stream, *told, *lines["stream"].to_pylist()} - {""}):
                known = [told[stream]] if stream in told else []
                cells = by_stream.get(stream, CELL_SCHEMA.empty_table())
                number(stream, list(reconciler.verdicts(cells, known)) if known or cells.num_rows else [])
        number("", [(row,) for row in roster_of(config, captured, pa.concat_tables(numbered))])
        return rows, pa.concat_tables(numbered)

    def _earlier(self, config: AuditConfig) -> tuple[pa.Table, pa.Table]:
        before = SETTLED_SCHEMA.empty_table() if self.settled is None else self.settled
        return earlier_lines(before, config.topics)

    def _require_settled(
        self, config: AuditConfig, captured: Any, evident: list[tuple], lines: pa.Table, rows: pa.Table
    ) -> None:
        """What streams were numbered one by one is what they are together."""
        whole = settle(evident_rows(evident), self.settled, config.topics, captured.taken_ms)
        assert (whole.table, whole.rows) == (lines, reported(rows))

    def _reconciler(
        self, config: AuditConfig, captured: Any, commit: Commit, doubts: Any, cells: pa.Table
    ) -> Reconciler:
        """As the job puts it together."""
        arrivals = {}
        for name, cluster in config.aggregates().items():
            if cluster.mirror == "foreign":
                sources = set(config.sources())
                by_stream: dict[str, list] = {}
                for cell in cells_of(cells):
                    by_stream.setdefault(cell.stream, []).append(cell)
                told = [each for own in by_stream.values() for each in stream_passages(own, sources, name)]
                arrivals[name] = of_pinned([pin for pin in captured.pins if pin.cluster in sources], told)
        return reconciler_of(config, captured, [*commit.unread, *doubts], captured.taken_ms, arrivals)
