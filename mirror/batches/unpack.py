"""The records of many small compressed batches, unpacked side by side. Pure.

Called by `rebatch` for a run that becomes one batch. A call of a codec's library costs 2 to 5 µs, far more
than a kilobyte's work: LZ4, which most producers choose who send little at a time, is decoded by one compiled
call for the whole run (`lz4_kernels`). The library decodes what that does not know, and every other codec.

What was unpacked is valid until this thread unpacks the next run.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from millrace.broker.errors import RecordTooLarge
from millrace.broker.protocol.compression import LZ4, decompress

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Kept for the next run; what is larger is given back.
KEPT_SIZE = 4 << 20


@lru_cache(maxsize=1)
def _kernels() -> ModuleType:
    from millrace.broker.protocol import lz4_kernels

    return lz4_kernels


def warm_kernels() -> None:
    """Loads the compiled decoder (from numba's cache, or compiles it once)."""
    _kernels()


def unpacked(
    data: memoryview, sections: NDArray[np.int64], codec: int, room: int
) -> tuple[memoryview, NDArray[np.int64]]:
    """The plain records of all `sections` (rows of `BatchWalk.sections`, over the bytes of `data`), and the
    rows that say where each one's are.

    Raises RecordTooLarge where they are more than `room` bytes, CorruptMessage (or another KafkaError of the
    codec) where any cannot be unpacked.
    """
    sections = sections.copy()
    return (_by_kernel if codec == LZ4 else _by_library)(data, sections, codec, room), sections


def _by_library(data: memoryview, sections: NDArray[np.int64], codec: int, room: int) -> memoryview:
    plain = bytearray()
    for row, (start, end) in enumerate(sections[:, :2].tolist()):
        at = len(plain)
        plain += decompress(codec, data[start:end], room - at)
        sections[row, 0] = at
        sections[row, 1] = len(plain)
    return memoryview(plain)


def _by_kernel(data: memoryview, sections: NDArray[np.int64], codec: int, room: int) -> memoryview:
    import numpy

    kernels = _kernels()
    source = numpy.frombuffer(data.toreadonly(), numpy.uint8)
    target = _room(room + kernels.SLACK)
    view = memoryview(target)
    row = at = 0
    while True:
        row, end = kernels.unpack_frames(source, sections, 0, row, target, at)
        if row == len(sections):
            return view[:end]
        if row:
            at = int(sections[row - 1, 1])
        if end == kernels.NO_ROOM:
            raise RecordTooLarge(f"lz4 records hold more than {room} bytes when decompressed")
        start, end = sections[row, :2].tolist()
        plain = decompress(codec, data[start:end], room - at)
        view[at : at + len(plain)] = plain
        sections[row, :2] = at, at + len(plain)
        at += len(plain)
        row += 1


class _Memory(threading.local):
    def __init__(self) -> None:
        self.target: Any = None


_memory = _Memory()


def _room(size: int) -> Any:
    """An array of `size` bytes; this thread's own, until the next call."""
    import numpy

    target = _memory.target
    if target is None or len(target) < size:
        target = numpy.empty(size, numpy.uint8)
        if size <= KEPT_SIZE + _kernels().SLACK:
            _memory.target = target
    return target[:size]
