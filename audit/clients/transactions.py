"""A transactional producer's transactions: which one is open, and what becomes of its records when it ends.

Held by `producer`, whose calls drive it. A transaction is ended here when the client says that it is over;
an error that can be retried, or that asks for an abort, leaves its records pending. `lock` is held while a
record is numbered and handed over, so that it counts with the transaction that it is sent in; None for a
producer without transactions, for which all of this does nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from confluent_kafka import KafkaException

from millrace.audit.clients.recovery import ProducerJournal
from millrace.audit.clients.transaction_counts import OpenTransaction, Outcome


class Transactions:
    """Safe from any thread."""

    def __init__(self, transactional: bool, journal: ProducerJournal | None) -> None:
        self.lock = threading.RLock() if transactional else None
        self.open: OpenTransaction | None = None
        self._journal = journal

    def begin(self, begin: Callable[[], None]) -> None:
        """`begin` is the client's. What came before and was never ended has an unknown end."""
        with self.lock or contextlib.nullcontext():
            begin()
            self.end(self.open, Outcome.UNKNOWN)
            self.open = OpenTransaction()

    def finish(self, finish: Callable[[], None], outcome: Outcome) -> None:
        """`finish` is the client's commit or abort; raises what it raises."""
        transaction = self.open
        try:
            finish()
        except KafkaException as error:
            if error.args[0].fatal():  # only this is the last word
                self.end(transaction, Outcome.UNKNOWN)
            elif self._journal is not None:
                self._journal.settle()
            raise
        self.end(transaction, outcome)

    def end(self, transaction: OpenTransaction | None, outcome: Outcome) -> None:
        """Settle the records of a transaction that is over."""
        if transaction is None or self.lock is None:
            return
        with self.lock:
            transaction.end(outcome)
            if self.open is transaction:
                self.open = None
            for stream, window in transaction.windows():
                window.destination = None
                if self._journal is not None and outcome is not Outcome.COMMITTED:
                    self._journal.not_acknowledged(stream, window)
        if self._journal is not None:
            self._journal.settle()

    def forked(self) -> threading.RLock | None:
        """A lock made anew: a thread that held it does not exist in the child."""
        if self.lock is not None:
            self.lock = threading.RLock()
        return self.lock
