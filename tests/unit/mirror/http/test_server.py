"""The HTTP server over real sockets: what is asked is answered, and what a client does wrong costs little."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from millrace.broker.errors import FatalError, PortTaken
from millrace.broker.protocol.address import Address
from millrace.mirror.control.http import server as server_module
from millrace.mirror.control.http.client import NoAnswer, get_json
from millrace.mirror.control.http.messages import Request, Response, json_response
from millrace.mirror.control.http.server import MAX_BODY_SIZE, HttpServer
from tests.waiting import patience
from tests.waiting import until_async as until

Story = Callable[[HttpServer], Awaitable[None]]


async def echo(request: Request) -> Response:
    seen = {"method": request.method, "path": request.path, "body": request.body.decode()}
    return json_response({**seen, "x": request.headers.get("x")})


def run(story: Story, respond: Callable[[Request], Awaitable[Response]] = echo) -> None:
    async def whole() -> None:
        server = HttpServer(Address("127.0.0.1", 0), respond)
        await server.start()
        try:
            async with asyncio.timeout(patience(120)):
                await story(server)
        finally:
            await server.stop()

    asyncio.run(whole())


async def talk(server: HttpServer, *pieces: bytes) -> bytes:
    """Everything the server says to these bytes until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
    data = await reader.read()
    writer.close()
    return data


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def body_of(answer: bytes) -> dict[str, object]:
    return dict(json.loads(answer.partition(b"\r\n\r\n")[2]))


def test_a_request_is_answered_with_its_guards() -> None:
    async def story(server: HttpServer) -> None:
        head = b"POST /a/b?c=d HTTP/1.1\r\nHost: x\r\nX: one\r\nX: two\r\nContent-Length: 2\r\n"
        answer = await talk(server, head + b"Connection: close\r\n\r\n", b"{}")
        assert status_of(answer) == 200
        assert body_of(answer) == {"method": "POST", "path": "/a/b", "body": "{}", "x": "one, two"}
        lower = answer.lower()
        for guard in (
            b"cache-control: no-store",
            b"x-content-type-options: nosniff",
            b"x-frame-options: deny",
        ):
            assert guard in lower

    run(story)


def test_a_connection_serves_several_requests_also_sent_at_once() -> None:
    async def story(server: HttpServer) -> None:
        one = b"GET /1 HTTP/1.1\r\nHost: x\r\n\r\n"
        last = b"GET /2 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        answer = await talk(server, one + last)
        assert answer.count(b"HTTP/1.1 200") == 2
        assert answer.index(b'"/1"') < answer.index(b'"/2"')

    run(story)


def test_head_has_the_length_and_no_body() -> None:
    async def story(server: HttpServer) -> None:
        answer = await talk(server, b"HEAD /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert status_of(answer) == 200
        head, _, body = answer.partition(b"\r\n\r\n")
        assert body == b""
        assert b"content-length: 0" not in head.lower()

    run(story)


def test_a_chunked_body_and_expect_continue() -> None:
    async def story(server: HttpServer) -> None:
        head = b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n"
        answer = await talk(server, head + b"Connection: close\r\n\r\n", b"2\r\n{}\r\n0\r\n\r\n")
        first, _, rest = answer.partition(b"\r\n\r\n")
        assert status_of(first) in (100, 200)
        assert b'"body": "{}"' in (rest if status_of(first) == 100 else answer)

    run(story)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",  # no host
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # TLS
    ],
)
def test_what_is_not_http_is_said_to_be(data: bytes) -> None:
    async def story(server: HttpServer) -> None:
        answer = await talk(server, data)
        assert 400 <= status_of(answer) < 502
        assert "error" in body_of(answer)

    run(story)


def test_too_large_a_head_and_too_large_a_body_are_refused() -> None:
    async def story(server: HttpServer) -> None:
        answer = await talk(server, b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 40_000)
        assert status_of(answer) == 431
        head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (MAX_BODY_SIZE + 1)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(head + b"x" * (MAX_BODY_SIZE + 1))
        assert status_of(await reader.readuntil(b"\r\n\r\n")) == 413
        writer.close()

    run(story)


def test_a_client_that_sends_half_a_request_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "REQUEST_TIMEOUT_S", 0.1)

    async def story(server: HttpServer) -> None:
        assert await talk(server, b"GET / HTTP/1.1\r\nHost: x\r\n") == b""

    run(story)


def test_a_client_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "IDLE_TIMEOUT_S", 0.1)

    async def story(server: HttpServer) -> None:
        assert await talk(server) == b""

    run(story)


def test_a_client_that_takes_no_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "ANSWER_TIMEOUT_S", 0.1)

    async def large(request: Request) -> Response:
        return Response(200, "text/plain", b"x" * (64 << 20))

    async def story(server: HttpServer) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await writer.drain()
        await until(lambda: len(server._connections) == 1)
        await until(lambda: len(server._connections) == 0)
        writer.close()

    run(story, large)


def test_connections_over_the_limit_are_closed_and_the_others_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 2)

    async def story(server: HttpServer) -> None:
        kept = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
        await until(lambda: len(server._connections) == 2)
        assert await talk(server) == b""
        reader, writer = kept[0]
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert status_of(await reader.readuntil(b"\r\n\r\n")) == 200
        for _, writer in kept:
            writer.close()

    run(story)


def test_a_taken_port_and_a_foreign_address_are_said() -> None:
    async def story(server: HttpServer) -> None:
        with pytest.raises(PortTaken, match="is taken by another process"):
            await HttpServer(Address("127.0.0.1", server.port), echo).start()
        with pytest.raises(FatalError, match=r"control\.listen 203\.0\.113\.1:1"):
            await HttpServer(Address("203.0.113.1", 1), echo).start()

    run(story)


def test_the_client_reads_what_the_server_says_and_names_what_went_wrong() -> None:
    async def broken(request: Request) -> Response:
        return Response(500 if request.path == "/bad" else 200, "application/json", b"{")

    async def story(server: HttpServer) -> None:
        url = f"http://127.0.0.1:{server.port}"
        assert (await get_json(f"{url}/status"))["path"] == "/status"

    async def failing(server: HttpServer) -> None:
        url = f"http://127.0.0.1:{server.port}"
        with pytest.raises(NoAnswer, match="status 500"):
            await get_json(f"{url}/bad")
        with pytest.raises(NoAnswer, match="something else than JSON"):
            await get_json(url)
        with pytest.raises(NoAnswer):
            await get_json("http://127.0.0.1:1/status")
        for address in ("mirror..example.com:80", "127.0.0.1:70000", "[::1:80"):
            with pytest.raises(NoAnswer, match="nothing can answer at"):
                await get_json(f"http://{address}/status")

    run(story)
    run(failing, broken)


def test_the_client_does_not_wait_for_ever() -> None:
    async def never(request: Request) -> Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def story(server: HttpServer) -> None:
        with pytest.raises(NoAnswer, match="no answer within"):
            await get_json(f"http://127.0.0.1:{server.port}/", timeout_s=0.1)

    run(story, never)
