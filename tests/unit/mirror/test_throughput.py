"""Rates over the last moments, from counters that only grow."""

from __future__ import annotations

from millrace.mirror.control.throughput import STILL, Rate, Throughput


def test_nothing_is_known_before_two_samples() -> None:
    throughput = Throughput()
    assert throughput.rate("ewr", "flights") == STILL
    throughput.sample({("ewr", "flights"): (10, 100)}, 0)
    assert throughput.rate("ewr", "flights") == STILL
    throughput.sample({("ewr", "flights"): (20, 200)}, 0)  # the clock stood still
    assert throughput.rate("ewr", "flights") == STILL


def test_the_rate_is_of_the_window_alone() -> None:
    throughput = Throughput(window_ms=10_000)
    for second in range(31):
        before = min(second, 15) * 1000 + max(0, second - 15) * 10
        throughput.sample({("ewr", "flights"): (before, before * 2)}, second * 1000)
        if second == 10:
            assert throughput.rate("ewr", "flights") == Rate(1000.0, 2000.0)
    assert throughput.rate("ewr", "flights") == Rate(10.0, 20.0)


def test_a_new_topic_counts_from_nothing_and_a_clock_that_goes_back_does_no_harm() -> None:
    throughput = Throughput()
    throughput.sample({}, 1_000)
    throughput.sample({("ewr", "new"): (50, 500)}, 2_000)
    assert throughput.rate("ewr", "new") == Rate(50.0, 500.0)
    throughput.sample({("ewr", "new"): (60, 600)}, 500)
    assert throughput.rate("ewr", "new") == STILL
