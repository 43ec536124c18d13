"""Source partitions on their way through the real fetch loops: what they hold is a count, and no bytes.

The loops, their budget and what is asked for are the product's own (`SourceReader`), and so are a partition's
rules of who wants a fetch, stands and gets on. Modelled are the sources, which fill an answer as Apache Kafka
does (the first batch comes whole, whatever its size; the last one may be cut), and the rows of the target:
what was sent stays until the target takes it, also when its partition is gone; nothing behind it is sent.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.broker.client.raw_fetch import FetchedPartition, FetchPosition
from millrace.broker.errors import RequestTimedOut
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.mirror.pipeline import PartitionPipeline, State
from millrace.mirror.sources import source as source_module
from millrace.mirror.sources.fetch_memory import FetchBudget, Frame
from millrace.mirror.sources.source import SourceReader
from millrace.mirror.topics.routes import SourcePartition
from tests.unit.mirror.source_stage import Source, pipeline_at, reader_of

TICK_S = 0.02
LATENCY_S = 0.01
SENT = 5
"""Batches of a row that may be with the target, and cannot be taken back."""
_ZEROS = bytes(64 << 20)


def steady_ms() -> int:
    return round(asyncio.get_running_loop().time() * 1_000) + 1_000_000


class Batch:
    """On its way to the target."""

    def __init__(self, size: int, frame: Frame | None) -> None:
        self.size, self.frame = size, frame


class Carried(SimpleNamespace):
    """One partition. `sizes` are those of its batches, over and over; `end` of them are in its log."""

    wants_fetch = PartitionPipeline.wants_fetch
    stands = PartitionPipeline.stands
    gets_on = PartitionPipeline.gets_on
    may_get_on = PartitionPipeline.may_get_on

    def __init__(self, number: int, sizes: Sequence[int], end: int, *, takes: bool = True) -> None:
        made = vars(pipeline_at(0))
        made.update(partition=SourcePartition("ewr", "t", number), bytes_behind=1 << 30)
        for rule in ("wants_fetch", "stands", "gets_on", "may_get_on", "accept"):
            del made[rule]
        super().__init__(**made)
        self.progress.is_blocked = False
        self.sizes, self.end, self.takes = sizes, end, takes
        self.row: deque[Batch] = deque()
        self.delivered_count = 0
        self.refuses = False  # the target answers, and takes nothing
        self._got_on_at_ms, self._delivered_at_ms = 0, None
        self._sink = SimpleNamespace(
            is_failing=lambda _target: self.refuses and bool(self.row),
            silent_ms=lambda *_: 0 if self.takes or self.refuses else 1 << 31,
        )

    @property
    def key(self) -> TopicPartition:
        return self.partition.topic, self.partition.partition

    def size_at(self, offset: int) -> int:
        return self.sizes[offset % len(self.sizes)]

    def given(self, offset: int, most: int, *, whole: bool) -> int:
        """Bytes of an answer that begins at `offset`."""
        size = 0
        while offset < self.end and size < most:
            size += self.size_at(offset)
            offset += 1
            if whole and size >= most:
                return size
            whole = False
        return min(size, most)

    def accept(self, answer: FetchedPartition, frame: Frame) -> None:
        progress, left = self.progress, len(answer.records)
        if not progress.outstanding_size:
            self._got_on_at_ms = steady_ms()
        while left and left >= (size := self.size_at(progress.fetch_offset)):
            left -= size
            self.row.append(Batch(size, frame))
            progress.fetch_offset += 1
            progress.outstanding_size += size

    def deliver(self) -> bool:
        for _ in range((len(self.row) + 1) // 2):
            self.progress.outstanding_size -= self.row.popleft().size
            self.delivered_count += 1
            self._got_on_at_ms = self._delivered_at_ms = steady_ms()
        return bool(self.row)

    def leave_answers(self) -> None:
        for place, batch in enumerate(self.row):
            if (place >= SENT or self.refuses) and batch.frame is not None and batch.frame.is_shared:
                batch.frame = batch.frame.apart(batch.size)

    def rewind(self) -> None:
        """The lane's transaction was aborted."""
        self.progress.fetch_offset -= len(self.row)
        self.progress.outstanding_size = 0
        self.row.clear()

    def closed(self) -> list[Batch]:
        """What was sent, and stays."""
        self.state = State.CLOSED
        self.progress.outstanding_size = 0
        sent = list(self.row)[:SENT]
        self.row.clear()
        return sent


