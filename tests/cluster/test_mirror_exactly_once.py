"""Exactly once between real clusters: workers killed and frozen in mid-flow.

What read_committed sees in the target must be each record of the source once and in order, at the end and at
every moment before; a killed worker's partitions move within its session and little more, because its open
transaction is aborted by whoever leads, long before it would time out.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.open_transactions import OpenTransaction, open_transactions
from tests.cluster.fed_workers import (
    SESSION_MS,
    Feed,
    check,
    finish,
    owners,
    seen,
    start,
    until_alone,
    until_grown,
    until_shared,
)
from tests.cluster.mirror_process import MirrorProcess, until
from tests.pairs import Pair, in_pairs
from tests.waiting import DeadlinePassed

# Session, heartbeat of the others, rebalance, fencing, reading positions. The transaction's timeout is 15 s.
TAKEOVER_S = SESSION_MS / 1000 + 6.0
MOST_KILLS = 4
# A stopped worker may have asked for the end of its transaction a moment before: by then it has ended.
SETTLE_S = 0.3
# The second freeze, and the death of both workers in every pair, by `make test-pairs`.
IS_THOROUGH = bool(os.environ.get("MILLRACE_PAIRS"))
FREEZES = 2 if IS_THOROUGH else 1


async def stopped_in_a_transaction(
    target: Cluster, feed: Feed, partition: int, victim: MirrorProcess
) -> list[OpenTransaction]:
    """Stops the worker (SIGSTOP) while it has a transaction open on the partition, and not yet asked for its
    end: that transaction."""
    assert victim.process is not None
    process = victim.process

    async def still_open() -> list[OpenTransaction]:
        found = await open_transactions(target, feed.topic, partition)
        return [each for each in found if each.state == "Ongoing"]

    async def is_caught() -> list[OpenTransaction]:
        process.send_signal(signal.SIGSTOP)
        found = await still_open()
        await asyncio.sleep(SETTLE_S)
        if not found or await still_open() != found:
            process.send_signal(signal.SIGCONT)
            return []
        return found

    return await until(is_caught, lambda: "no transaction was open whenever it was looked at")


async def kill_and_replace(
    pair: Pair, target: Cluster, feed: Feed, victim: MirrorProcess, heir: MirrorProcess
) -> float:
    """The seconds until a partition of the victim went on."""
    lost = next(iter((await owners([victim]))[0]))
    check(await seen(target, feed.topic))
    left_open = await stopped_in_a_transaction(target, feed, lost, victim)
    victim.kill()
    killed_at = time.monotonic()
    assert set(left_open) <= set(await open_transactions(target, feed.topic, lost))
    # Read committed, nothing behind the open transaction is seen before it was aborted.
    await until_grown(target, feed, lost, 100, heir)
    took_s = time.monotonic() - killed_at
    print(f"{pair.name}: partition {lost} went on after {took_s:.1f} s")
    assert not set(left_open) & set(await open_transactions(target, feed.topic, lost))
    assert "fenced earlier holders of slots" in heir.log
    check(await seen(target, feed.topic))
    victim.start()
    await until_shared([victim, heir])
    return took_s


@pytest.mark.safety
@in_pairs("millrace-kafka", "kafka-millrace")
def test_killed_worker_repeats_nothing_and_is_replaced_within_its_session(pair: Pair) -> None:
    async def scenario() -> None:
        async with pair.source.cluster() as source, pair.target.cluster() as target:
            feed, workers = await start(pair, source, target, 2)
            # The first to come most often leads the group.
            orders = [workers, workers[::-1]]
            if not IS_THOROUGH:
                orders = [orders[0] if pair.source.kind == "millrace" else orders[1]]
            took_s = [await kill_and_replace(pair, target, feed, *order) for order in orders]
            # A busy machine may hold one of them up.
            while min(took_s) >= TAKEOVER_S and len(took_s) < MOST_KILLS:
                took_s.append(await kill_and_replace(pair, target, feed, *workers))
            if min(took_s) >= TAKEOVER_S:
                seconds = ", ".join(f"{each:.1f}" for each in took_s)
                raise DeadlinePassed(f"a partition went on after {seconds} s, never within {TAKEOVER_S:.0f}")
            await finish(target, feed, workers)

    asyncio.run(scenario())


@pytest.mark.safety
@in_pairs("millrace-millrace", "kafka-kafka")
def test_worker_frozen_past_its_session_repeats_nothing(pair: Pair) -> None:
    async def scenario() -> None:
        async with pair.source.cluster() as source, pair.target.cluster() as target:
            feed, workers = await start(pair, source, target, 2)
            zombie, heir = workers
            assert zombie.process is not None
            for _ in range(FREEZES):
                zombie.process.send_signal(signal.SIGSTOP)
                await until_alone(heir)
                zombie.process.send_signal(signal.SIGCONT)
                await until_shared(workers)
                check(await seen(target, feed.topic))
            await finish(target, feed, workers)

    asyncio.run(scenario())
