"""Times as people write them, in config files and on command lines: one reading of them for all. Pure."""

from __future__ import annotations

from datetime import UTC, date, datetime

TIME_EXPECTED = "a time such as 2013-01-01T00:00:00Z, or milliseconds since 1970, which have 13 digits"

_FIRST_MS, _LAST_MS = 10**12, 10**13 - 1
"""From 2001 to 2286: a shorter number would rather be seconds, a date or a year."""


def time_ms(value: object) -> int:
    """Milliseconds since 1970, 0 or more: a negative time is a word to a cluster, -1 the end of a partition.

    `value` is ISO 8601 (UTC unless it says otherwise; a date is its midnight), what YAML makes of that, or
    milliseconds: 13 digits, or 0 for the beginning. Raises ValueError; its text completes "got 1795500000,
    expected …", and says which time a number of another length would have been.
    """
    if isinstance(value, str):
        value = _of_text(value)
    if type(value) is int:
        if value == 0 or _FIRST_MS <= value <= _LAST_MS:
            return value
        raise ValueError(TIME_EXPECTED + _understood(value))
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    if not isinstance(value, datetime):
        raise ValueError(TIME_EXPECTED)
    milliseconds = round((value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp() * 1000)
    if milliseconds < 0:
        raise ValueError(f"{TIME_EXPECTED}; no record has a time before 1970")
    return milliseconds


def _of_text(text: str) -> object:
    if text.isascii() and text.isdecimal():
        return int(text) if len(text) <= len(str(_LAST_MS)) else None
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def _understood(milliseconds: int) -> str:
    """Of a number that may have been meant as another thing."""
    if not 0 < milliseconds < _FIRST_MS:
        return ""
    moment = datetime.fromtimestamp(milliseconds // 1000, UTC)
    return f"; as milliseconds it is {moment:%Y-%m-%dT%H:%M:%SZ}"
