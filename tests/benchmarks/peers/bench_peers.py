"""`make bench-peers`: the paper's experiment, this broker beside Apache Kafka, RabbitMQ and ActiveMQ.

    python -m tests.benchmarks.peers.bench_peers [--rounds 3] [--records 10000000] [--only produce,consume,…]

The server under load has one core and the clients the other, so that a ratio says what the servers cost. Both
speakers of Kafka's protocol get the same load from the same client, in turns, round by round; printed are the
medians, and the median of the rounds' ratios with the least and the greatest. Only ratios within one run
count on a shared machine.

- produce: 200-byte records, one producer; batches of 1, of 50 and the client's default; acks 0, 1 and all
- consume: one consumer, 200 KB a fetch; batches of 50 and those that the client's producer makes by default
- spread: 1, 8 and 64 partitions; 1, 16 and 256 connections; 1, 4 and 16 groups that read the same data
- latency: from sending a batch to its answer, and to its arrival at a consumer, at a fixed rate
- queues: RabbitMQ by AMQP, ActiveMQ by STOMP, persistent messages; the time to a confirmation at a fixed rate
- two: two broker ids on this host against one
- disk: bytes on disk for each message
- growth: what a record costs while one partition grows to 20 GB
- validation: what looking at each record of a batch costs our broker (`record.validation`)
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from millrace.broker.client import admin
from millrace.broker.client.cluster import Cluster
from tests.benchmarks.peers.kafka_load import (
    MIB,
    RECORD_SIZE,
    JavaTools,
    batch_of,
    confluent_consume,
    confluent_produce,
    raw_consume,
    raw_latency,
    raw_produce,
)
from tests.benchmarks.peers.queue_load import Amqp, Stomp
from tests.benchmarks.peers.servers import HEAP, ActiveMq, Kafka, Millrace, RabbitMq, Server
from tests.benchmarks.peers.usage import Cores, pinned_cores, running_on
from tests.peers.kafka import gather_jars
from tests.servers import ZooKeeper

PARTS = ("produce", "consume", "spread", "latency", "disk", "growth", "queues", "two", "validation")
ACKS = {0: "0", 1: "1", -1: "all"}
SINGLES_SHARE = 40
"""Batches of one record are some forty times slower: so many times fewer are sent."""
QUEUE_MESSAGES = 200_000
LATENCY_BATCHES, LATENCY_RATE = 2_000, 200.0
JAVA_BATCH_OF_50 = 10_600
"""`batch.size` that 50 records of 200 bytes fill."""

Load = Callable[[Server, str], tuple[int, float]]
"""Puts a server under load, in a topic that exists; how many records, in how many seconds."""


@dataclass
class Measured:
    """One experiment on one server, round by round."""

    rates: list[float] = field(default_factory=list)
    cpu_per_million: list[float] = field(default_factory=list)

    def add(self, records: int, seconds: float, cpu_seconds: float) -> None:
        self.rates.append(records / seconds)
        self.cpu_per_million.append(cpu_seconds / (records / 1e6))


class Bench:
    """The two speakers of Kafka's protocol, and what was measured on them."""

    def __init__(self, ours: Server, theirs: Server, rounds: int) -> None:
        self._ours, self._theirs, self._rounds = ours, theirs, rounds
        self._number = 0
        self.single_rate = self.batch_rate = self.consume_rate = 0.0

    def compare(
        self, name: str, load: Load, *, partitions: int = 1, prepare: Load | None = None
    ) -> tuple[float, float]:
        """Run a load on both in turns and print the line; (our median rate, the median ratio)."""
        measured = {server.name: Measured() for server in (self._ours, self._theirs)}
        for _ in range(self._rounds):
            for server in (self._ours, self._theirs):
                with self.topic(server, partitions) as topic:
                    if prepare is not None:
                        prepare(server, topic)
                    before = server.processor_seconds()
                    records, seconds = load(server, topic)
                    measured[server.name].add(records, seconds, server.processor_seconds() - before)
        ours, theirs = measured[self._ours.name], measured[self._theirs.name]
        ratios = [a / b for a, b in zip(ours.rates, theirs.rates, strict=True)]
        rate, ratio = statistics.median(ours.rates), statistics.median(ratios)
        print(
            f"{name:<44} {rate:>11,.0f} {statistics.median(theirs.rates):>11,.0f}"
            f" {ratio:>6.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
            f" {statistics.median(ours.cpu_per_million):>8.2f}"
            f" {statistics.median(theirs.cpu_per_million):>8.2f}",
            flush=True,
        )
        return rate, ratio

    def tell_memory(self, title: str) -> None:
        """The most that each had resident since this was told last."""
        ours, theirs = self._ours.peak_memory_mb(), self._theirs.peak_memory_mb()
        name = f"peak memory, MB: {title}"
        print(f"{name:<44} {ours:>11,.0f} {theirs:>11,.0f} {ours / theirs:>6.2f}", flush=True)
        for server in (self._ours, self._theirs):
            server.begin_peak_anew()

    @contextmanager
    def topic(self, server: Server, partitions: int = 1) -> Iterator[str]:
        """A fresh topic, deleted afterwards: disks are not endless."""
        self._number += 1
        name = f"bench-{self._number}"
        asyncio.run(_create(server, name, partitions))
        try:
            yield name
        finally:
            asyncio.run(_delete(server, name))


