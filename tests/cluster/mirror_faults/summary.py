"""The table that a fault run ends with: what happened, what became of the records, memory. Pure.

Called by `run` (`Run.table`), printed by `make soak` and `make mirror-faults`.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.cluster.mirror_faults.checks import Verdict

NAME_WIDTH = 44


def table(
    *,
    minutes: float,
    event_counts: Mapping[str, int],
    round_count: int,
    acknowledged: int,
    carried: int,
    verdict: Verdict,
    ended_count: int,
    memory_mb: Mapping[str, tuple[float, float]],
    spared_mb: tuple[float, float] | None = None,
) -> str:
    """A line each: `event_counts` by kind; records that the sources acknowledged and the aggregate holds;
    `ended_count` servers that ended by themselves; `memory_mb` {worker: (at the start, at the end)};
    `spared_mb` of the worker whom nothing befell, in the first and the last quarter of the run."""
    rows = [
        ("minutes", f"{minutes:.1f}"),
        ("events", f"{sum(event_counts.values())} in {round_count} rounds"),
        *((f"  {name.lower()}", str(count)) for name, count in sorted(event_counts.items())),
        ("records acknowledged", f"{acknowledged}"),
        ("records in the aggregate", f"{carried}"),
        ("lost", f"{verdict.lost_count}"),
        ("explained by a gap's event", f"{verdict.explained_count}"),
        ("duplicated", f"{verdict.duplicate_count}"),
        ("twice in the source's own log", f"{verdict.source_duplicate_count}"),
        ("servers that ended by themselves", f"{ended_count}"),
        *(
            (f"resident memory of {name}, start and end", f"{first:.0f} MB, {last:.0f} MB")
            for name, (first, last) in memory_mb.items()
        ),
        *(
            [("of the one that was spared, early and late", f"{spared_mb[0]:.0f} MB, {spared_mb[1]:.0f} MB")]
            if spared_mb
            else []
        ),
    ]
    return "\n".join(f"{name:<{NAME_WIDTH}} {value}" for name, value in rows)
