"""Produce, versions 3 to 11 (0 to 2 are advertised and refused: some librdkafka ask for that range).

The hot path: the request is decoded by hand, every batch goes to the log as a view into the received frame,
and the answer is made before the next request is looked at. Only what must wait (a flush that is due,
followers) makes a future. Each partition succeeds or fails for itself. A failure under acks=0 closes the
connection, as there is no other way to tell. Transactional requests and batches are refused until
transactions exist; clients may not write to the brokers' own topics.
"""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from millrace.broker.coordination.metadata_cache import INTERNAL_TOPICS
from millrace.broker.errors import (
    InvalidRecord,
    InvalidRequiredAcks,
    InvalidTopic,
    KafkaError,
    NotEnoughReplicasAfterAppend,
    ProtocolError,
    RequestTimedOut,
    TransactionalIdAuthorizationFailed,
    UnknownServerError,
)
from millrace.broker.protocol.batch import ATTRIBUTES_POSITION, TRANSACTIONAL_BIT
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.frames import RequestHead as Head
from millrace.broker.protocol.hot_produce import (
    PartitionAnswer,
    PartitionBatches,
    ProduceRequest,
    decode_request,
    encode_response,
)
from millrace.broker.replication.replica_manager import ACKS_ALL
from millrace.broker.server.context import BrokerServices, RequestContext
from millrace.broker.server.dispatch import Frame

log = structlog.get_logger("millrace.broker")

API = Api.PRODUCE
VERSIONS = range(3, 12)
FRAME_VERSIONS = VERSIONS
ADVERTISED_FROM = 0

_ATTRIBUTES_LOW_BYTE = ATTRIBUTES_POSITION + 1


def handle_frame(
    head: Head, frame: memoryview, position: int, context: RequestContext
) -> Frame | asyncio.Future[Any]:
    """Append every batch now; the answer now too, unless something has to be waited for."""
    request = decode_request(frame, position, head.version)
    broker = context.broker
    refusal = _refusal(request)
    waits: list[asyncio.Future[None]] = []
    answers = [
        _refused(batches, refusal, broker) if refusal else _append(batches, request.acks, broker, waits)
        for batches in request.partitions
    ]
    if request.acks == 0:
        if any(answer.error_code for answer in answers):
            raise ProtocolError("a produce request with acks=0 failed; closing is the only answer")
        return None
    if not waits:
        return encode_response(head.version, head.correlation_id, answers)
    return asyncio.ensure_future(_answer_later(head, answers, waits, request.timeout_ms, broker))


def _refusal(request: ProduceRequest) -> KafkaError | None:
    if request.acks not in (0, 1, ACKS_ALL):
        return InvalidRequiredAcks(f"acks is {request.acks}; expected 0, 1 or -1")
    if request.transactional_id is not None:
        return TransactionalIdAuthorizationFailed("transactions are not supported by this broker")
    return None


def _append(
    batches: PartitionBatches, acks: int, broker: BrokerServices, waits: list[asyncio.Future[None]]
) -> PartitionAnswer:
    topic, partition, records = batches
    try:
        if topic in INTERNAL_TOPICS:
            raise InvalidTopic(f"topic {topic} is written by the brokers alone")
        if not records:
            raise InvalidRecord("a produce request holds exactly one batch for each partition")
        if len(records) > _ATTRIBUTES_LOW_BYTE and records[_ATTRIBUTES_LOW_BYTE] & TRANSACTIONAL_BIT:
            # Nothing would ever end its transaction: readers of committed data would wait before it for ever.
            raise TransactionalIdAuthorizationFailed("transactions are not supported by this broker")
        appended, wait = broker.replica_manager.append_now(topic, partition, records, acks)
    except KafkaError as error:
        return _refused(batches, error, broker)
    except Exception:
        log.exception("an append failed", topic=topic, partition=partition)
        return _refused(batches, UnknownServerError("the append failed; see the broker's log"), broker)
    if wait is not None:
        waits.append(wait)
    return PartitionAnswer(
        topic, partition, 0, appended.base_offset, appended.log_append_time_ms, appended.log_start_offset
    )


def _refused(batches: PartitionBatches, error: KafkaError, broker: BrokerServices) -> PartitionAnswer:
    broker.metrics.count_error(error.code)
    return PartitionAnswer(batches.topic, batches.partition, error.code, error_message=str(error))


async def _answer_later(
    head: Head,
    answers: list[PartitionAnswer],
    waits: list[asyncio.Future[None]],
    timeout_ms: int,
    broker: BrokerServices,
) -> Frame:
    """Wait for what the appended batches need before they may be called written."""
    done, late = await asyncio.wait(waits, timeout=max(timeout_ms, 0) / 1000)
    failed = next((future.exception() for future in done if future.exception() is not None), None)
    if late or failed is not None:
        error: KafkaError = RequestTimedOut("the batch was not flushed in time")
        if failed is not None:
            error = failed if isinstance(failed, KafkaError) else NotEnoughReplicasAfterAppend(str(failed))
        answers = [
            answer
            if answer.error_code
            else PartitionAnswer(answer.topic, answer.partition, error.code, error_message=str(error))
            for answer in answers
        ]
        broker.metrics.count_error(error.code)
    return encode_response(head.version, head.correlation_id, answers)
