"""Produce, versions 3 to 11 (0 to 2 are advertised and refused: some librdkafka ask for that range).

The hot path: the request is decoded by hand, every batch goes to the log as a view into the received frame,
and the answer is made before the next request is looked at. Only what must wait (a flush that is due,
followers) makes a future, and what takes its time (`produce_work.py`) goes by way of a thread, copied where
its frame is small.
A partition that stands in a request twice is refused: which of its batches an answer is for, nobody could
tell. A client over its quota is told a throttle time. Each partition succeeds or fails
for itself. A failure under acks=0 closes the connection, as there is no other way to tell. Batches of
transactions pass `transactional_produce.py` first, and need a request that names their transactional id.
Version 12 is 11 again: that its leaders add partitions to transactions by themselves (KIP-890, part 2) is
expected only of brokers with the feature `transaction.version`; this one does not offer it. Clients may not
write to the brokers' own topics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

import structlog

from millrace.broker.errors import (
    ACKS_0,
    InvalidRecord,
    InvalidRequest,
    InvalidRequiredAcks,
    InvalidTopic,
    KafkaError,
    KafkaStorageError,
    NotEnoughReplicasAfterAppend,
    NotLeaderOrFollower,
    ProtocolError,
    RequestTimedOut,
    TransactionalIdAuthorizationFailed,
    UnknownServerError,
    UnsupportedCompressionType,
)
from millrace.broker.protocol.batch import TRANSACTIONAL_BIT
from millrace.broker.protocol.compression import ZSTD
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.frames import RequestHead as Head
from millrace.broker.protocol.hot_produce import (
    VERSIONS,
    PartitionAnswer,
    PartitionBatches,
    ProduceRequest,
    decode_request,
    encode_response,
)
from millrace.broker.protocol.system_topics import INTERNAL_TOPICS
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.replication.off_loop import Turns
from millrace.broker.replication.replica_manager import ACKS_ALL
from millrace.broker.replication.slow_appends import Outcome, is_large
from millrace.broker.server import produce_work, refused_batches
from millrace.broker.server.context import BrokerServices, RequestContext
from millrace.broker.server.dispatch import KEPT_FRAME_SIZE, Answered, Throttled
from millrace.broker.server.produce_work import ATTRIBUTES_LOW_BYTE, TooMuchAtOnce, codec_of
from millrace.broker.server.transactional_produce import Refusals, copied
from millrace.broker.storage.batch_validation import Budget, CheckedBatch
from millrace.broker.storage.disk_errors import WouldBlock

log = structlog.get_logger("millrace.broker")

API = Api.PRODUCE
FRAME_VERSIONS = VERSIONS
ADVERTISED_FROM = 0

FIRST_WITH_STORAGE_ERROR = 4
FIRST_WITH_ZSTD = 7
FIRST_WITH_CURRENT_LEADER = 10

Waits = dict[TopicPartition, asyncio.Future[None]]
"""What each appended batch has to wait for, by partition."""

Checked = list[CheckedBatch | KafkaError | None]


class Verdicts(NamedTuple):
    """Which batches a transaction does not let in, and who is told of those that are in their logs."""

    refusals: Refusals
    appended: Callable[[PartitionBatches], None]


def handle_frame(
    head: Head, frame: memoryview, position: int, context: RequestContext
) -> Answered | Coroutine[Any, Any, Any] | asyncio.Future[Any]:
    """Append every batch now; the answer now too, unless something has to be waited for. What takes its time
    is done while the connection's next requests wait: they may be of the same producer."""
    request = decode_request(frame, position, head.version)
    work = _Appends(request, len(frame), context)
    refusal = _refusal(request)
    if refusal is not None:
        work.refuse(request.partitions, refusal)
        return work.answer()
    if request.transactional_id is not None:
        return _handle_transactional(work, request.transactional_id)
    rest = work.at_once(request.partitions)
    return work.answer() if not rest else _append_in_turns(work, work.kept(rest))


