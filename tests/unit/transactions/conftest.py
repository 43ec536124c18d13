"""Drives one transactional id through virtual time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import pytest
from kio.schema.errors import ErrorCode

from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.transactions.state import Transaction
from millrace.broker.transactions.values import (
    Answer,
    Completed,
    Decision,
    Forget,
    NeedProducerId,
    ProducerIdentity,
    SendMarkers,
    TimedOut,
    TransactionRecord,
    Write,
)

A, B = ("flights", 0), ("flights", 1)
TIMEOUT_MS = 60_000


class TransactionDriver:
    """One `Transaction`, a virtual clock, a log, and everything that was ever decided.

    Writes succeed and markers arrive at once unless `holds_writes` and `holds_markers` say otherwise.
    """

    def __init__(self, transaction: Transaction | None = None) -> None:
        self.transaction = transaction or Transaction("orders")
        self.now_ms = 1_000
        self.tickets = itertools.count(1)
        self.producer_ids = itertools.count(4_000)
        self.answers: dict[int, Answer] = {}
        self.needs_id: set[int] = set()
        self.writes: list[Write] = []
        self.log: list[TransactionRecord | None] = []
        self.markers: list[SendMarkers] = []
        self.completed: list[bool] = []
        self.forgotten = False
        self.timeouts = 0
        self.holds_writes = False
        self.holds_markers = False

    def carry_out(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Answer(ticket):
                    assert ticket not in self.answers, "a ticket was answered twice"
                    self.answers[ticket] = decision
                case NeedProducerId(ticket):
                    self.needs_id.add(ticket)
                case Write():
                    self.writes.append(decision)
                    if not self.holds_writes:
                        self.written(decision)
                case SendMarkers():
                    self.markers.append(decision)
                    if not self.holds_markers:
                        self.marked(decision)
                case Completed(committed):
                    self.completed.append(committed)
                case Forget():
                    self.forgotten = True
                case TimedOut():
                    self.timeouts += 1

    def written(self, write: Write, error: ErrorCode = ErrorCode.none) -> None:
        if error in (ErrorCode.none, ErrorCode.not_enough_replicas_after_append):
            self.log.append(write.record)
        self.carry_out(self.transaction.written(write.write_id, error, self.now_ms))

    def marked(self, markers: SendMarkers, *partitions: TopicPartition) -> None:
        done = partitions or markers.partitions
        self.carry_out(self.transaction.marked(markers.producer, done, self.now_ms))

    def begin(
        self, expected: ProducerIdentity | None = None, timeout_ms: int = TIMEOUT_MS
    ) -> tuple[ErrorCode, ProducerIdentity]:
        """InitProducerId; draws a producer id where one is needed."""
        ticket = next(self.tickets)
        self.carry_out(self.transaction.begin_producer(timeout_ms, expected, ticket, self.now_ms))
        if ticket in self.needs_id:
            fresh = next(self.producer_ids)
            self.carry_out(self.transaction.begin_producer(timeout_ms, expected, ticket, self.now_ms, fresh))
        answer = self.answers.get(ticket)
        return (answer.error, answer.producer) if answer else (PENDING, ProducerIdentity())

    def started(self) -> ProducerIdentity:
        """A producer that has begun."""
        error, producer = self.begin()
        assert error is ErrorCode.none
        return producer

    def add(self, producer: ProducerIdentity, *partitions: TopicPartition) -> ErrorCode:
        ticket = next(self.tickets)
        self.carry_out(self.transaction.add_partitions(producer, partitions, ticket, self.now_ms))
        return self._error(ticket)

    def end(self, producer: ProducerIdentity, committed: bool = True) -> ErrorCode:
        ticket = next(self.tickets)
        self.carry_out(self.transaction.end(producer, committed, ticket, self.now_ms))
        return self._error(ticket)

    def verify(self, producer: ProducerIdentity, partition: TopicPartition = A) -> ErrorCode:
        return self.transaction.verify(producer, [partition])[partition]

    def check_timeout(self) -> None:
        self.carry_out(self.transaction.time_out(self.now_ms))

    def retry(self) -> None:
        self.carry_out(self.transaction.retry())

    def expire(self, expiration_ms: int = 100_000) -> None:
        self.carry_out(self.transaction.expire(self.now_ms, expiration_ms))

    def restarted(self) -> TransactionDriver:
        """The id at a new coordinator: what the log says, and nothing else."""
        record = self.log[-1]
        assert record is not None
        other = TransactionDriver(Transaction.restore("orders", record))
        other.now_ms, other.log = self.now_ms, self.log
        other.producer_ids = self.producer_ids
        other.holds_writes, other.holds_markers = self.holds_writes, self.holds_markers
        other.carry_out(other.transaction.resume(other.now_ms))
        return other

    def _error(self, ticket: int) -> ErrorCode:
        answer = self.answers.get(ticket)
        return answer.error if answer else PENDING


PENDING = ErrorCode.unknown_server_error
"""What the driver's calls return while their answer is still to come."""


@pytest.fixture
def driver() -> TransactionDriver:
    return TransactionDriver()


@pytest.fixture
def new_driver() -> Callable[..., TransactionDriver]:
    return TransactionDriver
