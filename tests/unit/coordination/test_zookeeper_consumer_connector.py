"""How long a consumer of the old model reads on without ZooKeeper."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

from millrace.broker.coordination.session import SessionState
from millrace.broker.coordination.zookeeper_consumer.connector import ConsumerConnector
from millrace.broker.coordination.zookeeper_consumer.options import ConsumerOptions
from millrace.broker.coordination.zookeeper_consumer.registry import StoredOffset
from millrace.broker.coordination.zookeeper_consumer.rules import Pattern, Subscription, ThreadId
from millrace.broker.coordination.zookeeper_consumer.streams import StreamQueue
from tests.waiting import until_async

KEY = ("t", 0)


class InterruptedRegistry:
    """Reads offsets; the connection is lost just when they are there."""

    def __init__(self, connector: ConsumerConnector) -> None:
        self._connector = connector

    def forget_watches(self) -> None:
        return

    async def read_offsets(self, keys: Collection[Any]) -> dict[Any, StoredOffset]:
        self._connector._on_state(SessionState.SUSPENDED)
        return {key: StoredOffset(5, 0) for key in keys}


def test_a_share_that_is_taken_just_as_zookeeper_goes_is_not_read_for_ever() -> None:
    async def run() -> None:
        connector = ConsumerConnector("127.0.0.1:1", "g", ConsumerOptions())
        session: Any = SimpleNamespace(session_timeout_ms=20)
        registry: Any = InterruptedRegistry(connector)
        connector._session, connector._registry = session, registry
        connector._subscription = Subscription(Pattern.STATIC, {"t": 1})
        connector._queues[KEY] = StreamQueue(
            "t/0", max_chunks=1, max_size=1, read_committed=True, on_room=lambda: None
        )
        await connector._start_streams({KEY: ThreadId("c", 0)}, connector._session_number)
        await until_async(lambda: not connector.owned_partitions())

    asyncio.run(run())
