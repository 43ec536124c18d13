"""Heartbeat, versions 0-4: a member is alive, and learns whether a rebalance has begun.

Called by dispatch; the rules are in `groups/membership.py`. From version 3 members may be static
(KIP-345). As in Apache Kafka 3.9.
"""

from __future__ import annotations

from typing import Any

from millrace.broker.protocol.frames import Api
from millrace.broker.server.answers import answer
from millrace.broker.server.context import RequestContext
from millrace.broker.server.group_requests import instance_id_of

API = Api.HEARTBEAT
VERSIONS = range(5)


async def handle(request: Any, context: RequestContext) -> Any:
    error = context.broker.groups.heartbeat(
        request.group_id, request.member_id, instance_id_of(request), request.generation_id
    )
    return answer(API, context.head.version, error_code=error)
