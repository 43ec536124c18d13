"""Consumer groups that move from a source to the target: by `millrace mirror translate`, and by the
background sync. Whoever moves reads every record exactly once, whatever kind of source it was: plain,
transactional with aborted records, compacted with holes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from millrace.mirror.offsets.map_reader import MapReader
from millrace.mirror.offsets.translation import Answer, Translation
from millrace.mirror.topics.routes import SourcePartition
from tests import waiting
from tests.cluster.mirror_process import MirrorProcess
from tests.pairs import End, Pair, in_pairs
from tests.waiting import Deadline, patience
from tests.watermarks import end_offset

TIMEOUT_S = 120.0
COMPACTED = {
    "cleanup.policy": "compact",
    "segment.ms": "100",
    "min.cleanable.dirty.ratio": "0.01",
    "delete.retention.ms": "0",
}
ROLLS = b"only-rolls"

Read = tuple[str, bytes]
"""Topic and value: values are unique in a topic."""


# --- reading and writing -------------------------------------------------------------------------------


def until(condition: Callable[[], Any], what: Callable[[], str] | str = "", **options: Any) -> Any:
    return waiting.until(condition, what, within_s=TIMEOUT_S, every_s=0.1, **options)


def create(end: End, topic: str, partitions: int, config: dict[str, str] | None = None) -> None:
    admin = AdminClient({"bootstrap.servers": end.bootstrap})
    admin.create_topics([NewTopic(topic, partitions, 1, config=config or {})])[topic].result(
        patience(TIMEOUT_S)
    )


def produce(end: End, topic: str, partitions: int, numbers: range) -> None:
    """In many small batches."""
    producer = Producer({"bootstrap.servers": end.bootstrap, "linger.ms": 0})
    for number in numbers:
        producer.produce(topic, f"{topic}:{number}".encode(), partition=number % partitions)
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
            producer.produce(topic, f"{topic}:{number}".encode(), partition=number % partitions)
        producer.flush(patience(TIMEOUT_S))
        if first // 5 % 3 == 2:
            producer.abort_transaction(patience(TIMEOUT_S))
        else:
            producer.commit_transaction(patience(TIMEOUT_S))


def key_of(number: int) -> bytes:
    """Keys that come again and again, and some that stay: compaction leaves holes all over."""
    return b"once-%d" % number if number % 4 == 0 else b"often-%d" % (number % 3)


def produce_by_keys(end: End, topic: str, numbers: range) -> dict[bytes, int]:
    """{value: its offset}, for compaction takes most of them."""
    written: dict[bytes, int] = {}
    producer = Producer({"bootstrap.servers": end.bootstrap, "linger.ms": 0})
    for number in numbers:
        send_one(producer, topic, f"{topic}:{number}".encode(), key_of(number), written)
    return written


def roll(end: End, topic: str) -> dict[bytes, int]:
    """Only a new record ends the segment that compaction leaves alone."""
    written: dict[bytes, int] = {}
    producer = Producer({"bootstrap.servers": end.bootstrap})
    send_one(producer, topic, ROLLS + b" %d" % time.monotonic_ns(), ROLLS, written)
    return written


def send_one(producer: Producer, topic: str, value: bytes, key: bytes, written: dict[bytes, int]) -> None:
    def note(error: KafkaError | None, message: Message) -> None:
        assert error is None, error
        written[value] = message.offset() or 0

    producer.produce(topic, value, key, partition=0, on_delivery=note)
    assert producer.flush(patience(TIMEOUT_S)) == 0 and value in written


@contextmanager
def reader(end: End, group: str, topics: Sequence[str]) -> Iterator[Consumer]:
    consumer = Consumer(
        {
            "bootstrap.servers": end.bootstrap,
            "group.id": group,
            "enable.auto.commit": False,
            "enable.partition.eof": True,
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


def places(end: End, topic: str, partition: int) -> dict[bytes, int]:
    """{value: offset} of all that is committed in the partition."""
    found: dict[bytes, int] = {}
    consumer = Consumer(
        {
            "bootstrap.servers": end.bootstrap,
            "group.id": "looks",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
        }
    )
    deadline = Deadline(lambda: f"{len(found)} records of {topic}-{partition}", within_s=TIMEOUT_S)
    try:
        consumer.assign([TopicPartition(topic, partition, 0)])
        while True:
            deadline.check()
            message = consumer.poll(0.2)
            if message is None:
                continue
            if (error := message.error()) is None:
                found[message.value() or b""] = message.offset() or 0
            elif error.code() == KafkaError._PARTITION_EOF:
                return found
            else:
                raise AssertionError(str(error))
    finally:
        consumer.close()


def everything(end: End, topics: dict[str, int]) -> list[Read]:
    return read(end, f"reads-all-{time.monotonic_ns()}", topics)


def stable_end(end: End, topic: str, partition: int) -> int:
    consumer = Consumer(
        {"bootstrap.servers": end.bootstrap, "group.id": "looks", "isolation.level": "read_committed"}
    )
    try:
        return end_offset(consumer, topic, partition, TIMEOUT_S)
    finally:
        consumer.close()


# --- what the tests share ------------------------------------------------------------------------------


class Move:
    """Three topics of three kinds, a mirror of them, and the reading of both ends."""

    def __init__(self, pair: Pair, **settings: Any) -> None:
        self.pair = pair
        self.plain, self.transactional, self.compacted = (
            pair.unique(stem) for stem in ("plain", "transactional", "compacted")
        )
        self.topics = {self.plain: 2, self.transactional: 2, self.compacted: 1}
        self.group = pair.unique("moves")
        self.written: dict[bytes, int] = {}
        for topic, count in self.topics.items():
            create(pair.source, topic, count, COMPACTED if topic == self.compacted else None)
            create(pair.target, topic, count)  # and not compacted: nothing goes while it is compared
        self.mirror = pair.mirror(list(self.topics), start=False, config_sync={"enabled": False}, **settings)

    def start(self, groups: dict[str, Any] | None = None) -> None:
        if groups is not None:
            self.mirror.settings["sources"][0]["groups"] = groups
            self.mirror.config_path.write_text(yaml.safe_dump(self.mirror.settings))
        self.mirror.start()

    def write(self, numbers: range) -> None:
        produce(self.pair.source, self.plain, 2, numbers)
        produce_in_transactions(self.pair.source, self.transactional, 2, numbers)
        self.written |= produce_by_keys(self.pair.source, self.compacted, numbers)

    def wait_for_holes(self, written: int) -> None:
        def has_holes() -> bool:
            self.written |= roll(self.pair.source, self.compacted)
            return len(everything(self.pair.source, {self.compacted: 1})) < written * 3 // 4

        until(has_holes, lambda: "the source was not compacted")

    def wait_until_carried(self) -> None:
        ends = {
            (topic, number): stable_end(self.pair.source, topic, number)
            for topic, count in self.topics.items()
            for number in range(count)
        }

        def is_carried() -> bool:
            positions = {
                (each["topic"], each["partition"]): each["position"] or 0
                for each in self.mirror.status().get("partitions", [])
            }
            return all(positions.get(key, -1) >= end for key, end in ends.items())

        until(is_carried, lambda: f"{self.mirror.status()}\n{self.mirror.log}")

    def translate(self, *words: str) -> tuple[int, dict[str, Any], str]:
        return translate(self.mirror.config_path, self.group, *words)

    def check_every_offset(self) -> dict[str, int]:
        """Each offset of the source's logs, those of records and those between, is translated to where the
        next record's copy is, or to the end. Returns how many of these were of no record, by topic."""
        between: dict[str, int] = {}
        for topic, count in self.topics.items():
            for partition in range(count):
                at_target = places(self.pair.target, topic, partition)
                if topic == self.compacted:  # there is less at the source now than was carried
                    at_source = {value: self.written[value] for value in at_target}
                else:
                    at_source = places(self.pair.source, topic, partition)
                    assert at_source.keys() == at_target.keys()
                end = stable_end(self.pair.source, topic, partition)
                wanted = []
                following = max(at_target.values()) + 1
                values = {offset: value for value, offset in at_source.items()}
                for offset in range(end, -1, -1):
                    following = at_target[values[offset]] if offset in values else following
                    wanted.insert(0, Translation(Answer.EXACT, following))
                found = asyncio.run(self._translations(SourcePartition("src", topic, partition), end))
                assert found == wanted, (topic, partition)
                between[topic] = between.get(topic, 0) + end - len(values)
        return between

    async def _translations(self, partition: SourcePartition, end: int) -> list[Translation]:
        async with self.pair.target.cluster() as target:
            reader = MapReader(target, self.mirror.settings["name"])
            await reader.refresh_positions()
            await reader.refresh_map({(partition.source, partition.topic)})
            position = reader.positions.known[partition]
            chunks = reader.maps[partition]
            return [
                chunks.translate(offset, position.next_offset, position.topic_id) for offset in range(end + 1)
            ]

    def superseded(self, at_source: list[Read]) -> list[Read]:
        """What the source may have compacted away after it was carried and before the group came to it: of
        such a key the group has read a later record there."""
        read_there = {
            int(value.rpartition(b":")[2])
            for topic, value in at_source
            if topic == self.compacted and not value.startswith(ROLLS)
        }
        last = {key_of(number): number for number in sorted(read_there)}
        return [
            (self.compacted, f"{self.compacted}:{number}".encode())
            for number in range(200)
            if number not in read_there and number < last.get(key_of(number), 0)
        ]

    def check_read_once(self, at_source: list[Read], at_target: list[Read]) -> None:
        carried = [each for each in everything(self.pair.target, self.topics) if is_of_test(each)]
        read_at_all = Counter(each for each in at_source + at_target if is_of_test(each))
        assert read_at_all - Counter(carried) == Counter()
        never_read = Counter(carried) - read_at_all
        assert never_read - Counter(self.superseded(at_source)) == Counter()
        plain = [value for topic, value in carried if topic == self.plain]
        assert len(plain) == len(set(plain)) == 200


