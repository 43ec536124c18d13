"""Transactions on one real broker and ZooKeeper, with foreign clients and with a raw one."""

from __future__ import annotations

import time

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from kio.schema.errors import ErrorCode

from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.hot_fetch import PartitionFetch
from tests.cluster.transactional import (
    SHOWN,
    TIMEOUT_S,
    RawProducer,
    coordinator_of,
    create_topic,
    read,
    transactional,
    until,
)
from tests.servers import BrokerProcess
from tests.waiting import Deadline, patience

pytestmark = pytest.mark.java  # ZooKeeper


def test_commit_and_abort_with_confluent(broker):
    create_topic(broker, "flights", 2)
    producer = transactional(broker, "orders")
    producer.init_transactions(patience(TIMEOUT_S))
    for number in range(6):
        producer.begin_transaction()
        for partition in range(2):
            producer.produce("flights", b"%d" % number, partition=partition)
        if number % 2:
            producer.abort_transaction(patience(TIMEOUT_S))
        else:
            producer.commit_transaction(patience(TIMEOUT_S))
    assert sorted(read(broker, "flights", 100, partitions=2)) == sorted([b"0", b"2", b"4"] * 2)
    assert len(read(broker, "flights", 100, isolation="read_uncommitted", partitions=2)) >= 6


def test_transactions_end_on_a_topic_whose_segments_are_smaller_than_a_marker(broker):
    """A marker has 78 bytes, a batch of one such record 69."""
    create_topic(broker, "t", config={"segment.bytes": "75"})
    producer = transactional(broker, "tx")
    producer.init_transactions(patience(TIMEOUT_S))
    for value, is_committed in ((b"a", True), (b"b", False), (b"c", True)):
        producer.begin_transaction()
        producer.produce("t", value)
        producer.flush(patience(TIMEOUT_S))
        end = producer.commit_transaction if is_committed else producer.abort_transaction
        end(patience(TIMEOUT_S))
    until(lambda: read(broker, "t", 2) == [b"a", b"c"], SHOWN, logs_of=[broker])


def test_a_second_producer_fences_the_first(broker):
    create_topic(broker, "flights")
    first = transactional(broker, "orders")
    first.init_transactions(patience(TIMEOUT_S))
    first.begin_transaction()
    first.produce("flights", b"of the first")
    first.flush(patience(TIMEOUT_S))
    second = transactional(broker, "orders")
    second.init_transactions(patience(TIMEOUT_S))  # aborts what the first had open
    with pytest.raises(KafkaException) as caught:
        first.commit_transaction(patience(TIMEOUT_S))
    assert caught.value.args[0].code() in (KafkaError._FENCED, KafkaError.PRODUCER_FENCED)
    second.begin_transaction()
    second.produce("flights", b"of the second")
    second.commit_transaction(patience(TIMEOUT_S))
    until(lambda: read(broker, "flights", 10) == [b"of the second"], SHOWN)


def test_nothing_behind_an_open_transaction_is_committed(broker):
    create_topic(broker, "flights")
    plain = Producer({"bootstrap.servers": broker.bootstrap})
    plain.produce("flights", b"before")
    plain.flush(patience(TIMEOUT_S))
    producer = transactional(broker, "orders", transaction_timeout_ms=60_000)
    producer.init_transactions(patience(TIMEOUT_S))
    producer.begin_transaction()
    producer.produce("flights", b"in it")
    producer.flush(patience(TIMEOUT_S))
    plain.produce("flights", b"behind")
    plain.flush(patience(TIMEOUT_S))
    assert read(broker, "flights", 10) == [b"before"]
    assert read(broker, "flights", 10, isolation="read_uncommitted") == [b"before", b"in it", b"behind"]
    producer.commit_transaction(patience(TIMEOUT_S))
    until(lambda: read(broker, "flights", 3) == [b"before", b"in it", b"behind"], SHOWN)


