"""One connection against servers that behave and servers that do not, on both event loops."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import struct
import tracemalloc
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from kio.schema.heartbeat.v4.request import HeartbeatRequest

from millrace.broker.client import opening
from millrace.broker.client.connection import Connection
from millrace.broker.client.opening import open_connection, os_reason
from millrace.broker.errors import (
    AccessRefused,
    NetworkException,
    ProtocolError,
    RequestTimedOut,
    UnsupportedVersion,
)
from millrace.broker.protocol.address import Address
from millrace.broker.protocol.frames import Api
from tests.ports import free_port
from tests.unit.client.scripted_server import (
    EVERY_VERSION,
    Peer,
    ScriptedServer,
    response,
    versions_answer,
    waiting_count,
)
from tests.waiting import patience
from tests.waiting import until_async as until

Run = Callable[[Coroutine[Any, Any, None]], None]
HEARTBEAT = HeartbeatRequest(group_id="g", generation_id=1, member_id="m")
TIMEOUT_MS = 5_000


@pytest.fixture(params=["uvloop", "asyncio"])
def run(request: pytest.FixtureRequest) -> Run:
    return uvloop.run if request.param == "uvloop" else asyncio.run


async def connect(server: ScriptedServer, timeout_ms: float = TIMEOUT_MS, **options: Any) -> Connection:
    address = Address("127.0.0.1", server.port)
    return await open_connection("ewr", address, client_id="test", timeout_ms=timeout_ms, **options)


def frame(correlation_id: int, body: bytes) -> bytes:
    return struct.pack(">ii", 4 + len(body), correlation_id) + body


def raw(correlation_id: int) -> list[bytes]:
    """A request that scripts tell apart by its correlation id alone."""
    return [struct.pack(">ihhih", 10, Api.HEARTBEAT, 0, correlation_id, -1)]


async def read_raw(peer: Peer) -> int:
    data = await peer.reader.readexactly(14)
    return int(struct.unpack(">ihhih", data)[3])


async def hold(peer: Peer) -> None:
    """Keep the connection open until the client closes it."""
    await peer.reader.read()


def test_copy_that_travelled_without_its_metadata_connects(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    told: list[tuple[str, str]] = []

    async def script(peer: Peer) -> None:
        head, request, _ = await peer.read()
        told.append((request.client_software_name, request.client_software_version))
        await peer.answer(head, versions_answer(EVERY_VERSION, head.version))
        await hold(peer)

    async def main() -> None:
        async with ScriptedServer(script) as server:
            (await connect(server)).close()
            opening._software_version.cache_clear()
            monkeypatch.setattr(importlib.metadata, "version", not_installed)
            try:
                (await connect(server)).close()
            finally:
                opening._software_version.cache_clear()

    installed = importlib.metadata.version("millrace")
    run(main())
    assert told == [("millrace", installed), ("millrace", "unknown")]


def test_answered_request_gives_its_entity(run: Run) -> None:
    async def script(peer: Peer) -> None:
        await peer.answer_versions()
        head, request, _ = await peer.read()
        assert request.member_id == "m"
        await peer.answer(head, response(Api.HEARTBEAT, 4, error_code=27))
        await hold(peer)

    async def main() -> None:
        async with ScriptedServer(script) as server:
            connection = await connect(server)
            answer = await connection.call(HEARTBEAT, TIMEOUT_MS)
            assert answer.error_code == 27
            connection.close()

    run(main())


def test_pipelined_requests_get_their_own_answers_however_the_bytes_are_cut(run: Run) -> None:
    bodies = [os.urandom(size) for size in (0, 1, 3, 100, 16 << 10, (16 << 10) - 8, 300_000, 5)]

    async def script(peer: Peer) -> None:
        await peer.answer_versions()
        ids = [await read_raw(peer) for _ in bodies]
        stream = b"".join(frame(number, body) for number, body in zip(ids, bodies, strict=True))
        cut = 0
        for size in (1, 2, 3, 5, 7, 90, 4096):
            await peer.send(stream[cut : cut + size])
            await asyncio.sleep(0)
            cut += size
        await peer.send(stream[cut:])
        await hold(peer)

    async def main() -> None:
        async with ScriptedServer(script) as server:
            connection = await connect(server)
            frames = await asyncio.gather(*[connection.exchange(raw, TIMEOUT_MS) for _ in bodies])
            assert [bytes(each[4:]) for each in frames] == bodies
            assert waiting_count(connection) == 0
            connection.close()

    run(main())


def test_large_request_arrives_whole_through_a_slow_reader(run: Run) -> None:
    parts = [os.urandom(3_000_000) for _ in range(4)]
    received = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.answer_versions()
        await asyncio.sleep(0.05)  # the socket's buffers fill meanwhile
        got = await peer.reader.readexactly(sum(map(len, parts)))
        assert got == b"".join(parts)
        received.set()
        await peer.send(frame(1, b""))
        await hold(peer)

    async def main() -> None:
        async with ScriptedServer(script) as server:
            connection = await connect(server)
            waiting = asyncio.create_task(
                connection.exchange(lambda _: [memoryview(part) for part in parts], TIMEOUT_MS)
            )
            await waiting
            assert received.is_set()
            connection.close()

    run(main())


def test_requests_are_sent_in_the_order_they_were_made_though_the_socket_is_full(run: Run) -> None:
    count, size = 40, 700_000
    received: list[int] = []

    async def script(peer: Peer) -> None:
        await peer.answer_versions()
        for number in range(count):
            received.append(int.from_bytes((await peer.reader.readexactly(size))[:2], "big"))
            await peer.send(frame(number + 1, b""))
        await hold(peer)

    async def main() -> None:
        async with ScriptedServer(script) as server:
            connection = await connect(server)
            sending = []
            for number in range(count):
                body = number.to_bytes(2, "big") + bytes(size - 2)
                sending.append(
                    asyncio.create_task(connection.exchange(lambda _, body=body: [body], TIMEOUT_MS))
                )
                # The loop turns now and then, so that newcomers meet the socket as it drains.
                if number % 3 == 0:
                    await asyncio.sleep(0)
            await asyncio.gather(*sending)
            assert received == list(range(count))
            connection.close()

    run(main())


def test_server_closing_within_a_frame_fails_with_how_much_was_there(run: Run) -> None:
    async def script(peer: Peer) -> None:
        await peer.answer_versions()
        number = await read_raw(peer)
        await peer.send(frame(number, bytes(100_000))[:50_000])

    async def main() -> None:
        async with ScriptedServer(script) as server:
            connection = await connect(server)
            with pytest.raises(NetworkException) as caught:
                await connection.exchange(raw, TIMEOUT_MS)
            assert f"cluster ewr at {server.address}" in str(caught.value)
            assert "within a frame (49996 of 100004 bytes were there)" in str(caught.value)
            assert not connection.is_open

    run(main())


def test_wrong_correlation_id_fails_all_requests_and_closes(run: Run) -> None:
    async def script(peer: Peer) -> None:
        await peer.answer_versions()
        number = await read_raw(peer)
        await peer.send(frame(number + 7, b""))
        await hold(peer)

    async def main() -> None:
        async with ScriptedServer(script) as server:
            connection = await connect(server)
            results = await asyncio.gather(
                *[connection.exchange(raw, TIMEOUT_MS) for _ in range(3)], return_exceptions=True
            )
            assert [type(each) for each in results] == [ProtocolError] * 3
            assert "correlation id 8, expected 1" in str(results[0])
            assert not connection.is_open
            with pytest.raises(ProtocolError):
                await connection.exchange(raw, TIMEOUT_MS)

    run(main())


@pytest.mark.parametrize("size", [(2 << 30) - 1, 2 << 30, -1, 3, 0])
def test_impossible_frame_size_is_refused_without_memory(run: Run, size: int) -> None:
    async def script(peer: Peer) -> None:
        await peer.answer_versions()
        await read_raw(peer)
        await peer.send(struct.pack(">I", size & 0xFFFFFFFF) + bytes(20))
        await hold(peer)

    async def main() -> None:
        async with ScriptedServer(script) as server:
            connection = await connect(server)
            tracemalloc.start()
            try:
                with pytest.raises(ProtocolError, match=f"cluster ewr at {server.address}: an answer of"):
                    await connection.exchange(raw, TIMEOUT_MS)
                assert tracemalloc.get_traced_memory()[1] < 4 << 20
            finally:
                tracemalloc.stop()

    # 2 GiB as a signed 32-bit number is negative, as a server in another language would announce it.
    run(main())


def test_answer_above_the_bound_is_refused(run: Run) -> None:
    async def script(peer: Peer) -> None:
        await peer.answer_versions()
        number = await read_raw(peer)
        await peer.send(frame(number, bytes(5000)))
        await hold(peer)

    async def main() -> None:
        async with ScriptedServer(script) as server:
            connection = await connect(server, max_response_size=4096)
            with pytest.raises(ProtocolError, match="an answer of 5004 bytes; between 4 and 4096"):
                await connection.exchange(raw, TIMEOUT_MS)

    run(main())


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", "'HTTP/1.1 400 Bad Request'"),
        (b"-ERR unknown command\r\n", "'-ERR unknown command'"),
        (b"\xff\xfe\x00\x01\x02", "does not speak Kafka's protocol$"),
        (bytes.fromhex("15030300020246"), "the port speaks TLS; set security.protocol to SSL or SASL_SSL"),
    ],
)
@pytest.mark.parametrize("is_asked", [True, False])
def test_first_answer_of_another_protocol_says_which_port_it_is_and_of_what(
    run: Run, answer: bytes, words: str, is_asked: bool
) -> None:
    async def script(peer: Peer) -> None:
        if is_asked:
            await peer.read()
        await peer.send(answer)
        await hold(peer)

    async def main() -> None:
        async with ScriptedServer(script) as server:
            with pytest.raises(AccessRefused, match=words) as caught:
                await connect(server)
            assert str(caught.value).startswith(f"cluster ewr: {server.address}: ")

    run(main())


@pytest.mark.parametrize("numbers", [[111], [111, 113]])
def test_name_whose_addresses_all_failed_has_its_reasons_once(numbers: list[int]) -> None:
    each = ", ".join(f"[Errno {number}] Connect call failed ('::1', 1, 0, 0)" for number in [*numbers, 111])
    told = os_reason(OSError(f"Multiple exceptions: {each}"))
    assert told == ", ".join(os.strerror(number) for number in numbers)


def test_answer_that_nobody_asked_for_closes(run: Run) -> None:
    async def script(peer: Peer) -> None:
        await peer.answer_versions()
        await peer.send(frame(0, b"unasked"))
        await hold(peer)

    async def main() -> None:
        async with ScriptedServer(script) as server:
            connection = await connect(server)
            await until(lambda: not connection.is_open)
            with pytest.raises(ProtocolError, match="nothing was asked for"):
                await connection.exchange(raw, TIMEOUT_MS)

    run(main())


def test_silent_server_times_out_and_takes_the_requests_behind_with_it(run: Run) -> None:
    async def script(peer: Peer) -> None:
        await peer.answer_versions()
        await hold(peer)

    async def main() -> None:
        async with ScriptedServer(script) as server:
            connection = await connect(server)
            results = await asyncio.gather(
                connection.exchange(raw, 50), connection.exchange(raw, 60_000), return_exceptions=True
            )
            assert [type(each) for each in results] == [RequestTimedOut] * 2
            assert "no answer within 50 ms; 1 requests beside it" in str(results[0])
            assert not connection.is_open

    run(main())


class Clock:
    """A loop's clock and timers, moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().create_future()

    def call_later(self, delay_s: float, callback: Callable[..., None], *arguments: Any) -> Any:
        timer = (self.now + delay_s, lambda: callback(*arguments))
        self.timers.append(timer)
        return SimpleNamespace(cancel=lambda: self.timers.remove(timer) if timer in self.timers else None)

    def pass_(self, seconds: float) -> None:
        self.now += seconds
        while due := [timer for timer in self.timers if timer[0] <= self.now]:
            self.timers.remove(due[0])
            due[0][1]()


