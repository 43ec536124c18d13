"""A scripted coordinator, which goes the odd paths that a real one seldom takes, and a member at it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.group_member import GroupMember
from millrace.broker.protocol.frames import Api, RequestHead
from tests.unit.client.cluster_stage import FakeBroker
from tests.unit.client.scripted_server import coordinator_answer, nested, response


class Coordinator:
    """A group of one that always makes its member the leader. `heartbeats`, `joins` and `syncs` are codes
    to answer first; `silent` leaves heartbeats unanswered."""

    def __init__(self) -> None:
        self.joins: list[int] = []
        self.syncs: list[int] = []
        self.heartbeats: list[int] = []
        self.silent = False
        self.generation = 0
        self.asked: list[str] = []
        self.members_joining: list[str] = []
        self.leaving: list[tuple[str, str | None]] = []
        # Answers that are held back, by what they answer; as in Apache Kafka nothing more is read from their
        # connection meanwhile.
        self.held: set[str] = set()
        self.leads = True
        self.broker = FakeBroker(
            {
                Api.FIND_COORDINATOR: self.find,
                Api.JOIN_GROUP: self.join,
                Api.SYNC_GROUP: self.sync,
                Api.HEARTBEAT: self.heartbeat,
                Api.LEAVE_GROUP: self.leave,
                Api.OFFSET_COMMIT: self.commit,
            }
        )

    def find(self, head: RequestHead, request: Any) -> Any:
        self.asked.append("find")
        return coordinator_answer(head.version, self.broker.server.port)

    async def join(self, head: RequestHead, request: Any) -> Any:
        self.asked.append("join")
        await self.hold("join")
        self.members_joining.append(request.member_id)
        code = self.joins.pop(0) if self.joins else 0
        if not code and not request.member_id and request.group_instance_id is None:
            code = 79
        member_id = request.member_id or f"member-{len(self.members_joining)}"
        self.generation += not code
        member = nested(
            Api.JOIN_GROUP, head.version, "JoinGroupResponseMember", member_id=member_id, metadata=b"meta"
        )
        return response(
            Api.JOIN_GROUP,
            head.version,
            error_code=code,
            generation_id=self.generation,
            protocol_type="test",
            protocol_name="range",
            leader=member_id if self.leads else "another",
            member_id=member_id,
            members=() if code else (member,),
        )

    async def hold(self, what: str) -> None:
        while what in self.held:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    async def sync(self, head: RequestHead, request: Any) -> Any:
        self.asked.append("sync")
        await self.hold("sync")
        code = self.syncs.pop(0) if self.syncs else 0
        share = request.assignments[0].assignment if request.assignments else b""
        return response(Api.SYNC_GROUP, head.version, error_code=code, assignment=share)

    def heartbeat(self, head: RequestHead, request: Any) -> Any:
        self.asked.append("heartbeat")
        if self.silent:
            return None
        code = self.heartbeats.pop(0) if self.heartbeats else 0
        return response(Api.HEARTBEAT, head.version, error_code=code)

    def leave(self, head: RequestHead, request: Any) -> Any:
        self.asked.append("leave")
        self.leaving += [(each.member_id, each.group_instance_id) for each in request.members]
        return response(Api.LEAVE_GROUP, head.version, error_code=0, members=())

    def commit(self, head: RequestHead, request: Any) -> Any:
        part = nested(
            Api.OFFSET_COMMIT,
            head.version,
            "OffsetCommitResponsePartition",
            partition_index=0,
            error_code=22 if request.generation_id_or_member_epoch != self.generation else 0,
        )
        topic = nested(
            Api.OFFSET_COMMIT, head.version, "OffsetCommitResponseTopic", name="flights", partitions=(part,)
        )
        return response(Api.OFFSET_COMMIT, head.version, topics=(topic,))


class Events:
    """What the member's callbacks were told."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.draining: asyncio.Event | None = None

    @property
    def has_share(self) -> bool:
        return bool(self.seen) and self.seen[-1].startswith("assign")

    async def on_assign(self, share: bytes) -> None:
        self.seen.append(f"assign {share.decode()}")

    async def on_revoke(self) -> None:
        self.seen.append("revoke")
        if self.draining is not None:
            await self.draining.wait()

    async def on_lost(self) -> None:
        self.seen.append("lost")


def member(ewr: Cluster, events: Events, **options: Any) -> GroupMember:
    def assign(members: Mapping[str, bytes]) -> dict[str, bytes]:
        return {member_id: metadata + b"!" for member_id, metadata in members.items()}

    options = {"session_timeout_ms": 5000, "heartbeat_interval_ms": 10, "assign": assign, **options}
    return GroupMember(
        ewr,
        "workers",
        protocol_type="test",
        protocols=[("range", b"meta")],
        on_assign=events.on_assign,
        on_revoke=events.on_revoke,
        on_lost=events.on_lost,
        **options,
    )


async def never(members: Mapping[str, bytes]) -> Mapping[str, bytes]:
    await asyncio.Event().wait()
    return {}
