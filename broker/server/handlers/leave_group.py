"""LeaveGroup, versions 0-5: members go, and the others rebalance at once.

Called by dispatch; the rules are in `groups/membership.py`. Versions 0-2 name one member and have one
error; from version 3 several members, static ones by their instance (KIP-345). As in Apache Kafka 3.9.
"""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from millrace.broker.groups.values import LeaveRequest
from millrace.broker.protocol.frames import Api
from millrace.broker.server.answers import answer
from millrace.broker.server.context import RequestContext

API = Api.LEAVE_GROUP
VERSIONS = range(6)

_SEVERAL_MEMBERS_FROM = 3


async def handle(request: Any, context: RequestContext) -> Any:
    version = context.head.version
    groups = context.broker.groups
    if version < _SEVERAL_MEMBERS_FROM:
        error, results = groups.leave(request.group_id, [LeaveRequest(request.member_id, None)])
        if error is ErrorCode.none:
            error = results[0].error
        return answer(API, version, error_code=error)
    leaving = [LeaveRequest(member.member_id, member.group_instance_id) for member in request.members]
    error, results = groups.leave(request.group_id, leaving)
    return answer(
        API,
        version,
        error_code=error,
        members=[
            {
                "member_id": result.member_id,
                "group_instance_id": result.instance_id,
                "error_code": result.error,
            }
            for result in results
        ],
    )
