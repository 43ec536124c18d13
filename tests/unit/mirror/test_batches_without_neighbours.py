"""A batch that the source gives without the ones beside it, whatever is asked for: nobody can tell whether it
stands where it claims to.

A broker's own limit (`fetch.max.bytes`, KIP-541) may be smaller than two batches; and in Apache Kafka no
answer goes on from one file of a log into the next.
"""

from __future__ import annotations

import asyncio

import pytest

from millrace.broker.client.raw_fetch import FetchedPartition
from millrace.mirror.batches.placement import Start, start_at
from millrace.mirror.sources.doubt import MAX_TIMES_ALONE
from millrace.mirror.sources.fetch_sizes import MORE_SIZE
from tests.unit.mirror.pipeline_stage import answer, batch, started
from tests.unit.mirror.source_stage import Source, pipeline_at, reader_of, taken, with_records
from tests.unit.mirror.test_misplaced_batches import LARGE, SIZES, SMALL, Log, carried, log_of, missing


class LogOfTwoFiles(Log):
    """The second file's name is the offset that it begins with."""

    second = 0

    def _read_from(self, offset: int) -> list[bytearray]:
        name = self.true[self.second].start
        first, second = self.batches[: self.second], self.batches[self.second :]
        ends_before = all(self.claimed_end(each) <= offset for each in first)
        return second if offset >= name or ends_before else first


def in_two_files(second: int, size: int) -> LogOfTwoFiles:
    log, whole = LogOfTwoFiles(24), log_of(size)
    log.batches, log.true, log.second = whole.batches, whole.true, second
    return log


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bit", range(5))
def test_batch_alone_behind_a_hole_is_told_where_the_source_never_gives_what_follows(
    monkeypatch: pytest.MonkeyPatch, bit: int, size: int
) -> None:
    for number, offsets in enumerate(log_of(SMALL).true[:-1]):
        log = log_of(size)
        log.most_given = 1
        claimed = offsets.start ^ 1 << bit
        # One that would be the last of the log looks as if nothing could follow it.
        if claimed < offsets.start or claimed + len(offsets) == log.end:
            continue
        log.claim(number, claimed)
        found, around = asyncio.run(carried(log, monkeypatch))
        told = {offset for first, following, _ in around.events for offset in range(first, following)}
        assert missing(log, found) <= told, f"lost in silence: {missing(log, found) - told}, {number}"
        assert {kind for *_, kind in around.events} == {"corrupt"}
        assert all(offset == true for offset, true in found.items())


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_last_batch_of_a_file_is_carried_although_it_comes_alone(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    for second in range(1, 10):
        for max_bytes in (1, 1 << 20):
            log = in_two_files(second, size)
            found, around = asyncio.run(carried(log, monkeypatch, max_bytes))
            assert (missing(log, found), around.events) == (set(), [])
            assert all(offset == true for offset, true in found.items())


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_last_batch_of_a_file_that_claims_offsets_of_the_next_one_is_told(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    for second in range(1, 10):
        for bit in range(4):
            log = in_two_files(second, size)
            claimed = log.true[second - 1].start ^ 1 << bit
            is_last = claimed + len(log.true[second - 1]) == log.end
            if claimed < log.true[second - 1].start or is_last:
                continue
            log.claim(second - 1, claimed)
            found, around = asyncio.run(carried(log, monkeypatch, 1))
            told = {offset for first, following, _ in around.events for offset in range(first, following)}
            assert missing(log, found) <= told, f"lost in silence: {missing(log, found) - told}, {second}"


def whole(*batches: bytearray) -> bytes:
    return b"".join(bytes(each) for each in batches)


def test_wanted_batch_that_the_answer_cuts_off_is_not_the_one_that_claims_its_offset() -> None:
    first, middle, wanted, following = batch(14, [9]), batch(13, [9]), batch(14, [500]), batch(15, [9])
    data = whole(first, middle, wanted, following)
    at = len(first) + len(middle)
    assert start_at(data, 14, 16) == Start(at)
    cut = start_at(data[: at + 100], 14, 16)
    assert cut.position is None
    assert start_at(data[: cut.needed_size], 14, 16) == Start(at)


def test_nothing_is_passed_over_that_may_be_the_wanted_batch_itself() -> None:
    """The one that is out of its place stands where offset 13 is expected: what follows is no beginning."""
    moved, following, last = batch(15, [9]), batch(14, [9]), batch(16, [9])
    assert start_at(whole(moved, following, last), 13, 17).position is None
    assert start_at(whole(moved, following, last), 14, 17) == Start(len(moved))
    behind = start_at(whole(moved, following, last), 15, 17)
    assert behind == Start(len(moved) + len(following)), "what stands before one that is believed is older"


def test_wanted_batch_is_found_behind_more_than_are_compared_with_each_other() -> None:
    many = [batch(1 << 9, [9]), *(batch(offset, [9]) for offset in range(1, 400))]
    for offset in (1, 150, 320, 390):
        assert start_at(whole(*many), offset, 1 << 10) == Start(sum(map(len, many[:offset])))


def test_partition_whose_answers_are_not_taken_is_in_trouble_until_one_is() -> None:
    async def story() -> None:
        now = [1_000]
        reader = reader_of(Source(), lambda: now[0])
        pipeline = pipeline_at(10, doubt="a batch contradicts its neighbours")
        for now[0] in (1_000, 40_000):
            await taken(reader, pipeline, with_records(b"x"))
        failure = reader.failures.get(("t", 0))
        assert failure is not None and failure.since_ms == 1_000
        assert "contradicts" in failure.reason
        pipeline.doubt = ""
        await taken(reader, pipeline, with_records(b""))
        assert reader.failures.get(("t", 0)) is None

    asyncio.run(story())


def test_pipeline_says_why_it_does_not_take_what_it_is_given() -> None:
    async def story() -> None:
        pipeline, _, _ = started()
        good, wrong = batch(0, [9]), batch(5, [9])
        wrong[-1] ^= 1
        answers: list[tuple[FetchedPartition, str]] = [
            (answer(batch(5, [9])), "stands alone"),
            (answer(good[:-1]), "only a part"),
            (answer(wrong), "CRC"),
            (answer(batch(5_000, [9])), "the log ends at"),
        ]
        for given, said in answers:
            for _ in range(MAX_TIMES_ALONE):
                pipeline.accept(given)
            assert said in pipeline.doubt
        pipeline.accept(answer(good))
        assert pipeline.doubt == ""

    asyncio.run(story())


def test_answer_that_grows_from_look_to_look_stays_within_what_a_client_takes() -> None:
    async def story() -> None:
        pipeline, _, _ = started()
        size = 0
        for _ in range(200):
            pipeline.accept(answer(batch(5, [9])))
            assert size <= pipeline.needed_size <= 64 << 20
            size = pipeline.needed_size
        assert size > MORE_SIZE
        assert pipeline.damage is not None, "and is damage in the end"

    asyncio.run(story())
