"""Ranges that came more than once against a count of each number."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
import pytest

from millrace.audit.scanning.copy_ranges import COPIES, COPY_COLUMNS, encode_copies, summed
from millrace.audit.scanning.set_kernels import FIRST, LAST, SET
from tests import seeds
from tests.cells import copies_of

TOP = (1 << 32) - 1


def table(*rows: tuple[int, int, int, int]) -> np.ndarray:
    return np.array(rows, np.int64).reshape(-1, COPY_COLUMNS)


def counted(ranges: np.ndarray) -> Counter[tuple[int, int]]:
    """{(set, number): copies}."""
    found: Counter[tuple[int, int]] = Counter()
    for number, first, last, copies in ranges.tolist():
        for each in range(first, last + 1):
            found[number, each] += copies
    return found


def random_ranges(rng: random.Random) -> np.ndarray:
    rows = []
    for _ in range(rng.randrange(40)):
        first = rng.choice((rng.randrange(30), TOP - rng.randrange(5)))
        last = min(first + rng.choice((0, 0, 1, 12)), TOP)
        rows.append((rng.randrange(4), first, last, rng.choice((1, 1, 1, 2, 7, 1 << 40))))
    return table(*rows)


def test_sums_are_in_order_and_apart_and_say_the_same():
    rng = random.Random(seeds.given())
    for _ in range(300):
        ranges = random_ranges(rng)
        total = summed(ranges)
        assert counted(total) == counted(ranges)
        for before, after in itertools.pairwise(total.tolist()):
            assert before[SET] < after[SET] or before[LAST] < after[FIRST]
            touches = before[SET] == after[SET] and before[LAST] + 1 == after[FIRST]
            assert not (touches and before[COPIES] == after[COPIES])


def test_bitmaps_by_digit_hold_the_copies_of_each_set():
    rng = random.Random(seeds.given())
    for _ in range(300):
        ranges = summed(random_ranges(rng))
        bitmaps, bounds = encode_copies(ranges, 5)
        found = Counter(
            {
                (number, each): copies
                for number in range(5)
                for each, copies in copies_of(
                    bitmaps[at] for at in range(*bounds[number : number + 2].tolist())
                ).items()
            }
        )
        assert found == counted(ranges)
        assert all(bitmaps[end - 1] for begin, end in itertools.pairwise(bounds) if end > begin)


@pytest.mark.parametrize("copies", [1, 2, 9])
def test_a_stream_that_came_again_as_a_whole_is_one_range_and_some_kilobytes(copies):
    halves = table((0, 1, 50_000_000, copies), (0, 50_000_001, 100_000_000, copies))
    total = summed(halves)
    assert total.tolist() == [[0, 1, 100_000_000, copies]]
    assert len(encode_copies(total, 1)[0].content) < 50_000
