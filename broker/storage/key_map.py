"""The last offset of each key in the part of a log that is being compacted, in memory that is bounded.

A hash table of 24 bytes a slot: 128 bits of the key's hash under a secret of this run (the kernels' module
states what a collision would cost and how improbable it is) and an offset. When it is three quarters full it
takes no more keys, and the run goes only as far as it came.

Called by the cleaner, on a thread: the work is compiled and lets go of the interpreter's lock.
"""

from __future__ import annotations

import os
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from millrace.broker.errors import CorruptMessage
from millrace.broker.protocol.batch import BatchHeader
from millrace.broker.protocol.checksum import Buffer
from millrace.broker.protocol.records import MINIMUM_RECORD_SIZE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SLOT_SIZE = 24
_LEAST_SLOTS = 64
_SHIFT_ROOM = 16


@lru_cache(maxsize=1)
def _kernels() -> ModuleType:
    from millrace.broker.protocol import compaction_kernels

    return compaction_kernels


def warm_kernels() -> None:
    """Loads the compiled loops (from numba's cache, or compiles them once)."""
    _kernels()


class Sifted(NamedTuple):
    """What stays of a batch. `keep` has a 1 for each record that does."""

    keep: NDArray[np.uint8]
    kept_count: int
    tombstone_count: int
    greatest_timestamp_delta: int


class KeyMap:
    """See the module. `key_count` bounds how many keys there can be, `memory_size` the bytes of the table."""

    def __init__(self, key_count: int, memory_size: int):
        import numpy

        wanted = key_count * 4 // 3 + 2
        slot_count = max(_LEAST_SLOTS, min(wanted, memory_size // SLOT_SIZE))
        self._table = numpy.zeros(3 * slot_count, numpy.uint64)
        self._counts = numpy.array([0, slot_count * 3 // 4, -1], numpy.int64)
        self._secret = numpy.frombuffer(bytearray(os.urandom(16)), numpy.uint64)

    def __len__(self) -> int:
        return int(self._counts[0])

    @property
    def latest_offset(self) -> int:
        """Greatest offset that the map speaks of; beyond it every record stays."""
        return int(self._counts[2])

    def reach(self, offset: int) -> None:
        """Says that all up to `offset` has been taken in, records or not."""
        self._counts[2] = max(self._counts[2], offset)

    def add(self, section: Buffer, header: BatchHeader, from_offset: int) -> bool:
        """Takes in a batch's records from `from_offset` on; False when the map is full, and `latest_offset`
        lies before the first that found no room then. Raises CorruptMessage."""
        kernels = _kernels()
        status, index = kernels.put_keys(
            _as_array(section),
            _record_count(section, header),
            header.base_offset,
            from_offset,
            self._secret,
            self._table,
            self._counts,
        )
        if status == kernels.FULL:
            return False
        _check(status, index, header)
        return True

    def sift(self, section: Buffer, header: BatchHeader, *, keep_tombstones: bool) -> Sifted:
        """Which records of a batch stay. Raises CorruptMessage."""
        import numpy

        count = _record_count(section, header)
        keep = numpy.empty(count, numpy.uint8)
        status, index, kept_count, tombstone_count, greatest = _kernels().sift(
            _as_array(section),
            count,
            header.base_offset,
            self.latest_offset,
            keep_tombstones,
            self._secret,
            self._table,
            keep,
        )
        _check(status, index, header)
        return Sifted(keep, kept_count, tombstone_count, greatest)


def copy_records(section: Buffer, keep: NDArray[np.uint8] | None, count: int, shift: int) -> memoryview:
    """The records for which `keep` has a 1 (all `count` of them for None), `shift` ms added to their
    timestamp deltas. Raises CorruptMessage."""
    import numpy

    if keep is None:
        keep = numpy.ones(count, numpy.uint8)
    out: Any = numpy.empty(len(section) + (_SHIFT_ROOM * count if shift else 0), numpy.uint8)
    status, size = _kernels().copy_kept(_as_array(section), count, keep, shift, out)
    if status != 0:
        raise CorruptMessage("a record's length is wrong")
    return memoryview(out)[:size]


def _record_count(section: Buffer, header: BatchHeader) -> int:
    if not 0 <= header.record_count * MINIMUM_RECORD_SIZE <= len(section):
        raise CorruptMessage(
            f"the batch at offset {header.base_offset} announces {header.record_count} records in "
            f"{len(section)} bytes"
        )
    return header.record_count


def _check(status: int, index: int, header: BatchHeader) -> None:
    if status != 0:
        raise CorruptMessage(f"record {index} of the batch at offset {header.base_offset} is malformed")


def _as_array(data: Buffer) -> Any:
    import numpy

    # Read-only always: the kernels are compiled for one type of array.
    return numpy.frombuffer(memoryview(data).toreadonly(), "u1")
