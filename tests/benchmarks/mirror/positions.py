"""How long the positions take to read, which every assignment waits for: five million records.

    python -m tests.benchmarks.mirror.positions [--records 5000000]

The same records are written to two positions topics of one broker: one with a cluster's default settings,
where a segment is closed at a gigabyte, and one as a mirror creates it; the cleaner works on what is closed.
Both are read as a worker does. For each: records that were read, seconds, and for how long at most nothing
else had its turn (a heartbeat's answer waits so long). Beside them, the first with every record decoded.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from uuid import UUID

from millrace.broker.client.admin import create_topic
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.raw_produce import produce
from millrace.broker.client.read_to_end import read_topic_to_end
from millrace.broker.protocol.mirror_positions import Position
from millrace.broker.protocol.records import Record, build_batch
from millrace.mirror.config import MirrorConfig, parse_config
from millrace.mirror.delivery.checkpoints import Positions, encode_records
from millrace.mirror.delivery.positions_keeper import PositionsKeeper
from millrace.mirror.delivery.system_records import SystemRecords
from millrace.mirror.topics.own_topics import POSITIONS
from millrace.mirror.topics.routes import SourcePartition
from tests.servers import BrokerProcess, ZooKeeper

PARTITIONS = 100
BATCH_RECORDS = 1_000
DEFAULTS, OURS = "defaults", "ours"
CLEANED_LIMIT_S = 180.0


def config(name: str, bootstrap: str) -> MirrorConfig:
    source = {"cluster": "src", "bootstrap": ["127.0.0.1:1"], "topics": {"include": ["t"]}}
    target = {"cluster": "agg", "bootstrap": [bootstrap]}
    return parse_config({"name": name, "target": target, "sources": [source]})


def batch() -> bytes:
    rounds = range(BATCH_RECORDS // PARTITIONS)
    at = [
        (SourcePartition("src", "flights", number), Position(10**9 + each, "c" * 22, UUID(int=7), 3, 10**12))
        for each in rounds
        for number in range(PARTITIONS)
    ]
    now_ms = time.time_ns() // 1_000_000
    return bytes(build_batch([Record(key, value, timestamp_ms=now_ms) for key, value in encode_records(at)]))


async def write(cluster: Cluster, topic: str, records: int) -> None:
    view = await cluster.metadata([topic], max_age_ms=0)
    leader, data = view.leader(topic, 0), batch()
    for _ in range(records // BATCH_RECORDS):
        outcomes = await produce(cluster, leader or 0, {(topic, 0): bytearray(data)}, acks=1)
        if outcomes[topic, 0].error_code:
            raise RuntimeError(f"not written: {outcomes}")


async def count(cluster: Cluster, topic: str) -> int:
    read = 0
    async for _ in read_topic_to_end(cluster, topic):
        read += 1
    return read


async def timed(work: Callable[[], Awaitable[object]]) -> tuple[float, float]:
    """Seconds, and the longest in which nothing else had its turn."""
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        before = time.perf_counter()
        while True:
            await asyncio.sleep(0)
            now = time.perf_counter()
            longest, before = max(longest, now - before), now

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0)
    began = time.perf_counter()
    await work()
    seconds = time.perf_counter() - began
    watching.cancel()
    return seconds, longest


async def measure(bootstrap: str, records: int) -> None:
    async with Cluster("agg", [bootstrap]) as cluster:
        for name, configs in ((DEFAULTS, {"cleanup.policy": "compact"}), (OURS, POSITIONS.configs)):
            await create_topic(cluster, POSITIONS.of(name), 1, 1, configs)
            began = time.perf_counter()
            await write(cluster, POSITIONS.of(name), records)
            print(f"{name}: {records:,} written in {time.perf_counter() - began:.0f} s", flush=True)
        began, left = time.perf_counter(), records
        while left > records // 10 and time.perf_counter() - began < CLEANED_LIMIT_S:
            await asyncio.sleep(5)
            left = await count(cluster, POSITIONS.of(OURS))
        print(f"{OURS}: compacted to {left:,} after {time.perf_counter() - began:.0f} s", flush=True)
        for name in (OURS, DEFAULTS):
            system = SystemRecords(cluster, lambda: time.time_ns() // 1_000_000, 1)
            keeper = PositionsKeeper(config(name, bootstrap), cluster, system)
            read = await count(cluster, POSITIONS.of(name))
            seconds, longest = await timed(keeper.read)
            print(f"{name}: {read:,} records read in {seconds:.1f} s, longest turn {longest * 1000:.0f} ms")

        async def decode_each() -> None:
            positions = Positions()
            async for record in read_topic_to_end(cluster, POSITIONS.of(DEFAULTS)):
                positions.apply(record.key, record.value)

        seconds, longest = await timed(decode_each)
        print(f"{DEFAULTS}, every record decoded: {seconds:.1f} s, longest turn {longest * 1000:.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, default=5_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="millrace-positions-") as name:
        zookeeper = ZooKeeper(Path(name) / "zookeeper").start()
        broker = BrokerProcess(zookeeper.chroot(), Path(name) / "broker")
        try:
            broker.start()
            asyncio.run(measure(broker.bootstrap, options.records))
        finally:
            broker.kill()
            zookeeper.stop()


if __name__ == "__main__":
    main()
