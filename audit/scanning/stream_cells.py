"""One stream's cells as columns: what they hold together, by tier and window, without a Python step for each.

Called by `verdict_rows` inside Spark's workers. Where keys are hashed over partitions, a cell holds one
record, and a window hundreds of cells: their sets are united by compiled loops (`set_kernels`), and each sum
is the one that `SeenSet.add` would give. The cells themselves are made for who asks for them: where something
is missing their offsets decide, and that is rare.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyroaring import BitMap64

from millrace.audit.config import audited_topic
from millrace.audit.scanning.cell_columns import codes_of, digest_sums, earliest, latest, numbers_of
from millrace.audit.scanning.cell_rows import cells_of
from millrace.audit.scanning.cells import (
    BASE_STEP,
    Cell,
    CellList,
    SeenByWindow,
    SeenSet,
    decode_bitmap,
    merge_cells,
)
from millrace.audit.scanning.copy_ranges import copies_of, encode_copies, summed
from millrace.audit.scanning.old_repeats import in_sets
from millrace.audit.scanning.repeats import Repeats
from millrace.audit.scanning.set_kernels import SET, SMALL_SET_BYTES
from millrace.audit.scanning.united_sets import Bitmaps, runs_of, unite_sets

FEW_CELLS = 64
"""so few are added up one by one: columns take most of a millisecond however few there are"""
_SETS = ["bitmap", "again"]
_MOST_DIGITS = 62
"""of a number of copies in 64 bits, that can be added up"""


class StreamCells:
    """Cells of one stream: rows of `CELL_SCHEMA`, of which notes are left out."""

    def __init__(self, rows: pa.Table) -> None:
        cells = rows.filter(pc.is_null(rows["note"])) if rows["note"].null_count < len(rows) else rows
        self._rows = in_sets(cells)

    def __len__(self) -> int:
        return int(self._rows.num_rows)

    def __iter__(self) -> Iterator[Cell]:
        return cells_of(self._rows)

    @property
    def rows(self) -> pa.Table:
        """Columns of `CELL_SCHEMA`."""
        return self._rows

    @property
    def stream(self) -> str:
        return str(self._rows["stream"][0].as_py())

    @property
    def clusters(self) -> set[str]:
        return set(self._rows["cluster"].unique().to_pylist())

    @property
    def places(self) -> set[tuple[str, str]]:
        """(cluster, topic) of each."""
        found = self._rows.group_by(["cluster", "topic"]).aggregate([]).to_pylist()
        return {(row["cluster"], row["topic"]) for row in found}

    @property
    def producers(self) -> list[str]:
        """The names in them, each once, in their order."""
        return [name or "" for name in self._rows["producer"].unique().to_pylist()]

    def of_topic(self, topic: str) -> StreamCells:
        """Those of places of an audited topic."""
        names = self._rows["topic"].unique().to_pylist()
        wanted = [name for name in names if audited_topic(name) == topic]
        if len(wanted) == len(names):
            return self
        return StreamCells(
            self._rows.filter(pc.is_in(self._rows["topic"], value_set=pa.array(wanted, pa.string())))
        )

    def of_clusters(self, clusters: Collection[str]) -> StreamCells:
        """Those of these clusters."""
        theirs = pc.is_in(self._rows["cluster"], value_set=pa.array(clusters, pa.string()))
        return StreamCells(self._rows.filter(theirs))

    def held_twice(self) -> BitMap64:
        """The sequences that more than one of the cells hold, of whichever place and window."""
        if not len(self):
            return BitMap64()
        rows, count = self._rows, self._rows.num_rows
        for name, value in (("tier", ""), ("window_start_ms", 0), ("again", None)):
            at = rows.schema.get_field_index(name)
            kind = rows.schema.field(at)
            same = (
                pa.nulls(count, kind.type) if value is None else pa.repeat(pa.scalar(value, kind.type), count)
            )
            rows = rows.set_column(at, kind, same)
        return StreamCells(rows).seen()[""][0].repeats.sequences

    def as_one_tier(self, tier: str, clusters: Collection[str]) -> StreamCells:
        """The same, those of these clusters in the tier of this name."""
        theirs = pc.is_in(self._rows["cluster"], value_set=pa.array(clusters, pa.string()))
        column = self._rows.schema.get_field_index("tier")
        return StreamCells(
            self._rows.set_column(column, "tier", pc.if_else(theirs, tier, self._rows["tier"]))
        )

    def seen(self) -> dict[str, SeenByWindow]:
        """{tier: {window_start_ms: SeenSet}}: as `merge_cells` gives it."""
        if len(self) <= FEW_CELLS:
            return merge_cells(self)
        rows = self._rows
        (numbers, names), windows = codes_of(rows["tier"]), rows["window_start_ms"].to_numpy()
        order = np.lexsort((windows, numbers))
        numbers, windows = numbers[order], windows[order]
        starts = np.flatnonzero(np.concatenate(([True], (np.diff(numbers) != 0) | (np.diff(windows) != 0))))
        sums = _sums(rows, order, starts)
        found: dict[str, SeenByWindow] = {}
        for tier, start_ms, each in zip(
            numbers[starts].tolist(), windows[starts].tolist(), sums, strict=True
        ):
            found.setdefault(names[tier], {})[start_ms] = each
        return found


def _sums(cells: pa.Table, order: NDArray[np.int64], starts: NDArray[np.int64]) -> list[SeenSet]:
    """The sums of stretches of the cells in this order, each of which ends where the next one starts. Sets
    are not put in order: of a stream of many numbers they are nearly all that there is."""
    rows = cells.drop_columns(_SETS).take(pa.array(order))
    counts, sizes, unsequenced = (
        np.add.reduceat(numbers_of(rows[name]), starts).tolist()
        for name in ("count", "byte_count", "unsequenced_count")
    )
    firsts = earliest(rows["first_append_ms"], starts).tolist()
    lasts = latest(rows["last_append_ms"], starts).tolist()
    digests = [each.tolist() for each in digest_sums(rows["digest"], starts)]
    producers = _producers(rows["producer"], starts)
    ends = [*starts[1:].tolist(), rows.num_rows]
    sums = [
        SeenSet(
            count=counts[i],
            byte_count=sizes[i],
            unsequenced_count=unsequenced[i],
            digest=digests[0][i] if digests[1][i] else None,
            first_append_ms=firsts[i],
            last_append_ms=lasts[i],
            cells=CellList(partial(_cells_at, cells, order[first:end])),
            producers=producers[i],
        )
        for i, (first, end) in enumerate(zip(starts.tolist(), ends, strict=True))
    ]
    stretches = np.empty(rows.num_rows, np.int64)
    stretches[order] = np.repeat(np.arange(len(starts)), np.diff(ends, prepend=0))
    _add_sequences(cells, stretches, sums)
    return sums


def _cells_at(cells: pa.Table, places: NDArray[np.int64]) -> Iterable[Cell]:
    return cells_of(cells.take(pa.array(places)))


def _producers(column: pa.ChunkedArray, starts: NDArray[np.int64]) -> list[frozenset[str]]:
    numbers, texts = codes_of(column)
    if len(texts) == 1:
        return [frozenset(texts)] * len(starts)
    parts = np.split(numbers, starts[1:])
    return [frozenset(texts[each] for each in np.unique(part).tolist()) for part in parts]


def _add_sequences(rows: pa.Table, stretches: NDArray[np.int64], sums: list[SeenSet]) -> None:
    """The union of the sets of each stretch, which is told of each row, and what came more than once: in one
    cell, or in more than one."""
    bases = numbers_of(rows["base"])
    _add_sets(rows["bitmap"], bases, stretches, sums)
    depths = numbers_of(pc.list_value_length(rows["again"])).astype(np.int64)
    of_row = np.repeat(np.arange(rows.num_rows), depths)
    if len(of_row):
        places = np.arange(len(of_row)) - np.repeat(np.cumsum(depths) - depths, depths)
        digits = pc.list_flatten(rows["again"])
        _add_digits(digits, places, bases[of_row], stretches[of_row], sums)


def _add_sets(
    sets: pa.ChunkedArray, bases: NDArray[np.int64], stretches: NDArray[np.int64], sums: list[SeenSet]
) -> None:
    small, large = _by_size(sets, bases)
    if len(small):
        of_sets, numbers = _SetsOfStretches.of(bases[small], stretches[small])
        united = unite_sets(_chosen(sets, small), np.arange(len(small)), numbers, len(of_sets))
        for stretch, sequences in of_sets.decoded(united.bitmaps):
            sums[stretch].sequences |= sequences
        _add_copies(copies_of(united.again), of_sets, sums)
        large = np.concatenate((large, small[united.unread]))
    for row in large.tolist():
        sums[stretches[row]].add_sequences(decode_bitmap(int(bases[row]), sets[row].as_py()), Repeats())


def _add_digits(
    digits: pa.ChunkedArray,
    places: NDArray[np.int64],
    bases: NDArray[np.int64],
    stretches: NDArray[np.int64],
    sums: list[SeenSet],
) -> None:
    """Add 2^place extra copies of what each bitmap has."""
    small, large = _by_size(digits, bases)
    if len(small):
        if places.max() >= _MOST_DIGITS:
            raise ValueError("a cell of the state has more copies of a record than there can be")
        of_sets, numbers = _SetsOfStretches.of(bases[small], stretches[small])
        numbers = numbers * _MOST_DIGITS + places[small]
        runs, unread = runs_of(_chosen(digits, small), np.arange(len(small)), numbers)
        sets, its_places = np.divmod(runs[:, SET], _MOST_DIGITS)
        ranges = copies_of(runs, 1 << its_places)
        ranges[:, SET] = sets
        _add_copies(ranges, of_sets, sums)
        large = np.concatenate((large, small[unread]))
    for row in large.tolist():
        sequences = decode_bitmap(int(bases[row]), digits[row].as_py())
        sums[stretches[row]].repeats.add_digit(sequences, int(places[row]))


def _by_size(sets: pa.ChunkedArray, bases: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(those that compiled loops take apart, those that are the library's), without the empty ones."""
    sizes = numbers_of(pc.fill_null(pc.binary_length(sets), 0))
    is_small = (sizes <= SMALL_SET_BYTES) & (bases % BASE_STEP == 0)
    return np.flatnonzero((sizes > 0) & is_small), np.flatnonzero((sizes > 0) & ~is_small)


