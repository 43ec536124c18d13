"""The source offsets of a batch's records, where compaction has left holes between them. Pure.

Made by `rebatch` for rebuilt and coalesced batches, read by whoever needs exact source offsets: a refused
batch's halves, gaps, and the offset map. A batch without holes has a plain `range` instead; `ranges_of`
takes both, so nobody has to look at offsets one by one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import overload


class OffsetRuns(Sequence[int]):
    """Ascending offsets as runs without holes: a run costs one range, however long it is."""

    __slots__ = ("_ends", "_ranges")

    def __init__(self, ranges: Sequence[range]) -> None:
        """`ranges`: ascending, none empty, each of step 1."""
        self._ranges = tuple(ranges)
        self._ends = list(accumulate(map(len, self._ranges)))  # the index after each run's last offset

    @property
    def ranges(self) -> tuple[range, ...]:
        return self._ranges

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[int]:
        for each in self._ranges:
            yield from each

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            return self._slice(index)
        size = len(self)
        place = index + size if index < 0 else index
        if not 0 <= place < size:
            raise IndexError("no such record")
        run = bisect_right(self._ends, place)
        return self._ranges[run][place - self._ends[run]]  # counted from the run's end

    def _slice(self, index: slice) -> Sequence[int]:
        start, stop, step = index.indices(len(self))
        if step != 1:
            raise ValueError("offsets are cut into stretches only")
        parts: list[range] = []
        before = 0
        for each, end in zip(self._ranges, self._ends, strict=True):
            part = each[max(0, start - before) : max(0, stop - before)]
            if part:
                parts.append(part)
            before = end
        return offsets_of(parts)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, OffsetRuns):
            return self._ranges == other._ranges
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self._ranges)

    def __repr__(self) -> str:
        return f"OffsetRuns({list(self._ranges)!r})"


def offsets_of(ranges: Sequence[range]) -> Sequence[int]:
    """The compact form of some runs: a plain range where there is one run only."""
    if not ranges:
        return range(0)
    return ranges[0] if len(ranges) == 1 else OffsetRuns(ranges)


def ranges_of(offsets: Sequence[int]) -> Sequence[range]:
    """The runs without holes that make up `offsets`, whichever form they have."""
    if isinstance(offsets, range):
        return (offsets,) if offsets else ()
    if isinstance(offsets, OffsetRuns):
        return offsets.ranges
    ranges: list[range] = []
    for offset in offsets:
        if ranges and ranges[-1].stop == offset:
            ranges[-1] = range(ranges[-1].start, offset + 1)
        else:
            ranges.append(range(offset, offset + 1))
    return ranges
