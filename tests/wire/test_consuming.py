"""Reading without a group: by assignment, from times, at and past the edges, from topics that are not."""

from __future__ import annotations

import time

import aiokafka
import confluent_kafka
import kafka
import pytest
from confluent_kafka.admin import NewPartitions

from tests.waiting import Deadline, patience, until_async
from tests.wire.foreign_clients import PATIENCE_S, Refused, Sent, wait_until

BASE_MS = 1_700_000_000_000
LONG_POLL_MS = 10_000


def numbered(count: int, partition: int = 0) -> list[Sent]:
    return [Sent(b"%d" % n, timestamp_ms=BASE_MS + 1_000 * n, partition=partition) for n in range(count)]


def test_reading_begins_where_the_reader_says(client, new_topic):
    topic = new_topic(partitions=3)
    for partition in range(3):
        client.produce(topic, numbered(20, partition))
    received = client.consume(topic, [0, 2], 20, start=10)
    assert {(r.partition, r.offset, r.value) for r in received} == {
        (partition, offset, b"%d" % offset) for partition in (0, 2) for offset in range(10, 20)
    }


def test_reading_begins_at_a_time(client, readers, new_topic):
    """The offset that a time leads to, and the records from there on."""
    topic = new_topic()
    readers[0].produce(topic, numbered(30))
    start = client.offset_for_time(topic, 0, BASE_MS + 21_500)
    assert start == 22
    received = client.consume(topic, [0], 8, start=start)
    assert [r.timestamp_ms for r in received] == [BASE_MS + 1_000 * n for n in range(22, 30)]
    assert client.offset_for_time(topic, 0, BASE_MS + 29_001) is None
    assert client.offset_for_time(topic, 0, 0) == 0


@pytest.mark.parametrize("start", [4, 100], ids=["below the start", "past the end"])
def test_offset_out_of_range_is_reset_as_the_reader_says(client, readers, admin, new_topic, start):
    topic = new_topic()
    readers[0].produce(topic, numbered(10))
    (deleted,) = admin.delete_records([confluent_kafka.TopicPartition(topic, 0, 6)]).values()
    assert deleted.result(patience(PATIENCE_S)).low_watermark == 6
    assert client.bounds(topic, 0) == (6, 10)
    assert client.first_read(topic, start, "earliest").offset == 6
    with pytest.raises(Refused) as refused:
        client.first_read(topic, start, "error")
    assert (
        refused.value.reason
        == {
            "confluent-kafka": "_AUTO_OFFSET_RESET",
            "kafka-python": "OFFSET_OUT_OF_RANGE",
            "aiokafka": "OFFSET_OUT_OF_RANGE",
        }[client.name]
    )


def test_offset_out_of_range_is_reset_to_the_latest(readers, new_topic):
    """What is written after the reset is the first thing that is read."""
    topic = new_topic()
    readers[0].produce(topic, numbered(3))
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": readers[0].bootstrap, "group.id": "unused", "auto.offset.reset": "latest"}
    )
    try:
        consumer.assign([confluent_kafka.TopicPartition(topic, 0, 1_000)])

        def position() -> int:
            consumer.poll(0.05)
            return consumer.position([confluent_kafka.TopicPartition(topic, 0)])[0].offset

        sent = 3
        received = None
        deadline = Deadline("something is read", within_s=PATIENCE_S)
        while received is None:
            deadline.check()
            readers[1].produce(topic, [Sent(b"new")])
            sent += 1
            received = consumer.poll(0.3)
        assert received.error() is None
        assert (received.value(), 3 <= received.offset() < sent) == (b"new", True)
    finally:
        consumer.close()


def test_paused_partitions_give_nothing_until_resumed(readers, new_topic):
    topic = new_topic(partitions=2)
    for partition in range(2):
        readers[0].produce(topic, numbered(5, partition))
    consumer = kafka.KafkaConsumer(
        bootstrap_servers=readers[0].bootstrap, enable_auto_commit=False, auto_offset_reset="earliest"
    )
    try:
        places = [kafka.TopicPartition(topic, n) for n in range(2)]
        consumer.assign(places)
        consumer.pause(places[0])
        seen: list[tuple[int, int]] = []

        def take() -> int:
            for records in consumer.poll(timeout_ms=100).values():
                seen.extend((record.partition, record.offset) for record in records)
            return len(seen)

        wait_until(lambda: take() == 5, "the other partition")
        assert seen == [(1, n) for n in range(5)]
        consumer.resume(places[0])
        wait_until(lambda: take() == 10, "the resumed one")
        assert seen[5:] == [(0, n) for n in range(5)]
    finally:
        consumer.close()


