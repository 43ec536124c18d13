"""What every kind of stream tells, whether its records are numbered or only counted. Pure.

Base of `session.StreamSession` and `count_stream.CountStream`: who the stream is, its state, its promise, and
the order of its events: each window that changed since its last report, then the stream itself. Which windows
there are and what was counted in them is the subclass's. No clock is read here. What must stay true: whoever
calls a method whose name begins with an underscore holds the stream's lock.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from threading import Lock
from typing import Any

from millrace.audit.contract.event_json import MAX_UNTOLD
from millrace.audit.contract.events import (
    HEARTBEAT,
    OPENED,
    CountEvent,
    Event,
    StreamEvent,
    encode_event,
)
from millrace.audit.contract.header import encode_prefix

MAX_WINDOWS_A_STREAM = 10_000
"""One that has more is followed by another, so that one that runs for years keeps not all its windows."""

LARGE_REPORT_BYTES = 1 << 18
"""Sets with many holes make a report large, and a cluster takes none above `max.message.bytes` (1 MiB by
default). So a stream that comes to a quarter of it is followed by another, which tells of what comes then."""

MAX_REFUSALS = 3
"""So often a report is sent that is too large; more would only say the same for ever."""
UNTOLD = "its counts are not told again and stay UNKNOWN; raise max.message.bytes of that topic"

# A creation time is taken before the number is; the promise stays this far behind the clock to keep its word.
PROMISE_MARGIN_MS = 1000


@dataclass(frozen=True, slots=True)
class ProducerIdentity:
    """What all streams of one producer start have in common. `session` is 16 hexadecimal digits."""

    session: str
    producer: str
    host: str = ""
    application: str = ""
    datacenter: str = ""


class ToldStream:
    """One topic's stream. `stream` is a random id of 16 hexadecimal digits that nobody used before.

    `promises`: creation times come from a clock, so that a time can be named below which no more will come.
    `content`: acknowledgements bring digests.
    """

    windows: dict[int, Any]

    def __init__(
        self,
        identity: ProducerIdentity,
        topic: str,
        stream: str,
        *,
        window_ms: int,
        lease_ms: int,
        promises: bool = True,
        content: bool = False,
    ):
        self.identity, self.topic, self.stream = identity, topic, stream
        self.window_ms, self.lease_ms = window_ms, lease_ms
        self.content = content
        self.prefix = encode_prefix(stream)
        self.windows = {}
        self.state = OPENED
        self.promise_ms: int | None = 0 if promises else None
        # Of its last word. A clock that is set back does not make the next one older.
        self.at_ms = 0
        self._is_large = False
        self._refusals: dict[int, int] = {}
        self._lock = Lock()

    def forgo_promises(self) -> None:
        """The application sets creation times itself: nothing can be promised about the next one. A report
        that is being made in another thread must not take it back."""
        with self._lock:
            self.promise_ms = None

    def creation_time(self, timestamp: int) -> int:
        """That of a record for which the application gives it. Raises TypeError."""
        created_ms = operator.index(timestamp)
        if self.promise_ms is not None:
            self.forgo_promises()
        return created_ms

    def report(self, now_ms: int) -> list[Event]:
        """What to publish now: every window that changed since its last report, then the stream itself."""
        with self._lock:
            return self._report(now_ms)

    def encoded(self, event: Event) -> tuple[bytes, bytes]:
        """(key, value) of an event of this stream's, to be sent."""
        key, value = encode_event(event)
        self._is_large = self._is_large or len(value) >= LARGE_REPORT_BYTES
        return key, value

    @property
    def is_worn(self) -> bool:
        """Time for another stream."""
        return self._is_large or len(self.windows) > MAX_WINDOWS_A_STREAM

    def report_again(self, event: Event) -> None:
        """The event was not delivered: its window is reported anew next time."""
        if isinstance(event, CountEvent):
            with self._lock:
                self.windows[event.window_start_ms].changed = True

    def report_too_large(self, event: Event) -> bool:
        """The event is larger than the client or the cluster takes. Its window is reported anew, because
        several events may have been too large only together; after MAX_REFUSALS it is given up, and the
        stream's word says so (`untold`). Returns whether it is now."""
        self.report_again(event)
        if not isinstance(event, CountEvent):
            return False
        with self._lock:
            refusals = self._refusals.get(event.window_start_ms, 0) + 1
            self._refusals[event.window_start_ms] = refusals
            return refusals == MAX_REFUSALS

    @property
    def untold(self) -> tuple[int, ...]:
        """The beginnings of the windows whose reports were given up."""
        return tuple(sorted(each for each, count in list(self._refusals.items()) if count >= MAX_REFUSALS))

    def _counts(self, window: Any) -> dict[str, Any]:
        """The fields of a window's report that tell what was counted in it."""
        raise NotImplementedError

    def _reach(self) -> tuple[int, int]:
        """(last assigned, last settled) of the stream."""
        raise NotImplementedError

    def _pending_starts(self) -> Iterable[int]:
        """The beginnings of windows in which something is not settled."""
        raise NotImplementedError

    def _report(self, now_ms: int) -> list[Event]:
        events: list[Event] = []
        for window in self.windows.values():
            if window.changed and self._refusals.get(window.start_ms, 0) < MAX_REFUSALS:
                window.changed = False
                window.report += 1
                events.append(self._count_event(window, now_ms))
        events.append(self._stream_event(now_ms))
        if self.state is OPENED:
            self.state = HEARTBEAT
        return events

    def _count_event(self, window: Any, now_ms: int) -> CountEvent:
        return CountEvent(
            stream=self.stream,
            session=self.identity.session,
            topic=self.topic,
            producer=self.identity.producer,
            window_start_ms=window.start_ms,
            window_ms=self.window_ms,
            report=window.report,
            byte_count=window.byte_count,
            at_ms=now_ms,
            digest=window.digest if self.content else None,
            **self._counts(window),
        )

    def _stream_event(self, now_ms: int) -> StreamEvent:
        last_assigned, last_settled = self._reach()
        self.at_ms = max(self.at_ms, now_ms)
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
            last_assigned=last_assigned,
            last_settled=last_settled,
            no_earlier_than_ms=self._promise(now_ms),
            lease_ms=self.lease_ms,
            at_ms=self.at_ms,
            untold=self.untold[:MAX_UNTOLD],
        )

    def _promise(self, now_ms: int) -> int | None:
        """Every record created before this time has been reported, and none will be created before it."""
        if self.promise_ms is None:
            return None
        self.promise_ms = max(self.promise_ms, min([now_ms - PROMISE_MARGIN_MS, *self._pending_starts()]))
        return self.promise_ms
