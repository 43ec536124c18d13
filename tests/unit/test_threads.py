"""Servers on threads of the tests' own: whatever is under way when they are stopped is ended in order."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading

import pytest

from tests.cluster.faults.proxies import ProxyNetwork
from tests.ports import free_port
from tests.threads import LoopThread, first_of, meanwhile
from tests.waiting import patience, until

TURNS = 1_000
"""More than pass by chance between two calls of another thread."""


def test_a_connection_that_is_under_way_has_time_to_end() -> None:
    """It ends what it has begun, which takes as many turns as it needs."""
    thread, port = LoopThread("ends"), free_port()
    begun, told = threading.Semaphore(0), []

    async def ends_late() -> None:
        begun.release()
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(TURNS):
                await asyncio.sleep(0)
            told.append("half")

    async def connection(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await first_of(ends_late(), ends_late())
        finally:
            told.append("whole")
            writer.close()

    thread.run(thread.serve(connection, port))
    with socket.create_connection(("127.0.0.1", port), patience()) as client:
        for _ in range(2):
            assert begun.acquire(timeout=patience())
        thread.stop()
        assert told == ["half", "half", "whole"]
        assert thread.loop.is_closed()
        assert _is_over(client)


def test_with_one_half_the_other_ends() -> None:
    async def fails() -> None:
        raise ConnectionResetError

    async def scenario() -> None:
        waiting = asyncio.Event()
        with pytest.raises(ConnectionResetError):
            async with asyncio.timeout(patience()):
                await first_of(fails(), _forever(waiting))
        assert waiting.is_set(), "it was cancelled, and that was waited for"

    asyncio.run(scenario())


async def _forever(is_over: asyncio.Event) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        is_over.set()


def test_what_goes_on_meanwhile_ends_with_its_block() -> None:
    ended = threading.Event()

    def work(is_over: threading.Event) -> None:
        assert is_over.wait(patience())
        ended.set()

    with pytest.raises(ZeroDivisionError), meanwhile(work):
        raise ZeroDivisionError
    assert ended.is_set()


@pytest.mark.parametrize("scene", ["passed_on", "cut"])
def test_proxies_that_are_closed_end_their_connections(monkeypatch: pytest.MonkeyPatch, scene: str) -> None:
    """Those that a cut holds up, too, and nothing is left for a loop that is no more."""
    unraisable: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", unraisable.append)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(patience())
        _passed_on(server) if scene == "passed_on" else _cut(server)
    gc.collect()
    assert unraisable == []


def _passed_on(server: socket.socket) -> None:
    network = ProxyNetwork()
    with _connected(network, server) as client, server.accept()[0] as there:
        there.settimeout(patience())
        client.sendall(b"asked")
        assert there.recv(5) == b"asked"
        there.sendall(b"said")
        assert client.recv(4) == b"said"
        network.close()
        assert _is_over(there) and _is_over(client)


def _cut(server: socket.socket) -> None:
    network = ProxyNetwork()
    network.cut("", "b", both_ways=True)
    with _connected(network, server) as client:
        until(lambda: network._between.get(("", "b")), "the connection is held up")
        network.close()
        assert _is_over(client)


def _connected(network: ProxyNetwork, server: socket.socket) -> socket.socket:
    """To node `b`, and from none that has a process: such a connection comes from ""."""
    host, _, port = network.endpoint("b", server.getsockname()[1]).reached.rpartition(":")
    return socket.create_connection((host, int(port)), patience())


def _is_over(connection: socket.socket) -> bool:
    connection.settimeout(patience())
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
