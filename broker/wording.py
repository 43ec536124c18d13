"""Numbers in sentences that people read. Pure."""

from __future__ import annotations


def count_of(number: int, noun: str, plural: str | None = None) -> str:
    """`1 member`, `2,000 members`; `plural` where it is more than the noun with an s: `2 batches`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
