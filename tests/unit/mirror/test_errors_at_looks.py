"""Errors, silence and wire faults while a look is under way.

Only what a source gives speaks for a batch or against it: no error does, in neither direction.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millrace.broker.client.raw_fetch import FetchedPartition, FetchPosition
from millrace.broker.errors import (
    CorruptMessage,
    KafkaStorageError,
    NotLeaderOrFollower,
    OffsetOutOfRange,
    UnknownServerError,
)
from millrace.mirror import pipeline as pipeline_module
from millrace.mirror.batches.coalesce import Unvouched
from millrace.mirror.gaps.gaps import GapClass
from millrace.mirror.sources import survey as survey_module
from millrace.mirror.sources.doubt import MAX_REFUSALS, TOLD_DAMAGE_LASTS_MS, Doubt, Found
from tests.unit.mirror.look_stage import lone, refused, refusing, told
from tests.unit.mirror.pipeline_stage import started
from tests.unit.mirror.source_stage import Source, look, surveyor_of
from tests.unit.mirror.test_batches_without_neighbours import (
    CompactedMeanwhile,
    in_files,
    indexed_log_of,
)
from tests.unit.mirror.test_misplaced_batches import (
    LARGE,
    SMALL,
    TURN_MS,
    Log,
    carried,
    log_of,
    missing,
)

ERRORS = (CorruptMessage, KafkaStorageError, UnknownServerError, NotLeaderOrFollower, OffsetOutOfRange)


@pytest.mark.parametrize("error", [*ERRORS, None])
def test_error_at_a_look_does_not_speak_for_a_batch(
    monkeypatch: pytest.MonkeyPatch, error: type[Any] | None
) -> None:
    """The leader moves, say, while it is asked what it has where the batch claims to lie."""
    code = error.code if error is not None else None
    for number, claimed in ((1, 3 ^ 16), (1, 3 ^ 4), (3, 8 ^ 4), (8, 16 ^ 1)):
        for numbers in ([0], [1], [2], [3], [0, 1], [1, 2], [0, 2], range(3), range(9)):
            log = lone(indexed_log_of(LARGE))
            log.claim(number, claimed)
            found, around = asyncio.run(carried(log, monkeypatch, looked=refusing(code, numbers)))
            lost = missing(log, found)
            assert lost <= told(around.events), f"lost in silence: {lost}, {numbers}"
            assert all(offset == true for offset, true in found.items() if true not in log.true[number])


@pytest.mark.parametrize("error", [*ERRORS, None])
def test_error_at_a_look_makes_no_gap_of_a_hole(
    monkeypatch: pytest.MonkeyPatch, error: type[Any] | None
) -> None:
    code = error.code if error is not None else None
    for made in (log_of, indexed_log_of):
        for numbers in ([0], [1], [2], [3], [4], range(2), range(5), range(0, 20, 2), range(1, 20, 2)):
            log = lone(made(LARGE))
            found, around = asyncio.run(carried(log, monkeypatch, looked=refusing(code, numbers)))
            assert (around.events, missing(log, found)) == ([], set())
            assert all(offset == true for offset, true in found.items())


@pytest.mark.parametrize("error", [CorruptMessage, KafkaStorageError, None])
@pytest.mark.parametrize("count", range(1, 7))
def test_error_at_a_look_widens_no_gap(
    monkeypatch: pytest.MonkeyPatch, count: int, error: type[Any] | None
) -> None:
    """What lies behind damage could not be read for so many answers."""
    log = Log(40)
    for offset in range(40):
        log.add(range(offset, offset + 1), LARGE)
    log.batches[9][-1] ^= 1
    code = error.code if error is not None else None
    looked = refusing(code, range(1, 1 + count))
    found, around = asyncio.run(carried(lone(log), monkeypatch, looked=looked))
    assert around.events == [(9, 10, "corrupt")]
    assert found == {offset: offset for offset in range(40) if offset != 9}


def test_error_at_a_look_makes_no_gap_of_a_batch_that_was_compacted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is there now is not what was fetched, and then nothing is given."""
    for code in (CorruptMessage.code, NotLeaderOrFollower.code):
        for at in range(6):
            for numbers in ([2], [3], [2, 3], [4], [3, 4, 5, 6]):
                log = CompactedMeanwhile(24)
                log.at = at
                log.batches, log.true = log_of(LARGE).batches, log_of(LARGE).true
                found, around = asyncio.run(carried(lone(log), monkeypatch, looked=refusing(code, numbers)))
                assert around.events == []
                assert missing(log, found) <= set(range(8, 10))


def test_error_at_a_look_makes_no_gap_of_what_the_wire_has_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wire(Log):
        damages = 3

        def answer(self, offset: int, max_bytes: int = 1 << 20) -> FetchedPartition:
            given = super().answer(offset, max_bytes)
            if self.damages:
                self.damages -= 1
                given.records[70] ^= 1
            return given

    for code in (CorruptMessage.code, UnknownServerError.code):
        log = Wire(24)
        whole = log_of(SMALL)
        log.batches, log.true = whole.batches, whole.true
        found, around = asyncio.run(carried(log, monkeypatch, looked=refusing(code, [0])))
        assert (around.events, missing(log, found)) == ([], set())


