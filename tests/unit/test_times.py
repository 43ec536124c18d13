"""Times in config files and on command lines."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime

import pytest

from millrace.broker.times import TIME_EXPECTED, time_ms


@pytest.mark.parametrize(
    ("written", "milliseconds"),
    [
        ("2026-11-21T08:00", 1_795_248_000_000),
        ("2026-11-21T09:00:00.250+01:00", 1_795_248_000_250),
        ("2026-11-21", 1_795_219_200_000),
        (date(2026, 11, 21), 1_795_219_200_000),
        (datetime(2026, 11, 21, 8, tzinfo=UTC), 1_795_248_000_000),
        (datetime(2026, 11, 21, 8), 1_795_248_000_000),
        ("1795248000000", 1_795_248_000_000),
        (1_795_248_000_000, 1_795_248_000_000),
        ("0", 0),
        (0, 0),
        ("1970-01-01T00:00:01Z", 1_000),
        ("9999-12-31T23:59:59-12:00", 253_402_343_999_000),
    ],
)
def test_a_time_is_milliseconds_since_1970(written: object, milliseconds: int) -> None:
    assert time_ms(written) == milliseconds


@pytest.mark.parametrize(
    ("written", "understood"),
    [
        (1_795_500_000, "; as milliseconds it is 1970-01-21T18:45:00Z"),
        ("1795500000", "; as milliseconds it is 1970-01-21T18:45:00Z"),
        (20_261_121, "; as milliseconds it is 1970-01-01T05:37:41Z"),
        ("20261121", "; as milliseconds it is 1970-01-01T05:37:41Z"),
        (10**13, ""),
        (99999999999999999999, ""),
        ("9" * 5000, ""),
        (-1, ""),
        ("-1", ""),
        ("noon", ""),
        ("²", ""),
        (True, ""),
        (1.5, ""),
        (None, ""),
        ("1969-12-31T23:59:59.999Z", "; no record has a time before 1970"),
        (date(1969, 12, 31), "; no record has a time before 1970"),
        ("0001-01-01T00:00+14:00", "; no record has a time before 1970"),
    ],
    ids=lambda each: str(each)[:24],
)
def test_what_is_no_time_says_what_was_expected_and_what_a_number_would_have_been(
    written: object, understood: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(TIME_EXPECTED + understood)}$"):
        time_ms(written)
