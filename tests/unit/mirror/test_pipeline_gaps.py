"""What a partition does at a gap: stop, let pass, try again; and while it is paused."""

from __future__ import annotations

import asyncio

import pytest

from millrace.broker.errors import InvalidTimestamp, RecordTooLarge
from millrace.mirror.batches.coalesce import BatchWalk
from millrace.mirror.gaps.gaps import GapClass
from millrace.mirror.pipeline import State
from tests.unit.mirror.pipeline_stage import SECOND, answer, at, batch, pipeline_of, started


def test_paused_partition_fetches_nothing_and_what_is_under_way_arrives() -> None:
    async def story() -> None:
        pipeline, target, _ = started()
        pipeline.accept(answer(batch(0, [9, 9])))
        pipeline.pause()
        assert pipeline.state is State.PAUSED
        assert not pipeline.wants_fetch(SECOND, 1 << 20)
        pipeline.accept(answer(batch(2, [9])))  # was under way when it was paused
        assert target.offsets() == [[0, 1]]
        target.acknowledge()
        assert pipeline.progress.position == 2
        pipeline.unpause()
        assert pipeline.state is State.RUNNING
        assert pipeline.wants_fetch(SECOND, 1 << 20)
        pipeline.accept(answer(batch(2, [9])))
        assert target.offsets() == [[2]]

    asyncio.run(story())


def test_partition_that_is_given_up_fetches_no_more_though_its_gap_is_tried_again() -> None:
    """The target refuses what was under way when the drain began, and an operator has them try again."""

    async def story() -> None:
        pipeline, target, around = started()
        pipeline.accept(answer(batch(0, [9])))
        drained = asyncio.ensure_future(pipeline.drain(30.0))
        await asyncio.sleep(0)
        assert pipeline.state is State.DRAINING
        target.refuse(InvalidTimestamp())
        assert pipeline.state is State.STOPPED
        assert pipeline.retry() is not None
        await around.rest()
        assert pipeline.state is State.DRAINING and not pipeline.wants_fetch(SECOND, 1 << 20)
        assert await drained

    asyncio.run(story())


def test_pause_outlives_a_start_and_a_gap() -> None:
    async def story() -> None:
        pipeline, target, around = started()
        pipeline.pause()
        assert pipeline.state is State.PAUSED
        pipeline.at_gap(GapClass.POSITION_LOST, 5, "gone", resume_at=5)
        assert pipeline.state is State.STOPPED
        pipeline.unpause()
        assert pipeline.state is State.STOPPED
        pipeline.pause()
        pipeline.skip_gap()
        await around.rest()
        assert (pipeline.state, pipeline.progress.position) == (State.PAUSED, 5)
        other = pipeline_of(pipeline.partition, pipeline.target, target, around)
        other.pause()
        assert other.state is State.STARTING
        other.ready(at(3))
        assert other.state is State.PAUSED

    asyncio.run(story())


def test_stop_keeps_what_lies_before_the_gap_and_takes_back_what_lies_behind() -> None:
    async def story() -> None:
        pipeline, target, around = started()
        pipeline.accept(answer(batch(0, [9]), batch(1, [9]), batch(2, [9]), batch(3, [9, 9]), batch(5, [9])))
        # A real answer may be merged; here each stands alone, or the gap's own record is found by halving.
        while target.offsets()[0][0] < 1:
            if len(target.offsets()[0]) > 1:
                target.refuse(InvalidTimestamp())
            else:
                target.acknowledge()
        while len(target.offsets()[0]) > 1:
            target.refuse(InvalidTimestamp())
        target.refuse(InvalidTimestamp())
        assert pipeline.state is State.STOPPED
        assert target.offsets() == []
        assert (pipeline.progress.position, pipeline.progress.fetch_offset) == (1, 2)
        await around.rest()
        assert around.events == [(1, 2, "refused")]
        assert not pipeline.wants_fetch(SECOND, 1 << 20)

    asyncio.run(story())


