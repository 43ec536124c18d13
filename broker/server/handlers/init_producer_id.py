"""InitProducerId, versions 0 to 5: a producer begins; it gets an id and an epoch.

Without a transactional id (an idempotent producer) any broker hands out a fresh id; one that asks again with
an id and epoch (KIP-360) gets a fresh id too, which fences nothing and loses nothing. With a transactional id
its coordinator answers (`transactions/state.py`): an older producer is fenced, its open transaction aborted
first. From version 3 a producer may say who it was.
"""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from millrace.broker.coordination.session import SessionError
from millrace.broker.protocol.frames import Api
from millrace.broker.server.answers import answer
from millrace.broker.server.context import RequestContext
from millrace.broker.server.group_requests import milliseconds
from millrace.broker.server.transaction_requests import fenced_code
from millrace.broker.transactions.values import NO_EPOCH, NO_PRODUCER_ID, ProducerIdentity

API = Api.INIT_PRODUCER_ID
VERSIONS = range(6)

_PRODUCER_FENCED_FROM = 4


async def handle(request: Any, context: RequestContext) -> Any:
    version = context.head.version
    error, producer = await _begin(request, context)
    return answer(
        API,
        version,
        error_code=fenced_code(error, version, _PRODUCER_FENCED_FROM),
        producer_id=producer.producer_id,
        producer_epoch=producer.epoch,
    )


async def _begin(request: Any, context: RequestContext) -> tuple[ErrorCode, ProducerIdentity]:
    former = ProducerIdentity(
        getattr(request, "producer_id", NO_PRODUCER_ID), getattr(request, "producer_epoch", NO_EPOCH)
    )
    if (former.producer_id == NO_PRODUCER_ID) != (former.epoch == NO_EPOCH):
        return ErrorCode.invalid_request, ProducerIdentity()
    if request.transactional_id is not None:
        return await context.broker.transactions.begin_producer(
            request.transactional_id,
            milliseconds(request.transaction_timeout),
            former if former.producer_id != NO_PRODUCER_ID else None,
        )
    try:
        return ErrorCode.none, ProducerIdentity(await context.broker.producer_ids.take(), 0)
    except SessionError:
        return ErrorCode.coordinator_not_available, ProducerIdentity()
