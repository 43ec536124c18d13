"""Where a missing record was last had, and which of its neighbours did arrive. Pure.

Offsets are those of cells: a record's own offset is not kept, its cell bounds it. Called by `verdict_rows`
(so that the report names offsets) and by `explain`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pyroaring import BitMap64

from millrace.audit.reconciliation.verdicts import Hop, Ranges
from millrace.audit.scanning.cells import Cell

MOST_PLACES = 4  # ranges of one hop in one window that are looked up; the rest is named without offsets
MOST_HELD = 8  # cells that are told for one range
MOST_OF_STREAM = 100  # ranges of one stream: each costs a look at all of its cells


class Neighbourhood:
    """The cells of one stream, by tier. They are looked at, and decoded, when they are first asked for."""

    def __init__(self, cells: Iterable[Cell]) -> None:
        self._unsorted = cells
        self._cells: dict[str, list[Cell]] | None = None
        self._sets: dict[str, list[tuple[Cell, BitMap64]]] = {}
        self._whole: dict[str, BitMap64] = {}
        self._told = 0

    def around(self, hop: Hop, first: int, last: int) -> dict[str, Any]:
        """What is known of the lost sequences [first, last] of a hop:

        {"sequences": [first, last], "held": [place], "before": place, "after": place}; a place is
        {"tier", "partition", "offsets": [first, last]} with the "sequence" of a neighbour. `held` is where
        the upstream tier has them, `before` and `after` their nearest neighbours in the downstream tier;
        either is left out when there is none, or when it stands in a united cell.
        """
        upstream, downstream = hop
        held = [
            _place(cell)
            for cell, sequences in self._of(upstream)
            if cell.has_place and sequences.range_cardinality(first, last + 1)
        ]
        told: dict[str, Any] = {"sequences": [first, last], "held": held[:MOST_HELD]}
        if len(held) > MOST_HELD:
            told["held_more"] = len(held) - MOST_HELD
        for word, sequence in (
            ("before", self._below(downstream, first)),
            ("after", self._above(downstream, last)),
        ):
            cell = None if sequence is None else self._cell_with(downstream, sequence)
            if cell is not None and cell.has_place:
                told[word] = {"sequence": sequence, **_place(cell)}
        return told

    def places(
        self, missing: Mapping[Hop, Ranges], most: int = MOST_PLACES
    ) -> Iterator[tuple[Hop, list[dict[str, Any]]]]:
        """`around` for the first ranges of every hop, until enough was told of the stream."""
        for hop, ranges in missing.items():
            asked = ranges[: min(most, MOST_OF_STREAM - self._told)]
            self._told += len(asked)
            if asked:
                yield hop, [self.around(hop, first, last) for first, last in asked]

    def _of(self, tier: str) -> list[tuple[Cell, BitMap64]]:
        if self._cells is None:
            self._cells = {}
            for cell in self._unsorted:
                self._cells.setdefault(cell.tier, []).append(cell)
        known = self._sets.get(tier)
        if known is None:
            cells = sorted(
                self._cells.get(tier, ()), key=lambda cell: (cell.cluster, cell.partition, cell.first_offset)
            )
            known = self._sets[tier] = [(cell, cell.sequences()) for cell in cells]
        return known

    def _all(self, tier: str) -> BitMap64:
        known = self._whole.get(tier)
        if known is None:
            known = BitMap64()
            for _, sequences in self._of(tier):
                known |= sequences
            self._whole[tier] = known
        return known

    def _below(self, tier: str, first: int) -> int | None:
        """The greatest sequence seen below `first`."""
        seen = self._all(tier)
        rank = seen.rank(first - 1) if first > 0 else 0
        return int(seen[rank - 1]) if rank else None

    def _above(self, tier: str, last: int) -> int | None:
        """The least sequence seen above `last`."""
        seen = self._all(tier)
        rank = seen.rank(last)
        return int(seen[rank]) if rank < len(seen) else None

    def _cell_with(self, tier: str, sequence: int) -> Cell | None:
        return next((cell for cell, sequences in self._of(tier) if sequence in sequences), None)


def _place(cell: Cell) -> dict[str, Any]:
    return {
        "tier": cell.cluster or cell.tier,
        "partition": cell.partition,
        "offsets": [cell.first_offset, cell.last_offset],
    }
