"""How a source is fetched from: what is asked for, over how many connections, from which leader, how fast."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.broker.client.raw_fetch import FetchPosition
from millrace.broker.errors import (
    RequestTimedOut,
)
from millrace.mirror.config import FetchConfig
from millrace.mirror.pipeline import State
from millrace.mirror.sources import source as source_module
from millrace.mirror.sources.doubt import Doubt
from millrace.mirror.sources.fetch_loop import CROWDED_WAIT_MS, FetchLoop, Way
from millrace.mirror.sources.fetch_memory import MIN_FETCH_SIZE, FetchBudget
from millrace.mirror.sources.source import SourceReader
from millrace.mirror.steady import steady_ms
from millrace.mirror.topics.routes import SourcePartition
from tests import virtual_clock
from tests.unit.mirror.source_stage import NEW, OLD, Source, answered, pipeline_at, reader_of, with_records
from tests.waiting import until_async as until


def test_fetches_name_the_log_that_the_position_is_of() -> None:
    reader = reader_of(Source(NEW))
    loop = FetchLoop(reader._budget)
    loop.partitions["t", 0] = pipeline_at(40, epoch=3)
    positions, _ = loop.positions(1 << 20, steady_ms())
    assert positions == {("t", 0): FetchPosition(40, -1, 3, OLD)}


def test_partition_that_needs_more_of_an_answer_is_asked_for_alone_and_gets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[set[int], int, int]] = []

    async def fetch(
        _cluster: object, _node: int, positions: Any, *, max_bytes: int, partition_max_bytes: int, **_: object
    ) -> Any:
        asked.append(({number for _, number in positions}, max_bytes, partition_max_bytes))
        raise asyncio.CancelledError

    monkeypatch.setattr(source_module, "fetch", fetch)
    reader = reader_of(Source())
    loop = FetchLoop(reader._budget)
    for number in range(4):
        needed_size = 9 << 20 if number == 2 else 0
        loop.partitions["t", number] = pipeline_at(40, doubt=Doubt(40, needed_size=needed_size))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(reader._fetch_from(Way(1, 0), loop))
    assert asked == [({2}, 9 << 20, 9 << 20)]


def test_partition_that_needs_more_of_an_answer_leaves_every_second_one_to_the_others() -> None:
    reader = reader_of(Source())
    loop = FetchLoop(reader._budget)
    for number in range(4):
        needed_size = 70_000 if number in (1, 2) else 0
        loop.partitions["t", number] = pipeline_at(10, doubt=Doubt(10, needed_size=needed_size))
    rounds = [[number for _, number in loop.positions(1 << 20, steady_ms())[0]] for _ in range(16)]
    assert all(sorted(asked) == [0, 3] for asked in rounds[1::2])
    assert {asked[0] for asked in rounds[1::2]} == {0, 3}, "each is first in its turn"
    assert all(len(asked) == 1 for asked in rounds[::2])
    assert {asked[0] for asked in rounds[::2]} == {1, 2}


@pytest.mark.parametrize(
    ("left_ms", "stands", "limit_ms"),
    [
        (0, False, CROWDED_WAIT_MS),  # it waits for room, which may come at any moment
        (0, True, None),  # its target takes nothing, which may last
        (3, False, 3),
        (300, False, 300),
        (300, True, 300),
    ],
)
def test_partition_that_is_not_asked_for_shortens_the_others_wait_as_far_as_it_must(
    monkeypatch: pytest.MonkeyPatch, left_ms: int, stands: bool, limit_ms: int | None
) -> None:
    """A source that holds no answer back is asked fifty times a second, for nothing."""
    waits: list[int] = []

    async def fetch(*_: object, max_wait_ms: int, **__: object) -> Any:
        waits.append(max_wait_ms)
        raise asyncio.CancelledError

    monkeypatch.setattr(source_module, "fetch", fetch)
    monkeypatch.setattr(source_module, "steady_ms", lambda: 1_000)
    reader = reader_of(Source())
    loop = FetchLoop(reader._budget)
    loop.partitions["t", 0] = pipeline_at(40)
    other = {"wants_fetch": lambda *_: False, "stands": lambda *_: stands, "retry_at_ms": 1_000 + left_ms}
    for number in (1, 2):
        loop.partitions["t", number] = pipeline_at(40, **other)
    loop.partitions["t", 3] = pipeline_at(40, wants_fetch=lambda *_: False, state=State.PAUSED)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(reader._fetch_from(Way(1, 0), loop))
    assert waits == [FetchConfig().max_wait_ms if limit_ms is None else limit_ms]


def test_partitions_are_spread_over_a_brokers_connections_and_stay_where_they_are(monkeypatch) -> None:
    """A connection carries no more than a socket buffer in a round trip: several carry several times that."""
    asked: dict[str, set[tuple[str, int]]] = {}
    closed: list[tuple[str, int]] = []

    async def fetch(_cluster: object, node: int, positions: Any, *, purpose: str, **_: object) -> Any:
        assert node == 1
        asked.setdefault(purpose, set()).update(positions)
        await asyncio.sleep(0)
        return []

    async def story() -> None:
        reader = reader_of(Source())
        reader.cluster.close_purpose = lambda purpose, node: closed.append((purpose, node))
        reader.config.connections = 4
        budget = reader._budget
        async with asyncio.TaskGroup() as reader._tasks:
            reader.view = reader.cluster.view()
            for number in range(8):
                pipeline = pipeline_at(40)
                pipeline.partition = SourcePartition("ewr", "t", number)
                reader.add(pipeline)
            await until(lambda: sum(map(len, asked.values())) == 8)
            assert budget.loop_count == 4 and sorted(map(len, asked.values())) == [2, 2, 2, 2]
            before = {purpose: set(keys) for purpose, keys in asked.items()}
            asked.clear()
            reader.remove(reader._pipelines["t", 0])
            reader._place()
            assert {key for keys in before.values() for key in keys} == {("t", number) for number in range(8)}
            assert all(
                set(loop.partitions) == before[way.purpose] - {("t", 0)}
                for way, loop in reader._loops.items()
            )
            config: Any = SimpleNamespace(**vars(reader.config) | {"connections": 1})
            reader.reconfigure(config, FetchConfig(), 10)
            assert budget.loop_count == 1 and len(closed) == 3
            await until(
                lambda: any(keys == {("t", number) for number in range(1, 8)} for keys in asked.values())
            )
            for loop in reader._loops.values():
                assert loop.task is not None
                loop.task.cancel()

    monkeypatch.setattr(source_module, "fetch", fetch)
    asyncio.run(story())


def test_leader_that_moves_is_followed_while_the_target_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a look at the source brings is asked of the target, which may be away for long."""
    leader, fetched_from, looks = 1, set[int](), 0

    async def fetch(_cluster: object, node: int, *_: object, **__: object) -> Any:
        fetched_from.add(node)
        await asyncio.sleep(0.1)
        return []

    async def never(_reader: SourceReader) -> None:
        nonlocal looks
        looks += 1
        await asyncio.Event().wait()

    async def story() -> None:
        nonlocal leader
        source = Source()
        view = source.view
        source.view = lambda: SimpleNamespace(  # type: ignore[method-assign]
            cluster_id="c", topics=view().topics, leader=lambda *_: leader
        )
        reader = reader_of(source)
        reader._on_view = never
        reader.add(pipeline_at(40))
        running = asyncio.create_task(reader.run())
        await asyncio.sleep(10)
        assert fetched_from == {1}
        leader = 2
        await asyncio.sleep(10)
        assert fetched_from == {1, 2}
        assert looks == 1, "one at a time"
        assert reader.is_connected
        running.cancel()
        await asyncio.wait([running])

    monkeypatch.setattr(source_module, "fetch", fetch)
    virtual_clock.run(story())


