"""Reads the small values of command lines: `key=value` pairs, address lists, numbers and their bounds."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from millrace.broker.protocol.address import ADDRESS_EXPECTED, Address

MOST_INT16, MOST_INT32, MOST_INT64 = 2**15 - 1, 2**31 - 1, 2**63 - 1
"""What Kafka's protocol has replication factors, numbers of partitions and brokers, and offsets in."""


def key_value_pairs(pairs: Sequence[str], *, option: str) -> dict[str, str]:
    """`["a=1", "b=x=y"]` → `{"a": "1", "b": "x=y"}`; raises BadParameter naming the pair and option."""
    values: dict[str, str] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key.strip():
            raise typer.BadParameter(
                f"{option} {pair!r}: expected key=value, e.g. {option} retention.ms=3600000"
            )
        values[key.strip()] = value
    return values


def addresses(text: str, *, option: str) -> list[str]:
    """`"a:1,b:2"` → `["a:1", "b:2"]`; raises BadParameter for an entry that is no address."""
    entries = [entry.strip() for entry in text.split(",") if entry.strip()]
    for entry in entries:
        try:
            Address.parse(entry)
        except ValueError as error:
            raise typer.BadParameter(f"{option} {entry!r}: expected {error}") from None
    if not entries:
        raise typer.BadParameter(f"{option} is empty: expected {ADDRESS_EXPECTED}")
    return entries


def whole_number(text: str, most: int = MOST_INT32) -> int | None:
    """Of decimal digits alone, from 0 to `most`; None for any other text."""
    if not (text.isascii() and text.isdecimal()):
        return None
    digits = text.lstrip("0") or "0"
    if len(digits) > len(str(most)):  # Python makes no number of very long ones
        return None
    return number if (number := int(digits)) <= most else None
