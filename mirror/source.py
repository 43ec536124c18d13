"""One source cluster: discovery, and one fetch loop for each of its brokers.

Called by `worker`. Hands fetched batches to the pipelines and turns what a source says about a log (out of
range, another topic id, a diverging epoch) into gaps. It holds no rule about what may be skipped.

The bytes under way are bounded: each fetch loop has an equal share of the worker's budget and fetches only
while its partitions have less than that outstanding, so a slow target slows fetching. A partition has at
most a quarter of a share, and one whose lane fails gets nothing more: it cannot take the others' room.
The next fetch is under way while the last one's batches are being produced.

A source that is away is asked again with growing pauses, for ever; nobody else waits for it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import structlog

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.metadata import ClusterMetadata, TopicMetadata
from millrace.broker.client.offsets import EARLIEST, LATEST
from millrace.broker.client.raw_fetch import FetchedPartition, FetchPosition, fetch
from millrace.broker.errors import OffsetOutOfRange, UnknownTopicOrPartition, error_for_code
from millrace.mirror.checkpoints import NO_TOPIC_ID, Position
from millrace.mirror.config import FetchConfig, SourceConfig
from millrace.mirror.gaps import GapClass
from millrace.mirror.pipeline import Origin, PartitionPipeline, State
from millrace.mirror.routes import SourcePartition, TopicSelector
from millrace.mirror.system_records import CLUSTER_FAILURES

log = structlog.get_logger("millrace.mirror.source")

MIN_FETCH_SIZE = 64 << 10
FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 5.0
# While a partition waits for room, the others' long poll is kept short: room may come at any moment.
CROWDED_WAIT_MS = 20
ERROR_PAUSE_MS = 250


class FetchBudget:
    """The worker's bytes in flight, shared equally by the fetch loops that are running."""

    def __init__(self, total_size: int) -> None:
        self._total_size = total_size
        self.loop_count = 0

    @property
    def share(self) -> int:
        return self._total_size // max(1, self.loop_count)


@dataclass(eq=False)
class _NodeLoop:
    """The fetching from one broker."""

    task: asyncio.Task[None] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    partitions: dict[tuple[str, int], PartitionPipeline] = field(default_factory=dict)
    turn: int = 0


