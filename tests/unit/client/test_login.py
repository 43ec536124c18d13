"""Logging in over a real socket: order, renewal, and servers that misbehave."""

from __future__ import annotations

import asyncio
import base64
import datetime
import gc
import itertools
import re
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from kio.schema.sasl_handshake.v1.request import SaslHandshakeRequest
from kio.static.primitive import i64Timedelta

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.connection import request_schema
from millrace.broker.client.login import Access
from millrace.broker.client.opening import open_connection
from millrace.broker.client.retry import REFUSED_BACK_OFF
from millrace.broker.client.security import Security
from millrace.broker.errors import AccessRefused, ClusterUnreachable, KafkaError, NetworkException
from millrace.broker.protocol.address import Address
from millrace.broker.protocol.frames import Api
from tests.unit.client.scripted_server import (
    Handler,
    Peer,
    ScriptedServer,
    brokerlike,
    metadata_answer,
    response,
)
from tests.waiting import patience
from tests.waiting import until_async as until

HEARTBEAT = request_schema(Api.HEARTBEAT, 4)


@pytest.fixture
def password(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.write_text("hunter2")
    return path


def security(password: Path, mechanism: str = "PLAIN") -> Security:
    sasl = {"mechanism": mechanism, "username": "mirror", "password": {"file": str(password)}}
    return Security.model_validate({"protocol": "SASL_PLAINTEXT", "sasl": sasl})


def handshake(head: Any, request: Any) -> Any:
    return response(Api.SASL_HANDSHAKE, head.version, error_code=0, mechanisms=("PLAIN",))


def authenticated(head: Any, *, lifetime_ms: int = 0, auth_bytes: bytes = b"", error_code: int = 0) -> Any:
    lifetime = i64Timedelta.parse(datetime.timedelta(milliseconds=lifetime_ms))
    return response(
        Api.SASL_AUTHENTICATE,
        head.version,
        error_code=error_code,
        error_message="no hunter2 here" if error_code else None,
        auth_bytes=auth_bytes,
        session_lifetime=lifetime,
    )


def heartbeat() -> Any:
    return HEARTBEAT.HeartbeatRequest(group_id="g", generation_id=1, member_id="m", group_instance_id=None)


def beat(head: Any, _: Any) -> Any:
    return response(Api.HEARTBEAT, head.version, error_code=0)


async def opened(server: ScriptedServer, password: Path, mechanism: str = "PLAIN") -> Any:
    access = Access(security(password, mechanism))
    address = Address.parse(server.address)
    return await open_connection("agg", address, client_id="test", timeout_ms=5_000, access=access)


def test_the_session_is_renewed_with_nothing_in_between(password: Path) -> None:
    # Requests are made all the time; between a handshake and the end of its login the server must see none.
    seen: list[int] = []
    logins: list[int] = []

    def see(inner: Callable[[Any, Any], Any]) -> Handler:
        def handler(head: Any, request: Any) -> Any:
            seen.append(int(head.api_key))
            return inner(head, request)

        return handler

    def authenticate(head: Any, request: Any) -> Any:
        logins.append(1)
        assert request.auth_bytes == b"\0mirror\0hunter2"
        return authenticated(head, lifetime_ms=60)

    async def slow_beat(head: Any, request: Any) -> Any:
        await asyncio.sleep(0.002)  # so that requests queue up behind each other
        return beat(head, request)

    async def run() -> None:
        handlers: dict[Api, Handler] = {
            Api.SASL_HANDSHAKE: see(handshake),
            Api.SASL_AUTHENTICATE: see(authenticate),
            Api.HEARTBEAT: see(slow_beat),
        }
        async with ScriptedServer(brokerlike(handlers)) as server:
            connection = await opened(server, password)

            async def load() -> None:
                while len(logins) < 5:
                    await connection.call(heartbeat(), 5_000)

            async with asyncio.timeout(patience()):
                await asyncio.gather(*(load() for _ in range(8)))
            assert connection.is_open
            connection.close()

    asyncio.run(run())
    for position, key in enumerate(seen):
        if key == Api.SASL_HANDSHAKE:
            assert seen[position + 1 : position + 2] in ([Api.SASL_AUTHENTICATE], [])
    assert seen.count(Api.HEARTBEAT) > 5


@pytest.mark.parametrize("gives_up", [False, True])
def test_a_login_waits_for_an_answer_that_is_held_back_and_its_time_begins_then(gives_up: bool) -> None:
    """A coordinator holds a JoinGroup for as long as a rebalance may take; a fetch may be a long poll."""
    seen: list[int] = []
    let = asyncio.Event()

    async def held_beat(head: Any, request: Any) -> Any:
        seen.append(int(head.api_key))
        await let.wait()
        return beat(head, request)

    def seen_handshake(head: Any, request: Any) -> Any:
        seen.append(int(head.api_key))
        return handshake(head, request)

    async def run() -> None:
        handlers: dict[Api, Handler] = {Api.SASL_HANDSHAKE: seen_handshake, Api.HEARTBEAT: held_beat}
        async with ScriptedServer(brokerlike(handlers)) as server:
            where = Address.parse(server.address)
            connection = await open_connection("agg", where, client_id="test", timeout_ms=60_000)

            async def log_in() -> None:
                async with connection.alone(300) as ask:
                    await ask(SaslHandshakeRequest(mechanism="PLAIN"))

            held = asyncio.create_task(connection.call(heartbeat(), 60_000))
            await until(lambda: bool(seen))
            logging_in = asyncio.create_task(log_in())
            late = asyncio.get_running_loop().time() + 0.4
            await until(lambda: asyncio.get_running_loop().time() > late)
            behind = asyncio.create_task(connection.call(heartbeat(), 60_000))
            if gives_up:
                held.cancel()
                await asyncio.wait([held])
            assert connection.is_open and not logging_in.done()
            let.set()
            await asyncio.gather(logging_in, behind)
            assert seen == [Api.HEARTBEAT, Api.SASL_HANDSHAKE, Api.HEARTBEAT]
            connection.close()

    asyncio.run(run())


def test_a_login_that_waits_fails_with_its_connection() -> None:
    async def run() -> None:
        asked = asyncio.Event()

        async def hold(head: Any, request: Any) -> Any:
            asked.set()
            await asyncio.Event().wait()

        async with ScriptedServer(brokerlike({Api.HEARTBEAT: hold})) as server:
            where = Address.parse(server.address)
            connection = await open_connection("agg", where, client_id="test", timeout_ms=60_000)

            async def log_in() -> None:
                async with connection.alone(60_000):
                    raise AssertionError("it has the turn")

            held = asyncio.create_task(connection.call(heartbeat(), 60_000))
            await asked.wait()
            logging_in = asyncio.create_task(log_in())
            await asyncio.sleep(0)
            connection.close()
            async with asyncio.timeout(patience()):
                for each in (held, logging_in):
                    with pytest.raises(NetworkException, match="closed by this client"):
                        await each

    asyncio.run(run())


def test_a_password_that_no_longer_holds_ends_the_connection_and_the_next_login_says_why(
    password: Path,
) -> None:
    logins: list[bytes] = []

    def authenticate(head: Any, request: Any) -> Any:
        logins.append(bytes(request.auth_bytes))
        if len(logins) > 1:
            return authenticated(head, error_code=58)
        return authenticated(head, lifetime_ms=50)

    async def run() -> None:
        handlers: dict[Api, Handler] = {
            Api.SASL_HANDSHAKE: handshake,
            Api.SASL_AUTHENTICATE: authenticate,
            Api.HEARTBEAT: beat,
        }
        async with ScriptedServer(brokerlike(handlers)) as server:
            connection = await opened(server, password)
            password.write_text("changed")
            await until(lambda: not connection.is_open)
            with pytest.raises(NetworkException, match="could not log in again"):
                await connection.call(heartbeat(), 5_000)
            with pytest.raises(AccessRefused, match="the login by PLAIN is refused") as refusal:
                await opened(server, password)
            assert "hunter2" not in str(refusal.value)
            assert str(refusal.value).startswith(f"cluster agg: {server.address}: ")

    asyncio.run(run())
    assert logins[1:] == [b"\0mirror\0changed"] * 2  # read again at each login


def test_a_closed_connection_leaves_nothing_behind(password: Path) -> None:
    """Its next login is an hour away; a mirror whose brokers restart would gather such connections."""

    def authenticate(head: Any, request: Any) -> Any:
        return authenticated(head, lifetime_ms=3_600_000)

    async def run() -> None:
        handlers: dict[Api, Handler] = {Api.SASL_HANDSHAKE: handshake, Api.SASL_AUTHENTICATE: authenticate}
        async with ScriptedServer(brokerlike(handlers)) as server:
            connection = await opened(server, password)
            left = weakref.ref(connection)
            connection.close()
            del connection

            def is_gone() -> bool:
                gc.collect()
                return left() is None

            await until(is_gone)

    asyncio.run(run())


def test_a_server_that_cannot_prove_itself_gets_no_request(password: Path) -> None:
    async def script(peer: Peer) -> None:
        await peer.answer_versions()
        head, request, _ = await peer.read()
        await peer.answer(head, handshake(head, request))
        head, request, _ = await peer.read()
        nonce = bytes(request.auth_bytes).decode().split("r=")[1]
        salt = base64.b64encode(b"salt").decode()
        challenge = f"r={nonce}x,s={salt},i=4096".encode()
        await peer.answer(head, authenticated(head, auth_bytes=challenge))
        head, _, _ = await peer.read()
        forged = b"v=" + base64.b64encode(bytes(32))
        await peer.answer(head, authenticated(head, auth_bytes=forged))
        with pytest.raises(asyncio.IncompleteReadError):
            await peer.read()

    async def run() -> None:
        async with ScriptedServer(script) as server:
            with pytest.raises(AccessRefused, match="impostor"):
                await opened(server, password, "SCRAM-SHA-256")

    asyncio.run(run())


def test_a_server_without_logins_is_told_from_one_that_is_away(password: Path) -> None:
    async def script(peer: Peer) -> None:
        await peer.answer_versions({18: (0, 3), 3: (0, 12)})
        await peer.reader.read()

    async def run() -> None:
        async with ScriptedServer(script) as server:
            with pytest.raises(AccessRefused, match="the server knows no logins"):
                await opened(server, password)

    asyncio.run(run())


def test_refused_logins_are_tried_one_at_a_time_with_growing_pauses(password: Path) -> None:
    """Many callers of a cluster whose password is wrong are few logins, and each hears why."""
    moments: list[float] = []

    def authenticate(head: Any, request: Any) -> Any:
        moments.append(asyncio.get_running_loop().time())
        return authenticated(head, error_code=58)

    async def run() -> None:
        handlers: dict[Api, Handler] = {Api.SASL_HANDSHAKE: handshake, Api.SASL_AUTHENTICATE: authenticate}
        async with (
            ScriptedServer(brokerlike(handlers)) as server,
            Cluster("agg", [server.address], security=security(password)) as cluster,
        ):
            assert cluster.trouble is None
            with pytest.raises(AccessRefused):
                await cluster.metadata()
            trouble = cluster.trouble
            assert trouble is not None and "the login by PLAIN is refused" in trouble

            async def ask() -> None:
                with pytest.raises(AccessRefused, match="refused"):
                    await cluster.metadata(max_age_ms=0)

            await asyncio.gather(*(ask() for _ in range(20)))
            assert len(moments) == 2
            await ask()

    asyncio.run(run())
    assert len(moments) == 3
    least_s = [each * (1 - REFUSED_BACK_OFF.jitter) / 1000 for each in (500, 1_000)]
    pauses_s = [after - before for before, after in itertools.pairwise(moments)]
    assert all(pause > least for pause, least in zip(pauses_s, least_s, strict=True)), pauses_s


def test_trouble_ends_when_the_cluster_lets_us_in(password: Path) -> None:
    is_wrong = True

    def authenticate(head: Any, request: Any) -> Any:
        return authenticated(head, error_code=58 if is_wrong else 0)

    async def run() -> None:
        nonlocal is_wrong
        port: list[int] = []

        def metadata(head: Any, request: Any) -> Any:
            return metadata_answer(head.version, {1: port[0]}, {})

        handlers: dict[Api, Handler] = {
            Api.SASL_HANDSHAKE: handshake,
            Api.SASL_AUTHENTICATE: authenticate,
            Api.METADATA: metadata,
        }
        async with ScriptedServer(brokerlike(handlers)) as server:
            port.append(server.port)
            async with Cluster("agg", [server.address], security=security(password)) as cluster:
                with pytest.raises(AccessRefused):
                    await cluster.metadata()
                is_wrong = False
                await cluster.metadata()
                assert cluster.trouble is None

    asyncio.run(run())


def test_one_server_that_refuses_does_not_hide_the_others(password: Path) -> None:
    def refusing(head: Any, request: Any) -> Any:
        return authenticated(head, error_code=58)

    def accepting(head: Any, request: Any) -> Any:
        return authenticated(head)

    async def run() -> None:
        port: list[int] = []

        def metadata(head: Any, request: Any) -> Any:
            return metadata_answer(head.version, {1: port[0]}, {})

        bad: dict[Api, Handler] = {Api.SASL_HANDSHAKE: handshake, Api.SASL_AUTHENTICATE: refusing}
        good: dict[Api, Handler] = {
            Api.SASL_HANDSHAKE: handshake,
            Api.SASL_AUTHENTICATE: accepting,
            Api.METADATA: metadata,
        }
        async with ScriptedServer(brokerlike(bad)) as first, ScriptedServer(brokerlike(good)) as second:
            port.append(second.port)
            for _ in range(6):  # whichever of the two is asked first
                servers = [first.address, second.address]
                async with Cluster("agg", servers, security=security(password)) as cluster:
                    assert list((await cluster.metadata()).brokers) == [1]

    asyncio.run(run())


def test_a_try_that_was_too_short_takes_no_better_reasons_place(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> str:
        async def end_at_the_first_request(peer: Peer) -> None:
            script.append(stay_silent)
            await peer.answer_versions()
            await peer.read()

        async def stay_silent(peer: Peer) -> None:
            await peer.reader.read()

        script: list[Callable[[Peer], Awaitable[None]]] = [end_at_the_first_request]
        async with (
            ScriptedServer(lambda peer: script[-1](peer)) as server,
            Cluster("agg", [server.address], request_timeout_ms=1_000) as cluster,
        ):
            with pytest.raises(ClusterUnreachable) as failure:
                await cluster.metadata()
            assert len(script) > 1
            return str(failure.value)

    assert "it is stuck" in asyncio.run(run())
    monkeypatch.setattr("millrace.broker.client.cluster.TELLING_TRY_MS", 5_000)
    assert "one that asks for a login does that" in asyncio.run(run())


def test_silent_ends_say_what_they_may_mean() -> None:
    async def end_at_once(peer: Peer) -> None:
        await peer.read()

    async def end_at_the_first_request(peer: Peer) -> None:
        await peer.answer_versions()
        await peer.read()

    async def alert(peer: Peer) -> None:
        await peer.read()
        await peer.send(bytes.fromhex("15030300020228"))
        await peer.reader.read()

    async def stay_silent(peer: Peer) -> None:
        await peer.reader.read()

    async def said(script: Callable[[Peer], Awaitable[None]]) -> str:
        async with (
            ScriptedServer(script) as server,
            Cluster("agg", [server.address], request_timeout_ms=1_000) as cluster,
        ):
            with pytest.raises((ClusterUnreachable, KafkaError)) as failure:
                await cluster.metadata()
            return str(failure.value)

    assert "a TLS port does that (set security.protocol to SSL or SASL_SSL)" in asyncio.run(said(end_at_once))
    assert re.search(r"within \d+ ms: it is stuck, or does not speak", asyncio.run(said(stay_silent)))
    assert "one that asks for a login does that" in asyncio.run(said(end_at_the_first_request))
    assert "the port speaks TLS; set security.protocol to SSL or SASL_SSL" in asyncio.run(said(alert))
