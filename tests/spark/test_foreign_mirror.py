"""Streams that MirrorMaker 2 moves, audited as they are: two sources, its default renaming, one aggregate."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from millrace.audit import job
from millrace.audit.config import AuditConfig, parse_config
from millrace.audit.producer import AuditedProducer
from tests.peers.kafka import KafkaPeer
from tests.peers.mirror_maker import MirrorMaker
from tests.servers import BrokerProcess
from tests.waiting import Deadline, patience, until
from tests.watermarks import end_offset

pytestmark = [pytest.mark.java, pytest.mark.kafka]
START_MS = 1_356_998_400_000
COUNT = 600  # records a source, in twelve windows of a second
TIMEOUT_S = 240
PARTITIONS = 2


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory, zookeeper: Any) -> Iterator[dict[str, str]]:
    """ewr and the aggregate are Apache Kafka, jfk is Millrace; each test has a topic of its own."""
    folder = tmp_path_factory.mktemp("foreign")
    keep = {"log.retention.ms": "-1"}  # the records are of 2013
    jfk = BrokerProcess(zookeeper.chroot(), folder / "jfk", settings=keep)
    try:
        jfk.start()
        with (
            KafkaPeer(folder / "ewr", settings=keep) as ewr,
            KafkaPeer(folder / "agg", settings=keep) as aggregate,
        ):
            found = {"ewr": ewr.bootstrap, "jfk": jfk.bootstrap, "agg": aggregate.bootstrap}
            for name in ("ewr", "jfk"):
                create(found[name], NewTopic("millrace.audit", 1, 1))
            yield found
    finally:
        jfk.kill()


@pytest.fixture
def topic(clusters: dict[str, str]) -> str:
    name = f"flights-{time.monotonic_ns()}"
    for cluster in ("ewr", "jfk"):
        create(clusters[cluster], NewTopic(name, PARTITIONS, 1))
    return name


def create(bootstrap: str, topic: NewTopic) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    (made,) = admin.create_topics([topic]).values()
    made.result(patience(TIMEOUT_S))


def publish(bootstrap: str, topic: str, producer: str, count: int = COUNT, start_ms: int = START_MS) -> None:
    """`count` records alternating between the partitions, 50 a window, all acknowledged and reported."""
    sender = AuditedProducer(
        {
            "bootstrap.servers": bootstrap,
            "linger.ms": 5,
            "millrace.producer": producer,
            "millrace.datacenter": producer.partition("@")[2],
            "millrace.window.ms": 1000,
        }
    )
    for number in range(count):
        sender.produce(
            topic,
            f"flight {number}".encode(),
            partition=number % PARTITIONS,
            timestamp=start_ms + 20 * number,
        )
        sender.poll(0)
    assert sender.flush(patience(TIMEOUT_S)) == 0
    sender.close()


def ends(bootstrap: str, topic: str) -> list[int]:
    """The end offset of each partition; 0 while there is no such topic."""
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "looks", "allow.auto.create.topics": "false"}
    )
    try:
        if topic not in consumer.list_topics(timeout=60).topics:
            return [0] * PARTITIONS
        count = len(consumer.list_topics(topic, timeout=60).topics[topic].partitions)
        return [end_offset(consumer, topic, number, 60) for number in range(count)]
    finally:
        consumer.close()


def end(bootstrap: str, topic: str) -> int:
    """The end offset of partition 0."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "looks"})
    try:
        return end_offset(consumer, topic, 0, 60)
    finally:
        consumer.close()


def ends_are_told(bootstrap: str, topic: str) -> bool:
    return topic in AdminClient({"bootstrap.servers": bootstrap}).list_topics(timeout=60).topics