def test_an_answer_that_is_arriving_is_not_late_however_slow_the_link(run: Run) -> None:
    """Otherwise a fetch larger than the link carries in its timeout is asked for again for ever."""

    async def story() -> None:
        clock = Clock()
        connection = Connection("test", Address("127.0.0.1", 1), "test", 1 << 20)
        connection._loop = clock  # type: ignore[assignment]
        connection.connection_made(SimpleNamespace(write=lambda _: None, abort=lambda: None))  # type: ignore[arg-type]

        def receive(piece: bytes) -> None:
            while piece and connection.is_open:
                room = connection.get_buffer(-1)
                taken = piece[: len(room)]
                room[: len(taken)] = taken
                connection.buffer_updated(len(taken))
                piece = piece[len(taken) :]

        async def ask() -> asyncio.Task[memoryview]:
            task = asyncio.create_task(connection.exchange(lambda _: (b"?",), 1_000))
            await until(lambda: waiting_count(connection) == 1)
            return task

        answer = await ask()
        frame = (900_000).to_bytes(4, "big") + bytes(900_000)
        for start in range(0, len(frame), 100_000):
            clock.pass_(0.9)  # 9 s in all, for a request that may wait for 1 s
            receive(frame[start : start + 100_000])
        assert len(await answer) == 900_000 and not clock.timers

        first, second = await ask(), asyncio.create_task(connection.exchange(lambda _: (b"?",), 1_000))
        await until(lambda: waiting_count(connection) == 2)
        frame = (900_000).to_bytes(4, "big") + (1).to_bytes(4, "big") + bytes(899_996)
        for start in range(0, len(frame), 100_000):
            clock.pass_(0.9)
            receive(frame[start : start + 100_000])
        clock.pass_(0.9)  # its turn came with the end of the one before
        receive((4).to_bytes(4, "big") + (2).to_bytes(4, "big"))
        assert (len(await first), len(await second), len(clock.timers)) == (900_000, 4, 0)

        answer = await ask()
        receive((900_000).to_bytes(4, "big") + (3).to_bytes(4, "big") + bytes(499_996))
        clock.pass_(0.9)
        receive(b"x")
        clock.pass_(0.9)
        assert connection.is_open
        clock.pass_(0.2)
        with pytest.raises(
            RequestTimedOut, match=r"nothing more .*\(500001 of 900000 bytes .* within 1000 ms"
        ):
            await answer
        assert not connection.is_open and not clock.timers

    run(story())


