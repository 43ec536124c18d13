"""The time of day is set back by an hour: no rest and no limit of the mirror becomes an hour longer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.broker.client.raw_produce import ProduceOutcome
from millrace.broker.errors import KafkaStorageError, NotLeaderOrFollower
from millrace.broker.protocol.records import Record, build_batch
from millrace.mirror.config import GroupSyncConfig, parse_config
from millrace.mirror.delivery import sink as sink_module
from millrace.mirror.delivery.outgoing import Outgoing
from millrace.mirror.delivery.progress import Span
from millrace.mirror.delivery.sink import Sink
from millrace.mirror.offsets import group_sync
from millrace.mirror.offsets.group_sync import GroupPatterns, GroupSync, _Source
from millrace.mirror.sources import source as source_module
from millrace.mirror.steady import steady_ms
from millrace.mirror.topics.routes import SourcePartition, TargetPartition
from tests.unit.mirror import lane_stage
from tests.unit.mirror.lane_stage import Stage
from tests.unit.mirror.pipeline_stage import answer, batch, started
from tests.unit.mirror.source_stage import Source, answered, pipeline_at, reader_of, taken
from tests.unit.mirror.test_group_sync import settings
from tests.waiting import until_async as until

HOUR_MS = 3_600_000
EWR = SourcePartition("ewr", "flights", 0)
TARGET = TargetPartition("flights", 0)


class WallClock:
    """The time of day, which the test sets back."""

    def __init__(self) -> None:
        self.shift_ms = 0

    def __call__(self) -> int:
        return time.time_ns() // 1_000_000 + self.shift_ms


def test_a_lane_whose_coordinator_was_away_goes_on_in_time(monkeypatch: pytest.MonkeyPatch) -> None:

    async def story() -> None:
        wall = WallClock()
        monkeypatch.setattr(lane_stage, "now_ms", wall)
        async with Stage(monkeypatch) as stage:
            stage.target.away |= {"m.0", "m.0.b"}
            pipeline = stage.carries(EWR, TARGET)
            pipeline.accept(answer(batch(0, [9] * 10), end=10))
            await until(lambda: all(each._not_before_ms for each in stage.lane.rules.both))
            wall.shift_ms -= HOUR_MS
            stage.target.away.clear()
            await stage.fetches(pipeline, batch(0, [9] * 10), end=10)
            await until(lambda: EWR in stage.target.positions())
            told_ms = stage.target.positions()[EWR].at_ms
            assert abs(told_ms - wall()) < HOUR_MS // 2, "what is told has the time of day"

    asyncio.run(story())


def test_a_batch_that_failed_is_sent_again_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    wall = WallClock()
    sent: list[object] = []

    async def identity(*_: object) -> tuple[int, int]:
        return 1, 0

    async def produce(_cluster: object, _node: int, batches: dict[Any, Any], **_: object) -> Any:
        sent.append(batches)
        if len(sent) > 1:
            return dict.fromkeys(batches, ProduceOutcome(0, 0))
        asyncio.get_running_loop().call_soon(setattr, wall, "shift_ms", -HOUR_MS)
        return dict.fromkeys(batches, ProduceOutcome(NotLeaderOrFollower.code))

    async def metadata(*_: object, **__: object) -> Any:
        return SimpleNamespace(leader=lambda *_: 1)

    monkeypatch.setattr(sink_module, "init_producer_id", identity)
    monkeypatch.setattr(sink_module, "produce", produce)

    async def story() -> None:
        cluster: Any = SimpleNamespace(
            metadata=metadata, invalidate=lambda: None, close_purpose=lambda _: None
        )
        delivered: list[int] = []
        owner: Any = SimpleNamespace(delivered=lambda _outgoing, _offset, now_ms, _: delivered.append(now_ms))
        sink = Sink(cluster, wall)
        made = memoryview(build_batch([Record(b"k", b"v", (), 1)]))
        running = asyncio.create_task(sink.run())
        sink.enqueue(TARGET, Outgoing(made, [0], Span(0, 1, 1, len(made), -1), owner, 0, "seen"))
        await until(lambda: bool(delivered))
        assert abs(delivered[0] - wall()) < HOUR_MS // 2, "the latency is measured by the time of day"
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(story())
    assert len(sent) == 2


@pytest.mark.parametrize("error", [NotLeaderOrFollower, KafkaStorageError])
def test_a_refused_fetch_rests_by_the_steady_clock(error: Any) -> None:
    pipeline = pipeline_at(40)
    asyncio.run(taken(reader_of(Source(), WallClock()), pipeline, answered(error.code)))
    assert 0 < pipeline.retry_at_ms <= steady_ms() + source_module.ERROR_PAUSE_MS


def test_a_damaged_batch_is_fetched_again_by_the_steady_clock() -> None:
    async def story() -> None:
        pipeline, _, around = started()
        around.now_ms = WallClock()
        damaged = batch(0, [9])
        damaged[-1] ^= 1
        pipeline.accept(answer(damaged))
        assert not pipeline.wants_fetch(steady_ms(), 1 << 20)
        assert pipeline.wants_fetch(steady_ms() + 1_000, 1 << 20)

    asyncio.run(story())


def test_log_ends_that_were_seen_later_than_now_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    wall = WallClock()
    asked: list[list[object]] = []
    pipeline = pipeline_at(40)
    pipeline.lag.sample(55, wall())
    wall.shift_ms -= HOUR_MS

    async def sample_ends(pipelines: list[object], _view: object) -> None:
        asked.append(pipelines)

    async def story() -> None:
        reader = reader_of(Source(), wall)
        config: Any = SimpleNamespace(max_wait_ms=1)
        monkeypatch.setattr(source_module, "SAMPLE_INTERVAL_MS", 1)
        monkeypatch.setattr(reader, "_fetch_config", config)
        monkeypatch.setattr(reader, "_pipelines", {("t", 0): pipeline})
        monkeypatch.setattr(reader, "view", object())
        monkeypatch.setattr(reader._logs, "sample_ends", sample_ends)
        keeping = asyncio.create_task(reader._keep_log_ends())
        await until(lambda: bool(asked))
        keeping.cancel()
        await asyncio.wait([keeping])

    asyncio.run(story())
    assert asked[0] == [pipeline]


def test_groups_are_synced_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    steady_s = 0.0
    rounds: list[object] = []

    async def sync_source(source: object) -> None:
        rounds.append(source)

    async def story() -> None:
        nonlocal steady_s
        cluster: Any = SimpleNamespace(name="ewr")
        config = parse_config(settings(include=[".*"]))
        stands_still: Callable[[], int] = lambda: 1_000  # noqa: E731
        sync = GroupSync(cluster, stands_still, lambda: True, lambda: (config, {}), lambda: steady_s)
        sync._sources = [_Source("ewr", cluster, GroupPatterns(GroupSyncConfig(include=(".*",))), 500)]
        monkeypatch.setattr(group_sync, "CHECK_PAUSE_S", 0.001)
        monkeypatch.setattr(sync, "_take_settings", lambda: None)
        monkeypatch.setattr(sync, "_sync_source", sync_source)
        running = asyncio.create_task(sync.run())
        await until(lambda: len(rounds) == 1)
        steady_s = 0.5
        await until(lambda: len(rounds) == 2)
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(story())
