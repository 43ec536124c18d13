"""One random history of one topic, and its audits: what `test_end_to_end` runs.

`plan(seed)` is pure: a main fault, one for each seed in turn, and some that go with every other. `Scenario`
makes it happen and compares every row of every audit with the `Truth`.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from confluent_kafka import Producer, TopicPartition

from millrace.audit import job
from millrace.audit.config import AuditConfig, parse_config
from millrace.audit.consumer import AuditedConsumer
from tests.spark.end_to_end_mishaps import (
    UntoldSender,
    choose_spoilt,
    compare_doubts,
    learn_all,
    mishaps_of,
    start_skewed,
    write_strange_records,
)
from tests.spark.end_to_end_rows import RANKS, iso, kinds_of, name_of, numbers, status_of, told, wanted
from tests.spark.end_to_end_senders import NEVER_MS, CountingSender, MortalSender, Sender
from tests.spark.end_to_end_truth import WINDOW_MS, Group, Row, Truth
from tests.spark.end_to_end_world import AGGREGATE, DEADLINE_S, EVENTS_TOPIC, SOURCES, Logged, World
from tests.waiting import Deadline, patience

OLD_MS = 1_356_998_400_000  # 2013-01-01T00:00:00Z
SKEW_MS = 4 * 3_600_000
"""How far the audit's clock is ahead where a dead producer's lease must have run out."""

MAIN = (
    "drop",
    "group",
    "recreated",
    "expired-before",
    "content",
    "lag",
    "silent",
    "count-only",
    "job-killed",
    "transactions",
    "expired-after",
    "journal",
    "partitions-added",
    "several-runs",
    "too-large",
    "repeat",
    "repeated-at-source",
    "reorder",
    "own-clock",
    "old-and-audited-expired",
)
ALSO = (
    "drop",
    "repeat",
    "reorder",
    "repeated-at-source",
    "transactions",
    "count-only",
    "journal",
    "group",
    "foreign",
)
"""`group`: an audited group is a tier. `foreign`: to the audit the mirror is one without positions. And those
of `end_to_end_mishaps`."""

_CHILD = """
import json, os, signal, sys
from millrace.audit import job
from millrace.audit.config import parse_config
from millrace.audit.keeping.state import StateFolder
from millrace.audit.spark.spark_cells import RunCells

config, point, now_ms = parse_config(json.loads(sys.argv[1])), sys.argv[2], int(sys.argv[3])

def dying(original):
    def call(*given, **more):
        original(*given, **more)
        os.kill(os.getpid(), signal.SIGKILL)
    return call

if point == "counted":
    RunCells.count = dying(RunCells.count)
else:
    StateFolder.commit = dying(StateFolder.commit)
