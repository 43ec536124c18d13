"""Random histories of several audit runs over one state: lag, restarts of the mirror, retention, topics made
anew, open transactions, lost events. Whatever the audit *names* must be so, and PROVEN must be true.

The truth is kept record by record in plain Python. The audit sees what a capture would see: events, pinned
offsets, positions, and the records of the ranges that it planned itself, run after run. Every scenario is a
seed; a failure prints it.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from millrace.audit.capture import Capture, MirrorPosition, PartitionPin
from millrace.audit.cells import Cell, count_repeats, encode_bitmaps
from millrace.audit.config import parse_config
from millrace.audit.events import EventLedger, encode_event
from millrace.audit.fact_rows import facts_table, restore
from millrace.audit.reading_plan import hidden_by_transactions, passages, plan_ranges
from millrace.audit.reconcile import UnreadRange
from millrace.audit.session import ProducerIdentity, StreamSession
from millrace.audit.state import Commit, ReadPosition
from millrace.audit.verdict_rows import ClusterReading, Reconciler
from millrace.audit.verdicts import Verdict, WindowState, overall_verdict

WINDOW_MS, GRACE_MS, LEASE_MS = 1000, 500, 4000
CONFIG = parse_config(
    {
        "clusters": {
            "ewr": {"bootstrap": ["h:1"], "tier": "source"},
            "agg": {"bootstrap": ["h:2"], "tier": "aggregate"},
        },
        "topics": ["flights"],
        "window": f"{WINDOW_MS}ms",
        "grace": f"{GRACE_MS}ms",
    }
)
PARTITIONS = 2


@dataclass
class Log:
    """One partition: (stream, sequence, created_ms) by offset; `start` after retention."""

    topic_id: str
    records: list[tuple[str, int, int]] = field(default_factory=list)
    start: int = 0
    hidden: int = 0
    """records at the end that an open transaction keeps back"""

    @property
    def end(self) -> int:
        return len(self.records)


class World:
    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        chance = self.rng.choice
        self.loss_at_source, self.drop, self.repeat = (
            chance((0, 0, 0.02)),
            chance((0, 0, 0.03)),
            chance((0, 0.02)),
        )
        self.lose_events = chance((0, 0, 0.3))
        self.unsure = chance((0, 0.03))
        self.calm = self.rng.random() < 0.4
        self.generation = 1
        self.now_ms = 1_000_000
        self.source = [Log("s1") for _ in range(PARTITIONS)]
        self.aggregate = [Log("a1") for _ in range(PARTITIONS)]
        self.carried = [0] * PARTITIONS
        self.told: list[tuple[int, str]] = [(0, "s1")] * PARTITIONS
        self.sessions: dict[str, tuple[StreamSession, list]] = {}
        self.created: dict[str, dict[int, int]] = {}
        self.acknowledged: dict[str, set[int]] = {}
        self.written: dict[str, Counter[int]] = {}
        self.arrived: dict[str, Counter[int]] = {}
        self.dropped: set[tuple[str, int]] = set()
        self.deleted: set[tuple[str, int]] = set()
        self.events: list[tuple[bytes, bytes]] = []
        self.commit, self.kept, self.facts = Commit(), [], None
        self.proofs = 0

    def step(self) -> None:
        self.now_ms += self.rng.randint(0, 400)
        actions = [self._produce, self._produce, self._produce, self._report, self._mirror, self._mirror]
        if not self.calm:
            actions += [self._restart_mirror, self._expire, self._recreate, self._transact]
        actions += [self._end]
        self.rng.choices(
            actions,
            [8, 8, 8, 8, 8, 8, 1, 0.5, 0.3, 1, 2][: len(actions)] if not self.calm else [8, 8, 8, 8, 8, 8, 2],
        )[0]()

    def _produce(self) -> None:
        rng = self.rng
        if not self.sessions or rng.random() < 0.02:
            stream = f"{len(self.created) + 1:016x}"
            session = StreamSession(
                ProducerIdentity("5" * 16, f"p{stream[-2:]}"), "flights", stream,
                window_ms=WINDOW_MS, lease_ms=LEASE_MS, now_ms=self.now_ms,
            )  # fmt: skip
            self.sessions[stream] = (session, [])
            self.created[stream], self.acknowledged[stream] = {}, set()
            self.written[stream], self.arrived[stream] = Counter(), Counter()
        stream = rng.choice(list(self.sessions))
        session, pending = self.sessions[stream]
        for _ in range(rng.randint(1, 8)):
            window, sequence = session.assign(self.now_ms)
            self.created[stream][sequence] = self.now_ms
            pending.append((window, sequence))
        while len(pending) > rng.randint(0, 4):
            window, sequence = pending.pop(0)
            if rng.random() < self.unsure:
                if rng.random() < 0.5:
                    self._write(stream, sequence)
                session.mark_ambiguous(window, sequence)
                continue
            if rng.random() >= self.loss_at_source:
                self._write(stream, sequence)
            window.acknowledge(sequence, 10)
            self.acknowledged[stream].add(sequence)

    def _write(self, stream: str, sequence: int) -> None:
        log = self.rng.choice(self.source)
        log.records.append((stream, sequence, self.created[stream][sequence]))
        log.hidden += bool(log.hidden)
        self.written[stream][sequence] += 1

    def _report(self) -> None:
        for session, _ in self.sessions.values():
            self._publish(session.report(self.now_ms))

    def _publish(self, events) -> None:
        for event in events:
            lost = self.rng.random() < self.lose_events
            if not lost:
                self.events.append(encode_event(event))

    def _end(self) -> None:
        if self.sessions:
            session, _pending = self.sessions.pop(self.rng.choice(list(self.sessions)))
            if self.rng.random() < 0.7:
                self._publish(session.close(self.now_ms))

    def _mirror(self) -> None:
        for number, log in enumerate(self.source):
            if self.told[number][1] != log.topic_id and self.rng.random() < 0.5:
                continue  # it has not noticed that the topic is another one
            if self.told[number][1] != log.topic_id:
                self.carried[number] = 0
            end = (
                self.rng.randint(min(self.carried[number], log.end), log.end - log.hidden)
                if (log.end - log.hidden > self.carried[number])
                else self.carried[number]
            )
            for offset in range(max(self.carried[number], log.start), end):
                stream, sequence, created_ms = log.records[offset]
                if self.rng.random() < self.drop:
                    self.dropped.add((stream, sequence))
                    continue
                for _ in range(2 if self.rng.random() < self.repeat else 1):
                    self.aggregate[number].records.append((stream, sequence, created_ms))
                    self.arrived[stream][sequence] += 1
            self.carried[number] = max(self.carried[number], end)
            if self.rng.random() < 0.8:
                self.told[number] = (self.carried[number], log.topic_id)

    def _restart_mirror(self) -> None:
        for number, log in enumerate(self.source):
            position, topic_id = self.told[number]
            if topic_id == log.topic_id:
                self.carried[number] = position

    def _expire(self) -> None:
        for log in (*self.source, *self.aggregate):
            if self.rng.random() < 0.3:
                log.start = self.rng.randint(log.start, log.end)

    def _recreate(self) -> None:
        if not self.commit.number:
            return  # an audit that never looked cannot know that there was another topic
        self.generation += 1
        self.deleted |= {(stream, sequence) for log in self.source for stream, sequence, _ in log.records}
        self.source = [Log(f"s{self.generation}") for _ in range(PARTITIONS)]
        self.carried = [0] * PARTITIONS

    def _transact(self) -> None:
        log = self.rng.choice(self.source)
        log.hidden = (
            0 if log.hidden else min(self.rng.randint(0, 3), log.end - max(log.start, self._passed(log)))
        )

    def _passed(self, log: Log) -> int:
        number = self.source.index(log)
        return self.carried[number]

    def audit(self):
        """One run: capture, plan, count, reconcile, commit."""
        ledger = EventLedger()
        origins = {} if self.facts is None else restore(self.facts, ledger)
        captured = Capture(self.now_ms, ledger, origins)
        for key, value in self.events:
            ledger.add(key, value)
            stream = key.split(b"/")[1].decode()
            captured.origins.setdefault(stream, set()).add("ewr")
        for cluster, logs in (("ewr", self.source), ("agg", self.aggregate)):
            for number, log in enumerate(logs):
                captured.pins.append(
                    PartitionPin(
                        cluster,
                        "flights",
                        "flights",
                        number,
                        log.topic_id,
                        log.start,
                        max(log.end - log.hidden, log.start),
                        log.end,
                    )
                )
        for number, (position, topic_id) in enumerate(self.told):
            captured.positions.append(
                MirrorPosition("agg", "m", "ewr", "flights", number, position, topic_id)
            )
        ranges, lost = plan_ranges(captured, CONFIG, self.commit)
        offsets, kept, tail = dict(self.commit.offsets), list(self.kept), []
        for each in ranges:
            log = (self.source if each.cluster == "ewr" else self.aggregate)[each.partition]
            (tail if each.tail else kept).extend(self._count(each, log))
            if not each.tail:
                offsets[f"{each.cluster}/{each.topic}/{each.partition}"] = ReadPosition(
                    each.end_offset, each.topic_id
                )
        commit = Commit(number=self.commit.number + 1, offsets=offsets, unread=[*self.commit.unread, *lost])
        facts = facts_table(ledger, captured.origins)
        rows = self._reconcile(captured, commit, facts, [*kept, *tail])
        if self.rng.random() < 0.8:  # else the job died before it committed
            self.commit, self.kept, self.facts = commit, kept, facts
        return rows

    def _reconcile(self, captured, commit, facts, cells):
        unread: dict[str, list[UnreadRange]] = {}
        for note in [*commit.unread, *hidden_by_transactions(captured)]:
            unread.setdefault(note.cluster, []).append(
                UnreadRange(
                    (note.cluster, note.topic, note.partition),
                    note.first_offset,
                    note.end_offset,
                    note.cause,
                    note.until_ms,
                )
            )
        same = {"flights": "flights"}
        reconciler = Reconciler(
            clusters=[
                ClusterReading("ewr", True, same, unread.get("ewr", ()), same),
                ClusterReading("agg", False, same, unread.get("agg", ()), same),
            ],
            passed=passages(captured),
            gaps={},
            window_ms=WINDOW_MS,
            grace_ms=GRACE_MS,
            now_ms=self.now_ms,
            topics=("flights",),
        )
        by_stream = {row["stream"]: row for row in facts.to_pylist()}
        rows = []
        for stream in sorted({*by_stream, *(cell.stream for cell in cells)}):
            known = [by_stream[stream]] if stream in by_stream else []
            own = [cell for cell in cells if cell.stream == stream]
            rows += [row for row, _ in reconciler.verdicts(own, known)]
        return rows

    def _count(self, each, log: Log) -> list[Cell]:
        groups: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for offset in range(each.first_offset, each.end_offset):
            stream, sequence, created_ms = log.records[offset]
            group = (stream, created_ms - created_ms % WINDOW_MS)
            groups.setdefault(group, []).append((offset, sequence))
        cells = []
        for (stream, start_ms), members in groups.items():
            distinct, repeats = count_repeats(np.array([s for _, s in members], dtype=np.uint64))
            ((base, bitmap),) = encode_bitmaps(distinct)
            cells.append(
                Cell(
                    tier=each.tier,
                    cluster=each.cluster,
                    topic=each.topic,
                    partition=each.partition,
                    stream=stream,
                    producer="",
                    window_start_ms=start_ms,
                    chunk_start=each.first_offset,
                    count=len(members),
                    byte_count=0,
                    first_offset=members[0][0],
                    last_offset=members[-1][0],
                    base=base,
                    bitmap=bitmap,
                    repeats=tuple(repeats.items()),
                    topic_id=each.topic_id,
                )
            )
        return cells

    def check(self, rows) -> None:
        for row in rows:
            self._check_named(row)
        if overall_verdict(rows) is Verdict.PROVEN:
            self.proofs += 1
            for row in rows:
                self._check_proof(row)

    def _check_named(self, row) -> None:
        stream = row.stream
        waiting = {
            (record[0], record[1])
            for number, log in enumerate(self.source)
            for record in log.records[self.carried[number] if self.told[number][1] == log.topic_id else 0 :]
        }
        for hop, ranges in row.missing.items():
            for sequence in members(ranges):
                assert not self.arrived[stream][sequence], f"{sequence} arrived, yet lost between {hop}"
                assert (stream, sequence) not in waiting, f"{sequence} is on its way, yet lost between {hop}"
                if hop == ("produced", "ewr"):
                    assert sequence in self.acknowledged[stream]
                    gone = (stream, sequence) in self.deleted  # before the audit ever saw that topic
                    assert gone or not self.written[stream][sequence], f"{sequence} was written"
                else:
                    assert self.written[stream][sequence]
        for tier, ranges in row.duplicates.items():
            copies = self.written if tier == "ewr" else self.arrived
            assert all(copies[stream][sequence] > 1 for sequence in members(ranges)), f"duplicates in {tier}"

    def _check_proof(self, row) -> None:
        """Every record acknowledged in a settled window is in the aggregate, exactly once."""
        if row.state is not WindowState.SETTLED or row.window_start_ms is None:
            return
        for sequence in self.acknowledged[row.stream]:
            if row.window_start_ms <= self.created[row.stream][sequence] < row.window_end_ms:
                assert self.arrived[row.stream][sequence] == 1, f"{row.stream} {sequence} in a proof"


def members(ranges) -> list[int]:
    return [sequence for first, last in ranges for sequence in range(first, last + 1)]


def history(seed: int) -> tuple[World, Counter[str]]:
    world, kinds = World(seed), Counter()
    try:
        for number in range(world.rng.randint(1, 6)):
            for _ in range(world.rng.randint(1, 40)):
                world.step()
            if number and world.calm:
                world._mirror()
            world.now_ms += world.rng.choice((0, 100, 2000, 9000))
            rows = world.audit()
            kinds.update(str(Verdict(row.verdict)) for row in rows)
            world.check(rows)
    except Exception:
        print(f"MILLRACE_AUDIT_RUNS_SEED={seed} fails")
        raise
    kinds["proofs"] += world.proofs
    return world, kinds


def test_what_is_named_over_many_runs_is_so_and_what_is_proven_is_true():
    alone = os.environ.get("MILLRACE_AUDIT_RUNS_SEED")
    count = int(os.environ.get("RUNS", "150"))
    total: Counter[str] = Counter()
    for seed in [int(alone)] if alone else range(count):
        total += history(seed)[1]
    if alone is None:
        assert all(total[kind] for kind in ("LOSS", "DUPLICATE", "UNKNOWN", "PROVEN", "proofs")), total
