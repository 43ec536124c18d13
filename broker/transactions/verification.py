"""May a transactional batch be appended? Only when its partition is in an open transaction (KIP-890).

A batch that comes after its transaction has ended would open a transaction that nobody ends, and readers of
committed data would wait before it for ever. So before a producer's first append to a partition in each
transaction, the partition's leader asks the transaction coordinator; later batches are recognised by the
transaction being open in the log itself.

Two nouns: `VerificationStates` (pure) remembers what is being verified, so that an answer which has been
overtaken by the transaction's end counts for nothing; `TransactionGate` asks the coordinator, on this broker
or another. Called by the produce handler, TxnOffsetCommit and WriteTxnMarkers, on the event loop only.
Between an admission and the append that uses it the caller must not await.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass

from kio.schema.errors import ErrorCode

from millrace.broker.errors import KafkaError, MillraceError
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.replication.partition import NO_LEADER
from millrace.broker.replication.replica_manager import ReplicaManager
from millrace.broker.transactions.values import ProducerIdentity

Errors = dict[TopicPartition, ErrorCode]
Token = int

UNVERIFIED = frozenset(
    {
        ErrorCode.concurrent_transactions,
        ErrorCode.network_exception,
        ErrorCode.coordinator_load_in_progress,
        ErrorCode.coordinator_not_available,
        ErrorCode.not_coordinator,
    }
)
"""The coordinator could not say: the client is to send the same again, to the same broker."""

NO_SEQUENCE = -1
"""For batches that carry no sequence: the offsets of a group."""

UNUSED_FOR_MS = 86_400_000
"""A verification that no append has used for so long belongs to a producer that is gone."""


@dataclass(slots=True)
class _Verification:
    token: Token
    epoch: int
    lowest_sequence: int
    since_ms: int


class VerificationStates:
    """What is verified, or being verified, and has not yet been appended."""

    def __init__(self) -> None:
        self._states: dict[TopicPartition, dict[int, _Verification]] = {}
        self._tokens = itertools.count(1)

    def begin(
        self, partition: TopicPartition, producer: ProducerIdentity, base_sequence: int, now_ms: int
    ) -> Token:
        """A verification begins, or joins the one under way; the token stands for this very transaction."""
        states = self._states.setdefault(partition, {})
        state = states.get(producer.producer_id)
        if state is None:
            state = _Verification(next(self._tokens), producer.epoch, base_sequence, now_ms)
            states[producer.producer_id] = state
        elif producer.epoch > state.epoch:
            state.epoch, state.lowest_sequence = producer.epoch, base_sequence
        elif producer.epoch == state.epoch:
            state.lowest_sequence = min(state.lowest_sequence, base_sequence)
        return state.token

    def refusal(
        self, partition: TopicPartition, producer_id: int, token: Token, base_sequence: int
    ) -> ErrorCode:
        """Now that the coordinator has agreed: may this batch be appended?

        Not when the transaction has ended meanwhile, and not before an earlier batch that was refused for
        now: it could then never be appended.
        """
        state = self._states.get(partition, {}).get(producer_id)
        if state is None or state.token != token:
            return ErrorCode.invalid_txn_state
        if base_sequence > state.lowest_sequence:
            return ErrorCode.out_of_order_sequence_number
        return ErrorCode.none

    def end(self, partition: TopicPartition, producer_id: int) -> None:
        """The batch is in the log, or the transaction's marker is."""
        states = self._states.get(partition)
        if states is not None and states.pop(producer_id, None) is not None and not states:
            del self._states[partition]

    def forget(self, partition: TopicPartition) -> None:
        """This broker no longer leads the partition."""
        self._states.pop(partition, None)

    def expire(self, now_ms: int) -> None:
        for partition, states in list(self._states.items()):
            for producer_id, state in list(states.items()):
                if now_ms - state.since_ms >= UNUSED_FOR_MS:
                    self.end(partition, producer_id)

    def __len__(self) -> int:
        return sum(map(len, self._states.values()))


VerifyNow = Callable[[str, ProducerIdentity, Collection[TopicPartition]], Errors | None]
"""Ask the coordinator on this broker; None where it has to ask its log first (`VerifyHere`)."""

VerifyHere = Callable[[str, ProducerIdentity, Collection[TopicPartition]], Awaitable[Errors]]
VerifyThere = Callable[[int, str, ProducerIdentity, Collection[TopicPartition]], Awaitable[Errors]]
"""(broker id, ...): ask the coordinator there. Raises MillraceError when it cannot be asked."""


