"""What a worker that ends says of the work that it could not hand over."""

from __future__ import annotations

import pytest

from millrace.mirror.handover import LEAVE_S, Handover, WorkLeft, drain_times, is_handed_over
from millrace.mirror.pipeline import PartitionPipeline
from millrace.mirror.topics.routes import SourcePartition, TargetPartition
from tests.unit.mirror.pipeline_stage import Around, Target, answer, at, batch, pipeline_of


def carried(number: int) -> tuple[PartitionPipeline, Target]:
    target = Target()
    partition = SourcePartition("ewr", "flights", number)
    pipeline = pipeline_of(partition, TargetPartition("flights", number), target, Around())
    pipeline.ready(at(0))
    return pipeline, target


def test_handed_over_is_what_is_acknowledged_and_on_record() -> None:
    pipeline, target = carried(0)
    assert is_handed_over(pipeline), "nothing was carried"
    pipeline.accept(answer(batch(0, [9, 9]), end=2))
    assert not is_handed_over(pipeline)
    target.acknowledge()
    assert not is_handed_over(pipeline), "its position is not on record"
    position = pipeline.position_to_write(0)
    assert position is not None
    pipeline.position_written(position)
    assert is_handed_over(pipeline)
    pipeline.accept(answer(batch(2, [9]), end=3))
    pipeline.rewind(position)
    assert is_handed_over(pipeline), "what was under way is forgotten, and was never committed"


def test_one_line_names_what_is_left_and_what_becomes_of_it() -> None:
    handover = Handover()
    done, _ = carried(9)
    handover.gave_up(done)
    assert handover.work_left(20_000, "agg", "", "exactly_once") is None
    for number in range(5):
        pipeline, _ = carried(number)
        pipeline.accept(answer(batch(0, [9, 9]), end=2))
        handover.gave_up(pipeline)
        pipeline.close()
        handover.gave_up(pipeline)  # closed: somebody else's by now
    left = handover.work_left(20_000, "agg", "no server answers", "exactly_once")
    assert isinstance(left, WorkLeft)
    assert left.exit_status == 17
    assert "\n" not in str(left)
    assert "5 partitions (ewr/flights-0, ewr/flights-1, ewr/flights-2 and 2 more)" in str(left)
    assert "target agg did not take it within drain_timeout_ms 20000 (no server answers)" in str(left)
    assert str(left).endswith("nothing is lost, nothing is repeated")
    again = handover.work_left(20_000, "agg", "", "at_least_once")
    assert str(again).endswith("nothing is lost, some records will be repeated")


@pytest.mark.parametrize("drain_timeout_ms", [0, 1, 500, 3_000, 20_000, 600_000])
@pytest.mark.parametrize("limit_ms", [None, 5_000])
def test_everything_ends_within_the_drain_timeout(drain_timeout_ms: int, limit_ms: int | None) -> None:
    times = drain_times(drain_timeout_ms, limit_ms)
    assert 0 <= times.deliver_s <= times.record_s <= times.total_s
    assert times.total_s == max(drain_timeout_ms / 1000, LEAVE_S)
    assert limit_ms is None or times.record_s <= limit_ms / 1000
    if drain_timeout_ms >= 2 * LEAVE_S * 1000:
        assert times.record_s + LEAVE_S <= times.total_s, "there is time to leave the group"
