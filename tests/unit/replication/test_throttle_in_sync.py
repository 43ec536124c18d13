"""The throttle of moving replicas holds back who catches up, and nobody who is in sync."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from millrace.broker.protocol.hot_fetch import PartitionData, PartitionFetch
from millrace.broker.replication.catching_up import ALL, Taken
from millrace.broker.replication.lanes import Lane
from millrace.broker.replication.partition import Role
from millrace.broker.replication.replica_fetcher import Following, LaneFetcher
from millrace.broker.replication.throttle import ReplicationThrottle

LEADER, LOG_END = 1, 100
MOVING, MOVED = ("t", 0), ("t", 1)


def following(key: tuple[str, int]) -> Following:
    local: Any = SimpleNamespace(
        key=key,
        topic=key[0],
        replica=SimpleNamespace(role=Role.FOLLOWER, leader=LEADER),
        turn=asyncio.Lock(),
        log=SimpleNamespace(end_offset=LOG_END),
    )
    return Following(local)


class CatchingUp:
    async def take(self, *_: Any) -> Taken:
        return ALL


async def answered(lane: LaneFetcher, each: Following, high_watermark: int) -> None:
    """The leader has committed so much; what it gave has been taken."""
    connection: Any = None
    question = PartitionFetch(each.local.topic, each.local.key[1], LOG_END, 1, 0, 0, 0)
    given = PartitionData(each.local.topic, each.local.key[1], 0, high_watermark)
    await lane._take(connection, each, question, given)


def test_a_throttled_replica_that_is_in_sync_is_asked_for_while_others_pay_back() -> None:
    async def run() -> None:
        throttle = ReplicationThrottle()
        throttle.set(1_000, [MOVING, MOVED])
        owner: Any = SimpleNamespace(
            own_epoch=7, only_flushed=False, throttle=throttle, catching_up=CatchingUp()
        )
        leader: Any = SimpleNamespace(leader=LEADER)
        lane = LaneFetcher(Lane.BUSY, leader, owner)
        moving, moved = following(MOVING), following(MOVED)
        for each in (moving, moved):
            assert lane._is_ready(each, 5.0)
        await answered(lane, moving, LOG_END + 1)
        await answered(lane, moved, LOG_END)
        throttle.consume(MOVING, 60_000)  # a minute's worth
        assert not lane._is_ready(moving, 5.0)
        assert lane._is_ready(moved, 5.0), "every write with acks=all waits for it"
        await answered(lane, moved, LOG_END + 1)
        assert not lane._is_ready(moved, 5.0), "it has fallen behind"
        lane.cancel()
        await asyncio.gather(lane.task, return_exceptions=True)

    asyncio.run(run())
