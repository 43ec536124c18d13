"""The audited producer on real brokers, Millrace's and Apache Kafka's, and a whole audit of what it sent."""

from __future__ import annotations

import time
from collections import defaultdict

import numpy as np
import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from millrace.audit.cells import Cell, count_repeats, encode_bitmaps, merge_cells
from millrace.audit.events import EventLedger
from millrace.audit.header import HEADER_KEY, decode_identity, window_start_ms
from millrace.audit.producer import AuditedProducer
from millrace.audit.reconcile import TierReading, reconcile_stream
from millrace.audit.verdicts import PRODUCED, Verdict, overall_verdict

DEADLINE_S = 30.0
WINDOW_MS = 10_000
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")


@pytest.fixture(params=["millrace", pytest.param("apache-kafka", marks=pytest.mark.kafka)])
def bootstrap(request) -> str:
    if request.param == "millrace":
        return request.getfixturevalue("broker").bootstrap
    return request.getfixturevalue("kafka_peer").bootstrap


def read_all(bootstrap: str, topic: str) -> list:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "audit-reader"})
    partitions = consumer.list_topics(topic, timeout=DEADLINE_S).topics[topic].partitions
    starts = [TopicPartition(topic, partition, 0) for partition in partitions]
    ends = sum(consumer.get_watermark_offsets(start, timeout=DEADLINE_S)[1] for start in starts)
    consumer.assign(starts)
    messages, deadline = [], time.monotonic() + DEADLINE_S
    while len(messages) < ends and time.monotonic() < deadline:
        messages += [message for message in consumer.consume(1000, 0.5) if message.error() is None]
    consumer.close()
    assert len(messages) == ends
    return messages


def cells_of(messages) -> list[Cell]:
    """What a scan counts, through a foreign client."""
    groups = defaultdict(list)
    for message in messages:
        identity = decode_identity(dict(message.headers())[HEADER_KEY])
        start_ms = window_start_ms(identity.created_ms, WINDOW_MS)
        key = (message.topic(), message.partition(), identity.stream, start_ms)
        groups[key].append((message.offset(), identity.sequence, len(message)))
    cells = []
    for (topic, partition, stream, start_ms), members in groups.items():
        distinct, repeats = count_repeats(np.array([member[1] for member in members], dtype=np.uint64))
        ((base, bitmap),) = encode_bitmaps(distinct)
        cells.append(
            Cell(
                tier="source",
                cluster="ewr",
                topic=topic,
                partition=partition,
                stream=stream,
                producer="",
                window_start_ms=start_ms,
                chunk_start=0,
                count=len(members),
                byte_count=sum(member[2] for member in members),
                first_offset=min(member[0] for member in members),
                last_offset=max(member[0] for member in members),
                base=base,
                bitmap=bitmap,
                repeats=tuple(repeats.items()),
            )
        )
    return cells


def reconcile(ledger: EventLedger, cells: list[Cell], topic: str):
    rows = []
    for facts in ledger.streams.values():
        if facts.topic == topic:
            seen = merge_cells(cell for cell in cells if cell.stream == facts.stream)
            rows += reconcile_stream(
                facts,
                seen,
                [TierReading("source")],
                window_ms=WINDOW_MS,
                grace_ms=0,
                now_ms=int(time.time() * 1000),
            )
    return rows


def test_what_a_producer_sent_is_proven_and_a_removed_record_is_named(bootstrap):
    topic = f"flights-{time.monotonic_ns()}"
    for codec in CODECS:
        producer = AuditedProducer(
            {
                "bootstrap.servers": bootstrap,
                "compression.type": codec,
                "linger.ms": 5,
                "millrace.producer": codec,
                "millrace.window.ms": WINDOW_MS,
            }
        )
        for number in range(400):
            created_ms = 1_357_000_000_000 + number * 100
            producer.produce(topic, b"flight %d" % number, key=b"k%d" % number, timestamp=created_ms)
            producer.poll(0)
        assert producer.close()
    ledger = EventLedger()
    for message in read_all(bootstrap, "millrace.audit"):
        ledger.add(message.key(), message.value())
    messages = read_all(bootstrap, topic)
    assert len(messages) == 400 * len(CODECS)
    rows = reconcile(ledger, cells_of(messages), topic)
    assert {row.producer for row in rows} == set(CODECS)
    assert overall_verdict(rows) is Verdict.PROVEN
    assert sum(row.published for row in rows) == sum(row.consumed["source"] for row in rows) == len(messages)
    removed = decode_identity(dict(messages[123].headers())[HEADER_KEY])
    rows = reconcile(ledger, cells_of(messages[:123] + messages[124:]), topic)
    (loss,) = [row for row in rows if row.verdict is Verdict.LOSS]
    assert (loss.producer, loss.stream) == (removed.producer, removed.stream)
    assert loss.missing == {(PRODUCED, "source"): ((removed.sequence, removed.sequence),)}
    check_events_topic(bootstrap)


def check_events_topic(bootstrap: str) -> None:
    """Compacted and deleted in the end, one partition."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    assert (
        len(admin.list_topics("millrace.audit", timeout=DEADLINE_S).topics["millrace.audit"].partitions) == 1
    )
    resource = ConfigResource(ResourceType.TOPIC, "millrace.audit")
    settings = admin.describe_configs([resource])[resource].result(DEADLINE_S)
    assert set(settings["cleanup.policy"].value.split(",")) == {"compact", "delete"}
