"""Unions of many small sets at once, by the loops of `set_kernels`. Pure; numpy in and out.

Called by `counting`, `stream_cells` and `uniting`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millrace.audit.scanning.set_kernels import (
    FIRST,
    LAST,
    LEAST_RUN_BYTES,
    RUN_COLUMNS,
    SET,
    merge_runs,
    read_sets,
    set_sizes,
    write_sets,
)

MEMBER_BITS, SIGNED_BITS = 32, 63


@dataclass(frozen=True, slots=True)
class Bitmaps:
    """Portable 32-bit bitmaps, one after the other: number i is content[bounds[i]:bounds[i + 1]], empty for
    an empty set."""

    content: NDArray[np.uint8]
    bounds: NDArray[np.int64]

    @classmethod
    def of_column(cls, column: pa.ChunkedArray) -> Bitmaps:
        """A column of binary values; a null is empty."""
        array = column.cast(pa.large_binary()).combine_chunks()
        if isinstance(array, pa.ChunkedArray):  # no chunk at all
            array = pa.array([], pa.large_binary())
        _, bounds, content = array.buffers()
        data = np.frombuffer(b"" if content is None else content, np.uint8)
        data.flags.writeable = False
        if not len(array):
            return cls(data, np.zeros(1, np.int64))
        return cls(data, np.frombuffer(bounds, np.int64)[array.offset :][: len(array) + 1])

    def to_column(self) -> pa.Array:
        """As binary values; raises where they are too large for one array."""
        bounds = pa.array(self.bounds, pa.int32()).buffers()[1]
        return pa.Array.from_buffers(
            pa.binary(), len(self.bounds) - 1, [None, bounds, pa.py_buffer(self.content)]
        )

    @property
    def sizes(self) -> NDArray[np.int64]:
        return np.diff(self.bounds)

    def __getitem__(self, number: int) -> bytes:
        return self.content[self.bounds[number] : self.bounds[number + 1]].tobytes()


@dataclass(frozen=True, slots=True)
class United:
    """Unions by number, and how many members each has. `again` are rows (number, first, last) of what came in
    more than one set of a union, one for each time beyond the first; `unread` says of each set that was given
    whether it is in no union, because its bytes are left to the library."""

    bitmaps: Bitmaps
    sizes: NDArray[np.int64]
    again: NDArray[np.int64]
    unread: NDArray[np.bool_]


def encode_sets(runs: NDArray[np.int64], count: int) -> Bitmaps:
    """The bitmaps of sets 0 to count - 1, of merged runs in order."""
    rows = np.searchsorted(runs[:, SET], np.arange(count + 1))
    bounds = np.zeros(count + 1, np.int64)
    set_sizes(runs, rows, bounds[1:])
    np.cumsum(bounds, out=bounds)
    content = np.empty(int(bounds[-1]), np.uint8)
    write_sets(runs, rows, bounds, content)
    return Bitmaps(content, bounds)


def in_order(runs: NDArray[np.int64]) -> NDArray[np.int64]:
    """A copy in order of set and first; numbers of sets are below 2^31, and members below 2^32.

    As one number each, where set, first and length fit into one: numbers are sorted at a third of the cost of
    finding their order, and of hashed keys nearly all runs are one member.
    """
    if not len(runs):
        return runs.copy()
    lengths = runs[:, LAST] - runs[:, FIRST]
    length_bits = int(lengths.max()).bit_length()
    if int(runs[:, SET].max()).bit_length() + MEMBER_BITS + length_bits > SIGNED_BITS:
        return runs[np.argsort((runs[:, SET] << MEMBER_BITS) | runs[:, FIRST])]
    keys = (((runs[:, SET] << MEMBER_BITS) | runs[:, FIRST]) << length_bits) | lengths
    keys.sort()
    ordered = np.empty_like(runs)
    np.bitwise_and(keys, (1 << length_bits) - 1, out=ordered[:, LAST])
    keys >>= length_bits
    np.bitwise_and(keys, (1 << MEMBER_BITS) - 1, out=ordered[:, FIRST])
    np.right_shift(keys, MEMBER_BITS, out=ordered[:, SET])
    ordered[:, LAST] += ordered[:, FIRST]
    return ordered


def unite_sets(sets: Bitmaps, chosen: NDArray[np.int64], numbers: NDArray[np.int64], count: int) -> United:
    """Unite the chosen sets, each into the union of its number, of which there are `count`."""
    runs, unread = runs_of(sets, chosen, numbers)
    runs = in_order(runs)
    again = np.empty_like(runs)
    kept, found = merge_runs(runs, again)
    runs = runs[:kept]
    sizes = np.zeros(count, np.int64)
    np.add.at(sizes, runs[:, SET], runs[:, LAST] - runs[:, FIRST] + 1)
    return United(encode_sets(runs, count), sizes, again[:found], unread)


def runs_of(
    sets: Bitmaps, chosen: NDArray[np.int64], numbers: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """(runs of the chosen sets, each under its number; which of these sets are left to the library)."""
    begins, ends = sets.bounds[chosen], sets.bounds[chosen + 1]
    runs = np.empty((int((ends - begins).sum()) // LEAST_RUN_BYTES + 1, RUN_COLUMNS), np.int64)
    unread = np.zeros(len(chosen), np.int64)
    made = read_sets(sets.content, begins, ends, numbers.astype(np.int64), runs, unread)
    return runs[:made], unread.astype(np.bool_)
