from __future__ import annotations

import pytest

from millrace.broker.client.retry import BackOff


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
