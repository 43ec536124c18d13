"""Where a token comes from may answer nothing of use, or not at all: that is no token, told as that."""

from __future__ import annotations

import asyncio

import pytest

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.oauth import TokenSource, TokenUnavailable
from millrace.broker.client.security import Secret, Security, TokenConfig
from millrace.broker.errors import ClusterUnreachable
from tests.unit.client.scripted_server import Peer, ScriptedServer
from tests.waiting import patience

UNFINISHED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab"


@pytest.mark.parametrize(
    "said", [b"no HTTP at all\r\n\r\n", b"", UNFINISHED, b"HTTP/1.1 400 No\r\n" + UNFINISHED[17:]]
)
def test_endpoint_that_does_not_speak_http_is_no_token(said: bytes) -> None:
    async def main() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(said)
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            config = TokenConfig.model_construct(
                endpoint=f"http://127.0.0.1:{port}/token",
                client_id="mirror",
                client_secret=Secret.of("hunter2"),
                file=None,
                env=None,
                command=None,
                scope=None,
                ca=None,
                urlencode=False,
            )
            with pytest.raises(TokenUnavailable, match=f"no token: http://127.0.0.1:{port}/token ") as caught:
                await asyncio.wait_for(TokenSource(config).token(), patience())
        assert "hunter2" not in str(caught.value)

    asyncio.run(main())


def test_token_that_does_not_come_in_time_is_no_silent_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(_: TokenSource) -> str:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(TokenSource, "token", never)

    async def main() -> None:
        async def wait_for_a_login(peer: Peer) -> None:
            await peer.answer_versions()
            await peer.reader.read()

        token = {"command": ["cat", "token"]}
        sasl = {"mechanism": "OAUTHBEARER", "token": token}
        security = Security.model_validate({"protocol": "SASL_PLAINTEXT", "sasl": sasl})
        async with (
            ScriptedServer(wait_for_a_login) as server,
            Cluster("agg", [server.address], request_timeout_ms=1_000, security=security) as agg,
        ):
            with pytest.raises(
                ClusterUnreachable, match=r"login was not over within .* security\.sasl\.token"
            ):
                await agg.metadata()

    asyncio.run(main())
