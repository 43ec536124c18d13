"""Threads of the tests' own: for work that goes on meanwhile, and for servers, which have an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tests.waiting import patience

T = TypeVar("T")
Connection = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]

WITHIN_S = 10.0


@contextmanager
def meanwhile(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """The work goes on for as long as the block runs; the event tells it that this is over."""
    is_over = threading.Event()
    thread = threading.Thread(target=work, args=(is_over,))
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(patience())


class LoopThread:
    """Runs from the start to `stop`, which ends in order what is still under way on it."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._servers: list[asyncio.Server] = []
        self._connections: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """From another thread: what comes of it on this one."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(patience(WITHIN_S))

    async def serve(self, connection: Connection, port: int, **options: Any) -> None:
        """On the thread: each connection to the port goes on as long as it likes, until `stop` at most."""

        def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = self.loop.create_task(connection(reader, writer))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

        self._servers.append(await asyncio.start_server(accepted, "127.0.0.1", port, **options))

    def stop(self) -> None:
        self.run(self._end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(patience(WITHIN_S))
        self.loop.close()

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        # Each ends what it has begun; who is cancelled a second time meanwhile would leave off doing so.
        await _cancel(self._connections)
        await _cancel(asyncio.all_tasks() - {asyncio.current_task()})


async def _cancel(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Waits for what they have to do then."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


async def first_of(*halves: Coroutine[Any, Any, None]) -> None:
    """Until one of them has ended; the others end with it. Raises what they raised, the first of it."""
    tasks = [asyncio.create_task(each) for each in halves]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await _cancel(tasks)
        # Asked for in any case, or it would be said that nobody did.
        errors = [error for task in tasks if not task.cancelled() and (error := task.exception())]
    if errors:
        raise errors[0]
