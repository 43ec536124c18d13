"""What a look at the log may say of a batch for which nothing in its answer speaks, and what it costs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from millrace.broker.client.raw_fetch import FetchedPartition, FetchPosition
from millrace.mirror import pipeline as pipeline_module
from millrace.mirror.batches.coalesce import BatchWalk
from millrace.mirror.batches.placement import reaching
from millrace.mirror.gaps.gaps import GapClass
from millrace.mirror.sources import survey as survey_module
from millrace.mirror.sources.doubt import MAX_REFUSALS, TOLD_DAMAGE_LASTS_MS, Found, Question
from millrace.mirror.steady import steady_ms
from millrace.mirror.topics.routes import SourcePartition
from tests.unit.mirror.look_stage import Looks, lone, told
from tests.unit.mirror.old_entries import entry
from tests.unit.mirror.pipeline_stage import answer, batch, started
from tests.unit.mirror.source_stage import OLD, Source, look, surveyor_of
from tests.unit.mirror.test_batches_without_neighbours import (
    IndexedLog,
    in_files,
)
from tests.unit.mirror.test_misplaced_batches import (
    LARGE,
    MERGED_BELOW,
    SMALL,
    Log,
    carried,
    collect,
    log_of,
    missing,
)


def test_lone_batch_beyond_the_end_is_damage_also_where_one_is_known_to_be_misplaced() -> None:
    """Nothing can be asked about an offset that the log does not have."""

    async def story() -> None:
        pipeline, _, _ = started()
        pipeline._trust._misplaced_up_to = 24
        for _ in range(4):
            assert pipeline.doubt.question is None
            pipeline.accept(answer(batch(0, [9] * 30), end=24))
        question = pipeline.take_question()
        assert question is not None and question.suspect is None
        assert "the log ends at 24" in question.reason

    asyncio.run(story())


class OpenTransaction(Log):
    """Up to `stable_end` for those that read committed data."""

    stable_end = 10
    says_so = True

    def answer(self, offset: int, max_bytes: int = 1 << 20) -> FetchedPartition:
        given = super().answer(offset, max_bytes)
        before = sum(len(each) for each, true in zip(self.batches, self.true, strict=True) if true[0] < 10)
        start = sum(len(each) for each in self.batches) - len(given.records)
        stable = given.records[: max(0, before - start)] if self.stable_end < self.end else given.records
        said = self.stable_end if self.says_so else -1
        return replace(given, last_stable_offset=said, records=stable)

    def uncommitted(self, offset: int) -> FetchedPartition:
        return super().answer(offset)


@pytest.mark.parametrize("says_so", [True, False])
@pytest.mark.parametrize("claimed", [9, 9 ^ 32, 9 ^ 64])
def test_batch_that_claims_to_lie_in_an_open_transaction_is_told(
    monkeypatch: pytest.MonkeyPatch, claimed: int, says_so: bool
) -> None:
    """It is the last one that may be given, and so it comes alone wherever it stands. That is found out while
    the transaction is still open."""

    async def story() -> None:
        log = OpenTransaction(128)
        log.says_so = says_so
        for offset in range(128):
            log.add(range(offset, offset + 1), SMALL)
        log.claim(9, claimed)

        async def fetch(*given: Any, **how: Any) -> list[FetchedPartition]:
            (asked,) = given[2].values()
            return [log.answer(asked.offset) if how["read_committed"] else log.uncommitted(asked.offset)]

        monkeypatch.setattr(survey_module, "fetch", fetch)
        pipeline, target, around = started(GapClass.CORRUPT)
        surveyor, found = surveyor_of(Source(latest=128)), dict[int, int]()
        for number in range(40):
            log.stable_end = 128 if number > 20 else 10
            pipeline.accept(log.answer(pipeline.progress.fetch_offset))
            await look(surveyor, pipeline)
            collect(target, found)
            await around.rest()
            if number == 20:
                assert pipeline.progress.settled_position == 10, "as far as the transaction lets it"
        assert pipeline.progress.settled_position == 128
        lost = set(range(128)) - set(found.values())
        assert lost == told(around.events) == (set() if claimed == 9 else {9})
        assert all(offset == true for offset, true in found.items())

    asyncio.run(story())


def test_look_that_ends_late_says_nothing_of_another_batch() -> None:
    """Its lane went back meanwhile; the same offset may stand for something else by now."""

    async def story() -> None:
        pipeline, target, _ = started()
        pipeline.accept(answer(batch(5, [9])))
        first = pipeline.take_question()
        assert first is not None and first.suspect is not None
        pipeline.rewind()
        pipeline.accept(answer(batch(5, [9])))
        assert pipeline.take_question() is None, "one look at a time"
        pipeline.looked(first, Found(is_in_order=True, mark=first.suspect.mark, misplaced_up_to=90))
        second = pipeline.take_question()
        assert second is not None and second is not first
        pipeline.accept(answer(batch(5, [9])))
        assert target.offsets() == []
        pipeline.looked(second, Found(90))
        assert pipeline.gap is None or pipeline.gap.to_offset == 90

    asyncio.run(story())


def test_only_the_batch_that_was_looked_at_is_taken_for_it() -> None:
    """The next answer may be another replica's, with damage of its own."""

    async def story() -> None:
        pipeline, target, _ = started()
        pipeline.accept(answer(batch(5, [9])))
        question = pipeline.take_question()
        assert question is not None and question.suspect is not None
        pipeline.looked(question, Found(is_in_order=True, mark=question.suspect.mark))
        pipeline.accept(answer(batch(7, [9])))
        assert target.offsets() == [] and "stands alone" in pipeline.doubt.reason
        assert not pipeline.wants_fetch(steady_ms(), 1 << 20)
        again = pipeline.take_question()
        assert again is not None and again.suspect is not None and again.suspect.base_offset == 7
        pipeline.looked(again, Found(why_not="no leader"))
        assert "no leader" in pipeline.doubt.reason
        assert not pipeline.wants_fetch(steady_ms(), 1 << 20)
        assert pipeline.wants_fetch(steady_ms() + 10_000, 1 << 20)

    asyncio.run(story())


