"""How long it counts that an operator let a gap pass: until other records have its offsets."""

from __future__ import annotations

import asyncio

import pytest

from millrace.mirror.gaps.gaps import GapClass
from millrace.mirror.gaps.open_gaps import Origin
from millrace.mirror.pipeline import PartitionPipeline, State
from tests.unit.mirror.pipeline_stage import Around, Target, answer, batch, started


async def carried_over_a_large_record(
    pipeline: PartitionPipeline, target: Target, around: Around, *, epoch: int, asks: bool
) -> None:
    """Carries offsets 0, 2 and 3; 1 is too large, and an operator lets it pass where that `asks`."""
    around.limit = 1_000
    pipeline.accept(answer(batch(0, [10, 5_000, 10, 10], epoch=epoch)))
    await around.rest()
    target.acknowledge(len(target.queue))
    if asks:
        assert (pipeline.state, pipeline.gap and pipeline.gap.from_offset) == (State.STOPPED, 1)
        pipeline.skip_gap()
        await around.rest()
    assert pipeline.state is State.RUNNING
    if (offset := pipeline.progress.fetch_offset) < 4:
        pipeline.accept(answer(batch(offset, [10] * (4 - offset), epoch=epoch)))
    target.acknowledge(len(target.queue))
    await around.rest()
    assert pipeline.progress.settled_position == 4


async def cut(pipeline: PartitionPipeline, around: Around, at: int, *, asks: bool = True) -> None:
    pipeline.at_gap(GapClass.TRUNCATED, 4, "cut", first=at, resume_at=at, resume_epoch=1)
    if asks:
        assert pipeline.state is State.STOPPED
        pipeline.skip_gap()
    await around.rest()
    assert (pipeline.state, pipeline.progress.fetch_offset) == (State.RUNNING, at)


@pytest.mark.parametrize("origin", [None, Origin("cluster")], ids=["truncated", "made anew"])
def test_what_was_let_pass_says_nothing_of_other_records_at_its_offsets(origin: Origin | None) -> None:
    async def story() -> None:
        pipeline, target, around = started()
        pipeline._record.origin = Origin("cluster")  # no topic id tells the two logs apart
        await carried_over_a_large_record(pipeline, target, around, epoch=1, asks=True)
        if origin is None:
            await cut(pipeline, around, 0)
        else:
            pipeline.at_gap(GapClass.RECREATED, 4, "made anew", resume_at=0, origin=origin)
            pipeline.skip_gap()
            await around.rest()
        await carried_over_a_large_record(pipeline, target, around, epoch=2, asks=True)

    asyncio.run(story())


def test_what_was_let_pass_before_the_cut_is_not_asked_about_again() -> None:
    """The lane's transaction is aborted, and the same records are met again."""

    async def story() -> None:
        pipeline, target, around = started()
        before = pipeline.position_to_write(0) or pipeline._record.written
        await carried_over_a_large_record(pipeline, target, around, epoch=1, asks=True)
        await cut(pipeline, around, 3)
        pipeline.rewind(before)
        await carried_over_a_large_record(pipeline, target, around, epoch=1, asks=False)

    asyncio.run(story())


def test_truncation_is_asked_about_until_it_is_on_record_and_anew_after_that() -> None:
    async def story() -> None:
        pipeline, target, around = started()
        around.limit = 1_000
        pipeline.accept(answer(batch(0, [10] * 4, epoch=1)))
        target.acknowledge()
        before = pipeline.position_to_write(0)
        assert before is not None
        pipeline.position_written(before)
        await cut(pipeline, around, 2)
        for _ in range(2):
            pipeline.rewind()  # nothing of it was committed: the same truncation
            assert pipeline.progress.fetch_offset == 4
            await cut(pipeline, around, 2, asks=False)
        after = pipeline.position_to_write(0)
        assert after is not None and after.next_offset == 2
        pipeline.position_written(after)
        pipeline.accept(answer(batch(2, [10, 10], epoch=2)))
        target.acknowledge()
        await cut(pipeline, around, 2)

    asyncio.run(story())
