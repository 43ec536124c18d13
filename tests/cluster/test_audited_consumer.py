"""The audited consumer on real servers: what a group got, told before it is committed, judged as a tier."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from millrace.audit.consumer import AuditedConsumer
from millrace.audit.contract.events import EventLedger, StreamFacts
from millrace.audit.contract.group_counts import Claim, claim_of, group_doubts, seen_by_group
from millrace.audit.producer import AuditedProducer
from millrace.audit.reconciliation.reconcile import Passage, TierReading
from millrace.audit.reconciliation.verdicts import Verdict
from millrace.broker.errors import ConfigError
from tests.cluster.audited_topics import (
    DEADLINE_S,
    WINDOW_MS,
    audit,
    facts_of,
    ledger_of,
    make_topic,
    read_all,
    unique,
)
from tests.servers import BrokerProcess
from tests.verdicts import overall_verdict
from tests.waiting import Deadline, patience

COUNT = 240
PARTITIONS = 3
NEVER_MS = 3_600_000
SHORT_SESSION_MS = 4_000


@pytest.fixture(scope="module")
def millrace_broker(zookeeper, tmp_path_factory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("audited-consumer")
    settings = {"group.min.session.timeout.ms": SHORT_SESSION_MS}
    broker = BrokerProcess(zookeeper.chroot(), folder, settings=settings).start()
    yield broker.bootstrap
    broker.kill()


@pytest.fixture(params=["millrace", pytest.param("apache-kafka", marks=pytest.mark.kafka)])
def bootstrap(request) -> str:
    if request.param == "millrace":
        return request.getfixturevalue("millrace_broker")
    return request.getfixturevalue("kafka_peer").bootstrap


class Flow:
    """A topic with audited records, and a group that reads it."""

    def __init__(self, bootstrap: str, partitions: int = PARTITIONS):
        self.bootstrap = bootstrap
        self.topic = make_topic(bootstrap, "flights", partitions)
        self.events_topic, self.group = unique("events"), unique("readers")
        self.partitions = partitions

    def produce(self, count: int = COUNT) -> None:
        producer = AuditedProducer(
            {
                "bootstrap.servers": self.bootstrap,
                "millrace.window.ms": WINDOW_MS,
                "millrace.audit.topic": self.events_topic,
                "millrace.content.digest": True,
            }
        )
        for number in range(count):
            producer.produce(
                self.topic,
                f"value {number}",
                key=f"k{number}",
                partition=number % self.partitions,
                timestamp=1_700_000_000_000 + number * 3 * WINDOW_MS // count,
                headers={"own": b"1"},
            )
        assert producer.close(patience(DEADLINE_S))

    def settings(self, **more) -> dict[str, object]:
        return {
            "bootstrap.servers": self.bootstrap,
            "group.id": self.group,
            "auto.offset.reset": "earliest",
            "session.timeout.ms": 10_000,
            "heartbeat.interval.ms": 300,
            "millrace.window.ms": WINDOW_MS,
            "millrace.audit.topic": self.events_topic,
            "millrace.content.digest": True,
            "millrace.report.interval.ms": NEVER_MS,
            **{key.replace("_", "."): value for key, value in more.items()},
        }

    def consumer(self, **more) -> AuditedConsumer:
        consumer = AuditedConsumer(self.settings(**more))
        consumer.subscribe([self.topic])
        return consumer

    def ledger(self) -> EventLedger:
        return ledger_of(self.bootstrap, self.events_topic)

    def seen(self, ledger: EventLedger) -> dict:
        facts = facts_of(ledger, self.topic)
        return seen_by_group(ledger.tiers.values(), [self.topic]).get(self.group, {}).get(facts.stream, {})

    def committed(self) -> list[int]:
        """By partition; -1001 for none."""
        return [place.offset for place in self.places()]

    def claims(self) -> dict[tuple[str, str], int]:
        """What the commits say that the events tell of."""
        claims: dict[tuple[str, str], int] = {}
        for session, count in filter(None, (claim_of(place.metadata or "") for place in self.places())):
            claims[self.group, session] = max(count, claims.get((self.group, session), 0))
        return claims

    def places(self) -> list[TopicPartition]:
        """What is committed, by partition."""
        plain = Consumer({"bootstrap.servers": self.bootstrap, "group.id": self.group})
        places = [TopicPartition(self.topic, number) for number in range(self.partitions)]
        found: list[TopicPartition] = plain.committed(places, timeout=patience(DEADLINE_S))
        plain.close()
        return found

    def rows(self, lost: tuple[bytes, ...] = ()) -> list:
        """The audit's rows, the group judged by its reports and committed offsets."""
        ledger = self.ledger()
        claims = {place: Claim(count) for place, count in self.claims().items()}
        assert group_doubts(ledger, claims) == {}
        facts: StreamFacts = facts_of(ledger, self.topic)
        tier = f"group:{self.group}"
        passed = {
            ("source", self.topic, number): Passage(max(offset, 0))
            for number, offset in enumerate(self.committed())
        }
        tiers = (TierReading("source"), TierReading(tier, upstream="source", passed=passed))
        messages = read_all(self.bootstrap, self.topic)
        return audit(facts, messages, tiers, **{tier: self.seen(ledger)})


