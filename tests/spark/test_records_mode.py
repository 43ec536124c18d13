"""`mode` records: every record with all that it has, as another client reads it."""

from __future__ import annotations

import asyncio
import pickle
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka import TopicPartition as Place
from confluent_kafka.admin import AdminClient, NewTopic
from kafka import KafkaConsumer, TopicPartition

from millrace.audit.contract.header import encode_identity, encode_prefix
from millrace.audit.scanning.range_reader import RangeReader
from millrace.audit.spark.kafka_options import parse_source
from millrace.audit.spark.pinning import pin_ranges
from millrace.audit.spark.spark_source import MillraceReader
from millrace.audit.spark.task_plan import OffsetRange
from millrace.audit.spark.task_reader import _read_records
from millrace.broker.errors import ConfigError
from millrace.broker.protocol.batch_kernels import B_LAST_OFFSET
from tests.cluster.transactional import create_topic, transactional
from tests.waiting import Deadline, patience

pytestmark = pytest.mark.java
IDENTITY = encode_identity(encode_prefix("00000000000000aa"), 7, 1_356_998_400_123, b"UA@ewr")
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")


def publish(bootstrap: str, topic: str) -> None:
    """Records of every shape, through every codec, in two partitions."""
    for number, codec in enumerate(CODECS):
        producer = Producer({"bootstrap.servers": bootstrap, "compression.type": codec, "linger.ms": 20})
        shapes: list[dict[str, Any]] = [
            {"value": b"plain", "key": b"k"},
            {"value": None, "key": b"tombstone"},
            {"value": b"", "key": None},
            {"value": b"v" * 5000, "key": b"", "headers": [("a", b"1"), ("a", None), ("b", b"")]},
            {"value": b"stamped", "headers": [("_mr", b"old"), ("\u00e9", b"x"), ("_mr", IDENTITY)]},
            {"value": b"broken", "headers": [("_mr", IDENTITY[:9])]},
        ]
        for shape in shapes:
            producer.produce(topic, partition=number % 2, timestamp=1_356_998_400_000 + number, **shape)
        assert producer.flush(patience(30)) == 0


def as_kafka_python_reads(bootstrap: str, topic: str, count: int) -> list[tuple[Any, ...]]:
    consumer = KafkaConsumer(
        bootstrap_servers=bootstrap, isolation_level="read_committed", auto_offset_reset="earliest"
    )
    consumer.assign([TopicPartition(topic, number) for number in range(2)])
    found: list[tuple[Any, ...]] = []
    deadline = Deadline(lambda: f"{len(found)} of {count} records", within_s=180)
    while len(found) < count:
        deadline.check()
        for records in consumer.poll(timeout_ms=500).values():
            found += [
                (r.partition, r.offset, r.timestamp, r.key, r.value, [tuple(each) for each in r.headers])
                for r in records
            ]
    consumer.close()
    return sorted(found, key=lambda row: row[:2])


@pytest.mark.parametrize("times", ["CreateTime", "LogAppendTime"])
def test_rows_are_what_kafka_python_reads(spark, broker_factory, times):
    broker = broker_factory(log_retention_ms=-1)
    create_topic(broker, "shapes", 2, config={"message.timestamp.type": times})
    publish(broker.bootstrap, "shapes")
    producer = transactional(broker, "t-1", compression_type="lz4")
    producer.init_transactions(patience(30))
    for ending in ("abort_transaction", "commit_transaction"):
        producer.begin_transaction()
        for number in range(5):
            producer.produce("shapes", f"{ending} {number}".encode(), partition=0)
        producer.flush(patience(30))
        getattr(producer, ending)(30)
    table = (
        spark.read.format("millrace")
        .option("kafka.bootstrap.servers", broker.bootstrap)
        .option("subscribe", "shapes")
        .option("kafka.isolation.level", "read_committed")
        .option("includeHeaders", "true")
        .option("includeIdentity", "true")
        .option("minPartitions", "3")
        .load()
    )
    rows = sorted(table.toArrow().to_pylist(), key=lambda row: (row["partition"], row["offset"]))
    expected = as_kafka_python_reads(broker.bootstrap, "shapes", 35)
    assert len(expected) == 35
    assert expected == [
        (
            row["partition"],
            row["offset"],
            row["timestamp"].timestamp() * 1000,
            row["key"],
            row["value"],
            [(each["key"], each["value"]) for each in row["headers"] or ()],
        )
        for row in rows
    ]
    assert {row["topic"] for row in rows} == {"shapes"}
    assert {row["timestampType"] for row in rows} == {int(times == "LogAppendTime")}
    identified = [row for row in rows if row["identity"] is not None]
    assert {row["value"] for row in identified} == {b"stamped"} and len(identified) == len(CODECS)
    created = datetime.fromtimestamp(1_356_998_400.123, UTC)
    assert all(
        row["identity"]
        == {"stream": "00000000000000aa", "sequence": 7, "created": created, "producer": "UA@ewr"}
        for row in identified
    )


