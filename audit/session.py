"""A stream as its producer keeps it: numbers given out, what became of each, the events that tell it. Pure.

Called by `producer` (any client can use it): `assign` before a record is handed to the client, `acknowledge`,
`mark_ambiguous` or `mark_failed` when its fate is known, `report` every few seconds, `close` at the end.

A session is one producer start; a stream is one topic in one session. Sequences run 1, 2, 3, ... without
holes: a number that the client refused to take is given to the next record, or ends as failed.

The three fates, which reconciliation relies on:

    acknowledged   the cluster said that it has the record
    ambiguous      nobody knows (timeouts, errors after sending): it may exist, and is not missed if it does
    not failed         it surely was never sent

Threads: `assign` and `report` may run in different threads; a lock guards the numbers. `acknowledge` takes no
lock: it only appends to lists, which is atomic, and `fold` removes only what it has read. All other methods
belong to the thread that reports or are rare. No clock is read here.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
from typing import Any

from pyroaring import BitMap64

from millrace.audit.events import CLOSED, HEARTBEAT, OPENED, CountEvent, Event, StreamEvent
from millrace.audit.header import MAX_CREATED_MS, MAX_SEQUENCE, encode_prefix, window_start_ms

# A creation time is taken before the number is; the promise stays this far behind the clock to keep its word.
PROMISE_MARGIN_MS = 1000
FOLD_INTERVAL_MASK = 0xFFFF


class StreamClosed(Exception):
    """A number was asked of a stream that has ended; the caller opens a new stream."""


@dataclass(frozen=True, slots=True)
class ProducerIdentity:
    """What all streams of one producer start have in common. `session` is 16 hexadecimal digits."""

    session: str
    producer: str
    host: str = ""
    application: str = ""
    datacenter: str = ""


class WindowCounts:
    """One window's fates. `fresh` and `fresh_sizes` are acknowledgements that wait to be folded in.

    `changed` since the last report; `delivered_report` is the newest one that the cluster acknowledged;
    `journaled` when the journal follows this window.
    """

    __slots__ = (
        "acknowledged",
        "ambiguous",
        "assigned_count",
        "byte_count",
        "changed",
        "delivered_report",
        "end_ms",
        "failed",
        "fresh",
        "fresh_sizes",
        "journaled",
        "report",
        "start_ms",
    )

    def __init__(self, start_ms: int, window_ms: int):
        self.start_ms = start_ms
        self.end_ms = start_ms + window_ms
        self.assigned_count = 0
        self.fresh: list[int] = []
        self.fresh_sizes: list[int] = []
        self.acknowledged = BitMap64()
        self.ambiguous = BitMap64()
        self.failed = BitMap64()
        self.byte_count = 0
        self.report = 0
        self.delivered_report = 0
        self.changed = False
        self.journaled = False

    def acknowledge(self, sequence: int, size: int) -> None:
        """The cluster has the record, `size` bytes of value."""
        self.fresh_sizes.append(size)
        self.fresh.append(sequence)

    def fold(self) -> BitMap64:
        """Take the fresh acknowledgements into the set; returns them."""
        count = len(self.fresh)
        taken = BitMap64(self.fresh[:count])
        if count == 0:
            return taken
        self.byte_count += sum(self.fresh_sizes[:count])
        del self.fresh[:count]
        del self.fresh_sizes[:count]
        self.acknowledged |= taken
        if self.ambiguous:
            self.ambiguous -= taken
        self.changed = True
        return taken

    @property
    def settled_count(self) -> int:
        return len(self.acknowledged) + len(self.ambiguous) + len(self.failed)

    @property
    def pending_count(self) -> int:
        """Records whose fate is not known, or not folded in yet."""
        return self.assigned_count - self.settled_count

    @property
    def unreported(self) -> bool:
        """Something in it is not in any report that was delivered."""
        return self.changed or self.report != self.delivered_report


_NO_WINDOW = WindowCounts(0, 0)


class StreamSession:
    """One topic's stream. `stream` is a random id of 16 hexadecimal digits that nobody used before.

    `promises`: creation times come from a clock, so that a time can be named below which no more will come.
    """

    def __init__(
        self,
        identity: ProducerIdentity,
        topic: str,
        stream: str,
        *,
        window_ms: int,
        lease_ms: int,
        now_ms: int,
        promises: bool = True,
    ):
        self.identity, self.topic, self.stream = identity, topic, stream
        self.window_ms, self.lease_ms, self.opened_ms = window_ms, lease_ms, now_ms
        self.prefix = encode_prefix(stream)
        self.windows: dict[int, WindowCounts] = {}
        self.last_assigned = 0
        self.settled = BitMap64()
        self.state = OPENED
        self.promise_ms: int | None = 0 if promises else None
        self._current = _NO_WINDOW
        self._run_start = 0
        self._active: dict[int, WindowCounts] = {}
        self.reserved = MAX_SEQUENCE
        self.keeps_folded = False
        self._folded: list[tuple[WindowCounts, BitMap64]] = []
        self._returned: list[tuple[int, WindowCounts]] = []
        self._lock = Lock()
        self._acquire, self._release = self._lock.acquire, self._lock.release

    def assign(self, created_ms: int) -> tuple[WindowCounts, int]:
        """(window, sequence) of a record. Raises StreamClosed, and ValueError for an impossible time."""
        # Once a record: bound calls take half the time of a `with` on the lock.
        self._acquire()
        try:
            window = self._current
            if not window.start_ms <= created_ms < window.end_ms:
                return self._assign_elsewhere(created_ms)
            sequence = self.last_assigned = self.last_assigned + 1
            if not sequence & FOLD_INTERVAL_MASK:
                self._fold()
            return window, sequence
        finally:
            self._release()

    def give_back(self, window: WindowCounts, sequence: int) -> None:
        """The client did not take the record: its number goes to the next one."""
        with self._lock:
            self._returned.append((sequence, window))
            self._leave_window()

    def forgo_promises(self) -> None:
        """The application sets creation times itself: nothing can be promised about the next one."""
        self.promise_ms = None

    def mark_ambiguous(self, window: WindowCounts, sequence: int) -> None:
        """The record may or may not exist."""
        with self._lock:
            window.ambiguous.add(sequence)
            self.settled.add(sequence)
            window.changed = True

    def mark_failed(self, window: WindowCounts, sequence: int) -> None:
        """The record surely does not exist."""
        with self._lock:
            window.failed.add(sequence)
            self.settled.add(sequence)
            window.changed = True

    def take_folded(self) -> list[tuple[WindowCounts, BitMap64]]:
        """(window, sequences) acknowledged since the last call, for a journal (`keeps_folded`)."""
        with self._lock:
            self._fold()
            folded, self._folded = self._folded, []
            return folded

    def report(self, now_ms: int) -> list[Event]:
        """What to publish now: every window that changed since its last report, then the stream itself."""
        with self._lock:
            return self._report(now_ms)

    def report_again(self, event: Event) -> None:
        """The event was not delivered: its window is reported anew next time."""
        if isinstance(event, CountEvent):
            with self._lock:
                self.windows[event.window_start_ms].changed = True

    def report_delivered(self, event: Event) -> WindowCounts | None:
        """The cluster has the report; returns its window when nothing in it is left to report."""
        if not isinstance(event, CountEvent):
            return None
        with self._lock:
            window = self.windows[event.window_start_ms]
            window.delivered_report = max(window.delivered_report, event.report)
            return None if window.unreported or window.pending_count else window

    def close(self, now_ms: int) -> list[Event]:
        """The last events. What is pending becomes ambiguous; no number is given out any more."""
        with self._lock:
            self._fail_returned()
            self._fold()
            self._give_up_pending()
            self._leave_window()
            self.state = CLOSED
            return self._report(now_ms)

    @property
    def pending_count(self) -> int:
        with self._lock:
            self._fold()
            return self.last_assigned - len(self.settled)

    @property
    def last_settled(self) -> int:
        """The last number of the prefix whose fates are all known."""
        if not self.settled or self.settled.min() != 1:
            return 0
        first_hole = 1 + len(self.settled)
        if self.settled.max() == first_hole - 1:
            return first_hole - 1
        return _first_absent(self.settled) - 1

    def _assign_elsewhere(self, created_ms: int) -> tuple[WindowCounts, int]:
        """`assign` when the window is not the last record's, a number came back, or the stream ended."""
        self._leave_window()
        if self.state is CLOSED:
            raise StreamClosed(self.stream)
        window = self._window(created_ms)
        if self._returned:
            sequence, refused = self._returned.pop()
            refused.assigned_count -= 1
            window.assigned_count += 1
            return window, sequence
        self._current = window
        sequence = self.last_assigned = self._run_start = self.last_assigned + 1
        window.assigned_count += 1
        return window, sequence

    def _count_run(self) -> None:
        """Add to the current window what was assigned in it since the last time: `assign` does not count."""
        self._current.assigned_count += self.last_assigned - self._run_start
        self._run_start = self.last_assigned

    def _leave_window(self) -> None:
        """Make the next `assign` look for its window."""
        self._count_run()
        self._current = _NO_WINDOW

    def _window(self, created_ms: int) -> WindowCounts:
        if not 0 <= created_ms <= MAX_CREATED_MS:
            raise ValueError(f"creation time {created_ms} ms is outside of what a record can carry")
        start_ms = window_start_ms(created_ms, self.window_ms)
        window = self.windows.get(start_ms)
        if window is None:
            window = self.windows[start_ms] = WindowCounts(start_ms, self.window_ms)
        self._active[start_ms] = window
        return window

    def _fold(self) -> None:
        if self.state is CLOSED:
            return
        self._count_run()
        for window in list(self._active.values()):
            sequences = window.fold()
            if sequences:
                self.settled |= sequences
                if self.keeps_folded:
                    self._folded.append((window, sequences))
            elif window is not self._current and window.pending_count == 0:
                del self._active[window.start_ms]

    def _fail_returned(self) -> None:
        while self._returned:
            sequence, window = self._returned.pop()
            window.failed.add(sequence)
            self.settled.add(sequence)
            window.changed = True

    def _give_up_pending(self) -> None:
        """File what is pending as ambiguous.

        Of pending records only each window's number is kept, so the sequences are dealt out in order of time;
        reconciliation looks for an ambiguous sequence in every window.
        """
        pending = BitMap64()
        pending.add_range(1, self.last_assigned + 1)
        numbers = iter(sorted(pending - self.settled))
        for window in sorted(self.windows.values(), key=lambda window: window.start_ms):
            for _ in range(window.pending_count):
                sequence = next(numbers)
                window.ambiguous.add(sequence)
                self.settled.add(sequence)
                window.changed = True

    def _report(self, now_ms: int) -> list[Event]:
        self._fail_returned()
        self._fold()
        events: list[Event] = []
        for window in self.windows.values():
            if window.changed:
                window.changed = False
                window.report += 1
                events.append(self._count_event(window, now_ms))
        events.append(self._stream_event(now_ms))
        if self.state is OPENED:
            self.state = HEARTBEAT
        return events

    def _count_event(self, window: WindowCounts, now_ms: int) -> CountEvent:
        for sequences in (window.acknowledged, window.ambiguous, window.failed):
            sequences.run_optimize()
        return CountEvent(
            stream=self.stream,
            session=self.identity.session,
            topic=self.topic,
            producer=self.identity.producer,
            window_start_ms=window.start_ms,
            window_ms=self.window_ms,
            report=window.report,
            count=len(window.acknowledged),
            byte_count=window.byte_count,
            acknowledged=window.acknowledged.copy(),
            ambiguous=window.ambiguous.copy(),
            failed=window.failed.copy(),
            at_ms=now_ms,
        )

    def _stream_event(self, now_ms: int) -> StreamEvent:
        self.settled.run_optimize()
        return StreamEvent(
            state=self.state,
            stream=self.stream,
            session=self.identity.session,
            topic=self.topic,
            producer=self.identity.producer,
            host=self.identity.host,
            application=self.identity.application,
            datacenter=self.identity.datacenter,
            window_ms=self.window_ms,
            last_assigned=self.last_assigned,
            last_settled=self.last_settled,
            no_earlier_than_ms=self._promise(now_ms),
            lease_ms=self.lease_ms,
            at_ms=now_ms,
        )

    def _promise(self, now_ms: int) -> int | None:
        """Every record created before this time has been reported, and none will be created before it."""
        if self.promise_ms is None:
            return None
        pending = [window.start_ms for window in self._active.values() if window.pending_count]
        self.promise_ms = max(self.promise_ms, min([now_ms - PROMISE_MARGIN_MS, *pending]))
        return self.promise_ms


def _first_absent(sequences: BitMap64) -> int:
    """The smallest number from 1 that the set lacks, by halving on ranks."""
    low, high = 1, len(sequences) + 1
    while low < high:
        middle = (low + high) // 2
        if sequences.rank(middle) == middle:
            low = middle + 1
        else:
            high = middle
    return low


def describe(session: StreamSession) -> dict[str, Any]:
    """The parts of a stream that its journal keeps once."""
    identity = session.identity
    return {
        "stream": session.stream,
        "session": identity.session,
        "topic": session.topic,
        "producer": identity.producer,
        "host": identity.host,
        "application": identity.application,
        "datacenter": identity.datacenter,
        "window_ms": session.window_ms,
        "lease_ms": session.lease_ms,
    }
