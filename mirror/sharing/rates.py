"""How many bytes a second each partition brings, smoothed and coarse. Pure.

`pipeline` counts what the target has acknowledged (`add`), `worker` lets time pass (`sample`, every few
seconds); `assignment` carries the levels in a worker's claim, from which the group's leader weighs the
partitions.

Coarse, because a claim that differs a little each time would move partitions to and fro: a level is a half
power of two. Smoothed over a minute, because a backlog that is caught up in seconds is not a load.

A worker that has come back to partitions that it had before (`settle`) knows nothing of their rates, and its
first ones are those of what had waited. Until a minute was watched it says so in its claim, and nothing moves
for the balance's sake: a restart would otherwise make partitions move to the worker that seems idle.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from millrace.mirror.topics.routes import SourcePartition

SMOOTHED_OVER_MS = 60_000
# A partition is measured once it was watched for this long; before, it is taken for what was known of it.
MEASURED_AFTER_MS = 10_000
_SMALLEST = 1 << 10  # bytes/s of level 1
# The work is shared out anew when a worker's load is another by this factor (and by so much at all) than the
# one that it told the group of.
STALE_FACTOR = 1.5
STALE_BYTES = 1 << 20
# Not more often than this, as every share-out is a round of all workers.
STALE_AFTER_MS = 60_000
# What was told while a rate was still rising may be half of it: later a smaller difference counts.
SETTLED_AFTER_MS = 300_000
SETTLED_FACTOR = 1.2
SAMPLE_INTERVAL_S = 5.0


def level_of(rate: float) -> int:
    """0 for what is as good as idle; one more for each factor of the square root of 2 from 1 KiB/s on."""
    return 0 if rate < _SMALLEST else 1 + round(2 * math.log2(rate / _SMALLEST))


def rate_of(level: int) -> float:
    """The bytes/s that a level stands for."""
    return 0.0 if level <= 0 else _SMALLEST * 2 ** ((min(level, 100) - 1) / 2)


class _Meter:
    __slots__ = ("began_ms", "bytes", "rate", "sampled_ms")

    def __init__(self, now_ms: int) -> None:
        self.bytes = 0
        self.rate = 0.0
        self.began_ms = self.sampled_ms = now_ms


class Workload:
    """One worker's measurements, and what of them it has told the group."""

    def __init__(self) -> None:
        self._meters: dict[SourcePartition, _Meter] = {}
        self._told: dict[SourcePartition, int] = {}
        self._told_ms = 0
        self.is_settling = False
        self._settling_since_ms: int | None = None

    def settle(self) -> None:
        """What this worker carries now is what it carried before it was measured here."""
        if not self.is_settling:  # or a seat that is taken over again and again would never settle
            self.is_settling, self._settling_since_ms = True, None

    def add(self, partition: SourcePartition, size: int) -> None:
        """So many bytes were delivered. Of a partition that is not sampled: nothing is counted."""
        meter = self._meters.get(partition)
        if meter is not None:
            meter.bytes += size

    def sample(self, owned: Iterable[SourcePartition], now_ms: int) -> bool:
        """Take the rates since the last call; partitions that are no longer owned are forgotten. Whether the
        group should hear the rates again."""
        meters: dict[SourcePartition, _Meter] = {}
        for partition in owned:
            meter = meters[partition] = self._meters.get(partition) or _Meter(now_ms)
            passed_ms = now_ms - meter.sampled_ms
            if passed_ms <= 0:
                continue
            now_rate = meter.bytes * 1000 / passed_ms
            # As long as less time was watched than is smoothed over, the rate is the mean of that time.
            watched_ms = now_ms - meter.began_ms
            share = max(1 - math.exp(-passed_ms / SMOOTHED_OVER_MS), passed_ms / watched_ms)
            meter.rate += (now_rate - meter.rate) * min(1.0, share)
            meter.bytes, meter.sampled_ms = 0, now_ms
        self._meters = meters
        if self.is_settling:
            self._settling_since_ms = now_ms if self._settling_since_ms is None else self._settling_since_ms
            self.is_settling = now_ms - self._settling_since_ms < SMOOTHED_OVER_MS
            return not self.is_settling
        told_for_ms = now_ms - self._told_ms
        if told_for_ms < STALE_AFTER_MS:
            return False
        factor = SETTLED_FACTOR if told_for_ms >= SETTLED_AFTER_MS else STALE_FACTOR
        return is_stale(self._told, self.levels(), factor)

    def tell(self, now_ms: int) -> dict[SourcePartition, int]:
        """The levels, for a claim that is made now."""
        self._told, self._told_ms = self.levels(), now_ms
        return self._told

    def levels(self) -> dict[SourcePartition, int]:
        """The level of each partition that was watched for long enough."""
        return {
            partition: level_of(meter.rate)
            for partition, meter in self._meters.items()
            if meter.sampled_ms - meter.began_ms >= MEASURED_AFTER_MS
        }


def is_stale(
    told: Mapping[SourcePartition, int], now: Mapping[SourcePartition, int], factor: float = STALE_FACTOR
) -> bool:
    """Whether the group should hear the rates again: the load is another than the one it was told of."""
    before, after = (sum(map(rate_of, levels.values())) for levels in (told, now))
    low, high = sorted((before, after))
    return high - low >= STALE_BYTES and high >= low * factor
