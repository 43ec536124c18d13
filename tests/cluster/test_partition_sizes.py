"""Bytes an offset, asked of a real broker, and of one that does not tell."""

from __future__ import annotations

import asyncio

import pytest
from confluent_kafka import Producer

from millrace.audit.spark import partition_sizes
from millrace.audit.spark.kafka_options import parse_source
from millrace.audit.spark.partition_sizes import bytes_per_offset, density
from millrace.audit.spark.pinning import pin_ranges
from millrace.audit.spark.task_plan import plan_tasks
from millrace.broker.client.admin import create_topic
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.raw_produce import produce
from tests.benchmarks.audit.load import BatchMaker, Shape
from tests.waiting import patience

SIZES = {0: 200, 1: 1600}
BATCHES = 20


async def fill(bootstrap: str, topic: str) -> dict[int, tuple[int, float]]:
    """Small records in partition 0, large ones in 1, none in 2: (records, bytes a record) of each."""
    written = {}
    async with Cluster("c", [bootstrap]) as cluster:
        await create_topic(cluster, topic, 3, 1)
        leader = (await cluster.metadata([topic], max_age_ms=0)).leader(topic, 0)
        assert leader is not None
        for partition, record_bytes in SIZES.items():
            shape = Shape("none", record_bytes)
            batches = list(BatchMaker(shape, partition).batches(BATCHES * shape.batch_records))
            for batch in batches:
                answer = await produce(cluster, leader, {(topic, partition): batch})
                assert not answer[topic, partition].error_code
            written[partition] = (BATCHES * shape.batch_records, len(batches[0]) / shape.batch_records)
    return written


async def ask(bootstrap: str, topic: str, bounds: dict[int, tuple[int, int]]) -> dict[int, float]:
    async with Cluster("c", [bootstrap]) as cluster:
        found = await bytes_per_offset(cluster, {(topic, number): each for number, each in bounds.items()})
    return {number: each for (_, number), each in found.items()}


def test_bytes_an_offset_are_known_either_way_and_make_tasks_even(broker, monkeypatch):
    written = asyncio.run(fill(broker.bootstrap, "sizes"))
    expected = {number: pytest.approx(each, rel=0.01) for number, (_, each) in written.items()}
    bounds = {0: (0, written[0][0]), 1: (0, written[1][0]), 2: (0, 0)}
    assert asyncio.run(ask(broker.bootstrap, "sizes", bounds)) == expected

    source = parse_source({"kafka.bootstrap.servers": broker.bootstrap, "subscribe": "sizes"})
    tasks = plan_tasks(asyncio.run(pin_ranges(source)), 4)
    loads = [sum(each.size * written[each.partition][1] for each in task) for task in tasks]
    assert len(loads) == 4 and max(loads) < 1.6 * min(loads), loads
    assert sum(each.size for task in tasks for each in task) == sum(count for count, _ in written.values())

    async def refused(*_: object) -> dict[tuple[str, int], float]:
        raise partition_sizes.MillraceError("no right to describe the cluster")

    monkeypatch.setattr(partition_sizes, "_log_sizes_at", refused)
    assert asyncio.run(ask(broker.bootstrap, "sizes", bounds)) == expected, "probed"


def test_a_server_that_cannot_tell_is_probed_and_one_that_is_gone_is_left_out():
    producer = Producer({"bootstrap.servers": "mock", "test.mock.num.brokers": 1, "log_level": 2})
    (server,) = producer.list_topics(timeout=patience(60)).brokers.values()
    for _ in range(50):
        producer.produce("sizes", b"x" * 100, partition=0)
    assert producer.flush(patience(60)) == 0
    found = asyncio.run(ask(f"{server.host}:{server.port}", "sizes", {0: (0, 50), 1: (0, 10)}))
    assert 100 < found[0] < 200 and set(found) == {0}, "librdkafka's mock has no DescribeLogDirs"


def test_density_of_answers_that_are_cut_or_strange():
    batch = BatchMaker(Shape("none", 200)).batch(0)
    usual = len(batch) / 500
    assert density(memoryview(batch + batch)) == usual
    assert density(memoryview(batch[:61])) == usual, "the header alone tells"
    assert density(memoryview(batch + batch[:40])) == usual
    for strange in (b"", batch[:60], b"\0" * 100, batch[:16] + b"\1" + batch[17:]):
        with pytest.raises(ValueError, match="no batches"):
            density(memoryview(strange))
