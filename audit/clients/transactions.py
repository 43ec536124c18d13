"""A transactional producer's transactions: which one is open, and what becomes of its records when it ends.

Held by `producer`, whose calls drive it. A transaction is ended here when the client says that it is over;
an error that can be retried, or that asks for an abort, leaves its records pending. `lock` is held while a
record is numbered and handed over, so that it counts with the transaction that it is sent in; None for a
producer without transactions, for which all of this does nothing.

What a callback of the application's raises during a commit or an abort takes the place of the client's
answer, and nothing tells the two apart. So the client is asked again at once, and the records are pending
until it says more: where it is ready for another transaction, this one had ended as it was asked to.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable

from confluent_kafka import KafkaError

from millrace.audit.clients.client_errors import is_fatal, kafka_error
from millrace.audit.clients.producer_life import seconds_left
from millrace.audit.clients.recovery import ProducerJournal
from millrace.audit.clients.transaction_counts import OpenTransaction, Outcome

_log = logging.getLogger("millrace.audit.producer")

MAX_ABORTS = 10


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
            if self.open is not None:  # it is over, and no answer has said how it ended
                self.end(self.open, self.open.asked or Outcome.UNKNOWN)
            self.open = OpenTransaction()

    def finish(self, finish: Callable[[float], None], timeout_s: float, outcome: Outcome) -> None:
        """`finish` is the client's commit or abort; raises what it raises."""
        transaction = self.open
        try:
            self._ask(finish, timeout_s, outcome)
        except Exception as error:
            if self.open is transaction is not None and _may_hide_an_answer(error):
                with contextlib.suppress(Exception):
                    self._ask(finish, 0, outcome)
            if self._journal is not None:
                self._journal.settle()
            raise

    def abort_open(self, abort: Callable[[float], None], timeout_s: float, raised: list[Exception]) -> bool:
        """Before the client is closed: whether no transaction is left that its `close` would wait for.

        `raised` gets what a callback raises meanwhile.
        """
        deadline = math.inf if timeout_s < 0 else time.monotonic() + timeout_s
        for _ in range(MAX_ABORTS):  # a callback's error may have ended one before its end
            if self.open is None:
                break
            try:
                self.finish(abort, seconds_left(deadline), Outcome.ABORTED)
            except Exception as error:
                if is_fatal(error) or not _may_hide_an_answer(error):
                    _log.warning("the open transaction was not aborted: %s", error)
                    break
                if not _is_ready(error):
                    raised.append(error)
        return self.open is None

    def _ask(self, finish: Callable[[float], None], timeout_s: float, outcome: Outcome) -> None:
        transaction = self.open
        asked = None
        if transaction is not None:
            asked = transaction.asked
            transaction.asked = outcome if asked in (None, outcome) else Outcome.UNKNOWN
        try:
            finish(timeout_s)
        except Exception as error:
            if is_fatal(error):  # only this is the last word
                self.end(transaction, Outcome.UNKNOWN)
            elif asked is not None and _is_ready(error):
                self.end(transaction, asked)
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


def _may_hide_an_answer(error: Exception) -> bool:
    """Whether a callback may have raised it: one to try again, or that asks for an abort, is the client's."""
    carried = kafka_error(error)
    return carried is None or not (carried.retriable() or carried.txn_requires_abort())


def _is_ready(error: BaseException) -> bool:
    """Whether the client refuses to end a transaction because none is open. It has one code for all calls
    that come at the wrong time: the text has the state, which is another while a commit is under way.
    """
    answer = kafka_error(error)
    return answer is not None and answer.code() == KafkaError._STATE and "state Ready" in answer.str()
