"""What is measured on a running mirror: how fast and at what cost it works off a backlog, and its latency.

The mirror stands still (SIGSTOP, a minute at most; sessions are longer) while the backlog is written, so that
the brokers do nothing but serve it afterwards. What is counted is the same for every system:

    not counted   until a tenth of the backlog is there, or WARM_UP_S have passed
    counted       from then on until all is there, but MEASURED_S at most

from one growth of the target's last stable offsets to another, so that no transaction is counted in part.
Control records of transactions count there too, less than one in a hundred. What a slow mirror has left is
deleted at the source, and it ends there.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import signal
import struct
import time
from dataclasses import dataclass

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.offsets import LATEST
from millrace.broker.errors import MillraceError
from millrace.broker.protocol import hot_fetch, hot_produce
from millrace.broker.protocol.batch import iterate_batches
from millrace.broker.protocol.hot_fetch import FetchRequest, PartitionFetch
from millrace.deploy.processes import start_time
from tests.benchmarks.mirror.ends import Ends
from tests.benchmarks.mirror.workloads import Workload
from tests.benchmarks.peers.kafka_load import (
    FETCH_VERSION,
    MIB,
    PRODUCE_VERSION,
    connect,
    raw_produce,
    receive_frame,
)
from tests.benchmarks.peers.usage import processor_seconds
from tests.record_deletion import delete_records

POLL_S = 0.02
STALL_S = 60.0
"""Without any progress for so long, a mirror has failed."""
WARM_UP_PART = 0.1
WARM_UP_S = 5.0
MEASURED_S = 15.0
"""Bounds what a slow mirror costs: one that takes longer for its backlog is at its steady rate by then."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What was counted of one backlog."""

    records: int
    megabytes: float
    seconds: float
    cpu_s: float

    def figures(self) -> dict[str, float]:
        return {
            "MB/s": self.megabytes / self.seconds,
            "records/s": self.records / self.seconds,
            "CPU s/GB": self.cpu_s / (self.megabytes / 1e3),
            "records": self.records,
            "MB": self.megabytes,
            "seconds": self.seconds,
        }


class Window:
    """What of a backlog counts; told how far it has come, when and at which cost, it says when to end. Pure.

    `seen` is called in the order of time, with the records that are there, the time in s and the processor
    time in s so far; the first call is the beginning.
    """

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self._begun_s = -1.0
        self._newest = (0, 0.0, 0.0)
        self._first: tuple[int, float, float] | None = None

    def seen(self, there: int, now_s: float, cpu_s: float) -> bool:
        """Whether it is over."""
        if self._begun_s < 0:
            self._begun_s = now_s
        if there > self._newest[0]:
            self._newest = (there, now_s, cpu_s)
            is_warm = there >= self._wanted * WARM_UP_PART or now_s - self._begun_s >= WARM_UP_S
            if self._first is None and is_warm:
                self._first = self._newest
        if there >= self._wanted:
            return True
        return self._first is not None and now_s - self._first[1] >= MEASURED_S

    def counted(self) -> tuple[int, float, float]:
        """Records, seconds and seconds of processor time. Raises Stalled where nothing came after the
        warm-up: all at once, or nothing more."""
        if self._first is None or self._newest[0] <= self._first[0]:
            raise Stalled("nothing was carried after the warm-up: the backlog is too small to tell a rate")
        records, seconds, cpu_s = (
            after - before for after, before in zip(self._newest, self._first, strict=True)
        )
        return int(records), seconds, cpu_s


class Stalled(Exception):
    """A mirror does not come to an end; the text says how far it was."""


def wait_until_ready(ends: Ends, pid: int, topics: dict[str, int], canary: str, timeout_s: float) -> None:
    """Until the mirror carries the canary's batch of every source and has made every topic at the target."""

    async def wait() -> None:
        async with Cluster("target", [ends.target.address]) as target:
            deadline = time.monotonic() + timeout_s
            while not await _is_ready(target, topics, canary, len(ends.sources)):
                if time.monotonic() > deadline:
                    raise Stalled(f"nothing is mirrored within {timeout_s:.0f} s")
                check_alive(pid)
                await asyncio.sleep(0.2)

    asyncio.run(wait())


