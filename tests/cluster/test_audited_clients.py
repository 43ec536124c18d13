"""Adapters for kafka-python, aiokafka and our own client on real servers, and the audit of what they send."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from confluent_kafka import Producer
from kafka import errors as kafka_errors

from millrace.audit.aiokafka_producer import AuditedAIOKafkaProducer
from millrace.audit.client_producer import AuditedClientProducer
from millrace.audit.clients.adapter_config import open_reporter
from millrace.audit.contract.events import CLOSED
from millrace.audit.contract.header import HEADER_KEY, decode_identity
from millrace.audit.kafka_python_producer import AuditedKafkaProducer
from millrace.audit.reconciliation.verdicts import Verdict
from millrace.broker.client.cluster import Cluster
from millrace.broker.errors import ConfigError
from tests.cluster.audited_topics import (
    DEADLINE_S,
    WINDOW_MS,
    audit,
    facts_of,
    fate,
    ledger_of,
    make_topic,
    read_all,
    unique,
)
from tests.servers import BrokerProcess
from tests.verdicts import overall_verdict
from tests.waiting import patience

COUNT = 300
CREATED_MS = 1_700_000_000_000
HEADERS = [("own", b"1"), ("empty", b"")]


@pytest.fixture(scope="module")
def millrace_broker(zookeeper, tmp_path_factory) -> Iterator[str]:
    broker = BrokerProcess(zookeeper.chroot(), tmp_path_factory.mktemp("audited-clients")).start()
    yield broker.bootstrap
    broker.kill()


@pytest.fixture(params=["millrace", pytest.param("apache-kafka", marks=pytest.mark.kafka)])
def bootstrap(request) -> str:
    if request.param == "millrace":
        return request.getfixturevalue("millrace_broker")
    return request.getfixturevalue("kafka_peer").bootstrap


def settings(events_topic: str, **more) -> dict[str, object]:
    return {
        "millrace_producer": "AA@ewr",
        "millrace_datacenter": "ewr",
        "millrace_window_ms": WINDOW_MS,
        "millrace_audit_topic": events_topic,
        **more,
    }


def records(count: int = COUNT) -> Iterator[tuple[bytes, bytes | None, int]]:
    """(key, value, creation time), over three windows."""
    for number in range(count):
        value = None if number % 50 == 7 else b"x" * (number % 97)
        yield f"k{number}".encode(), value, CREATED_MS + number * 3 * WINDOW_MS // count


def with_kafka_python(bootstrap: str, topic: str, own: dict[str, object]) -> None:
    producer = AuditedKafkaProducer(bootstrap_servers=bootstrap, **own)
    futures = [
        producer.send(topic, value, key, headers=list(HEADERS), timestamp_ms=created_ms)
        for key, value, created_ms in records()
    ]
    assert producer.close(patience(DEADLINE_S)) is True
    assert all(future.succeeded() for future in futures)


def with_aiokafka(bootstrap: str, topic: str, own: dict[str, object]) -> None:
    async def run() -> None:
        async with AuditedAIOKafkaProducer(bootstrap_servers=bootstrap, **own) as producer:
            for key, value, created_ms in records():
                await producer.send(topic, value, key, timestamp_ms=created_ms, headers=HEADERS)

    asyncio.run(run())


def with_our_client(bootstrap: str, topic: str, own: dict[str, object]) -> None:
    async def run() -> None:
        async with Cluster("ewr", [bootstrap]) as cluster, AuditedClientProducer(cluster, **own) as producer:
            for key, value, created_ms in records():
                await producer.send(topic, key=key, value=value, headers=HEADERS, timestamp_ms=created_ms)

    asyncio.run(run())


CLIENTS: dict[str, Callable[[str, str, dict[str, object]], None]] = {
    "kafka-python": with_kafka_python,
    "aiokafka": with_aiokafka,
    "our-client": with_our_client,
}


@pytest.mark.parametrize("client", CLIENTS)
def test_what_any_client_sends_is_proven_with_its_content(bootstrap, client):
    topic, events_topic = make_topic(bootstrap, "flights"), unique("events")
    CLIENTS[client](bootstrap, topic, settings(events_topic, millrace_content_digest=True))
    messages = read_all(bootstrap, topic)
    identities = sorted(
        (decode_identity(dict(message.headers())[HEADER_KEY]) for message in messages),
        key=lambda identity: identity.sequence,
    )
    assert [identity.sequence for identity in identities] == list(range(1, COUNT + 1))
    assert [identity.created_ms for identity in identities] == [created for *_, created in records()]
    assert {identity.producer for identity in identities} == {"AA@ewr"}
    assert all(message.headers()[:2] == HEADERS for message in messages)
    assert {(message.key(), message.value()) for message in messages} == {record[:2] for record in records()}
    facts = facts_of(ledger_of(bootstrap, events_topic), topic)
    assert (facts.state, facts.last_assigned, facts.last_settled) == (CLOSED, COUNT, COUNT)
    assert fate(facts, "acknowledged") == set(range(1, COUNT + 1))
    assert sum(report.byte_count for report in facts.windows.values()) == sum(map(len, messages))
    rows = audit(facts, messages)
    assert len(rows) == 3 and overall_verdict(rows) is Verdict.PROVEN, rows
    assert {row.content_checked for row in rows} == {"compared"}
    lost = [message for message in messages if message.key() not in (b"k5", b"k299")]
    rows = audit(facts, lost)
    assert [row.missing for row in rows if row.missing] == [
        {("produced", "source"): ((6, 6),)},
        {("produced", "source"): ((300, 300),)},
    ]


@pytest.mark.parametrize("client", CLIENTS)
def test_count_only_producers_get_the_verdict_by_count(millrace_broker, client):
    topic, events_topic = make_topic(millrace_broker, "gateway"), unique("events")
    CLIENTS[client](millrace_broker, topic, settings(events_topic, millrace_sequenced=False))
    messages = read_all(millrace_broker, topic)
    assert {decode_identity(dict(m.headers())[HEADER_KEY]).sequence for m in messages} == {0}
    facts = facts_of(ledger_of(millrace_broker, events_topic), topic)
    assert not facts.sequenced and sum(report.count for report in facts.windows.values()) == COUNT
    assert {row.verdict for row in audit(facts, messages)} == {Verdict.COUNT_MATCH}
    short, over = audit(facts, messages[1:]), audit(facts, [*messages, messages[0]])
    assert [row.missing_count for row in short if row.verdict is Verdict.LOSS] == [
        {("produced", "source"): 1}
    ]
    assert [row.extra_copies for row in over if row.verdict is Verdict.DUPLICATE] == [{"source": 1}]


def test_kafka_pythons_serializers_and_refusals_are_followed(millrace_broker):
    """What is refused at once takes no number; the digest is of the bytes that a serializer gave."""
    topic, events_topic = make_topic(millrace_broker, "flights"), unique("events")
    producer = AuditedKafkaProducer(
        bootstrap_servers=millrace_broker,
        max_request_size=1000,
        value_serializer=lambda value: f"{time.monotonic_ns()} {value}".encode(),
        **settings(events_topic, millrace_content_digest=True),
    )
    producer.send(topic, "first", b"k")
    for wrong in ({"value": "x" * 2000}, {"value": None, "key": None}, {"value": "a", "headers": "text"}):
        with pytest.raises((ValueError, TypeError, kafka_errors.KafkaError)):
            producer.send(topic, **wrong)
    producer.send(topic, "second", b"k")
    assert producer.close(patience(DEADLINE_S))
    facts = facts_of(ledger_of(millrace_broker, events_topic), topic)
    assert fate(facts, "acknowledged") == {1, 2} and facts.last_assigned == 2
    rows = audit(facts, read_all(millrace_broker, topic))
    assert {(row.verdict, row.content_checked) for row in rows} == {(Verdict.PROVEN, "compared")}


def test_aiokafkas_serializers_and_refusals_are_followed(millrace_broker):
    topic, events_topic = make_topic(millrace_broker, "flights"), unique("events")

    async def run() -> None:
        producer = AuditedAIOKafkaProducer(
            bootstrap_servers=millrace_broker,
            max_request_size=1000,
            value_serializer=lambda value: f"{time.monotonic_ns()} {value}".encode(),
            **settings(events_topic, millrace_content_digest=True),
        )
        await producer.start()
        await producer.send_and_wait(topic, "first", b"k")
        for wrong in ({"value": "x" * 2000}, {"value": None, "key": None}):
            with pytest.raises(Exception, match=r"Need at least one|larger than"):
                await producer.send(topic, **wrong)
        with pytest.raises(TypeError, match="use send"):
            await producer.send_batch(producer.create_batch(), topic, partition=0)
        future = await producer.send(topic, "second", b"k")
        future.cancel()
        await producer.stop()

    asyncio.run(run())
    facts = facts_of(ledger_of(millrace_broker, events_topic), topic)
    assert fate(facts, "acknowledged") == {1} and fate(facts, "ambiguous") == {2}
    assert facts.last_assigned == 2 and facts.state == CLOSED


@pytest.mark.parametrize("make", [AuditedKafkaProducer, AuditedAIOKafkaProducer])
@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"acks": 0}, "acks"),
        ({"transactional_id": "t"}, "transactional_id"),
        ({"millrace_windw_ms": 5}, "millrace.windw.ms"),
        ({"millrace_window_ms": 0}, "millrace.window.ms"),
        ({"millrace_sequenced": "no"}, "millrace_sequenced"),
        ({"millrace_sequenced": False, "millrace_journal": "/tmp/none"}, "millrace.journal"),
    ],
)
def test_settings_that_cannot_be_honest_are_refused_by_name(make, wrong, named):
    with pytest.raises(ConfigError, match=named):
        make(**wrong)


def test_what_was_under_way_when_the_broker_died_is_ambiguous_for_every_client(zookeeper, tmp_path):
    """Nobody knows: an attempt may have arrived. The reports wait for the broker and say so."""
    own = settings("events", millrace_report_interval_ms=3_600_000)
    broker = BrokerProcess(zookeeper.chroot(), tmp_path / "dying").start()
    try:
        topics = {client: make_topic(broker.bootstrap, client, 1) for client in CLIENTS}
        asyncio.run(_lose_the_broker(broker, topics, own))
        ledger = ledger_of(broker.bootstrap, "events")
        for topic in topics.values():
            facts = facts_of(ledger, topic)
            known = fate(facts, "acknowledged")
            assert 1 in known and fate(facts, "ambiguous") == set(range(1, 7)) - known, topic
            # aiokafka repeats an idempotent batch for as long as it takes, the others gave up.
            assert known == {1} or topic == topics["aiokafka"]
            rows = audit(facts, read_all(broker.bootstrap, topic))
            assert overall_verdict(rows) is Verdict.PROVEN, rows
    finally:
        broker.kill()


async def _lose_the_broker(broker: BrokerProcess, topics: dict[str, str], own: dict[str, object]) -> None:
    threaded = AuditedKafkaProducer(
        bootstrap_servers=broker.bootstrap, delivery_timeout_ms=3_000, request_timeout_ms=2_500, **own
    )
    looped = AuditedAIOKafkaProducer(bootstrap_servers=broker.bootstrap, request_timeout_ms=3_000, **own)
    await looped.start()
    async with Cluster("ewr", [broker.bootstrap], request_timeout_ms=2_500) as cluster:
        ours = AuditedClientProducer(cluster, delivery_timeout_ms=3_000, **own)
        await asyncio.to_thread(threaded.send(topics["kafka-python"], b"1").get, DEADLINE_S)
        await looped.send_and_wait(topics["aiokafka"], b"1")
        await (await ours.send(topics["our-client"], key=None, value=b"1"))
        broker.stop()  # not killed: it may come back at once
        futures = [threaded.send(topics["kafka-python"], b"x") for _ in range(5)]
        for _ in range(5):
            await looped.send(topics["aiokafka"], b"x")
        answers = [await ours.send(topics["our-client"], key=None, value=b"x") for _ in range(5)]
        told = await asyncio.wait_for(asyncio.gather(*answers, return_exceptions=True), patience(DEADLINE_S))
        assert all(isinstance(answer, Exception) for answer in told)
        for future in futures:
            with pytest.raises(kafka_errors.KafkaError):
                await asyncio.to_thread(future.get, DEADLINE_S)
        broker.start()
        await asyncio.wait_for(looped.stop(), patience(DEADLINE_S))
        await ours.close()
        assert await asyncio.to_thread(threaded.close, DEADLINE_S)


PROGRAM = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent!r}:
            raise ImportError(name)
sys.meta_path.insert(0, Absent())
{program}
"""