def _chosen(sets: pa.ChunkedArray, small: NDArray[np.int64]) -> Bitmaps:
    """The small ones, in one piece; nearly always that is all of them."""
    return Bitmaps.of_column(sets if len(small) == len(sets) else sets.take(pa.array(small)))


@dataclass(frozen=True, slots=True)
class _SetsOfStretches:
    """By number of a set: the stretch that it belongs to, and the upper halves of its sequences."""

    stretches: list[int]
    highs: list[int]

    @classmethod
    def of(
        cls, bases: NDArray[np.int64], stretches: NDArray[np.int64]
    ) -> tuple[_SetsOfStretches, NDArray[np.int64]]:
        """(the sets of these bases and stretches, the number of each one's)."""
        highs, which = np.unique(bases // BASE_STEP, return_inverse=True)
        keys, numbers = np.unique(stretches * len(highs) + which, return_inverse=True)
        return cls((keys // len(highs)).tolist(), highs[keys % len(highs)].tolist()), numbers

    def __len__(self) -> int:
        return len(self.stretches)

    def decoded(self, bitmaps: Bitmaps) -> Iterator[tuple[int, BitMap64]]:
        """(stretch, sequences) of each set that is not empty."""
        content, bounds = bitmaps.content.tobytes(), bitmaps.bounds.tolist()
        for number, (stretch, high) in enumerate(zip(self.stretches, self.highs, strict=True)):
            bitmap = content[bounds[number] : bounds[number + 1]]
            if bitmap:
                yield stretch, decode_bitmap(high * BASE_STEP, bitmap)


def _add_copies(ranges: NDArray[np.int64], of_sets: _SetsOfStretches, sums: list[SeenSet]) -> None:
    """Add the extra copies of `copy_ranges`."""
    if not len(ranges):
        return
    bitmaps, bounds = encode_copies(summed(ranges), len(of_sets))
    for number in np.flatnonzero(np.diff(bounds)).tolist():
        base, repeats = of_sets.highs[number] * BASE_STEP, sums[of_sets.stretches[number]].repeats
        for place, bitmap in enumerate(range(bounds[number], bounds[number + 1])):
            repeats.add_digit(decode_bitmap(base, bitmaps[bitmap]), place)
