"""The audited producer as Kafka 0.7's: synchronous, asynchronous `send`, partitioner, encoder, settings."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time

import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from confluent_kafka.error import ValueSerializationError

from millrace.audit.clients.producer_config import read_config
from millrace.audit.clients.sending import NotDelivered, ProducerData, Standing
from millrace.audit.contract.events import EventLedger, StreamFacts
from millrace.audit.contract.header import HEADER_KEY, decode_identity
from millrace.audit.producer import AuditedProducer
from millrace.broker.errors import ConfigError
from tests.cluster.audited_topics import fate
from tests.servers import BrokerProcess
from tests.waiting import Deadline, patience, until
from tests.watermarks import end_offset

DEADLINE_S = 120.0
LINGER_MS = 900_000
"""The most that the client takes, and longer than any test waits."""
_numbers = itertools.count()


def unique(name: str) -> str:
    return f"{name}-{os.getpid()}-{next(_numbers)}-{time.monotonic_ns()}"


@pytest.fixture(scope="module")
def shared_broker(zookeeper, tmp_path_factory):
    broker = BrokerProcess(zookeeper.chroot(), tmp_path_factory.mktemp("broker"))
    try:
        yield broker.start()
    finally:
        broker.kill()


@pytest.fixture(params=["millrace", pytest.param("apache-kafka", marks=pytest.mark.kafka)])
def bootstrap(request, shared_broker) -> str:
    if request.param == "millrace":
        return shared_broker.bootstrap
    return request.getfixturevalue("kafka_peer").bootstrap


def create(bootstrap: str, partitions: int) -> str:
    topic = unique("flights")
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(patience(DEADLINE_S))
    return topic


def settings(bootstrap: str, **own: object) -> dict[str, object]:
    return {
        "bootstrap.servers": bootstrap,
        "log_level": 0,
        "millrace.producer": "AA@ewr",
        "millrace.audit.topic": unique("events"),
        **{key.replace("_", "."): value for key, value in own.items()},
    }


def read(bootstrap: str, topic: str) -> dict[tuple[int, int], object]:
    """{(partition, offset): message}"""
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": unique("reader"), "fetch.wait.max.ms": 10}
    )
    partitions = consumer.list_topics(topic, timeout=patience(DEADLINE_S)).topics[topic].partitions
    starts = [TopicPartition(topic, partition, 0) for partition in partitions]
    ends = sum(end_offset(consumer, topic, partition, DEADLINE_S) for partition in partitions)
    consumer.assign(starts)
    messages = {}
    deadline = Deadline(lambda: f"{len(messages)} of {ends} records of {topic}", within_s=DEADLINE_S)
    while len(messages) < ends:
        deadline.check()
        for message in consumer.consume(500, 0.02):
            if message.error() is None:
                messages[message.partition(), message.offset()] = message
    consumer.close()
    return messages


def facts_of(bootstrap: str, producer: AuditedProducer, topic: str) -> StreamFacts:
    ledger = EventLedger()
    for message in read(bootstrap, producer._config.events_topic).values():
        ledger.add(message.key(), message.value())
    assert ledger.untrusted == []
    (facts,) = [facts for facts in ledger.streams.values() if facts.topic == topic]
    return facts


def test_send_waits_and_says_where_each_record_stands(bootstrap):
    topic = create(bootstrap, 3)
    # Synchronous sending does not wait for others to come: a quarter of an hour.
    producer = AuditedProducer(settings(bootstrap, linger_ms=LINGER_MS, message_timeout_ms=2 * LINGER_MS))
    (one,) = producer.send(topic, b"one", "key", timeout=patience())
    many = producer.send(topic, [b"two", b"three"], "key", timeout=patience())
    data = [
        ProducerData(topic, [b"four", b"five"]),
        ProducerData(topic, b"six", partition=2, timestamp=123_456),
    ]
    listed = producer.send(data, timeout=patience())
    producer.close()
    messages = read(bootstrap, topic)
    stands = [one, *many, *listed]
    assert all(isinstance(stand, Standing) and stand.topic == topic for stand in stands)
    values = [messages[stand.partition, stand.offset].value() for stand in stands]
    assert values == [b"one", b"two", b"three", b"four", b"five", b"six"]
    assert len({stand.partition for stand in stands[:3]}) == 1
    assert (listed[2].partition, listed[2].timestamp_ms) == (2, 123_456)
    assert fate(facts_of(bootstrap, producer, topic), "acknowledged") == set(range(1, 7))


def test_send_raises_what_was_not_acknowledged_and_the_record_is_in_doubt():
    producer = AuditedProducer(settings("127.0.0.1:1", message_timeout_ms=300))
    with pytest.raises(NotDelivered) as failed:
        producer.send("flights", [b"one", b"two"])
    assert [error.code() for error in failed.value.errors] == [KafkaError._MSG_TIMED_OUT] * 2
    assert str(failed.value).startswith("2 of 2 records not acknowledged: ")
    with pytest.raises(NotDelivered) as late:
        producer.send("flights", b"three", timeout=0.01)
    assert late.value.args[0].code() == KafkaError._TIMED_OUT
    stream = producer._streams["flights"]
    assert {1, 2} <= fate(stream, "ambiguous")
    assert not fate(stream, "failed") and not fate(stream, "acknowledged")
    producer.close(0.1)


def test_a_partitioner_gets_the_key_as_it_is_and_the_number_of_partitions(bootstrap):
    topic = create(bootstrap, 5)
    asked = []

    def by_member(key, count):
        asked.append((key, count))
        return key["member"] % count

    producer = AuditedProducer(
        settings(
            bootstrap,
            partitioner=by_member,
            key_serializer=lambda key, context: None if key is None else json.dumps(key).encode(),
            encoder=lambda event: json.dumps(event).encode(),
        )
    )
    for member in range(20):
        producer.produce(topic, {"seen": member}, {"member": member})
    producer.produce_batch(topic, [{"value": {"seen": 20}, "key": {"member": 20}}])
    producer.produce(topic, {"seen": 21}, {"member": 21}, partition=0)
    producer.produce(topic, {"seen": 22})
    producer.close()
    found = {
        json.loads(m.value())["seen"]: (place[0], m.key()) for place, m in read(bootstrap, topic).items()
    }
    assert {member: found[member][0] for member in range(21)} == {member: member % 5 for member in range(21)}
    assert found[20][1] == b'{"member": 20}' and found[21][0] == 0 and found[22][1] is None
    assert asked == [({"member": member}, 5) for member in range(21)]
    assert fate(facts_of(bootstrap, producer, topic), "acknowledged") == set(range(1, 24))


@pytest.mark.parametrize("chosen", [5, -1, "1", 1.0, True, None])
def test_a_partition_that_does_not_exist_is_refused_and_burns_no_number(shared_broker, chosen):
    topic = create(shared_broker.bootstrap, 5)
    producer = AuditedProducer(settings(shared_broker.bootstrap, partitioner=lambda key, count: chosen))
    with pytest.raises(ValueError, match=f"of 5 partitions of {topic}"):
        producer.produce(topic, b"", "key")
    producer.produce(topic, b"", partition=4)
    producer.close()
    assert fate(facts_of(shared_broker.bootstrap, producer, topic), "acknowledged") == {1}


def test_the_partitioner_learns_of_partitions_that_were_added(shared_broker, monkeypatch):
    bootstrap = shared_broker.bootstrap
    topic = create(bootstrap, 1)
    producer = AuditedProducer(settings(bootstrap, partitioner=lambda key, count: count - 1))
    assert producer.send(topic, b"", "k")[0].partition == 0
    from confluent_kafka.admin import NewPartitions

    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_partitions([NewPartitions(topic, 3)])[topic].result(patience(DEADLINE_S))
    monkeypatch.setattr("millrace.audit.clients.preparation.METADATA_INTERVAL_S", 0.0)
    deadline = Deadline("a record in the third partition", within_s=DEADLINE_S)
    while (partition := producer.send(topic, b"", "k")[0].partition) != 2:
        deadline.check(partition)
        producer.report()
    producer.close()


def test_an_encoder_that_fails_burns_no_number(shared_broker):
    topic = create(shared_broker.bootstrap, 1)
    producer = AuditedProducer(settings(shared_broker.bootstrap, encoder=str.encode))
    with pytest.raises(ValueSerializationError):
        producer.produce(topic, 5)
    assert producer.send(topic, "text")[0].offset == 0
    producer.close()


class ByLength:
    def partition(self, key, count):
        return len(key) % count


class Upper:
    def to_message(self, data):
        return data.upper().encode()


def test_the_settings_of_kafka_0_7(bootstrap):
    topic = create(bootstrap, 4)
    heard = []
    old = {
        "producer.type": "async",
        "broker.list": f"0:{bootstrap}",
        "queue.time": 5,
        "queue.size": 1000,
        "batch.size": 200,
        "compression.codec": 1,
        "partitioner.class": ByLength(),
        "serializer.class": Upper(),
        "callback.handler": lambda error, message: heard.append((error, message.partition())),
        "millrace.audit.topic": unique("events"),
        "log_level": 0,
    }
    producer = AuditedProducer(old)
    assert producer.send([ProducerData(topic, ["a", "b"], "kkk"), ProducerData(topic, "c", "k")]) == []
    assert producer.flush(patience(DEADLINE_S)) == 0
    producer.close()
    assert sorted(heard) == [(None, 1), (None, 3), (None, 3)]
    assert sorted(m.value() for m in read(bootstrap, topic).values()) == [b"A", b"B", b"C"]
    assert fate(facts_of(bootstrap, producer, topic), "acknowledged") == {1, 2, 3}


def test_old_names_are_old_only_beside_the_type_of_the_producer():
    assert read_config({"batch.size": 1000}).client["batch.size"] == 1000
    old = read_config({"producer.type": "sync", "batch.size": 10, "broker.list": "1:a:9092,2:b:9093"})
    assert old.client["batch.num.messages"] == 10 and old.client["bootstrap.servers"] == "a:9092,b:9093"
    old = read_config({"producer.type": "sync", "broker.list": "0:[::1]:9092, b:9093"})
    assert old.client["bootstrap.servers"] == "[::1]:9092,b:9093"
    with pytest.raises(ConfigError, match=r"broker\.list"):
        read_config({"producer.type": "sync", "broker.list": "0:a"})
    queued = read_config({"producer.type": "async", "queue.time": 5000, "queue.size": 9}).client
    assert (queued["linger.ms"], queued["queue.buffering.max.messages"]) == (5000, 9)
    assert not queued.keys() & {"queue.time", "queue.size", "producer.type"}


@pytest.mark.parametrize("names", ["of Kafka 0.7", "of confluent-kafka"])
def test_a_record_waits_for_as_many_others_or_as_long_as_is_set(bootstrap, names):
    topic, heard = create(bootstrap, 1), []

    def producer_that_waits(wait_ms: int, count: int) -> AuditedProducer:
        old = {
            "producer.type": "async",
            "broker.list": f"0:{bootstrap}",
            "queue.time": wait_ms,
            "batch.size": count,
        }
        new = {"bootstrap.servers": bootstrap, "linger.ms": wait_ms, "batch.num.messages": count}
        return AuditedProducer(
            {
                **(old if names == "of Kafka 0.7" else new),
                "on_delivery": lambda error, message: heard.append(error),
                "message.timeout.ms": 2 * LINGER_MS,
                "millrace.audit.topic": unique("events"),
                "log_level": 0,
            }
        )

    def send(producer: AuditedProducer, count: int) -> None:
        for _ in range(count):
            producer.produce(topic, b"")

    def hear(producer: AuditedProducer, count: int) -> None:
        deadline = Deadline(lambda: f"{len(heard)} of {count} records were acknowledged")
        while len(heard) < count:
            deadline.check()
            producer.poll(0.05)
        assert heard == [None] * count

    patient = producer_that_waits(LINGER_MS, 10)
    send(patient, 10)
    hear(patient, 10)  # from here on it has its connection, and what it sends is there at once
    send(patient, 9)
    patient.poll(0.5)
    assert len(heard) == 10, "nine of ten wait for the tenth"
    send(patient, 1)
    hear(patient, 20)
    prompt = producer_that_waits(50, 100_000)
    send(prompt, 9)
    hear(prompt, 29)
    for producer in (patient, prompt):
        producer.close()


def test_a_record_that_was_sent_may_be_purged_from_the_queue_and_stand_in_the_log(broker_factory):
    """It waits there to be sent again. Whoever called it failed would call a record that exists absent."""
    broker = broker_factory()
    timed_out = []

    def look(statistics):
        brokers = json.loads(statistics)["brokers"].values()
        timed_out.append(sum(broker["req_timeouts"] for broker in brokers))

    producer = AuditedProducer(
        settings(
            broker.bootstrap,
            linger_ms=0,
            socket_timeout_ms=2_000,  # the first record must be through in less, or it waits for a retry too
            retry_backoff_ms=100_000,
            retry_backoff_max_ms=200_000,
            statistics_interval_ms=100,
        ),
        stats_cb=look,
    )
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.create_topics([NewTopic("flights", 1, 1)])["flights"].result(patience(DEADLINE_S))
    assert producer.send("flights", b"first", timeout=patience(DEADLINE_S))
    errors = []
    os.kill(broker.process.pid, signal.SIGSTOP)
    try:
        before = timed_out[-1] if timed_out else 0
        producer.produce("flights", b"second", on_delivery=lambda error, _: errors.append(error.code()))
        deadline = Deadline("a request that timed out, and the record's fate", within_s=DEADLINE_S)
        while not timed_out or timed_out[-1] <= before or not errors:
            deadline.check((timed_out[-1:], errors))
            if timed_out and timed_out[-1] > before:
                producer.purge(in_flight=False)
            producer.poll(0.1)
    finally:
        os.kill(broker.process.pid, signal.SIGCONT)
    assert errors == [KafkaError._PURGE_QUEUE]
    stream = producer._streams["flights"]
    assert (fate(stream, "ambiguous"), fate(stream, "failed")) == ({2}, set())
    until(lambda: len(read(broker.bootstrap, "flights")) == 2, within_s=DEADLINE_S, logs_of=[broker])
    messages = read(broker.bootstrap, "flights")
    sequences = {decode_identity(dict(m.headers())[HEADER_KEY]).sequence for m in messages.values()}
    assert sequences == {1, 2}
    producer.close(patience(DEADLINE_S))
