"""A coordinator that dies at named points of a commit: its client's retry succeeds, and what the restarted
one answers is what the log has."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from millrace.broker.protocol.batch import iterate_batches
from tests.cluster.raw_offsets import commit, committed, find_coordinator
from tests.cluster.three_brokers import read_all
from tests.cluster.transactional import create_topic
from tests.conftest import BrokerFactory
from tests.points.fault import FaultAt, until
from tests.servers import BrokerProcess

pytestmark = [pytest.mark.java, pytest.mark.safety]

DEADLINE_S = 90.0
TOPIC, GROUP = "t", "g"


@pytest.fixture
def aside() -> Iterator[ThreadPoolExecutor]:
    """For the client's call during which the broker dies."""
    with ThreadPoolExecutor(1) as thread:
        yield thread


def test_group_coordinator_dies_between_a_commit_s_append_and_its_answer_and_once_restarted_knows_it(
    broker_factory: BrokerFactory, fault_at: FaultAt, aside: ThreadPoolExecutor
) -> None:
    """First nobody asks again: what was appended counts. Then a client does, and is answered."""
    broker = broker_factory(start=False)
    fault = fault_at(broker, "offsets appended, commit not answered", nth=2)
    broker.start()
    create_topic(broker, TOPIC)
    find_coordinator(broker, GROUP)
    until(lambda: commit(broker, GROUP, TOPIC, 5) == 0, "the first commit is taken")
    with pytest.raises((EOFError, OSError)):
        commit(broker, GROUP, TOPIC, 9)
    fault.wait_until_died()
    fault = fault_at(broker, "offsets appended, commit not answered")
    broker.start()
    assert told(broker) == 9
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": GROUP, "log_level": 0})

    def commit_by_consumer() -> bool:
        consumer.commit(offsets=[TopicPartition(TOPIC, 0, 12)], asynchronous=False)
        return True

    retrying = aside.submit(until, commit_by_consumer, "the retry succeeds", retry=(KafkaException,))
    fault.wait_until_died()
    broker.start()
    retrying.result()
    assert told(broker) == 12
    consumer.close()


def told(broker: BrokerProcess) -> int:
    """The group's offset, once its coordinator has read its log."""
    return until(lambda: committed(broker, GROUP, TOPIC), "the group's offset is told")


def test_transaction_coordinator_dies_before_and_between_the_markers_and_once_restarted_writes_them(
    broker_factory: BrokerFactory, fault_at: FaultAt, aside: ThreadPoolExecutor
) -> None:
    broker = broker_factory(start=False, transaction_state_log_num_partitions=1)
    fault = fault_at(broker, "marker of the first partition written, of the second not")
    broker.start()
    create_topic(broker, TOPIC, 2)
    producer = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": "tx", "log_level": 0})
    producer.init_transactions(DEADLINE_S)

    def carry_out(first: int) -> Future[None]:
        producer.begin_transaction()
        for number in range(first, first + 6):
            producer.produce(TOPIC, b"%d" % number, partition=number % 2)
        return aside.submit(producer.commit_transaction, DEADLINE_S)

    committing = carry_out(0)
    fault.wait_until_died()
    assert markers(broker) == [1, 0]
    fault = fault_at(broker, "commit decided, no marker written", nth=3)  # of the second one
    broker.start()
    committing.result()
    until(lambda: markers(broker)[1] == 1, "the interrupted transaction is completed")
    until(lambda: sorted(read_all(broker.bootstrap, TOPIC, 2)) == list(range(6)), "and shown")
    before = markers(broker)
    committing = carry_out(6)
    fault.wait_until_died()
    assert markers(broker) == before
    broker.start()
    committing.result()
    until(lambda: sorted(read_all(broker.bootstrap, TOPIC, 2)) == list(range(12)), "all is committed")


def markers(broker: BrokerProcess) -> list[int]:
    """How many control batches are in the log of each partition."""
    contents = [(broker.data / f"{TOPIC}-{number}" / f"{0:020d}.log").read_bytes() for number in (0, 1)]
    return [sum(header.is_control for _, header in iterate_batches(each)) for each in contents]
