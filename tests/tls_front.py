"""TLS before a server that has none: a front that wants a client's certificate and passes bytes on.

Our broker has no such listeners; as people put a proxy before it, so do tests that need a secured end of it.
The broker must tell its clients the front's address.
"""

from __future__ import annotations

import asyncio
import ssl

from tests.certificates import Authority
from tests.ports import free_port
from tests.threads import LoopThread, first_of

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
        self._thread: LoopThread | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> TlsFront:
        self._thread = LoopThread("tls front")
        self._thread.run(self._thread.serve(self._pass_on, self.port, ssl=self._context))
        return self

    def stop(self) -> None:
        if self._thread is not None:
            self._thread.stop()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ways = [writer]
        try:
            answers, onward = await asyncio.open_connection("127.0.0.1", self._server_port)
            ways.append(onward)
            await first_of(_pump(reader, onward), _pump(answers, writer))
        except OSError:
            pass
        except asyncio.CancelledError:
            for way in ways:
                way.transport.abort()  # nobody is left who would finish a farewell
            raise
        finally:
            for way in ways:
                way.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK_SIZE):
        writer.write(data)
        await writer.drain()