def test_a_transaction_that_takes_too_long_is_aborted(broker_factory):
    broker = broker_factory(transaction_abort_timed_out_transaction_cleanup_interval_ms=200)
    create_topic(broker, "flights")
    producer = transactional(broker, "orders", transaction_timeout_ms=1_500)
    producer.init_transactions(patience(TIMEOUT_S))
    producer.begin_transaction()
    producer.produce("flights", b"too late")
    producer.flush(patience(TIMEOUT_S))
    plain = Producer({"bootstrap.servers": broker.bootstrap})
    plain.produce("flights", b"behind")
    plain.flush(patience(TIMEOUT_S))
    until(lambda: read(broker, "flights", 10) == [b"behind"])
    assert "a transaction timed out" in broker.log
    with pytest.raises(KafkaException):
        producer.commit_transaction(patience(TIMEOUT_S))


def test_consume_transform_produce(broker):
    """Each message of one topic goes to another once, offsets committed in the same transaction."""
    create_topic(broker, "source", 2)
    create_topic(broker, "target")
    plain = Producer({"bootstrap.servers": broker.bootstrap})
    for number in range(40):
        plain.produce("source", b"%d" % number, partition=number % 2)
    plain.flush(patience(TIMEOUT_S))
    carried = 0
    for attempt in range(3):  # a new member and producer each time, as after a crash
        consumer = Consumer(
            {
                "bootstrap.servers": broker.bootstrap,
                "group.id": "transformers",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "isolation.level": "read_committed",
            }
        )
        consumer.subscribe(["source"])
        producer = transactional(broker, "transformer")
        producer.init_transactions(patience(TIMEOUT_S))
        for batch in range(3):
            messages = consumer.consume(5, 10.0)
            if not messages:
                break
            producer.begin_transaction()
            for message in messages:
                assert message.error() is None
                producer.produce("target", message.value() + b"!")
            producer.send_offsets_to_transaction(
                consumer.position(consumer.assignment()), consumer.consumer_group_metadata(), TIMEOUT_S
            )
            if batch == 2 and attempt < 2:
                producer.abort_transaction(patience(TIMEOUT_S))  # and its messages come again
            else:
                producer.commit_transaction(patience(TIMEOUT_S))
                carried += len(messages)
        consumer.close()
    # The rest.
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": "transformers",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )
    consumer.subscribe(["source"])
    producer = transactional(broker, "transformer")
    producer.init_transactions(patience(TIMEOUT_S))
    deadline = Deadline(lambda: f"40 messages; {carried} were carried", within_s=TIMEOUT_S, logs_of=[broker])
    while carried < 40:
        deadline.check()
        messages = consumer.consume(100, 0.5)
        if not messages:
            continue
        producer.begin_transaction()
        for message in messages:
            producer.produce("target", message.value() + b"!")
        producer.send_offsets_to_transaction(
            consumer.position(consumer.assignment()), consumer.consumer_group_metadata(), TIMEOUT_S
        )
        producer.commit_transaction(patience(TIMEOUT_S))
        carried += len(messages)
    consumer.close()
    carried_once = sorted(b"%d!" % number for number in range(40))
    until(lambda: sorted(read(broker, "target", 1_000)) == carried_once, SHOWN)


# -- with a raw client ------------------------------------------------------------------------------


@pytest.fixture
def flights(broker: BrokerProcess) -> BrokerProcess:
    create_topic(broker, "flights", 2)
    coordinator_of(broker.port, "orders")
    return broker


