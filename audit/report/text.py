"""How the report writes names, times, numbers and ranges: short, and harmless whoever wrote them. Pure.

Escaping for HTML is the template engine's part; what comes from here is printable text of bounded length.
Called by `html` (as template filters), `plain` and `heatmap`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

MOST_RANGES = 8  # of one row
MOST_NAME = 80
MOST_SENTENCE = 300
_DAY_MS = 86_400_000
_UNITS = ("B", "kB", "MB", "GB", "TB")


def visible(text: str | None, most: int = MOST_NAME) -> str:
    """Printable, and not longer than a line can hold: control characters, direction marks and halves of
    surrogate pairs become their escapes (`\\x1b`, `\\u202e`)."""
    if not text:
        return "(no name)"
    shown = "".join(letter if letter.isprintable() else _escape(letter) for letter in text[:most])
    if len(text) <= most and len(shown) <= 2 * most:
        return shown
    return f"{shown[: most - 1]}… ({len(text):,} characters)"


def sentence_text(text: str) -> str:
    return visible(text, MOST_SENTENCE)


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")


def count(value: float) -> str:
    return f"{value:,.0f}"


def day(window_start: str | None, daily: bool = False) -> str:
    """A window's start; where windows are whole days, only the day."""
    if window_start is None:
        return "no window known"
    shown = moment(window_start).removesuffix(" UTC")
    return shown.removesuffix(" 00:00") if daily else shown


def is_daily(window_ms: int) -> bool:
    return window_ms % _DAY_MS == 0


def moment(iso: str | None) -> str:
    """`2013-01-04 06:30 UTC`; seconds only where there are any."""
    if iso is None:
        return "not known"
    shown = iso.replace("T", " ").removesuffix("Z")
    return (shown.removesuffix(":00") if shown.count(":") == 2 else shown) + " UTC"


def instant(iso: str | None) -> str:
    """When something was done: to the second."""
    if iso is None or "." not in iso:
        return moment(iso)
    return moment(iso.partition(".")[0] + "Z")


def ranges(sequences: Sequence[Sequence[int]]) -> str:
    """`3, 7-9, …`: as many as a reader can take in."""
    if not sequences:
        return "not named"
    shown = [span(first, last) for first, last in sequences[:MOST_RANGES]]
    rest = len(sequences) - len(shown)
    return ", ".join(shown) + (f" and {rest:,} more ranges" if rest else "")


def span(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first}–{last}"


def length(ms: int) -> str:
    """`1 day`, `10 minutes`: a window's or a square's length."""
    for size, name in ((_DAY_MS, "day"), (3_600_000, "hour"), (60_000, "minute"), (1000, "second")):
        if ms % size == 0:
            number = ms // size
            return f"{number:,} {name}{'' if number == 1 else 's'}"
    return f"{ms:,} milliseconds"


def byte_size(byte_count: float) -> str:
    """`834 B`, `1.2 GB`."""
    for unit in _UNITS[:-1]:
        if byte_count < 1000:
            return f"{byte_count:.0f} {unit}" if unit == "B" else f"{byte_count:.1f} {unit}"
        byte_count /= 1000
    return f"{byte_count:.1f} {_UNITS[-1]}"


def place(where: dict[str, Any]) -> str:
    """`agg partition 0, offsets 16-40`."""
    first, last = where["offsets"]
    offsets = f"offset {first}" if first == last else f"offsets {first}–{last}"
    return f"{visible(where['tier'])} partition {where['partition']}, {offsets}"


def utc(at_ms: int, spec: str) -> str:
    """A time of the calendar by `strftime`'s `spec`; what lies beyond it as milliseconds."""
    try:
        return datetime.fromtimestamp(at_ms / 1000, UTC).strftime(spec)
    except (OverflowError, ValueError, OSError):
        return f"{at_ms} ms"
