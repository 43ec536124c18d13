"""One digest of many rows, however they are ordered and cut into parts. Pure.

Called by `settled` for lines, and by `next_commit` for spans: a state whose digest is that of the one
before has learnt nothing. A sum of the rows' digests, each of the rows' columns in their order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_NULL = 0x6E756C6C5F6E756C  # no value that is there


def rows_digest(parts: Iterable[pa.Table], names: Sequence[str]) -> str:
    """128 bits in hexadecimal, of these columns: texts, numbers and booleans."""
    sums = [0, 0]
    for part in parts:
        columns = [_hashes(part[name].combine_chunks()) for name in names]
        for number in range(len(sums)):
            digests = np.full(part.num_rows, number, np.uint64)
            for column in columns:
                digests = _mixed(digests + column)
            sums[number] += int(digests.sum(dtype=np.uint64))
    return "".join(f"{each % (1 << 64):016x}" for each in sums)


def _hashes(column: pa.Array) -> np.ndarray:
    """64 bits for each value; what lies behind a null may differ."""
    if pa.types.is_string(column.type):
        encoded = column.dictionary_encode()
        values = [
            int.from_bytes(hashlib.blake2b(each.encode("utf-8", "surrogatepass"), digest_size=8).digest())
            for each in encoded.dictionary.to_pylist()
        ]
        values.append(_NULL)
        return np.array(values, np.uint64)[pc.fill_null(encoded.indices, len(values) - 1).to_numpy()]
    numbers = pc.fill_null(column.cast(pa.int64()), 0).to_numpy().astype(np.uint64)
    return np.where(pc.is_valid(column).to_numpy(zero_copy_only=False), numbers, np.uint64(_NULL))


def _mixed(values: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64: equal sums of columns are not equal digests."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
