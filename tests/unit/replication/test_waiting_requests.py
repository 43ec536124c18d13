"""Waiting fetches."""

from __future__ import annotations

import asyncio

import pytest

from millrace.broker.replication import waiting_requests
from millrace.broker.replication.waiting_requests import WaitingFetches

A, B, C = ("t", 0), ("t", 1), ("u", 0)


def test_bytes_of_all_partitions_add_up_and_others_do_not_count() -> None:
    async def scenario() -> None:
        waiting = WaitingFetches()
        fetch = asyncio.ensure_future(waiting.wait([A, B], 100, 60))
        await asyncio.sleep(0)
        waiting.appended(A, 60)
        waiting.appended(C, 1_000)
        await asyncio.sleep(0)
        assert not fetch.done()
        waiting.appended(B, 40)
        assert await fetch == (True, {A, B})
        assert len(waiting) == 0

    asyncio.run(scenario())


def test_readers_of_committed_data_count_what_they_may_see() -> None:
    async def scenario() -> None:
        waiting = WaitingFetches()
        of_all, of_committed = (
            asyncio.ensure_future(waiting.wait([A], 100, 60, read_committed=is_committed))
            for is_committed in (False, True)
        )
        await asyncio.sleep(0)
        waiting.appended(A, 100, 0)
        assert await of_all == (True, {A})
        assert not of_committed.done()
        waiting.appended(A, 1, 101)
        assert await of_committed == (True, {A})

    asyncio.run(scenario())


def test_time_and_disturbance_end_the_wait() -> None:
    async def scenario() -> None:
        waiting = WaitingFetches()
        assert await waiting.wait([A], 1, 0.001) == (False, set())
        fetch = asyncio.ensure_future(waiting.wait([A, B], 1 << 30, 60))
        await asyncio.sleep(0)
        waiting.disturbed(A)
        assert await fetch == (True, {A})
        assert len(waiting) == 0

    asyncio.run(scenario())


def test_reader_that_goes_away_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        waiting = WaitingFetches()
        fetch = asyncio.ensure_future(waiting.wait([A, B], 1, 60))
        await asyncio.sleep(0)
        assert len(waiting) == 1
        fetch.cancel()
        await asyncio.gather(fetch, return_exceptions=True)
        assert len(waiting) == 0
        waiting.appended(A, 5)

    asyncio.run(scenario())


def test_follower_gives_up_its_own_wait_only() -> None:
    async def scenario() -> None:
        waiting = WaitingFetches()
        of_two, of_three, of_a_consumer = (
            asyncio.ensure_future(waiting.wait([A, B], 1 << 30, 60, *reader)) for reader in ((2,), (3,), ())
        )
        await asyncio.sleep(0)
        waiting.appended(B, 1)
        waiting.give_up(A, 2)
        assert await of_two == (False, {B})
        await asyncio.sleep(0)
        assert not of_three.done() and not of_a_consumer.done()
        waiting.give_up(C, 3)
        waiting.disturbed(A)
        assert await of_three == await of_a_consumer == (True, {A, B})

    asyncio.run(scenario())


def test_fetch_of_many_partitions_hears_of_each_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting_requests, "MANY_PARTITIONS", 2)

    async def scenario() -> None:
        waiting = WaitingFetches()
        of_many = asyncio.ensure_future(waiting.wait([A, B, C], 100, 60, 7))
        of_one = asyncio.ensure_future(waiting.wait([A], 100, 60))
        await asyncio.sleep(0)
        assert len(waiting) == 2
        waiting.appended(A, 60)
        waiting.appended(("u", 1), 1_000)
        waiting.appended(C, 39)
        await asyncio.sleep(0)
        assert not of_many.done() and not of_one.done()
        waiting.appended(B, 1)
        assert await of_many == (True, {A, B, C})
        assert len(waiting) == 1
        waiting.appended(A, 40)
        assert await of_one == (True, {A})
        assert len(waiting) == 0
        for end in (lambda: waiting.disturbed(B), lambda: waiting.give_up(C, 7)):
            fetch = asyncio.ensure_future(waiting.wait([A, B, C], 100, 60, 7))
            await asyncio.sleep(0)
            waiting.give_up(C, 8)
            waiting.disturbed(("u", 1))
            end()
            assert (await fetch).touched <= {B}
            assert len(waiting) == 0

    asyncio.run(scenario())
