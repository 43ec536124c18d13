"""Sparse index from offset to position in a segment's `.log` file.

An entry is 8 bytes, big endian: offset relative to the segment's base (u32), position of a batch (u32).
The offset is the batch's *last*, as in Apache Kafka. Both ascend. An entry is written about every
`index.interval.bytes` of log.

Invariant: the index only helps to begin a search; whoever uses an entry checks it against the batch that
is at its position (`segment.py`), and an index that disagrees with its log is rebuilt.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

from millrace.broker.storage.index_file import IndexFile

ENTRY_SIZE = 8
_ENTRY = struct.Struct(">II")
_unpack = _ENTRY.unpack


class OffsetEntry(NamedTuple):
    offset: int
    position: int


class OffsetIndex:
    """The `.index` file of the segment that begins at `base_offset`."""

    def __init__(self, path: Path, base_offset: int):
        self.base_offset = base_offset
        self.file = IndexFile(path, ENTRY_SIZE)
        self._append = self.file.append

    def append(self, offset: int, position: int) -> None:
        """Adds the batch at `position` whose last offset is `offset`; both beyond the last entry's."""
        self._append(_ENTRY.pack(offset - self.base_offset, position))

    def lookup(self, offset: int, *, may_block: bool = True) -> OffsetEntry | None:
        """The entry with the greatest offset that is not above `offset`. With `may_block=False` raises
        WouldBlock rather than look into the file."""
        relative = offset - self.base_offset
        entry = self.file.search(lambda found: _unpack(found)[0] <= relative, may_block=may_block)
        return None if entry is None else self._decode(entry)

    def last(self) -> OffsetEntry | None:
        entry = self.file.last()
        return None if entry is None or len(entry) < ENTRY_SIZE else self._decode(entry)

    def truncate(self, position: int) -> None:
        """Drops the entries of batches at or beyond `position`."""
        self.file.truncate(sum(_unpack(entry)[1] < position for entry in self.file.entries()))

    def problem(self, log_size: int, *, every_entry: bool = True) -> str | None:
        """Why the index cannot be right, judged by itself and the log's size; None when it can. Without
        `every_entry` only its last entry is read."""
        if self.file.is_misaligned:
            return "its size is not a multiple of an entry's"
        fields = [("offsets", ">u4"), ("positions", ">u4")]
        wrong = self.file.is_ascending(fields) if every_entry else None
        if wrong is not None:
            return f"its {wrong} do not ascend"
        last = self.last()
        if last is not None and last.position >= log_size:
            return f"it points to byte {last.position} of {log_size}"
        return None

    def _decode(self, entry: bytes) -> OffsetEntry:
        relative, position = _unpack(entry)
        return OffsetEntry(self.base_offset + relative, position)