def test_cancelled_request_leaves_the_others_in_order(run: Run) -> None:
    asked = asyncio.Event()
    go_on = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.answer_versions()
        first, second = await read_raw(peer), await read_raw(peer)
        asked.set()
        await go_on.wait()
        await peer.send(frame(first, b"first"), frame(second, b"second"))
        await hold(peer)

    async def main() -> None:
        async with ScriptedServer(script) as server:
            connection = await connect(server)
            first = asyncio.create_task(connection.exchange(raw, TIMEOUT_MS))
            second = asyncio.create_task(connection.exchange(raw, TIMEOUT_MS))
            await asked.wait()
            first.cancel()
            await asyncio.wait([first])
            go_on.set()
            assert bytes((await second)[4:]) == b"second"
            assert first.cancelled()
            connection.close()

    run(main())


def test_a_replaced_connection_whose_rest_is_not_waited_for_any_more_closes_at_once(run: Run) -> None:
    async def script(peer: Peer) -> None:
        await peer.answer_versions()
        await hold(peer)

    async def main() -> None:
        async with ScriptedServer(script) as server:
            connection = await connect(server)
            under_way = asyncio.ensure_future(connection.call(HEARTBEAT, 3_600_000))
            await until(lambda: waiting_count(connection) == 1)
            ending = asyncio.ensure_future(connection.close_when_idle(3_600_000))
            await asyncio.sleep(0)
            ending.cancel()
            async with asyncio.timeout(patience()):
                with pytest.raises(NetworkException):
                    await under_way

    run(main())