class Live(Log):
    """It ends at `start`, until it is asked for what lies there."""

    start = 0
    is_indexed = False
    _has_grown = False

    def answer(self, offset: int, max_bytes: int = 1 << 20) -> FetchedPartition:
        self._has_grown |= offset >= self.start
        if self._has_grown:
            return super().answer(offset, max_bytes)
        batches = self.batches
        self.batches = [each for each, true in zip(batches, self.true, strict=True) if true[0] < self.start]
        given = super().answer(offset, max_bytes)
        self.batches = batches
        return replace(given, high_watermark=self.start, last_stable_offset=self.start)

    def _read_from(self, offset: int) -> list[bytearray]:
        return IndexedLog._read_from(self, offset) if self.is_indexed else self.batches  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("most_given", [1, 1 << 20])
@pytest.mark.parametrize("is_indexed", [True, False])
def test_batch_that_claims_to_begin_before_another_ends_is_told(
    monkeypatch: pytest.MonkeyPatch, size: int, most_given: int, is_indexed: bool
) -> None:
    """Its first records would count as fetched before, and the others get offsets that are not theirs."""
    for number, claimed in ((8, 15), (8, 14), (8, 13), (9, 19), (9, 18)):
        log = Live(24)
        whole = log_of(size)
        log.batches, log.true, log.is_indexed = whole.batches, whole.true, is_indexed
        log.most_given, log.start = most_given, log.true[number - 1][-1] + 1
        log.claim(number, claimed)
        found, around = asyncio.run(carried(log, monkeypatch))
        lost = missing(log, found)
        assert lost <= told(around.events), f"lost in silence: {lost - told(around.events)}, {number}"


