"""Two relays: the plainest that Python can be, as the limit of what moving bytes costs; and one that delays.

`python -m tests.benchmarks.mirror.relay LISTEN TO DELAY_MS [WINDOW]` accepts connections at one loopback port
and passes bytes on to another, each after the delay, in both directions. It ends the TCP connection: what a
long link does to TCP itself (slow start, loss) is not in its figures. `WINDOW` stands for the smaller of both
ends' socket buffers: so many bytes of a connection and a direction are under way at most, counted until their
acknowledgement would be back. Without it a connection carries any rate.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import sys
import threading
import time
from collections import deque
from multiprocessing.synchronize import Event
from typing import cast

import uvloop

from tests.benchmarks.peers.usage import processor_seconds, running_on

MIB = 1 << 20
MOST_UNDER_WAY = 256 * MIB
PIECE = 256 << 10


def relay_once(size: int, mover: frozenset[int], others: frozenset[int]) -> tuple[float, float]:
    """(MB/s, CPU seconds per GB) of a blocking loop of receive and send on the mirror's core."""
    context = multiprocessing.get_context("spawn")
    with (
        running_on(others),
        socket.create_server(("127.0.0.1", 0)) as source,
        socket.create_server(("127.0.0.1", 0)) as sink,
    ):
        ready = context.Event()
        relay = context.Process(target=_relay, args=(source.getsockname(), sink.getsockname(), mover, ready))
        relay.start()
        incoming, _ = source.accept()
        outgoing, _ = sink.accept()
        ready.wait()
        pid = relay.pid or 0
        before, begun = processor_seconds(pid), time.perf_counter()
        sender = threading.Thread(target=_send, args=(incoming, size))
        sender.start()
        scratch = bytearray(MIB)
        left = size
        while left > 0:
            left -= outgoing.recv_into(scratch)
        seconds = time.perf_counter() - begun
        spent = processor_seconds(pid) - before
        sender.join()
        incoming.close()
        relay.join()
        outgoing.close()
    return size / seconds / 1e6, spent / (size / 1e9)


def _send(to: socket.socket, size: int) -> None:
    piece = bytes(MIB)
    for _ in range(size // MIB):
        to.sendall(piece)
    to.sendall(piece[: size % MIB])


def _relay(source: tuple[str, int], sink: tuple[str, int], cores: frozenset[int], ready: Event) -> None:
    with (
        running_on(cores),
        socket.create_connection(source) as incoming,
        socket.create_connection(sink) as outgoing,
    ):
        ready.set()
        scratch = memoryview(bytearray(PIECE))
        while received := incoming.recv_into(scratch):
            outgoing.sendall(scratch[:received])


class _Half(asyncio.BufferedProtocol):
    """One end of a delayed connection: what it receives goes to the other end, later."""

    def __init__(self, delay_s: float, window: int, connect_to: int | None) -> None:
        self.other: _Half | None = None
        self.transport: asyncio.Transport | None = None
        self._delay_s, self._window, self._connect_to = delay_s, window, connect_to
        self._waiting: deque[tuple[float, bytes | None]] = deque()
        self._under_way = 0
        self._scratch = memoryview(bytearray(PIECE))
        self._is_paused = False
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self.transport = cast(asyncio.Transport, transport)
        if self._connect_to is not None:
            task = self._loop.create_task(self._connect(self._connect_to))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self, port: int) -> None:
        assert self.transport is not None
        # A handshake over the link takes one round trip.
        await asyncio.sleep(2 * self._delay_s)
        try:
            _, other = await self._loop.create_connection(
                lambda: _Half(self._delay_s, self._window, None), "127.0.0.1", port
            )
        except OSError:
            self.transport.close()
            return
        self.other, other.other = other, self
        self._deliver()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._scratch[: max(1, self._window - self._under_way)]

    def buffer_updated(self, nbytes: int) -> None:
        self._under_way += nbytes
        self._put(bytes(self._scratch[:nbytes]))
        self._loop.call_later(2 * self._delay_s, self._acknowledged, nbytes)
        if self._under_way >= self._window and not self._is_paused and self.transport is not None:
            self._is_paused = True
            self.transport.pause_reading()

    def _acknowledged(self, size: int) -> None:
        self._under_way -= size
        if self._is_paused and self.transport is not None and not self.transport.is_closing():
            self._is_paused = False
            self.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._put(None)

    def _put(self, data: bytes | None) -> None:
        due = self._loop.time() + self._delay_s
        self._waiting.append((due, data))
        if len(self._waiting) == 1:
            self._loop.call_at(due, self._deliver)

    def _deliver(self) -> None:
        if self.other is None:
            return  # whoever connects calls again
        now, out = self._loop.time(), self.other.transport
        while self._waiting and self._waiting[0][0] <= now + 0.0002:
            _, data = self._waiting.popleft()
            if out is None or out.is_closing():
                continue
            if data is None:
                out.close()
                continue
            out.write(data)
        if self._waiting:
            self._loop.call_at(self._waiting[0][0], self._deliver)


async def _serve(listen: int, to: int, delay_s: float, window: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Half(delay_s, window, to), "127.0.0.1", listen)
    await server.serve_forever()


if __name__ == "__main__":
    window = int(sys.argv[4]) if len(sys.argv) > 4 else MOST_UNDER_WAY
    uvloop.run(_serve(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]) / 1000, window))
