"""When a waiting fetch is answered, what a quota and a wrong broker make of it."""

from __future__ import annotations

import asyncio
import gc
import threading
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.coordination.paths import BrokerRegistration, TopicAssignment
from millrace.broker.errors import (
    FencedLeaderEpoch,
    InconsistentTopicId,
    NotLeaderOrFollower,
    ProtocolError,
    UnknownTopicId,
)
from millrace.broker.protocol import hot_fetch, hot_produce
from millrace.broker.protocol.control_records import build_marker
from millrace.broker.protocol.frames import decode_request
from millrace.broker.protocol.hot_fetch import PartitionFetch
from millrace.broker.protocol.records import Record, build_batch
from millrace.broker.replication import off_loop
from millrace.broker.replication.partition import PartitionState
from millrace.broker.replication.replica_manager import ReplicaManager
from millrace.broker.server.dispatch import Throttled
from millrace.broker.server.fetch_sessions import FetchSessionCache
from millrace.broker.server.handlers import fetch, produce
from millrace.broker.server.memory_limits import UNBOUNDED, AnswerBacklog
from millrace.broker.server.quotas import ClientQuotas
from millrace.broker.storage import segment
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.log_manager import LogManager
from millrace.broker.telemetry.metrics import BrokerMetrics
from tests.waiting import patience, until_async

VERSION = 12
MAX_WAIT_MS = 3_600_000
"""Longer than any test: what is answered was not waited for in vain."""


def _frame(request: bytes | bytearray) -> tuple[Any, memoryview, int]:
    frame = memoryview(bytearray(request))[4:]
    return decode_request(frame)[0], frame, decode_request(frame)[1]


def _ask(
    services: Any,
    *,
    min_bytes: int = 1,
    max_wait_ms: int = MAX_WAIT_MS,
    version: int = VERSION,
    session: tuple[int, int] = (0, -1),
    offsets: tuple[int, ...] = (0,),
    read_committed: bool = False,
) -> Any:
    """`session`: its id, and the epoch of this request in it. `offsets`: the partition stands there once for
    each."""
    asked = tuple(PartitionFetch("t", 0, offset, 1 << 20) for offset in offsets)
    session_id, epoch = session
    request = hot_fetch.FetchRequest(
        max_wait_ms, min_bytes, 1 << 20, read_committed, asked, session_id=session_id, session_epoch=epoch
    )
    head, frame, position = _frame(hot_fetch.encode_request(version, 1, "raw", request))
    context: Any = SimpleNamespace(broker=services)
    return fetch.handle_frame(head, frame, position, context)


def _decoded(buffers: Any, version: int = VERSION) -> hot_fetch.FetchResponse:
    return hot_fetch.decode_response(memoryview(b"".join(buffers))[4:], version)


def _batch(value: bytes = b"v") -> memoryview:
    return memoryview(build_batch([Record(b"k", value, (), 1)]))


@asynccontextmanager
async def _broker(
    folder: Path, *, leader: int = 1, largest_answer: int = 1 << 20, partitions: int = 1
) -> AsyncIterator[Any]:
    """The services of broker 1, which has a replica of t-0; with more `partitions`, so has broker 2, which
    is not in sync."""
    logs = LogManager([folder], LogConfig())
    logs.start(0)
    metrics = BrokerMetrics()
    replicas = ReplicaManager(
        1, logs, LogConfig(), clock_ms=lambda: 0, is_known=lambda *_: True, metrics=metrics
    )
    services = SimpleNamespace(
        replica_manager=replicas,
        metrics=metrics,
        metadata_cache=MetadataCache(),
        clock=SimpleNamespace(steady_ms=lambda: 0),  # the time of day is not asked for
        quotas=ClientQuotas(),
        fetch_sessions=FetchSessionCache(10),
        backlog=AnswerBacklog(UNBOUNDED, largest_answer, 1 << 20),
    )
    cache, topic_id = services.metadata_cache, uuid.UUID(int=1)
    for number in (1, 2):
        cache.set_broker(BrokerRegistration(number, f"host-{number}", 9090 + number))
    assignment: dict[int, tuple[int, ...]] = dict.fromkeys(range(partitions), (1, 2))
    cache.set_assignment("t", TopicAssignment(topic_id, assignment))
    state = PartitionState(leader, 5, (leader,), 1)
    for number in assignment:
        cache.set_state("t", number, state, 1)
    followed = assignment if partitions > 1 else {}
    try:
        await replicas.hosted.apply_topic("t", topic_id, dict.fromkeys(assignment, state), {}, followed)
        yield services
    finally:
        replicas.close()
        logs.close(0)


