"""What a partition does at a gap, paused, told to go on: a real pipeline, a scripted source and target."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any
from uuid import UUID

import pytest

from millrace.broker.client.raw_fetch import FetchedPartition
from millrace.broker.errors import InvalidTimestamp, KafkaError, RecordTooLarge
from millrace.broker.protocol.batch import stamp_offset_and_epoch
from millrace.broker.protocol.records import Record, build_batch
from millrace.mirror.delivery.sink import Outgoing
from millrace.mirror.gaps.gaps import Gap, GapClass, GapPolicy
from millrace.mirror.gaps.open_gaps import Origin
from millrace.mirror.pipeline import MAX_TIMES_ALONE, MORE_SIZE, PartitionPipeline, State
from millrace.mirror.topics.routes import SourcePartition, TargetPartition
from tests.unit.mirror.old_entries import entry

ORIGIN = Origin("cluster", UUID(int=7))
SECOND = 1_000_000


class Target:
    """The sink's face to a pipeline: a queue, of which a test sends, acknowledges and refuses."""

    is_transactional = False

    def __init__(self) -> None:
        self.queue: list[Outgoing] = []
        self.sent_count = 0

    def enqueue(self, _target: TargetPartition, outgoing: Outgoing) -> None:
        self.queue.append(outgoing)

    def withdraw(self, _target: TargetPartition, owner: object, from_offset: int = 0) -> list[Outgoing]:
        gone = [each for each in self.queue[self.sent_count :] if each.offsets[0] >= from_offset]
        self.queue = [each for each in self.queue if each not in gone]
        return gone

    def is_failing(self, _target: TargetPartition) -> bool:
        return False

    def offsets(self) -> list[list[int]]:
        return [list(each.offsets) for each in self.queue]

    def acknowledge(self, count: int = 1) -> None:
        for _ in range(count):
            outgoing = self.queue.pop(0)
            self.sent_count = max(0, self.sent_count - 1)
            outgoing.owner.delivered(outgoing, -1, 0)

    def refuse(self, error: KafkaError) -> None:
        """The first is refused; what takes its place stands where it stood."""
        outgoing = self.queue.pop(0)
        self.sent_count = max(0, self.sent_count - 1)
        self.queue[:0] = outgoing.owner.refused(outgoing, error, 0)


class Around:
    """The worker's face to a pipeline."""

    def __init__(self, *skipped: GapClass) -> None:
        self.skipped = skipped
        self.events: list[tuple[int, int, str]] = []
        self.limit = 1 << 20
        self.limit_now = 1 << 20
        self.now = SECOND
        self.may_record = asyncio.Event()
        self.may_record.set()
        self.tasks: set[asyncio.Task[None]] = set()

    def now_ms(self) -> int:
        return self.now

    def policy(self, gap_class: GapClass) -> GapPolicy:
        return GapPolicy.SKIP if gap_class in self.skipped else GapPolicy.STOP

    async def record_gap(self, gap: Gap) -> None:
        await self.may_record.wait()
        self.events.append((gap.from_offset, gap.to_offset, gap.gap_class.value))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.add(asyncio.get_running_loop().create_task(work))

    def max_batch_size(self, _topic: str) -> int:
        return self.limit

    async def refresh_limits(self, _topic: str) -> None:
        self.limit = self.limit_now

    def moved(self, _pipeline: object) -> None: ...

    def count_batch(self, *_: object) -> None: ...

    def count_delivered(self, *_: object) -> None: ...

    async def rest(self) -> None:
        """Until what was spawned has come as far as it can; raises what it raised."""
        for _ in range(20):
            await asyncio.sleep(0)
        for task in self.tasks:
            if task.done():
                task.result()


def started(*skipped: GapClass, began: int = 0) -> tuple[PartitionPipeline, Target, Around]:
    target, around = Target(), Around(*skipped)
    sink: Any = target
    where = SourcePartition("ewr", "flights", 0)
    pipeline = PartitionPipeline(where, TargetPartition("flights", 0), sink, around)
    pipeline.ready(began, -1, ORIGIN, began)
    return pipeline, target, around


def batch(base: int, sizes: list[int], epoch: int = 0) -> bytearray:
    built = build_batch([Record(b"k", b"x" * size, timestamp_ms=SECOND) for size in sizes])
    stamp_offset_and_epoch(memoryview(built), base, epoch)
    return built