def test_offsets_are_pinned_when_spark_plans_the_read(spark, world):
    cluster = world.clusters["ewr"]
    for number in range(20):
        cluster.produce("pinned", b"%d" % number)
    cluster.flush()
    options = {"kafka.bootstrap.servers": cluster.bootstrap, "subscribe": "pinned"}
    pinned = asyncio.run(pin_ranges(parse_source(options)))
    reader = MillraceReader(parse_source(options))
    planned = pickle.dumps([(reader, task) for task in reader.partitions()])  # as a plan travels to workers
    for number in range(20, 30):
        cluster.produce("pinned", b"%d" % number)
    cluster.flush()
    assert [(each.partition, each.first_offset, each.end_offset) for each in pinned if each.size] == [
        (0, 0, 20)
    ]
    rows = [
        row
        for reader, task in pickle.loads(planned)
        for batch in reader.read(task)
        for row in batch.to_pylist()
    ]
    assert sorted(row["offset"] for row in rows) == list(range(20)), "what came after the plan is not read"
    assert {row["value"] for row in rows} == {b"%d" % number for number in range(20)}
    later = spark.read.format("millrace").options(**options).load()
    assert later.count() == 30  # each action plans anew


APACHE_KAFKA = pytest.param("apache-kafka", marks=[pytest.mark.kafka, pytest.mark.long])


@pytest.mark.parametrize("server", ["millrace", APACHE_KAFKA])
def test_what_retention_took_since_the_plan_is_told_as_that_and_the_rest_is_read(server, request):
    if server == "millrace":
        bootstrap = request.getfixturevalue("broker_factory")().bootstrap
    else:
        bootstrap = request.getfixturevalue("kafka_peer").bootstrap
    topic, admin = f"expiring-{time.monotonic_ns()}", AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(patience(60))
    producer = Producer({"bootstrap.servers": bootstrap})
    for number in range(10):  # each in a batch of its own
        producer.produce(topic, b"%d" % number)
        assert producer.flush(patience(60)) == 0
    planned = OffsetRange("cluster", "cluster", topic, topic, 0, 0, 10)
    (deleted,) = admin.delete_records([Place(topic, 0, 6)]).values()
    assert deleted.result(patience(60)).low_watermark == 6
    unread: list[tuple[int, int, str]] = []
    with RangeReader({"cluster": [bootstrap]}, 1 << 20) as reader:
        found = [
            int(row[B_LAST_OFFSET])
            for batches in reader.read(planned, pytest.fail, lambda *what: unread.append(what))
            for row in batches.index
        ]
    assert (found, unread) == ([6, 7, 8, 9], [(0, 6, "expired")])


def test_a_topic_that_is_not_there_is_one_line(world):
    options = {
        "kafka.bootstrap.servers": world.clusters["ewr"].bootstrap,
        "subscribe": "no-such-topic",
    }
    with pytest.raises(
        ConfigError, match="option subscribe: got 'no-such-topic', expected a topic that cluster"
    ):
        asyncio.run(pin_ranges(parse_source(options)))


class Compacted:
    """A reader whose log was compacted to nothing, or whose range is gone."""

    def __init__(self, cause: str) -> None:
        self._cause = cause

    def read(self, range_: OffsetRange, distrust: Any, unread: Any) -> list[Any]:
        unread(range_.first_offset, range_.end_offset, self._cause)
        return []


def test_compaction_is_shown_as_it_is_and_lost_offsets_are_refused(tmp_path: Path):
    options = parse_source({"kafka.bootstrap.servers": "a:1", "subscribe": "x"}).read
    ranges = [OffsetRange("c", "c", "x", "x", 0, 0, 10)]
    assert list(_read_records(Compacted("compacted"), ranges, options)) == []  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="offsets 0 to 9 cannot be read any more: expired"):
        list(_read_records(Compacted("expired"), ranges, options))  # type: ignore[arg-type]
    careless = replace(options, fail_on_loss=False)
    assert list(_read_records(Compacted("expired"), ranges, careless)) == []  # type: ignore[arg-type]


TRIES = 3
NO_WORKER = "Python worker failed to connect back"
"""Spark gives the process that it starts for a stream's reader ten seconds and no more."""


@pytest.mark.long
def test_a_streaming_query_is_refused_in_one_sentence_before_it_reads(spark, tmp_path):
    """Spark asks for the stream's reader when the query starts."""
    table = spark.readStream.format("millrace").option("kafka.bootstrap.servers", "127.0.0.1:1")
    table = table.option("subscribe", "flights").load()
    for number in range(TRIES):
        place = str(tmp_path / f"checkpoint-{number}")
        writer = table.writeStream.format("noop").option("checkpointLocation", place)
        with pytest.raises(Exception) as refused:
            writer.start().processAllAvailable()
        if NO_WORKER not in str(refused.value):
            break
    assert "got 'readStream', expected read: this source reads in batches" in str(refused.value)
