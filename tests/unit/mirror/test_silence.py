"""A source that ends fetches with nothing, and no error, though its log goes on: a trouble, once it lasts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from millrace.broker.client.raw_fetch import FetchedPartition, FetchPosition
from millrace.mirror.pipeline import State
from millrace.mirror.sources.fetch_loop import FetchLoop
from millrace.mirror.sources.fetch_memory import FetchBudget
from millrace.mirror.sources.silence import MIN_ANSWERS, Silences
from millrace.mirror.troubles import LASTING_AFTER_MS, Failure
from tests.unit.mirror.source_stage import Source, heard, pipeline_at, reader_of

BEGAN_MS = 1_000_000
KEY = ("t", 0)


def nothing(stable_end: int = 100, log_end: int = 100) -> FetchedPartition:
    return FetchedPartition("t", 0, 0, log_end, stable_end, 0, (), None, memoryview(b""))


SOMETHING = replace(nothing(), records=memoryview(b"x"))


class Row:
    """Answers to fetches at an offset, evenly over a time."""

    def __init__(self) -> None:
        self.silences: Silences[tuple[str, int]] = Silences()
        self.now_ms = BEGAN_MS

    def goes_on(
        self,
        answer: FetchedPartition,
        count: int = MIN_ANSWERS,
        ms: int = LASTING_AFTER_MS,
        offset: int = 10,
        had_room: bool = True,
    ) -> Failure | None:
        """What is told at the last of them."""
        told, first_ms = None, self.now_ms
        for number in range(count):
            self.now_ms = first_ms + ms * number // max(1, count - 1)
            told = self.silences.answered(
                KEY, offset, answer.last_stable_offset,
                gives=len(answer.records) > 0, had_room=had_room, now_ms=self.now_ms,
            )  # fmt: skip
        return told


def test_nothing_again_and_again_where_records_follow_is_told_with_what_to_look_at() -> None:
    told = Row().goes_on(nothing())
    assert told is not None and told.since_ms == BEGAN_MS
    assert "gives nothing at offset 10" in told.reason and "goes on to 100" in told.reason
    assert "remote store" in told.reason and "compaction" in told.reason


def test_nothing_for_a_moment_or_twice_is_not_told() -> None:
    assert Row().goes_on(nothing(), count=500, ms=LASTING_AFTER_MS - 1) is None
    assert Row().goes_on(nothing(), count=MIN_ANSWERS - 1, ms=50 * LASTING_AFTER_MS) is None


def test_end_of_the_log_is_not_told_however_long_nothing_comes() -> None:
    assert Row().goes_on(nothing(stable_end=10, log_end=10), count=50) is None


@pytest.mark.parametrize("stable_end", [10, 4, -1])
def test_what_an_open_transaction_holds_back_is_not_told(stable_end: int) -> None:
    """That is a trouble of its own. -1: the source does not say."""
    assert Row().goes_on(nothing(stable_end=stable_end), count=50) is None


def test_what_comes_behind_an_open_transaction_counts_from_then_on() -> None:
    row = Row()
    row.goes_on(nothing(stable_end=10))
    assert row.goes_on(nothing(), ms=LASTING_AFTER_MS - 1) is None


@pytest.mark.parametrize("meanwhile", [SOMETHING, nothing(stable_end=10)])
def test_one_answer_that_has_something_or_needs_nothing_begins_it_anew(meanwhile: FetchedPartition) -> None:
    row = Row()
    assert row.goes_on(nothing()) is not None
    assert row.goes_on(meanwhile, count=1) is None
    assert row.goes_on(nothing(), ms=LASTING_AFTER_MS - 1) is None


def test_another_offset_begins_it_anew() -> None:
    """It was given something after all, or goes on elsewhere."""
    row = Row()
    assert row.goes_on(nothing()) is not None
    assert row.goes_on(nothing(), offset=11, ms=LASTING_AFTER_MS - 1) is None


def test_answers_whose_room_others_took_do_not_count_and_take_nothing_back() -> None:
    row = Row()
    assert row.goes_on(nothing(), count=50, had_room=False) is None
    assert row.goes_on(nothing()) is not None
    assert row.goes_on(nothing(), had_room=False) is not None


def test_clock_that_is_set_back_does_not_keep_it_untold() -> None:
    row = Row()
    row.goes_on(nothing())
    row.now_ms = 5_000
    told = row.goes_on(nothing())
    assert told is not None and told.since_ms == 5_000


class Reader:
    """A real reader of two partitions of one connection, in turn."""

    def __init__(self) -> None:
        self.now_ms = BEGAN_MS
        self.reader = reader_of(Source(), lambda: self.now_ms)
        self.pipelines: dict[tuple[str, int], Any] = {("t", number): pipeline_at(10) for number in (0, 1)}
        self.reader._pipelines = self.pipelines
        self.loop = FetchLoop(FetchBudget(1 << 20))

    def answers(self, *records: bytes, first: int = 0, ms: int = LASTING_AFTER_MS) -> str:
        """Of partitions 0 and 1, for as long as counts; what is told of partition 1 then."""
        numbers = (first, 1 - first)
        asked = {
            ("t", number): FetchPosition(10, topic_id=self.pipelines["t", number].origin.topic_id)
            for number in numbers
        }
        given = [
            replace(nothing(), partition=number, records=memoryview(records[number])) for number in numbers
        ]
        for step_ms in (0, 1, ms - 1):
            self.now_ms += step_ms
            session = self.loop.session
            session.want(asked, 1 << 20, by_id=False)
            session.answered(0, list(map(heard, given)))
            self.reader._take_all(self.loop, self.pipelines, asked, given)
        told = self.reader.failures.get(("t", 1))
        return told.reason if told is not None else ""


def test_partition_that_others_leave_no_room_is_not_told_and_the_first_in_its_turn_is() -> None:
    """Our own limit of an answer, or the source's, is used up by those before it."""

    async def story() -> None:
        assert Reader().answers(b"x", b"", first=0) == ""
        assert "gives nothing" in Reader().answers(b"x", b"", first=1)
        assert "gives nothing" in Reader().answers(b"", b"", first=0)

    asyncio.run(story())


def test_partition_that_is_paused_is_not_told_and_begins_anew() -> None:
    async def story() -> None:
        stage = Reader()
        assert stage.answers(b"", b"") != ""
        stage.pipelines["t", 1].state = State.PAUSED
        stage.reader._forget_what_stands()
        assert stage.answers(b"", b"") == "", "what is not fetched is not tried in vain"
        stage.pipelines["t", 1].state = State.RUNNING
        assert stage.answers(b"", b"", ms=LASTING_AFTER_MS - 1) == ""
        assert stage.answers(b"", b"") != ""

    asyncio.run(story())


def test_partition_that_is_taken_away_and_given_again_begins_anew() -> None:
    async def story() -> None:
        stage = Reader()
        pipeline = stage.pipelines["t", 1]
        pipeline.partition = pipeline.partition._replace(partition=1)
        assert stage.answers(b"", b"") != ""
        stage.reader.remove(pipeline)
        stage.pipelines["t", 1] = pipeline
        assert stage.answers(b"", b"", ms=LASTING_AFTER_MS - 1) == ""

    asyncio.run(story())
