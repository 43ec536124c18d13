"""The throttles of moving replicas hold back who catches up, and nobody who is in sync."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.broker.protocol.hot_fetch import PartitionData, PartitionFetch
from millrace.broker.replication.catching_up import ALL, Taken
from millrace.broker.replication.lanes import Lane
from millrace.broker.replication.local_partition import FollowerFetch, MustReadCold
from millrace.broker.replication.partition import Role
from millrace.broker.replication.replica_fetcher import Following, LaneFetcher
from millrace.broker.replication.throttle import ReplicationThrottle
from millrace.broker.storage.disk_errors import WouldBlock
from millrace.broker.storage.log import Log, LogRead
from tests.unit.replication.replicated_stage import Bench, run

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
        throttle.consume(MOVING, 60_000, 5.0, in_sync=False)  # a minute's worth
        assert not lane._is_ready(moving, 5.0)
        assert lane._is_ready(moved, 5.0), "every write with acks=all waits for it"
        await answered(lane, moved, LOG_END + 1)
        assert not lane._is_ready(moved, 5.0), "it has fallen behind"
        lane.cancel()
        await asyncio.gather(lane.task, return_exceptions=True)

    asyncio.run(run())


def test_a_leader_gives_so_much_to_those_who_catch_up_together(tmp_path: Path) -> None:
    """One second's worth at once, and an answer that overdraws; then nothing until it is paid back."""

    async def scenario(bench: Bench) -> None:
        await bench.lead(1, 3)
        for _ in range(4):
            bench.append(bytes(1_000), acks=1)
        size = len(bench.fetch(2, 0).records) // 4
        bench.manager.set_leader_throttle(size, [MOVING])
        bench.now_ms = 5_000

        def given(follower: int, offset: int) -> int:
            read = bench.manager.read_now(
                "t", 0, offset, 1, at_least_one=True, current_leader_epoch=0,
                follower=FollowerFetch(follower, follower * 10, 0),
            )  # fmt: skip
            assert read.high_watermark == bench.high_watermark, "it is told all the same"
            return len(read.records) // size

        assert [given(2, offset) for offset in (0, 1, 2)] == [1, 1, 0]
        assert [given(3, offset) for offset in (0, 1, 2, 3)] == [1, 1, 1, 1], (
            "every write with acks=all waits"
        )
        assert given(2, 2) == 0
        progress = bench.manager.leader_of("t", 0).replica.followers[2]
        assert progress.end_offset == 2, "that it asks for more says what it has"
        bench.now_ms = 6_001
        assert [given(2, offset) for offset in (2, 3)] == [1, 0]
        assert len(bench.manager.read_now("t", 0, 0, 1, at_least_one=True).records) > 0, (
            "consumers are not held back"
        )
        bench.manager.set_leader_throttle(size, [MOVED])
        assert given(2, 3) == 1

    run(tmp_path, scenario)


def test_what_a_leader_gives_from_its_disk_counts_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that is made anew reads a log from its start, of which nothing is in memory."""
    warm = Log.read

    def cold(log: Log, *arguments: Any, may_block: bool = True, **named: Any) -> LogRead:
        if not may_block:
            raise WouldBlock("cold")
        return warm(log, *arguments, **named)

    async def scenario(bench: Bench) -> None:
        await bench.lead(1, 3)
        bench.append(bytes(1_000), acks=1)
        bench.fetch(3, 1)  # it is committed, so that who lacks it is not in sync
        bench.manager.set_leader_throttle(100, [MOVING])
        bench.now_ms = 5_000
        monkeypatch.setattr(Log, "read", cold)
        with pytest.raises(MustReadCold) as caught:
            bench.fetch(2, 0)
        assert (await caught.value.read()).records
        assert not bench.fetch(2, 0).records, "ten seconds' worth are owed"

    run(tmp_path, scenario)