class _Appends:
    """The batches of one request of `size` bytes on their way into their logs, in their order."""

    def __init__(self, request: ProduceRequest, size: int, context: RequestContext) -> None:
        self.request = request
        self.context = context
        self._size = size
        self._answers: list[PartitionAnswer] = []
        self._waits: Waits = {}
        self._budget: Budget | None = None
        self._repeated = produce_work.repeated(request.partitions)

    def refuse(self, partitions: Sequence[PartitionBatches], refusal: KafkaError) -> None:
        self._answers += [_refused(batches, refusal, self.context) for batches in partitions]

    def at_once(
        self, partitions: Sequence[PartitionBatches], verdicts: Verdicts | None = None
    ) -> Sequence[PartitionBatches]:
        """Appends what little work can append; the rest. `verdicts` are a transaction's."""
        if self._size > produce_work.COMPRESSED_AT_ONCE and produce_work.is_much(partitions):
            return partitions
        self._budget = produce_work.budget_at_once()
        for number, batches in enumerate(partitions):
            if number == produce_work.BATCHES_AT_ONCE:
                return partitions[number:]
            try:
                self.append(batches, verdicts)
            except (TooMuchAtOnce, WouldBlock):
                return partitions[number:]
        return ()

    @property
    def keeps_frame(self) -> bool:
        """Whether the batches stay where they are until a coroutine has ended."""
        return self._size >= KEPT_FRAME_SIZE

    def kept(self, partitions: Sequence[PartitionBatches]) -> Sequence[PartitionBatches]:
        """The same batches where they stay until they are appended."""
        return partitions if self.keeps_frame else copied(partitions)

    async def check(self, partitions: Sequence[PartitionBatches]) -> Checked:
        """What `append` is to be given with each, found out on a thread."""
        broker = self.context.broker
        budget = produce_work.budget_of_request(self._size, broker.config.settings.socket_request_max_bytes)
        self._budget = None
        return await broker.replica_manager.slow_appends.check(partitions, budget)

    def append(
        self,
        batches: PartitionBatches,
        verdicts: Verdicts | None = None,
        checked: CheckedBatch | KafkaError | None = None,
    ) -> None:
        """Raises TooMuchAtOnce, WouldBlock."""
        try:
            records = self._checked(batches, verdicts)
            outcome = self.context.broker.replica_manager.append_now(
                batches.topic,
                batches.partition,
                records,
                self.request.acks,
                budget=self._budget,
                checked=checked,
                may_block=self._budget is None,
            )
        except (TooMuchAtOnce, WouldBlock):
            raise
        except Exception as error:
            self._failed(batches, error)
        else:
            self._appended(batches, outcome, verdicts)

    async def append_slowly(
        self,
        batches: PartitionBatches,
        checked: CheckedBatch | KafkaError | None,
        verdicts: Verdicts | None = None,
    ) -> bool:
        """As `append`, on a thread where the batch is large, after which verdicts may hold no more: False
        then. Raises WouldBlock, before anything was waited for."""
        if not is_large(checked):
            self.append(batches, verdicts, checked)
            return True
        key = batches.topic, batches.partition
        try:
            size = len(self._checked(batches, verdicts))
            appending = self.context.broker.replica_manager.slow_appends.begin(
                key, size, checked, self.request.acks
            )
            outcome = await asyncio.shield(appending)
        except WouldBlock:
            raise
        except Exception as error:
            self._failed(batches, error)
        else:
            self._appended(batches, outcome, verdicts)
        return False

    async def settled(self, batches: PartitionBatches) -> None:
        """Until nobody's large batch is under way to where these go."""
        await self.context.broker.replica_manager.slow_appends.settled((batches.topic, batches.partition))

    def _checked(self, batches: PartitionBatches, verdicts: Verdicts | None) -> memoryview:
        """The partition's batch. Raises KafkaErrors where nobody need look at the log."""
        topic, partition, records = batches
        if (topic, partition) in self._repeated:
            raise InvalidRequest(f"{topic}-{partition} stands more than once in the request")
        if verdicts is not None and (refusal := verdicts.refusals.get((topic, partition))) is not None:
            raise refusal
        if topic in INTERNAL_TOPICS:
            raise InvalidTopic(f"topic {topic} is written by the brokers alone")
        if not records:
            raise InvalidRecord("a produce request holds exactly one batch for each partition")
        if (
            verdicts is None
            and len(records) > ATTRIBUTES_LOW_BYTE
            and records[ATTRIBUTES_LOW_BYTE] & TRANSACTIONAL_BIT
        ):
            # Nothing would ever end its transaction: readers of committed data would wait before it for ever.
            raise TransactionalIdAuthorizationFailed("a transactional batch in a request without its id")
        if self.context.head.version < FIRST_WITH_ZSTD and codec_of(records) == ZSTD:
            raise UnsupportedCompressionType("zstd needs produce version 7 or newer (KIP-110)")
        return records

    def _appended(self, batches: PartitionBatches, outcome: Outcome, verdicts: Verdicts | None) -> None:
        topic, partition, _ = batches
        appended, wait = outcome
        if wait is not None:
            self._waits[topic, partition] = wait
        self._answers.append(
            PartitionAnswer(
                topic,
                partition,
                0,
                appended.base_offset,
                appended.log_append_time_ms,
                appended.log_start_offset,
            )
        )
        if verdicts is not None:
            verdicts.appended(batches)

    def _failed(self, batches: PartitionBatches, error: Exception) -> None:
        topic, partition, _ = batches
        if not isinstance(error, KafkaError):
            log.error("an append failed", topic=topic, partition=partition, exc_info=error)
            error = UnknownServerError("the append failed; see the broker's log")
        self._answers.append(_refused(batches, error, self.context))

    def answer(self) -> Answered | asyncio.Future[Any]:
        return _answer(self.request, self._answers, self._waits, self._size, self.context)


async def _append_in_turns(work: _Appends, partitions: Sequence[PartitionBatches]) -> Any:
    """Checked on a thread, and appended with others' requests in between; the answer, or its future."""
    checked = await work.check(partitions)
    turns = Turns()
    for batches, found in zip(partitions, checked, strict=True):
        await work.settled(batches)
        await work.append_slowly(batches, found)
        await turns.maybe()
    return work.answer()


