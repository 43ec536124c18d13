"""Content digests through Spark: the option, the tasks, the column."""

from __future__ import annotations

import json

import pytest
from confluent_kafka import Producer

from millrace.audit.contract.content_digest import digest_sum, record_digest
from millrace.audit.contract.header import encode_identity, encode_prefix
from millrace.audit.spark.read_options import parse_options
from millrace.audit.spark.spark_source import read_pinned
from millrace.audit.spark.task_plan import OffsetRange, ranges_option
from millrace.broker.errors import ConfigError
from tests.waiting import patience

COUNT = 300


def test_cells_carry_the_digests_that_were_asked_for(spark):
    producer = Producer(
        {"bootstrap.servers": "mock", "test.mock.num.brokers": 1, "compression.type": "lz4", "log_level": 2}
    )
    (server,) = producer.list_topics(timeout=60).brokers.values()
    expected = []
    for sequence in range(1, COUNT + 1):
        identity = encode_identity(encode_prefix("0" * 15 + "7"), sequence, 1_356_998_400_000, b"feed")
        headers = [("trace", b"t"), ("_mr", identity)]
        key, value = f"{sequence}".encode(), b"v" * sequence
        producer.produce("digests", value, key, partition=0, headers=headers)
        expected.append(record_digest(sequence, key, value, headers))
    assert producer.flush(patience(30)) == 0
    range_ = OffsetRange("c", "c", "digests", "digests", 0, 0, COUNT)
    options = {
        "bootstraps": json.dumps({"c": [f"{server.host}:{server.port}"]}),
        "ranges": ranges_option([range_]),
        "tasks": "2",
    }

    def digests(**more: str) -> list[int | None]:
        rows = read_pinned(spark, options | more).filter("note is null").select("digest").collect()
        assert rows
        return [row[0] for row in rows]

    assert set(digests()) == set(digests(digest="false")) == {None}
    assert digest_sum(int(each or 0) for each in digests(digest="true")) == digest_sum(expected)


def test_a_digest_that_is_neither_true_nor_false_is_refused():
    with pytest.raises(ConfigError, match="true or false"):
        parse_options({"bootstraps": "{}", "ranges": "[]", "digest": "yes"})