def test_a_batch_without_an_open_transaction_is_refused(flights):
    """A hanging transaction cannot come to be: the leader asks the coordinator first (KIP-890)."""
    producer = RawProducer(flights.port, "orders")
    assert producer.begin() is ErrorCode.none
    assert producer.produce("flights", 0, b"x", version=10) is ErrorCode.invalid_txn_state
    assert producer.produce("flights", 0, b"x", version=11) is ErrorCode.transaction_abortable
    assert producer.add("flights", 0) is ErrorCode.none
    assert producer.produce("flights", 1, b"x") is ErrorCode.invalid_txn_state  # another partition
    assert producer.produce("flights", 0, b"x") is ErrorCode.none
    producer.end_everywhere()
    # Late: its transaction is over.
    assert producer.produce("flights", 0, b"late") is ErrorCode.invalid_txn_state
    assert producer.produce("flights", 0, b"x", transactional_id="other") is (
        ErrorCode.invalid_producer_id_mapping
    )
    assert producer.produce("flights", 0, b"x", transactional_id=None) is (
        ErrorCode.transactional_id_authorization_failed
    )
    assert read(flights, "flights", 10, partitions=2) == [b"x"]


def test_a_repeated_batch_is_stored_once_also_over_transactions(flights):
    producer = RawProducer(flights.port, "orders")
    producer.begin()
    for number in range(3):
        producer.add_until_accepted("flights", 0)
        assert producer.produce("flights", 0, b"%d" % number) is ErrorCode.none
        assert producer.produce("flights", 0, b"%d" % number, sequence=number) is ErrorCode.none
        producer.end_everywhere()
    assert read(flights, "flights", 10, partitions=2) == [b"0", b"1", b"2"]


def test_a_gap_in_the_first_batches_is_refused(flights):
    producer = RawProducer(flights.port, "orders")
    producer.begin()
    assert producer.produce("flights", 0, b"a") is ErrorCode.invalid_txn_state
    producer.add("flights", 0)
    # Sequence 0 was refused: 1 must not go in before it.
    assert producer.produce("flights", 0, b"b", sequence=1) is ErrorCode.out_of_order_sequence_number
    assert producer.produce("flights", 0, b"a", sequence=0) is ErrorCode.none
    assert producer.produce("flights", 0, b"b", sequence=1) is ErrorCode.none


def test_fencing_by_version(flights):
    old, new = RawProducer(flights.port, "orders"), RawProducer(flights.port, "orders")
    old.begin()
    old.add("flights", 0)
    assert old.produce("flights", 0, b"old") is ErrorCode.none
    new.begin()
    assert (new.producer_id, new.epoch) == (old.producer_id, old.epoch + 2)
    assert old.produce("flights", 0, b"old") is ErrorCode.invalid_producer_epoch
    for version in range(2):
        assert old.add("flights", 0, version=version) is ErrorCode.invalid_producer_epoch
        assert old.end(version=version) is ErrorCode.invalid_producer_epoch
    for version in range(2, 4):
        assert old.add("flights", 0, version=version) is ErrorCode.producer_fenced
    for version in range(2, 5):
        assert old.end(version=version) is ErrorCode.producer_fenced
    former = {"producer_id": old.producer_id, "producer_epoch": old.epoch}
    assert old.begin(3, **former) is ErrorCode.invalid_producer_epoch
    assert old.begin(4, **former) is ErrorCode.producer_fenced
    assert old.begin(5, **former) is ErrorCode.producer_fenced
    assert read(flights, "flights", 10, partitions=2) == []


def test_requests_that_make_no_sense(flights):
    producer = RawProducer(flights.port, "orders")
    assert producer.end() is ErrorCode.invalid_producer_id_mapping
    assert producer.begin(timeout_ms=900_001) is ErrorCode.invalid_transaction_timeout
    assert producer.begin(timeout_ms=0) is ErrorCode.invalid_transaction_timeout
    assert producer.begin(producer_id=5) is ErrorCode.invalid_request
    assert producer.begin(producer_epoch=5) is ErrorCode.invalid_request
    assert RawProducer(flights.port, "").begin() is ErrorCode.invalid_request
    assert producer.begin() is ErrorCode.none
    assert producer.end() is ErrorCode.invalid_txn_state
    assert producer.add("nowhere", 0) is ErrorCode.unknown_topic_or_partition
    answer = producer.coordinator.ask(
        Api.ADD_PARTITIONS_TO_TXN,
        3,
        v3_and_below_transactional_id="orders",
        v3_and_below_producer_id=producer.producer_id,
        v3_and_below_producer_epoch=producer.epoch,
        v3_and_below_topics=[{"name": "flights", "partitions": [0, 9]}],
    )
    results = answer.results_by_topic_v3_and_below[0].results_by_partition
    assert [result.partition_error_code for result in results] == [
        ErrorCode.operation_not_attempted,
        ErrorCode.unknown_topic_or_partition,
    ]
    assert producer.state() == "Empty"


