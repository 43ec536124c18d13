"""A source whose remote store (tiered storage, KIP-405) is away for longer, and can come back.

What such a source answers is no word of its log: the partition waits, and is told as waiting. Damage is what
a source gives and cannot be, or what it says itself to be damaged, and says for a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from millrace.broker.client.raw_fetch import FetchedPartition, FetchPosition
from millrace.broker.errors import (
    CorruptMessage,
    KafkaStorageError,
    OffsetOutOfRange,
    UnknownServerError,
    UnsupportedVersion,
)
from millrace.mirror import pipeline as pipeline_module
from millrace.mirror.batches.coalesce import BatchWalk
from millrace.mirror.gaps.gaps import GapClass
from millrace.mirror.sources import source as source_module
from millrace.mirror.sources import source_logs as logs_module
from millrace.mirror.sources import survey as survey_module
from millrace.mirror.sources.doubt import MAX_REFUSALS, TOLD_DAMAGE_LASTS_MS, Question
from millrace.mirror.steady import steady_ms
from millrace.mirror.topics.routes import SourcePartition
from tests.unit.mirror.look_stage import refused
from tests.unit.mirror.pipeline_stage import ORIGIN, started
from tests.unit.mirror.source_stage import OLD, Source, answered, pipeline_at, reader_of, surveyor_of, taken
from tests.unit.mirror.test_batches_without_neighbours import IndexedLog
from tests.unit.mirror.test_misplaced_batches import LARGE, MERGED_BELOW, SMALL, collect

PARTITION = SourcePartition("ewr", "flights", 0)
END, LOCAL_START = 40, 30
TELLS_NONE = -1
LONG_MS = 300_000
NOTHING = None
AWAY = [UnknownServerError.code, KafkaStorageError.code, NOTHING]
"""What a source answers for what lies in a store that is away: of Apache Kafka UNKNOWN_SERVER_ERROR, or
nothing, where the store is silent for longer than a fetch waits."""


class TieredLog(IndexedLog):
    """Offsets below LOCAL_START are in the remote store alone."""

    def __init__(self, size: int = LARGE, width: int = 1, *, is_indexed: bool = True) -> None:
        super().__init__(END)
        self.is_indexed = is_indexed
        for offset in range(0, END, width):
            self.add(range(offset, offset + width), size)
        self.away: int | None = 0  # a code, or NOTHING; 0: it is there
        self.is_away = False

    def answer(self, offset: int, max_bytes: int = 1 << 20) -> FetchedPartition:
        given = super().answer(offset, max_bytes)
        if not self.is_away or offset >= LOCAL_START:
            return given
        return replace(given, records=memoryview(b"")) if self.away is None else refused(given, self.away)

    def _read_from(self, offset: int) -> list[bytearray]:
        return super()._read_from(offset) if self.is_indexed else self.batches

    def goes_away(self, how: int | None) -> None:
        self.is_away, self.away = True, how


def tiered(local_start: int = LOCAL_START, topic_id: UUID = OLD) -> Source:
    source = Source(topic_id, latest=END)
    source.local_start = local_start
    return source


class History:
    """A partition that is fetched and looked at for as long as the test says, by a clock of its own."""

    def __init__(self, log: TieredLog, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log, self.now, self.looks = log, 0, 0
        self.found: dict[int, int] = {}

        async def fetch(
            _cluster: object, _node: int, positions: Any, *, max_bytes: int, **_: object
        ) -> list[FetchedPartition]:
            (asked,) = positions.values()
            self.looks += 1
            return [log.answer(asked.offset, max_bytes)]

        monkeypatch.setattr(survey_module, "fetch", fetch)
        for module in (pipeline_module, source_module):
            monkeypatch.setattr(module, "steady_ms", lambda: self.now)
        self.pipeline, self.target, self.around = started(GapClass.CORRUPT)
        self.pipeline._shared.walk = BatchWalk(MERGED_BELOW)
        self.reader = reader_of(tiered(topic_id=ORIGIN.topic_id), lambda: self.now)

    async def passes(self, ms: int, until: Callable[[], bool] = lambda: False) -> None:
        pipeline, end_ms = self.pipeline, self.now + ms
        async with asyncio.TaskGroup() as self.reader._tasks:
            while self.now < end_ms and not until():
                if pipeline.wants_fetch(self.now, 1 << 20):
                    offset = pipeline.progress.fetch_offset
                    asked = FetchPosition(offset, topic_id=pipeline.origin.topic_id)
                    size = max(1 << 20, pipeline.doubt.needed_size)
                    self.reader._take(pipeline, asked, self.log.answer(offset, size))
                await self.around.rest()
                collect(self.target, self.found)
                self.now += 50 if pipeline.retry_at_ms <= self.now else pipeline.retry_at_ms - self.now

    def trouble(self) -> str:
        failure = self.reader.failures.get(("flights", 0))
        return failure.reason if failure is not None else ""


@pytest.mark.parametrize("how", AWAY)
@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_store_that_is_away_makes_no_gap_however_long_and_what_it_has_is_carried_then(
    monkeypatch: pytest.MonkeyPatch, size: int, how: int | None
) -> None:
    async def story() -> None:
        log = TieredLog(size)
        history = History(log, monkeypatch)
        log.goes_away(how)
        await history.passes(LONG_MS)
        assert (history.around.events, history.pipeline.gap, history.found) == ([], None, {})
        said = "the source gives nothing at offset 0" if how is NOTHING else "the source refuses the fetch"
        assert said in history.trouble()
        log.is_away = False
        await history.passes(LONG_MS, lambda: len(history.found) == END)
        assert history.found == {offset: offset for offset in range(END)}
        assert (history.around.events, history.trouble()) == ([], "")

    asyncio.run(story())


@pytest.mark.parametrize("how", AWAY)
def test_gap_of_damage_ends_where_the_damage_does_and_not_where_an_absent_store_ends(
    monkeypatch: pytest.MonkeyPatch, how: int | None
) -> None:
    """The store goes away between what was given and the look at what lies behind it."""

    async def story() -> None:
        log = TieredLog(SMALL)
        log.batches[0][-1] ^= 1
        history = History(log, monkeypatch)
        await history.passes(LONG_MS, lambda: history.pipeline.doubt.refusal_count == 2)
        log.goes_away(how)
        history.pipeline.distrust(CorruptMessage("its checksum is wrong"))
        history.pipeline.retry_at_ms = 0
        assert history.pipeline.doubt.question is not None
        async with asyncio.TaskGroup() as history.reader._tasks:
            history.reader._answer(history.pipeline)
        await history.passes(LONG_MS)
        assert (history.around.events, history.pipeline.gap) == ([], None)
        assert history.looks >= 1 and history.trouble() != ""
        log.is_away = False
        await history.passes(LONG_MS, lambda: len(history.found) == END - 1)
        assert history.around.events == [(0, 1, "corrupt")]

    asyncio.run(story())


@pytest.mark.parametrize(
    ("how", "local_start"), [*[(how, LOCAL_START) for how in AWAY], (UnknownServerError.code, TELLS_NONE)]
)
@pytest.mark.parametrize("damaged", [[3], [3, 4, 5]])
def test_look_at_damage_tells_nothing_while_the_store_behind_it_is_away(
    monkeypatch: pytest.MonkeyPatch, damaged: list[int], how: int | None, local_start: int
) -> None:
    log = TieredLog(LARGE)
    for number in damaged:
        log.batches[number][-1] ^= 1
    log.most_given = 1
    behind = damaged[-1] + 1

    async def fetch(*given: Any, **_: Any) -> list[FetchedPartition]:
        (asked,) = given[2].values()
        log.is_away = log.away != 0 and asked.offset >= behind
        return [log.answer(asked.offset)]

    monkeypatch.setattr(survey_module, "fetch", fetch)
    log.goes_away(how)
    look = surveyor_of(tiered(local_start)).look
    found = asyncio.run(look(PARTITION, OLD, Question(3, "bad")))
    assert (found.damage_end, found.is_in_order, bool(found.why_not)) == (-1, False, True)
    log.away = 0
    assert asyncio.run(look(PARTITION, OLD, Question(3, "bad"))).damage_end == behind


def test_source_that_knows_of_no_remote_store_gives_nothing_only_where_it_finds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As behind a wrong length on the disk of an older one."""
    log = TieredLog()
    log.batches[3][-1] ^= 1
    log.most_given = 1

    async def fetch(*given: Any, **_: Any) -> list[FetchedPartition]:
        (asked,) = given[2].values()
        log.is_away = asked.offset >= 4
        return [log.answer(asked.offset)]

    monkeypatch.setattr(survey_module, "fetch", fetch)
    log.goes_away(NOTHING)
    found = asyncio.run(surveyor_of(tiered(TELLS_NONE)).look(PARTITION, OLD, Question(3, "bad")))
    assert found.damage_end == LOCAL_START


