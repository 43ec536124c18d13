"""Every path that a batch can take, between real clusters: what a client reads there is what it reads here.

Records are read by other clients (confluent-kafka, Apache Kafka's Java consumer) from both ends and compared
one by one: key, value, headers, timestamp. Apache Kafka's DumpLogSegments looks at every record of the
target's files. Where the target is Apache Kafka, the record sections of batches that pass through are
compared byte by byte on the disks.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from millrace.broker.client.admin import create_topic
from millrace.broker.client.cluster import Cluster
from millrace.broker.protocol.batch import HEADER_SIZE, BatchHeader, iterate_batches, verify_crc
from millrace.broker.protocol.compression import CODEC_NAMES, LZ4
from millrace.broker.protocol.records import Record, build_batch, read_records
from millrace.mirror.topics.own_topics import POSITIONS
from tests import seeds
from tests.cluster.mirror_process import MirrorProcess, end_offset, send, until
from tests.pairs import End, Pair, in_pairs
from tests.waiting import Deadline
from tests.wire.java_tools import JavaTools


def now_ms() -> int:
    return int(time.time() * 1000)


NOW_MS = now_ms() - 60_000
READ_S = 120.0
DEFAULT_LIMIT = 1_048_588
"""Of a batch, where a topic says nothing; the same of both kinds of servers."""
NOISE = random.Random(7).randbytes(DEFAULT_LIMIT)
"""No codec makes less of it."""
Batch: TypeAlias = tuple[BatchHeader, bytes]


class Seen(NamedTuple):
    """One record as another client sees it. The kind of timestamp is the topic's own and not compared."""

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp_ms: int


