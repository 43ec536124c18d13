"""An Apache Kafka of this module's own, which may be killed and frozen: logs of message formats 0 and 1, and
a target that stands still for longer than its transactions may take.

No server writes those formats any more, and logs from before are still served as they lie on the disk: the
entries are put into the log of a topic while the server is down.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.broker.client.admin import create_topic
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.read_to_end import read_topic_to_end
from millrace.broker.protocol.compression import GZIP, LZ4, SNAPPY
from millrace.broker.protocol.records import Record, build_batch
from tests.cluster.mirror_process import MirrorProcess, end_offset, program_with, send, until
from tests.kafka_fixture import SAME_SETTINGS
from tests.pairs import SMALL_HEAP, SOURCE_NAME, TARGET_NAME, End, Kind
from tests.peers.kafka import KafkaPeer
from tests.unit.mirror.old_entries import Content, packed, written

pytestmark = [pytest.mark.java, pytest.mark.kafka]

NEW = Record(b"new", b"of today", (("h", b"1"),), 1_700_000_000_000)
TRANSACTION_TIMEOUT_MS = 4_000
FROZEN_S = 6.0


@pytest.fixture(scope="module")
def own_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaPeer]:
    settings = {**SAME_SETTINGS, "group.min.session.timeout.ms": "1000"}
    with KafkaPeer(tmp_path_factory.mktemp("own"), settings=settings, jvm_options=SMALL_HEAP) as peer:
        yield peer


# --- old formats ------------------------------------------------------------------------------------------


def old_log() -> tuple[bytes, list[Content]]:
    """Sets of both formats, of every codec that they have, without a hole."""
    rng = random.Random(1)
    data, contents = b"", []
    for magic in (0, 1):
        for codec in (0, GZIP, SNAPPY, LZ4):
            messages: list[Content] = [
                (
                    len(contents) + number,
                    rng.choice((None, b"", b"key")),
                    rng.choice((None, rng.randbytes(rng.randrange(300)))),
                    1_400_000_000_000 + number if magic else -1,
                )
                for number in range(10)
            ]
            data += written(magic, codec, messages)
            contents += messages
    return data, contents


def compacted_log() -> tuple[bytes, list[Content]]:
    """Holes between sets and in them."""
    data = packed(3, 1, [0, 3]) + packed(9, 0, [5, 6, 9])
    places = [(0, b"0"), (3, b"3"), (5, b"5"), (6, b"6"), (9, b"9")]
    return data, [(offset, b"k", value, 5 if offset < 4 else -1) for offset, value in places]


def put(folder: Path, data: bytes) -> None:
    """In place of what the log of a server that is down has; it makes the indexes anew."""
    for file in folder.iterdir():
        if file.suffix in (".index", ".timeindex", ".snapshot"):
            file.unlink()
    (log,) = folder.glob("*.log")
    log.write_bytes(data)


@pytest.mark.parametrize(
    ("kind", "delivery"),
    [
        ("millrace", "exactly_once"),
        pytest.param("millrace", "at_least_once", marks=pytest.mark.long),
        pytest.param("kafka", "exactly_once", marks=pytest.mark.long),
        pytest.param("kafka", "at_least_once", marks=pytest.mark.long),
    ],
)
def test_topics_of_old_formats_arrive_as_they_were(
    kind: Kind, delivery: str, own_kafka: KafkaPeer, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Keys, values, times and, without ends of transactions between them, offsets; and the log goes on in the
    format of today."""
    old_topic = f"written-long-ago-for-{kind}-{delivery}"
    target_end: End = request.getfixturevalue(f"pair_{kind}_target")
    logs = [old_log(), compacted_log()]

    async def story() -> None:
        async with Cluster(SOURCE_NAME, [own_kafka.bootstrap]) as source:
            await create_topic(source, old_topic, len(logs), 1)
        folders = [own_kafka.directory / "data" / f"{old_topic}-{number}" for number in range(len(logs))]

        async def are_made() -> bool:
            # Without the id that stands there, a broker takes the folder for a stray when it starts.
            return all((folder / "partition.metadata").exists() for folder in folders)

        await until(are_made, logs_of=[own_kafka.log_file])
        own_kafka.kill()
        for folder, (data, _) in zip(folders, logs, strict=True):
            put(folder, data)
        own_kafka.start()  # by the main thread: what another one starts ends with that
        async with (
            Cluster(SOURCE_NAME, [own_kafka.bootstrap]) as source,
            target_end.cluster() as target,
        ):
            for number, (_, contents) in enumerate(logs):
                end = contents[-1][0] + 1
                assert await end_offset(source, old_topic, number) == end, "the server reads them"
                await send(source, old_topic, number, build_batch([NEW]))
                contents.append((end, NEW.key, NEW.value, NEW.timestamp_ms))
            mirror = MirrorProcess(
                tmp_path,
                target_end.bootstrap,
                {SOURCE_NAME: own_kafka.bootstrap},
                topics=[old_topic],
                target_name=TARGET_NAME,
                name=f"old-{time.time_ns()}",
                delivery=delivery,
            ).start()
            try:

                async def arrived() -> bool:
                    ends = [contents[-1][0] + 1 for _, contents in logs]
                    there = {each["partition"]: each for each in mirror.status().get("partitions", [])}
                    return [there.get(number, {}).get("position") for number in range(len(logs))] == ends

                await until(arrived, logs_of=[mirror])
                found: list[list[Content]] = [[] for _ in logs]
                async for record in read_topic_to_end(target, old_topic):
                    content = (record.offset, record.key, record.value, record.timestamp_ms)
                    found[record.partition].append(content)
                # Where there are holes, the target counts on.
                for there, (_, contents) in zip(found, logs, strict=True):
                    assert [each[1:] for each in there] == [each[1:] for each in contents]
                    if delivery == "at_least_once":
                        assert [each[0] for each in there] == list(range(len(contents)))
                status = mirror.status()["partitions"]
                assert [each.get("gap") for each in status] == [None] * len(logs)
            finally:
                mirror.kill()

    asyncio.run(story())


