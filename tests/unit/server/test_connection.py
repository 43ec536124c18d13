"""A connection over a transport that only takes notes."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Callable
from typing import Any

import pytest

from millrace.broker.errors import ProtocolError
from millrace.broker.server.connection import MOST_PENDING, Connection, ConnectionLimits
from millrace.broker.telemetry.logs import RateLimit
from millrace.broker.telemetry.metrics import BrokerMetrics

BUFFER_SIZE = 4096
LARGEST_REQUEST = 1 << 20
QUEUE_SIZE = 10_000


class NotingTransport:
    def __init__(self) -> None:
        self.written = bytearray()
        self.reading = True
        self.closed = self.aborted = False

    def set_write_buffer_limits(self, high: int) -> None:
        self.high = high

    def get_extra_info(self, _name: str) -> tuple[str, int]:
        return ("10.0.0.1", 5)

    def write(self, data: bytes) -> None:
        self.written += data

    def writelines(self, buffers: Any) -> None:
        for buffer in buffers:
            self.written += buffer

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True


class Server:
    """One connection; `answer(body)` stands for the dispatcher and its handlers."""

    def __init__(self, answer: Callable[[bytes], Any]) -> None:
        self.seen: list[bytes] = []
        self.transport = NotingTransport()
        self.metrics = BrokerMetrics()
        self.gone: list[Connection] = []
        self._answer = answer
        self.connection = Connection(
            self,  # type: ignore[arg-type]
            self.metrics,
            ConnectionLimits(
                request_max_size=LARGEST_REQUEST, receive_buffer_size=BUFFER_SIZE, send_queue_size=QUEUE_SIZE
            ),
            RateLimit(lambda: 0.0),
            self.gone.append,
        )
        self.connection.connection_made(self.transport)  # type: ignore[arg-type]

    def dispatch(self, frame: memoryview, client_address: str) -> Any:
        assert client_address == "10.0.0.1"
        body = bytes(frame[8:])
        self.seen.append(body)
        return self._answer(body)

    def receive(self, data: bytes) -> int:
        """As the event loop does; how many bytes found room while reading was not paused."""
        taken = 0
        while taken < len(data) and self.transport.reading and not self.transport.aborted:
            room = self.connection.get_buffer(-1)
            assert len(room) > 0, "a buffer without room closes the connection"
            count = min(len(room), len(data) - taken)
            room[:count] = data[taken : taken + count]
            room.release()
            self.connection.buffer_updated(count)
            taken += count
        return taken


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop turn until the condition holds; it takes a few turns or never comes."""
    for _ in range(100):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came")


def request(body: bytes) -> bytes:
    return struct.pack(">ihhi", 8 + len(body), 3, 0, 0) + body


def test_frames_arrive_whole_however_the_bytes_are_cut() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
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


def test_answers_before_a_broken_request_are_sent() -> None:
    server = Server(lambda _body: b"answer")
    server.receive(request(b"fine") + struct.pack(">i", -1))
    assert bytes(server.transport.written) == b"answer"


def test_announced_size_alone_takes_no_memory() -> None:
    server = Server(lambda _body: b"")
    server.receive(struct.pack(">i", LARGEST_REQUEST) + bytes(100))
    assert len(server.connection._buffer) == BUFFER_SIZE


def test_buffer_shrinks_when_the_connection_is_quiet() -> None:
    server = Server(lambda _body: b"")
    server.receive(request(bytes(500_000)))
    assert len(server.connection._buffer) >= 500_000
    server.receive(request(b"x")[:6])
    server.connection.shrink_if_quiet(quiet_since=float("inf"))
    assert len(server.connection._buffer) >= 500_000  # half a frame is here
    server.receive(request(b"x")[6:])
    server.connection.shrink_if_quiet(quiet_since=0.0)
    assert len(server.connection._buffer) >= 500_000  # not quiet for long enough
    server.connection.shrink_if_quiet(quiet_since=float("inf"))
    assert len(server.connection._buffer) == BUFFER_SIZE
    server.receive(request(b"after"))
    assert server.seen[-1] == b"after"


