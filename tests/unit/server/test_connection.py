"""A connection over a transport that only takes notes."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Callable
from typing import Any

import pytest

from millrace.broker.errors import ProtocolError
from millrace.broker.server import connection as connection_module
from millrace.broker.server.connection import MOST_PENDING, SEND_HIGH_WATER, Connection
from millrace.broker.server.connection_limits import (
    LANDING_SIZE,
    MAPPED_SIZE,
    ConnectionLimits,
    ReceiveBuffer,
    receive_buffer,
)
from millrace.broker.server.dispatch import Throttled
from millrace.broker.server.memory_limits import (
    SEND_STALL_SECONDS,
    STALL_SECONDS,
    UNBOUNDED,
    AnswerBacklog,
    RequestMemory,
)
from millrace.broker.telemetry.logs import RateLimit
from millrace.broker.telemetry.metrics import BrokerMetrics
from tests import seeds
from tests.waiting import until_async as until

BUFFER_SIZE = 4096
LARGEST_REQUEST = 1 << 20
QUEUE_SIZE = 10_000


class NotingTransport:
    def __init__(self) -> None:
        self.written = bytearray()
        self.unread_size = 0  # set by tests that play a peer who does not read
        self.stalled: Connection | None = None
        self.reading = True
        self.closed = self.aborted = False

    def set_write_buffer_limits(self, high: int) -> None:
        self.high = high

    def get_extra_info(self, _name: str) -> tuple[str, int]:
        return ("10.0.0.1", 5)

    def write(self, data: bytes) -> None:
        self.written += data
        if self.stalled is not None:
            self.unread_size += len(data)
            if self.unread_size > self.high:
                self.stalled.pause_writing()

    def writelines(self, buffers: Any) -> None:
        for buffer in buffers:
            self.write(buffer)

    def get_write_buffer_size(self) -> int:
        return self.unread_size

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True


def limits_of(memory: RequestMemory, backlog: AnswerBacklog | None = None) -> ConnectionLimits:
    return ConnectionLimits(
        request_max_size=LARGEST_REQUEST,
        receive_buffer_size=BUFFER_SIZE,
        backlog=AnswerBacklog(UNBOUNDED, LARGEST_REQUEST, QUEUE_SIZE) if backlog is None else backlog,
        memory=memory,
    )


class Server:
    """One connection; `answer(body)` stands for the dispatcher and its handlers."""

    def __init__(
        self,
        answer: Callable[[bytes], Any],
        *,
        memory: RequestMemory | None = None,
        backlog: AnswerBacklog | None = None,
        limits: ConnectionLimits | None = None,
    ) -> None:
        self.seen: list[bytes] = []
        self.transport = NotingTransport()
        self.metrics = BrokerMetrics()
        self.gone: list[Connection] = []
        self._answer = answer
        self.connection = Connection(
            self,  # type: ignore[arg-type]
            self.metrics,
            limits or limits_of(memory or RequestMemory(), backlog),
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
        """As the event loop does, which holds the buffer until its call is over; how many bytes found room
        while reading was not paused."""
        taken = 0
        while taken < len(data) and self.transport.reading and not self.transport.aborted:
            room = self.connection.get_buffer(-1)
            assert len(room) > 0, "a buffer without room closes the connection"
            count = min(len(room), len(data) - taken)
            room[:count] = data[taken : taken + count]
            self.connection.buffer_updated(count)
            room.release()
            taken += count
        return taken


def request(body: bytes) -> bytes:
    return struct.pack(">ihhi", 8 + len(body), 3, 0, 0) + body


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


def test_announced_size_alone_takes_no_memory() -> None:
    server = Server(lambda _body: b"")
    server.receive(struct.pack(">i", LARGEST_REQUEST) + bytes(100))
    assert len(server.connection._buffer) == BUFFER_SIZE


def test_buffer_shrinks_to_what_is_used() -> None:
    server = Server(lambda _body: b"")
    server.receive(request(bytes(500_000)))
    assert len(server.connection._buffer) >= 500_000
    server.connection.shrink()
    assert len(server.connection._buffer) >= 500_000  # it was needed since the last look
    server.receive(request(bytes(20_000))[:10_000])
    server.connection.shrink()
    assert BUFFER_SIZE < len(server.connection._buffer) <= 16_384  # half a frame is here
    server.receive(request(bytes(20_000))[10_000:])
    server.connection.shrink()
    server.connection.shrink()
    assert len(server.connection._buffer) == 0
    server.receive(request(b"after"))
    assert server.seen[-1] == b"after"


def test_whole_requests_need_no_memory_of_the_connection() -> None:
    server = Server(lambda _body: b"")
    server.receive(request(bytes(1_000)) * 100)
    assert len(server.seen) == 100
    assert len(server.connection._buffer) == 0


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
                rng.choice(servers).connection.give_room_back()
            if rng.random() < 0.3:
                for future in waiting:
                    future.set_result(b"")
                waiting.clear()
                await asyncio.sleep(0)
                await asyncio.sleep(0)
        for server, each in zip(servers, bodies, strict=True):
            assert server.seen == each
        assert limits.memory.used == sum(server.connection._extra_size for server in servers)

    asyncio.run(scenario())


def test_buffer_counts_in_the_memory_of_all_requests() -> None:
    memory = RequestMemory()
    server = Server(lambda _body: b"", memory=memory)
    server.receive(request(bytes(500_000))[:-1])
    assert memory.used == len(server.connection._buffer) - BUFFER_SIZE > 400_000
    server.receive(b"x")
    server.connection.shrink()
    server.connection.shrink()
    assert memory.used == 0
    server.receive(request(bytes(500_000))[:-1])
    server.connection.connection_lost(None)
    assert memory.used == 0


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
                server.connection.give_room_back()  # as the listener does when somebody waits
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


def test_a_request_that_is_given_up_closes_the_connection() -> None:
    """The answers behind it would wait for their turn for ever, and so would their client."""

    async def scenario() -> None:
        given_up = asyncio.get_running_loop().create_future()
        server = Server(lambda body: given_up if body == b"1" else b"<" + body + b">")
        server.receive(request(b"1") + request(b"2"))
        given_up.cancel()
        await asyncio.sleep(0)
        assert server.transport.aborted and bytes(server.transport.written) == b""

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
        await until(lambda: bytes(server.transport.written) == b"<control><next>")

    asyncio.run(scenario())


def test_what_is_left_to_be_waited_for_holds_up_no_request_behind_it() -> None:
    async def scenario() -> None:
        acknowledged = asyncio.get_running_loop().create_future()

        async def heavy() -> asyncio.Future[bytes]:
            return acknowledged

        server = Server(lambda body: heavy() if body == b"heavy" else b"<" + body + b">")
        server.receive(request(b"heavy") + request(b"next"))
        assert server.seen == [b"heavy"]
        await until(lambda: server.seen == [b"heavy", b"next"])
        assert bytes(server.transport.written) == b""
        acknowledged.set_result(b"<heavy>")
        await until(lambda: bytes(server.transport.written) == b"<heavy><next>")

    asyncio.run(scenario())


def test_full_buffer_behind_a_waiting_request_pauses_reading() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        release = loop.create_future()

        async def control() -> bytes:
            await release
            return b""

        server = Server(lambda body: control() if body == b"control" else b"")
        rest = b"".join(request(b"x" * 100) for _ in range(4_000))
        taken = server.receive(request(b"control") + rest)
        assert not server.transport.reading
        assert taken < LANDING_SIZE + BUFFER_SIZE < len(rest)
        release.set_result(None)
        await until(lambda: server.transport.reading)
        server.receive((request(b"control") + rest)[taken:])
        assert len(server.seen) == 4_001

    asyncio.run(scenario())


class Keeping(Server):
    """Keeps the frame itself of each request that a coroutine answers."""

    def __init__(self, answer: Callable[[bytes], Any], **more: Any) -> None:
        super().__init__(answer, **more)
        self.kept: list[memoryview] = []

    def dispatch(self, frame: memoryview, client_address: str) -> Any:
        answer = super().dispatch(frame, client_address)
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
        server.connection.shrink()
        server.connection.shrink()
        assert server.seen == [large]
        assert bytes(server.kept[0]) == large
        release.set()
        await until(lambda: server.transport.reading)
        server.receive(stream[taken:])
        assert server.seen == [large, *small]

    asyncio.run(scenario())


@pytest.mark.parametrize("is_held", [False, True])
def test_a_buffer_that_is_grown_without_a_copy_keeps_what_is_in_it(
    monkeypatch: pytest.MonkeyPatch, is_held: bool
) -> None:
    """Also, then by a copy, while somebody still looks at what was received before."""
    made: list[int] = []

    def making(capacity: int) -> ReceiveBuffer:
        made.append(capacity)
        return receive_buffer(capacity)

    monkeypatch.setattr(connection_module, "receive_buffer", making)
    rng = random.Random(seeds.given())
    limits = ConnectionLimits(
        request_max_size=16 << 20,
        receive_buffer_size=BUFFER_SIZE,
        backlog=AnswerBacklog(UNBOUNDED, LARGEST_REQUEST, QUEUE_SIZE),
        memory=RequestMemory(),
    )
    bodies = [rng.randbytes(size) for size in (MAPPED_SIZE - 12, 2 * MAPPED_SIZE + 1, 10, 5 * MAPPED_SIZE)]
    held: list[memoryview] = []
    server = Server(lambda _body: b"", limits=limits)
    for number, body in enumerate(bodies):
        stream = request(body)
        at = rng.randrange(1, len(stream))
        server.receive(stream[:at])
        if is_held:
            held.append(server.connection._view[:4])
        server.receive(stream[at:])
        assert server.seen[number] == body
        server.connection.shrink()
    assert len(server.connection._buffer) >= 5 * MAPPED_SIZE
    assert is_held or max(made) == MAPPED_SIZE
    server.connection.shrink()
    server.connection.shrink()
    assert len(server.connection._buffer) == 0 == limits.memory.used


def test_peer_that_does_not_read_is_not_answered_further() -> None:
    backlog = AnswerBacklog(UNBOUNDED, LARGEST_REQUEST, 1 << 20)
    server = Server(lambda _body: bytes(100_000), backlog=backlog)
    server.transport.stalled = server.connection
    server.receive(request(b"x" * 100) * 4_000)
    seen = len(server.seen)
    assert (1 << 20) - 100_000 <= len(server.transport.written) - SEND_HIGH_WATER <= (1 << 20) + 200_000
    assert not server.transport.reading
    assert len(server.transport.written) - SEND_HIGH_WATER <= backlog.held + 100_000
    server.transport.stalled = None
    server.transport.unread_size = 0
    server.connection.resume_writing()
    assert len(server.seen) > seen
    assert server.transport.reading
    assert backlog.held == 0


def test_backlog_of_all_shrinks_what_one_may_queue() -> None:
    backlog = AnswerBacklog(8 << 20, LARGEST_REQUEST, 1 << 20)
    server = Server(lambda _body: bytes(100_000), backlog=backlog)
    server.transport.stalled = server.connection
    backlog.set("somebody else", 8 << 20, 0.0)
    server.receive(request(b"x" * 100) * 1_000)
    assert len(server.transport.written) <= SEND_HIGH_WATER + (256 << 10) + 200_000


def test_reading_some_is_progress() -> None:
    backlog = AnswerBacklog(1 << 20, LARGEST_REQUEST, 1 << 20)
    server = Server(lambda _body: bytes(1 << 20), backlog=backlog)
    server.transport.stalled = server.connection
    server.receive(request(b"x"))
    began = server.connection.last_active
    server.connection.look_at_reader(began + 1)
    server.connection.look_at_reader(began + STALL_SECONDS - 1)
    assert backlog.overdue(began + STALL_SECONDS + 1) == [server.connection]
    server.transport.unread_size += 1_000  # more is queued
    server.connection.look_at_reader(began + STALL_SECONDS)
    server.transport.unread_size -= 1_000  # it reads
    server.connection.look_at_reader(began + STALL_SECONDS + 1)
    assert backlog.overdue(began + STALL_SECONDS + 2) == []
    server.connection.connection_lost(None)
    assert backlog.held == 0


def test_throttled_client_is_answered_at_once_and_then_not_heard_for_a_while() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        server = Server(lambda body: Throttled(b"<slow>", 60) if body == b"slow" else b"<" + body + b">")
        server.receive(request(b"slow") + request(b"next") + request(b"more"))
        began = loop.time()
        assert bytes(server.transport.written) == b"<slow>"
        assert server.seen == [b"slow"]
        assert server.metrics.throttled_requests == 1
        await until(lambda: len(server.seen) == 3)
        assert loop.time() - began >= 0.059
        assert bytes(server.transport.written) == b"<slow><next><more>"

        silent = Server(lambda _body: Throttled(None, 60_000))
        silent.receive(request(b"acks=0") * 2)
        assert len(silent.seen) == 1
        silent.connection.connection_lost(None)
        assert silent.connection._muted is None  # the timer would keep it in memory

    asyncio.run(scenario())


def test_throttled_answer_waits_for_its_turn() -> None:
    async def scenario() -> None:
        first = asyncio.get_running_loop().create_future()
        server = Server(lambda body: first if body == b"first" else Throttled(b"<slow>", 30))
        server.receive(request(b"first") + request(b"slow"))
        assert bytes(server.transport.written) == b""
        assert server.metrics.throttled_requests == 0
        first.set_result(Throttled([b"<fi", b"rst>"], 10))
        await asyncio.sleep(0)
        assert bytes(server.transport.written) == b"<first><slow>"
        assert server.metrics.throttled_requests == 2
        server.receive(request(b"third"))
        assert len(server.seen) == 2
        await until(lambda: len(server.seen) == 3)

    asyncio.run(scenario())


def test_refused_connection_is_dropped_before_it_says_a_word() -> None:
    server = Server(lambda _body: b"")
    refused = Connection(
        server,  # type: ignore[arg-type]
        server.metrics,
        server.connection._limits,
        RateLimit(lambda: 0.0),
        server.gone.append,
        lambda connection: connection.client_address != "10.0.0.1",
    )
    transport = NotingTransport()
    refused.connection_made(transport)  # type: ignore[arg-type]
    assert transport.aborted
    assert server.metrics.connections_opened == 1


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


def test_requests_are_taken_up_again_when_others_have_left_more_room_meanwhile() -> None:
    async def scenario() -> None:
        first = asyncio.get_running_loop().create_future()
        backlog = AnswerBacklog(8 << 20, LARGEST_REQUEST, 1 << 20)
        backlog.set("somebody else", 8 << 20, 0.0)
        server = Server(lambda body: first if body == b"first" else bytes(150_000), backlog=backlog)
        server.receive(request(b"first") + request(b"large") * 4)
        assert len(server.seen) == 1 + 2  # for want of room the others are not taken yet
        backlog.set("somebody else", 0, 1.0)
        first.set_result(b"")
        await asyncio.sleep(0)
        assert len(server.seen) == 5
        assert len(server.transport.written) == 600_000

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


def test_peer_that_is_gone_is_not_waited_with() -> None:
    """A fetch may wait for a day; who has ended the connection reads no answer, and the socket would stay."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        waits = [loop.create_future(), loop.create_future()]
        server = Server(lambda body: waits[int(body)])
        server.receive(request(b"0") + request(b"1"))
        assert not server.connection.eof_received(), "the transport closes"
        assert all(wait.cancelled() for wait in waits)
        await asyncio.sleep(0)
        assert not server.transport.aborted and server.metrics.closes == {}

    asyncio.run(scenario())


