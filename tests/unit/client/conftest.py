"""What tests of finding and of following a cluster watch."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.broker.client import connection_pool as pool_module
from millrace.broker.client import opening
from millrace.broker.client.connection import Connection
from millrace.broker.protocol.address import Address


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[Address]:
    """The addresses of all connections that were begun."""
    addresses: list[Address] = []

    async def open_connection(name: str, address: Address, **options: Any) -> Connection:
        addresses.append(address)
        return await opening.open_connection(name, address, **options)

    monkeypatch.setattr(pool_module, "open_connection", open_connection)
    return addresses
