"""How fast records are counted: the compiled scan alone, then `cells` mode on Spark with a real broker.

    python tests/benchmarks/bench_scan.py [--records 8000000] [--rounds 3] [--scan-only]

Prints medians with minimum and maximum. 200-byte records, uncompressed and lz4. Spark's start is not counted:
the first read of the session warms it up.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from numpy.typing import NDArray

from millrace.audit.counting import CellCounter
from millrace.audit.header import encode_identity, encode_prefix
from millrace.audit.range_reader import index_fetched
from millrace.audit.spark_session import spark_session
from millrace.audit.task_reader import count_batches
from millrace.broker.client.admin import create_topic
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.raw_produce import produce
from millrace.broker.protocol.batch import HEADER_SIZE, stamp_offset_and_epoch
from millrace.broker.protocol.checksum import crc32c
from millrace.broker.protocol.compression import CODEC_IDS
from millrace.broker.protocol.records import Record, build_batch, read_records

RECORD_SIZE = 200
PRODUCER = b"feed@host-1"
START_MS = (
    time.time_ns() // 1_000_000 - 3_600_000
)  # recent: a broker deletes what is older than its retention
CRC_POSITION = 17
BATCH_RECORDS = 500


def batches(record_count: int, batch_records: int, producers: int, codec: str = "none") -> Iterator[bytes]:
    """Whole batches of `producers` feeds in turn, each record about RECORD_SIZE bytes.

    One batch is built as producers build theirs; the others are its copies with their own sequences, times
    and offsets written over, so that ten million records take seconds to make.
    """
    records = []
    for number in range(batch_records):
        identity = encode_identity(
            encode_prefix(f"{number % producers + 1:016x}"), number + 1, START_MS, PRODUCER
        )
        value = f"{number:08d}".encode() * ((RECORD_SIZE - len(identity) - 14) // 8)
        records.append(Record(None, value, (("_mr", identity),), START_MS, number))
    batch = build_batch(records)
    positions = _identity_positions(batch, records)
    octets = np.frombuffer(batch, np.uint8)
    sequence_octets = positions[:, None] + np.arange(9, 17)
    time_octets = positions[:, None] + np.arange(17, 23)
    places = np.arange(batch_records)
    in_a_batch = (batch_records - places % producers + producers - 1) // producers  # of the record's producer
    for batch_number, first in enumerate(range(0, record_count, batch_records)):
        numbers = first + places
        octets[sequence_octets] = _big_endian(batch_number * in_a_batch + places // producers + 1)
        octets[time_octets] = _big_endian(START_MS + numbers // 10)[:, 2:]
        if codec == "none":
            struct.pack_into(">I", batch, CRC_POSITION, crc32c(memoryview(batch)[CRC_POSITION + 4 :]))
            made = bytearray(batch)
        else:
            made = build_batch(read_records(memoryview(batch)), compression=CODEC_IDS[codec])
        stamp_offset_and_epoch(made, first, 0)
        yield bytes(made)


def _identity_positions(batch: bytearray, records: Sequence[Record]) -> NDArray[np.int64]:
    found, at = [], HEADER_SIZE
    for record in records:
        identity = record.headers[0][1] or b""
        at = batch.index(identity, at)
        found.append(at)
        at += len(identity)
    return np.array(found)


def _big_endian(numbers: NDArray[np.int64]) -> NDArray[np.uint8]:
    return numbers.astype(">u8").view(np.uint8).reshape(-1, 8)


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
    counts = {"none": record_count, "lz4": record_count // 8}  # packing them is what would take long
    for codec, count in counts.items():
        asyncio.run(fill(bootstrap, f"bench-{codec}", count, codec))
    with spark_session("local[2]", folder) as spark:
        for codec, count in counts.items():
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
                if rows is None or rows[0] != count:
                    raise RuntimeError(f"cells hold {rows} of {count} records")
                samples.append(count / seconds)
            report(f"cells to Parquet, local[2], 16 producers, {codec}", "records/s", samples[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=8_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scan-only", action="store_true")
    given = parser.parse_args()
    bench_scan(min(given.records, 200_000), given.rounds)
    if not given.scan_only:
        bench_cells(given.records, given.rounds)


if __name__ == "__main__":
    main()
