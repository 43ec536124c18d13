"""When a waiting fetch is answered, what a quota and a wrong broker make of it."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.broker.coordination.paths import TopicAssignment
from millrace.broker.errors import (
    FencedLeaderEpoch,
    InconsistentTopicId,
    NotLeaderOrFollower,
    UnknownTopicId,
)
from millrace.broker.protocol import hot_fetch, hot_produce
from millrace.broker.protocol.control_records import build_marker
from millrace.broker.protocol.hot_fetch import PartitionFetch
from millrace.broker.protocol.records import Record, build_batch
from millrace.broker.replication.partition import PartitionState
from millrace.broker.server.context import ConnectionMemory
from millrace.broker.server.dispatch import Throttled
from millrace.broker.server.handlers import fetch, produce
from millrace.broker.storage import segment
from tests.unit.server.fetch_stage import MAX_WAIT_MS, VERSION, ask, batch, decoded, frame_of, serving
from tests.waiting import patience, until_async


def test_partition_that_stands_more_than_once_is_answered_once_by_what_stands_last(tmp_path: Path) -> None:
    """Or a small request could ask for the same megabytes thousands of times."""

    async def scenario() -> None:
        async with serving(tmp_path) as services:
            services.replica_manager.append_now("t", 0, batch(), 1)
            response = decoded(ask(services, offsets=(99, 98, 0)))
            assert [(each.error_code, bytes(each.records) != b"") for each in response.partitions] == [
                (0, True)
            ]

    asyncio.run(scenario())


def test_append_between_a_fetch_and_its_wait_is_not_overlooked(tmp_path: Path) -> None:
    """Both requests arrive in one turn of the loop: the fetch finds nothing, the produce request comes before
    the fetch has begun to wait. It must not sleep until the next append, or until its time is up."""

    async def scenario() -> int:
        async with serving(tmp_path) as services:
            answer = ask(services)
            services.replica_manager.append_now("t", 0, batch(), 1)
            response = decoded(await asyncio.wait_for(answer, patience()))
            return len(response.partitions[0].records)

    assert asyncio.run(scenario()) > 0


def test_fetch_that_waits_for_more_holds_nothing_and_still_gets_all(tmp_path: Path) -> None:
    async def scenario() -> tuple[int, int]:
        async with serving(tmp_path) as services:
            services.replica_manager.append_now("t", 0, batch(b"x" * 1_000), 1)
            answer = ask(services, min_bytes=1_500)
            await until_async(lambda: services.metrics.fetch_waits)
            fetch_under_way = answer.get_coro().cr_frame.f_locals["fetch"]
            assert fetch_under_way.given is None
            services.replica_manager.append_now("t", 0, batch(b"y" * 1_000), 1)
            response = decoded(await asyncio.wait_for(answer, patience()))
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
        async with serving(tmp_path, partitions=2) as services:
            replicas = services.replica_manager
            replicas.append_now("t", 0, batch(b"x" * 1_000), 1)
            monkeypatch.setattr(segment.LogFile, "read", counted)
            answer = ask(services, min_bytes=1_500)
            while not services.metrics.fetch_waits:
                assert not answer.done()
                replicas.append_now("t", 1, batch(b"elsewhere"), 1)
                await asyncio.sleep(0)
            replicas.append_now("t", 0, batch(b"y" * 1_000), 1)
            response = decoded(await asyncio.wait_for(answer, patience()))
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
        async with serving(tmp_path) as services:
            if began != "during the wait":
                _append_of(services, 7, 10_000)
            if began == "before the leadership":
                for leader, epoch in ((2, 6), (1, 7)):
                    state = PartitionState(leader, epoch, (leader,), 1, epoch)
                    await services.replica_manager.hosted.apply_topic("t", uuid.UUID(int=1), {0: state}, {})
            answer = ask(services, min_bytes=5_000, read_committed=True)
            await until_async(lambda: services.metrics.fetch_waits)
            if began == "during the wait":
                _append_of(services, 7, 10_000)
            for _ in range(3):
                await asyncio.sleep(0)
            assert services.metrics.fetch_waits == 1, "what it may not see yet wakes nobody"
            _commit_of(services, 7)
            response = decoded(await asyncio.wait_for(answer, patience()))
            assert len(response.partitions[0].records) > 10_000

    asyncio.run(scenario())


def test_what_another_open_transaction_holds_back_is_still_waited_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as services:
            _append_of(services, 7, 1_000)
            _append_of(services, 8, 10_000)
            answer = ask(services, min_bytes=5_000, read_committed=True)
            await until_async(lambda: services.metrics.fetch_waits)
            _commit_of(services, 7)
            await until_async(lambda: services.metrics.fetch_waits == 2)
            assert not answer.done()
            _commit_of(services, 8)
            response = decoded(await asyncio.wait_for(answer, patience()))
            assert len(response.partitions[0].records) > 11_000

    asyncio.run(scenario())


def _ask_as_follower(services: Any, *partitions: int, max_wait_ms: int = MAX_WAIT_MS) -> Any:
    asked = [PartitionFetch("t", number, 0, 1 << 20, 5) for number in partitions]
    request = hot_fetch.FetchRequest(max_wait_ms, 1, 1 << 20, False, asked, replica_id=2)
    head, frame, position = frame_of(hot_fetch.encode_request(VERSION, 1, "raw", request))
    context: Any = SimpleNamespace(broker=services, memory=ConnectionMemory())
    return fetch.handle_frame(head, frame, position, context)


def test_after_a_wait_only_what_changed_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, partitions=4) as services:
            read: list[int] = []
            read_now = services.replica_manager.read_now

            def reading(topic: str, partition: int, *arguments: Any, **named: Any) -> Any:
                read.append(partition)
                return read_now(topic, partition, *arguments, **named)

            monkeypatch.setattr(services.replica_manager, "read_now", reading)
            answer = _ask_as_follower(services, 0, 1, 2, 3)
            await asyncio.sleep(0)
            services.replica_manager.append_now("t", 2, batch(), 1)
            services.replica_manager.append_now("t", 1, batch(), 1)
            response = decoded(await asyncio.wait_for(answer, patience()))
            assert read[:4] == [0, 1, 2, 3] and sorted(read[4:]) == [1, 2]
            given = [(part.partition, len(part.records) > 0) for part in response.partitions]
            assert given == [(0, False), (1, True), (2, True), (3, False)]

    asyncio.run(scenario())


def test_a_topic_that_is_known_by_its_new_id_is_not_read_from_the_old_ones_log(tmp_path: Path) -> None:
    """Between the picture of the cluster and the replicas there is time, with many partitions seconds."""

    async def scenario() -> list[tuple[int, int]]:
        version, anew = 13, uuid.UUID(int=2)
        async with serving(tmp_path) as services:
            services.replica_manager.append_now("t", 0, batch(), 1)
            cache = services.metadata_cache
            cache.remove_topic("t")
            cache.set_assignment("t", TopicAssignment(anew, {0: (1,)}))
            told = []
            for topic_id in (anew, uuid.UUID(int=1)):
                part = PartitionFetch(topic_id, 0, 0, 1 << 20)
                request = hot_fetch.FetchRequest(0, 1, 1 << 20, False, (part,))
                head, frame, position = frame_of(hot_fetch.encode_request(version, 1, "raw", request))
                context: Any = SimpleNamespace(broker=services, memory=ConnectionMemory())
                answer: Any = fetch.handle_frame(head, frame, position, context)
                (found,) = decoded(answer, version).partitions
                told.append((found.error_code, len(found.records or b"")))
            return told

    assert asyncio.run(scenario()) == [(InconsistentTopicId.code, 0), (UnknownTopicId.code, 0)]


def test_lost_leadership_ends_a_wait_and_is_told(tmp_path: Path) -> None:
    async def scenario() -> list[int]:
        async with serving(tmp_path, partitions=2) as services:
            answer = _ask_as_follower(services, 0, 1)
            await asyncio.sleep(0)
            state = PartitionState(2, 6, (1, 2), 1, 2)
            await services.replica_manager.hosted.apply_topic("t", uuid.UUID(int=1), {1: state}, {})
            response = decoded(await asyncio.wait_for(answer, patience()))
            return [part.error_code for part in response.partitions]

    assert asyncio.run(scenario()) == [0, FencedLeaderEpoch.code]


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_follower_that_does_not_wait_ends_its_earlier_wait(tmp_path: Path, turns: int) -> None:
    """Also where both requests come in one piece of the stream, so that no wait has begun yet."""

    async def scenario() -> None:
        async with serving(tmp_path, partitions=3) as services:
            other = _ask_as_follower(services, 2)
            answer = _ask_as_follower(services, 0, 1)
            for _ in range(turns):
                await asyncio.sleep(0)
            assert len(decoded(_ask_as_follower(services, 1, max_wait_ms=0)).partitions) == 1
            response = decoded(await asyncio.wait_for(answer, patience()))
            assert [(part.partition, len(part.records)) for part in response.partitions] == [(0, 0), (1, 0)]
            assert not other.done()
            other.cancel()

    asyncio.run(scenario())


def test_more_than_an_answer_can_hold_is_not_waited_for(tmp_path: Path) -> None:
    async def scenario() -> int:
        async with serving(tmp_path, largest_answer=500) as services:
            services.replica_manager.append_now("t", 0, batch(b"x" * 1_000), 1)
            answer = ask(services, min_bytes=100_000)
            assert not asyncio.isfuture(answer), "it waits"
            return len(decoded(answer).partitions[0].records)

    assert asyncio.run(scenario()) > 1_000


@pytest.mark.parametrize("min_bytes", [2_500, 1 << 20])
def test_answer_that_no_further_batch_fits_into_is_not_waited_with(tmp_path: Path, min_bytes: int) -> None:
    """Batches do not add up to the limit exactly; the one that would pass it stays behind."""

    async def scenario() -> tuple[int, int]:
        async with serving(tmp_path, largest_answer=2_500) as services:
            for _ in range(3):
                services.replica_manager.append_now("t", 0, batch(b"x" * 1_000), 1)
            given = len(decoded(ask(services, min_bytes=min_bytes)).partitions[0].records)
            return given, services.metrics.fetch_waits

    given, waits = asyncio.run(scenario())
    assert 2_000 < given < 2_500 and waits == 0


def test_throttled_fetch_is_empty_and_costs_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as services:
            services.replica_manager.append_now("t", 0, batch(b"x" * 1_000), 1)
            services.quotas.apply({"raw": {"consumer_byte_rate": 50.0}})
            answer = ask(services)
            assert isinstance(answer, Throttled)
            response = decoded(answer.frame)
            assert response.throttle_ms == answer.throttle_ms > 0
            assert response.partitions == []
            assert services.metrics.fetch_bytes == 0
            services.quotas.apply({"raw": {"consumer_byte_rate": 500.0}})
            assert len(decoded(ask(services)).partitions[0].records) > 1_000

    asyncio.run(scenario())


def test_age_of_a_session_is_measured_by_the_steady_clock(tmp_path: Path) -> None:
    """Set back, the time of day would keep unused ones for an hour, and refuse new ones."""

    async def scenario() -> None:
        async with serving(tmp_path) as services:
            services.clock.steady_ms = lambda: 7
            services.replica_manager.append_now("t", 0, batch(), 1)
            session_id = decoded(ask(services, session=(0, 0))).session_id
            session = services.fetch_sessions._sessions[session_id]
            services.clock.steady_ms = lambda: 9
            assert decoded(ask(services, session=(session_id, 1))).session_id == session_id
            assert (session.created_ms, session.used_ms) == (7, 9)

    asyncio.run(scenario())


@pytest.mark.parametrize(("version", "is_told"), [(12, False), (15, False), (16, True), (17, True)])
def test_wrong_broker_tells_who_leads(tmp_path: Path, version: int, is_told: bool) -> None:
    async def scenario() -> hot_fetch.PartitionData:
        async with serving(tmp_path, leader=2) as services:
            request = hot_fetch.FetchRequest(
                0, 1, 1 << 20, False, (PartitionFetch("t" if version < 13 else uuid.UUID(int=1), 0, 0, 100),)
            )
            head, frame, position = frame_of(hot_fetch.encode_request(version, 1, "raw", request))
            context: Any = SimpleNamespace(broker=services, memory=ConnectionMemory())
            return decoded(fetch.handle_frame(head, frame, position, context), version).partitions[0]

    part = asyncio.run(scenario())
    assert part.error_code == NotLeaderOrFollower.code
    assert part.current_leader == ((2, 5) if is_told else None)


@pytest.mark.parametrize(("version", "is_told"), [(9, False), (10, True), (11, True)])
def test_wrong_broker_tells_a_producer_who_leads(tmp_path: Path, version: int, is_told: bool) -> None:
    async def scenario() -> Any:
        async with serving(tmp_path, leader=2) as services:
            request = b"".join(hot_produce.encode_request(version, 1, "raw", {("t", 0): batch()}, acks=1))
            head, frame, position = frame_of(request)
            context: Any = SimpleNamespace(broker=services, head=head, client_address="")
            answer = produce.handle_frame(head, frame, position, context)
            assert (b"host-2" in answer) is is_told
            return hot_produce.decode_response(memoryview(answer)[4:], version)[0][0]

    part = asyncio.run(scenario())
    assert part.error_code == NotLeaderOrFollower.code
    assert part.current_leader == ((2, 5) if is_told else None)
