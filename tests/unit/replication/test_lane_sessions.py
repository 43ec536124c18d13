"""A lane of the replica fetcher and its leader's fetch sessions: what it names in which request."""

from __future__ import annotations

import asyncio
import gc
import math
import weakref
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from millrace.broker.errors import NetworkException
from millrace.broker.protocol import hot_fetch
from millrace.broker.protocol.hot_fetch import FetchRequest, PartitionData
from millrace.broker.replication import leader_questions
from millrace.broker.replication.catching_up import ALL, NOT_ALL, Taken
from millrace.broker.replication.lanes import Lane
from millrace.broker.replication.partition import Role
from millrace.broker.replication.replica_fetcher import FetchLimits, Following, LaneFetcher
from millrace.broker.replication.throttle import ReplicationThrottle
from millrace.broker.server.fetch_sessions import FetchSessionCache
from tests.waiting import patience

LEADER, VERSION = 1, 16
TOPIC_ID = UUID(int=7)
END_OFFSET = 10


class Leader:
    """Answers what it reads through its sessions, once it is told to; and what it was asked."""

    def __init__(self) -> None:
        self.sessions = FetchSessionCache(10)
        self.requests: list[FetchRequest] = []
        self.high_watermark = 5
        self._may_answer: asyncio.Queue[None] = asyncio.Queue()
        self._asked = asyncio.Event()

    async def send(self, _connection: object, _version: int, request: FetchRequest) -> memoryview:
        self.requests.append(request)
        self._asked.set()
        await self._may_answer.get()
        fetch = self.sessions.resolve(request, True, 0)
        if isinstance(fetch, tuple):
            code, session_id, told = *fetch, ()
        else:
            read = [
                PartitionData(asked.topic, asked.partition, 0, self.high_watermark)
                for asked in fetch.partitions
            ]
            code, session_id, told = fetch.finish(read, 0)
        frame = hot_fetch.encode_response(VERSION, 0, told, error_code=code, session_id=session_id)
        return memoryview(b"".join(frame))[4:]

    def answer(self) -> None:
        self._asked.clear()
        self._may_answer.put_nowait(None)

    async def next_request(self) -> FetchRequest:
        """Answer the request that waits, if any; the next one."""
        if self.requests:
            self.answer()
        return await self.present_request()

    async def present_request(self) -> FetchRequest:
        async with asyncio.timeout(patience()):
            await self._asked.wait()
        return self.requests[-1]


class CatchingUp:
    """Takes answers as it is told to."""

    def __init__(self) -> None:
        self.says: dict[int, Taken] = {}
        self.is_cut_off = False
        self.taken: list[int] = []

    async def take(self, local: Any, *_: Any) -> Taken:
        if self.is_cut_off:
            raise NetworkException("the leader is away")
        self.taken.append(local.partition)
        return self.says.get(local.partition, ALL)


def partition(number: int) -> Any:
    return SimpleNamespace(
        key=("t", number),
        topic="t",
        topic_id=TOPIC_ID,
        partition=number,
        replica=SimpleNamespace(role=Role.FOLLOWER, leader=LEADER, leader_epoch=3),
        turn=asyncio.Lock(),
        log=SimpleNamespace(
            end_offset=END_OFFSET, start_offset=0, leader_epochs=SimpleNamespace(latest_epoch=3)
        ),
    )


