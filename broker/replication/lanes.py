"""Which partitions are fetched from a leader together: those that bring records, or the quiet rest.

A fetch costs both sides something for every partition that it names. Were all of a leader's partitions in one
fetch, a record of one would wait until a thousand that have nothing were gone through, twice. So there are
two lanes, each with a connection and a request of its own.

Called by `replica_fetcher.py`. Pure: times in, decisions out, in seconds of one steady clock.
"""

from __future__ import annotations

from enum import Enum

IDLE_AFTER_SECONDS = 10.0
"""Without records for so long, a partition is idle."""
SWEEP_SECONDS = 1.0
"""The busy lane is gone through for idle partitions this often: each such move ends the idle lane's wait."""

NEVER = float("-inf")


class Lane(Enum):
    BUSY = "busy"
    IDLE = "idle"


def lane_of(records_at: float, now: float) -> Lane:
    """Where a partition belongs whose last records came at `records_at` (NEVER: none yet)."""
    return Lane.BUSY if now - records_at < IDLE_AFTER_SECONDS else Lane.IDLE


def is_sweep_due(lane: Lane, swept_at: float, now: float) -> bool:
    """Whether to look, after an answer, for partitions that belong into the other lane: at once for those
    that have begun to bring records, now and then for those that have ceased."""
    return lane is Lane.IDLE or now - swept_at >= SWEEP_SECONDS
