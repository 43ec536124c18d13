"""How fast records are counted: the compiled scan alone, then `cells` mode on Spark with a real broker.

    python tests/benchmarks/bench_scan.py [--records 8000000] [--rounds 3] [--scan-only]

Prints medians with minimum and maximum: records of 200 bytes, uncompressed and lz4. Spark's start is not
counted. `make bench-audit` (audit/bench_audit.py) has every codec, and Spark's own connector beside it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from millrace.audit.scanning.counting import CellCounter
from millrace.audit.scanning.range_reader import index_fetched
from millrace.audit.scanning.scan import G_COUNT
from millrace.audit.scanning.unpack import Unpacker
from millrace.audit.spark.task_reader import count_batches
from tests.benchmarks.audit.bench_audit import Bench, Load, Rows
from tests.benchmarks.audit.load import BatchMaker, Shape

SCANNED_RECORDS = 200_000
UNPACKER = Unpacker()


def report(name: str, unit: str, samples: Sequence[float]) -> None:
    middle, low, high = statistics.median(samples), min(samples), max(samples)
    print(f"{name:<62} {middle:>14,.1f} {unit}  (min {low:,.1f}, max {high:,.1f})", flush=True)


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def bench_scan(rounds: int) -> None:
    """The kernels alone: no network, no checksum."""
    for shape in (
        Shape(batch_bytes=10_000),
        Shape(),
        Shape(producers=16, mixed=True),
        Shape("lz4", producers=16, mixed=True),
        Shape("lz4", batch_bytes=16_000),
    ):
        data = b"".join(BatchMaker(shape).batches(SCANNED_RECORDS))
        record_count = SCANNED_RECORDS // shape.batch_records * shape.batch_records
        for digest in (False, True):

            def count(data: bytes = data, digest: bool = digest, least: int = record_count) -> None:
                counter = CellCounter(60_000, 1 << 20, digest)
                count_batches(counter, index_fetched(data), 0, 1 << 62, UNPACKER)
                if counter.take().groups[:, G_COUNT].sum() < least:
                    raise RuntimeError("the scan lost records")

            samples = [timed(count) / record_count * 1e9 for _ in range(rounds + 1)][1:]
            report(f"scan, {shape.name}{', digest' if digest else ''}", "ns/record", samples)


def bench_cells(record_count: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as name:
        rows = Rows(Path(name) / "rows.jsonl")
        with Bench(Path(name) / "data", rows, rounds, with_connector=False) as bench:
            bench.warm_up()
            for codec in ("none", "lz4"):
                bench.measure(Load(Shape(codec, producers=16, mixed=True), record_count, digest=False))
        for shape in dict.fromkeys(row["shape"] for row in rows.rows):
            samples = [row["records"] / row["seconds"] for row in rows.rows if row["shape"] == shape]
            report(f"cells to Parquet, local[2], {shape}", "records/s", samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=8_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scan-only", action="store_true")
    given = parser.parse_args()
    bench_scan(given.rounds)
    if not given.scan_only:
        bench_cells(given.records, given.rounds)


if __name__ == "__main__":
    main()
