"""Delivery at least once: one idempotent producer, positions written every so often for what is acknowledged.

Made by `worker`. A worker that is killed leaves records behind its last written position; they come again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from millrace.broker.client.cluster import Cluster
from millrace.broker.protocol.mirror_positions import Position
from millrace.mirror.config import MirrorConfig
from millrace.mirror.delivery.checkpoints import Positions, encode_records
from millrace.mirror.delivery.delivery import TransactionCounts
from millrace.mirror.delivery.positions_keeper import PositionsKeeper
from millrace.mirror.delivery.sink import Sink
from millrace.mirror.delivery.system_records import SystemRecords
from millrace.mirror.delivery.transaction import Seat
from millrace.mirror.pipeline import PartitionPipeline
from millrace.mirror.topics.own_topics import OFFSET_MAP, POSITIONS
from millrace.mirror.topics.routes import SourcePartition
from millrace.mirror.troubles import Failure


class AtLeastOnce:
    """See the module's text; the methods are `delivery.Delivery`'s."""

    slot: int | None = None
    lane_limit = 0

    def __init__(
        self,
        config: MirrorConfig,
        target: Cluster,
        keeper: PositionsKeeper,
        system: SystemRecords,
        now_ms: Callable[[], int],
    ) -> None:
        self._interval_ms = config.position_interval_ms
        self._keeper = keeper
        self._system = system
        self._now_ms = now_ms
        self._sink = Sink(target, now_ms)
        self._pipelines: set[PartitionPipeline] = set()
        self._writing = asyncio.Lock()

    @property
    def sinks(self) -> Collection[Sink]:
        return (self._sink,)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._sink.run())
            tasks.create_task(self._keep_positions())

    def take_config(self, config: MirrorConfig) -> None:
        self._interval_ms = config.position_interval_ms

    def seated(self, slot: int, seat: Callable[[], Seat | None]) -> None:
        return

    def sink_of(self, partition: SourcePartition) -> Sink:
        return self._sink

    def began(self, pipeline: PartitionPipeline) -> None:
        self._pipelines.add(pipeline)

    async def settle(self, pipelines: Iterable[PartitionPipeline]) -> None:
        await self._write(pipelines)

    def left(self, pipeline: PartitionPipeline) -> None:
        self._pipelines.discard(pipeline)

    async def lost(self) -> None:
        return

    async def close(self) -> None:
        return

    async def read_positions(self) -> Positions:
        return await self._keeper.read()

    async def record_start(self, partition: SourcePartition, position: Position) -> None:
        await self._write_positions(encode_records([(partition, position)]))

    async def fence(self, slots: Mapping[int, int], timeout_s: float) -> dict[int, int]:
        return {}

    def standing(self) -> Iterator[tuple[SourcePartition, Failure]]:
        return iter(())

    def transactions(self) -> TransactionCounts:
        return TransactionCounts()

    async def _keep_positions(self) -> None:
        while True:
            await asyncio.sleep(self._interval_ms / 1000)
            await self._write(list(self._pipelines))

    async def _write(self, pipelines: Iterable[PartitionPipeline]) -> None:
        async with self._writing:
            writing = self._keeper.gather(pipelines, (), self._now_ms())
            # The map first: below a position that is on record it is whole.
            for target, records in writing.records.items():
                if target != self._keeper.positions:
                    await self._system.write(
                        target.topic,
                        records,
                        partition=target.partition,
                        partitions=OFFSET_MAP.partitions,
                        configs=OFFSET_MAP.configs,
                    )
            if writing.moved:
                await self._write_positions(writing.records[self._keeper.positions])
            for pipeline, position in writing.moved:
                pipeline.position_written(position)

    async def _write_positions(self, records: Iterable[tuple[bytes, bytes | None]]) -> None:
        topic = self._keeper.positions.topic
        await self._system.write(topic, list(records), configs=POSITIONS.configs)
