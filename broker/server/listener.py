"""Accepts connections, keeps track of them, and closes those that cost without giving.

`bind` takes the port before anything else starts, so that a taken port is found at once; `start` begins
to accept when the broker is ready. Called by `server/broker.py`.

A connection over `max.connections` or its address's limit is closed at once (Apache Kafka lets one over
the first wait in the backlog). Every few seconds the listener takes unused room out of receive buffers and
closes who has been idle for `connections.max.idle.ms` (as in Apache Kafka also while a request of his is
waited for), who has not read its answers for long while all
together hold much, and who holds half a request while others wait for memory (see `memory_limits.py`). Each
is counted by reason, with one log line in a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import time
from collections import Counter
from functools import partial
from typing import cast

import structlog

from millrace.broker.config import BrokerSettings, parse_connection_limits
from millrace.broker.errors import PortTaken
from millrace.broker.protocol.address import Address
from millrace.broker.server.connection import Connection
from millrace.broker.server.connection_limits import ConnectionLimits
from millrace.broker.server.dispatch import Dispatcher
from millrace.broker.server.memory_limits import AnswerBacklog, RequestMemory
from millrace.broker.telemetry.logs import RateLimit
from millrace.broker.telemetry.memory import trim_heap
from millrace.broker.telemetry.metrics import BrokerMetrics

log = structlog.get_logger("millrace.broker")

TIDY_INTERVAL_SECONDS = 5.0
TRIM_SIZE = 16 << 20
"""So many bytes of large buffers must have been freed since the last look for the heap to be trimmed."""
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
        self,
        bound: socket.socket,
        dispatcher: Dispatcher,
        metrics: BrokerMetrics,
        settings: BrokerSettings,
        backlog: AnswerBacklog,
    ) -> None:
        self._bound = bound
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._max_connections = settings.max_connections
        self._max_connections_per_ip = settings.max_connections_per_ip
        self._overrides = settings.max_connections_per_ip_overrides
        self._max_connections_of = _limits_by_address(self._overrides)
        self._max_idle_seconds = settings.connections_max_idle_ms / 1000
        self.backlog = backlog
        self.memory = RequestMemory(settings.queued_max_request_bytes)
        self.memory.on_shortage = self._shrink_soon
        self._limits = ConnectionLimits(
            request_max_size=settings.socket_request_max_bytes,
            receive_buffer_size=settings.connection_receive_buffer_bytes,
            backlog=backlog,
            memory=self.memory,
        )
        self._complaints = RateLimit(time.monotonic)
        self._connections: set[Connection] = set()
        self._per_address: Counter[str] = Counter()
        self._all_closed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._tidying: asyncio.Task[None] | None = None

    def set_limits(self, settings: BrokerSettings) -> None:
        """Holds for connections that come from now on; none that is there is closed."""
        self._max_connections = settings.max_connections
        self._max_connections_per_ip = settings.max_connections_per_ip
        overrides = settings.max_connections_per_ip_overrides
        if overrides != self._overrides:
            self._overrides = overrides
            # Names are looked up for it, which may last.
            found = asyncio.get_running_loop().run_in_executor(None, _limits_by_address, overrides)
            found.add_done_callback(partial(self._take_overrides, overrides))

    def _take_overrides(self, overrides: str, found: asyncio.Future[dict[str, int]]) -> None:
        if overrides == self._overrides and not found.cancelled():
            self._max_connections_of = found.result()

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
                async with asyncio.timeout(DRAIN_SECONDS):
                    await self._all_closed.wait()
        for connection in list(self._connections):
            connection.close("stop")

    # -- coming and going ----------------------------------------------------------------------------

    def _accept(self) -> asyncio.BaseProtocol:
        if len(self._connections) >= self._max_connections:
            self._refuse("max.connections", self._max_connections)
            return _Refused()
        return Connection(
            self._dispatcher, self._metrics, self._limits, self._complaints, self._forget, self._admit
        )

    def _admit(self, connection: Connection) -> bool:
        """Called when a connection is made; False closes it."""
        address = connection.client_address
        limit = self._max_connections_of.get(address, self._max_connections_per_ip)
        if self._per_address[address] >= limit:
            self._refuse("max.connections.per.ip", limit, client=address)
            return False
        self._per_address[address] += 1
        self._connections.add(connection)
        return True

    def _refuse(self, setting: str, limit: int, **details: str) -> None:
        self._metrics.connections_refused += 1
        self._metrics.count_close(setting)
        held_back = self._complaints.take(setting)
        if held_back is not None:
            log.warning(
                f"connection refused: {setting} is reached; raise it, or find out who opens so many",
                limit=limit,
                held_back=held_back,
                **details,
            )

    def _forget(self, connection: Connection) -> None:
        if connection in self._connections:
            self._connections.discard(connection)
            address = connection.client_address
            self._per_address[address] -= 1
            if not self._per_address[address]:
                del self._per_address[address]
        if not self._connections:
            self._all_closed.set()

    # -- keeping order -------------------------------------------------------------------------------

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(TIDY_INTERVAL_SECONDS)
            try:
                self.tidy(time.monotonic())
            except Exception:
                # Without the next round nobody would be closed any more who keeps the others waiting.
                log.exception("tidying up the connections failed; it is tried again")

    def tidy(self, now: float) -> None:
        """One round; `now` in seconds of the monotonic clock."""
        for connection in list(self._connections):
            connection.received.shrink()
            connection.look_at_reader(now)
            stuck = connection.is_stuck(now)
            if now - connection.idle_since > self._max_idle_seconds:
                connection.close("idle")
            elif stuck and self.memory.waiting:
                self._close(connection, "request", "it holds half a request while others wait for memory")
        for slow in self.backlog.overdue(now):
            self._close(cast(Connection, slow), "reader", "it does not read its answers, which pile up")
        held = self.backlog.held + self.memory.used
        if self.backlog.peak + self.memory.peak - held >= TRIM_SIZE:
            trim_heap()
        self.backlog.peak, self.memory.peak = self.backlog.held, self.memory.used

    def _close(self, connection: Connection, kind: str, reason: str) -> None:
        held_back = self._complaints.take(kind)
        if held_back is not None:
            log.warning(f"connection closed: {reason}", client=connection.client_address, held_back=held_back)
        connection.close(f"stalled {kind}")

    def _shrink_soon(self) -> None:
        """Somebody waits for memory: take what is not in use out of all receive buffers."""
        asyncio.get_running_loop().call_soon(self._shrink_all)

    def _shrink_all(self) -> None:
        for connection in list(self._connections):
            connection.received.give_room_back()


def _limits_by_address(overrides: str) -> dict[str, int]:
    """Hosts as the addresses that connections come from; one whose name is not known limits nobody."""
    limits: dict[str, int] = {}
    for host, limit in parse_connection_limits(overrides).items():
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except OSError as error:
            log.warning(
                "max.connections.per.ip.overrides: the host is not known, its limit does not count",
                host=host,
                error=str(error),
            )
            continue
        limits |= {str(address[0]): limit for *_, address in found}
    return limits


class _Refused(asyncio.Protocol):
    """One connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()
