"""The bounds of a broker's connections, and what all of them together have used of them.

Made by `listener`, one for all its connections; read by `connection`.
"""

from __future__ import annotations

from millrace.broker.server.memory_limits import AnswerBacklog, RequestMemory
from millrace.broker.server.receive_buffer import LandingArea


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