def test_partition_that_stands_more_than_once_is_answered_once_by_what_stands_last(tmp_path: Path) -> None:
    """Or a small request could ask for the same megabytes thousands of times."""

    async def scenario() -> None:
        async with _broker(tmp_path) as services:
            services.replica_manager.append_now("t", 0, _batch(), 1)
            response = _decoded(_ask(services, offsets=(99, 98, 0)))
            assert [(each.error_code, bytes(each.records) != b"") for each in response.partitions] == [
                (0, True)
            ]

    asyncio.run(scenario())


def test_append_between_a_fetch_and_its_wait_is_not_overlooked(tmp_path: Path) -> None:
    """Both requests arrive in one turn of the loop: the fetch finds nothing, the produce request comes before
    the fetch has begun to wait. It must not sleep until the next append, or until its time is up."""

    async def scenario() -> int:
        async with _broker(tmp_path) as services:
            answer = _ask(services)
            services.replica_manager.append_now("t", 0, _batch(), 1)
            response = _decoded(await asyncio.wait_for(answer, patience()))
            return len(response.partitions[0].records)

    assert asyncio.run(scenario()) > 0


def test_fetch_that_waits_for_more_holds_nothing_and_still_gets_all(tmp_path: Path) -> None:
    async def scenario() -> tuple[int, int]:
        async with _broker(tmp_path) as services:
            services.replica_manager.append_now("t", 0, _batch(b"x" * 1_000), 1)
            answer = _ask(services, min_bytes=1_500)
            await until_async(lambda: services.metrics.fetch_waits)
            fetch_under_way = answer.get_coro().cr_frame.f_locals["fetch"]
            assert fetch_under_way.given is None
            services.replica_manager.append_now("t", 0, _batch(b"y" * 1_000), 1)
            response = _decoded(await asyncio.wait_for(answer, patience()))
            return len(response.partitions[0].records), services.metrics.fetch_waits

    size, waits = asyncio.run(scenario())
    assert size > 2_000
    assert waits == 1


def test_fetch_that_waits_for_more_than_it_reads_on_a_thread_is_woken_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And reads it twice: once when it comes, once when there is enough; however much happens elsewhere."""
    monkeypatch.setattr(segment, "LARGE_READ_SIZE", 500)
    reads: list[int] = []
    read = segment.LogFile.read

    def counted(file: segment.LogFile, position: int, size: int) -> bytes:
        reads.append(size)
        return read(file, position, size)

    async def scenario() -> int:
        async with _broker(tmp_path, partitions=2) as services:
            replicas = services.replica_manager
            replicas.append_now("t", 0, _batch(b"x" * 1_000), 1)
            monkeypatch.setattr(segment.LogFile, "read", counted)
            answer = _ask(services, min_bytes=1_500)
            while not services.metrics.fetch_waits:
                assert not answer.done()
                replicas.append_now("t", 1, _batch(b"elsewhere"), 1)
                await asyncio.sleep(0)
            replicas.append_now("t", 0, _batch(b"y" * 1_000), 1)
            response = _decoded(await asyncio.wait_for(answer, patience()))
            return len(response.partitions[0].records)

    assert asyncio.run(scenario()) > 2_000
    assert len([size for size in reads if size > 500]) == 2


def _append_of(services: Any, producer_id: int, size: int) -> None:
    """A transaction's first batch, which opens it."""
    records = [Record(b"k", b"x" * size, (), 1)]
    named = {"producer_id": producer_id, "producer_epoch": 0, "base_sequence": 0, "transactional": True}
    services.replica_manager.append_now("t", 0, memoryview(build_batch(records, **named)), 1, "internal")