class Stage:
    """A lane with three partitions, and its leader."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.leader = Leader()
        self.catching_up = CatchingUp()
        monkeypatch.setattr(leader_questions, "_send", self.leader.send)
        connection: Any = SimpleNamespace(versions=SimpleNamespace(highest=lambda *_: VERSION))
        owner: Any = SimpleNamespace(
            broker_id=2,
            own_epoch=7,
            only_flushed=False,
            throttle=ReplicationThrottle(),
            limits=FetchLimits(),
            catching_up=self.catching_up,
            connections=SimpleNamespace(get=lambda *_: asyncio.sleep(0, connection)),
        )
        self.lane = LaneFetcher(
            Lane.IDLE,
            SimpleNamespace(leader=LEADER, resumed=lambda: None, interrupted=lambda error: None),
            owner,  # type: ignore[arg-type]
        )
        for number in range(3):
            self.lane.partitions["t", number] = Following(partition(number))  # type: ignore[index]

    async def asks(self) -> tuple[list[int], list[int], bool]:
        """What the next request names and forgets, and whether it is a full one."""
        return self._said(await self.leader.next_request())

    async def asked(self) -> tuple[list[int], list[int], bool]:
        """The same of the request that waits."""
        return self._said(await self.leader.present_request())

    @staticmethod
    def _said(request: FetchRequest) -> tuple[list[int], list[int], bool]:
        named = [asked.partition for asked in request.partitions]
        return named, [number for _, number in request.forgotten], request.session_epoch == 0

    async def end(self) -> None:
        self.lane.cancel()
        await asyncio.gather(self.lane.task, return_exceptions=True)


def run(monkeypatch: pytest.MonkeyPatch, scenario: Any) -> None:
    async def staged() -> None:
        stage = Stage(monkeypatch)
        try:
            await scenario(stage)
        finally:
            await stage.end()

    asyncio.run(staged())


def test_only_what_is_new_is_said_by_either(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(stage: Stage) -> None:
        assert await stage.asks() == ([0, 1, 2], [], True)
        assert await stage.asks() == ([], [], False)
        assert stage.catching_up.taken == [0, 1, 2]
        stage.lane.partitions["t", 1].local.log.end_offset += 1  # type: ignore[index]
        assert await stage.asks() == ([1], [], False)
        stage.leader.high_watermark += 1
        assert await stage.asks() == ([], [], False)
        assert stage.catching_up.taken == [0, 1, 2, 0, 1, 2]

    run(monkeypatch, scenario)


def test_an_answer_that_was_not_taken_whole_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It came when the replica was in another epoch by then, say, and its high watermark was left out."""

    async def scenario(stage: Stage) -> None:
        stage.catching_up.says[1] = NOT_ALL
        await stage.asks()
        assert await stage.asks() == ([0, 1, 2], [], True)
        stage.catching_up.says[1] = Taken(3600.0)
        assert await stage.asks() == ([], [1], False)
        stage.lane.partitions["t", 1].ready_at = 0.0  # type: ignore[index]
        assert await stage.asks() == ([1], [], False)

    run(monkeypatch, scenario)


def test_a_leader_that_knows_nothing_of_the_session_is_asked_in_full_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(stage: Stage) -> None:
        await stage.asks()
        await stage.asks()
        stage.leader.sessions = FetchSessionCache(10)
        assert await stage.asks() == ([0, 1, 2], [], True)
        assert await stage.asks() == ([], [], False)

    run(monkeypatch, scenario)


def test_after_an_answer_whose_taking_was_cut_off_everything_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A leader is asked where its log begins and ends while its answer is taken."""

    async def scenario(stage: Stage) -> None:
        stage.catching_up.is_cut_off = True
        await stage.asks()
        assert await stage.asks() == ([0, 1, 2], [], True)
        stage.catching_up.is_cut_off = False
        assert await stage.asks() == ([], [], False)

    run(monkeypatch, scenario)


def test_what_was_let_go_of_is_forgotten_and_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log's files would stay open until somebody else is asked for."""

    async def scenario(stage: Stage) -> None:
        await stage.asks()
        await stage.asks()
        is_gone = asyncio.Event()
        weakref.finalize(stage.lane.partitions["t", 1].local.turn, is_gone.set)  # type: ignore[index]
        assert stage.lane.let_go(("t", 1))  # type: ignore[arg-type]
        assert not stage.lane.let_go(("t", 1))  # type: ignore[arg-type]
        for following in stage.lane.partitions.values():
            following.ready_at = math.inf
        stage.leader.answer()
        async with asyncio.timeout(patience()):
            await is_gone.wait()
        for following in stage.lane.partitions.values():
            following.ready_at = 0.0
        stage.lane.wake.set()
        assert await stage.asked() == ([], [1], False)

    gc.disable()
    try:
        run(monkeypatch, scenario)
    finally:
        gc.enable()


def test_who_is_back_before_it_was_forgotten_is_told_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(stage: Stage) -> None:
        await stage.asks()
        await stage.asks()
        stage.lane.let_go(("t", 1))  # type: ignore[arg-type]
        stage.lane.partitions["t", 1] = Following(partition(1))  # type: ignore[index]
        assert await stage.asks() == ([0, 2, 1], [], True)

    run(monkeypatch, scenario)
