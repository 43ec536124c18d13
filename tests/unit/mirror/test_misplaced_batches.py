"""A batch whose base offset has a wrong bit, on the source's disk: its checksum does not cover that field.

A real pipeline and a real look at the log, a source that finds its batches as Apache Kafka does within one
interval of its index: the first one, in the order of the file, that claims to reach up to the offset.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from millrace.broker.client.raw_fetch import FetchedPartition, FetchPosition
from millrace.broker.protocol.batch import parse_header, stamp_offset_and_epoch
from millrace.broker.protocol.control_records import build_marker
from millrace.broker.protocol.records import Record, build_batch, read_records
from millrace.mirror import pipeline as pipeline_module
from millrace.mirror.batches.coalesce import BatchWalk
from millrace.mirror.gaps.gaps import GapClass
from millrace.mirror.pipeline import State
from millrace.mirror.sources import survey as survey_module
from tests.unit.mirror.old_entries import entry, packed
from tests.unit.mirror.pipeline_stage import Around, Target, started
from tests.unit.mirror.source_stage import OLD, Source, look, surveyor_of

SMALL, LARGE, MERGED_BELOW = 9, 14_000, 12 << 10
"""Sizes of values: of batches that are merged with their neighbours, and of those that pass as they are."""
SIZES = (SMALL, LARGE, 36_000, 150_000)
"""Of some a first look holds several, of some one and a part of the next, of some less than one."""


class Log:
    """The source's file, as (what is true of it, its bytes). Each record's value begins with its offset."""

    def __init__(self, end: int) -> None:
        self.end = end
        self.batches: list[bytearray] = []
        self.true: list[range] = []
        self.most_given = 1 << 30

    def add(self, offsets: range, size: int) -> None:
        values = [str(offset).encode().ljust(size, b".") for offset in offsets]
        built = build_batch([Record(None, value, timestamp_ms=1) for value in values])
        self._add(built, offsets)

    def add_marker(self, offset: int) -> None:
        self._add(build_marker(7, 0, 0, committed=True, now_ms=1), range(offset, offset + 1))

    def _add(self, built: bytearray, offsets: range) -> None:
        stamp_offset_and_epoch(memoryview(built), offsets.start, 0)
        self.batches.append(built)
        self.true.append(offsets)

    def claim(self, number: int, base: int) -> None:
        self.batches[number][:8] = base.to_bytes(8, "big")

    @staticmethod
    def claimed_end(batch: bytearray) -> int:
        return parse_header(batch, 0).next_offset

    def answer(self, offset: int, max_bytes: int = 1 << 20) -> FetchedPartition:
        data = bytearray()
        max_bytes = min(max_bytes, self.most_given)
        for each in self._read_from(offset):
            if self.claimed_end(each) > offset or data:
                if data and len(data) + len(each) > max_bytes:
                    data += each[: max(0, max_bytes - len(data))]
                    break
                data += each
        return FetchedPartition("flights", 0, 0, self.end, self.end, 0, (), None, memoryview(data))

    def _read_from(self, offset: int) -> list[bytearray]:
        """Of the file that an answer comes from."""
        return self.batches


class OldLog(Log):
    """Of message format 0: entries of one message, and sets of several that were compressed together."""

    def add(self, offsets: range, size: int) -> None:
        if len(offsets) > 1:
            self._keep(packed(offsets[-1], 0, list(offsets)), offsets)
        else:
            self._keep(entry(offsets[0], 0, None, str(offsets[0]).encode().ljust(size, b".")), offsets)

    def _keep(self, data: bytes, offsets: range) -> None:
        self.batches.append(bytearray(data))
        self.true.append(offsets)

    @staticmethod
    def claimed_end(batch: bytearray) -> int:
        return int.from_bytes(batch[:8], "big") + 1


def old_log_of(size: int) -> OldLog:
    """Offsets 0 to 23; compaction has left holes at 4-5 and 15, and 8 to 11 and 20 to 22 are sets."""
    log = OldLog(24)
    singles = [range(offset, offset + 1) for offset in (0, 1, 2, 3, 6, 7, 12, 13, 14, 16, 17, 18, 19, 23)]
    for offsets in sorted([*singles, range(8, 12), range(20, 23)], key=lambda each: each.start):
        log.add(offsets, size)
    return log


def log_of(size: int) -> Log:
    """Offsets 0 to 23; compaction has left holes at 6-7 and 15, and 12 is the end of a transaction."""
    log = Log(24)
    for offsets in (range(3), range(3, 4), range(4, 6), range(8, 10), range(10, 12)):
        log.add(offsets, size)
    log.add_marker(12)
    for offsets in (range(13, 14), range(14, 15), range(16, 20), range(20, 23), range(23, 24)):
        log.add(offsets, size)
    return log


TURN_MS = 1_000
"""Between two answers that are carried."""
MARKER = 5
BESIDE_HOLES = {2, 3, 7, 8}


async def carried(
    log: Log,
    monkeypatch: pytest.MonkeyPatch,
    max_bytes: int = 1 << 20,
    began: int = 0,
    looked: Callable[[FetchPosition, FetchedPartition], FetchedPartition] = lambda _asked, given: given,
    earliest: int = 0,
    walk: BatchWalk | None = None,
) -> tuple[dict[int, int], Around]:
    """What a mirror that skips damage carries, by the offset that it gives it: the true one; and its gaps.
    `looked` gives what becomes of an answer that a look has asked for; `earliest`, where the source says that
    its log begins; `walk`: one that merges less than the usual one if none is given."""
    pipeline, target, around = started(GapClass.CORRUPT, began=began)
    pipeline._shared.walk = walk or BatchWalk(MERGED_BELOW)
    source = Source(OLD, earliest, log.end)

    async def fetch(
        _cluster: object, _node: int, positions: Any, *, max_bytes: int, **_: object
    ) -> list[FetchedPartition]:
        (asked,) = positions.values()
        return [looked(asked, log.answer(asked.offset, max_bytes))]

    monkeypatch.setattr(survey_module, "fetch", fetch)
    surveyor = surveyor_of(source)
    found: dict[int, int] = {}
    now_ms = 0
    monkeypatch.setattr(pipeline_module, "steady_ms", lambda: now_ms)
    for _ in range(200):
        now_ms += TURN_MS
        if pipeline.progress.settled_position >= log.end:
            break
        if pipeline.state is State.RUNNING:
            size = max(max_bytes, pipeline.doubt.needed_size)
            pipeline.accept(log.answer(pipeline.progress.fetch_offset, size))
        await look(surveyor, pipeline)
        collect(target, found)
        await around.rest()
    assert pipeline.progress.settled_position == log.end, "it stands still"
    return found, around


def collect(target: Target, found: dict[int, int]) -> None:
    while target.queue:
        outgoing = target.queue[0]
        records = read_records(bytes(outgoing.batch))
        for offset, record in zip(outgoing.offsets, records, strict=True):
            assert offset not in found, "twice"
            found[offset] = int((record.value or b"").rstrip(b"."))
        target.acknowledge()


def missing(log: Log, found: dict[int, int]) -> set[int]:
    markers = set() if isinstance(log, OldLog) else {MARKER}
    data = {offset for number, offsets in enumerate(log.true) if number not in markers for offset in offsets}
    return data - set(found.values())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bit", [0, 1, 2, 3, 4, 29])
@pytest.mark.parametrize("number", range(11))
def test_wrong_bit_in_an_offset_costs_that_batch_at_most_and_is_told(
    monkeypatch: pytest.MonkeyPatch, number: int, bit: int, size: int
) -> None:
    log = log_of(size)
    log.claim(number, log.true[number].start ^ 1 << bit)
    found, around = asyncio.run(carried(log, monkeypatch))
    told = {offset for first, following, _ in around.events for offset in range(first, following)}
    lost = missing(log, found)
    assert lost <= told, "lost in silence"
    # Where compaction left a hole beside it, a batch may stand in the hole as well as where it did.
    moved = {true for offset, true in found.items() if true != offset}
    assert moved <= (set(log.true[number]) if number in BESIDE_HOLES else set())
    assert lost <= set(log.true[number]) | neighbours(log, number)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bit", range(5))
def test_mirror_that_begins_where_a_batch_of_before_claims_to_stand_does_not_take_that_one(
    monkeypatch: pytest.MonkeyPatch, bit: int, size: int
) -> None:
    """A worker that takes over knows of no damage, and the source gives the wrong one first."""
    for number, offsets in enumerate(log_of(SMALL).true):
        began = offsets.start ^ 1 << bit
        # Of the last two of a log nobody can tell which is wrong.
        if not offsets.start < began < 24 or began + len(offsets) == 24:
            continue
        log = log_of(size)
        log.claim(number, began)
        found, around = asyncio.run(carried(log, monkeypatch, began=began))
        told = {offset for first, following, _ in around.events for offset in range(first, following)}
        lost = {offset for offset in missing(log, found) if offset >= began}
        assert lost <= told, f"lost in silence: {lost - told}, {number}"


@pytest.mark.parametrize("kind", [*SIZES, "old", "large old"])
@pytest.mark.parametrize("bit", range(5))
def test_batch_that_comes_alone_is_believed_behind_a_hole_only_with_what_follows_it(
    monkeypatch: pytest.MonkeyPatch, bit: int, kind: int | str
) -> None:
    """Each answer holds one batch, as where batches are larger than what is asked for. One whose offset is
    too large looks as if compaction had left a hole before it: the position would pass over what is there."""

    def made() -> Log:
        if isinstance(kind, int):
            return log_of(kind)
        return old_log_of(36_000 if kind == "large old" else SMALL)

    for number, offsets in enumerate(made().true[:-1]):
        log = made()
        true = offsets[0] if isinstance(kind, int) else offsets[-1]
        if true ^ 1 << bit < true:
            continue
        log.claim(number, true ^ 1 << bit)
        found, around = asyncio.run(carried(log, monkeypatch, 1))
        told = {offset for first, following, _ in around.events for offset in range(first, following)}
        assert missing(log, found) <= told, f"lost in silence: {missing(log, found) - told}, {number}"


def neighbours(log: Log, number: int) -> set[int]:
    """Where two batches contradict each other next to a hole, nobody can tell which of them is wrong."""
    return {offset for each in log.true[max(0, number - 1) : number + 2] for offset in each}


@pytest.mark.parametrize("size", SIZES)
def test_log_with_holes_is_carried_whole_whatever_an_answer_holds(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    for max_bytes in (1, 100, 200, 30_000, 64_000, 100_000, 1 << 20):
        log = log_of(size)
        found, around = asyncio.run(carried(log, monkeypatch, max_bytes))
        assert (missing(log, found), around.events) == (set(), [])
        assert all(offset == true for offset, true in found.items())


@pytest.mark.parametrize("bit", [0, 1, 2, 3, 4, 29])
def test_wrong_bit_in_an_offset_of_an_old_format_costs_that_entry_at_most_and_is_told(
    monkeypatch: pytest.MonkeyPatch, bit: int
) -> None:
    for number, offsets in enumerate(old_log_of(SMALL).true):
        log = old_log_of(SMALL)
        log.claim(number, offsets[-1] ^ 1 << bit)
        found, around = asyncio.run(carried(log, monkeypatch))
        told = {offset for first, following, _ in around.events for offset in range(first, following)}
        lost = missing(log, found)
        assert lost <= told, f"lost in silence: {lost - told}"
        assert lost <= set(offsets) | neighbours(log, number)
        assert all(following <= log.end for _, following, _ in around.events)
        moved = {true for offset, true in found.items() if true != offset}
        assert moved <= set(offsets), "whole entries alone may stand in a hole beside them"
        assert not moved or holes_beside(log, number)


def holes_beside(log: Log, number: int) -> bool:
    """Whether compaction left room before or behind it."""
    before = log.true[number - 1].stop if number else 0
    after = log.true[number + 1].start if number + 1 < len(log.true) else log.end
    return (before, after) != (log.true[number].start, log.true[number].stop)


@pytest.mark.parametrize("max_bytes", [1, 60, 100, 1 << 20])
def test_log_of_an_old_format_with_holes_is_carried_whole_whatever_an_answer_holds(
    monkeypatch: pytest.MonkeyPatch, max_bytes: int
) -> None:
    log = old_log_of(SMALL)
    found, around = asyncio.run(carried(log, monkeypatch, max_bytes))
    assert (missing(log, found), around.events) == (set(), [])
    assert all(offset == true for offset, true in found.items())


@pytest.mark.parametrize("behind", ["data", "marker"])
def test_batch_beyond_the_end_is_found_behind_good_ones_of_the_same_step(
    monkeypatch: pytest.MonkeyPatch, behind: str
) -> None:
    """Small neighbours become one batch, and the end of a transaction belongs to the data before it: the
    good one is carried all the same, and the other is told."""
    log = Log(2)
    log.add(range(1), SMALL)
    if behind == "data":
        log.add(range(1, 2), SMALL)
    else:
        log.add_marker(1)
    log.claim(1, 1 | 1 << 29)
    found, around = asyncio.run(carried(log, monkeypatch))
    assert found == {0: 0}
    assert around.events == [(1, 2, "corrupt")]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("number", range(11))
def test_offsets_that_do_not_fit_64_bits_cost_that_batch_at_most_and_are_told(
    monkeypatch: pytest.MonkeyPatch, number: int, size: int
) -> None:
    """What the batch claims as its last offset would be negative: as if it lay before what is wanted."""
    log = log_of(size)
    log.claim(number, (1 << 63) - 1)
    found, around = asyncio.run(carried(log, monkeypatch))
    told = {offset for first, following, _ in around.events for offset in range(first, following)}
    assert missing(log, found) <= told & set(log.true[number])
    assert all(offset == true for offset, true in found.items())


def test_corrupt_batch_in_the_middle_of_a_run_is_named_and_costs_nothing_but_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = Log(300)
    for offset in range(300):
        log.add(range(offset, offset + 1), SMALL)
    log.batches[137][-1] ^= 1
    found, around = asyncio.run(carried(log, monkeypatch))
    assert missing(log, found) == {137}
    assert all(offset == true for offset, true in found.items())
    assert around.events == [(137, 138, "corrupt")]


def test_message_of_an_old_format_beyond_the_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        pipeline, target, _ = started()
        wrong = entry(1 | 1 << 29, 1, None, b"y")
        for data in (entry(0, 1, None, b"x") + wrong, *[wrong] * 3):
            assert pipeline.doubt.question is None
            data = memoryview(bytearray(data))
            pipeline.accept(FetchedPartition("flights", 0, 0, 2, 2, 0, (), None, data))
        question = pipeline.take_question()
        assert question is not None and "claims offset 536870913, and the log ends at 2" in question.reason
        assert target.offsets() == [[0]], "what stands before it is carried"

    asyncio.run(story())


def test_survey_sees_what_follows_a_batch_larger_than_its_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise all that lies before the offset that the batch claims would be given up."""
    log = Log(3)
    for offset in range(3):
        log.add(range(offset, offset + 1), 100_000)
    log.claim(0, 1)
    found, around = asyncio.run(carried(log, monkeypatch))
    assert found == {1: 1, 2: 2}
    assert around.events == [(0, 1, "corrupt")]