def test_verification_between_brokers(flights):
    producer = RawProducer(flights.port, "orders")
    producer.begin()
    producer.add("flights", 0)
    for version in (4, 5):
        answer = producer.coordinator.ask(
            Api.ADD_PARTITIONS_TO_TXN,
            version,
            transactions=[
                {
                    "transactional_id": name,
                    "producer_id": producer.producer_id,
                    "producer_epoch": producer.epoch,
                    "verify_only": True,
                    "topics": [{"name": "flights", "partitions": [0, 1]}],
                }
                for name in ("orders", "unknown")
            ],
        )
        errors = {
            result.transactional_id: [
                partition.partition_error_code for partition in result.topic_results[0].results_by_partition
            ]
            for result in answer.results_by_transaction
        }
        assert errors == {
            "orders": [ErrorCode.none, ErrorCode.transaction_abortable],
            "unknown": [ErrorCode.invalid_producer_id_mapping] * 2,
        }
    # The same request without verify_only adds.
    producer.coordinator.ask(
        Api.ADD_PARTITIONS_TO_TXN,
        4,
        transactions=[
            {
                "transactional_id": "orders",
                "producer_id": producer.producer_id,
                "producer_epoch": producer.epoch,
                "verify_only": False,
                "topics": [{"name": "flights", "partitions": [1]}],
            }
        ],
    )
    assert producer.produce("flights", 1, b"x") is ErrorCode.none


def test_descriptions(flights):
    producer = RawProducer(flights.port, "orders")
    producer.begin()
    producer.add("flights", 1, 0)
    producer.produce("flights", 1, b"a", b"b")
    client = producer.coordinator
    (described, unknown, empty) = client.ask(
        Api.DESCRIBE_TRANSACTIONS, 0, transactional_ids=["orders", "unknown", ""]
    ).transaction_states
    assert described.error_code is ErrorCode.none
    assert (described.transaction_state, described.producer_id, described.producer_epoch) == (
        "Ongoing",
        producer.producer_id,
        producer.epoch,
    )
    assert described.transaction_timeout.total_seconds() == 60
    assert abs(described.transaction_start_time.timestamp() - time.time()) < 30
    assert [(topic.topic, topic.partitions) for topic in described.topics] == [("flights", (0, 1))]
    assert unknown.error_code is ErrorCode.transactional_id_not_found
    assert empty.error_code is ErrorCode.invalid_request
    listed = client.ask(
        Api.LIST_TRANSACTIONS, 0, state_filters=["Ongoing", "Sleeping"], producer_id_filters=[]
    )
    assert [each.transactional_id for each in listed.transaction_states] == ["orders"]
    assert listed.unknown_state_filters == ("Sleeping",)
    for filters in ({"state_filters": ["Empty"]}, {"producer_id_filters": [77]}, {"duration_filter": 60_000}):
        listed = client.ask(Api.LIST_TRANSACTIONS, 1, **{"duration_filter": -1, **filters})
        assert listed.transaction_states == ()
    (topic,) = client.ask(
        Api.DESCRIBE_PRODUCERS, 0, topics=[{"name": "flights", "partition_indexes": [0, 1, 2]}]
    ).topics
    nobody, one, missing = topic.partitions
    assert nobody.active_producers == ()
    (writer,) = one.active_producers
    assert (writer.producer_id, writer.producer_epoch, writer.last_sequence) == (
        producer.producer_id,
        producer.epoch,
        1,
    )
    assert (writer.current_txn_start_offset, writer.coordinator_epoch) == (0, -1)
    assert missing.error_code is ErrorCode.unknown_topic_or_partition
    producer.end_everywhere()
    (topic,) = client.ask(
        Api.DESCRIBE_PRODUCERS, 0, topics=[{"name": "flights", "partition_indexes": [1]}]
    ).topics
    (writer,) = topic.partitions[0].active_producers
    assert writer.current_txn_start_offset == -1
    assert writer.coordinator_epoch >= 0


