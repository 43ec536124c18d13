"""Where a source's log begins for the mirror, and where it ends as far as is known."""

from __future__ import annotations

import asyncio
from typing import Any, cast
from uuid import UUID

import pytest

from millrace.broker.client.metadata import NO_TOPIC_ID
from millrace.broker.protocol.mirror_positions import Position
from millrace.mirror.delivery.beginnings import Start
from millrace.mirror.gaps.gaps import GapClass
from millrace.mirror.gaps.open_gaps import Origin
from millrace.mirror.pipeline import PartitionPipeline, State
from millrace.mirror.sources.source_logs import SourceLogs
from millrace.mirror.topics.routes import SourcePartition, TargetPartition
from tests.unit.mirror import pipeline_stage as stages
from tests.unit.mirror.source_stage import NEW, OLD, Source, logs_of, pipeline_at


def begun(source: Source, known: Position, **more: Any) -> Any:
    pipeline = pipeline_at(0, state=State.STARTING)

    def ready(start: Position) -> None:
        pipeline.began = (start.next_offset, start.leader_epoch, Origin.of(start))
        pipeline.first, pipeline.epoch_from = start.began, start.epoch_from
        pipeline.state = State.RUNNING

    pipeline.ready = ready
    asyncio.run(logs_of(source).begin(pipeline, known, is_lost=False, start=Start("latest")))
    return pipeline


def test_position_of_another_topic_is_a_gap_up_to_the_end_that_was_known() -> None:
    pipeline = begun(Source(NEW, earliest=3), Position(40, "c", OLD, 2, 0, 55, 900))
    assert pipeline.began == (40, 2, Origin("c", OLD))
    assert pipeline.gaps == [("recreated", 55, {"resume_at": 0, "origin": Origin("c", NEW)})]


def test_what_retention_took_of_a_topic_made_anew_is_a_gap_of_its_own() -> None:
    """Its first records came and went while the mirror was away: they are on record as never carried."""
    source = Source(NEW, earliest=3)
    pipeline = begun(source, Position(40, "c", OLD, 2, 0, 55, 900))
    ((_, _, behind),) = pipeline.gaps
    pipeline.progress.fetch_offset, pipeline.origin, pipeline.gaps = behind["resume_at"], behind["origin"], []
    pipeline.at_gap = lambda kind, to, _reason, **rest: pipeline.gaps.append((kind.value, to, rest))
    asyncio.run(logs_of(source).explain(pipeline))  # the source does not know that offset
    assert pipeline.gaps == [("expired", 3, {"resume_at": 3})]


def test_end_of_the_log_is_known_from_the_beginning() -> None:
    """It may be gone before the first fetch."""
    recorded: list[Position] = []

    async def record(_partition: SourcePartition, position: Position) -> None:
        recorded.append(position)

    pipeline = pipeline_at(0, state=State.STARTING)
    pipeline.ready = lambda *_: setattr(pipeline, "state", State.RUNNING)
    source: Any = Source(latest=100)
    logs = SourceLogs("ewr", source, lambda: 5_000, record)
    asyncio.run(logs.begin(pipeline, None, is_lost=False, start=Start("earliest")))
    assert [(each.next_offset, each.log_end) for each in recorded] == [(0, 100)]
    assert pipeline.lag.log_end == 100
    # Known already, and grown since: what was on record is not the last that is known.
    assert begun(Source(latest=100), Position(40, "c", OLD, 2, 0, 55, 900)).lag.log_end == 100
    assert begun(Source(NEW, latest=3), Position(40, "c", OLD, 2, 0, 55, 900)).lag.log_end == 55


def test_a_position_keeps_the_place_where_the_mirroring_began() -> None:
    """Whoever reads positions must know that nothing of what was there before was carried."""
    recorded: list[Position] = []

    async def record(_partition: SourcePartition, position: Position) -> None:
        recorded.append(position)

    pipeline = pipeline_at(0, state=State.STARTING)
    pipeline.ready = lambda *given: setattr(pipeline, "state", State.RUNNING)
    source: Any = Source(latest=100)
    logs = SourceLogs("ewr", source, lambda: 5_000, record)
    asyncio.run(logs.begin(pipeline, None, is_lost=False, start=Start("latest")))
    assert [(each.next_offset, each.began) for each in recorded] == [(100, 100)]
    assert begun(source, Position(100, "c", OLD, 2, 0, began=40)).first == 40


