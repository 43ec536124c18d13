"""Group membership against a scripted coordinator: the odd paths that a real one seldom takes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from millrace.broker.client import group_member
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.group_member import GroupMember
from millrace.broker.client.group_offsets import CommittedOffset
from millrace.broker.errors import FencedInstanceId, GroupMaxSizeReached, IllegalGeneration
from millrace.broker.protocol.frames import Api, RequestHead
from tests.servers import free_port
from tests.unit.client.scripted_server import ScriptedServer, nested, response
from tests.unit.client.test_cluster import FakeBroker, cluster, hold
from tests.waiting import patience
from tests.waiting import until_async as until


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
            member(ewr, events),
        ):
            await until(lambda: "revoke" in events.seen)
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
                    await asyncio.wait_for(one.wait(), patience())
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
                    await asyncio.wait_for(one.wait(), patience())
            assert coordinator.asked[-1] == "leave"

    asyncio.run(main())


def test_seat_that_is_lost_while_joining_again_is_said_before_the_next_claim() -> None:
    """Others may have the work by then: what was kept through the rebalance must not be claimed again."""

    async def main() -> None:
        coordinator, events = Coordinator(), Events()
        async with (
            coordinator.broker as broker,
            cluster(broker.server.address) as ewr,
            member(ewr, events) as one,
        ):
            await until(lambda: events.has_share)
            coordinator.joins = [25]
            one.rejoin()
            await until(lambda: events.seen.count("assign meta!") == 2)
            assert events.seen == ["assign meta!", "revoke", "lost", "assign meta!"]

    asyncio.run(main())


@pytest.mark.parametrize(("instance_id", "is_lost"), [("worker-1", True), (None, False)])
def test_static_member_that_a_generation_was_begun_without_was_lost(
    instance_id: str | None, is_lost: bool
) -> None:
    """The leader went by an old claim of it. A dynamic member would have lost its seat instead."""

    async def main() -> None:
        coordinator, events = Coordinator(), Events()
        async with (
            coordinator.broker as broker,
            cluster(broker.server.address) as ewr,
            member(ewr, events, instance_id=instance_id) as one,
        ):
            await until(lambda: events.has_share)
            one.rejoin()
            await until(lambda: events.seen.count("assign meta!") == 2)
            coordinator.generation += 1
            one.rejoin()
            # The join of which it came out claimed what is lost: it is made again.
            again = ["lost", "assign meta!", "revoke", "assign meta!"] if is_lost else ["assign meta!"]
            wanted = ["assign meta!", "revoke", "assign meta!", "revoke", *again]
            await until(lambda: len(events.seen) >= len(wanted))
            assert events.seen == wanted

    asyncio.run(main())


def test_seat_that_is_asked_for_in_vain_is_told_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_member, "_TOLD_AFTER_S", 0.05)
    monkeypatch.setattr(group_member, "_TOLD_AGAIN_AFTER_S", 0.05)

    async def main() -> None:
        coordinator, events = Coordinator(), Events()
        coordinator.joins = [15] * 1000
        with capture_logs() as lines:
            async with (
                coordinator.broker as broker,
                cluster(broker.server.address) as ewr,
                member(ewr, events) as one,
            ):
                await until(lambda: len([line for line in lines if "no seat" in line["event"]]) > 1)
                told = lines[-1]
                assert (told["cluster"], told["group"]) == ("ewr", "workers")
                assert "cluster ewr: group workers: join: " in told["reason"]
                assert one.trouble == told["reason"]
                coordinator.joins = []
                await until(lambda: events.has_share)
                monkeypatch.setattr(group_member, "_LONG_S", -1.0)
                assert one.trouble == "", "there is a seat"

    asyncio.run(main())


async def never(members: Mapping[str, bytes]) -> Mapping[str, bytes]:
    await asyncio.Event().wait()
    return {}


@pytest.mark.parametrize(
    ("held", "leads", "options", "told"),
    [
        ("join", True, {}, "it waits for the other members"),
        ("", True, {"assign": never}, "this member leads the group and has not shared out its work yet"),
        ("sync", True, {}, "the group's coordinator has not taken the shares yet"),
        ("sync", False, {}, "the group's leader has not shared out its work yet"),
    ],
)
def test_what_a_join_waits_for_is_told_by_its_step(
    held: str, leads: bool, options: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_member, "_LONG_S", 0.05)

    async def main() -> None:
        coordinator, events = Coordinator(), Events()
        coordinator.leads = leads
        async with coordinator.broker as broker, cluster(broker.server.address) as ewr:
            async with member(ewr, events, instance_id="worker-1", **options) as one:
                coordinator.held = {held}
                await until(lambda: told in one.trouble)
                coordinator.held = set()
            assert one.trouble == "", "it has ended"

    asyncio.run(main())


def test_coordinator_that_cannot_be_reached_is_not_said_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_member, "_LONG_S", 0.05)

    async def main() -> None:
        async with ScriptedServer(hold) as silent:
            for address, timeout_ms, reason in (
                # The attempt itself goes on: it is the cluster that knows.
                (f"127.0.0.1:{free_port()}", 60_000, "Connection refused"),
                (silent.address, 300, "no connection within"),
            ):
                async with cluster(address, request_timeout_ms=timeout_ms) as ewr:
                    one = member(ewr, Events())
                    one.start()
                    said: set[str] = set()

                    def is_told(one=one, reason=reason, said=said) -> bool:
                        said.add(one.trouble)
                        return reason in one.trouble

                    await until(is_told, reason)
                    assert not [each for each in said if "waits" in each]
                    assert all(address in each for each in said - {""})
                    one.abandon()

    asyncio.run(main())


def test_member_whose_first_join_is_not_answered_leaves_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """KIP-345: it does not know its member id yet, nor whether it has taken a seat of before."""
    monkeypatch.setattr(group_member, "_LEAVE_TIMEOUT_MS", 30_000)

    async def main() -> None:
        coordinator, events = Coordinator(), Events()
        coordinator.held = {"join"}
        async with coordinator.broker as broker, cluster(broker.server.address) as ewr:
            one = member(ewr, events, instance_id="worker-1")
            one.start()
            await until(lambda: "join" in coordinator.asked)
            await one.close(leave=True)
            assert coordinator.leaving == [("", "worker-1")]
            await one.close(leave=True)
            assert len(coordinator.leaving) == 1, "whoever has come under the name since must not be put out"

    asyncio.run(main())


def test_member_that_has_not_asked_for_a_seat_puts_nobody_of_its_name_out() -> None:
    async def main() -> None:
        coordinator, events = Coordinator(), Events()
        looked_up = asyncio.Event()

        async def no_answer(head: RequestHead, request: Any) -> None:
            looked_up.set()

        find, coordinator.broker.handlers[Api.FIND_COORDINATOR] = coordinator.find, no_answer
        async with coordinator.broker as broker, cluster(broker.server.address) as ewr:
            one = member(ewr, events, instance_id="worker-1")
            one.start()
            await looked_up.wait()
            coordinator.broker.handlers[Api.FIND_COORDINATOR] = find
            await one.close(leave=True)
            assert coordinator.leaving == []

    asyncio.run(main())


@pytest.mark.parametrize(
    ("where", "leads", "leaving"),
    [
        # What its answer says is not known: it may make this member the leader.
        ("join", True, [("", "worker-1")]),
        ("assign", True, [("member-1", "worker-1")]),
        ("sync", False, []),
        ("sync", True, []),
    ],
)
def test_static_member_that_ends_within_a_join_leaves_where_the_others_wait_for_it(
    where: str, leads: bool, leaving: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_member, "_LEAVE_TIMEOUT_MS", 30_000)

    async def main() -> None:
        coordinator, events = Coordinator(), Events()
        coordinator.held, coordinator.leads = {where}, leads

        async def assign(members: Mapping[str, bytes]) -> Mapping[str, bytes]:
            coordinator.asked.append("assign")
            await coordinator.hold("assign")
            return members

        async with coordinator.broker as broker, cluster(broker.server.address) as ewr:
            one = member(ewr, events, instance_id="worker-1", assign=assign)
            one.start()
            await until(lambda: where in coordinator.asked)
            await one.close()
            assert coordinator.leaving == leaving

    asyncio.run(main())


@pytest.mark.parametrize(
    ("sits", "lost", "leaving"),
    [
        (False, "join", [("", "worker-1")]),
        (True, "join", [("member-1", "worker-1")]),
        # Its shares may not have been taken.
        (False, "sync", [("member-1", "worker-1")]),
        # The coordinator has said that this join is over.
        (False, "", []),
    ],
)
def test_static_member_that_ends_between_two_tries_leaves_where_the_others_may_wait_for_it(
    sits: bool, lost: str, leaving: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_member, "_LEAVE_TIMEOUT_MS", 30_000)
    hour = SimpleNamespace(delay_ms=lambda *_: 3_600_000)
    monkeypatch.setattr(group_member, "REQUEST_BACK_OFF", hour)

    async def main() -> None:
        coordinator, events = Coordinator(), Events()

        def lose(head: RequestHead, request: Any) -> None:
            raise ConnectionResetError

        async with coordinator.broker as broker, cluster(broker.server.address) as ewr:
            one = member(ewr, events, instance_id="worker-1")
            if sits:
                one.start()
                await until(lambda: events.has_share)
            if lost:
                broker.handlers[Api.JOIN_GROUP if lost == "join" else Api.SYNC_GROUP] = lose
            else:
                coordinator.joins = [15]
            if sits:
                one.rejoin()
            else:
                one.start()
            await until(lambda: one.trouble)
            await one.close()
            assert coordinator.leaving == leaving

    asyncio.run(main())


@pytest.mark.parametrize("why", ["not_answered", "not_answered_yet_shared", "refused", "away"])
def test_member_that_cannot_join_again_is_lost(why: str) -> None:
    """It kept its work through the rebalance; by now others may have it."""

    async def main() -> None:
        coordinator, events = Coordinator(), Events()
        async with (
            coordinator.broker as broker,
            cluster(broker.server.address, request_timeout_ms=30_000) as ewr,
            member(ewr, events, session_timeout_ms=150, rebalance_timeout_ms=100) as one,
        ):
            await until(lambda: events.has_share)
            find = coordinator.broker.handlers[Api.FIND_COORDINATOR]
            is_over = asyncio.Event()

            async def never(head: RequestHead, request: Any) -> None:
                coordinator.broker.handlers[Api.JOIN_GROUP] = coordinator.join
                await is_over.wait()

            if why == "not_answered":
                coordinator.broker.handlers[Api.JOIN_GROUP] = never
            elif why == "not_answered_yet_shared":
                coordinator.held.add("sync")
            elif why == "refused":
                coordinator.joins = [14] * 1_000
            else:
                coordinator.joins = [16]
                coordinator.broker.handlers[Api.FIND_COORDINATOR] = lambda head, request: None
            one.rejoin()
            await until(lambda: "lost" in events.seen)
            coordinator.held.clear()
            coordinator.joins.clear()
            coordinator.broker.handlers[Api.FIND_COORDINATOR] = find
            await until(lambda: events.seen.count("assign meta!") == 2)
            assert events.seen == ["assign meta!", "revoke", "lost", "assign meta!"]
            assert one.member_id != "member-1"
            is_over.set()

    asyncio.run(main())


def test_member_whose_join_waits_for_others_is_not_lost_by_its_session() -> None:
    """The coordinator keeps the seats of those who wait, for a rebalance timeout."""

    async def main() -> None:
        coordinator, events = Coordinator(), Events()
        async with (
            coordinator.broker as broker,
            cluster(broker.server.address) as ewr,
            member(ewr, events, session_timeout_ms=60) as one,
        ):
            await until(lambda: events.has_share)
            loop = asyncio.get_running_loop()
            for held in ("join", "sync"):
                coordinator.held.add(held)
                seen = events.seen.count("assign meta!")
                before = coordinator.asked.count(held)
                one.rejoin()
                await until(lambda held=held, before=before: coordinator.asked.count(held) > before)
                began_at = loop.time()
                await until(lambda began_at=began_at: loop.time() > began_at + 0.2)
                coordinator.held.clear()
                await until(lambda seen=seen: events.seen.count("assign meta!") > seen)
            assert "lost" not in events.seen

    asyncio.run(main())


@pytest.mark.parametrize("is_silent", [False, True])
def test_share_that_is_still_being_taken_is_given_up_when_the_seat_is_lost(is_silent: bool) -> None:
    """What the callback waits for may never come."""

    async def main() -> None:
        coordinator, events = Coordinator(), Events()
        is_over = asyncio.Event()

        async def wait(share: bytes) -> None:
            events.seen.append("wait")
            try:
                await is_over.wait()
            except asyncio.CancelledError:
                events.seen.append("cancelled")
                raise

        taken = events.on_assign
        events.on_assign = wait  # type: ignore[method-assign]
        async with (
            coordinator.broker as broker,
            cluster(broker.server.address) as ewr,
            member(ewr, events, session_timeout_ms=150) as one,
        ):
            await until(lambda: events.seen == ["wait"])
            one._on_assign = taken
            if is_silent:
                coordinator.silent = True
            else:
                coordinator.heartbeats = [0, 25]
            try:
                await until(lambda: "lost" in events.seen)
                coordinator.silent = False
                await until(lambda: events.seen == ["wait", "cancelled", "lost", "assign meta!"])
            finally:
                is_over.set()

    asyncio.run(main())


def test_share_that_is_being_given_back_is_lost_with_the_seat() -> None:
    async def main() -> None:
        coordinator, events = Coordinator(), Events()
        events.draining = asyncio.Event()
        async with (
            coordinator.broker as broker,
            cluster(broker.server.address) as ewr,
            member(ewr, events) as one,
        ):
            await until(lambda: events.has_share)
            one.rejoin()
            await until(lambda: events.seen[-1:] == ["revoke"])
            coordinator.heartbeats = [25]
            try:
                await until(lambda: events.seen[1:] == ["revoke", "lost", "assign meta!"])
            finally:
                events.draining.set()

    asyncio.run(main())


def test_rejoin_shares_out_the_work_anew() -> None:
    async def main() -> None:
        coordinator, events = Coordinator(), Events()
        async with (
            coordinator.broker as broker,
            cluster(broker.server.address) as ewr,
            member(ewr, events) as one,
        ):
            await until(lambda: events.has_share)
            one.rejoin()
            await until(lambda: events.seen.count("assign meta!") == 2)
            assert events.seen[:3] == ["assign meta!", "revoke", "assign meta!"]

    asyncio.run(main())


def test_member_closed_while_it_waits_to_join_ends_at_once() -> None:
    async def main() -> None:
        coordinator, events = Coordinator(), Events()

        async def never(head: RequestHead, request: Any) -> None:
            coordinator.asked.append("join")

        coordinator.broker.handlers[Api.JOIN_GROUP] = never
        async with coordinator.broker as broker, cluster(broker.server.address) as ewr:
            one = member(ewr, events, session_timeout_ms=3_600_000, rebalance_timeout_ms=3_600_000)
            one.start()
            await until(lambda: "join" in coordinator.asked)
            await asyncio.wait_for(one.close(), patience())
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
            await until(lambda: events.has_share)
            await one.commit({("flights", 0): CommittedOffset(5)})
            coordinator.generation += 1
            with pytest.raises(IllegalGeneration):
                await one.commit({("flights", 0): CommittedOffset(6)})

    asyncio.run(main())


def test_member_whose_heartbeats_fail_for_no_foreseen_reason_does_not_hold_its_share_for_ever() -> None:
    async def main() -> None:
        coordinator, events = Coordinator(), Events()

        async def fail() -> None:
            raise RuntimeError("on purpose")

        async with coordinator.broker as broker, cluster(broker.server.address) as ewr:
            one = member(ewr, events)
            one._heartbeat = fail  # type: ignore[method-assign]
            one.start()
            async with asyncio.timeout(patience()):
                with pytest.raises(RuntimeError, match="on purpose"):
                    await one.wait()
            assert events.seen == ["assign meta!", "revoke"]
            await one.close()

    asyncio.run(main())