@pytest.mark.parametrize("is_stuck", [True, False])
def test_partition_whose_leader_is_silent_or_gone_is_told_though_the_others_answer(
    monkeypatch: pytest.MonkeyPatch, is_stuck: bool
) -> None:
    """A broker that is stuck leads it, or none does."""
    is_well, answer_count = True, 0

    async def fetch(_cluster: object, node: int, positions: Any, **_: object) -> Any:
        nonlocal answer_count
        await asyncio.sleep(0)
        if node == 2 and is_stuck and not is_well:
            raise RequestTimedOut("no answer within 30000 ms")
        answer_count += 1
        return [replace(answered(), partition=number) for _, number in positions]

    async def story() -> None:
        nonlocal is_well
        source = Source()
        view = source.view
        source.view = lambda: SimpleNamespace(  # type: ignore[method-assign]
            cluster_id="c",
            topics=view().topics,
            leader=lambda _, number: number + 1 if number == 0 or is_well or is_stuck else None,
        )
        reader = reader_of(source)
        for number in range(2):
            pipeline = pipeline_at(100, partition=SourcePartition("ewr", "t", number))
            reader.add(pipeline)
        running = asyncio.create_task(reader.run())
        await until(lambda: answer_count > 4)
        assert list(reader.failures) == []
        is_well = False
        await until(lambda: reader.failures.get(("t", 1)) is not None)
        before = answer_count
        await until(lambda: answer_count > before + 4)
        ((key, failure),) = reader.failures
        assert key == ("t", 1)
        reason = "its leader does not answer: no answer" if is_stuck else "names no leader"
        assert reason in failure.reason
        is_well = True
        await until(lambda: list(reader.failures) == [])
        running.cancel()
        await asyncio.wait([running])

    monkeypatch.setattr(source_module, "fetch", fetch)
    asyncio.run(story())


