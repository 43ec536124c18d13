from __future__ import annotations

from millrace.mirror.lag import MAX_SAMPLES, LagSamples


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


def test_shorter_log_starts_anew() -> None:
    lag = LagSamples()
    lag.sample(100, 1_000)
    lag.sample(5, 2_000)
    assert lag.log_end == 5
    assert lag.seconds_behind(0, 3_000) == 1.0
