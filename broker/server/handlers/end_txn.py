"""EndTxn, versions 0 to 4: commit or abort.

Answered when the outcome is in the coordinator's log; the markers follow. Version 5 belongs to KIP-890's
second part (the epoch grows with every transaction), which clients use only where a broker offers the feature
`transaction.version`; this one does not.
"""

from __future__ import annotations

from typing import Any

from millrace.broker.protocol.frames import Api
from millrace.broker.server.answers import answer
from millrace.broker.server.context import RequestContext
from millrace.broker.server.transaction_requests import fenced_code, producer_of

API = Api.END_TXN
VERSIONS = range(5)

_PRODUCER_FENCED_FROM = 2


async def handle(request: Any, context: RequestContext) -> Any:
    error = await context.broker.transactions.end(
        request.transactional_id, producer_of(request), bool(request.committed)
    )
    version = context.head.version
    return answer(API, version, error_code=fenced_code(error, version, _PRODUCER_FENCED_FROM))
