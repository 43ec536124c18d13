"""The transaction coordinator: carries out what the state machines of transactional ids decide.

The broker makes one, tells it which partitions of `__transaction_state` it leads (`load`, `unload`), and runs
its clock (`run`, or `check_timeouts`, `expire` with a time of the caller's). The handlers call
`begin_producer`, `add_partitions`, `verify`, `end`, `describe`, `list_transactions`; expected refusals are
error codes, not exceptions. It knows no server and no network: time, ids, the log and the sender of markers
come from outside.

Invariants:

1. A transactional id belongs to one partition of the log; only its leader answers for it, after it has read
   that partition to its end and all in-sync replicas have what it read.
2. A record is appended at the moment it is decided, in the leadership whose records were loaded; its
   outcome is told to the state machine whoever has gone meanwhile, so memory never differs from the log.
   A new epoch of the same leadership (a follower has died) changes nothing: nobody else can have written.
   Where an epoch is missing in between somebody may have, and the partition is loaded anew.
3. Markers carry the leader epoch in which the transactional id's partition was loaded as coordinator epoch:
   leaders refuse those of a coordinator that has been replaced.

Everything runs on one event loop: the only places where other requests come in between are the awaits.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import structlog
from kio.schema.errors import ErrorCode

from millrace.broker.errors import KafkaError, MillraceError, UnreadableRecord
from millrace.broker.protocol.batch import iterate_batches
from millrace.broker.protocol.java_hash import coordinator_partition
from millrace.broker.protocol.records import Record, build_batch, read_records
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.replication.off_loop import Compute, Pauses, at_once, slices
from millrace.broker.transactions.config import TransactionConfig
from millrace.broker.transactions.markers import LeaderOf, Marker, MarkerSender
from millrace.broker.transactions.markers import Write as WriteMarkers
from millrace.broker.transactions.records import decode_key, decode_value, encode_key, encode_value
from millrace.broker.transactions.state import Transaction
from millrace.broker.transactions.values import (
    NO_PRODUCER_ID,
    Answer,
    Completed,
    Decision,
    Forget,
    NeedProducerId,
    ProducerIdentity,
    SendMarkers,
    Ticket,
    TimedOut,
    TransactionDescription,
    TransactionListing,
    TransactionRecord,
    TransactionState,
    Write,
)

RETRY_INTERVAL_MS = 500
"""How soon a record that must be written is written again."""

_FROM_MEMORY = frozenset(
    {
        ErrorCode.none,
        ErrorCode.concurrent_transactions,
        ErrorCode.coordinator_load_in_progress,
        ErrorCode.not_coordinator,
    }
)
"""What a leader may be told of a transaction without asking the log: it lets a batch in (and the log of its
partition is looked at once more then), or has it sent again."""

IDS_AT_ONCE = 100
"""Looked at in one turn of the event loop: should all of them be due, some 5 ms."""

LONGEST_ID = 32_767
"""Bytes of a transactional id that the log's records have room for."""

log = structlog.get_logger(__name__)


class TransactionLog(Protocol):
    """`__transaction_state` as the broker provides it."""

    def partition_count(self) -> int:
        """How many partitions the topic has; what it would be made with while it does not exist."""
        ...

    def epoch(self, partition: int) -> int:
        """The leader epoch in which this broker leads. Raises KafkaError when it does not."""
        ...

    def append_now(self, partition: int, batch: bytes) -> tuple[int, asyncio.Future[None] | None]:
        """Append one batch: its base offset, and what is done once it is committed (None: it is). Raises
        KafkaError when nothing was appended."""
        ...

    async def until_committed(self, partition: int, offset: int) -> None:
        """Wait until everything below `offset` is committed. Raises KafkaError when it cannot be."""
        ...

    def read_all(self, partition: int) -> AsyncIterator[memoryview]:
        """Every batch of the partition, from its start to its end, in order: runs of whole batches."""
        ...


@dataclass(slots=True)
class _OwnedPartition:
    """A partition of the transaction log that this broker leads."""

    epoch: int = -1
    loaded: bool = False
    transactions: dict[str, Transaction] = field(default_factory=dict)


