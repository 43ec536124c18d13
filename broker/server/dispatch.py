"""From a request's bytes to the handler that answers it, and from what it returns to bytes.

A handler is a module of `server/handlers/` with `API`, `VERSIONS` (a contiguous range) and
`async def handle(request, context) -> response entity`. A module may also have
`def handle_frame(head, frame, position, context)` for the versions in its `FRAME_VERSIONS`: it is called
at once on the event loop with the undecoded request, and returns the frame to send (bytes, or a list of
buffers), None where no answer is due, any of these as `Throttled` where the client is over a quota, or a
future of what may be returned. It must not keep `frame` after it returns; but one of `KEPT_FRAME_SIZE` and
more stays as it is until the coroutine that it returns has ended.

Requests that cannot be answered as they wish get an error code in the API's own response, in each item where
that is its place (`error_answers.py`): 35 for a version that is not spoken, the handler's own, or -1 for a
failure of ours. What has no schema here (an unknown API or version) gets a bare 35. Where a response has no
place for a code the connection closes: an answer without one would be taken for success. A request that
cannot be decoded closes it, too (`ProtocolError`). One of the few places that catch `Exception`.

What is large is decoded on a thread, item by item, while its connection's next requests wait. A request that
is like an earlier one of its connection may be answered without any of this, by the `Shortcut` that a handler
has left in the connection's memory (`fetch_shortcut.py`).
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any, NamedTuple

import structlog
from kio.index import KioIndexError

from millrace.broker.errors import (
    ACKS_0,
    KafkaError,
    ProtocolError,
    Unanswered,
    UnknownServerError,
    UnsupportedVersion,
)
from millrace.broker.protocol.frames import (
    Api,
    RequestHead,
    decode_entity,
    decode_request,
    encode_response,
    is_flexible,
)
from millrace.broker.server.answers import errors_of, request_type
from millrace.broker.server.context import BrokerServices, ConnectionMemory, RequestContext, Shortcut
from millrace.broker.server.error_answers import error_answer
from millrace.broker.telemetry import garbage
from millrace.broker.telemetry.logs import RateLimit
from millrace.broker.telemetry.metrics import API_SLOTS, BrokerMetrics

log = structlog.get_logger("millrace.broker")

Frame = bytes | bytearray | Sequence[bytes | bytearray | memoryview] | None
"""What goes to the network: one buffer, several in a row, or nothing."""


class Throttled(NamedTuple):
    """An answer after which the connection is not read from for `throttle_ms` (KIP-219)."""

    frame: Frame
    throttle_ms: int


Answered = Frame | Throttled
"""What a finished request has come to."""

Answer = Answered | asyncio.Future[Any] | Awaitable[Any]

_BARE_REFUSAL = struct.Struct(">iih")
_NO_VERSIONS = range(0)

KEPT_FRAME_SIZE = 4 << 20
"""Bytes that take more than a millisecond to copy."""

DECODED_AT_ONCE = 64 << 10
"""Bytes of a request that is decoded on the event loop: some 5,000 items, and 2 to 4 µs for each."""

MOST_ITEMS = 500_000
"""Array items and tagged fields that a request may hold: each costs this process far more memory than its
bytes did."""


class Handler(NamedTuple):
    """One API as the dispatcher knows it."""

    api_key: int
    versions: range
    frame_versions: range
    handle: Callable[[Any, RequestContext], Awaitable[Any]] | None
    handle_frame: Callable[[RequestHead, memoryview, int, RequestContext], Any] | None


def handler_of(module: ModuleType) -> Handler:
    """Read a handler module's registration."""
    return Handler(
        int(module.API),
        module.VERSIONS,
        getattr(module, "FRAME_VERSIONS", _NO_VERSIONS),
        getattr(module, "handle", None),
        getattr(module, "handle_frame", None),
    )


def api_name(api_key: int) -> str:
    """A name for logs and metrics; unknown keys stay numbers."""
    try:
        return Api(api_key).name.lower()
    except ValueError:
        return str(api_key)


