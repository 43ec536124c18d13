"""Transactional audited producers on Millrace and Apache Kafka: what readers of committed data see counts."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from millrace.audit.contract.content_digest import digest_sum, record_digest
from millrace.audit.contract.events import CLOSED, EventLedger, StreamFacts
from millrace.audit.contract.header import HEADER_KEY, decode_identity
from millrace.audit.producer import AuditedProducer
from tests.cluster.audited_topics import read_all, unique
from tests.waiting import Deadline, patience, until

DEADLINE_S = 120.0


@pytest.fixture(params=["millrace", pytest.param("apache-kafka", marks=pytest.mark.kafka)])
def bootstrap(request, shared_broker) -> str:
    if request.param == "millrace":
        return shared_broker
    return request.getfixturevalue("kafka_peer").bootstrap


@pytest.fixture(scope="module")
def shared_broker(zookeeper, tmp_path_factory):
    from tests.servers import BrokerProcess

    broker = BrokerProcess(zookeeper.chroot(), tmp_path_factory.mktemp("broker"))
    try:
        yield broker.start().bootstrap
    finally:
        broker.kill()


class Story:
    """A topic and an events topic of their own, and a transactional id."""

    def __init__(self, bootstrap: str):
        self.bootstrap = bootstrap
        self.topic, self.events, self.id = unique("flights"), unique("events"), unique("writer")

    def settings(self, **own: object) -> dict[str, object]:
        return {
            "bootstrap.servers": self.bootstrap,
            "transactional.id": self.id,
            "linger.ms": 1,
            "log_level": 0,
            "millrace.producer": "AA@ewr",
            "millrace.audit.topic": self.events,
            "millrace.window.ms": 60_000,
            **{key.replace("_", "."): value for key, value in own.items()},
        }

    def producer(self, **own: object) -> AuditedProducer:
        producer = AuditedProducer(self.settings(**own))
        producer.init_transactions(patience(DEADLINE_S))
        return producer

    def seen(self, isolation: str = "read_committed") -> set[int]:
        return {
            decode_identity(dict(m.headers())[HEADER_KEY]).sequence
            for m in read_all(self.bootstrap, self.topic, isolation)
        }

    def told(self) -> list[StreamFacts]:
        """What the events say now; nothing while their topic is not there yet."""
        topics = (
            AdminClient({"bootstrap.servers": self.bootstrap})
            .list_topics(timeout=patience(DEADLINE_S))
            .topics
        )
        return self.facts() if self.events in topics else []

    def facts(self) -> list[StreamFacts]:
        ledger = EventLedger()
        for message in read_all(self.bootstrap, self.events):
            ledger.add(message.key(), message.value())
        assert ledger.untrusted == []
        return [facts for facts in ledger.streams.values() if facts.topic == self.topic]

    def only_facts(self) -> StreamFacts:
        (facts,) = self.facts()
        return facts


def fate(facts: StreamFacts, name: str) -> set[int]:
    return {sequence for report in facts.windows.values() for sequence in getattr(report, name)}


def fates(facts: StreamFacts) -> tuple[set[int], set[int], set[int]]:
    return fate(facts, "acknowledged"), fate(facts, "ambiguous"), fate(facts, "failed")


def send(producer: AuditedProducer, topic: str, count: int) -> None:
    for number in range(count):
        producer.produce(topic, b"value %d" % number, b"k%d" % number)


def test_what_was_committed_is_acknowledged_and_what_was_aborted_has_failed(bootstrap):
    story = Story(bootstrap)
    producer = story.producer()
    producer.begin_transaction()
    send(producer, story.topic, 40)
    producer.commit_transaction(patience(DEADLINE_S))
    producer.begin_transaction()
    send(producer, story.topic, 30)
    producer.flush(patience(DEADLINE_S))
    producer.abort_transaction(patience(DEADLINE_S))
    producer.begin_transaction()
    send(producer, story.topic, 20)
    producer.commit_transaction(patience(DEADLINE_S))
    assert producer.close()
    facts = story.only_facts()
    committed = set(range(1, 41)) | set(range(71, 91))
    assert fates(facts) == (committed, set(), set(range(41, 71)))
    assert story.seen() == committed
    assert story.seen("read_uncommitted") == set(range(1, 91))
    assert (facts.state, facts.last_assigned, facts.last_settled) == (CLOSED, 90, 90)


def test_nothing_is_acknowledged_or_promised_before_the_commit(bootstrap):
    story = Story(bootstrap)
    producer = story.producer(millrace_window_ms=100)
    producer.begin_transaction()
    send(producer, story.topic, 10)
    producer.flush(patience(DEADLINE_S))
    stream = producer._streams[story.topic]
    first_ms = min(stream.windows)
    while time.time() * 1000 < first_ms + 2_000:
        producer.poll(0.1)
    producer.report()
    # Reports do not wait for the transaction.
    until(lambda: any(facts.last_assigned == 10 for facts in story.told()), within_s=DEADLINE_S)
    assert stream.pending_count == 10
    assert stream.promise_ms is not None and stream.promise_ms <= first_ms
    producer.commit_transaction(patience(DEADLINE_S))
    producer.report()
    assert stream.pending_count == 0 and stream.promise_ms > first_ms
    producer.close()
    assert fates(story.only_facts()) == (set(range(1, 11)), set(), set())


def test_offsets_of_what_was_read_go_with_the_transaction_of_what_was_made_of_it(bootstrap):
    """Read, change, write, with the calls of confluent-kafka."""
    story = Story(bootstrap)
    read_from, group = unique("orders"), unique("changer")
    producer = story.producer()
    producer.begin_transaction()
    for number in range(30):
        producer.produce(read_from, b"order %d" % number, partition=0)
    producer.commit_transaction(patience(DEADLINE_S))
    settings = {"bootstrap.servers": bootstrap, "group.id": group, "auto.offset.reset": "earliest"}
    consumer = Consumer(settings | {"enable.auto.commit": False, "isolation.level": "read_committed"})
    consumer.subscribe([read_from])

    def change(count: int) -> None:
        """So many of them, in a transaction that is still open."""
        producer.begin_transaction()
        deadline, changed = Deadline(f"{count} records are read", within_s=DEADLINE_S), 0
        while changed < count:
            deadline.check(changed)
            for message in consumer.consume(count - changed, 0.1):
                assert message.error() is None, message.error()
                producer.produce(story.topic, b"changed " + message.value())
                changed += 1
        positions = consumer.position(consumer.assignment())
        producer.send_offsets_to_transaction(
            positions, consumer.consumer_group_metadata(), patience(DEADLINE_S)
        )

    change(10)
    producer.commit_transaction(patience(DEADLINE_S))
    change(5)
    producer.flush(patience(DEADLINE_S))
    producer.abort_transaction(patience(DEADLINE_S))
    (committed,) = consumer.committed([TopicPartition(read_from, 0)], timeout=patience(DEADLINE_S))
    assert committed.offset == 10
    consumer.close()
    producer.close()
    assert fates(story.only_facts()) == (set(range(1, 11)), set(), set(range(11, 16)))
    assert story.seen() == set(range(1, 11))


def test_a_transaction_that_is_left_open_is_aborted_by_closing(bootstrap):
    story = Story(bootstrap)
    producer = story.producer()
    producer.begin_transaction()
    send(producer, story.topic, 5)
    producer.flush(patience(DEADLINE_S))
    producer.close(patience(DEADLINE_S))
    assert fates(story.only_facts()) == (set(), set(), set(range(1, 6)))
    assert story.seen() == set()


def test_a_record_outside_of_a_transaction_is_refused_and_burns_no_number(bootstrap):
    story = Story(bootstrap)
    producer = story.producer()
    with pytest.raises(KafkaException):
        producer.produce(story.topic, b"early")
    producer.begin_transaction()
    send(producer, story.topic, 3)
    producer.commit_transaction(patience(DEADLINE_S))
    producer.close()
    assert fates(story.only_facts()) == ({1, 2, 3}, set(), set())


@pytest.mark.filterwarnings("ignore:Producer abort_transaction failed during close")
def test_a_fenced_producers_open_transaction_is_in_doubt_and_its_counts_are_told(bootstrap):
    story = Story(bootstrap)
    old = story.producer()
    old.begin_transaction()
    send(old, story.topic, 7)
    old.commit_transaction(patience(DEADLINE_S))
    old.begin_transaction()
    send(old, story.topic, 4)
    old.flush(patience(DEADLINE_S))
    new = story.producer()
    with pytest.raises(KafkaException) as fenced:
        old.commit_transaction(patience(DEADLINE_S))
    assert fenced.value.args[0].fatal()
    old.close(patience(DEADLINE_S))
    new.begin_transaction()
    send(new, story.topic, 2)
    new.commit_transaction(patience(DEADLINE_S))
    new.close()
    first, second = sorted(story.facts(), key=lambda facts: -facts.last_assigned)
    assert fates(first) == (set(range(1, 8)), set(range(8, 12)), set())
    assert fates(second) == ({1, 2}, set(), set())
    assert len(read_all(story.bootstrap, story.topic)) == 9


def test_the_digest_of_a_report_covers_what_was_committed_and_nothing_else(bootstrap):
    story = Story(bootstrap)
    producer = story.producer(millrace_content_digest=True)
    for end in (producer.commit_transaction, producer.abort_transaction, producer.commit_transaction):
        producer.begin_transaction()
        for number in range(25):
            producer.produce(story.topic, f"wert {number} ✈", "schlüssel", headers={"h": "ö", "n": None})
        producer.flush(patience(DEADLINE_S))
        end(DEADLINE_S)
    producer.close()
    facts = story.only_facts()
    told = digest_sum(report.digest for report in facts.windows.values())
    assert told == digest_sum(
        record_digest(
            decode_identity(dict(message.headers())[HEADER_KEY]).sequence,
            message.key(),
            message.value(),
            message.headers(),
        )
        for message in read_all(story.bootstrap, story.topic)
    )
    assert len(fate(facts, "acknowledged")) == 50


CHILD = """
import sys, time
from millrace.audit.producer import AuditedProducer
bootstrap, topic, events, name, journal = sys.argv[1:]
producer = AuditedProducer({"bootstrap.servers": bootstrap, "linger.ms": 1, "transactional.id": name,
    "millrace.producer": "AA@ewr", "millrace.journal": journal, "millrace.audit.topic": events})
producer.init_transactions(60)
for transaction in range(3):
    producer.begin_transaction()
    for number in range(100):
        producer.produce(topic, b"value")
    producer.flush(60)
    if transaction < 2:
        producer.commit_transaction(60)
print("open", flush=True)
time.sleep(600)
"""


def test_killed_in_an_open_transaction_the_next_start_calls_it_in_doubt(bootstrap, tmp_path: Path):
    story = Story(bootstrap)
    command = [
        sys.executable,
        "-c",
        CHILD,
        bootstrap,
        story.topic,
        story.events,
        story.id,
        str(tmp_path / "j"),
    ]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "open\n"
    child.send_signal(signal.SIGKILL)
    child.communicate()
    successor = story.producer(millrace_journal=tmp_path / "j")
    assert successor.close()
    facts = story.only_facts()
    acknowledged, ambiguous, failed = fates(facts)
    assert acknowledged == set(range(1, 201)) == story.seen()
    assert set(range(201, 301)) <= ambiguous and failed == set()
    assert facts.state == CLOSED and facts.conflicts == []
    assert acknowledged | ambiguous == set(range(1, facts.last_assigned + 1))
