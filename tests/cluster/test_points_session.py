"""A leader whose ZooKeeper session ends while it stands still at a named point: another one leads and takes
records meanwhile. When the first goes on, it answers for nothing that it no longer leads, its client's retry
succeeds, and the two logs become one."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.cluster.raw_offsets import commit, committed, find_coordinator
from tests.cluster.three_brokers import ThreeBrokers, read_all
from tests.conftest import BrokerFactory
from tests.points.fault import Fault, FaultAt, until
from tests.raw_client import RawClient, batch_of
from tests.servers import BrokerProcess

pytestmark = [pytest.mark.java, pytest.mark.safety]

TOPIC, GROUP, OFFSETS = "t", "g", "__consumer_offsets"
PRODUCER_ID = 4711
SETTINGS = {
    "offsets_topic_num_partitions": 1,
    "offsets_topic_replication_factor": 2,
    "replica_lag_time_max_ms": 60_000,  # who stands still for a moment must not leave the in-sync set
}


@pytest.fixture
def asking() -> Iterator[ThreadPoolExecutor]:
    """For the one request whose answer is long in coming."""
    with ThreadPoolExecutor(1) as thread:
        yield thread


class Two:
    """Brokers 1, which has the fault, and 2; `t-0` is led by 1 and followed by 2."""

    def __init__(self, make: BrokerFactory, fault_at: FaultAt, point: str, nth: int, **configs: str) -> None:
        self.fault: Fault | None = None

        def armed(**settings: object) -> BrokerProcess:
            broker = make(**{**settings, **SETTINGS})
            if broker.id == 1:
                self.fault = fault_at(broker, point, "wait", nth=nth)
            return broker

        self.cluster = ThreeBrokers(armed, 2)
        self.first, self.second = self.cluster.brokers.values()
        self.cluster.create_on(TOPIC, (1, 2), **configs)
        self.cluster.wait_in_sync(TOPIC, 0, 1, 2)

    def stand_still(self, topic: str = TOPIC) -> None:
        """Broker 1 is at the point; returns when its session has ended and broker 2 leads."""
        assert self.fault is not None and self.first.process is not None
        self.fault.wait_until_reached()
        self.first.process.send_signal(signal.SIGSTOP)
        until(lambda: self.cluster.partitions(topic, at=2)[0].leader_id == 2, "broker 2 leads")

    def go_on(self) -> None:
        assert self.fault is not None and self.first.process is not None
        self.fault.go()
        self.first.process.send_signal(signal.SIGCONT)

    def check(self, count: int) -> None:
        """Numbers 0, 1, 2, … are there once, in the log of either."""
        self.cluster.wait_in_sync(TOPIC, 0, 1, 2)
        assert sorted(read_all(self.cluster.bootstrap, TOPIC)) == list(range(count))
        until(lambda: log_of(self.first) == log_of(self.second), "the logs are the same")


def log_of(broker: BrokerProcess) -> bytes:
    paths = sorted((broker.data / f"{TOPIC}-0").glob("*.log"))
    return b"".join(path.read_bytes() for path in paths)


def send(broker: BrokerProcess, number: int, sequence: int, producer_id: int = PRODUCER_ID) -> int:
    """The error code of a batch of one record, acks=all."""
    batch = batch_of(b"%d" % number, producer_id=producer_id, producer_epoch=0, base_sequence=sequence)
    with RawClient(broker.port) as client:
        return int(client.produce({(TOPIC, 0): batch}, acks=-1)[0].error_code)


@pytest.mark.parametrize(
    ("point", "nth", "is_replicated"),
    [
        ("batches appended, answer not made", 3, False),
        ("roll: new segment made, index of the old one not written", 1, False),
        ("log flushed, recovery point not written", 1, True),
    ],
)
def test_leader_whose_session_ends_at_a_point_of_an_append_answers_for_nothing_it_no_longer_leads(
    broker_factory: BrokerFactory,
    fault_at: FaultAt,
    asking: ThreadPoolExecutor,
    point: str,
    nth: int,
    is_replicated: bool,
) -> None:
    """The third batch is the one. Where the flush alone stands still, on its thread, the follower may have
    the batch before the session ends."""
    size = len(batch_of(b"0"))
    configs = {"segment_bytes": str(2 * size), "flush_messages": "3"}
    two = Two(broker_factory, fault_at, point, nth, **configs)
    assert [send(two.first, number, number) for number in (0, 1)] == [0, 0]
    answer = asking.submit(send, two.first, 2, 2)
    if is_replicated:
        until(lambda: len(log_of(two.second)) == 3 * size, "broker 2 has it")
    two.stand_still()
    until(lambda: send(two.second, 3, 0, producer_id=PRODUCER_ID + 1) == 0, "broker 2 takes a record")
    two.go_on()
    code = answer.result()
    assert is_replicated or code != 0
    if code:
        until(lambda: send(two.second, 2, 2) == 0, "the retry succeeds")
    two.check(4)


def test_group_coordinator_whose_session_ends_between_append_and_answer_does_not_answer_for_the_commit(
    broker_factory: BrokerFactory, fault_at: FaultAt, asking: ThreadPoolExecutor
) -> None:
    two = Two(broker_factory, fault_at, "offsets appended, commit not answered", 2)
    until(lambda: find_coordinator(two.first, GROUP) > 0, "the offsets topic is there")
    two.cluster.reassign(OFFSETS, {0: (1, 2)})
    two.cluster.wait_in_sync(OFFSETS, 0, 1, 2)
    two.cluster.elect_in_the_end(OFFSETS, 0)
    two.cluster.wait_led(OFFSETS, 0, 1)
    until(lambda: commit(two.first, GROUP, TOPIC, 5) == 0, "the first commit is taken")
    answer = asking.submit(commit, two.first, GROUP, TOPIC, 9)
    two.stand_still(OFFSETS)
    until(lambda: commit(two.second, GROUP, TOPIC, 7) == 0, "broker 2 takes a commit")
    two.go_on()
    assert answer.result() != 0
    assert committed(two.second, GROUP, TOPIC) == 7
    assert commit(two.second, GROUP, TOPIC, 9) == 0
    assert committed(two.second, GROUP, TOPIC) == 9
    assert commit(two.first, GROUP, TOPIC, 11) != 0
    two.cluster.wait_in_sync(OFFSETS, 0, 1, 2)
    two.cluster.elect_in_the_end(OFFSETS, 0)
    until(lambda: committed(two.first, GROUP, TOPIC) == 9, "broker 1 coordinates again, and knows it")
