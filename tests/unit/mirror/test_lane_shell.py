"""What the shell around the rules of a transactional lane must get right: who comes, leaves and jumps while a
transaction is under way."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from millrace.broker.client.raw_fetch import FetchedPartition
from millrace.broker.errors import UnknownMemberId
from millrace.broker.protocol.batch import stamp_offset_and_epoch
from millrace.broker.protocol.records import Record, build_batch
from millrace.mirror.delivery import transactional_lane
from millrace.mirror.delivery.exactly_once import ExactlyOnce
from millrace.mirror.delivery.transaction import Phase, Seat
from millrace.mirror.gaps.gaps import GapClass
from millrace.mirror.gaps.open_gaps import Origin
from millrace.mirror.pipeline import PartitionPipeline, State
from millrace.mirror.sources.lag import LagSamples
from millrace.mirror.topics.routes import SourcePartition, TargetPartition
from tests.unit.mirror.lane_stage import (
    INTERVAL_MS,
    MIRROR,
    Stage,
    Target,
    now_ms,
    position,
)
from tests.unit.mirror.pipeline_stage import ORIGIN, Around, answer, at, batch, pipeline_of
from tests.waiting import until_async as until

EWR = SourcePartition("ewr", "flights", 0)
JFK = SourcePartition("jfk", "flights", 1)
TARGET = TargetPartition("flights", 0)
ELSEWHERE = TargetPartition("flights", 1)
AGAIN = Origin("cluster", UUID(int=8))


# --- a jump back ------------------------------------------------------------------------------------


def test_log_created_again_is_on_record_though_its_offsets_are_those_of_the_old_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        async with Stage(monkeypatch, GapClass.RECREATED) as stage:
            pipeline = stage.carries(EWR, TARGET)
            end = stage.target.hold("end")
            pipeline.accept(answer(batch(0, [9] * 10), end=10))
            await stage.reaches(Phase.ENDING)
            pipeline.at_gap(GapClass.RECREATED, 10, "created again", resume_at=0, origin=AGAIN)
            again = asyncio.create_task(stage.fetches(pipeline, batch(0, [5] * 10), end=10))
            await stage.rest()
            end.set()
            await again
            await until(lambda: pipeline.progress.settled_position == 10)
            await stage.settled(pipeline)
            found = stage.target.positions()[EWR]
            assert (found.next_offset, found.topic_id) == (10, AGAIN.topic_id)
            assert stage.target.mapped(EWR) == [(ORIGIN.topic_id, 0, 10, 0), (AGAIN.topic_id, 0, 10, 10)]

    asyncio.run(story())


def test_offset_map_has_no_hole_behind_a_log_that_was_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with Stage(monkeypatch, GapClass.TRUNCATED) as stage:
            pipeline = stage.carries(EWR, TARGET)
            end = stage.target.hold("end")
            pipeline.accept(answer(batch(0, [9] * 10), end=10))
            await stage.reaches(Phase.ENDING)
            pipeline.at_gap(GapClass.TRUNCATED, 10, "cut", first=7, resume_at=7, resume_epoch=0)
            again = asyncio.create_task(stage.fetches(pipeline, batch(7, [5] * 3, epoch=1), end=10))
            await stage.rest()
            end.set()
            await again
            await until(lambda: pipeline.progress.settled_position == 10)
            await stage.settled(pipeline)
            found = stage.target.positions()[EWR]
            assert (found.next_offset, found.leader_epoch) == (10, 1)
            runs = [(first, end, at) for _, first, end, at in stage.target.mapped(EWR)]
            assert runs == [(0, 10, 0), (7, 10, 10)]

    asyncio.run(story())


# --- a refusal of what may be in the log ------------------------------------------------------------


def test_late_refusal_aborts_what_may_hold_the_batch_and_tells_no_gap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The batch was taken, the answer was lost, and the second try is refused. Its record is in the open
    transaction: that must not be committed beside a gap's event, nor the next batch go under its sequence."""

    async def story() -> None:
        async with Stage(monkeypatch, GapClass.TOO_LARGE) as stage:
            pipeline = stage.carries(EWR, TARGET)
            stage.target.script = ["lost", "refused"]
            pipeline.accept(answer(batch(0, [9]), end=2))
            await until(lambda: stage.target.script == [] and pipeline.progress.fetch_offset == 0)
            await stage.fetches(pipeline, batch(0, [9]), end=2)
            await stage.fetches(pipeline, batch(1, [5]), end=2)
            await until(lambda: pipeline.progress.settled_position == 2)
            await stage.settled(pipeline)
            assert stage.around.events == []
            assert stage.target.carried(TARGET) == [b"x" * 9, b"x" * 5]

    asyncio.run(story())


