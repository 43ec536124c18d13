"""Sparse index from timestamp to offset in a segment.

An entry is 12 bytes, big endian: timestamp in ms (i64), offset relative to the segment's base (u32). It
says: up to this offset, no record of the segment is newer than this timestamp, and the batch that ends at
this offset holds one that is exactly that old. Timestamps ascend. Entries are written together with those
of the offset index, when the greatest timestamp has grown; the last is written when the segment is closed,
so that the last entry of a closed segment is its greatest timestamp. Where no record of it has one, its only
entry is (-1, its base offset), which says nothing of any batch: an index without entries was lost.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

from millrace.broker.protocol.batch import NO_TIMESTAMP
from millrace.broker.storage.index_file import IndexFile

ENTRY_SIZE = 12
_ENTRY = struct.Struct(">qI")
_unpack = _ENTRY.unpack


class TimeEntry(NamedTuple):
    timestamp_ms: int
    offset: int


class TimeIndex:
    """The `.timeindex` file of the segment that begins at `base_offset`."""

    def __init__(self, path: Path, base_offset: int):
        self.base_offset = base_offset
        self.file = IndexFile(path, ENTRY_SIZE)
        last = self.last()
        self._last_timestamp = NO_TIMESTAMP if last is None else last.timestamp_ms

    def append_if_newer(self, timestamp_ms: int, offset: int) -> None:
        """Adds an entry unless the last one is as new."""
        if timestamp_ms > self._last_timestamp:
            self.file.append(_ENTRY.pack(timestamp_ms, offset - self.base_offset))
            self._last_timestamp = timestamp_ms

    def append_greatest(self, timestamp_ms: int, offset: int) -> None:
        """The last entry of a segment with batches that is closed."""
        if timestamp_ms > NO_TIMESTAMP:
            self.append_if_newer(timestamp_ms, offset)
        elif len(self.file) == 0:
            self.file.append(_ENTRY.pack(NO_TIMESTAMP, 0))

    def lookup(self, timestamp_ms: int) -> TimeEntry | None:
        """The newest entry that is not newer than `timestamp_ms`."""
        entry = self.file.search(lambda found: _unpack(found)[0] <= timestamp_ms)
        return None if entry is None else self._decode(entry)

    def last(self) -> TimeEntry | None:
        entry = self.file.last()
        return None if entry is None or len(entry) < ENTRY_SIZE else self._decode(entry)

    def truncate(self, end_offset: int) -> None:
        """Drops the entries of batches that end at or beyond `end_offset`."""
        relative = end_offset - self.base_offset
        self.file.truncate(sum(_unpack(entry)[1] < relative for entry in self.file.entries()))
        last = self.last()
        self._last_timestamp = NO_TIMESTAMP if last is None else last.timestamp_ms

    def problem(self, log_size: int, *, every_entry: bool = True) -> str | None:
        """Why the index cannot be right, judged by itself and the log's size; None when it can. Without
        `every_entry` only its size is looked at."""
        if self.file.is_misaligned:
            return "its size is not a multiple of an entry's"
        fields = [("timestamps", ">i8"), ("offsets", ">u4")]
        wrong = self.file.is_ascending(fields) if every_entry else None
        if wrong is not None:
            return f"its {wrong} do not ascend"
        if log_size > 0 and len(self.file) == 0:
            return "it is empty and its log is not"
        return None

    def _decode(self, entry: bytes) -> TimeEntry:
        timestamp_ms, relative = _unpack(entry)
        return TimeEntry(timestamp_ms, self.base_offset + relative)
