"""What a partition believes of the batches that it is given, and what it asks for again."""

from __future__ import annotations

import asyncio

import pytest

from millrace.mirror.pipeline import PartitionPipeline
from tests.unit.mirror.old_entries import entry
from tests.unit.mirror.pipeline_stage import SECOND, answer, batch, started


def asked(pipeline: PartitionPipeline) -> str:
    """Why the log is looked at now; "" when it is not."""
    question = pipeline.take_question()
    return question.reason if question is not None else ""


def test_batches_of_two_leader_epochs_are_never_merged() -> None:
    """Otherwise a log that was cut where the second began would seem to be cut where the run began."""

    async def story() -> None:
        pipeline, target, _ = started()
        tiny = [batch(base, [9], epoch=base // 3) for base in range(6)]
        pipeline.accept(answer(*tiny))
        assert target.offsets() == [[0, 1, 2], [3, 4, 5]]
        assert pipeline.progress.epochs.parts_at(0, 5, 6) == (3, 0)

    asyncio.run(story())


def test_damage_is_fetched_three_times_before_anybody_asks_how_far_it_goes() -> None:
    async def story() -> None:
        pipeline, target, _ = started()
        bad = batch(1, [9])
        bad[-1] ^= 1
        for count in range(3):
            assert pipeline.doubt.question is None
            pipeline.accept(answer(batch(0, [9]), bad))
            assert not pipeline.wants_fetch(SECOND, 1 << 20)
            assert target.offsets() == [[0]], count
        assert pipeline.take_question() is not None
        assert pipeline.progress.fetch_offset == 1

    asyncio.run(story())


@pytest.mark.parametrize(
    "useless",
    [
        batch(0, [9, 9]),
        bytearray(entry(3, 0, None, b"x") + entry(4, 1, None, b"y")),
    ],
)
def test_answer_that_never_reaches_what_was_asked_for_is_damage_and_not_asked_for_for_ever(
    useless: bytearray,
) -> None:
    async def story() -> None:
        pipeline, target, _ = started()
        pipeline.accept(answer(batch(0, [9] * 5)))
        for _ in range(3):
            assert pipeline.doubt.question is None
            pipeline.accept(answer(useless))
            assert not pipeline.wants_fetch(SECOND, 1 << 20)
        assert "before offset 5" in asked(pipeline)
        assert target.offsets() == [[0, 1, 2, 3, 4]]
        # A batch that the fetch has cut off is no answer at all.
        pipeline, target, _ = started()
        pipeline.accept(answer(batch(0, [9])[:-1]))
        assert pipeline.wants_fetch(SECOND, 1 << 20)

    asyncio.run(story())


FLIPPED_BIT = 1 << 29


def test_batch_that_claims_to_stand_behind_the_logs_end_is_damage() -> None:
    """Its own offset is not under its checksum: one flipped bit, and the position would be 536,870,913 where
    the log ends at 2."""

    async def story() -> None:
        pipeline, target, _ = started()
        flipped = batch(FLIPPED_BIT, [9])
        for count in range(4):
            assert pipeline.doubt.question is None, count
            pipeline.accept(answer(flipped, batch(1, [9]), end=2))
            pipeline.retry_at_ms = 0
        assert "a batch claims to end at 536870913, and the log ends at 2" in asked(pipeline)
        assert (pipeline.progress.fetch_offset, target.offsets()) == (0, [])

    asyncio.run(story())


def test_log_that_grew_while_it_was_read_is_not_damaged() -> None:
    """The source had read its end before the batches."""

    async def story() -> None:
        pipeline, target, _ = started()
        pipeline.accept(answer(batch(0, [9]), batch(1, [9]), end=1))
        assert pipeline.wants_fetch(SECOND, 1 << 20)
        pipeline.accept(answer(batch(0, [9]), batch(1, [9]), end=2))
        for base, end in ((2, 2), (2, 3), (3, 3), (3, 4)):  # it grows again, and again
            pipeline.accept(answer(batch(base, [9]), end=end))
            assert pipeline.wants_fetch(SECOND, 1 << 20), "at once"
        assert pipeline.progress.fetch_offset == 4
        assert [offset for offsets in target.offsets() for offset in offsets] == [0, 1, 2, 3]

    asyncio.run(story())
