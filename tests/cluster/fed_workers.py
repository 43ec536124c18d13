"""A topic under load, and the workers of a mirror that share it: what has arrived, and who carries what."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

from millrace.broker.client.admin import create_topic
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.read_to_end import read_topic_to_end
from millrace.broker.protocol.records import Record, build_batch
from tests.cluster.mirror_process import MirrorProcess, send, until
from tests.pairs import Pair

PARTITIONS = 4
SESSION_MS = 3_000
GROUP = {"session_timeout_ms": SESSION_MS, "rebalance_timeout_ms": 10_000}


class Feed:
    """Numbered records for every partition of one topic, for as long as it runs."""

    def __init__(self, cluster: Cluster, topic: str) -> None:
        self.topic = topic
        self._cluster = cluster
        self.sent = [0] * PARTITIONS
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while not self._stop.is_set():
            await asyncio.gather(*(self._send(partition) for partition in range(PARTITIONS)))
            await asyncio.sleep(0.01)

    async def _send(self, partition: int) -> None:
        first = self.sent[partition]
        count = random.randint(1, 20)
        now_ms = time.time_ns() // 1_000_000
        records = [
            Record(str(partition).encode(), str(number).encode(), timestamp_ms=now_ms)
            for number in range(first, first + count)
        ]
        await send(self._cluster, self.topic, partition, build_batch(records))
        self.sent[partition] += count

    async def stop(self) -> None:
        self._stop.set()
        await self._task


async def seen(target: Cluster, topic: str) -> list[list[int]]:
    """The numbers in each partition, as read_committed sees them."""
    numbers: list[list[int]] = [[] for _ in range(PARTITIONS)]
    async for record in read_topic_to_end(target, topic):
        numbers[record.partition].append(int(record.value or b"-1"))
    return numbers


async def all_there(target: Cluster, feed: Feed) -> bool:
    return [len(set(numbers)) for numbers in await seen(target, feed.topic)] == feed.sent


def check(numbers: list[list[int]], *, repeats_allowed: bool = False) -> None:
    """Each number once and in order; where repeats are allowed, what comes for the first time."""
    for partition, row in enumerate(numbers):
        judged = list(dict.fromkeys(row)) if repeats_allowed else row
        assert judged == list(range(len(judged))), f"partition {partition} is not each number once, in order"


async def owners(workers: Sequence[MirrorProcess]) -> list[set[int]]:
    return [
        {each["partition"] for each in worker.status().get("partitions", []) if each["state"] == "running"}
        for worker in workers
    ]


async def start(
    pair: Pair, source: Cluster, target: Cluster, count: int, **config: Any
) -> tuple[Feed, list[MirrorProcess]]:
    """A topic under load and a mirror of `count` workers that share it, with these keys in their config."""
    topic = pair.unique("shared")
    settings = {"name": pair.unique("mirror"), "group": GROUP, **config}
    await create_topic(source, topic, PARTITIONS, 1)
    workers = [pair.mirror([topic], **settings) for _ in range(count)]

    await until_shared(workers)
    feed = Feed(source, topic)

    async def flows() -> bool:
        return all(len(numbers) > 20 for numbers in await seen(target, topic))

    await until(flows, logs_of=workers)
    return feed, workers


def logs(workers: list[MirrorProcess]) -> str:
    return "\n".join(worker.log for worker in workers)


async def until_shared(workers: Sequence[MirrorProcess]) -> None:
    share = PARTITIONS // len(workers)

    async def is_shared() -> bool:
        return [len(each) for each in await owners(workers)] == [share] * len(workers)

    await until(is_shared, logs_of=workers)


async def until_grown(target: Cluster, feed: Feed, partition: int, by: int, worker: MirrorProcess) -> None:
    """Until more has come than was there, and no repeats of it."""

    async def count() -> int:
        return len(set((await seen(target, feed.topic))[partition]))

    there = await count()

    async def has_grown() -> bool:
        return await count() > there + by

    await until(has_grown, logs_of=[worker])


async def finish(
    target: Cluster, feed: Feed, workers: list[MirrorProcess], *, repeats_allowed: bool = False
) -> None:
    """Everything that was sent has arrived, once."""
    await feed.stop()
    await until(lambda: all_there(target, feed), logs_of=workers)
    check(await seen(target, feed.topic), repeats_allowed=repeats_allowed)
