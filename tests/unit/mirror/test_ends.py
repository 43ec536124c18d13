"""What an operator hears of an orderly end that something else cuts short."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.broker.errors import FatalError
from millrace.mirror.config import parse_config
from millrace.mirror.daemon import Mirror
from millrace.mirror.delivery.progress import BrokenCommitRule
from millrace.mirror.handover import Handover
from millrace.mirror.worker import Worker
from tests.unit.mirror.pipeline_stage import answer, batch, started
from tests.waiting import patience
from tests.waiting import until_async as until

CONFIG = parse_config(
    {
        "name": "aggregate",
        "target": {"cluster": "agg", "bootstrap": ["127.0.0.1:1"]},
        "sources": [{"cluster": "ewr", "bootstrap": ["127.0.0.1:2"], "topics": {"include": ["flights"]}}],
    }
)
REFUSED = FatalError("topic millrace.positions.aggregate refuses the mirror's own records for good")


class Ending:
    """A worker of which only the end is asked for, and what that did, in order."""

    def __init__(self, *failing: str) -> None:
        self.failing = failing
        self.did: list[str] = []
        self.pipeline, target, _ = started()
        self.pipeline.accept(answer(batch(0, [9])))
        target.acknowledge()
        worker: Any = object.__new__(Worker)
        worker.config = CONFIG
        worker.handover = Handover()
        worker.owned = {self.pipeline.partition: self.pipeline}
        worker.readers = {"ewr": SimpleNamespace(remove=lambda _: None)}
        worker.delivery = SimpleNamespace(
            settle=lambda pipelines: self.step("settle" if pipelines else "settle nothing"),
            close=lambda: self.step("close"),
            left=lambda _: None,
        )
        worker.member = SimpleNamespace(end=lambda: self.step("leave"))
        worker.is_assigned = True
        self.worker: Worker = worker

    async def step(self, name: str) -> None:
        self.did.append(name)
        if name in self.failing:
            raise REFUSED if name == "settle" else RuntimeError(name)


async def until_stopped(stop: Any, carry: Coroutine[Any, Any, None]) -> None:
    """Asks a mirror to end whose worker's tasks are `carry`."""
    mirror = Mirror(CONFIG)
    mirror.request_stop()
    worker: Any = SimpleNamespace(stop=stop, config=CONFIG)
    carrying = asyncio.get_running_loop().create_task(carry)
    try:
        async with asyncio.timeout(patience()):
            await mirror._until_stopped(worker, carrying)
    finally:
        carrying.cancel()
        await asyncio.wait([carrying])


async def for_ever() -> None:
    await asyncio.Event().wait()


def test_end_that_fails_says_why_and_lets_the_seat_go_all_the_same() -> None:
    """Its partitions would rest until the session ends, and the operator would look for a slow target."""
    ending = Ending("settle", "leave")
    with pytest.raises(FatalError, match="refuses the mirror's own records for good"):
        asyncio.run(until_stopped(ending.worker.stop, for_ever()))
    assert ending.did == ["settle", "leave", "settle nothing", "close"]
    assert ending.worker.handover.partitions == ["ewr/flights-0"]
    assert not ending.worker.is_assigned and not ending.worker.owned


def test_end_in_order_says_nothing() -> None:
    ending = Ending()
    asyncio.run(until_stopped(ending.worker.stop, for_ever()))
    assert ending.did == ["settle", "leave", "settle nothing", "close"]


def test_worker_that_dies_while_it_drains_says_why() -> None:
    """Nobody delivers any more what is waited for."""

    async def dies() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(broken())

    async def broken() -> None:
        raise BrokenCommitRule("on purpose")

    with pytest.raises(BaseExceptionGroup) as caught:
        asyncio.run(until_stopped(for_ever, dies()))
    assert caught.value.subgroup(BrokenCommitRule) is not None


def test_second_signal_ends_at_once_and_waits_for_no_step() -> None:
    ending = Ending()

    async def leaves_for_ever() -> None:
        await ending.step("leave")
        await for_ever()

    async def story() -> None:
        worker: Any = ending.worker
        worker.member.end = leaves_for_ever
        stopping = asyncio.create_task(worker.stop())
        await until(lambda: "leave" in ending.did)
        stopping.cancel()
        await asyncio.wait([stopping])
        assert stopping.cancelled() and ending.did == ["settle", "leave"]

    asyncio.run(story())
