"""What a stream costs the audit whose records all came twice: to count them, to keep, and to reconcile.

    python -m tests.benchmarks.audit.bench_repeats [--records 1M 10M 100M] [--shapes requests stream]

A mirror that lost its answers, or its positions, carries records again. Here are all records of a stream, in
one window, each there twice:

    requests    each request of 1,000 records twice, one after the other: repeats within a cell
    stream      the whole stream, and then the whole stream once more: two cells hold a record each
    hashed      as `requests`, with keys hashed over 64 partitions, of which each has every 64th record

Two tiers have the same cells, so that the second one's copies are the first one's. Counting and reconciling
are processes of their own, and tell their CPU time and how much memory they took beyond what they began with;
the making of the batches is in neither. No broker, no Spark, one core.

Beyond what is nothing, memory may be `MARK_BYTES` a record, which is what the cells of both tiers take where
keys are hashed (two bytes a number and copy, each twice). Exit status 1 when it is more.
"""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyroaring import BitMap64

from millrace.audit.contract.event_values import CLOSED, CountEvent, StreamEvent
from millrace.audit.contract.events import EventLedger
from millrace.audit.contract.header import HEADER_KEY, encode_identity, encode_prefix
from millrace.audit.reconciliation.reconcile import Passage
from millrace.audit.reconciliation.verdict_rows import ClusterReading, Reconciler
from millrace.audit.runs.fact_rows import facts_table
from millrace.audit.scanning.cell_rows import CELL_SCHEMA, RowPlace, cell_batches
from millrace.audit.scanning.counting import CellCounter
from millrace.audit.scanning.range_reader import index_fetched
from millrace.audit.spark.task_reader import ROWS_PER_ARROW_BATCH
from millrace.broker.protocol.checksum import crc32c
from millrace.broker.protocol.records import Record, build_batch
from tests.benchmarks.audit.bench_audit import parse_count

STREAM = "00000000000000ff"
WINDOW_MS = 60_000
CHUNK_OFFSETS = 1 << 20
REQUEST = 1_000
HASHED = 64
SHAPES = ("requests", "stream", "hashed")
MARK_BYTES, NOTHING_MB = 8.0, 64.0
_CRC, _CRC_FROM = 17, 21


class Requests:
    """Batches of one stream and window, made of one by writing their numbers over."""

    def __init__(self) -> None:
        identity = encode_identity(encode_prefix(STREAM), 1, 0, b"feed@host")
        self._batch = build_batch(
            [Record(None, b"", ((HEADER_KEY, identity),), 0, n) for n in range(REQUEST)]
        )
        places, at = [], self._batch.find(identity)
        while at >= 0:
            places.append(at)
            at = self._batch.find(identity, at + 1)
        self._at = np.array(places)[:, None] + np.arange(9, 17)

    def of(self, sequences: np.ndarray, offset: int) -> bytes:
        octets = np.frombuffer(self._batch, np.uint8)
        octets[self._at] = sequences.astype(">u8").view(np.uint8).reshape(-1, 8)
        struct.pack_into(">q", self._batch, 0, offset)
        struct.pack_into(">I", self._batch, _CRC, crc32c(memoryview(self._batch)[_CRC_FROM:]))
        return bytes(self._batch)