def answer(*batches: bytearray, end: int = 1_000) -> FetchedPartition:
    data = memoryview(bytearray(b"".join(batches)))
    return FetchedPartition("flights", 0, 0, end, end, 0, (), None, data)


# --- pausing ----------------------------------------------------------------------------------------


def test_paused_partition_fetches_nothing_and_what_is_under_way_arrives() -> None:
    async def story() -> None:
        pipeline, target, _ = started()
        pipeline.accept(answer(batch(0, [9, 9])))
        pipeline.pause()
        assert pipeline.state is State.PAUSED
        assert not pipeline.wants_fetch(SECOND, 1 << 20)
        pipeline.accept(answer(batch(2, [9])))  # was under way when it was paused
        assert target.offsets() == [[0, 1]]
        target.acknowledge()
        assert pipeline.progress.position == 2
        pipeline.unpause()
        assert pipeline.state is State.RUNNING
        assert pipeline.wants_fetch(SECOND, 1 << 20)
        pipeline.accept(answer(batch(2, [9])))
        assert target.offsets() == [[2]]

    asyncio.run(story())


def test_pause_outlives_a_start_a_drain_and_a_gap() -> None:
    async def story() -> None:
        pipeline, target, around = started()
        pipeline.pause()
        await pipeline.drain(1.0)
        assert pipeline.state is State.DRAINING
        pipeline.resume()
        assert pipeline.state is State.PAUSED
        pipeline.at_gap(GapClass.POSITION_LOST, 5, "gone", resume_at=5)
        assert pipeline.state is State.STOPPED
        pipeline.unpause()
        assert pipeline.state is State.STOPPED
        pipeline.pause()
        pipeline.skip_gap()
        await around.rest()
        assert (pipeline.state, pipeline.progress.position) == (State.PAUSED, 5)
        sink: Any = target
        other = PartitionPipeline(pipeline.partition, pipeline.target, sink, around)
        other.pause()
        assert other.state is State.STARTING
        other.ready(3, -1, ORIGIN)
        assert other.state is State.PAUSED

    asyncio.run(story())


# --- stopped within what was fetched ----------------------------------------------------------------


def test_stop_keeps_what_lies_before_the_gap_and_takes_back_what_lies_behind() -> None:
    async def story() -> None:
        pipeline, target, around = started()
        pipeline.accept(answer(batch(0, [9]), batch(1, [9]), batch(2, [9]), batch(3, [9, 9]), batch(5, [9])))
        # A real answer may be merged; here each stands alone, or the gap's own record is found by halving.
        while target.offsets()[0][0] < 1:
            if len(target.offsets()[0]) > 1:
                target.refuse(InvalidTimestamp())
            else:
                target.acknowledge()
        while len(target.offsets()[0]) > 1:
            target.refuse(InvalidTimestamp())
        target.refuse(InvalidTimestamp())
        assert pipeline.state is State.STOPPED
        assert target.offsets() == []
        assert (pipeline.progress.position, pipeline.progress.fetch_offset) == (1, 2)
        await around.rest()
        assert around.events == [(1, 2, "refused")]
        assert not pipeline.wants_fetch(SECOND, 1 << 20)

    asyncio.run(story())


def test_records_before_one_that_is_too_large_are_delivered_while_stopped() -> None:
    async def story() -> None:
        pipeline, target, around = started()
        around.limit = 400
        pipeline.accept(answer(batch(0, [9, 9, 5_000, 9])))
        assert pipeline.state is State.STOPPED
        assert [offset for offsets in target.offsets() for offset in offsets] == [0, 1]
        target.acknowledge(len(target.queue))
        assert pipeline.progress.position == 2
        assert pipeline.gap is not None and pipeline.gap.gap_class is GapClass.TOO_LARGE

    asyncio.run(story())


