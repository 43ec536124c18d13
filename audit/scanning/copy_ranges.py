"""What came more than once, for sets by the thousand: as ranges, and as the bitmaps that a cell keeps. Pure.

Rows (set, first, last, copies) of an int64 table: each number from `first` to `last` of that set came so many
times beyond the first. Numbers are below 2^32, sets below 2^30. Called by `counting`, `stream_cells` and
`old_repeats`; `repeats.Repeats` are the same for one set, with any numbers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millrace.audit.scanning.set_kernels import FIRST, LAST, RUN_COLUMNS, SET, merge_runs
from millrace.audit.scanning.united_sets import Bitmaps, encode_sets, in_order

COPIES = RUN_COLUMNS
COPY_COLUMNS = RUN_COLUMNS + 1
_NUMBER_BITS = 33  # one more than a number has: a range ends behind its last


def copies_of(runs: NDArray[np.int64], copies: int | NDArray[np.int64] = 1) -> NDArray[np.int64]:
    """Runs of sets (`set_kernels`) as ranges of so many copies."""
    ranges = np.empty((len(runs), COPY_COLUMNS), np.int64)
    ranges[:, :RUN_COLUMNS] = runs
    ranges[:, COPIES] = copies
    return ranges


def summed(ranges: NDArray[np.int64]) -> NDArray[np.int64]:
    """The same copies in as few rows as there can be: in order, apart, no two neighbours alike."""
    if not len(ranges):
        return ranges
    sets = ranges[:, SET] << _NUMBER_BITS
    at = np.concatenate((sets | ranges[:, FIRST], sets | (ranges[:, LAST] + 1)))
    changes = np.concatenate((ranges[:, COPIES], -ranges[:, COPIES]))
    order = np.argsort(at)
    at, copies = at[order], np.cumsum(changes[order])
    is_last = np.append(at[1:] != at[:-1], True)
    at, copies = at[is_last], copies[is_last]
    differs = np.append(True, copies[1:] != copies[:-1])
    at, copies = at[differs], copies[differs]
    begins = np.flatnonzero(copies)  # the last one is 0: each range has ended
    total = np.empty((len(begins), COPY_COLUMNS), np.int64)
    total[:, SET] = at[begins] >> _NUMBER_BITS
    total[:, FIRST] = at[begins] & ((1 << _NUMBER_BITS) - 1)
    total[:, LAST] = (at[begins + 1] - 1) & ((1 << _NUMBER_BITS) - 1)
    total[:, COPIES] = copies[begins]
    return total


def encode_copies(ranges: NDArray[np.int64], count: int) -> tuple[Bitmaps, NDArray[np.int64]]:
    """(bitmaps, bounds) of sets 0 to count - 1, of summed ranges: of set i, bitmap bounds[i] + k has the
    numbers in whose copies 2^k is one of the terms; there are as many as its greatest number needs."""
    copies, depths = ranges[:, COPIES], np.zeros(count, np.int64)
    digits: list[NDArray[np.int64]] = []
    while (copies >> len(digits)).any():
        digits.append(np.flatnonzero((copies >> len(digits)) & 1))
        depths[ranges[digits[-1], SET]] = len(digits)
    bounds = np.concatenate(([0], np.cumsum(depths)))
    runs = np.empty((sum(map(len, digits)), RUN_COLUMNS), np.int64)
    end = 0
    for place, rows in enumerate(digits):
        part = runs[end : end + len(rows)]
        part[:] = ranges[rows, :RUN_COLUMNS]
        part[:, SET] = bounds[part[:, SET]] + place
        end += len(rows)
    runs = in_order(runs)
    kept, _ = merge_runs(runs, np.empty_like(runs))
    return encode_sets(runs[:kept], int(bounds[-1])), bounds
