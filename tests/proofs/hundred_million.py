"""A hundred million records in one run: `make audit-hundred-million [ARGS="--records 1M"]`.

    python -m tests.proofs.hundred_million [--records 100M] [--partitions 64] [--producers 1000]
        [--minutes 10] [--linger 1000] [--codec lz4] [--skewed] [--seed 7]

Records are what the run reads: half of them are in the source, as producers with hashed keys leave them, and
the same in the aggregate, as a mirror leaves them (`hashed_load`). A tenth of that is audited first, in a
world of its own: memory must be the same. Three records are lost and three repeated on the way; each must be
named, and nothing else. How dense cells are follows from `--minutes`: windows are one minute, and each
partition has a cell for every producer in each. The line of `cells` says it. With `--skewed` one producer
has a third of the records, and one partition half of them.

Exit status 0 when every verdict was exact; a mark that is missed makes it 1 only with all 100 million. Needs
20 GB of disk (lz4). Longest takes the source, whose small batches go to the broker one by one, some 57,000 a
second (`--linger 5000` makes them larger, and a producer that waits so long rarer).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from millrace.audit.contract.events import CLOSED
from tests.benchmarks.audit.bench_audit import parse_count
from tests.peak_memory import DRIVER, JVM, WORKER
from tests.proofs.audited import (
    COUNT,
    RECONCILE,
    REPORT,
    START,
    Audited,
    Truth,
    audit,
    end_tidily,
    megabytes,
    table,
    write_config,
)
from tests.proofs.hashed_load import (
    TOPIC,
    Sending,
    Written,
    count_events,
    drawn,
    even,
    stream_event,
)
from tests.proofs.world import BUILD, World

WHOLE = 100_000_000
MARK_RATE, MARK_GROWTH = 5_000_000, 1.1
PAST_MS = 1_200_000
FINDINGS, HOT_SHARE = 3, 0.5


@dataclass(frozen=True, slots=True)
class Run:
    """One size. `records` were read."""

    records: int
    found: Audited
    state_cells: str


@dataclass(frozen=True, slots=True)
class Share:
    """Records that are sent together, and those of them that are lost and that come twice on the way."""

    sending: Sending
    lost: list[int]
    repeated: list[int]

    @classmethod
    def of(cls, sending: Sending, seed: int) -> Share:
        count = min(FINDINGS, len(sending.who))
        lost, repeated = drawn(sending, count, seed), drawn(sending, count, seed + 1)
        return cls(sending, lost, [each for each in repeated if each not in lost])


def one_size(given: argparse.Namespace, records: int) -> tuple[Run, list[str]]:
    now_ms = time.time_ns() // 1_000_000
    span_ms = int(given.minutes * 60_000)
    shares = [
        Share.of(each, given.seed)
        for each in sendings(given, records // 2, now_ms - PAST_MS - span_ms, span_ms)
    ]
    with World(BUILD / "hundred-million", partitions=given.partitions) as world:
        world.make_topics()
        fill(world, shares)
        config = write_config(world.folder / "audit", world.bootstraps, keep="forever")
        found = audit(config)
        wrong = truth(shares).wrong(found)
        cells = cells_of(world, shares)
    return Run(int(found.cost.get("records", 0)), found, cells), wrong


def sendings(given: argparse.Namespace, count: int, start_ms: int, span_ms: int) -> list[Sending]:
    """All producers' records; with one that has a third of them, these apart."""

    def even_ones(producers: int, count: int, seed: int) -> Sending:
        return even(
            producers, count, start_ms, span_ms, given.partitions,
            linger_ms=given.linger, codec=given.codec, seed=seed, hot_share=HOT_SHARE if given.skewed else 0,
        )  # fmt: skip

    if not given.skewed:
        return [even_ones(given.producers, count, given.seed)]
    first = even_ones(1, count // 3, given.seed)
    others = even_ones(given.producers - 1, count - first.record_count, given.seed + 1)
    return [first, replace(others, who=others.who + 1, streams=others.streams + 1)]


def fill(world: World, shares: Sequence[Share]) -> None:
    """The source has all; in the aggregate records are missing, and others stand twice."""
    for tier in ("src", "agg"):
        begin, done = time.perf_counter(), Written()
        for each in shares:
            without, twice = (each.lost, each.repeated) if tier == "agg" else ([], [])
            done += world.send(each.sending, tier, without=without, twice=twice)
        took_s = time.perf_counter() - begin
        print(
            f"  {tier}: {done.record_count:,} records in {done.batch_count:,} batches, "
            f"{done.byte_count / 1e6:,.0f} MB, made in {took_s:.1f} s",
            flush=True,
        )
    now_ms = time.time_ns() // 1_000_000
    told = 0
    for sending in (each.sending for each in shares):
        told += world.tell(count_events(sending, now_ms))
        last = sending.assigned_after().tolist()
        words = zip(sending.who.tolist(), sending.streams.tolist(), last, strict=True)
        world.tell(stream_event(*each, None, now_ms) for each in ((n, s, CLOSED, at) for n, s, at in words))
    world.position(world.ends("src"))
    ends = sorted(world.ends("src").values())
    print(f"  {told:,} windows told; {max(ends) / sum(ends):.0%} of the records in one partition", flush=True)


def truth(shares: Sequence[Share]) -> Truth:
    count = sum(each.sending.record_count for each in shares)
    return Truth(
        count,
        {"src": count, "agg": count - sum(len(each.lost) for each in shares)},
        frozenset(each.sending.place(number) for each in shares for number in each.lost),
        frozenset(each.sending.place(number) for each in shares for number in each.repeated),
    )


def cells_of(world: World, shares: Sequence[Share]) -> str:
    import pyarrow.parquet as pq

    files = list((world.folder / "audit" / "audit-state" / "cells").rglob("*.parquet"))
    rows = sum(pq.read_metadata(path).num_rows for path in files)
    size = sum(path.stat().st_size for path in files)
    records = 2 * sum(each.sending.record_count for each in shares)
    return f"{rows:,} cells, {records / max(rows, 1):.1f} records each, {size / 1e6:,.1f} MB"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=parse_count, default=WHOLE)
    parser.add_argument("--partitions", type=int, default=64)
    parser.add_argument("--producers", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--linger", type=int, default=1000, help="ms in which a producer fills a batch")
    parser.add_argument("--codec", default="lz4")
    parser.add_argument("--skewed", action="store_true")
    parser.add_argument("--seed", type=int, default=time.time_ns() // 1_000_000 % 10**6)
    given = parser.parse_args()
    end_tidily()
    print(f"seed {given.seed}; {TOPIC} in {given.partitions} partitions, {given.producers:,} producers")
    runs, wrongs = [], []
    for records in (given.records // 10, given.records):
        print(f"{records:,} records", flush=True)
        run, wrong = one_size(given, records)
        runs.append(run)
        wrongs += wrong
        print(*(f"  WRONG {each}" for each in wrong), sep="\n", end="\n" if wrong else "", flush=True)
    print()
    print(summary_of(runs))
    small, large = (run.found for run in runs)
    rate = runs[1].records / max(large.without_start_s, 1e-9)
    marks = [
        (
            rate >= MARK_RATE,
            f"{rate / 1e6:.2f} M records/s without Spark's start (mark {MARK_RATE / 1e6:.0f})",
        ),
    ]
    for kind in (WORKER, JVM):  # in local[2] the JVM is the executor's as well as the driver's
        growth = large.peak_mb.get(kind, 0.0) / max(small.peak_mb.get(kind, 0.0), 1e-9)
        told = f"memory of {kind} {growth:.2f} times that of a tenth (mark {MARK_GROWTH})"
        marks.append((growth <= MARK_GROWTH, told))
    for reached, told in marks:
        print(f"{'reached' if reached else 'NOT REACHED'}: {told}")
    print("every verdict was exact" if not wrongs else f"{len(wrongs)} WRONG")
    missed = given.records >= WHOLE and not all(reached for reached, _ in marks)
    return 1 if wrongs or missed else 0


def summary_of(runs: list[Run]) -> str:
    columns = ("records", "start", "counting", "reconciling", "report", "M/s counting", "M/s", DRIVER, JVM)
    rows = []
    for run in runs:
        steps, peaks = run.found.steps, run.found.peak_mb
        seconds = [f"{steps.get(name, 0.0):.1f} s" for name in (START, COUNT, RECONCILE, REPORT)]
        rates = [
            f"{run.records / max(took, 1e-9) / 1e6:.2f}"
            for took in (steps.get(COUNT, 0.0), run.found.without_start_s)
        ]
        memory = [f"{peaks.get(kind, 0.0):,.0f} MB" for kind in (DRIVER, JVM, WORKER)]
        rows.append((f"{run.records:,}", *seconds, *rates, *memory))
    cells = "\n".join(f"{run.records:,} records: {run.state_cells}" for run in runs)
    return f"{table((*columns, WORKER), rows)}\n{cells}\n{megabytes(runs[-1].found.peak_mb)} at most"


if __name__ == "__main__":
    sys.exit(main())
