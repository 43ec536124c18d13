"""Which part of a backlog counts in the benchmark of the mirror: by the same rule for a fast one and a slow
one."""

from __future__ import annotations

import pytest

from tests.benchmarks.mirror.measure import MEASURED_S, WARM_UP_S, Stalled, Window

WANTED = 1_000


def counted(rate: float, step_s: float = 0.5) -> tuple[int, float, float]:
    """Of a mirror that carries so many records a second, grows each half second, and takes half of a core."""
    window, now_s, there = Window(WANTED), 0.0, 0
    while not window.seen(there, now_s, now_s / 2):
        now_s += step_s
        there = min(WANTED, int(rate * now_s))
    return window.counted()


def test_all_behind_the_first_tenth_counts_of_a_mirror_that_is_fast() -> None:
    records, seconds, cpu_s = counted(200)
    assert (records, seconds, cpu_s) == (900, 4.5, 2.25)


def test_slow_mirror_is_measured_for_a_while_and_not_to_its_end() -> None:
    records, seconds, cpu_s = counted(10)
    assert seconds == MEASURED_S and records == 10 * MEASURED_S and cpu_s == MEASURED_S / 2
    assert counted(1)[0] == MEASURED_S, "though it is not a tenth of the way after the warm-up"


def test_nothing_counts_before_the_warm_up_is_over_and_nothing_in_part() -> None:
    window = Window(WANTED)
    assert not window.seen(0, 0.0, 0.0)
    assert not window.seen(50, 1.0, 1.0)
    assert not window.seen(90, WARM_UP_S, 5.0)
    assert not window.seen(90, WARM_UP_S + 10, 6.0)
    assert not window.seen(290, WARM_UP_S + 12, 8.0)
    assert window.seen(290, WARM_UP_S + MEASURED_S, 9.0)
    assert window.counted() == (200, 12.0, 3.0)


def test_backlog_that_is_there_at_once_tells_no_rate() -> None:
    window = Window(WANTED)
    assert not window.seen(0, 0.0, 0.0)
    assert window.seen(WANTED, 0.1, 0.1)
    with pytest.raises(Stalled, match="too small"):
        window.counted()
