"""Two lanes per leader: which partitions belong where, and that each is in the care of one lane."""

from __future__ import annotations

import asyncio
import uuid
from types import SimpleNamespace
from typing import Any

from millrace.broker.replication.lanes import (
    IDLE_AFTER_SECONDS,
    NEVER,
    SWEEP_SECONDS,
    Lane,
    is_sweep_due,
    lane_of,
)
from millrace.broker.replication.replica_fetcher import NO_EPOCH, LaneFetcher, LeaderFetcher


def test_partition_is_busy_until_it_has_brought_nothing_for_a_while() -> None:
    assert lane_of(NEVER, 0.0) is Lane.IDLE
    assert lane_of(5.0, 5.0) is Lane.BUSY
    assert lane_of(5.0, 5.0 + IDLE_AFTER_SECONDS * 0.99) is Lane.BUSY
    assert lane_of(5.0, 5.0 + IDLE_AFTER_SECONDS) is Lane.IDLE


def test_idle_lane_lets_go_at_once_and_the_busy_one_now_and_then() -> None:
    assert is_sweep_due(Lane.IDLE, 7.0, 7.0)
    assert not is_sweep_due(Lane.BUSY, 7.0, 7.0 + SWEEP_SECONDS * 0.99)
    assert is_sweep_due(Lane.BUSY, 7.0, 7.0 + SWEEP_SECONDS)


def _local(number: int) -> Any:
    return SimpleNamespace(key=("t", number), topic_id=uuid.UUID(int=1), partition=number)


def _lanes(fetcher: LeaderFetcher) -> tuple[LaneFetcher, LaneFetcher]:
    return fetcher._lanes[Lane.BUSY], fetcher._lanes[Lane.IDLE]


def test_partition_changes_over_and_back_and_is_never_in_both() -> None:
    async def scenario() -> None:
        now = asyncio.get_running_loop().time()
        # A broker that is not registered asks for nothing: the lanes rest.
        fetcher = LeaderFetcher(2, SimpleNamespace(own_epoch=NO_EPOCH))  # type: ignore[arg-type]
        busy, idle = _lanes(fetcher)
        locals_ = [_local(number) for number in range(3)]
        for local in locals_:
            fetcher.add(local)
        assert (len(busy.partitions), len(idle.partitions)) == (0, 3)

        idle.partitions["t", 1].records_at = now
        idle._change_over()
        assert (list(busy.partitions), list(idle.partitions)) == ([("t", 1)], [("t", 0), ("t", 2)])

        fetcher.add(locals_[1])  # a new epoch of the same leader
        assert (list(busy.partitions), len(idle.partitions)) == ([("t", 1)], 2)

        busy.partitions["t", 1].records_at = now - IDLE_AFTER_SECONDS
        busy._change_over()
        assert list(busy.partitions) == [("t", 1)], "it is too early to look"
        busy._swept_at -= SWEEP_SECONDS
        busy._change_over()
        assert (len(busy.partitions), len(idle.partitions)) == (0, 3)

        idle.partitions["t", 1].records_at = now
        idle._change_over()
        fetcher.add(_local(1))  # the topic was made anew: another log, of which nothing is known
        assert (len(busy.partitions), len(idle.partitions)) == (0, 3)
        assert sorted(key for key, _ in fetcher.partitions()) == [("t", 0), ("t", 1), ("t", 2)]

        assert fetcher.remove(("t", 1)) and not fetcher.remove(("t", 1))
        assert not fetcher.is_empty
        assert fetcher.remove(("t", 0)) and fetcher.remove(("t", 2))
        assert fetcher.is_empty
        fetcher.cancel()
        await asyncio.gather(*fetcher.tasks, return_exceptions=True)

    asyncio.run(scenario())