def partitions_of(shape: str, records: int) -> Iterator[Iterator[np.ndarray]]:
    """The sequences of each request, partition by partition."""
    step = HASHED if shape == "hashed" else 1
    requests = range(records // step // REQUEST)
    numbers = np.arange(REQUEST)

    def of_partition(partition: int) -> Iterator[np.ndarray]:
        rounds = 2 if shape == "stream" else 1
        for request in [*requests] * rounds:
            sequences = (request * REQUEST + numbers) * step + partition + 1
            for _ in range(3 - rounds):
                yield sequences

    return (of_partition(partition) for partition in range(step))


def count(shape: str, records: int, path: Path) -> dict[str, float]:
    """Write the cells of one tier as Parquet, as a task does."""
    maker = Requests()
    taken, rows = 0.0, 0
    begin = _begin_peak()
    with pq.ParquetWriter(path, CELL_SCHEMA, compression="snappy") as writer:
        for partition, requests in enumerate(partitions_of(shape, records)):
            place = RowPlace("ewr", "ewr", "flights", "id", partition, False)
            counter = CellCounter(WINDOW_MS, CHUNK_OFFSETS)
            for number, sequences in enumerate(requests):
                fetched = index_fetched(maker.of(sequences, number * REQUEST))
                started = time.process_time()
                counter.count(fetched.buffer, fetched.index, 0, 1 << 62)
                if counter.is_full():
                    rows += _hand_over(counter, place, writer)
                taken += time.process_time() - started
            started = time.process_time()
            rows += _hand_over(counter, place, writer)
            taken += time.process_time() - started
    return {"cpu": taken, "memory": _peak_bytes() - begin, "rows": rows, "bytes": path.stat().st_size}


def _hand_over(counter: CellCounter, place: RowPlace, writer: pq.ParquetWriter) -> int:
    rows = 0
    for batch in cell_batches(place, counter.take(), CHUNK_OFFSETS, ROWS_PER_ARROW_BATCH):
        writer.write_batch(batch)
        rows += batch.num_rows
    return rows


def reconcile(records: int, path: Path) -> dict[str, float]:
    """The stream's verdicts, of cells that both tiers have."""
    about: dict[str, Any] = {
        "stream": STREAM,
        "session": "0" * 16,
        "topic": "flights",
        "producer": "feed@host",
    }
    acknowledged, nothing = BitMap64(), BitMap64()
    acknowledged.add_range(1, records + 1)
    ledger = EventLedger()
    ledger.learn(
        CountEvent(
            **about, window_ms=WINDOW_MS, window_start_ms=0, report=1, count=records, byte_count=0, at_ms=0,
            acknowledged=acknowledged, ambiguous=nothing, failed=nothing,
        )
    )  # fmt: skip
    ledger.learn(
        StreamEvent(
            **about, window_ms=WINDOW_MS, state=CLOSED, host="", application="", datacenter="",
            last_assigned=records, last_settled=records, no_earlier_than_ms=None, lease_ms=WINDOW_MS,
            at_ms=WINDOW_MS,
        )
    )  # fmt: skip
    facts = facts_table(ledger, {STREAM: {"ewr"}}, None, set()).to_pylist()
    names = {"flights": "flights"}
    passed = {("ewr", "flights", number): Passage(1 << 60, "id") for number in range(HASHED)}
    clusters = [ClusterReading(name, name == "ewr", names, names=names) for name in ("ewr", "agg")]
    reconciler = Reconciler(clusters, {"agg": passed}, {}, WINDOW_MS, 0, 1 << 50, ("flights",))
    begin, started = _begin_peak(), time.process_time()
    cells = pq.read_table(path)
    there = cells.set_column(0, "tier", pa.repeat("agg", len(cells)))
    there = there.set_column(1, "cluster", pa.repeat("agg", len(cells)))
    rows = reconciler.rows(pa.concat_tables([cells, there]), facts, None).to_pylist()
    told = {"cpu": time.process_time() - started, "memory": _peak_bytes() - begin}
    detail = json.loads(rows[0]["detail"])
    assert [row["verdict"] for row in rows] == ["DUPLICATE"] and rows[0]["duplicates"] == records
    assert detail["duplicates"] == {"ewr": [[1, records]]}
    return told


def _begin_peak() -> int:
    """Forget the peak of what was before; returns how much memory is taken now. Linux only."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak_bytes()


def _peak_bytes() -> int:
    (line,) = (each for each in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in each)
    return int(line.split()[1]) * 1024


def apart(*given: str) -> dict[str, float]:
    """What a process of its own tells."""
    command = [sys.executable, "-m", "tests.benchmarks.audit.bench_repeats", *given]
    told: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return told


def main() -> int:
    parser = argparse.ArgumentParser()
    sizes = [1_000_000, 10_000_000, 100_000_000]
    parser.add_argument("--records", type=parse_count, nargs="+", default=sizes)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=SHAPES)
    parser.add_argument("--part", choices=("count", "reconcile"), help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        shape, records = given.shapes[0], given.records[0]
        # What is loaded and compiled once is no part of it.
        with tempfile.TemporaryDirectory() as folder:
            few = Path(folder) / "cells.parquet"
            count(shape, HASHED * REQUEST, few)
            reconcile(HASHED * REQUEST, few)
        told = count(shape, records, given.path) if given.part == "count" else reconcile(records, given.path)
        print(json.dumps(told))
        return 0
    print(
        "| shape | records, each twice | rows | Parquet | counted, CPU | memory | reconciled, CPU | memory |"
    )
    print("|---|---|---|---|---|---|---|---|")
    missed = []
    for shape in given.shapes:
        for wanted in sorted(given.records):
            records = wanted // (HASHED * REQUEST) * HASHED * REQUEST
            with tempfile.TemporaryDirectory() as folder:
                asked = ("--shapes", shape, "--records", str(records), "--path", f"{folder}/cells.parquet")
                made, read = apart("--part", "count", *asked), apart("--part", "reconcile", *asked)
            print(
                f"| {shape} | {records:,} | {made['rows']:,} | {made['bytes'] / 1e6:,.2f} MB "
                f"| {made['cpu']:.2f} s | {made['memory'] / 1e6:,.0f} MB "
                f"| {read['cpu']:.2f} s | {read['memory'] / 1e6:,.0f} MB |",
                flush=True,
            )
            most_mb = max(NOTHING_MB, MARK_BYTES * records / 1e6)
            missed += [
                f"{shape}, {records:,}: {what} took {told['memory'] / 1e6:,.0f} MB of {most_mb:,.0f}"
                for what, told in (("counting", made), ("reconciling", read))
                if told["memory"] / 1e6 > most_mb
            ]
    print(*(f"MISSED: {each}" for each in missed), sep="\n", end="\n" if missed else "")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
