"""`make bench`: how fast each part is on this machine, beside the marks the project set itself.

    python tests/benchmarks/bench.py [--rounds 5] [--only produce,fetch,mirror,memory,audit] [--gb 10]

Prints the median of the rounds with minimum and maximum. Brokers, ZooKeeper and mirror are the real processes
that users start, one broker a cluster, all on this machine's cores; the client shares those cores.

- produce: one raw connection, requests pipelined two bursts deep, records of 200 bytes
- fetch: one raw connection, one request at a time, whole batches
- mirror: a backlog from one broker to another, beside a TCP relay in Python that moves the same bytes
- memory: the broker's resident memory while `--gb` pass through it (in and out)
- audit: see bench_scan.py
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil

from millrace.broker.client import admin
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.raw_fetch import FetchPosition, fetch
from millrace.broker.protocol import hot_produce
from millrace.broker.protocol.batch import iterate_batches
from millrace.broker.protocol.records import Record, build_batch
from tests.cluster.mirror_process import MirrorProcess
from tests.servers import BrokerProcess, ZooKeeper

RECORD_SIZE = 200
PRODUCE_VERSION = 9
MEGABYTE = 1e6
GIGABYTE = 1e9
MIB = 1 << 20

# Records a batch, requests a burst, records a round.
PRODUCE_SHAPES = ((1, 100, 40_000), (50, 20, 1_000_000), (5_000, 2, 4_000_000))
FETCH_BYTES = 400 * MIB
MIRROR_BYTES = 600 * MIB
MIRROR_SHAPES = (500, 50)  # records a batch
PARTS = ("produce", "fetch", "mirror", "memory", "audit")


def report(name: str, unit: str, samples: Sequence[float], mark: str = "") -> None:
    middle, low, high = statistics.median(samples), min(samples), max(samples)
    line = f"{name:<46} {middle:>14,.1f} {unit:<11} (min {low:,.1f}, max {high:,.1f})"
    print(f"{line}   {mark}" if mark else line, flush=True)


def batch_of(record_count: int) -> bytes:
    """A batch of records of 200 bytes of value each; the values differ, as compressors would notice."""
    rows = [
        Record(None, number.to_bytes(8, "big") * (RECORD_SIZE // 8), timestamp_ms=1_700_000_000_000)
        for number in range(record_count)
    ]
    return bytes(build_batch(rows))


@contextmanager
def servers(brokers: int, **settings: object) -> Iterator[list[BrokerProcess]]:
    """ZooKeeper and so many brokers, each a cluster of its own; data in a temporary folder."""
    named = {key.replace("_", "."): value for key, value in settings.items()}
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as name:
        folder = Path(name)
        zookeeper = ZooKeeper(folder / "zookeeper").start()
        started: list[BrokerProcess] = []
        try:
            for number in range(brokers):
                broker = BrokerProcess(zookeeper.chroot(), folder / f"broker-{number}", settings=named)
                started.append(broker.start())
            yield started
        finally:
            for broker in started:
                broker.kill()
            zookeeper.stop()


def create_topic(broker: BrokerProcess, name: str, **configs: str) -> None:
    async def create() -> None:
        async with Cluster("bench", [broker.bootstrap]) as cluster:
            named = {key.replace("_", "."): value for key, value in configs.items()}
            await admin.create_topic(cluster, name, 1, 1, named)

    asyncio.run(create())


class RawProducer:
    """One connection that sends the same request again and again, a burst ahead of the answers."""

    def __init__(self, broker: BrokerProcess, topic: str, batch: bytes, burst: int) -> None:
        buffers = hot_produce.encode_request(PRODUCE_VERSION, 1, "bench", {(topic, 0): batch}, acks=1)
        self._request = b"".join(buffers)
        self._burst = self._request * burst
        self._burst_count = burst
        self._socket = socket.create_connection(("127.0.0.1", broker.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answer_size = 0
        self._scratch = bytearray(MIB)

    def send(self, request_count: int) -> None:
        """Sends at least so many requests and returns when all are answered."""
        bursts = max(1, -(-request_count // self._burst_count))
        self._socket.sendall(self._burst)
        for _ in range(bursts - 1):
            self._socket.sendall(self._burst)
            self._take_answers(self._burst_count)
        self._take_answers(self._burst_count)

    def close(self) -> None:
        self._socket.close()

    def _take_answers(self, count: int) -> None:
        if not self._answer_size:
            self._answer_size = self._take_first_answer()
            count -= 1
        left = count * self._answer_size
        while left:
            left -= self._receive(min(left, len(self._scratch)))

    def _take_first_answer(self) -> int:
        """Checks that produce succeeds, and learns how many bytes an answer has (all are alike)."""
        head = bytearray()
        while len(head) < 4:
            head += self._socket.recv(4 - len(head))
        (size,) = struct.unpack(">i", head)
        body = bytearray()
        while len(body) < size:
            body += self._socket.recv(size - len(body))
        answers, _ = hot_produce.decode_response(memoryview(bytes(body)), PRODUCE_VERSION)
        if answers[0].error_code:
            raise RuntimeError(f"produce was refused with code {answers[0].error_code}")
        return 4 + size

    def _receive(self, size: int) -> int:
        received = self._socket.recv_into(self._scratch, size)
        if not received:
            raise RuntimeError("the broker closed the connection")
        return received


def bench_produce(rounds: int) -> None:
    for record_count, burst, round_records in PRODUCE_SHAPES:
        with servers(1, log_segment_bytes=256 * MIB, log_retention_check_interval_ms=2_000) as (broker,):
            # A batch of 5,000 such records is a little larger than Kafka's default limit.
            create_topic(broker, "t", retention_bytes=str(256 * MIB), max_message_bytes=str(4 * MIB))
            batch = batch_of(record_count)
            producer = RawProducer(broker, "t", batch, burst)
            requests = round_records // record_count
            producer.send(requests // 4)
            rates = []
            for _ in range(rounds):
                begun = time.perf_counter()
                producer.send(requests)
                rates.append(requests / (time.perf_counter() - begun))
            producer.close()
        name = f"produce, {record_count} records a batch"
        mark = "mark: 400,000" if record_count == 50 else ""
        report(name, "requests/s", rates)
        report(name, "records/s", [rate * record_count for rate in rates], mark)
        report(name, "MB/s", [rate * len(batch) / MEGABYTE for rate in rates])


def fill(broker: BrokerProcess, topic: str, size: int, record_count: int = 500) -> int:
    """Produces at least `size` bytes in batches of `record_count`; the bytes that lie in the log then."""
    batch = batch_of(record_count)
    count = -(-size // len(batch))
    producer = RawProducer(broker, topic, batch, 1)
    producer.send(count)
    producer.close()
    return count * len(batch)


def bench_fetch(rounds: int) -> None:
    with servers(1) as (broker,):
        create_topic(broker, "t")
        size = fill(broker, "t", FETCH_BYTES)
        rates = []
        for _ in range(rounds + 1):
            begun = time.perf_counter()
            read = asyncio.run(read_all(broker, "t", size))
            rates.append(read / (time.perf_counter() - begun) / MEGABYTE)
    report("fetch, 4 MiB a partition and request", "MB/s", rates[1:])


async def read_all(broker: BrokerProcess, topic: str, size: int) -> int:
    """Reads the partition from its beginning until so many bytes of whole batches have come."""
    read = offset = 0
    async with Cluster("bench", [broker.bootstrap]) as cluster:
        leader = (await cluster.metadata([topic])).leader(topic, 0)
        if leader is None:
            raise RuntimeError(f"{topic} has no leader")
        while read < size:
            positions = {(topic, 0): FetchPosition(offset)}
            (answer,) = await fetch(cluster, leader, positions, partition_max_bytes=4 * MIB)
            if answer.error_code:
                raise RuntimeError(f"fetch was refused with code {answer.error_code}")
            for _, header in iterate_batches(answer.records):
                read += header.size
                offset = header.next_offset
    return read


@dataclass(frozen=True)
class Moved:
    """What moving bytes cost: the rate, and the mover's own processor time."""

    megabytes_per_s: float
    cpu_s_per_gb: float