def is_of_test(each: Read) -> bool:
    return not each[1].startswith(ROLLS)


def translate(config: Path, group: str, *words: str) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, "-m", "millrace.deploy.cli", "mirror", "translate", "--config", str(config)]
    done = subprocess.run(
        [*command, "--group", group, "--json", *words],
        capture_output=True,
        text=True,
        timeout=patience(180),
        check=False,
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


@in_pairs("kafka-millrace", "millrace-kafka")
def test_a_group_that_moves_by_translation_reads_every_record_once(pair: Pair) -> None:
    move = Move(pair)
    move.write(range(100))
    move.wait_for_holes(100)
    move.start()
    move.wait_until_carried()
    at_source = read(pair.source, move.group, move.topics, at_least=140)
    move.mirror.kill()  # in the middle of its transactions, or not: the map is as whole as the data
    move.mirror.start()
    move.write(range(100, 200))
    move.wait_until_carried()
    between = move.check_every_offset()
    assert between[move.plain] == 0
    assert between[move.transactional] > 40, "aborted records and markers"
    assert between[move.compacted] > 10, "what was compacted away before it was carried"

    status, shown, _ = move.translate()
    assert status == 0, shown
    assert [row["is"] for row in shown["partitions"]] == ["exact"] * len(shown["partitions"])
    assert "committed" not in shown  # only looked at

    with reader(pair.target, move.group, list(move.topics)) as member:
        until(lambda: member.poll(0.1) is not None or member.assignment(), lambda: "no assignment")
        status, _, said = move.translate("--apply")
        assert status != 0
        assert "member" in said and "Traceback" not in said
    status, applied, said = move.translate("--apply")
    assert status == 0, said
    offsets = {(row["to"], row["target_offset"]) for row in applied["partitions"]}
    assert {(f"{row['topic']}-{row['partition']}", row["offset"]) for row in applied["committed"]} == offsets

    assert len(offsets) == 5
    at_target = read(pair.target, move.group, move.topics)
    assert at_source and at_target
    move.check_read_once(at_source, at_target)

    # Forwards only: nothing is put back.
    status, again, _ = move.translate("--apply")
    assert status == 0
    assert again["committed"] == []
    assert len(again["already_there"]) == len(offsets)
    # Unless asked: then the group stands exactly where it stood at the source.
    before = committed(pair.target, move.group, move.topics)
    status, back, said = move.translate("--apply", "--backwards")
    assert (status, back["already_there"]) == (0, []), said
    wanted = {(row["topic"], row["partition"]): row["offset"] for row in applied["committed"]}
    assert {(row["topic"], row["partition"]): row["offset"] for row in back["committed"]} == wanted
    after = committed(pair.target, move.group, move.topics)
    assert after == wanted
    assert any(after[key] < before[key] for key in after)


@in_pairs("kafka-millrace", "millrace-kafka")
def test_a_group_is_kept_in_step_and_moves_at_any_time(pair: Pair) -> None:
    delivery = {"kafka-millrace": "exactly_once", "millrace-kafka": "at_least_once"}
    move = Move(pair, delivery=delivery.get(pair.name, "exactly_once"))
    other = pair.unique("stays")
    move.start({"include": ["moves-.*"], "interval_ms": 200})
    move.write(range(100))
    move.wait_until_carried()
    at_source = read(pair.source, move.group, move.topics, at_least=60)
    at_source += read(pair.source, move.group, move.topics, at_least=80)
    read(pair.source, other, {move.plain: 2}, at_least=5)
    move.write(range(100, 200))
    move.wait_until_carried()

    wanted = {(row["to"], row["target_offset"]) for row in move.translate()[1]["partitions"]}

    def is_synced() -> bool:
        found = committed(pair.target, move.group, move.topics)
        return {(f"{topic}-{number}", offset) for (topic, number), offset in found.items()} == wanted

    until(is_synced, lambda: f"{move.mirror.status().get('groups')}\n{move.mirror.log}")
    (shown,) = until(lambda: move.mirror.status().get("groups"), logs_of=[move.mirror])
    assert (shown["group"], shown["state"]) == (move.group, "synced")
    assert committed(pair.target, other, {move.plain: 2}) == {}

    at_target = read(pair.target, move.group, move.topics)
    move.check_read_once(at_source, at_target)

    # Its position on the target is its own now, also once it has left: never put back, and not moved on
    # while it has members there.
    before = committed(pair.target, move.group, move.topics)
    with reader(pair.target, move.group, list(move.topics)) as member:
        until(lambda: member.poll(0.1) is not None or member.assignment(), lambda: "no assignment")
        produce(pair.source, move.plain, 2, range(200, 210))
        move.wait_until_carried()
        read(pair.source, move.group, move.topics)
        until(
            lambda: (
                [each["state"] for each in move.mirror.status().get("groups", ())] == ["active_on_target"]
            ),
            lambda: str(move.mirror.status().get("groups")),
        )
        assert committed(pair.target, move.group, move.topics) == before


@pytest.mark.long
@in_pairs("millrace-kafka", "kafka-millrace")
def test_a_partition_of_which_nothing_was_carried_begins_where_the_target_does(pair: Pair) -> None:
    topic, group = pair.unique("empty"), pair.unique("moves")
    create(pair.source, topic, 2)
    mirror = pair.mirror([topic])
    consumer = Consumer({"bootstrap.servers": pair.source.bootstrap, "group.id": group})
    consumer.commit(offsets=[TopicPartition(topic, 0, 0), TopicPartition(topic, 1, 3)], asynchronous=False)
    consumer.close()
    until(lambda: len(mirror.status().get("partitions", [])) == 2, logs_of=[mirror])

    def row(number: int) -> dict[str, Any]:
        _, shown, said = translate(mirror.config_path, group)
        assert shown, said
        return dict(shown["partitions"][number])

    until(lambda: row(0)["is"] == "exact", lambda: str(row(0)))
    assert row(0)["target_offset"] == 0
    assert (row(1)["is"], row(1)["target_offset"]) == ("not mirrored yet", None)
    produce(pair.source, topic, 2, range(20))
    until(lambda: row(1)["is"] == "exact", lambda: str(row(1)))
    assert (row(1)["target_offset"], row(1)["lag"]) == (3, 7)
    assert row(0)["target_offset"] == 0


def committed(end: End, group: str, topics: dict[str, int]) -> dict[tuple[str, int], int]:
    consumer = Consumer({"bootstrap.servers": end.bootstrap, "group.id": group})
    try:
        asked = [TopicPartition(topic, n) for topic, count in topics.items() for n in range(count)]
        answer = consumer.committed(asked, TIMEOUT_S)
        return {(each.topic, each.partition): each.offset for each in answer if each.offset >= 0}
    finally:
        consumer.close()


@pytest.mark.long
@pytest.mark.java
@pytest.mark.kafka
@pytest.mark.pairs
def test_where_sources_merge_it_is_refused_or_leaves_nothing_out(
    pair_millrace_source: End, pair_kafka_source: End, pair_millrace_target: End, tmp_path: Path
) -> None:
    one, two, target = pair_millrace_source, pair_kafka_source, pair_millrace_target
    suffix = str(time.monotonic_ns())
    topic, group = f"merged-{suffix}", f"merges-{suffix}"
    for end in (one, two):
        create(end, topic, 1)
        produce(end, topic, 1, range(50))
    create(target, topic, 1)
    mirror = MirrorProcess(
        tmp_path / "mirror",
        target.bootstrap,
        {"one": one.bootstrap, "two": two.bootstrap},
        topics=[topic],
        name=f"merge-{suffix}",
    )
    mirror.start()
    try:
        until(lambda: len(everything(target, {topic: 1})) == 100, logs_of=[mirror])
        at_one = read(one, group, {topic: 1}, at_least=30)
        at_two = read(two, group, {topic: 1}, at_least=20)

        status, shown, _ = translate(mirror.config_path, group)
        assert status == 1
        assert {row["is"] for row in shown["partitions"]} == {"merged"}
        assert {row["target_offset"] for row in shown["partitions"]} == {None}

        status, shown, said = translate(mirror.config_path, group, "--allow-rereads", "--apply")
        assert status == 0, said
        assert len({row["target_offset"] for row in shown["partitions"]}) == 1
        at_target = read(target, group, {topic: 1})
        left = Counter(everything(target, {topic: 1})) - Counter(at_one) - Counter(at_two)
        assert not left - Counter(at_target)

        status, _, said = translate(mirror.config_path, "no-such-group", "--source", "one")
        assert status != 0
        assert "no-such-group has committed nothing on one" in said and "Traceback" not in said
        status, _, said = translate(mirror.config_path, group, "--source", "three")
        assert status == 1
        assert "its sources are one, two" in said
    finally:
        mirror.kill()
