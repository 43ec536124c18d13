"""The audit of the project's own producer through real brokers, moved by a mirror that keeps no positions."""

from __future__ import annotations

import time

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition

from millrace.audit import job
from millrace.audit.config import parse_config
from millrace.audit.producer import AuditedProducer

pytestmark = pytest.mark.java
COUNT = 1_000
START_MS = 1_356_998_400_000  # ten windows of a hundred records; the last one arrives whole


def publish(bootstrap: str) -> None:
    producer = AuditedProducer(
        {
            "bootstrap.servers": bootstrap,
            "compression.type": "zstd",
            "linger.ms": 5,
            "millrace.producer": "AA@ewr",
            "millrace.datacenter": "ewr",
            "millrace.window.ms": 1000,
        }
    )
    for number in range(COUNT):
        producer.produce("flights", f"flight {number}".encode(), key=b"k", timestamp=START_MS + 10 * number)
        producer.poll(0)
    assert producer.flush(20) == 0
    producer.close()


def copy(source: str, target: str, lose: set[int]) -> None:
    """Carry the topic record by record, leaving some out, as any foreign mirror might."""
    consumer = Consumer({"bootstrap.servers": source, "group.id": "foreign", "enable.auto.commit": False})
    producer = Producer({"bootstrap.servers": target, "linger.ms": 5})
    _, end = consumer.get_watermark_offsets(TopicPartition("flights", 0), timeout=20)
    consumer.assign([TopicPartition("flights", 0, OFFSET_BEGINNING)])
    deadline = time.monotonic() + 30
    position = 0
    while position < end and time.monotonic() < deadline:
        for message in consumer.consume(500, 0.2):
            assert message.error() is None
            position = message.offset() + 1
            if message.offset() not in lose:
                producer.produce("flights", message.value(), message.key(), headers=message.headers())
    assert position == end == COUNT
    assert producer.flush(20) == 0
    consumer.close()


def test_records_a_foreign_mirror_left_out_are_named_between_real_brokers(spark, broker_factory, tmp_path):
    source, aggregate = broker_factory(), broker_factory()
    publish(source.bootstrap)
    copy(source.bootstrap, aggregate.bootstrap, lose={40, 41, 500})
    config = parse_config(
        {
            "clusters": {
                "ewr": {"bootstrap": [source.bootstrap], "tier": "source"},
                "agg": {"bootstrap": [aggregate.bootstrap], "tier": "aggregate"},
            },
            "topics": ["flights"],
            "window": "1s",
            "grace": "0s",
            "state": str(tmp_path / "state"),
            "report": str(tmp_path / "report"),
        }
    )
    result = job.run(config, "local[2]")
    assert result.exit_status == 1, result.problem
    counts = result.summary["counts"]
    assert counts["acknowledged"] == COUNT and counts["seen"] == {"ewr": COUNT, "agg": COUNT - 3}
    lost = [pair for loss in result.summary["losses"] for pair in loss["sequences"]]
    assert sorted(number for first, last in lost for number in range(first, last + 1)) == [41, 42, 501]
    assert {tuple(loss["lost_between"]) for loss in result.summary["losses"]} == {("ewr", "agg")}
