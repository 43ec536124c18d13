"""Delivery exactly once: a worker's partitions spread over a few transactional lanes.

Made by `worker`. The group gives each worker a slot, a number that no other worker has; a worker's lanes are
`millrace.<mirror>.<slot>.<n>`, each with that transactional id and another one, `….<n>.b`. So the ids are few
and come again: whoever gets a slot next fences what its last holder left open, and the group's leader does so
for the slots that nobody has (`fence`), before the partitions are handed out.

A lane whose transaction is held up by some partitions keeps those; the others go on in another lane, which
is made where no healthy one is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace

import structlog

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.raw_produce import init_producer_id
from millrace.broker.errors import UnknownMemberId
from millrace.broker.protocol.mirror_positions import Position
from millrace.mirror.config import MirrorConfig
from millrace.mirror.delivery.checkpoints import Positions
from millrace.mirror.delivery.delivery import TransactionCounts
from millrace.mirror.delivery.positions_keeper import PositionsKeeper
from millrace.mirror.delivery.sink import Sink
from millrace.mirror.delivery.system_records import CLUSTER_FAILURES
from millrace.mirror.delivery.transaction import TRANSACTION_TIMEOUT_MS, Seat
from millrace.mirror.delivery.transactional_lane import TransactionalLane
from millrace.mirror.pipeline import PartitionPipeline
from millrace.mirror.steady import steady_ms
from millrace.mirror.topics.routes import SourcePartition, TargetPartition
from millrace.mirror.troubles import Failure

log = structlog.get_logger("millrace.mirror.delivery.exactly_once")

# So many times the configured lanes may be made for partitions that block theirs.
MAX_LANES_FACTOR = 3


def transactional_ids(mirror: str, slot: int, number: int) -> tuple[str, str]:
    """The two of one lane, which take turns."""
    name = f"millrace.{mirror}.{slot}.{number}"
    return name, f"{name}.b"


class ExactlyOnce:
    """See the module's text; the methods are `delivery.Delivery`'s."""

    def __init__(
        self,
        config: MirrorConfig,
        target: Cluster,
        keeper: PositionsKeeper,
        now_ms: Callable[[], int],
        on_transaction: Callable[[float, bool], None] = lambda seconds, committed: None,
        steady_ms: Callable[[], int] = steady_ms,
    ) -> None:
        """`on_transaction` hears of every transaction that ended: how long it was open, and whether it was
        committed."""
        self.slot: int | None = None
        self.counts = TransactionCounts()
        self._config = config
        self._target = target
        self._keeper = keeper
        self._now_ms = now_ms
        self._on_transaction = on_transaction
        self._steady_ms = steady_ms
        self._seat: Callable[[], Seat | None] = lambda: None
        self._lanes: list[TransactionalLane] = []
        self._running: dict[TransactionalLane, asyncio.Task[None]] = {}
        self._lane_of: dict[SourcePartition, TransactionalLane] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._next_number = 0

    # --- life ------------------------------------------------------------------------------------

    async def run(self) -> None:
        async with asyncio.TaskGroup() as self._tasks:
            for lane in self._lanes:
                self._running[lane] = self._tasks.create_task(lane.run())
            try:
                await asyncio.Event().wait()
            finally:
                self._tasks = None  # a lane may ask for another before it hears that it is over

    @property
    def sinks(self) -> Collection[Sink]:
        return [lane.sink for lane in self._lanes]

    def take_config(self, config: MirrorConfig) -> None:
        self._config = config
        for lane in self._lanes:
            lane.rules.take_interval(config.position_interval_ms)

    @property
    def lane_limit(self) -> int:
        return MAX_LANES_FACTOR * self._config.lanes

    def seated(self, slot: int, seat: Callable[[], Seat | None]) -> None:
        self._seat = seat
        if self.slot != slot:
            if self._lanes:
                raise RuntimeError(f"slot {slot} was given while slot {self.slot} is held")
            self.slot = slot
            self._next_number = 0
            for _ in range(self._config.lanes):
                self._add_lane()
        for lane in self._lanes:
            lane.wake()

    async def lost(self) -> None:
        self._seat = lambda: None
        await self.close()

    async def close(self) -> None:
        lanes, self._lanes = self._lanes, []
        self.slot = None
        self._lane_of.clear()
        running = [task for lane in lanes if (task := self._running.pop(lane, None)) is not None]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        await asyncio.gather(*(lane.close() for lane in lanes))

    # --- partitions ------------------------------------------------------------------------------

    def sink_of(self, partition: SourcePartition) -> Sink:
        lane = self._lane_of.get(partition)
        if lane is None:
            lane = self._lane_of[partition] = self._emptiest([each for each in self._lanes if _is_free(each)])
        return lane.sink

    def began(self, pipeline: PartitionPipeline) -> None:
        self._lane_of[pipeline.partition].add(pipeline)

    def left(self, pipeline: PartitionPipeline) -> None:
        lane = self._lane_of.pop(pipeline.partition, None)
        if lane is not None:
            lane.remove(pipeline)

    async def settle(self, pipelines: Iterable[PartitionPipeline]) -> None:
        of_lane: dict[TransactionalLane, list[PartitionPipeline]] = {}
        for pipeline in pipelines:
            lane = self._lane_of.get(pipeline.partition)
            if lane is not None:
                of_lane.setdefault(lane, []).append(pipeline)
        await asyncio.gather(*(lane.settle(each) for lane, each in of_lane.items()))

    def isolate(self, lane: TransactionalLane, blamed: frozenset[TargetPartition]) -> None:
        """`lane` keeps the partitions that go to `blamed`; the others leave. They have been rewound."""
        leaving = [each for each in lane.pipelines if each.target not in blamed]
        if not leaving or (len(leaving) == len(lane.pipelines) == 1 and not self._healthy(lane)):
            return
        healthy = self._healthy(lane)
        if not healthy:
            if len(self._lanes) >= self.lane_limit:
                return
            healthy = [self._add_lane()]
        log.warning(
            "partitions go on in another lane",
            stay=len(lane.pipelines) - len(leaving),
            leave=len(leaving),
            lane=lane.name,
        )
        for pipeline in leaving:
            other = self._emptiest(healthy)
            lane.hand_over(pipeline, other)
            self._lane_of[pipeline.partition] = other

    def _healthy(self, but: TransactionalLane) -> list[TransactionalLane]:
        return [each for each in self._lanes if each is not but and _is_free(each) and not each.is_stuck]

    def _emptiest(self, lanes: list[TransactionalLane]) -> TransactionalLane:
        return min(lanes or self._lanes, key=lambda lane: len(lane.pipelines))

    def _add_lane(self) -> TransactionalLane:
        if self.slot is None:
            raise RuntimeError("a lane without a slot")
        lane = TransactionalLane(
            transactional_ids(self._config.name, self.slot, self._next_number),
            self._target,
            self._keeper,
            self._config.group_id,
            self._seat,
            self._now_ms,
            self._config.position_interval_ms,
            self.isolate,
            self._transaction_ended,
            self._steady_ms,
        )
        self._next_number += 1
        self._lanes.append(lane)
        if self._tasks is not None:
            self._running[lane] = self._tasks.create_task(lane.run())
        return lane

    # --- positions -------------------------------------------------------------------------------

    async def read_positions(self) -> Positions:
        return await self._keeper.read()

    async def record_start(self, partition: SourcePartition, position: Position) -> None:
        lane = self._lane_of.get(partition)
        if lane is None:
            raise UnknownMemberId(f"{partition} is not assigned to this worker any more")
        await lane.record_start(partition, position)

    # --- those who left --------------------------------------------------------------------------

    async def fence(self, slots: Mapping[int, int], timeout_s: float) -> dict[int, int]:
        """A new producer epoch for every id of the slots: what was open under it is aborted, and its holder,
        should it still live, can commit nothing more."""
        left = {
            name: slot
            for slot, lane_count in slots.items()
            for number in range(lane_count)
            for name in transactional_ids(self._config.name, slot, number)
        }

        async def fence_one(name: str) -> None:
            try:
                await init_producer_id(
                    self._target, name, timeout_ms=TRANSACTION_TIMEOUT_MS, retry_ms=timeout_s * 1000
                )
                del left[name]
            except CLUSTER_FAILURES as error:
                log.debug("not fenced", id=name, error=str(error))

        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(fence_one(name) for name in list(left)))
        except TimeoutError:
            log.debug("no more time to fence")
        if left:
            # Safe all the same: whoever takes over waits for the outcome of what is open.
            log.warning(
                "not all earlier holders of slots are fenced; what they left open ends by timeout",
                ids=sorted(left),
            )
        if slots:
            log.info("fenced earlier holders of slots", slots=sorted(slots), ids_left=len(left))
        return {slot: slots[slot] for slot in set(left.values())}

    def _transaction_ended(self, seconds: float, committed: bool) -> None:
        counts = self.counts
        self._on_transaction(seconds, committed)
        if committed:
            self.counts = replace(
                counts,
                committed=counts.committed + 1,
                open_seconds=counts.open_seconds + seconds,
                last_open_seconds=seconds,
            )
        else:
            self.counts = replace(counts, aborted=counts.aborted + 1)

    def standing(self) -> Iterator[tuple[SourcePartition, Failure]]:
        for lane in self._lanes:
            yield from lane.standing()

    def transactions(self) -> TransactionCounts:
        return self.counts


def _is_free(lane: TransactionalLane) -> bool:
    """Whether no partition that blocks it is in it."""
    return not lane.isolated
