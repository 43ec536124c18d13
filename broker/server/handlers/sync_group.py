"""SyncGroup, versions 0-5: the leader hands in everyone's assignment, each member gets its own.

Called by dispatch; the rules are in `groups/membership.py`. From version 3 members may be static
(KIP-345), from version 5 the protocol's type and name are checked (KIP-559). As in Apache Kafka 3.9.
"""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from millrace.broker.groups.values import SyncRequest
from millrace.broker.protocol.frames import Api
from millrace.broker.server.answers import answer
from millrace.broker.server.context import RequestContext
from millrace.broker.server.group_requests import instance_id_of

API = Api.SYNC_GROUP
VERSIONS = range(6)

_PROTOCOL_MANDATORY_FROM = 5


async def handle(request: Any, context: RequestContext) -> Any:
    version = context.head.version
    protocol_type = getattr(request, "protocol_type", None)
    protocol_name = getattr(request, "protocol_name", None)
    if version >= _PROTOCOL_MANDATORY_FROM and (protocol_type is None or protocol_name is None):
        return answer(API, version, error_code=ErrorCode.inconsistent_group_protocol)
    synced = await context.broker.groups.sync(
        request.group_id,
        SyncRequest(
            member_id=request.member_id,
            instance_id=instance_id_of(request),
            generation=request.generation_id,
            protocol_type=protocol_type,
            protocol_name=protocol_name,
            assignments={given.member_id: given.assignment for given in request.assignments},
        ),
    )
    return answer(
        API,
        version,
        error_code=synced.error,
        protocol_type=synced.protocol_type,
        protocol_name=synced.protocol_name,
        assignment=synced.assignment,
    )