@pytest.mark.parametrize(
    ("absent", "program"),
    [
        (
            ("pyspark", "confluent_kafka", "kafka", "aiokafka", "numba", "pyarrow", "pandas"),
            "from millrace.audit.stream_reporter import StreamReporter\n"
            "reporter = StreamReporter({'millrace.producer': 'AA'})\n"
            "reporter.stamp('flights').acknowledged(5)\n"
            "assert len(reporter.close()) == 2\n"
            "import millrace.audit.client_producer",
        ),
        (("pyspark", "confluent_kafka", "aiokafka", "numba"), "import millrace.audit.kafka_python_producer"),
        (("pyspark", "confluent_kafka", "kafka", "numba"), "import millrace.audit.aiokafka_producer"),
        (("pyspark", "kafka", "aiokafka", "numba", "pyarrow"), "import millrace.audit.producer"),
        (("pyspark", "kafka", "aiokafka", "numba", "pyarrow"), "import millrace.audit.consumer"),
    ],
)
def test_an_application_needs_nothing_but_its_own_client(absent, program):
    text = PROGRAM.format(absent=absent, program=program)
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=patience(DEADLINE_S)
    )
    assert done.returncode == 0, done.stderr


FORGETFUL = """
import sys
from millrace.audit.kafka_python_producer import AuditedKafkaProducer
producer = AuditedKafkaProducer(bootstrap_servers={bootstrap!r}, millrace_audit_topic={events!r})
producer._unregister_cleanup()  # the client's own, which leaves a second
for number in range(50):
    producer.send({topic!r}, b"x")
producer.flush()
"""


