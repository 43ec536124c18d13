"""The HTTP/1.1 server: sockets and limits. The protocol itself is h11's.

Started by `control` with one function that answers a request. Whatever a client does, it costs a
bounded amount: so many connections, so large a head and a body, so long to send one or to take an answer;
then the connection is closed. Connections are kept for further requests. Nothing is logged for a client's
mistakes.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable

import h11
import structlog

from millrace.broker.errors import FatalError, PortTaken
from millrace.broker.protocol.address import Address
from millrace.mirror.control.http.messages import Refusal, Request, Response

log = structlog.get_logger("millrace.mirror.control.http")

MAX_HEAD_SIZE = 16 << 10
MAX_BODY_SIZE = 64 << 10
MAX_CONNECTIONS = 64
# For one request to arrive whole, for one answer to be taken, and between requests.
REQUEST_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 10.0
IDLE_TIMEOUT_S = 30.0
_READ_SIZE = 16 << 10
# On every answer: it is never stored, never guessed at, never framed.
_COMMON_HEADERS = (
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
)

Respond = Callable[[Request], Awaitable[Response]]


class HttpServer:
    """Listens on `listen` and asks `respond`, which turns every failure of its own into an answer."""

    def __init__(self, listen: Address, respond: Respond) -> None:
        self._listen = listen
        self._respond = respond
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._stopping = False
        self.port = 0

    async def start(self) -> None:
        """Raises PortTaken, or FatalError for an address that is not this machine's."""
        try:
            self._server = await asyncio.start_server(
                self._connected, self._listen.host, self._listen.port, limit=MAX_HEAD_SIZE
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortTaken(
                    f"control.listen {self._listen} is taken by another process; choose another port"
                ) from None
            raise FatalError(f"control.listen {self._listen}: {error.strerror or error}") from None
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Closes the port and every connection; answers that are being made are not waited for."""
        if self._server is None:
            return
        self._stopping = True
        self._server.close()
        for task in list(self._connections):
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)
        await self._server.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or len(self._connections) >= MAX_CONNECTIONS:
            writer.close()
            return
        self._connections.add(task)
        try:
            await _Connection(reader, writer, self._respond).serve()
        except (OSError, TimeoutError, h11.ProtocolError) as error:
            log.debug("a connection was given up", error=str(error))
        except asyncio.CancelledError:
            if not self._stopping:
                raise  # asyncio's streams complain of a cancelled handler
        finally:
            self._connections.discard(task)
            writer.close()


class _Connection:
    """One client's requests, one after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, respond: Respond) -> None:
        self._reader = reader
        self._writer = writer
        self._respond = respond
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_SIZE)

    async def serve(self) -> None:
        while True:
            try:
                async with asyncio.timeout(IDLE_TIMEOUT_S):
                    if not await self._await_bytes():
                        return
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    request = await self._read_request()
            except Refusal as refusal:
                await self._answer("GET", refusal.response(), close=True)
                return
            except h11.RemoteProtocolError as error:
                await self._answer_broken(error)
                return
            if request is None:
                return
            await self._answer(request.method, await self._respond(request))
            if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
                return
            self._http.start_next_cycle()

    async def _await_bytes(self) -> bool:
        """Waits for the first bytes of a request; False when the client has gone."""
        if self._http.trailing_data[0]:
            return True
        data = await self._reader.read(_READ_SIZE)
        self._http.receive_data(data)
        return bool(data)

    async def _read_request(self) -> Request | None:
        """None when the client went away in the middle. Raises Refusal, h11.RemoteProtocolError."""
        head: h11.Request | None = None
        body = bytearray()
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                if self._http.they_are_waiting_for_100_continue:
                    await self._send(h11.InformationalResponse(status_code=100, headers=[]))
                self._http.receive_data(await self._reader.read(_READ_SIZE))
            elif isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > MAX_BODY_SIZE:
                    raise Refusal(413, f"a body of more than {MAX_BODY_SIZE} bytes is not taken")
            elif isinstance(event, h11.EndOfMessage):
                return None if head is None else _request_of(head, bytes(body))
            else:  # the connection was closed
                return None

    async def _answer(self, method: str, response: Response, *, close: bool = False) -> None:
        headers = [
            ("Content-Type", response.content_type),
            ("Content-Length", str(len(response.body))),
            *_COMMON_HEADERS,
            *response.headers,
        ]
        if close:
            headers.append(("Connection", "close"))
        await self._send(h11.Response(status_code=response.status, headers=headers))
        if method != "HEAD":
            await self._send(h11.Data(data=response.body))
        await self._send(h11.EndOfMessage())

    async def _answer_broken(self, error: h11.RemoteProtocolError) -> None:
        """Says what was wrong, where an answer can still be sent."""
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            refusal = Refusal(error.error_status_hint, f"this is not HTTP as it should be: {error}")
            await self._answer("GET", refusal.response(), close=True)

    async def _send(self, event: h11.Event) -> None:
        data = self._http.send(event)
        if data:
            self._writer.write(data)
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await self._writer.drain()


def _request_of(head: h11.Request, body: bytes) -> Request:
    headers: dict[str, str] = {}
    for name, value in head.headers:
        key, text = name.decode("ascii"), value.decode("latin-1")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    path = head.target.decode("latin-1").partition("?")[0]
    return Request(head.method.decode("ascii"), path, headers, body)
