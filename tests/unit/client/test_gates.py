"""Addresses that refused: when they are asked again, and who waits for that."""

from __future__ import annotations

import asyncio
import random

import pytest

from millrace.broker.client import gates as gates_module
from millrace.broker.client.connection import Connection
from millrace.broker.client.gates import Gates
from millrace.broker.client.retry import BackOff
from millrace.broker.errors import AccessRefused
from millrace.broker.protocol.address import Address
from tests.waiting import until_async as until

WHERE = Address("127.0.0.1", 9092)


class Refusing:
    def __init__(self) -> None:
        self.count = 0
        self.let = asyncio.Event()
        self.let.set()

    async def connect(self) -> Connection:
        self.count += 1
        await self.let.wait()
        raise AccessRefused("agg", f"refused for the {self.count}. time")


def test_who_has_no_time_to_wait_for_an_address_that_refused_hears_what_it_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gates_module, "REFUSED_BACK_OFF", BackOff(first_ms=3_600_000, limit_ms=3_600_000))

    async def main() -> None:
        gates, server = Gates(random.Random(7)), Refusing()
        with pytest.raises(AccessRefused):
            await gates.open(WHERE, server.connect)
        async with asyncio.timeout(30):
            with pytest.raises(AccessRefused, match=r"refused for the 1\. time"):
                await gates.open(WHERE, server.connect, 1)
        assert server.count == 1, "it was not time yet"

    asyncio.run(main())


def test_who_has_no_time_to_wait_for_the_try_of_another_hears_what_was_said_before() -> None:
    async def main() -> None:
        gates, server = Gates(random.Random(7)), Refusing()
        with pytest.raises(AccessRefused):
            await gates.open(WHERE, server.connect)
        server.let.clear()
        trying = asyncio.create_task(gates.open(WHERE, server.connect))
        await until(lambda: server.count == 2)
        async with asyncio.timeout(30):
            with pytest.raises(AccessRefused, match=r"refused for the 1\. time"):
                await gates.open(WHERE, server.connect, 1)
        server.let.set()
        with pytest.raises(AccessRefused, match=r"refused for the 2\. time"):
            await trying

    asyncio.run(main())
