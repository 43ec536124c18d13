"""Replays one history: `python -m tests.simulation.cluster SEED`."""

from __future__ import annotations

import sys

from tests.simulation.cluster.history import History

outcome = History(int(sys.argv[1])).run()
print("\n".join(outcome.trace[-int(sys.argv[2]) if len(sys.argv) > 2 else 0 :]))
print(f"seed {outcome.seed}: {outcome.violation or 'all invariants hold'}")
print(
    f"{outcome.acknowledged} acknowledged, {outcome.committed} committed, {outcome.excused} excused; "
    f"{outcome.events}"
)
sys.exit(outcome.violation is not None)
