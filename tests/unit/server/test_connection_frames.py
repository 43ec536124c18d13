"""Requests are found in a connection's bytes, however these come, within the memory that there is."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Callable
from typing import Any

import pytest

from millrace.broker.server import connection as connection_module
from millrace.broker.server.memory_limits import (
    SEND_STALL_SECONDS,
    UNBOUNDED,
    RequestMemory,
)
from tests import seeds
from tests.unit.server.connection_stage import (
    LARGEST_REQUEST,
    Server,
    limits_of,
    request,
)
from tests.waiting import until_async as until


def test_frames_arrive_whole_however_the_bytes_are_cut() -> None:
    rng = random.Random(seeds.given())
    for _ in range(30):
        bodies = [rng.randbytes(rng.choice([0, 1, 50, 4_000, 5_000, 70_000])) for _ in range(20)]
        stream = b"".join(map(request, bodies))
        server = Server(lambda body: body[:3])
        position = 0
        while position < len(stream):
            size = rng.choice([1, 3, 700, 5_000, 100_000])
            server.receive(stream[position : position + size])
            position += size
        assert server.seen == bodies
        assert bytes(server.transport.written) == b"".join(body[:3] for body in bodies)


@pytest.mark.parametrize("size", [-1, -(2**31), 0, 7, LARGEST_REQUEST + 1, 2_000_000_000])
def test_impossible_size_closes_and_is_counted(size: int) -> None:
    server = Server(lambda _body: b"")
    server.receive(request(b"fine") + struct.pack(">i", size) + b"more")
    assert server.seen == [b"fine"]
    assert server.transport.aborted
    assert server.metrics.connections_closed_for_protocol == 1
    assert server.metrics.closes == {"protocol: size": 1}


@pytest.mark.parametrize(
    ("start", "reason"),
    [(b"GET / HTTP/1.1\r\n", "HTTP"), (b"\x16\x03\x01\x02\x00\x01\x00", "TLS"), (b"\x7f\0\0\0", "max.bytes")],
)
def test_log_names_what_came_instead(start: bytes, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[dict[str, Any]] = []
    monkeypatch.setattr(connection_module.log, "warning", lambda _event, **fields: lines.append(fields))
    Server(lambda _body: b"").receive(start)
    (line,) = lines
    assert reason in line["reason"]
    assert line["client"] == "10.0.0.1"


def test_answers_before_a_broken_request_are_sent() -> None:
    server = Server(lambda _body: b"answer")
    server.receive(request(b"fine") + struct.pack(">i", -1))
    assert bytes(server.transport.written) == b"answer"


@pytest.mark.parametrize("seed", range(20))
def test_connections_that_share_the_landing_area_keep_their_bytes_apart(seed: int) -> None:
    """Requests cut anywhere, of all sizes, on connections that take turns, stall and give room back."""
    rng = random.Random(seed)

    async def scenario() -> None:
        waiting: list[asyncio.Future[bytes]] = []

        def answer(body: bytes) -> Any:
            if rng.random() < 0.3:
                waiting.append(asyncio.get_running_loop().create_future())
                return waiting[-1]
            return b""

        limits = limits_of(RequestMemory(rng.choice((UNBOUNDED, 300_000, 2_000_000))))
        servers = [Server(answer, limits=limits) for _ in range(4)]
        bodies = [
            [rng.randbytes(rng.choice((1, 100, 5_000, 40_000, 300_000))) for _ in range(rng.randint(5, 60))]
            for _ in servers
        ]
        streams = [b"".join(map(request, each)) for each in bodies]
        sent = [0] * len(servers)
        while any(len(server.seen) < len(each) for server, each in zip(servers, bodies, strict=True)):
            number = rng.randrange(len(servers))
            size = rng.choice((1, 10, 1_000, 20_000, 200_000))
            sent[number] += servers[number].receive(streams[number][sent[number] : sent[number] + size])
            if rng.random() < 0.1:
                rng.choice(servers).connection.received.give_room_back()
            if rng.random() < 0.3:
                for future in waiting:
                    future.set_result(b"")
                waiting.clear()
                await asyncio.sleep(0)
                await asyncio.sleep(0)
        for server, each in zip(servers, bodies, strict=True):
            assert server.seen == each
        assert limits.memory.used == sum(server.connection.received.extra_size for server in servers)

    asyncio.run(scenario())


def test_half_requests_that_fill_the_memory_do_not_wait_for_each_other() -> None:
    async def scenario() -> None:
        memory = RequestMemory(100_000)
        servers = [Server(lambda _body: b"", memory=memory) for _ in range(4)]
        stream = request(bytes(90_000))
        sent = [0] * len(servers)

        def feed() -> None:
            for number, server in enumerate(servers):
                sent[number] += server.receive(stream[sent[number] : sent[number] + 1_000])

        for _ in range(60):
            feed()
        # One has all it wants, beyond the limit if need be; the others are not read from.
        assert memory.used <= 100_000 + 2 * len(stream)
        assert [server.transport.reading for server in servers].count(False) >= 1

        def all_seen() -> bool:
            feed()
            return all(len(server.seen) == 1 for server in servers)

        for _ in range(1_000):
            if all_seen():
                break
            for server in servers:
                server.connection.received.give_room_back()  # as the listener does when somebody waits
            await asyncio.sleep(0)
        assert all_seen()

    asyncio.run(scenario())


def test_half_a_request_without_progress_is_stuck() -> None:
    server = Server(lambda _body: b"")
    connection = server.connection
    assert not connection.is_stuck(0.0)
    server.receive(request(bytes(1_000))[:500])
    assert not connection.is_stuck(1.0)
    assert not connection.is_stuck(SEND_STALL_SECONDS)
    server.receive(request(bytes(1_000))[500:600])
    assert not connection.is_stuck(SEND_STALL_SECONDS + 2)
    assert connection.is_stuck(2 * SEND_STALL_SECONDS + 3)
    server.receive(request(bytes(1_000))[600:])
    assert not connection.is_stuck(10 * SEND_STALL_SECONDS)  # nothing is half here


class Keeping(Server):
    """Keeps the frame itself of each request that a coroutine answers."""

    def __init__(self, answer: Callable[[bytes], Any], **more: Any) -> None:
        super().__init__(answer, **more)
        self.kept: list[memoryview] = []

    def dispatch(self, frame: memoryview, client_address: str, _memory: Any) -> Any:
        answer = super().dispatch(frame, client_address, _memory)
        if asyncio.iscoroutine(answer):
            self.kept.append(frame[8:])
        return answer


@pytest.mark.safety
def test_a_large_frame_stays_as_it_is_until_what_answers_it_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its batches are appended from there: bytes that came later would be stored in their place."""
    monkeypatch.setattr(connection_module, "KEPT_FRAME_SIZE", 600_000)

    async def scenario() -> None:
        rng = random.Random(seeds.given())
        release = asyncio.Event()

        async def append() -> bytes:
            await release.wait()
            return b"<large>"

        large, small = rng.randbytes(900_000), [rng.randbytes(50_000) for _ in range(40)]
        server = Keeping(lambda body: append() if body == large else b".")
        stream = request(large) + b"".join(map(request, small))
        taken = server.receive(stream)
        assert not server.transport.reading and taken < len(stream)
        server.connection.received.shrink()
        server.connection.received.shrink()
        assert server.seen == [large]
        assert bytes(server.kept[0]) == large
        release.set()
        await until(lambda: server.transport.reading)
        server.receive(stream[taken:])
        assert server.seen == [large, *small]

    asyncio.run(scenario())


def test_a_large_frame_counts_until_what_answers_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when its client goes, and comes again with the same: the append may be stuck, and is not ended."""
    monkeypatch.setattr(connection_module, "KEPT_FRAME_SIZE", 600_000)

    async def scenario() -> None:
        release = asyncio.Event()
        memory = RequestMemory()

        async def append() -> bytes:
            await release.wait()
            return b"<large>"

        server = Keeping(lambda _body: append(), memory=memory)
        server.receive(request(bytes(900_000)))
        server.connection.connection_lost(None)
        assert memory.used > 800_000
        release.set()
        await until(lambda: memory.used == 0)
        assert len(server.connection.received.block) == 0

    asyncio.run(scenario())
