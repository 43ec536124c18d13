"""Fetches of very many partitions: others have their turn, and garbage is left alone meanwhile."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.broker.errors import (
    ProtocolError,
)
from millrace.broker.protocol import hot_fetch
from millrace.broker.protocol.hot_fetch import PartitionFetch
from millrace.broker.replication import off_loop
from millrace.broker.server.context import ConnectionMemory
from millrace.broker.server.handlers import fetch
from tests.unit.server.fetch_stage import MAX_WAIT_MS, VERSION, batch, decoded, frame_of, serving
from tests.waiting import patience, until_async


def _ask_many(services: Any, count: int, *, min_bytes: int = 1, max_wait_ms: int = MAX_WAIT_MS) -> Any:
    asked = [PartitionFetch("t", number, 0, 1 << 20) for number in range(count)]
    request = hot_fetch.FetchRequest(max_wait_ms, min_bytes, 1 << 20, False, asked)
    head, frame, position = frame_of(hot_fetch.encode_request(VERSION, 1, "raw", request))
    context: Any = SimpleNamespace(broker=services, memory=ConnectionMemory())
    return fetch.handle_frame(head, frame, position, context)


class Turns:
    """What `read_now` is called with, and in which turn of the loop; `before_read` is told of each."""

    def __init__(self, services: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: list[tuple[int, int]] = []
        self.before_read: Callable[[int], None] = lambda _partition: None
        self._number = 0
        self._read_now = services.replica_manager.read_now
        monkeypatch.setattr(services.replica_manager, "read_now", self._reading)
        monkeypatch.setattr(fetch, "MOST_AT_ONCE", 2)
        monkeypatch.setattr(off_loop, "TURN_SECONDS", -1.0)
        self._next()

    def _next(self) -> None:
        self._number += 1
        asyncio.get_running_loop().call_soon(self._next)

    def _reading(self, topic: str, partition: int, *arguments: Any, **named: Any) -> Any:
        self.read.append((partition, self._number))
        self.before_read(partition)
        return self._read_now(topic, partition, *arguments, **named)


def test_others_have_their_turn_while_very_many_partitions_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, partitions=4) as services:
            turns = Turns(services, monkeypatch)
            services.replica_manager.append_now("t", 3, batch(), 1)
            services.replica_manager._partitions["t", 3].replica.high_watermark = 1
            answer = _ask_many(services, 4)
            response = decoded(await asyncio.wait_for(answer, patience()))
            assert [partition for partition, _ in turns.read] == [0, 1, 2, 3]
            assert len({turn for _, turn in turns.read}) == 4
            assert [len(part.records) > 0 for part in response.partitions] == [False, False, False, True]

    asyncio.run(scenario())


def test_what_comes_while_very_many_partitions_are_read_is_found_and_costs_no_second_reading_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partition gets a record right after it was read, and another, that nobody asked for, all the time."""

    async def scenario() -> None:
        async with serving(tmp_path, partitions=5) as services:
            turns = Turns(services, monkeypatch)

            def append(partition: int) -> None:
                services.replica_manager.waiting_fetches.appended(("t", 4), 1)
                if partition == 2:
                    local = services.replica_manager._partitions["t", 1]
                    services.replica_manager.append_now("t", 1, batch(), 1)
                    local.replica.high_watermark = local.log.end_offset
                    services.replica_manager.waiting_fetches.appended(("t", 1), 1)

            turns.before_read = append
            response = decoded(await asyncio.wait_for(_ask_many(services, 4), patience()))
            assert [len(part.records) > 0 for part in response.partitions] == [False, True, False, False]
            assert [partition for partition, _ in turns.read] == [0, 1, 2, 3, 1]
            assert services.metrics.fetch_waits == 0

    asyncio.run(scenario())


def test_very_many_partitions_with_less_than_was_asked_for_are_waited_with_and_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, partitions=4) as services:
            turns = Turns(services, monkeypatch)
            services.replica_manager.append_now("t", 0, batch(), 1)
            services.replica_manager._partitions["t", 0].replica.high_watermark = 1
            turns.before_read = lambda _: services.replica_manager.waiting_fetches.appended(("u", 0), 1)
            answer = _ask_many(services, 4, min_bytes=1_000)
            await until_async(lambda: services.metrics.fetch_waits)
            assert [partition for partition, _ in turns.read] == [0, 1, 2, 3]
            answer.cancel()

    asyncio.run(scenario())


def test_a_large_fetch_is_read_and_written_on_a_thread_while_its_connection_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[bool] = []

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            threads.append(threading.current_thread() is threading.main_thread())
            return original(*arguments, **named)

        return call

    for name in ("decode_request", "encode_response"):
        monkeypatch.setattr(fetch, name, noting(getattr(fetch, name)))
    monkeypatch.setattr(fetch, "MOST_AT_ONCE", 2)
    monkeypatch.setattr(fetch, "LARGEST_FRAME_AT_ONCE", 50)

    async def scenario() -> None:
        async with serving(tmp_path, partitions=4) as services:
            answer = _ask_many(services, 4, max_wait_ms=0)
            assert asyncio.iscoroutine(answer), "the next request of its session must wait"
            response = decoded(await (await answer))
            assert [part.partition for part in response.partitions] == [0, 1, 2, 3]
            assert threads == [False, False]

    asyncio.run(scenario())


