"""TLS before a server that has none: a front that wants a client's certificate and passes bytes on.

Our broker has no such listeners; as people put a proxy before it, so do tests that need a secured end of it.
The broker must tell its clients the front's address.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading

from tests.certificates import Authority
from tests.ports import free_port
from tests.waiting import patience

CHUNK_SIZE = 64 << 10


class TlsFront:
    """On a thread of its own; `authority` signs the front's certificate, and those that it lets in."""

    def __init__(self, authority: Authority, server_port: int) -> None:
        self.port = free_port()
        own = authority.issue("front")
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.pem)
        self._context.load_cert_chain(own.cert, own.key)
        self._context.verify_mode = ssl.CERT_REQUIRED
        self._server_port = server_port
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tls front", daemon=True)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> TlsFront:
        self._thread.start()
        serving = asyncio.start_server(self._accepted, "127.0.0.1", self.port, ssl=self._context)
        asyncio.run_coroutine_threadsafe(serving, self._loop).result(patience(10))
        return self

    def stop(self) -> None:
        def end() -> None:
            for task in self._tasks:
                task.cancel()
            self._loop.call_soon(self._loop.stop)

        self._loop.call_soon_threadsafe(end)
        self._thread.join(patience(10))

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._pass_on(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = None
        try:
            there = await asyncio.open_connection("127.0.0.1", self._server_port)
            # The whole connection ends with either half.
            halves = (_pump(reader, there[1]), _pump(there[0], writer))
            tasks = [self._loop.create_task(half) for half in halves]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
        finally:
            for each in (writer, *([there[1]] if there else ())):
                with contextlib.suppress(OSError):
                    each.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK_SIZE):
            writer.write(data)
            await writer.drain()
