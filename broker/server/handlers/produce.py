"""Produce, versions 3 to 11 (0 to 2 are advertised and refused: some librdkafka ask for that range).

The hot path: the request is decoded by hand, every batch goes to the log as a view into the received frame,
and the answer is made before the next request is looked at. Only what must wait (a flush that is due,
followers) makes a future. A client over its quota is told a throttle time. Each partition succeeds or fails
for itself. A failure under acks=0 closes the connection, as there is no other way to tell. Batches of
transactions pass `transactional_produce.py` first, and need a request that names their transactional id.
Version 12 is 11 again: that its leaders add partitions to transactions by themselves (KIP-890, part 2) is
expected only of brokers with the feature `transaction.version`; this one does not offer it. Clients may not
write to the brokers' own topics.
"""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from millrace.broker.errors import (
    InvalidRecord,
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
from millrace.broker.protocol.batch import ATTRIBUTES_POSITION, TRANSACTIONAL_BIT
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
from millrace.broker.replication.replica_manager import ACKS_ALL
from millrace.broker.server import refused_batches
from millrace.broker.server.connection import ACKS_0
from millrace.broker.server.context import BrokerServices, RequestContext
from millrace.broker.server.dispatch import Answered, Throttled
from millrace.broker.server.transactional_produce import Refusals, copied

log = structlog.get_logger("millrace.broker")

API = Api.PRODUCE
FRAME_VERSIONS = VERSIONS
ADVERTISED_FROM = 0

FIRST_WITH_STORAGE_ERROR = 4
FIRST_WITH_ZSTD = 7
FIRST_WITH_CURRENT_LEADER = 10

_ATTRIBUTES_LOW_BYTE = ATTRIBUTES_POSITION + 1

Waits = dict[tuple[str, int], asyncio.Future[None]]
"""What each appended batch has to wait for, by partition."""


def handle_frame(
    head: Head, frame: memoryview, position: int, context: RequestContext
) -> Answered | asyncio.Future[Any]:
    """Append every batch now; the answer now too, unless something has to be waited for."""
    request = decode_request(frame, position, head.version)
    refusal = _refusal(request)
    waits: Waits = {}
    if request.transactional_id is not None and refusal is None:
        return _handle_transactional(request, request.transactional_id, len(frame), context)
    answers = [
        _refused(batches, refusal, context) if refusal else _append(batches, request.acks, context, waits)
        for batches in request.partitions
    ]
    return _answer(request, answers, waits, len(frame), context)


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


def _append(
    batches: PartitionBatches,
    acks: int,
    context: RequestContext,
    waits: Waits,
    *,
    verified: bool = False,
) -> PartitionAnswer:
    topic, partition, records = batches
    try:
        if topic in INTERNAL_TOPICS:
            raise InvalidTopic(f"topic {topic} is written by the brokers alone")
        if not records:
            raise InvalidRecord("a produce request holds exactly one batch for each partition")
        if (
            not verified
            and len(records) > _ATTRIBUTES_LOW_BYTE
            and records[_ATTRIBUTES_LOW_BYTE] & TRANSACTIONAL_BIT
        ):
            # Nothing would ever end its transaction: readers of committed data would wait before it for ever.
            raise TransactionalIdAuthorizationFailed("a transactional batch in a request without its id")
        if context.head.version < FIRST_WITH_ZSTD and _codec(records) == ZSTD:
            raise UnsupportedCompressionType("zstd needs produce version 7 or newer (KIP-110)")
        appended, wait = context.broker.replica_manager.append_now(topic, partition, records, acks)
    except KafkaError as error:
        return _refused(batches, error, context)
    except Exception:
        log.exception("an append failed", topic=topic, partition=partition)
        return _refused(batches, UnknownServerError("the append failed; see the broker's log"), context)
    if wait is not None:
        waits[topic, partition] = wait
    return PartitionAnswer(
        topic, partition, 0, appended.base_offset, appended.log_append_time_ms, appended.log_start_offset
    )


def _handle_transactional(
    request: ProduceRequest, transactional_id: str, size: int, context: RequestContext
) -> Answered | asyncio.Future[Any]:
    """As any other request, once it is known which batches belong to an open transaction."""
    waits: Waits = {}
    answers: list[PartitionAnswer] = []
    head, appends = context.head, context.broker.transactional_appends
    partitions = request.partitions

    def append(refusals: Refusals) -> None:
        for batches in partitions:
            refusal = refusals.get((batches.topic, batches.partition))
            if refusal is not None:
                answers.append(_refused(batches, refusal, context))
                continue
            answers.append(_append(batches, request.acks, context, waits, verified=True))
            if not answers[-1].error_code:
                appends.appended(batches)

    try:
        refusals = appends.admit_now(transactional_id, head.version, partitions)
    except KafkaError as error:
        answers = [_refused(batches, error, context) for batches in partitions]
        return _answer(request, answers, waits, size, context)
    if refusals is not None:
        append(refusals)
        return _answer(request, answers, waits, size, context)
    partitions = copied(partitions)
    appended = appends.in_turn(transactional_id, head.version, partitions, append)

    async def append_later() -> Answered:
        await asyncio.shield(appended)  # also when the client has gone meanwhile
        answer = _answer(request, answers, waits, size, context)
        return await answer if asyncio.isfuture(answer) else answer

    return asyncio.ensure_future(append_later())


def _codec(records: memoryview) -> int:
    return records[_ATTRIBUTES_LOW_BYTE] & 7 if len(records) > _ATTRIBUTES_LOW_BYTE else 0


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
        batches.topic, batches.partition, code, error_message=str(error), current_leader=leader
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
