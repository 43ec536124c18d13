"""Transactional producers as stream applications have them: read an input, write its output, commit both.

The inputs of a stream are the numbers from 0 on; how far it has come is the offset of its group, committed in
the transaction of the outputs. A `Stream` begins ever new producers under one transactional id: some follow
one that was killed, some take the place of one that goes on and does not know (a zombie).
"""

from __future__ import annotations

import datetime

from kio.schema.errors import ErrorCode

from millrace.broker.errors import NetworkException
from millrace.broker.groups.coordinator import GroupCoordinator
from millrace.broker.groups.offsets import CommittedOffset
from millrace.broker.protocol.system_topics import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from millrace.broker.server.handlers import (
    add_offsets_to_txn,
    add_partitions_to_txn,
    end_txn,
    init_producer_id,
    txn_offset_commit,
)
from millrace.broker.transactions.values import ProducerIdentity
from tests.simulation.cluster.broker import Broker
from tests.simulation.cluster.connections import call
from tests.simulation.cluster.coordinators import DATA_TOPIC, Topics
from tests.simulation.cluster.exactly_once import ExactlyOnce, Key, output
from tests.simulation.cluster.requester import RETRIED, UNREACHED, Requester
from tests.simulation.cluster.truth import Violation
from tests.simulation.cluster.world import Network, World

FENCING = frozenset({ErrorCode.producer_fenced, ErrorCode.invalid_producer_epoch})
INPUT = (DATA_TOPIC, 0)
GIVE_UP_MS = 4_000


class Fenced(Exception):
    """Another producer has taken this one's place."""


class Abortable(Exception):
    """The transaction cannot be committed any more."""