def test_a_kafka_python_program_that_only_flushed_still_closes_its_streams(millrace_broker):
    topic, events_topic = make_topic(millrace_broker, "flights"), unique("events")
    text = FORGETFUL.format(bootstrap=millrace_broker, events=events_topic, topic=topic)
    done = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        timeout=patience(DEADLINE_S),
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr
    facts = facts_of(ledger_of(millrace_broker, events_topic), topic)
    assert facts.state == CLOSED and fate(facts, "acknowledged") == set(range(1, 51))


def test_close_of_kafka_python_ends_while_the_cluster_is_away(tmp_path):
    """Though kafka-python waits for metadata, for answers and for its own records as long as it may."""
    host = Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "unused", "log_level": 0})
    (broker,) = host.list_topics("millrace.audit", timeout=patience(DEADLINE_S)).brokers.values()
    producer = AuditedKafkaProducer(
        bootstrap_servers=f"{broker.host}:{broker.port}",
        api_version=(2, 3),
        enable_idempotence=False,
        max_block_ms=86_400_000,
        delivery_timeout_ms=86_400_000,
        **settings(
            "millrace.audit", millrace_journal=str(tmp_path / "j"), millrace_report_interval_ms=3_600_000
        ),
    )
    producer._topic_ready = True  # as after a first report
    producer.send("flights", b"").get(patience(DEADLINE_S))
    host.close()
    producer.send("flights", b"")
    ended = []
    closing = threading.Thread(target=lambda: ended.append(producer.close(1)), daemon=True)
    closing.start()
    closing.join(patience(DEADLINE_S))
    assert ended == [False]
    assert producer._closed and producer.close(1)
    again = open_reporter({"millrace_journal": str(tmp_path / "j")})
    assert any(b"flights" in event.value for event in again.report())
    again.finish()
