from __future__ import annotations

import pytest

from millrace.broker.client.retry import BackOff, share_ms


def test_no_failure_needs_no_pause() -> None:
    assert BackOff().delay_ms(0, 0.5) == 0


def test_delays_double_up_to_the_limit() -> None:
    back_off = BackOff(first_ms=50, limit_ms=300, jitter=0)
    assert [back_off.delay_ms(count, 0.5) for count in range(1, 6)] == [50, 100, 200, 300, 300]


def test_jitter_spreads_around_the_middle() -> None:
    back_off = BackOff(first_ms=100, limit_ms=100, jitter=0.2)
    assert back_off.delay_ms(1, 0.0) == pytest.approx(80)
    assert back_off.delay_ms(1, 0.5) == pytest.approx(100)
    assert back_off.delay_ms(1, 1.0) == pytest.approx(120)


def test_a_very_long_outage_does_not_overflow() -> None:
    assert BackOff(limit_ms=1000, jitter=0).delay_ms(10**9, 0.5) == 1000


@pytest.mark.parametrize(
    "wrong", [{"first_ms": 0}, {"first_ms": 9, "limit_ms": 8}, {"jitter": 1}, {"factor": 0.5}]
)
def test_senseless_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="not a back-off"):
        BackOff(**wrong)


@pytest.mark.parametrize(
    ("left_ms", "tries_left", "share"),
    [
        (30_000, 1, 30_000),
        (30_000, 3, 10_000),
        (10_000, 2, 5_000),
        (30_000, 100, 3_000),  # not all get one, but who does can be reached
        (2_000, 100, 2_000),
        (0, 3, 0),
    ],
)
def test_a_try_has_an_even_share_of_the_time_left_and_not_too_little(
    left_ms: float, tries_left: int, share: float
) -> None:
    assert share_ms(left_ms, tries_left, 30_000) == share


def test_short_times_have_room_for_more_than_one_try() -> None:
    assert share_ms(1_500, 10, 1_500) == 500