def check_alive(pid: int) -> None:
    """Raises Stalled when the mirror's process has ended."""
    if start_time(pid) is None:
        raise Stalled("the mirror has ended")


async def _is_ready(target: Cluster, topics: dict[str, int], canary: str, least: int) -> bool:
    try:
        known = (await target.metadata(max_age_ms=0)).topics
        if any(name not in known or len(known[name].partitions) < count for name, count in topics.items()):
            return False
        return (await target.list_offsets({(canary, 0): LATEST}))[canary, 0].offset >= least
    except MillraceError:
        return False


def write_backlog(ends: Ends, workload: Workload, topic: str, scale: float) -> None:
    for end in ends.sources.values():
        raw_produce(
            end.port,
            topic,
            workload.batch,
            workload.records(scale),
            acks=1,
            partitions=workload.partitions,
            is_across=True,
        )


def backlog(ends: Ends, pid: int, workload: Workload, topic: str, scale: float) -> Moved:
    """Writes a backlog into a topic that the mirror knows already, and watches it go; what is left of it then
    is deleted at the source. Raises Stalled."""
    os.kill(pid, signal.SIGSTOP)
    try:
        write_backlog(ends, workload, topic, scale)
        wanted = asyncio.run(_total(ends, topic, workload.partitions))
    finally:
        os.kill(pid, signal.SIGCONT)
    window = asyncio.run(_watch(ends, pid, topic, workload.partitions, wanted))
    records, seconds, cpu_s = window.counted()
    asyncio.run(_delete_rest(ends, topic, workload.partitions))
    megabytes = records / workload.records_per_batch * len(workload.batch) / 1e6
    return Moved(records, megabytes, seconds, cpu_s)


def carry(ends: Ends, pid: int, workload: Workload, topic: str, scale: float) -> None:
    """A backlog that nobody measures, to its end. Raises Stalled."""
    write_backlog(ends, workload, topic, scale)
    wanted = asyncio.run(_total(ends, topic, workload.partitions))
    asyncio.run(_watch(ends, pid, topic, workload.partitions, wanted, is_whole=True))


async def _delete_rest(ends: Ends, topic: str, partitions: int) -> None:
    """At the target too: a session's backlogs are many GB."""
    for name, end in [*ends.sources.items(), ("target", ends.target)]:
        async with Cluster(name, [end.address]) as cluster:
            await delete_records(cluster, {(topic, number): -1 for number in range(partitions)})


async def _total(ends: Ends, topic: str, partitions: int) -> int:
    total = 0
    for name, end in ends.sources.items():
        async with Cluster(name, [end.address]) as cluster:
            found = await cluster.list_offsets({(topic, number): LATEST for number in range(partitions)})
            total += sum(each.offset for each in found.values())
    return total


async def _watch(
    ends: Ends, pid: int, topic: str, partitions: int, wanted: int, *, is_whole: bool = False
) -> Window:
    """Until the window is over (`is_whole`: until all is there)."""
    keys = {(topic, number): LATEST for number in range(partitions)}
    window = Window(wanted)
    there, moved_at, cpu_s = 0, time.monotonic(), processor_seconds(pid)
    async with Cluster("target", [ends.target.address]) as target:
        while not window.seen(there, time.perf_counter(), cpu_s) or (is_whole and there < wanted):
            await asyncio.sleep(POLL_S)
            found = sum(
                each.offset for each in (await target.list_offsets(keys, read_committed=True)).values()
            )
            if found > there:
                there, moved_at, cpu_s = found, time.monotonic(), processor_seconds(pid)
            elif time.monotonic() - moved_at > STALL_S:
                check_alive(pid)
                raise Stalled(f"{there} records of {wanted} after {STALL_S:.0f} s without progress")
    return window


