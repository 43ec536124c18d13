"""A lane is closed with batches on their way: they arrive when their transaction is over."""

from __future__ import annotations

import asyncio

import pytest

from millrace.broker.client.transactions import TransactionalProducer
from tests.unit.mirror.lane_stage import Stage
from tests.unit.mirror.pipeline_stage import answer, batch
from tests.unit.mirror.test_lane_shell import EWR, TARGET
from tests.waiting import until_async as until


def test_a_batch_that_arrives_after_the_lane_was_closed_opens_no_transaction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody would end it: readers of committed records would wait before it, and the next transaction of the
    same producer would commit it, beside the same records of the next owner."""

    async def story() -> None:
        async with Stage(monkeypatch) as stage:
            pipeline = stage.carries(EWR, TARGET)
            produce = stage.target.hold("produce")
            pipeline.accept(answer(batch(0, [9] * 10), end=10))
            await until(lambda: bool(stage.lane.sink._tasks))
            await stage.rest()
        await stage.lane.close()
        assert stage.target.is_decided, "it is aborted at once"
        produce.set()
        await until(lambda: not stage.lane.sink._tasks)
        assert stage.target.strays == []
        assert stage.target.carried(TARGET) == []

    asyncio.run(story())


def test_a_lane_that_is_closed_late_ends_nothing_of_who_has_its_id_by_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        async with Stage(monkeypatch) as stage:
            pipeline = stage.carries(EWR, TARGET)
            stage.target.hold("produce")
            pipeline.accept(answer(batch(0, [9] * 10), end=10))
            await until(lambda: bool(stage.lane.sink._tasks))
        other = TransactionalProducer("m.0", *await stage.target.begin("m.0"))
        await stage.target.add(other, [TARGET])
        await stage.lane.close()
        assert not stage.target.is_decided

    asyncio.run(story())
