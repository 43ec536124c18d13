"""One run: places, a load, a witness, and round after round of events, waiting and judgement.

`Run.round` is the story: events, everything back, then all that was acknowledged until now must be in the
aggregate within a time, while the load goes on; then everything that was read is judged. `Run.finish` halts
the load and judges the whole. `Run.report` is for a person who was not there, `Run.table` for one who looks
at a long run.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tests.cluster.faults.timeline import Timeline
from tests.cluster.mirror_faults import spared_memory, summary
from tests.cluster.mirror_faults.audited_end import audit
from tests.cluster.mirror_faults.checks import Verdict, judge
from tests.cluster.mirror_faults.events import Events
from tests.cluster.mirror_faults.links import NamespaceLinks, ProxyLinks, SlowableNetwork
from tests.cluster.mirror_faults.load import Load
from tests.cluster.mirror_faults.places import MIRROR, NODES, Places
from tests.cluster.mirror_faults.plan import SOURCES, SPARED, TARGET, Event, Kind, rounds
from tests.cluster.mirror_faults.records import Gap, Journal, Stream
from tests.cluster.mirror_faults.witness import Witness, gap_events, has_begun_with_all, read_again_at
from tests.waiting import Deadline, patience

ARRIVE_TIMEOUT_S = 90.0
START_TIMEOUT_S = 120.0
WARM_UP_S = 1.5
TAIL_LINES = 60
MOUNT_MIB = 1 << 10
SUSPECT = "Traceback (most recent call last)"


class Run:
    """`problems` is empty as long as every promise was kept."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        *,
        pair: str,
        delivery: str,
        namespaces: bool,
        events: int | Iterable[tuple[Event, ...]],
        batches_per_s: float,
        disk_mib: int = MOUNT_MIB,
        sabotage: str | None = None,
        judged_as: str | None = None,
        arrive_s: float = ARRIVE_TIMEOUT_S,
        spares: bool = False,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """`events`: how many the seed is to bring, or the rounds that there are to be. `spares`: nothing
        befalls a further worker, whose memory is judged in the end."""
        self.seed, self.delivery = seed, delivery
        self.problems: list[str] = []
        self.verdict = Verdict()
        self.event_counts: Counter[str] = Counter()
        self.timeline = Timeline(say)
        self._is_finishing = False
        self._arrive_s = arrive_s
        self._exactly_once = (judged_as or delivery) == "exactly_once"
        self._folder = folder
        network: SlowableNetwork = NamespaceLinks(NODES) if namespaces else ProxyLinks()
        self.places = Places(
            network,
            folder,
            pair,
            self.timeline,
            delivery=delivery,
            small_disk_mib=disk_mib if namespaces else None,
            sabotage=sabotage,
            spares=spares,
        )
        absent = set() if namespaces else {Kind.DISK_FULL}
        absent |= set() if network.can_slow else {Kind.SLOW_TARGET}
        self.timeline.note(f"seed {seed}, {pair}, {delivery}; links: {network.description}")
        if absent:
            self.timeline.note(f"not possible here: {', '.join(kind.name for kind in absent)}")
        kinds = [kind for kind in Kind if kind not in absent]
        self._plan: Iterator[tuple[Event, ...]] = (
            rounds(seed, events, kinds) if isinstance(events, int) else iter(events)
        )
        bootstraps = {name: self.places.servers[name].bootstrap for name in SOURCES}
        self.load = Load(bootstraps, seed, batches_per_s)
        self._has_foreign_sources = pair.startswith("kafka")  # of ours a second copy is a breach
        self._at_source: dict[Stream, Counter[int]] = {}
        self.witness = Witness(self.places.servers["agg"].bootstrap)
        self.first_memory: dict[str, float] = {}
        self.last_memory: dict[str, float] = {}
        self.spared_mb: list[float] = []
        self.round_count = 0
        self._started = time.monotonic()

    def start(self) -> None:
        self.places.start_servers()
        self.load.start()
        for name in self.places.workers:
            self.places.start_worker(name)
        self._until(self.witness.topics_exist, "the mirror creates its topics")
        self.witness.start()
        target = self.places.servers[TARGET].bootstrap
        self._until(lambda: has_begun_with_all(target, MIRROR), "the mirror begins with every partition")
        time.sleep(WARM_UP_S)
        self._started = time.monotonic()
        self.first_memory = self._memory()
        self.timeline.note(f"the mirror is up: {self.load.record_count} records acknowledged")

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = Deadline(what, within_s=START_TIMEOUT_S)
        while not condition():
            self.places.tend()
            if deadline.has_passed or self.places.problems:
                raise RuntimeError(f"not so: {what}\n" + "\n".join(self.places.tails(30)))
            time.sleep(0.1)

    def stop(self) -> None:
        self.witness.stop()
        self.load.stop()
        self.places.stop()

    # -- one round -----------------------------------------------------------------------------------

    def round(self) -> bool | None:
        """Whether every promise was kept; None when there are no more events."""
        events = next(self._plan, None)
        if events is None:
            return None
        self.round_count += 1
        self.event_counts.update(event.kind.name for event in events)
        Events(self.places, self.load).run(events)
        self.places.wait_until_serving()
        kept = self._arrived_and_judged()
        if (spared := self.places.workers.get(SPARED)) is not None:
            self.spared_mb.append(spared.memory_mb())
        return kept

    def finish(self) -> bool:
        """Halts the load and judges all of it."""
        self._is_finishing = True
        self.load.halt()
        self.timeline.note(f"nothing is written any more: {self.load.record_count} records acknowledged")
        self._arrived_and_judged()
        self._end_workers()
        self.witness.wait_until_quiet()
        kept = self._arrived_and_judged()
        for name, worker in self.places.workers.items():
            if SUSPECT in worker.log:
                at = worker.log.index(SUSPECT)
                self.problems.append(f"{name} has a traceback:\n{worker.log[at : at + 3_000]}")
        self.problems += spared_memory.problems(self.spared_mb)
        return kept and not self.problems

    def audit(self) -> bool:
        """What the product's own audit says of the audited part, after `finish` or a broken round."""
        self.load.halt()
        bootstraps = {name: server.bootstrap for name, server in self.places.servers.items()}
        began = time.monotonic()
        found = audit(self._folder / "audit", bootstraps)
        took_s = time.monotonic() - began
        self.timeline.note(f"the audit took {took_s:.0f} s: status {found.status}\n{found.said.rstrip()}")
        if found.status != 0:
            self.problems.append(f"the audit ended with status {found.status}: {found.said.strip()}")
            return False
        known = self.load.audited_count
        if (found.acknowledged, found.arrived) != (known, known):
            self.problems.append(
                f"the audit counts {found.acknowledged} acknowledged and {found.arrived} arrived records; "
                f"its producers were told of {known}"
            )
            return False
        return True

    def _end_workers(self) -> None:
        """An orderly end, after which nothing can come any more. A worker that was started a moment ago does
        not even handle signals yet."""
        deadline = Deadline("every worker has a share", within_s=START_TIMEOUT_S)
        while not all(worker.has_joined for worker in self.places.workers.values()):
            if deadline.has_passed:
                self.problems.append("a worker that was started again has no share")
                break
            self.places.tend()
            time.sleep(0.1)
        self.last_memory = self._memory()
        for name, worker in self.places.workers.items():
            worker.meant_to_run = False
            if worker.is_running and (status := worker.terminate()) != 0:
                self.problems.append(f"{name} was asked to stop: status {status}")

    def _arrived_and_judged(self) -> bool:
        healed = time.monotonic()
        up_to = self.load.runs_now()
        verdict = self._judge(up_to)
        is_late = False
        while verdict.missing and not is_late and not self._is_broken(verdict):
            is_late = time.monotonic() - healed > patience(self._arrive_s)
            self.places.tend()
            time.sleep(0.25)
            verdict = self._judge(up_to)
        self.verdict = verdict
        if verdict.missing and not is_late:
            self.problems.append(
                f"{verdict.lost_count} records had not arrived when something else was found"
            )
            verdict.missing.clear()
        self.problems += self._breaches(verdict)
        now_ms = time.time_ns() // 1_000_000
        for journal in self.load.journals:
            if journal.ended_ms is not None and journal.settled_ms is None and not verdict.missing:
                journal.settled_ms = now_ms
        self.timeline.note(
            f"{sum(self.event_counts.values())} events, {time.monotonic() - healed:.1f} s after the last: "
            f"{self.load.record_count} acknowledged, {self.witness.record_count} read, "
            f"lost {verdict.lost_count}, explained {verdict.explained_count}, "
            f"duplicated {verdict.duplicate_count}, twice at the source {verdict.source_duplicate_count}"
        )
        return not self.problems

    def _judge(self, up_to: dict[Stream, int]) -> Verdict:
        journals = list(self.load.journals)
        verdict = self._judged(journals, [], up_to)
        if self._is_finishing or any(stream in verdict.missing for stream in self._ended_streams()):
            verdict = self._judged(journals, gap_events(self.places.servers["agg"].bootstrap), up_to)
        return verdict

    def _judged(self, journals: list[Journal], gaps: list[Gap], up_to: dict[Stream, int]) -> Verdict:
        def judged() -> Verdict:
            with self.witness.lock:
                return judge(
                    journals,
                    self.witness.seen,
                    gaps,
                    exactly_once=self._exactly_once,
                    up_to=up_to,
                    at_source=self._at_source,
                )

        verdict = judged()
        if not (self._exactly_once and verdict.duplicate_count and self._has_foreign_sources):
            return verdict
        # Before the mirror is blamed: what does the source's own log say?
        with self.witness.lock:
            doubtful = [
                stream
                for stream, found in self.witness.seen.items()
                if found.again - self._at_source.get(stream, Counter())
            ]
        for stream in doubtful:
            self._at_source[stream] = read_again_at(self.places.servers[stream.source].bootstrap, stream)
        return judged()

    def _ended_streams(self) -> set[Stream]:
        return {journal.stream for journal in list(self.load.journals) if journal.ended_ms is not None}

    def _is_broken(self, verdict: Verdict) -> bool:
        return bool(
            verdict.breaches
            or self.witness.problems
            or self.witness.failure
            or self.load.failure
            or self.places.problems
        )

    def _breaches(self, verdict: Verdict) -> list[str]:
        found = [*verdict.lines(), *self.witness.problems, *self.places.problems]
        return found + [each for each in (self.witness.failure, self.load.failure) if each]

    def _memory(self) -> dict[str, float]:
        return {name: worker.memory_mb() for name, worker in self.places.workers.items()}

    # -- for people ----------------------------------------------------------------------------------

    def table(self) -> str:
        return summary.table(
            minutes=(time.monotonic() - self._started) / 60,
            event_counts=self.event_counts,
            round_count=self.round_count,
            acknowledged=self.load.record_count,
            carried=self.witness.record_count,
            verdict=self.verdict,
            ended_count=self.places.ended_count,
            memory_mb={
                name: (self.first_memory.get(name, 0.0), self.last_memory.get(name, 0.0))
                for name in self.places.workers
            },
            spared_mb=spared_memory.early_and_late(self.spared_mb),
        )

    def report(self) -> str:
        return "\n".join(
            [
                f"seed {self.seed}, round {self.round_count}: {len(self.problems)} promises broken",
                *(f"  {problem}" for problem in self.problems),
                "---- what happened",
                *self.timeline.lines,
                *self.places.tails(TAIL_LINES),
                f"---- everything is in {self._folder}",
            ]
        )