def take(consumer, count: int) -> list:
    """Poll until so many records came."""
    messages: list = []
    deadline = Deadline(lambda: f"{len(messages)} of {count} records came", within_s=DEADLINE_S)
    while len(messages) < count:
        deadline.check()
        messages += [each for each in consumer.consume(count - len(messages), 0.2) if not each.error()]
    return messages


def sequences(windows: dict) -> set[int]:
    return {sequence for window in windows.values() for sequence in window.sequences}


def test_a_group_that_got_everything_is_proven_with_its_content(bootstrap):
    flow = Flow(bootstrap)
    flow.produce()
    consumer = flow.consumer()
    first = []
    while not first:
        message = consumer.poll(0.5)
        first += [] if message is None or message.error() else [message]
    take(consumer, COUNT - 1)
    assert consumer.untrusted() == {}
    consumer.close()
    consumer.close()
    assert flow.committed() == [COUNT // PARTITIONS] * PARTITIONS
    assert list(flow.claims().values()) == [COUNT]
    told = [began for event in flow.ledger().tiers.values() for began in event.began]
    assert sorted(told) == [(number, 0) for number in range(PARTITIONS)]
    (cluster_id,) = {event.cluster_id for event in flow.ledger().tiers.values()}
    assert (
        cluster_id
        == AdminClient({"bootstrap.servers": bootstrap}).list_topics(timeout=patience(60)).cluster_id
    )
    rows = flow.rows()
    assert overall_verdict(rows) is Verdict.PROVEN and len(rows) == 3, rows
    assert {row.content_checked for row in rows} == {"compared"}


def test_what_an_application_skipped_and_committed_is_lost_by_the_group(millrace_broker):
    flow = Flow(millrace_broker, partitions=1)
    flow.produce()
    consumer = AuditedConsumer(flow.settings())
    consumer.assign([TopicPartition(flow.topic, 0, 0)])
    take(consumer, 100)
    consumer.assign([TopicPartition(flow.topic, 0, 105)])
    take(consumer, COUNT - 105)
    consumer.commit(asynchronous=False)
    consumer.close()
    rows = flow.rows()
    assert overall_verdict(rows) is Verdict.LOSS
    assert [row.missing for row in rows if row.missing] == [
        {("source", f"group:{flow.group}"): ((101, 105),)}
    ]


@pytest.mark.parametrize("manner", ["sync", "async", "message", "stored", "closed"])
def test_no_offset_is_committed_before_its_report_is_out(millrace_broker, manner):
    """The events topic's name is impossible, so no report is ever acknowledged."""
    flow = Flow(millrace_broker, partitions=1)
    flow.produce(20)
    consumer = flow.consumer(
        millrace_audit_topic="no such topic", millrace_report_timeout_ms=500, auto_commit_interval_ms=50
    )
    messages = take(consumer, 20)
    if manner == "sync":
        with pytest.raises(KafkaException, match="not committed"):
            consumer.commit(asynchronous=False)
    elif manner == "message":
        with pytest.raises(KafkaException, match="not committed"):
            consumer.commit(messages[-1], asynchronous=False)
    elif manner == "async":
        consumer.commit()
        consumer.commit(offsets=[TopicPartition(flow.topic, 0, 7)])
    elif manner == "stored":
        consumer.store_offsets(messages[-1])
    assert not consumer.report()
    consumer.poll(0.2)
    consumer.close()
    assert flow.committed() == [-1001]


def test_every_way_of_committing_goes_out_behind_a_report(millrace_broker):
    flow = Flow(millrace_broker, partitions=1)
    flow.produce(60)
    told = []
    settings = flow.settings(enable_auto_commit=False)
    settings["on_commit"] = lambda error, places: told.append(places[0].offset)
    consumer = AuditedConsumer(settings)
    consumer.subscribe([flow.topic])
    messages = take(consumer, 10)
    assert consumer.commit(messages[4], asynchronous=False)[0].offset == 5
    assert len(sequences(flow.seen(flow.ledger()))) == 10 and flow.committed() == [5]
    take(consumer, 10)
    consumer.commit(offsets=[TopicPartition(flow.topic, 0, 12)])
    consumer.commit()
    take(consumer, 10)  # after the call: not for this commit
    deadline = Deadline("20 is told to be committed", within_s=DEADLINE_S)
    while 20 not in told:
        deadline.check(told)
        consumer.poll(0.05)
    assert flow.committed() == [20]
    assert max(flow.claims().values()) >= 20
    assert len(sequences(flow.seen(flow.ledger()))) >= 20
    with pytest.raises(ValueError):
        consumer.commit(messages[0], offsets=[], asynchronous=False)
    consumer.close()


def test_offsets_that_the_application_stores_itself_wait_for_the_report(millrace_broker):
    flow = Flow(millrace_broker, partitions=1)
    flow.produce(20)
    consumer = flow.consumer(enable_auto_offset_store=False)
    messages = take(consumer, 20)
    consumer.store_offsets(messages[9])
    consumer.store_offsets(offsets=[TopicPartition(flow.topic, 0, 15)])
    consumer.close()
    assert flow.committed() == [15] and len(sequences(flow.seen(flow.ledger()))) == 20


def test_whatever_is_committed_has_the_leader_epoch_of_the_record_before_it(bootstrap):
    """As the plain client's commits have it: whoever goes on there is told of a log that was shortened."""
    flow = Flow(bootstrap, partitions=1)
    flow.produce(50)

    def stands_at(offset: int) -> None:
        (place,) = flow.places()
        assert (place.offset, place.leader_epoch) == (offset, messages[0].leader_epoch()), manner

    told: list[int] = []
    settings = flow.settings(enable_auto_commit=False)
    settings["on_commit"] = lambda error, places: told.append(places[0].offset)
    consumer = AuditedConsumer(settings)
    consumer.subscribe([flow.topic])
    manner, messages = "a message", take(consumer, 10)
    assert messages[0].leader_epoch() >= 0
    consumer.commit(messages[4], asynchronous=False)
    stands_at(5)
    manner = "everything"
    consumer.commit(asynchronous=False)
    stands_at(10)
    manner = "later"
    take(consumer, 10)
    consumer.commit()
    deadline = Deadline("20 is told to be committed", within_s=DEADLINE_S)
    while 20 not in told:
        deadline.check(told)
        consumer.poll(0.05)
    stands_at(20)
    consumer.close()
    manner, consumer = "stored on its own", flow.consumer()
    take(consumer, 10)
    consumer.close()
    stands_at(30)
    manner, consumer = "stored by the application", flow.consumer(enable_auto_offset_store=False)
    consumer.store_offsets(take(consumer, 10)[4])
    consumer.close()
    stands_at(35)
    manner, consumer = (
        "what was stored",
        flow.consumer(enable_auto_offset_store=False, enable_auto_commit=False),
    )
    consumer.store_offsets(take(consumer, 10)[6])
    consumer.commit(asynchronous=False)
    consumer.close()
    stands_at(42)


KILLED = """
import sys, time
from millrace.audit.consumer import AuditedConsumer
consumer = AuditedConsumer({settings!r})
consumer.subscribe([{topic!r}])
for wanted in (40, 80):
    count = wanted - 40
    while count < wanted:
        count += sum(message.error() is None for message in consumer.consume(wanted - count, 0.2))
    if wanted == 40:
        assert consumer.report()
print(count, flush=True)
time.sleep(600)
"""


def test_a_member_that_was_killed_leaves_no_false_loss_and_what_it_told_is_repeated(millrace_broker):
    """It committed nothing, so all is given again: a repeat where it could still say that it had it."""
    flow = Flow(millrace_broker, partitions=1)
    flow.produce(100)
    settings = flow.settings(enable_auto_commit=False, session_timeout_ms=SHORT_SESSION_MS)
    text = KILLED.format(settings=settings, topic=flow.topic)
    process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline().strip() == "80"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(patience(DEADLINE_S))
    heir = flow.consumer()
    take(heir, 100)
    heir.close()
    windows = flow.seen(flow.ledger())
    assert sequences(windows) == set(range(1, 101))
    assert {sequence for window in windows.values() for sequence in window.repeats.sequences} == set(
        range(1, 41)
    )
    rows = flow.rows()
    assert not any(row.missing for row in rows) and overall_verdict(rows) is Verdict.DUPLICATE


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
def test_a_rebalance_loses_and_repeats_nothing(bootstrap, strategy):
    """Before partitions go to another member, what came from them is reported and committed."""
    flow = Flow(bootstrap)
    flow.produce(COUNT // 2)
    revoked = []
    first = AuditedConsumer(flow.settings(partition_assignment_strategy=strategy))
    first.subscribe([flow.topic], on_revoke=lambda _, places: revoked.append(len(places)))
    take(first, COUNT // 2)
    second = flow.consumer(partition_assignment_strategy=strategy)
    deadline = Deadline("both members have a share and its records", within_s=DEADLINE_S)
    while not (revoked and second.assignment() and first.assignment()):
        deadline.check()
        for consumer in (first, second):
            assert consumer.poll(0.05) is None
    flow.produce(COUNT // 2)
    got = 0
    while got < COUNT // 2:
        deadline.check(got)
        for consumer in (first, second):
            got += sum(message.error() is None for message in consumer.consume(COUNT, 0.05))
    for consumer in (first, second):
        consumer.close()
    ledger = flow.ledger()
    assert group_doubts(ledger) == {}
    assert len({event.session for event in ledger.tiers.values()}) == 2
    found = seen_by_group(ledger.tiers.values(), [flow.topic])[flow.group]
    assert len(found) == 2
    for windows in found.values():
        assert sequences(windows) == set(range(1, COUNT // 2 + 1))
        assert not any(window.repeats for window in windows.values())


def test_the_regular_report_commits_for_an_application_that_never_asks(millrace_broker):
    flow = Flow(millrace_broker, partitions=1)
    flow.produce(20)
    consumer = flow.consumer(millrace_report_interval_ms=50, auto_commit_interval_ms=50)
    take(consumer, 20)
    deadline = Deadline("the report commits 20", within_s=DEADLINE_S)
    while (committed := flow.committed()) != [20]:
        deadline.check(committed)
        consumer.poll(0.05)
    assert sequences(flow.seen(flow.ledger())) == set(range(1, 21))
    consumer.close()


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"group.id": None}, "group.id"),
        ({"group.id": "a\nb"}, "group.id"),
        ({"millrace.windw.ms": 5}, "millrace.windw.ms"),
        ({"millrace.window.ms": 0}, "millrace.window.ms"),
        ({"millrace.content.digest": "perhaps"}, "millrace.content.digest"),
        ({"enable.auto.offset.store": "perhaps"}, "enable.auto.offset.store"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(wrong, named):
    with pytest.raises(ConfigError, match=named):
        AuditedConsumer({"bootstrap.servers": "127.0.0.1:1", "group.id": "g", **wrong})
