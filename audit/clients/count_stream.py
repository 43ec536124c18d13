"""The stream of a producer that cannot number its records: it counts, per window, what became of them. Pure.

For producers whose records pass through something that cannot keep a number for each: a gateway that splits
and merges, several processes behind one name. Its records carry a header with the name, the creation time
and sequence 0; its reports say how many were acknowledged and how many have an unknown fate. The audit can
then say COUNT_MATCH, never PROVEN: a loss and a duplicate in one window hide each other.

Called by `stream_reporter`. `CountStream` has the calls of `session.StreamSession` that it uses, with 0 for
every number. A stream that does number its records is told apart by its events (`sequenced`), and one that
does both is believed in neither. No clock is read here; a lock makes every call safe from any thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pyroaring import BitMap64

from millrace.audit.clients.session import StreamClosed
from millrace.audit.clients.told_stream import ToldStream
from millrace.audit.contract.content_digest import DIGEST_MASK
from millrace.audit.contract.events import CLOSED, Event
from millrace.audit.contract.header import MAX_CREATED_MS, window_start_ms


@dataclass(slots=True)
class CountWindow:
    """One window's counts. `pending_count` records were sent and nothing is known of them yet."""

    start_ms: int
    pending_count: int = 0
    acknowledged_count: int = 0
    ambiguous_count: int = 0
    byte_count: int = 0
    digest: int = 0
    report: int = 0
    changed: bool = False


class CountStream(ToldStream):
    """One topic's counts in one producer start; `stream` is a random id, as of any other stream."""

    windows: dict[int, CountWindow]

    def assign(self, created_ms: int) -> tuple[CountWindow, int]:
        """(window, 0) of a record. Raises StreamClosed, and ValueError for an impossible time."""
        if not 0 <= created_ms <= MAX_CREATED_MS:
            raise ValueError(f"creation time {created_ms} ms is outside of what a record can carry")
        with self._lock:
            if self.state == CLOSED:
                raise StreamClosed(self.stream)
            start_ms = window_start_ms(created_ms, self.window_ms)
            window = self.windows.get(start_ms)
            if window is None:
                window = self.windows[start_ms] = CountWindow(start_ms)
            window.pending_count += 1
            return window, 0

    def acknowledge(self, window: CountWindow, sequence: int, size: int, digest: int = 0) -> None:
        """The cluster has the record, `size` bytes of value."""
        with self._lock:
            if self._settle(window):
                window.acknowledged_count += 1
                window.byte_count += size
                window.digest = (window.digest + digest) & DIGEST_MASK

    def mark_ambiguous(self, window: CountWindow, sequence: int) -> None:
        """The record may or may not exist."""
        with self._lock:
            if self._settle(window):
                window.ambiguous_count += 1

    def mark_failed(self, window: CountWindow, sequence: int) -> None:
        """The record surely does not exist: as if it had never been asked for."""
        with self._lock:
            self._settle(window)

    def give_back(self, window: CountWindow, sequence: int) -> None:
        """The client did not take the record."""
        self.mark_failed(window, sequence)

    def report_delivered(self, event: Event) -> None:
        """The cluster has the report."""

    def close(self, now_ms: int) -> list[Event]:
        """The last events. What is pending becomes ambiguous."""
        with self._lock:
            for window in self.windows.values():
                if window.pending_count:
                    window.ambiguous_count += window.pending_count
                    window.pending_count = 0
                    window.changed = True
            self.state = CLOSED
            return self._report(now_ms)

    @property
    def pending_count(self) -> int:
        with self._lock:
            return sum(window.pending_count for window in self.windows.values())

    def _settle(self, window: CountWindow) -> bool:
        """Whether the fate is news: after the end everything pending was given up already."""
        if self.state == CLOSED:
            return False
        window.pending_count -= 1
        window.changed = True
        return True

    def _counts(self, window: CountWindow) -> dict[str, Any]:
        nothing = {name: BitMap64() for name in ("acknowledged", "ambiguous", "failed")}
        told = {"count": window.acknowledged_count, "ambiguous_count": window.ambiguous_count}
        return {**nothing, **told, "sequenced": False}

    def _reach(self) -> tuple[int, int]:
        """How many records the reports count by now: a lost report shows by it."""
        windows = self.windows.values()
        reported = sum(window.acknowledged_count + window.ambiguous_count for window in windows)
        return reported, reported

    def _pending_starts(self) -> Iterable[int]:
        return [window.start_ms for window in self.windows.values() if window.pending_count]
