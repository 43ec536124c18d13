"""What an audited consumer says that its application got, and how far it lets its group go on: no more than
is true, whatever ends a call or takes a partition away. No broker is needed for that."""

from __future__ import annotations

import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from millrace.audit.clients.consumer_counts import UNREADABLE
from millrace.audit.consumer import AuditedConsumer
from millrace.audit.contract.events import EventLedger
from millrace.audit.contract.group_counts import Claim, claim_of, group_doubts
from millrace.audit.contract.header import HEADER_KEY, encode_identity, encode_prefix
from tests.waiting import patience

REVOKED = [TopicPartition("flights", 0)]


class Client(Consumer):
    """What the audited consumer calls: `batches` are what `consume` brings, one a call; one may be called."""

    def __init__(self, *configs: Any, **settings: Any):
        super().__init__(*configs, **settings)
        self.batches: list[Any] = []
        self.committed: list[tuple[int, int]] = []
        self.stored: list[tuple[int, int]] = []

    def consume(self, num_messages: int = 1, timeout: float = -1) -> Any:
        batch = self.batches.pop(0)
        return batch() if callable(batch) else batch

    def commit(self, offsets: Any = (), asynchronous: bool = True, **_: Any) -> Any:
        self.committed += [(each.partition, each.offset) for each in offsets]
        return offsets

    def store_offsets(self, offsets: Any = (), **_: Any) -> None:
        self.stored += [(each.partition, each.offset) for each in offsets]


class Scripted(AuditedConsumer, Client):  # type: ignore[misc]
    """Whose client is that."""


class Connection:
    """For events: it delivers them, or is down. `meanwhile` is done while they are under way."""

    def __init__(self, meanwhile: Any = lambda: None):
        self.is_down = False
        self.events: list[tuple[bytes, bytes]] = []
        self._meanwhile = meanwhile

    def produce(self, _topic: str, value: bytes, key: bytes, _partition: int, on_delivery: Any) -> None:
        if self.is_down:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        self.events.append((key, value))
        on_delivery(None, None)

    def flush(self, _timeout: float) -> int:
        self._meanwhile()
        return 0

    def purge(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def consumer() -> Any:
    made: Any = Scripted(
        {"bootstrap.servers": "127.0.0.1:1", "group.id": "billing", "log_level": 0},
        **{"millrace.report.interval.ms": 3_600_000, "millrace.report.timeout.ms": 1},
    )
    made._topic_ready, made._events = True, Connection()
    wakes, made._wake = made._wake, threading.Event()  # its reporting thread rests
    yield made
    made.close()
    wakes.set()


def record(sequence: int, partition: int = 0, headers: Any = None) -> Any:
    header = encode_identity(encode_prefix("00000000000000aa"), sequence, 1_000, b"AA")
    return SimpleNamespace(
        error=lambda: None,
        topic=lambda: "flights",
        partition=lambda: partition,
        offset=lambda: sequence,
        leader_epoch=lambda: None,
        key=lambda: None,
        value=lambda: b"v",
        headers=headers or (lambda: [(HEADER_KEY, header)]),
    )


def told(consumer: Any) -> EventLedger:
    assert consumer.report(patience())
    ledger = EventLedger()
    for key, value in consumer._events.events:
        ledger.add(key, value)
    return ledger


def seen(ledger: EventLedger) -> set[int]:
    return {number for event in ledger.tiers.values() for number in event.seen}


# --- records that the application did not get ---------------------------------------------------------


def interrupt() -> Any:
    raise KeyboardInterrupt


def test_what_was_fetched_by_a_call_that_is_interrupted_the_application_has_not_got(
    consumer: Any,
) -> None:
    consumer.batches = [[record(1)], [record(2), record(3)], interrupt]
    assert len(consumer.consume(1, 60)) == 1
    with pytest.raises(KeyboardInterrupt):
        consumer.consume(100, 60)
    assert seen(told(consumer)) == {1}
    assert consumer.stored == [(0, 2)]


def test_records_of_several_fetches_are_told_and_stored_when_they_are_handed_out(consumer: Any) -> None:
    consumer.batches = [[record(1), record(2, partition=1)], [], [record(3)]]
    assert len(consumer.consume(3, 60)) == 3
    assert seen(told(consumer)) == {1, 2, 3}
    assert sorted(consumer.stored) == [(0, 4), (1, 3)]


def test_of_a_partition_that_goes_during_a_consume_nothing_is_stored_after_it(consumer: Any) -> None:
    def rebalance() -> list[Any]:
        consumer._before(None)(consumer, REVOKED)
        return [record(3, partition=1)]

    consumer.batches = [[record(1), record(2, partition=1)], rebalance]
    assert len(consumer.consume(3, 60)) == 3
    assert seen(told(consumer)) == {1, 2, 3}
    assert consumer.stored == [(1, 4)]


# --- records whose headers the client cannot read -----------------------------------------------------


def test_a_group_that_got_a_record_which_nobody_could_count_is_in_doubt(consumer: Any) -> None:
    """It may be one that the audit misses: then it is not lost."""

    def unreadable() -> Any:
        raise SystemError("returned a result with an exception set")

    consumer._count([record(1), record(2, headers=unreadable), record(3)])
    assert consumer.untrusted() == {UNREADABLE: 1}
    ledger = told(consumer)
    assert seen(ledger) == {1, 3} and consumer.stored == [(0, 4)]
    ((doubt,),) = group_doubts(ledger).values()
    assert "counted 1 records that none of its events tells of" in doubt.sentence


def test_and_so_it_is_when_its_session_got_nothing_else(consumer: Any) -> None:
    consumer._count([record(1, headers=lambda: "é".encode("latin-1").decode())])
    told(consumer)
    session, count = claim_of(consumer._mark) or ("", 0)
    doubts = group_doubts(EventLedger(), {("billing", session): Claim(count)})
    assert count == 1 and list(doubts) == ["billing"]


FOREIGN_HEADER = """
import asyncio, os
from confluent_kafka import Producer, TopicPartition
from millrace.audit.consumer import AuditedConsumer
from millrace.broker.client.cluster import Cluster
from millrace.broker.client import producer as ours

class Latin1(str):
    def encode(self, *_, **__): return b"caf\\xe9"

async def fill():
    async with Cluster("test", [address]) as cluster:
        producer = ours.Producer(cluster)
        for number in range(40):  # by then the interpreter has a short way for the call
            name = "x" if number < 39 else Latin1("x")
            await producer.send("t", key=None, value=b"%d" % number, headers=[(name, b"1")], partition=0)
        await producer.flush()
        await producer.close()

mock = Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "x", "log_level": 0})
(broker,) = mock.list_topics("t", timeout=30).brokers.values()
address = f"{broker.host}:{broker.port}"
while not mock.list_topics("t", timeout=30).topics["t"].partitions: pass
asyncio.run(fill())
consumer = AuditedConsumer(
    {"bootstrap.servers": address, "group.id": "g", "auto.offset.reset": "earliest", "log_level": 0}
)
consumer.assign([TopicPartition("t", 0, 0)])
for number in range(40):
    message = consumer.poll()
    assert message.error() is None and message.value() == b"%d" % number
print(consumer.untrusted(), flush=True)
os._exit(0)
"""


def test_a_header_whose_key_is_no_utf8_kills_no_consumer() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FOREIGN_HEADER], capture_output=True, text=True, timeout=patience()
    )
    assert (done.returncode, UNREADABLE in done.stdout) == (0, True), done.stderr


