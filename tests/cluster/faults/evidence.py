"""What is found after a round: contents as clients read them, group offsets, files, and what brokers said."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from confluent_kafka import Consumer, KafkaException, TopicPartition

from millrace.broker.protocol.batch import iterate_batches
from millrace.broker.protocol.records import read_records
from tests.cluster.faults.checks import check_compacted, check_replicas
from tests.cluster.faults.cluster import BROKERS, Broker, Cluster
from tests.cluster.faults.producers import CLIENT
from tests.cluster.faults.records import TOPICS, Contents, Found
from tests.waiting import Deadline

READ_TIMEOUT_S = 90.0
AGREE_TIMEOUT_S = 90.0
"""A request to a leader that does not answer is given up after 30 s, as in Apache Kafka."""
MOST_AT_ONCE = 10_000
COMPACTED = {"__consumer_offsets": 3, "__transaction_state": 3}

_EOF = -191

SUSPECT = ("Traceback (most recent call last)", "a task of the broker failed")
"""No expected failure has a traceback."""


class Unreadable(Exception):
    """Something that must be readable by now is not."""


def read_contents(bootstrap: str) -> Contents:
    """Everything that a reader of committed data sees, from the start. Raises Unreadable."""
    consumer = Consumer(
        {
            **CLIENT,
            "bootstrap.servers": bootstrap,
            "group.id": f"evidence-{time.monotonic_ns()}",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "isolation.level": "read_committed",
            "fetch.wait.max.ms": 50,
            "fetch.message.max.bytes": 4 << 20,
            "queued.min.messages": 500_000,
        }
    )
    keys = [(topic, number) for topic, count in TOPICS.items() for number in range(count)]
    contents: dict[tuple[str, int], list[Found]] = {key: [] for key in keys}
    missing = set(keys)
    deadline = Deadline("everything is read", within_s=READ_TIMEOUT_S)
    try:
        consumer.assign([TopicPartition(topic, number, 0) for topic, number in keys])
        while missing:
            if deadline.has_passed:
                raise Unreadable(f"within {READ_TIMEOUT_S:.0f} s nobody can read to the end of {missing}")
            for message in consumer.consume(MOST_AT_ONCE, 0.2):
                key = message.topic(), message.partition()
                error = message.error()
                if error is None:
                    contents[key].append(Found(message.offset(), message.value()))
                elif error.code() == _EOF:
                    missing.discard(key)
                elif not error.retriable():
                    raise Unreadable(f"{key[0]}-{key[1]}: {error}")
        return contents
    finally:
        consumer.close()


def committed_offsets(bootstrap: str, group: str, topics: Iterable[str]) -> dict[tuple[str, int], int]:
    """What is committed, -1 for nothing. Raises Unreadable."""
    consumer = Consumer({**CLIENT, "bootstrap.servers": bootstrap, "group.id": group})
    wanted = [TopicPartition(topic, number) for topic in topics for number in range(TOPICS[topic])]
    deadline = Deadline(f"the offsets of {group}", within_s=READ_TIMEOUT_S)
    try:
        while True:
            try:
                found = consumer.committed(wanted, 10)
            except KafkaException as error:
                if deadline.has_passed:
                    raise Unreadable(f"the offsets of group {group}: {error}") from error
                continue
            return {(each.topic, each.partition): max(each.offset, -1) for each in found}
    finally:
        consumer.close()


def wait_until_replicas_agree(cluster: Cluster) -> list[str]:
    """Nothing is written any more: what still differs between the files of the replicas in the end."""
    deadline = Deadline("the replicas agree", within_s=AGREE_TIMEOUT_S)
    while True:
        is_last = deadline.has_passed
        breaches = []
        for topic, count in TOPICS.items():
            for number in range(count):
                name = f"{topic}-{number}"
                breaches += check_replicas(
                    name, {each: log_of(cluster.brokers[each], name) for each in BROKERS}
                )
        if not breaches or is_last:
            break
        time.sleep(0.2)
    for topic, count in COMPACTED.items():
        for number in range(count):
            name = f"{topic}-{number}"
            records = {each: records_of(log_of(cluster.brokers[each], name)) for each in BROKERS}
            breaches += check_compacted(name, records)
    return breaches


def log_of(broker: Broker, name: str) -> bytes:
    """All bytes of a partition's log, as they lie on a broker's disk."""
    return b"".join(_read(path) for path in sorted((broker.data / name).glob("*.log")))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:  # compacted away meanwhile
        return b""


def records_of(log: bytes) -> Mapping[int, object]:
    """Records by offset; those of a batch that is being written are not there yet."""
    found: dict[int, object] = {}
    for position, header in iterate_batches(log):
        batch = log[position : position + header.size]
        if len(batch) == header.size:
            for record in read_records(batch):
                found[record.offset] = record.key, record.value, header.producer_id, header.is_control
    return found


def senders(cluster: Cluster, topic: str) -> Callable[[int, int], tuple[int, int]]:
    """(partition, offset) → (producer id, epoch) of the batch there, by one broker's files."""
    broker = cluster.brokers[BROKERS[0]]
    starts: dict[int, list[int]] = {}
    found: dict[int, list[tuple[int, int]]] = {}
    for number in range(TOPICS[topic]):
        for _, header in iterate_batches(log_of(broker, f"{topic}-{number}")):
            starts.setdefault(number, []).append(header.base_offset)
            found.setdefault(number, []).append((header.producer_id, header.producer_epoch))

    def sender_of(partition: int, offset: int) -> tuple[int, int]:
        return found[partition][bisect_right(starts[partition], offset) - 1]

    return sender_of


def suspect_lines(broker: Broker) -> list[str]:
    """Tracebacks in what the broker has said since the last look."""
    said = broker.log
    fresh, broker.read_position = said[broker.read_position :], len(said)
    lines = fresh.splitlines()
    found = []
    for number, line in enumerate(lines):
        if any(text in line for text in SUSPECT):
            found.append(f"broker {broker.id}: " + "\n    ".join(lines[max(0, number - 3) : number + 30]))
    return found
