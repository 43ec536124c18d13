"""Says why a start takes long that compiles its loops: the first one on a machine does, for many seconds.

Around the loading of compiled loops, by broker and mirror. Whether they come from numba's cache is known
only when they are there, so the clock decides: from the cache they take about a second.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SLOW_AFTER_S = 3.0
COMPILING = "loading the compiled loops takes a while: the first start on a machine compiles them, once"


@contextmanager
def told_when_slow(log: Any, after_s: float = SLOW_AFTER_S) -> Iterator[None]:
    """One line of `log` if what is done in this context lasts longer. From a thread of its own: the loading
    may hold up the event loop."""
    timer = threading.Timer(after_s, log.info, (COMPILING,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
