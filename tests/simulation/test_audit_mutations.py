"""Random histories with known truth, through the producer's session, the events and the reconciliation.

A world produces records into source partitions, loses, repeats, delays and expires some on the way, loses
reports and kills producers. What happened is kept record by record, with exact offsets, in plain Python
sets; the audit sees only events and cells. Its rows must say exactly what the truth says. Every scenario is
a seed; a failure prints it, and `MILLRACE_AUDIT_SEED=n` runs that one alone.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest

from millrace.audit.cells import Cell, count_repeats, encode_bitmaps, merge_cells
from millrace.audit.events import CLOSED, CountEvent, EventLedger, StreamEvent, encode_event
from millrace.audit.header import window_start_ms
from millrace.audit.reconcile import Gap, Passage, TierReading, UnreadRange, reconcile_stream
from millrace.audit.session import ProducerIdentity, StreamSession
from millrace.audit.verdicts import PRODUCED, Verdict, WindowState, overall_verdict

WINDOW_MS = 1000
GRACE_MS = 500
LEASE_MS = 5000
SOURCE, AGGREGATE = "source", "aggregate"
LOST_AT_SOURCE, LOST_BETWEEN = (PRODUCED, SOURCE), (SOURCE, AGGREGATE)
SCENARIOS_A_TEST = 100


@dataclass
class Truth:
    """One stream's records by sequence, as they really fared, and what the delivered events say of them."""

    created_ms: dict[int, int] = field(default_factory=dict)
    source: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """(partition, offset) of every copy"""
    aggregate: Counter[int] = field(default_factory=Counter)
    acknowledged: set[int] = field(default_factory=set)
    ambiguous: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    last_assigned: int = 0
    last_settled: int = 0
    closed: bool = False
    announced: bool = False
    at_ms: int = 0
    said: dict[int, tuple[set[int], set[int], set[int]]] = field(default_factory=dict)


