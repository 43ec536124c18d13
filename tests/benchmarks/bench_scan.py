"""How fast records are counted: the compiled scan alone, then `cells` mode on Spark with a real broker.

    python tests/benchmarks/bench_scan.py [--records 1000000] [--rounds 3] [--scan-only]

Prints medians with minimum and maximum. 200-byte records, uncompressed and lz4. Spark's start is not counted:
the first read of the session warms it up.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from millrace.audit.counting import CellCounter
from millrace.audit.header import encode_identity, encode_prefix
from millrace.audit.range_reader import index_fetched
from millrace.audit.spark_session import spark_session
from millrace.audit.task_reader import count_batches
from millrace.broker.client.admin import create_topic
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.raw_produce import produce
from millrace.broker.protocol.batch import stamp_offset_and_epoch
from millrace.broker.protocol.compression import CODEC_IDS
from millrace.broker.protocol.records import Record, build_batch

RECORD_SIZE = 200
PRODUCER = b"feed@host-1"
START_MS = 1_700_000_000_000
BATCH_RECORDS = 500


def batches(record_count: int, batch_records: int, producers: int, codec: str = "none") -> list[bytearray]:
    """Batches of `producers` feeds in turn, each record about RECORD_SIZE bytes."""
    built = []
    sequences = [0] * producers
    for first in range(0, record_count, batch_records):
        records = []
        for number in range(first, min(first + batch_records, record_count)):
            producer = number % producers
            sequences[producer] += 1
            identity = encode_identity(
                encode_prefix(f"{producer + 1:016x}"), sequences[producer], START_MS + number // 10, PRODUCER
            )
            value = f"{number:08d}".encode() * ((RECORD_SIZE - len(identity) - 14) // 8)
            records.append(Record(None, value, (("_mr", identity),), START_MS, number))
        batch = build_batch(records, compression=CODEC_IDS[codec])
        stamp_offset_and_epoch(batch, first, 0)
        built.append(batch)
    return built


def report(name: str, unit: str, samples: Sequence[float]) -> None:
    middle, low, high = statistics.median(samples), min(samples), max(samples)
    print(f"{name:<46} {middle:>14,.1f} {unit}  (min {low:,.1f}, max {high:,.1f})", flush=True)


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def bench_scan(record_count: int, rounds: int) -> None:
    for batch_records, producers, codec in (
        (50, 1, "none"),
        (500, 1, "none"),
        (500, 16, "none"),
        (500, 16, "lz4"),
    ):
        data = b"".join(batches(record_count, batch_records, producers, codec))

        def count(data: bytes = data) -> None:
            counter = CellCounter(60_000, 1 << 20)
            count_batches(counter, index_fetched(data), 0, 1 << 62)
            if sum(row.count for row in counter.take()) != record_count:
                raise RuntimeError("the scan lost records")

        samples = [timed(count) / record_count * 1e9 for _ in range(rounds + 1)][1:]
        report(f"scan, {batch_records} a batch, {producers} producers, {codec}", "ns/record", samples)


async def fill(bootstrap: str, topic: str, record_count: int, codec: str) -> None:
    async with Cluster("bench", [bootstrap]) as cluster:
        await create_topic(cluster, topic, 2, 1)
        view = await cluster.metadata([topic], max_age_ms=0)
        for partition in (0, 1):
            leader = view.leader(topic, partition)
            if leader is None:
                raise RuntimeError(f"{topic}-{partition} has no leader")
            for batch in batches(record_count // 2, BATCH_RECORDS, 16, codec):
                outcome = (await produce(cluster, leader, {(topic, partition): batch}))[topic, partition]
                if outcome.error_code:
                    raise RuntimeError(f"produce was refused with code {outcome.error_code}")


def bench_cells(record_count: int, rounds: int) -> None:
    from tests.servers import BrokerProcess, ZooKeeper

    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as name:
        folder = Path(name)
        zookeeper = ZooKeeper(folder / "zookeeper")
        try:
            zookeeper.start()
            broker = BrokerProcess(zookeeper.chroot(), folder / "broker", broker_id=1, settings={})
            try:
                broker.start()
                _read_with_spark(broker.bootstrap, folder, record_count, rounds)
            finally:
                broker.kill()
        finally:
            zookeeper.stop()


def _read_with_spark(bootstrap: str, folder: Path, record_count: int, rounds: int) -> None:
    codecs = ("none", "lz4")
    for codec in codecs:
        asyncio.run(fill(bootstrap, f"bench-{codec}", record_count, codec))
    with spark_session("local[2]", folder) as spark:
        for codec in codecs:
            samples = []
            for round_number in range(rounds + 1):
                cells = (
                    spark.read.format("millrace")
                    .option("bootstrap", bootstrap)
                    .option("topics", f"bench-{codec}")
                    .option("tasks", "4")
                    .load()
                )
                target = folder / f"cells-{codec}-{round_number}"
                seconds = timed(lambda cells=cells, target=target: cells.write.parquet(str(target)))
                rows = spark.read.parquet(str(target)).filter("note is null").selectExpr("sum(count)").first()
                if rows is None or rows[0] != record_count:
                    raise RuntimeError(f"cells hold {rows} of {record_count} records")
                samples.append(record_count / seconds)
            report(f"cells to Parquet, local[2], 16 producers, {codec}", "records/s", samples[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scan-only", action="store_true")
    given = parser.parse_args()
    bench_scan(min(given.records, 200_000), given.rounds)
    if not given.scan_only:
        bench_cells(given.records, given.rounds)


if __name__ == "__main__":
    main()
