"""A transactional lane that cannot commit: it holds up those alone that are the reason, and says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from millrace.broker.errors import AccessRefused, CoordinatorNotAvailable, NotEnoughReplicas
from millrace.mirror.delivery import lane_producer
from millrace.mirror.delivery.exactly_once import ExactlyOnce
from millrace.mirror.delivery.transaction import GIVE_UP_AFTER_MS, Seat
from millrace.mirror.delivery.transactional_lane import TransactionalLane
from millrace.mirror.gaps.gaps import GapClass
from millrace.mirror.pipeline import PartitionPipeline, State
from millrace.mirror.topics.routes import SourcePartition, TargetPartition
from millrace.mirror.troubles import LASTING_AFTER_MS
from tests import virtual_clock
from tests.unit.mirror.lane_stage import INTERVAL_MS, MIRROR, Target, carry, loop_ms, now_ms, position
from tests.unit.mirror.pipeline_stage import Around, answer, at, batch, pipeline_of

SILENT, GOOD, IDLE = (TargetPartition(name, 0) for name in ("silent", "good", "idle"))
EVERY_S = 0.5
WITHIN_MS = 300_000


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
        pipeline.ready(at(0))
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
    """Time jumps here, so what does not come within minutes costs none."""
    end_ms = now_ms() + WITHIN_MS
    while not holds():
        assert now_ms() < end_ms, "it never came"
        await asyncio.sleep(0.05)


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
        assert "silent-0" in reason
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


def test_positions_that_are_not_taken_are_told_of_whoever_waits_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(worker: Worker) -> None:
        good = worker.carries(GOOD)
        worker.takes(IDLE)
        await worker.gets_on(good)
        worker.target.own_refusal = NotEnoughReplicas.code
        await until(worker.told)
        ((_, since_ms),) = worker.told().values()
        await passes(LASTING_AFTER_MS)
        ((topic, (reason, told_ms)),) = worker.told().items()
        assert (topic, told_ms) == ("good", since_ms)
        assert ": not enough replicas" in reason
        worker.target.own_refusal = 0
        await worker.gets_on(good)
        assert worker.told() == {}

    with_worker(monkeypatch, story)


@pytest.mark.parametrize("step", ["init_producer_id", "add_group", "commit_offsets_as", "end_transaction"])
def test_step_that_is_refused_without_end_is_told(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = asyncio.Event()

    async def story(worker: Worker) -> None:
        let = getattr(lane_producer, step)

        async def refuse(*args: object, **named: object) -> object:
            if answers.is_set():
                return await let(*args, **named)
            await asyncio.sleep(1)
            raise CoordinatorNotAvailable("the coordinator is away")

        monkeypatch.setattr(lane_producer, step, refuse)
        good = worker.carries(GOOD)
        await until(worker.told)
        ((_, since_ms),) = worker.told().values()
        await passes(LASTING_AFTER_MS)
        reason, told_ms = worker.told()["good"]
        assert told_ms == since_ms and "the coordinator is away" in reason
        answers.set()
        await worker.gets_on(good)
        assert worker.told() == {}

    with_worker(monkeypatch, story)


@pytest.mark.parametrize(
    ("error", "helps"),
    [
        (CoordinatorNotAvailable("the coordinator is away"), True),
        (AccessRefused("target", "the login is refused"), False),
    ],
)
def test_at_least_once_is_offered_where_it_would_help(
    error: Exception, helps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(worker: Worker) -> None:
        async def refuse(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(lane_producer, "init_producer_id", refuse)
        worker.carries(GOOD)
        with capture_logs() as lines:
            await until(worker.told)
        said = [each["event"] for each in lines if "no producer id" in each["event"]]
        assert said and all(("delivery: at_least_once does without" in each) == helps for each in said)

    with_worker(monkeypatch, story)


def test_partition_that_has_left_for_another_lane_stands_until_it_is_committed_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(worker: Worker) -> None:
        worker.target.leaders[SILENT] = 2
        worker.target.silent = {2}
        worker.target.own_refusal = NotEnoughReplicas.code
        worker.carries(SILENT)
        good = worker.carries(GOOD)
        blocked = worker.lane_of(good)
        await until(lambda: worker.lane_of(good) is not blocked)
        since_ms = {failure.since_ms for _, failure in worker.delivery.standing()}
        assert sorted(worker.told()) == ["good", "silent"] and len(since_ms) == 1
        await passes(LASTING_AFTER_MS)
        assert {failure.since_ms for _, failure in worker.delivery.standing()} == since_ms
        worker.target.own_refusal = 0
        await worker.gets_on(good)
        assert list(worker.told()) == ["silent"]

    with_worker(monkeypatch, story)


def test_lane_that_blames_while_the_worker_ends_spoils_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It hears a turn later than the worker that it is over."""

    async def story() -> None:
        worker = Worker(monkeypatch)
        running = asyncio.create_task(worker.delivery.run())
        await asyncio.sleep(0)
        worker.delivery.seated(0, lambda: Seat("member", 1))
        silent, good = worker.takes(SILENT), worker.takes(GOOD)
        lane = worker.lane_of(silent)
        running.cancel()
        await asyncio.sleep(0)
        assert not running.done()
        worker.delivery.isolate(lane, frozenset({SILENT}))
        assert worker.lane_of(good) is not lane
        await asyncio.wait([running])
        assert running.cancelled()

    virtual_clock.run(story())


def test_partition_that_is_paused_stands_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(worker: Worker) -> None:
        good, other = worker.carries(GOOD), worker.carries(IDLE)
        await worker.gets_on(good)
        worker.target.own_refusal = NotEnoughReplicas.code
        await until(lambda: sorted(worker.told()) == ["good", "idle"])
        other.pause()
        await until(lambda: list(worker.told()) == ["good"])
        worker.target.own_refusal = 0
        await worker.gets_on(good)
        worker.target.own_refusal = NotEnoughReplicas.code
        begun_ms = now_ms()
        other.unpause()
        await until(lambda: sorted(worker.told()) == ["good", "idle"])
        assert worker.told()["idle"][1] >= begun_ms, "not since it stood before the pause"

    with_worker(monkeypatch, story)


def test_start_that_cannot_be_put_on_record_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(worker: Worker) -> None:
        worker.target.own_refusal = NotEnoughReplicas.code
        partition = SourcePartition("ewr", *GOOD)
        worker.delivery.began(pipeline_of(partition, GOOD, worker.delivery.sink_of(partition), worker.around))
        start = asyncio.create_task(worker.delivery.record_start(partition, position(0)))
        await until(worker.told)
        assert "millrace.positions.m-0: not enough replicas" in worker.told()["good"][0]
        worker.target.own_refusal = 0
        await start
        assert worker.told() == {}

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
