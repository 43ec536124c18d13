"""Group membership against a scripted coordinator: the odd paths that a real one seldom takes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.group_member import GroupMember
from millrace.broker.client.group_offsets import CommittedOffset
from millrace.broker.errors import FencedInstanceId, GroupMaxSizeReached, IllegalGeneration
from millrace.broker.protocol.frames import Api, RequestHead
from tests.unit.client.scripted_server import nested, response, until
from tests.unit.client.test_cluster import FakeBroker, cluster


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
        port = self.broker.server.port
        return response(
            Api.FIND_COORDINATOR,
            head.version,
            error_code=0,
            error_message=None,
            node_id=1,
            host="127.0.0.1",
            port=port,
        )

    def join(self, head: RequestHead, request: Any) -> Any:
        self.asked.append("join")
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
            leader=member_id,
            member_id=member_id,
            members=() if code else (member,),
        )

    def sync(self, head: RequestHead, request: Any) -> Any:
        self.asked.append("sync")
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

    async def on_assign(self, share: bytes) -> None:
        self.seen.append(f"assign {share.decode()}")

    async def on_revoke(self) -> None:
        self.seen.append("revoke")
        if self.draining is not None:
            await self.draining.wait()

    async def on_lost(self) -> None:
        self.seen.append("lost")


def member(ewr: Cluster, events: Events, **options: Any) -> GroupMember:
    options = {"session_timeout_ms": 5000, "heartbeat_interval_ms": 10, **options}
    return GroupMember(
        ewr,
        "workers",
        protocol_type="test",
        protocols=[("range", b"meta")],
        on_assign=events.on_assign,
        on_revoke=events.on_revoke,
        on_lost=events.on_lost,
        assign=lambda members: {member_id: metadata + b"!" for member_id, metadata in members.items()},
        **options,
    )


def test_member_takes_the_id_it_is_given_joins_and_leaves() -> None:
    async def main() -> None:
        coordinator, events = Coordinator(), Events()
        async with coordinator.broker as broker, cluster(broker.server.address) as ewr:
            async with member(ewr, events) as one:
                await until(lambda: "heartbeat" in coordinator.asked)
                assert (one.member_id, one.generation, one.protocol) == ("member-1", 1, "range")
                assert one.is_leader
            assert coordinator.members_joining == ["", "member-1"]
            assert events.seen == ["assign meta!", "revoke"]
            assert coordinator.asked[-1] == "leave"

    asyncio.run(main())


def test_static_member_keeps_its_seat_when_it_closes() -> None:
    async def main() -> None:
        coordinator, events = Coordinator(), Events()
        async with coordinator.broker as broker, cluster(broker.server.address) as ewr:
            async with member(ewr, events, instance_id="worker-1"):
                await until(lambda: "heartbeat" in coordinator.asked)
            assert "leave" not in coordinator.asked

    asyncio.run(main())


def test_heartbeats_go_on_while_the_share_is_given_back() -> None:
    async def main() -> None:
        coordinator, events = Coordinator(), Events()
        events.draining = asyncio.Event()
        coordinator.heartbeats = [27]
        async with (
            coordinator.broker as broker,
            cluster(broker.server.address) as ewr,
            member(ewr, events) as one,
        ):
            await until(lambda: "revoke" in events.seen)
            assert not one.is_assigned
            before = coordinator.asked.count("heartbeat")
            await until(lambda: coordinator.asked.count("heartbeat") > before + 2)
            assert coordinator.asked.count("join") == 2
            events.draining.set()
            await until(lambda: events.seen.count("assign meta!") == 2)
            assert coordinator.members_joining[-1] == "member-1"

    asyncio.run(main())


@pytest.mark.parametrize("code", [22, 25])
def test_member_that_was_put_out_is_lost_and_joins_anew(code: int) -> None:
    async def main() -> None:
        coordinator, events = Coordinator(), Events()
        coordinator.heartbeats = [0, code]
        async with coordinator.broker as broker, cluster(broker.server.address) as ewr:
            async with member(ewr, events):
                await until(lambda: events.seen.count("assign meta!") == 2)
            assert events.seen == ["assign meta!", "lost", "assign meta!", "revoke"]
            assert coordinator.members_joining == ["", "member-1", "", "member-3"]

    asyncio.run(main())


def test_silent_coordinator_costs_the_seat_after_the_session_timeout() -> None:
    async def main() -> None:
        coordinator, events = Coordinator(), Events()
        async with (
            coordinator.broker as broker,
            cluster(broker.server.address) as ewr,
            member(ewr, events, session_timeout_ms=150),
        ):
            await until(lambda: "heartbeat" in coordinator.asked)
            coordinator.silent = True
            await until(lambda: "lost" in events.seen)
            coordinator.silent = False
            await until(lambda: events.seen.count("assign meta!") == 2)

    asyncio.run(main())


def test_coordinator_that_moves_is_looked_up_and_the_seat_is_kept() -> None:
    async def main() -> None:
        coordinator, events = Coordinator(), Events()
        coordinator.heartbeats = [0, 16, 14, 15]
        async with (
            coordinator.broker as broker,
            cluster(broker.server.address) as ewr,
            member(ewr, events),
        ):
            await until(lambda: coordinator.asked.count("heartbeat") > 6)
            assert coordinator.asked.count("find") == 3
            assert events.seen == ["assign meta!"]

    asyncio.run(main())


def test_trouble_while_joining_is_tried_again() -> None:
    async def main() -> None:
        coordinator, events = Coordinator(), Events()
        coordinator.joins = [15, 14, 79, 25, 0]
        coordinator.syncs = [27, 16]
        async with (
            coordinator.broker as broker,
            cluster(broker.server.address) as ewr,
            member(ewr, events),
        ):
            await until(lambda: events.seen == ["assign meta!"])

    asyncio.run(main())


@pytest.mark.parametrize(
    ("joins", "heartbeats", "error"), [([81], [], GroupMaxSizeReached), ([], [82], FencedInstanceId)]
)
def test_refusal_without_cure_ends_the_membership(
    joins: list[int], heartbeats: list[int], error: Any
) -> None:
    async def main() -> None:
        coordinator, events = Coordinator(), Events()
        coordinator.joins, coordinator.heartbeats = list(joins), list(heartbeats)
        async with coordinator.broker as broker, cluster(broker.server.address) as ewr:
            async with member(ewr, events, instance_id="worker-1") as one:
                with pytest.raises(error, match="cluster ewr: group workers: "):
                    await asyncio.wait_for(one.wait(), 5)
            assert events.seen == (["assign meta!", "lost"] if heartbeats else [])

    asyncio.run(main())


def test_error_in_a_callback_ends_the_membership_with_that_error() -> None:
    async def main() -> None:
        coordinator, events = Coordinator(), Events()

        async def broken(share: bytes) -> None:
            raise RuntimeError("no room")

        events.on_assign = broken  # type: ignore[method-assign]
        async with coordinator.broker as broker, cluster(broker.server.address) as ewr:
            async with member(ewr, events) as one:
                with pytest.raises(RuntimeError, match="no room"):
                    await asyncio.wait_for(one.wait(), 5)
            assert coordinator.asked[-1] == "leave"

    asyncio.run(main())


def test_rejoin_shares_out_the_work_anew() -> None:
    async def main() -> None:
        coordinator, events = Coordinator(), Events()
        async with (
            coordinator.broker as broker,
            cluster(broker.server.address) as ewr,
            member(ewr, events) as one,
        ):
            await until(lambda: one.is_assigned)
            one.rejoin()
            await until(lambda: one.generation == 2)
            assert events.seen[:3] == ["assign meta!", "revoke", "assign meta!"]

    asyncio.run(main())


def test_member_closed_while_it_waits_to_join_ends_at_once() -> None:
    async def main() -> None:
        coordinator, events = Coordinator(), Events()

        async def never(head: RequestHead, request: Any) -> None:
            coordinator.asked.append("join")

        coordinator.broker.handlers[Api.JOIN_GROUP] = never
        async with coordinator.broker as broker, cluster(broker.server.address) as ewr:
            one = member(ewr, events)
            one.start()
            await until(lambda: "join" in coordinator.asked)
            await asyncio.wait_for(one.close(), 5)
            assert events.seen == []

    asyncio.run(main())


def test_commit_of_an_older_generation_is_refused() -> None:
    async def main() -> None:
        coordinator, events = Coordinator(), Events()
        async with (
            coordinator.broker as broker,
            cluster(broker.server.address) as ewr,
            member(ewr, events) as one,
        ):
            await until(lambda: one.is_assigned)
            await one.commit({("flights", 0): CommittedOffset(5)})
            coordinator.generation += 1
            with pytest.raises(IllegalGeneration):
                await one.commit({("flights", 0): CommittedOffset(6)})

    asyncio.run(main())
