"""What fetched batches keep of memory: counted as it is, bounded, and with room for those that get on."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.broker.client.frame_memory import FrameMemory
from millrace.broker.client.raw_fetch import FetchedPartition
from millrace.broker.protocol.records import Record, build_batch
from millrace.mirror.delivery.lane import Identity, Outcome
from millrace.mirror.delivery.sink import Sink
from millrace.mirror.pipeline import STANDING_AFTER_MS, PartitionPipeline, State
from millrace.mirror.sources import source as source_module
from millrace.mirror.sources.fetch_loop import FetchLoop, Way
from millrace.mirror.sources.fetch_memory import MIN_FETCH_SIZE, FetchBudget, Frame, HeldMemory
from millrace.mirror.steady import steady_ms
from millrace.mirror.topics.routes import SourcePartition, TargetPartition
from tests.unit.mirror.pipeline_stage import Around, at, pipeline_of
from tests.unit.mirror.source_stage import Source, pipeline_at, reader_of
from tests.waiting import patience

MEBIBYTE = 1 << 20
SMALL = 3_400


def with_records(records: memoryview, partition: int = 0) -> FetchedPartition:
    return FetchedPartition("t", partition, 0, 1, 1, 0, (), None, records)


def test_other_loops_and_another_limit_change_every_share() -> None:
    budget = FetchBudget(64 * MEBIBYTE)

    def shares() -> list[float]:
        each = (budget.share, budget.floor, budget.most_of_a_partition, budget.most_of_a_fetch)
        return [size / MEBIBYTE for size in each]

    assert shares() == [64, 8, 16, 28]
    budget.loop_count = 2
    assert shares() == [32, 4, 8, 14]
    budget.resize(16 * MEBIBYTE)
    assert shares() == [8, 1, 2, 3.5]
    budget.loop_count -= 2
    assert shares() == [16, 2, 4, 7]


class TwoInOneAnswer:
    """A small batch of one partition and a large one of another, fetched together, on their way to a target
    that nobody has asked for anything yet."""

    def __init__(self) -> None:
        self.memory = FrameMemory(lambda: 0)
        self.held = HeldMemory(FetchBudget(64 * MEBIBYTE))
        cluster: Any = SimpleNamespace(close_purpose=lambda _: None)
        self.sink = Sink(cluster, lambda: 0)
        self.sink._schedule = lambda: None  # type: ignore[method-assign]
        self.small = self._pipeline(0)
        self.large = self._pipeline(1)
        self.batches = [build_batch([Record(None, bytes(size), timestamp_ms=1)]) for size in (SMALL, 4 << 20)]
        records = self.memory.take(sum(map(len, self.batches)))
        frame, end = self.held.take(len(records)), 0
        for pipeline, batch in zip((self.small, self.large), self.batches, strict=True):
            records[end : end + len(batch)] = batch
            pipeline.accept(with_records(records[end : end + len(batch)]), frame)
            end += len(batch)
        self.size = end

    def _pipeline(self, number: int) -> PartitionPipeline:
        around: Any = Around()
        around.limit = 8 * MEBIBYTE
        pipeline = pipeline_of(
            SourcePartition("ewr", "t", number), TargetPartition("t", number), self.sink, around
        )
        pipeline.ready(at(0))
        return pipeline


def test_batch_that_stays_behind_counts_with_the_whole_answer_that_it_keeps() -> None:
    story = TwoInOneAnswer()
    assert story.held.size == story.size
    story.large.close()
    assert story.small.progress.outstanding_size < 2 * SMALL
    assert story.held.size == story.memory.in_use == story.size
    story.small.close()
    assert story.held.size == story.memory.in_use == 0


def test_batch_that_left_its_answer_keeps_its_own_size_and_is_the_same() -> None:
    story = TwoInOneAnswer()
    story.large.close()
    story.small.leave_answers()
    assert (story.held.size, story.memory.in_use) == (len(story.batches[0]), 0)
    (left,) = story.sink.withdraw(story.small.target, story.small)
    assert bytes(left.batch) == bytes(story.batches[0])
    del left
    assert story.held.size == 0


def test_batch_in_a_request_that_is_under_way_stays_in_its_answer() -> None:
    """The request keeps it: a copy would only add to that."""
    story = TwoInOneAnswer()
    story.large.close()
    lane = story.sink._lane(story.small.target)
    lane.renew(Identity(7, 0))
    sent = lane.next_to_send(0)
    assert sent is not None
    story.small.leave_answers()
    assert story.held.size == story.memory.in_use == story.size
    lane.answered(sent, Outcome.RETRY, 0)
    story.small.leave_answers()
    assert story.held.size == len(story.batches[0])


def test_partition_stands_when_nothing_of_it_gets_through_for_a_while(monkeypatch) -> None:
    """Also where nobody has refused anything: a target that is frozen, or has no leader."""
    monkeypatch.setattr("millrace.mirror.pipeline.steady_ms", lambda: 5_000)
    monkeypatch.setattr(Sink, "is_failing", lambda *_: False)
    story = TwoInOneAnswer()
    assert not story.small.stands(5_000 + STANDING_AFTER_MS)
    assert story.small.stands(5_001 + STANDING_AFTER_MS)
    assert not story.small.wants_fetch(5_001 + STANDING_AFTER_MS, MEBIBYTE)
    story.small.close()
    assert not story.small.stands(5_001 + STANDING_AFTER_MS)


# --- room ---------------------------------------------------------------------------------------------


class Held(SimpleNamespace):
    """A partition with batches on their way: `size` of an answer that keeps `kept` bytes."""

    frame: Frame | None

    def leave_answers(self) -> None:
        self.frame = None


def loop_with(reader: Any, standing: int, moving: int, *, size: int, kept: int) -> Any:
    """A fetch loop, of whose partitions `standing` do not get on, and the others have nothing under way."""
    loop = FetchLoop(reader._budget)
    for number in range(standing + moving):
        stands = number < standing
        made = pipeline_at(0)
        made.progress.outstanding_size = size if stands else 0
        held = Held(**vars(made))
        held.stands = lambda *_, stands=stands: stands
        held.wants_fetch = lambda *_, stands=stands: not stands
        held.frame = loop.held.take(kept) if stands else None
        loop.partitions["t", number] = held
    return loop


def asked_of(reader: Any, loop: Any) -> tuple[set[int], int]:
    room = loop.room(steady_ms())
    positions, _ = loop.positions(room, steady_ms())
    return {number for _, number in positions}, room


@pytest.mark.parametrize("kept", [SMALL, 4 * MEBIBYTE])
def test_four_partitions_that_stand_leave_room_for_the_others(kept: int) -> None:
    reader = reader_of(Source())
    reader._budget = FetchBudget(16 * MEBIBYTE)
    reader._budget.loop_count = 1
    loop = loop_with(reader, 4, 96, size=SMALL, kept=kept)
    asked, room = asked_of(reader, loop)
    assert asked == set(range(4, 100))
    assert room > 8 * MEBIBYTE, "they keep what they need, and no answer as a whole"


def all_room_taken() -> tuple[Any, Any]:
    """A reader and its loop: four of a hundred partitions stand and need all that they keep."""
    reader = reader_of(Source())
    reader._budget = FetchBudget(16 * MEBIBYTE)
    reader._budget.loop_count = 1
    size = 7 * MEBIBYTE // 2
    return reader, loop_with(reader, 4, 96, size=size, kept=size)


def test_partitions_that_stand_and_need_all_that_they_keep_leave_a_part() -> None:
    reader, loop = all_room_taken()
    asked, room = asked_of(reader, loop)
    assert asked == set(range(4, 100))
    assert room == 2 * MEBIBYTE
    assert loop._most_of_each >= room
    assert all(each.frame is not None for each in list(loop.partitions.values())[:4]), "nothing to be gained"


def test_partition_of_which_nothing_was_delivered_tries_a_smallest_fetch_where_others_stand() -> None:
    """It may be one that stands too, and each of those would take what is kept for the others."""
    reader, loop = all_room_taken()
    *_, untried, tried = loop.partitions.values()
    untried.gets_on = tried.gets_on = lambda _: False
    tried.progress.outstanding_size = SMALL
    assert asked_of(reader, loop)[0] == set(range(4, 99)), "one has tried, and waits for what comes of it"
    assert loop._most_of_each == MIN_FETCH_SIZE
    loop.partitions["t", 0].frame = None
    assert asked_of(reader, loop)[0] == set(range(4, 100)), "there is room for all"
    assert loop._most_of_each > MIN_FETCH_SIZE


def test_partitions_that_come_to_stand_one_after_the_other_keep_no_more_than_is_allowed() -> None:
    budget = FetchBudget(16 * MEBIBYTE)
    budget.loop_count = 1
    held = HeldMemory(budget)
    frames = [held.take(14 * MEBIBYTE)]
    for _ in range(8):
        room = budget.room(held.size, 0, some_stand=True)
        if room > MIN_FETCH_SIZE:
            frames.append(held.take(room))
    assert held.size == 16 * MEBIBYTE
    assert room == MIN_FETCH_SIZE, "nobody would find out who gets on"
    assert budget.room(held.size, SMALL, some_stand=True) < MIN_FETCH_SIZE, "somebody does"
    frames.clear()
    assert budget.room(held.size, 0, some_stand=True) == 14 * MEBIBYTE


def test_partition_gets_on_for_a_while_after_something_of_it_was_delivered() -> None:
    story = TwoInOneAnswer()
    assert not story.small.gets_on(5_000)
    (outgoing,) = story.sink._lanes[story.small.target].at_rest()
    story.small.delivered(outgoing, 0, 0, 5_000)
    assert story.small.gets_on(5_000 + STANDING_AFTER_MS)
    assert not story.small.gets_on(5_001 + STANDING_AFTER_MS)


def test_what_other_loops_keep_and_ask_for_bounds_the_floor_too() -> None:
    """Of a loop that begins when another has taken all, by the share that was that one's then."""
    budget = FetchBudget(16 * MEBIBYTE)
    budget.loop_count = 1
    old, new = HeldMemory(budget), HeldMemory(budget)
    frame = old.take(14 * MEBIBYTE)
    with old.asking(2 * MEBIBYTE):
        budget.loop_count = 2
        assert budget.room(0, 0, some_stand=False) == MIN_FETCH_SIZE, "one answer in any case"
        first = new.take(MIN_FETCH_SIZE)
        assert budget.room(new.size, MIN_FETCH_SIZE, some_stand=True) < MIN_FETCH_SIZE
    assert budget.room(new.size, MIN_FETCH_SIZE, some_stand=True) == 2 * MEBIBYTE - MIN_FETCH_SIZE
    del frame
    assert budget.room(new.size, 0, some_stand=False) == 7 * MEBIBYTE - first.size


