"""Thirty days in an hour: `make audit-month [DAYS=3] [RECORDS=20000]`.

    python -m tests.proofs.month [--days 30] [--records 1M] [--producers 1000] [--partitions 256] [--keep 1d]
        [--seed 7]

Each day so many records of producers with hashed keys are written to a real broker, as such producers leave
them, a real mirror carries them to another, and at the day's end the audit runs, with a clock that is a day
further each time; windows are one minute. On every day, too:

- three records were acknowledged and are not in the log; two stand twice in it, one more in the aggregate;
- a tenth of the producers is cut off for the last two hours, whose records arrive on the next day;
- a twentieth of the producers restarts, and goes on under another stream;
- the mirror is killed while it carries and started again, and then one of the two brokers is.

Every audit must name each finding of all days so far, and nothing else: exit status 1 when one did not. What
was acknowledged and seen must be all that was sent, less the windows that earlier audits have proven and let
go (`keep`): with the default of a day the evidence of two days is there, on day 2 as on day 30. After each
audit the files of the state are made a day older, for what is left over is cleared away by the files' age.

A row a day has the run's seconds by step, the state on disk and the memory; the last day is compared with the
second. The marks (1.2 times each, and an hour for all) make the exit status 1 only with all thirty days.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from millrace.audit.contract.events import CLOSED, HEARTBEAT
from millrace.audit.keeping.state import StateFolder
from millrace.audit.keeping.verdict_files import own_lines, read_spans
from tests.benchmarks.audit.bench_audit import parse_count
from tests.cluster.mirror_process import MirrorProcess
from tests.peak_memory import DRIVER, WORKER
from tests.proofs.audited import (
    COUNT,
    RECONCILE,
    REPORT,
    START,
    Audited,
    Truth,
    audit,
    end_tidily,
    table,
    write_config,
)
from tests.proofs.hashed_load import TOPIC, Sending, count_events, drawn, stream_event
from tests.proofs.world import BUILD, World
from tests.waiting import until

DAY_MS, HOUR_MS = 86_400_000, 3_600_000
LATE_MS = 2 * HOUR_MS
LATE_SHARE, RESTART_SHARE = 10, 20
LOSSES, REPEATS_AT_SOURCE, REPEATS_IN_AGGREGATE = 3, 2, 1
WHOLE_DAYS = 30
MARK = 1.2
MARK_S = 3_600.0
MIRROR_TIMEOUT_S = 1_800.0
NOTICED_MS = HOUR_MS
"""So long after midnight the audit runs."""


@dataclass(slots=True)
class Producers:
    """How far each of them is, and what is known to be true so far."""

    streams: np.ndarray
    assigned: np.ndarray
    late: list[Sending] = field(default_factory=list)
    truth: Truth = field(default_factory=lambda: Truth(0, {"src": 0, "agg": 0}))
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    day: int
    found: Audited
    made_s: float
    disk_bytes: int
    wrong: list[str]


def let_go(folder: Path) -> int:
    """Records of the windows that the audits so far have proven, once each in every tier, and let go."""
    state = StateFolder.open(folder)
    commit = state.latest()
    if commit.number == 0:
        return 0
    pruned = own_lines(state, commit.verdicts)[1], read_spans(state, commit.verdicts)
    return sum(sum(each["published"].to_pylist()) for each in pruned)


def make_older(folder: Path, by_ms: int) -> None:
    for path in [folder, *folder.rglob("*")]:
        stat = path.stat()
        os.utime(path, (stat.st_atime - by_ms / 1000, stat.st_mtime - by_ms / 1000))


class Month:
    """The world of one run of this proof."""

    def __init__(self, given: argparse.Namespace, world: World) -> None:
        self.given, self.world = given, world
        count = given.producers
        self.producers = Producers(np.arange(1, count + 1, dtype=np.int64), np.zeros(count, np.int64))
        self.start_ms = (time.time_ns() // 1_000_000 // DAY_MS - given.days - 2) * DAY_MS
        self.mirror = MirrorProcess(
            world.folder / "mirror", world.bootstraps["agg"], {"src": world.bootstraps["src"]}, topics=[TOPIC]
        )
        self.config = write_config(world.folder / "audit", world.bootstraps, keep=given.keep)

    def live(self, day: int) -> Row:
        """One day: sent, carried, told, audited."""
        begin = time.perf_counter()
        now_ms = self.start_ms + (day + 1) * DAY_MS + NOTICED_MS
        prompt, late, afterwards = self._sendings(day)
        luck = self.given.seed + 10 * day
        findings = drawn(prompt, LOSSES + REPEATS_AT_SOURCE + REPEATS_IN_AGGREGATE, luck)
        lost, twice = findings[:LOSSES], findings[LOSSES:-REPEATS_IN_AGGREGATE]
        again = findings[-REPEATS_IN_AGGREGATE:]
        arrived = [*self.producers.late, prompt, late]
        for sending in arrived:
            if sending is prompt:
                self.world.send(sending, "src", without=lost, twice=twice)
            else:
                self.world.send(sending, "src")
        self._carry(day)
        self.world.send(prompt, "agg", only=again)
        for sending in arrived:
            self.world.tell(count_events(sending, now_ms))
        self._move_on(prompt, late, afterwards)
        self.world.tell(self._words(day, late, now_ms))
        count = sum(sending.record_count for sending in arrived)
        truth = self.producers.truth
        self.producers.truth = Truth(
            truth.acknowledged + count,
            {tier: seen + count - len(lost) for tier, seen in truth.seen.items()},
            truth.losses | {prompt.place(number) for number in lost},
            truth.duplicates | {prompt.place(number) for number in [*twice, *again]},
        )
        made_s = time.perf_counter() - begin
        state = self.world.folder / "audit" / "audit-state"
        gone = let_go(state)
        found = audit(self.config, now_ms=now_ms)
        disk = sum(path.stat().st_size for path in state.rglob("*") if path.is_file())
        make_older(state, DAY_MS)
        truth = self.producers.truth
        seen = {tier: count - gone for tier, count in truth.seen.items()}
        expected = replace(truth, acknowledged=truth.acknowledged - gone, seen=seen)
        return Row(day + 1, found, made_s, disk, expected.wrong(found))

    def _sendings(self, day: int) -> tuple[Sending, Sending, Sending]:
        """Of those who are cut off for no time, and of those who are: what arrives today, and tomorrow."""
        who = np.arange(self.given.producers, dtype=np.int64)
        is_late = (who + day) % LATE_SHARE == 0
        start_ms = self.start_ms + day * DAY_MS
        rounds = max(2, self.given.records // self.given.producers)
        tomorrow = max(1, rounds * LATE_MS // DAY_MS)

        def of(chosen: np.ndarray, rounds: int, from_ms: int, span_ms: int) -> Sending:
            return Sending(
                who[chosen], self.producers.streams[chosen], self.producers.assigned[chosen].copy(),
                rounds * int(chosen.sum()), start_ms + from_ms, span_ms, self.given.partitions,
                seed=self.given.seed + day,
            )  # fmt: skip

        prompt = of(~is_late, rounds, 0, DAY_MS)
        late = of(is_late, rounds - tomorrow, 0, DAY_MS - LATE_MS)
        afterwards = replace(of(is_late, tomorrow, DAY_MS - LATE_MS, LATE_MS), assigned=late.assigned_after())
        return prompt, late, afterwards

    def _move_on(self, prompt: Sending, late: Sending, afterwards: Sending) -> None:
        for sending in (prompt, late, afterwards):
            self.producers.assigned[sending.who] = sending.assigned_after()
        self.producers.late = [afterwards]

    def _words(self, day: int, late: Sending, now_ms: int) -> Iterator[tuple[bytes, bytes]]:
        """Every producer's word on its stream; some have ended it and go on under another one."""
        end_ms = self.start_ms + (day + 1) * DAY_MS
        told_by_late = dict(zip(late.who.tolist(), late.assigned_after().tolist(), strict=True))
        producers = self.producers
        producers.generation += 1
        for number in range(self.given.producers):
            stream, last = int(producers.streams[number]), int(producers.assigned[number])
            if number in told_by_late:
                promise_ms = end_ms - LATE_MS
                yield stream_event(number, stream, HEARTBEAT, told_by_late[number], promise_ms, now_ms)
            elif (number + 3 * day) % RESTART_SHARE == 0:
                yield stream_event(number, stream, CLOSED, last, None, now_ms)
                producers.streams[number] = (producers.generation << 32) + number + 1
                producers.assigned[number] = 0
            else:
                yield stream_event(number, stream, HEARTBEAT, last, end_ms, now_ms)

    def _carry(self, day: int) -> None:
        """Until the aggregate has all that the source has; the mirror and a broker die on the way."""
        before = self.world.ends("agg")
        self.mirror.start()
        try:
            self._wait(lambda: self.world.ends("agg") != before, "the mirror carries")
            self.mirror.kill()
            self.mirror.start()
            broker = self.world.brokers["src" if day % 2 else "agg"]
            broker.kill()
            broker.end_session()
            broker.start()
            self._wait(self._is_carried, "all is carried")
            if status := self.mirror.terminate():
                raise RuntimeError(f"the mirror ended with {status}:\n{self.mirror.log[-3000:]}")
        finally:
            self.mirror.kill()

    def _is_carried(self) -> bool:
        status: dict[str, Any] = self.mirror.status()
        partitions = [each for each in status.get("partitions", []) if each["topic"] == TOPIC]
        return len(partitions) == self.given.partitions and all(
            each.get("lag_records") == 0 and each["outstanding_bytes"] == 0 for each in partitions
        )

    def _wait(self, condition: Any, what: str) -> None:
        until(condition, what, within_s=MIRROR_TIMEOUT_S, every_s=0.2, logs_of=[self.mirror])


