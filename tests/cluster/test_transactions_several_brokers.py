"""Transactions whose coordinator, leaders and replicas are on several real brokers."""

from __future__ import annotations

import os
import signal

import pytest
from confluent_kafka.admin import AdminClient
from kio.schema.errors import ErrorCode

from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.hot_fetch import PartitionFetch
from millrace.broker.protocol.hot_produce import decode_response, encode_request
from tests.cluster.transactional import (
    SHOWN,
    TIMEOUT_S,
    RawProducer,
    coordinator_of,
    create_topic,
    read,
    transactional,
    until,
    wait_for_brokers,
)
from tests.raw_client import RawClient, batch_of
from tests.servers import BrokerProcess
from tests.waiting import patience

pytestmark = pytest.mark.java  # ZooKeeper


@pytest.fixture
def pair(zookeeper, broker_factory) -> tuple[BrokerProcess, BrokerProcess]:
    """(the coordinator of "orders", the leader of flights-0): two brokers, one replica of everything."""
    path = zookeeper.chroot()
    settings = {"transaction_state_log_num_partitions": 1, "transaction_state_log_replication_factor": 1}
    brokers = [broker_factory(zookeeper_path=path, broker_id=number, **settings) for number in (1, 2)]
    wait_for_brokers(*brokers)
    port = coordinator_of(brokers[0].port, "orders")
    coordinator = next(broker for broker in brokers if broker.port == port)
    leader = next(broker for broker in brokers if broker.port != port)
    create_topic(coordinator, "flights", replica_assignment=[[leader.id]], replication_factor=-1)
    # The one that was asked knows of the leader; the leader itself may hear of it a moment later.
    with RawClient(leader.port) as asking:
        until(lambda: not asking.fetch(PartitionFetch("flights", 0, 0, 1)).partitions[0].error_code)
    return coordinator, leader


def test_coordinator_and_leader_on_different_brokers(pair):
    coordinator, leader = pair
    producer = RawProducer(leader.port, "orders", coordinator.port)
    producer.begin()
    # The leader has to ask the other broker.
    assert producer.produce("flights", 0, b"x", version=10) is ErrorCode.invalid_txn_state
    assert producer.produce("flights", 0, b"x", version=11) is ErrorCode.transaction_abortable
    for number in range(4):
        producer.add_until_accepted("flights", 0)
        assert producer.produce("flights", 0, b"%d" % number, b"") is ErrorCode.none
        producer.end_everywhere(committed=number % 2 == 0)
    assert read(leader, "flights", 10) == [b"0", b"", b"2", b""]


def test_batches_that_wait_for_verification_keep_their_order(pair):
    """Several requests on one connection before the coordinator has answered for the first."""
    coordinator, leader = pair
    producer = RawProducer(leader.port, "orders", coordinator.port)
    producer.begin()
    producer.add("flights", 0)
    frames = []
    for sequence in range(8):
        batch = batch_of(
            b"%d" % sequence,
            producer_id=producer.producer_id,
            producer_epoch=producer.epoch,
            base_sequence=sequence,
            transactional=True,
        )
        frames += encode_request(
            9, sequence, "raw", {("flights", 0): batch}, acks=-1, transactional_id="orders"
        )
    producer.leader.send(b"".join(frames))
    for _ in range(8):
        (answer,) = decode_response(producer.leader.receive(), 9)[0]
        assert ErrorCode(answer.error_code) is ErrorCode.none
    producer.end_everywhere()
    assert read(leader, "flights", 10) == [b"%d" % sequence for sequence in range(8)]


def test_a_coordinator_that_cannot_be_asked_makes_the_producer_come_again(pair):
    coordinator, leader = pair
    producer = RawProducer(leader.port, "orders", coordinator.port)
    producer.begin()
    producer.add("flights", 0)
    coordinator.kill()
    assert producer.produce("flights", 0, b"x") is ErrorCode.not_enough_replicas
    coordinator.start()
    until(lambda: producer.produce("flights", 0, b"x") is ErrorCode.none)


