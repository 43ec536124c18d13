"""Consumer groups that move from sources to the target: the topics that they read, as producers and readers
see them, and where they have to go on, told from where the records really lie.

A value is said once in a topic of a cluster, and names both (`value_of`).
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from millrace.mirror.config import load_config
from millrace.mirror.offsets.map_reader import MapReader
from millrace.mirror.offsets.translate import Question, Reply, answer
from millrace.mirror.offsets.translation import Translation
from millrace.mirror.topics.routes import SourcePartition
from tests import waiting
from tests.cluster.mirror_process import MirrorProcess
from tests.pairs import End
from tests.waiting import Deadline, patience
from tests.watermarks import end_offset

TIMEOUT_S = 120.0

Read = tuple[str, bytes]
"""Topic and value: values are unique in a topic."""
Place = tuple[str, int]
"""Topic and partition."""


def until(condition: Callable[[], Any], what: Callable[[], str] | str = "", **options: Any) -> Any:
    return waiting.until(condition, what, within_s=TIMEOUT_S, every_s=0.1, **options)


# --- writing ---------------------------------------------------------------------------------------------


def create(end: End, topic: str, partitions: int, config: dict[str, str] | None = None) -> None:
    admin = AdminClient({"bootstrap.servers": end.bootstrap})
    admin.create_topics([NewTopic(topic, partitions, 1, config=config or {})])[topic].result(
        patience(TIMEOUT_S)
    )


def value_of(end: End, topic: str, number: int) -> bytes:
    return f"{end.name}/{topic}:{number}".encode()


def produce(end: End, topic: str, partitions: int, numbers: range) -> None:
    """In many small batches."""
    producer = Producer({"bootstrap.servers": end.bootstrap, "linger.ms": 0})
    for number in numbers:
        producer.produce(topic, value_of(end, topic, number), partition=number % partitions)
        if number % 7 == 0:
            producer.flush(patience(TIMEOUT_S))
    assert producer.flush(patience(TIMEOUT_S)) == 0


def produce_in_transactions(end: End, topic: str, partitions: int, numbers: range) -> None:
    """Transactions of five records; every third is aborted."""
    producer = Producer({"bootstrap.servers": end.bootstrap, "transactional.id": f"writes-{topic}"})
    producer.init_transactions(patience(TIMEOUT_S))
    for first in range(numbers.start, numbers.stop, 5):
        producer.begin_transaction()
        for number in range(first, min(first + 5, numbers.stop)):
            producer.produce(topic, value_of(end, topic, number), partition=number % partitions)
        producer.flush(patience(TIMEOUT_S))
        if first // 5 % 3 == 2:
            producer.abort_transaction(patience(TIMEOUT_S))
        else:
            producer.commit_transaction(patience(TIMEOUT_S))


# --- reading ---------------------------------------------------------------------------------------------


@contextmanager
def reader(end: End, group: str, topics: Sequence[str]) -> Iterator[Consumer]:
    consumer = Consumer(
        {
            "bootstrap.servers": end.bootstrap,
            "group.id": group,
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            # Who moves has a place there.
            "auto.offset.reset": "error" if group.startswith("moves") and end.name == "dst" else "earliest",
            "isolation.level": "read_committed",
        }
    )
    consumer.subscribe(list(topics))
    try:
        yield consumer
    finally:
        consumer.close()


def read(end: End, group: str, topics: dict[str, int], at_least: int | None = None) -> list[Read]:
    """As a member of the group: all up to the ends of the topics (name -> partitions), or `at_least` records
    and some of every partition; commits what it has read."""
    found: list[Read] = []
    seen: set[tuple[str, int]] = set()
    ended: set[tuple[str, int]] = set()
    count = sum(topics.values())
    deadline = Deadline(lambda: f"{len(found)} records, ends of {ended}", within_s=TIMEOUT_S)
    with reader(end, group, list(topics)) as consumer:
        while len(ended) < count and (at_least is None or len(found) < at_least or len(seen) < count):
            deadline.check()
            message = consumer.poll(0.2)
            if message is None:
                continue
            error = message.error()
            where = (message.topic() or "", message.partition() or 0)
            if error is None:
                seen.add(where)
                ended.discard(where)
                found.append((where[0], message.value() or b""))
            elif error.code() == KafkaError._PARTITION_EOF:
                ended.add(where)
            else:
                raise AssertionError(str(error))
        if found:
            consumer.commit(asynchronous=False)
    return found


def looker(end: End) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": end.bootstrap,
            "group.id": "looks",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
        }
    )


def places(end: End, topics: Mapping[str, int]) -> dict[Place, dict[bytes, int]]:
    """{value: offset} of all that is committed in each partition of the topics (name -> partitions)."""
    found: dict[Place, dict[bytes, int]] = {
        (topic, number): {} for topic, count in topics.items() for number in range(count)
    }
    ended: set[Place] = set()
    consumer = looker(end)
    deadline = Deadline(lambda: f"the ends of all but {ended} of {topics}", within_s=TIMEOUT_S)
    try:
        consumer.assign([TopicPartition(topic, number, 0) for topic, number in found])
        while len(ended) < len(found):
            deadline.check()
            message = consumer.poll(0.2)
            if message is None:
                continue
            where = (message.topic() or "", message.partition() or 0)
            if (error := message.error()) is None:
                found[where][message.value() or b""] = message.offset() or 0
            elif error.code() == KafkaError._PARTITION_EOF:
                ended.add(where)
            else:
                raise AssertionError(str(error))
        return found
    finally:
        consumer.close()


def everything(end: End, topics: dict[str, int]) -> list[Read]:
    return read(end, f"reads-all-{time.monotonic_ns()}", topics)


def stable_ends(end: End, topics: Mapping[str, int]) -> dict[SourcePartition, int]:
    consumer = looker(end)
    try:
        return {
            SourcePartition(end.name, topic, number): end_offset(consumer, topic, number, TIMEOUT_S)
            for topic, count in topics.items()
            for number in range(count)
        }
    finally:
        consumer.close()


def committed(end: End, group: str, topics: Mapping[str, int]) -> dict[Place, int]:
    consumer = Consumer({"bootstrap.servers": end.bootstrap, "group.id": group})
    try:
        asked = [TopicPartition(topic, n) for topic, count in topics.items() for n in range(count)]
        answer = consumer.committed(asked, TIMEOUT_S)
        return {(each.topic, each.partition): each.offset for each in answer if each.offset >= 0}
    finally:
        consumer.close()


def check_read_once(read_at_all: Iterable[bytes], carried: Iterable[bytes]) -> None:
    """Nothing twice, nothing left out, nothing that is not there."""
    counts = Counter(read_at_all)
    assert [value for value, count in counts.items() if count > 1] == []
    assert set(counts) == set(carried)


# --- mirrors and their map -------------------------------------------------------------------------------


def wait_until_carried(ends: Mapping[SourcePartition, int], *workers: MirrorProcess) -> None:
    """By one mirror, to these offsets of its sources."""

    def is_carried() -> bool:
        positions = {
            SourcePartition(each["source"], each["topic"], each["partition"]): each["position"] or 0
            for worker in workers
            for each in worker.status().get("partitions", [])
        }
        return all(positions.get(key, -1) >= end for key, end in ends.items())

    until(is_carried, lambda: str([worker.status() for worker in workers]), logs_of=workers)


def next_places(at_source: Mapping[bytes, int], at_target: Mapping[bytes, int], end: int) -> list[int]:
    """For each offset of a source's partition, up to its end: where the copy of the next record lies at the
    target, or where all of them end. Both are {value: offset}."""
    following = max(at_target.values(), default=-1) + 1
    values = {offset: value for value, offset in at_source.items()}
    wanted = []
    for offset in range(end, -1, -1):
        following = at_target[values[offset]] if offset in values else following
        wanted.insert(0, following)
    return wanted


def map_translations(target: End, mirror: str, partition: SourcePartition, end: int) -> list[Translation]:
    """Of each offset up to the end, as the map says it."""

    async def asked() -> list[Translation]:
        async with target.cluster() as cluster:
            reader = MapReader(cluster, mirror)
            await reader.refresh_positions()
            await reader.refresh_map({(partition.source, partition.topic)})
            position, chunks = reader.positions.known[partition], reader.maps[partition]
            return [
                chunks.translate(offset, position.next_offset, position.topic_id) for offset in range(end + 1)
            ]

    return asyncio.run(asked())


def translate_command(config: Path, group: str, *words: str) -> tuple[int, str, str]:
    """`millrace mirror translate`: its status, and what it prints and complains."""
    command = [sys.executable, "-m", "millrace.deploy.cli", "mirror", "translate", "--config", str(config)]
    done = subprocess.run(
        [*command, "--group", group, *words],
        capture_output=True,
        text=True,
        timeout=patience(180),
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def translate(config: Path, group: str, *words: str) -> tuple[int, dict[str, Any], str]:
    """The same for a program: as JSON."""
    status, printed, said = translate_command(config, group, "--json", *words)
    return status, json.loads(printed) if printed else {}, said


def asked(config: Path, question: Question) -> Reply:
    """The same without a process of its own."""
    return asyncio.run(answer(load_config(config), question))
