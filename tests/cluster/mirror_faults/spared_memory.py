"""Whether a worker whom nothing befell kept to its memory over a long run. Pure.

It is looked at after each round, when all that was written has arrived; called by `run.py`. The first rounds
bring every kind of event once, a backlog and a target that takes nothing among them, so every buffer has been
in use by then. After that, medians of many looks: of the first quarter and of the last one.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tests.cluster.mirror_faults.plan import Kind

WARM_UP_ROUNDS = len(Kind)
LEAST_ROUNDS = 4 * WARM_UP_ROUNDS
TOLERANCE = 0.1


def early_and_late(each_mb: Sequence[float]) -> tuple[float, float] | None:
    """None where there were too few rounds to say."""
    if len(each_mb) < LEAST_ROUNDS:
        return None
    counted = each_mb[WARM_UP_ROUNDS:]
    quarter = len(counted) // 4
    return statistics.median(counted[:quarter]), statistics.median(counted[-quarter:])


def problems(each_mb: Sequence[float]) -> list[str]:
    """In words, if it is more than a tenth larger in the end."""
    found = early_and_late(each_mb)
    if found is None or found[1] <= found[0] * (1 + TOLERANCE):
        return []
    return [f"the worker whom nothing befell had {found[0]:.0f} MB early on, and {found[1]:.0f} MB at last"]
