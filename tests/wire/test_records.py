"""Records through the broker, written by one foreign client and read by every other: the same bytes.

Keys, values, headers, timestamps and offsets; every codec; producers with and without idempotence.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from confluent_kafka import KafkaError, Message, Producer

from millrace.broker.protocol.records import Record, build_batch
from tests.raw_client import RawClient
from tests.waiting import patience
from tests.wire.foreign_clients import CODECS, PATIENCE_S, ForeignClient, Received, Sent

EVERY_BYTE = bytes(range(256))
NEW_YEAR_MS = 1_357_034_400_000


def telling_records(client: ForeignClient) -> list[Sent]:
    """Every combination of null, empty and telling keys and values, with headers of all kinds."""
    rng = random.Random(2_013)
    fields = (None, b"", EVERY_BYTE)
    headers: list[tuple[tuple[str, bytes | None], ...]] = [
        (),
        (("_mr", EVERY_BYTE),),
        (("twice", b"1"), ("twice", b"2"), ("", b""), ("naïve ключ", b"\x00")),
    ]
    if client.sends_null_headers:
        headers.append((("null", None),))
    records = [
        Sent(value, key, which, timestamp_ms=NEW_YEAR_MS + 17 * number, partition=number % 2)
        for number, (key, value, which) in enumerate(itertools.product(fields, fields, headers))
        if client.sends_null_records or key is not None or value is not None
    ]
    records.append(Sent(rng.randbytes(300_000), b"large and random", (), 1, 1))
    records.append(Sent(b"flight " * 60_000, b"large and dull", (), NEW_YEAR_MS - 10**11, 1))
    return records


def in_order(records: list[Sent], partition: int) -> list[Sent]:
    return [record for record in records if record.partition == partition]


def assert_same(received: list[Received], sent: list[Sent], who: str = "") -> None:
    """Record by record, so that a difference is shown and not 300 KB around it."""
    for number, (got, expected) in enumerate(zip(received, sent, strict=True)):
        if got.as_sent() != expected:
            pytest.fail(f"{who} record {number}: {got!r:.600} instead of {expected!r:.600}")


def by_partition(received: list[Received]) -> dict[int, list[Received]]:
    parts: dict[int, list[Received]] = {0: [], 1: []}
    for record in received:
        parts[record.partition].append(record)
    return parts


@pytest.mark.parametrize("codec", CODECS)
def test_every_client_reads_what_one_wrote_byte_for_byte(client, readers, new_topic, codec):
    topic = new_topic(partitions=2)
    records = telling_records(client)
    offsets = client.produce(topic, records, codec)
    for number in (0, 1):
        placed = [
            offset for offset, record in zip(offsets, records, strict=True) if record.partition == number
        ]
        assert placed == list(range(len(placed)))
    for reader in readers:
        parts = by_partition(reader.consume(topic, [0, 1], len(records)))
        for number, part in parts.items():
            assert [record.offset for record in part] == list(range(len(part))), reader.name
            assert_same(part, in_order(records, number), reader.name)


@pytest.mark.parametrize("acks", [0, 1, -1])
def test_every_level_of_acknowledgement_delivers(client, readers, new_topic, acks):
    topic = new_topic()
    records = [Sent(b"value %d" % number, timestamp_ms=NEW_YEAR_MS + number) for number in range(20)]
    client.produce(topic, records, acks=acks)
    received = readers[0].consume(topic, [0], len(records))
    assert_same(received, records)


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_idempotent_producer_writes_each_record_once_in_order(client, readers, new_topic, codec):
    topic = new_topic(partitions=2)
    records = [
        Sent(b"%d" % number, b"key", timestamp_ms=NEW_YEAR_MS + number, partition=number % 2)
        for number in range(3_000)
    ]
    client.produce(topic, records, codec, idempotent=True)
    parts = by_partition(readers[0].consume(topic, [0, 1], len(records)))
    for number, part in parts.items():
        assert_same(part, in_order(records, number))
        assert client.bounds(topic, number) == (0, len(part))


def test_offsets_are_found_by_time(client, new_topic):
    topic = new_topic()
    times_ms = [NEW_YEAR_MS + 1_000 * number for number in range(50)]
    client.produce(topic, [Sent(b"x" * 200, timestamp_ms=time_ms) for time_ms in times_ms])
    assert client.offset_for_time(topic, 0, times_ms[0] - 10**6) == 0
    assert client.offset_for_time(topic, 0, times_ms[17]) == 17
    assert client.offset_for_time(topic, 0, times_ms[17] + 1) == 18
    assert client.offset_for_time(topic, 0, times_ms[-1]) == 49
    assert client.offset_for_time(topic, 0, times_ms[-1] + 1) is None
    assert client.bounds(topic, 0) == (0, 50)


def test_reading_can_start_in_the_middle_of_a_compressed_batch(client, readers, new_topic):
    topic = new_topic()
    records = [Sent(b"%05d" % number, timestamp_ms=NEW_YEAR_MS + number) for number in range(500)]
    client.produce(topic, records, "lz4")
    for reader in readers:
        received = reader.consume(topic, [0], 158, start=342)
        assert_same(received, records[342:], reader.name)
        assert received[0].offset == 342


def test_log_append_time_replaces_the_producers_time(client, readers, new_topic):
    topic = new_topic(message_timestamp_type="LogAppendTime")
    client.produce(topic, [Sent(b"x", timestamp_ms=NEW_YEAR_MS) for _ in range(5)], "gzip")
    seen = {tuple(r.timestamp_ms for r in reader.consume(topic, [0], 5)) for reader in readers}
    assert len(seen) == 1, "every client reads the same time"
    assert min(seen.pop()) > NEW_YEAR_MS + 10 * 365 * 86_400_000


def test_producer_is_told_which_records_of_a_refused_batch_are_at_fault(server, bootstrap, new_topic):
    """KIP-467: the keyless records of a compacted topic are named; the others failed for their company."""
    topic = new_topic(cleanup_policy="compact")
    keyless = set(range(5, 100, 10))
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 5_000, "retries": 0, "log_level": 2})
    producer.list_topics(topic, timeout=PATIENCE_S)  # so that all of them go into one batch
    told: dict[int, str] = {}

    def delivered(number: int) -> Callable[[KafkaError | None, Message], None]:
        def report(error: KafkaError | None, _: Message) -> None:
            told[number] = "" if error is None else error.name()

        return report

    for number in range(100):
        key = None if number in keyless else b"%d" % number
        producer.produce(topic, b"value", key, partition=0, on_delivery=delivered(number))
    assert producer.flush(patience(PATIENCE_S)) == 0
    assert {number for number, name in told.items() if name == "INVALID_RECORD"} == keyless
    assert {told[number] for number in set(range(100)) - keyless} == {"_INVALID_DIFFERENT_RECORD"}

    # The sentences, which confluent-kafka does not hand on.
    records = [Record(None if number in keyless else b"k", b"v") for number in range(100)]
    with RawClient(server.port) as raw:
        (answer,) = raw.produce({(topic, 0): build_batch(records)})
    assert {number for number, _ in answer.record_errors} == keyless
    assert all("key" in str(sentence) for _, sentence in answer.record_errors)
