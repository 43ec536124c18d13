"""A worker's seat: whose share it was, and what the loss of a name says."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millrace.broker.client.cluster import Cluster
from millrace.broker.errors import FatalError
from millrace.mirror.config import parse_config
from millrace.mirror.seat import WorkerSeat
from millrace.mirror.sharing.assignment import Share, encode_share
from millrace.mirror.sharing.peers import add_crew, crew_of
from tests.unit.client.cluster_stage import cluster
from tests.unit.client.group_stage import Coordinator, Events
from tests.waiting import patience
from tests.waiting import until_async as until


def seat(target: Cluster, events: Events, **group: Any) -> WorkerSeat:
    config = parse_config(
        {
            "name": "aggregate",
            "target": {"cluster": "agg", "bootstrap": ["127.0.0.1:1"]},
            "sources": [{"cluster": "ewr", "bootstrap": ["127.0.0.1:2"], "topics": {"include": ["flights"]}}],
            "group": {"session_timeout_ms": 5_000, **group},
        }
    )

    return WorkerSeat(
        config,
        target,
        lambda: [("sticky", b"meta")],
        on_assign=events.on_assign,
        on_revoke=events.on_revoke,
        on_lost=events.on_lost,
        assign=lambda members: dict.fromkeys(members, b"share"),
    )


@pytest.mark.parametrize(("name", "is_told"), [("one", False), (None, True)])
def test_an_end_keeps_the_seat_of_a_name_and_a_drain_none(name: str | None, is_told: bool) -> None:
    async def main() -> None:
        for give_up in (False, True):
            coordinator, events = Coordinator(), Events()
            async with coordinator.broker as broker, cluster(broker.server.address) as target:
                one = seat(target, events, instance_id=name)
                keeping = asyncio.create_task(one.keep())
                await until(lambda: events.has_share)  # noqa: B023
                await (one.give_up() if give_up else one.end())
                await keeping
                assert ("leave" in coordinator.asked) is (give_up or is_told)

    asyncio.run(main())


def test_whoever_lost_its_name_to_another_process_ends_with_what_to_do() -> None:
    async def main() -> None:
        coordinator, events = Coordinator(), Events()
        coordinator.heartbeats = [82]
        async with coordinator.broker as broker, cluster(broker.server.address) as target:
            with pytest.raises(FatalError, match="another process has taken this worker's place") as ended:
                await asyncio.wait_for(seat(target, events, instance_id="one").keep(), patience())
            assert "group.instance_id one too. Give each worker a name of its own" in str(ended.value)
        assert events.seen[-1] == "lost", "others may own it all by then"

    asyncio.run(main())


def test_a_share_of_before_names_others_than_its_holder() -> None:
    one = seat(Cluster("agg", ["127.0.0.1:1"]), Events(), instance_id="one")
    share = add_crew(encode_share(Share()), {"one-new": b"{}", "two-x": b"{}"}, [])
    one.member_id = "one-new"
    assert not one.is_inherited(crew_of(share))
    one.member_id = "one-newer"
    assert one.is_inherited(crew_of(share))
    assert not one.is_inherited(crew_of(b"")), "nothing was shared out yet"