def test_records_before_one_that_is_too_large_are_delivered_while_stopped() -> None:
    async def story() -> None:
        pipeline, target, around = started()
        around.limit = 400
        pipeline.accept(answer(batch(0, [9, 9, 5_000, 9])))
        assert pipeline.state is State.STOPPED
        assert [offset for offsets in target.offsets() for offset in offsets] == [0, 1]
        target.acknowledge(len(target.queue))
        assert pipeline.progress.position == 2
        assert pipeline.gap is not None and pipeline.gap.gap_class is GapClass.TOO_LARGE

    asyncio.run(story())


def test_skip_passes_only_when_the_event_is_durable_and_goes_on_behind_the_gap() -> None:
    async def story() -> None:
        pipeline, target, around = started()
        around.limit = 400
        data = batch(0, [9, 5_000, 9])
        pipeline.accept(answer(data))
        target.acknowledge()
        await around.rest()
        around.may_record.clear()
        skipped = pipeline.skip_gap()
        assert skipped is not None and (skipped.from_offset, skipped.to_offset) == (1, 2)
        assert pipeline.skip_gap() is None
        await around.rest()
        assert (pipeline.state, pipeline.progress.position) == (State.SKIPPING, 1)
        around.may_record.set()
        await around.rest()
        assert (pipeline.state, pipeline.progress.position, pipeline.gap) == (State.RUNNING, 2, None)
        pipeline.accept(answer(data))
        assert target.offsets() == [[2]]
        target.acknowledge()
        assert pipeline.progress.position == 3

    asyncio.run(story())


def test_retry_asks_for_the_limit_anew_and_fetches_from_the_gap_on() -> None:
    async def story() -> None:
        pipeline, target, around = started()
        around.limit = 400
        data = batch(0, [9, 5_000, 9])
        pipeline.accept(answer(data))
        target.acknowledge()
        assert pipeline.retry() is not None
        await around.rest()
        assert (pipeline.state, pipeline.progress.fetch_offset) == (State.RUNNING, 1)
        around.limit = 400
        pipeline.accept(answer(data))
        assert pipeline.state is State.STOPPED  # the limit was not raised
        around.limit_now = 10_000
        pipeline.retry()
        await around.rest()
        pipeline.accept(answer(data))
        assert target.offsets() == [[1, 2]]
        target.acknowledge()
        assert (pipeline.progress.position, pipeline.state) == (3, State.RUNNING)

    asyncio.run(story())


def test_retry_of_a_record_behind_a_hole() -> None:
    async def story() -> None:
        pipeline, target, around = started()
        around.limit = 400
        pipeline.accept(answer(batch(5, [5_000]), batch(6, [9])))
        assert pipeline.gap is not None and pipeline.gap.from_offset == 5
        around.limit_now = 10_000
        pipeline.retry()
        await around.rest()
        assert pipeline.wants_fetch(SECOND, 1 << 20)
        pipeline.accept(answer(batch(5, [5_000]), batch(6, [9])))
        target.acknowledge()
        assert (pipeline.progress.position, pipeline.state) == (7, State.RUNNING)

    asyncio.run(story())


def test_retry_of_a_refused_record_waits_for_what_is_under_way() -> None:
    async def story() -> None:
        pipeline, target, around = started()
        target.sent_count = 2
        pipeline.accept(answer(batch(0, [9])))
        pipeline.accept(answer(batch(1, [9])))
        target.refuse(InvalidTimestamp())
        assert target.offsets() == [[1]]
        pipeline.retry()
        await around.rest()
        assert pipeline.state is State.STOPPED
        target.acknowledge()
        await around.rest()
        assert (pipeline.state, pipeline.progress.fetch_offset) == (State.RUNNING, 0)
        pipeline.accept(answer(batch(0, [9])))
        target.acknowledge()
        assert pipeline.progress.position == 1

    asyncio.run(story())


