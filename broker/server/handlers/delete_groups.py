"""DeleteGroups, versions 0-2: forget empty groups and their offsets.

Called by dispatch; the rules are in `groups/coordinator.py`. As in Apache Kafka 3.9.
"""

from __future__ import annotations

from typing import Any

from millrace.broker.protocol.frames import Api
from millrace.broker.server.answers import answer
from millrace.broker.server.context import RequestContext

API = Api.DELETE_GROUPS
VERSIONS = range(3)


async def handle(request: Any, context: RequestContext) -> Any:
    groups = context.broker.groups
    results = [
        {"group_id": group_id, "error_code": await groups.delete_group(group_id)}
        for group_id in dict.fromkeys(request.groups_names)
    ]
    return answer(API, context.head.version, results=results)