class TransactionCoordinator:
    """All transactional ids whose log partition this broker leads."""

    def __init__(
        self,
        config: TransactionConfig,
        transaction_log: TransactionLog,
        *,
        clock_ms: Callable[[], int],
        take_producer_id: Callable[[], Awaitable[int]],
        leader_of: LeaderOf,
        write_markers: WriteMarkers,
        compute: Compute = at_once,
    ) -> None:
        self._compute = compute
        self.config = config
        self._log = transaction_log
        self._clock_ms = clock_ms
        self._take_producer_id = take_producer_id
        self.markers = MarkerSender(
            leader_of, write_markers, report=self._on_marked, is_wanted=self._is_wanted
        )
        self._partitions: dict[int, _OwnedPartition] = {}
        self._tickets = itertools.count(1)
        self._waiting: dict[Ticket, asyncio.Future[Answer | NeedProducerId]] = {}
        self._under_way: set[asyncio.Task[None]] = set()
        self._unsaved: list[tuple[_OwnedPartition, Transaction]] = []
        self.timed_out_count = 0
        self.committed_count = 0
        self.aborted_count = 0

    # -- life ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Drive timeouts, retries and expiry until cancelled."""
        # How often it looks goes by the loop's steady clock, what it then judges by the time of day: when a
        # transaction began is in the log (as in Apache Kafka).
        steady = asyncio.get_running_loop().time
        timeouts_due = steady() + self.config.abort_check_interval_ms / 1000
        expiry_due = steady() + self.config.expiry_check_interval_ms / 1000
        while True:
            soonest = min(timeouts_due, expiry_due) - steady()
            await asyncio.sleep(min(max(soonest, 0.001), RETRY_INTERVAL_MS / 1000))
            self.retry()
            if steady() >= timeouts_due:
                timeouts_due = steady() + self.config.abort_check_interval_ms / 1000
                await self.check_timeouts(self._clock_ms())
            if steady() >= expiry_due:
                expiry_due = steady() + self.config.expiry_check_interval_ms / 1000
                await self.expire(self._clock_ms())

    async def close(self) -> None:
        """Give up every partition; what was asked for is answered."""
        for partition in list(self._partitions):
            self.unload(partition)
        await self.markers.close()
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)

    async def load(self, partition: int) -> None:
        """Become the coordinator of a partition's ids: read what the log remembers, and end what it had
        decided to end.

        Until this returns its ids answer COORDINATOR_LOAD_IN_PROGRESS, also after a failure: the caller
        tries again, or calls `unload`. Raises KafkaError, OSError, UnreadableRecord.
        """
        self.unload(partition)
        owned = self._partitions[partition] = _OwnedPartition()
        records = await self._read(partition)
        if self._partitions.get(partition) is not owned:
            return  # leadership went away, or came anew, while the log was being read
        owned.epoch = self._log.epoch(partition)
        owned.transactions = {
            transactional_id: Transaction.restore(transactional_id, record)
            for transactional_id, record in records.items()
        }
        owned.loaded = True
        now_ms = self._clock_ms()
        for transaction in list(owned.transactions.values()):
            if transaction.state.is_preparing:
                log.info(
                    "a transaction is ended where the coordinator before this one stopped",
                    transactional_id=transaction.transactional_id,
                    state=transaction.state.value,
                )
            self._carry_out(owned, transaction, transaction.resume(now_ms))
        log.debug("transactions loaded", partition=partition, epoch=owned.epoch, ids=len(owned.transactions))

    async def _read(self, partition: int) -> dict[str, TransactionRecord]:
        records: dict[str, TransactionRecord] = {}
        unknown = 0
        end_offset = 0

        def take(run: memoryview) -> tuple[int, int]:
            """(records that are not known, the offset after the run)."""
            unknown = next_offset = 0
            pauses = Pauses()
            for position, header in iterate_batches(run):
                pauses.maybe()
                next_offset = header.next_offset
                if header.is_control:
                    continue
                for record in read_records(run[position : position + header.size]):
                    try:
                        transactional_id = decode_key(record.key)
                        if transactional_id is None:
                            unknown += 1
                        elif record.value is None:
                            records.pop(transactional_id, None)
                        else:
                            records[transactional_id] = decode_value(record.value)
                    except UnreadableRecord as error:
                        raise UnreadableRecord(f"record at offset {record.offset}: {error}") from None
            return unknown, next_offset

        async for run in self._log.read_all(partition):
            found, end_offset = await self._compute(partial(take, run))
            unknown += found
        if unknown:
            log.warning("records of a newer version skipped", partition=partition, records=unknown)
        await self._log.until_committed(partition, end_offset)
        return records

    def unload(self, partition: int) -> None:
        """Stop coordinating a partition's ids: whoever waits hears NOT_COORDINATOR."""
        owned = self._partitions.pop(partition, None)
        if owned is None:
            return
        for transaction in list(owned.transactions.values()):
            self._carry_out(owned, transaction, transaction.close(ErrorCode.not_coordinator))

    # -- time ----------------------------------------------------------------------------------------

    def retry(self) -> None:
        """Write again what must be in the log and is not."""
        unsaved, self._unsaved = self._unsaved, []
        for owned, transaction in unsaved:
            self._carry_out(owned, transaction, transaction.retry())

    async def check_timeouts(self, now_ms: int) -> None:
        """Abort what has been open for too long."""
        await self._each(lambda transaction: transaction.time_out(now_ms))

    async def expire(self, now_ms: int) -> None:
        """Forget ids that nobody has used for long."""
        await self._each(lambda transaction: transaction.expire(now_ms, self.config.id_expiration_ms))

    async def _each(self, event: Callable[[Transaction], Iterable[Decision]]) -> None:
        """Others have their turn in between: ids that began together are due together, each with a write."""
        for owned in list(self._partitions.values()):
            async for some in slices(list(owned.transactions.values()), IDS_AT_ONCE):
                for transaction in some:
                    # One that went while others were looked at has nothing to be done any more.
                    if owned.transactions.get(transaction.transactional_id) is transaction:
                        self._carry_out(owned, transaction, event(transaction))

    # -- requests ------------------------------------------------------------------------------------

    async def begin_producer(
        self, transactional_id: str, timeout_ms: int, expected: ProducerIdentity | None
    ) -> tuple[ErrorCode, ProducerIdentity]:
        """InitProducerId of a transactional producer; `expected` is who it was before, if anyone."""
        if not transactional_id or len(transactional_id.encode()) > LONGEST_ID:
            return ErrorCode.invalid_request, ProducerIdentity()
        if not 0 < timeout_ms <= self.config.max_timeout_ms:
            return ErrorCode.invalid_transaction_timeout, ProducerIdentity()
        new_producer_id: int | None = None
        while True:
            owned, error = self._owner(transactional_id)
            if owned is None:
                return error, ProducerIdentity()
            transaction = owned.transactions.setdefault(transactional_id, Transaction(transactional_id))
            ticket = next(self._tickets)
            decisions = transaction.begin_producer(
                timeout_ms, expected, ticket, self._clock_ms(), new_producer_id
            )
            answer = await self._answer_to(ticket, owned, transaction, decisions)
            _drop_blank(owned, transaction)  # nothing has come of it, or not yet
            if isinstance(answer, Answer):
                if answer.error is ErrorCode.none:
                    log.debug(
                        "a transactional producer begins",
                        transactional_id=transactional_id,
                        producer_id=answer.producer.producer_id,
                        epoch=answer.producer.epoch,
                    )
                return answer.error, answer.producer
            try:
                new_producer_id = await self._take_producer_id()
            except MillraceError as unavailable:
                log.warning("no producer id to be had", error=str(unavailable))
                return ErrorCode.coordinator_not_available, ProducerIdentity()

    async def add_partitions(
        self, transactional_id: str, producer: ProducerIdentity, partitions: Collection[TopicPartition]
    ) -> ErrorCode:
        """AddPartitionsToTxn and AddOffsetsToTxn: one answer for all partitions."""
        return await self._ask(
            transactional_id,
            producer,
            lambda transaction, ticket, now_ms: transaction.add_partitions(
                producer, partitions, ticket, now_ms
            ),
        )

    async def end(self, transactional_id: str, producer: ProducerIdentity, committed: bool) -> ErrorCode:
        """EndTxn."""
        return await self._ask(
            transactional_id,
            producer,
            lambda transaction, ticket, now_ms: transaction.end(producer, committed, ticket, now_ms),
        )

    async def verify(
        self, transactional_id: str, producer: ProducerIdentity, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, ErrorCode]:
        """Are these partitions in this producer's open transaction (KIP-890)? That they are is said from
        memory; a refusal, which ends a transaction or a producer, when the log has confirmed it."""
        errors = self._verified(transactional_id, producer, partitions)
        if _FROM_MEMORY.issuperset(errors.values()):
            return errors
        error = await self._ask(
            transactional_id, producer, lambda transaction, ticket, _: transaction.confirm(ticket)
        )
        return errors if error is ErrorCode.none else dict.fromkeys(partitions, error)

    def verify_now(
        self, transactional_id: str, producer: ProducerIdentity, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, ErrorCode] | None:
        """As `verify`, where nothing has to be waited for; None where the log has to confirm it."""
        errors = self._verified(transactional_id, producer, partitions)
        return errors if _FROM_MEMORY.issuperset(errors.values()) else None

    def _verified(
        self, transactional_id: str, producer: ProducerIdentity, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, ErrorCode]:
        transaction, error = self._find(transactional_id)
        if transaction is None:
            return dict.fromkeys(partitions, error)
        return transaction.verify(producer, partitions)

    def describe(self, transactional_id: str) -> TransactionDescription:
        transaction, error = self._find(transactional_id)
        if error is ErrorCode.invalid_producer_id_mapping:
            error = ErrorCode.transactional_id_not_found
        if transaction is None:
            return TransactionDescription(error, transactional_id)
        return transaction.describe()

    async def list_transactions(
        self,
        states: Collection[str] = (),
        producer_ids: Collection[int] = (),
        longer_than_ms: int = -1,
    ) -> tuple[ErrorCode, list[str], list[TransactionListing]]:
        """(error, names that are no states, this broker's ids); empty filters let everything through. Ids
        that come meanwhile may be missing."""
        if any(not owned.loaded for owned in self._partitions.values()):
            return ErrorCode.coordinator_load_in_progress, [], []
        names = {state.value for state in TransactionState}
        now_ms = self._clock_ms()
        transactions = [each for owned in self._partitions.values() for each in owned.transactions.values()]
        listings: list[TransactionListing] = []
        async for some in slices(transactions):
            listings += [
                TransactionListing(each.transactional_id, each.record.producer_id, each.state.value)
                for each in some
                if each.record.producer_id >= 0
                and (not states or each.state.value in states)
                and (not producer_ids or each.record.producer_id in producer_ids)
                and (longer_than_ms < 0 or now_ms - each.record.started_ms > longer_than_ms)
            ]
        return ErrorCode.none, [state for state in states if state not in names], listings

    @property
    def open_count(self) -> int:
        """Transactions that have begun and are not ended everywhere."""
        return sum(
            not transaction.state.is_at_rest
            for owned in self._partitions.values()
            for transaction in owned.transactions.values()
        )

    # -- finding -------------------------------------------------------------------------------------

    def partition_of(self, transactional_id: str) -> int:
        """The log partition of an id, by the same rule as a group's."""
        return coordinator_partition(transactional_id, self._log.partition_count())

    def _owner(self, transactional_id: str) -> tuple[_OwnedPartition | None, ErrorCode]:
        owned = self._partitions.get(self.partition_of(transactional_id))
        if owned is None:
            return None, ErrorCode.not_coordinator
        if not owned.loaded:
            return None, ErrorCode.coordinator_load_in_progress
        return owned, ErrorCode.none

    def _find(self, transactional_id: str) -> tuple[Transaction | None, ErrorCode]:
        if not transactional_id:
            return None, ErrorCode.invalid_request
        owned, error = self._owner(transactional_id)
        if owned is None:
            return None, error
        transaction = owned.transactions.get(transactional_id)
        if transaction is None or transaction.record.producer_id == NO_PRODUCER_ID:
            return None, ErrorCode.invalid_producer_id_mapping
        return transaction, ErrorCode.none

    # -- decisions -----------------------------------------------------------------------------------

    async def _ask(
        self,
        transactional_id: str,
        producer: ProducerIdentity,
        event: Callable[[Transaction, Ticket, int], list[Decision]],
    ) -> ErrorCode:
        if not transactional_id:
            return ErrorCode.invalid_request
        if producer.producer_id < 0 or len(transactional_id.encode()) > LONGEST_ID:
            return ErrorCode.invalid_producer_id_mapping  # at every coordinator, for ever
        owned, error = self._owner(transactional_id)
        if owned is None:
            return error
        transaction = owned.transactions.setdefault(transactional_id, Transaction(transactional_id))
        ticket = next(self._tickets)
        decisions = event(transaction, ticket, self._clock_ms())
        answer = await self._answer_to(ticket, owned, transaction, decisions)
        assert isinstance(answer, Answer)
        return answer.error

    async def _answer_to(
        self, ticket: Ticket, owned: _OwnedPartition, transaction: Transaction, decisions: list[Decision]
    ) -> Answer | NeedProducerId:
        answer: asyncio.Future[Answer | NeedProducerId] = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = answer
        try:
            self._carry_out(owned, transaction, decisions)
            return await answer
        finally:
            self._waiting.pop(ticket, None)

    def _carry_out(
        self, owned: _OwnedPartition, transaction: Transaction, decisions: Iterable[Decision]
    ) -> None:
        for decision in decisions:
            match decision:
                case Answer(ticket) | NeedProducerId(ticket):
                    waiting = self._waiting.pop(ticket, None)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(decision)
                case Write():
                    self._save(owned, transaction, decision)
                case SendMarkers(producer, committed, partitions):
                    self.markers.send(
                        Marker(transaction.transactional_id, producer, owned.epoch, committed, partitions)
                    )
                case TimedOut():
                    self.timed_out_count += 1
                    log.warning(
                        "a transaction timed out and is aborted",
                        transactional_id=transaction.transactional_id,
                        producer_id=transaction.record.producer_id,
                        timeout_ms=transaction.record.timeout_ms,
                    )
                case Completed(committed):
                    if committed:
                        self.committed_count += 1
                    else:
                        self.aborted_count += 1
                case Forget():
                    owned.transactions.pop(transaction.transactional_id, None)
                    log.info("a transactional id expired", transactional_id=transaction.transactional_id)

    def _save(self, owned: _OwnedPartition, transaction: Transaction, write: Write) -> None:
        """Append now; tell the state machine, never before this returns, how that went."""
        transactional_id = transaction.transactional_id
        now_ms = self._clock_ms()
        partition = self.partition_of(transactional_id)
        error, committed = ErrorCode.none, None
        try:
            value = None if write.record is None else encode_value(write.record)
            batch = bytes(build_batch([Record(encode_key(transactional_id), value, (), now_ms, 0)]))
            if self._partitions.get(partition) is not owned:
                error = ErrorCode.not_leader_or_follower  # what was loaded may no longer be all there is
            else:
                _, committed = self._log.append_now(partition, batch)
        except KafkaError as refusal:
            error = ErrorCode(refusal.code)
        except Exception:
            # A transition without an outcome would keep its id busy for ever.
            log.exception("a write to the transaction log failed", transactional_id=transactional_id)
            error = ErrorCode.unknown_server_error
        task = asyncio.get_running_loop().create_task(
            self._follow_up(owned, transaction, write, error, committed)
        )
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _follow_up(
        self,
        owned: _OwnedPartition,
        transaction: Transaction,
        write: Write,
        error: ErrorCode,
        committed: asyncio.Future[None] | None,
    ) -> None:
        if committed is not None:
            await asyncio.wait([committed], timeout=self.config.write_timeout_ms / 1000)
            if not committed.done():
                self._carry_out(owned, transaction, transaction.give_up(write.write_id))
                await asyncio.wait([committed])
            error = _outcome(committed)
        if error is not ErrorCode.none and write.confirms:
            # By any client's question, as often as it asks while too few replicas are in sync.
            log.debug(
                "an answer was not confirmed",
                transactional_id=transaction.transactional_id,
                error=error.name,
            )
        elif error is not ErrorCode.none:
            log.warning(
                "a transaction's state was not saved",
                transactional_id=transaction.transactional_id,
                error=error.name,
            )
            self._unsaved.append((owned, transaction))
        self._carry_out(owned, transaction, transaction.written(write.write_id, error, self._clock_ms()))
        _drop_blank(owned, transaction)

    # -- markers -------------------------------------------------------------------------------------

    def _is_wanted(self, marker: Marker) -> bool:
        owned = self._partitions.get(self.partition_of(marker.transactional_id))
        return owned is not None and owned.loaded and owned.epoch == marker.coordinator_epoch

    def _on_marked(self, marker: Marker, partitions: frozenset[TopicPartition]) -> None:
        if not self._is_wanted(marker):
            return
        owned = self._partitions[self.partition_of(marker.transactional_id)]
        transaction = owned.transactions.get(marker.transactional_id)
        if transaction is not None:
            decisions = transaction.marked(marker.producer, partitions, self._clock_ms())
            self._carry_out(owned, transaction, decisions)


def _drop_blank(owned: _OwnedPartition, transaction: Transaction) -> None:
    """Keep nothing of an id that nobody has begun with."""
    if transaction.is_blank and owned.transactions.get(transaction.transactional_id) is transaction:
        del owned.transactions[transaction.transactional_id]


def _outcome(committed: asyncio.Future[None]) -> ErrorCode:
    if committed.cancelled():
        return ErrorCode.not_leader_or_follower
    error = committed.exception()
    if error is None:
        return ErrorCode.none
    if isinstance(error, KafkaError):
        return ErrorCode(error.code)
    log.error("a write to the transaction log failed", exc_info=error)
    return ErrorCode.unknown_server_error
