"""Clients of every library go on while the broker that they write to and read from moves to another port, and
to another host.

Only the first broker is named to them. The topics' one partition is on the second, alone: nobody else leads
it meanwhile, and whoever does not ask where it is now gets no further. librdkafka does the same in the random
faults (`tests/cluster/faults`), where brokers restart on another port.
"""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import aiokafka
import kafka
import pytest
from confluent_kafka import Consumer, KafkaException

from tests.cluster.several_brokers import move, three_millraces
from tests.cluster.three_brokers import ThreeBrokers
from tests.conftest import BrokerFactory
from tests.ports import free_port
from tests.waiting import patience, until
from tests.watermarks import end_offset
from tests.wire.client_face import GroupMember
from tests.wire.foreign_clients import AioKafka, KafkaPython
from tests.wire.java_tools import JavaTools

pytestmark = [pytest.mark.java, pytest.mark.long]
TIMEOUT_S = 120.0
ENOUGH = 100
PACE_S = 0.01
JAVA_RECORDS, JAVA_RATE = 4_000, 100


class Writing(threading.Thread):
    """Sends numbers, each when the one before is acknowledged, until it is told to end."""

    def __init__(self, send: Callable[[bytes], object]) -> None:
        super().__init__(daemon=True)
        self.acknowledged = 0
        self.failure: Exception | None = None
        self._send = send
        self._ending = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            while not self._ending.wait(PACE_S):
                self._send(b"%d" % self.acknowledged)
                self.acknowledged += 1
        except Exception as problem:
            self.failure = problem

    def end(self) -> int:
        self._ending.set()
        self.join(patience(TIMEOUT_S))
        assert self.failure is None and not self.is_alive(), self.failure
        return self.acknowledged


@pytest.fixture
def brokers(module_broker_factory: BrokerFactory) -> ThreeBrokers:
    return three_millraces(module_broker_factory, 2)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever, daemon=True)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join(patience(TIMEOUT_S))
    made.close()


def by_kafka_python(bootstrap: str, topic: str) -> Callable[[bytes], object]:
    producer = kafka.KafkaProducer(bootstrap_servers=bootstrap, acks="all", enable_idempotence=True)
    return lambda value: producer.send(topic, value, partition=0).get(timeout=patience(TIMEOUT_S))


def by_aiokafka(bootstrap: str, topic: str, loop: asyncio.AbstractEventLoop) -> Callable[[bytes], object]:
    async def begin() -> aiokafka.AIOKafkaProducer:
        producer = aiokafka.AIOKafkaProducer(bootstrap_servers=bootstrap, enable_idempotence=True)
        await producer.start()
        return producer

    producer = asyncio.run_coroutine_threadsafe(begin(), loop).result(patience(TIMEOUT_S))

    def send(value: bytes) -> object:
        sent = producer.send_and_wait(topic, value, partition=0)
        return asyncio.run_coroutine_threadsafe(sent, loop).result(patience(TIMEOUT_S))

    return send


def end_of(bootstrap: str, topic: str) -> int:
    """Of the log; asked until the broker that has it is there."""

    def ask() -> int | None:
        consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "looks", "log_level": 0})
        try:
            return end_offset(consumer, topic, 0, 10.0) + 1
        except KafkaException:
            return None
        finally:
            consumer.close()

    return int(until(ask, f"the end of {topic}", within_s=TIMEOUT_S, every_s=0.2)) - 1


def offsets_of(reader: GroupMember) -> list[int]:
    """Of the records that it got, in their order, each once: what was not committed may come again."""
    return list(dict.fromkeys(record.offset for record in reader.records))


def test_clients_of_other_libraries_follow_a_broker_to_another_port_and_another_host(
    brokers: ThreeBrokers, loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    named = brokers.brokers[1].bootstrap
    topics = ["of-kafka-python", "of-aiokafka", "of-java"]
    for topic in topics:
        brokers.create_on(topic, (2,))
        brokers.wait_led(topic, 0, 2)
    writers = [
        Writing(by_kafka_python(named, topics[0])),
        Writing(by_aiokafka(named, topics[1], loop)),
    ]
    readers = [
        library.member_type(named, f"readers-{topic}", topic)
        for library, topic in zip((KafkaPython, AioKafka), topics, strict=False)
    ]
    tools = JavaTools(named, tmp_path)
    of_java = [
        ("producer-performance", "--num-records", str(JAVA_RECORDS), "--throughput", str(JAVA_RATE),
         "--record-size", "20", "--producer-props", f"bootstrap.servers={named}", "acks=all"),
        ("console-consumer", "--bootstrap-server", named, "--partition", "0", "--offset", "earliest",
         "--max-messages", str(JAVA_RECORDS)),
    ]  # fmt: skip
    java = [
        subprocess.Popen(
            tools.command(tool, "--topic", topics[2], *words), stdout=(tmp_path / tool).open("wb")
        )
        for tool, *words in of_java
    ]
    try:
        for host in ("127.0.0.1", "127.0.0.2"):
            before = [writer.acknowledged for writer in writers]
            read = [len(offsets_of(reader)) for reader in readers]
            written = end_of(named, topics[2])

            def go_on(before=before, read=read, written=written) -> bool:
                assert all(writer.failure is None for writer in writers), [each.failure for each in writers]
                return (
                    all(w.acknowledged >= b + ENOUGH for w, b in zip(writers, before, strict=True))
                    and all(len(offsets_of(r)) >= b + ENOUGH for r, b in zip(readers, read, strict=True))
                    and end_of(named, topics[2]) >= written + ENOUGH
                )

            until(go_on, "all of them go on", within_s=TIMEOUT_S, every_s=0.2)
            assert java[0].poll() is None, "it has ended before the broker moved"
            move(brokers.brokers[2], free_port(), host)
        counts = [writer.acknowledged + ENOUGH for writer in writers]
        until(
            lambda: all(w.acknowledged >= count for w, count in zip(writers, counts, strict=True)),
            "they write to where it is now",
            within_s=TIMEOUT_S,
        )
        ends = [writer.end() for writer in writers]
        assert [end_of(named, topic) for topic in topics[:2]] == ends
        for reader, end in zip(readers, ends, strict=True):
            until(
                lambda reader=reader, end=end: offsets_of(reader) == list(range(end)),
                lambda reader=reader: f"{len(offsets_of(reader))} of them came; {reader.failure}",
                within_s=TIMEOUT_S,
            )
            values = {record.offset: record.value for record in reader.records}
            assert values == {number: b"%d" % number for number in range(end)}
            reader.leave()
        assert [each.wait(patience(TIMEOUT_S)) for each in java] == [0, 0]
        assert end_of(named, topics[2]) == JAVA_RECORDS
        assert len((tmp_path / "console-consumer").read_bytes().splitlines()) == JAVA_RECORDS
    finally:
        for each in java:
            each.kill()
            each.wait()