class World:
    """One topic from a source cluster through a mirror to the aggregate."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        chance = self.random.choice
        self.partition_count = self.random.randint(1, 4)
        self.logs: dict[int, list[tuple[str, int]]] = {p: [] for p in range(self.partition_count)}
        self.arrived: dict[int, list[tuple[str, int]]] = {p: [] for p in range(self.partition_count)}
        self.truths: dict[str, Truth] = {}
        self.ledger = EventLedger()
        self.delivered: list[tuple[bytes, bytes]] = []
        self.loss_at_source = chance((0, 0, 0.02))
        self.double_at_source = chance((0, 0, 0.02))
        self.unsure = chance((0, 0.05))
        self.drop = chance((0, 0, 0.02, 0.3, 1.0))
        self.repeat = chance((0, 0, 0.03))
        self.lose_events = chance((0, 0, 0.2, 0.9))
        self.now_ms = 1_000_000
        self.positions: dict[int, int] = {}
        self.gaps: dict[int, tuple[int, int]] = {}
        self.log_start: dict[int, int] = {}

    def run(self) -> None:
        for number in range(self.random.randint(1, 3)):
            self._run_producer(number)
        self.now_ms += self.random.choice((0, 1_000, 3_000, 10_000))
        self.random.shuffle(self.delivered)
        for key, value in self.delivered:
            self.ledger.add(key, value)
        self._mirror()
        self._expire()

    def _run_producer(self, number: int) -> None:
        rng = self.random
        stream = f"{number + 1:016x}"
        truth = self.truths[stream] = Truth()
        backdates = rng.random() < 0.3
        session = StreamSession(
            ProducerIdentity("5" * 16, f"producer-{number}"),
            "flights",
            stream,
            window_ms=WINDOW_MS,
            lease_ms=LEASE_MS,
            now_ms=self.now_ms,
            promises=not backdates,
        )
        skew_ms = rng.choice((0, 0, -700_000, 50_000_000)) if backdates else 0
        pending = []
        self._publish(truth, session.report(self.now_ms))
        for _ in range(rng.randint(0, 120)):
            self.now_ms += rng.randint(0, 60)
            created_ms = self.now_ms + skew_ms - (rng.randint(0, 5000) if backdates else 0)
            window, sequence = session.assign(created_ms)
            if rng.random() < 0.03:
                session.give_back(window, sequence)
                continue
            truth.created_ms[sequence] = created_ms
            pending.append((window, sequence))
            if rng.random() < 0.2:
                rng.shuffle(pending)
                self._settle(session, stream, truth, pending, rng.randint(0, len(pending)))
            if rng.random() < 0.05:
                self._publish(truth, session.report(self.now_ms))
        end = rng.choice(("close", "close", "kill", "live"))
        if end == "close":
            self._settle(session, stream, truth, pending, len(pending) - rng.choice((0, 0, 1)))
            self._publish(truth, session.close(self.now_ms))
        for _, sequence in pending:
            if rng.random() < 0.5:
                self._write(stream, truth, sequence)
        if end == "live":
            self._publish(truth, session.report(self.now_ms))

    def _settle(self, session, stream, truth, pending, count) -> None:
        rng = self.random
        for _ in range(count):
            window, sequence = pending.pop()
            if rng.random() < self.unsure:
                if rng.random() < 0.5:
                    session.mark_failed(window, sequence)
                    continue
                if rng.random() < 0.5:
                    self._write(stream, truth, sequence)
                session.mark_ambiguous(window, sequence)
                continue
            if rng.random() >= self.loss_at_source:
                self._write(stream, truth, sequence)
                if rng.random() < self.double_at_source:
                    self._write(stream, truth, sequence)
            window.acknowledge(sequence, 10)

    def _write(self, stream: str, truth: Truth, sequence: int) -> None:
        partition = self.random.randrange(self.partition_count)
        truth.source.setdefault(sequence, []).append((partition, len(self.logs[partition])))
        self.logs[partition].append((stream, sequence))

    def _publish(self, truth: Truth, events) -> None:
        """Deliver events or not. The truth learns what was *said* in those that arrived."""
        for event in events:
            if self.random.random() < self.lose_events:
                continue
            self.delivered += [encode_event(event)] * self.random.choice((1, 1, 2))
            if isinstance(event, CountEvent):
                sets = (event.acknowledged, event.ambiguous, event.failed)
                truth.said[event.window_start_ms] = tuple(set(part) for part in sets)
            elif isinstance(event, StreamEvent):
                truth.announced = True
                truth.at_ms = event.at_ms
                truth.closed = truth.closed or event.state == CLOSED
                truth.last_assigned, truth.last_settled = event.last_assigned, event.last_settled
        truth.acknowledged = set().union(*(parts[0] for parts in truth.said.values()))
        truth.ambiguous = set().union(*(parts[1] for parts in truth.said.values()))
        truth.failed = set().union(*(parts[2] for parts in truth.said.values()))

    def _mirror(self) -> None:
        rng = self.random
        lags = rng.random() < 0.4
        for partition, log in self.logs.items():
            end = rng.randint(0, len(log)) if lags else len(log)
            self.positions[partition] = end
            gap = (0, 0)
            if rng.random() < 0.2 and end > 2:
                first = rng.randint(0, end - 1)
                gap = (first, rng.randint(first, end))
            self.gaps[partition] = gap
            for offset in range(end):
                stream, sequence = log[offset]
                if gap[0] <= offset < gap[1] or rng.random() < self.drop:
                    continue
                for _ in range(2 if rng.random() < self.repeat else 1):
                    self.truths[stream].aggregate[sequence] += 1
                    self.arrived[partition].append((stream, sequence))

    def _expire(self) -> None:
        expires = self.random.random() < 0.2
        for partition, log in self.logs.items():
            self.log_start[partition] = self.random.randint(0, len(log)) if expires else 0

    def cells(self, cut_at_bounds: bool) -> list[Cell]:
        cells = []
        for tier, cluster, logs in ((SOURCE, "ewr", self.logs), (AGGREGATE, "agg", self.arrived)):
            for partition, log in logs.items():
                first = self.log_start[partition] if tier == SOURCE else 0
                bounds = {first, len(log)}
                if tier == SOURCE and cut_at_bounds:
                    bounds |= {self.positions[partition], *self.gaps[partition]}
                while self.random.random() < 0.7:
                    bounds.add(self.random.randint(0, len(log)))
                cuts = sorted(bound for bound in bounds if first <= bound <= len(log))
                for start, end in pairwise(cuts):
                    cells += self._chunk(tier, cluster, partition, log, start, end)
        self.random.shuffle(cells)
        return cells

    def _chunk(self, tier, cluster, partition, log, start, end) -> list[Cell]:
        groups: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for offset in range(start, end):
            stream, sequence = log[offset]
            created_ms = self.truths[stream].created_ms[sequence]
            group = (stream, window_start_ms(created_ms, WINDOW_MS))
            groups.setdefault(group, []).append((offset, sequence))
        return [
            self._cell(tier, cluster, partition, start, stream, start_ms, members)
            for (stream, start_ms), members in groups.items()
        ]

    @staticmethod
    def _cell(tier, cluster, partition, chunk_start, stream, start_ms, members) -> Cell:
        distinct, repeats = count_repeats(np.array([sequence for _, sequence in members], dtype=np.uint64))
        ((base, bitmap),) = encode_bitmaps(distinct)
        return Cell(
            tier=tier,
            cluster=cluster,
            topic="flights",
            partition=partition,
            stream=stream,
            producer="",
            window_start_ms=start_ms,
            chunk_start=chunk_start,
            count=len(members),
            byte_count=10 * len(members),
            first_offset=members[0][0],
            last_offset=members[-1][0],
            base=base,
            bitmap=bitmap,
            repeats=tuple(repeats.items()),
        )

    def tiers(self) -> list[TierReading]:
        places = {partition: ("ewr", "flights", partition) for partition in self.logs}
        unread = [
            UnreadRange(places[partition], 0, start, "retention")
            for partition, start in self.log_start.items()
            if start > 0
        ]
        return [
            TierReading(SOURCE, unread=unread),
            TierReading(
                AGGREGATE,
                upstream=SOURCE,
                passed={places[p]: Passage(position) for p, position in self.positions.items()},
                gaps=[Gap(places[p], *gap, "oversized") for p, gap in self.gaps.items() if gap[0] < gap[1]],
            ),
        ]


@dataclass
class Findings:
    lost_at_source: set[int] = field(default_factory=set)
    lost_between: set[int] = field(default_factory=set)
    in_flight: set[int] = field(default_factory=set)
    explained: set[int] = field(default_factory=set)
    unknown: set[int] = field(default_factory=set)
    unreported: set[int] = field(default_factory=set)
    doubled_at_source: dict[int, int] = field(default_factory=dict)
    doubled_between: dict[int, int] = field(default_factory=dict)


def true_findings(world: World, truth: Truth) -> Findings:
    """What is so, record by record, with exact offsets and without any of the audit's code."""
    findings = Findings()
    reported = truth.acknowledged | truth.ambiguous | truth.failed
    expired_somewhere = any(world.log_start.values())
    seen = set()
    for sequence in truth.created_ms:
        readable = [c for c in truth.source.get(sequence, ()) if c[1] >= world.log_start[c[0]]]
        copies = truth.aggregate[sequence]
        if readable or copies:
            seen.add(sequence)
        if len(readable) > 1:
            findings.doubled_at_source[sequence] = len(readable) - 1
        if copies > max(1, len(readable)):
            findings.doubled_between[sequence] = copies - max(1, len(readable))
        if copies:
            continue
        if not readable:
            if sequence in truth.acknowledged:
                (findings.unknown if expired_somewhere else findings.lost_at_source).add(sequence)
        elif any(offset >= world.positions[partition] for partition, offset in readable):
            findings.in_flight.add(sequence)
        elif all(world.gaps[p][0] <= offset < world.gaps[p][1] for p, offset in readable):
            findings.explained.add(sequence)
        else:
            findings.lost_between.add(sequence)
    findings.unreported = seen - reported
    findings.unknown |= true_holes(world, truth, reported | seen)
    return findings


