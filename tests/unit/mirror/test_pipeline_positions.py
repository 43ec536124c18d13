"""What a partition's position tells its next owner: of the log that it is in, or of one made anew."""

from __future__ import annotations

import asyncio
from uuid import UUID

import pytest

from millrace.mirror.gaps.gaps import GapClass
from millrace.mirror.gaps.open_gaps import Origin
from millrace.mirror.pipeline import State
from tests.unit.mirror.pipeline_stage import ORIGIN, SECOND, answer, batch, started


def test_recreated_log_has_its_own_ends_and_origin() -> None:
    async def story() -> None:
        pipeline, target, around = started(GapClass.RECREATED)
        pipeline.accept(answer(batch(0, [9]), end=900))
        target.acknowledge()
        there = Origin("cluster", UUID(int=8))
        pipeline.at_gap(GapClass.RECREATED, 900, "again", resume_at=0, origin=there)
        await around.rest()
        assert around.events == [(1, 900, "recreated")]
        assert (pipeline.origin, pipeline.progress.position, pipeline.lag.log_end) == (there, 0, -1)
        written = pipeline.position_to_write(SECOND)
        assert written is not None and (written.next_offset, written.topic_id) == (0, UUID(int=8))

    asyncio.run(story())


def test_position_tells_where_the_mirroring_of_this_topic_began() -> None:
    """However far it is by now: below that nothing was carried."""

    async def story() -> None:
        pipeline, target, around = started(GapClass.RECREATED, GapClass.TRUNCATED, began=100)
        pipeline.accept(answer(batch(100, [9])))
        target.acknowledge()
        written = pipeline.position_to_write(SECOND)
        assert written is not None and (written.next_offset, written.began) == (101, 100)
        pipeline.position_written(written)
        pipeline.at_gap(GapClass.TRUNCATED, 101, "shorter", first=40, resume_at=40)
        await around.rest()
        written = pipeline.position_to_write(SECOND)
        assert written is not None and (written.next_offset, written.began) == (40, 40)
        there = Origin("cluster", UUID(int=8))
        pipeline.at_gap(GapClass.RECREATED, 41, "again", resume_at=3, origin=there)
        await around.rest()
        written = pipeline.position_to_write(SECOND)
        assert written is not None and (written.next_offset, written.began) == (3, 0)

    asyncio.run(story())


def test_position_of_before_a_log_was_shortened_is_not_the_one_of_the_same_offset_after_it() -> None:
    """At least once it may still be under way when the log has grown to there again."""

    async def story() -> None:
        pipeline, target, around = started(GapClass.TRUNCATED)
        pipeline.accept(answer(batch(0, [9] * 6, epoch=1)))
        target.acknowledge()
        under_way = pipeline.position_to_write(SECOND)
        assert under_way is not None and (under_way.next_offset, under_way.leader_epoch) == (6, 1)
        pipeline.at_gap(GapClass.TRUNCATED, 6, "shorter", first=3, resume_at=3, resume_epoch=1)
        await around.rest()
        pipeline.accept(answer(batch(3, [9] * 3, epoch=2)))
        target.acknowledge()
        pipeline.position_written(under_way)
        newer = pipeline.position_to_write(SECOND)
        assert newer is not None and (newer.next_offset, newer.leader_epoch) == (6, 2)
        pipeline.position_written(newer)
        assert pipeline.position_to_write(SECOND) is None

    asyncio.run(story())


@pytest.mark.parametrize("skipped", [(), (GapClass.RECREATED,)])
def test_position_tells_the_next_owner_how_much_a_log_that_is_gone_still_held(
    skipped: tuple[GapClass, ...],
) -> None:
    async def story() -> None:
        pipeline, target, around = started(*skipped)
        pipeline.accept(answer(batch(0, [9]), end=1))
        target.acknowledge()
        written = pipeline.position_to_write(SECOND)
        assert written is not None and (written.next_offset, written.log_end) == (1, 1)
        pipeline.position_written(written)
        pipeline.pause()
        pipeline.lag.sample(900, SECOND)
        assert pipeline.position_to_write(SECOND) is None, "a growing log alone is nothing to write"
        around.may_record.clear()
        there = Origin("cluster", UUID(int=8))
        pipeline.at_gap(GapClass.RECREATED, 900, "again", resume_at=0, origin=there)
        told = pipeline.position_to_write(SECOND)
        assert told is not None
        assert (told.next_offset, told.topic_id, told.log_end) == (1, ORIGIN.topic_id, 900)
        # One that was under way when the gap was met says too little: once more, and then no more.
        pipeline.position_written(written)
        again = pipeline.position_to_write(SECOND)
        assert again is not None and again.log_end == 900
        pipeline.position_written(again)
        assert pipeline.position_to_write(SECOND) is None

    asyncio.run(story())


def test_letting_one_made_again_topic_pass_says_nothing_about_the_next_at_the_same_offset() -> None:
    async def story() -> None:
        pipeline, _, around = started()
        for number in (8, 9):
            there = Origin("cluster", UUID(int=number))
            pipeline.at_gap(GapClass.RECREATED, 0, "again", resume_at=0, origin=there)
            assert pipeline.state is State.STOPPED, number
            pipeline.skip_gap()
            await around.rest()
            assert (pipeline.state, pipeline.origin) == (State.RUNNING, there)

    asyncio.run(story())


def test_position_says_what_was_known_of_the_log() -> None:
    async def story() -> None:
        pipeline, target, around = started()
        pipeline.accept(answer(batch(0, [9]), end=1))
        target.acknowledge()
        position = pipeline.position_to_write(SECOND)
        assert position is not None
        assert (position.next_offset, position.log_end, position.waiting_since_ms) == (1, 1, -1)
        around.now += 5
        pipeline.accept(answer(batch(1, [9]), end=4))
        target.acknowledge()
        around.now += 5
        position = pipeline.position_to_write(around.now)
        assert position is not None
        assert (position.next_offset, position.log_end, position.waiting_since_ms) == (2, 4, SECOND + 5)

    asyncio.run(story())


def test_what_the_target_has_taken_is_counted_and_is_the_load_of_its_worker() -> None:
    pipeline, target, around = started()
    made = batch(0, [9, 9])
    pipeline.accept(answer(made))
    assert (around.delivered, around.load) == ([], [])
    target.acknowledge()
    assert around.delivered == [(pipeline.partition, 2, len(made))]
    assert around.load == [(pipeline.partition, len(made))]


def test_what_became_known_of_a_log_goes_on_record_though_a_position_is_being_committed() -> None:
    """It was gathered before, and says the same offset: the partition may stand there for long."""
    pipeline, target, _ = started()
    pipeline.accept(answer(batch(0, [9])))
    target.acknowledge()
    gathered = pipeline.position_to_write(SECOND)
    assert gathered is not None
    more = Origin(ORIGIN.cluster_id, UUID(int=9))
    pipeline.adopt(more)
    pipeline.position_written(gathered)
    written = pipeline.position_to_write(SECOND)
    assert written is not None and (written.next_offset, written.topic_id) == (1, UUID(int=9))
    pipeline.position_written(written)
    assert pipeline.position_to_write(SECOND) is None
