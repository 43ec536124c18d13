"""One TCP connection to one broker: framed, pipelined, bounded.

`opening.py` makes one; `Connection.call` sends one request made of kio types, `Connection.exchange` one whose
bytes the caller lays out (the hot produce and fetch paths) and gives back the raw answer. They are opened and
closed by `connection_pool.py`.

Receiving: bytes land in a small scratch buffer until a frame's size is known. A frame that is whole there
is copied out (it is small); a larger one gets a buffer of its own, into which the socket then writes
directly. The memoryview of a frame belongs to the caller: it is not written again while a view of it lives.

Sending: the buffers of a request go to `transport.writelines` one by one. uvloop hands them to `writev`
and keeps references to what the socket did not take, so a 64 MB request costs no copy; the selector loop of
Python 3.11 joins them first. A buffer must not change before the answer is there.

Invariants: a server answers in the order of the requests, so the oldest request owns the next frame. An
answer that nobody asked for, a wrong correlation id, or a size out of bounds is a breach: the connection
closes with an error that names cluster and address, and every request under way fails with it. A request
that gets no answer in time closes the connection as well, because all behind it would wait too. A large
answer that is arriving is not late, however slow the link is: only silence counts. Otherwise a fetch that is
larger than what the link carries in its timeout would be asked for again for ever.

A server over whose quota this client is says for how long it wants nothing more (KIP-219): nothing is sent
on the connection until then (`throttle`), and what is under way is not late meanwhile, because the server
does not read it. Answers of kio types are looked at here; who reads an answer by hand tells. Those times have
no bound (KIP-599): a request that does not get its turn to be sent within its timeout fails alone, with
nothing sent, and the connection stays.
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias, cast

from kio.index import load_payload_module, load_response_schema
from kio.static.constants import EntityType
from kio.static.protocol import RequestPayload, ResponsePayload

from millrace.broker.client.foreign_answers import foreign_answer
from millrace.broker.client.frame_memory import SMALLEST, FrameMemory
from millrace.broker.client.login import Access
from millrace.broker.client.tls import tls_refusal
from millrace.broker.errors import (
    NetworkException,
    ProtocolError,
    RequestTimedOut,
    UnsupportedVersion,
)
from millrace.broker.protocol.address import Address
from millrace.broker.protocol.frames import decode_response, encode_request

Bytes: TypeAlias = bytes | bytearray | memoryview
Encoder: TypeAlias = Callable[[int], Sequence[Bytes]]

# Answers larger than this are refused before memory is set aside for them. A fetch answer may exceed its
# request's max_bytes by one batch, whatever that batch's size.
MAX_RESPONSE_SIZE = 256 << 20
# Also the most that is ever copied of a large frame (its beginning).
_SCRATCH_SIZE = 16 << 10
_SIZE = struct.Struct(">i")
_CORRELATION_ID = struct.Struct(">i")


@dataclass(frozen=True, slots=True)
class VersionRanges:
    """What one server offers: the lowest and highest version of each API, by API key."""

    ranges: dict[int, tuple[int, int]]

    def offers(self, api_key: int, version: int) -> bool:
        low, high = self.ranges.get(api_key, (0, -1))
        return low <= version <= high

    def highest(self, api_key: int, at_least: int, at_most: int) -> int | None:
        """The highest version within both ranges; None where they do not meet."""
        low, high = self.ranges.get(api_key, (0, -1))
        version = min(high, at_most)
        return version if version >= max(low, at_least) else None


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request under way. Its place in the queue stays when the caller gives up on it."""

    correlation_id: int
    answer: asyncio.Future[memoryview]
    timer: asyncio.TimerHandle | None = field(default=None)