def test_answers_keep_the_order_of_requests() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        futures = {body: loop.create_future() for body in (b"1", b"3")}
        server = Server(lambda body: futures.get(body, b"<" + body + b">"))
        server.receive(b"".join(request(body) for body in (b"0", b"1", b"2", b"3", b"4")))
        assert bytes(server.transport.written) == b"<0>"
        futures[b"3"].set_result([b"<", b"3>"])
        await asyncio.sleep(0)
        assert bytes(server.transport.written) == b"<0>"
        futures[b"1"].set_result(None)  # nothing to send for this one
        await asyncio.sleep(0)
        assert bytes(server.transport.written) == b"<0><2><3><4>"

    asyncio.run(scenario())


def test_control_request_runs_alone() -> None:
    async def scenario() -> None:
        release = asyncio.Event()

        async def control() -> bytes:
            await release.wait()
            return b"<control>"

        server = Server(lambda body: control() if body == b"control" else b"<" + body + b">")
        server.receive(request(b"control") + request(b"next"))
        await asyncio.sleep(0)
        assert server.seen == [b"control"]
        release.set()
        await until(lambda: len(server.seen) == 2)
        assert bytes(server.transport.written) == b"<control><next>"

    asyncio.run(scenario())


def test_full_buffer_behind_a_waiting_request_pauses_reading() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        release = loop.create_future()

        async def control() -> bytes:
            await release
            return b""

        server = Server(lambda body: control() if body == b"control" else b"")
        rest = b"".join(request(b"x" * 100) for _ in range(1_000))
        taken = server.receive(request(b"control") + rest)
        assert not server.transport.reading
        assert taken < 2 * BUFFER_SIZE
        release.set_result(None)
        await until(lambda: server.transport.reading)
        server.receive((request(b"control") + rest)[taken:])
        assert len(server.seen) == 1_001

    asyncio.run(scenario())


def test_peer_that_does_not_read_is_not_answered_further() -> None:
    server = Server(lambda _body: b"answer")
    server.connection.pause_writing()
    server.receive(request(b"x") * 1_000)
    assert server.seen == []
    assert not server.transport.reading
    server.connection.resume_writing()
    assert len(server.seen) > 0
    assert server.transport.reading


def test_answers_that_wait_for_their_turn_are_bounded() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        first = loop.create_future()
        server = Server(lambda body: first if body == b"first" else bytes(4_000))
        server.receive(request(b"first") + request(b"large") * 10)
        assert len(server.seen) == 1 + 3  # 12,000 bytes parked are more than the queue may hold
        first.set_result(b"")
        await asyncio.sleep(0)
        assert len(server.seen) == 11
        assert len(server.transport.written) == 40_000

    asyncio.run(scenario())


def test_requests_under_way_are_bounded() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[bytes]] = []

        def wait(_body: bytes) -> asyncio.Future[bytes]:
            futures.append(loop.create_future())
            return futures[-1]

        server = Server(wait)
        server.receive(request(b"x") * (MOST_PENDING + 5))
        assert len(futures) == MOST_PENDING
        futures[0].set_result(b"")
        await asyncio.sleep(0)
        assert len(futures) == MOST_PENDING + 1
        server.connection.connection_lost(None)
        assert all(future.done() for future in futures)  # nobody is left to answer
        assert server.gone == [server.connection]

    asyncio.run(scenario())


def test_end_of_stream_waits_for_what_is_under_way() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        waiting = loop.create_future()
        server = Server(lambda body: waiting if body == b"waits" else b"")
        server.receive(request(b"waits"))
        assert server.connection.eof_received()
        waiting.set_result(b"answer")
        await asyncio.sleep(0)
        assert bytes(server.transport.written) == b"answer"
        assert server.transport.closed
        assert not Server(lambda _body: b"").connection.eof_received()

    asyncio.run(scenario())


def test_protocol_error_of_a_later_answer_closes() -> None:
    async def scenario() -> None:
        async def broken() -> bytes:
            raise ProtocolError("no")

        server = Server(lambda _body: broken())
        server.receive(request(b"x"))
        await until(lambda: server.transport.aborted)
        assert server.metrics.connections_closed_for_protocol == 1

    asyncio.run(scenario())
