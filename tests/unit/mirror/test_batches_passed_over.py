"""A batch whose base offset has a wrong bit and claims to lie farther back than it does.

Asked for by its own offsets, Apache Kafka passes over it: it gives the first batch that reaches up to what is
asked for, as compaction would have left it. Where an answer shows it between its neighbours, the walk tells.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import Any

import pytest

from millrace.broker.client.raw_fetch import FetchedPartition, FetchPosition
from millrace.broker.errors import CorruptMessage, NotLeaderOrFollower, OffsetOutOfRange
from millrace.mirror.batches.coalesce import BatchWalk
from tests.unit.mirror.look_stage import Looks, lone, refused, told
from tests.unit.mirror.test_batches_without_neighbours import LogOfFiles, like
from tests.unit.mirror.test_misplaced_batches import LARGE, SMALL, Log, carried

TOO_LOW, CLAIMED = 5, 2
"""The number of the batch (offsets 10 and 11), and what it claims."""


def dense(size: int, made: Log | None = None) -> Log:
    log = Log(24)
    for offset in range(0, 24, 2):
        log.add(range(offset, offset + 2), size)
    return log if made is None else like(log, made)


class Tailed(Log):
    """It ends at `cut_at` until what lies there is asked for."""

    cut_at, _has_grown = 10, False

    def answer(self, offset: int, max_bytes: int = 1 << 20) -> FetchedPartition:
        batches, self.batches = self.batches, list(self.batches)
        self._has_grown |= offset >= self.cut_at
        if not self._has_grown:
            del self.batches[self.cut_at // 2 :]
        given = super().answer(offset, max_bytes)
        self.batches = batches
        return given


class Searched(Tailed):
    """It looks for the first batch that begins behind an offset, and then whether the one before that holds
    it, as Apache Kafka 4.1 does."""

    def _read_from(self, offset: int) -> list[bytearray]:
        before = -1
        for number, each in enumerate(self.batches):
            base_offset = int.from_bytes(each[:8], "big")
            if base_offset == offset:
                return self.batches[number:]
            if base_offset > offset:
                is_before = before >= 0 and self.claimed_end(self.batches[before]) > offset
                return self.batches[before if is_before else number :]
            before = number
        return self.batches[before:] if self.claimed_end(self.batches[before]) > offset else []


@pytest.mark.parametrize("made", [Tailed, Searched])
@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_batch_that_claims_to_lie_farther_back_where_an_answer_begins_is_told(
    monkeypatch: pytest.MonkeyPatch, size: int, made: type[Tailed]
) -> None:
    """The answer before ended with the batch before it: nothing showed that it is there."""
    log = dense(size, made(24))
    log.claim(TOO_LOW, CLAIMED)
    found, around = asyncio.run(carried(log, monkeypatch))
    assert around.events == [(10, 12, "corrupt")]
    assert found == {offset: offset for offset in range(24) if offset not in (10, 11)}


@pytest.mark.parametrize("max_bytes", [40_000, 60_000, 1 << 20])
def test_batch_that_claims_to_lie_farther_back_is_told_wherever_answers_end(
    monkeypatch: pytest.MonkeyPatch, max_bytes: int
) -> None:
    for number in range(2, 11):
        log = dense(LARGE)
        log.claim(number, 0)
        found, around = asyncio.run(carried(log, monkeypatch, max_bytes))
        lost = set(range(24)) - set(found.values())
        assert lost == told(around.events) == set(log.true[number]), number


@pytest.mark.safety
def test_batch_that_claims_to_lie_farther_back_is_told_behind_many_that_became_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The look has to reach over all of them."""
    begins, taken = 34, Tailed(80)
    taken.cut_at = begins
    for offset in range(0, 80, 2):
        taken.add(range(offset, offset + 2), LARGE)
    taken.claim(begins // 2, CLAIMED)
    found, around = asyncio.run(carried(taken, monkeypatch, walk=BatchWalk()))
    assert around.events == [(begins, begins + 2, "corrupt")]
    assert set(found) == set(range(80)) - {begins, begins + 1} == set(found.values())


@pytest.mark.parametrize("error", [None, OffsetOutOfRange, CorruptMessage])
def test_hole_is_carried_over_whatever_became_of_the_batch_before_it(
    monkeypatch: pytest.MonkeyPatch, error: type[Any] | None
) -> None:
    """It has been carried: that it expired, or is damaged now, must not hold up what follows."""

    def looked(asked: FetchPosition, given: FetchedPartition) -> FetchedPartition:
        return given if error is None or asked.offset >= 10 else refused(given, error.code)

    for size in (SMALL, LARGE):
        log = dense(size, Tailed(24))
        del log.batches[TOO_LOW], log.true[TOO_LOW]
        earliest = 10 if error is OffsetOutOfRange else 0
        found, around = asyncio.run(carried(log, monkeypatch, looked=looked, earliest=earliest))
        assert around.events == []
        assert found == {offset: offset for offset in range(24) if offset not in (10, 11)}


@pytest.mark.safety
@pytest.mark.parametrize("failing", [{0, 1, 2}, {1}], ids=["at first", "when it is asked twice"])
@pytest.mark.parametrize(
    "code",
    [NotLeaderOrFollower.code, CorruptMessage.code, OffsetOutOfRange.code, 0],
    ids=["error", "damage", "out of range, and it is not", "nothing"],
)
def test_failed_look_at_what_stands_before_a_hole_does_not_speak_for_it(
    monkeypatch: pytest.MonkeyPatch, failing: set[int], code: int
) -> None:
    log, looks = dense(LARGE, Tailed(24)), itertools.count()
    log.claim(TOO_LOW, CLAIMED)

    def looked(asked: FetchPosition, given: FetchedPartition) -> FetchedPartition:
        if asked.offset < 10 and next(looks) in failing:
            return refused(given, code) if code else replace(given, records=memoryview(b""))
        return given

    _, around = asyncio.run(carried(log, monkeypatch, looked=looked))
    assert around.events == [(10, 12, "corrupt")] and next(looks) > max(failing)


def test_wire_fault_at_a_look_at_what_stands_before_a_hole_makes_no_gap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It turns the batch behind the hole into one that claims to lie before it."""
    log, faults = dense(LARGE, Tailed(24)), 1
    del log.batches[TOO_LOW], log.true[TOO_LOW]

    def looked(asked: FetchPosition, given: FetchedPartition) -> FetchedPartition:
        nonlocal faults
        if asked.offset == 8 and faults:
            faults -= 1
            following = len(log.batches[4])
            given.records[following : following + 8] = (4).to_bytes(8, "big")
        return given

    found, around = asyncio.run(carried(log, monkeypatch, looked=looked))
    assert around.events == [] and not faults and len(found) == 22


def test_holes_within_answers_and_behind_what_an_answer_shows_cost_no_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = Looks()
    log = Log(300)
    for offset in range(0, 300, 3):
        log.add(range(offset, offset + 1), LARGE)
    log.end = 298
    found, around = asyncio.run(carried(log, monkeypatch, 5 * LARGE - 100, looked=looks))
    assert (around.events, looks, len(found)) == ([], [], 100)


@pytest.mark.parametrize("is_in_files", [True, False])
def test_batch_that_no_answer_shows_is_not_told(monkeypatch: pytest.MonkeyPatch, is_in_files: bool) -> None:
    """Nobody can: it is the first of a file, or the source gives one batch an answer, and such holes are what
    compaction leaves. ARCHITECTURE.md says so, at "a base offset is believed"."""
    files = LogOfFiles(24)
    files.begins = (TOO_LOW,)
    log = dense(LARGE, files) if is_in_files else lone(dense(LARGE))
    log.claim(TOO_LOW, CLAIMED)
    found, around = asyncio.run(carried(log, monkeypatch))
    assert around.events == [] and set(range(24)) - set(found.values()) == {10, 11}


def test_batch_refused_behind_others_is_not_taken_from_the_middle_when_it_comes_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It claims to begin where the one before it does, and to end in the hole behind it: fetched again, only
    where that one ended speaks against it."""
    log = Log(24)
    for offsets in (range(2), range(2, 3), range(10, 14), range(14, 16), range(16, 24)):
        log.add(offsets, LARGE)
    log.claim(2, 2)
    found, around = asyncio.run(carried(log, monkeypatch))
    lost = {*range(3), *range(10, 24)} - set(found.values())
    assert lost == {10, 11, 12, 13} <= told(around.events), f"lost in silence: {lost - told(around.events)}"
    assert all(offset == true for offset, true in found.items())