# --- a target that stands still ---------------------------------------------------------------------------


def test_target_frozen_for_longer_than_its_transactions_may_take_loses_and_repeats_nothing(
    own_kafka: KafkaPeer, pair_millrace_source: End, tmp_path: Path
) -> None:
    topic = f"frozen-{time.time_ns()}"
    mirror = MirrorProcess(
        tmp_path,
        own_kafka.bootstrap,
        {SOURCE_NAME: pair_millrace_source.bootstrap},
        topics=[topic],
        target_name=TARGET_NAME,
        name=topic,
        group={"session_timeout_ms": 3_000, "rebalance_timeout_ms": 5_000},
    )
    # A quarter of what they otherwise may take, so that nobody waits for long.
    mirror.program = program_with({"delivery.transaction.TRANSACTION_TIMEOUT_MS": TRANSACTION_TIMEOUT_MS})
    if own_kafka.pid is None:
        own_kafka.start()
    pid = own_kafka.pid
    assert pid is not None

    async def story() -> None:
        async with (
            pair_millrace_source.cluster() as source,
            Cluster(TARGET_NAME, [own_kafka.bootstrap]) as target,
        ):
            for cluster in (source, target):
                await create_topic(cluster, topic, 2, 1)
            mirror.start()
            sent = [0, 0]
            is_over = asyncio.Event()

            async def feed(partition: int) -> None:
                while not is_over.is_set():
                    records = [Record(None, b"%d" % (sent[partition] + number)) for number in range(10)]
                    await send(source, topic, partition, build_batch(records))
                    sent[partition] += 10
                    await asyncio.sleep(0.01)

            async def seen() -> list[list[int]]:
                numbers: list[list[int]] = [[], []]
                async for record in read_topic_to_end(target, topic):
                    numbers[record.partition].append(int(record.value or b"-1"))
                return numbers

            async def has(counts: list[int]) -> bool:
                return [len(each) for each in await seen()] >= counts

            feeding = asyncio.gather(feed(0), feed(1))
            try:
                await until(lambda: has([100, 100]), logs_of=[mirror])
                os.kill(pid, signal.SIGSTOP)
                try:
                    await asyncio.sleep(FROZEN_S)
                finally:
                    os.kill(pid, signal.SIGCONT)
                before = list(sent)
                await until(lambda: has(before), logs_of=[mirror])
            finally:
                is_over.set()
                await feeding
            await until(lambda: has(sent), logs_of=[mirror])
            assert await seen() == [list(range(count)) for count in sent]
            assert mirror.process is not None
            assert mirror.process.poll() is None, mirror.log

    try:
        asyncio.run(story())
    finally:
        mirror.kill()
