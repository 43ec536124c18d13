"""Delivery at least once: one idempotent producer, positions written every so often for what is acknowledged.

Made by `worker`. A worker that is killed leaves records behind its last written position; they come again.

How old data may be so that several batches are under way (`lane.replayed_after_ms`) follows from what the
target's brokers say of their settings, asked again and again, for they may change while it runs. One that may
not be asked is taken to have what Apache Kafka has by default.

The newest position of a partition counts, so whoever had it before must not write behind its new owner. Who
hears that its seat is lost gives up what it is writing. Who was frozen and has not heard yet is told by the
clock, before each try; and a try with a partition that was given up meanwhile is the last. A request that was
on its way then may still be taken, so a new owner writes its positions once more when that is over: else one
that stands still, in a partition where nothing comes any more, would leave the older one to the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from typing import Any

import structlog

from millrace.broker.client.admin import describe_broker_configs
from millrace.broker.client.cluster import Cluster
from millrace.broker.errors import UnknownMemberId
from millrace.broker.protocol.mirror_positions import Position
from millrace.mirror.config import MirrorConfig
from millrace.mirror.delivery.checkpoints import Positions, encode_records
from millrace.mirror.delivery.delivery import TransactionCounts
from millrace.mirror.delivery.lane import EXPIRATION_MS, replayed_after_ms
from millrace.mirror.delivery.positions_keeper import PositionsKeeper
from millrace.mirror.delivery.sink import Sink
from millrace.mirror.delivery.system_records import CLUSTER_FAILURES, NewFailures, SystemRecords, Waiting
from millrace.mirror.delivery.transaction import Seat
from millrace.mirror.pipeline import PartitionPipeline
from millrace.mirror.steady import steady_ms
from millrace.mirror.topics.own_topics import OFFSET_MAP, POSITIONS
from millrace.mirror.topics.routes import SourcePartition
from millrace.mirror.troubles import Failure

log = structlog.get_logger("millrace.mirror.delivery.at_least_once")

# Longer than a request's answer is waited for, so its connection is given up: what a former owner has sent
# is taken by then, but for what a network holds back for longer.
LATE_WRITES_MS = 20_000
# When a broker forgets a producer; by the second one where there is no first (before Apache Kafka 3.4).
EXPIRATIONS = ("producer.id.expiration.ms", "transactional.id.expiration.ms")
EXPIRATIONS_EVERY_S = 60.0
EXPIRATIONS_PAUSE_S = 1.0


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
        steady_ms: Callable[[], int] = steady_ms,
        *,
        holds_seat: Callable[[], bool] = lambda: True,
    ) -> None:
        """`holds_seat`: whether the worker's seat in the group is still its own, by the clock."""
        self._interval_ms = config.position_interval_ms
        self._keeper = keeper
        self._system = system
        self._now_ms = now_ms
        self._holds_seat = holds_seat
        self._sink = Sink(target, now_ms)
        self._steady_ms = steady_ms
        self._pipelines: set[PartitionPipeline] = set()
        self._taken_over: dict[PartitionPipeline, int] = {}  # when late writes are over, by the steady clock
        self._writing = asyncio.Lock()
        self._writes: set[asyncio.Task[None]] = set()
        self._target = target
        self._expirations_ms: dict[int, int] = {}  # by broker
        self._untold = NewFailures()

    @property
    def sinks(self) -> Collection[Sink]:
        return (self._sink,)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._sink.run())
            tasks.create_task(self._keep_positions())
            tasks.create_task(self._follow_expirations())

    def take_config(self, config: MirrorConfig) -> None:
        self._interval_ms = config.position_interval_ms

    def seated(self, slot: int, seat: Callable[[], Seat | None]) -> None:
        return

    def sink_of(self, partition: SourcePartition) -> Sink:
        return self._sink

    def began(self, pipeline: PartitionPipeline) -> None:
        self._pipelines.add(pipeline)
        self._taken_over[pipeline] = self._steady_ms() + LATE_WRITES_MS

    async def settle(self, pipelines: Iterable[PartitionPipeline]) -> None:
        try:
            await self._as_member(self._write(pipelines))
        except UnknownMemberId as error:
            log.debug("positions are not written", reason=str(error))

    def left(self, pipeline: PartitionPipeline) -> None:
        self._pipelines.discard(pipeline)
        self._taken_over.pop(pipeline, None)

    async def lost(self) -> None:
        writes = list(self._writes)
        for write in writes:
            write.cancel()
        if writes:
            await asyncio.wait(writes)

    async def close(self) -> None:
        return

    async def read_positions(self) -> Positions:
        return await self._keeper.read()

    async def record_start(self, partition: SourcePartition, position: Position) -> None:
        records = encode_records([(partition, position)])
        await self._as_member(self._write_positions(records, (), lambda: (partition,)))

    async def fence(self, slots: Mapping[int, int], timeout_s: float) -> dict[int, int]:
        return {}

    def standing(self) -> Iterator[tuple[SourcePartition, Failure]]:
        return iter(())  # no transactions; what else is not taken `SystemRecords` tells

    def transactions(self) -> TransactionCounts:
        return TransactionCounts()

    async def _keep_positions(self) -> None:
        while True:
            await asyncio.sleep(self._interval_ms / 1000)
            self._write_again()
            await self.settle(list(self._pipelines))

    def _write_again(self) -> None:
        """Of partitions that somebody else may have had until now, once."""
        now_ms = self._steady_ms()
        for pipeline, over_at_ms in list(self._taken_over.items()):
            if pipeline.has_begun and over_at_ms <= now_ms:
                del self._taken_over[pipeline]
                pipeline.progress.write_again()

    async def _follow_expirations(self) -> None:
        while True:
            pause_s = EXPIRATIONS_EVERY_S
            try:
                await self._ask_expirations()
            except CLUSTER_FAILURES as error:
                log.debug("the target's brokers are not asked for their settings", error=str(error))
                pause_s = EXPIRATIONS_PAUSE_S
            await asyncio.sleep(pause_s)

    async def _ask_expirations(self) -> None:
        """The least of all brokers counts."""
        brokers = list((await self._target.metadata([])).brokers)
        found = await asyncio.gather(*map(self._expiration_of, brokers))
        self._expirations_ms = dict(zip(brokers, found, strict=True))
        self._sink.replayed_after_ms = replayed_after_ms(min(found, default=EXPIRATION_MS))

    async def _expiration_of(self, node_id: int) -> int:
        """Of one that does not answer, what it said before."""
        try:
            told = await describe_broker_configs(self._target, node_id, EXPIRATIONS)
        except CLUSTER_FAILURES as error:
            if self._untold.is_news(error):
                log.info("a broker does not tell when it forgets producers", node=node_id, error=str(error))
            return self._expirations_ms.get(node_id, EXPIRATION_MS)
        values = [told.get(key) or "" for key in EXPIRATIONS]
        return next((int(value) for value in values if value.isdecimal()), EXPIRATION_MS)

    async def _as_member(self, write: Coroutine[Any, Any, None]) -> None:
        """Raises UnknownMemberId when the seat is lost meanwhile: others may own the partitions by then."""
        task = asyncio.get_running_loop().create_task(write)
        self._writes.add(task)
        try:
            await asyncio.wait([task])
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
            self._writes.discard(task)
        if task.cancelled():
            raise UnknownMemberId("the seat in the mirror's group was lost while positions were written")
        task.result()

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
                        waiting=self._unwritten,
                    )
            if writing.moved:
                records, moved = writing.records[self._keeper.positions], [each for each, _ in writing.moved]
                await self._write_positions(records, moved, self._unwritten)
            for pipeline, position in writing.moved:
                pipeline.position_written(position)

    def _unwritten(self) -> Iterator[SourcePartition]:
        """Whose position is not the one on record: what is being written, and what waits behind that."""
        for pipeline in self._pipelines:
            if pipeline.has_begun and pipeline.progress.position_to_write() is not None:
                yield pipeline.partition

    async def _write_positions(
        self,
        records: Iterable[tuple[bytes, bytes | None]],
        moved: Collection[PartitionPipeline],
        waiting: Waiting,
    ) -> None:
        def permit() -> None:
            if not self._holds_seat():
                raise UnknownMemberId("the seat in the mirror's group may be lost by now")
            if not self._pipelines.issuperset(moved):
                raise UnknownMemberId("a partition was given up while its position was written")

        topic = self._keeper.positions.topic
        await self._system.write(
            topic, list(records), configs=POSITIONS.configs, waiting=waiting, permit=permit
        )
