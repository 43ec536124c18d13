"""A stage for transactional lanes: the real lane, its sink, pipelines and positions, over a scripted target.

`Target` stands for the target cluster: its transaction coordinators and its partitions' leaders, as far as a
lane asks them. It keeps what was written, and by which transaction, so that a test reads what a reader of
committed records would. A test may hold back requests of one kind (`hold`): they take effect, and are
answered, when it lets them; a leader may be `silent`. `Stage` is one lane over it, and stands for the worker
and the lane's sources; `carry` stands for sources that never end. Time is the event loop's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Self
from uuid import UUID

import pytest

from millrace.broker.client.raw_produce import ProduceOutcome
from millrace.broker.client.transactions import TransactionalProducer
from millrace.broker.errors import (
    ConcurrentTransactions,
    CoordinatorNotAvailable,
    InvalidProducerEpoch,
    NetworkException,
    ProducerFenced,
    RecordTooLarge,
)
from millrace.broker.protocol.batch import iterate_batches
from millrace.broker.protocol.mirror_positions import Position
from millrace.broker.protocol.records import Record, read_records
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.mirror.delivery import lane_producer, sink
from millrace.mirror.delivery.checkpoints import Positions, encode_records
from millrace.mirror.delivery.positions_keeper import PositionsKeeper
from millrace.mirror.delivery.system_records import SystemRecords
from millrace.mirror.delivery.transaction import Phase, Seat
from millrace.mirror.delivery.transactional_lane import TransactionalLane
from millrace.mirror.gaps.gaps import GapClass
from millrace.mirror.offsets.offset_map import decode_chunk, decode_key, decode_runs
from millrace.mirror.pipeline import PartitionPipeline, State
from millrace.mirror.topics.routes import SourcePartition, TargetPartition
from tests.unit.mirror.pipeline_stage import ORIGIN, Around, answer, at, batch, pipeline_of
from tests.waiting import patience
from tests.waiting import until_async as until

MIRROR = "m"
INTERVAL_MS = 50


@dataclass(eq=False)
class Transaction:
    """What was open under a transactional id at some time."""

    partitions: set[TargetPartition]
    is_committed: bool | None = None  # None: not decided


class Target:
    """See the module's text. Takes the place of the client's requests where the lane makes them."""

    name = "target"

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.away: set[str] = set()  # ids whose coordinator does not answer
        self.refuses_ends = False  # the coordinators have aborted by themselves what a lane wants to commit
        self.leaders: dict[TargetPartition, int] = {}  # of those that node 1 does not lead
        self.silent: set[int] = set()  # nodes that take requests and markers, and answer nothing
        self.script: list[
            str
        ] = []  # what becomes of the next batches of data: lost (taken, not answered), refused
        # Written to, but not part of the writer's transaction, or when that was over.
        self.strays: list[TargetPartition] = []
        self.own_limit = 1 << 20  # the largest batch of the mirror's own records
        self.data_limit = 1 << 20  # and of data
        self.own_refusal = 0  # the code by which the mirror's own records are refused
        self.own_batches: list[tuple[int, int]] = []  # of positions, as taken: sequence and count
        self.read_count = 0
        self.committed_count = 0
        self._transactions: dict[str, Transaction] = {}
        self._epochs: dict[str, int] = {}
        self._marked: dict[str, int] = {}  # the epoch that the leaders have seen in a marker
        self._log: dict[TargetPartition, list[tuple[Transaction, Record]]] = {}
        self._held: dict[str, asyncio.Event] = {}
        self._config: Any = SimpleNamespace(name=MIRROR, target=SimpleNamespace(replication_factor=1))
        patch.setattr(sink, "produce", Target.produce)
        patch.setattr(lane_producer, "produce", Target.produce)
        patch.setattr(lane_producer, "init_producer_id", Target.begin)
        patch.setattr(lane_producer, "require_transactions", Target.metadata)
        patch.setattr(lane_producer, "add_partitions", Target.add)
        patch.setattr(lane_producer, "add_group", Target.metadata)
        patch.setattr(lane_producer, "commit_offsets_as", Target.metadata)
        patch.setattr(lane_producer, "end_transaction", Target.end)

    def keeper(self) -> PositionsKeeper:
        return Keeper(self._config, self)

    def hold(self, what: str) -> asyncio.Event:
        """Holds back every `end`, `produce`, `write` (of the mirror's own records) or `read` (of positions)
        until the event is set."""
        event = self._held[what] = asyncio.Event()
        return event

    async def _let(self, what: str) -> None:
        if (event := self._held.get(what)) is not None:
            await event.wait()

    # --- what a test looks at --------------------------------------------------------------------

    @property
    def is_decided(self) -> bool:
        return all(each.is_committed is not None for each in self._transactions.values())

    def positions(self) -> dict[SourcePartition, Position]:
        return self._positions().known

    def carried(self, partition: TargetPartition) -> list[bytes | None]:
        """The values that a reader of committed records sees."""
        return [record.value for record in self._committed(partition)]

    def mapped(self, partition: SourcePartition) -> list[tuple[UUID, int, int, int]]:
        """The runs of its offset map: of which log, the first offset, the end, the target's offset."""
        found = []
        for record in self._committed(self.keeper().map_of(partition)):
            key = decode_key(record.key)
            if key is not None and key.partition == partition and record.value is not None:
                chunk = decode_chunk(key, record.value)
                runs = decode_runs(chunk.body, chunk.from_offset, chunk.head.base)
                found += [(chunk.head.topic_id, *run) for run in runs]
        return found

    def committed_by_another(self, partition: SourcePartition, position: Position) -> None:
        """Another worker puts a position on record."""
        other = Transaction({self.keeper().positions}, is_committed=True)
        rows = self._log.setdefault(self.keeper().positions, [])
        rows += [(other, Record(key, value)) for key, value in encode_records([(partition, position)])]

    def _positions(self) -> Positions:
        positions = Positions()
        for record in self._committed(self.keeper().positions):
            positions.apply(record.key, record.value)
        return positions

    def _committed(self, partition: TargetPartition) -> Iterable[Record]:
        return [record for by, record in self._log.get(partition, ()) if by.is_committed]

    def _meets_silence(self, transaction: Transaction) -> bool:
        return any(self.leader(*each) in self.silent for each in transaction.partitions)

    # --- what a lane asks ------------------------------------------------------------------------

    async def metadata(self, *_: object, **__: object) -> Target:
        return self

    def leader(self, topic: str, partition: int) -> int:
        return self.leaders.get(TargetPartition(topic, partition), 1)

    def by_leader(self, partitions: Iterable[TopicPartition]) -> dict[int | None, list[TopicPartition]]:
        groups: dict[int | None, list[TopicPartition]] = {}
        for each in partitions:
            groups.setdefault(self.leader(*each), []).append(each)
        return groups

    def invalidate(self) -> None: ...

    def close_purpose(self, _purpose: str) -> None: ...

    async def begin(
        self, transactional_id: str, *, holder: tuple[int, int] | None = None, **_: object
    ) -> tuple[int, int]:
        if transactional_id in self.away:
            raise CoordinatorNotAvailable("away")
        if holder is not None and holder[1] != self._epochs.get(transactional_id):
            raise ProducerFenced("another has the id")
        left = self._transactions.get(transactional_id)
        if left is not None and not left.is_committed and self._meets_silence(left):
            raise ConcurrentTransactions("its markers are not written yet")
        if left is not None and left.is_committed is None:
            left.is_committed = False
            self._marked[transactional_id] = self._epochs[transactional_id] + 1
        epoch = self._epochs[transactional_id] = self._epochs.get(transactional_id, -1) + 1
        return 100 + sorted(self._epochs).index(transactional_id), epoch

    async def add(
        self, producer: TransactionalProducer, partitions: Collection[TopicPartition], **_: object
    ) -> dict[TopicPartition, Exception]:
        name = producer.transactional_id
        if (current := self._transactions.get(name)) is None or current.is_committed is not None:
            current = self._transactions[name] = Transaction(set())
        current.partitions |= {TargetPartition(*each) for each in partitions}
        return {}

    async def end(self, producer: TransactionalProducer, *, commit: bool, **_: object) -> bool:
        await self._let("end")
        current = self._transactions[producer.transactional_id]
        current.is_committed = commit and not self.refuses_ends
        if commit and self.refuses_ends:
            raise InvalidProducerEpoch("aborted already")
        self.committed_count += commit
        return True

    async def produce(
        self, node: int, batches: Mapping[TopicPartition, Any], *, transactional_id: str, **_: object
    ) -> dict[TopicPartition, ProduceOutcome]:
        if node in self.silent:
            await asyncio.Event().wait()
        is_own = any(topic.startswith("millrace.") for topic, _ in batches)
        await self._let("write" if is_own else "produce")
        current = self._transactions[transactional_id]
        outcomes = {}
        fate = self.script.pop(0) if self.script and not is_own else ""
        if is_own and self.own_refusal:
            return {key: ProduceOutcome(self.own_refusal) for key in batches}
        if fate == "refused":
            return {key: ProduceOutcome(RecordTooLarge.code) for key in batches}
        for key, sent in batches.items():
            partition = TargetPartition(*key)
            if len(sent) > (self.own_limit if is_own else self.data_limit):
                outcomes[key] = ProduceOutcome(RecordTooLarge.code)
                continue
            if partition == self.keeper().positions:
                header = next(iterate_batches(sent))[1]
                self.own_batches.append((header.base_sequence, header.record_count))
            # Leaders before Apache Kafka 3.6 ask nobody: what is of no older epoch than they know is taken.
            if next(iterate_batches(sent))[1].producer_epoch < self._marked.get(transactional_id, 0):
                outcomes[key] = ProduceOutcome(InvalidProducerEpoch.code)
                continue
            if partition not in current.partitions or current.is_committed is not None:
                self.strays.append(partition)
            rows = self._log.setdefault(partition, [])
            outcomes[key] = ProduceOutcome(0, len(rows))
            rows += [(current, record) for record in read_records(sent)]
        if fate == "lost":
            raise NetworkException("the connection is lost")
        return outcomes

    async def read_positions(self) -> Positions:
        """What was committed when the reading began."""
        positions = self._positions()
        self.read_count += 1
        await self._let("read")
        return positions


class Keeper(PositionsKeeper):
    """The real one, but for the client that reads a topic to its end."""

    def __init__(self, config: Any, target: Any) -> None:
        super().__init__(config, target, SystemRecords(target, now_ms, 1))
        self._stand_in: Target = target

    async def read(self) -> Positions:
        return await self._stand_in.read_positions()


class Stage:
    """One lane that runs as long as the `async with` lasts. Gaps of the classes `skipped` are passed."""

    def __init__(self, patch: pytest.MonkeyPatch, *skipped: GapClass) -> None:
        self.target = Target(patch)
        self.seat = Seat("member", 1)
        self.keeper = self.target.keeper()
        cluster: Any = self.target
        self.lane = TransactionalLane(
            ("m.0", "m.0.b"),
            cluster,
            self.keeper,
            "g",
            lambda: self.seat,
            now_ms,
            INTERVAL_MS,
            isolate=lambda *_: None,  # there are no other lanes
            on_ended=lambda *_: None,
            steady_ms=loop_ms,
        )
        self.around = Around(*skipped)
        self._running: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._running = asyncio.create_task(self.lane.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._running is None:
            return
        self._running.cancel()
        await asyncio.wait([self._running])
        if not self._running.cancelled():
            self._running.result()

    def joins(self, partition: SourcePartition, target: TargetPartition) -> PartitionPipeline:
        """It is assigned; `ready` follows."""
        pipeline = pipeline_of(partition, target, self.lane.sink, self.around)
        self.lane.add(pipeline)
        return pipeline

    def carries(self, partition: SourcePartition, target: TargetPartition) -> PartitionPipeline:
        """It is assigned, and begins at the start of its log."""
        pipeline = self.joins(partition, target)
        pipeline.ready(at(0))
        return pipeline

    def leaves(self, pipeline: PartitionPipeline) -> None:
        self.lane.remove(pipeline)
        pipeline.close()

    async def reaches(self, phase: Phase) -> None:
        """Returns when one of the two ids is there."""
        await until(lambda: any(each.phase is phase for each in self.lane.rules.both))

    async def rest(self) -> None:
        """Until everything has come as far as it can without the requests that are held back."""
        for _ in range(300):
            await asyncio.sleep(0)

    async def fetches(self, pipeline: PartitionPipeline, batch: bytearray, end: int) -> None:
        """The source's answer, as soon as the pipeline asks."""
        await until(lambda: pipeline.state is State.RUNNING)
        pipeline.accept(answer(batch, end=end))

    async def settled(self, *pipelines: PartitionPipeline) -> None:
        """Until all that was carried is committed, as far as the lane knows, and nothing is open."""
        async with asyncio.timeout(patience()):
            await self.lane.settle(pipelines)
        await until(lambda: self.target.is_decided)


def position(offset: int) -> Position:
    return Position(offset, ORIGIN.cluster_id, ORIGIN.topic_id, -1, 0)


def now_ms() -> int:
    return loop_ms()


def loop_ms() -> int:
    return int(asyncio.get_running_loop().time() * 1000)


async def carry(pipelines: Callable[[], Iterable[PartitionPipeline]], every_s: float) -> None:
    """A record for each that has nothing under way, for ever; more is known to come."""
    while True:
        for pipeline in pipelines():
            if pipeline.state is State.RUNNING and pipeline.progress.outstanding_size == 0:
                offset = pipeline.progress.fetch_offset
                pipeline.accept(answer(batch(offset, [100]), end=offset + 1_000))
        await asyncio.sleep(every_s)
