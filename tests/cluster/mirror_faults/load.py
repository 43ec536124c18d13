"""Who writes: every stream of both sources gets numbered batches with acks=all, each sent once and never
again; beside them, the product's audited producers (`audited_load.py`).

A batch without an answer may be in the source or not; its numbers are not used again, so what the aggregate
holds twice was doubled by the mirror, and what a source acknowledged must arrive. All of these run on one
thread with an event loop; the main thread talks to it by `call`.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
import traceback
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from millrace.broker.client.admin import create_topic, delete_topic
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.raw_produce import produce
from millrace.broker.errors import MillraceError
from millrace.broker.protocol.records import build_batch
from tests.cluster.mirror_faults.audited_load import AuditedLoad
from tests.cluster.mirror_faults.plan import SOURCES
from tests.cluster.mirror_faults.records import (
    AUDITED,
    PARTITIONS_AUDITED,
    TOPICS,
    Journal,
    Stream,
    record_of,
)
from tests.waiting import patience, until, until_async

T = TypeVar("T")
MOST_RECORDS = 20
CODECS = 5
REQUEST_TIMEOUT_MS = 5_000
AGAIN_S = 0.2
ADMIN_TIMEOUT_S = 60.0
FAILURES = (MillraceError, OSError, TimeoutError)
CONFIGS = {"retention.ms": "-1", "segment.bytes": str(8 << 20)}


class Load:
    """`journals` grows by a stream for every life of a topic's partition."""

    def __init__(self, bootstraps: Mapping[str, str], seed: int, batches_per_s: float) -> None:
        self._audited = AuditedLoad(bootstraps, seed)
        self.journals: list[Journal] = list(self._audited.journals)
        self._failure: str | None = None
        self._record_count = 0
        self._bootstraps = bootstraps
        self._interval_s = len(SOURCES) * sum(TOPICS.values()) / batches_per_s
        self._draw = random.Random(f"load {seed}")
        self._clusters: dict[str, Cluster] = {}
        self._current: dict[tuple[str, str, int], Journal] = {}
        self._closed_topics: set[tuple[str, str]] = set()
        self._sending: dict[tuple[str, str], int] = {}
        self._hurry_left: dict[str, int] = dict.fromkeys(SOURCES, 0)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)
        self._paused = False

    @property
    def failure(self) -> str | None:
        return self._failure or self._audited.failure

    @property
    def record_count(self) -> int:
        """Acknowledged, of all streams."""
        return self._record_count + self._audited.record_count

    @property
    def audited_count(self) -> int:
        """Of those, the audited producers'."""
        return self._audited.record_count

    def start(self) -> None:
        self._thread.start()
        self.call(self._open(), ADMIN_TIMEOUT_S)
        self._audited.start()

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float = ADMIN_TIMEOUT_S) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(patience(timeout_s))

    def stop(self) -> None:
        self._audited.halt(in_order=False)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(patience(10))

    def halt(self) -> None:
        """Nothing more is written, and what is under way is settled."""
        self._paused = True
        until(lambda: not any(self._sending.values()), "the load comes to an end", every_s=0.05)
        self._audited.halt()

    def hurry(self, batches: int) -> None:
        """So many batches for each stream of every source as fast as they go."""
        for source in SOURCES:
            self._hurry_left[source] = batches * sum(TOPICS.values())

    def runs_now(self) -> dict[Stream, int]:
        """How much of each journal is acknowledged by now, for `checks.judge`."""
        return {journal.stream: len(journal.runs) for journal in list(self.journals)}

    def recreate(self, source: str, topic: str) -> None:
        """Deletes the topic and creates it again; from now on its streams are others."""
        self.call(self._recreate(source, topic), 2 * ADMIN_TIMEOUT_S)

    # -- on the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))

    async def _open(self) -> None:
        for source in SOURCES:
            cluster = Cluster(source, [self._bootstraps[source]], request_timeout_ms=REQUEST_TIMEOUT_MS)
            self._clusters[source] = cluster
            await create_topic(cluster, AUDITED, PARTITIONS_AUDITED, 1, CONFIGS)
            for topic, count in TOPICS.items():
                await create_topic(cluster, topic, count, 1, CONFIGS)
                self._sending[source, topic] = 0
                self._begin_life(source, topic, 0)
                for partition in range(count):
                    task = self._loop.create_task(self._write(source, topic, partition))
                    task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = "".join(traceback.format_exception(error))

    def _begin_life(self, source: str, topic: str, incarnation: int) -> None:
        for partition in range(TOPICS[topic]):
            journal = Journal(Stream(source, topic, incarnation, partition))
            self._current[source, topic, partition] = journal
            self.journals.append(journal)

    async def _write(self, source: str, topic: str, partition: int) -> None:
        where = (source, topic)
        draw = random.Random(f"{source} {topic} {partition} {self._draw.random()}")
        while True:
            if self._hurry_left[source] > 0 and not self._paused:
                self._hurry_left[source] -= 1
            else:
                await asyncio.sleep(self._interval_s * draw.uniform(0.5, 1.5))
            if self._paused or where in self._closed_topics:
                await asyncio.sleep(0.05)
                continue
            self._sending[where] += 1
            try:
                await self._send(self._current[source, topic, partition], draw)
            except FAILURES:
                await asyncio.sleep(AGAIN_S)
            finally:
                self._sending[where] -= 1

    async def _send(self, journal: Journal, draw: random.Random) -> None:
        stream, cluster = journal.stream, self._clusters[journal.stream.source]
        key = (stream.topic, stream.partition)
        leader = (await cluster.metadata([stream.topic])).leader(*key)
        if leader is None:
            cluster.invalidate()
            await asyncio.sleep(AGAIN_S)
            return
        numbers = journal.take(draw.randint(1, MOST_RECORDS))
        batch = build_batch(
            [record_of(stream, number) for number in numbers], compression=draw.randrange(CODECS)
        )
        outcome = (await produce(cluster, leader, {key: batch}, timeout_ms=REQUEST_TIMEOUT_MS))[key]
        if outcome.error_code:
            await asyncio.sleep(AGAIN_S)
            return
        journal.acknowledged(numbers, outcome.base_offset)
        self._record_count += len(numbers)

    async def _recreate(self, source: str, topic: str) -> None:
        where = (source, topic)
        self._closed_topics.add(where)
        await until_async(lambda: not self._sending[where], "no batch is under way", every_s=0.02)
        cluster = self._clusters[source]
        journals = [self._current[source, topic, partition] for partition in range(TOPICS[topic])]
        for journal in journals:
            journal.ended_ms = time.time_ns() // 1_000_000
        await delete_topic(cluster, topic)
        await _until_gone(cluster, topic)
        await create_topic(cluster, topic, TOPICS[topic], 1, CONFIGS)
        self._begin_life(source, topic, journals[0].stream.incarnation + 1)
        self._closed_topics.discard(where)


async def _until_gone(cluster: Cluster, topic: str) -> None:
    async def is_gone() -> bool:
        return topic not in (await cluster.metadata(max_age_ms=0)).topics

    await until_async(is_gone, f"{topic} of {cluster} is deleted", every_s=0.05)
