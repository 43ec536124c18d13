"""A batch that the source gives without the ones beside it, whatever is asked for: nobody can tell whether it
stands where it claims to.

A broker's own limit (`fetch.max.bytes`, KIP-541) may be smaller than two batches; and in Apache Kafka no
answer goes on from one file of a log into the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest

from millrace.broker.client.raw_fetch import FetchedPartition
from millrace.broker.protocol.batch import seal, stamp_offset_and_epoch
from millrace.broker.protocol.records import Record, build_batch
from millrace.mirror.batches.placement import Start, start_at
from millrace.mirror.sources.doubt import MAX_REFUSALS, Doubt, Found
from millrace.mirror.steady import steady_ms
from tests.unit.mirror.pipeline_stage import answer, batch, started
from tests.unit.mirror.source_stage import Source, pipeline_at, reader_of, taken, with_records
from tests.unit.mirror.test_misplaced_batches import (
    LARGE,
    SIZES,
    SMALL,
    Log,
    carried,
    log_of,
    missing,
    old_log_of,
)


class IndexedLog(Log):
    """Every batch has its entry in the source's index, as those have that are larger than what Apache Kafka
    leaves between two (`index.interval.bytes`, 4 KiB): it was made before the damage."""

    def _read_from(self, offset: int) -> list[bytearray]:
        entries = [number for number, each in enumerate(self.true) if each[-1] <= offset]
        return self.batches[entries[-1] :] if entries else self.batches


class LogFromTheBatchBefore(Log):
    """An answer may begin before what was asked for: here, behind a hole, with the last one before that."""

    def answer(self, offset: int, max_bytes: int = 1 << 20) -> FetchedPartition:
        given = super().answer(offset, max_bytes)
        number = max((number for number, each in enumerate(self.true) if each[0] <= offset), default=0)
        if offset not in self.true[number]:
            given = replace(given, records=memoryview(self.batches[number] + given.records))
        return given


class LogOfFiles(Log):
    """A file's name is the offset that it begins with; `begins` are the numbers of their first batches."""

    begins: Sequence[int] = ()

    def _read_from(self, offset: int) -> list[bytearray]:
        edges = [0, *self.begins, len(self.batches)]
        for begin, end in pairwise(edges):
            batches = self.batches[begin:end]
            is_named_so = end == len(self.batches) or self.true[end].start > offset
            if is_named_so and any(self.claimed_end(each) > offset for each in batches):
                return batches
        return []


def indexed_log_of(size: int) -> Log:
    return like(log_of(size), IndexedLog(24))


def log_from_the_batch_before(size: int) -> Log:
    return like(log_of(size), LogFromTheBatchBefore(24))


def in_files(size: int, *begins: int) -> Log:
    log = LogOfFiles(24)
    log.begins = begins
    return like(log_of(size), log)


def like(given: Log, made: Log) -> Log:
    made.batches, made.true = given.batches, given.true
    return made


@pytest.mark.parametrize(
    "made",
    [
        *[partial(log_of, size) for size in SIZES],
        partial(indexed_log_of, LARGE),
        partial(log_from_the_batch_before, LARGE),
        partial(old_log_of, LARGE),
    ],
)
def test_healthy_log_with_holes_is_carried_whole_by_a_source_that_gives_one_batch_an_answer(
    monkeypatch: pytest.MonkeyPatch, made: Callable[[], Log]
) -> None:
    for began in range(24):
        log = made()
        log.most_given = 1
        found, around = asyncio.run(carried(log, monkeypatch, began=began))
        assert around.events == []
        assert all(offset < began for offset in missing(log, found))
        assert all(offset == true for offset, true in found.items())


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("max_bytes", [1, 1 << 20])
@pytest.mark.parametrize(
    "begins", [*[(number,) for number in range(1, 11)], (3, 4), (8, 9), (3, 8, 9), range(1, 11)]
)
def test_healthy_log_with_holes_is_carried_whole_wherever_its_files_end(
    monkeypatch: pytest.MonkeyPatch, size: int, max_bytes: int, begins: Sequence[int]
) -> None:
    """The last batch of a file comes alone, and the next file may have no more than one, too."""
    for began in (0, 6, 8, 15, 16):
        log = in_files(size, *begins)
        found, around = asyncio.run(carried(log, monkeypatch, max_bytes, began=began))
        assert around.events == []
        assert all(offset < began for offset in missing(log, found))
        assert all(offset == true for offset, true in found.items())