@pytest.mark.parametrize(
    "elsewhere",
    [
        # It claims to end where another does, behind a hole: what it claims to begin in the source has lost.
        {11: (11, 12)},
        # The index leads to it from its last offset on, and to the one of before from that one's.
        {7: (0, 8)},
    ],
)
def test_batch_that_claims_to_begin_before_the_last_one_ended_is_asked_for_at_both_ends_of_its_claim(
    monkeypatch: pytest.MonkeyPatch, elsewhere: dict[int, tuple[int, int]]
) -> None:
    """Else it would be taken from the middle on: its records under offsets that are not theirs, and the one
    that stands there passed over in silence."""
    claimed = batch(4, [LARGE] * 8)

    async def fetch(*given: Any, **_: Any) -> list[FetchedPartition]:
        (asked,) = given[2].values()
        base, end = elsewhere.get(asked.offset, (asked.offset, asked.offset + 1))
        is_it = asked.offset not in elsewhere and 4 <= asked.offset < 12
        return [answer(claimed if is_it else batch(base, [LARGE] * (end - base)), end=100)]

    monkeypatch.setattr(survey_module, "fetch", fetch)
    question = Question(8, "it claims to begin at 4", reaching(claimed, 8))
    look = surveyor_of(Source()).look
    found = asyncio.run(look(SourcePartition("ewr", "flights", 0), OLD, question))
    assert not found.is_in_order and found.damage_end > 8
    elsewhere.clear()
    assert asyncio.run(look(SourcePartition("ewr", "flights", 0), OLD, question)).is_in_order


def test_batch_that_claims_to_end_where_the_next_one_does_is_told_and_not_taken_for_that_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What lies before its claimed end is found by that alone."""
    log = IndexedLog(11)
    log.add(range(4), LARGE)
    for offsets in (range(4, 6), range(7, 9), range(10, 11)):
        log.add(offsets, SMALL)
    log.claim(0, 2)
    log.most_given = 200
    found, around = asyncio.run(carried(log, monkeypatch))
    lost = {0, 1, 2, 3, 4, 5, 7, 8, 10} - set(found.values())
    assert lost <= told(around.events), f"lost in silence: {lost - told(around.events)}"
    assert all(offset == true for offset, true in found.items())


def test_source_that_has_merged_its_batches_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ended at an offset lies within a larger batch by now."""

    class Merging(Log):
        def answer(self, offset: int, max_bytes: int = 1 << 20) -> FetchedPartition:
            if offset >= 8 and len(self.batches) > 3:
                merged = Log(24)
                merged.add(range(4, 16), LARGE)
                merged.add(range(16, 24), LARGE)
                self.batches, self.true = merged.batches, merged.true
            return super().answer(offset, max_bytes)

    log = Merging(24)
    for offset in range(0, 24, 4):
        log.add(range(offset, offset + 4), LARGE)
    log.most_given = 1
    found, around = asyncio.run(carried(log, monkeypatch))
    assert around.events == [] and found == {offset: offset for offset in range(24)}


def test_log_that_grows_while_it_is_looked_at_is_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    for most_given in (1, 1 << 20):
        for at in range(6):
            log = Log(6)
            log.add(range(3), LARGE)
            log.add(range(5, 6), LARGE)
            log.most_given = most_given
            count = 0

            def looked(asked: FetchPosition, _given: FetchedPartition, log: Log = log, at: int = at) -> Any:
                nonlocal count
                if count == at:
                    log.add(range(6, 9), LARGE)
                    log.end = 9
                count += 1
                return log.answer(asked.offset)

            found, around = asyncio.run(carried(log, monkeypatch, looked=looked))
            assert around.events == []
            assert {0, 1, 2, 5} <= found.keys() and all(offset == true for offset, true in found.items())


