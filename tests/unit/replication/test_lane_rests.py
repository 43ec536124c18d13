"""When a lane of the replica fetcher asks again for a partition that rests, whatever its clock does, and for
which it asks no more."""

from __future__ import annotations

import asyncio
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.broker.errors import NetworkException
from millrace.broker.replication.lanes import Lane
from millrace.broker.replication.partition import Role
from millrace.broker.replication.replica_fetcher import NO_EPOCH, Following, LaneFetcher
from millrace.broker.replication.throttle import ReplicationThrottle
from tests.waiting import patience

LEADER = 1


class Clock:
    """Stands for the loop of a lane: shows the given times one after the other, then the last for ever."""

    def __init__(self, *times: float) -> None:
        self._times = list(times)

    def time(self) -> float:
        return self._times.pop(0) if len(self._times) > 1 else self._times[0]


class Connections:
    """Cannot reach the leader, and tells that it was to."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def get(self, leader: int, purpose: str) -> Any:
        self.asked.set()
        raise NetworkException("the leader is away")


def partition(number: int = 0) -> Any:
    replica = SimpleNamespace(role=Role.FOLLOWER, leader=LEADER)
    return SimpleNamespace(
        key=("t", number), topic_id="t", partition=number, replica=replica, turn=asyncio.Lock()
    )


def lane_with(following: Following, clock: Clock) -> tuple[LaneFetcher, Any]:
    owner: Any = SimpleNamespace(
        own_epoch=7, only_flushed=False, throttle=ReplicationThrottle(), connections=Connections()
    )
    leader: Any = SimpleNamespace(leader=LEADER, interrupted=lambda error: None)
    lane = LaneFetcher(Lane.IDLE, leader, owner)
    lane._loop = clock  # type: ignore[assignment]
    lane.partitions[following.local.key] = following
    return lane, owner


async def ended(lane: LaneFetcher) -> None:
    lane.cancel()
    await asyncio.gather(lane.task, return_exceptions=True)


def test_a_rest_that_ends_between_two_looks_at_the_clock_is_over() -> None:
    async def run() -> None:
        lane, owner = lane_with(Following(partition(), ready_at=10.0), Clock(9.999, 10.001))
        async with asyncio.timeout(patience()):
            await owner.connections.asked.wait()
        await ended(lane)

    asyncio.run(run())


@pytest.mark.parametrize("hindrance", ["role", "turn", "registration"])
def test_what_kept_a_partition_from_being_due_may_end_without_a_word(
    hindrance: str,
) -> None:
    async def run() -> None:
        local = partition()
        lane, owner = lane_with(Following(local), Clock(1.0))
        match hindrance:
            case "role":
                local.replica.role = Role.NONE
            case "turn":
                await local.turn.acquire()
            case "registration":
                owner.own_epoch = NO_EPOCH
        for _ in range(10):
            await asyncio.sleep(0)
        assert not owner.connections.asked.is_set()
        local.replica.role, owner.own_epoch = Role.FOLLOWER, 7
        if local.turn.locked():
            local.turn.release()
        async with asyncio.timeout(patience()):
            await owner.connections.asked.wait()
        await ended(lane)

    asyncio.run(run())


@pytest.mark.parametrize("while_it", ["waits for the leader", "pauses after an error"])
def test_a_lane_that_has_ended_holds_nothing_of_what_it_asked_for(while_it: str) -> None:
    """In a cycle it would stay (`telemetry/garbage.py`), and the files of its log open."""

    async def run() -> None:
        local = partition()
        known = weakref.ref(local.turn)
        lane, owner = lane_with(Following(local), Clock(1.0))
        asked: asyncio.Event = owner.connections.asked
        if while_it == "waits for the leader":
            owner.connections.get = lambda *_: waits_for_ever(asked)
        async with asyncio.timeout(patience()):
            await asked.wait()
        for _ in range(10):
            await asyncio.sleep(0)
        await ended(lane)
        del lane, owner, local
        await asyncio.sleep(0)
        assert known() is None

    async def waits_for_ever(asked: asyncio.Event) -> None:
        asked.set()
        await asyncio.get_running_loop().create_future()

    gc.disable()
    try:
        asyncio.run(run())
    finally:
        gc.enable()


def test_a_lane_that_is_woken_and_cancelled_at_once_ends() -> None:
    async def run() -> None:
        lane, _ = lane_with(Following(partition(), ready_at=10.0), Clock(1.0))
        for _ in range(10):
            await asyncio.sleep(0)
        lane.wake.set()
        await asyncio.sleep(0)
        lane.cancel()
        async with asyncio.timeout(patience()):
            await asyncio.gather(lane.task, return_exceptions=True)

    asyncio.run(run())


@pytest.mark.parametrize("forgotten", [{0}, {0, 1}])
def test_what_was_let_go_of_while_the_connection_was_waited_for_is_not_asked_for(
    monkeypatch: pytest.MonkeyPatch, forgotten: set[int]
) -> None:
    """The answer would be passed over, and the question says what this broker has of another's partition."""
    asked: list[list[tuple[str, int]]] = []

    async def exchange(_lane: LaneFetcher, _connection: object, due: list[Following]) -> Any:
        asked.append([each.local.key for each in due])
        raise NetworkException("the leader is away")

    monkeypatch.setattr(LaneFetcher, "_exchange", exchange)

    async def run() -> None:
        lane, owner = lane_with(Following(partition()), Clock(1.0))
        lane.partitions["t", 1] = Following(partition(1))
        is_over = asyncio.Event()

        async def get(*_: object) -> None:
            for number in forgotten:
                lane.partitions.pop(("t", number), None)

        async def rests(*_: object) -> None:
            is_over.set()
            await asyncio.Event().wait()

        owner.connections.get = get
        lane.leader.interrupted = lambda error: is_over.set()  # type: ignore[method-assign]
        monkeypatch.setattr(lane, "_rest", rests)
        async with asyncio.timeout(patience()):
            await is_over.wait()
        await ended(lane)

    asyncio.run(run())
    assert asked == [[("t", 1)]][: 2 - len(forgotten)]
