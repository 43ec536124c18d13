"""The metadata of a billion records: `make audit-billion [ARGS="--producers 200 --hours 2"]`.

    python -m tests.proofs.billion_metadata [--producers 10000] [--hours 24] [--records-a-window 69]
        [--seed 7]

A billion messages a day from 10,000 producers, in windows of one minute, are 14.4 million windows. Not their
records are made, but what the audit has of them: every producer's events, in the events topic of a
broker, and their cells in two tiers, in a state as a run leaves it that has counted and united them
(`cell_union`: one a stream, window and tier; cells of one partition each come of `hundred_million`). Three
acknowledged records are in no cell, and must be named. Then the job runs as on any day: it reads the
events, reconciles, and writes state and report; and once more, with nothing new. A tenth of the producers is
done first, so that what grows can be told from what does not.

Time by step and the memory of the driver and of a worker are printed; the mark is a driver of at most 1 GB,
and it makes the exit status 1 only at the whole size. Exit status 0 when every verdict was exact.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyroaring import BitMap

from millrace.audit.contract.events import CLOSED
from millrace.audit.keeping.state import Commit, ReadPosition, StateFolder
from millrace.audit.scanning.cell_columns import column_of
from millrace.audit.scanning.cell_rows import CELL_SCHEMA
from millrace.audit.scanning.cells import NO_PLACE, NO_TIME
from millrace.broker.client.cluster import Cluster
from tests.peak_memory import DRIVER, JVM, WORKER
from tests.proofs.audited import (
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
from tests.proofs.hashed_load import TOPIC, WINDOW_MS, count_text, producer_name, stream_event
from tests.proofs.world import BUILD, World

HOUR_MS = 3_600_000
WHOLE = 14_400_000
MARK_MB = 1_000
FINDINGS = 3
VALUE_BYTES = 140
FILE_PRODUCERS = 200  # of a Parquet file, some 300,000 cells


@dataclass(frozen=True, slots=True)
class Day:
    """Each producer sends `records` in each of so many windows from `start_ms` on, numbered from 1."""

    producers: int
    windows: int
    records: int
    start_ms: int

    @property
    def record_count(self) -> int:
        return self.producers * self.windows * self.records

    def events(self, at_ms: int) -> Iterator[tuple[bytes, bytes]]:
        """As producers tell them: each its windows, then that it is closed."""
        for number in range(self.producers):
            stream, name = f"{number + 1:016x}", producer_name(number)
            for window in range(self.windows):
                first, last = window * self.records + 1, (window + 1) * self.records
                start_ms = self.start_ms + window * WINDOW_MS
                yield count_text(stream, name, start_ms, first, last, VALUE_BYTES, at_ms)
            last = self.windows * self.records
            yield stream_event(number, number + 1, CLOSED, last, None, at_ms)

    def cells(
        self, tier: str, topic_id: str, first: int, end: int, without: set[tuple[int, int]]
    ) -> pa.Table:
        """The united cells of producers `first` to `end`. `without` are (producer, sequence)."""
        count = (end - first) * self.windows
        windows = np.tile(np.arange(self.windows), end - first)
        bitmaps = [
            BitMap(range(window * self.records + 1, (window + 1) * self.records + 1)).serialize()
            for window in range(self.windows)
        ]
        numbers = np.repeat(np.arange(first, end), self.windows)
        sets = pa.array(bitmaps, pa.binary()).take(pa.array(windows))
        counts = np.full(count, self.records, np.int64)
        if any(first <= producer < end for producer, _ in without):
            changed = sets.to_pylist()
            for producer, sequence in without:
                if first <= producer < end:
                    at = (producer - first) * self.windows + (sequence - 1) // self.records
                    changed[at] = (BitMap.deserialize(changed[at]) - BitMap([sequence])).serialize()
                    counts[at] -= 1
            sets = pa.array(changed, pa.binary())
        streams = pa.array([f"{number + 1:016x}" for number in range(first, end)])
        names = pa.array([producer_name(number) for number in range(first, end)])
        places = pa.array(numbers - first)
        values = {
            **dict.fromkeys(("tier", "cluster"), tier),
            "topic": TOPIC,
            "topic_id": topic_id,
            **dict.fromkeys(("partition", "chunk_start", "first_offset", "last_offset"), NO_PLACE),
            "stream": streams.take(places),
            "producer": names.take(places),
            "window_start_ms": self.start_ms + windows * WINDOW_MS,
            "count": counts,
            "byte_count": counts * VALUE_BYTES,
            **dict.fromkeys(("first_append_ms", "last_append_ms"), NO_TIME),
            "base": 0,
            "bitmap": sets,
            "unsequenced_count": 0,
            "tail": False,
        }
        columns = [_column(values.get(each.name), each.type, count) for each in CELL_SCHEMA]
        return pa.Table.from_arrays(columns, schema=CELL_SCHEMA)


def _column(value: object, kind: pa.DataType, count: int) -> pa.Array:
    if value is None:
        return pa.nulls(count, kind)
    return column_of(value, kind, count)


def write_state(folder: Path, world: World, day: Day, without: set[tuple[int, int]]) -> int:
    """The state of a run that has counted the whole day. Returns its bytes of cells."""
    state = StateFolder.open(folder)
    run, names, size = "00000001-counted", [], 0
    (folder / "cells" / run).mkdir(parents=True)
    offsets = {}
    for tier in ("src", "agg"):
        topic_id = asyncio.run(_topic_id(world.bootstraps[tier]))
        for partition in range(world.partitions):
            offsets[f"{tier}/{TOPIC}/{partition}"] = ReadPosition(0, topic_id)
        for first in range(0, day.producers, FILE_PRODUCERS):
            end = min(first + FILE_PRODUCERS, day.producers)
            cells = day.cells(tier, topic_id, first, end, without)
            name = f"cells/{run}/{tier}-{first:06d}.parquet"
            pq.write_table(cells, folder / name, compression="zstd")
            names.append(name)
            size += (folder / name).stat().st_size
    state.commit(
        Commit(number=1, at_ms=day.start_ms, window_ms=WINDOW_MS, cells=names, offsets=offsets,
               folded_ms=time.time_ns() // 1_000_000)
    )  # fmt: skip
    return size


async def _topic_id(bootstrap: str) -> str:
    async with Cluster("load", [bootstrap]) as cluster:
        return str((await cluster.metadata([TOPIC])).topics[TOPIC].topic_id)


def one_size(given: argparse.Namespace, producers: int) -> tuple[list[tuple[str, int, Audited]], list[str]]:
    now_ms = time.time_ns() // 1_000_000
    windows = int(given.hours * 60)
    start_ms = (now_ms - windows * WINDOW_MS - HOUR_MS) // HOUR_MS * HOUR_MS
    day = Day(producers, windows, given.records_a_window, start_ms)
    luck = random.Random(given.seed)
    lost = {
        (number, luck.randrange(1, windows * given.records_a_window + 1))
        for number in luck.sample(range(producers), FINDINGS)
    }
    count = day.record_count
    truth = Truth(
        count,
        dict.fromkeys(("src", "agg"), count - len(lost)),
        frozenset((producer_name(number), sequence) for number, sequence in lost),
    )
    runs, wrongs = [], []
    with World(BUILD / "billion-metadata", partitions=1) as world:
        world.make_topics()
        world.position({0: 0})
        begin = time.perf_counter()
        told = world.tell(day.events(now_ms))
        events_s = time.perf_counter() - begin
        config = write_config(world.folder / "audit", world.bootstraps, keep="forever")
        size = write_state(world.folder / "audit" / "audit-state", world, day, lost)
        print(
            f"{producers * windows:,} windows of {producers:,} producers ({count:,} records): {told:,} "
            f"events in {events_s:.0f} s, {size / 1e6:,.0f} MB of cells",
            flush=True,
        )
        for what in ("first", "again"):
            found = audit(config)
            wrong = truth.wrong(found)
            print(f"  {what}: status {found.status}, {found.seconds:.0f} s", *wrong, sep="\n    ", flush=True)
            wrongs += wrong
            runs.append((what, producers * windows, found))
    return runs, wrongs


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--producers", type=int, default=10_000)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--records-a-window", type=int, default=69)
    parser.add_argument("--seed", type=int, default=time.time_ns() // 1_000_000 % 10**6)
    given = parser.parse_args()
    end_tidily()
    print(f"seed {given.seed}", flush=True)
    runs: list[tuple[str, int, Audited]] = []
    wrongs: list[str] = []
    for producers in (max(FINDINGS, given.producers // 10), given.producers):
        done, wrong = one_size(given, producers)
        runs += done
        wrongs += wrong
    rows = []
    for what, windows, found in runs:
        seconds = [f"{found.steps.get(name, 0.0):.1f}" for name in (START, RECONCILE, REPORT)]
        each = f"{found.seconds / windows * 1e6:,.0f}"
        memory = [f"{found.peak_mb.get(kind, 0.0):,.0f}" for kind in (DRIVER, JVM, WORKER)]
        state = f"{found.cost.get('state_bytes', 0) / 1e6:,.1f}"
        rows.append((f"{windows:,}", what, *seconds, f"{found.seconds:.1f}", each, *memory, state))
    columns = ("windows", "run", "events, start s", "reconcile s", "report s", "all s", "µs a window")
    print()
    print(table((*columns, "driver MB", "JVM MB", "a worker MB", "state MB"), rows))
    small, large = runs[0], runs[2]
    driver_mb = large[2].peak_mb.get(DRIVER, 0.0)
    growth = (driver_mb - small[2].peak_mb.get(DRIVER, 0.0)) * 1e6 / max(large[1] - small[1], 1)
    reached = driver_mb <= MARK_MB
    print(
        f"{'reached' if reached else 'NOT REACHED'}: driver {driver_mb:,.0f} MB (mark {MARK_MB:,} MB with "
        f"{WHOLE:,} windows); it grows by {growth:,.0f} bytes a window, so {WHOLE:,} take about "
        f"{(driver_mb * 1e6 + growth * max(WHOLE - large[1], 0)) / 1e6:,.0f} MB"
    )
    print("every verdict was exact" if not wrongs else f"{len(wrongs)} WRONG")
    return 1 if wrongs or (large[1] >= WHOLE and not reached) else 0


if __name__ == "__main__":
    sys.exit(main())
