"""How many histories a run of pytest went through, and of what; the long suite's table has the sum.

Counted is what held: a history that breaks a rule ends its test, one from which a rule was taken out is none.
"""

from __future__ import annotations

from collections import Counter

_counts: Counter[str] = Counter()


def went_through(what: str) -> None:
    _counts[what] += 1


def summary() -> str:
    """One line; "" where there were none."""
    kinds = ", ".join(f"{what} {count}" for what, count in sorted(_counts.items()))
    return f"{_counts.total()} histories: {kinds}" if kinds else ""
