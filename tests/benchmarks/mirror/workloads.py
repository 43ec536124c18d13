"""What is mirrored: prepared batches, the same bytes for every system of a run. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

from millrace.broker.protocol.records import Record, build_batch
from tests.benchmarks.peers.kafka_load import STARTED_MS, batch_of

LZ4 = 3
MEGABYTE = 1e6
SEED = 7


@lru_cache(maxsize=8)
def kilobyte_batch(record_count: int, compression: int) -> bytes:
    """Records of 1 KB, half of it random and half of it text that lz4 shortens: about 2 to 1."""
    rng = random.Random(SEED)
    text = b"flight arrives on time " * 40
    rows = [
        Record(b"%08d" % number, rng.randbytes(500) + text[:500], timestamp_ms=STARTED_MS)
        for number in range(record_count)
    ]
    return bytes(build_batch(rows, compression=compression))


@lru_cache(maxsize=16)
def small_batch(record_count: int, compression: int) -> bytes:
    """Records of 200 bytes, half of each random."""
    rng = random.Random(SEED)
    text = b"flight arrives on time " * 5
    rows = [
        Record(None, rng.randbytes(100) + text[:100], timestamp_ms=STARTED_MS) for _ in range(record_count)
    ]
    return bytes(build_batch(rows, compression=compression))


@dataclass(frozen=True, slots=True)
class Workload:
    """`megabytes` are those of the source's log, at scale 1: at the rates on record the faster side takes
    some 5 s for them. `partitions` are those of every source's topic."""

    name: str
    title: str
    batch: bytes
    records_per_batch: int
    megabytes: float
    partitions: int = 1
    sources: int = 1

    def records(self, scale: float) -> int:
        """Of each source."""
        batches = max(1, int(self.megabytes * scale * MEGABYTE / len(self.batch) / self.sources))
        return batches * self.records_per_batch


def workloads() -> dict[str, Workload]:
    """By name, in the order in which they are measured."""
    packed = kilobyte_batch(64, LZ4)
    found = [
        Workload("packed", "1 KB records, 64 KB batches, lz4", packed, 64, 800),
        Workload("fifty", "200-byte records, 50 a batch", batch_of(50), 50, 1_200),
        Workload("single", "200-byte records, 1 a batch, 32 partitions", batch_of(1), 1, 900, partitions=32),
        Workload("hundred", "100 partitions, 64 KB batches, lz4", packed, 64, 600, partitions=100),
        Workload("ten", "10 sources to one aggregate, 64 KB, lz4", packed, 64, 400, sources=10),
    ]
    for codec, word in ((0, "none"), (LZ4, "lz4")):
        for count, record_thousands in BATCH_SIZES.items():
            batch = small_batch(count, codec)
            size_mb = record_thousands * 1_000 / count * len(batch) / MEGABYTE
            partitions = SMALL_PARTITIONS if count <= 10 else 1
            spread = f", {partitions} partitions" if partitions > 1 else ""
            title = f"200-byte records, {count} a batch, {word}{spread}"
            found.append(Workload(f"{count}-{word}", title, batch, count, size_mb, partitions))
    return {each.name: each for each in found}


BATCH_SIZES = {1: 3_300, 5: 4_700, 10: 5_000, 50: 5_500, 80: 5_500, 500: 6_000}
"""Records a batch, and how many thousand of them, some 1 GB uncompressed. 80 fill a batch of Apache Kafka's
default size."""
SMALL_PARTITIONS = 32
"""Of loads of 1 to 10 records a batch: millions of batches, of which Apache Kafka takes some 20,000 a second
one by one and several times as many where each request has one for every partition."""
BY_BATCH_SIZE = [f"{count}-{word}" for word in ("none", "lz4") for count in BATCH_SIZES]


def warm_up() -> Workload:
    """Before anything is measured: a compiler at run time has its work done by then."""
    return Workload("warm", "warm-up", kilobyte_batch(64, LZ4), 64, 300, partitions=4)
