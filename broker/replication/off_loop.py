"""Work that takes a processor's time, kept away from the event loop.

Coordinators are given a `Compute`: a thread in the broker, `at_once` where there are none (simulations).
Called by the coordinators of groups and transactions when they read their logs.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

WORK_SECONDS = 0.002
PAUSE_SECONDS = 0.0002

Compute = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs what takes its time where it keeps nobody waiting."""


async def at_once(work: Callable[[], Any]) -> Any:
    return work()


class Pauses:
    """Lets the event loop in while a thread computes in the interpreter: without, the loop would wait for the
    interpreter's switch interval (5 ms) at each of its steps."""

    def __init__(self) -> None:
        self._until = time.perf_counter() + WORK_SECONDS

    def maybe(self) -> None:
        if time.perf_counter() > self._until:
            time.sleep(PAUSE_SECONDS)
            self._until = time.perf_counter() + WORK_SECONDS
