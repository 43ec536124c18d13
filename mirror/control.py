"""The mirror's HTTP port: metrics, health and status for machines and people.

    GET /metrics   Prometheus text
    GET /healthz   200 while the process serves
    GET /readyz    200 when the worker has its assignment and the target answers, otherwise 503
    GET /status    JSON: what is carried, where it stands, what is open

Called by `daemon`. Answers one request a connection, reads at most a small head, and never waits for a
slow reader longer than a few seconds.
"""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from millrace.broker.errors import FatalError, PortTaken

log = structlog.get_logger("millrace.mirror.control")

MAX_HEAD_SIZE = 8 << 10
TIMEOUT_S = 5.0
TEXT = "text/plain; charset=utf-8"
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
JSON = "application/json"
REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Unavailable"}


class ControlServer:
    """Serves what the callbacks say."""

    def __init__(
        self,
        listen: str,
        *,
        metrics: Callable[[], bytes],
        is_ready: Callable[[], bool],
        status: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._listen = listen
        self._metrics = metrics
        self._is_ready = is_ready
        self._status = status
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        """Raises PortTaken."""
        host, _, port = self._listen.rpartition(":")
        try:
            self._server = await asyncio.start_server(
                self._serve, host.strip("[]"), int(port), limit=MAX_HEAD_SIZE
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortTaken(
                    f"control.listen {self._listen} is taken by another process; choose another port"
                ) from None
            raise FatalError(f"control.listen {self._listen}: {error.strerror or error}") from None
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                status, content_type, body = self._answer(head)
                writer.write(
                    f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: {content_type}\r\n"
                    f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
                )
                writer.write(body)
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, OSError) as error:
            log.debug("a control request was not served", error=str(error))
        finally:
            writer.close()

    def _answer(self, head: bytes) -> tuple[int, str, bytes]:
        words = head.split(b"\r\n", 1)[0].split()
        if len(words) != 3:
            return 400, TEXT, b"not an HTTP request\n"
        if words[0] != b"GET":
            return 405, TEXT, b"only GET\n"
        path = words[1].split(b"?", 1)[0]
        if path == b"/metrics":
            return 200, PROMETHEUS, self._metrics()
        if path == b"/healthz":
            return 200, TEXT, b"ok\n"
        if path == b"/readyz":
            return (200, TEXT, b"ready\n") if self._is_ready() else (503, TEXT, b"not ready\n")
        if path == b"/status":
            return 200, JSON, json.dumps(self._status()).encode() + b"\n"
        return 404, TEXT, b"try /status, /metrics, /healthz or /readyz\n"
