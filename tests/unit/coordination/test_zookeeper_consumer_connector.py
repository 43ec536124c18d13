"""How long a consumer of the old model reads on without ZooKeeper, and what it commits in a rebalance."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.broker.coordination.session import SessionState
from millrace.broker.coordination.zookeeper_consumer.connector import CommitFailed, ConsumerConnector
from millrace.broker.coordination.zookeeper_consumer.options import ConsumerOptions
from millrace.broker.coordination.zookeeper_consumer.registry import StoredOffset
from millrace.broker.coordination.zookeeper_consumer.rules import Pattern, Subscription, ThreadId
from millrace.broker.coordination.zookeeper_consumer.streams import Reading, StreamQueue
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


class Offsets:
    """What stands in ZooKeeper of one partition, as (offset, version)."""

    def __init__(self) -> None:
        self.stands = (5, 2)

    async def write_offset(self, _key: object, offset: int, version: int) -> int | None:
        if version != self.stands[1]:
            return None
        self.stands = (offset, version + 1)
        return version + 1


def rebalancing(told: Callable[[ConsumerConnector, Offsets], Coroutine[Any, Any, None]]) -> None:
    """A consumer within a rebalance: 7 messages of its partition were consumed, 5 are committed, one is in
    the hand of thread 1."""

    async def run() -> None:
        connector = ConsumerConnector("127.0.0.1:1", "g", ConsumerOptions())
        offsets: Any = Offsets()
        connector._registry = offsets
        stream = StreamQueue("t/0", max_chunks=1, max_size=1, read_committed=True, on_room=lambda: None)
        reading = Reading(KEY, stream, delivered=8, finished=7, stored=5, version=2)
        stream._in_hand, stream._holder = reading, 1
        connector._readings[KEY] = reading
        connector._halt()
        await told(connector, offsets)

    asyncio.run(run())


@pytest.mark.safety
@pytest.mark.parametrize(("holder", "committed"), [(1, 8), (2, 7)])
def test_commit_within_a_rebalance_writes_what_was_consumed(holder: int, committed: int) -> None:
    async def told(connector: ConsumerConnector, offsets: Offsets) -> None:
        await connector.commit_offsets(holder)
        assert offsets.stands == (committed, 3)
        await connector.commit_offsets(2)
        assert offsets.stands == (committed, 3)

    rebalancing(told)


@pytest.mark.safety
def test_commit_of_a_partition_that_another_has_committed_since_fails_once() -> None:
    async def told(connector: ConsumerConnector, offsets: Offsets) -> None:
        offsets.stands = (6, 9)
        with pytest.raises(CommitFailed, match="offset 8 of t-0 was not written: the partition is another's"):
            await connector.commit_offsets(1)
        assert offsets.stands == (6, 9)
        await connector.commit_offsets(1)

    rebalancing(told)