def latency(
    source_port: int,
    target_port: int,
    topic: str,
    batch: bytes,
    per_batch: int,
    bytes_per_s: float,
    seconds: float,
    warm_up_s: float,
) -> list[float]:
    """Milliseconds from sending a batch to its last record's arrival at a read-committed consumer of the
    target. With the source as the target: what the way takes without a mirror.

    Batches leave at a fixed rate, whatever comes of them (no coordinated omission). One partition.
    """
    request = b"".join(hot_produce.encode_request(PRODUCE_VERSION, 1, "bench", {(topic, 0): batch}, acks=1))
    interval = len(batch) / bytes_per_s
    warm_up_count, count = int(warm_up_s / interval), int((warm_up_s + seconds) / interval)
    producer, consumer = connect(source_port), connect(target_port)
    selector = selectors.DefaultSelector()
    selector.register(producer, selectors.EVENT_READ)
    selector.register(consumer, selectors.EVENT_READ)
    offset = records = 0
    sent: list[float] = []
    seen: list[float] = []

    def ask() -> None:
        asked = [PartitionFetch(topic, 0, offset, 4 * MIB)]
        request = FetchRequest(500, 1, 4 * MIB, True, asked)
        consumer.sendall(hot_fetch.encode_request(FETCH_VERSION, 1, "bench", request))

    ask()
    begun = time.perf_counter() + 0.05
    heard = time.monotonic()
    while len(seen) < count:
        due = begun + len(sent) * interval
        now = time.perf_counter()
        if len(sent) < count and now >= due:
            producer.sendall(request)
            sent.append(due)
            continue
        wait = due - now if len(sent) < count else 1.0
        for key, _ in selector.select(wait):
            if key.fileobj is producer:
                frame = receive_frame(producer)
                answers, _ = hot_produce.decode_response(memoryview(frame), PRODUCE_VERSION)
                if answers[0].error_code:
                    raise RuntimeError(f"produce was refused with code {answers[0].error_code}")
                continue
            frame = receive_frame(consumer)
            now = time.perf_counter()
            part = hot_fetch.decode_response(memoryview(frame), FETCH_VERSION).partitions[0]
            for position, header in iterate_batches(part.records):
                if position + header.size <= len(part.records) and header.next_offset > offset:
                    offset = header.next_offset
                    records += 0 if header.is_control else header.record_count
            while len(seen) < min(records // per_batch, len(sent)):
                seen.append((now - sent[len(seen)]) * 1e3)
                heard = time.monotonic()
            ask()
        if time.monotonic() - heard > STALL_S:
            raise Stalled(f"{len(seen)} of {len(sent)} batches arrived")
    producer.close()
    consumer.close()
    return seen[warm_up_count:]


def request_response(port: int, topic: str, partition_bytes: int, batch: bytes, seconds: float) -> float:
    """MB/s of a plain loop that asks for so many bytes of one partition, waits for them, and asks again."""
    connection = connect(port)
    begun, size, offset = time.perf_counter(), 0, 0
    while time.perf_counter() - begun < seconds:
        asked = [PartitionFetch(topic, 0, offset, partition_bytes)]
        request = FetchRequest(500, 1, partition_bytes, False, asked)
        connection.sendall(hot_fetch.encode_request(FETCH_VERSION, 1, "bench", request))
        (length,) = struct.unpack(">i", _exactly(connection, 4))
        frame = _exactly(connection, length)
        part = hot_fetch.decode_response(memoryview(frame), FETCH_VERSION).partitions[0]
        if part.error_code:
            raise RuntimeError(f"fetch was refused with code {part.error_code}")
        whole = len(part.records) // len(batch)
        if not whole:
            break  # the end of the log
        last = part.records[(whole - 1) * len(batch) : whole * len(batch)]
        offset = next(header.next_offset for _, header in iterate_batches(last))
        size += whole * len(batch)
    connection.close()
    return size / (time.perf_counter() - begun) / 1e6


def _exactly(connection: object, size: int) -> bytearray:
    from tests.benchmarks.peers.kafka_load import receive_exactly

    return receive_exactly(connection, size)  # type: ignore[arg-type]
