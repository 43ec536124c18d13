"""One stream's cells as columns: what they hold together, by tier and window, without a Python step for each.

Called by `verdict_rows` inside Spark's workers. Where keys are hashed over partitions, a cell holds one
record, and a window hundreds of cells: their sets are united by compiled loops (`set_kernels`), and each sum
is the one that `SeenSet.add` would give. The cells themselves are made for who asks for them: where something
is missing their offsets decide, and that is rare.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator
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
from millrace.audit.scanning.set_kernels import SMALL_SET_BYTES
from millrace.audit.scanning.united_sets import Bitmaps, unite_sets

FEW_CELLS = 64
"""so few are added up one by one: columns take most of a millisecond however few there are"""


class StreamCells:
    """Cells of one stream: rows of `CELL_SCHEMA`, of which notes are left out."""

    def __init__(self, rows: pa.Table) -> None:
        self._rows = rows.filter(pc.is_null(rows["note"])) if rows["note"].null_count < len(rows) else rows

    def __len__(self) -> int:
        return int(self._rows.num_rows)

    def __iter__(self) -> Iterator[Cell]:
        return cells_of(self._rows)

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
        rows = rows.take(pa.array(order))
        numbers, windows = numbers[order], windows[order]
        starts = np.flatnonzero(np.concatenate(([True], (np.diff(numbers) != 0) | (np.diff(windows) != 0))))
        sums = _sums(rows, starts)
        found: dict[str, SeenByWindow] = {}
        for tier, start_ms, each in zip(
            numbers[starts].tolist(), windows[starts].tolist(), sums, strict=True
        ):
            found.setdefault(names[tier], {})[start_ms] = each
        return found


def _sums(rows: pa.Table, starts: NDArray[np.int64]) -> list[SeenSet]:
    """The sums of stretches of rows, each of which ends where the next one starts."""
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
            cells=CellList(partial(_cells_between, rows, first, end)),
            producers=producers[i],
        )
        for i, (first, end) in enumerate(zip(starts.tolist(), ends, strict=True))
    ]
    _add_sequences(rows, starts, sums)
    return sums


def _cells_between(rows: pa.Table, first: int, end: int) -> Iterable[Cell]:
    return cells_of(rows.slice(first, end - first))


def _producers(column: pa.ChunkedArray, starts: NDArray[np.int64]) -> list[frozenset[str]]:
    numbers, texts = codes_of(column)
    if len(texts) == 1:
        return [frozenset(texts)] * len(starts)
    parts = np.split(numbers, starts[1:])
    return [frozenset(texts[each] for each in np.unique(part).tolist()) for part in parts]


def _add_sequences(rows: pa.Table, starts: NDArray[np.int64], sums: list[SeenSet]) -> None:
    """The union of each stretch's sets, and what came in more than one of them."""
    sets, bases = Bitmaps.of_column(rows["bitmap"]), numbers_of(rows["base"])
    sizes = sets.sizes
    stretches = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, rows.num_rows)))
    small = np.flatnonzero((sizes > 0) & (sizes <= SMALL_SET_BYTES) & (bases % BASE_STEP == 0))
    large = np.flatnonzero(sizes > 0)
    if len(small):
        unread = _add_small(sets, bases[small], stretches[small], small, sums)
        large = np.setdiff1d(large, small[~unread], assume_unique=True)
    for row in large.tolist():
        sums[stretches[row]].add_sequences(decode_bitmap(int(bases[row]), sets[row]), {})
    lists = rows["repeats"]
    has_repeats = pc.fill_null(pc.greater(pc.list_value_length(lists), 0), False)
    for row in pc.indices_nonzero(has_repeats).to_pylist():
        repeats = {each["sequence"]: each["extra"] for each in lists[row].as_py()}
        sums[stretches[row]].add_sequences(BitMap64(), repeats)


def _add_small(
    sets: Bitmaps,
    bases: NDArray[np.int64],
    stretches: NDArray[np.int64],
    small: NDArray[np.int64],
    sums: list[SeenSet],
) -> NDArray[np.bool_]:
    """Add these sets, of these bases and stretches; returns which of them cannot be read here."""
    highs, which = np.unique(bases // BASE_STEP, return_inverse=True)
    keys, numbers = np.unique(stretches * len(highs) + which, return_inverse=True)
    united = unite_sets(sets, small, numbers, len(keys))
    of_stretch, of_high = (keys // len(highs)).tolist(), highs[keys % len(highs)].tolist()
    content, bounds = united.bitmaps.content.tobytes(), united.bitmaps.bounds.tolist()
    for number, (stretch, high) in enumerate(zip(of_stretch, of_high, strict=True)):
        bitmap = content[bounds[number] : bounds[number + 1]]
        if bitmap:
            sums[stretch].sequences |= BitMap64.deserialize(struct.pack("<QI", 1, high) + bitmap)
    for number, first, last in united.again.tolist():
        base, repeats = of_high[number] * BASE_STEP, sums[of_stretch[number]].repeats
        for sequence in range(base + first, base + last + 1):
            repeats[sequence] = repeats.get(sequence, 0) + 1
    return united.unread
