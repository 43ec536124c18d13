"""At least once between real clusters: workers that join, drain, die and freeze in mid-flow.

Nothing is missing, and what comes for the first time comes in order, whatever happens. Repeats are the price
of a worker that ends without a word; one that comes, and one that is told to go, costs none.
"""

from __future__ import annotations

import asyncio
import signal

import pytest

from tests.cluster.fed_workers import (
    check,
    finish,
    owners,
    seen,
    start,
    until_alone,
    until_grown,
    until_shared,
)
from tests.cluster.mirror_calls import command
from tests.pairs import Pair, in_pairs

DELIVERY = "at_least_once"
# No session ends but by a word, and no handover for want of time: either would repeat, and rightly.
AT_EASE = {"session_timeout_ms": 60_000, "rebalance_timeout_ms": 60_000}


@pytest.mark.safety
@in_pairs("kafka-millrace", "millrace-kafka")
def test_a_worker_that_joins_and_one_that_is_drained_repeat_nothing(pair: Pair) -> None:
    async def scenario() -> None:
        async with pair.source.cluster() as source, pair.target.cluster() as target:
            feed, (first,) = await start(pair, source, target, 1, delivery=DELIVERY, group=AT_EASE)
            second = pair.mirror([feed.topic], name=first.settings["name"], delivery=DELIVERY, group=AT_EASE)
            await until_shared([first, second])
            # Told to drain, its process goes on; the other one ends.
            (moving, *_) = (await owners([second]))[0]
            await until_grown(target, feed, moving, 50, second)
            await asyncio.to_thread(command, second, "drain")
            await until_alone(first)
            await until_grown(target, feed, moving, 50, first)
            check(await seen(target, feed.topic))
            assert await asyncio.to_thread(second.terminate) == 0, second.log
            second.start()
            await until_shared([first, second])
            (moving, *_) = (await owners([first]))[0]
            assert await asyncio.to_thread(first.terminate) == 0, first.log
            await until_alone(second)
            await until_grown(target, feed, moving, 50, second)
            await finish(target, feed, [first, second])

    asyncio.run(scenario())


@pytest.mark.safety
@in_pairs("millrace-kafka", "kafka-millrace")
def test_a_worker_that_is_killed_and_one_that_is_frozen_lose_nothing_and_keep_the_order(pair: Pair) -> None:
    async def scenario() -> None:
        async with pair.source.cluster() as source, pair.target.cluster() as target:
            feed, workers = await start(pair, source, target, 2, delivery=DELIVERY)
            killed, frozen = workers
            (moving, *_) = (await owners([killed]))[0]
            killed.kill()
            await until_alone(frozen)
            await until_grown(target, feed, moving, 100, frozen)
            killed.start()
            await until_shared(workers)
            check(await seen(target, feed.topic), repeats_allowed=True)

            assert frozen.process is not None
            (moving, *_) = (await owners([frozen]))[0]
            frozen.process.send_signal(signal.SIGSTOP)
            await until_alone(killed)
            await until_grown(target, feed, moving, 100, killed)
            frozen.process.send_signal(signal.SIGCONT)
            await until_shared(workers)
            assert "lost the seat in the group" in frozen.log
            await finish(target, feed, workers, repeats_allowed=True)
            print("repeats:", [len(row) - len(set(row)) for row in await seen(target, feed.topic)])

    asyncio.run(scenario())
