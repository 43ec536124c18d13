"""What happens to audited producers without a call (reports at every interval, exit, fork), and their end.

Set up by `producer`. The reporting thread holds no reference between two reports, so that a producer that is
dropped ends; the registry is weak for the same reason. Its finalizer hands it to that thread, which closes
it: a finalizer runs wherever a reference is let go, an event loop too, and must not wait there.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import math
import os
import threading
import time
import weakref
from typing import Any, Protocol

from millrace.audit.clients.client_errors import is_fatal

_log = logging.getLogger("millrace.audit.producer")

EXIT_TIMEOUT_S = 5.0


class Living(Protocol):
    """What an audited producer has to offer."""

    @property
    def refusal(self) -> str | None:
        """Why it works no more."""

    def report(self) -> None: ...

    def close(self, timeout: float = -1) -> bool: ...

    def forked(self) -> list[Any]:
        """In a child: refuse to work from now on; returns the clients that must never end."""


_living: weakref.WeakSet[Any] = weakref.WeakSet()


class ReportingThread(threading.Thread):
    """Reports at every interval and whenever `wake` is set; closes a producer that was dropped unclosed."""

    def __init__(self, producer: Living, interval_s: float) -> None:
        super().__init__(name="millrace-audit-reports", daemon=True)
        self.wake = threading.Event()
        self._reference = weakref.ref(producer)
        self._interval_s = interval_s
        self._dropped: Living | None = None
        self._is_over = False

    def close_dropped(self, producer: Living) -> None:
        """By its finalizer: it lives on until it is closed."""
        self._dropped = producer
        _closing.add(self)
        self.wake.set()

    def end(self) -> None:
        """The producer was closed."""
        self._is_over = True
        self.wake.set()

    def run(self) -> None:
        while not self._is_over:
            self.wake.wait(self._interval_s)
            self.wake.clear()
            dropped, self._dropped = self._dropped, None
            if dropped is not None:
                _close(dropped)
                del dropped
                _closing.discard(self)
                return
            self._report()

    def _report(self) -> None:
        producer = self._reference()
        if producer is None or producer.refusal is not None:
            return
        try:
            producer.report()
        except Exception:
            _log.exception("the audit's report failed; the next one will hold what this one did not say")


_closing: set[ReportingThread] = set()


def begin(producer: Living, reporting: ReportingThread) -> None:
    """Start the reporting thread, and look after the producer until it is closed."""
    _living.add(producer)
    reporting.start()


def end(producer: Living, reporting: ReportingThread) -> None:
    """It was closed."""
    _living.discard(producer)
    reporting.end()


def drain(client: Any, timeout_s: float, raised: list[Exception]) -> int:
    """`flush` to its end, whatever callbacks raise meanwhile; returns how many records are left.

    Without an `error_cb` the client raises a fatal error from here, once; that is told by `produce` already.
    A client that was closed raises for ever; it holds no record, as one that is through does.
    """
    deadline = math.inf if timeout_s < 0 else time.monotonic() + timeout_s
    while True:
        try:
            return int(client.flush(seconds_left(deadline)))
        except Exception as error:
            if not is_fatal(error):
                raised.append(error)
        if client.__len__() == 0:  # by its name, for the client may be a `super()`
            return 0


def seconds_left(deadline: float, *, share: int = 1, unlimited: float = -1.0) -> float:
    """A part of the time to the deadline; `unlimited` when there is none (-1: wait for ever)."""
    return unlimited if deadline == math.inf else max((deadline - time.monotonic()) / share, 0.0)


def _close(producer: Living) -> None:
    try:
        producer.close(EXIT_TIMEOUT_S)
    except Exception:
        _log.exception("an audited producer was not closed in order")  # the others are all the same


def _close_at_exit() -> None:
    """An application that only flushed before it ended still closes its streams."""
    for producer in list(_living):
        _close(producer)
    for thread in list(_closing):
        thread.join(EXIT_TIMEOUT_S)


def _refuse_in_child() -> None:
    """After a fork numbers, journal and connection are the parent's.

    The child's copies of the clients are kept alive for ever: the end of one would wait for its threads,
    which do not exist in the child.
    """
    for producer in list(_living):
        for client in producer.forked():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))


atexit.register(_close_at_exit)
os.register_at_fork(after_in_child=_refuse_in_child)