@pytest.mark.parametrize("how", AWAY)
def test_lone_batch_waits_for_what_lies_behind_it_while_the_store_is_away(
    monkeypatch: pytest.MonkeyPatch, how: int | None
) -> None:
    """It claims offsets of the next but one. Were what cannot be given passed over, what is farther behind
    would seem to follow it, and those before it were lost in silence."""

    async def story() -> None:
        log = TieredLog(width=2, is_indexed=False)
        log.most_given = 1
        log.claim(3, 9)
        log.goes_away(how)
        history = History(log, monkeypatch)
        given = TieredLog.answer

        def answer(self: TieredLog, offset: int, max_bytes: int = 1 << 20) -> FetchedPartition:
            log.is_away = log.away != 0 and offset >= 11
            return given(self, offset, max_bytes)

        monkeypatch.setattr(TieredLog, "answer", answer)
        await history.passes(LONG_MS)
        assert history.looks > 4 * MAX_REFUSALS
        assert (history.found, history.around.events) == ({offset: offset for offset in range(6)}, [])
        assert "to look at it fails" in history.trouble()
        log.away = 0
        await history.passes(LONG_MS, lambda: history.pipeline.progress.settled_position == END)
        told = {offset for first, to, _ in history.around.events for offset in range(first, to)}
        assert set(range(END)) - set(history.found.values()) <= told <= set(range(6, 12))

    asyncio.run(story())