def read(end: End, topic: str) -> list[Seen]:
    """All committed records of partition 0."""
    consumer = Consumer(
        {
            "bootstrap.servers": end.bootstrap,
            "group.id": f"reader-{time.monotonic_ns()}",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
            "check.crcs": True,
        }
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    found: list[Seen] = []
    deadline = Deadline(lambda: f"the end of {topic} at {end.name}; {len(found)} came", within_s=READ_S)
    try:
        while True:
            deadline.check()
            for message in consumer.consume(10_000, timeout=0.2):
                if message.error() is not None:
                    if message.error().name() == "_PARTITION_EOF":
                        return found
                    continue  # a leader that is not known yet
                headers = tuple(message.headers() or ())
                found.append(Seen(message.key(), message.value(), headers, message.timestamp()[1]))
    finally:
        consumer.close()


def batches_on_disk(folder: Path, only: Container[bytes | None] | None = None) -> Iterator[Batch]:
    """Each batch of data of a partition's files, with its record section; only those whose first value is in
    `only`, when that is given."""
    for path in sorted(folder.glob("*.log")):
        data = memoryview(path.read_bytes())
        for position, header in iterate_batches(data):
            batch = data[position : position + header.size]
            verify_crc(batch, 0, header)
            is_data = header.record_count > 0 and not header.is_control
            if is_data and (only is None or read_records(batch)[0].value in only):
                yield header, bytes(batch[HEADER_SIZE:])


def headers_on_disk(*folders: Path) -> list[BatchHeader]:
    """Of all batches of these partitions' files, the ends of transactions too."""
    logs = [path.read_bytes() for folder in folders for path in sorted(folder.glob("*.log"))]
    return [header for data in logs for _, header in iterate_batches(memoryview(data))]


def codecs(batches: Iterable[Batch]) -> list[int]:
    """In which codec each record lies."""
    return [header.compression for header, _ in batches for _ in range(header.record_count)]


def source_batch_count(pair: Pair, *topics: str) -> int:
    """On the source's disk, of whatever kind."""
    return len(headers_on_disk(*(pair.source.log_folder(topic, 0) for topic in topics)))


async def check_stamps(pair: Pair, mirror: MirrorProcess, *topics: str) -> None:
    """Each batch of data on the target's disk stands in a transaction of the mirror's own producers, under
    the epoch of the target's leader and without a delete horizon; nobody else ended a transaction there."""
    # What else each of its transactions writes tells who they are.
    folders = pair.target.data.glob(f"{POSITIONS.of(mirror.settings['name'])}-*")
    written = [header for header in headers_on_disk(*folders) if header.is_transactional]
    its_own = {(header.producer_id, header.producer_epoch) for header in written if not header.is_control}
    assert its_own
    async with pair.target.cluster() as target:
        view = await target.metadata(list(topics), max_age_ms=0)
    for topic in topics:
        headers = headers_on_disk(pair.target.log_folder(topic, 0))
        assert {(header.producer_id, header.producer_epoch) for header in headers} <= its_own
        assert all(header.is_transactional for header in headers)
        assert not any(header.has_delete_horizon for header in headers)
        assert {header.leader_epoch for header in headers} == {view.topics[topic].partitions[0].leader_epoch}
        ends = [header for header in headers if header.is_control]
        # A coordinator's, not a producer's.
        assert ends and {header.base_sequence for header in ends} == {-1}


async def carried(pair: Pair, topics: Sequence[str], **config: Any) -> MirrorProcess:
    """Mirrors until every record of partition 0 of these topics is at the target."""
    mirror = pair.mirror(topics, **config)
    async with pair.source.cluster() as source:
        ends = {topic: await end_offset(source, topic, 0) for topic in topics}

    async def all_there() -> bool:
        assert mirror.process is not None and mirror.process.poll() is None, mirror.log[-3_000:]
        positions = {each["topic"]: each["position"] for each in mirror.status().get("partitions", [])}
        return all(positions.get(topic) == end for topic, end in ends.items())

    await until(all_there, lambda: f"{ends} {mirror.status()} {mirror.log[-3_000:]}")
    return mirror


def paths_taken(mirror: MirrorProcess, counted: str = "batches") -> dict[str, int]:
    """Batches by path, as /metrics counts them; or their `path_records`, or their `path_bytes`."""
    line = re.compile(rf'millrace_mirror_{counted}_total\{{[^}}]*path="(\w+)"[^}}]*\}} (\S+)')
    return {path: int(float(count)) for path, count in line.findall(mirror.get("/metrics")[1])}


def check_counted(pair: Pair, mirror: MirrorProcess, committed: Mapping[str, Sequence[Seen]]) -> None:
    """Over the paths that carry, records and bytes are those of the source's batches: none twice, none but
    what is carried. `committed`: the records of each topic. (What an aborted transaction held is carried
    again, and counted again.)"""
    headers = [
        header
        for topic, records in committed.items()
        for header, _ in batches_on_disk(pair.source.log_folder(topic, 0), {each.value for each in records})
    ]
    record_count = sum(header.record_count for header in headers)
    assert record_count == sum(map(len, committed.values()))
    records, sizes = paths_taken(mirror, "path_records"), paths_taken(mirror, "path_bytes")
    counted, expected = (
        (sum(records.values()), sum(sizes.values())),
        (record_count, sum(header.size for header in headers)),
    )
    assert counted == expected or (was_repeated(mirror) and counted > expected), (records, sizes)
    assert records.keys() == sizes.keys() == paths_taken(mirror).keys() - {"drop"}
    assert min(*records.values(), *sizes.values()) > 0


def check_count(mirror: MirrorProcess, in_all: int) -> None:
    """Each batch of the source was counted under one path, once; with the same reservation."""
    counted = sum(paths_taken(mirror).values())
    assert counted == in_all or (was_repeated(mirror) and counted > in_all), (paths_taken(mirror), in_all)


def was_repeated(mirror: MirrorProcess) -> bool:
    aborted: int = mirror.status()["transactions"]["aborted"]
    return aborted > 0


def some_records(rng: random.Random, count: int, size: int, first: int = 0) -> list[Record]:
    """Null keys and values, headers with null values, times that go back, and none."""
    return [
        Record(
            rng.choice((None, b"", b"key-%d" % rng.randrange(100))),
            None if rng.random() < 0.1 else b"%d " % (first + at) + rng.randbytes(size // 2).hex().encode(),
            rng.choice(((), (("trace", b"\x00\xff"), ("none", None), ("trace", b"")))),
            -1 if rng.random() < 0.05 else NOW_MS + rng.randrange(-5_000, 5_000),
        )
        for at in range(count)
    ]


async def write_all_codecs(cluster: Cluster, topic: str, rng: random.Random) -> None:
    """Runs of tiny batches of each codec, and between them batches that pass on their own."""
    for codec in CODEC_NAMES:
        for at in range(30):
            await send(cluster, topic, 0, build_batch(some_records(rng, 1, 200, at), compression=codec))
        for count, size in ((5, 100), (200, 400), (3, 60_000)):
            await send(cluster, topic, 0, build_batch(some_records(rng, count, size), compression=codec))


def transactional_producers(end: End, topic: str) -> list[Producer]:
    """Two, of different codecs, that have begun."""
    producers = [
        Producer(
            {
                "bootstrap.servers": end.bootstrap,
                "transactional.id": f"{topic}-{number}",
                "compression.type": codec,
                "linger.ms": 0,
            }
        )
        for number, codec in enumerate(("none", "lz4"))
    ]
    for producer in producers:
        producer.init_transactions(READ_S)
    return producers


async def write_transactions(end: End, topic: str, rng: random.Random) -> None:
    """Transactions of a few records that end either way, beside an idempotent and a plain producer."""

    def produce() -> None:
        producers = transactional_producers(end, topic)
        idempotent = Producer(
            {"bootstrap.servers": end.bootstrap, "enable.idempotence": True, "linger.ms": 0}
        )
        for number in range(16):
            for which, producer in enumerate(producers):
                producer.begin_transaction()
                for at in range(rng.choice((1, 1, 3, 40))):
                    value = b"in %d.%d.%d" % (which, number, at)
                    producer.produce(topic, value, b"k", 0, timestamp=NOW_MS + at)
                producer.flush(READ_S)
                idempotent.produce(topic, b"beside %d" % number, None, 0, timestamp=NOW_MS)
                idempotent.flush(READ_S)
            for producer in producers:
                if rng.random() < 0.5:
                    producer.abort_transaction(READ_S)
                else:
                    producer.commit_transaction(READ_S)

    await asyncio.to_thread(produce)


async def write_compacted(pair: Pair, cluster: Cluster, topic: str, rng: random.Random) -> None:
    """Few keys and many values; returns when the source's cleaner has left holes."""
    folder = pair.source.log_folder(topic, 0)

    def is_clean() -> bool:
        """No key twice: no later round can take anything away."""
        keys: list[bytes | None] = []
        has_holes = False
        for path in sorted(folder.glob("*.log")):
            data = memoryview(path.read_bytes())
            for position, header in iterate_batches(data):
                has_holes |= header.record_count < header.last_offset_delta + 1
                batch = data[position : position + header.size]
                keys += [record.key for record in read_records(batch)] if header.record_count else []
        return has_holes and len(set(keys)) == len(keys)

    for number in range(60):
        records = [
            Record(b"key-%d" % rng.randrange(40), b"%d.%d" % (number, at), (("h", None),), now_ms())
            for at in range(rng.choice((1, 10, 30)))
        ]
        await send(cluster, topic, 0, build_batch(records, compression=number % 5))

    await until_cleaned(cluster, topic, is_clean)


async def until_cleaned(cluster: Cluster, topic: str, is_clean: Callable[[], bool]) -> None:
    """Until a look at the log's files says that its cleaner has done what is waited for."""
    numbers = itertools.count(1)

    async def is_so() -> bool:
        # The active segment is never compacted: a further record, later by its own time, begins a new one.
        further = Record(b"last-%d" % next(numbers), b"", (), now_ms())
        await send(cluster, topic, 0, build_batch([further]))
        await asyncio.sleep(0.2)
        try:
            if not is_clean():
                return False
            await asyncio.sleep(0.2)  # while files are being changed, too little may be there
            return is_clean()
        except OSError:
            return False  # the cleaner has just put another file in its place

    await until(is_so, lambda: f"{topic} is as its cleaner is to leave it")


JAVA_FORMAT = ("print.timestamp", "print.key", "print.headers", "print.partition")


def read_by_java(java: JavaTools, topic: str, count: int) -> list[str]:
    """As its console shows the committed records of partition 0: but for offsets and kind of time."""
    shown = [word for name in JAVA_FORMAT for word in ("--property", f"{name}=true")]
    shown += ["--property", "null.literal=none at all"]
    where = ["--topic", topic, "--partition", "0", "--offset", "earliest"]
    bounds = ["--isolation-level", "read_committed", "--max-messages", str(count), "--timeout-ms", "60000"]
    lines = java.run("console-consumer", *where, *bounds, *shown).checked().out.split("\n")[:-1]
    return [re.sub("^(CreateTime|LogAppendTime):", "", line) for line in lines]


def dumped(java: JavaTools, folder: Path) -> int:
    """How many records of data Apache Kafka's own tool finds in a partition's files, all of them valid."""
    files = ",".join(str(path) for path in sorted(folder.glob("*.log")))
    lines = java.raw("dump-log", "--deep-iteration", "--files", files).checked().lines
    batches = [line for line in lines if line.startswith("baseOffset:")]
    assert batches and all("isvalid: true" in line for line in batches)
    data = [line for line in batches if "isControl: false" in line]
    return sum(int(line.split(" count: ")[1].split()[0]) for line in data)


COMPACTED_FILE = 1 << 20
COMPACT_SOON = {
    "cleanup.policy": "compact",
    "segment.bytes": str(COMPACTED_FILE),
    "segment.ms": "100",
    "min.cleanable.dirty.ratio": "0.01",
    "max.compaction.lag.ms": "100",
}


@pytest.mark.safety
@in_pairs("kafka-millrace", "millrace-kafka")
def test_every_record_is_read_at_the_target_as_at_the_source(pair: Pair) -> None:
    asyncio.run(all_kinds_of_topics(pair))


async def all_kinds_of_topics(pair: Pair) -> None:
    rng = random.Random(4)
    plain, appended, transactions, compacted = (
        pair.unique(name) for name in ("plain", "appended", "transactions", "compacted")
    )
    async with pair.source.cluster() as source:
        await create_topic(source, plain, 1, 1)
        await write_all_codecs(source, plain, rng)
        await create_topic(source, appended, 1, 1, {"message.timestamp.type": "LogAppendTime"})
        await write_all_codecs(source, appended, rng)
        await create_topic(source, transactions, 1, 1)
        await write_transactions(pair.source, transactions, rng)
        await create_topic(source, compacted, 1, 1, COMPACT_SOON)
        await write_compacted(pair, source, compacted, rng)
    topics = [plain, appended, transactions, compacted]
    mirror = await carried(pair, topics)
    here, there = (JavaTools(end.bootstrap, pair.folder) for end in (pair.source, pair.target))
    committed: dict[str, list[Seen]] = {}
    for topic in topics:
        expected = committed[topic] = await asyncio.to_thread(read, pair.source, topic)
        assert expected and await asyncio.to_thread(read, pair.target, topic) == expected, topic
        if topic != compacted:  # the target's cleaner may be at its files
            found = await asyncio.to_thread(dumped, there, pair.target.log_folder(topic, 0))
            assert found >= len(expected), topic
            sent = batches_on_disk(pair.source.log_folder(topic, 0), {record.value for record in expected})
            assert codecs(batches_on_disk(pair.target.log_folder(topic, 0))) == codecs(sent), topic
            await check_stamps(pair, mirror, topic)
        if topic in (appended, transactions):
            by_java = await asyncio.to_thread(read_by_java, here, topic, len(expected))
            assert len(by_java) == len(expected)
            assert await asyncio.to_thread(read_by_java, there, topic, len(expected)) == by_java, topic
    taken = paths_taken(mirror)
    assert taken.keys() >= {"pass_through", "rebuild", "coalesce", "drop"}, taken
    assert taken["coalesce"] >= 2 * 5 * 30, "each run of tiny batches was merged"
    check_counted(pair, mirror, committed)


@pytest.mark.long
@pytest.mark.safety
@in_pairs("kafka-kafka", "kafka-millrace")
def test_any_sequence_of_batches_is_read_by_others_as_at_the_source(pair: Pair) -> None:
    asyncio.run(drawn_sequences(pair, random.Random(seeds.given())))


async def drawn_sequences(pair: Pair, rng: random.Random) -> None:
    """Topics of runs of batches, each run of one kind, fetched in answers that are cut anywhere."""
    topics = [pair.unique(f"drawn-{number}") for number in range(seeds.runs(6))]
    async with pair.source.cluster() as source:
        for topic in topics:
            time_type = rng.choice(("CreateTime", "LogAppendTime"))
            await create_topic(source, topic, 1, 1, {"message.timestamp.type": time_type})
            for _ in range(rng.randint(1, 12)):
                await write_run(source, topic, rng)
            if rng.random() < 0.5:
                await write_transactions(pair.source, topic, rng)
                await write_run(source, topic, rng)
    answer = rng.choice((16 << 10, 128 << 10, 1 << 20))
    fetch = {"max_bytes": max(answer, 64 << 10), "partition_max_bytes": answer, "behind_max_bytes": 0}
    mirror = await carried(pair, topics, fetch=fetch)
    here, there = (JavaTools(end.bootstrap, pair.folder) for end in (pair.source, pair.target))
    for topic in topics:
        expected = await asyncio.to_thread(read, pair.source, topic)
        assert expected and await asyncio.to_thread(read, pair.target, topic) == expected, topic
        by_java = await asyncio.to_thread(read_by_java, here, topic, len(expected))
        assert len(by_java) == len(expected)
        assert await asyncio.to_thread(read_by_java, there, topic, len(expected)) == by_java, topic
        found = await asyncio.to_thread(dumped, there, pair.target.log_folder(topic, 0))
        assert found >= len(expected), topic
    assert paths_taken(mirror).get("coalesce") or len(topics) < 3


async def write_run(cluster: Cluster, topic: str, rng: random.Random) -> None:
    """Batches of one codec and one number of records."""
    codec, count = rng.choice(list(CODEC_NAMES)), rng.choice((1, 1, 1, 2, 5, 40, 5_000))
    times, sizes = (1, (0, 2, 90)) if count > 100 else (rng.choice((1, 2, 7, 60)), (0, 2, 90, 1_400))
    for at in range(times):
        records = some_records(rng, count, rng.choice(sizes), at)
        await send(cluster, topic, 0, build_batch(records, compression=codec))


@in_pairs("kafka-millrace", "millrace-kafka")
def test_compacted_log_whose_files_hold_one_batch_each_arrives_without_a_gap(pair: Pair) -> None:
    """No answer goes on from one file into the next, so nothing beside a batch tells that a hole is one."""
    asyncio.run(one_batch_a_file(pair))


async def one_batch_a_file(pair: Pair) -> None:
    topic = pair.unique("lone")
    folder = pair.source.log_folder(topic, 0)
    keys = [b"again", b"1", b"again", b"again", b"2", b"3", b"again", b"4", b"5"]
    kept = len(set(keys))

    def batches() -> int:
        files = [path.read_bytes() for path in folder.glob("*.log")]
        return sum(header.record_count > 0 for data in files for _, header in iterate_batches(data))

    async with pair.source.cluster() as source:
        await create_topic(source, topic, 1, 1, COMPACT_SOON)
        for key in keys:
            value = b"." * (COMPACTED_FILE * 2 // 3)
            await send(source, topic, 0, build_batch([Record(key, value, (), now_ms())]))

    async def is_compacted() -> bool:
        try:
            return batches() == kept
        except OSError:
            return False  # the cleaner has just put another file in its place

    await until(is_compacted, lambda: f"{batches()} batches, {kept} of them wanted")
    mirror = await carried(pair, [topic])
    expected = await asyncio.to_thread(read, pair.source, topic)
    assert [each.key for each in expected] == [b"1", b"2", b"3", b"again", b"4", b"5"]
    assert await asyncio.to_thread(read, pair.target, topic) == expected
    assert "fetching a batch again" not in mirror.log


@pytest.mark.safety
@in_pairs("millrace-kafka", "kafka-kafka")
def test_what_passes_through_is_the_same_bytes_on_the_disk(pair: Pair) -> None:
    asyncio.run(same_bytes(pair))


async def same_bytes(pair: Pair) -> None:
    """Also with base offsets other than 0, which every batch of a log but the first has: a standard broker
    rewrites a compressed batch that comes with one."""
    rng = random.Random(5)
    topic = pair.unique("bytes")
    async with pair.source.cluster() as source:
        await create_topic(source, topic, 1, 1)
        for number in range(40):
            count, size = rng.choice(((1, 50_000), (1, 100), (60, 2_000), (500, 20)))
            await send(source, topic, 0, build_batch(some_records(rng, count, size), compression=number % 5))
        for codec in (0, LZ4):
            await send(source, topic, 0, batch_of_size(DEFAULT_LIMIT, codec=codec))
        await write_transactions(pair.source, topic, rng)
    mirror = await carried(pair, [topic], batches="pass_through")
    committed = {record.value for record in await asyncio.to_thread(read, pair.source, topic)}
    sent = list(batches_on_disk(pair.source.log_folder(topic, 0), committed))
    arrived = list(batches_on_disk(pair.target.log_folder(topic, 0)))
    assert [(header.compression, section) for header, section in arrived] == [
        (header.compression, section) for header, section in sent
    ]
    assert len({header.base_offset for header, _ in sent}) > 50
    assert [header.size for header, _ in arrived].count(DEFAULT_LIMIT) == 2
    assert paths_taken(mirror).keys() == {"pass_through", "drop"}
    check_count(mirror, source_batch_count(pair, topic))
    await check_stamps(pair, mirror, topic)


@in_pairs("kafka-millrace", "millrace-kafka")
def test_batches_at_the_limit_pass_and_larger_ones_are_split(pair: Pair) -> None:
    asyncio.run(at_the_limit(pair))


async def at_the_limit(pair: Pair) -> None:
    rng = random.Random(6)
    limit = 30_000
    topic, default = pair.unique("limit"), pair.unique("default")
    largest = [batch_of_size(DEFAULT_LIMIT, codec=codec) for codec in (0, LZ4)]
    async with pair.source.cluster() as source, pair.target.cluster() as target:
        await create_topic(source, topic, 1, 1, {"max.message.bytes": "400000"})
        await create_topic(target, topic, 1, 1, {"max.message.bytes": str(limit)})
        await create_topic(source, default, 1, 1)
        for batch in largest:
            await send(source, default, 0, batch)
        exact = batch_of_size(limit)
        for batch in (exact, batch_of_size(limit + 1, records=3), exact):
            await send(source, topic, 0, batch)
        for codec in CODEC_NAMES:
            await send(source, topic, 0, build_batch(some_records(rng, 100, 3_000), compression=codec))
            for at in range(20):
                await send(source, topic, 0, build_batch(some_records(rng, 2, 150, at), compression=codec))
    mirror = await carried(pair, [topic, default], config_sync={"exclude": ["max.message.bytes"]})
    expected = await asyncio.to_thread(read, pair.source, topic)
    assert await asyncio.to_thread(read, pair.target, topic) == expected
    taken = paths_taken(mirror)
    assert taken["split"] == 1 + len(CODEC_NAMES), taken
    assert taken["pass_through"] >= 2 + len(largest) and taken["coalesce"], taken
    check_count(mirror, source_batch_count(pair, topic, default))
    of_default = await asyncio.to_thread(read, pair.source, default)
    check_counted(pair, mirror, {topic: expected, default: of_default})
    arrived = list(batches_on_disk(pair.target.log_folder(topic, 0)))
    assert max(header.size for header, _ in arrived) == limit
    assert codecs(arrived) == codecs(batches_on_disk(pair.source.log_folder(topic, 0)))
    untouched = [section for _, section in batches_on_disk(pair.target.log_folder(default, 0))]
    assert untouched == [batch[HEADER_SIZE:] for batch in largest]


def batch_of_size(size: int, records: int = 1, codec: int = 0) -> bytearray:
    """A batch of exactly `size` bytes."""
    more = 0
    while missing := size - len(made := build(size // records, records, more, codec)):
        more += missing
    return made


def build(value_size: int, records: int, more: int, codec: int) -> bytearray:
    sizes = [value_size + more, *([value_size] * (records - 1))]
    return build_batch([Record(b"k", NOISE[:size], (), NOW_MS) for size in sizes], compression=codec)
