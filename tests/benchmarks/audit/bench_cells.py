"""What cells of one record cost: to be made of what was counted, and to be added up by every run after it.

    python -m tests.benchmarks.audit.bench_cells [--cells 1000000] [--partitions 67] [--one-by-one 50000]

Keys that are hashed over partitions make cells of one record: a producer's window is a cell in each of some
67 partitions. The same cells are made and added up in columns, as the audit does, and one by one, with
pyroaring and `merge_cells`, which is what they must equal; of the latter only so many, and both in one run.
The windows' verdicts are then made of the columns of two tiers, before and after a fold has united what is
proven. CPU time; no broker, no Spark, one core.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyroaring import BitMap, BitMap64

from millrace.audit.contract.event_values import CLOSED, CountEvent, StreamEvent
from millrace.audit.contract.events import EventLedger
from millrace.audit.contract.header import HEADER_KEY, encode_identity, encode_prefix
from millrace.audit.reconciliation.reconcile import Passage
from millrace.audit.reconciliation.verdict_rows import ClusterReading, Reconciler
from millrace.audit.runs.fact_rows import facts_table
from millrace.audit.scanning import scan
from millrace.audit.scanning.cell_rows import CELL_SCHEMA, RowPlace, cell_batches, cells_of
from millrace.audit.scanning.cell_union import unite
from millrace.audit.scanning.cells import merge_cells
from millrace.audit.scanning.counting import CellCounter
from millrace.audit.scanning.range_reader import index_fetched
from millrace.audit.scanning.stream_cells import StreamCells
from millrace.broker.protocol.records import Record, build_batch

WINDOW_MS = 60_000
STREAM = 1


def counted(count: int) -> CellCounter:
    """A counter that has met one record of a stream in each of so many windows."""
    prefix = encode_prefix(f"{STREAM:016x}")
    counter = CellCounter(WINDOW_MS, 1 << 20)
    for first in range(0, count, 5_000):
        identities = (
            encode_identity(prefix, number + 1, number * WINDOW_MS, b"feed@host")
            for number in range(first, min(first + 5_000, count))
        )
        records = [Record(None, b"", ((HEADER_KEY, each),), 0, at) for at, each in enumerate(identities)]
        fetched = index_fetched(bytes(build_batch(records, base_offset=first)))
        counter.count(fetched.buffer, fetched.index, 0, 1 << 62)
    return counter


def in_columns(counter: CellCounter, place: RowPlace) -> pa.Table:
    return pa.Table.from_batches(cell_batches(place, counter.take(), 1 << 20, 10_000), CELL_SCHEMA)


def one_by_one(counter: CellCounter, place: RowPlace) -> pa.Table:
    """A bitmap and a row for each cell."""
    rows = []
    for group in counter.take().groups.tolist():
        bitmap = BitMap()
        bitmap.add_range(group[scan.G_FIRST_OFFSET] + 1, group[scan.G_LAST_OFFSET] + 2)
        bitmap.run_optimize()
        rows.append(
            {
                "tier": place.tier,
                "cluster": place.cluster,
                "topic": place.topic,
                "topic_id": place.topic_id,
                "partition": place.partition,
                "stream": f"{group[scan.G_STREAM]:016x}",
                "producer": "feed@host",
                "window_start_ms": group[scan.G_WINDOW],
                "chunk_start": 0,
                "count": group[scan.G_COUNT],
                "byte_count": group[scan.G_BYTES],
                "first_offset": group[scan.G_FIRST_OFFSET],
                "last_offset": group[scan.G_LAST_OFFSET],
                "first_append_ms": -1,
                "last_append_ms": -1,
                "base": 0,
                "bitmap": bitmap.serialize(),
                "repeats": [],
                "unsequenced_count": 0,
                "tail": False,
            }
        )
    return pa.Table.from_pylist(rows, CELL_SCHEMA)


def added_up(table: pa.Table) -> Any:
    return StreamCells(table).seen()


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    begin = time.process_time()
    found = work()
    return found, time.process_time() - begin


def verdicts_of(cells: pa.Table, count: int, partitions: int) -> tuple[int, float]:
    """(windows, CPU seconds) of reconciling a source and an aggregate that have these cells."""
    name = f"{STREAM:016x}"
    about: dict[str, Any] = {"stream": name, "session": "0" * 16, "topic": "flights", "producer": "feed@host"}
    ledger, nothing = EventLedger(), BitMap64()
    for start in range(0, count, partitions):
        end = min(start + partitions, count)
        ledger.learn(
            CountEvent(
                **about, window_ms=WINDOW_MS, window_start_ms=start // partitions * WINDOW_MS, report=1,
                count=end - start, byte_count=0, at_ms=0, acknowledged=BitMap64(range(start + 1, end + 1)),
                ambiguous=nothing, failed=nothing,
            )
        )  # fmt: skip
    ledger.learn(
        StreamEvent(
            **about, window_ms=WINDOW_MS, state=CLOSED, host="", application="", datacenter="",
            last_assigned=count, last_settled=count, no_earlier_than_ms=None, lease_ms=WINDOW_MS,
            at_ms=count * WINDOW_MS,
        )
    )  # fmt: skip
    facts = facts_table(ledger, {name: {"ewr"}}, None, set()).to_pylist()
    names = {"flights": "flights"}
    reconciler = Reconciler(
        [ClusterReading("ewr", True, names, names=names), ClusterReading("agg", False, names, names=names)],
        {"agg": {("ewr", "flights", 0): Passage(1 << 60, "id")}},
        {},
        WINDOW_MS,
        0,
        1 << 50,
        ("flights",),
    )
    tiers = [
        cells.set_column(0, "tier", pa.repeat(tier, len(cells))).set_column(
            1, "cluster", pa.repeat(tier, len(cells))
        )
        for tier in ("ewr", "agg")
    ]
    both = pa.concat_tables(tiers)
    rows, seconds = min(
        (timed(lambda: reconciler.rows(both, facts, None)) for _ in range(3)), key=lambda each: each[1]
    )
    assert set(rows["verdict"].to_pylist()) == {"PROVEN"}
    return rows.num_rows, seconds


def parquet_bytes(cells: pa.Table) -> int:
    content = io.BytesIO()
    pq.write_table(cells, content, compression="snappy")  # as Spark writes it
    return len(content.getvalue())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", type=int, default=1_000_000)
    parser.add_argument("--partitions", type=int, default=67)
    parser.add_argument("--one-by-one", type=int, default=50_000)
    given = parser.parse_args()
    place = RowPlace("ewr", "ewr", "flights", "id", 0, False)
    streams = max(1, given.cells // 100_000)
    share = given.cells // streams
    in_columns(counted(1_000), place)  # loads and compiles what is loaded and compiled once
    made_s = added_s = 0.0
    for _ in range(streams):
        counter = counted(share)
        table, seconds = timed(partial(in_columns, counter, place))
        made_s += seconds
        windows = pa.array(np.arange(share) // given.partitions * WINDOW_MS)
        table = table.set_column(7, "window_start_ms", windows)  # as of so many partitions
        _, seconds = timed(partial(added_up, table))
        added_s += seconds
    starts = windows.unique()
    proven = pa.table({"window_start_ms": starts, "window_ms": pa.repeat(WINDOW_MS, len(starts))})
    united, united_s = timed(lambda: unite(table, proven))
    window_count, verdict_s = verdicts_of(table, share, given.partitions)
    _, united_verdict_s = verdicts_of(united, share, given.partitions)
    few = given.one_by_one
    counter = counted(few)
    slow, slow_made_s = timed(lambda: one_by_one(counter, place))
    slow = slow.set_column(7, "window_start_ms", windows[:few])
    sums, slow_added_s = timed(lambda: merge_cells(cells_of(slow)))
    assert StreamCells(slow).seen() == sums
    for what, seconds, slowly in (("made", made_s, slow_made_s), ("added up", added_s, slow_added_s)):
        fast_us, slow_us = seconds / (streams * share) * 1e6, slowly / few * 1e6
        print(
            f"{what:<9} one by one {slow_us:6.2f} µs a cell, in columns {fast_us:5.2f} "
            f"({slow_us / fast_us:.0f} times; {streams * share:,} cells)"
        )
    before, after = (parquet_bytes(each) / share for each in (table, united))
    print(
        f"united    {united_s / share * 1e6:.2f} µs a cell; {share:,} rows, {before:.0f} bytes a record, "
        f"become {len(united):,}, {after:.2f} bytes a record"
    )
    print(
        f"verdicts  {verdict_s / window_count * 1e6:.0f} µs a window of {2 * given.partitions} cells "
        f"({window_count:,} windows of one stream in two tiers), {united_verdict_s / window_count * 1e6:.0f} "
        "of united ones"
    )


if __name__ == "__main__":
    main()
