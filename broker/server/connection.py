"""One client connection: bytes in, whole frames to the dispatcher, answers out in the order of requests.

Where bytes are received, and what becomes of those that have to wait, is `receive_buffer.py`'s. A frame is
handed to the dispatcher as a view into that memory and is valid only during that call: nothing is copied on
the way to the log. A frame of `KEPT_FRAME_SIZE` and more, which only a connection's own block of memory can
hold, stays there until the coroutine that answers it has ended: to copy it would hold up everyone.

Order and limits:
- answers leave in the order of their requests; produce and fetch may overlap (several pipelined requests
  under way), any other request runs alone, as in Apache Kafka;
- a peer that does not read its answers is not read from: parsing stops when the unsent answers, with those
  that wait for an earlier one, exceed `connection.send.queue.bytes` (less, when all connections together
  hold much: see `memory_limits.py`), and reading stops when the receive buffer is full;
- a peer that has ended its side is gone, as in Apache Kafka: what it has sent is carried out, what would only
  be answered is dropped, and the connection closes;
- a client over its quota is answered with a throttle time and not read from until that has passed (KIP-219);
- a frame longer than `socket.request.max.bytes`, a negative one, or one that cannot be a request closes the
  connection; it is counted by kind, and one line in a while is logged.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import structlog

from millrace.broker.errors import ACKS_0, ProtocolError, Unanswered
from millrace.broker.server.connection_limits import ConnectionLimits
from millrace.broker.server.context import ConnectionMemory
from millrace.broker.server.dispatch import KEPT_FRAME_SIZE, Answered, Dispatcher, Throttled
from millrace.broker.server.memory_limits import SEND_STALL_SECONDS
from millrace.broker.server.receive_buffer import ReceiveBuffer
from millrace.broker.telemetry.logs import RateLimit
from millrace.broker.telemetry.metrics import API_SLOTS, BrokerMetrics

log = structlog.get_logger("millrace.broker")

SMALLEST_REQUEST_SIZE = 8
"""API key, version and correlation id: fewer bytes cannot be a request."""

MOST_PENDING = 16
"""Requests under way on one connection before the next has to wait."""

SEND_HIGH_WATER = 128 << 10
"""Unsent bytes from which on a peer counts as slow: what waits for it is kept count of."""

LARGEST_CORKED_SIZE = 32 << 10
"""Answers made in one parse go out together; when they pass this size, at once."""

_size_at = struct.Struct(">i").unpack_from


class _Pending:
    """An answer that is not there yet, or waits for an earlier one."""

    __slots__ = ("api_key", "done", "frame", "future", "is_given_up", "size", "started")

    def __init__(self, future: asyncio.Future[Any] | None, api_key: int, started: float) -> None:
        self.future = future
        self.frame: Answered = None
        self.size = 0
        self.done = False
        self.is_given_up = False  # nobody is there to hear it
        self.api_key = api_key
        self.started = started


class Connection(asyncio.BufferedProtocol):
    """See the module. Created by the listener for every accepted socket."""

    __slots__ = (
        "_backlog",
        "_control",
        "_corked",
        "_corked_size",
        "_dispatcher",
        "_ended",
        "_last_sent",
        "_limits",
        "_memory",
        "_metrics",
        "_muted",
        "_on_closed",
        "_on_opened",
        "_parked_size",
        "_pending",
        "_progress",
        "_protocol_errors",
        "_reading_paused",
        "_seen_unsent_size",
        "_told_size",
        "_transport",
        "_unsent_size",
        "_writing_paused",
        "client_address",
        "last_active",
        "received",
    )

    def __init__(
        self,
        dispatcher: Dispatcher,
        metrics: BrokerMetrics,
        limits: ConnectionLimits,
        protocol_errors: RateLimit,
        on_closed: Callable[[Connection], None],
        on_opened: Callable[[Connection], bool] = lambda _connection: True,
    ) -> None:
        """`on_opened` may refuse the connection, whose `client_address` is known by then."""
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._limits = limits
        self._backlog = limits.backlog
        self._protocol_errors = protocol_errors
        self._on_opened = on_opened
        self._on_closed = on_closed
        self._transport: asyncio.Transport | None = None
        self.client_address = ""
        self._memory = ConnectionMemory()
        self.received = ReceiveBuffer(
            limits.receive_buffer_size, limits.landing, limits.memory, self._room_came
        )
        self._pending: deque[_Pending] = deque()
        self._control: asyncio.Task[Any] | None = None
        self._corked: list[bytes | bytearray | memoryview] | None = None
        self._corked_size = 0
        self._parked_size = 0  # answers that wait for an earlier one
        self._unsent_size = 0  # answers that the peer has not read, while it is slow
        self._seen_unsent_size = 0  # what was unsent when the listener last looked
        self._told_size = 0  # what the backlog has been told of both
        self._progress: tuple[int, int, float, float] = (0, 0, 0.0, 0.0)
        self._muted: asyncio.TimerHandle | None = None
        self._writing_paused = False
        self._reading_paused = False
        self._ended = False  # the peer sends no more; what it has sent is still carried out
        self.last_active = self._last_sent = time.monotonic()

    # -- what the event loop calls -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=SEND_HIGH_WATER)
        peer = transport.get_extra_info("peername")
        self.client_address = str(peer[0]) if peer else ""
        if not self._on_opened(self):
            self._drop()
            return
        self._metrics.connections_opened += 1

    def connection_lost(self, _error: Exception | None) -> None:
        self._transport = None
        if self._muted is not None:
            self._muted.cancel()
            self._muted = None
        self._unsent_size = self._parked_size = 0
        self._tell_backlog()
        if not self.received.is_pinned:
            self.received.release()
        for pending in self._pending:
            if pending.future is not None and pending.future is not self._control:
                pending.future.cancel()
        self._pending.clear()
        self._on_closed(self)

    def get_buffer(self, _size_hint: int) -> memoryview:
        return self.received.space(self._stalled)

    def buffer_updated(self, size: int) -> None:
        self._metrics.bytes_in += size
        self.last_active = time.monotonic()
        received = self.received
        if received.is_landing:
            own = received.enter_landing(size)
            goes_on = False
            try:
                goes_on = self._take_frames()
            finally:
                is_room_due = received.leave_landing(own, is_closed=self._transport is None)
        else:
            received.end += size
            goes_on = is_room_due = self._take_frames()
        if goes_on and is_room_due and not received.make_room(self._stalled):
            self._pause_reading()

    def eof_received(self) -> bool:
        """Close now, or when every request that came before the end has been taken up: a producer without
        acknowledgements sends and goes, and its last requests may still wait here for their turn.
        """
        self._ended = True
        self._give_up_answers()
        self._parse()  # what had to wait for those answers need not any more
        if not self._finished():
            return True
        self._drop_rest()
        return False

    def _give_up_answers(self) -> None:
        """Nobody reads what is waited for any more, however long it may be waited for. What changes
        something goes on: an append is in the log, and a request that runs alone is not interrupted."""
        control, under_way = self._control, self._pending
        self._pending = deque(each for each in under_way if control is not None and each.future is control)
        for pending in under_way:
            if pending.future is not None and pending.future is not control:
                pending.is_given_up = True
                pending.future.cancel()
        self._parked_size = 0
        self._tell_backlog()

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        self._unsent_size = 0
        self._parse()

    # -- receiving -----------------------------------------------------------------------------------

    def _parse(self) -> None:
        if not self._take_frames():
            return
        if not self.received.make_room(self._stalled):
            self._pause_reading()
        elif self._reading_paused and self._transport is not None:
            self._reading_paused = False
            self._transport.resume_reading()

    def _take_frames(self) -> bool:
        """Hand every whole frame in the buffer to the dispatcher, as far as the limits allow. False when the
        connection has ended."""
        if self._transport is None:
            return False
        self._corked = []
        received = self.received
        try:
            while True:
                available = received.end - received.start - 4
                if available < 0 or self._stalled():
                    break
                (size,) = _size_at(received.block, received.start)
                if not SMALLEST_REQUEST_SIZE <= size <= self._limits.request_max_size:
                    raise self._impossible(size)
                if available < size:
                    break
                position = received.start + 4
                received.start = position + size
                self._answer(received.view[position : position + size])
                if self._transport is None:
                    return False
        except (ProtocolError, Unanswered) as error:
            self._uncork()
            self._refuse(error)
            return False
        self._uncork()
        if self._unsent_size or self._parked_size or self._told_size:
            self._tell_backlog()
        if self._ended and self._finished() and self._transport is not None:
            self._drop_rest()
            self._transport.close()
            return False
        return True

    def _drop_rest(self) -> None:
        """The peer has gone in the middle of a request, if anything is left: killed, or no client at all."""
        size = self.received.end - self.received.start
        if not size:
            return
        self.received.start = self.received.end
        self._metrics.count_close("protocol: cut")
        held_back = self._protocol_errors.take("cut")
        if held_back is not None:
            log.info(
                "the peer closed its connection in the middle of a request",
                client=self.client_address,
                received=size,
                held_back=held_back,
            )

    def _impossible(self, size: int) -> ProtocolError:
        """Say what may have come instead of a request."""
        received = self.received
        start = bytes(received.block[received.start : received.start + 4])
        if start in (b"GET ", b"POST", b"HEAD", b"PUT "):
            reason = "it speaks HTTP; this port speaks the Kafka protocol"
        elif start[:2] == b"\x16\x03":
            reason = "it speaks TLS; this listener does not"
        elif size > 0:
            reason = (
                f"it announced a request of {size} bytes, "
                f"socket.request.max.bytes is {self._limits.request_max_size}"
            )
        else:
            reason = f"it announced a request of {size} bytes"
        error = ProtocolError(reason)
        error.kind = "size"
        return error

    def _finished(self) -> bool:
        """Nothing is under way, and no more than a part of a request is left."""
        if self._pending or self._control is not None:
            return False
        received = self.received
        available = received.end - received.start - 4
        return available < 0 or available < _size_at(received.block, received.start)[0]

    def _stalled(self) -> bool:
        return (
            self._control is not None
            or self._muted is not None
            or len(self._pending) >= MOST_PENDING
            or self._unsent_size + self._parked_size > self._backlog.queue_limit
        )

    def _room_came(self) -> None:
        asyncio.get_running_loop().call_soon(self._parse)

    def _pause_reading(self) -> None:
        if not self._reading_paused and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()

    def is_stuck(self, now: float) -> bool:
        """Whether half a request has lain here for `SEND_STALL_SECONDS`, with not a byte since.

        To be asked now and then: it compares with what it saw before.
        """
        start, end = self.received.start, self.received.end
        seen = (start, end, self.last_active)
        if start == end or self._stalled() or self._reading_paused or self._progress[:3] != seen:
            self._progress = (*seen, now)
        return now - self._progress[3] >= SEND_STALL_SECONDS

    # -- answering -----------------------------------------------------------------------------------

    def _answer(self, frame: memoryview) -> None:
        started = self.last_active = time.monotonic()
        answer = self._dispatcher.dispatch(frame, self.client_address, self._memory)
        api_key = min(frame[0] << 8 | frame[1], API_SLOTS - 1)
        if asyncio.isfuture(answer) and self._ended:
            answer.cancel()
        elif asyncio.isfuture(answer):
            pending = _Pending(answer, api_key, started)
            self._pending.append(pending)
            answer.add_done_callback(lambda future: self._settle(pending, future))
        elif asyncio.iscoroutine(answer):
            task = asyncio.get_running_loop().create_task(answer)
            pending = _Pending(task, api_key, started)
            self._pending.append(pending)
            self._control = task
            self.received.is_pinned = len(frame) >= KEPT_FRAME_SIZE
            task.add_done_callback(lambda future: self._settle_control(pending, future))
        elif self._pending:
            pending = _Pending(None, api_key, started)
            self._park(pending, cast(Answered, answer))
            self._pending.append(pending)
        else:
            self._send(cast(Answered, answer), api_key, started)

    def _settle(self, pending: _Pending, future: asyncio.Future[Any]) -> None:
        """An answer is there: send it, and those after it that waited only for their turn."""
        if self._transport is None or pending.is_given_up:
            return
        if future.cancelled():
            # Nobody will answer it, and all behind it would wait for their turn for ever.
            log.warning("connection closed: a request was given up", client=self.client_address)
            self.close("failure")
            return
        error = future.exception()
        if error is not None:
            self._refuse(error)
            return
        self._park(pending, future.result())
        while self._pending and self._pending[0].done:
            first = self._pending.popleft()
            self._parked_size -= first.size
            self._send(first.frame, first.api_key, first.started)
        # Whatever has been received and not taken yet: what kept it waiting may have ended long before, as
        # the bound for the answers grows when other peers read theirs.
        if self.received.start != self.received.end or self._ended:
            self._parse()
        elif self._unsent_size or self._parked_size or self._told_size:
            self._tell_backlog()

    def _park(self, pending: _Pending, answer: Answered) -> None:
        pending.frame = answer
        pending.done = True
        frame = answer.frame if isinstance(answer, Throttled) else answer
        if frame is not None:
            pending.size = len(frame) if isinstance(frame, bytes | bytearray) else sum(map(len, frame))
        self._parked_size += pending.size

    def _settle_control(self, pending: _Pending, future: asyncio.Future[Any]) -> None:
        self._control = None
        self.received.is_pinned = False
        if self._transport is None:
            self.received.release()  # its frame was in use to the end
        later = None if future.cancelled() or future.exception() else future.result()
        if asyncio.isfuture(later):
            # All that is left of it is to be waited for, and those behind it need not.
            if self._ended or self._transport is None:
                later.cancel()
                if pending in self._pending:
                    self._pending.remove(pending)
            else:
                pending.future = later
                later.add_done_callback(lambda done: self._settle(pending, done))
            self._parse()
            return
        self._settle(pending, future)
        self._parse()

    def _send(self, answer: Answered, api_key: int, started: float) -> None:
        transport = self._transport
        if transport is None:
            return
        self._last_sent = time.monotonic()
        self._metrics.request_seconds[api_key] += self._last_sent - started
        if isinstance(answer, Throttled):
            self._mute(answer.throttle_ms)
            answer = answer.frame
        if answer is None:
            return
        buffers = (answer,) if isinstance(answer, bytes | bytearray) else answer
        size = sum(map(len, buffers))
        self._metrics.bytes_out += size
        if self._corked is None:
            transport.writelines(buffers)
            if self._writing_paused:
                self._unsent_size += size
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
        if self._writing_paused:
            self._unsent_size += size

    def _tell_backlog(self) -> None:
        """Keep count of what this peer has not read, among what all peers have not."""
        size = self._unsent_size + self._parked_size
        if size != self._told_size:
            self._told_size = size
            self._backlog.set(self, size, time.monotonic())

    def look_at_reader(self, now: float) -> None:
        """Note whether a slow peer has read something; the listener asks now and then.

        What it holds stays counted: an answer is one piece of memory until its last byte is sent.
        """
        if self._unsent_size and self._transport is not None:
            unsent_size = self._transport.get_write_buffer_size()
            if unsent_size < self._seen_unsent_size:
                self._backlog.progressed(self, now)
                self._last_sent = now
            self._seen_unsent_size = unsent_size

    def _mute(self, throttle_ms: int) -> None:
        """Take no further request for a while; a longer muting that is under way goes on."""
        loop = asyncio.get_running_loop()
        until = loop.time() + throttle_ms / 1000
        if self._muted is not None:
            if self._muted.when() >= until:
                return
            self._muted.cancel()
        self._metrics.throttled_requests += 1
        self._muted = loop.call_at(until, self._unmute)

    def _unmute(self) -> None:
        self._muted = None
        self._parse()

    def _refuse(self, error: BaseException) -> None:
        """Close on a peer that broke the protocol, or when a failure of ours left nothing to answer with."""
        if not isinstance(error, ProtocolError):
            held_back = self._protocol_errors.take("failure")
            if held_back is not None:
                log.error(
                    "connection closed: its request failed",
                    client=self.client_address,
                    held_back=held_back,
                    exc_info=error,
                )
            self.close("failure")
            return
        self._metrics.connections_closed_for_protocol += 1
        held_back = self._protocol_errors.take(error.kind)
        if held_back is not None:
            log.warning(
                "connection closed: a request with acks=0 failed"
                if error.kind == ACKS_0
                else "connection closed: the peer does not speak the protocol",
                client=self.client_address,
                reason=str(error),
                held_back=held_back,
            )
        self.close(f"protocol: {error.kind}")

    def finish(self) -> None:
        """Take no more requests, send what has been answered, and close."""
        if self._transport is not None:
            self._transport.close()

    def close(self, reason: str) -> None:
        """Close without sending what is queued; `reason` is what metrics count."""
        if self._transport is not None:
            self._metrics.count_close(reason)
            self._drop()

    def _drop(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    @property
    def idle_since(self) -> float:
        """When the last byte came, or went. What is under way does not count: who has nothing to say and
        nothing to read for so long is gone, whatever he may be waiting for."""
        return max(self.last_active, self._last_sent)
