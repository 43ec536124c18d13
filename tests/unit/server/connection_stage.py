"""A connection of the broker on a transport that notes what is done to it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from millrace.broker.server.connection import Connection
from millrace.broker.server.connection_limits import ConnectionLimits
from millrace.broker.server.memory_limits import (
    UNBOUNDED,
    AnswerBacklog,
    RequestMemory,
)
from millrace.broker.telemetry.logs import RateLimit
from millrace.broker.telemetry.metrics import BrokerMetrics

BUFFER_SIZE = 4096
LARGEST_REQUEST = 1 << 20
QUEUE_SIZE = 10_000


class NotingTransport:
    def __init__(self) -> None:
        self.written = bytearray()
        self.unread_size = 0  # set by tests that play a peer who does not read
        self.stalled: Connection | None = None
        self.reading = True
        self.closed = self.aborted = False

    def set_write_buffer_limits(self, high: int) -> None:
        self.high = high

    def get_extra_info(self, _name: str) -> tuple[str, int]:
        return ("10.0.0.1", 5)

    def write(self, data: bytes) -> None:
        self.written += data
        if self.stalled is not None:
            self.unread_size += len(data)
            if self.unread_size > self.high:
                self.stalled.pause_writing()

    def writelines(self, buffers: Any) -> None:
        for buffer in buffers:
            self.write(buffer)

    def get_write_buffer_size(self) -> int:
        return self.unread_size

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True


def limits_of(memory: RequestMemory, backlog: AnswerBacklog | None = None) -> ConnectionLimits:
    return ConnectionLimits(
        request_max_size=LARGEST_REQUEST,
        receive_buffer_size=BUFFER_SIZE,
        backlog=AnswerBacklog(UNBOUNDED, LARGEST_REQUEST, QUEUE_SIZE) if backlog is None else backlog,
        memory=memory,
    )


class Server:
    """One connection; `answer(body)` stands for the dispatcher and its handlers."""

    def __init__(
        self,
        answer: Callable[[bytes], Any],
        *,
        memory: RequestMemory | None = None,
        backlog: AnswerBacklog | None = None,
        limits: ConnectionLimits | None = None,
    ) -> None:
        self.seen: list[bytes] = []
        self.transport = NotingTransport()
        self.metrics = BrokerMetrics()
        self.gone: list[Connection] = []
        self._answer = answer
        self.connection = Connection(
            self,  # type: ignore[arg-type]
            self.metrics,
            limits or limits_of(memory or RequestMemory(), backlog),
            RateLimit(lambda: 0.0),
            self.gone.append,
        )
        self.connection.connection_made(self.transport)  # type: ignore[arg-type]

    def dispatch(self, frame: memoryview, client_address: str, _memory: Any) -> Any:
        assert client_address == "10.0.0.1"
        body = bytes(frame[8:])
        self.seen.append(body)
        return self._answer(body)

    def receive(self, data: bytes) -> int:
        """As the event loop does, which holds the buffer until its call is over; how many bytes found room
        while reading was not paused."""
        taken = 0
        while taken < len(data) and self.transport.reading and not self.transport.aborted:
            room = self.connection.get_buffer(-1)
            assert len(room) > 0, "a buffer without room closes the connection"
            count = min(len(room), len(data) - taken)
            room[:count] = data[taken : taken + count]
            self.connection.buffer_updated(count)
            room.release()
            taken += count
        return taken


def request(body: bytes) -> bytes:
    return struct.pack(">ihhi", 8 + len(body), 3, 0, 0) + body
