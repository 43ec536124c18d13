"""How long a broker is away when it is started again: 1,000 partitions, 20 GB of log.

    python -m tests.benchmarks.bench_restart [--partitions 1000] [--gb 20] [--behind-mb 100] [--folder DIR]

The broker is the process that users start, without the packages that only tests need (where there is
hypothesis, `kio` loads it: an eighth of all imports), with a ZooKeeper of its own on the same machine. It
is stopped cleanly and started, once with its files in the page cache and once with none of them, and then
killed (SIGKILL) with `--behind-mb` written behind the last flush. For each start: seconds until it answers,
until it leads all of its partitions, its processor time and how many bytes it has read by then, and until it
has taken a batch (the compiled loops that check one are loaded by then).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import tempfile
import time
from pathlib import Path

from millrace.broker.client import admin
from millrace.broker.client.cluster import Cluster
from millrace.broker.protocol.frames import Api
from tests.benchmarks.bench_storage import forget_pages
from tests.benchmarks.peers.kafka_load import batch_of, raw_produce
from tests.benchmarks.peers.usage import processor_seconds
from tests.raw_client import RawClient
from tests.raw_client import batch_of as one_record
from tests.servers import BrokerProcess, ZooKeeper, answers

TOPIC = "bench"
AT_A_TIME = 50
"""Partitions that are written to side by side, a connection each."""
BATCH_RECORDS = 500
POLL_S = 0.01
LEADS_ALL_S = 120.0


def hide_test_packages(folder: Path) -> None:
    """From processes that are started from now on."""
    folder.mkdir()
    (folder / "hypothesis.py").write_text("raise ImportError\n", encoding="utf-8")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


async def _create(broker: BrokerProcess, partitions: int) -> None:
    async with Cluster("bench", [broker.bootstrap], request_timeout_ms=120_000) as cluster:
        await admin.create_topic(cluster, TOPIC, partitions, 1, {"retention.ms": "-1"})


def write(broker: BrokerProcess, partitions: int, size: int) -> None:
    """`size` bytes, spread evenly."""
    batch = batch_of(BATCH_RECORDS)
    for first in range(0, partitions, AT_A_TIME):
        count = min(AT_A_TIME, partitions - first)
        records = int(size * count / partitions / len(batch) * BATCH_RECORDS)
        raw_produce(
            broker.port,
            TOPIC,
            batch,
            records,
            acks=1,
            partitions=count,
            connections=count,
            first_partition=first,
        )


def are_all_led(broker: BrokerProcess, partitions: int) -> bool:
    """Whether the broker answers for each of its partitions as their leader."""
    asked = [{"partition_index": n, "timestamp": -1, "current_leader_epoch": -1} for n in range(partitions)]
    topics = [{"name": TOPIC, "partitions": asked}]
    with RawClient(broker.port) as client:
        answer = client.ask(Api.LIST_OFFSETS, 7, replica_id=-1, isolation_level=0, topics=topics)
    return not any(partition.error_code for partition in answer.topics[0].partitions)


def start(name: str, broker: BrokerProcess, partitions: int) -> None:
    begun = time.perf_counter()
    broker.launch()
    while not answers(broker.port):
        time.sleep(POLL_S)
    answering = time.perf_counter() - begun
    while not are_all_led(broker, partitions):
        assert time.perf_counter() - begun < LEADS_ALL_S, f"not every partition is led:\n{broker.log[-2000:]}"
        time.sleep(POLL_S)
    leading = time.perf_counter() - begun
    assert broker.process is not None
    pid = broker.process.pid
    read = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    used = processor_seconds(pid)
    with RawClient(broker.port) as client:
        client.socket.settimeout(LEADS_ALL_S)
        (taken,) = client.produce({(TOPIC, 0): one_record(b"first")}, acks=1)
    assert taken.error_code == 0, taken
    print(
        f"{name:<52} answers after {answering:.2f} s, leads all after {leading:.2f} s, "
        f"{used:.2f} s of CPU, {int(read['rchar']) / 1e6:,.0f} MB read, "
        f"first batch taken after {time.perf_counter() - begun:.2f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--partitions", type=int, default=1000)
    parser.add_argument("--gb", type=float, default=20)
    parser.add_argument("--behind-mb", type=float, default=100)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-restart-", dir=options.folder))
    free = shutil.disk_usage(folder).free
    if free < options.gb * 1.5e9:
        folder.rmdir()
        raise SystemExit(f"{folder} has {free / 1e9:.0f} GB free, {options.gb * 1.5:.0f} are needed")
    hide_test_packages(folder / "hidden")
    zookeeper = ZooKeeper(folder / "zookeeper").start()
    broker = BrokerProcess(zookeeper.chroot(), folder, settings={"zookeeper.session.timeout.ms": 18_000})
    try:
        start_empty = time.perf_counter()
        broker.start()
        print(f"{'the same without any data':<52} answers after {time.perf_counter() - start_empty:.2f} s")
        asyncio.run(_create(broker, options.partitions))
        begun = time.perf_counter()
        write(broker, options.partitions, int(options.gb * 1e9))
        size = sum(path.stat().st_size for path in broker.data.rglob("*.log"))
        seconds = time.perf_counter() - begun
        print(f"wrote {size / 1e9:.1f} GB to {options.partitions} partitions in {seconds:.0f} s", flush=True)
        os.sync()  # or the stop would wait for the disk, which is not what is measured
        begun = time.perf_counter()
        broker.stop()
        print(f"clean stop: {time.perf_counter() - begun:.2f} s", flush=True)
        start("after a clean stop", broker, options.partitions)
        broker.stop()
        forget_pages(broker.data)
        start("the same, nothing of it in the page cache", broker, options.partitions)
        broker.stop()
        start("after a clean stop, again", broker, options.partitions)
        write(broker, min(AT_A_TIME, options.partitions), int(options.behind_mb * 1e6))
        broker.kill()
        # Its predecessor's session must end before an id is free again.
        time.sleep(20)
        start(f"after SIGKILL, {options.behind_mb:.0f} MB behind the last flush", broker, options.partitions)
    finally:
        broker.kill()
        zookeeper.stop()
        shutil.rmtree(folder)
        os.sync()


if __name__ == "__main__":
    main()
