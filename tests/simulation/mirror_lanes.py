"""Transactional lanes of an exactly-once mirror over a model target: the real rules, without sockets.

Used by `mirror_workers`. The rules under test are `alternation.Alternation` with its two
`transaction.LaneTransaction`s, `lane.TargetLane` and `progress.PartitionProgress`; what the real shell does
with sockets and tasks is here a list of calls under way, which the scheduler lets arrive, get lost, or arrive
late.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from millrace.mirror.delivery.alternation import Alternation
from millrace.mirror.delivery.lane import Identity, Item, Outcome, TargetLane
from millrace.mirror.delivery.progress import PartitionProgress, Span
from millrace.mirror.delivery.transaction import CLOSING, Act, LaneTransaction, Phase, Seat, Step
from millrace.mirror.topics.routes import SourcePartition, TargetPartition
from tests.simulation.mirror_model import GROUP, POSITIONS, Record

if TYPE_CHECKING:
    from tests.simulation.mirror_workers import Worker

NOBODY = Identity(-1, -1)


@dataclass(eq=False)
class Pipeline:
    partition: SourcePartition
    target: TargetPartition
    progress: PartitionProgress
    lane: Lane
    is_draining: bool = False

    @property
    def is_settled(self) -> bool:
        progress = self.progress
        return progress.is_drained and progress.is_exact and progress.position_to_write() is None


class Batch(Item):
    def __init__(self, pipeline: Pipeline, span: Span, offsets: list[int], record_size: int) -> None:
        super().__init__(len(offsets), len(offsets) * record_size)
        self.pipeline = pipeline
        self.span = span
        self.offsets = offsets


def transactional_ids(lane: str) -> tuple[str, str]:
    return lane, f"{lane}.b"


@dataclass(eq=False)
class Producer:
    """One of a lane's two transactional ids (`lane_producer.LaneProducer`)."""

    index: int
    name: str
    rules: LaneTransaction
    identity: Identity = NOBODY
    position_sequence: int = 0
    writing: dict[SourcePartition, int] = field(default_factory=dict)
    is_busy: bool = False
    was_asked: bool = False