def test_each_of_two_gaps_is_decided_about_by_itself() -> None:
    async def story() -> None:
        pipeline, target, around = started()
        target.sent_count = 3
        for base in range(3):
            pipeline.accept(answer(batch(base, [9])))
        target.refuse(RecordTooLarge())
        target.refuse(InvalidTimestamp())
        target.acknowledge()
        await around.rest()
        assert sorted(around.events) == [(0, 1, "too_large"), (1, 2, "refused")]
        assert pipeline.skip_gap() is not None
        await around.rest()
        assert (pipeline.state, pipeline.progress.position) == (State.STOPPED, 1)
        assert pipeline.gap is not None and pipeline.gap.gap_class is GapClass.REFUSED
        assert pipeline.skip_gap() is not None
        await around.rest()
        assert (pipeline.state, pipeline.progress.position) == (State.RUNNING, 3)

    asyncio.run(story())


def test_policy_skip_passes_without_stopping() -> None:
    async def story() -> None:
        pipeline, target, around = started(GapClass.REFUSED)
        target.sent_count = 2
        pipeline.accept(answer(batch(0, [9])))
        pipeline.accept(answer(batch(1, [9])))
        target.refuse(InvalidTimestamp())
        assert (pipeline.state, pipeline.gap is not None) == (State.RUNNING, True)
        target.acknowledge()
        assert pipeline.progress.position == 0
        await around.rest()
        assert (pipeline.progress.position, pipeline.gap) == (2, None)
        assert around.events == [(0, 1, "refused")]

    asyncio.run(story())


def test_what_was_fetched_before_an_expired_stretch_is_delivered() -> None:
    async def story() -> None:
        pipeline, target, around = started()
        pipeline.accept(answer(batch(0, [9, 9])))
        pipeline.at_gap(GapClass.EXPIRED, 7, "retention", resume_at=7)
        assert (pipeline.state, target.offsets()) == (State.STOPPED, [[0, 1]])
        await around.rest()
        assert around.events == [(2, 7, "expired")]
        pipeline.skip_gap()
        await around.rest()
        assert (pipeline.state, pipeline.progress.position) == (State.SKIPPING, 0)
        target.acknowledge()
        await around.rest()
        assert (pipeline.state, pipeline.progress.position) == (State.RUNNING, 7)

    asyncio.run(story())


def test_refusal_heard_late_comes_before_the_gap_at_the_fetch_offset() -> None:
    async def story() -> None:
        pipeline, target, around = started(GapClass.EXPIRED)
        target.sent_count = 1
        pipeline.accept(answer(batch(0, [9])))
        pipeline.at_gap(GapClass.EXPIRED, 7, "retention", resume_at=7)
        target.refuse(InvalidTimestamp())
        await around.rest()
        assert pipeline.state is State.STOPPED
        assert pipeline.gap is not None and pipeline.gap.gap_class is GapClass.REFUSED
        pipeline.skip_gap()
        await around.rest()
        assert (pipeline.state, pipeline.progress.position, pipeline.gap) == (State.RUNNING, 7, None)

    asyncio.run(story())


def test_what_is_taken_back_before_the_gap_at_the_fetch_offset_is_fetched_again() -> None:
    async def story() -> None:
        pipeline, target, around = started(GapClass.EXPIRED)
        pipeline.accept(answer(batch(0, [9], epoch=1), batch(1, [9], epoch=2)))
        assert target.offsets() == [[0], [1]]
        target.sent_count = 1
        pipeline.at_gap(GapClass.EXPIRED, 7, "retention", resume_at=7)
        target.refuse(InvalidTimestamp())
        await around.rest()
        assert (pipeline.state, target.offsets()) == (State.STOPPED, [])
        pipeline.skip_gap()
        await around.rest()
        assert (pipeline.state, pipeline.progress.fetch_offset) == (State.RUNNING, 1)
        pipeline.accept(answer(batch(1, [9], epoch=2)))
        target.acknowledge()
        pipeline.at_gap(GapClass.EXPIRED, 7, "retention", resume_at=7)
        await around.rest()
        assert (pipeline.state, pipeline.progress.position) == (State.RUNNING, 7)

    asyncio.run(story())


