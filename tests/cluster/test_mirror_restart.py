"""Workers with names of their own: a restart moves no partition, neither there nor back; of two processes
with one name the later one carries; and a drain moves everything, long before the session ends."""

from __future__ import annotations

import asyncio
import signal
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import yaml

from millrace.broker.client.admin import create_topic
from tests.cluster.fed_workers import PARTITIONS, Feed, finish, logs, owners, until_shared
from tests.cluster.mirror_process import MirrorProcess, until
from tests.pairs import Pair, in_pairs
from tests.waiting import patience

# No test waits for the end of such a session: what it finds has come before that.
LONG_SESSION_MS = 300_000


def named(name: str, rebalance_timeout_ms: int = 10_000) -> dict[str, Any]:
    return {
        "instance_id": name,
        "session_timeout_ms": LONG_SESSION_MS,
        "rebalance_timeout_ms": rebalance_timeout_ms,
    }


def moves(worker: MirrorProcess) -> list[str]:
    """What was shared out to a worker that changed what it carries, in the words of its log."""
    assigned = [line for line in worker.log.splitlines() if " assigned" in line]
    return [line for line in assigned if "going=0" not in line or "coming=0" not in line]


def positions(workers: Sequence[MirrorProcess]) -> dict[int, int]:
    """Partition -> how far it has been carried."""
    return {
        each["partition"]: each["position"]
        for worker in workers
        for each in worker.status().get("partitions", ())
        if each["position"] is not None
    }


async def flowing(*workers: MirrorProcess) -> None:
    """Every partition comes on."""
    before = positions(workers)

    async def has_grown() -> bool:
        now = positions(workers)
        return len(now) == PARTITIONS and all(now[each] > before.get(each, 0) for each in now)

    await until(has_grown, logs_of=[*workers])


async def until_owned(worker: MirrorProcess, others: Sequence[MirrorProcess], wanted: set[int]) -> None:
    async def has_them() -> bool:
        return (await owners([worker]))[0] == wanted

    await until(has_them, logs_of=[worker, *others])


@in_pairs("millrace-millrace", "kafka-kafka")
def test_a_worker_with_a_name_is_restarted_replaced_and_drained(pair: Pair) -> None:
    async def story() -> None:
        topic, mirror = pair.unique("restart"), pair.unique("mirror")
        async with pair.source.cluster() as source, pair.target.cluster() as target:
            await create_topic(source, topic, PARTITIONS, 1)
            workers = [pair.mirror([topic], name=mirror, group=named(f"worker-{n}")) for n in range(2)]
            await until_shared(workers)
            feed = Feed(source, topic)
            # Each of them: one of the two is the leader. The second without any time to hand over.
            for restarted, other in (workers, reversed(workers)):
                await flowing(*workers)
                async with nothing_moves(restarted, other):
                    if restarted is workers[0]:
                        assert await asyncio.to_thread(restarted.terminate) == 0
                    else:
                        await asyncio.to_thread(restarted.kill)
                    restarted.start()
                await flowing(*workers)
            earlier, other = workers
            async with nothing_moves(earlier, other, by=pair.mirror([topic], start=False)) as later:
                later.settings |= {"name": mirror, "group": named("worker-0")}
                later.config_path.write_text(yaml.safe_dump(later.settings))
                later.start()
                assert earlier.process is not None
                assert await asyncio.to_thread(earlier.process.wait, patience()) == 1, logs([earlier, later])
            assert "another process has taken this worker's place" in earlier.log
            assert "group.instance_id worker-0 too" in earlier.log and "Traceback" not in earlier.log
            await asyncio.to_thread(drain, other)
            await until_owned(later, [other], set(range(PARTITIONS)))
            await finish(target, feed, [later, *workers])

    asyncio.run(story())


@asynccontextmanager
async def nothing_moves(
    worker: MirrorProcess, other: MirrorProcess, by: MirrorProcess | None = None
) -> AsyncIterator[MirrorProcess]:
    """Waits until `by` (the worker itself, started again) has what `worker` had, and the group knows it anew:
    nothing of the other one's has moved."""
    heir = by or worker
    mine, theirs = await owners([worker, other])
    seen_moves, generation = len(moves(other)), other.status()["generation"]
    yield heir
    await until_owned(heir, [other], mine)

    async def known_anew() -> bool:
        is_led = sorted([each.status().get("leader", False) for each in (heir, other)]) == [False, True]
        is_anew = other.status().get("generation", -1) > generation
        return is_led and is_anew and await owners([heir, other]) == [mine, theirs]

    await until(known_anew, logs_of=[heir, other])
    assert len(moves(other)) == seen_moves


def drain(worker: MirrorProcess) -> None:
    call = urllib.request.Request(
        f"http://127.0.0.1:{worker.port}/drain", b"{}", {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(call, timeout=patience(60)) as answer:
        assert answer.status == 200


@pytest.mark.long
@in_pairs("kafka-kafka", "millrace-millrace")
def test_a_name_that_the_group_did_not_wait_for_carries_nothing_twice(pair: Pair) -> None:
    """A generation begins without the worker, which is still a member of it: its leader knows nothing of the
    partitions that the worker was given after it joined."""

    async def story() -> None:
        topic, mirror = pair.unique("passedover"), pair.unique("mirror")
        async with pair.source.cluster() as source, pair.target.cluster() as target:
            await create_topic(source, topic, PARTITIONS, 1)
            late = pair.mirror([topic], name=mirror, group=named("late", rebalance_timeout_ms=2_000))
            await until_owned(late, [], set(range(PARTITIONS)))
            feed = Feed(source, topic)
            await flowing(late)
            assert late.process is not None
            late.process.send_signal(signal.SIGSTOP)
            try:
                heir = pair.mirror([topic], name=mirror, group=named("heir", rebalance_timeout_ms=2_000))

                async def carries() -> bool:
                    return bool(positions([heir]))

                await until(carries, logs_of=[heir])
            finally:
                late.process.send_signal(signal.SIGCONT)
            await until_shared([late, heir])
            await flowing(late, heir)
            assert "lost the seat" in late.log
            await finish(target, feed, [late, heir])

    asyncio.run(story())