class StreamProducer(Requester):
    """One producer of a stream, from its start until it is killed, fenced or told to stop."""

    def __init__(
        self,
        world: World,
        transactional_id: str,
        life: int,
        network: Network,
        brokers: dict[int, Broker],
        topics: Topics,
        promises: ExactlyOnce,
    ) -> None:
        super().__init__(world, f"{transactional_id}.{life}", network, brokers)
        self.topics = topics
        self.is_stopped = False
        self.is_done = False
        self._id, self._life_number, self._promises = transactional_id, life, promises
        self._group = f"group-{transactional_id}"
        self._coordinator = self.coordinator_number(TRANSACTIONS_TOPIC, transactional_id)
        self._group_coordinator = self.coordinator_number(OFFSETS_TOPIC, self._group)
        self._timeout_ms = world.rng.choice((700, 2_500))
        self._producer = ProducerIdentity()
        self._sequences: dict[int, int] = {}
        self._is_in_doubt = False
        self._count = 0
        self._offset: int | None = None
        self.spawn(self._work())

    async def _work(self) -> None:
        try:
            await self._begin(None)
            while not self.is_stopped:
                await self._transaction()
                await self.pause(1, 80)
        except Fenced:
            self.world.note(f"{self.name} is fenced")
        self.is_done = True

    def kill(self) -> None:
        self.world.note(f"{self.name} is killed")
        self.is_done = True
        self.end()

    # -- one transaction -----------------------------------------------------------------------------

    async def _transaction(self) -> None:
        rng = self.world.rng
        if self._offset is None:
            self._offset = await self._committed_offset()
        self._count += 1
        key: Key = (self._id, self._life_number, self._count)
        outputs: dict[int, list[bytes]] = {}
        next_input = self._offset + rng.randint(1, 4)
        for taken in range(self._offset, next_input):
            outputs.setdefault(rng.randrange(self.topics.data), []).append(output(key, taken))
        is_meant = rng.random() < 0.8
        try:
            await self._write(outputs, next_input)
        except Abortable as error:
            self.world.note(f"{self.name} cannot commit {key}: {error}")
            is_meant = False
        if rng.random() < 0.05:
            await self.pause(500, 3_000)  # for longer than the coordinator may wait
        ended = await self._end(is_meant)
        self.world.note(f"{self.name} {'commits' if is_meant else 'aborts'} {key} up to {next_input}")
        if ended:
            values = [value for each in outputs.values() for value in each]
            self._promises.promise(key, is_meant, values if is_meant else ())
        if is_meant:
            self._offset = next_input
        if self._is_in_doubt:
            await self._begin(self._producer)

    async def _write(self, outputs: dict[int, list[bytes]], next_input: int) -> None:
        """Everything between the beginning of a transaction and its end. Raises Abortable, Fenced."""
        await self._add_partitions(list(outputs))
        for number, values in outputs.items():
            await self._produce(number, values)
        await self._add_offsets()
        await self._commit_offset(next_input)

    async def _add_partitions(self, numbers: list[int]) -> None:
        error = UNREACHED
        while error in RETRIED:
            try:
                answer = await self.serve(
                    self.leader_of(self._coordinator),
                    add_partitions_to_txn,
                    3,
                    v3_and_below_transactional_id=self._id,
                    v3_and_below_producer_id=self._producer.producer_id,
                    v3_and_below_producer_epoch=self._producer.epoch,
                    v3_and_below_topics=[_Topic(DATA_TOPIC, numbers)],
                )
                topic = answer.results_by_topic_v3_and_below[0]
                error = topic.results_by_partition[0].partition_error_code
            except NetworkException:
                error = UNREACHED
            await self._after(error, "AddPartitionsToTxn")

    async def _add_offsets(self) -> None:
        error = UNREACHED
        while error in RETRIED:
            try:
                answer = await self.serve(
                    self.leader_of(self._coordinator),
                    add_offsets_to_txn,
                    3,
                    transactional_id=self._id,
                    producer_id=self._producer.producer_id,
                    producer_epoch=self._producer.epoch,
                    group_id=self._group,
                )
                error = answer.error_code
            except NetworkException:
                error = UNREACHED
            await self._after(error, "AddOffsetsToTxn")

    async def _commit_offset(self, offset: int) -> None:
        error = UNREACHED
        give_up_ms = self.world.now_ms + GIVE_UP_MS
        while error in RETRIED:
            try:
                answer = await self.serve(
                    self.leader_of(self._group_coordinator),
                    txn_offset_commit,
                    3,
                    transactional_id=self._id,
                    producer_id=self._producer.producer_id,
                    producer_epoch=self._producer.epoch,
                    group_id=self._group,
                    member_id="",
                    generation_id=-1,
                    group_instance_id=None,
                    topics=[_OffsetTopic(DATA_TOPIC, offset)],
                )
                error = answer.topics[0].partitions[0].error_code
            except NetworkException:
                error = UNREACHED
            if error in (ErrorCode.invalid_txn_state, ErrorCode.invalid_producer_epoch):
                raise Abortable(f"offset: {error.name}")
            if error in RETRIED and self.world.now_ms > give_up_ms:
                self._is_in_doubt = True
                raise Abortable("the offset was not taken in time")
            await self._after(error, "TxnOffsetCommit")

    async def _after(self, error: ErrorCode, what: str) -> None:
        """Wait before the next try; raise what ends the producer."""
        if error in RETRIED:
            await self.pause()
        elif error in FENCING:
            raise Fenced
        elif error is not ErrorCode.none:
            await self._refused(error, what)

    async def _refused(self, error: ErrorCode, what: str) -> None:
        if self._promises.is_judged:
            raise Violation(f"{self.name} hears {error.name} to {what}")
        raise Fenced  # what it stood on was lost with the power

    async def _produce(self, number: int, values: list[bytes]) -> None:
        """Until it is acknowledged; sometimes it is given up soon, and arrives long after that."""
        rng = self.world.rng
        sequence = self._sequences.get(number, 0)
        self._sequences[number] = sequence + len(values)
        is_hasty = rng.random() < 0.1
        give_up_ms = self.world.now_ms + (0 if is_hasty else GIVE_UP_MS)
        while True:
            try:
                answer = await self.produce(
                    number,
                    self._producer,
                    sequence,
                    values,
                    transactional_id=self._id,
                    timeout_ms=rng.randint(1, 40) if is_hasty else rng.choice((150, 400)),
                    late_ms=rng.choice((0, 80, 300)) if is_hasty else 0,
                )
                error = ErrorCode(answer.error_code)
            except NetworkException:
                error = UNREACHED
            if error is ErrorCode.none:
                return
            if error not in RETRIED or self.world.now_ms >= give_up_ms:
                self._is_in_doubt = True
                raise Abortable(f"produce to {number}: {error.name}")
            await self.pause()

    async def _end(self, committed: bool) -> bool:
        """Until the outcome is known; False when there was nothing to end."""
        while True:
            try:
                answer = await self.serve(
                    self.leader_of(self._coordinator),
                    end_txn,
                    3,
                    transactional_id=self._id,
                    producer_id=self._producer.producer_id,
                    producer_epoch=self._producer.epoch,
                    committed=committed,
                )
                error = answer.error_code
            except NetworkException:
                error = UNREACHED
            if error is ErrorCode.none:
                return True
            if error is ErrorCode.invalid_txn_state and not committed:
                return False
            await self._after(error, "EndTxn")

    # -- before a transaction ------------------------------------------------------------------------

    async def _begin(self, expected: ProducerIdentity | None) -> None:
        former = expected or ProducerIdentity()
        error = UNREACHED
        while error in RETRIED:
            try:
                answer = await self.serve(
                    self.leader_of(self._coordinator),
                    init_producer_id,
                    4,
                    transactional_id=self._id,
                    transaction_timeout=datetime.timedelta(milliseconds=self._timeout_ms),
                    producer_id=former.producer_id,
                    producer_epoch=former.epoch,
                )
                error = answer.error_code
            except NetworkException:
                error = UNREACHED
            if error is ErrorCode.none:
                self._producer = ProducerIdentity(int(answer.producer_id), int(answer.producer_epoch))
                self._sequences.clear()
                self._is_in_doubt = False
                self.world.note(f"{self.name} begins as {self._producer}")
            await self._after(error, "InitProducerId")

    async def _committed_offset(self) -> int:
        """How far the stream has come, once no transaction is about to change that."""
        while True:
            found = await self._fetch_offset()
            if isinstance(found, int):
                return found
            await self.pause()

    async def _fetch_offset(self) -> int | None:
        broker = self.leader_of(self._group_coordinator)
        if broker is None:
            return None

        def work() -> int | None:
            # A coordinator that was replaced and has not heard of it would answer from what it had: as in
            # Apache Kafka, nothing keeps it from that.
            if not self._promises.is_current_leader(broker.id, self._group_coordinator):
                return None
            assert broker.coordinators is not None
            return committed_offset(broker.coordinators.groups, self._group)

        try:
            found: int | None = await call(self.network, self, broker, "control", work, timeout_ms=300)
        except NetworkException:
            return None
        return found