job.run(config, "local[1]", clock_ms=lambda: now_ms)
"""


@dataclass(frozen=True)
class Plan:
    """What happens. `kinds` has the main fault and the others."""

    seed: int
    kinds: frozenset[str]
    partitions: int
    sources: tuple[str, ...]

    def __contains__(self, kind: str) -> bool:
        return kind in self.kinds


def plan(seed: int) -> Plan:
    rng = random.Random(seed)
    main = MAIN[(seed - 1) % len(MAIN)]
    also = {kind for kind in ALSO if rng.random() < 0.3}
    if main in ("recreated", "expired-before", "expired-after", "group", "content"):
        also.discard("count-only")  # counts alone cannot tell what they have lost there
    if main in ("recreated", "expired-before", "content"):
        also.discard("repeated-at-source")
    gone = ("recreated", "expired-before", "expired-after", "old-and-audited-expired")
    if main in (*gone, "content", "count-only"):
        also.discard("group")
    if main in (*gone, "too-large", "count-only", "reorder"):
        also.discard("foreign")
    if "foreign" in also:  # it keeps the order, and counts alone cannot tell how far it is
        also -= {"reorder", "count-only"}
    if "group" in also:
        also.discard("count-only")
    if main == "content":
        also.discard("transactions")  # the changed record must arrive
    return Plan(
        seed,
        frozenset({main, *also, *mishaps_of(seed)}),
        partitions=rng.randint(1, 3),
        sources=SOURCES if rng.random() < 0.6 else SOURCES[:1],
    )


class Scenario:
    """`run` does it all. `found` counts what the audits had to name, by kind."""

    def __init__(self, world: World, folder: Path, plan: Plan) -> None:
        self.world, self.plan = world, plan
        self.rng = random.Random(plan.seed * 7919)
        self.topic = f"e2e-{plan.seed}-{time.time_ns()}"
        self.truth = Truth(self.topic)
        self.truth.content = "content" in plan
        self.found: Counter[str] = Counter()
        self.partitions = plan.partitions
        self.skew_ms = SKEW_MS if "silent" in plan else 0
        self.deeds: dict[str, set[str]] = {"lose": set(), "repeat": set(), "corrupt": set()}
        if "group" in plan:
            self.truth.group = Group(f"readers-{self.topic}", self.rng.choice([AGGREGATE, "ewr"]))
        self.truth.foreign = "foreign" in plan
        groups = {self.truth.group.cluster: [self.truth.group.name]} if self.truth.group else {}
        self.settings: dict[str, Any] = {
            "clusters": {
                name: {
                    "bootstrap": [world.bootstrap(name)],
                    "tier": "aggregate" if name == AGGREGATE else "source",
                }
                for name in (*SOURCES, AGGREGATE)
            },
            "topics": [self.topic],
            "window": f"{WINDOW_MS}ms",
            "grace": "0s",
            "content": self.truth.content,
            "groups": groups,
            "state": str(folder / "state"),
            "report": str(folder / "report"),
        }
        if self.truth.foreign:
            self.settings["clusters"][AGGREGATE]["mirror"] = "foreign"
        self.folder = folder

    @property
    def config(self) -> AuditConfig:
        return parse_config(self.settings)

    def run(self) -> None:
        plan, world = self.plan, self.world
        if "too-large" in plan:  # before the mirror makes it
            world.create(AGGREGATE, self.topic, self.partitions, {"max.message.bytes": "20000"})
        for source in plan.sources:
            world.create(source, self.topic, self.partitions)
        mishap_rng = random.Random(plan.seed * 104_729)
        untold = None
        if "lost-counts" in plan:  # before anybody else tells anything
            untold = UntoldSender(world, self.truth, mishap_rng, self.partitions, OLD_MS)
        skewed = []
        if "skewed-clocks" in plan:
            skewed = start_skewed(world, self.truth, mishap_rng, self.partitions)
        mortals = self._start_mortals()
        living = self._send_first()
        for mortal in mortals:
            mortal.die()
            mortal.learn()
        if untold is not None:
            untold.go_on()
        learn_all(skewed)
        if "corrupt-identity" in plan:
            write_strange_records(world, self.truth, "ewr", self.partitions, mishap_rng)
        if "repeated-at-source" in plan:
            self._repeat_at_source()
        self._carry()
        if "expired-after" in plan:
            self._expire("ewr")
        if "group" in plan:
            self._consume()
        if "job-killed" in plan:
            self._kill_a_job()
        if {"recreated", "several-runs", "job-killed", "old-and-audited-expired"} & plan.kinds:
            self.audit()
        if "old-and-audited-expired" in plan:
            self._expire("ewr")
        if "partitions-added" in plan:
            self.partitions += 1
            for source in plan.sources:
                world.widen(source, self.topic, self.partitions)
        if "recreated" in plan:
            self._recreate("ewr")
        self._send_second(living)
        self.audit()
        if "lag" in plan:
            world.resume(self.topic, plan.sources)
            self._carry()
            self.audit()

    # --- what is sent ----------------------------------------------------------------------------

    def _start_mortals(self) -> list[MortalSender]:
        found = []
        for kind in ("silent", "journal"):
            if kind in self.plan:
                journal = self.folder / "journal" if kind == "journal" else None
                given = {"partitions": self.partitions, "start_ms": OLD_MS, "journal": journal}
                found.append(MortalSender(self.world, self.truth, "ewr", f"{kind}@ewr", self.rng, **given))
        return found

    def _send_first(self) -> list[Sender]:
        """Two or three producers; those that live on are given back."""
        rng, plan = self.rng, self.plan
        counts = {
            f"first-{n}@{rng.choice(plan.sources) if n else 'ewr'}": rng.randint(80, 240)
            for n in range(rng.randint(2, 3))
        }
        if "count-only" in plan:
            counts["gateway@ewr"] = 120
        self._choose_victims(counts)
        living = []
        for name, count in counts.items():
            source = name.partition("@")[2]
            if name.startswith("gateway"):
                counting = CountingSender(self.world, self.truth, source, name, rng)
                counting.send(count, self.partitions, OLD_MS, 50)
                counting.close()
                continue
            sender = self._sender(name, transactional="transactions" in plan and name.startswith("first-0"))
            sender.send(count, self.partitions)
            if "too-large" in plan and name.startswith("first-0"):
                sender.send(2, self.partitions, size=60_000)
                sender.send(20, self.partitions)
            if plan.kinds & {"several-runs", "lag"} and name.startswith("first-1"):
                sender.report()
                living.append(sender)
            else:
                sender.close()
        return living

    def _send_second(self, living: list[Sender]) -> None:
        """More, by those that live and a new one."""
        plan = self.plan
        if plan.kinds & {"lag", "expired-before"}:
            self.world.pause(self.topic, plan.sources)
        for sender in living:
            sender.send(self.rng.randint(20, 60), self.partitions)
            sender.close()
        if {
            "recreated",
            "several-runs",
            "partitions-added",
            "lag",
            "expired-before",
            "job-killed",
        } & plan.kinds:
            if plan.kinds & {"recreated", "several-runs"}:
                self._choose_victims({"second@ewr": 100})
            sender = self._sender("second@ewr")
            sender.send(100, self.partitions)
            sender.close()
        if "expired-before" in plan:
            self._look()
            self._expire("ewr")
            self.world.resume(self.topic, plan.sources)
        if "lag" in plan:
            self._look()
        else:
            self._carry()

    def _sender(self, name: str, transactional: bool = False) -> Sender:
        own_clock = "own-clock" in self.plan and not name.startswith("first-1")
        return Sender(
            self.world,
            self.truth,
            name.partition("@")[2],
            name,
            self.rng,
            start_ms=None if own_clock else OLD_MS,
            transactional=transactional,
        )

    def _choose_victims(self, counts: dict[str, int]) -> None:
        """Of the records that are about to be sent: which the mirror will lose, repeat and change."""
        rng, plan = self.rng, self.plan
        numbered = [f"{name}#{n}" for name, count in counts.items() for n in range(1, count + 1)]
        rng.shuffle(numbered)
        if "content" in plan:
            victim = numbered.pop()
            self.deeds["corrupt"].add(victim)
            name, _, number = victim.partition("#")
            window = (
                int(number) * 50
            ) // WINDOW_MS  # nothing else happens in it, or it could not be compared
            numbered = [
                each
                for each in numbered
                if each.partition("#")[0] != name or (int(each.partition("#")[2]) * 50) // WINDOW_MS != window
            ]
        if "corrupt-identity" in plan and not self.truth.spoilt:
            named = [each for each in numbered if not each.startswith("gateway")]
            self.truth.spoilt = choose_spoilt(named, random.Random(plan.seed * 15_485_863))
            numbered = [each for each in numbered if each not in self.truth.spoilt]
        if "drop" in plan or "several-runs" in plan or "count-only" in plan:
            self.deeds["lose"] |= {numbered.pop() for _ in range(rng.randint(1, 9))}
            if "count-only" in plan:
                self.deeds["lose"].add("gateway@ewr#7")
        if "repeat" in plan or "count-only" in plan:
            self.deeds["repeat"] |= {numbered.pop() for _ in range(rng.randint(1, 6))}
            if "count-only" in plan:
                self.deeds["repeat"].add("gateway@ewr#70")
        self.deeds["repeat"] -= self.deeds["lose"]
        self.truth.lost |= self.deeds["lose"]
        self.truth.repeated |= self.deeds["repeat"]
        self.truth.changed |= self.deeds["corrupt"]
        harm = {kind: sorted(names) for kind, names in self.deeds.items()}
        self.world.harm(self.topic, **harm, spoil=self.truth.spoilt, reorder="reorder" in plan)

    def _repeat_at_source(self) -> None:
        """An application that sends again what the cluster has already, as it is."""
        client = Producer({"bootstrap.servers": self.world.bootstrap("ewr"), "acks": "all"})
        messages = [
            each
            for each in self.world.readers["ewr"].messages(self.topic)
            if not each.value().startswith((b"gateway", b"journal", b"silent", b"stranger"))
            and each.value().partition(b"|")[0].decode() not in self.truth.changed
        ]
        for message in self.rng.sample(messages, 3):
            client.produce(
                self.topic,
                message.value(),
                message.key(),
                message.partition(),
                headers=message.headers(),
                timestamp=message.timestamp()[1],
            )
        assert client.flush(patience(DEADLINE_S)) == 0

    # --- what happens to it ----------------------------------------------------------------------

    def _look(self) -> None:
        for source in self.plan.sources:
            log = self.world.readers[source].log(self.topic)
            self.truth.look(source, log, len(self.world.readers[source].ends(self.topic)))

    def _carry(self, old_ids: dict[tuple[str, int], str] | None = None) -> None:
        """Let the mirror carry everything, and see that the aggregate holds what it must."""
        self._look()
        self.world.wait_until_carried(self.topic, self.plan.sources, old_ids or self._old_ids)
        known = self.world.positions.known()
        for source in self.plan.sources:
            positions = {
                p: known[source, self.topic, p][0]
                for p in self.truth.logs[source]
                if (source, self.topic, p) in known
            }
            self.truth.carry(source, positions, self._gaps(source))
        assert self.world.copies(self.topic) == self.truth.arrivals()

    _old_ids: dict[tuple[str, int], str] | None = None

    def _gaps(self, source: str) -> dict[int, dict[int, str]]:
        """The mirror's own words on what it could not carry; only offsets that the topic has now."""
        found: dict[int, dict[int, str]] = {}
        if not self.plan.kinds & {"too-large", "expired-before"}:
            return found
        for event in self.world.events(AGGREGATE).values():
            if event["type"] == "gap" and (event["source"], event["topic"]) == (source, self.topic):
                offsets = dict.fromkeys(range(event["from"], event["to"]), event["class"])
                found.setdefault(event["partition"], {}).update(offsets)
        return found

    def _expire(self, source: str) -> None:
        """Retention takes some of each partition: of what is not carried yet where the mirror is paused."""
        for number, partition in self.truth.logs[source].items():
            paused = "expired-before" in self.plan
            offsets = sorted(o for o in partition.records if not paused or o >= partition.position)
            if len(offsets) < 2:
                continue
            partition.start = offsets[self.rng.randrange(1, len(offsets))]
            self.world.expire(source, self.topic, number, partition.start)

    def _recreate(self, source: str) -> None:
        known = self.world.positions.known()
        self._old_ids = {
            (source, number): known[source, self.topic, number][1]
            for number in self.truth.logs[source]
            if (source, self.topic, number) in known
        }
        self.truth.recreate(source)
        self.world.recreate(source, self.topic, self.partitions)

    def _consume(self) -> None:
        """A group reads everything but some records, which it jumps over, and commits."""
        group = self.truth.group
        assert group is not None
        log = self.world.readers[group.cluster].log(self.topic)
        jumps = self._jumps(log)
        consumer = AuditedConsumer(
            {
                "bootstrap.servers": self.world.bootstrap(group.cluster),
                "group.id": group.name,
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "millrace.window.ms": WINDOW_MS,
                "millrace.report.interval.ms": NEVER_MS,
            }
        )
        last = {each.partition: each.offset for each in log}
        consumer.assign([TopicPartition(self.topic, number, 0) for number in last])
        deadline = Deadline(lambda: f"the group reads {last}", within_s=DEADLINE_S)
        while last:
            deadline.check()
            message = consumer.poll(0.1)
            if message is None:
                continue
            assert message.error() is None
            place = (message.partition(), message.offset())
            name = message.value().partition(b"|")[0].decode()
            if group.cluster != AGGREGATE or self.truth.spoilt.get(name, "name") == "name":
                group.got[name] += 1  # another it cannot name
            if place in jumps:
                consumer.seek(TopicPartition(self.topic, place[0], jumps[place]))
            if last.get(place[0]) == place[1]:
                del last[place[0]]
        consumer.commit(asynchronous=False)
        consumer.close()
        group.passed = {each.name for each in log}

    def _jumps(self, log: list[Logged]) -> dict[tuple[int, int], int]:
        """{(partition, offset of the record after which it jumps): where to}, not over a first one."""
        jumps = {}
        for number in {each.partition for each in log}:
            records = [each for each in log if each.partition == number]
            size = self.rng.randint(1, 4)
            if len(records) > size + 1:
                at = self.rng.randrange(1, len(records) - size)
                jumps[number, records[at - 1].offset] = records[at + size].offset
        return jumps

    # --- the audits ------------------------------------------------------------------------------

    def _now_ms(self) -> int:
        return time.time_ns() // 1_000_000 + self.skew_ms

    def _kill_a_job(self) -> None:
        """kill -9 of a job between two runs; one that died after its commit has told nobody."""
        point = self.rng.choice(["counted", "committed"])
        given = [json.dumps(self.settings), point, str(self._now_ms())]
        child = subprocess.run([sys.executable, "-c", _CHILD, *given], timeout=patience(240), check=False)
        assert child.returncode == -9
        self.found[f"killed when {point}"] += 1
        if point == "committed":
            self.truth.about_to_audit()
            self.truth.audited()

    def audit(self) -> dict[str, Any]:
        """Run the job once and compare everything with the truth."""
        self.truth.about_to_audit()
        expected = self.truth.expected()
        now_ms = self._now_ms()
        result = job.run(self.config, "local[2]", clock_ms=lambda: now_ms)
        assert result.summary is not None, result.problem
        assert result.problem == ""
        rows = pq.read_table(self.config.report / "reconciliation.parquet").to_pylist()
        self._compare_rows(rows, expected)
        self._compare_summary(result.summary, expected)
        status = status_of(expected.values())
        assert result.exit_status == (status or 2 if result.summary["untrusted"] else status)
        self.truth.audited()
        return result.summary

    def _compare_rows(self, rows: list[dict[str, Any]], expected: dict[tuple[str, int | None], Row]) -> None:
        said = {(name_of(row), row["window_start_ms"]): row for row in rows}
        assert len(said) == len(rows)
        assert set(said) == set(expected), f"rows {set(said) ^ set(expected)} are said or wanted only"
        for key, row in expected.items():
            self._leave_in_flight(row, told(said[key])["in_flight"])
            here, there = told(said[key]), wanted(row)
            differences = {name: (here[name], there[name]) for name in here if here[name] != there[name]}
            assert not differences, (
                f"{key}: said and wanted {differences}; {said[key]['detail']}\n{self._told_by(*key)}"
            )
            self.found.update(kinds_of(key, row, self.truth))

    def _leave_in_flight(self, row: Row, said: dict[tuple[str, str], set[int]]) -> None:
        """What need not be named as lost yet, because nothing tells how far a foreign mirror is, may be
        called in flight."""
        for hop, sequences in row.may_lag.items():
            waiting = sequences & said.get(hop, set())
            if waiting:
                row.in_flight.setdefault(hop, set()).update(waiting)
                row.missing[hop] -= waiting
                if not row.missing[hop]:
                    del row.missing[hop]
                row.decide("PROVEN")

    def _told_by(self, producer: str, start_ms: int | None) -> str:
        """Every event of a producer on a window, for whoever must find out why the audit said something."""
        messages = self.world.readers["ewr"].messages(EVENTS_TOPIC)
        told = [message.value() or b"" for message in messages]
        of_it = [each for each in told if f'"{producer}"'.encode() in each and self.topic.encode() in each]
        return "\n".join(
            each.decode() for each in of_it if f"{start_ms},".encode() in each or b'"stream",' in each
        )

    def _compare_summary(self, summary: dict[str, Any], expected: dict[tuple[str, int | None], Row]) -> None:
        rows = expected.values()
        counts = summary["counts"]
        assert counts["acknowledged"] == sum(row.published for row in rows)
        assert counts["missing"] == sum(
            sum(map(len, row.missing.values())) + sum(row.missing_count.values()) for row in rows
        )
        assert counts["duplicates"] == sum(sum(row.extra_copies.values()) for row in rows)
        for name in ("unreported", "unknown"):
            assert counts[name] == sum(len(getattr(row, name)) for row in rows), name
        for name in ("in_flight", "explained"):
            assert counts[name] == sum(len(each) for row in rows for each in getattr(row, name).values())
        for tier, seen in counts["seen"].items():
            assert seen == sum(row.seen.get(tier, 0) for row in rows), tier
        losses = {
            (name_of(loss), loss["window_start"], tuple(loss["lost_between"])): numbers(loss["sequences"])
            for loss in summary["losses"]
        }
        named = {
            (producer, iso(start_ms), hop): sequences
            for (producer, start_ms), row in expected.items()
            for hop, sequences in [*row.missing.items(), *((hop, set[int]()) for hop in row.missing_count)]
        }
        assert losses == named and len(losses) == len(summary["losses"])
        doubled = {
            (name_of(each), each["window_start"], each["tier"]): (
                numbers(each["sequences"]),
                each["count"],
            )
            for each in summary["duplicates"]
        }
        assert doubled == {
            (producer, iso(start_ms), tier): (row.duplicates.get(tier, set()), count)
            for (producer, start_ms), row in expected.items()
            for tier, count in row.extra_copies.items()
        }
        doubts = compare_doubts(summary, self.truth)
        self.found["identity not to be read"] += bool(summary["untrusted"])
        assert "untrusted_waivers" not in summary
        assert summary["content"]["differs"] == sum(row.content_differs for row in rows)
        settled = [row.verdict for row in rows if row.state == "SETTLED"]
        loud = [row.verdict for row in rows if row.verdict in ("LOSS", "DUPLICATE")]
        worst = (
            max([*settled, *loud], key=RANKS.index) if settled else max([*loud, "UNKNOWN"], key=RANKS.index)
        )
        if doubts:
            worst = max(worst, "UNKNOWN", key=RANKS.index)
        assert summary["verdict"] == worst
