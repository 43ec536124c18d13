"""InitProducerId, versions 0 to 5: a producer id for an idempotent producer.

Transactions are not spoken yet: a transactional id gets TRANSACTIONAL_ID_AUTHORIZATION_FAILED, the one
code that every client takes as final at once instead of trying for ever. An idempotent producer that asks
again with an id and epoch (KIP-360) gets a fresh id, which fences nothing and loses nothing.
"""

from __future__ import annotations

from typing import Any

from millrace.broker.coordination.session import SessionError
from millrace.broker.errors import (
    CoordinatorNotAvailable,
    InvalidRequest,
    TransactionalIdAuthorizationFailed,
)
from millrace.broker.protocol.frames import Api
from millrace.broker.server.answers import NO_ERROR, answer
from millrace.broker.server.context import RequestContext

API = Api.INIT_PRODUCER_ID
VERSIONS = range(6)


async def handle(request: Any, context: RequestContext) -> Any:
    version = context.head.version
    if request.transactional_id is not None:
        code = TransactionalIdAuthorizationFailed.code if request.transactional_id else InvalidRequest.code
        return answer(API, version, error_code=code, producer_id=-1, producer_epoch=-1)
    try:
        producer_id = await context.broker.producer_ids.take()
    except SessionError:
        return answer(
            API, version, error_code=CoordinatorNotAvailable.code, producer_id=-1, producer_epoch=-1
        )
    return answer(API, version, error_code=NO_ERROR, producer_id=producer_id, producer_epoch=0)
