"""Work that takes a processor's time, kept away from the event loop or done there in parts.

Coordinators are given a `Compute`: a thread in the broker, `at_once` where there are none (simulations).
The coordinators of groups and transactions read their logs so. What has to be done on the loop for very
many is done in `slices`, or in `Turns`, between which others have theirs: by the controller, by who
brings partitions here, by handlers of requests that name very many.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")

WORK_SECONDS = 0.002
PAUSE_SECONDS = 0.0002

SLICE_LENGTH = 500
"""Groups, at some 3 µs for each."""

TURN_SECONDS = 0.01
"""How long the loop works for one request or one change, before others have their turn."""

Compute = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs what takes its time where it keeps nobody waiting."""


async def at_once(work: Callable[[], Any]) -> Any:
    return work()


async def slices(items: Sequence[Item], length: int | None = None) -> AsyncIterator[Sequence[Item]]:
    """`items` in parts, and others' turns between them; by count and not by time, so that simulations see the
    same each time."""
    length = length or SLICE_LENGTH
    for start in range(0, len(items), length):
        if start:
            await asyncio.sleep(0)
        yield items[start : start + length]


class Turns:
    """Others' turns by the loop's clock, for work whose steps cost what they cost."""

    def __init__(self) -> None:
        self._now = asyncio.get_running_loop().time
        self._until = self._now() + TURN_SECONDS

    async def maybe(self) -> bool:
        """Between two steps; whether others have had their turn."""
        if self._now() <= self._until:
            return False
        await asyncio.sleep(0)
        self._until = self._now() + TURN_SECONDS
        return True


class Pauses:
    """Lets the event loop in while a thread computes in the interpreter: without, the loop would wait for the
    interpreter's switch interval (5 ms) at each of its steps."""

    def __init__(self) -> None:
        self._until = time.perf_counter() + WORK_SECONDS

    def maybe(self) -> None:
        if time.perf_counter() > self._until:
            time.sleep(PAUSE_SECONDS)
            self._until = time.perf_counter() + WORK_SECONDS
