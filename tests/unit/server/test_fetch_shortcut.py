"""The short way of a fetch answers as the usual one does, or leaves the request to it."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.errors import (
    FencedLeaderEpoch,
    InconsistentTopicId,
    InvalidFetchSessionEpoch,
    NotLeaderOrFollower,
    UnknownServerError,
    UnknownTopicId,
)
from millrace.broker.protocol import hot_fetch
from millrace.broker.protocol.control_records import build_marker
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.hot_fetch import FetchRequest, PartitionFetch
from millrace.broker.protocol.records import Record, build_batch
from millrace.broker.replication.partition import PartitionState
from millrace.broker.server.context import ConnectionMemory
from millrace.broker.server.dispatch import Dispatcher, Throttled, handler_of
from millrace.broker.server.fetch_sessions import FetchSessionCache
from millrace.broker.server.fetch_shortcut import FetchShortcut
from millrace.broker.server.handlers import fetch
from millrace.broker.storage.disk_errors import WouldBlock
from millrace.broker.storage.segment import LogFile
from tests import seeds
from tests.unit.server.fetch_stage import batch, decoded, serving
from tests.waiting import patience

TOPIC_ID = uuid.UUID(int=1)
IDS = hot_fetch.FIRST_WITH_TOPIC_IDS


class Reader:
    """One connection that fetches from t-0. `short` are the answers that came by the short way."""

    def __init__(self, services: Any, version: int = 12, **options: Any) -> None:
        self.dispatcher = Dispatcher([handler_of(fetch)], services, services.metrics)
        self.memory = ConnectionMemory()
        self.version = version
        self.session_id, self.epoch = 0, -1
        self.options = {"max_wait_ms": 0, "min_bytes": 1, "max_bytes": 1 << 20, "room": 1 << 20} | options
        self.correlation_id = 0
        self.short = 0

    def frame(self, offset: int) -> memoryview:
        options = self.options
        topic: hot_fetch.Topic = TOPIC_ID if self.version >= IDS else "t"
        epochs = options.get("epochs", (-1, -1))
        asked = PartitionFetch(topic, 0, offset, options["room"], *epochs)
        request = FetchRequest(
            options["max_wait_ms"],
            options["min_bytes"],
            options["max_bytes"],
            options.get("read_committed", False),
            [asked],
            self.session_id,
            self.epoch,
        )
        self.correlation_id += 1
        frame = hot_fetch.encode_request(self.version, self.correlation_id, "reader", request)
        return memoryview(bytearray(frame))[4:]

    def ask(self, offset: int) -> Any:
        with self.noting():
            return self.dispatcher.dispatch(self.frame(offset), "10.0.0.1", self.memory)

    def ask_the_usual_way(self, offset: int) -> Any:
        self.correlation_id -= 1
        return self.dispatcher.dispatch(self.frame(offset), "10.0.0.1", ConnectionMemory())

    @contextmanager
    def noting(self) -> Iterator[None]:
        answer = FetchShortcut.answer

        def noted(shortcut: FetchShortcut, frame: memoryview) -> Any:
            found = answer(shortcut, frame)
            self.short += found is not None
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FetchShortcut, "answer", noted)
            yield


def frame_of(request: FetchRequest) -> memoryview:
    return memoryview(bytearray(hot_fetch.encode_request(12, 1, "reader", request)))[4:]


def warm(reader: Reader) -> Reader:
    """A reader that has a short way from now on."""
    reader.ask(0)
    reader.ask(0)
    assert reader.memory.shortcut is not None
    assert not reader.memory.last_fetch, "once is enough to keep"
    assert not reader.short
    return reader


@asynccontextmanager
async def warmed(folder: Path, *values: bytes, **options: Any) -> AsyncIterator[tuple[Any, Reader]]:
    """The services, with a batch of each of these values (or one), and a reader that has a short way."""
    async with serving(folder) as services:
        for value in values or (b"v",):
            services.replica_manager.append_now("t", 0, batch(value), 1)
        yield services, warm(Reader(services, **options))


def _fill(services: Any, rng: random.Random) -> None:
    """Some batches, of transactions too, of which some are aborted and one may stay open."""
    append = services.replica_manager.append_now
    for number in range(rng.randrange(2, 30)):
        records = [Record(b"k", rng.randbytes(rng.randrange(300)), (), 1) for _ in range(rng.randrange(1, 5))]
        if rng.random() < 0.6:
            append("t", 0, memoryview(build_batch(records)), 1)
            continue
        named = {"producer_id": number, "producer_epoch": 0, "base_sequence": 0, "transactional": True}
        append("t", 0, memoryview(build_batch(records, **named)), 1, "internal")
        if rng.random() < 0.9:
            marker = build_marker(number, 0, 1, rng.random() < 0.5, 1)
            append("t", 0, memoryview(marker), 1, "internal")


def _same(given: Any, expected: Any) -> bool:
    if isinstance(given, Throttled) or isinstance(expected, Throttled):
        return False
    if asyncio.isfuture(given) or asyncio.isfuture(expected):
        return asyncio.isfuture(given) and asyncio.isfuture(expected)
    return b"".join(given) == b"".join(expected)


def test_every_answer_is_that_of_the_usual_way(tmp_path: Path) -> None:
    seed = seeds.given()
    short = waited = 0

    async def scenario(number: int) -> None:
        nonlocal short, waited
        rng = random.Random(f"{seed}/{number}")
        async with serving(tmp_path / str(number)) as services:
            _fill(services, rng)
            log = services.replica_manager.leader_of("t", 0).log
            if rng.random() < 0.3:
                log.advance_start_offset(rng.randrange(log.end_offset))
            readers = [
                Reader(
                    services,
                    rng.choice(hot_fetch.VERSIONS),
                    max_wait_ms=rng.choice([0, 10_000_000]),
                    min_bytes=rng.choice([0, 1, 1, 1, 2_000]),
                    max_bytes=rng.choice([1, 700, 1 << 20]),
                    room=rng.choice([0, 1, 100, 900, 1 << 20]),
                    read_committed=rng.random() < 0.5,
                )
                for _ in range(6)
            ]
            for _ in range(60):
                reader = rng.choice(readers)
                offset = rng.randrange(-2, log.end_offset + 3)
                given, expected = reader.ask(offset), reader.ask_the_usual_way(offset)
                assert _same(given, expected), (seed, number, offset, reader.version, reader.options)
                for answer in (given, expected):
                    if asyncio.isfuture(answer):
                        waited += 1
                        answer.cancel()
            short += sum(reader.short for reader in readers)

    for number in range(25):
        asyncio.run(scenario(number))
    assert short > 200, f"{short} of 1,500"
    assert waited > 50


@pytest.mark.parametrize("version", [7, 12, 13, 17])
def test_sessions_go_on_by_the_short_way(tmp_path: Path, version: int) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as services:
            for number in range(20):
                services.replica_manager.append_now("t", 0, batch(b"%d" % number), 1)
            reader = Reader(services, version, room=150)
            reader.epoch = 0
            reader.session_id = decoded(reader.ask(0), version).session_id
            assert reader.session_id
            seen = []
            for offset in range(19):
                reader.epoch = offset + 1
                response = decoded(reader.ask(offset), version)
                assert (response.error_code, response.session_id) == (0, reader.session_id)
                (part,) = response.partitions
                assert part.log_start_offset == 0
                assert part.high_watermark == 20
                seen.append(bytes(part.records[-40:]))
            assert len(set(seen)) == 19, "each its own batch"
            assert reader.short == 17
            overtaken = decoded(reader.ask(0), version)
            assert overtaken.error_code == InvalidFetchSessionEpoch.code
            reader.epoch = 20
            assert len(decoded(reader.ask(0), version).partitions) == 1
            assert reader.short == 18

    asyncio.run(scenario())


async def _in_session(services: Any) -> Reader:
    """A reader whose fourth request, in epoch 3, has gone the short way: it was given the third of four
    batches, and told of the fourth."""
    for number in range(3):
        services.replica_manager.append_now("t", 0, batch(b"%d" % number), 1)
    reader = Reader(services, room=100)
    reader.epoch = 0
    reader.session_id = decoded(reader.ask(0)).session_id
    for reader.epoch in (1, 2):
        reader.ask(0)
    services.replica_manager.append_now("t", 0, batch(b"3"), 1)
    reader.epoch = 3
    assert decoded(reader.ask(2)).partitions[0].high_watermark == 4
    assert reader.short == 1
    return reader


def test_what_the_short_way_has_told_in_a_session_is_not_told_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as services:
            reader = await _in_session(services)
            reader.epoch = 4
            assert decoded(reader.ask(4)).partitions == []

    asyncio.run(scenario())


def test_a_session_knows_the_offset_that_the_short_way_was_asked_for(tmp_path: Path) -> None:
    """A request that says nothing new goes on from there."""

    async def scenario() -> None:
        async with serving(tmp_path) as services:
            reader = await _in_session(services)
            nothing_new = FetchRequest(0, 1, 1 << 20, False, [], reader.session_id, 4)
            answer: Any = reader.dispatcher.dispatch(frame_of(nothing_new), "10.0.0.1", reader.memory)
            (part,) = decoded(answer).partitions
            assert part.records[:8] == (2).to_bytes(8, "big")

    asyncio.run(scenario())


def test_a_session_that_is_asked_for_is_opened(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with warmed(tmp_path) as (_, reader):
            reader.epoch = 0
            assert decoded(reader.ask(0)).session_id
            assert not reader.short

    asyncio.run(scenario())


@pytest.mark.parametrize("version", [12, 13])
def test_epochs_and_ids_are_compared_each_time(tmp_path: Path, version: int) -> None:
    """A reader of another history, of an old leader, or of an earlier topic of the name is told so."""

    async def scenario() -> None:
        async with serving(tmp_path) as services:
            hosted = services.replica_manager.hosted
            services.replica_manager.append_now("t", 0, batch(), 1)
            reader = warm(Reader(services, version, epochs=(5, 5)))
            assert len(decoded(reader.ask(0), version).partitions[0].records)
            assert reader.short == 1
            assert decoded(reader.ask(1), version).partitions[0].diverging is None
            # Of epoch 6 and a batch of it this broker has never heard; it leads again by now.
            ahead = warm(Reader(services, version, epochs=(-1, 5), min_bytes=0))
            await hosted.apply_topic("t", TOPIC_ID, {0: PartitionState(1, 7, (1,), 1, 7)}, {})
            for _ in range(2):
                services.replica_manager.append_now("t", 0, batch(), 1)
            assert decoded(ahead.ask(2), version).partitions[0].diverging == (5, 1)
            assert decoded(reader.ask(0), version).partitions[0].error_code == FencedLeaderEpoch.code
            if version >= IDS:
                by_id = warm(Reader(services, version))
                await hosted.apply_topic("t", uuid.UUID(int=2), {0: PartitionState(1, 8, (1,), 1, 8)}, {})
                services.replica_manager.append_now("t", 0, batch(), 1)
                assert decoded(by_id.ask(0), version).partitions[0].error_code == InconsistentTopicId.code

    asyncio.run(scenario())


def test_a_request_for_more_partitions_goes_the_usual_way(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, partitions=2) as services:
            for number in (0, 1):
                services.replica_manager.append_now("t", number, batch(), 1)
            reader = Reader(services)
            both = [PartitionFetch("t", number, 0, 100) for number in (0, 1)]
            frame = frame_of(FetchRequest(0, 1, 1 << 20, False, both))
            for _ in range(3):
                answer: Any = reader.dispatcher.dispatch(frame, "10.0.0.1", reader.memory)
                assert [part.partition for part in decoded(answer).partitions] == [0, 1]

    asyncio.run(scenario())


def test_a_session_of_more_partitions_goes_the_usual_way(tmp_path: Path) -> None:
    """Its answer may have to tell of the others."""

    async def scenario() -> None:
        async with serving(tmp_path, partitions=2) as services:
            append = services.replica_manager.append_now
            for _ in range(4):
                append("t", 0, batch(), 1)
            reader = Reader(services, 12, room=100)
            reader.epoch = 0
            reader.session_id = decoded(reader.ask(0)).session_id
            for reader.epoch in (1, 2):
                reader.ask(0)
            other = FetchRequest(0, 1, 1 << 20, False, [PartitionFetch("t", 1, 0, 100)], reader.session_id, 3)
            reader.dispatcher.dispatch(frame_of(other), "10.0.0.1", reader.memory)
            reader.epoch = 4
            assert len(decoded(reader.ask(1)).partitions) == 1
            append("t", 1, batch(), 1)
            reader.epoch = 5
            assert {part.partition for part in decoded(reader.ask(2)).partitions} == {0, 1}
            assert not reader.short

    asyncio.run(scenario())


def test_what_is_not_in_the_page_cache_is_read_on_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with warmed(tmp_path) as (_, reader):

            def cold(_file: LogFile, _position: int, _size: int) -> bytes:
                raise WouldBlock("cold")

            monkeypatch.setattr(LogFile, "read_cached", cold)
            answer = reader.ask(0)
            assert asyncio.isfuture(answer)
            response = decoded(await asyncio.wait_for(answer, patience()))
            assert len(response.partitions[0].records)
            assert not reader.short

    asyncio.run(scenario())


def test_a_quota_that_comes_later_holds_for_who_has_a_short_way(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with warmed(tmp_path, b"v" * 1_000) as (services, reader):
            reader.ask(0)
            assert reader.short == 1
            services.quotas.fetch.set_limits(100.0, {})
            assert any(isinstance(reader.ask(0), Throttled) for _ in range(200))
            assert reader.short == 1

    asyncio.run(scenario())


def test_refusals_are_told_as_ever(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as services:
            services.replica_manager.append_now("t", 0, batch(), 1)
            by_name, by_id = warm(Reader(services, 12)), warm(Reader(services, 13))
            known, services.metadata_cache = services.metadata_cache, MetadataCache()
            assert decoded(by_id.ask(0), 13).partitions[0].error_code == UnknownTopicId.code
            services.metadata_cache = known
            for reader in (by_name, by_id):
                assert len(decoded(reader.ask(0), reader.version).partitions[0].records)
                assert reader.short == 1
            state = {0: PartitionState(2, 6, (2,), 1)}
            await services.replica_manager.hosted.apply_topic("t", TOPIC_ID, state, {})
            for reader in (by_name, by_id):
                part = decoded(reader.ask(0), reader.version).partitions[0]
                assert part.error_code == NotLeaderOrFollower.code
                assert reader.short == 1

    asyncio.run(scenario())


def test_requests_are_counted_and_bounded_like_others(tmp_path: Path) -> None:
    """The bytes given, the requests, and what one answer may hold for the sake of slow readers."""

    async def scenario() -> None:
        async with warmed(tmp_path, *[b"v" * 1_000] * 3) as (services, reader):
            counts, given = services.metrics.request_counts[Api.FETCH], services.metrics.fetch_bytes
            size = len(decoded(reader.ask(0)).partitions[0].records)
            assert size > 3_000
            assert reader.short == 1
            assert services.metrics.request_counts[Api.FETCH] == counts + 1
            assert services.metrics.fetch_bytes == given + size
            shortcut = reader.memory.shortcut
            for _ in range(2):
                assert decoded(reader.ask(3)).partitions[0].records == b"", "at the end"
            assert reader.memory.shortcut is shortcut, "made once"
            services.backlog.answer_limit = 2_500
            assert len(decoded(reader.ask(0)).partitions[0].records) < 2_500
            assert reader.short == 2

    asyncio.run(scenario())


def _empty_topic_first(version: int, offset: int) -> memoryview:
    """A topic of which nothing is asked, then t-0."""
    asked = PartitionFetch("t", 0, offset, 100)
    frame = hot_fetch.encode_request(version, 1, "reader", FetchRequest(0, 1, 1 << 20, False, [asked]))
    flexible = version >= hot_fetch.FIRST_FLEXIBLE
    one_topic = b"\x02\x02t\x02" if flexible else b"\x00\x00\x00\x01\x00\x01t"
    two_topics = (
        b"\x03\x02a\x01\x00\x02t\x02" if flexible else b"\x00\x00\x00\x02\x00\x01a\x00\x00\x00\x00\x00\x01t"
    )
    assert frame.count(one_topic) == 1
    return memoryview(bytearray(frame.replace(one_topic, two_topics)))[4:]


@pytest.mark.parametrize("version", [9, 12])
def test_a_topic_of_which_nothing_is_asked_changes_nothing(tmp_path: Path, version: int) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as services:
            for _ in range(8):
                services.replica_manager.append_now("t", 0, batch(), 1)
            reader = Reader(services, version)
            for offset in (0, 5, 5, 5):
                frame = _empty_topic_first(version, offset)
                answer: Any = reader.dispatcher.dispatch(frame, "10.0.0.1", reader.memory)
                (part,) = decoded(answer, version).partitions
                assert part.records[:8] == offset.to_bytes(8, "big")

    asyncio.run(scenario())


@pytest.mark.parametrize("versions", [(12, 13), (13, 12), (12, 17), (17, 12), (7, 12), (9, 8)])
def test_requests_of_one_length_in_other_versions_are_no_repetition(
    tmp_path: Path, versions: tuple[int, int]
) -> None:
    """A client that has lost a topic's id asks by name again."""

    async def scenario() -> None:
        async with serving(tmp_path) as services:
            reader = Reader(services)
            lengths = []
            for version in versions:
                reader.version = version
                lengths.append(len(reader.frame(0)))
            longest = max(lengths)
            for version, length in [*zip(versions, lengths, strict=True)] * 2:
                # The client's name makes them as long as each other.
                topic: hot_fetch.Topic = TOPIC_ID if version >= IDS else "t"
                request = FetchRequest(0, 1, 1 << 20, False, [PartitionFetch(topic, 0, 0, 100)])
                name = "reader" + "x" * (longest - length)
                frame = memoryview(bytearray(hot_fetch.encode_request(version, 1, name, request)))[4:]
                assert len(frame) == longest
                answer: Any = reader.dispatcher.dispatch(frame, "10.0.0.1", reader.memory)
                assert decoded(answer, version).partitions[0].error_code == 0
            assert reader.memory.shortcut is None

    asyncio.run(scenario())