def full_loop() -> tuple[Any, Any]:
    """What stands has filled all; four others never had anything under way."""
    reader, loop = all_room_taken()
    loop.rest = loop.held.take(16 * MEBIBYTE - loop.held.size)
    for number in list(loop.partitions)[8:]:
        del loop.partitions[number]
    for untried in list(loop.partitions.values())[4:]:
        untried.gets_on = lambda _: False
    return reader, loop


def asked_at(loop: Any, at_ms: int) -> set[int]:
    positions, _ = loop.positions(loop.room(at_ms), at_ms)
    return {number for _, number in positions}


def test_those_that_try_where_all_is_full_do_so_with_growing_pauses() -> None:
    """Each try may stay: a target that takes nothing would make them keep an answer for each partition."""
    _, loop = full_loop()
    tried_at_ms, kept = [], []
    for at_ms in range(0, 64_000, 250):
        if asked_at(loop, at_ms):
            tried_at_ms.append(at_ms)
            kept.append(loop.held.take(MIN_FETCH_SIZE))
    assert tried_at_ms == [0, 1_000, 3_000, 7_000, 15_000, 31_000, 63_000]
    kept.pop()
    assert asked_at(loop, 64_000), "the last one got through"
    assert asked_at(loop, 64_001), "the source had nothing"


