"""Writing the records of one or several batches again, as one: the Python side of `rewrite_kernels.py`.

Called by the mirror for what cannot pass as it is. Memory for the output is kept by each thread and used
again; results are copied out of it at once. Pure.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from millrace.broker.errors import InvalidRecord
from millrace.broker.protocol import batch as batch_format
from millrace.broker.protocol.batch import HEADER_SIZE, BatchHeader
from millrace.broker.protocol.checksum import Buffer
from millrace.broker.protocol.compression import compress
from millrace.broker.protocol.records import failure_reason

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ALL = 1 << 62
"""As `last` of `rewrite`: whatever records there are."""

# A record may grow: its length by 4 bytes, its timestamp delta by 9, its offset delta by 4.
_GROWTH = 17
_KEPT_SIZE = 4 << 20


class Rewritten(NamedTuple):
    """One batch with records 0 … n-1, base offset 0, no producer, and no CRC yet (`batch.seal` writes it).
    `ranges` are the source offsets of the records as runs without holes."""

    batch: bytearray
    ranges: Sequence[range]
    record_count: int


@lru_cache(maxsize=1)
def _kernels() -> ModuleType:
    from millrace.broker.protocol import rewrite_kernels

    return rewrite_kernels


def warm_kernels() -> None:
    """Loads the compiled loop (from numba's cache, or compiles it once)."""
    _kernels()


def section_of(
    header: BatchHeader, start: int, end: int, *, from_offset: int = 0
) -> tuple[int, int, int, int, int, int, int, int, int]:
    """The row for one batch whose plain records lie at `[start, end)`; records before `from_offset` are not
    wanted."""
    return (
        start,
        end,
        header.record_count,
        header.base_offset,
        header.last_offset,
        header.base_timestamp,
        header.max_timestamp,
        1 if header.is_log_append_time else 0,
        from_offset,
    )


def rewrite(
    records: Buffer, sections: NDArray[np.int64], codec: int, first: int = 0, last: int = ALL
) -> Rewritten | None:
    """The wanted records with places `[first, last)` of all `sections` (rows of `section_of`) of the plain
    `records`, as one batch compressed by `codec`. None when there are none.

    Record timestamps are kept: where a section has append time, every record has it. Raises InvalidRecord
    when any section is malformed, holds another number of records than its header says, or offsets that do
    not ascend within what it says.
    """
    import numpy

    kernels = _kernels()
    buffer = numpy.frombuffer(memoryview(records).toreadonly(), numpy.uint8)
    # Nothing is set aside for records that cannot be there.
    size, total = kernels.measure(sections, len(buffer))
    if size < 0:
        raise InvalidRecord("a batch announces more records than its bytes can hold")
    out, runs = _room(HEADER_SIZE + size + _GROWTH * total, total)
    status, _, index, _, end, base_ms, max_ms, run_count = kernels.rewrite(
        buffer, sections, first, last, out, HEADER_SIZE, runs
    )
    if status != kernels.OK:
        raise InvalidRecord(f"record {index}: {_reason(status)}")
    if run_count == 0:
        return None
    ranges = [range(start, start + count) for start, count in runs[:run_count].tolist()]
    count = sum(map(len, ranges))
    batch = bytearray(memoryview(out)[:end]) if codec == 0 else bytearray(HEADER_SIZE)
    if codec:
        batch += compress(codec, memoryview(out)[HEADER_SIZE:end])
    batch[:HEADER_SIZE] = batch_format.pack_header(
        size=len(batch),
        attributes=codec,
        last_offset_delta=count - 1,
        base_timestamp=base_ms,
        max_timestamp=max_ms,
        record_count=count,
    )
    return Rewritten(batch, ranges, count)


def _reason(status: int) -> str:
    kernels = _kernels()
    if status == kernels.BAD_OFFSET_DELTA:
        return "its offset is not where its batch says"
    if status in (kernels.OUT_IS_FULL, kernels.BAD_SECTION):
        raise RuntimeError(f"records were rewritten with too little room, or outside the buffer ({status})")
    return failure_reason(status)


class _Memory(threading.local):
    def __init__(self) -> None:
        self.out: Any = None
        self.runs: Any = None


_memory = _Memory()


def _room(size: int, run_count: int) -> tuple[Any, Any]:
    """Memory for `size` bytes of output and `run_count` runs; this thread's own, until the next call."""
    import numpy

    out, runs = _memory.out, _memory.runs
    if out is None or len(out) < size:
        out = numpy.empty(max(size, 1 << 17), numpy.uint8)
        if size <= _KEPT_SIZE:
            _memory.out = out
    if runs is None or len(runs) < run_count:
        runs = numpy.empty((max(run_count, 1 << 10), 2), numpy.int64)
        if runs.nbytes <= _KEPT_SIZE:
            _memory.runs = runs
    return out, runs