def bench_mirror(rounds: int) -> None:
    for record_count in MIRROR_SHAPES:
        moved = [mirror_once(record_count) for _ in range(rounds)]
        name = f"mirror, one partition, {record_count} a batch"
        report(name, "MB/s", [m.megabytes_per_s for m in moved], "mark: 100")
        report(f"{name}, own CPU", "CPU s/GB", [m.cpu_s_per_gb for m in moved])
    relayed = [relay_once(MIRROR_BYTES) for _ in range(rounds)]
    report("TCP relay in Python, same bytes", "MB/s", [m.megabytes_per_s for m in relayed])
    report("TCP relay in Python, its own processor time", "CPU s/GB", [m.cpu_s_per_gb for m in relayed])


def mirror_once(record_count: int) -> Moved:
    """A fresh mirror works off a backlog; timed from the first batch in the target to the last."""
    with servers(2) as (source, target), tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        create_topic(source, "t")
        size = fill(source, "t", MIRROR_BYTES, record_count)
        mirror = MirrorProcess(Path(folder), target.bootstrap, {"source": source.bootstrap}).start()
        try:
            if mirror.process is None:
                raise RuntimeError("the mirror was started")
            return asyncio.run(watch_mirror(target, size, psutil.Process(mirror.process.pid)))
        finally:
            mirror.kill()


async def watch_mirror(target: BrokerProcess, size: int, mirror: psutil.Process) -> Moved:
    log = target.data / "t-0"
    begun_at = begun_bytes = begun_cpu = 0.0
    while True:
        there = sum(path.stat().st_size for path in log.glob("*.log")) if log.is_dir() else 0
        now, cpu = time.perf_counter(), sum(mirror.cpu_times()[:2])
        if there and not begun_at:
            begun_at, begun_bytes, begun_cpu = now, there, cpu
        if there >= size:
            moved = there - begun_bytes
            return Moved(moved / (now - begun_at) / MEGABYTE, (cpu - begun_cpu) / (moved / GIGABYTE))
        await asyncio.sleep(0.005)