def test_who_gets_on_waits_for_no_pause_where_all_is_full() -> None:
    _, loop = full_loop()
    assert asked_at(loop, 0) == {4, 5, 6, 7}
    loop.kept = loop.held.take(MIN_FETCH_SIZE)
    loop.partitions["t", 6].gets_on = lambda _: True
    assert asked_at(loop, 1) == {6}


def test_who_has_a_silent_leader_does_not_try_where_all_is_full() -> None:
    _, loop = full_loop()
    loop.partitions["t", 5].may_get_on = lambda _: False
    assert asked_at(loop, 0) == {4, 6, 7}
    del loop.rest
    assert asked_at(loop, 1) == {4, 5, 6, 7}, "there is room"


def test_loop_whose_memory_is_kept_by_partitions_that_have_left_goes_on() -> None:
    """They were given up, or have another leader: what was sent of them stays until the target takes it."""
    reader = reader_of(Source())
    loop = loop_with(reader, 0, 2, size=0, kept=0)
    frame = loop.held.take(reader._budget.share)
    assert asked_of(reader, loop)[0] == {0, 1}
    loop.partitions["t", 0].progress.outstanding_size = MIN_FETCH_SIZE
    assert not asked_of(reader, loop)[0], "it gets on, and makes room"
    del frame