class Connection(asyncio.BufferedProtocol):
    """See the module's text. Made by `open_connection`. `on_close` is called once, when it has closed."""

    def __init__(
        self,
        cluster: str,
        address: Address,
        client_id: str,
        max_response_size: int,
        access: Access | None = None,
        frame_memory: FrameMemory | None = None,
    ) -> None:
        self.cluster = cluster
        self.address = address
        self.versions = VersionRanges({})
        self.on_close: Callable[[], None] | None = None
        self.on_throttle: Callable[[int], None] | None = None
        self._access = access
        # Why client and server do not accept each other, once that is known.
        self.refusal: str | None = None
        self.client_id = client_id
        self._max_response_size = max_response_size
        self._frame_memory = frame_memory
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[_Waiting] = deque()
        self._next_correlation_id = 0
        self._closed_by: Exception | None = None
        # Requests are sent in the order in which they were made, also when the socket is full: the lock is
        # fair, whereas those who wait for an event can be overtaken by one who comes just as it is set.
        self._turn = asyncio.Lock()
        self._queued_count = 0  # who may have to wait for the turn, or has it and waits for the server
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._all_answered = asyncio.Event()
        self._all_answered.set()
        self._is_full = False
        self._throttled_until = -math.inf
        self._throttle_end: asyncio.TimerHandle | None = None
        self._scratch = bytearray(_SCRATCH_SIZE)
        self._scratch_view = memoryview(self._scratch)
        self._scratch_filled = 0
        self._frame: memoryview | None = None
        self._frame_filled = 0
        self._frame_grew_at = -math.inf

    # --- requests -----------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self._transport is not None and self._closed_by is None

    @property
    def was_made(self) -> bool:
        """Whether the server has taken the connection, and shaken hands where TLS is spoken."""
        return self._transport is not None

    @property
    def throttle_left_ms(self) -> float:
        """For how long the server wants nothing more from now on; 0: it takes requests."""
        return max(0.0, (self._throttled_until - self._loop.time()) * 1000)

    async def call(self, request: RequestPayload, timeout_ms: float) -> Any:
        """Send a request made of kio types and read its answer.

        Raises UnsupportedVersion before anything is sent where the server does not offer the version,
        NetworkException when the connection is lost, RequestTimedOut (also where the request could not be
        sent for so long), ProtocolError.
        """
        key, version = int(request.__api_key__), int(request.__version__)
        if not self.versions.offers(key, version):
            offered = "{}-{}".format(*self.versions.ranges[key]) if key in self.versions.ranges else "none"
            raise UnsupportedVersion(
                f"{self}: {type(request).__name__} version {version} is not offered (offered: {offered})"
            )
        frame = await self.exchange(
            lambda correlation_id: (encode_request(request, correlation_id, self.client_id),), timeout_ms
        )
        return self._read_answer(_response_type(key, version), frame)

    async def exchange(self, encode: Encoder, timeout_ms: float) -> memoryview:
        """Send the buffers that `encode(correlation_id)` lays out (size prefix included); wait for the
        answer's frame, which begins with the correlation id. The timeout holds for the turn to send, and
        from then on for the answer."""
        if self._has_turn():
            return await self._send(encode, timeout_ms).answer
        await self._take_turn(timeout_ms)
        try:
            waiting = self._send(encode, timeout_ms)
        finally:
            self._turn.release()
        return await waiting.answer

    @asynccontextmanager
    async def alone(self, timeout_ms: float) -> AsyncIterator[Callable[[RequestPayload], Awaitable[Any]]]:
        """The turn to send, kept: what is called in this context goes out with nothing between it, after
        what was sent before is answered. Gives a function like `call`. What has to be said on this very
        connection cannot go another way, so what is only before it is waited out and is none of its timeout:
        a throttle time, and an answer that the server holds back (a long poll, a JoinGroup), which has a
        timeout of its own."""
        self._queued_count += 1
        try:
            await self._turn.acquire()
        finally:
            self._queued_count -= 1
        try:
            await self._all_answered.wait()
            await self._until_writable(timeout_ms + self.throttle_left_ms)

            async def ask(request: RequestPayload) -> Any:
                await self._until_writable(timeout_ms)
                waiting = self._send(
                    lambda correlation_id: (encode_request(request, correlation_id, self.client_id),),
                    timeout_ms,
                )
                key, version = int(request.__api_key__), int(request.__version__)
                return self._read_answer(_response_type(key, version), await waiting.answer)

            yield ask
        finally:
            self._turn.release()

    async def post(self, encode: Encoder, timeout_ms: float) -> None:
        """Send a request that the server does not answer (a produce request with acks=0)."""
        if self._has_turn():
            self._write(encode(self._take_correlation_id()))
            return
        await self._take_turn(timeout_ms)
        try:
            self._write(encode(self._take_correlation_id()))
        finally:
            self._turn.release()

    def decode(self, response_type: type[ResponsePayload], frame: memoryview) -> Any:
        """Read an answer; one that cannot be read closes the connection, as nothing after it is safe."""
        try:
            return decode_response(response_type, frame.toreadonly())  # kio reads no writable buffer
        except (ProtocolError, ValueError) as error:
            raise self.breach(str(error)) from error

    def _read_answer(self, response_type: type[ResponsePayload], frame: memoryview) -> Any:
        answer = self.decode(response_type, frame)
        if throttle_time := getattr(answer, "throttle_time", None):
            self.throttle(round(throttle_time.total_seconds() * 1000))
        return answer

    def throttle(self, throttle_ms: int) -> None:
        """Send nothing for so long, as the server has asked for in an answer; 0 asks for nothing."""
        if throttle_ms <= 0 or self._closed_by is not None:
            return
        if self.on_throttle is not None:
            self.on_throttle(throttle_ms)
        until = self._loop.time() + throttle_ms / 1000
        if until <= self._throttled_until:
            return
        self._throttled_until = until
        self._may_write.clear()
        if self._throttle_end is not None:
            self._throttle_end.cancel()
        self._throttle_end = self._loop.call_later(throttle_ms / 1000, self._unthrottle)

    def _unthrottle(self) -> None:
        self._throttle_end = None
        if not self._is_full:
            self._may_write.set()

    def breach(self, reason: str) -> ProtocolError:
        """Close because the server broke the protocol in a way only the caller could see; the error to
        raise is returned."""
        error = ProtocolError(f"{self}: {reason}")
        self._fail(error)
        return error

    def fail(self, reason: str) -> None:
        """Close because it is of no more use. Requests under way fail with NetworkException."""
        self._fail(NetworkException(f"{self}: {reason}"))

    def close(self) -> None:
        """Close now. Requests under way fail with NetworkException."""
        self._fail(NetworkException(f"{self}: closed by this client"))

    async def close_when_idle(self, timeout_ms: float) -> None:
        """Let the requests under way end, then close: for a connection that has been replaced."""
        answers = [waiting.answer for waiting in self._waiting]
        try:
            if answers:
                await asyncio.wait(answers, timeout=timeout_ms / 1000)
        finally:
            self.close()

    def __str__(self) -> str:
        return f"cluster {self.cluster} at {self.address}"

    def _has_turn(self) -> bool:
        """Whether nobody is before who asks, and the server takes more: what is sent in one go needs no turn.
        Raises what has closed the connection."""
        if self._queued_count or self._turn.locked() or not self._may_write.is_set():
            return False
        if self._closed_by is not None:
            raise _again(self._closed_by)
        return True

    async def _take_turn(self, timeout_ms: float) -> None:
        """The turn to send, which the caller gives back, with a server that takes more. Raises
        RequestTimedOut where that takes longer."""
        self._queued_count += 1
        try:
            deadline = self._loop.time() + timeout_ms / 1000
            await self._within(self._turn.acquire(), deadline, timeout_ms)
            try:
                await self._until_writable(timeout_ms, deadline)
            except BaseException:
                self._turn.release()
                raise
        finally:
            self._queued_count -= 1

    async def _until_writable(self, timeout_ms: float, deadline: float | None = None) -> None:
        if self._closed_by is None and not self._may_write.is_set():
            if deadline is None:
                deadline = self._loop.time() + timeout_ms / 1000
            await self._within(self._may_write.wait(), deadline, timeout_ms)
        if self._closed_by is not None:
            raise _again(self._closed_by)

    async def _within(self, work: Awaitable[Any], deadline: float, timeout_ms: float) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await work
        except TimeoutError:
            raise RequestTimedOut(f"{self}: {self.unsent(timeout_ms)}") from None

    def unsent(self, timeout_ms: float) -> str:
        """Why a request was not sent within its timeout, in words."""
        why = "others are before this one"
        if left_ms := self.throttle_left_ms:
            why = f"the server wants nothing more for another {left_ms:.0f} ms (a quota)"
        elif self._is_full:
            why = "the server takes nothing more"
        return f"not sent within {timeout_ms:.0f} ms: {why}"

    def _send(self, encode: Encoder, timeout_ms: float) -> _Waiting:
        waiting = _Waiting(self._take_correlation_id(), self._loop.create_future())
        buffers = encode(waiting.correlation_id)
        self._waiting.append(waiting)
        self._all_answered.clear()
        waiting.timer = self._loop.call_later(timeout_ms / 1000, self._on_timeout, waiting, timeout_ms)
        self._write(buffers)
        return waiting

    def _take_correlation_id(self) -> int:
        correlation_id = self._next_correlation_id
        self._next_correlation_id = (correlation_id + 1) & 0x7FFFFFFF
        return correlation_id

    def _write(self, buffers: Sequence[Bytes]) -> None:
        transport = cast(asyncio.Transport, self._transport)
        if len(buffers) == 1:
            transport.write(buffers[0])
        else:
            transport.writelines(buffers)

    def _on_timeout(self, waiting: _Waiting, timeout_ms: float) -> None:
        # Also for those whose turn came with the end of an answer that was long on its way.
        left_s = max(self._frame_grew_at, self._throttled_until) + timeout_ms / 1000 - self._loop.time()
        if left_s > 0:
            waiting.timer = self._loop.call_later(left_s, self._on_timeout, waiting, timeout_ms)
            return
        behind = len(self._waiting) - 1
        others = f"; {behind} requests beside it fail with it" if behind else ""
        what = "no answer"
        if self._frame is not None:
            what = f"nothing more of an answer ({self._frame_filled} of {len(self._frame)} bytes are there)"
        self._fail(RequestTimedOut(f"{self}: {what} within {timeout_ms:.0f} ms{others}"))

    def _fail(self, error: Exception) -> None:
        """Close for good, once; every request under way gets the error."""
        if self._closed_by is not None:
            return
        self._closed_by = error
        if self._transport is not None:
            # abort, not close: close would first wait until everything queued is written, which a
            # stalled server prevents for ever.
            self._transport.abort()
        if self._throttle_end is not None:
            self._throttle_end.cancel()
        self._may_write.set()
        self._frame = None
        if self.on_close is not None:
            self.on_close()
        while self._waiting:
            waiting = self._waiting.popleft()
            if waiting.timer is not None:
                waiting.timer.cancel()
            if not waiting.answer.done():
                waiting.answer.set_exception(_again(error))
        self._all_answered.set()

    # --- what the transport calls -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._closed_by is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None and self._access is not None and self._access.tls is not None:
            # In TLS 1.3 a server refuses a client's certificate after the client's side of the handshake.
            self.refusal = tls_refusal(exc, self.address.host, self._access.tls.config)
        reason = self.refusal or (str(exc) if exc else "the server closed the connection")
        if self._waiting and self.refusal is None:
            reason += self._silent_end()
        if self._frame is not None:
            reason += f" within a frame ({self._frame_filled} of {len(self._frame)} bytes were there)"
        self._fail(NetworkException(f"{self}: {reason}"))

    def _silent_end(self) -> str:
        """What it may mean that a server closes a connection on which it served nothing."""
        if self._next_correlation_id - len(self._waiting) > 2:  # two may have been about versions
            return ""
        if not self.versions.ranges:
            if self._access is None or self._access.tls is None:
                return (
                    " before its first answer; a TLS port does that (set security.protocol to SSL or "
                    "SASL_SSL), and one that does not speak Kafka's protocol"
                )
            if self._access.tls.config.cert is None:
                return " before its first answer; one that asks for a client certificate does that"
        elif self._access is None or not self._access.logs_in:
            return " at the first request; one that asks for a login does that: see security.protocol"
        return ""

    def pause_writing(self) -> None:
        self._is_full = True
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._is_full = False
        if self._throttle_end is None:
            self._may_write.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._frame is not None:
            return self._frame[self._frame_filled :]
        return self._scratch_view[self._scratch_filled :]

    def buffer_updated(self, nbytes: int) -> None:
        frame = self._frame
        if frame is None:
            self._scratch_filled += nbytes
            self._read_scratch()
            return
        self._frame_filled += nbytes
        self._frame_grew_at = self._loop.time()
        if self._frame_filled == len(frame):
            self._frame = None
            self._deliver(frame)

    def _read_scratch(self) -> None:
        """Deliver the whole frames in the scratch buffer, and begin a frame of its own for the rest."""
        position, filled = 0, self._scratch_filled
        while filled - position >= 4:
            (size,) = _SIZE.unpack_from(self._scratch, position)
            if not self._accepts(size):
                return
            there = self._scratch_view[position + 4 : min(filled, position + 4 + size)]
            if len(there) < size:
                self._begin_frame(size, there)
                position = filled
                break
            position += 4 + size
            self._deliver(memoryview(bytearray(there)))
        rest = filled - position
        if rest and position:
            self._scratch_view[:rest] = self._scratch[position:filled]
        self._scratch_filled = rest

    def _begin_frame(self, size: int, there: memoryview) -> None:
        if self._frame_memory is None or size < SMALLEST:
            self._frame = memoryview(bytearray(size))
        else:
            try:
                self._frame = self._frame_memory.take(size)
            except MemoryError as error:
                self.fail(str(error))
                return
        self._frame[: len(there)] = there
        self._frame_filled = len(there)
        self._frame_grew_at = self._loop.time()

    def _accepts(self, size: int) -> bool:
        """Whether a frame of this size may follow; otherwise the connection is closed."""
        if self._closed_by is not None:
            return False
        is_in_bounds = _CORRELATION_ID.size <= size <= self._max_response_size
        if not self.versions.ranges and not is_in_bounds:
            self.refusal = foreign_answer(bytes(self._scratch_view[: self._scratch_filled]))
            self.breach(self.refusal)
        elif not self._waiting:
            self.breach(f"an answer of {size} bytes that nothing was asked for")
        elif not is_in_bounds:
            self.breach(f"an answer of {size} bytes; between 4 and {self._max_response_size} are accepted")
        return self._closed_by is None

    def _deliver(self, frame: memoryview) -> None:
        if not self._waiting:
            self.breach(f"an answer of {len(frame)} bytes that nothing was asked for")
            return
        (correlation_id,) = _CORRELATION_ID.unpack_from(frame)
        waiting = self._waiting[0]
        if correlation_id != waiting.correlation_id:
            self.breach(f"an answer with correlation id {correlation_id}, expected {waiting.correlation_id}")
            return
        self._waiting.popleft()
        if not self._waiting:
            self._all_answered.set()
        if waiting.timer is not None:
            waiting.timer.cancel()
        if not waiting.answer.done():
            waiting.answer.set_result(frame)


def _again(error: Exception) -> Exception:
    """A fresh error of the same kind for each request: one exception raised in several tasks would
    collect the tracebacks of all."""
    return type(error)(str(error))


@cache
def request_schema(api_key: int, version: int) -> Any:
    """The kio module with a request's class and the classes nested in it."""
    return load_payload_module(api_key, version, EntityType.request)


@cache
def _response_type(api_key: int, version: int) -> type[ResponsePayload]:
    return load_response_schema(api_key, version)
