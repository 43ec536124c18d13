"""A group's member that has a seat: it joins, holds its share, gives it back, commits and leaves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millrace.broker.client.group_offsets import CommittedOffset
from millrace.broker.errors import FencedInstanceId, GroupMaxSizeReached, IllegalGeneration
from tests.unit.client.cluster_stage import cluster
from tests.unit.client.group_stage import Coordinator, Events, member
from tests.waiting import patience
from tests.waiting import until_async as until


def test_member_takes_the_id_it_is_given_joins_and_leaves() -> None:
    async def main() -> None:
        coordinator, events = Coordinator(), Events()
        async with coordinator.broker as broker, cluster(broker.server.address) as ewr:
            async with member(ewr, events) as one:
                await until(lambda: "heartbeat" in coordinator.asked)
                assert (one.member_id, one.generation, one.protocol) == ("member-1", 1, "range")
                assert one.is_leader
            assert (one.member_id, one.generation, one.is_leader) == ("", -1, False)
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
