"""What the broker makes of its own tasks that fail."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from millrace.broker.config import load_config
from millrace.broker.coordination.session import SessionError, SessionState
from millrace.broker.errors import MillraceError, ZooKeeperUnreachable
from millrace.broker.server import broker as broker_module
from millrace.broker.server.broker import Broker
from millrace.broker.server.start_report import StartReport
from millrace.broker.server.supervisor import Supervisor
from tests.waiting import patience, until_async

CONFIG = {"id": 1, "listen": "127.0.0.1:9092", "zookeeper": "127.0.0.1:2181/dc1", "data": ["d"]}


def test_task_of_a_part_that_fails_ends_the_broker() -> None:
    async def fail() -> None:
        raise RuntimeError("on purpose")

    async def scenario() -> None:
        broker: Any = Broker(load_config(None, CONFIG))
        broker._supervisor.watch(asyncio.get_running_loop().create_task(fail()))
        await asyncio.wait_for(broker.serve_until_stopped(), patience())

    with pytest.raises(RuntimeError, match="on purpose"):
        asyncio.run(scenario())


def test_task_that_is_given_up_by_nobody_ends_the_broker() -> None:
    async def give_up() -> None:
        raise asyncio.CancelledError

    async def scenario() -> None:
        broker: Any = Broker(load_config(None, CONFIG))
        broker._supervisor.spawn("flush", give_up())
        await asyncio.wait_for(broker.serve_until_stopped(), patience())

    with pytest.raises(MillraceError, match="flush"):
        asyncio.run(scenario())


@pytest.mark.parametrize("failure", [OSError("no space"), MillraceError("not now")])
def test_round_of_a_chore_that_fails_is_told_and_the_next_one_comes(failure: Exception) -> None:
    rounds: list[None] = []

    async def work() -> None:
        rounds.append(None)
        raise failure

    async def scenario() -> None:
        supervisor = Supervisor()
        supervisor.every(lambda: 1, "retention", work)
        await until_async(lambda: len(rounds) >= 2 or supervisor.is_stopping, "a second round")
        assert not supervisor.is_stopping
        supervisor.begin_stop()
        await supervisor.end_tasks()
        assert supervisor.failure is None, "it was ended in order"

    with capture_logs() as lines:
        asyncio.run(scenario())
    assert lines[0]["error"] == str(failure)


def test_start_that_stands_still_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when ZooKeeper dies in its midst: what is asked of it is answered when it is back."""

    async def scenario(lines: list[Any]) -> None:
        broker: Any = Broker(load_config(None, CONFIG))
        broker._report = StartReport("127.0.0.1:2181/dc1", 0.001)
        broker._replicas = SimpleNamespace(partition_count=0)
        session: Any = SimpleNamespace(state=SessionState.CONNECTED)

        async def until_told(of: str) -> None:
            await until_async(lambda: any(of in line.get("waiting_for", "") for line in lines), of)

        async def open_logs() -> None:
            await until_told("its data folders")

        async def connect() -> None:
            broker._report.session = session

        async def join() -> None:
            session.state = SessionState.SUSPENDED
            await until_told("ZooKeeper at 127.0.0.1:2181/dc1: the connection is suspended")
            session.state = SessionState.CONNECTED
            await until_told("its place in the cluster")

        async def nothing(**_: object) -> None:
            return

        monkeypatch.setattr(broker_module, "load_loops", nothing)
        monkeypatch.setattr(broker, "_take_port", lambda: None)
        for step, stand_in in (
            ("_take_folders", open_logs),
            ("_connect", connect),
            ("_open_logs", nothing),
            ("_join_cluster", join),
            ("_serve", nothing),
        ):
            monkeypatch.setattr(broker, step, stand_in)
        await broker.start()
        count = len(lines)
        await asyncio.sleep(0.02)
        assert len(lines) == count, "it is up"

    with capture_logs() as lines:
        asyncio.run(scenario(lines))


def test_start_that_loses_its_session_ends_with_a_word_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        broker: Any = Broker(load_config(None, CONFIG))

        async def nothing(**_: object) -> None:
            return

        async def expired() -> None:
            raise SessionError("SessionExpiredError")

        monkeypatch.setattr(broker_module, "load_loops", nothing)
        monkeypatch.setattr(broker, "_take_port", lambda: None)
        monkeypatch.setattr(broker, "_take_folders", nothing)
        monkeypatch.setattr(broker, "_connect", expired)
        await broker.start()

    with pytest.raises(ZooKeeperUnreachable, match=r"dc1 was lost .* start the broker again"):
        asyncio.run(scenario())
