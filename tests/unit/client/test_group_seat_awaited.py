"""A member that has no seat yet: what it waits for, and what its end leaves to the others."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from millrace.broker.client import group_member, group_requests
from millrace.broker.client.security import Secret, Security
from millrace.broker.protocol.frames import Api, RequestHead
from tests.servers import free_port
from tests.unit.client.cluster_stage import FakeBroker, cluster, hold
from tests.unit.client.group_stage import Coordinator, Events, member, never
from tests.unit.client.scripted_server import ScriptedServer
from tests.waiting import patience
from tests.waiting import until_async as until


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
                # A moment at which it is just being asked for again has another reason.
                why = "cluster ewr: group workers: join: "
                await until(lambda: len([each for each in lines if "no seat" in each["event"]]) > 1)
                await until(lambda: any(why in each.get("reason", "") for each in lines))
                told = next(each for each in lines if why in each.get("reason", ""))
                assert "no seat" in told["event"]
                assert (told["cluster"], told["group"]) == ("ewr", "workers")
                await until(lambda: one.trouble == told["reason"])
                coordinator.joins = []
                await until(lambda: events.has_share)
                monkeypatch.setattr(group_member, "_LONG_S", -1.0)
                assert one.trouble == "", "there is a seat"

    asyncio.run(main())


def test_login_that_is_refused_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that knows no logins refuses each. Other reasons have a while to pass by themselves."""
    monkeypatch.setattr(group_member, "_TOLD_AFTER_S", 3_600.0)
    login = {"mechanism": "PLAIN", "username": "worker", "password": Secret.of("sesame")}
    security = Security.model_validate({"protocol": "SASL_PLAINTEXT", "sasl": login})
    versions = {int(api): (0, 12) for api in Api if api != Api.SASL_HANDSHAKE}

    async def main() -> None:
        with capture_logs() as lines:
            async with (
                FakeBroker(versions=versions) as broker,
                cluster(broker.server.address, security=security) as ewr,
                member(ewr, Events()),
            ):
                await until(lambda: lines)
        (told,) = lines
        assert (told["event"], told["cluster"]) == ("no seat in the group yet", "ewr")
        assert "the server knows no logins" in told["reason"]

    asyncio.run(main())


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
                (silent.address, 300, "no answer to the first request within "),
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
    monkeypatch.setattr(group_requests, "_LEAVE_TIMEOUT_MS", 30_000)

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
    monkeypatch.setattr(group_requests, "_LEAVE_TIMEOUT_MS", 30_000)

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
    monkeypatch.setattr(group_requests, "_LEAVE_TIMEOUT_MS", 30_000)
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