def test_forgotten_gap_does_not_pass_and_is_not_asked_about_twice() -> None:
    """The lane's transaction was aborted while the event was being written."""

    async def story() -> None:
        pipeline, target, around = started()
        target.is_transactional = True
        target.sent_count = 1
        pipeline.accept(answer(batch(0, [9])))
        target.refuse(InvalidTimestamp())
        await around.rest()
        around.may_record.clear()
        pipeline.skip_gap()
        await around.rest()
        pipeline.rewind()
        around.may_record.set()
        await around.rest()
        assert (pipeline.state, pipeline.progress.position) == (State.RUNNING, 0)
        target.sent_count = 1
        pipeline.accept(answer(batch(0, [9])))
        target.refuse(InvalidTimestamp())
        assert pipeline.state is State.RUNNING
        await around.rest()
        assert pipeline.progress.settled_position == 1
        assert set(around.events) == {(0, 1, "refused")}

    asyncio.run(story())


@pytest.mark.parametrize("skipped", [(), (GapClass.TOO_LARGE,)], ids=["both stop", "the later passes"])
@pytest.mark.parametrize("says", ["skip", "retry"])
def test_gap_behind_one_that_was_heard_of_later_is_met_again(
    says: str, skipped: tuple[GapClass, ...]
) -> None:
    """What lies behind the earlier one is taken back and fetched again, the later gap with it."""

    async def story() -> None:
        pipeline, target, around = started(*skipped)
        around.limit, around.walk = 400, BatchWalk(0)
        around.may_record.clear()
        pipeline.accept(answer(batch(0, [9]), batch(1, [9]), batch(2, [5_000]), batch(3, [9])))
        target.refuse(InvalidTimestamp())
        assert (pipeline.state, pipeline.gap and pipeline.gap.from_offset) == (State.STOPPED, 0)
        around.may_record.set()
        await around.rest()
        assert (pipeline.skip_gap() if says == "skip" else pipeline.retry()) is not None
        await around.rest()
        first = 1 if says == "skip" else 0
        assert (pipeline.state, pipeline.progress.fetch_offset) == (State.RUNNING, first)
        again = [batch(number, [9]) for number in range(first, 2)]
        pipeline.accept(answer(*again, batch(2, [5_000]), batch(3, [9])))
        await around.rest()
        target.acknowledge(len(again))
        if not skipped:
            assert (pipeline.state, pipeline.gap and pipeline.gap.from_offset) == (State.STOPPED, 2)
            pipeline.skip_gap()
        await around.rest()
        assert (pipeline.state, pipeline.progress.position) == (State.RUNNING, 3)
        assert pipeline.wants_fetch(SECOND, 1 << 20)

    asyncio.run(story())


def test_retry_forgets_nothing_of_a_gap_before_it() -> None:
    """One that passes as soon as its event is durable, which it is not yet."""

    async def story() -> None:
        pipeline, target, around = started(GapClass.TOO_LARGE)
        around.walk = BatchWalk(0)
        around.may_record.clear()
        pipeline.accept(answer(batch(0, [9]), batch(1, [9]), batch(2, [9])))
        target.refuse(RecordTooLarge())
        target.refuse(InvalidTimestamp())
        assert (pipeline.state, pipeline.gap and pipeline.gap.from_offset) == (State.STOPPED, 1)
        assert pipeline.retry() is not None
        await around.rest()
        assert not pipeline.wants_fetch(SECOND, 1 << 20)
        around.may_record.set()
        await around.rest()
        assert (pipeline.state, pipeline.progress.position) == (State.RUNNING, 1)
        assert pipeline.wants_fetch(SECOND, 1 << 20)

    asyncio.run(story())
