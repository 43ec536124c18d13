"""What all connections together may keep in memory: requests on their way in, answers on their way out.

`RequestMemory` bounds the receive buffers (`queued.max.request.bytes`). A connection asks before its buffer
grows; where there is no room it stops reading until some comes free. Buffers grow as bytes arrive, so two
half-received requests could wait for each other for ever: one connection at a time may exceed the bound,
until its request is whole. `AnswerBacklog` counts answers that peers have not read
(`queued.max.response.bytes`). The fuller it is, the less a single fetch is given and the less one connection
may queue; a peer that has read nothing for `STALL_SECONDS` while the backlog is more than half full is named
to be closed. So a thousand readers that stall cost a bounded amount, and those who read are still served.

Called by `receive_buffer.py`, `connection.py` and `listener.py`; the fetch handler reads `answer_limit`.
Pure: owners are any hashable objects, time is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

UNBOUNDED = -1

SMALLEST_ANSWER_LIMIT = 256 << 10
"""What a fetch may carry however full the backlog is (and at least one batch)."""

SHARE = 8
"""One answer takes at most this part of what is left of the backlog."""

STALL_SECONDS = 30.0
"""How long a peer may read nothing before it is closed for the sake of the others."""

SEND_STALL_SECONDS = 10.0
"""How long a peer may send nothing in the middle of a request while others wait for memory."""

LARGEST_SMALL = 1 << 20
RESERVE_SHARE = 2
"""Requests of up to 1 MiB, which is what producers send by default, may use half as much memory again: they
do not wait behind large ones that come slowly."""


class RequestMemory:
    """Bytes of receive buffers beyond each connection's first `connection.receive.buffer.bytes`."""

    def __init__(self, limit: int = UNBOUNDED) -> None:
        self.limit = limit
        self.used = 0
        self.peak = 0
        """Most that was used since the listener last looked."""
        self.waiting: dict[Hashable, Callable[[], None]] = {}
        """Who waits for room, first come first, and how to tell them."""
        self._exceeding: Hashable | None = None
        self.refusals = 0
        self.on_shortage: Callable[[], None] | None = None
        """Called when somebody has to wait: whoever holds room without need may give it back."""

    def take(
        self, owner: Hashable, size: int, tell: Callable[[], None], *, request_size: int = LARGEST_SMALL + 1
    ) -> bool:
        """Room for `size` more bytes of a request of `request_size` in all. False: not now; `tell` is called
        when it is worth asking again."""
        is_small = request_size <= LARGEST_SMALL
        if not self.has_room(size - (self.limit // RESERVE_SHARE if is_small else 0)):
            if self._exceeding not in (None, owner):
                if owner not in self.waiting:
                    self.refusals += 1
                    self.waiting[owner] = tell
                    if self.on_shortage is not None:
                        self.on_shortage()
                return False
            self._exceeding = owner
        self.waiting.pop(owner, None)
        self.used += size
        self.peak = max(self.peak, self.used)
        if self.waiting and self.has_room(1):
            self._tell_first()
        return True

    def has_room(self, size: int) -> bool:
        """Whether `size` more bytes stay within the bound; for growth that is a convenience only."""
        return self.limit == UNBOUNDED or self.used + size <= self.limit

    def give_back(self, owner: Hashable, size: int, *, whole: bool) -> None:
        """`size` bytes are free again; `whole` when the owner's request is complete, or it is gone."""
        self.used -= size
        if whole:
            self.waiting.pop(owner, None)
            if self._exceeding == owner:
                self._exceeding = None
        if self.waiting and (self._exceeding is None or self.has_room(1)):
            self._tell_first()

    def _tell_first(self) -> None:
        self.waiting.pop(next(iter(self.waiting)))()


class _Unread(NamedTuple):
    size: int
    since: float
    """When the peer was last seen to read, in the clock of the caller."""


class AnswerBacklog:
    """Answers that wait for their readers. `largest_answer` is `fetch.max.bytes`."""

    def __init__(self, limit: int, largest_answer: int, queue_limit: int) -> None:
        self._limit = limit
        self._largest_answer = largest_answer
        self._largest_queue = queue_limit
        self._unread: dict[Hashable, _Unread] = {}
        self.held = 0
        self.peak = 0
        """Most that was held since the listener last looked."""
        self.answer_limit = largest_answer
        """Most bytes of record batches that one fetch is given now."""
        self.queue_limit = queue_limit
        """Most bytes one connection may have unsent before its requests wait."""

    def __len__(self) -> int:
        return len(self._unread)

    def set(self, owner: Hashable, size: int, now: float) -> None:
        """The owner has `size` unread bytes now; 0 forgets it."""
        old = self._unread.get(owner)
        if size == 0:
            if old is None:
                return
            del self._unread[owner]
        else:
            # More queued is no sign of reading; less is.
            since = old.since if old is not None and size >= old.size else now
            self._unread[owner] = _Unread(size, since)
        self.held += size - (0 if old is None else old.size)
        self.peak = max(self.peak, self.held)
        if self._limit != UNBOUNDED:
            share = max((self._limit - self.held) // SHARE, SMALLEST_ANSWER_LIMIT)
            self.answer_limit = min(share, self._largest_answer)
            self.queue_limit = min(share, self._largest_queue)

    def progressed(self, owner: Hashable, now: float) -> None:
        """The peer was seen to read some of what waits for it."""
        unread = self._unread.get(owner)
        if unread is not None:
            self._unread[owner] = unread._replace(since=now)

    def overdue(self, now: float) -> list[Hashable]:
        """Whom to close: those who have not read for longest, until the backlog is half empty again."""
        if self._limit == UNBOUNDED:
            return []
        excess = self.held - self._limit // 2
        chosen: list[Hashable] = []
        for owner, unread in sorted(self._unread.items(), key=lambda item: item[1].since):
            if excess <= 0 or now - unread.since < STALL_SECONDS:
                break
            chosen.append(owner)
            excess -= unread.size
        return chosen