def relay_once(size: int) -> Moved:
    """Source and sink in this process, the relay in one of its own: what moving bytes costs in Python."""
    with socket.create_server(("127.0.0.1", 0)) as source, socket.create_server(("127.0.0.1", 0)) as sink:
        context = multiprocessing.get_context("spawn")
        ready = context.Event()
        relay = context.Process(target=relay_bytes, args=(source.getsockname(), sink.getsockname(), ready))
        relay.start()
        incoming, _ = source.accept()
        outgoing, _ = sink.accept()
        ready.wait()
        process = psutil.Process(relay.pid)
        cpu = sum(process.cpu_times()[:2])
        begun = time.perf_counter()
        sender = threading.Thread(target=send_bytes, args=(incoming, size))
        sender.start()
        scratch = bytearray(MIB)
        left = size
        while left:
            left -= outgoing.recv_into(scratch)
        seconds = time.perf_counter() - begun
        cpu = sum(process.cpu_times()[:2]) - cpu
        sender.join()
        incoming.close()
        relay.join()
        outgoing.close()
    return Moved(size / seconds / MEGABYTE, cpu / (size / GIGABYTE))


def send_bytes(to: socket.socket, size: int) -> None:
    piece = bytes(MIB)
    for _ in range(size // MIB):
        to.sendall(piece)


def relay_bytes(source: tuple[str, int], sink: tuple[str, int], ready: threading.Event) -> None:
    with socket.create_connection(source) as incoming, socket.create_connection(sink) as outgoing:
        ready.set()
        scratch = memoryview(bytearray(256 << 10))
        while received := incoming.recv_into(scratch):
            outgoing.sendall(scratch[:received])


def bench_memory(gigabytes: float) -> None:
    """Produces and reads in turns, and looks at the broker's resident memory all the time."""
    settings = {"log_segment_bytes": 128 * MIB, "log_retention_check_interval_ms": 500}
    with servers(1, **settings) as (broker,):
        create_topic(broker, "t", retention_bytes=str(256 * MIB))
        if broker.process is None:
            raise RuntimeError("the broker was started")
        watcher = MemoryWatcher(broker.process.pid)
        batch = batch_of(500)
        producer = RawProducer(broker, "t", batch, 8)
        turn = 128 * MIB // len(batch)
        turns = max(1, int(gigabytes * GIGABYTE / (turn * len(batch))))
        read = 0
        for _ in range(turns):
            producer.send(turn)
            read += asyncio.run(read_tail(broker, "t", turn * len(batch)))
        producer.close()
        samples = watcher.stop()
    written = turns * turn * len(batch)
    name = f"broker's memory, {written / GIGABYTE:.1f} GB in, {read / GIGABYTE:.1f} GB out"
    report(name, "MB resident", samples, "mark: max < 150")


async def read_tail(broker: BrokerProcess, topic: str, size: int) -> int:
    """Reads up to so many bytes from the log's start; how many came before its end or retention."""
    async with Cluster("bench", [broker.bootstrap]) as cluster:
        leader = (await cluster.metadata([topic])).leader(topic, 0)
        if leader is None:
            raise RuntimeError(f"{topic} has no leader")
        offset = (await cluster.list_offsets({(topic, 0): -2}))[topic, 0].offset
        read = 0
        while read < size:
            positions = {(topic, 0): FetchPosition(offset)}
            (answer,) = await fetch(cluster, leader, positions, partition_max_bytes=4 * MIB, max_wait_ms=10)
            if answer.error_code or not answer.records:
                break  # retention has passed this reader, or it is at the end
            for _, header in iterate_batches(answer.records):
                read += header.size
                offset = header.next_offset
    return read


class MemoryWatcher:
    """Samples a process's resident memory in MB, ten times a second."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._samples: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> list[float]:
        self._stop.set()
        self._thread.join()
        return self._samples

    def _watch(self) -> None:
        while not self._stop.wait(0.1):
            self._samples.append(self._process.memory_info().rss / MEGABYTE)


def bench_audit(rounds: int) -> None:
    script = Path(__file__).with_name("bench_scan.py")
    subprocess.run([sys.executable, str(script), "--rounds", str(rounds)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of each part on this machine.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, with commas")
    parser.add_argument("--gb", type=float, default=10.0, help="gigabytes that pass while memory is watched")
    given = parser.parse_args()
    parts = given.only.split(",")
    for part in parts:
        if part not in PARTS:
            parser.error(f"--only {part}: expected some of {','.join(PARTS)}")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; median of {given.rounds} rounds")
    if "produce" in parts:
        bench_produce(given.rounds)
    if "fetch" in parts:
        bench_fetch(given.rounds)
    if "mirror" in parts:
        bench_mirror(min(given.rounds, 3))
    if "memory" in parts:
        bench_memory(given.gb)
    if "audit" in parts:
        bench_audit(given.rounds)


if __name__ == "__main__":
    main()