def true_holes(world: World, truth: Truth, accounted: set[int]) -> set[int]:
    alive = truth.announced and not truth.closed and world.now_ms <= truth.at_ms + LEASE_MS + GRACE_MS
    last = max([truth.last_assigned, *accounted])
    if alive:
        last = truth.last_settled
    return set(range(1, last + 1)) - accounted


def members(ranges) -> set[int]:
    return {sequence for first, last in ranges for sequence in range(first, last + 1)}


def found(rows) -> Findings:
    findings = Findings()
    for row in rows:
        findings.lost_at_source |= members(row.missing.get(LOST_AT_SOURCE, ()))
        findings.lost_between |= members(row.missing.get(LOST_BETWEEN, ()))
        for ranges in row.in_flight.values():
            findings.in_flight |= members(ranges)
        for ranges in row.explained.values():
            findings.explained |= members(ranges)
        findings.unknown |= members(row.unknown)
        findings.unreported |= members(row.unreported)
        for name, into in ((SOURCE, findings.doubled_at_source), (AGGREGATE, findings.doubled_between)):
            named = members(row.duplicates.get(name, ()))
            into.update(dict.fromkeys(named, 0))
            assert row.extra_copies.get(name, 0) >= len(named)
    return findings


def audit(world: World, stream: str, cells: list[Cell]):
    seen = merge_cells(cell for cell in cells if cell.stream == stream)
    return reconcile_stream(
        world.ledger.facts(stream),
        seen,
        world.tiers(),
        window_ms=WINDOW_MS,
        grace_ms=GRACE_MS,
        now_ms=world.now_ms,
    )


