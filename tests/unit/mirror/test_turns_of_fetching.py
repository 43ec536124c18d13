"""A turn of fetching over many partitions: who is where it was last time is asked for again without a closer
look, and a closer look would say the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from uuid import UUID

import pytest

from millrace.broker.client.fetch_session import FetchPosition
from millrace.broker.errors import CorruptMessage
from millrace.mirror.config import FetchConfig
from millrace.mirror.pipeline import PartitionPipeline, State
from millrace.mirror.sources.doubt import Doubt, Question
from millrace.mirror.sources.fetch_loop import FetchLoop
from millrace.mirror.sources.fetch_memory import MIN_FETCH_SIZE, FetchBudget
from millrace.mirror.steady import steady_ms
from tests.unit.mirror.pipeline_stage import ORIGIN, Target, answer, batch, started

KEY = ("flights", 0)
CAP = 1 << 20


def loop_of(pipeline: PartitionPipeline) -> FetchLoop:
    budget = FetchBudget(1 << 30)
    budget.loop_count = 1
    loop = FetchLoop(budget)
    loop.partitions[KEY] = pipeline
    return loop


def asked(loop: FetchLoop) -> dict[tuple[str, int], FetchPosition]:
    positions, _ = loop.positions(1 << 20, steady_ms())
    return positions


def at_rest() -> tuple[PartitionPipeline, Target]:
    """One that was given something, all of which has arrived."""
    pipeline, target, _ = started()
    pipeline.accept(answer(batch(0, [10, 10]), end=2))
    target.acknowledge()
    return pipeline, target


def test_idle_one_is_asked_for_by_what_was_said_of_it_before() -> None:
    pipeline, _ = at_rest()
    loop = loop_of(pipeline)
    before = asked(loop)
    assert before == {KEY: FetchPosition(2, -1, 0, ORIGIN.topic_id)}
    assert pipeline.wants_the_same(before[KEY], steady_ms())
    assert asked(loop)[KEY] is before[KEY]


def paused(pipeline: PartitionPipeline) -> None:
    pipeline.pause()


def waiting(pipeline: PartitionPipeline) -> None:
    pipeline.retry_at_ms = steady_ms() + 60_000


def blocked(pipeline: PartitionPipeline) -> None:
    pipeline.progress.failed(pipeline.progress.fetched(3, 1, 0, 0))
    pipeline.progress.fetch_offset = 2  # as if it stood there


def looked_at(pipeline: PartitionPipeline) -> None:
    pipeline.doubt.question = Question(2, "why")


def closed(pipeline: PartitionPipeline) -> None:
    pipeline.close()


@pytest.mark.parametrize("change", [paused, waiting, blocked, looked_at, closed])
def test_who_wants_no_fetch_any_more_is_not_asked_for(change: Callable[[PartitionPipeline], None]) -> None:
    pipeline, _ = at_rest()
    loop = loop_of(pipeline)
    before = asked(loop)[KEY]
    change(pipeline)
    assert not pipeline.wants_the_same(before, steady_ms())
    assert not pipeline.wants_fetch(steady_ms(), CAP)
    assert asked(loop) == {}


def test_what_is_under_way_is_looked_at_whole() -> None:
    pipeline, _, _ = started()
    loop = loop_of(pipeline)
    before = asked(loop)[KEY]
    pipeline.accept(answer(batch(0, [10, 10])))
    assert asked(loop) == {KEY: FetchPosition(2, -1, 0, ORIGIN.topic_id)}
    pipeline.progress.fetch_offset, pipeline.progress.fetched_leader_epoch = 0, -1
    assert not pipeline.wants_the_same(before, steady_ms())


@pytest.mark.parametrize("field", ["offset", "epoch", "topic"])
def test_position_that_has_changed_is_said_as_it_is_now(field: str) -> None:
    pipeline, _ = at_rest()
    loop = loop_of(pipeline)
    before = asked(loop)[KEY]
    match field:
        case "offset":
            pipeline.progress.fetch_offset, now = 7, before._replace(offset=7)
        case "epoch":
            pipeline.progress.fetched_leader_epoch, now = 3, before._replace(last_fetched_epoch=3)
        case _:
            other = UUID(int=8)
            pipeline.adopt(replace(ORIGIN, topic_id=other))
            now = before._replace(topic_id=other)
    assert asked(loop) == {KEY: now}


def test_who_needs_more_of_an_answer_is_asked_for_with_so_much() -> None:
    pipeline, _ = at_rest()
    loop = loop_of(pipeline)
    before = asked(loop)[KEY]
    assert loop.sizes(FetchConfig(), CAP).partition < 9 << 20
    pipeline.doubt.needed_size = 9 << 20
    assert asked(loop) == {KEY: before}
    assert loop.is_for_one
    assert loop.sizes(FetchConfig(), CAP) == (9 << 20, 9 << 20)
    pipeline.doubt.needed_size = 0
    asked(loop)
    assert not loop.is_for_one
    assert loop.sizes(FetchConfig(), CAP).answer == CAP


def test_doubt_of_an_offset_that_was_left_is_none_of_where_one_is_now() -> None:
    pipeline, _ = at_rest()
    pipeline._trust.last_doubt = Doubt(1, needed_size=5)
    before = FetchPosition(2, -1, 0, ORIGIN.topic_id)
    assert pipeline.wants_the_same(before, steady_ms())


def test_what_is_not_believed_waits_also_where_it_was_before() -> None:
    async def story() -> None:
        pipeline, _ = at_rest()
        loop = loop_of(pipeline)
        before = asked(loop)[KEY]
        pipeline.distrust(CorruptMessage("on purpose"))
        assert not pipeline.wants_the_same(before, steady_ms())
        assert asked(loop) == {}

    asyncio.run(story())


def test_idle_one_that_falls_behind_is_asked_for_more() -> None:
    pipeline, _ = at_rest()
    loop = loop_of(pipeline)
    asked(loop)
    usual = loop.sizes(FetchConfig(), 1 << 30)
    pipeline.lag.sample(1 << 30, 0)
    asked(loop)
    assert loop.sizes(FetchConfig(), 1 << 30).answer > usual.answer
    assert loop.sizes(FetchConfig(), 0).answer == MIN_FETCH_SIZE


def test_states_but_running_are_no_reason_to_fetch() -> None:
    for state in set(State) - {State.RUNNING}:
        pipeline, _ = at_rest()
        before = FetchPosition(2, -1, 0, ORIGIN.topic_id)
        assert pipeline.wants_the_same(before, steady_ms())
        pipeline.state = state
        assert not pipeline.wants_the_same(before, steady_ms())
