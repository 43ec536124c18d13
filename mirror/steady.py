"""The clock for rests, retries and time limits, which nobody sets.

Set back by an hour, the time of day would make a rest of a second an hour long, and a transaction would stay
open until its coordinator aborts it. What is told to others or compared with timestamps of records
(positions, events, wishes, lag) has the time of day, from the `now_ms` that the worker is given; the
two are never compared with each other, and this one means nothing to another process.
"""

from __future__ import annotations

import time


def steady_ms() -> int:
    """Milliseconds since some moment before this process."""
    return time.monotonic_ns() // 1_000_000
