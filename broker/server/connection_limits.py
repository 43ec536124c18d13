"""What the connections of a broker share: bounds, what has been used of them, memory to receive into.

Made by `listener`, one for all its connections; read by `connection`.
"""

from __future__ import annotations

import mmap

from millrace.broker.server.memory_limits import AnswerBacklog, RequestMemory

LANDING_SIZE = 256 << 10
"""Most bytes that are received at once: so many that system calls do not count, so few that a core's cache
holds them."""


MAPPED_SIZE = 1 << 20
"""From here on a connection's own buffer is memory mapped for it alone: no byte of it is touched before it is
received, and to grow moves none. Doubled and copied, 64 MiB hold the event loop for a tenth of a second."""

ReceiveBuffer = bytearray | mmap.mmap


def receive_buffer(capacity: int) -> ReceiveBuffer:
    if capacity < MAPPED_SIZE:
        return bytearray(capacity)
    return mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class LandingArea:
    """Memory into which every connection receives, one after the other.

    It is a connection's from its `get_buffer` to the end of its `buffer_updated`, which event loops call back
    to back.
    """

    __slots__ = ("buffer", "usable_size", "view")

    def __init__(self, receive_buffer_size: int) -> None:
        """A connection's own buffer has `receive_buffer_size`, or twice, four times ... as much."""
        self.usable_size = receive_buffer_size
        while 2 * self.usable_size <= LANDING_SIZE:
            self.usable_size *= 2
        self.buffer = bytearray(self.usable_size)
        self.view = memoryview(self.buffer)


class ConnectionLimits:
    """The configured bounds, and what all connections of a broker together have used of them."""

    __slots__ = ("backlog", "landing", "memory", "receive_buffer_size", "request_max_size")

    def __init__(
        self,
        *,
        request_max_size: int,
        receive_buffer_size: int,
        backlog: AnswerBacklog,
        memory: RequestMemory,
    ) -> None:
        self.request_max_size = request_max_size
        self.receive_buffer_size = receive_buffer_size
        self.landing = LandingArea(receive_buffer_size)
        self.backlog = backlog
        self.memory = memory