def test_reader_waits_for_what_is_not_there_yet_and_gets_it_at_once(client, readers, new_topic):
    """A long poll ends when a record arrives, not when its time is over."""
    topic = new_topic()
    readers[0].produce(topic, numbered(1))
    wait_name = "fetch_wait_max_ms" if client.name == "confluent-kafka" else "fetch_max_wait_ms"
    member = client.member("latency-" + topic, topic, **{wait_name: LONG_POLL_MS})
    try:
        wait_until(lambda: len(member.records) == 1, "the first record")
        late: list[float] = []
        for number in range(2, 7):
            readers[0].produce(topic, numbered(1))
            started = time.monotonic()
            wait_until(lambda: len(member.records) >= number, "the next record")  # noqa: B023
            late.append(time.monotonic() - started)
        assert min(late) < LONG_POLL_MS / 2_000, late
    finally:
        member.leave()


def test_topic_that_is_not_there_is_told_to_who_reads_it(bootstrap, fresh_name):
    unknown = fresh_name("unknown")
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": fresh_name("group"),
            "allow.auto.create.topics": False,
        }
    )
    try:
        consumer.subscribe([unknown])
        messages = []
        wait_until(lambda: bool(messages.append(consumer.poll(0.1)) or messages[-1]), "an error")
        assert messages[-1].error().name() == "UNKNOWN_TOPIC_OR_PART"
    finally:
        consumer.close()
    reader = kafka.KafkaConsumer(bootstrap_servers=bootstrap, allow_auto_create_topics=False)
    try:
        assert not reader.partitions_for_topic(unknown)
        assert unknown not in reader.topics()
    finally:
        reader.close()


def test_subscription_finds_topics_that_come_later(bootstrap, readers, new_topic, fresh_name, admin):
    """A pattern, a topic that matches it later, and a partition that is added to one."""
    prefix, group = fresh_name("pattern"), fresh_name("group")
    first, second = f"{prefix}.one", f"{prefix}.two"
    readers[0].produce(first, [Sent(b"one")])
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "topic.metadata.refresh.interval.ms": 300,
        }
    )
    seen: set[tuple[str, int, bytes]] = set()

    def take() -> set[tuple[str, int, bytes]]:
        message = consumer.poll(0.1)
        if message is not None and message.error() is None:
            seen.add((message.topic(), message.partition(), message.value()))
        return seen

    try:
        consumer.subscribe([f"^{prefix.replace('-', '.')}.*"])
        wait_until(lambda: (first, 0, b"one") in take(), "the first topic")
        readers[0].produce(second, [Sent(b"two")])
        wait_until(lambda: (second, 0, b"two") in take(), "the topic that came later")
        admin.create_partitions([NewPartitions(first, 2)])[first].result(patience(PATIENCE_S))
        wait_until(lambda: partitions_of(readers[0].bootstrap, first) == {0, 1}, "the new partition")
        readers[0].produce(first, [Sent(b"three", partition=1)])
        wait_until(lambda: (first, 1, b"three") in take(), "the partition that came later")
    finally:
        consumer.close()


def partitions_of(bootstrap: str, topic: str) -> set[int]:
    reader = kafka.KafkaConsumer(bootstrap_servers=bootstrap)
    try:
        return reader.partitions_for_topic(topic) or set()
    finally:
        reader.close()


def test_topic_is_made_by_the_first_who_asks_where_that_is_allowed(bootstrap, fresh_name):
    """Metadata of an unknown topic makes it, when client and broker agree: aiokafka's consumer does."""
    import asyncio

    topic = fresh_name("made-by-asking")

    async def ask() -> set[int]:
        consumer = aiokafka.AIOKafkaConsumer(topic, bootstrap_servers=bootstrap)
        await consumer.start()
        try:

            async def shown() -> set[int]:
                await consumer._client.force_metadata_update()
                return set(consumer.partitions_for_topic(topic) or ())

            return await until_async(shown, f"{topic} is made", every_s=0.05)
        finally:
            await consumer.stop()

    assert asyncio.run(ask()) == {0}
    assert partitions_of(bootstrap, topic) == {0}


def test_large_fetches_are_cut_where_the_reader_says(readers, new_topic):
    """200 KB of records, read 20 KB at a time: nothing is lost and nothing comes twice."""
    topic = new_topic()
    for _ in range(20):
        readers[0].produce(topic, [Sent(b"x" * 1_000) for _ in range(10)])
    consumer = kafka.KafkaConsumer(
        bootstrap_servers=readers[0].bootstrap,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        max_partition_fetch_bytes=20_000,
        fetch_max_bytes=20_000,
    )
    try:
        consumer.assign([kafka.TopicPartition(topic, 0)])
        offsets: list[int] = []

        def take() -> int:
            for records in consumer.poll(timeout_ms=100).values():
                offsets.extend(record.offset for record in records)
            return len(offsets)

        wait_until(lambda: take() >= 200, "everything")
        assert offsets == list(range(200))
    finally:
        consumer.close()