def test_version_that_is_not_offered_is_not_sent(run: Run) -> None:
    async def script(peer: Peer) -> None:
        await peer.answer_versions({Api.HEARTBEAT: (0, 3)})
        assert await peer.reader.read() == b""

    async def main() -> None:
        async with ScriptedServer(script) as server:
            connection = await connect(server)
            with pytest.raises(UnsupportedVersion, match=r"version 4 is not offered \(offered: 0-3\)"):
                await connection.call(HEARTBEAT, TIMEOUT_MS)
            connection.close()

    run(main())


def test_server_without_api_versions_3_is_asked_again_with_0(run: Run) -> None:
    async def script(peer: Peer) -> None:
        head, _, _ = await peer.read()
        assert head.version == 3
        await peer.answer(head, versions_answer({Api.API_VERSIONS: (0, 0)}, 0, error_code=35))
        head, _, _ = await peer.read()
        assert head.version == 0
        await peer.answer(head, versions_answer({Api.METADATA: (1, 9)}, 0))
        await hold(peer)

    async def main() -> None:
        async with ScriptedServer(script) as server:
            connection = await connect(server)
            assert connection.versions.ranges == {Api.METADATA: (1, 9)}
            connection.close()

    run(main())


def test_body_that_cannot_be_read_closes(run: Run) -> None:
    async def script(peer: Peer) -> None:
        await peer.answer_versions()
        await peer.send(frame((await peer.read())[0].correlation_id, b"\x00\xff"))
        await hold(peer)

    async def main() -> None:
        async with ScriptedServer(script) as server:
            connection = await connect(server)
            with pytest.raises(ProtocolError, match=r"cluster ewr at .*HeartbeatResponse"):
                await connection.call(HEARTBEAT, TIMEOUT_MS)
            assert not connection.is_open

    run(main())