def test_lone_batch_before_a_hole_that_reaches_the_end_of_the_log_is_carried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compaction has taken out all that was behind it, and the file of today is empty."""
    log = Log(24)
    for offsets in (range(3), range(5, 6)):
        log.add(offsets, LARGE)

    async def story() -> dict[int, int]:
        pipeline, target, around = started()

        async def fetch(*given: Any, **_: Any) -> list[FetchedPartition]:
            (asked,) = given[2].values()
            return [log.answer(asked.offset)]

        monkeypatch.setattr(survey_module, "fetch", fetch)
        surveyor, found = surveyor_of(Source(latest=24)), dict[int, int]()
        now_ms = 0
        monkeypatch.setattr(pipeline_module, "steady_ms", lambda: now_ms)
        for _ in range(MAX_REFUSALS + 4):
            now_ms += TOLD_DAMAGE_LASTS_MS // MAX_REFUSALS + 1
            pipeline.accept(log.answer(pipeline.progress.fetch_offset))
            await look(surveyor, pipeline)
            collect(target, found)
        assert around.events == [] and pipeline.progress.fetch_offset == 6
        return found

    assert asyncio.run(story()) == {0: 0, 1: 1, 2: 2, 5: 5}


def test_old_message_that_lies_before_what_was_asked_for_is_not_waited_for() -> None:
    async def story() -> None:
        pipeline, _, _ = started(began=5)
        before = memoryview(bytearray(entry(4, 0, None, b"x")))
        for _ in range(3):
            assert pipeline.doubt.question is None
            pipeline.accept(FetchedPartition("flights", 0, 0, 10, 10, 0, (), None, before))
            assert not pipeline.wants_fetch(steady_ms(), 1 << 20)
        question = pipeline.take_question()
        assert question is not None and "before offset 5" in question.reason

    asyncio.run(story())


def test_gap_of_a_wrong_bit_is_as_wide_as_its_batch_however_high_the_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = IndexedLog(4_000)
    for offset in range(200):
        log.add(range(offset, offset + 1), LARGE)
    for offset in range(200, 4_000, 100):
        log.add(range(offset, offset + 100), SMALL)
    lone(log).claim(100, 100 ^ 2_048)
    found, around = asyncio.run(carried(log, monkeypatch, began=50))
    assert around.events == [(100, 101, "corrupt")]
    assert all(offset == true for offset, true in found.items())


def test_batches_behind_what_a_misplaced_one_claims_cost_one_fetch_each() -> None:
    async def story() -> None:
        pipeline, target, _ = started()
        pipeline._trust._misplaced_up_to = 6
        pipeline._shared.walk = BatchWalk(MERGED_BELOW)
        pipeline.accept(answer(batch(0, [9])))
        assert pipeline.take_question() is not None
        pipeline, target, _ = started(began=6)
        pipeline._trust._misplaced_up_to = 6
        for offset in range(6, 12):
            pipeline.accept(answer(batch(offset, [9]), end=offset + 1))
        assert target.offsets() == [[offset] for offset in range(6, 12)]

    asyncio.run(story())


def test_partition_that_gets_nothing_needs_no_answer_for_itself() -> None:
    """Its leader may be one whose log ends there now: the others of its connection would wait with it."""

    async def story() -> None:
        pipeline, _, _ = started()
        pipeline.doubt.needed_size = 1 << 20
        pipeline.accept(answer())
        assert pipeline.doubt.needed_size == 0

    asyncio.run(story())


def test_healthy_lone_batch_costs_two_fetches_and_three_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks()
    log = Log(60)
    for offset in range(1, 60, 3):
        log.add(range(offset, offset + 1), LARGE)
    log.end = 59
    found, around = asyncio.run(carried(lone(log), monkeypatch, looked=looks))
    assert around.events == [] and len(found) == 20
    assert len(looks) <= 3 * len(found)
    # Where the source gives what follows, that says it at once; what stands before is asked for all the same.
    looks.clear()
    log = in_files(LARGE, 3)
    asyncio.run(carried(log, monkeypatch, 1, looked=looks))
    assert looks == [9, 4, 19, 14]


def test_looks_are_spent_of_the_limit_of_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        log, spent = lone(log_of(LARGE)), list[int]()

        async def fetch(*given: Any, **_: Any) -> list[FetchedPartition]:
            (asked,) = given[2].values()
            return [log.answer(asked.offset)]

        monkeypatch.setattr(survey_module, "fetch", fetch)
        pipeline, _, _ = started(began=6)
        pipeline.accept(log.answer(6))
        surveyor = surveyor_of(Source(latest=24))
        surveyor._spend = spent.append
        assert await look(surveyor, pipeline)
        assert sum(spent) > 2 * LARGE

    asyncio.run(story())