def test_leader_that_does_not_answer_is_no_trouble_of_a_partition_that_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader, pipeline = reader_of(Source()), pipeline_at(40)

    async def fetch(*_: object, **__: object) -> Any:
        reader.remove(pipeline)
        raise RequestTimedOut("no answer within 30000 ms")

    async def story() -> None:
        async with asyncio.TaskGroup() as reader._tasks:
            reader.view = reader.cluster.view()
            reader.add(pipeline)
            (loop,) = reader._loops.values()
            assert loop.task is not None
            await until(reader._look_again.is_set)
            loop.task.cancel()

    monkeypatch.setattr(source_module, "fetch", fetch)
    asyncio.run(story())
    assert list(reader.failures) == []


def test_target_that_fails_is_asked_again_with_the_next_look(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, told = 0, list[list[str]]()

    async def on_view(reader: SourceReader) -> None:
        nonlocal looks
        looks += 1
        told.append([failure.reason for _, failure in reader.view_failures])
        if looks < 3:
            raise RequestTimedOut("the target is away")

    async def story() -> None:
        reader = reader_of(Source())
        reader._on_view = on_view
        running = asyncio.create_task(reader.run())
        await until(lambda: looks > 3)
        assert (reader.is_connected, reader.failure) == (True, None)
        reason = "no topic can be let in or prepared: the target is away"
        assert told[:4] == [[], [reason], [reason], []]
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(story())


def test_every_loop_may_fetch_and_a_source_that_goes_gives_its_share_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budget = FetchBudget(1 << 20)
    budget.loop_count = 2  # of another source

    async def fetch(*_: object, **__: object) -> Any:
        await asyncio.Event().wait()

    async def story() -> None:
        reader = reader_of(Source())
        reader._budget = budget
        reader.config.connections = 30
        for number in range(30):
            pipeline = pipeline_at(40)
            pipeline.partition = SourcePartition("ewr", "t", number)
            reader.add(pipeline)
        running = asyncio.create_task(reader.run())
        await until(lambda: budget.loop_count == 32)
        assert budget.share == 2 * MIN_FETCH_SIZE
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    monkeypatch.setattr(source_module, "fetch", fetch)
    asyncio.run(story())
    assert budget.loop_count == 2


def test_throttled_source_is_asked_for_less_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual clock: each fetch brings all that it asked for."""
    now_ms = 0
    sizes: list[tuple[int, int]] = []
    reader = reader_of(Source(), lambda: now_ms)
    reader.set_rate(200_000)

    async def fetch(_cluster: object, _node: int, positions: Any, *, max_bytes: int, **_: object) -> Any:
        sizes.append((now_ms, max_bytes))
        if len(sizes) == 20:
            raise asyncio.CancelledError
        return [with_records(bytes(max_bytes))]

    async def until_changed(_loop: object, limit_ms: int) -> None:
        nonlocal now_ms
        now_ms += limit_ms

    monkeypatch.setattr(source_module, "fetch", fetch)
    monkeypatch.setattr(FetchLoop, "until_changed", until_changed)
    loop = FetchLoop(reader._budget)
    loop.partitions["t", 0] = pipeline_at(40)

    async def story() -> None:
        await reader._fetch_from(Way(1, 0), loop)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(story())
    read = sum(size for _, size in sizes[:-1])
    assert abs(read / 200 - sizes[-1][0]) < 1_100, sizes
    assert max(size for _, size in sizes) <= 200_000
    reader.set_rate(None)
    assert reader._bucket.room(now_ms) is None