def delete_before(bootstrap: str, topic: str, partition: int, offset: int) -> None:
    """Retention, told to hurry: the records below `offset` are gone."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for each in admin.delete_records([TopicPartition(topic, partition, offset)]).values():
        assert each.result(patience(TIMEOUT_S)).low_watermark == offset


def wait_for(mirror: MirrorMaker, aggregate: str, expected: dict[str, int]) -> None:
    def are_carried() -> bool:
        found.update({topic: sum(ends(aggregate, topic)) for topic in expected})
        assert mirror.process.poll() is None, (found, mirror.tail())
        return found == expected

    found: dict[str, int] = {}
    until(
        are_carried, lambda: f"{expected}; there is {found}; {mirror.tail()}", within_s=TIMEOUT_S, every_s=0.2
    )


def config_of(clusters: dict[str, str], topic: str, folder: Path, **more: Any) -> AuditConfig:
    return parse_config(
        {
            "clusters": {
                "ewr": {"bootstrap": [clusters["ewr"]], "tier": "source"},
                "jfk": {"bootstrap": [clusters["jfk"]], "tier": "source"},
                "agg": {
                    "bootstrap": [clusters["agg"]],
                    "tier": "aggregate",
                    "mirror": "foreign",
                    "topics": {topic: [f"ewr.{topic}", f"jfk.{topic}"]},
                },
            },
            "topics": [topic],
            "window": "1s",
            "grace": "0s",
            "keep": "forever",
            "state": str(folder / "state"),
            "report": str(folder / "report"),
            **more,
        }
    )


def lost(summary: dict[str, Any]) -> list[tuple[str, int]]:
    assert {tuple(each["lost_between"]) for each in summary["losses"]} <= {("ewr", "agg")}
    return sorted(
        (each["producer"], number)
        for each in summary["losses"]
        for first, last in each["sequences"]
        for number in range(first, last + 1)
    )


@pytest.mark.long
def test_lag_is_in_flight_and_what_the_source_deleted_too_early_is_named(spark, clusters, topic, tmp_path):
    publish(clusters["ewr"], topic, "UA@ewr")
    publish(clusters["jfk"], topic, "B6@jfk")
    config = config_of(clusters, topic, tmp_path)
    before = job.run(config, "local[2]")
    assert before.summary is not None, before.problem
    assert (before.exit_status, before.summary["losses"], before.summary["duplicates"]) == (2, [], [])
    assert before.summary["counts"]["in_flight"] == 2 * COUNT

    delete_before(clusters["ewr"], topic, 0, 60)  # the audit has counted them, no mirror has carried them
    sources = {name: clusters[name] for name in ("ewr", "jfk")}
    mirror = MirrorMaker(tmp_path / "mm2", sources, clusters["agg"], topic)
    try:
        wait_for(mirror, clusters["agg"], {f"ewr.{topic}": COUNT - 60, f"jfk.{topic}": COUNT})
        after = job.run(config, "local[2]")
    finally:
        mirror.stop()
    assert after.summary is not None, after.problem
    # Sequences go from 1 and alternate between the partitions: partition 0 had the odd ones.
    truth = [("UA@ewr", 2 * number + 1) for number in range(60)]
    assert (after.exit_status, lost(after.summary)) == (1, truth)
    counts = after.summary["counts"]
    assert counts["seen"] == {"ewr": COUNT, "jfk": COUNT, "agg": 2 * COUNT - 60}
    assert (counts["in_flight"], counts["duplicates"], counts["unknown"]) == (0, 0, 0)
    verdicts = {row["producer"]: row["verdict"] for row in after.summary["producers"]}
    assert verdicts == {"UA@ewr": "LOSS", "B6@jfk": "PROVEN"}

    publish(clusters["ewr"], topic, "AA@ewr", 100, START_MS + 60_000)
    lagging = job.run(config, "local[2]")
    assert lagging.summary is not None, lagging.problem
    assert lost(lagging.summary) == truth and lagging.summary["counts"]["in_flight"] == 100


@pytest.mark.long
def test_events_that_only_the_mirror_still_has_name_what_a_lost_source_had_alone(
    spark, clusters, topic, tmp_path
):
    """The source loses its records and its events; the mirror had brought the events and most records."""
    publish(clusters["ewr"], topic, "UA@ewr")
    delete_before(clusters["ewr"], topic, 0, 60)  # before the mirror came to them
    both = f"{topic}, millrace.audit"
    mirror = MirrorMaker(tmp_path / "mm2", {"ewr": clusters["ewr"]}, clusters["agg"], both)
    try:
        events = end(clusters["ewr"], "millrace.audit")
        wait_for(mirror, clusters["agg"], {f"ewr.{topic}": COUNT - 60, "ewr.millrace.audit": events})
    finally:
        mirror.stop()
    delete_before(clusters["ewr"], "millrace.audit", 0, events)
    admin = AdminClient({"bootstrap.servers": clusters["ewr"]})
    (deleted,) = admin.delete_topics([topic]).values()
    deleted.result(patience(TIMEOUT_S))
    until(lambda: not ends_are_told(clusters["ewr"], topic), f"{topic} deleted", within_s=TIMEOUT_S)
    create(clusters["ewr"], NewTopic(topic, PARTITIONS, 1))

    result = job.run(config_of(clusters, topic, tmp_path), "local[2]")
    assert result.summary is not None, result.problem
    named = {
        (each["producer"], *each["lost_between"], number)
        for each in result.summary["losses"]
        for first, last in each["sequences"]
        for number in range(first, last + 1)
    }
    assert named == {("UA@ewr", "produced", "ewr", 2 * number + 1) for number in range(60)}
    assert result.summary["counts"]["unknown"] == result.summary["counts"]["unreported"] == 0


@pytest.mark.long
def test_a_mirror_that_began_at_the_end_lost_what_was_before_across_streams(spark, clusters, topic, tmp_path):
    publish(
        clusters["ewr"], topic, "UA@ewr", 200
    )  # all of this stream was sent before the mirror knew the topic
    latest = {"ewr.consumer.auto.offset.reset": "latest"}
    mirror = MirrorMaker(tmp_path / "mm2", {"ewr": clusters["ewr"]}, clusters["agg"], topic, latest)
    try:
        publish(clusters["jfk"], topic, "B6@jfk", 100)
        deadline = Deadline(lambda: f"records of {topic}; {mirror.tail()}", within_s=TIMEOUT_S)
        start_ms, sent = START_MS + 60_000, 0
        while not all(ends(clusters["agg"], f"ewr.{topic}")):
            # Nothing tells when its consumer has found the end: records go on coming until some arrive.
            assert mirror.process.poll() is None, mirror.tail()
            deadline.check()
            publish(clusters["ewr"], topic, f"probe-{sent}@ewr", 10, start_ms + 1000 * sent)
            sent += 1
        publish(clusters["ewr"], topic, "AA@ewr", 200, START_MS + 6_000_000)
        wait_until_still(mirror, clusters, topic)
        result = job.run(config_of(clusters, topic, tmp_path), "local[2]")
    finally:
        mirror.stop()
    assert result.summary is not None, result.problem
    assert result.exit_status == 1
    named = lost(result.summary)
    assert {("UA@ewr", number) for number in range(1, 201)} <= set(named)
    assert not [each for each in named if each[0] == "AA@ewr"]
    carried = sum(ends(clusters["agg"], f"ewr.{topic}"))
    assert len(named) == sum(ends(clusters["ewr"], topic)) - carried
    # No mirror carries jfk: that is lag as long as nothing of it has arrived.
    assert result.summary["counts"]["in_flight"] == 100


def wait_until_still(mirror: MirrorMaker, clusters: dict[str, str], topic: str) -> None:
    """Until the last record of each partition of ewr has arrived: then nothing is under way."""
    wanted = [last_value(clusters["ewr"], topic, number) for number in range(PARTITIONS)]

    def is_still() -> bool:
        assert mirror.process.poll() is None, mirror.tail()
        return [last_value(clusters["agg"], f"ewr.{topic}", n) for n in range(PARTITIONS)] == wanted

    until(is_still, lambda: f"the ends {wanted}; {mirror.tail()}", within_s=TIMEOUT_S, every_s=0.2)


def last_value(bootstrap: str, topic: str, partition: int) -> bytes | None:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "looks"})
    try:
        end = end_offset(consumer, topic, partition, 60)
        if end <= 0:
            return None
        consumer.assign([TopicPartition(topic, partition, end - 1)])
        message = consumer.poll(60)
        return None if message is None or message.error() else message.value()
    finally:
        consumer.close()
