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
    """Numbered records for every partition of one topic, up to `most` at once, for as long as it runs."""

    def __init__(
        self,
        cluster: Cluster,
        topic: str,
        partitions: int = PARTITIONS,
        *,
        most: int = 20,
        pause_s: float = 0.01,
    ) -> None:
        self.topic = topic
        self._cluster = cluster
        self._most = most
        self._pause_s = pause_s
        self.sent = [0] * partitions
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while not self._stop.is_set():
            await asyncio.gather(*map(self._send, range(len(self.sent))))
            await asyncio.sleep(self._pause_s)

    async def _send(self, partition: int) -> None:
        first = self.sent[partition]
        count = random.randint(1, self._most)
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


async def seen(cluster: Cluster, topic: str, partitions: int = PARTITIONS) -> list[list[int]]:
    """The numbers in each partition, as read_committed sees them."""
    numbers: list[list[int]] = [[] for _ in range(partitions)]
    async for record in read_topic_to_end(cluster, topic):
        numbers[record.partition].append(int(record.value or b"-1"))
    return numbers


async def all_there(target: Cluster, feed: Feed) -> bool:
    there = await seen(target, feed.topic, len(feed.sent))
    return all(len(set(numbers)) >= sent for numbers, sent in zip(there, feed.sent, strict=True))


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
    await until_flowing(target, feed, workers)
    return feed, workers


async def until_flowing(
    target: Cluster, feed: Feed, workers: Sequence[MirrorProcess], least: int = 20
) -> None:
    """Until more than so many records have come to each partition."""

    async def flows() -> bool:
        there = await seen(target, feed.topic, len(feed.sent))
        return all(len(numbers) > least for numbers in there)

    await until(flows, logs_of=workers)


def logs(workers: list[MirrorProcess]) -> str:
    return "\n".join(worker.log for worker in workers)


async def until_shared(workers: Sequence[MirrorProcess], partitions: int = PARTITIONS) -> None:
    """Until each partition is carried by one worker, and none has two more than another."""
    share, rest = divmod(partitions, len(workers))
    wanted = [share] * (len(workers) - rest) + [share + 1] * rest

    async def is_shared() -> bool:
        return sorted(len(each) for each in await owners(workers)) == wanted

    await until(is_shared, logs_of=workers)


async def until_alone(worker: MirrorProcess) -> None:
    """Until this one carries them all."""
    await until_shared([worker])


async def until_grown(target: Cluster, feed: Feed, partition: int, by: int, worker: MirrorProcess) -> None:
    """Until more has come than was there, and no repeats of it."""

    async def count() -> int:
        return len(set((await seen(target, feed.topic, len(feed.sent)))[partition]))

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
    check(await seen(target, feed.topic, len(feed.sent)), repeats_allowed=repeats_allowed)