def test_a_topic_that_was_made_anew_before_it_was_begun_is_a_gap_and_the_old_one_is_on_record_first() -> None:
    """So whoever comes after a crash between the two meets the same gap, wherever a first run would begin."""
    for at in ("latest", "earliest", 5_000):
        recorded: list[Position] = []

        async def record(_: SourcePartition, position: Position, recorded: list[Position] = recorded) -> None:
            recorded.append(position)

        where, target = SourcePartition("ewr", "t", 0), TargetPartition("t", 0)
        around = stages.Around()
        pipeline = stages.pipeline_of(where, target, stages.Target(), around)
        source: Any = Source(NEW, latest=100)
        logs = SourceLogs("ewr", source, lambda: 5_000, record)
        asyncio.run(logs.begin(pipeline, None, is_lost=False, start=Start(at, OLD)))
        (first,) = recorded
        assert first == Position(0, "c", OLD, -1, 5_000, began=0, targets=(("t", 0),))
        assert pipeline.state is State.STOPPED
        gap = pipeline.gap
        assert gap is not None and (gap.gap_class, gap.from_offset, gap.to_offset, gap.topic_id) == (
            GapClass.RECREATED,
            0,
            0,
            str(OLD),
        )
        assert begun(source, first).gaps == [("recreated", 0, {"resume_at": 0, "origin": Origin("c", NEW)})]


@pytest.mark.parametrize("owed", [NEW, NO_TOPIC_ID])
def test_a_topic_that_is_still_the_one_that_was_seen_begins_at_the_start(owed: UUID) -> None:
    recorded: list[Position] = []

    async def record(_partition: SourcePartition, position: Position) -> None:
        recorded.append(position)

    pipeline = pipeline_at(0, state=State.STARTING)
    pipeline.ready = lambda *_: setattr(pipeline, "state", State.RUNNING)
    source: Any = Source(NEW, latest=100)
    logs = SourceLogs("ewr", source, lambda: 5_000, record)
    asyncio.run(logs.begin(pipeline, None, is_lost=False, start=Start("latest", owed)))
    assert [(each.next_offset, each.topic_id) for each in recorded] == [(100, NEW)] and not pipeline.gaps


def test_a_position_tells_the_next_owner_where_its_epoch_began() -> None:
    assert begun(Source(latest=100), Position(100, "c", OLD, 2, 0, epoch_from=40)).epoch_from == 40


def test_position_without_an_id_takes_the_one_that_the_source_has_by_now_and_puts_it_on_record() -> None:
    """Soon, though no record comes: a topic that is made anew later is told by it."""

    def began(source: Source, known: Position) -> PartitionPipeline:
        where, target = SourcePartition("ewr", "t", 0), TargetPartition("t", 0)
        pipeline = stages.pipeline_of(where, target, stages.Target(), stages.Around())
        asyncio.run(logs_of(source).begin(pipeline, known, is_lost=False, start=Start("latest")))
        assert (pipeline.state, pipeline.origin.cluster_id) == (State.RUNNING, "c")
        assert (pipeline.progress.fetch_offset, pipeline.progress.fetched_leader_epoch) == (40, 2)
        return pipeline

    pipeline = began(Source(NEW), Position(40, "c", NO_TOPIC_ID, 2, 0))
    assert (pipeline.origin.topic_id, pipeline.runs.topic_id) == (NEW, NEW)
    written = pipeline.position_to_write(0)
    assert written is not None and (written.next_offset, written.topic_id) == (40, NEW)
    pipeline = began(Source(NO_TOPIC_ID), Position(40, "c", OLD, 2, 0, targets=(("t", 0),)))
    assert (pipeline.origin.topic_id, pipeline.position_to_write(0)) == (OLD, None)