class TransactionGate:
    """See the module. `coordinator_of` gives the broker id, NO_LEADER where it is not known."""

    def __init__(
        self,
        broker_id: int,
        replica_manager: ReplicaManager,
        *,
        clock_ms: Callable[[], int],
        coordinator_of: Callable[[str], int],
        verify_now: VerifyNow,
        verify_here: VerifyHere,
        verify_there: VerifyThere,
        enabled: bool = True,
    ) -> None:
        self._broker_id = broker_id
        self._replica_manager = replica_manager
        self._clock_ms = clock_ms
        self._coordinator_of = coordinator_of
        self._verify_now = verify_now
        self._verify_here = verify_here
        self._verify_there = verify_there
        self.enabled = enabled
        self._states = VerificationStates()

    def is_open(self, partition: TopicPartition, producer: ProducerIdentity) -> bool:
        """The log has an open transaction of this producer, in this epoch. Raises KafkaErrors where this
        broker does not lead the partition."""
        local = self._replica_manager.leader_of(*partition)
        entry = local.log.producers.entries.get(producer.producer_id)
        return entry is not None and entry.transaction_start_offset >= 0 and entry.epoch == producer.epoch

    def admit_now(
        self, transactional_id: str, producer: ProducerIdentity, sequences: Mapping[TopicPartition, int]
    ) -> Errors | None:
        """As `admit`, where nothing has to be waited for; None where the coordinator is another broker, or
        has to ask its log."""
        errors, unknown = self._sort(producer, sequences)
        if unknown:
            if self._coordinator_of(transactional_id) != self._broker_id:
                return None
            verified = self._verify_now(transactional_id, producer, list(unknown))
            if verified is None:
                return None
            errors |= self._settle(producer, unknown, self._begin(producer, unknown), verified)
        return errors

    async def admit(
        self, transactional_id: str, producer: ProducerIdentity, sequences: Mapping[TopicPartition, int]
    ) -> Errors:
        """An error for each partition: ErrorCode.none admits one batch with this base sequence, now.

        `sequences` gives each partition's base sequence (NO_SEQUENCE where there is none). Errors are the
        coordinator's, as Apache Kafka gives them to the leader; NETWORK_EXCEPTION when it did not answer.
        """
        errors, unknown = self._sort(producer, sequences)
        if not unknown:
            return errors
        tokens = self._begin(producer, unknown)
        verified = await self._ask(transactional_id, producer, list(unknown))
        return self._still(producer, errors) | self._settle(producer, unknown, tokens, verified)

    def appended(self, partition: TopicPartition, producer_id: int) -> None:
        """A batch of the transaction is in the log: from now on the log itself knows."""
        self._states.end(partition, producer_id)

    def ended(self, partition: TopicPartition, producer_id: int) -> None:
        """The transaction's marker is in the log: answers still on their way count for nothing."""
        self._states.end(partition, producer_id)

    def lost(self, topic: str, partition: int) -> None:
        """A listener of the replica manager."""
        self._states.forget((topic, partition))

    def expire(self, now_ms: int) -> None:
        """Forget verifications that no append has used."""
        self._states.expire(now_ms)

    def _sort(
        self, producer: ProducerIdentity, sequences: Mapping[TopicPartition, int]
    ) -> tuple[Errors, dict[TopicPartition, int]]:
        """What is decided already, and what only the coordinator can say."""
        errors: Errors = {}
        unknown: dict[TopicPartition, int] = {}
        for partition, base_sequence in sequences.items():
            try:
                if not self.enabled or self.is_open(partition, producer):
                    errors[partition] = ErrorCode.none
                else:
                    unknown[partition] = base_sequence
            except KafkaError as error:
                errors[partition] = ErrorCode(error.code)
        return errors, unknown

    def _still(self, producer: ProducerIdentity, errors: Errors) -> Errors:
        """What was open before the coordinator was asked, and whether it is still: its client may have given
        up and ended the transaction meanwhile, and a batch behind the marker would open one that nobody
        ends."""
        found = dict(errors)
        for partition, error in errors.items():
            if error is ErrorCode.none and self.enabled:
                try:
                    if not self.is_open(partition, producer):
                        found[partition] = ErrorCode.invalid_txn_state
                except KafkaError as problem:
                    found[partition] = ErrorCode(problem.code)
        return found

    def _begin(
        self, producer: ProducerIdentity, sequences: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, Token]:
        now_ms = self._clock_ms()
        return {
            partition: self._states.begin(partition, producer, base_sequence, now_ms)
            for partition, base_sequence in sequences.items()
        }

    async def _ask(
        self, transactional_id: str, producer: ProducerIdentity, partitions: Collection[TopicPartition]
    ) -> Errors:
        coordinator = self._coordinator_of(transactional_id)
        if coordinator == NO_LEADER:
            return dict.fromkeys(partitions, ErrorCode.coordinator_not_available)
        if coordinator == self._broker_id:
            return await self._verify_here(transactional_id, producer, partitions)
        try:
            return await self._verify_there(coordinator, transactional_id, producer, partitions)
        except MillraceError:
            return dict.fromkeys(partitions, ErrorCode.network_exception)

    def _settle(
        self,
        producer: ProducerIdentity,
        sequences: Mapping[TopicPartition, int],
        tokens: Mapping[TopicPartition, Token],
        verified: Errors,
    ) -> Errors:
        errors: Errors = {}
        for partition, base_sequence in sequences.items():
            error = verified.get(partition, ErrorCode.network_exception)
            if error is ErrorCode.none:
                error = self._admission(producer, partition, tokens[partition], base_sequence)
            errors[partition] = error
        return errors

    def _admission(
        self, producer: ProducerIdentity, partition: TopicPartition, token: Token, base_sequence: int
    ) -> ErrorCode:
        try:
            if self.is_open(partition, producer):
                return ErrorCode.none  # another batch that waited beside this one has opened it
        except KafkaError as error:
            return ErrorCode(error.code)
        return self._states.refusal(partition, producer.producer_id, token, base_sequence)
