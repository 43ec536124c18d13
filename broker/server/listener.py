"""Accepts connections, keeps track of them, and closes those that have been quiet for too long.

`bind` takes the port before anything else starts, so that a taken port is found at once; `start` begins
to accept when the broker is ready. Called by `server/broker.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import time

import structlog

from millrace.broker.config import Address, BrokerSettings
from millrace.broker.errors import PortTaken
from millrace.broker.server.connection import Connection, ConnectionLimits
from millrace.broker.server.dispatch import Dispatcher
from millrace.broker.telemetry.logs import RateLimit
from millrace.broker.telemetry.metrics import BrokerMetrics

log = structlog.get_logger("millrace.broker")

TIDY_INTERVAL_SECONDS = 5.0
BACKLOG = 512
DRAIN_SECONDS = 1.0


def bind(address: Address) -> socket.socket:
    """A socket bound to the address; port 0 picks a free one. Raises PortTaken."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise PortTaken(f"cannot listen on {address}: {error.strerror}; correct the listen address") from None
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setblocking(False)
        bound.bind(target)
        # Listening is what takes the port; a client that connects early waits in the backlog.
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            reason = "the port is taken; stop the process that has it or listen on another one"
        else:
            reason = f"{error.strerror}; correct the listen address"
        raise PortTaken(f"cannot listen on {address}: {reason}") from None
    return bound


class Listener:
    """All connections of one broker."""

    def __init__(
        self, bound: socket.socket, dispatcher: Dispatcher, metrics: BrokerMetrics, settings: BrokerSettings
    ) -> None:
        self._bound = bound
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._max_connections = settings.max_connections
        self._max_idle_seconds = settings.connections_max_idle_ms / 1000
        self._limits = ConnectionLimits(
            request_max_size=settings.socket_request_max_bytes,
            receive_buffer_size=settings.connection_receive_buffer_bytes,
            send_queue_size=settings.connection_send_queue_bytes,
        )
        self._protocol_errors = RateLimit(time.monotonic)
        self._connections: set[Connection] = set()
        self._all_closed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._tidying: asyncio.Task[None] | None = None

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, sock=self._bound, backlog=BACKLOG)
        self._tidying = loop.create_task(self._tidy(), name="listener-tidy")

    def stop_accepting(self) -> None:
        if self._server is not None:
            self._server.close()
        else:
            self._bound.close()

    async def stop(self) -> None:
        """Close every connection once its answers are sent; peers that do not read get a moment only.

        Requests still under way get no answer: clients ask again elsewhere.
        """
        self.stop_accepting()
        if self._tidying is not None:
            self._tidying.cancel()
            await asyncio.gather(self._tidying, return_exceptions=True)
        for connection in list(self._connections):
            connection.finish()
        if self._connections:
            self._all_closed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_closed.wait(), DRAIN_SECONDS)
        for connection in list(self._connections):
            connection.close()

    def _accept(self) -> asyncio.BaseProtocol:
        if len(self._connections) >= self._max_connections:
            self._metrics.connections_refused += 1
            return _Refused()
        connection = Connection(
            self._dispatcher, self._metrics, self._limits, self._protocol_errors, self._forget
        )
        self._connections.add(connection)
        return connection

    def _forget(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._all_closed.set()

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(TIDY_INTERVAL_SECONDS)
            now = time.monotonic()
            for connection in list(self._connections):
                connection.shrink_if_quiet(now - TIDY_INTERVAL_SECONDS)
                if connection.idle and now - connection.last_active > self._max_idle_seconds:
                    connection.close()


class _Refused(asyncio.Protocol):
    """One connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()
