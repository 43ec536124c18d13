"""A partition's pipeline with everything around it written down: what was sent, told and kept."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any
from uuid import UUID

from millrace.broker.client.raw_fetch import FetchedPartition
from millrace.broker.errors import KafkaError
from millrace.broker.protocol.batch import stamp_offset_and_epoch
from millrace.broker.protocol.mirror_positions import Position
from millrace.broker.protocol.records import Record, build_batch
from millrace.mirror.batches.coalesce import BatchWalk
from millrace.mirror.delivery.outgoing import Outgoing
from millrace.mirror.gaps.gaps import Gap, GapClass, GapPolicy
from millrace.mirror.gaps.open_gaps import Origin
from millrace.mirror.pipeline import PartitionPipeline
from millrace.mirror.steady import steady_ms
from millrace.mirror.topics.routes import SourcePartition, TargetPartition

ORIGIN = Origin("cluster", UUID(int=7))
SECOND = 1_000_000


class Target:
    """The sink's face to a pipeline: a queue, of which a test sends, acknowledges and refuses."""

    is_transactional = False
    on_moved = None

    def __init__(self) -> None:
        self.queue: list[Outgoing] = []
        self.sent_count = 0

    def enqueue(self, _target: TargetPartition, outgoing: Outgoing) -> None:
        self.queue.append(outgoing)

    def withdraw(self, _target: TargetPartition, owner: object, from_offset: int = 0) -> list[Outgoing]:
        gone = [each for each in self.queue[self.sent_count :] if each.offsets[0] >= from_offset]
        self.queue = [each for each in self.queue if each not in gone]
        return gone

    def is_failing(self, _target: TargetPartition) -> bool:
        return False

    def offsets(self) -> list[list[int]]:
        return [list(each.offsets) for each in self.queue]

    def acknowledge(self, count: int = 1) -> None:
        for _ in range(count):
            outgoing = self.queue.pop(0)
            self.sent_count = max(0, self.sent_count - 1)
            outgoing.owner.delivered(outgoing, -1, 0, steady_ms())

    def refuse(self, error: KafkaError) -> None:
        """The first is refused; what takes its place stands where it stood."""
        outgoing = self.queue.pop(0)
        self.sent_count = max(0, self.sent_count - 1)
        self.queue[:0] = outgoing.owner.refused(outgoing, error, 0)


class Around:
    """What a pipeline shares with the others of its worker (`pipeline.Shared`), all of it in one."""

    between = None

    def __init__(self, *skipped: GapClass) -> None:
        self.skipped = skipped
        self.events: list[tuple[int, int, str]] = []
        self.limit = 1 << 20
        self.limit_now = 1 << 20
        self.now = SECOND
        self.may_record = asyncio.Event()
        self.may_record.set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.walk = BatchWalk()
        self.delivered: list[tuple[SourcePartition, int, int]] = []  # records and bytes
        self.load: list[tuple[SourcePartition, int]] = []
        self.gaps = self.topics = self.metrics = self.workload = self

    def now_ms(self) -> int:
        return self.now

    def policy(self, gap_class: GapClass) -> GapPolicy:
        return GapPolicy.SKIP if gap_class in self.skipped else GapPolicy.STOP

    async def record(self, gap: Gap) -> None:
        await self.may_record.wait()
        self.events.append((gap.from_offset, gap.to_offset, gap.gap_class.value))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.add(asyncio.get_running_loop().create_task(work))

    def max_batch_size(self, _topic: str) -> int:
        return self.limit

    async def refresh_limits(self, _topic: str) -> None:
        self.limit = self.limit_now

    def count_batch(self, *_: object) -> None: ...

    def count_delivered(self, where: SourcePartition, records: int, size: int, *_: object) -> None:
        self.delivered.append((where, records, size))

    def add(self, where: SourcePartition, size: int) -> None:
        self.load.append((where, size))

    async def rest(self) -> None:
        """Until what was spawned has come as far as it can; raises what it raised."""
        for _ in range(20):
            await asyncio.sleep(0)
        for task in self.tasks:
            if task.done():
                task.result()


def pipeline_of(where: SourcePartition, target: TargetPartition, sink: Any, around: Any) -> PartitionPipeline:
    """One whose source is told of nothing."""
    return PartitionPipeline(where, target, sink, around, lambda _: None)


def at(offset: int, began: int = -1) -> Position:
    """Where a pipeline is to begin."""
    return Position(offset, ORIGIN.cluster_id, ORIGIN.topic_id, -1, -1, began=began)


def started(*skipped: GapClass, began: int = 0) -> tuple[PartitionPipeline, Target, Around]:
    target, around = Target(), Around(*skipped)
    pipeline = pipeline_of(
        SourcePartition("ewr", "flights", 0), TargetPartition("flights", 0), target, around
    )
    pipeline.ready(at(began, began))
    return pipeline, target, around


def batch(base: int, sizes: list[int], epoch: int = 0) -> bytearray:
    built = build_batch([Record(b"k", b"x" * size, timestamp_ms=SECOND) for size in sizes])
    stamp_offset_and_epoch(memoryview(built), base, epoch)
    return built


def answer(*batches: bytearray, end: int = 1_000) -> FetchedPartition:
    data = memoryview(bytearray(b"".join(batches)))
    return FetchedPartition("flights", 0, 0, end, end, 0, (), None, data)
