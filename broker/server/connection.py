"""One client connection: bytes in, whole frames to the dispatcher, answers out in the order of requests.

Received bytes land in one buffer that belongs to the connection. A frame is handed to the dispatcher as a
view into it and is valid only during that call: nothing is copied on the way to the log. The buffer grows
as bytes arrive, never because a frame announces a size, and shrinks again when the connection is quiet.

Order and limits:
- answers leave in the order of their requests; produce and fetch may overlap (several pipelined requests
  under way), any other request runs alone, as in Apache Kafka;
- a peer that does not read its answers is not read from: parsing stops when the unsent answers, or those
  that wait for an earlier one, exceed `connection.send.queue.bytes`, and reading stops when the receive
  buffer is full;
- a frame longer than `socket.request.max.bytes`, a negative one, or one that cannot be a request closes the
  connection; it is counted, and one line in a while is logged.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import structlog

from millrace.broker.errors import ProtocolError
from millrace.broker.server.dispatch import Dispatcher, Frame
from millrace.broker.telemetry.logs import RateLimit
from millrace.broker.telemetry.metrics import API_SLOTS, BrokerMetrics

log = structlog.get_logger("millrace.broker")

SMALLEST_REQUEST_SIZE = 8
"""API key, version and correlation id: fewer bytes cannot be a request."""

MOST_PENDING = 16
"""Requests under way on one connection before the next has to wait."""

LARGEST_ADAPTED_SIZE = 1 << 20
"""How far the receive buffer grows for the sake of fewer system calls alone."""

LARGEST_CORKED_SIZE = 32 << 10
"""Answers made in one parse go out together; when they pass this size, at once."""

_size_at = struct.Struct(">i").unpack_from


class ConnectionLimits:
    """The configured bounds, shared by all connections of a broker."""

    __slots__ = ("receive_buffer_size", "request_max_size", "send_queue_size")

    def __init__(self, *, request_max_size: int, receive_buffer_size: int, send_queue_size: int) -> None:
        self.request_max_size = request_max_size
        self.receive_buffer_size = receive_buffer_size
        self.send_queue_size = send_queue_size


class _Pending:
    """An answer that is not there yet, or waits for an earlier one."""

    __slots__ = ("api_key", "done", "frame", "future", "size", "started")

    def __init__(self, future: asyncio.Future[Any] | None, api_key: int, started: float) -> None:
        self.future = future
        self.frame: Frame = None
        self.size = 0
        self.done = False
        self.api_key = api_key
        self.started = started


class Connection(asyncio.BufferedProtocol):
    """See the module. Created by the listener for every accepted socket."""

    __slots__ = (
        "_buffer",
        "_client_address",
        "_control",
        "_corked",
        "_corked_size",
        "_dispatcher",
        "_end",
        "_ended",
        "_limits",
        "_metrics",
        "_on_closed",
        "_parked_size",
        "_pending",
        "_protocol_errors",
        "_reading_paused",
        "_start",
        "_transport",
        "_view",
        "_writing_paused",
        "last_active",
    )

    def __init__(
        self,
        dispatcher: Dispatcher,
        metrics: BrokerMetrics,
        limits: ConnectionLimits,
        protocol_errors: RateLimit,
        on_closed: Callable[[Connection], None],
    ) -> None:
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._limits = limits
        self._protocol_errors = protocol_errors
        self._on_closed = on_closed
        self._transport: asyncio.Transport | None = None
        self._client_address = ""
        self._buffer = bytearray(limits.receive_buffer_size)
        self._view = memoryview(self._buffer)
        self._start = 0  # first byte not yet parsed
        self._end = 0  # first byte not yet received
        self._pending: deque[_Pending] = deque()
        self._control: asyncio.Task[Any] | None = None
        self._corked: list[bytes | bytearray | memoryview] | None = None
        self._corked_size = 0
        self._parked_size = 0  # answers that wait for an earlier one
        self._writing_paused = False
        self._reading_paused = False
        self._ended = False  # the peer sends no more; what it has sent is still carried out
        self.last_active = time.monotonic()

    # -- what the event loop calls -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self._limits.send_queue_size)
        peer = transport.get_extra_info("peername")
        self._client_address = str(peer[0]) if peer else ""
        self._metrics.connections_opened += 1

    def connection_lost(self, _error: Exception | None) -> None:
        self._transport = None
        for pending in self._pending:
            if pending.future is not None and pending.future is not self._control:
                pending.future.cancel()
        self._pending.clear()
        self._on_closed(self)

    def get_buffer(self, _size_hint: int) -> memoryview:
        return self._view[self._end :]

    def buffer_updated(self, size: int) -> None:
        self._end += size
        self._metrics.bytes_in += size
        self._parse()

    def eof_received(self) -> bool:
        """Close now, or when everything that came before the end has been carried out.

        A producer without acknowledgements sends and goes: its last requests may still wait here for
        their turn.
        """
        self._ended = True
        return not self._finished()

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        self._parse()

    # -- receiving -----------------------------------------------------------------------------------

    def _parse(self) -> None:
        """Hand every whole frame in the buffer to the dispatcher, as far as the limits allow."""
        transport = self._transport
        if transport is None:
            return
        self._corked = []
        try:
            while not self._stalled():
                available = self._end - self._start - 4
                if available < 0:
                    break
                (size,) = _size_at(self._buffer, self._start)
                if not SMALLEST_REQUEST_SIZE <= size <= self._limits.request_max_size:
                    raise ProtocolError(f"a request of {size} bytes was announced")
                if available < size:
                    break
                position = self._start + 4
                self._start = position + size
                self._answer(self._view[position : position + size])
                if self._transport is None:
                    return
        except ProtocolError as error:
            self._uncork()
            self._refuse(error)
            return
        self._uncork()
        if self._ended and self._finished() and self._transport is not None:
            self._transport.close()
            return
        self._make_room()

    def _finished(self) -> bool:
        """Nothing is under way, and no more than a part of a request is left."""
        if self._pending or self._control is not None:
            return False
        available = self._end - self._start - 4
        return available < 0 or available < _size_at(self._buffer, self._start)[0]

    def _stalled(self) -> bool:
        return (
            self._control is not None
            or self._writing_paused
            or len(self._pending) >= MOST_PENDING
            or self._parked_size > self._limits.send_queue_size
        )

    def _make_room(self) -> None:
        """Leave free space after what has been received, or stop reading when that must not grow."""
        if self._start == self._end:
            self._start = self._end = 0
        capacity = len(self._buffer)
        if self._end == capacity:
            if self._start > 0:
                # The move is within one buffer; memoryview assignment allows the overlap.
                kept = self._end - self._start
                self._view[:kept] = self._view[self._start : self._end]
                self._start, self._end = 0, kept
                if capacity < LARGEST_ADAPTED_SIZE and not self._stalled():
                    self._resize(2 * capacity)
            elif self._stalled():
                self._pause_reading()
                return
            else:
                # One frame fills the buffer and goes on: its bytes are here, so the room is earned.
                self._resize(2 * capacity)
        if self._reading_paused and self._transport is not None:
            self._reading_paused = False
            self._transport.resume_reading()

    def _pause_reading(self) -> None:
        if not self._reading_paused and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()

    def _resize(self, capacity: int) -> None:
        grown = bytearray(capacity)
        kept = self._end - self._start
        grown[:kept] = self._view[self._start : self._end]
        self._view.release()
        self._buffer, self._view = grown, memoryview(grown)
        self._start, self._end = 0, kept

    def shrink_if_quiet(self, quiet_since: float) -> None:
        """Give memory back; the listener calls this now and then. Not while a frame is half here."""
        if (
            self._start == self._end
            and self.last_active < quiet_since
            and len(self._buffer) > self._limits.receive_buffer_size
        ):
            self._start = self._end = 0
            self._resize(self._limits.receive_buffer_size)

    # -- answering -----------------------------------------------------------------------------------

    def _answer(self, frame: memoryview) -> None:
        started = self.last_active = time.monotonic()
        answer = self._dispatcher.dispatch(frame, self._client_address)
        api_key = min(frame[0] << 8 | frame[1], API_SLOTS - 1)
        if asyncio.isfuture(answer):
            pending = _Pending(answer, api_key, started)
            self._pending.append(pending)
            answer.add_done_callback(lambda future: self._settle(pending, future))
        elif asyncio.iscoroutine(answer):
            task = asyncio.get_running_loop().create_task(answer)
            pending = _Pending(task, api_key, started)
            self._pending.append(pending)
            self._control = task
            task.add_done_callback(lambda future: self._settle_control(pending, future))
        elif self._pending:
            pending = _Pending(None, api_key, started)
            self._park(pending, cast(Frame, answer))
            self._pending.append(pending)
        else:
            self._send(cast(Frame, answer), api_key, started)

    def _settle(self, pending: _Pending, future: asyncio.Future[Any]) -> None:
        """An answer is there: send it, and those after it that waited only for their turn."""
        if future.cancelled() or self._transport is None:
            return
        error = future.exception()
        if error is not None:
            self._refuse(error)
            return
        was_stalled = self._stalled()
        self._park(pending, future.result())
        while self._pending and self._pending[0].done:
            first = self._pending.popleft()
            self._parked_size -= first.size
            self._send(first.frame, first.api_key, first.started)
        if was_stalled or self._ended:
            self._parse()

    def _park(self, pending: _Pending, frame: Frame) -> None:
        pending.frame = frame
        pending.done = True
        if frame is not None:
            pending.size = len(frame) if isinstance(frame, bytes | bytearray) else sum(map(len, frame))
        self._parked_size += pending.size

    def _settle_control(self, pending: _Pending, future: asyncio.Future[Any]) -> None:
        self._control = None
        self._settle(pending, future)
        self._parse()

    def _send(self, frame: Frame, api_key: int, started: float) -> None:
        transport = self._transport
        if transport is None:
            return
        self._metrics.request_seconds[api_key] += time.monotonic() - started
        if frame is None:
            return
        buffers = (frame,) if isinstance(frame, bytes | bytearray) else frame
        size = sum(map(len, buffers))
        self._metrics.bytes_out += size
        if self._corked is None:
            transport.writelines(buffers)
            return
        self._corked += buffers
        self._corked_size += size
        if self._corked_size > LARGEST_CORKED_SIZE:
            self._uncork()
            self._corked = []

    def _uncork(self) -> None:
        """Send what the requests parsed in one go have been answered with, in one write."""
        corked, self._corked = self._corked, None
        size, self._corked_size = self._corked_size, 0
        if not corked or self._transport is None:
            return
        if size > LARGEST_CORKED_SIZE:
            self._transport.writelines(corked)  # large answers are not copied once more
        else:
            self._transport.write(b"".join(corked))

    def _refuse(self, error: BaseException) -> None:
        """Close on a peer that broke the protocol, or when a failure of ours left nothing to answer with."""
        if not isinstance(error, ProtocolError):
            log.error("connection closed: its request failed", client=self._client_address, exc_info=error)
            self.close()
            return
        self._metrics.connections_closed_for_protocol += 1
        held_back = self._protocol_errors.take("protocol")
        if held_back is not None:
            log.warning(
                "connection closed: the peer does not speak the protocol",
                client=self._client_address,
                reason=str(error),
                held_back=held_back,
            )
        self.close()

    def finish(self) -> None:
        """Take no more requests, send what has been answered, and close."""
        if self._transport is not None:
            self._transport.close()

    def close(self) -> None:
        """Close without sending what is queued."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    @property
    def idle(self) -> bool:
        """Nothing is under way."""
        return not self._pending and self._control is None