def test_what_a_source_says_to_be_damaged_is_a_gap_only_when_it_says_so_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        log = TieredLog(LARGE)
        history = History(log, monkeypatch)
        log.goes_away(CorruptMessage.code)
        await history.passes(TOLD_DAMAGE_LASTS_MS)
        assert (history.looks, history.pipeline.gap) == (0, None)
        assert "corrupt message" in history.trouble()
        log.is_away = False
        await history.passes(LONG_MS, lambda: len(history.found) == END)
        assert history.around.events == []

        history = History(log, monkeypatch)
        log.goes_away(CorruptMessage.code)
        await history.passes(2 * TOLD_DAMAGE_LASTS_MS)
        assert history.around.events == [(0, LOCAL_START, "corrupt")]

    asyncio.run(story())


def test_offset_within_its_log_that_a_source_does_not_find_makes_no_gap(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Apache Kafka says OFFSET_OUT_OF_RANGE of a place of which its remote store has no word now, while it
    knows the epoch of what was fetched, up to there and beyond."""

    async def epoch_ends(_cluster: object, asked: dict[Any, int]) -> Any:
        return {key: (epoch, 100) for key, epoch in asked.items()}

    monkeypatch.setattr(logs_module, "epoch_ends", epoch_ends)
    pipeline, reader = pipeline_at(40, epoch=9), reader_of(Source())
    for _ in range(20):
        asyncio.run(taken(reader, pipeline, answered(OffsetOutOfRange.code)))
    assert pipeline.gaps == []
    failure = reader.failures.get(("t", 0))
    assert failure is not None and "offset out of range" in failure.reason
    assert pipeline.retry_at_ms > steady_ms() + 2 * source_module.ERROR_PAUSE_MS, "and rarely"
    assert capsys.readouterr().out.count("waiting for what the source does not find") == 1


def test_source_that_cannot_be_asked_for_epochs_has_not_said_that_its_log_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def epoch_ends(*_: object) -> Any:
        raise UnsupportedVersion("OffsetForLeaderEpoch")

    monkeypatch.setattr(logs_module, "epoch_ends", epoch_ends)
    pipeline, reader = pipeline_at(40, epoch=9), reader_of(Source())
    for _ in range(20):
        asyncio.run(taken(reader, pipeline, answered(OffsetOutOfRange.code)))
    assert pipeline.gaps == []