class Lane:
    """A transactional lane (`transactional_lane.TransactionalLane`) without sockets."""

    def __init__(self, worker: Worker, name: str) -> None:
        self.worker = worker
        self.name = name
        self.rules = Alternation(position_interval_ms=50)
        for each in self.rules.both:
            each.allowance = worker.world.allowance
        self.producers = [
            Producer(index, each, rules)
            for index, (each, rules) in enumerate(zip(transactional_ids(name), self.rules.both, strict=True))
        ]
        self.pipelines: dict[SourcePartition, Pipeline] = {}
        self.rows: dict[TargetPartition, TargetLane[Batch]] = {}
        self.sender: Producer | None = None
        self.identity = NOBODY
        self.era = 0

    # --- transaction.LaneView --------------------------------------------------------------------

    @property
    def seat(self) -> Seat | None:
        worker = self.worker
        return Seat(worker.member, worker.generation) if worker.member else None

    @property
    def waiting(self) -> list[TargetPartition]:
        return [target for target, row in self.rows.items() if len(row)]

    @property
    def own_partitions(self) -> frozenset[TargetPartition]:
        return frozenset({POSITIONS})

    @property
    def is_settled(self) -> bool:
        return not any(row.in_flight or row.is_unsettled for row in self.rows.values())

    @property
    def is_exact(self) -> bool:
        return all(each.progress.is_exact for each in self.pipelines.values())

    @property
    def more_is_coming(self) -> bool:
        return self.worker.world.random.random() < 0.3

    @property
    def has_news(self) -> bool:
        return bool(self.news())

    def news(self, asker: Producer | None = None) -> dict[SourcePartition, int]:
        """Positions that are neither on record nor about to be (by another than `asker`)."""
        held: dict[SourcePartition, int] = {}
        for producer in self.producers:
            if producer is not asker and producer.rules.phase in CLOSING:
                held |= producer.writing
        return {
            partition: position
            for partition, each in self.pipelines.items()
            if (position := each.progress.position_to_write()) is not None and held.get(partition) != position
        }

    @property
    def is_urgent(self) -> bool:
        return any(each.is_draining for each in self.pipelines.values())

    def failing(self) -> frozenset[TargetPartition]:
        return frozenset(target for target in self.waiting if self.rows[target].is_failing)

    def holding_up(self) -> frozenset[TargetPartition]:
        inexact = {each.target for each in self.pipelines.values() if not each.progress.is_exact}
        return inexact | {target for target, row in self.rows.items() if row.in_flight or row.is_unsettled}

    # --- batches ---------------------------------------------------------------------------------

    def fetch(self, pipeline: Pipeline) -> None:
        world, progress = self.worker.world, pipeline.progress
        first, end = progress.fetch_offset, world.ends[pipeline.partition]
        if first >= end or pipeline.is_draining or progress.is_blocked:
            return
        control = world.control[pipeline.partition]
        if first in control:
            progress.fetched(first + 1, 0)
            return
        following = min(end, first + world.random.randint(1, 8 if world.merges else 3))
        if not world.merges:
            following = min([at for at in control if at > first] + [following])
        offsets = [at for at in range(first, following) if at not in control]
        span = progress.fetched(following, 1, len(offsets))
        row = self.rows.get(pipeline.target)
        if row is None:
            row = self.rows[pipeline.target] = TargetLane(self.identity)
            row.needs_identity = self.identity.producer_id < 0
        row.enqueue(Batch(pipeline, span, offsets, world.record_size))

    def send(self, target: TargetPartition) -> None:
        row, world = self.rows[target], self.worker.world
        if not self.rules.filling.lets(target) or self.sender is None:
            return
        batch = row.next_to_send(world.now_ms, only_again=self.rules.filling.only_again)
        if batch is None:
            return
        self.rules.filling.sent(batch.size, world.now_ms)
        era, sequence = self.era, batch.base_sequence
        records = [(batch.pipeline.partition, offset) for offset in batch.offsets]
        name, epoch = self.sender.name, self.identity.producer_epoch
        self.worker.call(
            "produce",
            lambda: world.target.produce(name, epoch, target, sequence, records),
            lambda answer: self.produced(era, target, batch, answer),
            records,
        )

    def produced(self, era: int, target: TargetPartition, batch: Batch, answer: Any) -> None:
        if era != self.era:
            return
        result, refusal = answer or (Outcome.RETRY, None)
        outcome = Outcome.OUT_OF_ORDER if refusal else result
        row = self.rows[target]
        if row.answered(batch, outcome, self.worker.world.now_ms, on_refused=self.refused) is (
            Outcome.ACKNOWLEDGED
        ):
            batch.pipeline.progress.acknowledged(batch.span)
        if row.needs_identity:
            self.rules.filling.doom("the sequence is lost")

    def refused(self, batch: Batch) -> None:
        """Halves go instead of a batch; a record that is refused by itself is a gap, which is skipped."""
        progress, half = batch.pipeline.progress, len(batch.offsets) // 2
        if half:
            parts = [batch.offsets[:half], batch.offsets[half:]]
            spans = progress.split(batch.span, [part[-1] + 1 for part in parts])
            size = self.worker.world.record_size
            self.rows[batch.pipeline.target].replace(
                batch,
                [Batch(batch.pipeline, span, part, size) for part, span in zip(parts, spans, strict=True)],
            )
            return
        progress.failed(batch.span)
        had_seat = self.worker.member in self.worker.world.target.members
        self.worker.world.unrecorded.append((self.worker, batch.pipeline, progress, batch, had_seat))

    # --- steps -----------------------------------------------------------------------------------

    def step(self) -> None:
        for producer in self.producers:
            if not producer.is_busy:
                step = self.rules.next_step(producer.index, self, self.worker.world.now_ms)
                if step.act is not Act.WAIT:
                    getattr(self, f"_{step.act.value}")(producer, step)
        if self.rules.filling.phase in (Phase.OPEN, Phase.SEALED):
            self.use(self.producers[self.rules.turn])

    def use(self, producer: Producer) -> None:
        if self.identity != producer.identity:
            self.sender, self.identity = producer, producer.identity
            for row in self.rows.values():
                row.switch(self.identity)

    def _ask(
        self, producer: Producer, execute: Callable[[], Any], take: Callable[[Any, str | None], None]
    ) -> None:
        """`take(result, refusal)`; the refusal of a lost request is "lost"."""
        producer.is_busy = True

        def answered(answer: Any) -> None:
            producer.is_busy = False
            take(*(answer or (None, "lost")))

        self.worker.call(producer.rules.phase.value, execute, answered)

    def _rewind(self, _producer: Producer, step: Step) -> None:
        self.forget()
        for pipeline in self.pipelines.values():
            self.rewind(pipeline, pipeline.progress.committed[0])
        self.rules.rewound()
        self.worker.isolate(self, step.blamed)

    def forget(self) -> None:
        self.era += 1
        self.rows.clear()
        self.sender, self.identity = None, NOBODY
        for producer in self.producers:
            producer.writing = {}

    @staticmethod
    def rewind(pipeline: Pipeline, position: int) -> None:
        pipeline.progress.close()
        pipeline.progress = PartitionProgress(position, transactional=True)

    def _begin_producer(self, producer: Producer, _step: Step) -> None:
        world = self.worker.world

        def began(result: Any, refusal: str | None) -> None:
            if refusal:
                producer.rules.producer_refused(world.now_ms, 5)
                return
            producer.identity, producer.position_sequence = Identity(*result), 0
            producer.was_asked = False
            producer.rules.producer_began()

        self._ask(producer, lambda: world.target.init(producer.name), began)

    def _read_positions(self, producer: Producer, _step: Step) -> None:
        producer.is_busy = True

        def read(positions: Mapping[SourcePartition, int]) -> None:
            producer.is_busy = False
            self.forget()
            for pipeline in self.pipelines.values():
                self.rewind(pipeline, positions.get(pipeline.partition, 0))
            self.rules.positions_read()

        self.worker.read_positions(read)

    def _add_partitions(self, producer: Producer, step: Step) -> None:
        target, name, epoch = self.worker.world.target, producer.name, producer.identity.producer_epoch

        def added(_: Any, refusal: str | None) -> None:
            self._within(producer, refusal, lambda: producer.rules.partitions_added(step.partitions))

        self._ask(producer, lambda: target.add(name, epoch, step.partitions), added)

    def _add_group(self, producer: Producer, _step: Step) -> None:
        target, name, epoch = self.worker.world.target, producer.name, producer.identity.producer_epoch
        self._ask(
            producer,
            lambda: target.add(name, epoch, [GROUP]),
            lambda _, refusal: self._within(producer, refusal, producer.rules.group_added),
        )

    def _within(self, producer: Producer, refusal: str | None, done: Callable[[], None]) -> None:
        if refusal is None:
            done()
        elif refusal in ("concurrent", "lost"):
            if self.worker.world.random.random() < 0.1:
                producer.rules.doom(refusal)
        else:
            producer.rules.fenced(self.worker.world.now_ms, refusal)

    def _write_positions(self, producer: Producer, _step: Step) -> None:
        producer.writing = self.news(producer)
        self._produce_positions(producer, list(producer.writing.items()), producer.position_sequence)
        producer.position_sequence += len(producer.writing)

    def _produce_positions(self, producer: Producer, records: list[Record], sequence: int) -> None:
        rules = producer.rules
        if not records:
            rules.positions_written()
            return
        target, name, epoch = self.worker.world.target, producer.name, producer.identity.producer_epoch

        def produced(result: Any, refusal: str | None) -> None:
            if refusal == "lost" and rules.phase is Phase.WRITING:
                # The same sequence, until it is acknowledged.
                self._produce_positions(producer, records, sequence)
            elif refusal or result is not Outcome.ACKNOWLEDGED:
                rules.fenced(self.worker.world.now_ms, refusal or "sequence")
            else:
                rules.positions_written()

        self._ask(producer, lambda: target.produce(name, epoch, POSITIONS, sequence, records), produced)

    def _fence(self, producer: Producer, step: Step) -> None:
        target, name, epoch = self.worker.world.target, producer.name, producer.identity.producer_epoch
        seat = step.seat
        assert seat is not None

        def fenced(_: Any, refusal: str | None) -> None:
            if refusal == "generation":
                producer.rules.fence_refused(seat.generation)
            else:
                self._within(producer, refusal, producer.rules.fence_passed)

        self._ask(producer, lambda: target.fence(name, epoch, seat.member_id, seat.generation), fenced)

    def _end(self, producer: Producer, _step: Step) -> None:
        target, name, epoch = self.worker.world.target, producer.name, producer.identity.producer_epoch

        def ended(_: Any, refusal: str | None) -> None:
            if refusal == "lost":
                producer.was_asked = True
            elif refusal in ("fenced", "invalid"):
                producer.rules.outcome_unknown(refusal)
            elif refusal is None:
                now_ms = self.worker.world.now_ms
                self.rules.committed(producer.index, now_ms, is_certain=not producer.was_asked)
                for partition, position in producer.writing.items():
                    if (pipeline := self.pipelines.get(partition)) is not None:
                        pipeline.progress.written(position)
                producer.writing = {}

        self._ask(producer, lambda: target.end(name, epoch, commit=True), ended)

    def remove(self, pipeline: Pipeline) -> None:
        del self.pipelines[pipeline.partition]
        if self.rules.holds_records and not pipeline.is_settled:
            self.rules.doom_all("it leaves with records that are not committed")
        row = self.rows.get(pipeline.target)
        if row is not None:
            row.withdraw(lambda batch: batch.pipeline is pipeline)
        pipeline.progress.close()