# --- commits that outlive their partition -------------------------------------------------------------


def test_what_waits_for_a_report_when_its_partition_goes_is_not_committed_after_it(consumer: Any) -> None:
    """Somebody else has gone on from there: it would set the group back."""
    consumer._events.is_down = True
    consumer._count([record(4), record(5, partition=1)])
    consumer.commit()
    consumer.store_offsets(offsets=[TopicPartition("flights", 0, 5), TopicPartition("flights", 1, 6)])
    consumer._let_go(REVOKED)
    consumer._events.is_down = False
    assert consumer.report(patience())
    assert consumer.committed == [(1, 6)] and set(consumer.stored) == {(1, 6)}


def test_nor_what_a_report_that_is_under_way_meanwhile_covers(consumer: Any) -> None:
    under_way, goes_on = threading.Event(), threading.Event()

    def meanwhile() -> None:
        under_way.set()
        assert goes_on.wait(patience())

    consumer._events = Connection(meanwhile)
    consumer._count([record(4), record(5, partition=1)])
    consumer.commit()
    reporting = threading.Thread(target=consumer._publish_report, args=(patience(),))
    reporting.start()
    assert under_way.wait(patience())
    consumer._let_go(REVOKED)
    goes_on.set()
    reporting.join()
    consumer._apply_reported()
    assert consumer.committed == consumer.stored == [(1, 6)]


def test_what_the_applications_callback_commits_goes_out_while_it_may(consumer: Any) -> None:
    consumer._count([record(4)])
    going = consumer._before(
        lambda *_: consumer.commit(offsets=[TopicPartition("flights", 0, 3)], asynchronous=True)
    )
    going(consumer, REVOKED)
    assert consumer.committed == [(0, 3)]
    assert consumer._commits == consumer._reported == []
