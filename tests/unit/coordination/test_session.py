"""A ZooKeeper session: its requests leave nothing behind, and it ends also where its connection does not."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from kazoo.client import KazooState
from kazoo.exceptions import NoNodeError, WriterNotClosedException
from kazoo.handlers.threading import AsyncResult, SequentialThreadingHandler

from millrace.broker.coordination.session import NodeMissing, Session, SessionState
from tests.waiting import patience, until_async


def connected(client: Any) -> Session:
    """A session whose kazoo client is this one, in the loop that runs."""
    session = Session("127.0.0.1:1", session_timeout_ms=1_000, connection_timeout_ms=1_000)
    session._client, session._loop = client, asyncio.get_running_loop()
    return session


class Stuck:
    """A kazoo client whose thread hangs, in the look-up of a name for instance."""

    def remove_listener(self, _listener: object) -> None:
        return

    def stop(self) -> None:
        raise WriterNotClosedException("Writer still open from prior connection")


def test_a_connection_that_does_not_end_keeps_nothing_else_from_being_stopped() -> None:
    async def run() -> None:
        await connected(Stuck()).stop()

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
        session = connected(Asked())
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


def test_what_kazoos_threads_tell_is_heard_on_the_loop_and_never_holds_them_up() -> None:
    """They tell it while the loop is busy: were they to wait for it, they would wait here for ever."""
    handler = SequentialThreadingHandler()
    watches: list[Callable[[Any], None]] = []

    class Watched:
        def get_async(self, _path: str, watch: Callable[[Any], None]) -> AsyncResult:
            watches.append(watch)
            result = handler.async_result()
            answered(result)
            return result

    async def run() -> None:
        session = connected(Watched())
        heard: list[tuple[object, int]] = []
        session.on_state(lambda state: heard.append((state, threading.get_ident())))
        await session.get("/a", lambda: heard.append(("changed", threading.get_ident())))

        def tell() -> None:
            watches[0](SimpleNamespace(path="/a"))
            session._on_state(KazooState.SUSPENDED)

        teller = threading.Thread(target=tell)
        teller.start()
        teller.join(patience(30))
        assert not teller.is_alive()
        assert heard == []
        await until_async(lambda: len(heard) == 2, "both are heard")
        own = threading.get_ident()
        assert heard == [("changed", own), (SessionState.SUSPENDED, own)]

    handler.start()
    try:
        asyncio.run(asyncio.wait_for(run(), patience(60)))
    finally:
        handler.stop()