class Garbage:
    """What a large fetch of four partitions does, and whether garbage is collected meanwhile."""

    def __init__(self, services: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[tuple[str, bool]] = []
        self._services = services
        monkeypatch.setattr(fetch, "MOST_AT_ONCE", 2)
        monkeypatch.setattr(fetch, "LARGEST_FRAME_AT_ONCE", 50)
        for name in ("decode_request", "_handle", "encode_response"):
            monkeypatch.setattr(fetch, name, self._noting(name, getattr(fetch, name)))
        monkeypatch.setattr(gc, "enable", self._noting("enable", gc.enable))
        replicas = services.replica_manager
        monkeypatch.setattr(replicas, "read_now", self._noting("read", replicas.read_now))

    def _noting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self.steps.append((name, gc.isenabled()))
            return original(*arguments, **named)

        return call

    async def ask(self, max_wait_ms: int = MAX_WAIT_MS) -> tuple[Any, Any]:
        """The answer to be, and what is under way, when the loop has begun with it."""
        answer = await _ask_many(self._services, 4, max_wait_ms=max_wait_ms)
        return answer, answer.get_coro().cr_frame.f_locals["fetch"]

    def append(self) -> None:
        replicas = self._services.replica_manager
        replicas.append_now("t", 3, batch(), 1)
        replicas._partitions["t", 3].replica.high_watermark = 1
        replicas.waiting_fetches.appended(("t", 3), 1)


async def _is_let_go(under_way: Any) -> None:
    await until_async(lambda: gc.isenabled() and not (under_way.asked or under_way.given or under_way.keys))


def test_garbage_is_left_alone_while_a_large_fetch_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its first byte until what it asked for and was given is let go of."""

    async def scenario() -> list[tuple[str, bool]]:
        async with serving(tmp_path, partitions=4) as services:
            monkeypatch.setattr(fetch, "LONGEST_WAIT_OF_LARGE_MS", MAX_WAIT_MS)
            garbage = Garbage(services, monkeypatch)
            answer, under_way = await garbage.ask()
            await until_async(lambda: services.metrics.fetch_waits)
            garbage.append()
            response = decoded(await asyncio.wait_for(answer, patience()))
            assert [len(part.records) > 0 for part in response.partitions] == [False, False, False, True]
            await _is_let_go(under_way)
            return garbage.steps

    steps = ["decode_request", "_handle", *["read"] * 5, "encode_response", "enable"]
    assert asyncio.run(scenario()) == [(step, False) for step in steps]


def test_a_large_fetch_is_answered_sooner_than_it_may_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For longer garbage could not be left alone."""

    async def scenario() -> None:
        async with serving(tmp_path, partitions=4) as services:
            monkeypatch.setattr(fetch, "LONGEST_WAIT_OF_LARGE_MS", 1)
            monkeypatch.setattr(fetch, "MOST_AT_ONCE", 3)
            response = decoded(await asyncio.wait_for(_ask_many(services, 4), patience()))
            assert len(response.partitions) == 4
            few = _ask_many(services, 3)
            await until_async(lambda: services.metrics.fetch_waits == 2)
            await asyncio.sleep(0.01)
            assert not few.done(), "a smaller one waits as long as it asks for"
            few.cancel()

    asyncio.run(scenario())


def test_what_a_large_fetch_holds_is_let_go_of_on_a_thread_also_when_its_client_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, partitions=4) as services:
            threads: list[bool] = []
            let_go = fetch._Fetch.let_go

            def noted(under_way: Any) -> None:
                threads.append(threading.current_thread() is threading.main_thread() or gc.isenabled())
                let_go(under_way)

            monkeypatch.setattr(fetch._Fetch, "let_go", noted)
            answer, under_way = await Garbage(services, monkeypatch).ask()
            await until_async(lambda: services.metrics.fetch_waits)
            answer.cancel()
            await _is_let_go(under_way)
            assert threads == [False]

    asyncio.run(scenario())


def test_a_fetch_that_is_read_for_very_long_has_garbage_collected_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it may be cold, and each partition wait for a disk."""

    async def scenario() -> list[tuple[str, bool]]:
        async with serving(tmp_path, partitions=4) as services:
            turns = Turns(services, monkeypatch)
            garbage = Garbage(services, monkeypatch)
            longest = "millrace.broker.telemetry.garbage.LONGEST_SECONDS"
            turns.before_read = lambda _partition: monkeypatch.setattr(longest, -1.0)
            answer, under_way = await garbage.ask(0)
            await answer
            await _is_let_go(under_way)
            return garbage.steps

    reads = [is_collected for step, is_collected in asyncio.run(scenario()) if step == "read"]
    assert reads[1:] == [True] * 3


def test_a_fetch_of_more_partitions_than_any_cluster_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot_fetch, "MOST_ITEMS", 3)
    of_two = [PartitionFetch(topic, number, 0, 1) for topic in ("t", "u") for number in range(2)]
    of_many = [PartitionFetch(f"t{number}", 0, 0, 1) for number in range(4)]
    for asked, is_refused in ((of_two[:3], False), (of_two, True), (of_many[:3], False), (of_many, True)):
        request = hot_fetch.FetchRequest(0, 1, 1, False, asked)
        _, frame, position = frame_of(hot_fetch.encode_request(VERSION, 1, "raw", request))
        with pytest.raises(ProtocolError) if is_refused else nullcontext():
            hot_fetch.decode_request(frame, position, VERSION)