@pytest.mark.parametrize("at", [7, 25, 70])
def test_wire_fault_at_a_look_makes_no_gap_of_a_hole(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """In what no checksum covers, in the header, and in a record."""
    for most_given in (1, 1 << 20):
        for number in range(8):
            count = -1

            def looked(_asked: FetchPosition, given: FetchedPartition, number: int = number) -> Any:
                nonlocal count
                count += 1
                if count == number and len(given.records) > at:
                    given.records[at] ^= 4
                return given

            log = in_files(LARGE, 3, 4, 8)
            log.most_given = most_given
            found, around = asyncio.run(carried(log, monkeypatch, 1, looked=looked))
            assert (around.events, missing(log, found)) == ([], set()), number
            assert all(offset == true for offset, true in found.items())


def test_damage_behind_a_lone_batch_does_not_hold_it_up_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def looked(asked: FetchPosition, given: FetchedPartition) -> FetchedPartition:
        return refused(given, CorruptMessage.code) if asked.offset == 10 else given

    log = lone(log_of(LARGE))
    found, around = asyncio.run(carried(log, monkeypatch, looked=looked))
    assert (around.events, missing(log, found)) == ([], set())


def test_what_was_unreadable_behind_a_lone_batch_is_asked_for_again_before_it_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The batch claims offsets of those behind it, and the one that says so could not be read, as often and
    for as long as counts, until just then. What is farther behind says nothing against the claim."""
    enough = TOLD_DAMAGE_LASTS_MS // TURN_MS  # looks, of one a turn, before one that may pass over
    log = Log(24)
    for offset in range(0, 24, 2):
        log.add(range(offset, offset + 2), LARGE)
    claimed = 9
    lone(log).claim(3, claimed)
    asked_behind = 0

    def looked(asked: FetchPosition, given: FetchedPartition) -> FetchedPartition:
        nonlocal asked_behind
        asked_behind += asked.offset == claimed + 2
        was_unreadable = asked.offset == claimed + 2 and asked_behind <= enough + 1
        return refused(given, CorruptMessage.code) if was_unreadable else given

    found, around = asyncio.run(carried(log, monkeypatch, looked=looked))
    assert asked_behind > enough + 1
    lost = set(range(24)) - set(found.values())
    assert lost <= told(around.events), f"lost in silence: {lost - told(around.events)}"


@pytest.mark.parametrize("error", [CorruptMessage, UnknownServerError])
def test_errors_behind_a_lone_batch_are_no_word_of_it_however_often_they_come(
    monkeypatch: pytest.MonkeyPatch, error: type[Any]
) -> None:
    async def story() -> None:
        log = lone(log_of(LARGE))

        async def fetch(*given: Any, **_: Any) -> list[FetchedPartition]:
            (asked,) = given[2].values()
            answered = log.answer(asked.offset)
            return [refused(answered, error.code) if asked.offset >= 10 else answered]

        monkeypatch.setattr(survey_module, "fetch", fetch)
        pipeline, target, around = started(GapClass.CORRUPT, began=6)
        surveyor = surveyor_of(Source(latest=24))
        now_ms = 0
        monkeypatch.setattr(pipeline_module, "steady_ms", lambda: now_ms)
        while now_ms < 3 * TOLD_DAMAGE_LASTS_MS:
            now_ms += TURN_MS
            pipeline.accept(log.answer(6))
            assert await look(surveyor, pipeline)
        assert (target.offsets(), around.events, pipeline.gap) == ([], [], None)
        assert "to look at it fails" in pipeline.doubt.reason, "which becomes its trouble"
        assert not pipeline.wants_fetch(now_ms, 1 << 20), "with a pause"

    asyncio.run(story())


def unread_for(doubt: Doubt, count: int, from_ms: int, to_ms: int) -> bool:
    """Whether the next look may pass over what so many could not read, evenly from one moment to another."""
    lone = Unvouched("it stands alone")
    for number in range(count):
        at_ms = from_ms + (to_ms - from_ms) * number // max(1, count - 1)
        doubt.refused(lone, at_ms)
        assert doubt.question is not None and not doubt.question.may_pass_over
        doubt.answered(Found(is_neighbour_unreadable=True), at_ms)
    doubt.refused(lone, to_ms)
    assert doubt.question is not None
    return doubt.question.may_pass_over


def test_what_cannot_be_read_behind_a_lone_batch_is_passed_over_only_after_a_while() -> None:
    """A store or a leader that is away for a moment is asked as often in it as for damage."""
    at, lasting = 7_000, TOLD_DAMAGE_LASTS_MS
    assert not unread_for(Doubt(5), 50, at, at + lasting - 1)
    assert not unread_for(Doubt(5), MAX_REFUSALS - 1, at, at + lasting)
    assert unread_for(Doubt(5), MAX_REFUSALS, at, at + lasting)


def test_look_that_could_read_what_lies_behind_a_batch_begins_the_while_anew() -> None:
    doubt, lasting = Doubt(5), TOLD_DAMAGE_LASTS_MS
    assert not unread_for(doubt, MAX_REFUSALS, 0, lasting - 1)
    doubt.answered(Found(why_not="no leader"), lasting)
    assert not unread_for(doubt, MAX_REFUSALS, lasting + 1, 2 * lasting)
