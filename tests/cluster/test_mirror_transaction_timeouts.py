"""Transactions whose worker stands still, and the target too: their coordinator ends them in time, so that
readers of what is committed go on, and nothing comes twice when all go on.

A target that alone stands still: test_mirror_own_kafka.
"""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from millrace.broker.client.groups import describe_group
from millrace.broker.client.open_transactions import open_transactions
from tests.cluster.fed_workers import PARTITIONS, check, finish, owners, seen, start, until_grown
from tests.cluster.mirror_process import end_offset, until
from tests.cluster.test_mirror_exactly_once import stopped_in_a_transaction
from tests.cluster.transactional import known_ids, told_timeout_ms
from tests.pairs import Pair, in_pairs

pytestmark = [pytest.mark.safety, pytest.mark.long]

# Nobody takes the seat of a frozen worker, nor fences it, before its transaction has timed out.
AT_EASE = {"session_timeout_ms": 120_000, "rebalance_timeout_ms": 10_000}


async def ended_by_its_coordinator(pair: Pair, target_stands_still_s: float = 0) -> None:
    """The worker is alone and stopped until the end, so nobody else can have done it."""
    async with pair.source.cluster() as source, pair.target.cluster() as target:
        feed, (worker,) = await start(pair, source, target, 1, group=AT_EASE)
        name = worker.settings["name"]

        async def members() -> set[str]:
            group = await describe_group(target, f"millrace-mirror.{name}")
            return {each.member_id for each in group.members}

        (seat,) = await members()
        left_open = await stopped_in_a_transaction(target, feed, 0, worker)
        assert worker.process is not None
        try:
            ids = [each.transactional_id or "" for each in left_open]
            assert {await told_timeout_ms(target, each) for each in ids} == {15_000}
            end = await end_offset(target, feed.topic, 0)
            assert await end_offset(target, feed.topic, 0, read_committed=True) < end
            if target_stands_still_s:
                os.kill(pair.target.pid, signal.SIGSTOP)
                try:
                    await asyncio.sleep(target_stands_still_s)
                finally:
                    os.kill(pair.target.pid, signal.SIGCONT)

            async def reader_is_let_on() -> bool:
                return await end_offset(target, feed.topic, 0, read_committed=True) >= end

            await until(reader_is_let_on, logs_of=[worker])
            assert not set(left_open) & set(await open_transactions(target, feed.topic, 0))
            known = await known_ids(target, f"millrace.{name}.")
            assert {known[each].state for each in ids} == {"CompleteAbort"}
            check(await seen(target, feed.topic))
        finally:
            worker.process.send_signal(signal.SIGCONT)
        for partition in range(PARTITIONS):
            await until_grown(target, feed, partition, 100, worker)
        await finish(target, feed, [worker])
        assert await members() == {seat}, "it went on in the seat that it had"
        assert (await owners([worker]))[0] == set(range(PARTITIONS))


@in_pairs("millrace-millrace", "kafka-kafka")
def test_coordinator_ends_a_frozen_workers_transaction_and_the_worker_repeats_nothing(pair: Pair) -> None:
    asyncio.run(ended_by_its_coordinator(pair))


@in_pairs("millrace-millrace", mortal=True)
def test_coordinator_that_stood_still_itself_ends_the_transaction_when_it_goes_on(pair: Pair) -> None:
    """For as long as the transaction may take: by then it is overdue."""
    asyncio.run(ended_by_its_coordinator(pair, 15.5))