def test_no_copy_is_made_that_there_is_no_room_for() -> None:
    """What is in a request keeps the answer all the same."""
    reader = reader_of(Source())
    reader._budget = FetchBudget(16 * MEBIBYTE)
    reader._budget.loop_count = 1
    loop = loop_with(reader, 2, 2, size=5 * MEBIBYTE // 4, kept=0)
    copies: list[Frame] = []
    for each in list(loop.partitions.values())[:2]:
        each.leave_answers = lambda: copies.append(loop.held.take(5 * MEBIBYTE // 4))
    answer = loop.held.take(15 * MEBIBYTE)
    loop.room(steady_ms())
    assert not copies
    del answer
    loop.answer = loop.held.take(14 * MEBIBYTE)
    loop.room(steady_ms())
    assert len(copies) == 1 and loop.held.size < 16 * MEBIBYTE


def test_those_that_get_on_may_not_take_what_is_kept_for_when_others_stand() -> None:
    budget = FetchBudget(16 * MEBIBYTE)
    budget.loop_count = 1
    held = HeldMemory(budget)
    frame = held.take(14 * MEBIBYTE)
    assert budget.room(held.size, 14 * MEBIBYTE, some_stand=False) < MIN_FETCH_SIZE
    assert budget.room(held.size, 0, some_stand=True) == 2 * MEBIBYTE
    assert budget.room(held.size, 2 * MEBIBYTE, some_stand=True) < MIN_FETCH_SIZE
    del frame
    assert budget.held_size == 0


def test_next_answer_is_fetched_while_the_last_one_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer counts as a whole until its last batch is gone: one that took all the room would stop all."""
    asked: list[int] = []
    held: list[Any] = []

    async def fetch(*_: object, max_bytes: int, **__: object) -> Any:
        asked.append(max_bytes)
        assert reader._budget.asked_size == max_bytes
        if len(asked) == 2:
            raise asyncio.CancelledError
        return [with_records(memoryview(bytearray(max_bytes)))]

    monkeypatch.setattr(source_module, "fetch", fetch)
    reader = reader_of(Source())
    reader._budget = FetchBudget(4 * MEBIBYTE)
    loop = FetchLoop(reader._budget)
    pipeline = loop.partitions["t", 0] = pipeline_at(0)
    pipeline.accept = lambda answer, frame: held.append((answer.records, frame))
    with pytest.raises(asyncio.CancelledError):
        fetching = reader._fetch_from(Way(1, 0), loop)
        asyncio.run(asyncio.wait_for(fetching, patience(10)))
    assert asked == [7 * MEBIBYTE // 4] * 2 and loop.held.size == asked[0]
    assert reader._budget.asked_size == 0, "nobody waits for it any more"


@pytest.mark.parametrize("standing", [0, 1])
def test_each_of_seventeen_brokers_is_fetched_from_with_a_mebibyte_in_all(standing: int) -> None:
    reader = reader_of(Source())
    reader._budget = FetchBudget(MEBIBYTE)
    reader._budget.loop_count = 17
    for _ in range(17):
        loop = loop_with(reader, standing, 2, size=MEBIBYTE, kept=MEBIBYTE)
        asked, room = asked_of(reader, loop)
        assert asked == {standing, standing + 1} and room >= MIN_FETCH_SIZE


def test_nothing_keeps_an_answer_while_the_next_one_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = FrameMemory(lambda: 0)
    kept: list[int] = []

    async def fetch(*_: object, **__: object) -> Any:
        kept.append(memory.in_use)
        if len(kept) == 3:
            raise asyncio.CancelledError
        await asyncio.sleep(0)
        return [with_records(memory.take(MEBIBYTE))]

    monkeypatch.setattr(source_module, "fetch", fetch)
    reader = reader_of(Source())
    loop = FetchLoop(reader._budget)
    pipeline = loop.partitions["t", 0] = pipeline_at(0)
    pipeline.accept = lambda *_: None
    pipeline.state = State.RUNNING
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(reader._fetch_from(Way(1, 0), loop))
    assert kept == [0, 0, 0]
    assert loop.held.size == 0
