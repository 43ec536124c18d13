"""ListPartitionReassignments, version 0 (KIP-455): the partitions that are being moved, all or those named.

Partitions that do not move, and such as do not exist, are left out.
"""

from __future__ import annotations

from typing import Any

from millrace.broker.protocol.frames import Api
from millrace.broker.server.answers import answer
from millrace.broker.server.context import RequestContext

API = Api.LIST_PARTITION_REASSIGNMENTS
VERSIONS = range(1)


async def handle(request: Any, context: RequestContext) -> Any:
    asked = request.topics
    wanted = None
    if asked is not None:
        wanted = {(topic.name, number) for topic in asked for number in topic.partition_indexes}
    topics: dict[str, list[dict[str, Any]]] = {}
    for (name, number), partition in context.broker.reassignments.moving().items():
        if wanted is None or (name, number) in wanted:
            topics.setdefault(name, []).append(
                {
                    "partition_index": number,
                    "replicas": partition.replicas,
                    "adding_replicas": partition.adding,
                    "removing_replicas": partition.removing,
                }
            )
    return answer(
        API,
        context.head.version,
        error_message=None,
        topics=[{"name": name, "partitions": parts} for name, parts in topics.items()],
    )
