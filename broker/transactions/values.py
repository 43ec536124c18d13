"""The values that cross the border of the transaction state machine: requests in, decisions out.

`state.py` takes these and returns these; `coordinator.py` carries the decisions out; `records.py` writes a
`TransactionRecord` to the log and reads it back. Plain frozen data, no rules.

A *ticket* names a request that waits for its answer. The state machine never looks inside one; it answers
each ticket exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kio.schema.errors import ErrorCode

from millrace.broker.protocol.topic_partition import TopicPartition

Ticket = int

NO_PRODUCER_ID = -1
NO_EPOCH = -1
NO_TIME_MS = -1


class TransactionState(Enum):
    """Apache Kafka's states; `code` is what its log holds, `value` the name its tools show."""

    EMPTY = "Empty"
    ONGOING = "Ongoing"
    PREPARE_COMMIT = "PrepareCommit"
    PREPARE_ABORT = "PrepareAbort"
    COMPLETE_COMMIT = "CompleteCommit"
    COMPLETE_ABORT = "CompleteAbort"
    DEAD = "Dead"
    PREPARE_EPOCH_FENCE = "PrepareEpochFence"

    @property
    def code(self) -> int:
        return _CODES[self]

    @classmethod
    def from_code(cls, code: int) -> TransactionState:
        """Raises ValueError for a code that Apache Kafka does not know."""
        for state, known in _CODES.items():
            if known == code:
                return state
        raise ValueError(f"{code} is no transaction state")

    @property
    def is_preparing(self) -> bool:
        """The outcome is decided and in the log; not every partition has its marker yet."""
        return self in (TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT)

    @property
    def is_at_rest(self) -> bool:
        """Nothing is open: the id may begin a transaction, change hands, or expire."""
        return self in (
            TransactionState.EMPTY,
            TransactionState.COMPLETE_COMMIT,
            TransactionState.COMPLETE_ABORT,
        )


_CODES = {state: code for code, state in enumerate(TransactionState)}


@dataclass(frozen=True, slots=True)
class ProducerIdentity:
    """A producer id with its epoch: who writes."""

    producer_id: int = NO_PRODUCER_ID
    epoch: int = NO_EPOCH


@dataclass(frozen=True, slots=True)
class TransactionRecord:
    """A transactional id as `__transaction_state` remembers it.

    `last_epoch` (the epoch before the last bump, by which a repeated InitProducerId is known again) is
    kept in memory only. `previous_producer_id`, `next_producer_id` and `client_version` are in records of
    value version 1, which Apache Kafka 4 writes (KIP-890).
    """

    producer_id: int
    epoch: int
    timeout_ms: int
    state: TransactionState
    partitions: frozenset[TopicPartition] = frozenset()
    started_ms: int = NO_TIME_MS
    updated_ms: int = NO_TIME_MS
    last_epoch: int = NO_EPOCH
    previous_producer_id: int = NO_PRODUCER_ID
    next_producer_id: int = NO_PRODUCER_ID
    client_version: int = 0


# -- decisions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request. `producer` is who the caller is from now on, where the request asks that."""

    ticket: Ticket
    error: ErrorCode
    producer: ProducerIdentity = ProducerIdentity()


@dataclass(frozen=True, slots=True)
class NeedProducerId:
    """Nothing happened: ask again with a producer id that no one has had."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Write:
    """Put `record` in the log (None: a tombstone), then report to `written` with the same `write_id`.

    The writes of one transactional id must reach the log in the order of the decisions. Several may be under
    way: of those only one changes anything, the others repeat what is there (see `state.py`).
    """

    write_id: int
    record: TransactionRecord | None


@dataclass(frozen=True, slots=True)
class SendMarkers:
    """Have the outcome written to each of `partitions` by its leader, whoever that is by then, and report
    each to `marked`. Sending one twice does no harm."""

    producer: ProducerIdentity
    committed: bool
    partitions: frozenset[TopicPartition]


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The transaction was open for longer than its producer allowed: it is being aborted."""


@dataclass(frozen=True, slots=True)
class Completed:
    """Every partition has its marker and the log says so. Only for the operator's log and the metrics."""

    committed: bool


@dataclass(frozen=True, slots=True)
class Forget:
    """The transactional id has expired and its tombstone is in the log."""


Decision = Answer | NeedProducerId | Write | SendMarkers | TimedOut | Completed | Forget


# -- answers to queries -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TransactionDescription:
    """What DescribeTransactions shows. `partitions`: while preparing, those without a marker."""

    error: ErrorCode
    transactional_id: str
    state: str = ""
    timeout_ms: int = 0
    started_ms: int = 0
    producer: ProducerIdentity = ProducerIdentity(0, 0)
    partitions: tuple[TopicPartition, ...] = ()


@dataclass(frozen=True, slots=True)
class TransactionListing:
    transactional_id: str
    producer_id: int
    state: str
