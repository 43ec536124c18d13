"""The way from a cluster's client to one of its brokers for one purpose: its connection, or how it comes to
one. Kept and changed by `cluster.py` and `connection_pool.py` alone.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from millrace.broker.client.connection import Connection
from millrace.broker.errors import MillraceError


@dataclass(slots=True, eq=False)
class Lane:
    """The way to one broker for one purpose.

    `turn` is fair, so that requests made while the connection opens are sent in the order in which they
    were made; `waiting_count` are those who wait for it or have it. Who waited in line while `failed_turns`
    grew shares that failure, `error`, instead of trying anew: many waiters would otherwise fail one timeout
    after another.
    """

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting_count: int = 0
    failed_turns: int = 0
    error: MillraceError | None = None
    connection: Connection | None = None
    opening: asyncio.Task[Connection] | None = None
    failure_count: int = 0
    not_before: float = 0.0
    is_given_up: bool = False

    @property
    def is_open(self) -> bool:
        return self.connection is not None and self.connection.is_open

    @property
    def is_throttled(self) -> bool:
        """Whether nothing would be sent on it now, by a quota of the server."""
        return self.connection is not None and self.is_open and self.connection.throttle_left_ms > 0

    def interrupt(self) -> None:
        """Ends its connection, open or opening; requests under way fail with NetworkException."""
        if self.opening is not None:
            self.opening.cancel()
        if self.connection is not None:
            self.connection.close()
