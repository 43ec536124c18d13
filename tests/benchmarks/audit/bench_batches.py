"""What a record costs the audit's reader, by how many of them a batch has: `make bench-audit-batches`.

    python -m tests.benchmarks.audit.bench_batches [--records 200000] [--rounds 5] [--codecs none,lz4]
        [--no-broker]

Nanoseconds of processor time a record, the least of some rounds, in three columns: `index` from the bytes of
a fetch to batches that may be counted (headers, checksums, what is committed), `count` from there to cells,
both without a network; and `task`, a whole Spark task in this process, receiving from a broker included. The
mark: with one record a batch at most three times the cost with 500, of a task.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from millrace.audit.scanning.counting import CellCounter
from millrace.audit.scanning.range_reader import (
    AbortedTransactions,
    FetchedBatches,
    hole_within,
    leading_batches,
    mark_skipped,
)
from millrace.audit.scanning.scan import G_COUNT
from millrace.audit.scanning.unpack import Unpacker
from millrace.audit.spark.kafka_options import parse_source
from millrace.audit.spark.pinning import pin_ranges
from millrace.audit.spark.task_reader import count_batches, read_task
from tests.benchmarks.audit.load import BatchMaker, Shape, fill
from tests.servers import BrokerProcess, ZooKeeper

SIZES = (500, 50, 10, 5, 1)
RECORD_BYTES = 200
FETCH_BYTES = 2 << 20
WINDOW_MS = 60_000
MARK = 3.0


def least(work: Callable[[], object], rounds: int) -> float:
    """Seconds of processor time, this process's threads included."""
    best = float("inf")
    for _ in range(rounds + 1):
        begin = time.process_time()
        work()
        best = min(best, time.process_time() - begin)
    return best


class Offline:
    """The bytes of one fetch."""

    def __init__(self, shape: Shape) -> None:
        maker, data, number = BatchMaker(shape), bytearray(), 0
        while len(data) < FETCH_BYTES:
            data += maker.batch(number)
            number += 1
        self._data = bytes(data)
        self._unpacker = Unpacker()
        self.records = number * shape.batch_records

    def index(self) -> FetchedBatches:
        batches = leading_batches(self._data, 0)
        if batches is None:
            raise RuntimeError("no batch was found")
        hole_within(batches.index, 0, self.records)
        mark_skipped(batches, AbortedTransactions(), lambda reason: None)
        return batches

    def index_and_count(self) -> None:
        counter = CellCounter(WINDOW_MS, 1 << 20)
        count_batches(counter, self.index(), 0, self.records, self._unpacker)
        if counter.take().groups[:, G_COUNT].sum() != self.records:
            raise RuntimeError("records were lost")


def task_of(bootstrap: str, topic: str) -> Callable[[], None]:
    asked = {"kafka.bootstrap.servers": bootstrap, "subscribe": topic, "mode": "cells"}
    source = parse_source(asked | {"window": f"{WINDOW_MS}ms"})
    ranges, options = asyncio.run(pin_ranges(source)), source.read

    def task() -> None:
        for _ in read_task(ranges, options):
            pass

    return task


@contextmanager
def broker(folder: Path) -> Iterator[BrokerProcess]:
    zookeeper = ZooKeeper(folder / "zookeeper").start()
    running = BrokerProcess(zookeeper.chroot(), folder / "broker")
    try:
        running.start()
        yield running
    finally:
        running.kill()
        zookeeper.stop()


def row(codec: str, size: int, options: argparse.Namespace, bootstrap: str | None) -> tuple[float, ...]:
    shape = Shape(codec, RECORD_BYTES, batch_bytes=size * RECORD_BYTES)
    offline = Offline(shape)
    index = least(offline.index, options.rounds) / offline.records * 1e9
    both = least(offline.index_and_count, options.rounds) / offline.records * 1e9
    if bootstrap is None:
        return index, both - index
    topic = f"batches-{codec}-{size}"
    records, _ = asyncio.run(fill(bootstrap, topic, shape, options.records, 1))
    return index, both - index, least(task_of(bootstrap, topic), options.rounds) / records * 1e9


def measure(options: argparse.Namespace, bootstrap: str | None) -> None:
    columns = ("index", "count") if bootstrap is None else ("index", "count", "task")
    heads = "".join(f"{name:>9}" for name in columns)
    print(f"{'ns a record':<24}{heads}   {'beside 500 a batch':>20}")
    for codec in options.codecs.split(","):
        usual = None
        for size in SIZES:
            cells = row(codec, size, options, bootstrap)
            told = sum(cells) if bootstrap is None else cells[-1]
            usual = usual or told
            ratio = told / usual
            missed = " MISSED" if ratio > MARK and bootstrap is not None else ""
            figures = "".join(f"{each:>9.0f}" for each in cells)
            print(f"{f'{size} a batch, {codec}':<24}{figures}   {ratio:>20.2f}{missed}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, default=200_000, help="of a topic")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--codecs", default="none,lz4")
    parser.add_argument("--no-broker", action="store_true", help="without the column `task`")
    options = parser.parse_args()
    if options.no_broker:
        measure(options, None)
        return
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as name, broker(Path(name)) as running:
        measure(options, running.bootstrap)


if __name__ == "__main__":
    main()
