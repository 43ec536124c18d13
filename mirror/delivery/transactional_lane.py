"""One transactional lane: some of a worker's partitions, and two transactional ids that take turns.

Made by `exactly_once`. Carries out what `alternation` and `transaction` decide: asks the target's
coordinators (by `lane_producer`), writes the positions, and takes the pipelines back to the committed
positions when a transaction is aborted. The batches themselves go out through the lane's own `sink`, on
connections of its own.

One task (`_drive`) decides; each id has one step at a time under way, in a task of its own. It is woken only
when there may be something to decide, so that a batch costs nothing here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator

import structlog

from millrace.broker.client.cluster import Cluster
from millrace.broker.errors import (
    IllegalGeneration,
    KafkaError,
    RebalanceInProgress,
    UnknownMemberId,
)
from millrace.broker.protocol.mirror_positions import Position
from millrace.mirror.delivery.alternation import Alternation
from millrace.mirror.delivery.checkpoints import Positions
from millrace.mirror.delivery.lane_producer import WRITE_PAUSE_S, LaneProducer
from millrace.mirror.delivery.positions_keeper import PositionsKeeper
from millrace.mirror.delivery.sink import Sink
from millrace.mirror.delivery.system_records import CLUSTER_FAILURES
from millrace.mirror.delivery.transaction import CLOSING, Act, Phase, Seat, Step
from millrace.mirror.gaps.gaps import GapClass
from millrace.mirror.pipeline import PartitionPipeline, State
from millrace.mirror.steady import steady_ms
from millrace.mirror.topics.routes import SourcePartition, TargetPartition
from millrace.mirror.troubles import Failure, Failures

log = structlog.get_logger("millrace.mirror.delivery.transactional_lane")

PRODUCER_PAUSE_MS = 500


class TransactionalLane:
    """See the module's text."""

    def __init__(
        self,
        transactional_ids: tuple[str, str],
        cluster: Cluster,
        keeper: PositionsKeeper,
        group_id: str,
        seat: Callable[[], Seat | None],
        now_ms: Callable[[], int],
        position_interval_ms: int,
        isolate: Callable[[TransactionalLane, frozenset[TargetPartition]], None],
        on_ended: Callable[[float, bool], None],
        steady_ms: Callable[[], int] = steady_ms,
    ) -> None:
        """`isolate` moves the lane's partitions elsewhere, but for those that it blames. `on_ended` hears of
        every transaction that ended: for how long (s) it was open, and whether it was committed."""
        self.name = transactional_ids[0]
        self.rules = Alternation(position_interval_ms)
        self.pipelines: set[PartitionPipeline] = set()
        # The target partitions, each of some pipeline here, that block its transactions.
        self.isolated: frozenset[TargetPartition] = frozenset()
        self._blamed: frozenset[TargetPartition] = frozenset()  # of these, those that blocked the last one
        self._standing: Failures[SourcePartition] = Failures()  # until a position of it is committed
        self._cluster = cluster
        self._keeper = keeper
        self._group_id = group_id
        self._seat = seat
        self._now_ms = now_ms
        self._steady_ms = steady_ms
        self._isolate = isolate
        self._on_ended = on_ended
        self._moved: set[PartitionPipeline] = set()
        self._starts: dict[SourcePartition, tuple[Position, asyncio.Future[None]]] = {}
        self._fence_offset = 0
        self._urgent_count = 0
        self._changed = asyncio.Event()
        self._ended = asyncio.Event()
        self._purpose = f"transactions {self.name}"
        self._maps: frozenset[TargetPartition] = frozenset()
        self._producers = [
            LaneProducer(index, name, rules, cluster, self._purpose)
            for index, (name, rules) in enumerate(zip(transactional_ids, self.rules.both, strict=True))
        ]
        self.sink = Sink(
            cluster,
            now_ms,
            alternation=self.rules,
            transactional_id=self.name,
            wake=self._changed.set,
            on_answer=self._on_answer,
            on_moved=self.moved,
            steady_ms=steady_ms,
        )

    # --- for `exactly_once` ----------------------------------------------------------------------

    async def run(self) -> None:
        """Carries until cancelled. What comes out of here is a broken rule."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.sink.run())
            tasks.create_task(self._drive(tasks))

    async def close(self) -> None:
        """After `run` has ended: aborts what is still open, as far as the target answers, and lets go."""
        for _, future in self._starts.values():
            if not future.done():
                future.set_exception(UnknownMemberId("the seat in the group was lost"))
        self._starts.clear()
        self.sink.reset()
        await asyncio.gather(*(producer.abort() for producer in self._producers))
        self._cluster.close_purpose(self._purpose)

    def add(self, pipeline: PartitionPipeline) -> None:
        self.pipelines.add(pipeline)
        self._maps |= {self._keeper.map_of(pipeline.partition)}

    def remove(self, pipeline: PartitionPipeline) -> None:
        """The assignment ends; called before the pipeline closes. What it has in the open transaction and
        is not committed must not be committed later: its next owner will carry it."""
        self.pipelines.discard(pipeline)
        self._moved.discard(pipeline)
        if (start := self._starts.pop(pipeline.partition, None)) is not None and not start[1].done():
            start[1].set_exception(UnknownMemberId(f"{pipeline.partition} is not assigned any more"))
        self._maps = frozenset(self._keeper.map_of(each.partition) for each in self.pipelines)
        # Whoever blocked the lane is gone: it is as good as new.
        targets = {each.target for each in self.pipelines}
        self.isolated &= targets
        self._blamed &= targets
        self._standing.over(pipeline.partition)
        if pipeline.target not in targets:
            self.sink.failures.over(pipeline.target)  # no batch of it will be acknowledged here
        # A start that is being written would stand behind what the next owner writes.
        begins = any(pipeline.partition in each.written_starts for each in self._producers)
        if self.rules.holds_records and (begins or not _is_settled(pipeline)):
            self.rules.doom_all(f"{pipeline.partition} leaves with records that are not committed")
            self._changed.set()

    def moved(self, pipeline: PartitionPipeline) -> None:
        """Its position may have moved, or a gap of it may have been recorded."""
        if pipeline not in self.pipelines:
            return  # it has left, and something of it comes to its end
        self._moved.add(pipeline)
        # One that moved before, too: by a gap's event that became durable, or past what is not carried, for
        # which no batch wakes the driver.
        phase = self.rules.filling.phase
        if phase is Phase.IDLE or phase is Phase.SEALED:
            self._changed.set()

    @property
    def is_stuck(self) -> bool:
        """Whether it cannot take batches now, and nobody knows for how long."""
        return (
            self.rules.filling.phase in (Phase.NO_PRODUCER, Phase.UNREAD)
            or any(each.is_unread for each in self.rules.both)
            or any(producer.unanswered_ends for producer in self._producers)
        )

    def wake(self) -> None:
        self._changed.set()

    def standing(self) -> Iterator[tuple[SourcePartition, Failure]]:
        """See `delivery.Delivery`."""
        for pipeline in self._waiting_pipelines():
            if (failure := self._standing.get(pipeline.partition)) is not None:
                yield pipeline.partition, failure

    async def settle(self, pipelines: Iterable[PartitionPipeline]) -> None:
        """Returns when everything that these have settled is committed, or forgotten with an abort."""
        waited = list(pipelines)
        self._urgent_count += 1
        try:
            while not all(_is_settled(pipeline) for pipeline in waited):
                self._ended.clear()
                self._changed.set()
                await self._ended.wait()
        finally:
            self._urgent_count -= 1

    def hand_over(self, pipeline: PartitionPipeline, other: TransactionalLane) -> None:
        """The partition goes on in another lane. Nothing of it is in a transaction of this one that can
        still be committed: it has been rewound, or has not begun."""
        start, stands = self._starts.pop(pipeline.partition, None), self._standing.get(pipeline.partition)
        self.remove(pipeline)
        pipeline.carry_by(other.sink)
        other.add(pipeline)
        if start is not None:
            other._starts[pipeline.partition] = start
        if stands is not None:
            other._standing.failed(pipeline.partition, *stands)  # until it is committed there
        other.moved(pipeline)
        other.wake()

    async def record_start(self, partition: SourcePartition, position: Position) -> None:
        """Returns when a first position is committed. Raises UnknownMemberId when the seat was lost."""
        future = asyncio.get_running_loop().create_future()
        self._starts[partition] = (position, future)
        self._changed.set()
        await future

    # --- what the rules look at (transaction.LaneView) --------------------------------------------

    @property
    def seat(self) -> Seat | None:
        return self._seat()

    @property
    def waiting(self) -> list[TargetPartition]:
        return self.sink.waiting_targets

    @property
    def own_partitions(self) -> frozenset[TargetPartition]:
        return self._maps | {self._keeper.positions}

    @property
    def is_settled(self) -> bool:
        return self.sink.is_settled

    @property
    def is_exact(self) -> bool:
        return all(pipeline.progress.is_exact for pipeline in self._moved)

    @property
    def more_is_coming(self) -> bool:
        return self.sink.has_unsent or any(map(_lags, self._moved))

    @property
    def has_news(self) -> bool:
        return bool(self._new_starts()) or bool(self._news())

    @property
    def is_urgent(self) -> bool:
        return self._urgent_count > 0 or bool(self._new_starts())

    def _new_starts(self) -> dict[SourcePartition, Position]:
        """Those that no transaction holds yet."""
        if not self._starts:
            return {}
        held = {partition for producer in self._producers for partition in producer.written_starts}
        return {key: position for key, (position, _) in self._starts.items() if key not in held}

    def _news(self, asker: LaneProducer | None = None) -> list[PartitionPipeline]:
        """Those whose position is another than the one on record, or about to be (by others than `asker`)."""
        held: dict[PartitionPipeline, int] = {}
        for producer in self._producers:
            if producer is not asker and producer.rules.phase in CLOSING:
                held |= {pipeline: position.next_offset for pipeline, position in producer.written.moved}
        return [
            pipeline
            for pipeline in self._moved
            if (offset := pipeline.progress.position_to_write()) is not None and held.get(pipeline) != offset
        ]

    def failing(self) -> frozenset[TargetPartition]:
        return frozenset(self.sink.failing_targets())

    def holding_up(self) -> frozenset[TargetPartition]:
        inexact = {each.target for each in self._moved if not each.progress.is_exact}
        return frozenset(self.sink.unsettled_targets() | inexact)

    def _on_answer(self) -> None:
        """Wakes the driver where an answer may change what is to be done; most change nothing."""
        rules = self.rules
        is_open = rules.filling.phase is Phase.OPEN
        if not is_open or self.sink.is_idle or (rules.may_seal and not self.more_is_coming):
            self._changed.set()

    # --- the steps -------------------------------------------------------------------------------

    async def _drive(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            self._changed.clear()
            until_ms: int | None = None
            for producer in self._producers:
                while producer.task is None:
                    step = self.rules.next_step(producer.index, self, self._steady_ms())
                    if step.act is Act.WAIT:
                        if step.until_ms is not None:
                            until_ms = min(until_ms or step.until_ms, step.until_ms)
                        break
                    self._changed.set()  # what one does may be what the other waits for
                    if step.act is Act.REWIND:
                        self._rewind(step.blamed)
                    else:
                        if step.act is Act.WRITE_POSITIONS:
                            self._gather(producer)  # now, before anything of the next one is acknowledged
                        producer.task = tasks.create_task(self._carry_out(producer, step))
            self._take_turn()
            await self._until_changed(until_ms)

    def _take_turn(self) -> None:
        """Batches go out under the id that has the turn."""
        rules = self.rules
        if rules.filling.phase in (Phase.OPEN, Phase.SEALED):
            producer = self._producers[rules.turn]
            self.sink.use(producer.identity, producer.transactional_id)
        self.sink.poke()

    async def _until_changed(self, until_ms: int | None) -> None:
        if until_ms is None:
            await self._changed.wait()
            return
        try:
            async with asyncio.timeout(max(0.001, (until_ms - self._steady_ms()) / 1000)):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _carry_out(self, producer: LaneProducer, step: Step) -> None:
        try:
            match step.act:
                case Act.BEGIN_PRODUCER:
                    await self._begin_producer(producer)
                case Act.READ_POSITIONS:
                    here = frozenset(self.pipelines)
                    self._take_positions(await self._keeper.read(), here)
                case Act.END:
                    await self._end(producer)
                case _:
                    await self._within_transaction(producer, step)
        finally:
            producer.task = None
            self._changed.set()

    async def _within_transaction(self, producer: LaneProducer, step: Step) -> None:
        """The steps whose failure dooms the transaction."""
        try:
            match step.act:
                case Act.ADD_PARTITIONS:
                    await self._add(producer, step.partitions)
                case Act.ADD_GROUP:
                    await producer.add_group(self._group_id)
                    producer.rules.group_added()
                case Act.WRITE_POSITIONS:
                    await self._write_positions(producer)
                case Act.FENCE:
                    await self._fence(producer, step.seat)
                case _:
                    raise RuntimeError(f"not a step within a transaction: {step.act}")
        except CLUSTER_FAILURES as error:
            reason = str(error) or type(error).__name__
            log.warning("the transaction is aborted", id=producer.transactional_id, error=reason)
            if isinstance(error, KafkaError) and not error.retriable:
                producer.rules.fenced(self._steady_ms(), reason)
            else:
                producer.rules.doom(reason)

    def _rewind(self, blamed: frozenset[TargetPartition]) -> None:
        reason = self.rules.lost_by
        log.warning(
            "carrying again what was not committed",
            lane=self.name,
            reason=reason,
            partitions=len(self.pipelines),
            blamed=sorted(map(str, blamed)),
        )
        self._stands(f"{reason} ({_some(blamed)})" if blamed else reason)
        self._forget()
        for pipeline in self.pipelines:
            pipeline.rewind()
        self.rules.rewound()
        self.isolated = self._blamed = blamed & {each.target for each in self.pipelines}
        if blamed:
            self._isolate(self, blamed)
        self._ended.set()

    def _forget(self) -> None:
        for producer in self._producers:
            if producer.rules.must_rewind or producer.rules.is_unread:
                self._on_ended(self._age_s(producer), False)
            producer.forget()
        self.sink.reset()
        self._moved.clear()

    async def _begin_producer(self, producer: LaneProducer) -> None:
        try:
            await producer.begin()
        except CLUSTER_FAILURES as error:
            if producer.refusals.is_news(error):
                # Of no help against a target that is away or lets nobody in.
                without = " (delivery: at_least_once does without)" if isinstance(error, KafkaError) else ""
                log.warning(
                    "no producer id from the target yet; nothing is carried under it until there is one"
                    f"{without}",
                    id=producer.transactional_id,
                    error=str(error),
                )
            before = f" (before that: {_some(self._blamed)} did not get through)" if self._blamed else ""
            self._stands(f"no producer id: {error}{before}")
            producer.rules.producer_refused(self._steady_ms(), PRODUCER_PAUSE_MS)
            await self._let_go()
            return
        producer.refusals.over()
        self.sink.is_connected = True
        producer.rules.producer_began()

    async def _let_go(self) -> None:
        """No transactional id can go on: the last transaction has a marker to write to a partition that has
        no leader, or its coordinator is away. Whoever can go on in another lane does."""
        if not self._is_halted or not self.pipelines:
            return
        try:
            view = await self._cluster.metadata(
                sorted({each.target.topic for each in self.pipelines}), max_age_ms=0
            )
        except CLUSTER_FAILURES:
            return  # the whole target is away
        targets = {each.target for each in self.pipelines}
        leaderless = {each for each in targets if view.leader(each.topic, each.partition) is None}
        # The marker may also be kept from a leader that is there and answers nothing.
        blocking = self._blamed | leaderless
        if blocking != targets and self._is_halted:
            self.isolated = blocking or self.isolated or frozenset(targets)
            # What was fetched meanwhile is queued here, and would be left behind.
            self.sink.reset()
            self._moved.clear()
            for pipeline in self.pipelines:
                pipeline.rewind()
            self._isolate(self, blocking)

    def _stands(self, reason: str) -> None:
        """What is to be committed here is not, for this reason."""
        text, now_ms = f"no transaction that holds it is committed: {reason}", self._now_ms()
        for pipeline in self._waiting_pipelines():
            self._standing.failed(pipeline.partition, text, now_ms)

    def _waiting_pipelines(self) -> Iterator[PartitionPipeline]:
        """Those of which something is to be committed."""
        for pipeline in self.pipelines:
            if not _is_settled(pipeline) or _lags(pipeline) or pipeline.partition in self._starts:
                yield pipeline

    @property
    def _is_halted(self) -> bool:
        return all(each.phase is Phase.NO_PRODUCER and each.is_clear for each in self.rules.both)

    def _take_positions(self, positions: Positions, here: Collection[PartitionPipeline]) -> None:
        """The outcome of the last transaction, as the positions topic tells it. `here` were in the lane when
        the reading began: who came since has read newer ones."""
        self._forget()
        for pipeline in self.pipelines:
            if pipeline not in here:
                pipeline.rewind()
                continue
            known = positions.known.get(pipeline.partition)
            pipeline.rewind(known)
            if known is None:
                # Its start was committed before it was carried: somebody has removed it.
                end = max(pipeline.lag.log_end, pipeline.progress.fetch_offset)
                reason = "the positions topic holds no readable position of it any more"
                pipeline.at_gap(GapClass.POSITION_LOST, end, reason, resume_at=end)
        self.rules.positions_read()
        self._ended.set()

    async def _add(self, producer: LaneProducer, partitions: frozenset[TargetPartition]) -> None:
        refused = await producer.add(partitions)
        if refused:
            first = next(iter(refused.values()))
            log.warning("the target refuses partitions", error=str(first))
            for target, error in refused.items():
                self.sink.failures.failed(target, f"the target refuses {target}: {error}", self._now_ms())
            reason = f"the target refuses partitions: {first}"
            producer.rules.doom(reason, refused.keys() - self.own_partitions)
            producer.rules.producer_refused(self._steady_ms(), PRODUCER_PAUSE_MS)
            self._cluster.invalidate()
            return
        producer.rules.partitions_added(partitions)

    def _gather(self, producer: LaneProducer) -> None:
        """What its transaction puts on record."""
        starts = self._new_starts()
        producer.written = self._keeper.gather(self._news(producer), starts.items(), self._now_ms())
        producer.written_starts = list(starts)

    async def _write_positions(self, producer: LaneProducer) -> None:
        base_offsets = await producer.write(producer.written.records, self._now_ms())
        self._fence_offset = base_offsets.get(self._keeper.positions, self._fence_offset) + 1
        producer.rules.positions_written()

    async def _fence(self, producer: LaneProducer, seat: Seat | None) -> None:
        if seat is None:
            raise RuntimeError("a fence without a seat")
        try:
            await producer.fence(self._group_id, seat, self._keeper.positions, self._fence_offset)
        except IllegalGeneration:
            producer.rules.fence_refused(seat.generation)
        except RebalanceInProgress:
            await asyncio.sleep(WRITE_PAUSE_S)
        else:
            producer.rules.fence_passed()

    async def _end(self, producer: LaneProducer) -> None:
        try:
            is_certain = await producer.end()
        except KafkaError as error:
            if not error.retriable:
                log.warning(
                    "nobody knows the outcome of the transaction; reading the positions",
                    id=producer.transactional_id,
                    error=str(error),
                )
                producer.unanswered_ends = 0
                self._stands(f"nobody knows the outcome of the last one: {error}")
                producer.rules.outcome_unknown(str(error))
            else:
                self._end_unanswered(producer, error)
        except CLUSTER_FAILURES as error:
            self._end_unanswered(producer, error)
        else:
            self._committed(producer, is_certain=is_certain and not producer.unanswered_ends)

    def _end_unanswered(self, producer: LaneProducer, error: Exception) -> None:
        if producer.unanswered_ends == 0:
            log.warning(
                "the end of the transaction is not answered", id=producer.transactional_id, error=str(error)
            )
        self._stands(f"its end is not answered: {error}")
        producer.unanswered_ends += 1

    def _committed(self, producer: LaneProducer, *, is_certain: bool) -> None:
        producer.unanswered_ends = 0
        self._on_ended(self._age_s(producer), True)
        self.rules.committed(producer.index, self._steady_ms(), is_certain=is_certain)
        self.isolated = self._blamed = frozenset()
        for pipeline, position in producer.written.moved:
            self._standing.over(pipeline.partition)
            if pipeline in self.pipelines:
                pipeline.position_written(position)
                if _is_settled(pipeline) and not _lags(pipeline):
                    self._moved.discard(pipeline)
        for partition in producer.written_starts:
            if (start := self._starts.pop(partition, None)) is not None and not start[1].done():
                start[1].set_result(None)
        self._forget_who_stands_no_more()
        producer.forget()
        self._ended.set()

    def _forget_who_stands_no_more(self) -> None:
        """Of what was to be committed when it failed nothing may be left: paused, or gone at the source."""
        if told := [partition for partition, _ in self._standing]:
            waiting = {each.partition for each in self._waiting_pipelines()}
            for partition in told:
                if partition not in waiting:
                    self._standing.over(partition)

    def _age_s(self, producer: LaneProducer) -> float:
        return max(0, self._steady_ms() - producer.rules.opened_at_ms) / 1000


def _some(targets: Collection[TargetPartition], most: int = 3) -> str:
    names = sorted(map(str, targets))
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def _lags(pipeline: PartitionPipeline) -> bool:
    """Whether its source is known to have more than was fetched, and that can be."""
    lag = pipeline.lag
    end = lag.log_end if lag.stable_end < 0 else min(lag.log_end, lag.stable_end)
    return pipeline.state is State.RUNNING and end > pipeline.progress.fetch_offset


def _is_settled(pipeline: PartitionPipeline) -> bool:
    """Whether nothing of the partition is in a transaction that may still be open."""
    progress = pipeline.progress
    if pipeline.state in (State.STARTING, State.CLOSED):
        return True
    return progress.is_drained and progress.is_exact and progress.position_to_write() is None