def _commit_of(services: Any, producer_id: int) -> None:
    marker = memoryview(build_marker(producer_id, 0, 1, True, 1))
    services.replica_manager.append_now("t", 0, marker, 1, "internal")


@pytest.mark.parametrize("began", ["before the wait", "during the wait", "before the leadership"])
def test_the_end_of_a_transaction_lets_readers_of_committed_data_have_all_that_it_held_back(
    tmp_path: Path, began: str
) -> None:
    """The marker itself is small; what becomes visible with it is not."""

    async def scenario() -> None:
        async with _broker(tmp_path) as services:
            if began != "during the wait":
                _append_of(services, 7, 10_000)
            if began == "before the leadership":
                for leader, epoch in ((2, 6), (1, 7)):
                    state = PartitionState(leader, epoch, (leader,), 1, epoch)
                    await services.replica_manager.hosted.apply_topic("t", uuid.UUID(int=1), {0: state}, {})
            answer = _ask(services, min_bytes=5_000, read_committed=True)
            await until_async(lambda: services.metrics.fetch_waits)
            if began == "during the wait":
                _append_of(services, 7, 10_000)
            for _ in range(3):
                await asyncio.sleep(0)
            assert services.metrics.fetch_waits == 1, "what it may not see yet wakes nobody"
            _commit_of(services, 7)
            response = _decoded(await asyncio.wait_for(answer, patience()))
            assert len(response.partitions[0].records) > 10_000

    asyncio.run(scenario())


def test_what_another_open_transaction_holds_back_is_still_waited_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with _broker(tmp_path) as services:
            _append_of(services, 7, 1_000)
            _append_of(services, 8, 10_000)
            answer = _ask(services, min_bytes=5_000, read_committed=True)
            await until_async(lambda: services.metrics.fetch_waits)
            _commit_of(services, 7)
            await until_async(lambda: services.metrics.fetch_waits == 2)
            assert not answer.done()
            _commit_of(services, 8)
            response = _decoded(await asyncio.wait_for(answer, patience()))
            assert len(response.partitions[0].records) > 11_000

    asyncio.run(scenario())


def _ask_as_follower(services: Any, *partitions: int, max_wait_ms: int = MAX_WAIT_MS) -> Any:
    asked = [PartitionFetch("t", number, 0, 1 << 20, 5) for number in partitions]
    request = hot_fetch.FetchRequest(max_wait_ms, 1, 1 << 20, False, asked, replica_id=2)
    head, frame, position = _frame(hot_fetch.encode_request(VERSION, 1, "raw", request))
    context: Any = SimpleNamespace(broker=services)
    return fetch.handle_frame(head, frame, position, context)


def test_after_a_wait_only_what_changed_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with _broker(tmp_path, partitions=4) as services:
            read: list[int] = []
            read_now = services.replica_manager.read_now

            def reading(topic: str, partition: int, *arguments: Any, **named: Any) -> Any:
                read.append(partition)
                return read_now(topic, partition, *arguments, **named)

            monkeypatch.setattr(services.replica_manager, "read_now", reading)
            answer = _ask_as_follower(services, 0, 1, 2, 3)
            await asyncio.sleep(0)
            services.replica_manager.append_now("t", 2, _batch(), 1)
            services.replica_manager.append_now("t", 1, _batch(), 1)
            response = _decoded(await asyncio.wait_for(answer, patience()))
            assert read[:4] == [0, 1, 2, 3] and sorted(read[4:]) == [1, 2]
            given = [(part.partition, len(part.records) > 0) for part in response.partitions]
            assert given == [(0, False), (1, True), (2, True), (3, False)]

    asyncio.run(scenario())