# --- what moves without a batch ---------------------------------------------------------------------


def test_position_behind_what_is_not_carried_is_committed_by_a_lane_at_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The source is known to have more when the last batch is committed; it is of an aborted transaction."""

    async def story() -> None:
        async with Stage(monkeypatch) as stage:
            pipeline = stage.carries(EWR, TARGET)
            pipeline.accept(answer(batch(0, [9] * 10), end=12))
            await until(lambda: pipeline.progress.position == 10)
            await stage.rest()
            pipeline.accept(aborted(10, 2))
            await until(lambda: pipeline.progress.position == 12)
            assert stage.target.positions()[EWR].next_offset == 12

    asyncio.run(story())


def test_gap_that_an_operator_lets_pass_is_behind_the_position_on_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        async with Stage(monkeypatch) as stage:
            pipeline = stage.carries(EWR, TARGET)
            stage.around.limit = 1
            pipeline.accept(answer(batch(0, [9]), end=1))
            assert pipeline.state is State.STOPPED
            await stage.rest()
            assert pipeline.skip_gap() is not None
            await until(lambda: EWR in stage.target.positions())
            assert stage.target.positions()[EWR].next_offset == 1

    asyncio.run(story())


def aborted(base: int, count: int) -> FetchedPartition:
    """The end of a source's log: records of a transaction that was aborted."""
    records = [Record(b"k", b"v", timestamp_ms=1)] * count
    built = build_batch(records, producer_id=5, producer_epoch=0, base_sequence=0, transactional=True)
    stamp_offset_and_epoch(memoryview(built), base, 0)
    end = base + count
    return FetchedPartition("flights", 0, 0, end, end, 0, ((5, base),), None, memoryview(built))


# --- who leaves, who joins --------------------------------------------------------------------------


