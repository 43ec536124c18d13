"""Numbers and lists in sentences that people read. Pure."""

from __future__ import annotations

from collections.abc import Iterable


def count_of(number: int, noun: str, plural: str | None = None) -> str:
    """`1 member`, `2,000 members`; `plural` where it is more than the noun with an s: `2 batches`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def some(names: Iterable[str]) -> str:
    """`a, b, c, d, e and 7 more`."""
    listed = list(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
