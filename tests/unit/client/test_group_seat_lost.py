"""A member whose seat is lost: how it learns of it, and what becomes of its share."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millrace.broker.client.group_requests import GroupRequests
from millrace.broker.protocol.frames import Api, RequestHead
from tests.unit.client.cluster_stage import cluster
from tests.unit.client.group_stage import Coordinator, Events, member
from tests.waiting import patience
from tests.waiting import until_async as until


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


def test_member_that_was_frozen_past_its_session_holds_no_seat_before_any_task_has_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        coordinator, events = Coordinator(), Events()
        loop = asyncio.get_running_loop()
        now = loop.time
        async with coordinator.broker as broker, cluster(broker.server.address) as ewr:
            async with member(ewr, events) as one:
                assert not one.holds_seat
                await until(lambda: events.has_share)
                assert one.holds_seat
                with monkeypatch.context() as patch:
                    patch.setattr(loop, "time", lambda: now() + 5.0)
                    assert not one.holds_seat
            assert not one.holds_seat

    asyncio.run(main())


def test_member_that_was_frozen_within_a_join_holds_no_seat_until_it_has_a_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who waits for the others keeps its seat for longer; but they may have come, and the session begun,
    while it stood still."""

    async def main() -> None:
        coordinator, events = Coordinator(), Events()
        loop = asyncio.get_running_loop()
        now = loop.time
        async with (
            coordinator.broker as broker,
            cluster(broker.server.address) as ewr,
            member(ewr, events, rebalance_timeout_ms=60_000) as one,
        ):
            await until(lambda: events.has_share)
            coordinator.held.add("join")
            one.rejoin()
            await until(lambda: coordinator.asked.count("join") == 3)
            assert one.holds_seat
            monkeypatch.setattr(loop, "time", lambda: now() + 6.0)
            assert not one.holds_seat, "before any task has run"
            for _ in range(10):
                await asyncio.sleep(0)
            assert not one.holds_seat, "after the join has had its turn"
            coordinator.held.clear()
            await until(lambda: events.seen.count("assign meta!") == 2)
            assert one.holds_seat

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
        session_s = patience(0.4)  # a busy machine's loop stands still for tenths of a second
        async with (
            coordinator.broker as broker,
            cluster(broker.server.address) as ewr,
            member(ewr, events, session_timeout_ms=round(1000 * session_s)) as one,
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
                await until(lambda began_at=began_at: loop.time() > began_at + 1.5 * session_s)
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


def test_member_whose_heartbeats_fail_for_no_foreseen_reason_does_not_hold_its_share_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        coordinator, events = Coordinator(), Events()

        async def fail(*_: object) -> None:
            raise RuntimeError("on purpose")

        async with coordinator.broker as broker, cluster(broker.server.address) as ewr:
            one = member(ewr, events)
            monkeypatch.setattr(GroupRequests, "heartbeat", fail)
            one.start()
            async with asyncio.timeout(patience()):
                with pytest.raises(RuntimeError, match="on purpose"):
                    await one.wait()
            assert events.seen == ["assign meta!", "revoke"]
            await one.close()

    asyncio.run(main())
