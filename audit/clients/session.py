"""A stream as its producer keeps it: numbers given out, what became of each, the events that tell it. Pure.

Called by `producer` (any client can use it): `assign` before a record is handed to the client, `acknowledge`,
`mark_ambiguous` or `mark_failed` when its fate is known, `report` every few seconds, `close` at the end.

A session is one producer start; a stream is one topic in one session. Sequences run 1, 2, 3, ... without
holes: a number that the client refused to take is given to the next record, or ends as failed.

The three fates, which reconciliation relies on:

    acknowledged   the cluster said that it has the record
    ambiguous      nobody knows (timeouts, errors after sending): it may exist, and is not missed if it does
    failed         it surely does not exist (never sent), or nobody will see it (its transaction was aborted)

With `content` every acknowledgement brings the record's digest (`content_digest`), and a report tells the sum
of those that it calls acknowledged, no more and no less.

Threads: `assign` and `report` may run in different threads; a lock guards the numbers. Two things that are
done for every record take none, and rest on being one step under the interpreter's lock. A number of the
current window may be taken by `next(window.numbers)`: of a *run*, which the lock handed to that window, and
whoever ends the run takes what is left of it at once, so that each number has one taker and a window's count
of them is exact. `acknowledge` only adds to a list, all that belongs to a record, and `fold` removes only
what it has read. All other methods belong to the thread that reports or are rare. No clock is read here.

A `Moment` says all this for the records of one millisecond, which a fast producer has hundreds of: one look
at the clock, and a number out of it, tell that window and promise are as they were when it was made. It has
its run's own numbers, so that whoever ends the run (another window, the stream's end, a promise that passes
the moment) ends the moment too, also for a thread that has looked it up already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import length_hint
from typing import Any

from pyroaring import BitMap64

from millrace.audit.clients.told_stream import ProducerIdentity, ToldStream
from millrace.audit.contract import sequence_set
from millrace.audit.contract.content_digest import DIGEST_MASK
from millrace.audit.contract.events import CLOSED, CountEvent, Event
from millrace.audit.contract.header import MAX_CREATED_MS, MAX_SEQUENCE, window_start_ms

FOLD_INTERVAL = 1 << 16
FIRST_RUN, LONGEST_RUN = 16, 1 << 12
"""A run is twice as long as the one before it in the same visit of a window: what is left costs time."""


class StreamClosed(Exception):
    """A number was asked of a stream that has ended; the caller opens a new stream."""


class Arrivals:
    """Acknowledgements that wait: `fresh` is flat, (sequence, size) of each or (sequence, size, digest)."""

    __slots__ = ("content", "fresh")

    def __init__(self, content: bool = False):
        self.content = content
        self.fresh: list[int] = []

    def acknowledge(self, sequence: int, size: int, digest: int = 0) -> None:
        """The cluster has the record, `size` bytes of value."""
        self.fresh.extend((sequence, size, digest) if self.content else (sequence, size))

    def take(self) -> tuple[list[int], list[int], list[int]]:
        """(sequences, sizes, digests) of what waits now, which is removed; no digests without `content`."""
        count = len(self.fresh)
        step = 3 if self.content else 2
        sequences, sizes = self.fresh[:count:step], self.fresh[1:count:step]
        digests = self.fresh[2:count:step] if self.content else []
        del self.fresh[:count]
        return sequences, sizes, digests


class WindowCounts(Arrivals):
    """One window's fates.

    `changed` since the last report; `delivered_report` is the newest one that the cluster acknowledged;
    `journaled` when the journal follows this window; `destination` is for whoever serves delivery reports;
    `numbers` are those of its run, none while it is not its stream's current window.
    """

    __slots__ = (
        "acknowledged",
        "ambiguous",
        "assigned_count",
        "byte_count",
        "changed",
        "delivered_report",
        "destination",
        "digest",
        "end_ms",
        "failed",
        "journaled",
        "numbers",
        "report",
        "start_ms",
    )

    def __init__(self, start_ms: int, window_ms: int, content: bool = False):
        super().__init__(content)
        self.start_ms = start_ms
        self.end_ms = start_ms + window_ms
        self.assigned_count = 0
        self.acknowledged = BitMap64()
        self.ambiguous = BitMap64()
        self.failed = BitMap64()
        self.byte_count = 0
        self.digest = 0
        self.report = 0
        self.delivered_report = 0
        self.changed = False
        self.journaled = False
        self.numbers: Iterator[int] = iter(())
        self.destination: Any = None

    def fold(self) -> BitMap64:
        """Take the fresh acknowledgements into the set; returns them."""
        sequences, sizes, digests = self.take()
        taken = BitMap64(sequences)
        if not sequences:
            return taken
        self.byte_count += sum(sizes)
        self.digest = (self.digest + sum(digests)) & DIGEST_MASK
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


@dataclass(frozen=True, slots=True)
class Fold:
    """Acknowledgements that were taken into a window together: the sequences, and what they added."""

    window: WindowCounts
    sequences: BitMap64
    byte_count: int
    digest: int


_NO_WINDOW = WindowCounts(0, 0)


Moment = tuple[int, int, Iterator[int], int, WindowCounts, bytes]
"""What a stream's records have in common that are created in one millisecond: the nanoseconds since 1970 at
which it begins and the next one does, the numbers of its run, its creation time, its window, and the end of
its header. A plain tuple: taken apart at once, it costs a record less than six attributes."""

NO_MOMENT: Moment = (0, 0, iter(()), -1, _NO_WINDOW, b"")


class StreamSession(ToldStream):
    """One topic's stream, whose records are numbered (`ToldStream` says what it is made of)."""

    windows: dict[int, WindowCounts]

    def __init__(self, identity: ProducerIdentity, topic: str, stream: str, **settings: Any):
        super().__init__(identity, topic, stream, **settings)
        self.settled = BitMap64()
        self.current = _NO_WINDOW
        self.moment = NO_MOMENT
        self._run_end = 0
        self._run_length = FIRST_RUN
        self._counted = 0
        self._fold_at = FOLD_INTERVAL
        self._active: dict[int, WindowCounts] = {}
        self.reserved = MAX_SEQUENCE
        self.keeps_folded = False
        self._folded: list[Fold] = []
        self._returned: list[tuple[int, WindowCounts]] = []

    def assign(self, created_ms: int) -> tuple[WindowCounts, int]:
        """(window, sequence) of a record. Raises StreamClosed, and ValueError for an impossible time."""
        # Not `acquire` and `try`: between the two a signal's handler may raise, and it stays locked for ever.
        with self._lock:
            window = self.current
            if not window.start_ms <= created_ms < window.end_ms:
                return self._assign_elsewhere(created_ms)
            sequence = next(window.numbers, 0)
            return window, sequence or self._begin_run(window)

    def assign_run(self, created_ms: int, count: int) -> tuple[WindowCounts, int] | None:
        """(window, first of `count` sequences in a row); None when they must be asked for one by one."""
        with self._lock:
            window = self.current
            if not window.start_ms <= created_ms < window.end_ms:
                return None
            self._end_run()
            first = self._run_end + 1
            self._run_end += count
            self._fold_now_and_then()
            return window, first

    def keep_moment(self, window: WindowCounts, created_ms: int, suffix: bytes) -> None:
        """Let the records of this millisecond take their numbers from `moment`, where nothing else is to be
        looked at for them: window, promise and what is reserved."""
        since_ns = created_ms * 1_000_000
        with self._lock:
            if (
                window is self.current
                and self._run_end <= self.reserved
                and (self.promise_ms is None or self.promise_ms <= created_ms)
            ):
                self.moment = (since_ns, since_ns + 1_000_000, window.numbers, created_ms, window, suffix)

    @property
    def run_end(self) -> int:
        """The last number that may be given out without the lock."""
        return self._run_end

    @property
    def last_assigned(self) -> int:
        """The last number that was given out."""
        return self._run_end - length_hint(self.current.numbers)

    def give_back(self, window: WindowCounts, first: int, last: int | None = None) -> None:
        """The client did not take the record (or those to `last`): its number goes to the next one."""
        with self._lock:
            for sequence in range(first, (last or first) + 1):
                self._returned.append((sequence, window))
            self._leave_window()

    def mark_ambiguous(self, window: WindowCounts, sequence: int) -> None:
        """The record may or may not exist."""
        self.mark_all_ambiguous(window, (sequence,))

    def mark_failed(self, window: WindowCounts, sequence: int) -> None:
        """The record surely does not exist."""
        self.mark_all_failed(window, (sequence,))

    def mark_all_failed(self, window: WindowCounts, sequences: Iterable[int]) -> None:
        """The records surely do not exist, or nobody will ever see them."""
        failed = BitMap64(sequences)
        with self._lock:
            window.failed |= failed
            window.ambiguous -= failed
            self.settled |= failed
            window.changed = window.changed or bool(failed)

    def mark_all_ambiguous(self, window: WindowCounts, sequences: Iterable[int]) -> None:
        """The records may or may not exist."""
        ambiguous = BitMap64(sequences)
        with self._lock:
            window.ambiguous |= ambiguous - window.acknowledged
            self.settled |= ambiguous
            window.changed = window.changed or bool(ambiguous)

    def state_of(self, window: WindowCounts) -> dict[str, Any]:
        """A window's whole state for a journal, from between two folds: sets and sums belong together."""
        with self._lock:
            return {
                "acknowledged": sequence_set.to_json(window.acknowledged),
                "ambiguous": sequence_set.to_json(window.ambiguous),
                "failed": sequence_set.to_json(window.failed),
                "bytes": window.byte_count,
                "digest": window.digest,
                "report": window.report,
            }

    def take_folded(self) -> list[Fold]:
        """What was acknowledged since the last call, for a journal (`keeps_folded`)."""
        with self._lock:
            self._fold()
            folded, self._folded = self._folded, []
            return folded

    def report(self, now_ms: int) -> list[Event]:
        """What to publish now: every window that changed since its last report, then the stream itself."""
        with self._lock:
            self._fail_returned()
            self._fold()
            return self._report(now_ms)

    def report_delivered(self, event: Event) -> WindowCounts | None:
        """The cluster has the report; returns its window when nothing in it is left to report."""
        if not isinstance(event, CountEvent):
            return None
        with self._lock:
            self._refusals.pop(event.window_start_ms, None)
            window = self.windows[event.window_start_ms]
            window.delivered_report = max(window.delivered_report, event.report)
            return None if window.unreported or window.pending_count else window

    @property
    def is_told(self) -> bool:
        """The cluster has a report of everything that was counted."""
        with self._lock:
            return not any(window.unreported for window in self.windows.values())

    def close(self, now_ms: int) -> list[Event]:
        """The last events. What is pending becomes ambiguous; no number is given out any more."""
        with self._lock:
            self._leave_window()
            self._fail_returned()
            self._fold()
            self._give_up_pending()
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
            number, refused = self._returned.pop()
            refused.assigned_count -= 1
            window.assigned_count += 1
            return window, number
        self.current, self._run_length = window, FIRST_RUN
        return window, self._begin_run(window)

    def _begin_run(self, window: WindowCounts) -> int:
        """Hand the next numbers to the current window, whose run is used up; returns the first of them, which
        is the caller's: others may take all that follow it at once."""
        self._fold_now_and_then()
        first, self._run_end = self._run_end + 1, self._run_end + self._run_length
        self._run_length = min(2 * self._run_length, LONGEST_RUN)
        window.numbers = iter(range(first + 1, self._run_end + 1))
        return first

    def _end_run(self) -> None:
        """Take back what is left of the run. One step: each number is either given out or taken back here."""
        self._run_end -= len(list(self.current.numbers))

    def _fold_now_and_then(self) -> None:
        if self._run_end >= self._fold_at:
            self._fold_at = self._run_end + FOLD_INTERVAL
            self._fold()

    def _count_run(self) -> None:
        """Add to the current window what was assigned in it since the last time: `assign` does not count."""
        last = self.last_assigned
        self.current.assigned_count += last - self._counted
        self._counted = last

    def _leave_window(self) -> None:
        """Make the next `assign` look for its window."""
        self._end_run()
        self._count_run()
        self.current = _NO_WINDOW

    def _window(self, created_ms: int) -> WindowCounts:
        if not 0 <= created_ms <= MAX_CREATED_MS:
            raise ValueError(f"creation time {created_ms} ms is outside of what a record can carry")
        start_ms = window_start_ms(created_ms, self.window_ms)
        window = self.windows.get(start_ms)
        if window is None:
            window = self.windows[start_ms] = WindowCounts(start_ms, self.window_ms, self.content)
        self._active[start_ms] = window
        return window

    def _fold(self) -> None:
        if self.state is CLOSED:
            return
        self._count_run()
        for window in list(self._active.values()):
            bytes_before, digest_before = window.byte_count, window.digest
            sequences = window.fold()
            if sequences:
                self.settled |= sequences
                if self.keeps_folded:
                    added = (window.digest - digest_before) & DIGEST_MASK
                    self._folded.append(Fold(window, sequences, window.byte_count - bytes_before, added))
            elif window is not self.current and window.pending_count == 0:
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

    def _counts(self, window: WindowCounts) -> dict[str, Any]:
        sets = {"acknowledged": window.acknowledged, "ambiguous": window.ambiguous, "failed": window.failed}
        for sequences in sets.values():
            sequences.run_optimize()
        return {"count": len(window.acknowledged), **{name: each.copy() for name, each in sets.items()}}

    def _promise(self, now_ms: int) -> int | None:
        promise_ms = super()._promise(now_ms)
        if promise_ms is not None and self.moment[3] < promise_ms:
            self._end_run()  # The clock may be set back into that moment: its time is compared again then.
            self.moment = NO_MOMENT
        return promise_ms

    def _reach(self) -> tuple[int, int]:
        self.settled.run_optimize()
        return self.last_assigned, self.last_settled

    def _pending_starts(self) -> Iterable[int]:
        return [window.start_ms for window in self._active.values() if window.pending_count]


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
        "content": session.content,
    }