def test_a_request_that_forgets_goes_the_usual_way(tmp_path: Path) -> None:
    """One that asks for a partition and forgets it ends its session."""

    async def scenario() -> None:
        async with serving(tmp_path) as services:
            services.replica_manager.append_now("t", 0, batch(), 1)
            reader = Reader(services)
            reader.epoch = 0
            session_id = decoded(reader.ask(0)).session_id
            asked = [PartitionFetch("t", 0, 0, 100)]
            for epoch, error_code in ((99, InvalidFetchSessionEpoch.code),) * 2 + ((1, 0),):
                forgets = FetchRequest(0, 1, 1 << 20, False, asked, session_id, epoch, [("t", 0)])
                answer: Any = reader.dispatcher.dispatch(frame_of(forgets), "10.0.0.1", reader.memory)
                assert decoded(answer).error_code == error_code
            assert not len(services.fetch_sessions)

    asyncio.run(scenario())


def test_a_failure_in_the_short_way_is_told_and_the_request_goes_the_usual_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fails in the short way alone only makes reading slow, which nobody would see; told once."""

    async def scenario() -> None:
        async with warmed(tmp_path) as (services, reader):
            shortcut: Any = reader.memory.shortcut
            shortcut._answers = None
            with capture_logs() as lines:
                for _ in range(3):
                    assert not decoded(reader.ask(0), 12).error_code
                    reader.memory.shortcut = shortcut
            assert [line["event"] for line in lines] == [
                "a request goes the usual way, because the short one failed"
            ]

            def failing(*_arguments: Any, **_options: Any) -> Any:
                raise MemoryError("no room")

            monkeypatch.setattr(services.replica_manager, "read_now", failing)
            answer: Any = reader.ask(0)
            response = hot_fetch.decode_response(memoryview(answer)[4:], 12)
            assert response.error_code == UnknownServerError.code

    asyncio.run(scenario())


def test_sessions_by_the_short_way_are_those_of_the_usual_one(tmp_path: Path) -> None:
    """Two readers do the same, each in a session; one has no memory. Appends, gaps in the epochs, and what
    the cache gives up, are drawn."""
    rng = random.Random(seeds.given())
    short = 0

    async def scenario(number: int) -> None:
        nonlocal short
        async with serving(tmp_path / str(number)) as services:
            version = rng.choice([7, 12, 13, 17])
            room = rng.choice([100, 1_000])
            readers = [Reader(services, version, room=room) for _ in range(2)]
            services.fetch_sessions = cache = FetchSessionCache(2)
            offset = 0
            for reader in readers:
                reader.epoch = 0
                reader.session_id = decoded(reader.ask(0), version).session_id
                reader.epoch = 1
            for _ in range(60):
                if rng.random() < 0.5:
                    services.replica_manager.append_now("t", 0, batch(rng.randbytes(rng.randrange(50))), 1)
                given = []
                skipped = rng.random() < 0.05
                for reader in readers:
                    reader.epoch += skipped
                    if reader is readers[1]:
                        reader.memory = ConnectionMemory()
                    answer = decoded(reader.ask(offset), version)
                    given.append((answer.error_code, answer.partitions))
                    reader.epoch += not answer.error_code
                    reader.epoch -= skipped
                assert given[0] == given[1]
                states = [cache._sessions[reader.session_id] for reader in readers]
                assert states[0].epoch == states[1].epoch
                assert list(cache._sessions) == [reader.session_id for reader in readers]
                views = [
                    [(part.asked, part.high_watermark, part.log_start_offset) for part in parts.values()]
                    for parts in (state.partitions for state in states)
                ]
                assert views[0] == views[1]
                if given[0][1] and len(given[0][1][0].records):
                    offset = rng.choice([offset, offset + 1])
            short += readers[0].short
            assert not readers[1].short

    for number in range(10):
        asyncio.run(scenario(number))
    assert short > 100


def test_only_a_request_that_comes_twice_has_a_short_way(tmp_path: Path) -> None:
    """To make one costs more than a request saves; and a follower has none."""

    async def scenario() -> None:
        async with serving(tmp_path) as services:
            services.replica_manager.append_now("t", 0, batch(), 1)
            reader = Reader(services)
            for room in range(100, 110):
                reader.options["room"] = room
                reader.ask(0)
            assert reader.memory.shortcut is None
            waiting = Reader(services, min_bytes=2)
            for _ in range(3):
                waiting.ask(0)
            assert waiting.memory.shortcut is None, "what is not enough would be read twice"
            memory = ConnectionMemory()
            plain = FetchRequest(0, 1, 1 << 20, False, [PartitionFetch("t", 0, 0, 100)])
            for _ in range(3):
                frame = hot_fetch.encode_request(12, 1, "x" * 1_000, plain)
                reader.dispatcher.dispatch(memoryview(bytearray(frame))[4:], "10.0.0.2", memory)
            assert memory == ConnectionMemory(), "connections keep little"
            request = FetchRequest(0, 1, 1 << 20, False, [PartitionFetch("t", 0, 0, 100)], replica_id=2)
            memory = ConnectionMemory()
            for _ in range(3):
                reader.dispatcher.dispatch(frame_of(request), "10.0.0.2", memory)
            assert memory.shortcut is None

    asyncio.run(scenario())
