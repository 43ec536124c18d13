"""What a batch costs on each path: microseconds of CPU for a batch and for a record, without a network.

    .venv/bin/python -m tests.benchmarks.mirror.bench_paths [--megabytes 4] [--rounds 7]

Three columns: `python` is the path said record by record in Python (`read_records`, `build_batch`), which the
compiled paths replaced and which is still their oracle; `prepare` is the compiled path alone, from the fetch
answer to a batch that can be stamped; `accept` is all of the pipeline's half (progress, latency, hand-over to
the sink). The best of some rounds: the machine is shared, and only the least disturbed round says anything.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from millrace.broker.client.committed import committed_batches
from millrace.broker.client.raw_fetch import FetchedPartition
from millrace.broker.protocol.batch import verify_crc
from millrace.broker.protocol.compression import CODEC_NAMES
from millrace.broker.protocol.mirror_positions import NO_TOPIC_ID, Position
from millrace.broker.protocol.records import Record, build_batch, read_records
from millrace.mirror.batches.coalesce import BatchWalk
from millrace.mirror.batches.intake import prepare
from millrace.mirror.gaps.gaps import GapPolicy
from millrace.mirror.pipeline import PartitionPipeline
from millrace.mirror.topics.routes import SourcePartition, TargetPartition

NOW_MS = 1_700_000_000_000
TARGET_LIMIT = 1 << 20


class Case(NamedTuple):
    name: str
    data: bytearray
    batches: int
    records: int
    coalesce_below: int
    target_limit: int = TARGET_LIMIT


def value(rng: random.Random, size: int) -> bytes:
    """Half random, half the same: compresses about as well as real records do."""
    return rng.randbytes(size // 2).hex().encode()[:size]


def answer(
    size: int, records_per_batch: int, record_size: int, *, codec: int = 0, append_time: bool = False
) -> tuple[bytearray, int, int]:
    rng = random.Random(1)
    data, offset, batches = bytearray(), 0, 0
    values = [value(rng, record_size) for _ in range(max(64, records_per_batch))]
    while len(data) < size:
        records = [
            Record(None, values[(offset + place) % len(values)], timestamp_ms=NOW_MS + place)
            for place in range(records_per_batch)
        ]
        batch = build_batch(records, base_offset=offset, compression=codec)
        if append_time:
            batch[22] |= 0x08
            from millrace.broker.protocol.batch import seal

            seal(batch)
        data += batch
        offset += records_per_batch
        batches += 1
    return data, batches, offset


def cases(size: int) -> Iterator[Case]:
    below = BatchWalk().coalesce_below
    for codec in (0, 3):
        name = CODEC_NAMES[codec]
        yield Case(f"pass through, 10 KB, {name}", *answer(size, 50, 200, codec=codec), 0)
        yield Case(f"pass through, 64 KB, {name}", *answer(size, 64, 1_000, codec=codec), 0)
        yield Case(
            f"rebuild (append time), 10 KB, {name}", *answer(size, 50, 200, codec=codec, append_time=True), 0
        )
        yield Case(f"split to 16 KB, 64 KB, {name}", *answer(size, 64, 1_000, codec=codec), 0, 16 << 10)
    yield Case("1 record of 200 B a batch, apart", *answer(size // 4, 1, 200), 0)
    for codec in range(5):
        made = answer(size // 4, 1, 200, codec=codec)
        yield Case(f"1 record of 200 B a batch, merged, {CODEC_NAMES[codec]}", *made, below)
    for codec in (0, 2, 3, 4):
        for count in (5, 15, 50):
            made = answer(size // 4, count, 200, codec=codec)
            merged = f"{count} records of 200 B, {CODEC_NAMES[codec]}"
            yield Case(f"{merged}, apart", *made, 0)
            yield Case(f"{merged}, merged", *made, 1 << 20)


class NullSink:
    """Takes batches and tells at once that they were delivered."""

    is_transactional = False
    on_moved = None

    def enqueue(self, target: TargetPartition, outgoing: Any) -> None:
        outgoing.owner.progress.acknowledged(outgoing.span)

    def is_failing(self, target: TargetPartition) -> bool:
        return False

    def withdraw(self, *_: Any, **__: Any) -> list[Any]:
        return []


class Around:
    """What a pipeline shares with the others of its worker, all of it in one."""

    between = None

    def __init__(self, limit: int, walk: BatchWalk) -> None:
        self._limit = limit
        self.walk = walk
        self.gaps = self.topics = self.metrics = self.workload = self

    def now_ms(self) -> int:
        return NOW_MS + 86_400_000

    def policy(self, gap_class: Any) -> GapPolicy:
        return GapPolicy.STOP

    def max_batch_size(self, topic: str) -> int:
        return self._limit

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


def in_python(case: Case) -> None:
    """One batch, one record at a time; what the compiled paths are compared with."""
    for batch, header, _ in committed_batches(memoryview(case.data), ()):
        verify_crc(batch, 0, header)
        build_batch(read_records(batch), compression=header.compression)


def by_prepare(case: Case) -> None:
    walk = BatchWalk(case.coalesce_below)
    data = memoryview(case.data)
    for _ in prepare(walk, data, (), 0, case.target_limit, lambda *_: None):
        pass


def by_accept(case: Case) -> None:
    around: Any = Around(case.target_limit, BatchWalk(case.coalesce_below))
    sink: Any = NullSink()
    pipeline = PartitionPipeline(
        SourcePartition("ewr", "flights", 0),
        TargetPartition("flights", 0),
        sink,
        around,
        lambda _: None,
    )
    pipeline.ready(Position(0, "c", NO_TOPIC_ID, -1, -1))
    pipeline.accept(
        FetchedPartition("flights", 0, 0, case.records, case.records, 0, (), None, memoryview(case.data))
    )
    if pipeline.progress.settled_position != case.records:
        raise AssertionError("not everything was accepted")


def least(work: Callable[[Case], None], case: Case, rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        work(case)
        best = min(best, time.process_time() - start)
    return best


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--megabytes", type=float, default=4)
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--only", default="", help="cases whose name holds this")
    asked = arguments.parse_args()
    print(
        f"{'us for a batch (a record)':44} {'python':>16} {'prepare':>16} {'accept':>16}  accept, records/s"
    )
    for case in cases(int(asked.megabytes * (1 << 20))):
        if asked.only not in case.name:
            continue
        cells = []
        for work, rounds in ((in_python, 1), (by_prepare, asked.rounds), (by_accept, asked.rounds)):
            seconds = least(work, case, rounds)
            cells.append(f"{seconds / case.batches * 1e6:8.2f} ({seconds / case.records * 1e6:.2f})")
        rate = case.records / seconds
        print(f"{case.name:44} {cells[0]:>16} {cells[1]:>16} {cells[2]:>16}  {rate:,.0f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
