"""One transactional id of a lane: what it asks of the target's coordinators and leaders, request by request.

Made by `transactional_lane`, two for each lane, which carries out what the rules say with them. Holds the
producer's epoch, the sequence numbers of the mirror's own records, and what its open transaction puts on
record. Raises what the target says (`CLUSTER_FAILURES`); what follows from that is the rules' affair.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Mapping

import structlog

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.group_offsets import CommittedOffset
from millrace.broker.client.raw_produce import ProduceOutcome, init_producer_id, produce
from millrace.broker.client.transactions import (
    Member,
    TransactionalProducer,
    add_group,
    add_partitions,
    commit_offsets_as,
    end_transaction,
    require_transactions,
)
from millrace.broker.errors import (
    DuplicateSequence,
    FatalError,
    KafkaError,
    LeaderNotAvailable,
    UnsupportedVersion,
    error_for_code,
)
from millrace.broker.protocol.records import Record, build_batch
from millrace.mirror.delivery.lane import SEQUENCE_MODULUS, Identity
from millrace.mirror.delivery.positions_keeper import Records, Writing
from millrace.mirror.delivery.sink import LOST_SEQUENCE
from millrace.mirror.delivery.system_records import (
    BATCH_SIZE,
    CLUSTER_FAILURES,
    LASTING,
    NewFailures,
    cut_by_size,
    smaller_limit,
)
from millrace.mirror.delivery.transaction import TRANSACTION_TIMEOUT_MS, LaneTransaction, Seat
from millrace.mirror.topics.routes import SourcePartition, TargetPartition

log = structlog.get_logger("millrace.mirror.delivery.lane_producer")

STEP_TIMEOUT_MS = 5_000
ADD_TIMEOUT_MS = 3_000
ABORT_TIMEOUT_MS = 2_000
PRODUCER_RETRY_MS = 3_000
WRITE_PAUSE_S = 0.05


class LaneProducer:
    """See the module's text. `rules` are those of its transaction."""

    def __init__(
        self, index: int, transactional_id: str, rules: LaneTransaction, cluster: Cluster, purpose: str
    ) -> None:
        self.index = index
        self.transactional_id = transactional_id
        self.rules = rules
        self.written = Writing((), {})
        self.written_starts: list[SourcePartition] = []
        self.unanswered_ends = 0
        self.refusals = NewFailures()
        self.task: asyncio.Task[None] | None = None  # the step that is under way
        self._cluster = cluster
        self._purpose = purpose
        self._producer = TransactionalProducer(transactional_id, -1, -1)
        self._sequences: dict[TargetPartition, int] = {}
        self._limits: dict[str, int] = {}  # of a batch's size, by topic, where one takes less than usual

    @property
    def identity(self) -> Identity:
        return Identity(self._producer.producer_id, self._producer.producer_epoch)

    def forget(self) -> None:
        """The transaction is not committed."""
        self.written, self.written_starts = Writing((), {}), []

    async def begin(self) -> None:
        """InitProducerId: a new epoch, whatever was open is aborted. Raises FatalError when the target does
        not speak what a transaction needs."""
        if self._producer.producer_id < 0:
            await self._require_transactions()
        producer_id, epoch = await init_producer_id(
            self._cluster,
            self.transactional_id,
            timeout_ms=TRANSACTION_TIMEOUT_MS,
            retry_ms=PRODUCER_RETRY_MS,
        )
        self._producer = TransactionalProducer(self.transactional_id, producer_id, epoch)
        self._sequences.clear()

    async def _require_transactions(self) -> None:
        try:
            await require_transactions(self._cluster)
        except UnsupportedVersion as error:
            raise FatalError(
                f"target {self._cluster.name} lacks what delivery: exactly_once needs ({error}); "
                "set delivery: at_least_once in the mirror's config"
            ) from None

    async def add(self, partitions: Collection[TargetPartition]) -> dict[TargetPartition, KafkaError]:
        """The partitions that the target refuses; when there are any, none was added."""
        refused = await add_partitions(
            self._cluster,
            self._producer,
            [(each.topic, each.partition) for each in sorted(partitions)],
            timeout_ms=ADD_TIMEOUT_MS,
            purpose=self._purpose,
        )
        return {TargetPartition(*each): error for each, error in refused.items()}

    async def add_group(self, group_id: str) -> None:
        await add_group(
            self._cluster, self._producer, group_id, timeout_ms=STEP_TIMEOUT_MS, purpose=self._purpose
        )

    async def fence(self, group_id: str, seat: Seat, positions: TargetPartition, offset: int) -> None:
        """A commit as the seat's member; refused to whoever is none any more."""
        await commit_offsets_as(
            self._cluster,
            self._producer,
            group_id,
            Member(seat.member_id, seat.generation),
            {(positions.topic, positions.partition): CommittedOffset(offset)},
            timeout_ms=STEP_TIMEOUT_MS,
            purpose=self._purpose,
        )

    async def end(self) -> bool:
        """Commits. Whether every request for that was answered: see `transactions.end_transaction`."""
        return await end_transaction(
            self._cluster, self._producer, commit=True, timeout_ms=STEP_TIMEOUT_MS, purpose=self._purpose
        )

    async def abort(self) -> None:
        """Aborts what may be open, as far as the target answers, and as long as nobody else has the id. By a
        new epoch, as batches may still be on their way: after a marker of their own epoch a leader that does
        not ask the coordinator (Apache Kafka before 3.6) would take them for another transaction."""
        if not self.rules.is_open or self._producer.producer_id < 0:
            return
        try:
            await init_producer_id(
                self._cluster,
                self.transactional_id,
                timeout_ms=TRANSACTION_TIMEOUT_MS,
                retry_ms=ABORT_TIMEOUT_MS,
                holder=(self._producer.producer_id, self._producer.producer_epoch),
            )
        except CLUSTER_FAILURES as error:
            log.debug("not aborted here; others have, or will", id=self.transactional_id, error=str(error))

    async def write(
        self, records: Mapping[TargetPartition, Records], now_ms: int
    ) -> dict[TargetPartition, int]:
        """The mirror's own records in the transaction, in batches cut by size; the base offsets of the last
        ones. Repeated with the same sequences until all are acknowledged. When none is for STEP_TIMEOUT_MS,
        however many have been, raises what a partition last said (TimeoutError: none said anything); a batch
        that is too large raises too, and the next transaction cuts smaller ones (FatalError: it is one
        record)."""
        left = {target: cut_by_size(rows, self._limit(target)) for target, rows in records.items() if rows}
        going = {target: self._build(target, batches[0], now_ms) for target, batches in left.items()}
        base_offsets: dict[TargetPartition, int] = {}
        refusals: dict[TargetPartition, Exception] = {}
        loop, limit_s = asyncio.get_running_loop(), STEP_TIMEOUT_MS / 1000
        try:
            async with asyncio.timeout(limit_s) as limit:
                while going:
                    waiting = set(going)
                    for target, outcome in (await self._attempt(going, refusals)).items():
                        code = outcome.error_code
                        if code and code != DuplicateSequence.code:
                            refusals[target] = self._refused(target, left[target][0], outcome)
                            continue
                        base_offsets[target] = outcome.base_offset
                        limit.reschedule(loop.time() + limit_s)
                        waiting.discard(target)
                        refusals.pop(target, None)
                        del left[target][0], going[target]
                        if left[target]:
                            going[target] = self._build(target, left[target][0], now_ms)
                    if waiting:
                        await asyncio.sleep(WRITE_PAUSE_S * random.uniform(0.5, 1.0))
        except TimeoutError:
            if refusals:
                raise next(iter(refusals.values())) from None
            silent = ", ".join(map(str, sorted(going)))
            raise TimeoutError(f"no answer for {limit_s:g} s from the leader of {silent}") from None
        return base_offsets

    def _limit(self, target: TargetPartition) -> int:
        return self._limits.get(target.topic, BATCH_SIZE)

    def _build(self, target: TargetPartition, rows: Records, now_ms: int) -> bytearray:
        sequence = self._sequences.get(target, 0)
        self._sequences[target] = (sequence + len(rows)) % SEQUENCE_MODULUS
        return build_batch(
            [Record(key, value, timestamp_ms=now_ms) for key, value in rows],
            producer_id=self._producer.producer_id,
            producer_epoch=self._producer.producer_epoch,
            base_sequence=sequence,
            transactional=True,
        )

    def _refused(self, target: TargetPartition, rows: Records, outcome: ProduceOutcome) -> KafkaError:
        """Raises what ends the transaction; returns what it is where the same batch goes out again."""
        code = outcome.error_code
        error = error_for_code(code, f"{target}: {outcome.error_message or error_for_code(code)}")
        if isinstance(error, LASTING):
            self._limits[target.topic] = smaller_limit(self._cluster.name, target.topic, rows, error)
        if code in LOST_SEQUENCE or not error.retriable:
            raise error
        log.debug("writing again", to=str(target), error=str(error))
        return error

    async def _attempt(
        self, batches: Mapping[TargetPartition, bytearray], refusals: dict[TargetPartition, Exception]
    ) -> dict[TargetPartition, ProduceOutcome]:
        """One produce request to every leader; what was answered. Of others, `refusals` has why not."""
        view = await self._cluster.metadata(sorted({target.topic for target in batches}))
        groups = view.by_leader((target.topic, target.partition) for target in batches)
        if leaderless := groups.pop(None, None):
            self._cluster.invalidate()
            for key in leaderless:
                target = TargetPartition(*key)
                refusals[target] = LeaderNotAvailable(f"{target}: it has no leader")
        answers = await asyncio.gather(
            *(
                produce(
                    self._cluster,
                    node,
                    {key: batches[TargetPartition(*key)] for key in keys},
                    timeout_ms=STEP_TIMEOUT_MS,
                    transactional_id=self.transactional_id,
                    purpose=self._purpose,
                )
                for node, keys in groups.items()
                if node is not None
            ),
            return_exceptions=True,
        )
        outcomes: dict[TargetPartition, ProduceOutcome] = {}
        for keys, answer in zip(groups.values(), answers, strict=True):
            if isinstance(answer, dict):
                outcomes |= {TargetPartition(*key): outcome for key, outcome in answer.items()}
            elif isinstance(answer, CLUSTER_FAILURES):
                refusals |= dict.fromkeys((TargetPartition(*key) for key in keys), answer)
            else:
                raise answer
        return outcomes
