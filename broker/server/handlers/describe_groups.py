"""DescribeGroups, versions 0-5: state, members, metadata and assignments of groups.

Called by dispatch. A group that does not exist is described as Dead without an error, as in Apache Kafka
3.9. There is no authorizer: whoever asks for its authorized operations (version 3) may do everything that
can be done to a group.
"""

from __future__ import annotations

from typing import Any

from millrace.broker.groups.values import GroupDescription
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.operations import ALL_ON_GROUP, NOT_ASKED
from millrace.broker.server.answers import answer
from millrace.broker.server.context import RequestContext

API = Api.DESCRIBE_GROUPS
VERSIONS = range(6)


async def handle(request: Any, context: RequestContext) -> Any:
    asked = getattr(request, "include_authorized_operations", False)
    operations = ALL_ON_GROUP if asked else NOT_ASKED
    groups = context.broker.groups
    return answer(
        API,
        context.head.version,
        groups=[_described(groups.describe(group_id), operations) for group_id in request.groups],
    )


def _described(group: GroupDescription, operations: int) -> dict[str, Any]:
    return {
        "error_code": group.error,
        "group_id": group.group_id,
        "group_state": group.state,
        "protocol_type": group.protocol_type,
        "protocol_data": group.protocol_name,
        "members": [
            {
                "member_id": member.member_id,
                "group_instance_id": member.instance_id,
                "client_id": member.client_id,
                "client_host": member.client_host,
                "member_metadata": member.metadata,
                "member_assignment": member.assignment,
            }
            for member in group.members
        ],
        "authorized_operations": operations,
    }
