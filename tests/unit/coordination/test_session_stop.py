"""The end of a ZooKeeper session whose connection does not end."""

from __future__ import annotations

import asyncio
from typing import Any

from kazoo.exceptions import WriterNotClosedException

from millrace.broker.coordination.session import Session


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
