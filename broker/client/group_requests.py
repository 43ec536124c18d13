"""What a member asks of its group's coordinator: to join, for its share, to keep the seat, to leave.

Held by `group_member`, which knows who it is and what an answer means for it. They have a connection of their
own, because a join waits in the server until the others have come.

Versions: JoinGroup 5-7 (member id from the server as of KIP-394, static members), SyncGroup 3-5, Heartbeat
3-4, LeaveGroup 3-4.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kio.static.primitive import i32Timedelta

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.connection import request_schema
from millrace.broker.client.group_offsets import ask_coordinator, group_refusal
from millrace.broker.protocol.frames import Api

_JOIN_VERSION = 7
_SYNC_VERSION = 5
_HEARTBEAT_VERSION = 4
_LEAVE_VERSION = 4

_LEAVE_TIMEOUT_MS = 3_000


@dataclass(frozen=True, slots=True)
class GroupRequests:
    """Of one member; `purpose` names its connection. `on_reached` is called when a request goes out."""

    cluster: Cluster
    group_id: str
    protocol_type: str
    instance_id: str | None
    session_timeout_ms: int
    rebalance_timeout_ms: int
    purpose: str

    async def join(
        self, member_id: str, protocols: Sequence[tuple[str, bytes]], on_reached: Callable[[], None]
    ) -> Any:
        """The answer, whatever it is."""
        schema = request_schema(Api.JOIN_GROUP, _JOIN_VERSION)
        request = schema.JoinGroupRequest(
            group_id=self.group_id,
            session_timeout=_ms(self.session_timeout_ms),
            rebalance_timeout=_ms(self.rebalance_timeout_ms),
            member_id=member_id,
            group_instance_id=self.instance_id,
            protocol_type=self.protocol_type,
            protocols=tuple(
                schema.JoinGroupRequestProtocol(name=name, metadata=metadata) for name, metadata in protocols
            ),
        )
        return await self._ask_at_length(request, on_reached)

    async def sync(
        self,
        member_id: str,
        generation: int,
        protocol: str | None,
        shares: Mapping[str, bytes],
        on_reached: Callable[[], None],
    ) -> Any:
        """The answer, whatever it is; the leader gives the `shares`."""
        schema = request_schema(Api.SYNC_GROUP, _SYNC_VERSION)
        request = schema.SyncGroupRequest(
            group_id=self.group_id,
            generation_id=generation,
            member_id=member_id,
            group_instance_id=self.instance_id,
            protocol_type=self.protocol_type,
            protocol_name=protocol,
            assignments=tuple(
                schema.SyncGroupRequestAssignment(member_id=member_id, assignment=share)
                for member_id, share in shares.items()
            ),
        )
        return await self._ask_at_length(request, on_reached)

    async def heartbeat(self, member_id: str, generation: int) -> None:
        """Raises the KafkaError that the coordinator answers."""
        schema = request_schema(Api.HEARTBEAT, _HEARTBEAT_VERSION)
        request = schema.HeartbeatRequest(
            group_id=self.group_id,
            generation_id=generation,
            member_id=member_id,
            group_instance_id=self.instance_id,
        )
        self.check(await self._ask(request, self.session_timeout_ms), "heartbeat")

    async def leave(self, member_id: str, *, beside: bool) -> None:
        """Without a member id the instance id alone says who leaves (KIP-345). `beside`: another request may
        be out. A server reads nothing more from a connection on which it holds an answer back, and that stays
        open meanwhile: with it, a request to join could get lost that is not read yet. Raises MillraceError,
        TimeoutError."""
        schema = request_schema(Api.LEAVE_GROUP, _LEAVE_VERSION)
        identity = schema.MemberIdentity(member_id=member_id, group_instance_id=self.instance_id)
        request = schema.LeaveGroupRequest(group_id=self.group_id, members=(identity,))
        purpose = f"{self.purpose} leaving" if beside else self.purpose
        try:
            async with asyncio.timeout(_LEAVE_TIMEOUT_MS / 1000):
                await ask_coordinator(
                    self.cluster, self.group_id, request, purpose=purpose, timeout_ms=_LEAVE_TIMEOUT_MS
                )
        finally:
            self.cluster.close_purpose(purpose)

    def check(self, answer: Any, subject: str) -> None:
        """Raises the KafkaError of a refusal."""
        if answer.error_code:
            raise group_refusal(self.cluster, self.group_id, int(answer.error_code), subject)

    def hang_up(self) -> None:
        """A request that is still out there would hold up all that follow on its connection."""
        self.cluster.close_purpose(self.purpose)

    async def _ask_at_length(self, request: Any, on_reached: Callable[[], None]) -> Any:
        """Ask what is answered when others have done their part."""
        timeout_ms = self.rebalance_timeout_ms + self.cluster.request_timeout_ms
        return await self._ask(request, timeout_ms, on_reached)

    async def _ask(
        self, request: Any, timeout_ms: float, on_reached: Callable[[], None] | None = None
    ) -> Any:
        return await ask_coordinator(
            self.cluster,
            self.group_id,
            request,
            purpose=self.purpose,
            timeout_ms=timeout_ms,
            on_reached=on_reached,
        )


def _ms(value: int) -> i32Timedelta:
    return i32Timedelta.parse(datetime.timedelta(milliseconds=value))