def check_rows(world: World, truth: Truth, rows) -> None:
    """The rows' plain figures, and that each row's verdict is the worst of what it names."""
    for row in rows:
        if row.window_start_ms is None:
            assert row.verdict is Verdict.UNKNOWN
            continue
        inside = {
            sequence
            for sequence, created_ms in truth.created_ms.items()
            if window_start_ms(created_ms, WINDOW_MS) == row.window_start_ms
        }
        named = found([row])
        losses = named.lost_at_source | named.lost_between
        doubled = named.doubled_at_source | named.doubled_between
        others = named.in_flight | named.explained | named.unknown | named.unreported
        assert (losses | set(doubled) | others) <= inside
        expected = Verdict.PROVEN
        if losses:
            expected = Verdict.LOSS
        elif doubled:
            expected = Verdict.DUPLICATE
        elif others:
            expected = Verdict.UNKNOWN
        assert row.verdict is expected
        assert row.published == len(truth.acknowledged & inside)
        assert row.seen[AGGREGATE] == len(inside & set(truth.aggregate))
        assert row.consumed[AGGREGATE] == sum(truth.aggregate[sequence] for sequence in inside)


def check_scenario(seed: int) -> None:
    world = World(seed)
    world.run()
    cells = world.cells(cut_at_bounds=True)
    all_rows = []
    for stream, truth in world.truths.items():
        rows = audit(world, stream, cells)
        all_rows += rows
        expected, actual = true_findings(world, truth), found(rows)
        copies = sum(row.extra_copies.get(SOURCE, 0) for row in rows)
        assert copies == sum(expected.doubled_at_source.values())
        copies = sum(row.extra_copies.get(AGGREGATE, 0) for row in rows)
        assert copies == sum(expected.doubled_between.values())
        expected.doubled_at_source = dict.fromkeys(expected.doubled_at_source, 0)
        expected.doubled_between = dict.fromkeys(expected.doubled_between, 0)
        assert actual == expected
        check_rows(world, truth, rows)
    check_overall(world, all_rows)


def check_overall(world: World, rows) -> None:
    """A proof is only given when everything that was acknowledged is there and nobody is silent."""
    if overall_verdict(rows) is not Verdict.PROVEN:
        return
    assert any(row.state is WindowState.SETTLED for row in rows)
    for stream, truth in world.truths.items():
        settled = {
            sequence
            for sequence in truth.acknowledged
            for row in rows
            if row.stream == stream
            and row.window_start_ms == window_start_ms(truth.created_ms[sequence], WINDOW_MS)
            and row.state is WindowState.SETTLED
        }
        assert settled <= set(truth.aggregate)


def check_uncut_scenario(seed: int) -> None:
    """Chunks cut anywhere: less may be decided, nothing may be decided wrongly."""
    world = World(seed)
    world.run()
    cells = world.cells(cut_at_bounds=False)
    for stream, truth in world.truths.items():
        expected, actual = true_findings(world, truth), found(audit(world, stream, cells))
        assert actual.lost_at_source == expected.lost_at_source
        assert actual.lost_between <= expected.lost_between
        assert actual.explained <= expected.explained
        undecided = actual.in_flight | actual.unknown
        assert expected.lost_between <= actual.lost_between | undecided
        assert expected.in_flight <= undecided


def seeds(block: int) -> range:
    alone = os.environ.get("MILLRACE_AUDIT_SEED")
    if alone is not None:
        return range(int(alone), int(alone) + 1)
    start = int(os.environ.get("MILLRACE_AUDIT_SEED_START", "20130101"))
    return range(start + block * SCENARIOS_A_TEST, start + (block + 1) * SCENARIOS_A_TEST)


@pytest.mark.parametrize("block", range(int(os.environ.get("RUNS", "600")) // SCENARIOS_A_TEST))
@pytest.mark.parametrize("check", [check_scenario, check_uncut_scenario])
def test_random_history_verdicts_equal_the_truth(check, block):
    for seed in seeds(block):
        try:
            check(seed)
        except Exception:
            print(f"MILLRACE_AUDIT_SEED={seed} fails in {check.__name__}")
            raise


def test_random_histories_cover_every_kind_of_finding():
    """The generator itself: a mutation that never happens proves nothing."""
    kinds: Counter[str] = Counter()
    for seed in range(150):
        world = World(seed)
        world.run()
        for truth in world.truths.values():
            for name, value in vars(true_findings(world, truth)).items():
                kinds[name] += bool(value)
            kinds["closed"] += truth.closed
            kinds["silent"] += not truth.closed
            kinds["unannounced"] += not truth.announced
    assert all(kinds[name] >= 3 for name in [*vars(Findings()), "closed", "silent", "unannounced"]), kinds