def told(rows: list[Row]) -> str:
    columns = ("day", "made s", START, COUNT, RECONCILE, REPORT, "audit s", "state MB", "on disk MB")
    cells = []
    for row in rows:
        found = row.found
        seconds = [f"{found.steps.get(step, 0.0):.1f}" for step in (START, COUNT, RECONCILE, REPORT)]
        state = f"{found.cost.get('state_bytes', 0) / 1e6:.2f}"
        memory = [f"{found.peak_mb.get(kind, 0.0):,.0f}" for kind in (DRIVER, WORKER)]
        disk = f"{row.disk_bytes / 1e6:.2f}"
        cells.append((row.day, f"{row.made_s:.0f}", *seconds, f"{found.seconds:.1f}", state, disk, *memory))
    return table((*columns, "driver MB", "a worker MB"), cells)


def marks(rows: list[Row]) -> list[tuple[bool, str]]:
    """The last day beside the second."""
    second, last = rows[1], rows[-1]
    pairs = [
        ("run time", second.found.seconds, last.found.seconds),
        ("state", second.found.cost.get("state_bytes", 0), last.found.cost.get("state_bytes", 0)),
        ("what is on the disk", second.disk_bytes, last.disk_bytes),
    ]
    return [
        (now <= MARK * then, f"{what} of day {last.day} is {now / max(then, 1e-9):.2f} times that of day 2")
        for what, then, now in pairs
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--days", type=int, default=WHOLE_DAYS)
    parser.add_argument("--records", type=parse_count, default=1_000_000, help="a day")
    parser.add_argument("--producers", type=int, default=1000)
    parser.add_argument("--partitions", type=int, default=256)
    parser.add_argument("--keep", default="1d", help="the audit's keep")
    parser.add_argument("--seed", type=int, default=time.time_ns() // 1_000_000 % 10**6)
    given = parser.parse_args()
    end_tidily()
    print(f"seed {given.seed}; {given.days} days of {given.records:,} records", flush=True)
    rows: list[Row] = []
    wrongs: list[str] = []
    begin = time.monotonic()
    with contextlib.ExitStack() as stack:
        world = stack.enter_context(World(Path(BUILD / "month"), partitions=given.partitions))
        world.make_topics()
        month = Month(given, world)
        stack.callback(month.mirror.kill)
        for day in range(given.days):
            row = month.live(day)
            rows.append(row)
            wrongs += row.wrong
            truth = month.producers.truth
            print(
                f"day {row.day}: made in {row.made_s:.0f} s, audited in {row.found.seconds:.0f} s, "
                f"{len(truth.losses)} losses and {len(truth.duplicates)} repeats so far, "
                f"{'WRONG' if row.wrong else 'exact'}",
                *row.wrong,
                sep="\n    ",
                flush=True,
            )
    print()
    print(told(rows))
    reached = [(now, f"{what} (mark {MARK})") for now, what in marks(rows)] if len(rows) > 1 else []
    taken_s = time.monotonic() - begin
    reached.append((taken_s <= MARK_S, f"{len(rows)} days took {taken_s:,.0f} s (mark {MARK_S:,.0f})"))
    for is_reached, what in reached:
        print(f"{'reached' if is_reached else 'NOT REACHED'}: {what}")
    print("every verdict was exact" if not wrongs else f"{len(wrongs)} WRONG")
    missed = given.days >= WHOLE_DAYS and not all(is_reached for is_reached, _ in reached)
    return 1 if wrongs or missed else 0


if __name__ == "__main__":
    sys.exit(main())
