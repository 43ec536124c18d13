"""Consumer groups that move from a source to the target: by `millrace mirror translate`, and by the
background sync. Whoever moves reads every record exactly once, whatever kind of source it was: plain,
transactional with aborted records, compacted with holes.

From several sources: test_mirror_groups_of_sources.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
import yaml
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition

from millrace.mirror.offsets.translation import Answer, Translation
from tests.cluster.moving_groups import (
    TIMEOUT_S,
    Read,
    committed,
    create,
    everything,
    map_translations,
    next_places,
    places,
    produce,
    produce_in_transactions,
    read,
    reader,
    stable_ends,
    translate,
    until,
    value_of,
    wait_until_carried,
)
from tests.pairs import End, Pair, in_pairs
from tests.waiting import patience

COMPACTED = {
    "cleanup.policy": "compact",
    "segment.ms": "100",
    "min.cleanable.dirty.ratio": "0.01",
    "delete.retention.ms": "0",
}
ROLLS = b"only-rolls"


def key_of(number: int) -> bytes:
    """Keys that come again and again, and some that stay: compaction leaves holes all over."""
    return b"once-%d" % number if number % 4 == 0 else b"often-%d" % (number % 3)


def produce_by_keys(end: End, topic: str, numbers: range) -> dict[bytes, int]:
    """{value: its offset}, for compaction takes most of them."""
    written: dict[bytes, int] = {}
    producer = Producer({"bootstrap.servers": end.bootstrap, "linger.ms": 0})
    for number in numbers:
        send_one(producer, topic, value_of(end, topic, number), key_of(number), written)
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
        wait_until_carried(stable_ends(self.pair.source, self.topics), self.mirror)

    def translate(self, *words: str) -> tuple[int, dict[str, Any], str]:
        return translate(self.mirror.config_path, self.group, *words)

    def check_every_offset(self) -> dict[str, int]:
        """Each offset of the source's logs, those of records and those between, is translated to where the
        next record's copy is, or to the end. Returns how many of these were of no record, by topic."""
        between: dict[str, int] = {}
        target, source = places(self.pair.target, self.topics), places(self.pair.source, self.topics)
        for partition, end in stable_ends(self.pair.source, self.topics).items():
            place = partition.topic, partition.partition
            at_source, at_target = source[place], target[place]
            if partition.topic == self.compacted:  # there is less at the source now than was carried
                at_source = {value: self.written[value] for value in at_target}
            assert at_source.keys() == at_target.keys()
            wanted = [Translation(Answer.EXACT, each) for each in next_places(at_source, at_target, end)]
            name = self.mirror.settings["name"]
            assert map_translations(self.pair.target, name, partition, end) == wanted, partition
            between[partition.topic] = between.get(partition.topic, 0) + end - len(at_source)
        return between

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
            (self.compacted, value_of(self.pair.source, self.compacted, number))
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
