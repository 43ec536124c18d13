"""A broker that dies at named points of its log's work: after an ordinary start every acknowledged record is
there once and in order, and what its client sends again is not there twice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from confluent_kafka import Producer

from millrace.broker.storage.checkpoints import RECOVERY_POINT_CHECKPOINT, read_offsets
from tests.cluster.three_brokers import read_all
from tests.cluster.transactional import create_topic
from tests.conftest import BrokerFactory
from tests.points.fault import FaultAt, until
from tests.raw_client import RawClient, batch_of
from tests.servers import BrokerProcess

pytestmark = [pytest.mark.java, pytest.mark.safety]

DEADLINE_S = 90.0
BATCHES, PER_BATCH = 12, 5
SETTLED = BATCHES * PER_BATCH
SMALL_SEGMENTS = {"segment.bytes": "250", "index.interval.bytes": "1"}
TOPIC = "t"
IDEMPOTENT = {
    "enable.idempotence": True,
    "linger.ms": 20,
    "batch.num.messages": PER_BATCH,
    "retry.backoff.ms": 20,
    "reconnect.backoff.ms": 20,
    "reconnect.backoff.max.ms": 100,
    "log_level": 0,
}


class Numbers:
    """Numbers 0, 1, 2, … in batches of five, by an idempotent producer that sends again what it must."""

    def __init__(self, broker: BrokerProcess, first: int = 0) -> None:
        self.acknowledged = list(range(first))
        self.sent = first
        self._producer = Producer({"bootstrap.servers": broker.bootstrap, **IDEMPOTENT})

    def send(self, batches: int = BATCHES) -> None:
        """Nothing is waited for: the broker may be about to die."""
        for number in range(self.sent, self.sent + batches * PER_BATCH):
            self._producer.produce(TOPIC, b"%d" % number, on_delivery=self._settled)
        self.sent += batches * PER_BATCH

    def _settled(self, error: object, message: object) -> None:
        assert error is None, error
        self.acknowledged.append(int(message.value()))  # type: ignore[attr-defined]

    def settle(self) -> None:
        assert self._producer.flush(DEADLINE_S) == 0
        assert self.acknowledged == list(range(self.sent))


def restart_and_check(broker: BrokerProcess, numbers: Numbers) -> None:
    """Starts the broker as anybody would; the producer gets rid of all it has, and some more."""
    broker.start()
    numbers.send(batches=2)
    numbers.settle()
    check(broker, numbers.sent)


def check(broker: BrokerProcess, count: int) -> None:
    assert read_all(broker.bootstrap, TOPIC) == list(range(count))
    assert "cannot be opened" not in broker.log and "Traceback" not in broker.log


def go_on(broker: BrokerProcess, first: int) -> None:
    """A new producer's numbers from `first` on follow what is there."""
    numbers = Numbers(broker, first)
    numbers.send(batches=2)
    numbers.settle()
    check(broker, numbers.sent)


def log_files(broker: BrokerProcess) -> list[Path]:
    return sorted((broker.data / f"{TOPIC}-0").glob("*.log"))


def recovery_point(broker: BrokerProcess) -> int:
    return read_offsets(broker.data / RECOVERY_POINT_CHECKPOINT).get((TOPIC, 0), 0)


def test_broker_dies_between_append_and_answer_and_has_each_record_once(
    broker_factory: BrokerFactory, fault_at: FaultAt
) -> None:
    broker = broker_factory(start=False)
    fault = fault_at(broker, "batches appended, answer not made", nth=4)
    broker.start()
    create_topic(broker, TOPIC)
    numbers = Numbers(broker)
    numbers.send()
    fault.wait_until_died()
    restart_and_check(broker, numbers)


def test_broker_dies_between_flush_and_recovery_point_and_loses_nothing(
    broker_factory: BrokerFactory, fault_at: FaultAt
) -> None:
    broker = broker_factory(start=False)
    fault = fault_at(broker, "log flushed, recovery point not written", nth=3)
    broker.start()
    create_topic(broker, TOPIC, config={"flush.messages": "10"})
    numbers = Numbers(broker)
    numbers.send()
    fault.wait_until_died()
    assert recovery_point(broker) == 0
    restart_and_check(broker, numbers)


def test_broker_dies_before_the_recovery_point_has_its_name_and_loses_nothing(
    broker_factory: BrokerFactory, fault_at: FaultAt
) -> None:
    broker = broker_factory(start=False, log_flush_offset_checkpoint_interval_ms=50)
    fault = fault_at(broker, "recovery point written aside, not renamed", nth=2)
    broker.start()
    create_topic(broker, TOPIC, config={"flush.messages": "1"})
    numbers = Numbers(broker)
    numbers.send(batches=1)
    numbers.settle()
    until(lambda: recovery_point(broker) == numbers.sent, "the first recovery point is written")
    numbers.send()
    fault.wait_until_died()
    assert recovery_point(broker) == PER_BATCH
    restart_and_check(broker, numbers)
    until(lambda: recovery_point(broker) == numbers.sent, "the recovery point is written after all")


