"""Looks at a source's log: histories of one partition, by the real pipeline and the real looks.

A history draws a log (batches, holes of compaction, an index, files, a limit of the source's for its answers,
a remote store), at most one wrong bit in the base offset of a batch, and a source that fails: looks that end
with an error or with nothing, in a healthy log a bit that the wire turns, a remote store that is away for a
while. It knows the truth:

    a healthy log    is carried whole, and nothing is told of it
    a wrong bit      costs its batch and those beside it at most, and none in silence

One history again, by the seed that its failure names: `MILLRACE_TEST_SEED=<seed> MILLRACE_TEST_RUNS=1`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import structlog

from millrace.broker.client.raw_fetch import FetchedPartition
from millrace.broker.errors import (
    CorruptMessage,
    KafkaStorageError,
    NotLeaderOrFollower,
    OffsetOutOfRange,
    UnknownServerError,
)
from millrace.mirror import pipeline as pipeline_module
from millrace.mirror.batches.coalesce import BatchWalk
from millrace.mirror.gaps.gaps import GapClass
from millrace.mirror.pipeline import State
from millrace.mirror.sources import doubt as doubt_module
from millrace.mirror.sources import survey as survey_module
from millrace.mirror.sources.doubt import Doubt
from tests import seeds
from tests.simulation import histories
from tests.unit.mirror.pipeline_stage import started
from tests.unit.mirror.source_stage import OLD, Source, look, surveyor_of
from tests.unit.mirror.test_misplaced_batches import LARGE, MERGED_BELOW, SMALL, Log, collect

HISTORY_COUNT = seeds.runs(300)
MUTATION_HISTORY_COUNT = 500
MOST_TURNS, TURN_MS = 400, 1_000
FAILING_LOOKS, FAILING_FETCHES = 80, 30
"""So many can fail; after them the source is well, and the history comes to its end."""
NOTHING, TURNED_BIT = None, 1_000
HEADER_AND_MORE = 80
FAILURES = (
    CorruptMessage.code,
    KafkaStorageError.code,
    UnknownServerError.code,
    NotLeaderOrFollower.code,
    OffsetOutOfRange.code,
    NOTHING,
    TURNED_BIT,
)
LIES = (CorruptMessage.code, KafkaStorageError.code, NOTHING, TURNED_BIT)
"""Of a source's own disk these say that it has damage there."""
ABSENCES = (UnknownServerError.code, NOTHING)


def failed(given: FetchedPartition, how: int | None) -> FetchedPartition:
    nothing = memoryview(b"")
    if how is NOTHING:
        return replace(given, records=nothing)
    return replace(given, error_code=how, high_watermark=-1, last_stable_offset=-1, records=nothing)


