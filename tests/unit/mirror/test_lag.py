from __future__ import annotations

from millrace.mirror.sources.lag import MAX_SAMPLES, LagSamples


def test_seconds_count_from_when_the_log_passed_the_position() -> None:
    lag = LagSamples()
    lag.sample(10, 1_000)
    lag.sample(20, 5_000)
    assert lag.seconds_behind(0, 6_000) == 5.0
    assert lag.seconds_behind(10, 6_000) == 1.0
    assert lag.seconds_behind(20, 6_000) == 0.0
    assert lag.records_behind(15) == 5


def test_silent_source_does_not_age_what_is_delivered() -> None:
    lag = LagSamples()
    lag.sample(10, 1_000)
    assert lag.seconds_behind(10, 900_000) == 0.0
    lag.sample(10, 2_000)
    assert lag.seconds_behind(10, 900_000) == 0.0


def test_waiting_record_ages_without_new_samples() -> None:
    lag = LagSamples()
    lag.sample(10, 1_000)
    assert lag.seconds_behind(5, 61_000) == 60.0


def test_first_sight_of_an_offset() -> None:
    lag = LagSamples()
    lag.sample(10, 1_000)
    lag.sample(20, 5_000)
    assert lag.first_seen_ms(9) == 1_000
    assert lag.first_seen_ms(10) == 5_000
    assert lag.first_seen_ms(20) is None


def test_thinning_never_understates() -> None:
    lag = LagSamples()
    for step in range(10 * MAX_SAMPLES):
        lag.sample(step + 1, step * 10)
        assert len(lag._log_ends) <= MAX_SAMPLES
    now_ms = 10 * MAX_SAMPLES * 10
    for position in (0, 1, 1_000, 3_333, 10 * MAX_SAMPLES - 1):
        assert lag.first_seen_ms(position) is not None
        assert lag.first_seen_ms(position) <= position * 10  # type: ignore[operator]
        assert lag.seconds_behind(position, now_ms) >= (now_ms - position * 10) / 1000


def test_what_waits_goes_on_waiting_when_the_log_becomes_shorter() -> None:
    """Truncated, or asked of a new leader that does not know yet how far the others are."""
    lag = LagSamples()
    lag.sample(10, 1_000)
    lag.sample(100, 2_000)
    lag.sample(50, 3_000)
    assert lag.log_end == 50
    assert lag.seconds_behind(0, 4_000) == 3.0
    assert lag.seconds_behind(20, 4_000) == 2.0
    assert lag.seconds_behind(50, 4_000) == 0.0
    lag.sample(60, 9_000)
    assert lag.seconds_behind(50, 9_500) == 0.5


def test_waiting_is_counted_on_from_the_last_owner() -> None:
    lag = LagSamples()
    lag.resume(7, 1_000, 12)
    assert (lag.log_end, lag.records_behind(7)) == (12, 5)
    lag.sample(20, 60_000)
    assert lag.seconds_behind(7, 61_000) == 60.0
    assert lag.seconds_behind(8, 61_000) == 1.0


def test_last_owner_that_knew_of_nothing_or_of_what_is_gone_counts_for_nothing() -> None:
    lag = LagSamples()
    lag.resume(7, -1, 7)
    lag.sample(20, 60_000)
    assert lag.seconds_behind(7, 61_000) == 1.0
    lag = LagSamples()
    lag.resume(7, 1_000, 12)
    lag.sample(7, 60_000)
    assert lag.seconds_behind(7, 61_000) == 0.0
    lag.sample(9, 62_000)
    assert lag.seconds_behind(7, 63_000) == 1.0


def test_what_the_shorter_log_no_longer_has_counts_for_nothing() -> None:
    lag = LagSamples()
    for end, at_ms in ((10, 1), (60, 2), (70, 3), (80, 4), (50, 5), (120, 9)):
        lag.sample(end, at_ms)
    assert [lag.first_seen_ms(offset) for offset in (5, 20, 55)] == [1, 2, 9]