def test_nobody_listening_says_connection_refused(run: Run) -> None:
    async def main() -> None:
        address = Address("127.0.0.1", free_port())
        with pytest.raises(NetworkException, match=f"cluster ewr at {address}: Connection refused"):
            await open_connection("ewr", address, client_id="test", timeout_ms=TIMEOUT_MS)

    run(main())


def test_unknown_host_says_so(run: Run) -> None:
    async def main() -> None:
        with pytest.raises(NetworkException, match=r"cluster ewr at no-such-host\.invalid:9092: "):
            await open_connection(
                "ewr", Address("no-such-host.invalid", 9092), client_id="test", timeout_ms=TIMEOUT_MS
            )

    run(main())


def test_server_that_accepts_and_says_nothing_times_out(run: Run) -> None:
    async def main() -> None:
        async with ScriptedServer(hold) as server:
            with pytest.raises(RequestTimedOut):
                await connect(server, timeout_ms=50)

    run(main())


def test_frames_are_never_written_again(run: Run) -> None:
    async def script(peer: Peer) -> None:
        await peer.answer_versions()
        for fill in (b"a", b"b"):
            for size in (100, 200_000):
                await peer.send(frame(await read_raw(peer), fill * size))
        await hold(peer)

    async def main() -> None:
        async with ScriptedServer(script) as server:
            connection = await connect(server)
            frames = [await connection.exchange(raw, TIMEOUT_MS) for _ in range(4)]
            assert [bytes(each[4:5]) * (len(each) - 4) == bytes(each[4:]) for each in frames] == [True] * 4
            assert [bytes(each[4:5]) for each in frames] == [b"a", b"a", b"b", b"b"]
            connection.close()

    run(main())
