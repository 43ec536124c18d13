"""An event loop whose clock jumps: what waits for time alone is over at once, and always after the same time.

For shells without sockets: while something is ready time stands still, and then it goes on to the next timer.
A story in which nothing can happen any more fails instead of hanging.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jumping(selectors.DefaultSelector):
    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("nothing can happen any more: everything waits, and for no time")
        self.now_s += max(0.0, timeout)
        return super().select(0)


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run(story: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, from second 0 on."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(story)