def test_start_that_is_being_written_does_not_outlive_the_assignment(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with Stage(monkeypatch) as stage:
            pipeline = stage.joins(EWR, TARGET)
            write = stage.target.hold("write")
            start = asyncio.create_task(stage.lane.record_start(EWR, position(100)))
            await stage.reaches(Phase.WRITING)
            stage.leaves(pipeline)
            with pytest.raises(UnknownMemberId):
                await start
            stage.seat = Seat("member", 2)
            stage.target.committed_by_another(EWR, position(150))
            write.set()
            await until(lambda: stage.target.is_decided)
            assert stage.target.positions()[EWR].next_offset == 150

    asyncio.run(story())


@pytest.mark.parametrize("was_known", [True, False])
def test_positions_read_after_an_unknown_outcome_leave_alone_who_joined_meanwhile(
    monkeypatch: pytest.MonkeyPatch, was_known: bool
) -> None:
    async def story() -> None:
        async with Stage(monkeypatch) as stage:
            stage.target.committed_by_another(EWR, position(0))
            if was_known:
                stage.target.committed_by_another(JFK, position(100))
            read = stage.target.hold("read")
            stage.target.refuses_ends = True
            pipeline = stage.carries(EWR, TARGET)
            pipeline.accept(answer(batch(0, [9])))
            await until(lambda: stage.target.read_count == 1)
            stage.target.committed_by_another(JFK, position(500))
            joined = stage.joins(JFK, ELSEWHERE)
            joined.ready(at(500))
            read.set()
            await until(lambda: not any(each.is_unread for each in stage.lane.rules.both))
            assert (joined.progress.fetch_offset, joined.state) == (500, State.RUNNING)
            assert (pipeline.progress.fetch_offset, pipeline.state) == (0, State.RUNNING)

    asyncio.run(story())


def test_own_partitions_are_in_the_transaction_also_of_a_partition_that_joins_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        async with Stage(monkeypatch) as stage:
            for each in stage.lane.rules.both:
                each.allowance = 1_000
            pipeline = stage.carries(EWR, TARGET)
            pipeline.accept(answer(batch(0, [9])))
            await until(lambda: stage.target.committed_count == 1)
            produce = stage.target.hold("produce")
            pipeline.accept(answer(batch(1, [300])))
            await until(
                lambda: stage.lane.rules.filling.phase is Phase.OPEN and stage.lane.rules.filling.lets(TARGET)
            )
            await stage.rest()
            assert stage.keeper.map_of(JFK) != stage.keeper.map_of(EWR)
            joined = stage.carries(JFK, TARGET)
            joined.accept(answer(batch(0, [900])))  # fills the transaction: nothing is asked in between
            produce.set()
            await until(lambda: stage.target.committed_count == 2)
            await stage.settled(pipeline, joined)
            assert stage.target.strays == []
            found = stage.target.positions()
            assert (found[EWR].next_offset, found[JFK].next_offset) == (2, 1)

    asyncio.run(story())


def test_transaction_that_fills_up_within_a_request_takes_nothing_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        async with Stage(monkeypatch) as stage:
            for each in stage.lane.rules.both:
                each.allowance = 1
            stage.target.hold("produce")
            for partition, target in ((EWR, TARGET), (JFK, ELSEWHERE)):
                pipeline = stage.carries(partition, target)
                pipeline.accept(answer(batch(0, [9])))
            await until(lambda: any(lane.in_flight for lane in stage.lane.sink._lanes.values()))
            await stage.rest()
            assert [lane.in_flight for lane in stage.lane.sink._lanes.values()] == [1, 0]

    asyncio.run(story())


def test_partition_that_has_left_is_nothing_to_its_lane_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its look at a log, or the write of its position, may come to an end after that."""

    async def story() -> None:
        async with Stage(monkeypatch) as stage:
            pipeline = stage.carries(EWR, TARGET)
            stage.leaves(pipeline)
            pipeline.position_written(position(0))
            assert stage.lane._moved == set()

    asyncio.run(story())


# --- several lanes ----------------------------------------------------------------------------------


def test_lanes_that_all_partitions_have_left_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactional_lane, "PRODUCER_PAUSE_MS", 10)

    async def story() -> None:
        target = Target(monkeypatch)
        cluster: Any = target
        config: Any = SimpleNamespace(name=MIRROR, lanes=2, group_id="g", position_interval_ms=INTERVAL_MS)
        delivery = ExactlyOnce(config, cluster, target.keeper(), now_ms)
        around = Around()

        def assigned(number: int) -> PartitionPipeline:
            partition = SourcePartition("ewr", "flights", number)
            sink = delivery.sink_of(partition)
            pipeline = pipeline_of(partition, TargetPartition("flights", number), sink, around)
            delivery.began(pipeline)
            pipeline.ready(at(0))
            return pipeline

        running = asyncio.create_task(delivery.run())
        await asyncio.sleep(0)
        delivery.seated(0, lambda: Seat("member", 1))
        left, other = delivery._lanes
        target.away = {each.transactional_id for each in left._producers}
        await until(lambda: not other.is_stuck)
        first, second = assigned(0), assigned(1)
        await until(lambda: not left.pipelines)
        assert other.pipelines == {first, second}
        target.away = set()
        await until(lambda: not left.is_stuck)
        assert delivery.sink_of(SourcePartition("ewr", "flights", 2)) is left.sink
        delivery.isolate(other, frozenset({second.target}))
        assert (left.pipelines, other.pipelines) == ({first}, {second})
        assert list(delivery.sinks) == [left.sink, other.sink]
        # What comes to the lane that was left does not find it blocked, before anything is committed there.
        third = assigned(2)
        assert third in left.pipelines
        assert left.isolated == frozenset()
        delivery.left(second)
        second.close()
        assert other.isolated == frozenset()
        assert assigned(3) in other.pipelines
        assert not running.done()
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(story())


def test_lane_waits_for_nothing_that_an_open_transaction_of_the_source_holds_back() -> None:
    """Its log ends behind what can be fetched."""
    lag = LagSamples()
    pipeline: Any = SimpleNamespace(state=State.RUNNING, lag=lag, progress=SimpleNamespace(fetch_offset=4))
    lag.sample(10, 0, 4)
    assert not transactional_lane._lags(pipeline)
    lag.sample(10, 0, 6)
    assert transactional_lane._lags(pipeline)
    lag.sample(10, 0)
    pipeline.progress.fetch_offset = 10
    assert not transactional_lane._lags(pipeline)
