"""ListTransactions, versions 0 and 1: the transactional ids that this broker coordinates (KIP-664).

Version 1 can ask for those that have been running for longer than a time (KIP-994).
"""

from __future__ import annotations

from typing import Any

from millrace.broker.protocol.frames import Api
from millrace.broker.server.answers import answer_of
from millrace.broker.server.context import RequestContext

API = Api.LIST_TRANSACTIONS
VERSIONS = range(2)


async def handle(request: Any, context: RequestContext) -> Any:
    error, unknown, listings = await context.broker.transactions.list_transactions(
        list(request.state_filters),
        {int(producer_id) for producer_id in request.producer_id_filters},
        int(getattr(request, "duration_filter", -1)),
    )
    return await answer_of(
        len(listings),
        context.head,
        error_code=error,
        unknown_state_filters=unknown,
        transaction_states=[
            {
                "transactional_id": listing.transactional_id,
                "producer_id": listing.producer_id,
                "transaction_state": listing.state,
            }
            for listing in listings
        ],
    )