def test_markers_of_a_coordinator_that_was_replaced_are_refused(flights):
    producer = RawProducer(flights.port, "orders")
    producer.begin()

    def end_by_marker(coordinator_epoch: int, epoch: int) -> ErrorCode:
        answer = producer.leader.ask(
            Api.WRITE_TXN_MARKERS,
            1,
            markers=[
                {
                    "producer_id": producer.producer_id,
                    "producer_epoch": epoch,
                    "transaction_result": False,
                    "topics": [{"name": "flights", "partition_indexes": [0]}],
                    "coordinator_epoch": coordinator_epoch,
                }
            ],
        )
        return answer.markers[0].topics[0].partitions[0].error_code

    producer.add("flights", 0)
    producer.produce("flights", 0, b"x")
    assert end_by_marker(7, producer.epoch) is ErrorCode.none
    assert end_by_marker(6, producer.epoch) is ErrorCode.transaction_coordinator_fenced
    assert end_by_marker(7, producer.epoch - 1) is ErrorCode.invalid_producer_epoch
    # The answer to a verification that was under way then would count for nothing; a new one does.
    assert producer.produce("flights", 0, b"y") is ErrorCode.none


def test_a_restart_keeps_idempotence_and_open_transactions(flights):
    producer = RawProducer(flights.port, "orders")
    producer.begin()
    producer.add("flights", 0)
    assert producer.produce("flights", 0, b"a", b"b") is ErrorCode.none
    for stop in (flights.stop, flights.kill):
        stop()
        flights.end_session()
        flights.start()
        coordinator_of(flights.port, "orders")
        again = RawProducer(flights.port, "orders")
        again.producer_id, again.epoch = producer.producer_id, producer.epoch
        until(lambda again=again: again.state() == "Ongoing")
        # Stored once, however often; its leader may know its office a moment later.
        assert until(
            lambda again=again: again.produce("flights", 0, b"a", b"b", sequence=0) is ErrorCode.none
        )
        assert again.produce("flights", 0, b"d", sequence=9) is ErrorCode.out_of_order_sequence_number
    assert again.produce("flights", 0, b"c", sequence=2) is ErrorCode.none
    assert again.end() is ErrorCode.none
    until(lambda: read(flights, "flights", 3, partitions=2) == [b"a", b"b", b"c"], SHOWN)


def test_an_id_that_nobody_uses_expires(broker_factory):
    broker = broker_factory(
        transactional_id_expiration_ms=300, transaction_remove_expired_transaction_cleanup_interval_ms=100
    )
    coordinator_of(broker.port, "orders")
    producer = RawProducer(broker.port, "orders")
    producer.begin()
    first = producer.producer_id
    until(lambda: producer.state() == "")
    producer.begin(producer_id=first, producer_epoch=0)
    assert (producer.producer_id, producer.epoch) == (first + 1, 0)
    broker.restart()
    coordinator_of(broker.port, "orders")
    assert "cannot be loaded" not in broker.log


def test_a_fetch_of_committed_data_names_what_was_aborted(flights):
    producer = RawProducer(flights.port, "orders")
    producer.begin()
    producer.add("flights", 0)
    producer.produce("flights", 0, b"a", b"b")
    producer.end_everywhere(committed=False)
    response = producer.leader.fetch(PartitionFetch("flights", 0, 0, 1 << 20), read_committed=True)
    (partition,) = response.partitions
    assert partition.last_stable_offset == 3
    assert list(partition.aborted) == [(producer.producer_id, 0)]
