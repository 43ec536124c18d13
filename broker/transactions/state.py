"""The state machine of one transactional id: who may write, what is open, and how it ends.

Pure: events come in with `now_ms`, decisions come out (`values.py`); it never reads a clock, waits, draws
ids or does I/O. `coordinator.py` is its only caller in the broker; the simulator drives it through virtual
time.

    Empty, Complete*          --add_partitions-->             Ongoing
    Ongoing                   --add_partitions-->             Ongoing
    Ongoing                   --end-->                        PrepareCommit | PrepareAbort
    Ongoing                   --begin_producer, time_out-->   (fence: epoch + 1) PrepareAbort
    PrepareCommit | Abort     --every partition marked-->     CompleteCommit | CompleteAbort
    Empty, Complete*          --begin_producer-->             Empty, in a new epoch or with a new producer id
    Empty, Complete*          --expire-->                     forgotten, with a tombstone

Every arrow is a record in the log; what the record says becomes visible when `written` reports success. Until
then every request hears CONCURRENT_TRANSACTIONS; while markers are out, the right producer and who begins do.

What a client would take for final and memory alone says (a repeated end, a wrong state, a wrong identity,
partitions that are in already, a refusal to a leader that asks) is answered only when the log has taken the
last record once more: a coordinator that has been replaced, and does not know it, never gets that
acknowledged. Apache Kafka's coordinators answer such requests from memory.

Invariants:

1. One transition at a time is written, and none while markers are out: the log holds them in order. What
   confirms an answer repeats the last one, and is never begun while another is on its way.
2. Markers are sent only for an outcome that is in the log, and a transaction once decided stays so.
3. Of all producers that ever began with this id only the last one's requests are taken: it alone knows the
   present producer id and epoch. An older epoch is refused from the first attempt to fence it on: to be asked
   again while that is being written, finally after that, written or not.
4. An epoch is never given to two producers: a fencing epoch is given to nobody, and the last one of a
   producer id (32767) is only ever used to fence.
5. Every ticket is answered exactly once.
6. An answer that its client will not ask for again rests on a write that began after the question. One that
   was under way before proves nothing: the acknowledgement may be older than the question. What the write
   proves is that this coordinator has not been replaced; of a fence that could not be written (3) it says
   nothing, and the next coordinator would know nothing of it.

Rules and error codes are those of Apache Kafka 3.9 (KIP-98, KIP-360, KIP-588), but for two. It looks at the
identity before it looks at what is being written: here what confirms the refusal would undo that. And it lets
a producer that asks for a new epoch abort the open transaction of its successor (3), and fence it. Records
that Apache Kafka 4 left with client version 2 (KIP-890) are completed by their own rule: the epoch in the
record is already the bumped one, and a rotated producer id takes over at the end.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from enum import Enum

from kio.schema.errors import ErrorCode

from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.transactions.values import (
    NO_EPOCH,
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
    TransactionRecord,
    TransactionState,
    Write,
)

LAST_EPOCH = 32_767
"""Never given to a client, so that any client can be fenced."""

_EPOCH_BUMPING_CLIENT = 2
"""From this client version on the end of a transaction bumps the epoch (KIP-890, part 2)."""

_WRITE_FAILURES = {
    ErrorCode.unknown_topic_or_partition: ErrorCode.coordinator_not_available,
    ErrorCode.not_enough_replicas: ErrorCode.coordinator_not_available,
    ErrorCode.not_enough_replicas_after_append: ErrorCode.coordinator_not_available,
    ErrorCode.request_timed_out: ErrorCode.coordinator_not_available,
    ErrorCode.not_leader_or_follower: ErrorCode.not_coordinator,
    ErrorCode.kafka_storage_error: ErrorCode.not_coordinator,
    ErrorCode.message_too_large: ErrorCode.unknown_server_error,
    ErrorCode.record_list_too_large: ErrorCode.unknown_server_error,
}
"""What a client hears when a transition could not be written."""


class _Purpose(Enum):
    """Why a write is under way: what follows it."""

    BEGIN = "a producer begins"
    ADD = "partitions are added"
    END = "the producer ends its transaction"
    FENCE = "an older producer's transaction is aborted"
    COMPLETE = "all markers are there"
    EXPIRE = "nobody has used the id for long"


@dataclass(slots=True)
class _Pending:
    """The transition under way; `ticket` is whom its outcome answers, if anyone still waits.

    `failed`: it is not being written now, and must be; `in_log`: the log has it on too few replicas.
    """

    write_id: int
    purpose: _Purpose
    record: TransactionRecord | None
    ticket: Ticket | None = None
    failed: bool = False
    in_log: bool = False


@dataclass(slots=True)
class Transaction:
    """One transactional id. Every method that takes an event returns the decisions to carry out, in order.

    Made anew it is Empty with no producer; `restore` makes it from the log.
    """

    transactional_id: str
    record: TransactionRecord = field(
        default_factory=lambda: TransactionRecord(NO_PRODUCER_ID, NO_EPOCH, 0, TransactionState.EMPTY)
    )
    unmarked: set[TopicPartition] = field(default_factory=set)
    """While preparing: the partitions that have no marker yet."""
    _pending: _Pending | None = field(default=None, init=False)
    _confirming: dict[int, Answer] = field(default_factory=dict, init=False)
    """Final answers, by the writes that have to confirm them."""
    _fence_failed: bool = field(default=False, init=False)  # the present epoch is a fence's: not given out
    _closed: bool = field(default=False, init=False)
    _write_id: int = field(default=0, init=False)

    @classmethod
    def restore(cls, transactional_id: str, record: TransactionRecord) -> Transaction:
        """The id as the log remembers it. Call `resume` next."""
        unmarked = set(record.partitions) if record.state.is_preparing else set()
        return cls(transactional_id, record, unmarked)

    @property
    def state(self) -> TransactionState:
        """The last state that is known to be in the log."""
        return self.record.state

    @property
    def producer(self) -> ProducerIdentity:
        return ProducerIdentity(self.record.producer_id, self.record.epoch)

    @property
    def is_changing(self) -> bool:
        """A transition is being written, or markers are out."""
        return self._pending is not None or self.state.is_preparing

    @property
    def is_blank(self) -> bool:
        """No producer has ever begun with the id, none is beginning, and nobody waits to be told so."""
        return self.record.producer_id == NO_PRODUCER_ID and self._pending is None and not self._confirming

    # -- requests ------------------------------------------------------------------------------------

    def begin_producer(
        self,
        timeout_ms: int,
        expected: ProducerIdentity | None,
        ticket: Ticket,
        now_ms: int,
        new_producer_id: int | None = None,
    ) -> list[Decision]:
        """InitProducerId: the caller becomes the id's only producer.

        `expected` is who the caller was before (KIP-360), None for one that starts. With an open
        transaction of an older producer that is aborted first; the caller hears CONCURRENT_TRANSACTIONS
        and comes again. Answers NeedProducerId where a new id is needed and none was given.
        """
        record = self.record
        if self.is_changing:
            return [Answer(ticket, ErrorCode.concurrent_transactions)]
        if expected is not None and not self._may_be(expected):
            return self._confirmed(Answer(ticket, ErrorCode.producer_fenced))
        if record.state is TransactionState.ONGOING:
            if expected is not None and not self._has_begun(expected):
                return self._confirmed(Answer(ticket, ErrorCode.producer_fenced))
            return self._fence(ticket, now_ms)
        is_new = record.producer_id == NO_PRODUCER_ID
        is_exhausted = record.epoch >= LAST_EPOCH - 1
        previous_producer_id = record.producer_id
        if is_new or (is_exhausted and (expected is None or expected.epoch == record.epoch)):
            if new_producer_id is None:
                return [NeedProducerId(ticket)]
            producer_id, epoch = new_producer_id, 0
            last_epoch = NO_EPOCH if expected is None else record.epoch
        elif expected is None:
            producer_id, epoch, last_epoch = record.producer_id, record.epoch + 1, NO_EPOCH
        elif expected.epoch == record.epoch and not is_exhausted:
            producer_id, epoch, last_epoch = record.producer_id, record.epoch + 1, record.epoch
        elif expected.epoch == record.last_epoch:
            # A repetition: the answer to the first got lost. A producer that began in between would have
            # cleared the last epoch.
            producer_id, epoch, last_epoch = record.producer_id, record.epoch, record.last_epoch
            previous_producer_id = record.previous_producer_id
        else:
            return self._confirmed(Answer(ticket, ErrorCode.producer_fenced))
        begun = TransactionRecord(
            producer_id,
            epoch,
            timeout_ms,
            TransactionState.EMPTY,
            updated_ms=now_ms,
            last_epoch=last_epoch,
            previous_producer_id=previous_producer_id,
        )
        return [self._write(_Purpose.BEGIN, begun, ticket)]

    def add_partitions(
        self,
        producer: ProducerIdentity,
        partitions: Collection[TopicPartition],
        ticket: Ticket,
        now_ms: int,
    ) -> list[Decision]:
        """AddPartitionsToTxn, AddOffsetsToTxn: these partitions will be written to; opens a transaction."""
        if self._pending is not None:
            return [Answer(ticket, ErrorCode.concurrent_transactions)]
        error = self._identity_error(producer)
        record = self.record
        is_open = record.state is TransactionState.ONGOING
        if error is not ErrorCode.none or (is_open and record.partitions.issuperset(partitions)):
            return self._confirmed(Answer(ticket, error))
        if record.state.is_preparing:
            return [Answer(ticket, ErrorCode.concurrent_transactions)]
        added = replace(
            record,
            state=TransactionState.ONGOING,
            partitions=record.partitions.union(partitions),
            started_ms=record.started_ms if is_open else now_ms,
            updated_ms=now_ms,
            previous_producer_id=record.producer_id,
            client_version=0,
        )
        return [self._write(_Purpose.ADD, added, ticket)]

    def verify(
        self, producer: ProducerIdentity, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, ErrorCode]:
        """Does this producer have an open transaction with these partitions (KIP-890)? What is being
        written is not looked at: the leader checks once more when it appends. From memory: `confirm` says
        whether a refusal may be told."""
        error = self._identity_error(producer)
        if error is ErrorCode.none and self.state.is_preparing:
            error = ErrorCode.concurrent_transactions
        if error is not ErrorCode.none:
            return dict.fromkeys(partitions, error)
        return {
            partition: ErrorCode.none
            if partition in self.record.partitions
            else ErrorCode.transaction_abortable
            for partition in partitions
        }

    def confirm(self, ticket: Ticket) -> list[Decision]:
        """What memory says now is final. Answers ErrorCode.none once the log confirms that."""
        if self._pending is not None:
            return [Answer(ticket, ErrorCode.concurrent_transactions)]
        return self._confirmed(Answer(ticket, ErrorCode.none))

    def end(self, producer: ProducerIdentity, committed: bool, ticket: Ticket, now_ms: int) -> list[Decision]:
        """EndTxn. Answered as soon as the outcome is in the log; the markers follow."""
        if self._pending is not None:
            return [Answer(ticket, ErrorCode.concurrent_transactions)]
        error = self._identity_error(producer)
        if error is not ErrorCode.none:
            return self._confirmed(Answer(ticket, error))
        wanted = TransactionState.COMPLETE_COMMIT if committed else TransactionState.COMPLETE_ABORT
        if self.state is wanted:  # the answer to the first got lost
            return self._confirmed(Answer(ticket, ErrorCode.none, self.producer))
        if self.state.is_preparing:
            return [Answer(ticket, ErrorCode.concurrent_transactions)]
        if self.state is not TransactionState.ONGOING:
            return self._confirmed(Answer(ticket, ErrorCode.invalid_txn_state))
        return [self._write(_Purpose.END, self._prepared(committed, now_ms), ticket)]

    def describe(self) -> TransactionDescription:
        record = self.record
        partitions = self.unmarked if record.state.is_preparing else record.partitions
        return TransactionDescription(
            ErrorCode.none,
            self.transactional_id,
            record.state.value,
            record.timeout_ms,
            record.started_ms,
            self.producer,
            tuple(sorted(partitions)),
        )

    # -- time ----------------------------------------------------------------------------------------

    def is_overdue(self, now_ms: int) -> bool:
        """The transaction has been open for longer than its producer allowed."""
        record = self.record
        return (
            record.state is TransactionState.ONGOING
            and self._pending is None
            and record.started_ms + record.timeout_ms < now_ms
        )

    def time_out(self, now_ms: int) -> list[Decision]:
        """Abort an overdue transaction and fence its producer; nothing when it is not overdue."""
        if self._closed or not self.is_overdue(now_ms):
            return []
        return [TimedOut(), *self._fence(None, now_ms)]

    def retry(self) -> list[Decision]:
        """Write again what has to be in the log and could not be written; else nothing."""
        pending = self._pending
        if self._closed or pending is None or not pending.failed:
            return []
        return [self._write(pending.purpose, pending.record, in_log=pending.in_log)]

    def give_up(self, write_id: int) -> list[Decision]:
        """The write takes longer than its request can wait: it goes on, and the client comes again."""
        unconfirmed = self._confirming.pop(write_id, None)
        if unconfirmed is not None:
            return [Answer(unconfirmed.ticket, ErrorCode.coordinator_not_available)]
        pending = self._pending
        if pending is None or pending.write_id != write_id:
            return []
        ticket, pending.ticket = pending.ticket, None
        return [] if ticket is None else [Answer(ticket, ErrorCode.coordinator_not_available)]

    def expire(self, now_ms: int, expiration_ms: int) -> list[Decision]:
        """Forget the id when nothing has happened under it for so long; nothing while it is in use."""
        record = self.record
        if (
            self._closed
            or self._pending is not None
            or not record.state.is_at_rest
            or record.producer_id == NO_PRODUCER_ID
            or record.updated_ms > now_ms - expiration_ms
        ):
            return []
        return [self._write(_Purpose.EXPIRE, None)]

    # -- the log and the markers ---------------------------------------------------------------------

    def resume(self, now_ms: int) -> list[Decision]:
        """After `restore`: go on where the coordinator before this one stopped."""
        if not self.state.is_preparing:
            return []
        return self._send_markers(now_ms)

    def written(self, write_id: int, error: ErrorCode, now_ms: int) -> list[Decision]:
        """A write came to its end. With ErrorCode.none all in-sync replicas have it, and there are enough of
        them; with NOT_ENOUGH_REPLICAS_AFTER_APPEND all have it, and there are too few; with any other error
        the log does not have it."""
        confirmed = self._confirming.pop(write_id, None)
        if confirmed is not None:
            if error is ErrorCode.none:
                return [confirmed]
            return [Answer(confirmed.ticket, _WRITE_FAILURES.get(error, error))]
        pending = self._pending
        if self._closed or pending is None or pending.write_id != write_id:
            return []  # its ticket was answered when this coordinator closed
        answered = _WRITE_FAILURES.get(error, error)
        too_few = error is ErrorCode.not_enough_replicas_after_append
        if error is not ErrorCode.none and self._must_be_written(pending, too_few):
            decisions = self._answered(pending, answered)
            pending.ticket, pending.failed = None, True
            return decisions
        self._pending = None
        if error is not ErrorCode.none and not too_few:
            return self._answered(pending, answered)
        if pending.record is None:
            return [Forget()]
        self.record = pending.record
        match pending.purpose:
            case _Purpose.END | _Purpose.FENCE:
                if pending.purpose is _Purpose.FENCE:
                    answered = ErrorCode.concurrent_transactions  # come again for an epoch of your own
                self._fence_failed = False
                self.unmarked = set(self.record.partitions)
                return [*self._answered(pending, answered), *self._send_markers(now_ms)]
            case _Purpose.COMPLETE:
                return [Completed(self.state is TransactionState.COMPLETE_COMMIT)]
            case _:
                return self._answered(pending, answered)

    def marked(
        self, producer: ProducerIdentity, partitions: Collection[TopicPartition], now_ms: int
    ) -> list[Decision]:
        """These partitions have this producer's marker, or no longer exist."""
        if self._closed or not self.state.is_preparing or producer != self.producer:
            return []  # of a transaction before the present one
        self.unmarked.difference_update(partitions)
        if self.unmarked or self._pending is not None:
            return []
        return self._complete(now_ms)

    def close(self, error: ErrorCode) -> list[Decision]:
        """This broker no longer coordinates the id: whoever waits is told so, and nothing more is done."""
        pending, self._pending = self._pending, None
        unconfirmed, self._confirming = self._confirming, {}
        self._closed = True
        told: list[Decision] = [Answer(answer.ticket, error) for answer in unconfirmed.values()]
        return told + (self._answered(pending, error) if pending is not None else [])

    # -- rules ---------------------------------------------------------------------------------------

    def _must_be_written(self, pending: _Pending, too_few: bool) -> bool:
        """A completion that the log does not have, because no request would ask for it again; and an outcome
        that the log has, but not safely, because markers must not go out before it is safe."""
        if pending.purpose in (_Purpose.END, _Purpose.FENCE):
            pending.in_log = pending.in_log or too_few
        return pending.in_log or (pending.purpose is _Purpose.COMPLETE and not too_few)

    def _identity_error(self, producer: ProducerIdentity) -> ErrorCode:
        if producer.producer_id < 0 or producer.producer_id != self.record.producer_id:
            return ErrorCode.invalid_producer_id_mapping
        if producer.epoch != self.record.epoch:
            return ErrorCode.producer_fenced
        return ErrorCode.none

    def _may_be(self, expected: ProducerIdentity) -> bool:
        """Could the caller be the present producer? Its epoch is looked at when it is bumped.

        Also an id that the log has forgotten, and the one before an exhausted id was replaced, whose
        producer may not have heard of it.
        """
        return (
            self.record.producer_id == NO_PRODUCER_ID
            or expected.producer_id == self.record.producer_id
            or (expected.producer_id == self.record.previous_producer_id and expected.epoch >= LAST_EPOCH - 1)
        )

    def _has_begun(self, expected: ProducerIdentity) -> bool:
        """Is the open transaction the caller's own? By the log: a fence that could not be written is tried
        again for whoever asked for it."""
        record = self._in_log()
        return record is not None and expected == ProducerIdentity(record.producer_id, record.epoch)

    def _confirmed(self, answer: Answer) -> list[Decision]:
        """Give a final answer when the log has taken once more what it already holds of the id: nothing
        that others ask for meanwhile has to wait for that. Not while a transition is being written, whose
        record it would undo."""
        self._write_id += 1
        self._confirming[self._write_id] = answer
        return [Write(self._write_id, self._in_log(), confirms=True)]

    def _in_log(self) -> TransactionRecord | None:
        """The last record that was written, None (a tombstone) where there is none."""
        record = self.record
        if record.producer_id == NO_PRODUCER_ID:
            return None
        return replace(record, epoch=record.epoch - 1) if self._fence_failed else record

    def _fence(self, ticket: Ticket | None, now_ms: int) -> list[Decision]:
        """Abort the open transaction under an epoch that no client has."""
        if not self._fence_failed:
            self.record = replace(self.record, epoch=self.record.epoch + 1, last_epoch=NO_EPOCH)
            self._fence_failed = True  # until it is written; a second attempt uses the same epoch
        return [self._write(_Purpose.FENCE, self._prepared(False, now_ms), ticket)]

    def _prepared(self, committed: bool, now_ms: int) -> TransactionRecord:
        return replace(
            self.record,
            state=TransactionState.PREPARE_COMMIT if committed else TransactionState.PREPARE_ABORT,
            updated_ms=now_ms,
            previous_producer_id=self.record.producer_id,
            client_version=0,
        )

    def _send_markers(self, now_ms: int) -> list[Decision]:
        if not self.unmarked:
            return self._complete(now_ms)
        committed = self.state is TransactionState.PREPARE_COMMIT
        return [SendMarkers(self.producer, committed, frozenset(self.unmarked))]

    def _complete(self, now_ms: int) -> list[Decision]:
        record = self.record
        committed = record.state is TransactionState.PREPARE_COMMIT
        rotated = record.client_version >= _EPOCH_BUMPING_CLIENT and record.next_producer_id != NO_PRODUCER_ID
        complete = replace(
            record,
            producer_id=record.next_producer_id if rotated else record.producer_id,
            epoch=0 if rotated else record.epoch,
            last_epoch=record.epoch if rotated else record.last_epoch,
            state=TransactionState.COMPLETE_COMMIT if committed else TransactionState.COMPLETE_ABORT,
            partitions=frozenset(),
            updated_ms=now_ms,
            previous_producer_id=record.producer_id,
            next_producer_id=NO_PRODUCER_ID,
        )
        return [self._write(_Purpose.COMPLETE, complete)]

    def _write(
        self,
        purpose: _Purpose,
        record: TransactionRecord | None,
        ticket: Ticket | None = None,
        *,
        in_log: bool = False,
    ) -> Write:
        self._write_id += 1
        self._pending = _Pending(self._write_id, purpose, record, ticket, in_log=in_log)
        return Write(self._write_id, record)

    def _answered(self, pending: _Pending, error: ErrorCode) -> list[Decision]:
        if pending.ticket is None:
            return []
        if error is ErrorCode.none:
            return [Answer(pending.ticket, error, self.producer)]
        return [Answer(pending.ticket, error)]
