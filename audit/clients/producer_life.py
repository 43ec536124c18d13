"""What happens to audited producers without a call (reports at every interval, exit, fork), and their end.

Set up by `producer`. The reporting thread holds no reference between two reports, so that a producer that is
dropped ends; the registry is weak for the same reason.
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

from confluent_kafka import KafkaException

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


def begin(producer: Living, wake: threading.Event, interval_s: float) -> None:
    """Start the reporting thread, and look after the producer until it is closed."""
    _living.add(producer)
    threading.Thread(
        target=_report_regularly,
        args=(weakref.ref(producer), wake, interval_s),
        name="millrace-audit-reports",
        daemon=True,
    ).start()


def end(producer: Living) -> None:
    """It was closed."""
    _living.discard(producer)


def drain(client: Any, timeout_s: float, raised: list[Exception]) -> int:
    """`flush` to its end, whatever callbacks raise meanwhile; returns how many records are left.

    Without an `error_cb` the client raises a fatal error from here, once; that is told by `produce` already.
    """
    deadline = math.inf if timeout_s < 0 else time.monotonic() + timeout_s
    while True:
        try:
            return int(client.flush(seconds_left(deadline)))
        except KafkaException as error:
            if not error.args[0].fatal():
                raised.append(error)
        except Exception as error:
            raised.append(error)


def seconds_left(deadline: float, *, share: int = 1, unlimited: float = -1.0) -> float:
    """A part of the time to the deadline; `unlimited` when there is none (-1: wait for ever)."""
    return unlimited if deadline == math.inf else max((deadline - time.monotonic()) / share, 0.0)


def _report_regularly(reference: weakref.ref[Living], wake: threading.Event, interval_s: float) -> None:
    """At every interval, and at once when a stream opens."""
    while True:
        wake.wait(interval_s)
        wake.clear()
        producer = reference()
        if producer is None or producer.refusal is not None:
            return
        try:
            producer.report()
        except Exception:
            _log.exception("the audit's report failed; the next one will hold what this one did not say")
        del producer


def _close_at_exit() -> None:
    """An application that only flushed before it ended still closes its streams."""
    for producer in list(_living):
        try:
            producer.close(EXIT_TIMEOUT_S)
        except Exception:
            _log.exception("an audited producer was not closed in order")  # the others are all the same


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
