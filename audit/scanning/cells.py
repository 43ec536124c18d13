"""Cells: what one tier counted of one stream, and how cells add up. Pure.

A `Cell` is the unit that the Spark job writes and keeps: (tier, cluster, topic-partition, offset chunk,
stream, window) with counts, offset and append-time bounds, and the set of sequences as a roaring bitmap.
The same key may come in several cells (a chunk re-read in finer pieces, a set wider than 2^32): adding is
the multiset sum, so the only rule is that no offset is counted in two cells. `SeenSet` is the sum of cells,
for one stream, tier and window; `reconcile` reads those.

Called by the Spark source (building), the job (merging, storing) and `reconcile`.

How to cut chunks, so that a loss can be told from lag: see `reconcile.Passage`. A chunk is any offset range
[chunk_start, chunk_end) of one partition; its cells bound the offsets of their records by `first_offset` and
`last_offset`. Chunks should end at the mirror's position and at the bounds of gaps where those are known.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from pyroaring import BitMap64

from millrace.audit.contract.content_digest import DIGEST_MASK
from millrace.audit.scanning.repeats import Repeats

BASE_STEP = 1 << 32
NO_TIME = -1
NO_PLACE = -1
"""In place of the partition and the offsets of a united cell (`cell_union`)."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Counts of one stream in one window, in one offset chunk of one partition of one tier.

    `count` is records (repeats included), `byte_count` the sum of their value sizes. `bitmap` is a portable
    32-bit roaring bitmap of `sequence - base`, `base` a multiple of 2^32. `again` are such bitmaps of what
    came more than once in this cell: number k has the sequences in whose *extra* copies 2^k is one of the
    terms (`repeats.Repeats`). `unsequenced_count` is the part of `count` that carried sequence 0. `digest` is
    the sum modulo 2^64 of the records' content digests, or None. Times are append times in ms, -1 when
    unknown.
    """

    tier: str
    cluster: str
    topic: str
    partition: int
    stream: str
    producer: str
    window_start_ms: int
    chunk_start: int
    count: int
    byte_count: int
    first_offset: int
    last_offset: int
    first_append_ms: int = NO_TIME
    last_append_ms: int = NO_TIME
    base: int = 0
    bitmap: bytes = b""
    again: tuple[bytes, ...] = ()
    unsequenced_count: int = 0
    digest: int | None = None
    topic_id: str = ""

    @property
    def has_place(self) -> bool:
        """Whether it is known where its records stood; not of a united cell."""
        return self.partition != NO_PLACE

    @property
    def place(self) -> tuple[str, str, int]:
        """(cluster, topic, partition): the key of `reconcile.TierReading.passed`."""
        return (self.cluster, self.topic, self.partition)

    def sequences(self) -> BitMap64:
        """The distinct sequences."""
        return decode_bitmap(self.base, self.bitmap)

    def repeats(self) -> Repeats:
        """The extra copies."""
        return Repeats(decode_bitmap(self.base, each) for each in self.again)


def decode_bitmap(base: int, bitmap: bytes) -> BitMap64:
    """The sequences of a (base, portable 32-bit bitmap) pair; raises ValueError when it is no bitmap.

    A base that is a multiple of 2^32 costs a copy of the bytes: roaring's 64-bit format is the count of
    32-bit bitmaps, then each one's upper half and its 32-bit format.
    """
    if not bitmap:
        return BitMap64()
    if base % BASE_STEP == 0:
        return BitMap64.deserialize(struct.pack("<QI", 1, base // BASE_STEP) + bitmap)
    return BitMap64.deserialize(struct.pack("<QI", 1, 0) + bitmap).shift(base)


class CellList:
    """Cells in any order, made when they are first looked at: nearly always nobody does."""

    __slots__ = ("_made", "_unmade")

    def __init__(self, *unmade: Callable[[], Iterable[Cell]]) -> None:
        self._made: list[Cell] = []
        self._unmade = list(unmade)

    def __iter__(self) -> Iterator[Cell]:
        while self._unmade:
            self._made.extend(self._unmade.pop()())
        return iter(self._made)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CellList) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def append(self, cell: Cell) -> None:
        self._made.append(cell)

    def extend(self, other: CellList) -> None:
        self._made.extend(other._made)
        self._unmade.extend(other._unmade)


@dataclass(slots=True)
class SeenSet:
    """What a tier saw of one stream in one window: the sum of its cells.

    `count` is records with repeats, `repeats` their extra copies by sequence. Where only their number is
    told, `loose_copies` are further extra copies, each of one of the sequences in `loose`. `cells` keeps the
    cells themselves, because whether a missing record can still arrive is decided by the offsets that they
    bound; `producers` are the names in them.
    """

    sequences: BitMap64 = field(default_factory=BitMap64)
    repeats: Repeats = field(default_factory=Repeats)
    count: int = 0
    byte_count: int = 0
    unsequenced_count: int = 0
    digest: int | None = 0
    first_append_ms: int = NO_TIME
    last_append_ms: int = NO_TIME
    cells: CellList = field(default_factory=CellList)
    loose_copies: int = 0
    loose: BitMap64 = field(default_factory=BitMap64)
    producers: frozenset[str] = frozenset()

    @classmethod
    def of(cls, sequences: Iterable[int]) -> SeenSet:
        """A set without cells, as an online consumer's event gives it (and tests)."""
        seen = cls(digest=None)
        for sequence in sequences:
            seen.add_sequences(BitMap64([sequence]), Repeats())
            seen.count += 1
        return seen

    def add(self, cell: Cell) -> None:
        """Add a cell that covers other offsets than all before."""
        self.add_sequences(cell.sequences(), cell.repeats())
        self._sum_counts(cell.count, cell.byte_count, cell.unsequenced_count, cell.digest)
        self._widen(cell.first_append_ms, cell.last_append_ms)
        self.cells.append(cell)
        if cell.producer not in self.producers:
            self.producers |= {cell.producer}

    def merge(self, other: SeenSet) -> None:
        """Add another sum; the two must not hold the same cell."""
        self.add_sequences(other.sequences, other.repeats)
        self._sum_counts(other.count, other.byte_count, other.unsequenced_count, other.digest)
        self._widen(other.first_append_ms, other.last_append_ms)
        self.cells.extend(other.cells)
        self.loose_copies += other.loose_copies
        self.loose |= other.loose
        self.producers |= other.producers

    def add_sequences(self, sequences: BitMap64, repeats: Repeats) -> None:
        """Add sequences that were seen, once each and so many times beyond; no counts, and no cell."""
        self.repeats.add(self.sequences & sequences)
        self.repeats.add_all(repeats)
        self.sequences |= sequences

    def _sum_counts(self, count: int, byte_count: int, unsequenced_count: int, digest: int | None) -> None:
        self.count += count
        self.byte_count += byte_count
        self.unsequenced_count += unsequenced_count
        if self.digest is not None:
            self.digest = None if digest is None else (self.digest + digest) & DIGEST_MASK

    def _widen(self, first_append_ms: int, last_append_ms: int) -> None:
        known = [time_ms for time_ms in (self.first_append_ms, first_append_ms) if time_ms != NO_TIME]
        self.first_append_ms = min(known, default=NO_TIME)
        self.last_append_ms = max(self.last_append_ms, last_append_ms)


SeenByWindow = dict[int, SeenSet]
"""window_start_ms -> SeenSet"""


def merge_cells(cells: Iterable[Cell]) -> dict[str, SeenByWindow]:
    """{tier: {window_start_ms: SeenSet}} of one stream's cells."""
    seen: dict[str, SeenByWindow] = {}
    for cell in cells:
        seen.setdefault(cell.tier, {}).setdefault(cell.window_start_ms, SeenSet()).add(cell)
    return seen
