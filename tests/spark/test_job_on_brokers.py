"""The audit of the project's own producer through real brokers, moved by a mirror that keeps no positions."""

from __future__ import annotations

from collections import Counter

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition

from millrace.audit import job
from millrace.audit.config import parse_config
from millrace.audit.contract.header import HEADER_KEY, decode_identity
from millrace.audit.producer import AuditedProducer
from tests.waiting import Deadline, patience
from tests.watermarks import end_offset

pytestmark = pytest.mark.java
COUNT = 1_000
START_MS = 1_356_998_400_000  # ten windows of a hundred records; the last one arrives whole


def publish(bootstrap: str, name: str, identity: str) -> None:
    producer = AuditedProducer(
        {
            "bootstrap.servers": bootstrap,
            "compression.type": "zstd",
            "linger.ms": 5,
            "millrace.producer": name,
            "millrace.identity": identity,
            "millrace.datacenter": "ewr",
            "millrace.window.ms": 1000,
        }
    )
    for number in range(COUNT):
        producer.produce("flights", f"flight {number}".encode(), key=b"k", timestamp=START_MS + 10 * number)
        producer.poll(0)
    assert producer.flush(patience(20)) == 0
    producer.close()


def copy(source: str, target: str, lose: set[int]) -> Counter[str]:
    """Carry the topic record by record, leaving some out, as any foreign mirror might. Returns how many
    records name each producer in their headers."""
    named: Counter[str] = Counter()
    consumer = Consumer({"bootstrap.servers": source, "group.id": "foreign", "enable.auto.commit": False})
    producer = Producer({"bootstrap.servers": target, "linger.ms": 5})
    end = end_offset(consumer, "flights", 0, 90)
    consumer.assign([TopicPartition("flights", 0, OFFSET_BEGINNING)])
    position = 0
    deadline = Deadline(lambda: f"{end} records; {position} were read", within_s=120)
    while position < end:
        deadline.check()
        for message in consumer.consume(500, 0.2):
            assert message.error() is None
            position = message.offset() + 1
            named[decode_identity(dict(message.headers())[HEADER_KEY]).producer] += 1
            if message.offset() not in lose:
                producer.produce("flights", message.value(), message.key(), headers=message.headers())
    assert position == end == 2 * COUNT
    assert producer.flush(patience(20)) == 0
    consumer.close()
    return named


def test_records_a_foreign_mirror_left_out_are_named_between_real_brokers(spark, broker_factory, tmp_path):
    """One producer writes its name into every record, the other (`compact`) only into its events."""
    source, aggregate = broker_factory(), broker_factory()
    publish(source.bootstrap, "AA@ewr", "full")
    publish(source.bootstrap, "BB@ewr", "compact")
    lose = {40, 41, 500, COUNT + 7, COUNT + 8}
    assert copy(source.bootstrap, aggregate.bootstrap, lose) == {"AA@ewr": COUNT, "": COUNT}
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
    assert counts["acknowledged"] == 2 * COUNT
    assert counts["seen"] == {"ewr": 2 * COUNT, "agg": 2 * COUNT - 5} and counts["unknown"] == 0
    lost: dict[str, list[int]] = {}
    for loss in result.summary["losses"]:
        lost.setdefault(loss["producer"], []).extend(
            number for first, last in loss["sequences"] for number in range(first, last + 1)
        )
    assert {name: sorted(each) for name, each in lost.items()} == {"AA@ewr": [41, 42, 501], "BB@ewr": [8, 9]}
    assert {tuple(loss["lost_between"]) for loss in result.summary["losses"]} == {("ewr", "agg")}
    assert {each["producer"] for each in result.summary["producers"]} == {"AA@ewr", "BB@ewr"}
    assert result.summary["windows"] == {"LOSS": 3, "PROVEN": 17}
    assert (result.summary["reasons"], result.summary["untrusted"]) == ([], [])
