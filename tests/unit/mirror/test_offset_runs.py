"""Offsets with holes behave as the plain list of them would."""

from __future__ import annotations

import random

import pytest

from millrace.mirror.offsets.offset_runs import OffsetRuns, offsets_of, ranges_of


def random_ranges(rng: random.Random) -> list[range]:
    ranges, offset = [], rng.choice((0, 7, 2**40))
    for _ in range(rng.randrange(1, 9)):
        count = rng.choice((1, 1, 2, 50))
        ranges.append(range(offset, offset + count))
        offset += count + rng.randrange(1, 5)
    return ranges


def test_offsets_with_holes_are_read_as_a_plain_list() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        ranges = random_ranges(rng)
        plain = [offset for each in ranges for offset in each]
        runs = OffsetRuns(ranges)
        assert (len(runs), list(runs)) == (len(plain), plain), f"seed {seed}"
        assert [runs[at] for at in range(-len(plain), len(plain))] == plain + plain
        start, stop = rng.randrange(-3, len(plain) + 3), rng.randrange(-3, len(plain) + 3)
        assert list(runs[start:stop]) == plain[start:stop], f"seed {seed}"
        assert (plain[0] in runs, plain[0] - 1 in runs, runs.index(plain[-1])) == (
            True,
            False,
            len(plain) - 1,
        )
        assert list(ranges_of(runs)) == list(ranges_of(plain)) == ranges


def test_offsets_without_holes_are_a_range() -> None:
    assert offsets_of([range(4, 9)]) == range(4, 9)
    assert offsets_of([]) == range(0) and not ranges_of(range(0))
    assert OffsetRuns([range(3), range(5, 7)])[3:] == range(5, 7)
    assert list(ranges_of(range(4, 9))) == [range(4, 9)]


def test_what_is_not_there_is_not_given() -> None:
    runs = OffsetRuns([range(3), range(5, 7)])
    for place in (5, -6):
        with pytest.raises(IndexError):
            runs[place]
    with pytest.raises(ValueError, match="stretches"):
        runs[::2]