def committed_offset(groups: GroupCoordinator, group: str) -> int | None:
    """The group's stable offset, 0 where there is none; None where it cannot be said now."""
    error, found = groups.fetch_offsets(group, [INPUT], require_stable=True)
    kept = found.get(INPUT)
    if error is not ErrorCode.none or isinstance(kept, ErrorCode):
        return None
    return kept.offset if isinstance(kept, CommittedOffset) else 0


class _Topic:
    """A topic of AddPartitionsToTxn."""

    def __init__(self, name: str, partitions: list[int]) -> None:
        self.name, self.partitions = name, partitions


class _OffsetTopic:
    """A topic of TxnOffsetCommit with one partition; it is its own partition."""

    def __init__(self, name: str, offset: int) -> None:
        self.name, self.partitions = name, [self]
        self.partition_index, self.committed_offset = 0, offset
        self.committed_leader_epoch, self.committed_metadata = -1, ""


class Stream:
    """Ever new producers of one transactional id."""

    def __init__(
        self,
        world: World,
        transactional_id: str,
        network: Network,
        brokers: dict[int, Broker],
        topics: Topics,
        promises: ExactlyOnce,
    ) -> None:
        self.id = transactional_id
        self.group = f"group-{transactional_id}"
        self._world, self._network, self._brokers = world, network, brokers
        self._topics, self._promises = topics, promises
        self._producers: list[StreamProducer] = []
        self._is_stopped = False
        world.after(world.rng.randint(1, 300), self._turn)

    def stop(self) -> None:
        """Every producer ends what it is at."""
        self._is_stopped = True
        for producer in self._producers:
            producer.is_stopped = True

    @property
    def is_done(self) -> bool:
        return all(producer.is_done for producer in self._producers)

    def _turn(self) -> None:
        if self._is_stopped:
            return
        rng = self._world.rng
        current = self._producers[-1] if self._producers else None
        if current is None or current.is_done:
            self._next()
        elif rng.random() < 0.3:
            current.kill()
            self._next()
        elif rng.random() < 0.3:
            self._next()  # the former goes on
        self._world.after(rng.choice((200, 1_000, 3_000)), self._turn)

    def _next(self) -> None:
        life = len(self._producers) + 1
        self._producers.append(
            StreamProducer(
                self._world, self.id, life, self._network, self._brokers, self._topics, self._promises
            )
        )
