"""Connections from one broker to the others."""

from __future__ import annotations

import asyncio

import pytest

from millrace.broker.client.broker_connections import BrokerConnections
from millrace.broker.errors import NetworkException
from millrace.broker.protocol.address import Address
from tests.unit.client.scripted_server import Peer, ScriptedServer


def test_stranger_on_another_brokers_port_is_a_lost_connection_like_any_other() -> None:
    """A fetcher asks again after these alone: any other error would end its broker."""

    async def web_server(peer: Peer) -> None:
        await peer.read()
        await peer.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await peer.reader.read()

    async def main() -> None:
        async with ScriptedServer(web_server) as server:
            peers = BrokerConnections({2: Address("127.0.0.1", server.port)}.get, "broker-1")
            with pytest.raises(
                NetworkException, match=f"broker 2: {server.address}: what answers there does not"
            ):
                await peers.get(2, "fetch")

    asyncio.run(main())