class DrawnLog(Log):
    """`interval`: batches to an entry of the index, each made before any damage; `begins`: the numbers of the
    batches that a file begins with, and is named after."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(0)
        count, offset = rng.randint(4, 16), 0
        for _ in range(count):
            offset += rng.choice((0, 0, 0, 1, 2, 7))
            width = rng.choice((1, 1, 2, 4))
            self.add(range(offset, offset + width), rng.choice((SMALL, SMALL, LARGE)))
            offset += width
        self.end = offset
        self.interval = rng.choice((1, 1, 2, 5, 100))
        self.begins: Sequence[int] = sorted(rng.sample(range(1, count), rng.randint(0, min(3, count - 1))))
        self.most_given = rng.choice((1, 1, 200, 20_000, 1 << 30))

    def _read_from(self, offset: int) -> list[bytearray]:
        for begin, end in pairwise([0, *self.begins, len(self.batches)]):
            if end < len(self.batches) and self.true[end].start <= offset:
                continue
            numbers = range(begin, end, self.interval)
            entries = [number for number in numbers if self.true[number][-1] <= offset]
            batches = self.batches[entries[-1] if entries else begin : end]
            if any(self.claimed_end(each) > offset for each in batches):
                return batches
        return []


class History:
    """See the module's text."""

    def __init__(self, seed: int) -> None:
        self.random = rng = random.Random(seed)
        self.merges = random.Random(f"merges {seed}").random() < 0.5
        self.log = DrawnLog(rng)
        self.wrong: int | None = rng.randrange(len(self.log.true)) if rng.random() < 0.6 else None
        if self.wrong is not None:
            self.log.claim(self.wrong, self.log.true[self.wrong].start ^ 1 << rng.randint(0, 6))
        self.failing = rng.choice((0, 0, 0.1, 0.4))
        self.max_bytes = rng.choice((1, 200, 1 << 20))
        self.local_start = rng.choice((0, 0, rng.randint(0, self.log.end)))
        self.absence = rng.choice(ABSENCES)
        self.away_until = rng.choice((0, rng.randint(0, 60)))
        self.has_turned = False
        self.lies: Counter[int] = Counter()
        self.fetches = self.looks = self.now_ms = 0
        self.found: dict[int, int] = {}

    def run(self) -> None:
        """Raises AssertionError where a promise is broken."""
        asyncio.run(self._carry())
        self._judge()

    async def _carry(self) -> None:
        self.pipeline, target, self.around = started(GapClass.CORRUPT)
        pipeline, log = self.pipeline, self.log
        if not self.merges:
            pipeline._shared.walk = BatchWalk(MERGED_BELOW)
        source = Source(OLD, latest=log.end)
        source.local_start = self.local_start
        surveyor = surveyor_of(source)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(survey_module, "fetch", self._looked)
            patch.setattr(pipeline_module, "steady_ms", lambda: self.now_ms)
            for _ in range(MOST_TURNS):
                self.now_ms += TURN_MS
                if pipeline.progress.settled_position >= log.end:
                    return
                if pipeline.state is State.RUNNING:
                    given = self._fetched()
                    if not given.error_code:  # else the source's reader waits, and asks again
                        pipeline.accept(given)
                await look(surveyor, pipeline)
                collect(target, self.found)
                await self.around.rest()

    def _fetched(self) -> FetchedPartition:
        self.fetches += 1
        size = max(self.max_bytes, self.pipeline.doubt.needed_size)
        given = self._answer(self.pipeline.progress.fetch_offset, size)
        if self.fetches < FAILING_FETCHES and self.random.random() < self.failing / 2:
            return failed(given, NOTHING)
        return given

    async def _looked(
        self, _cluster: object, _node: int, positions: Any, *, max_bytes: int, **_: object
    ) -> list[FetchedPartition]:
        (asked,) = positions.values()
        self.looks += 1
        given = self._answer(asked.offset, max_bytes)
        if self.looks < FAILING_LOOKS and self.random.random() < self.failing:
            how = self.random.choice(FAILURES)
            self.lies[asked.offset] += how in LIES
            if how != TURNED_BIT:
                return [failed(given, how)]
            if self.wrong is None and not self.has_turned:  # what is asked for twice tells of one
                self.has_turned = True
                if size := min(len(given.records), HEADER_AND_MORE):
                    given.records[self.random.randrange(size)] ^= 1 << self.random.randrange(8)
        return [given]

    def _answer(self, offset: int, max_bytes: int) -> FetchedPartition:
        given = self.log.answer(offset, max_bytes)
        is_away = offset < self.local_start and self.fetches + self.looks < self.away_until
        return failed(given, self.absence) if is_away else given

    def _judge(self) -> None:
        log, wrong, events = self.log, self.wrong, self.around.events
        if wrong is not None and self._is_never_shown(wrong):
            return
        settled = self.pipeline.progress.settled_position
        assert settled == log.end, f"it stands still at {settled}: {self.pipeline.doubt.reason}"
        told = {offset for first, following, _ in events for offset in range(first, following)}
        data = {offset for offsets in log.true for offset in offsets}
        moved = {true for offset, true in self.found.items() if offset != true}
        missing = data - set(self.found.values())
        if wrong is None:
            assert (events, missing, moved) == ([], set(), set()), "a healthy log"
        elif not self._is_hidden(wrong):
            assert missing <= told, f"lost in silence: {sorted(missing - told)}"
            beside = {offset for each in log.true[max(0, wrong - 1) : wrong + 2] for offset in each}
            if all(count < 2 for count in self.lies.values()):  # a place is asked for twice
                assert missing <= beside, f"told, and could be read: {sorted(missing - beside)}"
            assert moved <= set(log.true[wrong]), f"moved: {sorted(moved)}"

    def _is_never_shown(self, wrong: int) -> bool:
        """One that is too low the source itself passes over, and only an answer that begins before it shows
        it: none does with the first of a file, or where each holds one batch. Behind the last one of the log
        nothing comes, which is a trouble (`silence`)."""
        log = self.log
        is_too_low = log.claimed_end(log.batches[wrong]) <= log.true[wrong][-1]
        return is_too_low and (wrong in (0, *log.begins, len(log.true) - 1) or log.most_given < 1 << 30)

    def _is_hidden(self, wrong: int) -> bool:
        """What nobody can see (ARCHITECTURE.md, at "a base offset is believed"): one that hides from the
        source what it claims to lie behind, where not every batch has its entry in the index; and one that
        claims to end where the log does."""
        return self.log.interval > 1 or self.log.claimed_end(self.log.batches[wrong]) == self.log.end

    def __str__(self) -> str:
        log, wrong = self.log, self.wrong
        claimed = None if wrong is None else int.from_bytes(log.batches[wrong][:8])
        return (
            f"batches {log.true}, wrong: {wrong} claims {claimed}; index {log.interval}, files {log.begins}, "
            f"most given {log.most_given}, asked {self.max_bytes}, failing {self.failing}, local from "
            f"{self.local_start}, away until {self.away_until}; told {self.around.events}, "
            f"{self.fetches} fetches, {self.looks} looks"
        )