class Dispatcher:
    """Holds the registry; one for all connections."""

    def __init__(
        self, handlers: Iterable[Handler], services: BrokerServices | Any, metrics: BrokerMetrics
    ) -> None:
        self.handlers = {handler.api_key: handler for handler in handlers}
        self._services = services
        self._metrics = metrics
        self._failures = RateLimit(time.monotonic)

    def dispatch(
        self, frame: memoryview, client_address: str, memory: ConnectionMemory | None = None
    ) -> Answer:
        """Answer one request, or begin to: an awaitable means that the answer comes later. `memory` is what
        earlier requests of the connection have left.

        Raises ProtocolError, and Unanswered, when the connection cannot go on.
        """
        if memory is None:
            memory = ConnectionMemory()
        elif memory.shortcut is not None:
            answer = self._by_shortcut(memory.shortcut, frame)
            if answer is not None:
                self._metrics.request_counts[memory.shortcut.api_key] += 1
                return answer
        try:
            head, position = decode_request(frame)
        except ProtocolError as error:
            error.kind = "header"
            raise
        handler = self.handlers.get(head.api_key)
        if handler is None or head.version not in handler.versions:
            return self._refuse(head, frame, position)
        self._metrics.request_counts[head.api_key if 0 <= head.api_key < API_SLOTS else -1] += 1
        context = RequestContext(head, client_address, self._services, memory)
        if handler.handle_frame is not None and head.version in handler.frame_versions:
            try:
                return handler.handle_frame(head, frame, position, context)
            except ProtocolError:
                raise
            except Exception as error:
                return self._failed(head, error, lambda: self._decode(head, frame, position))
        assert handler.handle is not None
        if len(frame) > DECODED_AT_ONCE:
            return self._run_large(handler.handle, _kept(frame), position, context)
        return self._run(handler.handle, self._decode(head, frame, position), context)

    def _by_shortcut(self, shortcut: Shortcut, frame: memoryview) -> Frame:
        """None where the request goes the usual way. What fails there, too, is answered and told of there;
        but what fails here alone would be a defect that only makes reading slow."""
        try:
            return shortcut.answer(frame)
        except Exception as error:
            name = api_name(shortcut.api_key)
            held_back = self._failures.take(f"{name} by its short way")
            if held_back is not None:
                log.warning(
                    "a request goes the usual way, because the short one failed",
                    api=name,
                    held_back=held_back,
                    exc_info=error,
                )
            return None

    def _decode(self, head: RequestHead, frame: memoryview, position: int) -> Any:
        """The request as a `kio` entity. Raises ProtocolError, whatever the reader stumbled over."""
        is_large = len(frame) > DECODED_AT_ONCE
        try:
            with garbage.left_alone() if is_large else nullcontext():
                return decode_entity(
                    request_type(head.api_key, head.version),
                    frame,
                    position,
                    most_items=MOST_ITEMS,
                    gradually=is_large,
                )
        except ProtocolError:
            raise
        except Exception as error:
            name = api_name(head.api_key)
            raise ProtocolError(f"{name} request of version {head.version} cannot be read: {error}") from None

    async def _run_large(
        self,
        handle: Callable[[Any, RequestContext], Awaitable[Any]],
        frame: memoryview,
        position: int,
        context: RequestContext,
    ) -> Frame:
        request = await asyncio.to_thread(self._decode, context.head, frame, position)
        return await self._run(handle, request, context)

    async def _run(
        self,
        handle: Callable[[Any, RequestContext], Awaitable[Any]],
        request: Any,
        context: RequestContext,
    ) -> Frame:
        head = context.head
        try:
            response = await handle(request, context)
            for code in errors_of(response):
                self._metrics.count_error(code)
            if response is None or isinstance(response, bytes | bytearray | list):
                return response
            return encode_response(head, response)
        except ProtocolError:
            raise
        except Exception as error:
            return self._failed(head, error, lambda: request)

    def _failed(self, head: RequestHead, error: Exception, read_request: Callable[[], Any]) -> Frame:
        """Answer a request that a handler refused as a whole, or at which it failed. Raises Unanswered."""
        name = api_name(head.api_key)
        code = error.code if isinstance(error, KafkaError) else UnknownServerError.code
        self._metrics.count_error(code)
        try:
            frame = self._error_frame(head, code, read_request)
        except KioIndexError:
            frame = None
        if frame is None:
            raise Unanswered(
                f"{name} request of version {head.version} failed, and its answer has no place to say so"
            ) from error
        if not isinstance(error, KafkaError):
            held_back = self._failures.take(name)
            if held_back is not None:
                log.error(
                    "a request failed", api=name, version=head.version, held_back=held_back, exc_info=error
                )
        return frame

    def _refuse(self, head: RequestHead, frame: memoryview, position: int) -> Answer:
        """Answer an API or version that is not spoken. Raises ProtocolError."""
        self._metrics.unsupported_requests += 1
        self._metrics.count_error(UnsupportedVersion.code)
        if len(frame) > DECODED_AT_ONCE:
            return asyncio.to_thread(self._refusal, head, _kept(frame), position)
        return self._refusal(head, frame, position)

    def _refusal(self, head: RequestHead, frame: memoryview, position: int) -> Frame:
        """Raises ProtocolError."""
        api_versions = self.handlers.get(Api.API_VERSIONS)
        if head.api_key == Api.API_VERSIONS and api_versions is not None:
            assert api_versions.handle_frame is not None
            context = RequestContext(head, "", self._services, ConnectionMemory())
            return api_versions.handle_frame(head, memoryview(b""), 0, context)
        try:
            refusal = self._error_frame(
                head, UnsupportedVersion.code, lambda: self._decode(head, frame, position)
            )
        except KioIndexError:
            tail = b"\x00" if is_flexible(head.api_key, head.version) else b""
            body = _BARE_REFUSAL.pack(6 + len(tail), head.correlation_id, UnsupportedVersion.code)
            return body[:8] + tail + body[8:]
        if refusal is None:
            error = ProtocolError(f"{api_name(head.api_key)} of version {head.version} is not spoken here")
            error.kind = "version"
            raise error
        return refusal

    def _error_frame(self, head: RequestHead, code: int, read_request: Callable[[], Any]) -> bytes | None:
        """The API's own response with `code` in it; None where it has no place for one. Raises KioIndexError
        without a schema, ProtocolError for a request that cannot be read, or that wants no answer."""

        def read() -> Any:
            request = read_request()
            if head.api_key == Api.PRODUCE and request.acks == 0:
                error = ProtocolError(f"a produce request of version {head.version} got error {code}")
                error.kind = ACKS_0
                raise error
            return request

        response = error_answer(head.api_key, head.version, code, read)
        return None if response is None else encode_response(head, response)


def _kept(frame: memoryview) -> memoryview:
    """The frame where it stays until the coroutine that answers it has ended."""
    return frame if len(frame) >= KEPT_FRAME_SIZE else memoryview(bytes(frame))
