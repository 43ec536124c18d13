"""The audit of the project's own producer through real brokers: moved by a mirror that keeps no positions,
read by a group of the project's own consumer, compacted by a real cleaner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from millrace.audit import job
from millrace.audit.config import AuditConfig, parse_config
from millrace.audit.consumer import AuditedConsumer
from millrace.audit.contract.header import HEADER_KEY, decode_identity
from millrace.audit.producer import AuditedProducer
from tests.waiting import Deadline, patience, until
from tests.watermarks import end_offset

pytestmark = pytest.mark.java
COUNT = 1_000
START_MS = 1_356_998_400_000  # ten windows of a hundred records; the last one arrives whole


def settings(bootstrap: str, name: str, identity: str = "full") -> dict[str, object]:
    return {
        "bootstrap.servers": bootstrap,
        "compression.type": "zstd",
        "linger.ms": 5,
        "millrace.producer": name,
        "millrace.identity": identity,
        "millrace.datacenter": "ewr",
        "millrace.window.ms": 1000,
    }


def publish(bootstrap: str, name: str, identity: str = "full", count: int = COUNT) -> None:
    producer = AuditedProducer(settings(bootstrap, name, identity))
    for number in range(count):
        producer.produce("flights", f"flight {number}".encode(), key=b"k", timestamp=START_MS + 10 * number)
        producer.poll(0)
    assert producer.flush(patience(20)) == 0
    producer.close()


def publish_by_keys(bootstrap: str, keys: Sequence[bytes]) -> None:
    """A record each, 0.1 s after the one before; the last one of "gone" is a tombstone."""
    producer = AuditedProducer(settings(bootstrap, "AA@ewr"))
    last_of = {key: number for number, key in enumerate(keys)}
    offsets: list[int | None] = []

    def delivered(error: object, message: Message) -> None:
        assert error is None, error
        offsets.append(message.offset())

    for number, key in enumerate(keys):
        value = None if number == last_of[key] and key == b"gone" else b"flight %d" % number
        producer.produce("flights", value, key=key, timestamp=START_MS + 100 * number, on_delivery=delivered)
        assert producer.flush(patience(20)) == 0
    producer.close()
    assert offsets == list(range(len(keys)))


def config_of(folder: Path, clusters: Mapping[str, str], **more: object) -> AuditConfig:
    """One source, `ewr`, and an aggregate."""
    return parse_config(
        {
            "clusters": {
                name: {"bootstrap": [bootstrap], "tier": "source" if name == "ewr" else "aggregate"}
                for name, bootstrap in clusters.items()
            },
            "topics": ["flights"],
            "window": "1s",
            "grace": "0s",
            "state": str(folder / "state"),
            "report": str(folder / "report"),
            **more,
        }
    )


def sequences_of(bootstrap: str) -> list[int]:
    """Of the records that are in the log now."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "looks", "enable.auto.commit": False})
    try:
        end = end_offset(consumer, "flights", 0, 90)
        consumer.assign([TopicPartition("flights", 0, OFFSET_BEGINNING)])
        found: list[int] = []
        offset, deadline = -1, Deadline(lambda: f"{end} offsets; {offset + 1} were read", within_s=120)
        while offset < end - 1:
            deadline.check()
            for message in consumer.consume(500, 0.2):
                assert message.error() is None
                offset = message.offset()
                found.append(decode_identity(dict(message.headers())[HEADER_KEY]).sequence)
        return found
    finally:
        consumer.close()


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
    config = config_of(tmp_path, {"ewr": source.bootstrap, "agg": aggregate.bootstrap})
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


def test_a_group_is_a_tier_of_the_whole_job(spark, broker_factory, tmp_path):
    """It passed over five records, and committed behind them."""
    source = broker_factory()
    publish(source.bootstrap, "AA@ewr", count=200)
    consumer = AuditedConsumer(
        {
            "bootstrap.servers": source.bootstrap,
            "group.id": "readers",
            "auto.offset.reset": "earliest",
            "millrace.window.ms": 1000,
        }
    )
    deadline = Deadline(lambda: "200 records, but for five", within_s=120)
    for first, left in ((0, 100), (105, 95)):
        consumer.assign([TopicPartition("flights", 0, first)])
        while left:
            deadline.check()
            left -= sum(message.error() is None for message in consumer.consume(left, 0.2))
    consumer.commit(asynchronous=False)
    consumer.close()
    config = config_of(tmp_path, {"ewr": source.bootstrap}, groups={"ewr": ["readers"]})
    for _ in range(2):  # and what was committed is known from the state as it is from the cluster
        result = job.run(config, "local[2]")
        assert result.exit_status == 1, result.problem
        assert result.summary["counts"]["seen"] == {"ewr": 200, "group:readers": 195}
        assert [(each["sequences"], each["lost_between"]) for each in result.summary["losses"]] == [
            ([[101, 105]], ["ewr", "group:readers"])
        ]
        assert result.summary["windows"] == {"LOSS": 1, "PROVEN": 1}


def test_what_compaction_took_is_unknown_and_what_it_left_is_judged(spark, broker_factory, tmp_path):
    """A real cleaner at work on the source, before a mirror came that lost one of what was left."""
    source, aggregate = broker_factory(log_cleaner_backoff_ms=50), broker_factory()
    # Each record is in a segment of its own: all but the last are the cleaner's.
    by_key = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.01", "segment.ms": "50"}
    admin = AdminClient({"bootstrap.servers": source.bootstrap})
    admin.create_topics([NewTopic("flights", 1, 1, config=by_key)])["flights"].result(patience(20))
    # Three windows: of the first nothing is left, of the second some, and of the last all.
    keys = [b"often"] * 10 + [b"often", b"once", b"gone", b"kept", b"often"] + [b"gone"] * 5
    keys += [b"%d" % number for number in range(10)]
    publish_by_keys(source.bootstrap, keys)
    last_of = {key: number for number, key in enumerate(keys, 1)}
    left = sorted(last_of.values())
    until(lambda: sequences_of(source.bootstrap) == left, lambda: f"{left}", within_s=120, every_s=0.1)
    lost = last_of[b"kept"]
    assert copy(source.bootstrap, aggregate.bootstrap, {lost - 1}) == {"AA@ewr": len(left)}
    result = job.run(config_of(tmp_path, {"ewr": source.bootstrap, "agg": aggregate.bootstrap}), "local[2]")
    assert result.exit_status == 1, result.problem
    counts = result.summary["counts"]
    assert counts["seen"] == {"ewr": len(left), "agg": len(left) - 1}
    assert (counts["missing"], counts["unknown"]) == (1, len(keys) - len(left))
    assert [(each["sequences"], each["lost_between"]) for each in result.summary["losses"]] == [
        ([[lost, lost]], ["ewr", "agg"])
    ]
    assert result.summary["windows"] == {"UNKNOWN": 1, "LOSS": 1, "PROVEN": 1}
    assert any("compact" in each["reason"] for each in result.summary["reasons"]), result.summary["reasons"]
