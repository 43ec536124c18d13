"""Where the end-to-end latency of a batch begins."""

from __future__ import annotations

import pytest

from millrace.broker.protocol.batch import LOG_APPEND_TIME_BIT
from millrace.mirror.batches.intake import Prepared
from millrace.mirror.delivery.outgoing import LIVE_DATA_MS, latency_start
from millrace.mirror.sources.lag import LagSamples

NOW_MS = 1_800_000_000_000


def batch(newest_ms: int, attributes: int = 0, offset: int = 100) -> Prepared:
    return Prepared(
        memoryview(b""), range(offset, offset + 10), offset + 10, 0, offset, attributes, newest_ms
    )


def seen(*samples: tuple[int, int]) -> LagSamples:
    """(log end, when it was seen)"""
    lag = LagSamples()
    for log_end, at_ms in samples:
        lag.sample(log_end, at_ms)
    return lag


@pytest.mark.parametrize("age_ms", [0, 5, 2 * LIVE_DATA_MS, -60_000])
def test_where_the_source_stamps_its_time_that_is_believed(age_ms: int):
    at_ms = NOW_MS - age_ms
    assert latency_start(batch(at_ms, LOG_APPEND_TIME_BIT), seen((500, NOW_MS - 7)), NOW_MS) == (
        at_ms,
        "append",
    )


@pytest.mark.parametrize("age_ms", [0, 14, LIVE_DATA_MS])
def test_of_live_data_the_newest_records_creation_counts(age_ms: int):
    told = latency_start(batch(NOW_MS - age_ms), seen((500, NOW_MS - 7)), NOW_MS)
    assert told == (NOW_MS - age_ms, "create")


@pytest.mark.parametrize("age_ms", [LIVE_DATA_MS + 1, 2 * 365 * 86_400_000, -1, -60_000])
def test_of_data_from_long_ago_or_by_a_wrong_clock_the_time_when_the_log_was_seen_to_hold_it(age_ms: int):
    lag = seen((100, NOW_MS - 90), (101, NOW_MS - 40), (500, NOW_MS - 7))
    assert latency_start(batch(NOW_MS - age_ms), lag, NOW_MS) == (NOW_MS - 40, "seen")


def test_what_came_sooner_than_any_look_at_the_logs_end_begins_now():
    old = batch(NOW_MS - 2 * LIVE_DATA_MS)
    assert latency_start(old, LagSamples(), NOW_MS) == (NOW_MS, "seen")
    assert latency_start(old, seen((100, NOW_MS - 90)), NOW_MS) == (NOW_MS, "seen")