def test_a_commit_survives_the_death_of_its_coordinator(pair):
    """Killed between the answer to EndTxn and the markers, whose partition's leader is stopped."""
    coordinator, leader = pair
    producer = RawProducer(leader.port, "orders", coordinator.port)
    producer.begin()
    producer.add("flights", 0)
    assert producer.produce("flights", 0, b"kept") is ErrorCode.none
    assert leader.process is not None
    os.kill(leader.process.pid, signal.SIGSTOP)
    try:
        assert producer.end() is ErrorCode.none
        assert producer.state() == "PrepareCommit"
        coordinator.kill()
    finally:
        os.kill(leader.process.pid, signal.SIGCONT)
    assert read(leader, "flights", 1) == []
    coordinator.start()
    until(lambda: read(leader, "flights", 1) == [b"kept"])
    assert "a transaction is ended where the coordinator before this one stopped" in coordinator.log
    producer = RawProducer(leader.port, "orders", coordinator.port)
    assert producer.begin() is ErrorCode.none
    assert producer.epoch == 1


def test_markers_wait_for_a_leader_that_is_away(pair):
    coordinator, leader = pair
    producer = RawProducer(leader.port, "orders", coordinator.port)
    producer.begin()
    producer.add("flights", 0)
    assert producer.produce("flights", 0, b"kept") is ErrorCode.none
    leader.kill()
    assert producer.end() is ErrorCode.none
    assert producer.state() == "PrepareCommit"
    assert producer.add("flights", 0) is ErrorCode.concurrent_transactions
    leader.start()
    until(lambda: producer.state() == "CompleteCommit")
    assert read(leader, "flights", 1) == [b"kept"]


def test_a_deleted_topic_holds_no_transaction_up(pair):
    coordinator, leader = pair
    producer = RawProducer(leader.port, "orders", coordinator.port)
    producer.begin()
    producer.add("flights", 0)
    assert producer.produce("flights", 0, b"lost") is ErrorCode.none
    admin = AdminClient({"bootstrap.servers": leader.bootstrap})
    admin.delete_topics(["flights"])["flights"].result(patience(TIMEOUT_S))
    producer.end_everywhere()


def test_another_broker_takes_over_as_coordinator(zookeeper, broker_factory):
    """Three replicas of everything, of the coordinators' topics by default; the coordinator is killed after
    it has answered EndTxn."""
    path = zookeeper.chroot()
    settings = {
        "transaction_state_log_num_partitions": 1,
        "default_replication_factor": 3,
        "min_insync_replicas": 2,
    }
    brokers = [broker_factory(zookeeper_path=path, broker_id=number, **settings) for number in (1, 2, 3)]
    wait_for_brokers(*brokers)
    create_topic(brokers[0], "flights", 3, replication_factor=3)
    everywhere = ",".join(broker.bootstrap for broker in brokers)
    committed: list[bytes] = []
    producer = transactional(brokers[0], "orders", bootstrap_servers=everywhere)
    producer.init_transactions(patience(TIMEOUT_S))
    with RawClient(brokers[0].port) as client:
        (kept,) = client.ask(Api.METADATA, 9, topics=[{"name": "__transaction_state"}]).topics
    assert {len(part.replica_nodes) for part in kept.partitions} == {3}
    for round_number in range(3):
        port = coordinator_of(next(b.port for b in brokers if b.process.poll() is None), "orders")
        coordinator = next(broker for broker in brokers if broker.port == port)
        for number in range(5):
            value = b"%d-%d" % (round_number, number)
            producer.begin_transaction()
            for partition in range(3):
                producer.produce("flights", value, partition=partition)
            if number == 2:
                producer.flush(patience(TIMEOUT_S))
                coordinator.kill()
            if number % 2 and number != 3:
                producer.abort_transaction(patience(TIMEOUT_S))
            else:
                producer.commit_transaction(patience(TIMEOUT_S))
                committed.append(value)
        coordinator.start()
    committed_once = sorted(committed * 3)
    until(lambda: sorted(read(brokers[0], "flights", 1_000, partitions=3)) == committed_once, SHOWN)