def _ask_many(services: Any, count: int, *, min_bytes: int = 1, max_wait_ms: int = MAX_WAIT_MS) -> Any:
    asked = [PartitionFetch("t", number, 0, 1 << 20) for number in range(count)]
    request = hot_fetch.FetchRequest(max_wait_ms, min_bytes, 1 << 20, False, asked)
    head, frame, position = _frame(hot_fetch.encode_request(VERSION, 1, "raw", request))
    context: Any = SimpleNamespace(broker=services)
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
        async with _broker(tmp_path, partitions=4) as services:
            turns = Turns(services, monkeypatch)
            services.replica_manager.append_now("t", 3, _batch(), 1)
            services.replica_manager._partitions["t", 3].replica.high_watermark = 1
            answer = _ask_many(services, 4)
            response = _decoded(await asyncio.wait_for(answer, patience()))
            assert [partition for partition, _ in turns.read] == [0, 1, 2, 3]
            assert len({turn for _, turn in turns.read}) == 4
            assert [len(part.records) > 0 for part in response.partitions] == [False, False, False, True]

    asyncio.run(scenario())


def test_what_comes_while_very_many_partitions_are_read_is_found_and_costs_no_second_reading_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partition gets a record right after it was read, and another, that nobody asked for, all the time."""

    async def scenario() -> None:
        async with _broker(tmp_path, partitions=5) as services:
            turns = Turns(services, monkeypatch)

            def append(partition: int) -> None:
                services.replica_manager.waiting_fetches.appended(("t", 4), 1)
                if partition == 2:
                    local = services.replica_manager._partitions["t", 1]
                    services.replica_manager.append_now("t", 1, _batch(), 1)
                    local.replica.high_watermark = local.log.end_offset
                    services.replica_manager.waiting_fetches.appended(("t", 1), 1)

            turns.before_read = append
            response = _decoded(await asyncio.wait_for(_ask_many(services, 4), patience()))
            assert [len(part.records) > 0 for part in response.partitions] == [False, True, False, False]
            assert [partition for partition, _ in turns.read] == [0, 1, 2, 3, 1]
            assert services.metrics.fetch_waits == 0

    asyncio.run(scenario())


def test_very_many_partitions_with_less_than_was_asked_for_are_waited_with_and_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with _broker(tmp_path, partitions=4) as services:
            turns = Turns(services, monkeypatch)
            services.replica_manager.append_now("t", 0, _batch(), 1)
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
        async with _broker(tmp_path, partitions=4) as services:
            answer = _ask_many(services, 4, max_wait_ms=0)
            assert asyncio.iscoroutine(answer), "the next request of its session must wait"
            response = _decoded(await (await answer))
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
        replicas.append_now("t", 3, _batch(), 1)
        replicas._partitions["t", 3].replica.high_watermark = 1
        replicas.waiting_fetches.appended(("t", 3), 1)


async def _is_let_go(under_way: Any) -> None:
    await until_async(lambda: gc.isenabled() and not (under_way.asked or under_way.given or under_way.keys))


@pytest.mark.parametrize("wait_ms", [MAX_WAIT_MS, 1_000])
def test_garbage_is_left_alone_while_a_large_fetch_is_at_work_and_not_while_it_waits_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_ms: int
) -> None:
    """It is at work from its first byte until what it asked for and was given is let go of."""
    long = wait_ms > 1_000

    async def scenario() -> list[tuple[str, bool]]:
        async with _broker(tmp_path, partitions=4) as services:
            garbage = Garbage(services, monkeypatch)
            answer, under_way = await garbage.ask(wait_ms)
            await until_async(lambda: services.metrics.fetch_waits)
            assert gc.isenabled() is long
            garbage.append()
            response = _decoded(await asyncio.wait_for(answer, patience()))
            assert [len(part.records) > 0 for part in response.partitions] == [False, False, False, True]
            await _is_let_go(under_way)
            return garbage.steps

    wait = ["enable"] if long else []
    steps = ["decode_request", "_handle", *["read"] * 4, *wait, "read", "encode_response", "enable"]
    assert asyncio.run(scenario()) == [(step, False) for step in steps]


def test_what_a_large_fetch_holds_is_let_go_of_on_a_thread_also_when_its_client_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with _broker(tmp_path, partitions=4) as services:
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
        async with _broker(tmp_path, partitions=4) as services:
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
        _, frame, position = _frame(hot_fetch.encode_request(VERSION, 1, "raw", request))
        with pytest.raises(ProtocolError) if is_refused else nullcontext():
            hot_fetch.decode_request(frame, position, VERSION)


def test_a_topic_that_is_known_by_its_new_id_is_not_read_from_the_old_ones_log(tmp_path: Path) -> None:
    """Between the picture of the cluster and the replicas there is time, with many partitions seconds."""

    async def scenario() -> list[tuple[int, int]]:
        version, anew = 13, uuid.UUID(int=2)
        async with _broker(tmp_path) as services:
            services.replica_manager.append_now("t", 0, _batch(), 1)
            cache = services.metadata_cache
            cache.remove_topic("t")
            cache.set_assignment("t", TopicAssignment(anew, {0: (1,)}))
            told = []
            for topic_id in (anew, uuid.UUID(int=1)):
                part = PartitionFetch(topic_id, 0, 0, 1 << 20)
                request = hot_fetch.FetchRequest(0, 1, 1 << 20, False, (part,))
                head, frame, position = _frame(hot_fetch.encode_request(version, 1, "raw", request))
                context: Any = SimpleNamespace(broker=services)
                answer: Any = fetch.handle_frame(head, frame, position, context)
                (found,) = _decoded(answer, version).partitions
                told.append((found.error_code, len(found.records or b"")))
            return told

    assert asyncio.run(scenario()) == [(InconsistentTopicId.code, 0), (UnknownTopicId.code, 0)]


def test_lost_leadership_ends_a_wait_and_is_told(tmp_path: Path) -> None:
    async def scenario() -> list[int]:
        async with _broker(tmp_path, partitions=2) as services:
            answer = _ask_as_follower(services, 0, 1)
            await asyncio.sleep(0)
            state = PartitionState(2, 6, (1, 2), 1, 2)
            await services.replica_manager.hosted.apply_topic("t", uuid.UUID(int=1), {1: state}, {})
            response = _decoded(await asyncio.wait_for(answer, patience()))
            return [part.error_code for part in response.partitions]

    assert asyncio.run(scenario()) == [0, FencedLeaderEpoch.code]


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_follower_that_does_not_wait_ends_its_earlier_wait(tmp_path: Path, turns: int) -> None:
    """Also where both requests come in one piece of the stream, so that no wait has begun yet."""

    async def scenario() -> None:
        async with _broker(tmp_path, partitions=3) as services:
            other = _ask_as_follower(services, 2)
            answer = _ask_as_follower(services, 0, 1)
            for _ in range(turns):
                await asyncio.sleep(0)
            assert len(_decoded(_ask_as_follower(services, 1, max_wait_ms=0)).partitions) == 1
            response = _decoded(await asyncio.wait_for(answer, patience()))
            assert [(part.partition, len(part.records)) for part in response.partitions] == [(0, 0), (1, 0)]
            assert not other.done()
            other.cancel()

    asyncio.run(scenario())


def test_more_than_an_answer_can_hold_is_not_waited_for(tmp_path: Path) -> None:
    async def scenario() -> int:
        async with _broker(tmp_path, largest_answer=500) as services:
            services.replica_manager.append_now("t", 0, _batch(b"x" * 1_000), 1)
            answer = _ask(services, min_bytes=100_000)
            assert not asyncio.isfuture(answer), "it waits"
            return len(_decoded(answer).partitions[0].records)

    assert asyncio.run(scenario()) > 1_000


@pytest.mark.parametrize("min_bytes", [2_500, 1 << 20])
def test_answer_that_no_further_batch_fits_into_is_not_waited_with(tmp_path: Path, min_bytes: int) -> None:
    """Batches do not add up to the limit exactly; the one that would pass it stays behind."""

    async def scenario() -> tuple[int, int]:
        async with _broker(tmp_path, largest_answer=2_500) as services:
            for _ in range(3):
                services.replica_manager.append_now("t", 0, _batch(b"x" * 1_000), 1)
            given = len(_decoded(_ask(services, min_bytes=min_bytes)).partitions[0].records)
            return given, services.metrics.fetch_waits

    given, waits = asyncio.run(scenario())
    assert 2_000 < given < 2_500 and waits == 0


def test_throttled_fetch_is_empty_and_costs_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with _broker(tmp_path) as services:
            services.replica_manager.append_now("t", 0, _batch(b"x" * 1_000), 1)
            services.quotas.apply({"raw": {"consumer_byte_rate": 50.0}})
            answer = _ask(services)
            assert isinstance(answer, Throttled)
            response = _decoded(answer.frame)
            assert response.throttle_ms == answer.throttle_ms > 0
            assert response.partitions == []
            assert services.metrics.fetch_bytes == 0
            services.quotas.apply({"raw": {"consumer_byte_rate": 500.0}})
            assert len(_decoded(_ask(services)).partitions[0].records) > 1_000

    asyncio.run(scenario())


def test_age_of_a_session_is_measured_by_the_steady_clock(tmp_path: Path) -> None:
    """Set back, the time of day would keep unused ones for an hour, and refuse new ones."""

    async def scenario() -> None:
        async with _broker(tmp_path) as services:
            services.clock.steady_ms = lambda: 7
            services.replica_manager.append_now("t", 0, _batch(), 1)
            session_id = _decoded(_ask(services, session=(0, 0))).session_id
            session = services.fetch_sessions._sessions[session_id]
            services.clock.steady_ms = lambda: 9
            assert _decoded(_ask(services, session=(session_id, 1))).session_id == session_id
            assert (session.created_ms, session.used_ms) == (7, 9)

    asyncio.run(scenario())


@pytest.mark.parametrize(("version", "is_told"), [(12, False), (15, False), (16, True), (17, True)])
def test_wrong_broker_tells_who_leads(tmp_path: Path, version: int, is_told: bool) -> None:
    async def scenario() -> hot_fetch.PartitionData:
        async with _broker(tmp_path, leader=2) as services:
            request = hot_fetch.FetchRequest(
                0, 1, 1 << 20, False, (PartitionFetch("t" if version < 13 else uuid.UUID(int=1), 0, 0, 100),)
            )
            head, frame, position = _frame(hot_fetch.encode_request(version, 1, "raw", request))
            context: Any = SimpleNamespace(broker=services)
            return _decoded(fetch.handle_frame(head, frame, position, context), version).partitions[0]

    part = asyncio.run(scenario())
    assert part.error_code == NotLeaderOrFollower.code
    assert part.current_leader == ((2, 5) if is_told else None)


@pytest.mark.parametrize(("version", "is_told"), [(9, False), (10, True), (11, True)])
def test_wrong_broker_tells_a_producer_who_leads(tmp_path: Path, version: int, is_told: bool) -> None:
    async def scenario() -> Any:
        async with _broker(tmp_path, leader=2) as services:
            request = b"".join(hot_produce.encode_request(version, 1, "raw", {("t", 0): _batch()}, acks=1))
            head, frame, position = _frame(request)
            context: Any = SimpleNamespace(broker=services, head=head, client_address="")
            answer = produce.handle_frame(head, frame, position, context)
            assert (b"host-2" in answer) is is_told
            return hot_produce.decode_response(memoryview(answer)[4:], version)[0][0]

    part = asyncio.run(scenario())
    assert part.error_code == NotLeaderOrFollower.code
    assert part.current_leader == ((2, 5) if is_told else None)
