"""Groups come up when they are due, and whoever waits for that hears of what is due sooner."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from millrace.broker.groups.timers import GroupTimers
from tests import virtual_clock


@dataclass
class Followed:
    """A group, as far as timers know it."""

    group_id: str
    due_ms: int | None

    def deadline_ms(self) -> int | None:
        return self.due_ms


def test_groups_are_due_soonest_first_and_each_once():
    timers = GroupTimers(lambda: 0)
    for group in (Followed("late", 30), Followed("soon", 10), Followed("never", None), Followed("next", 20)):
        timers.follow(group)
    assert list(timers.due(9)) == []
    assert list(timers.due(20)) == ["soon", "next"]
    assert list(timers.due(20)) == []
    assert list(timers.due(1_000)) == ["late"]


def test_a_deadline_that_comes_nearer_counts_and_one_that_moves_away_is_looked_at_when_it_was():
    timers, group = GroupTimers(lambda: 0), Followed("g", 50)
    timers.follow(group)
    group.due_ms = 20
    timers.follow(group)
    group.due_ms = 90
    timers.follow(group)
    assert list(timers.due(20)) == ["g"]
    timers.follow(group)
    assert list(timers.due(60)) == [], "what was noted first is another's place by now"
    assert list(timers.due(90)) == ["g"]


def test_a_group_that_is_due_again_at_once_comes_up_in_the_same_round():
    timers, seen = GroupTimers(lambda: 0), []
    timers.follow(Followed("g", 10))
    for group_id in timers.due(30):
        seen.append(group_id)
        if len(seen) < 3:
            timers.follow(Followed("g", 10 * (len(seen) + 1)))
    assert seen == ["g", "g", "g"]


def test_a_wait_ends_when_the_next_group_is_due_or_what_is_sooner_comes_up():
    async def scenario():
        loop = asyncio.get_running_loop()

        def now_ms() -> int:
            return round(loop.time() * 1000)

        began_ms, timers = now_ms(), GroupTimers(now_ms)

        async def ends_after(until_ms: int | None) -> int:
            await timers.wait(None if until_ms is None else began_ms + until_ms)
            return now_ms() - began_ms

        assert await ends_after(100) == 100
        timers.follow(Followed("g", began_ms + 300))
        assert await ends_after(None) == 300
        assert list(timers.due(now_ms())) == ["g"]
        timers.follow(Followed("g", began_ms + 900))
        loop.call_later(0.1, timers.follow, Followed("h", began_ms + 700))
        assert await ends_after(800) == 400, "h is due before all others: whoever waits is to look again"
        assert await ends_after(800) == 700
        assert list(timers.due(now_ms())) == ["h"]
        loop.call_later(0.05, timers.stir)
        assert await ends_after(800) == 750
        assert await ends_after(800) == 800

    virtual_clock.run(scenario())
