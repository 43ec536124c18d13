"""A transactional lane that cannot commit: it holds up those alone that are the reason, and says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.mirror.delivery.exactly_once import ExactlyOnce
from millrace.mirror.delivery.transaction import GIVE_UP_AFTER_MS, Seat
from millrace.mirror.delivery.transactional_lane import TransactionalLane
from millrace.mirror.gaps.gaps import GapClass
from millrace.mirror.pipeline import PartitionPipeline, State
from millrace.mirror.topics.routes import SourcePartition, TargetPartition
from millrace.mirror.troubles import LASTING_AFTER_MS
from tests import virtual_clock
from tests.unit.mirror.lane_stage import INTERVAL_MS, MIRROR, Target, carry, loop_ms, now_ms
from tests.unit.mirror.pipeline_stage import ORIGIN, Around, answer, batch, pipeline_of
from tests.waiting import until_async

SILENT, GOOD = TargetPartition("silent", 0), TargetPartition("good", 0)
EVERY_S = 0.5


class Worker:
    """Exactly once over a scripted target, one lane to begin with; sources that never end."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.target = Target(patch)
        cluster: Any = self.target
        config: Any = SimpleNamespace(name=MIRROR, lanes=1, group_id="g", position_interval_ms=INTERVAL_MS)
        self.delivery = ExactlyOnce(config, cluster, self.target.keeper(), now_ms, steady_ms=loop_ms)
        self.around = Around(GapClass.TOO_LARGE)
        self.pipelines: list[PartitionPipeline] = []

    def carries(self, target: TargetPartition) -> PartitionPipeline:
        """A record each `EVERY_S`, as long as what was fetched gets through."""
        pipeline = self.takes(target)
        self.pipelines.append(pipeline)
        return pipeline

    def takes(self, target: TargetPartition) -> PartitionPipeline:
        partition = SourcePartition("ewr", *target)
        pipeline = pipeline_of(partition, target, self.delivery.sink_of(partition), self.around)
        self.delivery.began(pipeline)
        pipeline.ready(0, -1, ORIGIN)
        return pipeline

    def lane_of(self, pipeline: PartitionPipeline) -> TransactionalLane:
        (lane,) = (each for each in self.delivery._lanes if pipeline in each.pipelines)
        return lane

    def told(self) -> dict[str, tuple[str, int]]:
        """Why, and since when, by topic."""
        return {partition.topic: tuple(failure) for partition, failure in self.delivery.standing()}

    async def gets_on(self, pipeline: PartitionPipeline) -> None:
        """Returns when more of it is committed than now."""
        position = pipeline.progress.position
        await until(lambda: pipeline.progress.position > position)


async def until(holds: Callable[[], object]) -> None:
    await until_async(holds, every_s=0.05)


async def passes(ms: int) -> None:
    """Time, in which everything goes on as it does."""
    end_ms = now_ms() + ms
    await until(lambda: now_ms() >= end_ms)


def with_worker(patch: pytest.MonkeyPatch, story: Callable[[Worker], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        worker = Worker(patch)
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(worker.delivery.run()),
                tasks.create_task(carry(lambda: worker.pipelines, EVERY_S)),
            ]
            await asyncio.sleep(0)
            worker.delivery.seated(0, lambda: Seat("member", 1))
            await story(worker)
            for task in running:
                task.cancel()

    virtual_clock.run(whole())


def test_leader_that_answers_nothing_holds_up_its_own_partitions_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(worker: Worker) -> None:
        worker.target.leaders[SILENT] = 2
        silent, good = worker.carries(SILENT), worker.carries(GOOD)
        await worker.gets_on(silent)
        worker.target.silent = {2}
        await until(lambda: worker.lane_of(good) is not worker.lane_of(silent))
        blocked, (reason, since_ms) = worker.lane_of(silent), worker.told()["silent"]
        assert blocked.isolated == {SILENT}
        assert "does not acknowledge" in reason
        await worker.gets_on(good)
        # Nobody writes the marker, so neither id goes on; its partition stays all the same.
        await until(lambda: blocked.is_stuck)
        await passes(LASTING_AFTER_MS + GIVE_UP_AFTER_MS)
        assert worker.lane_of(silent) is blocked and blocked.pipelines == {silent}
        assert len(worker.delivery.sinks) == 2
        await worker.gets_on(good)
        assert list(worker.told()) == ["silent"] and worker.told()["silent"][1] == since_ms
        worker.target.silent = set()
        await worker.gets_on(silent)
        assert worker.told() == {} and not blocked.isolated

    with_worker(monkeypatch, story)


def test_skipped_gap_whose_event_is_not_taken_holds_up_its_own_partition_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What stands behind the refused record is acknowledged, so no position can be written."""

    async def story(worker: Worker) -> None:
        worker.target.data_limit = 60_000
        worker.around.may_record.clear()
        refused, good = worker.takes(SILENT), worker.carries(GOOD)

        async def fetch() -> None:
            while True:
                if refused.state is State.RUNNING and refused.progress.fetch_offset == 0:
                    refused.accept(answer(batch(0, [70_000]), batch(1, [40_000]), end=2))
                await asyncio.sleep(EVERY_S)

        source = asyncio.create_task(fetch())
        await until(lambda: worker.lane_of(good) is not worker.lane_of(refused))
        assert worker.lane_of(refused).isolated == {SILENT}
        since_ms = worker.told()["silent"][1]
        await worker.gets_on(good)
        await passes(LASTING_AFTER_MS)
        # Again and again what stands behind it is acknowledged: that is no end of it.
        ((topic, (reason, told_ms)),) = worker.told().items()
        assert (topic, told_ms) == ("silent", since_ms) and "the event of a gap" in reason
        assert worker.target.carried(SILENT) == []
        worker.around.may_record.set()
        await until(lambda: refused.progress.position == 2)
        assert worker.told() == {}
        assert worker.target.carried(SILENT) == [b"x" * 40_000]
        source.cancel()

    with_worker(monkeypatch, story)


def test_refusal_is_over_where_its_partition_has_left_for_another_lane(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No batch of it will be acknowledged there, and whoever looks would be told for ever."""

    async def story(worker: Worker) -> None:
        silent, good = worker.carries(SILENT), worker.carries(GOOD)
        left = worker.lane_of(good)
        await worker.gets_on(silent)
        left.sink.failures.failed(GOOD, "it is refused", now_ms())
        left.sink.failures.failed(SILENT, "it is refused", now_ms())
        worker.delivery.isolate(left, frozenset({SILENT}))
        assert worker.lane_of(good) is not left
        assert [target for target, _ in left.sink.failures] == [SILENT]

    with_worker(monkeypatch, story)
