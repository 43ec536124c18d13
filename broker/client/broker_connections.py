"""Connections from one broker to the others of its cluster, by broker id.

A broker knows where the others are (ZooKeeper tells it), so nothing is discovered here: `address_of` gives
the address an id has now, or None while it is not registered. One connection per (id, purpose): a follower's
long poll never holds up transaction markers. A broker that came back at another address is reached there,
because a connection whose address is not the present one is closed and opened anew.

Called by the replica fetchers and the transaction coordinator. On the event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from millrace.broker.client.connection import Connection
from millrace.broker.client.opening import open_connection
from millrace.broker.errors import AccessRefused, NetworkException
from millrace.broker.protocol.address import Address

CONNECT_TIMEOUT_MS = 5_000


class BrokerConnections:
    """See the module. `client_id` is what the other brokers see in their logs and quotas."""

    def __init__(self, address_of: Callable[[int], Address | None], client_id: str) -> None:
        self._address_of = address_of
        self._client_id = client_id
        self._open: dict[tuple[int, str], Connection] = {}
        self._turns: dict[tuple[int, str], asyncio.Lock] = {}
        self._closed = False

    async def get(self, broker_id: int, purpose: str) -> Connection:
        """An open connection. Raises NetworkException, RequestTimedOut, ProtocolError."""
        key = (broker_id, purpose)
        async with self._turns.setdefault(key, asyncio.Lock()):
            address = self._address_of(broker_id)
            if address is None or self._closed:
                raise NetworkException(f"broker {broker_id} is not registered")
            connection = self._open.get(key)
            if connection is not None:
                if connection.is_open and connection.address == address:
                    return connection
                connection.close()
            try:
                opened = await open_connection(
                    f"broker {broker_id}", address, client_id=self._client_id, timeout_ms=CONNECT_TIMEOUT_MS
                )
            except AccessRefused as error:  # a stranger has the port: the broker is away, as any that is down
                raise NetworkException(str(error)) from None
            if self._closed:
                opened.close()
                raise NetworkException("this broker is stopping")
            self._open[key] = opened
            return opened

    def close(self) -> None:
        """Close them all; no more are opened."""
        self._closed = True
        for connection in self._open.values():
            connection.close()
        self._open.clear()
