"""Cells' bitmaps and repeats made the plain way, beside the compiled loops that make them in the product."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyroaring import BitMap

from millrace.audit.scanning import scan
from millrace.audit.scanning.cell_rows import CELL_SCHEMA
from millrace.audit.scanning.cells import BASE_STEP, Cell
from millrace.audit.scanning.counting import CountedCells


def encode_bitmaps(sequences: npt.NDArray[np.uint64]) -> list[tuple[int, bytes]]:
    """(base, portable 32-bit bitmap) of distinct sequences; one pair for each 2^32 touched, normally one."""
    pairs: list[tuple[int, bytes]] = []
    high = sequences >> np.uint64(32)
    for part in np.unique(high):
        low = (sequences[high == part] & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        bitmap = BitMap(low)
        bitmap.run_optimize()
        pairs.append((int(part) * BASE_STEP, bitmap.serialize()))
    return pairs


def count_repeats(sequences: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint64], dict[int, int]]:
    """(distinct sequences, ascending; {sequence: extra copies}) of sequences as they came; zeros left out."""
    distinct, copies = np.unique(sequences[sequences != 0], return_counts=True)
    repeated = copies > 1
    extra = zip(distinct[repeated].tolist(), (copies[repeated] - 1).tolist(), strict=True)
    return distinct, dict(extra)


def again_of(repeats: Mapping[int, int], base: int = 0) -> tuple[bytes, ...]:
    """`Cell.again` of {sequence: extra copies}, of those that a cell of this base can hold."""
    mine = {
        sequence - base: copies
        for sequence, copies in repeats.items()
        if sequence // BASE_STEP * BASE_STEP == base
    }
    digits = [
        BitMap(number for number, copies in mine.items() if copies >> place & 1)
        for place in range(max(mine.values(), default=0).bit_length())
    ]
    return tuple(digit.serialize() if digit else b"" for digit in digits)


def copies_of(again: Iterable[bytes], base: int = 0) -> dict[int, int]:
    """{sequence: extra copies} of `Cell.again`."""
    copies: dict[int, int] = {}
    for place, digit in enumerate(again):
        for number in BitMap.deserialize(digit) if digit else ():
            copies[base + number] = copies.get(base + number, 0) + (1 << place)
    return copies


def table_of(cells: Iterable[Cell]) -> pa.Table:
    """Cells as the job keeps them."""
    return pa.Table.from_pylist([{**asdict(cell), "tail": False} for cell in cells], CELL_SCHEMA)


def old_table_of(cells: Iterable[Cell]) -> pa.Table:
    """Cells as the job kept them up to version 6 of the state."""
    rows = []
    for cell in cells:
        repeats = copies_of(cell.again, cell.base).items()
        pairs = [{"sequence": sequence, "extra": copies} for sequence, copies in repeats]
        rows.append({**asdict(cell), "repeats": pairs, "tail": False})
    names = [name for name in CELL_SCHEMA.names if name != "again"]
    return pa.Table.from_pylist(rows, pa.schema([CELL_SCHEMA.field(name) for name in names]))


@dataclass(slots=True)
class CountedRow:
    """One fragment of a cell, of `CountedCells`; sequences and repeats without their upper half."""

    stream: int
    window_start_ms: int
    chunk: int
    base: int
    sequenced: bool
    count: int
    byte_count: int
    first_offset: int
    last_offset: int
    first_append_ms: int
    last_append_ms: int
    producer: str
    sequences: BitMap
    repeats: dict[int, int]
    digest: int | None


def rows_of(counted: CountedCells) -> list[CountedRow]:
    """The columns row by row."""
    rows = []
    for i, group in enumerate(counted.groups.tolist()):
        again = range(*counted.again_bounds[i : i + 2].tolist())
        sequenced = group[scan.G_HIGH] != scan.COUNT_ONLY
        bitmap = counted.bitmaps[i]
        rows.append(
            CountedRow(
                stream=group[scan.G_STREAM] % (1 << 64),
                window_start_ms=group[scan.G_WINDOW],
                chunk=group[scan.G_CHUNK],
                base=group[scan.G_HIGH] * BASE_STEP if sequenced else 0,
                sequenced=sequenced,
                count=group[scan.G_COUNT],
                byte_count=group[scan.G_BYTES],
                first_offset=group[scan.G_FIRST_OFFSET],
                last_offset=group[scan.G_LAST_OFFSET],
                first_append_ms=group[scan.G_FIRST_APPEND],
                last_append_ms=group[scan.G_LAST_APPEND],
                producer=counted.producers[counted.producer_numbers[i]],
                sequences=BitMap.deserialize(bitmap) if bitmap else BitMap(),
                repeats=copies_of(counted.again[each] for each in again),
                digest=group[scan.G_DIGEST] % (1 << 64) if counted.digested[i] else None,
            )
        )
    return rows
