"""The audited producer against librdkafka's own in-memory cluster: an independent Kafka, without Java."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition

from millrace.audit.events import CLOSED, EventLedger, StreamFacts
from millrace.audit.header import HEADER_KEY, RecordIdentity, decode_identity
from millrace.audit.journal import Journal, JournalInUse
from millrace.audit.producer import AuditedProducer
from millrace.audit.recovery import recover
from millrace.broker.errors import ConfigError

DEADLINE_S = 20.0


@pytest.fixture
def mock_cluster() -> Iterator[str]:
    """A broker inside this process; lives as long as the client that hosts it."""
    host = Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "unused", "log_level": 0})
    # This cluster creates topics when it is asked for them, but knows no request for it.
    (broker,) = host.list_topics("millrace.audit", timeout=DEADLINE_S).brokers.values()
    yield f"{broker.host}:{broker.port}"
    host.close()


def settings(cluster: str, **own: object) -> dict[str, object]:
    return {
        "bootstrap.servers": cluster,
        "linger.ms": 1,
        "log_level": 0,
        "millrace.producer": "AA@ewr",
        "millrace.datacenter": "ewr",
        "millrace.window.ms": 1000,
        **{key.replace("_", "."): value for key, value in own.items()},
    }


def read_all(cluster: str, topic: str) -> list:
    """Every message of a topic up to its present end."""
    consumer = Consumer({"bootstrap.servers": cluster, "group.id": "reader", "auto.offset.reset": "earliest"})
    partitions = consumer.list_topics(topic, timeout=DEADLINE_S).topics[topic].partitions
    starts = [TopicPartition(topic, partition, 0) for partition in partitions]
    ends = sum(consumer.get_watermark_offsets(start, timeout=DEADLINE_S)[1] for start in starts)
    consumer.assign(starts)
    messages, deadline = [], time.monotonic() + DEADLINE_S
    while len(messages) < ends and time.monotonic() < deadline:
        messages += [message for message in consumer.consume(500, 0.2) if message.error() is None]
    consumer.close()
    assert len(messages) == ends
    return messages


def identities(messages) -> list[RecordIdentity]:
    return [decode_identity(dict(message.headers())[HEADER_KEY]) for message in messages]


def told(cluster: str) -> EventLedger:
    ledger = EventLedger()
    for message in read_all(cluster, "millrace.audit"):
        assert message.headers() is None
        ledger.add(message.key(), message.value())
    assert ledger.untrusted == []
    return ledger


def facts_of(ledger: EventLedger, topic: str) -> StreamFacts:
    (facts,) = [facts for facts in ledger.streams.values() if facts.topic == topic]
    return facts


def fate(facts: StreamFacts, name: str) -> set[int]:
    return {sequence for report in facts.windows.values() for sequence in getattr(report, name)}


def test_records_carry_their_identity_and_the_reports_say_exactly_what_was_acknowledged(mock_cluster):
    producer = AuditedProducer(settings(mock_cluster))
    delivered = []
    for number in range(300):
        producer.produce(
            "flights",
            b"x" * number,
            key=f"k{number}",
            timestamp=1_357_000_000_000 + number * 10,
            headers={"own": b"1"} if number % 2 else [("own", b"1")],
            on_delivery=lambda error, message: delivered.append((error, message.offset())),
        )
    assert producer.close()
    messages = read_all(mock_cluster, "flights")
    stamps = sorted(identities(messages), key=lambda identity: identity.sequence)
    assert [stamp.sequence for stamp in stamps] == list(range(1, 301))
    assert [stamp.created_ms for stamp in stamps] == [1_357_000_000_000 + n * 10 for n in range(300)]
    assert {stamp.producer for stamp in stamps} == {"AA@ewr"}
    assert all(dict(message.headers())["own"] == b"1" for message in messages)
    assert all(
        message.timestamp()[1] == stamp.created_ms
        for message, stamp in zip(sorted(messages, key=lambda m: m.timestamp()[1]), stamps, strict=True)
    )
    assert len(delivered) == 300 and {error for error, _ in delivered} == {None}
    facts = facts_of(told(mock_cluster), "flights")
    assert facts.stream == stamps[0].stream
    assert (facts.state, facts.last_assigned, facts.last_settled) == (CLOSED, 300, 300)
    assert fate(facts, "acknowledged") == set(range(1, 301))
    windows = {start: len(report.acknowledged) for start, report in facts.windows.items()}
    assert windows == {1_357_000_000_000 + second * 1000: 100 for second in range(3)}
    assert sum(report.byte_count for report in facts.windows.values()) == sum(range(300))


def test_each_topic_is_a_stream_of_its_own(mock_cluster):
    producer = AuditedProducer(settings(mock_cluster))
    for number in range(10):
        producer.produce("a" if number % 2 else "b", b"")
    producer.close()
    ledger = told(mock_cluster)
    a, b = facts_of(ledger, "a"), facts_of(ledger, "b")
    assert a.stream != b.stream and a.session == b.session
    assert fate(a, "acknowledged") == fate(b, "acknowledged") == {1, 2, 3, 4, 5}


def test_compact_identity_leaves_the_name_to_the_events(mock_cluster):
    producer = AuditedProducer(settings(mock_cluster, millrace_identity="compact"))
    producer.produce("flights", "text", "key")
    producer.close()
    (identity,) = identities(read_all(mock_cluster, "flights"))
    assert identity.producer == ""
    assert facts_of(told(mock_cluster), "flights").producer == "AA@ewr"


def test_without_a_timestamp_the_creation_time_is_now_and_a_promise_is_made(mock_cluster):
    before_ms = int(time.time() * 1000)
    producer = AuditedProducer(settings(mock_cluster))
    producer.produce("flights", b"")
    producer.flush()
    producer.report()
    producer.close()
    (identity,) = identities(read_all(mock_cluster, "flights"))
    assert before_ms <= identity.created_ms <= int(time.time() * 1000)
    assert facts_of(told(mock_cluster), "flights").no_earlier_than_ms is not None


def test_only_what_was_purged_before_sending_counts_as_failed():
    producer = AuditedProducer(settings("127.0.0.1:1"))
    errors = []
    for _ in range(5):
        producer.produce("flights", b"", on_delivery=lambda error, message: errors.append(error.code()))
    stream = producer._streams["flights"]
    producer.purge()
    producer.poll(1)
    assert errors == [KafkaError._PURGE_QUEUE] * 5
    (window,) = stream.windows.values()
    assert set(window.failed) == {1, 2, 3, 4, 5}
    producer.close(0.1)


def test_a_timeout_leaves_the_record_ambiguous():
    producer = AuditedProducer(settings("127.0.0.1:1", message_timeout_ms=50))
    producer.produce("flights", b"")
    stream = producer._streams["flights"]
    producer.flush(DEADLINE_S)
    (window,) = stream.windows.values()
    assert (set(window.ambiguous), set(window.failed)) == ({1}, set())
    producer.close(0.1)


def test_a_full_queue_raises_as_ever_and_burns_no_number(mock_cluster):
    producer = AuditedProducer(settings(mock_cluster, queue_buffering_max_messages=5, linger_ms=1000))
    refused = 0
    for _ in range(30):
        try:
            producer.produce("flights", b"")
        except BufferError:
            refused += 1
    assert refused > 0
    producer.flush()
    for _ in range(3):
        producer.produce("flights", b"")
    producer.close()
    facts = facts_of(told(mock_cluster), "flights")
    acknowledged, failed = fate(facts, "acknowledged"), fate(facts, "failed")
    assert len(acknowledged) == 30 - refused + 3
    assert acknowledged == {i.sequence for i in identities(read_all(mock_cluster, "flights"))}
    # A number that is still given back when a report is made ends as failed: one a report at most.
    assert acknowledged | failed == set(range(1, facts.last_assigned + 1))
    assert len(failed) <= max(report.report for report in facts.windows.values())


def test_a_wrong_call_raises_and_burns_no_number(mock_cluster):
    producer = AuditedProducer(settings(mock_cluster))
    with pytest.raises(TypeError):
        producer.produce("flights", object())
    with pytest.raises(ValueError, match="creation time"):
        producer.produce("flights", b"", timestamp=-5)
    with pytest.raises(ValueError, match="own events"):
        producer.produce("millrace.audit", b"")
    producer.produce("flights", b"")
    producer.close()
    assert fate(facts_of(told(mock_cluster), "flights"), "acknowledged") == {1}


def test_threads_share_one_producer_without_sharing_a_number(mock_cluster):
    producer = AuditedProducer(settings(mock_cluster, millrace_report_interval_ms=5))
    stop = threading.Event()

    def serve():
        while not stop.is_set():
            producer.poll(0.01)

    def send():
        for _ in range(500):
            producer.produce("flights", b"")

    poller = threading.Thread(target=serve)
    senders = [threading.Thread(target=send) for _ in range(3)]
    for thread in (poller, *senders):
        thread.start()
    for thread in senders:
        thread.join()
    stop.set()
    poller.join()
    assert producer.close()
    assert sorted(i.sequence for i in identities(read_all(mock_cluster, "flights"))) == list(range(1, 1501))
    facts = facts_of(told(mock_cluster), "flights")
    assert fate(facts, "acknowledged") == set(range(1, 1501))


def test_a_batch_is_stamped_record_by_record(mock_cluster):
    producer = AuditedProducer(settings(mock_cluster))
    assert producer.produce_batch("flights", [{"value": b"1"}, {"value": b"2", "key": b"k"}]) == 2
    producer.close()
    assert sorted(i.sequence for i in identities(read_all(mock_cluster, "flights"))) == [1, 2]


def test_a_stream_of_many_windows_is_followed_by_a_new_one(mock_cluster, monkeypatch):
    monkeypatch.setattr("millrace.audit.producer.MAX_WINDOWS_A_STREAM", 3)
    producer = AuditedProducer(settings(mock_cluster, millrace_report_interval_ms=60_000))
    for second in range(10):
        producer.produce("flights", b"", timestamp=1_357_000_000_000 + second * 1000)
        if second == 5:
            producer.flush()
            producer.report()
    producer.close()
    streams = sorted(told(mock_cluster).streams.values(), key=lambda facts: facts.last_assigned)
    assert [facts.last_assigned for facts in streams] == [4, 6]
    assert {facts.state for facts in streams} == {CLOSED}
    assert [len(fate(facts, "acknowledged")) for facts in streams] == [4, 6]
    named = {(i.stream, i.sequence) for i in identities(read_all(mock_cluster, "flights"))}
    assert named == {(f.stream, s) for f in streams for s in fate(f, "acknowledged")}


def test_a_closed_producer_refuses_and_closing_again_is_harmless(mock_cluster):
    with AuditedProducer(settings(mock_cluster)) as producer:
        producer.produce("flights", b"")
    assert producer.close()
    with pytest.raises(RuntimeError, match="closed"):
        producer.produce("flights", b"")
    assert facts_of(told(mock_cluster), "flights").state == CLOSED


def test_a_forked_child_refuses_to_use_its_parents_streams(mock_cluster):
    producer = AuditedProducer(settings(mock_cluster))
    producer.produce("flights", b"")
    producer.flush()
    child = os.fork()
    if child == 0:
        try:
            producer.produce("flights", b"")
        except RuntimeError as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    producer.produce("flights", b"")
    producer.close()
    assert fate(facts_of(told(mock_cluster), "flights"), "acknowledged") == {1, 2}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("millrace.window.ms", 0),
        ("millrace.window.ms", "soon"),
        ("millrace.identity", "none"),
        ("millrace.producer", "a\nb"),
        ("millrace.producer", "a" * 10_240),
        ("millrace.windows", 1),
        ("transactional.id", "t"),
        ("delivery.report.only.error", True),
    ],
)
def test_a_wrong_setting_is_refused_by_its_name(key, value):
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        AuditedProducer({"bootstrap.servers": "127.0.0.1:1", key: value})


CHILD = """
import sys
from millrace.audit.producer import AuditedProducer
producer = AuditedProducer({"bootstrap.servers": sys.argv[1], "linger.ms": 1, "millrace.journal": sys.argv[2],
    "millrace.producer": "AA@ewr", "millrace.report.interval.ms": int(sys.argv[3])})
