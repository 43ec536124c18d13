"""What a record's delivery report does to its producer's counts.

Made by `producer`, called by confluent-kafka where the application polls. The callback that travels with a
record is a bound method whose `self` is the record's number: of all that confluent-kafka can call, that is
the cheapest to make, and it is one object a record, because what waits with a record is walked by collections
of garbage meanwhile. A `Destination` has the functions, one for a window and a callback of the application.

Must stay true: an acknowledgement is added to `fresh` in one call, number and size and digest together, for a
report may be made by another thread between any two calls. Nothing here refers to the producer, so that one
that is dropped ends at once.

Which errors say that a record surely does not exist? Not even *purged from the queue*: a request that got no
answer goes back into that queue to be sent again, while its first copy may be in the broker's log (a test
shows it). It is proof only where nothing is ever sent twice (`retries` 0). Every other error is ambiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from confluent_kafka import KafkaError

from millrace.audit.clients.recovery import ProducerJournal
from millrace.audit.clients.session import Arrivals, StreamSession, WindowCounts
from millrace.audit.clients.transaction_counts import OpenTransaction

DeliveryCallback = Callable[[Any, Any], None]
Report = Callable[[int, KafkaError | None, Any], None]
Take = Callable[[tuple[int, int]], None]


def first_given(*callbacks: DeliveryCallback | None) -> DeliveryCallback | None:
    """Which may be false, as a list that can be called."""
    return next((each for each in callbacks if each is not None), None)


class ToldAlways:
    """A callback that hears of every record, whatever the application wants to hear."""

    __slots__ = ()


SEQUENCE_MASK = (1 << 64) - 1
DIGEST_SHIFT = 64


class Destination:
    """Where the records of one window (in one transaction) are counted.

    `record` is to be bound to a record's number: its sequence, and with content its digest above that
    (`DIGEST_SHIFT`). `last` is (callback, function): the function counts as `record` does and then calls that
    callback of the application's, which is most often the next record's too; the two are read together, for
    threads may use several. `take` is all that `record` does for an acknowledgement, None where it does more.
    """

    __slots__ = ("last", "only_errors", "record", "take")

    def __init__(self, record: Report, only_errors: bool, take: Take | None = None):
        self.record = record
        self.last: tuple[DeliveryCallback | None, Report] = (None, record)
        self.only_errors = only_errors
        self.take = take

    def bind(self, number: int, callback: DeliveryCallback | None) -> Callable[[Any, Any], None]:
        """The delivery callback of one record."""
        if callback is None:
            return MethodType(self.record, number)
        told, function = self.last
        # A bound method of the application's is another object each time, but equal. Other equals are others.
        if callback is not told and not (type(callback) is MethodType and callback == told):
            function = self._telling(callback)
            self.last = (callback, function)
        return MethodType(function, number)

    def _telling(self, callback: DeliveryCallback) -> Report:
        record, take = self.record, self.take
        only_errors = self.only_errors and not isinstance(callback, ToldAlways)
        if take is not None and not only_errors:

            def take_and_tell(sequence: int, error: KafkaError | None, message: Any) -> None:
                if error is None:
                    take((sequence, len(message)))
                else:
                    record(sequence, error, message)
                callback(error, message)

            return take_and_tell

        def record_and_tell(number: int, error: KafkaError | None, message: Any) -> None:
            record(number, error, message)
            if error is not None or not only_errors:
                callback(error, message)

        return record_and_tell


class DeliveryReports:
    """Makes the destinations of a producer's records.

    `sent_once`: the client never sends a record again. `only_errors`: all that the application wants to hear
    (`delivery.report.only.error`).
    """

    def __init__(self, journal: ProducerJournal | None, *, sent_once: bool, only_errors: bool = False):
        self._journal = journal
        self._sent_once = sent_once
        self._only_errors = only_errors

    def destination(
        self, stream: StreamSession, window: WindowCounts, transaction: OpenTransaction | None
    ) -> Destination:
        """Kept in `window.destination`; in a transaction, as long as that lasts."""
        arrivals: Arrivals = window if transaction is None else transaction.hold(stream, window)
        undelivered = self._undelivered
        take, content = arrivals.fresh.extend, stream.content
        landed = None if transaction is None else transaction.landed

        def record(sequence: int, error: KafkaError | None, message: Any) -> None:
            if error is None:
                take((sequence, len(message)))
            else:
                undelivered(stream, window, sequence, error)

        def record_in_detail(number: int, error: KafkaError | None, message: Any) -> None:
            sequence = number & SEQUENCE_MASK
            if error is not None:
                undelivered(stream, window, sequence, error)
            else:
                take(
                    (sequence, len(message), number >> DIGEST_SHIFT) if content else (sequence, len(message))
                )
            if landed is not None:
                landed()

        if content or landed is not None:
            return Destination(record_in_detail, self._only_errors)
        return Destination(record, self._only_errors, take)

    def in_doubt(self, stream: StreamSession, window: WindowCounts, sequence: int) -> None:
        """Nobody knows whether the record exists."""
        stream.mark_ambiguous(window, sequence)
        if self._journal is not None:
            self._journal.not_acknowledged(stream, window)

    def _undelivered(
        self, stream: StreamSession, window: WindowCounts, sequence: int, error: KafkaError
    ) -> None:
        if not (self._sent_once and error.code() == KafkaError._PURGE_QUEUE):
            self.in_doubt(stream, window, sequence)
            return
        stream.mark_failed(window, sequence)
        if self._journal is not None:
            self._journal.not_acknowledged(stream, window)
