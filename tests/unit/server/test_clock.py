"""The machine's two clocks are two."""

from __future__ import annotations

import time

from millrace.broker.server.context import SystemClock


def test_one_is_the_time_of_day_and_the_other_goes_on_whatever_is_done_to_it() -> None:
    clock = SystemClock()
    assert abs(clock.now_ms() - time.time_ns() // 1_000_000) < 60_000
    assert abs(clock.steady_ms() - time.monotonic_ns() // 1_000_000) < 60_000
