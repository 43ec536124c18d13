"""One worker: the sources it reads, the partitions it owns, the sink, the positions, its seat in the group.

Called by `daemon`. Workers with the same mirror name share the partitions of all sources through a group on
the target with a protocol type of its own. The group's leader shares them out (`assignment`); a rebalance
stops nobody: a worker goes on with what it keeps, drains what it loses, writes its position, and joins again
without it; only then does the leader hand it to its new owner.

Order of a partition's life here, none of it can be left out:
assigned → positions topic read to its end → start found (and written, when new) → carried → drained →
position written → claim given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

import structlog

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.group_member import GroupMember
from millrace.broker.client.read_to_end import read_topic_to_end
from millrace.broker.errors import FatalError, KafkaError
from millrace.mirror.assignment import (
    Claim,
    assign,
    decode_assignment,
    decode_claim,
    encode_assignment,
    encode_claim,
    withhold_claimed,
)
from millrace.mirror.checkpoints import POSITIONS_TOPIC_CONFIGS, Position, Positions, encode_records
from millrace.mirror.config import MirrorConfig
from millrace.mirror.gaps import Gap, GapClass, GapPolicy, gap_event
from millrace.mirror.metrics import MirrorMetrics
from millrace.mirror.pipeline import BetweenHook, PartitionPipeline, State
from millrace.mirror.rebatch import BatchPath
from millrace.mirror.routes import (
    AUDIT_TOPIC,
    Route,
    SourcePartition,
    TargetPartition,
    find_loops,
    positions_topic,
)
from millrace.mirror.sink import Sink
from millrace.mirror.source import FetchBudget, SourceReader
from millrace.mirror.system_records import (
    CLUSTER_FAILURES,
    SystemRecords,
    ensure_topic,
    refuse_expiring_topic,
)
from millrace.mirror.topics import TargetTopics

log = structlog.get_logger("millrace.mirror.worker")

PROTOCOL_TYPE = "millrace-mirror"
PROTOCOL_NAME = "sticky-v1"
AUDIT_TOPIC_CONFIGS = {"cleanup.policy": "compact,delete"}
READ_PAUSE_S = 0.2
# The group must not take a worker for dead while it drains.
MAX_SHARE_OF_REBALANCE = 0.5


class Worker:
    """See the module's text. `start`, then `run` until it is cancelled, or `stop` for an orderly end."""

    def __init__(
        self,
        config: MirrorConfig,
        target: Cluster,
        sources: Mapping[str, Cluster],
        now_ms: Callable[[], int],
        between: BetweenHook | None = None,
    ) -> None:
        self.config = config
        self.target = target
        self._between = between
        self._clock = now_ms
        self.owned: dict[SourcePartition, PartitionPipeline] = {}
        self.sink = Sink(target, now_ms)
        self.metrics = MirrorMetrics(now_ms, lambda: self.owned.values(), self._gauges)
        self.is_assigned = False
        self._naming = config.naming_rule
        self._topics = TargetTopics(target, config.target.replication_factor, now_ms)
        self._system = SystemRecords(target, now_ms, config.target.replication_factor)
        self._positions_topic = positions_topic(config.name)
        self._writing_positions = asyncio.Lock()
        self._budget = FetchBudget(config.in_flight_bytes)
        self._shared_out: frozenset[SourcePartition] = frozenset()
        self._generation = -1
        self._stopping = False
        self._tasks: asyncio.TaskGroup | None = None
        self.readers = {
            source.cluster: SourceReader(
                source,
                sources[source.cluster],
                config.fetch,
                self._budget,
                config.discovery_interval_ms,
                now_ms,
                self._on_view,
                self._record_start,
            )
            for source in config.sources
        }
        self._member = GroupMember(
            target,
            config.group_id,
            protocol_type=PROTOCOL_TYPE,
            protocols=self._claim,
            on_assign=self._assigned,
            on_revoke=self._revoked,
            on_lost=self._lost,
            assign=self._share_out,
            session_timeout_ms=config.group.session_timeout_ms,
            rebalance_timeout_ms=config.group.rebalance_timeout_ms,
            heartbeat_interval_ms=min(1_000, max(1, config.group.session_timeout_ms // 4)),
        )

    # --- life ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Carries until cancelled. An error that comes out of here is a broken invariant."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            tasks.create_task(self.sink.run())
            for reader in self.readers.values():
                tasks.create_task(reader.run())
            tasks.create_task(self._keep_positions())
            tasks.create_task(self._keep_seat())

    async def stop(self) -> None:
        """Drains: nothing new is fetched, what is under way is delivered, positions are written, and the
        group is told. Bounded by the drain timeout; what is not delivered by then is sent again later."""
        self._stopping = True
        await self._member.close()
        # Closed within a rebalance, the member has no share to give back; the partitions are still here.
        await self._release(list(self.owned.values()))

    async def _keep_seat(self) -> None:
        """Holds the seat in the group until `stop`. What trying again cannot cure ends the process."""
        self._member.start()
        try:
            await self._member.wait()
        except KafkaError as error:
            raise FatalError(f"the target refuses the mirror a seat in its group: {error}") from error

    # --- the group -------------------------------------------------------------------------------

    def _claim(self) -> list[tuple[str, bytes]]:
        claim = Claim(frozenset(self.owned), self._generation)
        return [(PROTOCOL_NAME, encode_claim(claim))]

    def _share_out(self, members: Mapping[str, bytes]) -> dict[str, bytes]:
        """The leader's part. A source that was never seen keeps its partitions where they are."""
        claims = {member: _claim_of(member, data) for member, data in members.items()}
        partitions = self._partitions()
        self._shared_out = frozenset(partitions)
        unseen = {name for name, reader in self.readers.items() if reader.view is None}
        for claim in claims.values():
            partitions |= {partition for partition in claim.owned if partition.source in unseen}
        ideal = assign(partitions, claims)
        log.info("sharing out", workers=len(members), partitions=len(partitions))
        now = withhold_claimed(ideal, claims)
        return {member: encode_assignment(share) for member, share in now.items()}

    def _partitions(self) -> set[SourcePartition]:
        """Every source partition that is to be carried and that the target has a place for."""
        return {
            SourcePartition(reader.name, topic.name, number)
            for reader in self.readers.values()
            for topic in reader.selected_topics()
            for number in topic.partitions
            if self._topics.has_partition(self._naming.target_topic(reader.name, topic.name), number)
        }

    async def _assigned(self, share: bytes) -> None:
        wanted = decode_assignment(share)
        self._generation = self._member.generation
        going = [pipeline for key, pipeline in self.owned.items() if key not in set(wanted)]
        coming = [key for key in wanted if key not in self.owned and key.source in self.readers]
        log.info("assigned", kept=len(self.owned) - len(going), going=len(going), coming=len(coming))
        if going:
            await self._release(going)
        if coming:
            self._begin(coming, await self._read_positions())
        self.is_assigned = True
        if going:
            self._member.rejoin()

    async def _revoked(self) -> None:
        """A rebalance begins. What is owned goes on; `_assigned` says what has to go."""
        if self._stopping:
            await self._release(list(self.owned.values()))

    async def _lost(self) -> None:
        """Others may own it all by now: stop at once, and write nothing."""
        log.warning("lost the seat in the group; starting again", partitions=len(self.owned))
        self.is_assigned = False
        for pipeline in list(self.owned.values()):
            self._drop(pipeline)

    async def _release(self, pipelines: list[PartitionPipeline]) -> None:
        """Drains, writes the positions, gives up."""
        limit_ms = min(
            self.config.drain_timeout_ms,
            int(self.config.group.rebalance_timeout_ms * MAX_SHARE_OF_REBALANCE),
        )
        drained = await asyncio.gather(*(pipeline.drain(limit_ms) for pipeline in pipelines))
        if not all(drained):
            log.warning(
                "not all was delivered in time; it will be sent again", partitions=drained.count(False)
            )
        try:
            async with asyncio.timeout(limit_ms / 1000):
                await self._write_positions(pipelines)
        except TimeoutError:
            log.warning("positions were not written in time; what follows them will be sent again")
        for pipeline in pipelines:
            self._drop(pipeline)

    def _drop(self, pipeline: PartitionPipeline) -> None:
        self.readers[pipeline.partition.source].remove(pipeline)
        pipeline.close()
        if self.owned.get(pipeline.partition) is pipeline:
            del self.owned[pipeline.partition]

    def _begin(self, coming: Iterable[SourcePartition], positions: Positions) -> None:
        seen_sources = {key.source for key in (*positions.known, *positions.unreadable)}
        for partition in coming:
            reader = self.readers[partition.source]
            target = TargetPartition(
                self._naming.target_topic(partition.source, partition.topic), partition.partition
            )
            pipeline = PartitionPipeline(partition, target, self.sink, self, self._between)
            self.owned[partition] = pipeline
            # `start` is for the first run. A partition that appears later begins with its first record.
            start = "earliest" if partition.source in seen_sources else reader.config.start
            is_lost = partition in positions.unreadable
            self.spawn(reader.begin(pipeline, positions.known.get(partition), is_lost=is_lost, start=start))

    # --- discovery -------------------------------------------------------------------------------

    async def _on_view(self, reader: SourceReader) -> None:
        topics = reader.selected_topics()
        named = [(topic, self._naming.target_topic(reader.name, topic.name)) for topic in topics]
        await self._refuse_loops(reader, [(topic.name, name) for topic, name in named])
        if named:
            await self._topics.ensure(reader.cluster, named)
        if self._member.is_leader and self.is_assigned and frozenset(self._partitions()) != self._shared_out:
            self._shared_out = frozenset(self._partitions())
            log.info("the partitions to carry have changed", source=reader.name)
            self._member.rejoin()

    async def _refuse_loops(self, reader: SourceReader, names: list[tuple[str, str]]) -> None:
        """Raises FatalError when this mirror alone would carry a topic into itself (`check` sees more)."""
        here = reader.view.cluster_id if reader.view is not None else None
        there = (await self.target.metadata([])).cluster_id
        if here and there and (loops := find_loops(Route(here, a, there, b) for a, b in names)):
            topic = loops[0][0][1]
            raise FatalError(
                f"source {reader.name} and target {self.target.name} are the same cluster, and topic {topic} "
                "would be carried into itself; correct the addresses or exclude the topic"
            )

    # --- positions -------------------------------------------------------------------------------

    async def _read_positions(self) -> Positions:
        while True:
            positions = Positions()
            try:
                await ensure_topic(
                    self.target,
                    self._positions_topic,
                    1,
                    self.config.target.replication_factor,
                    POSITIONS_TOPIC_CONFIGS,
                )
                await refuse_expiring_topic(self.target, self._positions_topic)
                async for record in read_topic_to_end(self.target, self._positions_topic):
                    positions.apply(record.key, record.value)
                return positions
            except CLUSTER_FAILURES as error:
                log.warning("cannot read the positions yet", error=str(error))
                await asyncio.sleep(READ_PAUSE_S)

    async def _keep_positions(self) -> None:
        while True:
            await asyncio.sleep(self.config.position_interval_ms / 1000)
            await self._write_positions(list(self.owned.values()))

    async def _write_positions(self, pipelines: Iterable[PartitionPipeline]) -> None:
        async with self._writing_positions:
            now_ms = self.now_ms()
            moved = [
                (pipeline, position)
                for pipeline in pipelines
                if (position := pipeline.position_to_write(now_ms)) is not None
            ]
            if not moved:
                return
            records = encode_records((pipeline.partition, position) for pipeline, position in moved)
            await self._system.write(self._positions_topic, records, configs=POSITIONS_TOPIC_CONFIGS)
            for pipeline, position in moved:
                pipeline.progress.written(position.next_offset)

    async def _record_start(self, partition: SourcePartition, position: Position) -> None:
        records = encode_records([(partition, position)])
        await self._system.write(self._positions_topic, records, configs=POSITIONS_TOPIC_CONFIGS)

    # --- what a pipeline asks for (pipeline.Surroundings) ----------------------------------------

    def now_ms(self) -> int:
        return self._clock()

    def policy(self, gap_class: GapClass) -> GapPolicy:
        return self.config.gaps.policy(gap_class)

    def max_batch_size(self, topic: str) -> int:
        return self._topics.max_batch_size(topic)

    async def record_gap(self, gap: Gap) -> None:
        key, value = gap_event(self.config.name, gap)
        await self._system.write(AUDIT_TOPIC, [(key, value)], partition_of=key, configs=AUDIT_TOPIC_CONFIGS)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        if self._tasks is None:
            raise RuntimeError("the worker does not run")
        self._tasks.create_task(work)

    def moved(self, pipeline: PartitionPipeline) -> None:
        self.readers[pipeline.partition.source].moved(pipeline)

    def count_batch(self, partition: SourcePartition, path: BatchPath) -> None:
        self.metrics.count_batch(partition, path)

    def count_delivered(
        self, partition: SourcePartition, records: int, size: int, measured_from: str, seconds: float
    ) -> None:
        self.metrics.count_delivered(partition, records, size, measured_from, seconds)

    # --- for people and machines -----------------------------------------------------------------

    def is_ready(self) -> bool:
        return (
            self.is_assigned
            and self.sink.is_connected
            and not any(pipeline.state is State.STARTING for pipeline in self.owned.values())
        )

    def status(self) -> dict[str, Any]:
        now_ms = self.now_ms()
        return {
            "mirror": self.config.name,
            "ready": self.is_ready(),
            "stopping": self._stopping,
            "delivery": self.config.delivery,
            "member": self._member.member_id,
            "generation": self._member.generation,
            "leader": self._member.is_leader,
            "target": {
                "cluster": self.target.name,
                "connected": self.sink.is_connected,
                "retries": self.sink.retry_count,
                "queued_batches": self.sink.queued_count,
            },
            "sources": [
                {"cluster": name, "connected": reader.is_connected} for name, reader in self.readers.items()
            ],
            "partitions": [_partition_status(self.owned[key], now_ms) for key in sorted(self.owned)],
        }

    def _gauges(self) -> list[tuple[str, str, dict[str, str], float]]:
        target = {"target": self.target.name}
        rows = [
            (
                "millrace_mirror_target_up",
                "Whether the target answers",
                target,
                float(self.sink.is_connected),
            ),
            (
                "millrace_mirror_produce_retries_total",
                "Batches sent again",
                target,
                float(self.sink.retry_count),
            ),
        ]
        for name, reader in self.readers.items():
            up = float(reader.is_connected)
            rows.append(("millrace_mirror_source_up", "Whether the source answers", {"source": name}, up))
        return rows


def _claim_of(member: str, data: bytes) -> Claim:
    """A worker whose claim cannot be read (another version) claims nothing; it is given work all the same."""
    try:
        return decode_claim(data)
    except ValueError as error:
        log.warning("a worker's claim cannot be read", member=member, error=str(error))
        return Claim()


def _partition_status(pipeline: PartitionPipeline, now_ms: int) -> dict[str, Any]:
    where, progress, gap = pipeline.partition, pipeline.progress, pipeline.gap
    is_started = pipeline.state is not State.STARTING
    status: dict[str, Any] = {
        "source": where.source,
        "topic": where.topic,
        "partition": where.partition,
        "to": str(pipeline.target),
        "state": pipeline.state.value,
        "position": progress.position if is_started else None,
        "log_end": pipeline.lag.log_end if pipeline.lag.log_end >= 0 else None,
        "outstanding_bytes": progress.outstanding_size,
    }
    if is_started and pipeline.lag.log_end >= 0:
        status["lag_records"] = pipeline.lag.records_behind(progress.position)
        status["lag_seconds"] = pipeline.lag.seconds_behind(progress.position, now_ms)
    if gap is not None:
        status["gap"] = {
            "from": gap.from_offset,
            "to": gap.to_offset,
            "class": gap.gap_class.value,
            "reason": gap.reason,
            "at_ms": gap.at_ms,
        }
    return status
