"""Fetching for the owned partitions: one loop for each leader, as long as there is room in the streams.

Made anew by the connector after each rebalance and cancelled before the next one. Partitions whose stream is
full are not asked for, so a stalled stream holds up no other. A stream that has room takes one whole answer
from each leader; an answer is bounded by the least room among the streams that are asked for.

A partition without an offset, or with one that the log does not have, begins at its smallest or largest
offset. That place is written to ZooKeeper before the first message is handed out: if this consumer dies
early, whoever takes over must not begin at a later end of the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.offsets import EARLIEST, LATEST
from millrace.broker.client.raw_fetch import FetchedPartition, FetchPosition, fetch
from millrace.broker.client.retry import BackOff
from millrace.broker.coordination.session import SessionError
from millrace.broker.coordination.zookeeper_consumer.streams import Reading, StreamQueue
from millrace.broker.errors import (
    ClusterUnreachable,
    KafkaError,
    OffsetOutOfRange,
    ProtocolError,
    error_for_code,
)
from millrace.broker.protocol.topic_partition import TopicPartition

log = logging.getLogger("millrace.consumer")

RESETS = {"smallest": EARLIEST, "largest": LATEST}

_FAILURES = (KafkaError, ClusterUnreachable, ProtocolError)
_BACK_OFF = BackOff(first_ms=50, limit_ms=2_000)
_LOOK_INTERVAL_S = 60.0


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Kafka's names: `fetch.message.max.bytes` (for one partition of an answer), `fetch.min.bytes`,
    `fetch.wait.max.ms`, `refresh.leader.backoff.ms`, `auto.offset.reset` (smallest or largest)."""

    message_max_bytes: int = 1 << 20
    min_bytes: int = 1
    wait_max_ms: int = 100
    leader_backoff_ms: int = 200
    offset_reset: str = "largest"
    read_committed: bool = True


@dataclass(eq=False, slots=True)
class _Loop:
    """The fetching from one leader."""

    readings: list[Reading] = field(default_factory=list)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    turn: int = 0


