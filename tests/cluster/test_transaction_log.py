"""`__transaction_state` as Apache Kafka writes and reads it.

The same requests go to a real Apache Kafka and to this broker; the records must tell the same story, Apache
Kafka's bytes must survive our decoder and encoder unchanged, and its own tools must read ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from confluent_kafka import Producer
from kio.schema.errors import ErrorCode

from millrace.broker.protocol.batch import iterate_batches
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.hot_fetch import PartitionFetch
from millrace.broker.protocol.java_hash import coordinator_partition
from millrace.broker.protocol.records import Record, read_records
from millrace.broker.protocol.system_topics import TRANSACTIONS_TOPIC
from millrace.broker.transactions.records import decode_key, decode_value, encode_key, encode_value
from tests.cluster.transactional import TIMEOUT_S, RawProducer, coordinator_of, create_topic, read, until
from tests.peers.kafka import KafkaPeer
from tests.raw_client import RawClient
from tests.servers import BrokerProcess
from tests.waiting import patience
from tests.wire.java_tools import JavaTools

pytestmark = [pytest.mark.java, pytest.mark.kafka]


@pytest.fixture
def narrow(broker_factory) -> BrokerProcess:
    return broker_factory(transaction_state_log_num_partitions=5)


def story(port: int) -> None:
    """Two topics, three transactions, a fence."""
    coordinator_of(port, "orders")
    producer = RawProducer(port, "orders")
    assert producer.begin(timeout_ms=50_000) is ErrorCode.none
    producer.add_until_accepted("flights", 0)
    producer.add_until_accepted("delays", 0)
    assert producer.produce("flights", 0, b"a") is ErrorCode.none
    producer.end_everywhere()
    producer.add_until_accepted("flights", 1, 0)
    producer.end_everywhere(committed=False)
    producer.add_until_accepted("flights", 1)
    successor = RawProducer(port, "orders")
    assert successor.begin(timeout_ms=70_000) is ErrorCode.none
    former = {"producer_id": successor.producer_id, "producer_epoch": successor.epoch}
    assert successor.begin(timeout_ms=70_000, **former) is ErrorCode.none
    until(lambda: successor.state() == "Empty")


def records_of(port: int) -> list[Record]:
    """What the log holds of "orders"."""
    with RawClient(port) as client:
        partition = coordinator_partition("orders", 5)
        (given,) = client.fetch(
            PartitionFetch(TRANSACTIONS_TOPIC, partition, 0, 1 << 20), version=12
        ).partitions
    data = bytes(given.records)
    return [
        record
        for position, header in iterate_batches(data)
        for record in read_records(data[position : position + header.size])
    ]


def told(records: list[Record]) -> list[tuple]:
    """The story without what differs from run to run: ids and times."""
    first = decode_value(records[0].value)
    lines = []
    for record in records:
        value = decode_value(record.value)
        lines.append(
            (
                decode_key(record.key),
                value.state.value,
                value.producer_id - first.producer_id,
                value.epoch,
                value.timeout_ms,
                value.partitions,
                value.started_ms >= 0,
                value.updated_ms >= value.started_ms,
            )
        )
    return lines


@pytest.fixture
def old_kafka(tmp_path) -> KafkaPeer:
    """Apache Kafka with `transaction.version` 0, as every cluster of 3.x has it."""
    with KafkaPeer(tmp_path / "kafka") as peer:
        with RawClient(port_of(peer)) as client:
            lowered = {"feature": "transaction.version", "max_version_level": 0, "upgrade_type": 2}
            answer = client.ask(57, 1, timeout=30_000, feature_updates=[lowered])
            assert answer.error_code is ErrorCode.none, answer
        yield peer


def port_of(peer: KafkaPeer) -> int:
    return int(peer.bootstrap.rpartition(":")[2])


def test_the_same_requests_leave_the_same_records(old_kafka, narrow):
    create_topic(old_kafka, "flights", 2)
    create_topic(old_kafka, "delays")
    create_topic(narrow, "flights", 2)
    create_topic(narrow, "delays")
    story(port_of(old_kafka))
    story(narrow.port)
    theirs, ours = records_of(port_of(old_kafka)), records_of(narrow.port)
    assert told(ours) == told(theirs)
    for record in theirs + ours:
        assert encode_key(decode_key(record.key)) == record.key
        assert record.value[:2] == b"\x00\x00"
        value = decode_value(record.value)
        topics = {topic for topic, _ in value.partitions}
        if len(topics) <= 1:  # the order of topics is not fixed there
            assert sorted_value(record.value) == encode_value(value)


def sorted_value(value: bytes) -> bytes:
    """Apache Kafka keeps partitions in a hash set; two of one topic may come in any order."""
    decoded = decode_value(value)
    assert len(encode_value(decoded)) == len(value)
    return encode_value(decoded) if len(decoded.partitions) > 1 else value


def test_records_of_a_cluster_with_kip_890(kafka_peer):
    """A cluster of 4.x writes flexible values; librdkafka's transactions there must read the same."""
    topic = f"txn-log-{time.monotonic_ns()}"
    create_topic(kafka_peer, topic)
    port = port_of(kafka_peer)
    coordinator_of(port, "orders")
    producer = Producer({"bootstrap.servers": kafka_peer.bootstrap, "transactional.id": "orders"})
    producer.init_transactions(patience(TIMEOUT_S))
    for _ in range(2):
        producer.begin_transaction()
        producer.produce(topic, b"x")
        producer.commit_transaction(patience(TIMEOUT_S))
    records = records_of(port)
    assert len(records) >= 5
    for record in records:
        assert record.value[:2] == b"\x00\x01"
        decoded = decode_value(record.value)
        again = encode_value(decoded, 1)
        if len(decoded.partitions) > 1:  # of another test's transaction, in the order of a hash table
            assert (decode_value(again), len(again)) == (decoded, len(record.value))
        else:
            assert again == record.value


