"""The audited producer on real brokers, Millrace's and Apache Kafka's, and a whole audit of what it sent."""

from __future__ import annotations

import time

import pytest
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, ResourceType

from millrace.audit.contract.events import EventLedger
from millrace.audit.contract.header import HEADER_KEY, decode_identity
from millrace.audit.producer import AuditedProducer
from millrace.audit.reconciliation.verdicts import PRODUCED, Verdict, WindowVerdict
from tests.cluster.audited_topics import DEADLINE_S, WINDOW_MS, audit, fate, ledger_of, read_all, unique
from tests.verdicts import overall_verdict
from tests.waiting import patience, until

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")


@pytest.fixture(params=["millrace", pytest.param("apache-kafka", marks=pytest.mark.kafka)])
def bootstrap(request) -> str:
    if request.param == "millrace":
        return request.getfixturevalue("broker").bootstrap
    return request.getfixturevalue("kafka_peer").bootstrap


def verdicts(ledger: EventLedger, messages: list, topic: str) -> list[WindowVerdict]:
    streams = [facts for facts in ledger.streams.values() if facts.topic == topic]
    return [row for facts in streams for row in audit(facts, messages)]


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
    ledger = ledger_of(bootstrap, "millrace.audit")
    messages = read_all(bootstrap, topic)
    assert len(messages) == 400 * len(CODECS)
    rows = verdicts(ledger, messages, topic)
    assert {row.producer for row in rows} == set(CODECS)
    assert overall_verdict(rows) is Verdict.PROVEN
    assert sum(row.published for row in rows) == sum(row.consumed["source"] for row in rows) == len(messages)
    removed = decode_identity(dict(messages[123].headers())[HEADER_KEY])
    rows = verdicts(ledger, messages[:123] + messages[124:], topic)
    (loss,) = [row for row in rows if row.verdict is Verdict.LOSS]
    assert (loss.producer, loss.stream) == (removed.producer, removed.stream)
    assert loss.missing == {(PRODUCED, "source"): ((removed.sequence, removed.sequence),)}
    check_events_topic(bootstrap)


def test_a_report_that_no_cluster_takes_is_given_up_and_all_others_are_told(bootstrap):
    """Numbers that go to two windows by turns make a set of holes of each."""
    scattered, small, events = (unique(name) for name in ("scattered", "small", "events"))
    admin = AdminClient({"bootstrap.servers": bootstrap})
    limit = {"max.message.bytes": "1500", "cleanup.policy": "compact,delete"}
    made = admin.create_topics([NewTopic(events, 1, 1, config=limit)])
    made[events].result(patience(DEADLINE_S))
    producer = AuditedProducer(
        {
            "bootstrap.servers": bootstrap,
            "millrace.audit.topic": events,
            "millrace.window.ms": WINDOW_MS,
            "millrace.report.interval.ms": 3_600_000,
        }
    )
    start_ms = 1_357_000_000_000 - 1_357_000_000_000 % WINDOW_MS
    for number in range(2_000):
        producer.produce(scattered, b"", timestamp=start_ms + number % 2 * WINDOW_MS)
        producer.poll(0)
    producer.produce(small, b"", timestamp=start_ms)

    def is_given_up() -> bool:
        producer.flush()
        producer.report()
        return len(producer._streams[scattered].untold) == 2 and producer._streams[small].is_told

    until(is_given_up, "two windows that cannot be told")
    assert not producer.close(), "not all was told"
    told = {facts.topic: facts for facts in ledger_of(bootstrap, events).streams.values()}
    assert told[scattered].untold == (start_ms, start_ms + WINDOW_MS)
    assert told[scattered].last_settled == 2_000
    # What was told while the stream was young was small enough.
    assert all(report.count < 1_000 for report in told[scattered].windows.values())
    assert (told[small].untold, fate(told[small], "acknowledged")) == ((), {1})


def check_events_topic(bootstrap: str) -> None:
    """Compacted and deleted in the end, one partition."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    assert (
        len(
            admin.list_topics("millrace.audit", timeout=patience(DEADLINE_S))
            .topics["millrace.audit"]
            .partitions
        )
        == 1
    )
    resource = ConfigResource(ResourceType.TOPIC, "millrace.audit")
    settings = admin.describe_configs([resource])[resource].result(patience(DEADLINE_S))
    assert set(settings["cleanup.policy"].value.split(",")) == {"compact", "delete"}