served = 0
def delivered(error, message):
    global served
    served += error is None
while True:
    for _ in range(50):
        producer.produce("flights", b"x" * 20, on_delivery=delivered)
    producer.poll(0.001)
    print(served, flush=True)
"""


@pytest.mark.parametrize("report_interval_ms", [20, 60_000])
def test_a_killed_producer_reports_by_its_journal_what_it_knew(mock_cluster, tmp_path, report_interval_ms):
    journal = tmp_path / "journal"
    command = [sys.executable, "-c", CHILD, mock_cluster, str(journal), str(report_interval_ms)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    known, deadline = 0, time.monotonic() + DEADLINE_S
    while known < 2000 and time.monotonic() < deadline:
        known = int(child.stdout.readline())
    child.send_signal(signal.SIGKILL)
    rest = child.communicate()[0].split("\n")
    known = max([known, *(int(line) for line in rest[:-1] if line)])
    successor = AuditedProducer(settings(mock_cluster, millrace_journal=journal))
    with pytest.raises(JournalInUse):
        AuditedProducer(settings(mock_cluster, millrace_journal=journal))
    assert successor.close()
    facts = facts_of(told(mock_cluster), "flights")
    written = {identity.sequence for identity in identities(read_all(mock_cluster, "flights"))}
    acknowledged = fate(facts, "acknowledged")
    assert facts.state == CLOSED and facts.conflicts == []
    assert known <= len(acknowledged) and acknowledged <= written
    assert written <= acknowledged | fate(facts, "ambiguous")
    left = Journal(journal)
    assert recover(left.recovered, 0) == {}
    left.close()