# -- Apache Kafka's tools and the Java client -------------------------------------------------------


@pytest.fixture
def java(tmp_path) -> Callable[..., str]:
    """Run a tool of Apache Kafka; its output."""
    tools = JavaTools("", tmp_path)
    return lambda tool, *arguments: tools.raw(tool, *arguments).checked().out


def test_the_java_client_copies_exactly_once(narrow, java):
    """Its TransactionalMessageCopier consumes, produces and commits offsets in transactions, some aborted."""
    create_topic(narrow, "source")
    create_topic(narrow, "target")
    plain = Producer({"bootstrap.servers": narrow.bootstrap})
    for number in range(200):
        plain.produce("source", b"%d" % number)
    plain.flush(patience(TIMEOUT_S))
    java(
        "transactional-copier",
        *("--broker-list", narrow.bootstrap, "--input-topic", "source", "--input-partition", "0"),
        *("--output-topic", "target", "--consumer-group", "copiers", "--transactional-id", "copier"),
        *(
            "--transaction-size",
            "17",
            "--max-messages",
            "200",
            "--enable-random-aborts",
            "--use-group-metadata",
        ),
    )
    assert read(narrow, "target", 1_000) == [b"%d" % number for number in range(200)]


def test_kafkas_tools_read_and_list(narrow, java):
    create_topic(narrow, "flights", 2)
    create_topic(narrow, "delays")
    story(narrow.port)
    expected = len(records_of(narrow.port))
    decoded = java(
        "console-consumer",
        *("--bootstrap-server", narrow.bootstrap, "--topic", TRANSACTIONS_TOPIC, "--from-beginning"),
        *("--formatter", "org.apache.kafka.tools.consumer.TransactionLogMessageFormatter"),
        *("--consumer-property", "exclude.internal.topics=false", "--timeout-ms", "120000"),
        *("--max-messages", str(expected)),
    )
    assert decoded.count('"transactionalId":"orders"') == expected == len(records_of(narrow.port))
    assert '"topic":"flights"' in decoded
    tool = "transactions"
    server = ("--bootstrap-server", narrow.bootstrap)
    listed = java(tool, *server, "list")
    assert "orders" in listed
    assert "Empty" in listed
    described = java(tool, *server, "describe", "--transactional-id", "orders")
    assert "70000" in described
    producers = java(tool, *server, "describe-producers", "--topic", "flights", "--partition", "0")
    assert len(producers.splitlines()) == 2


def test_a_hanging_transaction_is_found_and_ended_by_the_tool(broker_factory, java):
    """Verification turned off, so that one can come to be at all."""
    broker = broker_factory(
        transaction_state_log_num_partitions=5, transaction_partition_verification_enable="false"
    )
    create_topic(broker, "flights")
    coordinator_of(broker.port, "orders")
    producer = RawProducer(broker.port, "orders")
    producer.begin()
    assert producer.produce("flights", 0, b"hanging") is ErrorCode.none  # in no transaction
    assert read(broker, "flights", 1) == []
    tool = "transactions"
    server = ("--bootstrap-server", broker.bootstrap)
    found = java(
        tool, *server, "find-hanging", "--broker-id", str(broker.id), "--max-transaction-timeout", "0"
    )
    assert "flights" in found
    java(tool, *server, "abort", "--topic", "flights", "--partition", "0", "--start-offset", "0")
    plain = Producer({"bootstrap.servers": broker.bootstrap})
    plain.produce("flights", b"behind")
    plain.flush(patience(TIMEOUT_S))
    assert read(broker, "flights", 1) == [b"behind"]
    client = producer.leader
    (topic,) = client.ask(
        Api.DESCRIBE_PRODUCERS, 0, topics=[{"name": "flights", "partition_indexes": [0]}]
    ).topics
    assert topic.partitions[0].active_producers[0].current_txn_start_offset == -1
