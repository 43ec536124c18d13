"""The listener on real sockets: whom it closes when it tidies up. Its clock is the test's."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvloop
from structlog.testing import capture_logs

from millrace.broker.config import BrokerSettings, parse_connection_limits, parse_settings
from millrace.broker.errors import ConfigError
from millrace.broker.protocol.address import Address
from millrace.broker.server import listener as listener_module
from millrace.broker.server.listener import Listener, bind
from millrace.broker.server.memory_limits import SEND_STALL_SECONDS, STALL_SECONDS, AnswerBacklog
from millrace.broker.telemetry.metrics import BrokerMetrics
from tests.waiting import patience
from tests.waiting import until_async as until

MIB = 1 << 20
ANSWER = bytes(4 * MIB)


class Echo:
    """Stands for the dispatcher: four MiB for a request that asks for them, nothing much otherwise."""

    def dispatch(self, frame: memoryview, _client_address: str, _memory: Any) -> Any:
        return ANSWER if bytes(frame[8:]) == b"much" else b"ok"


@contextlib.asynccontextmanager
async def listening(**settings: Any) -> AsyncIterator[tuple[Listener, BrokerMetrics, int]]:
    wanted = BrokerSettings(**settings)
    bound = bind(Address("127.0.0.1", 0))
    backlog = AnswerBacklog(wanted.queued_max_response_bytes, 8 * MIB, 4 * MIB)
    metrics = BrokerMetrics()
    listener = Listener(bound, Echo(), metrics, wanted, backlog)  # type: ignore[arg-type]
    await listener.start()
    try:
        yield listener, metrics, bound.getsockname()[1]
    finally:
        await listener.stop()


async def connect(port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    peer = socket.socket()
    peer.setblocking(False)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await loop.sock_connect(peer, ("127.0.0.1", port))
    return peer


def request(body: bytes) -> bytes:
    return struct.pack(">ihhi", 8 + len(body), 3, 0, 0) + body


async def ask(peer: socket.socket) -> bool:
    """Whether the connection is served."""
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_sendall(peer, request(b"x"))
        return await asyncio.wait_for(loop.sock_recv(peer, 2), patience()) == b"ok"
    except ConnectionError:
        return False


def run(scenario: Callable[[], Any]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())


def test_reader_that_stalls_is_closed_when_the_backlog_is_full_and_others_are_not() -> None:
    async def scenario() -> None:
        async with listening(queued_max_response_bytes=16 * MIB) as (listener, metrics, port):
            stalled = [await connect(port) for _ in range(4)]
            good = await connect(port)
            loop = asyncio.get_running_loop()
            for peer in stalled:
                await loop.sock_sendall(peer, request(b"much") * 3)
            await until(lambda: len(listener.backlog) == 4 and listener.backlog.held >= 16 * MIB)
            now = time.monotonic()
            listener.tidy(now)
            listener.tidy(now + STALL_SECONDS - 1)
            assert metrics.closes == {}
            with capture_logs() as lines:
                listener.tidy(now + STALL_SECONDS + 1)
            assert metrics.closes == {"stalled reader": 2}  # enough to be half empty again
            (line,) = lines  # of many a minute it tells how many
            assert line["event"] == "connection closed: it does not read its answers, which pile up"
            assert (line["log_level"], line["client"]) == ("warning", "127.0.0.1")
            await until(lambda: listener.connection_count == 3 and listener.backlog.held <= 8 * MIB)
            assert await ask(good)
            for peer in (*stalled, good):
                peer.close()
            await until(lambda: listener.connection_count == 0 and listener.backlog.held == 0)

    run(scenario)


def test_half_requests_are_closed_only_while_others_wait_for_memory() -> None:
    async def scenario() -> None:
        async with listening(queued_max_request_bytes=8 * MIB) as (listener, metrics, port):
            loop = asyncio.get_running_loop()
            half = [await connect(port) for _ in range(3)]
            for number, peer in enumerate(half):  # the third is the one that may exceed the bound
                await loop.sock_sendall(peer, struct.pack(">i", 8 * MIB) + bytes(3 * MIB))
                held = (number + 1) * (4 * MIB - (64 << 10))
                await until(lambda held=held: listener.memory.used >= held)
            now = time.monotonic()
            for seconds in (0.0, SEND_STALL_SECONDS + 1):
                listener.tidy(now + seconds)
            assert metrics.closes == {}  # slow, and in nobody's way
            late = await connect(port)
            sending = asyncio.ensure_future(loop.sock_sendall(late, request(bytes(6 * MIB))))
            await until(lambda: bool(listener.memory.waiting))
            for seconds in (30.0, 30.0 + SEND_STALL_SECONDS):
                listener.tidy(now + seconds)
            assert metrics.closes["stalled request"] >= 1
            await asyncio.wait_for(sending, patience())
            assert await asyncio.wait_for(loop.sock_recv(late, 2), patience()) == b"ok"
            for peer in (*half, late):
                peer.close()
            await until(lambda: listener.connection_count == 0 and listener.memory.used == 0)

    run(scenario)


def test_connections_of_one_address_are_counted_down_as_they_go() -> None:
    async def scenario() -> None:
        async with listening(max_connections_per_ip=2) as (listener, metrics, port):
            for _ in range(3):
                peers = [await connect(port) for _ in range(3)]
                assert [await ask(peer) for peer in peers].count(True) == 2
                for peer in peers:
                    peer.close()
                await until(lambda: listener.connection_count == 0)
            assert metrics.connections_refused == 3
            assert metrics.closes == {"max.connections.per.ip": 3}
            assert not listener._per_address

    run(scenario)


def test_an_address_may_have_a_limit_of_its_own() -> None:
    async def scenario() -> None:
        limits = {"max_connections_per_ip": 1, "max_connections_per_ip_overrides": "localhost:3, 10.0.0.9:0"}
        async with listening(**limits) as (listener, metrics, port):
            peers = [await connect(port) for _ in range(5)]
            assert [await ask(peer) for peer in peers].count(True) == 3
            assert metrics.connections_refused == 2
            for peer in peers:
                peer.close()
            await until(lambda: listener.connection_count == 0)

    run(scenario)


def test_limits_that_are_set_anew_hold_for_those_who_come_and_end_nobody() -> None:
    async def scenario() -> None:
        async with listening() as (listener, _, port):
            peers = [await connect(port) for _ in range(2)]
            assert [await ask(peer) for peer in peers] == [True, True]
            listener.set_limits(BrokerSettings(max_connections_per_ip=2))
            peers.append(await connect(port))
            assert [await ask(peer) for peer in peers] == [True, True, False]
            listener.set_limits(
                BrokerSettings(max_connections_per_ip=2, max_connections_per_ip_overrides="localhost:3")
            )
            await until(lambda: listener._max_connections_of.get("127.0.0.1") == 3)
            peers.append(await connect(port))
            assert await ask(peers[-1])
            listener.set_limits(BrokerSettings(max_connections=3))
            peers.append(await connect(port))
            assert not await ask(peers[-1])
            for peer in peers:
                peer.close()
            await until(lambda: listener.connection_count == 0)

    run(scenario)


def test_a_host_that_nobody_knows_limits_nobody() -> None:
    async def scenario() -> None:
        async with listening(max_connections_per_ip_overrides="no-such-host.invalid:0") as (_, metrics, port):
            peer = await connect(port)
            assert await ask(peer)
            assert metrics.connections_refused == 0
            peer.close()

    run(scenario)


@pytest.mark.parametrize("text", ["localhost", "localhost:", ":3", "localhost:x", "localhost:-1", "a:1,b"])
def test_limits_of_addresses_are_checked(text: str) -> None:
    key = "max.connections.per.ip.overrides"
    with pytest.raises(ConfigError, match=f"settings.{key}.*host:limit"):
        parse_settings({key: text})


def test_limits_of_addresses_may_be_ipv6() -> None:
    assert parse_connection_limits("::1:5,[fe80::1]:6,host:7") == {"::1": 5, "fe80::1": 6, "host": 7}


def test_nobody_may_connect_only_where_somebody_may() -> None:
    assert not parse_settings(
        {"max.connections.per.ip": 0, "max.connections.per.ip.overrides": "::1:5"}
    ).max_connections_per_ip
    with pytest.raises(ConfigError, match=r"max\.connections\.per\.ip"):
        parse_settings({"max.connections.per.ip": 0})


@pytest.mark.parametrize("waits", [False, True])
def test_idle_connection_is_closed_whatever_it_may_wait_for(
    monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    async def scenario() -> None:
        async with listening(connections_max_idle_ms=60_000) as (listener, metrics, port):
            peer = await connect(port)
            assert await ask(peer)
            if waits:
                answer = asyncio.get_running_loop().create_future()
                monkeypatch.setattr(Echo, "dispatch", lambda *_: answer)
                await asyncio.get_running_loop().sock_sendall(peer, request(b"x"))
                (connection,) = listener._connections
                await until(lambda: connection._pending)
            listener.tidy(time.monotonic() + 59)
            assert metrics.closes == {}
            listener.tidy(time.monotonic() + 61)
            assert metrics.closes == {"idle": 1}
            peer.close()

    run(scenario)


def test_connection_of_a_client_that_is_gone_is_given_up_while_its_fetch_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        async with listening() as (listener, _, port):
            answers: list[asyncio.Future[bytes]] = []

            def waits(*_: object) -> asyncio.Future[bytes]:
                answers.append(asyncio.get_running_loop().create_future())
                return answers[-1]

            monkeypatch.setattr(Echo, "dispatch", waits)
            peers = [await connect(port) for _ in range(3)]
            for peer in peers:
                await asyncio.get_running_loop().sock_sendall(peer, request(b"x"))
            await until(lambda: len(answers) == 3)
            for peer in peers:
                peer.close()
            await until(lambda: listener.connection_count == 0)
            assert all(answer.cancelled() for answer in answers)

    run(scenario)


def test_a_round_of_tidying_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "TIDY_INTERVAL_SECONDS", 0.001)

    async def scenario() -> None:
        async with listening() as (listener, _, _):
            rounds = 0

            def tidy(_now: float) -> None:
                nonlocal rounds
                rounds += 1
                raise RuntimeError("on purpose")

            monkeypatch.setattr(listener, "tidy", tidy)
            await until(lambda: rounds > 1)

    run(scenario)
