"""All batches of a fetch answer at once: the Python side of `batch_kernels.py`.

Called by the audit's reader. Pure. Imports the compiled loops when it is imported.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millrace.broker.protocol.batch import ATTRIBUTES_POSITION, HEADER_SIZE
from millrace.broker.protocol.batch_kernels import (
    B_CHECK,
    B_CRC,
    B_END,
    B_POSITION,
    BATCH_COLUMNS,
    CRC_RIGHT,
    CRC_UNCHECKED,
    CRC_WRONG,
    index_batches,
)
from millrace.broker.protocol.checksum import Buffer, crc32c


def index_of(data: Buffer) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The bytes as a read-only array, and a row (`batch_kernels.B_*`) for each whole batch in them."""
    buffer = np.frombuffer(data, np.uint8)
    buffer.flags.writeable = False
    # As many as there can be; the system gives memory only for those that there are.
    index = np.empty((len(buffer) // HEADER_SIZE + 1, BATCH_COLUMNS), np.int64)
    return buffer, index[: index_batches(buffer, index)]


def damaged_rows(buffer: NDArray[np.uint8], index: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rows of batches whose checksum is wrong, in order. Computes those that the index has left out."""
    check = index[:, B_CHECK]
    view = buffer.data
    large = np.flatnonzero(check == CRC_UNCHECKED)
    if len(large):
        check[large] = [
            CRC_RIGHT if crc32c(view[position + ATTRIBUTES_POSITION : end]) == crc else CRC_WRONG
            for position, end, crc in index[large][:, [B_POSITION, B_END, B_CRC]].tolist()
        ]
    return np.flatnonzero(check == CRC_WRONG)
