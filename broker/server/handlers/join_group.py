"""JoinGroup, versions 0-9: enter a group and wait for its next generation.

Called by dispatch; the rules are in `groups/membership.py`. Version 0 has no rebalance timeout (the
session timeout serves), from version 4 a client without a member id is given one first (KIP-394), from
version 5 members may be static (KIP-345), and from version 9 a returning static leader may skip the
assignment (KIP-814). As in Apache Kafka 3.9.
"""

from __future__ import annotations

from typing import Any

from millrace.broker.groups.values import JoinRequest, Protocol
from millrace.broker.protocol.frames import Api
from millrace.broker.server.answers import answer
from millrace.broker.server.context import RequestContext
from millrace.broker.server.group_requests import client_host, instance_id_of, milliseconds

API = Api.JOIN_GROUP
VERSIONS = range(10)

_MEMBER_ID_REQUIRED_FROM = 4
_NULLABLE_PROTOCOL_FROM = 7
_SKIP_ASSIGNMENT_FROM = 9


async def handle(request: Any, context: RequestContext) -> Any:
    groups = context.broker.groups
    version = context.head.version
    client_id = context.head.client_id or ""
    instance_id = instance_id_of(request)
    session_timeout_ms = milliseconds(request.session_timeout)
    joined = await groups.join(
        request.group_id,
        JoinRequest(
            member_id=request.member_id,
            new_member_id=groups.new_member_id(client_id, instance_id),
            instance_id=instance_id,
            client_id=client_id,
            client_host=client_host(context),
            session_timeout_ms=session_timeout_ms,
            rebalance_timeout_ms=milliseconds(request.rebalance_timeout) if version else session_timeout_ms,
            protocol_type=request.protocol_type,
            protocols=tuple(Protocol(offered.name, offered.metadata) for offered in request.protocols),
            requires_known_member_id=version >= _MEMBER_ID_REQUIRED_FROM,
            can_skip_assignment=version >= _SKIP_ASSIGNMENT_FROM,
        ),
    )
    protocol_name = joined.protocol_name
    if protocol_name is None and version < _NULLABLE_PROTOCOL_FROM:
        protocol_name = ""
    return answer(
        API,
        version,
        error_code=joined.error,
        generation_id=joined.generation,
        protocol_type=joined.protocol_type,
        protocol_name=protocol_name,
        leader=joined.leader,
        skip_assignment=joined.skip_assignment,
        member_id=joined.member_id,
        members=[
            {
                "member_id": member.member_id,
                "group_instance_id": member.instance_id,
                "metadata": member.metadata,
            }
            for member in joined.members
        ],
    )
