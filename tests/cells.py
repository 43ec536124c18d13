"""Cells' bitmaps and repeats made the plain way, beside the compiled loops that make them in the product."""

from __future__ import annotations

from collections.abc import Iterable
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


def table_of(cells: Iterable[Cell]) -> pa.Table:
    """Cells as the job keeps them."""
    rows = [
        {
            **asdict(cell),
            "repeats": [{"sequence": sequence, "extra": extra} for sequence, extra in cell.repeats],
            "tail": False,
        }
        for cell in cells
    ]
    return pa.Table.from_pylist(rows, CELL_SCHEMA)


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
        again = slice(*counted.repeat_bounds[i : i + 2].tolist())
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
                repeats=dict(
                    zip(counted.repeated[again].tolist(), counted.extra[again].tolist(), strict=True)
                ),
                digest=group[scan.G_DIGEST] % (1 << 64) if counted.digested[i] else None,
            )
        )
    return rows