async def _create(server: Server, name: str, partitions: int) -> None:
    async with Cluster(server.name, [server.address]) as cluster:
        # The load sends one batch again and again, whose timestamp grows old for retention by time.
        await admin.create_topic(cluster, name, partitions, 1, {"retention.ms": "-1"})


async def _delete(server: Server, name: str) -> None:
    async with Cluster(server.name, [server.address]) as cluster:
        await admin.delete_topic(cluster, name)


def heading(title: str) -> None:
    print(f"\n{title}")
    print(
        f"{'':<44} {'millrace':>11} {'kafka':>11} {'ratio (min-max)':>18} {'CPU s per million records':>17}"
    )
    print(f"{'':<44} {'records/s':>11} {'records/s':>11} {'':>18} {'millrace':>8} {'kafka':>8}", flush=True)


def produce(bench: Bench, java: JavaTools, records: int) -> None:
    heading("produce, one producer, one partition")
    singles = records // SINGLES_SHARE
    for per_batch, count in ((1, singles), (50, records)):
        batch = batch_of(per_batch)
        for acks, word in ACKS.items():

            def raw(server: Server, topic: str, acks: int = acks, count: int = count) -> tuple[int, float]:
                return raw_produce(server.port, topic, batch, count, acks=acks)  # noqa: B023

            rate, _ = bench.compare(f"raw, {per_batch} a batch, acks={word}", raw)
            if acks == 1 and per_batch == 1:
                bench.single_rate = rate
            elif acks == 1:
                bench.batch_rate = rate
    print(f"{'batches of 50 against single records, raw':<44} {bench.batch_rate / bench.single_rate:>11,.1f}")
    for label, size, count in (
        ("1 a batch", 1, singles),
        ("50 a batch", JAVA_BATCH_OF_50, records),
        ("defaults", None, records),
    ):
        for acks, word in ACKS.items():

            def perf(
                server: Server, topic: str, acks: int = acks, size: int | None = size, count: int = count
            ) -> tuple[int, float]:
                return java.produce(server.address, topic, count, acks=acks, batch_bytes=size)

            bench.compare(f"Java, {label}, acks={word}", perf)
    for label, per, count in (
        ("1 a batch", 1, singles),
        ("50 a batch", 50, records // 4),
        ("defaults", None, records // 4),
    ):
        for acks, word in ACKS.items():

            def confluent(
                server: Server, topic: str, acks: int = acks, per: int | None = per, count: int = count
            ) -> tuple[int, float]:
                return confluent_produce(server.port, topic, count, acks=acks, batch_records=per)

            bench.compare(f"confluent-kafka, {label}, acks={word}", confluent)


def consume(bench: Bench, java: JavaTools, records: int) -> None:
    heading("consume, one consumer, 200 KB a fetch")
    batch = batch_of(50)

    def fill(server: Server, topic: str) -> tuple[int, float]:
        return raw_produce(server.port, topic, batch, records, acks=1)

    rate, _ = bench.compare(
        "raw", lambda server, topic: raw_consume(server.port, topic, batch, records), prepare=fill
    )
    bench.consume_rate = rate
    bench.compare("Java", lambda server, topic: java.consume(server.address, topic, records), prepare=fill)
    bench.compare(
        "confluent-kafka",
        lambda server, topic: confluent_consume(server.address, topic, records // 4),
        prepare=fill,
    )
    bench.compare(
        "Java, what its producer made by default",
        lambda server, topic: java.consume(server.address, topic, records // 2),
        prepare=lambda server, topic: java.produce(
            server.address, topic, records // 2, acks=1, batch_bytes=None
        ),
    )
    bench.compare(
        "confluent-kafka, what its own made by default",
        lambda server, topic: confluent_consume(server.address, topic, records // 4),
        prepare=lambda server, topic: confluent_produce(
            server.port, topic, records // 4, acks=1, batch_records=None
        ),
    )


def spread(bench: Bench, records: int) -> None:
    heading("spread, raw, 50 a batch, acks=1")
    batch = batch_of(50)
    for partitions in (1, 8, 64):

        def over(server: Server, topic: str, partitions: int = partitions) -> tuple[int, float]:
            return raw_produce(
                server.port, topic, batch, records, acks=1, partitions=partitions, connections=partitions
            )

        bench.compare(f"produce to {partitions} partitions, a connection each", over, partitions=partitions)
        if partitions == 1:
            continue  # below: one group

        def filled(server: Server, topic: str, partitions: int = partitions) -> tuple[int, float]:
            return raw_produce(
                server.port, topic, batch, records, acks=1, partitions=partitions, connections=partitions
            )

        def from_all(server: Server, topic: str, partitions: int = partitions) -> tuple[int, float]:
            share = records // partitions
            return raw_consume(server.port, topic, batch, share, readers=partitions, partitions=partitions)

        name = f"consume from {partitions} partitions, a connection each"
        bench.compare(name, from_all, partitions=partitions, prepare=filled)
    bench.tell_memory("by partitions")
    for connections in (1, 16, 256):

        def through(server: Server, topic: str, connections: int = connections) -> tuple[int, float]:
            return raw_produce(
                server.port, topic, batch, records, acks=1, partitions=8, connections=connections
            )

        bench.compare(f"produce by {connections} connections to 8 partitions", through, partitions=8)
        bench.tell_memory(f"{connections} connections")
    for groups in (1, 4, 16):
        share = records // groups

        def fill(server: Server, topic: str, share: int = share) -> tuple[int, float]:
            return raw_produce(server.port, topic, batch, share, acks=1)

        def read(server: Server, topic: str, groups: int = groups, share: int = share) -> tuple[int, float]:
            return raw_consume(server.port, topic, batch, share, readers=groups)

        bench.compare(f"{groups} groups read the same data", read, prepare=fill)
        bench.tell_memory(f"{groups} groups")


def latency(bench: Bench, servers: Sequence[Server], rounds: int) -> None:
    rate = LATENCY_RATE * 50
    print(f"\nlatency at {rate:,.0f} records/s in batches of 50, ms")
    print(f"{'':<44} {'p50':>8} {'p99':>8}")
    cuts: dict[tuple[str, str], tuple[float, float]] = {}
    for server in servers:
        acknowledged: list[float] = []
        seen: list[float] = []
        for _ in range(rounds):
            with bench.topic(server) as topic:
                raw_latency(server.port, topic, batch_of(50), LATENCY_BATCHES // 10, LATENCY_RATE)
                first, second = raw_latency(server.port, topic, batch_of(50), LATENCY_BATCHES, LATENCY_RATE)
            acknowledged += first
            seen += second
        for name, samples in (("acknowledged", acknowledged), ("at a waiting consumer", seen)):
            cuts[server.name, name] = tell_latency(f"{server.name}, {name}", samples)
    first_name, second_name = (server.name for server in servers)
    for name in ("acknowledged", "at a waiting consumer"):
        ratios = [a / b for a, b in zip(cuts[first_name, name], cuts[second_name, name], strict=True)]
        print(f"{f'ratio, {name}':<44} {ratios[0]:>8.2f} {ratios[1]:>8.2f}", flush=True)


def tell_latency(name: str, samples: Sequence[float]) -> tuple[float, float]:
    """(p50, p99) in ms, printed."""
    every = statistics.quantiles(samples, n=100)
    print(f"{name:<44} {every[49]:>8.2f} {every[98]:>8.2f}", flush=True)
    return every[49], every[98]


def queues(bench: Bench, ours: Server, folder: Path, rounds: int, cores: Cores) -> None:
    print("\nmessage queues, one producer, one consumer, messages/s")
    batches = {count: batch_of(count) for count in (1, 50)}
    singles: list[float] = []
    packed: list[float] = []
    consumed: list[float] = []
    for _ in range(rounds):
        for count, rates in ((1, singles), (50, packed)):
            with bench.topic(ours) as topic:
                records, seconds = raw_produce(
                    ours.port, topic, batches[count], QUEUE_MESSAGES * (1 if count == 1 else 10), acks=1
                )
                rates.append(records / seconds)
                if count == 50:
                    records, seconds = raw_consume(ours.port, topic, batches[count], QUEUE_MESSAGES * 10)
                    consumed.append(records / seconds)
    one, fifty, read = (statistics.median(rates) for rates in (singles, packed, consumed))
    print(f"{'millrace, 1 a batch':<30} produce {one:>12,.0f}")
    print(f"{'millrace, 50 a batch':<30} produce {fifty:>12,.0f}   consume {read:>12,.0f}")
    waited: list[float] = []
    for _ in range(rounds):
        with bench.topic(ours) as topic:
            raw_latency(ours.port, topic, batches[1], LATENCY_BATCHES // 10, LATENCY_RATE)
            waited += raw_latency(ours.port, topic, batches[1], LATENCY_BATCHES, LATENCY_RATE)[0]
    told = f"confirmed, {LATENCY_RATE:.0f} messages/s, p50 and p99 in ms"
    tell_latency(f"{ours.name}, {told}", waited)
    for kind, client in ((RabbitMq, Amqp), (ActiveMq, Stomp)):
        with running_on(cores.server):
            server = kind(folder)
        try:
            produced, taken, waited = [], [], []
            before = server.processor_seconds()
            for number in range(rounds):
                connection = client(server.port)
                queue = f"bench{number}"
                if isinstance(connection, Amqp):
                    connection.declare(queue)
                produced.append(QUEUE_MESSAGES / connection.produce(queue, QUEUE_MESSAGES))
                taken.append(QUEUE_MESSAGES / connection.consume(queue, QUEUE_MESSAGES))
                connection.close()
            spent = (server.processor_seconds() - before) / (rounds * QUEUE_MESSAGES / 1e6)
            sent, taken_rate = statistics.median(produced), statistics.median(taken)
            print(
                f"{server.name:<30} produce {sent:>12,.0f}   consume {taken_rate:>12,.0f}"
                f"   CPU {spent:.1f} s a million in and out   peak memory {server.peak_memory_mb():.0f} MB"
            )
            print(
                f"{f'  millrace / {server.name}':<30} produce {one / sent:>9.1f} x singly,"
                f" {fifty / sent:.1f} x in batches of 50   consume {read / taken_rate:.1f} x",
                flush=True,
            )
            for number in range(rounds):
                connection = client(server.port)
                queue = f"wait{number}"
                if isinstance(connection, Amqp):
                    connection.declare(queue)
                connection.latency(queue, LATENCY_BATCHES // 10, LATENCY_RATE)
                waited += connection.latency(queue, LATENCY_BATCHES, LATENCY_RATE)
                connection.close()
            tell_latency(f"{server.name}, {told}", waited)
        finally:
            server.stop()


def two_ids(folder: Path, records: int, rounds: int, cores: Cores) -> None:
    """One broker on one core against two on both, the load beside them on both cores."""
    print("\ntwo broker ids on this host against one, raw, 50 a batch, acks=1, clients on the same two cores")
    batch = batch_of(50)
    both = cores.server | cores.client
    rates: dict[int, list[float]] = {1: [], 2: []}
    zookeeper = ZooKeeper(folder / "zookeeper-two").start()
    try:
        for number in range(rounds):
            for ids in (1, 2):
                brokers = []
                path = zookeeper.chroot()
                for broker_id, core in zip(range(1, ids + 1), (cores.server, cores.client), strict=False):
                    with running_on(core):
                        brokers.append(
                            Millrace(folder / f"two-{number}-{ids}", broker_id=broker_id, zookeeper_path=path)
                        )
                try:
                    led = asyncio.run(_create_led(brokers[0], "t", ids))
                    with running_on(both):
                        rates[ids].append(_load_all(brokers, led, batch, records))
                finally:
                    for broker in brokers:
                        broker.stop()
    finally:
        zookeeper.stop()
    for ids, samples in rates.items():
        print(f"{f'broker ids: {ids}':<44} {statistics.median(samples):>11,.0f} records/s")
    ratios = [b / a for a, b in zip(rates[1], rates[2], strict=True)]
    print(
        f"{'ratio':<44} {statistics.median(ratios):>11.2f} ({min(ratios):.2f}-{max(ratios):.2f})", flush=True
    )


async def _create_led(broker: Millrace, topic: str, count: int) -> dict[int, int]:
    """A topic of `count` partitions; which broker id leads which."""
    async with Cluster("two", [broker.address]) as cluster:
        await admin.create_topic(cluster, topic, count, 1, {})
        view = await cluster.metadata([topic], max_age_ms=0)
        leaders = {view.leader(topic, number): number for number in range(count)}
    return {leader: number for leader, number in leaders.items() if leader is not None}


def _load_all(brokers: Sequence[Millrace], led: dict[int, int], batch: bytes, records: int) -> float:
    """Records a second through all brokers together, a client process for each."""
    import multiprocessing
    import time

    context = multiprocessing.get_context("spawn")
    share = records // len(brokers)
    clients = [
        context.Process(target=_produce_one, args=(broker.port, "t", led[broker.broker.id], batch, share))
        for broker in brokers
    ]
    for client in clients:
        client.start()
    begun = time.perf_counter()
    for client in clients:
        client.join()
    if any(client.exitcode for client in clients):
        raise RuntimeError("a client failed")
    return share * len(brokers) / (time.perf_counter() - begun)


def _produce_one(port: int, topic: str, partition: int, batch: bytes, records: int) -> None:
    raw_produce(port, topic, batch, records, acks=1, first_partition=partition)


def disk(bench: Bench, servers: Sequence[Millrace | Kafka]) -> None:
    print(f"\nbytes on disk for each message of {RECORD_SIZE} bytes, beyond the message (the paper: 9)")
    for per_batch in (1, 50, 500):
        sizes = []
        for server in servers:
            with bench.topic(server) as topic:
                records, _ = raw_produce(server.port, topic, batch_of(per_batch), 50 * per_batch, acks=1)
                sizes.append(
                    f"{server.name} {server.log_size(topic) / (records + per_batch) - RECORD_SIZE:.1f}"
                )
        print(f"{f'{per_batch} a batch':<44} {'   '.join(sizes)}", flush=True)


def growth(bench: Bench, server: Server, gigabytes: int) -> None:
    """What a record costs as the log grows, written and read at its end and at its beginning. On a machine
    with less memory than that both servers feel the disk."""
    print(
        f"\n{server.name}: one partition that grows to {gigabytes} GB, 500 records a batch, broker's CPU s a "
        "million records"
    )
    batch = batch_of(500)
    per_gigabyte = int(1e9 / len(batch)) * 500
    with bench.topic(server) as topic:
        for number in range(1, gigabytes + 1):
            before = server.processor_seconds()
            records, seconds = raw_produce(server.port, topic, batch, per_gigabyte, acks=1)
            spent = (server.processor_seconds() - before) / (records / 1e6)
            if number in (1, 2, 5, 10, 15, gigabytes):
                reading = []
                for offset in (0, number * per_gigabyte - per_gigabyte // 2):
                    before = server.processor_seconds()
                    read, _ = raw_consume(
                        server.port, topic, batch, per_gigabyte // 2, fetch_bytes=MIB, offset=offset
                    )
                    reading.append((server.processor_seconds() - before) / (read / 1e6))
                print(
                    f"{f'at {number} GB':<44} written {spent:>6.2f} ({records / seconds:>11,.0f} records/s)"
                    f"   its first half GB read {reading[0]:>6.2f}, its last {reading[1]:>6.2f}",
                    flush=True,
                )


def validation(folder: Path, records: int, rounds: int, cores: Cores) -> None:
    """Two of our brokers, one of which looks into each batch, in turns."""
    print("\nrecord.validation, raw, 500 records a batch, acks=1, broker's CPU s a million records")
    with running_on(cores.server):
        brokers = {
            word: Millrace(folder / f"validation-{word}", record_validation=word)
            for word in ("full", "header")
        }
    try:
        for codec in ("none", "lz4", "gzip"):
            batch = batch_of(500, codec)
            spent: dict[str, list[float]] = {word: [] for word in brokers}
            rates: dict[str, list[float]] = {word: [] for word in brokers}
            for number in range(rounds):
                for word, broker in brokers.items():
                    topic = f"{codec}-{number}"
                    asyncio.run(_create(broker, topic, 1))
                    before = broker.processor_seconds()
                    with running_on(cores.client):
                        count, seconds = raw_produce(broker.port, topic, batch, records, acks=1)
                    spent[word].append((broker.processor_seconds() - before) / (count / 1e6))
                    rates[word].append(count / seconds)
                    asyncio.run(_delete(broker, topic))
            middle = statistics.median
            costs = (f"{w} {middle(spent[w]):.3f} ({middle(rates[w]):>11,.0f} a second)" for w in brokers)
            print(f"{codec:<44} {', '.join(costs)}", flush=True)
    finally:
        for broker in brokers.values():
            broker.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description="This broker beside Apache Kafka, RabbitMQ and ActiveMQ.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--records", type=int, default=10_000_000, help="records an experiment, in batches")
    parser.add_argument("--gigabytes", type=int, default=20, help="how far the growing partition grows")
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, with commas")
    given = parser.parse_args()
    parts = given.only.split(",")
    for part in parts:
        if part not in PARTS:
            parser.error(f"--only {part}: expected some of {','.join(PARTS)}")
    cores = pinned_cores()
    java = JavaTools(gather_jars())
    print(
        f"server on core {sorted(cores.server)}, clients on core {sorted(cores.client)}, "
        f"load {os.getloadavg()[0]:.1f}; {given.rounds} rounds; Java heaps {HEAP}"
    )
    with tempfile.TemporaryDirectory(prefix="millrace-peers-") as name:
        folder = Path(name)
        started: list[Millrace | Kafka] = []
        try:
            with running_on(cores.server):
                ours = Millrace(folder)
                started.append(ours)
                theirs = Kafka(folder)
                started.append(theirs)
            with running_on(cores.client):
                bench = Bench(ours, theirs, given.rounds)
                if "produce" in parts:
                    produce(bench, java, given.records)
                    bench.tell_memory("producing")
                if "consume" in parts:
                    consume(bench, java, given.records)
                    bench.tell_memory("consuming")
                if "spread" in parts:
                    spread(bench, given.records // 2)
                if "latency" in parts:
                    latency(bench, started, given.rounds)
                if "disk" in parts:
                    disk(bench, started)
                if "growth" in parts:
                    for server in started:
                        growth(bench, server, given.gigabytes)
                    bench.tell_memory("latency, disk, growth")
                if "queues" in parts:
                    queues(bench, ours, folder, given.rounds, cores)
        finally:
            for server in started:
                server.stop()
        if "validation" in parts:
            validation(folder, given.records, given.rounds, cores)
        if "two" in parts:
            two_ids(folder, given.records // 2, given.rounds, cores)
    left = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if left:
        print(f"threads left: {left}", file=sys.stderr)


if __name__ == "__main__":
    main()
