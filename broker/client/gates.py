"""What a cluster's addresses said when a connection was tried, and when one that refused may be tried again.

Used by `Cluster` for every connection that it opens. An address that refused the login or a certificate, or
whose certificate was refused here, gets one try at a time, each later than the one before: some services lock
a user out after a few wrong passwords. Who waited while another try was refused shares that answer.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Container
from dataclasses import dataclass, field

from millrace.broker.client.connection import Connection
from millrace.broker.client.retry import REFUSED_BACK_OFF
from millrace.broker.errors import AccessRefused, MillraceError
from millrace.broker.protocol.address import Address


@dataclass(slots=True, eq=False)
class _Gate:
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    refusal_count: int = 0
    opens_at: float = 0.0  # the loop's time
    error: AccessRefused | None = None


class Gates:
    """See the module's text. On one event loop. `rng` spreads the pauses."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._gates: dict[Address, _Gate] = {}
        self._failures: dict[Address, MillraceError] = {}

    @property
    def failures(self) -> list[MillraceError]:
        """Why the addresses that could not be reached when last tried could not."""
        return list(self._failures.values())

    def failure_at(self, address: Address) -> MillraceError | None:
        """Why no connection came about when the address was last tried; None where one did."""
        return self._failures.get(address)

    def is_shut(self, address: Address) -> bool:
        """Whether the address refused when it was last tried."""
        return address in self._gates

    def forget_others(self, addresses: Container[Address]) -> None:
        """The cluster has only these addresses now: what the others said is of no interest any more."""
        for address in [known for known in self._failures if known not in addresses]:
            del self._failures[address]

    async def open(self, address: Address, connect: Callable[[], Awaitable[Connection]]) -> Connection:
        """A connection by `connect`, when it is time for it. Raises what `connect` raises."""
        gate = self._gates.get(address)
        if gate is None:
            return await self._try(address, connect)
        seen = gate.refusal_count
        async with gate.turn:
            if gate.error is not None and gate.refusal_count != seen:
                raise gate.error
            if address in self._gates:
                await asyncio.sleep(max(0.0, gate.opens_at - asyncio.get_running_loop().time()))
            return await self._try(address, connect)

    async def _try(self, address: Address, connect: Callable[[], Awaitable[Connection]]) -> Connection:
        try:
            connection = await connect()
        except AccessRefused as error:
            gate = self._gates.setdefault(address, _Gate())
            gate.refusal_count += 1
            gate.error = error
            delay_ms = REFUSED_BACK_OFF.delay_ms(gate.refusal_count, self._rng.random())
            gate.opens_at = asyncio.get_running_loop().time() + delay_ms / 1000
            self._failures[address] = error
            raise
        except MillraceError as error:
            self._failures[address] = error
            raise
        self._gates.pop(address, None)
        self._failures.pop(address, None)
        return connection
