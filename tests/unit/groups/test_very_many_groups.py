"""The coordinator does what concerns very many groups a few at a time; what others do in between counts."""

from __future__ import annotations

import asyncio

import pytest
from kio.schema.errors import ErrorCode

from millrace.broker.groups import coordinator
from millrace.broker.groups.timers import GroupTimers
from millrace.broker.replication import off_loop
from tests.unit.groups.coordinator_bench import Bench, run

MANY = [f"group-{number}" for number in range(5)]


@pytest.fixture
def two_at_once(monkeypatch: pytest.MonkeyPatch):
    """Of very many groups: others have their turn after so few."""
    for module in (off_loop, coordinator):
        monkeypatch.setattr(module, "SLICE_LENGTH", 2)


@pytest.mark.usefixtures("two_at_once")
def test_very_many_groups_are_watched_after_a_load_with_others_turns_in_between(offsets_log, monkeypatch):
    async def scenario():
        offsets_log.count = 1
        bench = await Bench(offsets_log).start()
        for group in MANY:
            await bench.stable_member(group=group)
        turns: list[int] = [0]
        follow = GroupTimers.follow

        def following(self, group):
            turns[-1] += 1
            follow(self, group)

        def next_turn():
            turns.append(0)
            asyncio.get_running_loop().call_soon(next_turn)

        monkeypatch.setattr(GroupTimers, "follow", following)
        next_turn()
        await bench.restart()
        assert [count for count in turns if count] == [2, 2, 1]
        bench.pass_time(10_001)
        assert {bench.groups.describe(group).state for group in MANY} == {"Empty"}

    run(scenario())


@pytest.mark.usefixtures("two_at_once")
def test_commit_while_very_many_groups_are_swept_is_not_swept_away(offsets_log):
    async def scenario():
        offsets_log.count = 1
        bench = await Bench(offsets_log, offsets_retention_ms=100_000).start()
        for group in MANY:
            await bench.commit(1, group=group)
        bench.now_ms += 100_000
        sweeping = asyncio.create_task(bench.groups.sweep(bench.now_ms))
        await asyncio.sleep(0)
        gone = [key.group_id for key, value in bench.log_records() if value is None]
        assert gone == MANY[:2]
        await bench.commit(2, group=MANY[-1])
        await sweeping
        for _ in range(2):
            assert [bench.committed(group=group) for group in MANY] == [None] * 4 + [2]
            await bench.restart()

    run(scenario())


@pytest.mark.usefixtures("two_at_once")
def test_losing_very_many_groups_answers_all_who_wait(offsets_log):
    async def scenario():
        offsets_log.count = 1
        bench = await Bench(offsets_log, initial_rebalance_delay_ms=3_000).start()
        waiting = [asyncio.create_task(bench.join(group=group)) for group in MANY]
        await asyncio.sleep(0)
        bench.groups.unload(0)
        answers = await asyncio.gather(*waiting)
        assert {answer.error for answer in answers} == {ErrorCode.not_coordinator}

    run(scenario())


@pytest.mark.usefixtures("two_at_once")
def test_very_many_groups_are_listed_with_others_turns_in_between(offsets_log):
    async def scenario():
        bench = await Bench(offsets_log).start()
        for group in MANY:
            await bench.commit(1, group=group)
        turns = [0]

        def next_turn():
            turns[0] += 1
            asyncio.get_running_loop().call_soon(next_turn)

        next_turn()
        error, listed = await bench.groups.list_groups()
        assert turns[0] == 1 + 2
        assert (error, sorted(listing.group_id for listing in listed)) == (ErrorCode.none, MANY)

    run(scenario())