def run(seed: int) -> None:
    history = History(seed)
    try:
        history.run()
    except AssertionError as error:
        again = f"{seeds.VARIABLE}={seed} {seeds.RUNS_VARIABLE}=1 .venv/bin/python -m pytest {__file__}"
        raise AssertionError(f"{error}\n{history}\nagain: {again}") from error


@pytest.fixture(autouse=True)
def _without_log_lines() -> Iterator[None]:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield


def test_random_logs_are_carried_or_told() -> None:
    first_seed = seeds.given()
    for seed in range(first_seed, first_seed + HISTORY_COUNT):
        run(seed)
        histories.went_through("looks at logs")


@pytest.mark.parametrize("seed", [2806360, 2808181])
def test_a_source_that_fails_once_has_said_nothing(seed: int) -> None:
    """What it passes over it shows at one look, and at the second it gives nothing; it says of what is there
    that it is out of range."""
    run(seed)


@pytest.mark.parametrize("seed", [910633, 928796])
def test_neighbours_speak_for_no_batch_that_begins_within_another(seed: int) -> None:
    """Two claim the same first offset: behind the end of the one, the other comes alone, and seems to be in
    its place. One claims to begin within what was taken: to where that stands in its way, all neighbours
    behind it are in order."""
    run(seed)


def believes_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Doubt, "trusts", lambda *_: True)


def asks_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(survey_module._Look, "_is_contradicted", survey_module._Look._has_another)


def passes_over_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(doubt_module, "_has_lasted", lambda *_: True)


@pytest.mark.parametrize(
    ("broken", "what_happens", "first_seed"),
    [
        (believes_all, "lost in silence", 0),
        (asks_once, "a healthy log", 600),
        (passes_over_at_once, "lost in silence", 1_900),
    ],
)
def test_each_rule_is_needed(
    monkeypatch: pytest.MonkeyPatch,
    broken: Callable[[pytest.MonkeyPatch], None],
    what_happens: str,
    first_seed: int,
) -> None:
    """`first_seed`: not far before one that shows it, as some need a rare coincidence."""
    broken(monkeypatch)
    for seed in range(first_seed, first_seed + MUTATION_HISTORY_COUNT):
        try:
            run(seed)
        except AssertionError as error:
            if what_happens in str(error):
                return
    raise AssertionError(f"{MUTATION_HISTORY_COUNT} histories look sound: {broken.__name__}")
