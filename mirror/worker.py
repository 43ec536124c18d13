"""One worker: the sources it reads, the partitions it owns, the sink, the positions, its seat in the group.

Called by `daemon`. Workers with the same mirror name share the partitions of all sources through a group on
the target with a protocol type of its own. The group's leader shares them out (`assignor`); a rebalance
stops nobody: a worker goes on with what it keeps, drains what it loses, writes its position, and joins again
without it; only then does the leader hand it to its new owner. Whose seat was lost has nothing to hand over:
the leader ends its open transactions (`delivery.fence`) before it shares out what it had.

How batches and positions reach the target is the `delivery`'s: `exactly_once` or `at_least_once`.

Order of a partition's life here, none of it can be left out:
assigned → what was begun, then the positions topic read to its end → start found (and written, when new, with
its mark) → carried → drained → position written → claim given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import structlog

from millrace.broker.client.cluster import Cluster
from millrace.broker.protocol.mirror_positions import Position
from millrace.mirror.assignor import Assignor, read_claims
from millrace.mirror.batches.between import BetweenHook
from millrace.mirror.batches.coalesce import BatchWalk
from millrace.mirror.config import MirrorConfig
from millrace.mirror.control.metrics import MirrorMetrics
from millrace.mirror.control.operators import Operators
from millrace.mirror.control.status import WorkerStatus
from millrace.mirror.delivery.at_least_once import AtLeastOnce
from millrace.mirror.delivery.beginnings import Beginnings, Begun
from millrace.mirror.delivery.checkpoints import Positions
from millrace.mirror.delivery.delivery import Delivery
from millrace.mirror.delivery.exactly_once import ExactlyOnce
from millrace.mirror.delivery.gap_records import GapRecords
from millrace.mirror.delivery.positions_keeper import PositionsKeeper
from millrace.mirror.delivery.system_records import SystemRecords
from millrace.mirror.delivery.transaction import Seat
from millrace.mirror.handover import Handover, WorkLeft, drain_times
from millrace.mirror.offsets.group_sync import GroupSync
from millrace.mirror.offsets.map_keeper import MapKeeper
from millrace.mirror.pipeline import PartitionPipeline, Shared, State
from millrace.mirror.seat import WorkerSeat
from millrace.mirror.sharing.assignment import (
    Claim,
    decode_share,
    departed_slots,
    encode_claim,
)
from millrace.mirror.sharing.peers import add_address, crew_of
from millrace.mirror.sharing.rates import SAMPLE_INTERVAL_S, Workload
from millrace.mirror.sources.fetch_memory import FetchBudget
from millrace.mirror.sources.progress_group import ProgressGroups
from millrace.mirror.sources.readers import Readers
from millrace.mirror.sources.source import SourceReader
from millrace.mirror.steady import steady_ms
from millrace.mirror.topics.discovery import Discovery
from millrace.mirror.topics.route_guard import RouteGuard
from millrace.mirror.topics.routes import SourcePartition
from millrace.mirror.topics.topics import TargetTopics
from millrace.mirror.troubles import Failure

log = structlog.get_logger("millrace.mirror.worker")

PROTOCOL_NAME = "sticky-v1"
# The group must not take a worker for dead while it drains.
MAX_SHARE_OF_REBALANCE = 0.5
# Nor its leader while it fences.
MAX_SHARE_OF_SESSION = 0.5
MAX_FENCING_S = 5.0
# Partitions that are shared out on the event loop: more take seconds at worst.
MOST_SHARED_OUT_AT_ONCE = 1_000


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
        self.now_ms = now_ms
        self.owned: dict[SourcePartition, PartitionPipeline] = {}
        self.status = WorkerStatus(self)
        self.metrics = MirrorMetrics(now_ms, lambda: self.owned.values(), self.status.gauges)
        self.is_assigned = False
        self.handover = Handover()
        self._system = SystemRecords(target, now_ms, config.target.replication_factor)
        self._gaps = GapRecords(config, target, self._system, self.metrics)
        self.discovery = Discovery(
            config,
            RouteGuard(config, target, self._system, now_ms, leads=self._leads_if_known),
            TargetTopics(config, target, steady_ms, now_ms),
        )
        keeper = self.keeper = PositionsKeeper(config, target, self._system)
        self.delivery: Delivery = (
            ExactlyOnce(config, target, keeper, now_ms, self.metrics.count_transaction)
            if config.delivery == "exactly_once"
            else AtLeastOnce(
                config, target, keeper, self._system, now_ms, holds_seat=lambda: self.member.holds_seat
            )
        )
        factor = config.target.replication_factor
        self._beginnings = Beginnings(config.name, target, self._system, factor, now_ms)
        self._slots: dict[int, int] = {}  # in use as of the last share: slot -> lanes
        self._workload = Workload()
        self._shared = Shared(
            now_ms,
            self.discovery.topics,
            self._gaps,
            self.metrics,
            self._workload,
            self._spawn,
            BatchWalk(*config.coalescing) if between is None else BatchWalk(0),
            between,
        )
        self.budget = FetchBudget(config.in_flight_bytes)
        self._assignor = Assignor()
        self._generation = -1
        self.is_stopping = False
        self._tasks: asyncio.TaskGroup | None = None
        self.readers = Readers(config, self.budget, now_ms, self._on_view, self._record_start)
        for source in config.sources:
            self.readers.add(source, sources[source.cluster])
        self.operators = Operators(self, self._system.write)
        self.group_sync = GroupSync(target, now_ms, self._leads, self._settings)
        self._progress_groups = ProgressGroups(now_ms, self._settings, lambda: list(self.owned.values()))
        self._map_keeper = MapKeeper(target, self._system.write, self._leads, self._settings)
        self.member = WorkerSeat(
            config,
            target,
            self._claim,
            on_assign=self._assigned,
            on_revoke=self._revoked,
            on_lost=self._lost,
            assign=self._share_out,
        )

    # --- life ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Carries until cancelled. An error that comes out of here is a broken invariant."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            tasks.create_task(self.delivery.run())
            self.readers.start(tasks)
            tasks.create_task(self.operators.run())
            tasks.create_task(self.group_sync.run())
            tasks.create_task(self._map_keeper.run())
            tasks.create_task(self._progress_groups.run())
            tasks.create_task(self.member.keep())
            tasks.create_task(self._measure())

    async def drain(self) -> None:
        """Gives everything up, the seat too: the other workers take it all. Then this one takes no part any
        more; asked again, it does nothing."""
        await self._end(self.member.give_up)

    async def stop(self) -> None:
        """An orderly end, before `run` is cancelled. A seat with a name waits for a restart (`seat`)."""
        await self._end(self.member.end)

    async def _end(self, let_go: Callable[[], Awaitable[None]]) -> None:
        """Nothing new is fetched, what is under way is delivered, positions are written, and the seat is let
        go. Bounded by the drain timeout; what is not delivered by then is carried again by the next owner
        (`handover` says what that is). Whatever fails, the seat is let go all the same, or others would wait
        for its session to end; the first failure is raised then."""
        self.is_stopping = True
        failures: list[Exception] = []
        # First while the seat is held: a transaction is committed as a member, or not at all.
        for step in (self._release_all, let_go, self._release_all, self.delivery.close):
            try:
                await step()
            except Exception as error:
                failures.append(error)
        self.is_assigned = False
        if failures:
            raise failures[0]

    async def _release_all(self) -> None:
        await self._release(list(self.owned.values()))

    def work_left(self) -> WorkLeft | None:
        """What an end, orderly or not, leaves to others; None: nothing."""
        for pipeline in list(self.owned.values()):
            self.handover.gave_up(pipeline)
        config = self.config
        return self.handover.work_left(
            config.drain_timeout_ms, self.target.name, self.target.trouble or "", config.delivery
        )

    def standing(self) -> Iterator[tuple[SourcePartition, Failure]]:
        """The partitions of which something is not put on record at the target: why, and since when."""
        yield from self.delivery.standing()
        yield from self._system.standing()

    async def _measure(self) -> None:
        """Takes the rates; when this worker's load has become another, the group shares its work out anew."""
        while True:
            await asyncio.sleep(SAMPLE_INTERVAL_S)
            is_stale = self._workload.sample(self.owned, steady_ms())
            if is_stale and self.is_assigned and not self.is_stopping:
                log.info("this worker's load has changed; asking for the work to be shared out anew")
                self.member.rejoin()

    # --- sources that come and go, settings that were read again (`operators.reload`) -------------

    async def remove_source(self, name: str) -> None:
        """Gives the source's partitions up, with nothing lost, and closes its connections."""
        # Again: meanwhile the group may have given this worker more of it.
        while carried := [pipeline for key, pipeline in self.owned.items() if key.source == name]:
            await self._release(carried)
        self.discovery.forget(name)
        await self.readers.remove(name)

    def take_config(self, config: MirrorConfig) -> None:
        """Settings that may change while the worker runs (`reload.RELOADABLE`)."""
        if config.target.security != self.config.target.security:
            self.target.take_security(config.target.security)
        self.config = self._gaps.config = config
        self.discovery.take_config(config)
        self.budget.resize(config.in_flight_bytes)
        self.delivery.take_config(config)
        self.readers.take_config(config)

    def _settings(self) -> tuple[MirrorConfig, dict[str, Cluster]]:
        """The config and the sources' clusters, as they are now."""
        return self.config, {name: reader.cluster for name, reader in self.readers.items()}

    def rejoin(self) -> None:
        """Lets the group share out its work anew."""
        self.member.rejoin()

    # --- the group -------------------------------------------------------------------------------

    def _claim(self) -> list[tuple[str, bytes]]:
        delivery = self.delivery
        claim = Claim(
            frozenset(self.owned),
            self._generation,
            delivery.slot,
            delivery.lane_limit,
            self._slots,
            self._workload.tell(steady_ms()),
            self._workload.is_settling,
            frozenset(self.readers),
            self.member.member_id,
        )
        return [(PROTOCOL_NAME, add_address(encode_claim(claim), self.operators.url))]

    async def _share_out(self, members: Mapping[str, bytes]) -> dict[str, bytes]:
        """The leader's part. Whose seat is gone is fenced before anybody is given what it had."""
        claims = read_claims(members)
        unfenced = await self._fence(departed_slots(claims, self._slots))
        partitions = self.discovery.partitions(self.readers)
        share_out = partial(
            self._assignor.share_out,
            members,
            claims,
            partitions,
            sources=frozenset(self.readers),
            unseen=frozenset(self.discovery.unseen(self.readers)),
            unfenced=unfenced,
        )
        if len(partitions) <= MOST_SHARED_OUT_AT_ONCE:
            return share_out()
        return await asyncio.to_thread(share_out)  # or it would lose its own seat meanwhile

    async def _fence(self, departed: Mapping[int, int]) -> dict[int, int]:
        """Ends what earlier holders of these slots left open, so that nobody waits for a timeout; the slots
        for which that was not possible. Among them is one given to a worker that missed its share."""
        session_s = self.config.group.session_timeout_ms / 1000
        return await self.delivery.fence(departed, min(MAX_FENCING_S, session_s * MAX_SHARE_OF_SESSION))

    def _seat(self) -> Seat | None:
        member = self.member
        return Seat(member.member_id, member.generation) if member.member_id else None

    async def _assigned(self, share: bytes) -> None:
        given = decode_share(share)
        wanted = given.partitions
        crew = crew_of(share)
        is_inherited = self.member.is_inherited(crew)
        self._generation = self.member.generation
        self._slots = dict(given.slots)
        if given.slot is not None:
            if is_inherited:
                # Also the lanes that this worker does not begin with: whose name it bears may have had more.
                await self._fence({given.slot: given.slots.get(given.slot, 0)})
            if self.delivery.slot not in (None, given.slot):
                await self._lost()  # another worker has the slot, by an older claim of ours
            self.delivery.seated(given.slot, self._seat)
        going = [pipeline for key, pipeline in self.owned.items() if key not in set(wanted)]
        coming = [key for key in wanted if key not in self.owned and key.source in self.readers]
        if unknown := {key.source for key in wanted} - self.readers.keys():
            # Given by a leader that does not know of claims' sources, or while a reload takes one away.
            log.warning("a share of sources that this config lacks is not carried", sources=sorted(unknown))
        if self.is_stopping:
            coming = []
        elif coming and self.delivery.lane_limit and given.slot is None:
            log.error("the worker that leads the group knows no transactions; end it", left=len(coming))
            coming = []
        log.info("assigned", kept=len(self.owned) - len(going), going=len(going), coming=len(coming))
        if going:
            await self._release(going)
        if coming:
            await self.operators.ready()
            begun = await self._beginnings.read()  # before the positions: see there
            positions = await self.delivery.read_positions()
            unseen = await self._beginnings.take_stock(begun, positions, coming)
            if not self.is_stopping:  # since it was asked above
                self._begin(coming, positions, begun, unseen)
        self.operators.take_crew(crew)
        self.is_assigned = True
        if is_inherited:
            self._workload.settle()
        if going or is_inherited:
            self.member.rejoin()

    async def _revoked(self) -> None:
        """A rebalance begins. What is owned goes on; `_assigned` says what has to go."""
        if self.is_stopping:
            await self._release(list(self.owned.values()))

    async def _lost(self) -> None:
        """Others may own it all by now: stop at once, and write nothing."""
        log.warning("lost the seat in the group; starting again", partitions=len(self.owned))
        self.is_assigned = False
        for pipeline in list(self.owned.values()):
            self._drop(pipeline)
        await self.delivery.lost()

    async def _release(self, pipelines: list[PartitionPipeline]) -> None:
        """Drains, writes the positions, gives up."""
        most_ms = int(self.config.group.rebalance_timeout_ms * MAX_SHARE_OF_REBALANCE)
        times = drain_times(self.config.drain_timeout_ms, most_ms)
        began = asyncio.get_running_loop().time()
        drained = await asyncio.gather(*(pipeline.drain(times.deliver_s) for pipeline in pipelines))
        if not all(drained):
            log.warning(
                "not all was delivered in time; it will be sent again", partitions=drained.count(False)
            )
        settled = [pipeline for pipeline, in_time in zip(pipelines, drained, strict=True) if in_time]
        try:
            async with asyncio.timeout_at(began + times.record_s):
                await self.delivery.settle(settled)
        except TimeoutError:
            log.warning("positions were not written in time; what follows them will be sent again")
        finally:
            for pipeline in pipelines:
                self._drop(pipeline)

    def _drop(self, pipeline: PartitionPipeline) -> None:
        if pipeline.state is State.CLOSED:
            return  # a rebalance and a reload gave it up at once
        if self.is_stopping:
            self.handover.gave_up(pipeline)
        self.readers[pipeline.partition.source].remove(pipeline)
        self.delivery.left(pipeline)
        pipeline.close()
        if self.owned.get(pipeline.partition) is pipeline:
            del self.owned[pipeline.partition]

    async def _record_start(self, partition: SourcePartition, position: Position) -> None:
        """Returns when a first position is on record, and apart from it that there is one."""
        await self.delivery.record_start(partition, position)
        await self._beginnings.mark(partition)

    def _begin(
        self, coming: Iterable[SourcePartition], positions: Positions, begun: Begun, unseen: set[str]
    ) -> None:
        """`unseen`: the sources that nothing is on record of."""
        waiting: dict[str, list[PartitionPipeline]] = {}
        for partition in coming:
            reader = self.readers.get(partition.source)
            if reader is None:
                continue  # a reload has just taken the source away
            target, sink = self.discovery.target_of(partition), self.delivery.sink_of(partition)
            pipeline = PartitionPipeline(partition, target, sink, self._shared, reader.moved)
            self.owned[partition] = pipeline
            self.delivery.began(pipeline)
            self.operators.began(pipeline)
            if partition.source in unseen:
                waiting.setdefault(partition.source, []).append(pipeline)
                continue
            start = begun.start(partition, reader.config.start, is_first=False)
            is_lost = partition in positions.unreadable
            self._spawn(reader.begin(pipeline, positions.known.get(partition), is_lost=is_lost, start=start))
        for source, pipelines in waiting.items():
            self._spawn(self._begin_when_seen(self.readers[source], pipelines))

    async def _begin_when_seen(self, reader: SourceReader, pipelines: list[PartitionPipeline]) -> None:
        """However late that is: begun without a first look on record, partitions that come later would be
        taken for ones that appeared later."""
        await reader.seen(pipelines)

        def waiting() -> list[SourcePartition]:
            return [pipeline.partition for pipeline in pipelines if pipeline.state is State.STARTING]

        if not waiting():
            return  # given up meanwhile
        begun, is_first = await self._beginnings.first_look(reader.name, reader.seen_topics(), waiting)
        for pipeline in pipelines:
            start = begun.start(pipeline.partition, reader.config.start, is_first=is_first)
            self._spawn(reader.begin(pipeline, None, is_lost=False, start=start))

    async def _on_view(self, reader: SourceReader) -> None:
        await self.discovery.looked(reader, lambda: self.member.is_leader)
        if not (self.member.is_leader and self.is_assigned):
            return
        if self._assignor.is_news(self.discovery.partitions(self.readers)):
            log.info("the partitions to carry have changed", source=reader.name)
            self.member.rejoin()
        if not reader.selected_topics():
            await self._beginnings.nothing_seen(reader.name)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        if self._tasks is None:
            raise RuntimeError("the worker does not run")
        self._tasks.create_task(work)

    def _leads(self) -> bool:
        """Whether this worker does what one of all has to do."""
        return self.member.is_leader and self.is_assigned and not self.is_stopping

    def _leads_if_known(self) -> bool | None:
        if self.is_stopping:
            return False
        return self.member.is_leader if self.is_assigned else None
