"""Cells' bitmaps and repeats made the plain way, beside the compiled loops that make them in the product."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap

from millrace.audit.scanning.cells import BASE_STEP


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