class Fetching:
    """See the module's text. `run` goes on until it is cancelled; then nothing is put any more."""

    def __init__(
        self,
        cluster: Cluster,
        readings: Collection[Reading],
        limits: FetchLimits,
        record_start: Callable[[Reading], Awaitable[None]],
    ) -> None:
        self._cluster = cluster
        self._readings = {reading.key: reading for reading in readings}
        self._limits = limits
        self._record_start = record_start
        self._loops: dict[int, _Loop] = {}
        self._look = asyncio.Event()
        self._resolving: set[TopicPartition] = set()
        self._not_before: dict[TopicPartition, float] = {}
        self._tasks = asyncio.TaskGroup()

    def wake(self) -> None:
        """A stream has room again, or a partition was rewound."""
        for loop in self._loops.values():
            loop.wake.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as self._tasks:
            self._tasks.create_task(self._follow_leaders())

    # --- leaders ------------------------------------------------------------------------------------

    async def _follow_leaders(self) -> None:
        topics = sorted({topic for topic, _ in self._readings})
        failure_count = 0
        while True:
            self._look.clear()
            try:
                view = await self._cluster.metadata(topics)
            except _FAILURES as error:
                failure_count += 1
                log.warning("no broker answers; trying again: %s", error)
                await asyncio.sleep(_BACK_OFF.delay_ms(failure_count, 0.5) / 1000)
                continue
            failure_count = 0
            groups = view.by_leader(self._readings)
            leaderless = groups.pop(None, [])
            self._place({leader: keys for leader, keys in groups.items() if leader is not None})
            if leaderless:
                self._cluster.invalidate()
            pause_s = self._limits.leader_backoff_ms / 1000
            try:
                async with asyncio.timeout(pause_s if leaderless else _LOOK_INTERVAL_S):
                    await self._look.wait()
                await asyncio.sleep(pause_s)  # news of a new leader take a moment to spread
            except TimeoutError:
                continue

    def _place(self, groups: dict[int, list[TopicPartition]]) -> None:
        """Give each partition to its leader's loop; loops begin and end as needed."""
        for leader in [leader for leader in self._loops if leader not in groups]:
            task = self._loops.pop(leader).task
            if task is not None:
                task.cancel()
        for leader, keys in groups.items():
            loop = self._loops.setdefault(leader, _Loop())
            loop.readings = [self._readings[key] for key in keys]
            loop.wake.set()
            if loop.task is None:
                loop.task = self._tasks.create_task(self._fetch_from(leader, loop))

    # --- fetching -----------------------------------------------------------------------------------

    async def _fetch_from(self, leader: int, loop: _Loop) -> None:
        failure_count = 0
        while True:
            loop.wake.clear()
            asked, positions, max_bytes = self._wanted(loop)
            if not positions:
                await self._until_woken(loop)
                continue
            try:
                answers = await fetch(
                    self._cluster,
                    leader,
                    positions,
                    min_bytes=self._limits.min_bytes,
                    max_wait_ms=self._limits.wait_max_ms,
                    max_bytes=max_bytes,
                    partition_max_bytes=self._limits.message_max_bytes,
                    read_committed=self._limits.read_committed,
                )
            except _FAILURES as error:
                failure_count += 1
                if failure_count == 1:
                    log.warning("fetching from broker %d fails; trying again: %s", leader, error)
                self._look.set()
                await asyncio.sleep(_BACK_OFF.delay_ms(failure_count, 0.5) / 1000)
                continue
            failure_count = 0
            # Views of one answer share its memory: what a stalled stream keeps must not pin the others'.
            given = [each for each in answers if (each.topic, each.partition) in asked]
            streams = {asked[each.topic, each.partition][0].stream for each in given if each.records}
            for answer in given:
                reading, epoch = asked[answer.topic, answer.partition]
                self._take(reading, epoch, answer, shared=len(streams) > 1)

    def _wanted(
        self, loop: _Loop
    ) -> tuple[dict[TopicPartition, tuple[Reading, int]], dict[TopicPartition, FetchPosition], int]:
        """What to ask for now, and how much of it."""
        now = asyncio.get_running_loop().time()
        rooms: dict[StreamQueue, int] = {}
        asked: dict[TopicPartition, tuple[Reading, int]] = {}
        positions: dict[TopicPartition, FetchPosition] = {}
        # A broker fills its answer in the order of the request: each partition is first in its turn.
        loop.turn = (loop.turn + 1) % max(1, len(loop.readings))
        for reading in loop.readings[loop.turn :] + loop.readings[: loop.turn]:
            stream = reading.stream
            if stream not in rooms:
                rooms[stream] = stream.room
            if not rooms[stream] or reading.key in self._resolving:
                continue
            if self._not_before.get(reading.key, 0.0) > now:
                continue
            offset, epoch = stream.fetch_position(reading)
            if offset is None:
                self._resolve(reading, epoch, None)
                continue
            asked[reading.key] = (reading, epoch)
            positions[reading.key] = FetchPosition(offset)
        least = min((rooms[reading.stream] for reading, _ in asked.values()), default=0)
        return asked, positions, max(least, self._limits.message_max_bytes)

    async def _until_woken(self, loop: _Loop) -> None:
        # The time limit is for partitions that wait for a moment to come (`_not_before`).
        try:
            async with asyncio.timeout(self._limits.leader_backoff_ms / 1000):
                await loop.wake.wait()
        except TimeoutError:
            return

    def _take(self, reading: Reading, epoch: int, answer: FetchedPartition, shared: bool) -> None:
        code = answer.error_code
        if code == OffsetOutOfRange.code:
            offset, epoch_now = reading.stream.fetch_position(reading)
            if epoch_now == epoch:
                self._resolve(reading, epoch, offset)
        elif code:
            self._pause(reading)
            self._look.set()
            log.debug("fetching %s again: %s", reading, error_for_code(code))
        elif answer.records:
            records = memoryview(bytes(answer.records)) if shared else answer.records
            try:
                reading.stream.put(reading, epoch, records, answer.aborted)
            except KafkaError as error:
                self._pause(reading)
                log.error("what broker sent of %s cannot be read; fetching again: %s", reading, error)

    def _pause(self, reading: Reading) -> None:
        pause_s = self._limits.leader_backoff_ms / 1000
        self._not_before[reading.key] = asyncio.get_running_loop().time() + pause_s

    # --- where to begin -----------------------------------------------------------------------------

    def _resolve(self, reading: Reading, epoch: int, unknown_offset: int | None) -> None:
        """Find the offset to begin at, beside the fetch loop."""
        self._resolving.add(reading.key)
        self._tasks.create_task(self._begin(reading, epoch, unknown_offset))

    async def _begin(self, reading: Reading, epoch: int, unknown_offset: int | None) -> None:
        reset = self._limits.offset_reset
        failure_count = 0
        while True:
            try:
                listed = await self._cluster.list_offsets(
                    {reading.key: RESETS[reset]}, self._limits.read_committed
                )
                offset = listed[reading.key].offset
                if unknown_offset is None:
                    log.info("%s has no committed offset: beginning at %d (%s)", reading, offset, reset)
                else:
                    log.warning(
                        "%s: offset %d is not in the log any more: going on at %d (%s)",
                        reading,
                        unknown_offset,
                        offset,
                        reset,
                    )
                break
            except _FAILURES as error:
                failure_count += 1
                log.warning("cannot find where %s begins; trying again: %s", reading, error)
                await asyncio.sleep(_BACK_OFF.delay_ms(failure_count, 0.5) / 1000)
        if reading.stream.jump(reading, epoch, offset):
            await self._record(reading)
        self._resolving.discard(reading.key)
        self.wake()

    async def _record(self, reading: Reading) -> None:
        """Nothing is fetched before the place is written: this partition waits with ZooKeeper."""
        failure_count = 0
        while True:
            try:
                await self._record_start(reading)
                return
            except SessionError as error:
                failure_count += 1
                log.warning("cannot write where %s begins; trying again: %s", reading, error)
                await asyncio.sleep(_BACK_OFF.delay_ms(failure_count, 0.5) / 1000)
