"""How fast each topic goes now: records and bytes per second over the last moments. Pure.

`operators` feeds it the counters of `metrics` once a second; status and page show what it says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

WINDOW_MS = 10_000

Totals: TypeAlias = Mapping[tuple[str, str], tuple[int, int]]
"""(source, topic) → records and bytes since the process began."""


@dataclass(frozen=True, slots=True)
class Rate:
    records_per_second: float
    bytes_per_second: float


STILL = Rate(0.0, 0.0)


class Throughput:
    """Samples of growing counters over a sliding window."""

    def __init__(self, window_ms: int = WINDOW_MS) -> None:
        self._window_ms = window_ms
        self._samples: deque[tuple[int, dict[tuple[str, str], tuple[int, int]]]] = deque()

    def sample(self, totals: Totals, now_ms: int) -> None:
        samples = self._samples
        samples.append((now_ms, dict(totals)))
        # One sample from before the window stays: the rate is over the whole window, never over less.
        while len(samples) > 2 and samples[1][0] <= now_ms - self._window_ms:
            samples.popleft()

    def rate(self, source: str, topic: str) -> Rate:
        """Between the oldest and the newest sample; a topic that was not there yet counts from 0."""
        if len(self._samples) < 2:
            return STILL
        (first_ms, first), (last_ms, last) = self._samples[0], self._samples[-1]
        seconds = (last_ms - first_ms) / 1000
        if seconds <= 0:
            return STILL
        before, after = first.get((source, topic), (0, 0)), last.get((source, topic), (0, 0))
        return Rate(max(0, after[0] - before[0]) / seconds, max(0, after[1] - before[1]) / seconds)