def test_skip_passes_only_when_the_event_is_durable_and_goes_on_behind_the_gap() -> None:
    async def story() -> None:
        pipeline, target, around = started()
        around.limit = 400
        data = batch(0, [9, 5_000, 9])
        pipeline.accept(answer(data))
        target.acknowledge()
        await around.rest()
        around.may_record.clear()
        skipped = pipeline.skip_gap()
        assert skipped is not None and (skipped.from_offset, skipped.to_offset) == (1, 2)
        assert pipeline.skip_gap() is None
        await around.rest()
        assert (pipeline.state, pipeline.progress.position) == (State.SKIPPING, 1)
        around.may_record.set()
        await around.rest()
        assert (pipeline.state, pipeline.progress.position, pipeline.gap) == (State.RUNNING, 2, None)
        pipeline.accept(answer(data))
        assert target.offsets() == [[2]]
        target.acknowledge()
        assert pipeline.progress.position == 3

    asyncio.run(story())


def test_retry_asks_for_the_limit_anew_and_fetches_from_the_gap_on() -> None:
    async def story() -> None:
        pipeline, target, around = started()
        around.limit = 400
        data = batch(0, [9, 5_000, 9])
        pipeline.accept(answer(data))
        target.acknowledge()
        assert pipeline.retry() is not None
        await around.rest()
        assert (pipeline.state, pipeline.progress.fetch_offset) == (State.RUNNING, 1)
        around.limit = 400
        pipeline.accept(answer(data))
        assert pipeline.state is State.STOPPED  # the limit was not raised
        around.limit_now = 10_000
        pipeline.retry()
        await around.rest()
        pipeline.accept(answer(data))
        assert target.offsets() == [[1, 2]]
        target.acknowledge()
        assert (pipeline.progress.position, pipeline.state) == (3, State.RUNNING)

    asyncio.run(story())


def test_retry_of_a_record_behind_a_hole() -> None:
    async def story() -> None:
        pipeline, target, around = started()
        around.limit = 400
        pipeline.accept(answer(batch(5, [5_000]), batch(6, [9])))
        assert pipeline.gap is not None and pipeline.gap.from_offset == 5
        around.limit_now = 10_000
        pipeline.retry()
        await around.rest()
        assert pipeline.wants_fetch(SECOND, 1 << 20)
        pipeline.accept(answer(batch(5, [5_000]), batch(6, [9])))
        target.acknowledge()
        assert (pipeline.progress.position, pipeline.state) == (7, State.RUNNING)

    asyncio.run(story())


def test_batch_that_comes_alone_behind_a_hole_is_believed_when_nothing_more_comes() -> None:
    """What follows it may be in an open transaction."""

    async def story() -> None:
        pipeline, target, _ = started()
        sizes = []
        for _ in range(MAX_TIMES_ALONE):
            assert target.offsets() == []
            pipeline.accept(answer(batch(5, [9])))
            sizes.append(pipeline.needed_size)
        assert sizes == sorted(sizes) and sizes[0] > MORE_SIZE
        assert pipeline.wants_fetch(SECOND, 1 << 20) and pipeline.damage is None
        pipeline.accept(answer(batch(5, [9])))
        assert (target.offsets(), pipeline.needed_size) == ([[5]], 0)

    asyncio.run(story())


def test_retry_of_a_refused_record_waits_for_what_is_under_way() -> None:
    async def story() -> None:
        pipeline, target, around = started()
        target.sent_count = 2
        pipeline.accept(answer(batch(0, [9])))
        pipeline.accept(answer(batch(1, [9])))
        target.refuse(InvalidTimestamp())
        assert target.offsets() == [[1]]
        pipeline.retry()
        await around.rest()
        assert pipeline.state is State.STOPPED
        target.acknowledge()
        await around.rest()
        assert (pipeline.state, pipeline.progress.fetch_offset) == (State.RUNNING, 0)
        pipeline.accept(answer(batch(0, [9])))
        target.acknowledge()
        assert pipeline.progress.position == 1

    asyncio.run(story())


def test_each_of_two_gaps_is_decided_about_by_itself() -> None:
    async def story() -> None:
        pipeline, target, around = started()
        target.sent_count = 3
        for base in range(3):
            pipeline.accept(answer(batch(base, [9])))
        target.refuse(RecordTooLarge())
        target.refuse(InvalidTimestamp())
        target.acknowledge()
        await around.rest()
        assert sorted(around.events) == [(0, 1, "too_large"), (1, 2, "refused")]
        assert pipeline.skip_gap() is not None
        await around.rest()
        assert (pipeline.state, pipeline.progress.position) == (State.STOPPED, 1)
        assert pipeline.gap is not None and pipeline.gap.gap_class is GapClass.REFUSED
        assert pipeline.skip_gap() is not None
        await around.rest()
        assert (pipeline.state, pipeline.progress.position) == (State.RUNNING, 3)

    asyncio.run(story())


