from __future__ import annotations

import random

import pytest

from millrace.mirror.sharing.rates import (
    MEASURED_AFTER_MS,
    SMOOTHED_OVER_MS,
    STALE_AFTER_MS,
    Workload,
    is_stale,
    level_of,
    rate_of,
)
from millrace.mirror.topics.routes import SourcePartition

ONE, TWO = SourcePartition("ewr", "flights", 0), SourcePartition("ewr", "flights", 1)
MEBIBYTE = 1 << 20


def run(rates: Workload, bytes_per_s: float, seconds: int, from_ms: int, every_s: int = 5) -> int:
    now_ms = from_ms
    for _ in range(seconds // every_s):
        rates.add(ONE, int(bytes_per_s * every_s))
        now_ms += every_s * 1000
        rates.sample([ONE], now_ms)
    return now_ms


def test_levels_are_within_a_fifth_of_what_they_stand_for() -> None:
    rng = random.Random(1)
    assert level_of(0) == level_of(1023) == 0
    assert rate_of(0) == 0
    for _ in range(1000):
        rate = 2 ** rng.uniform(10, 40)
        assert 0.8 < rate_of(level_of(rate)) / rate < 1.25


def test_a_steady_rate_is_found_and_a_burst_is_no_load() -> None:
    rates = Workload()
    rates.sample([ONE], 0)
    now_ms = run(rates, MEBIBYTE, 20, 0)
    assert rates.levels() == {ONE: level_of(MEBIBYTE)}
    now_ms = run(rates, MEBIBYTE, 600, now_ms)
    assert rates.levels() == {ONE: level_of(MEBIBYTE)}
    now_ms = run(rates, 20 * MEBIBYTE, 5, now_ms)
    assert level_of(MEBIBYTE) < rates.levels()[ONE] < level_of(4 * MEBIBYTE)
    run(rates, 0, 900, now_ms)
    assert rates.levels() == {ONE: 0}


def test_nothing_is_told_before_it_is_measured() -> None:
    rates = Workload()
    rates.add(ONE, 100)  # not sampled yet: whose it is, is not known
    rates.sample([ONE], 0)
    rates.add(ONE, MEBIBYTE)
    rates.sample([ONE, TWO], MEASURED_AFTER_MS - 1)
    assert rates.levels() == {}
    rates.sample([ONE, TWO], MEASURED_AFTER_MS)
    assert set(rates.levels()) == {ONE}
    rates.sample([TWO], 2 * MEASURED_AFTER_MS)
    assert set(rates.levels()) == {TWO}


def test_a_clock_that_stands_still_does_no_harm() -> None:
    rates = Workload()
    for now_ms in (5, 5, 4):
        rates.add(ONE, 10)
        rates.sample([ONE], now_ms)
    assert rates.levels() == {}


@pytest.mark.parametrize(
    ("told", "now", "stale"),
    [
        ({}, {}, False),
        ({}, {ONE: level_of(100_000)}, False),  # too little to move anything for
        ({}, {ONE: level_of(4 * MEBIBYTE)}, True),
        ({ONE: level_of(4 * MEBIBYTE)}, {ONE: level_of(5 * MEBIBYTE)}, False),
        ({ONE: level_of(4 * MEBIBYTE)}, {}, True),
        ({ONE: level_of(8 * MEBIBYTE)}, {TWO: level_of(8 * MEBIBYTE)}, False),
    ],
)
def test_the_group_hears_of_a_load_that_has_changed(
    told: dict[SourcePartition, int], now: dict[SourcePartition, int], stale: bool
) -> None:
    assert is_stale(told, now) is stale


def test_it_is_said_again_when_it_changed_but_not_all_the_time() -> None:
    rates = Workload()
    rates.sample([ONE], 0)
    assert rates.tell(0) == {}
    now_ms = run(rates, 8 * MEBIBYTE, STALE_AFTER_MS // 1000 - 5, 0)
    rates.add(ONE, 40 * MEBIBYTE)
    assert rates.sample([ONE], now_ms + 4_000) is False
    assert rates.sample([ONE], STALE_AFTER_MS) is True
    assert rates.tell(STALE_AFTER_MS) == rates.levels() != {}
    assert rates.sample([ONE], STALE_AFTER_MS + 1000) is False
    run(rates, 8 * MEBIBYTE, 120, STALE_AFTER_MS + 1000)
    assert rates.sample([ONE], STALE_AFTER_MS + 121_000) is False


def test_a_seat_that_is_taken_over_again_and_again_settles_nevertheless() -> None:
    load = Workload()
    load.settle()
    for now_ms in range(0, SMOOTHED_OVER_MS, 5_000):
        load.sample([], now_ms)
        load.settle()
    assert load.is_settling
    load.sample([], SMOOTHED_OVER_MS)
    assert not load.is_settling