def test_recovery_point_that_finds_no_room_for_its_name_is_written_later(
    broker_factory: BrokerFactory, fault_at: FaultAt
) -> None:
    broker = broker_factory(start=False, log_flush_offset_checkpoint_interval_ms=50)
    fault = fault_at(broker, "recovery point written aside, not renamed", "fail", error="ENOSPC")
    broker.start()
    create_topic(broker, TOPIC, config={"flush.messages": "1"})
    numbers = Numbers(broker)
    numbers.send()
    numbers.settle()
    fault.wait_until_reached()
    until(lambda: recovery_point(broker) == numbers.sent, "the recovery point is written")
    check(broker, numbers.sent)


def test_broker_dies_at_each_point_of_a_roll_and_has_each_record_once(
    broker_factory: BrokerFactory, fault_at: FaultAt
) -> None:
    broker = broker_factory(start=False)
    fault = fault_at(broker, "roll: new segment made, index of the old one not written", nth=2)
    broker.start()
    create_topic(broker, TOPIC, config=SMALL_SEGMENTS)
    numbers = Numbers(broker)
    numbers.send()
    fault.wait_until_died()
    sizes = [path.stat().st_size for path in log_files(broker)]
    assert len(sizes) == 3 and sizes[-1] == 0, sizes
    for point in ("roll: index written, producers not", "roll: both written, batch not appended"):
        fault = fault_at(broker, point)
        broker.launch()
        numbers.send()
        fault.wait_until_died()
        assert log_files(broker)[-1].stat().st_size == 0
    restart_and_check(broker, numbers)


def test_broker_dies_again_between_two_segments_of_a_recovery_and_recovers_whole(
    broker_factory: BrokerFactory, fault_at: FaultAt
) -> None:
    broker = killed_with_segments(broker_factory)
    fault = fault_at(broker, "recovery: two segments recovered, the others not")
    broker.launch()
    fault.wait_until_died()
    broker.start()
    check(broker, SETTLED)
    go_on(broker, SETTLED)


def test_broker_dies_again_at_each_point_where_a_recovery_cuts_and_recovers_whole(
    broker_factory: BrokerFactory, fault_at: FaultAt
) -> None:
    """What a loss of power may leave where pages reached the disk in another order: a hole. The longest good
    prefix stays, and offsets are given again only behind it."""
    broker = killed_with_segments(broker_factory)
    logs = log_files(broker)
    os.truncate(logs[1], logs[1].stat().st_size - 7)
    kept = int(logs[2].stem) - PER_BATCH
    fault = fault_at(broker, "recovery: torn batch cut off, indexes not rebuilt")
    broker.launch()
    fault.wait_until_died()
    assert log_files(broker) == logs
    fault = fault_at(broker, "recovery: first log after the torn one removed")
    broker.launch()
    fault.wait_until_died()
    assert log_files(broker) == [*logs[:2], *logs[3:]]
    broker.start()
    check(broker, kept)
    go_on(broker, kept)


def killed_with_segments(broker_factory: BrokerFactory) -> BrokerProcess:
    """A broker that was killed when twelve batches of five in six segments were in the page cache alone."""
    broker = broker_factory()
    create_topic(broker, TOPIC, config=SMALL_SEGMENTS)
    with RawClient(broker.port) as client:
        for first in range(0, SETTLED, PER_BATCH):
            batch = batch_of(*(b"%d" % number for number in range(first, first + PER_BATCH)))
            (answer,) = client.produce({(TOPIC, 0): batch}, acks=-1)
            assert (answer.error_code, answer.base_offset) == (0, first)
    broker.kill()
    broker.end_session()
    assert len(log_files(broker)) > 4 and recovery_point(broker) == 0
    return broker


def test_broker_dies_at_each_point_of_a_compaction_s_renames_and_has_the_newest_of_each_key(
    broker_factory: BrokerFactory, fault_at: FaultAt
) -> None:
    """The last of the points comes in the start that finishes what the death before it interrupted."""
    broker = broker_factory(start=False, log_cleaner_backoff_ms=50)
    fault = fault_at(broker, "compaction: indexes have their final names, the log has not")
    broker.start()
    compacted = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.01"}
    create_topic(broker, TOPIC, config=SMALL_SEGMENTS | compacted)
    producer = Producer({"bootstrap.servers": broker.bootstrap, **IDEMPOTENT})

    def send(first: int) -> None:
        for number in range(first, first + 40):
            producer.produce(TOPIC, b"%d" % number, key=b"%d" % (number % 4))
            producer.poll(0.001)

    send(0)
    fault.wait_until_died()
    assert list((broker.data / f"{TOPIC}-0").glob("*.log.swap"))
    fault = fault_at(broker, "compaction: new segment counts, old ones not removed")
    broker.launch()
    send(40)
    fault.wait_until_died()
    fault = fault_at(broker, "compaction: indexes of the first old segment removed, its log not")
    broker.launch()
    fault.wait_until_died()
    broker.start()
    send(80)
    assert producer.flush(DEADLINE_S) == 0
    assert broker.log.count("a compaction was interrupted and has been finished") == 2

    def is_compacted() -> bool:
        found = read_all(broker.bootstrap, TOPIC)
        assert found == sorted(set(found)) and found[-4:] == [116, 117, 118, 119]
        return len(found) < 20

    until(is_compacted, "the compaction goes on")
    assert "cannot be opened" not in broker.log and "Traceback" not in broker.log