class SourceReader:
    """See the module's text. `run` goes on until it is cancelled."""

    def __init__(
        self,
        config: SourceConfig,
        cluster: Cluster,
        fetch_config: FetchConfig,
        budget: FetchBudget,
        discovery_interval_ms: int,
        now_ms: Callable[[], int],
        on_view: Callable[[SourceReader], Awaitable[None]],
        record_start: Callable[[SourcePartition, Position], Awaitable[None]],
    ) -> None:
        self.name = config.cluster
        self.config = config
        self.cluster = cluster
        self.selector = TopicSelector(config.topics.include, config.topics.exclude)
        self.view: ClusterMetadata | None = None
        self.is_connected = False
        self._fetch_config = fetch_config
        self._budget = budget
        self._discovery_interval_ms = discovery_interval_ms
        self._now_ms = now_ms
        self._on_view = on_view
        self._record_start = record_start
        self._pipelines: dict[tuple[str, int], PartitionPipeline] = {}
        self._loops: dict[int, _NodeLoop] = {}
        self._look_again = asyncio.Event()
        self._tasks = asyncio.TaskGroup()

    # --- what is carried -------------------------------------------------------------------------

    def selected_topics(self) -> list[TopicMetadata]:
        """The topics of the last look that are to be mirrored."""
        if self.view is None:
            return []
        return [
            topic
            for name, topic in sorted(self.view.topics.items())
            if not topic.internal and self.selector.selects(name)
        ]

    def add(self, pipeline: PartitionPipeline) -> None:
        self._pipelines[pipeline.partition.topic, pipeline.partition.partition] = pipeline
        self._place()

    def remove(self, pipeline: PartitionPipeline) -> None:
        key = (pipeline.partition.topic, pipeline.partition.partition)
        if self._pipelines.get(key) is pipeline:
            del self._pipelines[key]
            for loop in self._loops.values():
                loop.partitions.pop(key, None)

    def moved(self, pipeline: PartitionPipeline) -> None:
        """Room was made: the loop of this partition may go on."""
        key = (pipeline.partition.topic, pipeline.partition.partition)
        for loop in self._loops.values():
            if key in loop.partitions:
                loop.changed.set()

    async def run(self) -> None:
        """Goes on until cancelled, or until something fails that nobody foresaw: a fetch loop that ended in
        silence would leave its partitions behind for ever."""
        async with asyncio.TaskGroup() as self._tasks:
            self._tasks.create_task(self._discover())

    # --- discovery -------------------------------------------------------------------------------

    async def _discover(self) -> None:
        failure_count = 0
        while True:
            self._look_again.clear()
            try:
                self.view = await self.cluster.metadata(max_age_ms=0)
                self._place()
                self._check_origins(self.view)
                await self._on_view(self)
                self.is_connected = True
                failure_count = 0
            except CLUSTER_FAILURES as error:
                if failure_count == 0:
                    log.warning("discovery fails; trying again", source=self.name, error=str(error))
                failure_count += 1
            pause_s = self._discovery_interval_ms / 1000
            try:
                async with asyncio.timeout(pause_s):
                    await self._look_again.wait()
                await asyncio.sleep(min(pause_s, FIRST_PAUSE_S * (1 + failure_count)))
            except TimeoutError:
                continue

    def _check_origins(self, view: ClusterMetadata) -> None:
        for (name, _), pipeline in self._pipelines.items():
            topic = view.topics.get(name)
            if topic is not None and pipeline.state is State.RUNNING:
                now = Origin(view.cluster_id or "", topic.topic_id)
                if _is_other_log(pipeline.origin, now):
                    self._resolve(pipeline)

    def _place(self) -> None:
        """Gives each pipeline to the loop of its leader; loops begin and end as needed."""
        if self.view is None:
            return
        wanted: dict[int, dict[tuple[str, int], PartitionPipeline]] = {}
        for key, pipeline in self._pipelines.items():
            leader = self.view.leader(*key)
            if leader is not None:
                wanted.setdefault(leader, {})[key] = pipeline
        for node in list(self._loops):
            if node not in wanted:
                loop = self._loops.pop(node)
                self._budget.loop_count -= 1
                if loop.task is not None:
                    loop.task.cancel()
        for node, partitions in wanted.items():
            known = self._loops.get(node)
            if known is None:
                known = self._loops[node] = _NodeLoop()
                self._budget.loop_count += 1
                known.task = self._tasks.create_task(self._fetch_from(node, known))
            if known.partitions != partitions:
                known.partitions = partitions
                known.changed.set()

    # --- fetching --------------------------------------------------------------------------------

    async def _fetch_from(self, node: int, loop: _NodeLoop) -> None:
        failure_count = 0
        while True:
            loop.changed.clear()
            room = self._budget.share - sum(
                pipeline.progress.outstanding_size for pipeline in loop.partitions.values()
            )
            positions, is_crowded = self._positions(loop, room)
            if not positions:
                await self._until_changed(loop)
                continue
            asked = {key: loop.partitions[key] for key in positions}
            try:
                answers = await fetch(
                    self.cluster,
                    node,
                    positions,
                    min_bytes=1,
                    max_wait_ms=CROWDED_WAIT_MS if is_crowded else self._fetch_config.max_wait_ms,
                    max_bytes=max(MIN_FETCH_SIZE, min(self._fetch_config.max_bytes, room)),
                    partition_max_bytes=self._fetch_config.partition_max_bytes,
                    read_committed=True,
                )
            except CLUSTER_FAILURES as error:
                if self.is_connected:
                    log.warning("the source does not answer", source=self.name, error=str(error))
                self.is_connected = False
                failure_count += 1
                self._look_again.set()
                pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(failure_count, 10))
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                continue
            failure_count = 0
            self.is_connected = True
            for answer in answers:
                key = (answer.topic, answer.partition)
                if key in positions:
                    self._take(asked[key], positions[key], answer)

    def _positions(self, loop: _NodeLoop, room: int) -> tuple[dict[tuple[str, int], FetchPosition], bool]:
        """What to ask for now; and whether some partition waits for room."""
        if room < MIN_FETCH_SIZE:
            return {}, True
        now_ms, cap = self._now_ms(), max(MIN_FETCH_SIZE, self._budget.share // 4)
        positions: dict[tuple[str, int], FetchPosition] = {}
        is_crowded = False
        keys = list(loop.partitions)
        # A source fills its answer in the order of the request: each partition is first in its turn.
        loop.turn = (loop.turn + 1) % max(1, len(keys))
        for key in keys[loop.turn :] + keys[: loop.turn]:
            pipeline = loop.partitions[key]
            if pipeline.wants_fetch(now_ms, cap):
                progress = pipeline.progress
                positions[key] = FetchPosition(
                    progress.fetch_offset, last_fetched_epoch=progress.fetched_leader_epoch
                )
            elif pipeline.state is State.RUNNING:
                is_crowded = True
        return positions, is_crowded

    async def _until_changed(self, loop: _NodeLoop) -> None:
        # The time limit is for partitions that wait for a moment to come (`retry_at_ms`).
        try:
            async with asyncio.timeout(ERROR_PAUSE_MS / 1000):
                await loop.changed.wait()
        except TimeoutError:
            return

    def _take(self, pipeline: PartitionPipeline, asked: FetchPosition, answer: FetchedPartition) -> None:
        if pipeline.state is not State.RUNNING or pipeline.progress.fetch_offset != asked.offset:
            return  # drained, closed or moved while the answer was under way
        code = answer.error_code
        if code == OffsetOutOfRange.code:
            pipeline.retry_at_ms = self._now_ms() + ERROR_PAUSE_MS
            self._resolve(pipeline)
        elif code:
            self.cluster.observe(code)
            pipeline.retry_at_ms = self._now_ms() + ERROR_PAUSE_MS
            self._look_again.set()
            if code != UnknownTopicOrPartition.code:
                log.debug("fetching again", of=str(pipeline.partition), error=str(error_for_code(code)))
        elif answer.diverging is not None:
            epoch, end_offset = answer.diverging
            pipeline.at_gap(
                GapClass.TRUNCATED,
                asked.offset,
                "the source's log ends before what was fetched from it",
                first=min(end_offset, asked.offset),
                resume_at=min(end_offset, asked.offset),
                resume_epoch=epoch,
            )
        else:
            pipeline.accept(answer)

    # --- positions and logs ----------------------------------------------------------------------

    def _resolve(self, pipeline: PartitionPipeline) -> None:
        """Finds out, beside the fetch loop, why the source does not know the fetch offset."""
        self._tasks.create_task(self._explain(pipeline))

    async def _explain(self, pipeline: PartitionPipeline) -> None:
        try:
            origin, earliest, latest = await self._log_of(pipeline.partition)
        except CLUSTER_FAILURES as error:
            log.warning("asking again", of=str(pipeline.partition), error=str(error))
            return
        offset = pipeline.progress.fetch_offset
        if pipeline.state is not State.RUNNING:
            return
        if _is_other_log(pipeline.origin, origin):
            pipeline.at_gap(
                GapClass.RECREATED,
                max(offset, pipeline.lag.log_end),
                "the topic was deleted and created again",
                resume_at=earliest,
                origin=origin,
            )
        elif offset < earliest:
            pipeline.at_gap(
                GapClass.EXPIRED, earliest, "retention deleted it before it was fetched", resume_at=earliest
            )
        elif offset > latest:
            pipeline.at_gap(
                GapClass.TRUNCATED,
                offset,
                f"the source's log now ends at {latest}",
                first=latest,
                resume_at=latest,
            )

    async def begin(
        self, pipeline: PartitionPipeline, known: Position | None, *, is_lost: bool, start: str | int
    ) -> None:
        """Finds where a newly assigned partition goes on, then lets it run. Tries until it is known or the
        assignment ends. `start` counts only for a partition that was never mirrored before."""
        failure_count = 0
        while pipeline.state is State.STARTING:
            try:
                await self._begin(pipeline, known, is_lost, start)
            except CLUSTER_FAILURES as error:
                if failure_count == 0:
                    log.warning("cannot begin yet", of=str(pipeline.partition), error=str(error))
                failure_count += 1
                pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(failure_count, 10))
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))

    async def _begin(
        self, pipeline: PartitionPipeline, known: Position | None, is_lost: bool, start: str | int
    ) -> None:
        partition = pipeline.partition
        origin, earliest, latest = await self._log_of(partition)
        if is_lost:
            pipeline.ready(earliest, -1, origin)
            reason = "the positions topic holds no readable position of it"
            pipeline.at_gap(GapClass.POSITION_LOST, latest, reason, resume_at=latest)
        elif known is not None:
            recorded = Origin(known.cluster_id, known.topic_id)
            pipeline.ready(known.next_offset, known.leader_epoch, recorded)
            if _is_other_log(recorded, origin):
                reason = "the position is of another topic or cluster of this name"
                pipeline.at_gap(
                    GapClass.RECREATED, known.next_offset, reason, resume_at=earliest, origin=origin
                )
        else:
            offset = earliest if start == "earliest" else latest
            if isinstance(start, int):
                key = (partition.topic, partition.partition)
                found = (await self.cluster.list_offsets({key: start}))[key].offset
                offset = found if found >= 0 else latest
            if pipeline.state is not State.STARTING:
                # Lost meanwhile: what was just found may lie beyond what the new owner has delivered, and
                # as the newest record it would be believed.
                return
            # Durable before the first record is carried: otherwise a crash could make `latest` mean a
            # later offset the next time, and what lies between would be lost.
            first = Position(offset, origin.cluster_id, origin.topic_id, -1, self._now_ms())
            await self._record_start(partition, first)
            pipeline.ready(offset, -1, origin)
        if pipeline.state is not State.CLOSED:
            self.add(pipeline)

    async def _log_of(self, partition: SourcePartition) -> tuple[Origin, int, int]:
        """Which log it is now, its first offset and its end (the high watermark)."""
        view = await self.cluster.metadata([partition.topic], max_age_ms=0)
        topic = view.topics.get(partition.topic)
        if topic is None:
            raise UnknownTopicOrPartition(f"{partition} does not exist now")
        key = (partition.topic, partition.partition)
        earliest = (await self.cluster.list_offsets({key: EARLIEST}))[key].offset
        latest = (await self.cluster.list_offsets({key: LATEST}))[key].offset
        return Origin(view.cluster_id or "", topic.topic_id), earliest, latest


def _is_other_log(before: Origin, now: Origin) -> bool:
    """Whether offsets of `before` mean nothing in `now`. What one side does not know proves nothing."""
    if before.cluster_id and now.cluster_id and before.cluster_id != now.cluster_id:
        return True
    return NO_TOPIC_ID not in (before.topic_id, now.topic_id) and before.topic_id != now.topic_id