def _answer(
    request: ProduceRequest,
    answers: list[PartitionAnswer],
    waits: Waits,
    size: int,
    context: RequestContext,
) -> Answered | asyncio.Future[Any]:
    """The answer to a request of `size` bytes, or the future of one that has to wait."""
    head, broker = context.head, context.broker
    throttle_ms = 0
    if broker.quotas.produce.active:
        throttle_ms = broker.quotas.produce.charge(head.client_id, size, broker.clock.steady_ms())
    if request.acks == 0:
        failed = next((answer for answer in answers if answer.error_code), None)
        if failed is not None:
            error = ProtocolError(f"{failed.topic}-{failed.partition}: {failed.error_message}")
            error.kind = ACKS_0
            raise error
        return Throttled(None, throttle_ms) if throttle_ms else None
    if not waits:
        answer = encode_response(
            head.version, head.correlation_id, answers, throttle_ms, broker.metadata_cache.brokers
        )
        return Throttled(answer, throttle_ms) if throttle_ms else answer
    return asyncio.ensure_future(_answer_later(head, answers, waits, request.timeout_ms, broker, throttle_ms))


def _refusal(request: ProduceRequest) -> KafkaError | None:
    if request.acks not in (0, 1, ACKS_ALL):
        return InvalidRequiredAcks(f"acks is {request.acks}; expected 0, 1 or -1")
    return None


def _handle_transactional(
    work: _Appends, transactional_id: str
) -> Answered | Coroutine[Any, Any, Any] | asyncio.Future[Any]:
    """As any other request, once it is known which batches belong to an open transaction."""
    head, appends = work.context.head, work.context.broker.transactional_appends
    partitions: Sequence[PartitionBatches] = work.request.partitions
    try:
        refusals = appends.admit_now(transactional_id, head.version, work.request.partitions)
    except KafkaError as error:
        work.refuse(partitions, error)
        return work.answer()
    if refusals is not None:
        partitions = work.at_once(partitions, Verdicts(refusals, appends.appended))
        if not partitions:
            return work.answer()
    rest = work.kept(partitions)
    checked: Checked = []

    async def prepare() -> None:
        checked.extend(await work.check(rest))

    async def append(refusals: Refusals, first: int, end: int) -> int:
        verdicts = Verdicts(refusals, appends.appended)
        for number in range(first, end):
            try:
                if not await work.append_slowly(rest[number], checked[number], verdicts):
                    return number + 1
            except WouldBlock:
                await work.settled(rest[number])
                return number
        return end

    appended = appends.in_turn(transactional_id, head.version, rest, append, prepare)

    async def append_later() -> Answered | asyncio.Future[Any]:
        await asyncio.shield(appended)  # also when the client has gone meanwhile
        return work.answer()

    async def answer_later() -> Answered:
        answer = await append_later()
        return await answer if asyncio.isfuture(answer) else answer

    return append_later() if work.keeps_frame else asyncio.ensure_future(answer_later())


def _refused(batches: PartitionBatches, error: KafkaError, context: RequestContext) -> PartitionAnswer:
    code = error.code
    if code == KafkaStorageError.code and context.head.version < FIRST_WITH_STORAGE_ERROR:
        code = NotLeaderOrFollower.code  # old clients do not know the other as worth another try
    context.broker.metrics.count_error(code)
    refused_batches.note(batches.topic, batches.partition, error, context.head, context.client_address)
    leader = None
    if code == NotLeaderOrFollower.code and context.head.version >= FIRST_WITH_CURRENT_LEADER:
        leader = context.broker.metadata_cache.leader_of(batches.topic, batches.partition)
    return PartitionAnswer(
        batches.topic,
        batches.partition,
        code,
        error_message=str(error),
        record_errors=error.record_errors,
        current_leader=leader,
    )


async def _answer_later(
    head: Head,
    answers: list[PartitionAnswer],
    waits: Waits,
    timeout_ms: int,
    broker: BrokerServices,
    throttle_ms: int,
) -> Answered:
    """Wait for what the appended batches need before they may be called written."""
    await asyncio.wait(waits.values(), timeout=max(timeout_ms, 0) / 1000)
    answers = [_waited(answer, waits.get((answer.topic, answer.partition)), broker) for answer in answers]
    answer = encode_response(
        head.version, head.correlation_id, answers, throttle_ms, broker.metadata_cache.brokers
    )
    return Throttled(answer, throttle_ms) if throttle_ms else answer


def _waited(
    answer: PartitionAnswer, wait: asyncio.Future[None] | None, broker: BrokerServices
) -> PartitionAnswer:
    """What is to be said of one partition now: each succeeds or fails for itself."""
    if answer.error_code or wait is None:
        return answer
    if not wait.done():
        error: KafkaError = RequestTimedOut("the batch was not replicated or flushed in time")
    else:
        failed = wait.exception()
        if failed is None:
            return answer
        error = failed if isinstance(failed, KafkaError) else NotEnoughReplicasAfterAppend(str(failed))
    broker.metrics.count_error(error.code)
    return PartitionAnswer(answer.topic, answer.partition, error.code, error_message=str(error))
