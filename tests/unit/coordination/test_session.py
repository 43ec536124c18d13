"""A ZooKeeper session: its requests leave nothing behind, and it ends also where its connection does not."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from kazoo.exceptions import NoNodeError, WriterNotClosedException
from kazoo.handlers.threading import AsyncResult, SequentialThreadingHandler

from millrace.broker.coordination.session import NodeMissing, Session
from tests.waiting import until_async


class Stuck:
    """A kazoo client whose thread hangs, in the look-up of a name for instance."""

    def remove_listener(self, _listener: object) -> None:
        return

    def stop(self) -> None:
        raise WriterNotClosedException("Writer still open from prior connection")


def test_a_connection_that_does_not_end_keeps_nothing_else_from_being_stopped() -> None:
    async def run() -> None:
        session = Session("127.0.0.1:1", session_timeout_ms=1_000, connection_timeout_ms=1_000)
        stuck: Any = Stuck()
        session._client = stuck
        await session.stop()

    asyncio.run(run())


def answered(result: AsyncResult) -> None:
    result.set((b"data", SimpleNamespace(version=1, ephemeralOwner=0, czxid=2)))


def refused(result: AsyncResult) -> None:
    result.set_exception(NoNodeError())


@pytest.mark.parametrize("answer", [answered, refused])
def test_requests_leave_nothing_for_the_garbage_collector(answer: Callable[[AsyncResult], None]) -> None:
    """Thousands follow the creation of a topic, and a full round of the collector holds up everyone."""
    handler = SequentialThreadingHandler()
    asked: list[weakref.ref[AsyncResult]] = []

    class Asked:
        def get_async(self, _path: str, watch: object) -> AsyncResult:
            result = handler.async_result()
            asked.append(weakref.ref(result))
            answer(result)
            return result

    async def run() -> None:
        session = Session("127.0.0.1:1", session_timeout_ms=1_000, connection_timeout_ms=1_000)
        client: Any = Asked()
        session._client, session._loop = client, asyncio.get_running_loop()
        try:
            assert (await session.get("/a", list)).version == 1
        except NodeMissing:
            assert answer is refused
        # The client's thread lets go of what it told a moment after it has told it.
        await until_async(let_go, "requests are forgotten", within_s=5)

    async def let_go() -> bool:
        return len(asked) == 1 and asked[0]() is None

    handler.start()
    gc.disable()
    try:
        asyncio.run(asyncio.wait_for(run(), 10))
    finally:
        gc.enable()
        handler.stop()
