"""A producer's open transaction: the records whose delivery is known and whose fate is not. Pure.

Called by `producer` and by the delivery callbacks of `delivery_reports`. An acknowledgement inside of a
transaction says only that the record is in the log; whether a reader of committed data will ever see it, the
end of the transaction decides:

    committed   the acknowledged records count as acknowledged
    aborted     they count as failed: nobody will see them
    unknown     (the producer was fenced, died, or gave up on the answer) they are ambiguous

Until then they are pending, so that no promise passes them. A record without an acknowledgement is ambiguous
whatever the end: one that was sent late may belong to no transaction that we know.

Must stay true: each record is settled once, by the end of the transaction that it was sent in. Delivery
reports that are served after the end (another thread polled) go the way of the others.
"""

from __future__ import annotations

from enum import Enum
from threading import Lock

from millrace.audit.clients.session import Arrivals, StreamSession, WindowCounts


class Outcome(Enum):
    """How a transaction ended."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    UNKNOWN = "unknown"


class OpenTransaction:
    """One transaction. Safe to call from any thread.

    `asked`: the end that the client was asked for by now (`transactions`), UNKNOWN where for both.
    """

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self.asked: Outcome | None = None
        self._held: list[tuple[StreamSession, WindowCounts, Arrivals]] = []
        self._lock = Lock()

    def hold(self, stream: StreamSession, window: WindowCounts) -> Arrivals:
        """Where the acknowledgements of a window's records in this transaction go until its end."""
        arrivals = Arrivals(window.content)
        with self._lock:
            self._held.append((stream, window, arrivals))
        return arrivals

    def landed(self) -> None:
        """After an acknowledgement was added."""
        if self.outcome is not None:
            self._settle(self.outcome)

    def end(self, outcome: Outcome) -> None:
        """The transaction is over; the first outcome that is told counts."""
        if self.outcome is None:
            self.outcome = outcome
        self._settle(self.outcome)

    def windows(self) -> list[tuple[StreamSession, WindowCounts]]:
        """Those that hold records of this transaction."""
        with self._lock:
            return [(stream, window) for stream, window, _ in self._held]

    def _settle(self, outcome: Outcome) -> None:
        with self._lock:
            for stream, window, arrivals in self._held:
                if outcome is Outcome.COMMITTED:
                    fresh = arrivals.fresh
                    count = len(fresh)
                    window.fresh.extend(fresh[:count])
                    del fresh[:count]
                    continue
                sequences = arrivals.take()[0]
                if sequences and outcome is Outcome.ABORTED:
                    stream.mark_all_failed(window, sequences)
                elif sequences:
                    stream.mark_all_ambiguous(window, sequences)
