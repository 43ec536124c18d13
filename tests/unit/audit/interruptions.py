"""A signal that arrives in the middle of a call, for tests of what its handler may do there."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


def interrupting(function: Callable[..., Any], times: int = 1) -> Callable[..., Any]:
    """The function, in which a signal arrives: in the main thread, for another one's would come anywhere."""
    left = [times]

    def interrupted(*given: Any, **more: Any) -> Any:
        if left[0] and threading.current_thread() is threading.main_thread():
            left[0] -= 1
            signal.raise_signal(signal.SIGUSR1)
        return function(*given, **more)

    return interrupted


def interrupted_after(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, after which a signal arrives: once."""
    arrive = interrupting(lambda: None)

    def interrupted(*given: Any, **more: Any) -> Any:
        answer = function(*given, **more)
        arrive()
        return answer

    return interrupted


@contextlib.contextmanager
def handled_by(call: Callable[[], Any]) -> Iterator[None]:
    """The signal's handler calls this."""
    before = signal.signal(signal.SIGUSR1, lambda *_: call())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)