def test_policy_skip_passes_without_stopping() -> None:
    async def story() -> None:
        pipeline, target, around = started(GapClass.REFUSED)
        target.sent_count = 2
        pipeline.accept(answer(batch(0, [9])))
        pipeline.accept(answer(batch(1, [9])))
        target.refuse(InvalidTimestamp())
        assert (pipeline.state, pipeline.gap is not None) == (State.RUNNING, True)
        target.acknowledge()
        assert pipeline.progress.position == 0
        await around.rest()
        assert (pipeline.progress.position, pipeline.gap) == (2, None)
        assert around.events == [(0, 1, "refused")]

    asyncio.run(story())


# --- stopped at the fetch offset --------------------------------------------------------------------


def test_what_was_fetched_before_an_expired_stretch_is_delivered() -> None:
    async def story() -> None:
        pipeline, target, around = started()
        pipeline.accept(answer(batch(0, [9, 9])))
        pipeline.at_gap(GapClass.EXPIRED, 7, "retention", resume_at=7)
        assert (pipeline.state, target.offsets()) == (State.STOPPED, [[0, 1]])
        await around.rest()
        assert around.events == [(2, 7, "expired")]
        pipeline.skip_gap()
        await around.rest()
        assert (pipeline.state, pipeline.progress.position) == (State.SKIPPING, 0)
        target.acknowledge()
        await around.rest()
        assert (pipeline.state, pipeline.progress.position) == (State.RUNNING, 7)

    asyncio.run(story())


def test_recreated_log_has_its_own_ends_and_origin() -> None:
    async def story() -> None:
        pipeline, target, around = started(GapClass.RECREATED)
        pipeline.accept(answer(batch(0, [9]), end=900))
        target.acknowledge()
        there = Origin("cluster", UUID(int=8))
        pipeline.at_gap(GapClass.RECREATED, 900, "again", resume_at=0, origin=there)
        await around.rest()
        assert around.events == [(1, 900, "recreated")]
        assert (pipeline.origin, pipeline.progress.position, pipeline.lag.log_end) == (there, 0, -1)
        written = pipeline.position_to_write(SECOND)
        assert written is not None and (written.next_offset, written.topic_id) == (0, UUID(int=8))

    asyncio.run(story())


def test_position_tells_where_the_mirroring_of_this_topic_began() -> None:
    """However far it is by now: below that nothing was carried."""

    async def story() -> None:
        pipeline, target, around = started(GapClass.RECREATED, GapClass.TRUNCATED, began=100)
        pipeline.accept(answer(batch(100, [9])))
        target.acknowledge()
        written = pipeline.position_to_write(SECOND)
        assert written is not None and (written.next_offset, written.began) == (101, 100)
        pipeline.position_written(written)
        pipeline.at_gap(GapClass.TRUNCATED, 101, "shorter", first=40, resume_at=40)
        await around.rest()
        written = pipeline.position_to_write(SECOND)
        assert written is not None and (written.next_offset, written.began) == (40, 40)
        there = Origin("cluster", UUID(int=8))
        pipeline.at_gap(GapClass.RECREATED, 41, "again", resume_at=3, origin=there)
        await around.rest()
        written = pipeline.position_to_write(SECOND)
        assert written is not None and (written.next_offset, written.began) == (3, 0)

    asyncio.run(story())


@pytest.mark.parametrize("skipped", [(), (GapClass.RECREATED,)])
def test_position_tells_the_next_owner_how_much_a_log_that_is_gone_still_held(
    skipped: tuple[GapClass, ...],
) -> None:
    async def story() -> None:
        pipeline, target, around = started(*skipped)
        pipeline.accept(answer(batch(0, [9]), end=1))
        target.acknowledge()
        written = pipeline.position_to_write(SECOND)
        assert written is not None and (written.next_offset, written.log_end) == (1, 1)
        pipeline.position_written(written)
        pipeline.pause()
        pipeline.lag.sample(900, SECOND)
        assert pipeline.position_to_write(SECOND) is None, "a growing log alone is nothing to write"
        around.may_record.clear()
        there = Origin("cluster", UUID(int=8))
        pipeline.at_gap(GapClass.RECREATED, 900, "again", resume_at=0, origin=there)
        told = pipeline.position_to_write(SECOND)
        assert told is not None
        assert (told.next_offset, told.topic_id, told.log_end) == (1, ORIGIN.topic_id, 900)
        # One that was under way when the gap was met says too little: once more, and then no more.
        pipeline.position_written(written)
        again = pipeline.position_to_write(SECOND)
        assert again is not None and again.log_end == 900
        pipeline.position_written(again)
        assert pipeline.position_to_write(SECOND) is None

    asyncio.run(story())


