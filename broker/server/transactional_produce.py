"""Produce requests of transactional producers: nothing is appended that no transaction will end (KIP-890).

Called by the produce handler for requests that name a transactional id. Each transactional batch passes
`transactions/verification.py` first. In nearly all requests the log itself says that the transaction is open,
or the coordinator is this very broker: then the batches are appended at once, like any others. What is waited
for is the first append of a transaction to a partition whose coordinator is elsewhere, and a refusal; a small
frame does not outlive the call, so its batches are copied.

Requests of one producer in one epoch are never overtaken: while one waits, those after it wait behind it. One
with very many batches is asked about and appended some at a time, so that others have their turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from kio.schema.errors import ErrorCode

from millrace.broker.errors import InvalidProducerIdMapping, KafkaError, NotEnoughReplicas, error_for_code
from millrace.broker.protocol.batch import HEADER_SIZE, parse_header
from millrace.broker.protocol.hot_produce import PartitionBatches
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.server.produce_work import BATCHES_AT_ONCE
from millrace.broker.transactions.values import ProducerIdentity
from millrace.broker.transactions.verification import UNVERIFIED, Errors, TransactionGate

_ABORTABLE_FROM = 11
"""The first produce version whose clients know TRANSACTION_ABORTABLE."""

Refusals = dict[TopicPartition, KafkaError]


class TransactionalAppends:
    """Lets the batches of transactional producers through in the order in which they came."""

    def __init__(self, gate: TransactionGate) -> None:
        self._gate = gate
        self._turns: dict[ProducerIdentity, asyncio.Lock] = {}
        self._waiting: dict[ProducerIdentity, int] = {}

    def admit_now(
        self, transactional_id: str, version: int, partitions: list[PartitionBatches]
    ) -> Refusals | None:
        """Which partitions' batches must not be appended, and why; None when that takes asking.

        Raises InvalidProducerIdMapping for a request with batches of several producers.
        """
        producer, sequences = _transactional(partitions)
        if not sequences:
            return {}
        if producer in self._waiting:
            return None
        errors = self._gate.admit_now(transactional_id, producer, sequences)
        return None if errors is None else _refusals(errors, version)

    def in_turn(
        self,
        transactional_id: str,
        version: int,
        partitions: Sequence[PartitionBatches],
        append: Callable[[Refusals, int, int], Awaitable[int]],
        prepare: Callable[[], Awaitable[None]] | None = None,
    ) -> asyncio.Task[None]:
        """Ask, and call `append`, for some of the partitions after the others when it is this request's turn;
        the place is taken in this very call. What takes its time is done by `prepare`, before asking: between
        the answer and the append a transaction could end, and so it could between two parts. Of the
        partitions from one place to another `append` appends as many as it can before it has to wait, and
        gives the place to go on at; the last of them may be one that it waits for itself."""
        producer, _ = _transactional(partitions)
        turn = self._turns.setdefault(producer, asyncio.Lock())
        self._waiting[producer] = self._waiting.get(producer, 0) + 1

        async def ask_and_append() -> None:
            async with turn:
                if prepare is not None:
                    await prepare()
                first = end = 0
                while first < len(partitions):
                    if first and first == end:  # else it has waited already
                        await asyncio.sleep(0)
                    end = min(first + BATCHES_AT_ONCE, len(partitions))
                    _, sequences = _transactional(partitions[first:end])
                    errors = await self._gate.admit(transactional_id, producer, sequences)
                    first = await append(_refusals(errors, version), first, end)

        task = asyncio.get_running_loop().create_task(ask_and_append())
        task.add_done_callback(lambda _: self._left(producer))
        return task

    def _left(self, producer: ProducerIdentity) -> None:
        self._waiting[producer] -= 1
        if not self._waiting[producer]:
            del self._waiting[producer], self._turns[producer]

    def appended(self, batches: PartitionBatches) -> None:
        """A batch went into the log."""
        header = parse_header(batches.records or b"")
        if header.is_transactional:
            self._gate.appended((batches.topic, batches.partition), header.producer_id)


def copied(partitions: Sequence[PartitionBatches]) -> list[PartitionBatches]:
    """The same batches in memory of their own."""
    return [
        batches
        if batches.records is None
        else batches._replace(records=memoryview(bytearray(batches.records)))
        for batches in partitions
    ]


def _transactional(
    partitions: Sequence[PartitionBatches],
) -> tuple[ProducerIdentity, dict[TopicPartition, int]]:
    """Who writes, and the base sequence for each partition that has a transactional batch.

    What is too short or malformed is left to the append, which says what is wrong with it.
    """
    producers: set[ProducerIdentity] = set()
    sequences: dict[TopicPartition, int] = {}
    for topic, partition, records in partitions:
        if records is None or len(records) < HEADER_SIZE:
            continue
        try:
            header = parse_header(records)
        except KafkaError:
            continue
        if header.is_transactional and header.producer_id >= 0:
            producers.add(ProducerIdentity(header.producer_id, header.producer_epoch))
            sequences[(topic, partition)] = header.base_sequence
    if len(producers) > 1:
        raise InvalidProducerIdMapping("a transactional request holds batches of several producers")
    return producers.pop() if producers else ProducerIdentity(), sequences


def _refusals(errors: Errors, version: int) -> Refusals:
    return {
        partition: _as_produce_error(error, version)
        for partition, error in errors.items()
        if error is not ErrorCode.none
    }


def _as_produce_error(error: ErrorCode, version: int) -> KafkaError:
    """A coordinator's error as producers understand it."""
    if error in UNVERIFIED:
        # As from Apache Kafka: all clients send again, and none looks for another leader because of it.
        return NotEnoughReplicas(
            f"it could not be verified that the partition is in the transaction: {error.name}"
        )
    if error is ErrorCode.producer_fenced:
        error = ErrorCode.invalid_producer_epoch
    elif error is ErrorCode.transaction_abortable and version < _ABORTABLE_FROM:
        error = ErrorCode.invalid_txn_state
    if error in (ErrorCode.invalid_txn_state, ErrorCode.transaction_abortable):
        return error_for_code(int(error), "the partition is not in an open transaction of this producer")
    return error_for_code(int(error))