def test_position_tells_where_the_records_went_and_idle_partitions_say_it_too() -> None:
    """Names change, and a source may leave the config at any time: then nobody else knows."""

    def written(*told: TargetPartition, start: TargetPartition) -> Position | None:
        where = SourcePartition("ewr", "t", 0)
        pipeline = stages.pipeline_of(where, start, stages.Target(), stages.Around())
        known = Position(40, "c", NEW, 2, 0, targets=told)
        asyncio.run(logs_of(Source(NEW)).begin(pipeline, known, is_lost=False, start=Start("latest")))
        assert pipeline.runs.target == start
        return pipeline.position_to_write(0)

    old, new = TargetPartition("t", 0), TargetPartition("agg.t", 3)
    for told, start, wanted in (((), old, (old,)), ((old,), new, (old, new))):
        position = written(*told, start=start)
        assert position is not None and (position.next_offset, position.targets) == (40, wanted)
    assert written(old, start=old) is None
    assert written(old, new, start=old) is None, "it is on record that it went there"
    made_anew = Position(40, "c", OLD, 2, 0, targets=(new,))
    assert begun(Source(NEW), made_anew).origin.topic_id == OLD, "it waits at a gap, and nothing goes there"


def test_first_position_tells_where_the_records_will_go() -> None:
    recorded: list[Position] = []

    async def record(_partition: SourcePartition, position: Position) -> None:
        recorded.append(position)

    where, target, source = SourcePartition("ewr", "t", 0), TargetPartition("agg.t", 3), Source(latest=100)
    pipeline = stages.pipeline_of(where, target, stages.Target(), stages.Around())
    logs = SourceLogs("ewr", cast(Any, source), lambda: 5_000, record)
    asyncio.run(logs.begin(pipeline, None, is_lost=False, start=Start("earliest")))
    assert ([each.targets for each in recorded], pipeline.position_to_write(0)) == ([(target,)], None)


def test_retry_at_a_recreated_log_still_knows_how_much_the_old_one_held() -> None:
    pipeline = begun(Source(NEW), Position(40, "c", OLD, 2, 0, 55, 900))
    pipeline.progress.fetch_offset, pipeline.gaps[:] = 40, []
    asyncio.run(logs_of(Source(NEW)).explain(pipeline_of(pipeline, OLD)))
    assert pipeline.gaps == [("recreated", 55, {"resume_at": 0, "origin": Origin("c", NEW)})]


def pipeline_of(pipeline: Any, topic_id: UUID) -> Any:
    pipeline.origin = Origin("c", topic_id)
    return pipeline


def test_waiting_goes_on_where_the_last_owner_left_it() -> None:
    pipeline = begun(Source(), Position(40, "c", OLD, 2, 0, 55, 900))
    pipeline.lag.sample(100, 5_000)
    assert pipeline.lag.seconds_behind(40, 5_900) == 5.0


def test_log_ends_are_noted_of_this_log_alone() -> None:
    source = Source(OLD, latest=70)
    mine, of_the_namesake = pipeline_at(40), pipeline_at(40, topic_id=NEW)
    asyncio.run(logs_of(source).sample_ends([mine, of_the_namesake], source.view()))
    assert (mine.lag.log_end, mine.lag.sampled_at_ms) == (70, 5_000)
    assert of_the_namesake.lag.log_end == -1


def test_log_end_of_a_topic_made_again_since_the_last_look_is_not_taken_for_this_logs() -> None:
    source = Source(NEW, latest=4)
    before = Source(OLD).view()
    pipeline = pipeline_at(40)
    pipeline.lag.sample(70, 4_000)
    asyncio.run(logs_of(source).sample_ends([pipeline], before))
    assert pipeline.lag.log_end == 70


def test_source_that_does_not_answer_for_a_log_end_costs_only_the_sample() -> None:
    source = Source()
    source.failing = True
    pipeline = pipeline_at(40)
    asyncio.run(logs_of(source).sample_ends([pipeline], source.view()))
    assert pipeline.lag.log_end == -1
