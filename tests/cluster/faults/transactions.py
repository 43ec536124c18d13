"""Transactional load: a producer that commits, aborts and dies, and a copier that reads, writes and commits
offsets in one transaction.

Both do with an error what its flags ask for, as the documentation of librdkafka has it: try again, abort, or
begin anew with another instance. What became of a commit that nobody answered is left open (`UNKNOWN`) by
the writer; the copier learns it from its committed offsets.

Two habits of librdkafka, whatever the brokers are, make an instance useless: 2.13 and later never return from
`send_offsets_to_transaction` when the group's coordinator has vanished from the metadata for a while
(confluentinc/librdkafka#5511), and no version looks for a transaction coordinator that has come back under
its id at another address before the metadata missed it (`rd_kafka_txn_coord_set` sees the same broker). So a
call is given up after `STUCK_S`, tries of a call after `GIVE_UP_S`, and with them the instance.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_INVALID,
    Consumer,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)

from tests.cluster.faults.producers import CLIENT, PRODUCER
from tests.cluster.faults.records import (
    COPIES,
    EVENTS,
    ORDERS,
    TOPICS,
    TRANSFORMERS,
    Outcome,
    Transaction,
    TransactionJournal,
    value_of,
)
from tests.cluster.faults.workers import Worker

TRANSACTION_TIMEOUT_MS = 15_000
CALL_S = 5.0
STUCK_S = 7.0
GIVE_UP_S = 15.0
MOST_RECORDS = 20
MOST_COPIED = 200
ABORTED_SHARE = 0.25
ABANDONED_SHARE = 0.03
BETWEEN_S = 0.1


class BeginAnew(Exception):
    """The producer instance is of no use any more."""


class Aborted(Exception):
    """The transaction had to be aborted, and has been."""


class TransactionalClient:
    """One transactional id, by one producer instance after the other. Raises BeginAnew, Aborted."""

    def __init__(self, transactional_id: str, bootstrap: str, stopping: Callable[[], bool]) -> None:
        self._settings: dict[str, Any] = {
            **PRODUCER,
            "bootstrap.servers": bootstrap,
            "transactional.id": transactional_id,
            "transaction.timeout.ms": TRANSACTION_TIMEOUT_MS,
            "delivery.timeout.ms": TRANSACTION_TIMEOUT_MS,
        }
        self._stopping = stopping
        self._producer: Producer | None = None
        self._stuck: list[Producer] = []
        """Never to be collected: that would wait for the call that never returns."""
        self.errors: dict[str, int] = {}

    @property
    def producer(self) -> Producer:
        """An instance that has fenced all before it."""
        if self._producer is None:
            fresh = Producer(self._settings)
            self._call("init", lambda: fresh.init_transactions(CALL_S))
            self._producer = fresh
        return self._producer

    def discard(self) -> None:
        """This instance is not used any more; what it left open, the next one ends."""
        self._producer = None

    def purge(self) -> None:
        if self._producer is not None:
            self._producer.purge()

    def commit(self) -> None:
        self._abortable("commit", lambda: self.producer.commit_transaction(CALL_S))

    def abort(self) -> None:
        self._call("abort", lambda: self.producer.abort_transaction(CALL_S))

    def do(self, work: Callable[[], None]) -> None:
        """Anything within a transaction."""
        self._abortable("do", work)

    def send_offsets(self, positions: list[TopicPartition], metadata: Any) -> None:
        producer = self.producer
        outcome: list[Exception | None] = []

        def send() -> None:
            try:
                producer.send_offsets_to_transaction(positions, metadata, CALL_S)
                outcome.append(None)
            except KafkaException as error:
                outcome.append(error)

        def bounded() -> None:
            outcome.clear()
            sender = threading.Thread(target=send, daemon=True)
            sender.start()
            sender.join(STUCK_S)
            if sender.is_alive():
                self._count("stuck")
                self._stuck.append(producer)
                self.discard()
                raise BeginAnew("send_offsets_to_transaction does not return")
            if outcome and outcome[0] is not None:
                raise outcome[0]

        self._abortable("offsets", bounded)

    def _abortable(self, what: str, work: Callable[[], None]) -> None:
        try:
            self._call(what, work)
        except KafkaException as error:
            if not error.args[0].txn_requires_abort():
                self.discard()
                raise BeginAnew(str(error)) from error
            self.abort()
            raise Aborted(str(error)) from error

    def _count(self, what: str) -> None:
        self.errors[what] = self.errors.get(what, 0) + 1

    def _call(self, what: str, work: Callable[[], None]) -> None:
        """Again and again while the error says that this may help, for `GIVE_UP_S`."""
        deadline = time.monotonic() + GIVE_UP_S
        while True:
            try:
                return work()
            except KafkaException as failure:
                error: KafkaError = failure.args[0]
                self._count(f"{what} {error.name()}")
                if error.fatal() or self._stopping() or time.monotonic() > deadline:
                    self.discard()
                    raise BeginAnew(str(error)) from failure
                if not error.retriable():
                    if error.txn_requires_abort():
                        raise
                    self.discard()
                    raise BeginAnew(str(error)) from failure


class Writer(Worker):
    """Transactions of a few records over all partitions of a topic; some are aborted, some abandoned."""

    def __init__(self, name: str, bootstrap: str, seed: int) -> None:
        super().__init__(name)
        self.journal = TransactionJournal(name, ORDERS)
        self.client = TransactionalClient(name, bootstrap, self._stop.is_set)
        self._draw = random.Random(f"{name} {seed}")
        self._number = 0

    def step(self) -> None:
        transaction = Transaction(f"{self.name} #{len(self.journal.transactions)}")
        coin = self._draw.random()
        try:
            producer = self.client.producer
            self.client.do(producer.begin_transaction)
        except (BeginAnew, Aborted):
            return
        self.journal.transactions.append(transaction)
        try:
            for _ in range(self._draw.randint(1, MOST_RECORDS)):
                self._send(producer, transaction)
            if coin < ABANDONED_SHARE:
                producer.poll(0.2)
                self.client.discard()
                transaction.outcome = Outcome.ABORTED
            elif coin < ABORTED_SHARE:
                if self._draw.random() < 0.5:
                    producer.flush(1.0)
                transaction.outcome = Outcome.ABORTED  # nobody asked for anything else, whatever comes
                self.client.abort()
            else:
                transaction.outcome = Outcome.UNKNOWN
                self.client.commit()
                transaction.outcome = Outcome.COMMITTED
        except Aborted:
            transaction.outcome = Outcome.ABORTED
        except BeginAnew:
            if transaction.outcome is Outcome.OPEN:
                transaction.outcome = Outcome.ABORTED
        self.pause(BETWEEN_S)

    def _send(self, producer: Producer, transaction: Transaction) -> None:
        number, self._number = self._number, self._number + 1
        partition = self._draw.randrange(TOPICS[ORDERS])
        value = value_of(self.name, number, self._draw)
        transaction.records.append((partition, number))
        self.client.do(lambda: producer.produce(ORDERS, value, partition=partition))

    def settle(self) -> bool:
        # What an abandoned instance left open, its successor ends: nothing is open when this halts.
        try:
            return self.client.producer is not None
        except (BeginAnew, Aborted):
            return False

    def close(self) -> None:
        self.client.purge()


class Copier(Worker):
    """Copies every event once, to the same partition of another topic, whatever happens meanwhile."""

    def __init__(self, name: str, bootstrap: str, seed: int) -> None:
        super().__init__(name)
        self.client = TransactionalClient(name, bootstrap, self._stop.is_set)
        self._draw = random.Random(f"{name} {seed}")
        self._settings = {
            **CLIENT,
            "bootstrap.servers": bootstrap,
            "group.id": TRANSFORMERS,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            "session.timeout.ms": 8_000,
            "heartbeat.interval.ms": 1_000,
            "fetch.wait.max.ms": 100,
        }
        self._consumer: Consumer | None = None
        self.copied_count = 0

    def step(self) -> None:
        try:
            self._copy_some()
        except BeginAnew:
            self._leave()
        except Aborted:
            self._rewind()

    def _copy_some(self) -> None:
        producer = self.client.producer  # first: it settles what the one before left open
        consumer = self._consumer
        if consumer is None:
            consumer = self._consumer = Consumer(self._settings)
            consumer.subscribe([EVENTS])
        messages = []
        for message in consumer.consume(MOST_COPIED, 0.3):
            if message.error() is None:
                messages.append(message)
        if not messages:
            return
        self.client.do(producer.begin_transaction)
        next_offsets: dict[int, int] = {}
        for message in messages:
            partition, value = message.partition(), message.value()
            next_offsets[partition] = message.offset() + 1

            def copy(partition: int = partition, value: bytes = value) -> None:
                producer.produce(COPIES, value, partition=partition)

            self.client.do(copy)
        positions = [TopicPartition(EVENTS, partition, offset) for partition, offset in next_offsets.items()]
        metadata = consumer.consumer_group_metadata()
        self.client.send_offsets(positions, metadata)
        if self._draw.random() < ABORTED_SHARE / 2:
            self.client.abort()
            raise Aborted("on purpose")
        self.client.commit()
        self.copied_count += len(messages)

    def _rewind(self) -> None:
        """To what is committed: what was aborted is read again."""
        assert self._consumer is not None
        try:
            assigned = self._consumer.assignment()
            for known in self._consumer.committed(assigned, CALL_S):
                known.offset = OFFSET_BEGINNING if known.offset == OFFSET_INVALID else known.offset
                self._consumer.seek(known)
        except KafkaException:
            self._leave()

    def _leave(self) -> None:
        """Another consumer begins where the group has committed."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None
        self.client.discard()

    def settle(self) -> bool:
        """Halts where everything there was has been copied, as the group's offsets say."""
        self.step()
        return self._consumer is not None and self._is_at_the_end(self._consumer)

    def _is_at_the_end(self, consumer: Consumer) -> bool:
        wanted = [TopicPartition(EVENTS, number) for number in range(TOPICS[EVENTS])]
        try:
            for known in consumer.committed(wanted, CALL_S):
                if max(known.offset, 0) < consumer.get_watermark_offsets(known, CALL_S)[1]:
                    return False
        except KafkaException:
            return False
        return True

    def close(self) -> None:
        self.client.purge()
        if self._consumer is not None:
            self._consumer.close()
