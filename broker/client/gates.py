"""What a cluster's addresses said when a connection was tried, and when one that refused may be tried again.

Used by `ConnectionPool` for every connection that it opens. An address that refused the login or a
certificate, or whose certificate was refused here, gets one try at a time, each later than the one before:
some services lock a user out after a few wrong passwords. Who waited while another try was refused shares
that answer.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Container
from dataclasses import dataclass, field

from millrace.broker.client.connection import Connection
from millrace.broker.client.retry import REFUSED_BACK_OFF
from millrace.broker.errors import AccessRefused, MillraceError, RequestTimedOut
from millrace.broker.protocol.address import Address


@dataclass(slots=True, eq=False)
class _Gate:
    error: AccessRefused
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    refusal_count: int = 0
    opens_at: float = 0.0  # the loop's time


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

    def turns_down(self, address: Address) -> bool:
        """Whether the address did not want this client's connection when it was last tried, rather than being
        slow to answer."""
        failure = self._failures.get(address)
        return failure is not None and not isinstance(failure, RequestTimedOut)

    def refusal_at(self, address: Address) -> AccessRefused | None:
        """What the address refused when it was last tried, if it did."""
        gate = self._gates.get(address)
        return gate.error if gate is not None else None

    def forget_others(self, addresses: Container[Address]) -> None:
        """The cluster has only these addresses now: what the others said is of no interest any more."""
        for address in [known for known in self._failures if known not in addresses]:
            del self._failures[address]

    async def open(
        self, address: Address, connect: Callable[[], Awaitable[Connection]], wait_ms: float = math.inf
    ) -> Connection:
        """A connection by `connect`, when it is time for it. Raises what `connect` raises, and what it raised
        last where it is not time for it within `wait_ms`."""
        gate = self._gates.get(address)
        if gate is None:
            return await self._try(address, connect)
        seen = gate.refusal_count
        until = asyncio.get_running_loop().time() + wait_ms / 1000
        try:
            async with asyncio.timeout_at(until if until < math.inf else None):
                await gate.turn.acquire()
        except TimeoutError:
            raise gate.error from None
        try:
            if gate.refusal_count != seen:
                raise gate.error
            if address in self._gates:
                now = asyncio.get_running_loop().time()
                await asyncio.sleep(max(0.0, min(gate.opens_at, until) - now))
                if until < gate.opens_at:
                    raise gate.error
            return await self._try(address, connect)
        finally:
            gate.turn.release()

    async def _try(self, address: Address, connect: Callable[[], Awaitable[Connection]]) -> Connection:
        try:
            connection = await connect()
        except AccessRefused as error:
            gate = self._gates.setdefault(address, _Gate(error))
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
