"""ListGroups, versions 0-5: the groups that this broker coordinates.

Called by dispatch. From version 4 filtered by state (KIP-518), from version 5 by type (KIP-848; every
group here is "classic"). As in Apache Kafka 3.9.
"""

from __future__ import annotations

from typing import Any

from millrace.broker.protocol.frames import Api
from millrace.broker.server.answers import answer_of
from millrace.broker.server.context import RequestContext

API = Api.LIST_GROUPS
VERSIONS = range(6)


async def handle(request: Any, context: RequestContext) -> Any:
    error, listings = await context.broker.groups.list_groups(
        getattr(request, "states_filter", ()), getattr(request, "types_filter", ())
    )
    return await answer_of(
        len(listings),
        context.head,
        error_code=error,
        groups=[
            {
                "group_id": listing.group_id,
                "protocol_type": listing.protocol_type,
                "group_state": listing.state,
                "group_type": listing.group_type,
            }
            for listing in listings
        ],
    )
