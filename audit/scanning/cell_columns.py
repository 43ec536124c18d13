"""Sums over columns of cells, in stretches of rows of which each ends where the next one starts. Pure.

Called by `cell_rows`, `stream_cells` and `cell_union`; the sums are those of `SeenSet.add`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from millrace.audit.scanning.cells import NO_TIME

_NEVER = np.iinfo(np.int64).max


def column_of(values: Any, kind: pa.DataType, count: int) -> pa.Array:
    """So many values of this type: an Arrow array as it is, an array or list, or one value for all."""
    if isinstance(values, pa.Array):
        return values
    if isinstance(values, np.ndarray | list):
        return pa.array(values, kind)
    return pa.repeat(pa.scalar(values, kind), count)


def numbers_of(column: pa.ChunkedArray, null: int = 0) -> NDArray[np.int64]:
    """The column's integers, `null` where there is none."""
    return pc.fill_null(column, null).to_numpy() if column.null_count else column.to_numpy()


def codes_of(column: pa.ChunkedArray) -> tuple[NDArray[np.int64], list[str]]:
    """(the number of each text, the texts by number); a null is an empty text."""
    texts = pc.fill_null(column, "").combine_chunks().dictionary_encode()
    return texts.indices.to_numpy(), texts.dictionary.to_pylist()


def earliest(column: pa.ChunkedArray, starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first of the times that are known."""
    times = numbers_of(column, NO_TIME)
    found = np.minimum.reduceat(np.where(times == NO_TIME, _NEVER, times), starts)
    return np.where(found == _NEVER, NO_TIME, found)


def latest(column: pa.ChunkedArray, starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The last of the times."""
    return np.maximum.reduceat(numbers_of(column, NO_TIME), starts)


def digest_sums(
    column: pa.ChunkedArray, starts: NDArray[np.int64]
) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """(the sums modulo 2^64, which of them are known): one that is not known makes its sum unknown."""
    if column.null_count == len(column):
        return np.zeros(len(starts), np.uint64), np.zeros(len(starts), np.bool_)
    digests = column.combine_chunks()
    # 128 bits each, of which the lower 64 come first and hold all of it.
    words = np.frombuffer(digests.buffers()[1], np.uint64)[2 * digests.offset :: 2][: len(digests)]
    known = np.logical_and.reduceat(digests.is_valid().to_numpy(zero_copy_only=False), starts)
    return np.add.reduceat(words, starts), known


def decimals(sums: NDArray[np.int64] | NDArray[np.uint64], known: NDArray[np.bool_]) -> pa.Array:
    """A column of 64 bits each, taken as numbers without a sign; null where they are not known."""
    words = np.zeros((len(sums), 2), np.uint64)
    words[:, 0] = sums.view(np.uint64)
    valid = pa.array(known, pa.bool_()).buffers()[1]
    return pa.Array.from_buffers(pa.decimal128(20, 0), len(sums), [valid, pa.py_buffer(words)])