class World:
    """Several sources and one budget. To be made in the event loop of the story."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, budget: FetchBudget, seed: int = 0) -> None:
        self.budget = budget
        self.random = random.Random(seed)
        self.readers: list[SourceReader] = []
        self.lost_fetches = 0.0
        self.left_behind: list[tuple[Carried, list[Batch]]] = []
        self.most_held = 0
        self._tasks: list[asyncio.Task[None]] = []
        monkeypatch.setattr(source_module, "fetch", self._fetch)
        monkeypatch.setattr(source_module, "random", self.random)
        monkeypatch.setattr(source_module, "steady_ms", steady_ms)

    def start_source(self) -> SourceReader:
        reader = reader_of(Source())
        leaders: dict[TopicPartition, int] = {}
        view: Any = SimpleNamespace(topics={}, leader=lambda *key: leaders.get(key, 1), leaders=leaders)
        reader.view = view
        reader._budget = self.budget
        known: Any = reader.cluster
        known.reader = reader
        self.readers.append(reader)
        self._tasks.append(asyncio.create_task(self._run(reader)))
        return reader

    async def _run(self, reader: SourceReader) -> None:
        try:
            async with asyncio.TaskGroup() as reader._tasks:
                await asyncio.Event().wait()
        finally:
            self.budget.loop_count -= len(reader._loops)
            reader._loops.clear()

    async def stop_source(self, reader: SourceReader) -> None:
        task = self._tasks.pop(self.readers.index(reader))
        self.readers.remove(reader)
        task.cancel()
        await asyncio.wait([task])
        for carried in list(reader._pipelines.values()):
            self.revoke(reader, carried)

    def add(self, reader: SourceReader, carried: Carried) -> None:
        reader.add(carried)  # type: ignore[arg-type]

    def revoke(self, reader: SourceReader, carried: Carried) -> None:
        reader.remove(carried)  # type: ignore[arg-type]
        self.left_behind.append((carried, carried.closed()))

    def lead(self, reader: SourceReader, carried: Carried, node: int) -> None:
        view: Any = reader.view
        view.leaders[carried.key] = node
        reader._place()

    def all_carried(self) -> list[tuple[SourceReader, Carried]]:
        return [(reader, each) for reader in self.readers for each in reader._pipelines.values()]  # type: ignore[misc]

    async def rest(self, seconds: float) -> None:
        """The target takes what it takes, for so long."""
        for _ in range(max(1, round(seconds / TICK_S))):
            await asyncio.sleep(TICK_S)
            for reader, each in self.all_carried():
                if each.takes and each.row:
                    each.deliver()
                    reader.moved(each)  # type: ignore[arg-type]
            self.left_behind = [(gone, sent) for gone, sent in self.left_behind if sent and not gone.takes]
            self.most_held = max(self.most_held, self.budget.held_size)

    async def end(self) -> None:
        for reader in list(self.readers):
            await self.stop_source(reader)
        self.left_behind.clear()

    async def _fetch(
        self,
        cluster: Any,
        node: int,
        positions: dict[TopicPartition, FetchPosition],
        *,
        max_wait_ms: int,
        max_bytes: int,
        partition_max_bytes: int,
        **_: object,
    ) -> list[FetchedPartition]:
        await asyncio.sleep(LATENCY_S * self.random.uniform(0.5, 2))
        if self.random.random() < self.lost_fetches:
            raise RequestTimedOut("on purpose")
        carried = cluster.reader._pipelines
        answers, left, was_whole = [], max_bytes, False
        for (topic, number), position in positions.items():
            size = 0
            if (each := carried.get((topic, number))) is not None:
                most = min(left, partition_max_bytes)
                size = each.given(position.offset, most, whole=not was_whole)
            was_whole |= size > 0
            left = max(0, left - size)
            end = position.offset + 1
            records = memoryview(_ZEROS)[:size]
            answers.append(FetchedPartition(topic, number, 0, end, end, 0, (), None, records))
        if not was_whole:
            await asyncio.sleep(max_wait_ms / 1_000)
        return answers