def test_all_that_a_peer_sent_before_it_went_is_carried_out() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        gate, waits = asyncio.Event(), []

        async def control() -> bytes:
            await gate.wait()
            return b"answer"

        def answer(body: bytes) -> Any:
            if body == b"alone":
                return control()
            waits.append(loop.create_future())
            return waits[-1]

        server = Server(answer)
        many = MOST_PENDING + 3
        server.receive(request(b"alone") + b"".join(request(b"append") for _ in range(many)))
        assert server.connection.eof_received(), "requests wait for their turn"
        assert server.seen == [b"alone"]
        gate.set()
        await until(lambda: server.transport.closed)
        assert server.seen == [b"alone"] + [b"append"] * many
        assert all(wait.cancelled() for wait in waits)
        assert bytes(server.transport.written) == b"answer"
        assert not Server(lambda _body: b"").connection.eof_received()

    asyncio.run(scenario())


def test_bytes_that_come_or_go_are_no_idleness() -> None:
    async def scenario() -> None:
        waiting = asyncio.get_running_loop().create_future()
        server = Server(lambda _body: waiting)
        moments = [server.connection.idle_since]
        whole = request(b"a large one")
        for piece in (whole[:5], whole[5:9], whole[9:]):
            server.receive(piece)
            moments.append(server.connection.idle_since)
        waiting.set_result(b"answer")
        await asyncio.sleep(0)
        moments.append(server.connection.idle_since)
        assert moments == sorted(set(moments))

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