def test_letting_one_made_again_topic_pass_says_nothing_about_the_next_at_the_same_offset() -> None:
    async def story() -> None:
        pipeline, _, around = started()
        for number in (8, 9):
            there = Origin("cluster", UUID(int=number))
            pipeline.at_gap(GapClass.RECREATED, 0, "again", resume_at=0, origin=there)
            assert pipeline.state is State.STOPPED, number
            pipeline.skip_gap()
            await around.rest()
            assert (pipeline.state, pipeline.origin) == (State.RUNNING, there)

    asyncio.run(story())


def test_refusal_heard_late_comes_before_the_gap_at_the_fetch_offset() -> None:
    async def story() -> None:
        pipeline, target, around = started(GapClass.EXPIRED)
        target.sent_count = 1
        pipeline.accept(answer(batch(0, [9])))
        pipeline.at_gap(GapClass.EXPIRED, 7, "retention", resume_at=7)
        target.refuse(InvalidTimestamp())
        await around.rest()
        assert pipeline.state is State.STOPPED
        assert pipeline.gap is not None and pipeline.gap.gap_class is GapClass.REFUSED
        pipeline.skip_gap()
        await around.rest()
        assert (pipeline.state, pipeline.progress.position, pipeline.gap) == (State.RUNNING, 7, None)

    asyncio.run(story())


def test_what_is_taken_back_before_the_gap_at_the_fetch_offset_is_fetched_again() -> None:
    async def story() -> None:
        pipeline, target, around = started(GapClass.EXPIRED)
        pipeline.accept(answer(batch(0, [9], epoch=1), batch(1, [9], epoch=2)))
        assert target.offsets() == [[0], [1]]
        target.sent_count = 1
        pipeline.at_gap(GapClass.EXPIRED, 7, "retention", resume_at=7)
        target.refuse(InvalidTimestamp())
        await around.rest()
        assert (pipeline.state, target.offsets()) == (State.STOPPED, [])
        pipeline.skip_gap()
        await around.rest()
        assert (pipeline.state, pipeline.progress.fetch_offset) == (State.RUNNING, 1)
        pipeline.accept(answer(batch(1, [9], epoch=2)))
        target.acknowledge()
        pipeline.at_gap(GapClass.EXPIRED, 7, "retention", resume_at=7)
        await around.rest()
        assert (pipeline.state, pipeline.progress.position) == (State.RUNNING, 7)

    asyncio.run(story())


def test_forgotten_gap_does_not_pass_and_is_not_asked_about_twice() -> None:
    """The lane's transaction was aborted while the event was being written."""

    async def story() -> None:
        pipeline, target, around = started()
        target.is_transactional = True
        target.sent_count = 1
        pipeline.accept(answer(batch(0, [9])))
        target.refuse(InvalidTimestamp())
        await around.rest()
        around.may_record.clear()
        pipeline.skip_gap()
        await around.rest()
        pipeline.rewind()
        around.may_record.set()
        await around.rest()
        assert (pipeline.state, pipeline.progress.position) == (State.RUNNING, 0)
        target.sent_count = 1
        pipeline.accept(answer(batch(0, [9])))
        target.refuse(InvalidTimestamp())
        assert pipeline.state is State.RUNNING
        await around.rest()
        assert pipeline.progress.settled_position == 1
        assert set(around.events) == {(0, 1, "refused")}

    asyncio.run(story())