def test_lone_batch_that_is_compacted_while_it_is_looked_at_is_carried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its header is another one then, at the same offsets; the one before lies in a hole by now."""
    for at in range(12):
        log = CompactedMeanwhile(24)
        log.at = at
        like(log_of(LARGE), log)
        log.most_given = 1
        found, around = asyncio.run(carried(log, monkeypatch))
        assert around.events == []
        assert missing(log, found) <= set(range(8, 10)), at


class CompactedMeanwhile(Log):
    """The one behind the first hole loses a record, with the answer after `at` others behind that hole."""

    at = 0
    _answers = 0

    def _read_from(self, offset: int) -> list[bytearray]:
        if 6 <= offset < 11:
            self._answers += 1
            if self._answers == self.at + 1:
                built = build_batch([Record(None, b"8".ljust(LARGE, b"."), timestamp_ms=1)])
                built[23:27] = (1).to_bytes(4, "big")
                seal(memoryview(built))
                stamp_offset_and_epoch(memoryview(built), 8, 0)
                self.batches[3] = built
        return self.batches


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bit", range(5))
def test_batch_alone_behind_a_hole_is_told_where_the_source_never_gives_what_follows(
    monkeypatch: pytest.MonkeyPatch, bit: int, size: int
) -> None:
    for number, offsets in enumerate(log_of(SMALL).true[:-1]):
        log = indexed_log_of(size)
        log.most_given = 1
        claimed = offsets.start ^ 1 << bit
        # One that would be the last of the log looks as if nothing could follow it.
        if claimed < offsets.start or claimed + len(offsets) == log.end:
            continue
        log.claim(number, claimed)
        found, around = asyncio.run(carried(log, monkeypatch))
        told = {offset for first, following, _ in around.events for offset in range(first, following)}
        assert missing(log, found) <= told, f"lost in silence: {missing(log, found) - told}, {number}"
        assert {kind for *_, kind in around.events} <= {"corrupt"}
        assert all(offset == true for offset, true in found.items() if true not in offsets)


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_last_batch_of_a_file_that_claims_offsets_of_the_next_one_is_told(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    for second in range(1, 10):
        for bit in range(4):
            log = in_files(size, second)
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
        pipeline = pipeline_at(10, doubt=Doubt(10, "a batch contradicts its neighbours"))
        for now[0] in (1_000, 40_000):
            await taken(reader, pipeline, with_records(b"x"))
        failure = reader.failures.get(("t", 0))
        assert failure is not None and failure.since_ms == 1_000
        assert "contradicts" in failure.reason
        pipeline.doubt = Doubt(10)
        await taken(reader, pipeline, with_records(b""))
        assert reader.failures.get(("t", 0)) is None

    asyncio.run(story())


def test_pipeline_says_why_it_does_not_take_what_it_is_given() -> None:
    async def story() -> None:
        pipeline, _, _ = started()
        good, wrong = batch(0, [9]), batch(5, [9])
        wrong[-1] ^= 1
        answers: list[tuple[FetchedPartition, str]] = [
            (answer(good[:-1]), "only a part"),
            (answer(wrong), "CRC"),
            (answer(batch(5_000, [9])), "the log ends at"),
        ]
        for given, said in answers:
            for _ in range(MAX_REFUSALS + 1):
                pipeline.accept(given)
            assert said in pipeline.doubt.reason
        pipeline.accept(answer(good))
        assert pipeline.doubt.reason == ""

    asyncio.run(story())


def test_nothing_is_fetched_or_told_while_a_lone_batch_is_looked_at() -> None:
    async def story() -> None:
        pipeline, target, _ = started()
        pipeline.accept(answer(batch(5, [9])))
        question = pipeline.take_question()
        assert question is not None and not pipeline.wants_fetch(steady_ms() + 600_000, 1 << 20)
        assert pipeline.doubt.reason == ""
        assert question.suspect is not None
        pipeline.looked(question, Found(is_in_order=True, mark=question.suspect.mark))
        assert pipeline.wants_fetch(steady_ms(), 1 << 20)
        pipeline.accept(answer(batch(5, [9])))
        assert target.offsets() == [[5]]

    asyncio.run(story())