def test_batches_of_two_leader_epochs_are_never_merged() -> None:
    """Otherwise a log that was cut where the second began would seem to be cut where the run began."""

    async def story() -> None:
        pipeline, target, _ = started()
        tiny = [batch(base, [9], epoch=base // 3) for base in range(6)]
        pipeline.accept(answer(*tiny))
        assert target.offsets() == [[0, 1, 2], [3, 4, 5]]
        assert pipeline.progress.epochs.parts_at(0, 5, 6) == (3, 0)

    asyncio.run(story())


# --- damage -----------------------------------------------------------------------------------------


def test_damage_is_fetched_three_times_before_anybody_asks_how_far_it_goes() -> None:
    async def story() -> None:
        pipeline, target, _ = started()
        bad = batch(1, [9])
        bad[-1] ^= 1
        for count in range(3):
            assert pipeline.damage is None
            pipeline.accept(answer(batch(0, [9]), bad))
            assert not pipeline.wants_fetch(SECOND, 1 << 20)
            assert target.offsets() == [[0]], count
        assert pipeline.damage is not None
        assert pipeline.progress.fetch_offset == 1

    asyncio.run(story())


@pytest.mark.parametrize(
    "useless",
    [
        batch(0, [9, 9]),
        bytearray(entry(3, 0, None, b"x") + entry(4, 1, None, b"y")),
    ],
)
def test_answer_that_never_reaches_what_was_asked_for_is_damage_and_not_asked_for_for_ever(
    useless: bytearray,
) -> None:
    async def story() -> None:
        pipeline, target, _ = started()
        pipeline.accept(answer(batch(0, [9] * 5)))
        for _ in range(3):
            assert pipeline.damage is None
            pipeline.accept(answer(useless))
            assert not pipeline.wants_fetch(SECOND, 1 << 20)
        assert "before offset 5" in (pipeline.damage or "")
        assert target.offsets() == [[0, 1, 2, 3, 4]]
        # A batch that the fetch has cut off is no answer at all.
        pipeline, target, _ = started()
        pipeline.accept(answer(batch(0, [9])[:-1]))
        assert pipeline.wants_fetch(SECOND, 1 << 20)

    asyncio.run(story())


FLIPPED_BIT = 1 << 29


def test_batch_that_claims_to_stand_behind_the_logs_end_is_damage() -> None:
    """Its own offset is not under its checksum: one flipped bit, and the position would be 536,870,913 where
    the log ends at 2."""

    async def story() -> None:
        pipeline, target, _ = started()
        flipped = batch(FLIPPED_BIT, [9])
        for count in range(4):
            assert pipeline.damage is None, count
            pipeline.accept(answer(flipped, batch(1, [9]), end=2))
            pipeline.retry_at_ms = 0
        assert "a batch claims to end at 536870913, and the log ends at 2" in (pipeline.damage or "")
        assert (pipeline.progress.fetch_offset, target.offsets()) == (0, [])

    asyncio.run(story())


def test_log_that_grew_while_it_was_read_is_not_damaged() -> None:
    """The source had read its end before the batches."""

    async def story() -> None:
        pipeline, target, _ = started()
        pipeline.accept(answer(batch(0, [9]), batch(1, [9]), end=1))
        assert pipeline.wants_fetch(SECOND, 1 << 20)
        pipeline.accept(answer(batch(0, [9]), batch(1, [9]), end=2))
        for base, end in ((2, 2), (2, 3), (3, 3), (3, 4)):  # it grows again, and again
            pipeline.accept(answer(batch(base, [9]), end=end))
            assert pipeline.wants_fetch(SECOND, 1 << 20), "at once"
        assert pipeline.progress.fetch_offset == 4
        assert [offset for offsets in target.offsets() for offset in offsets] == [0, 1, 2, 3]

    asyncio.run(story())


def test_position_says_what_was_known_of_the_log() -> None:
    async def story() -> None:
        pipeline, target, around = started()
        pipeline.accept(answer(batch(0, [9]), end=1))
        target.acknowledge()
        position = pipeline.position_to_write(SECOND)
        assert position is not None
        assert (position.next_offset, position.log_end, position.waiting_since_ms) == (1, 1, -1)
        around.now += 5
        pipeline.accept(answer(batch(1, [9]), end=4))
        target.acknowledge()
        around.now += 5
        position = pipeline.position_to_write(around.now)
        assert position is not None
        assert (position.next_offset, position.log_end, position.waiting_since_ms) == (2, 4, SECOND + 5)

    asyncio.run(story())
