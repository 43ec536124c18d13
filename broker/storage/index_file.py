"""A file of fixed-size entries in ascending order, appended at the end and searched by bisection.

What the offset index and the time index have in common. Entries that were not yet written live in memory
(`tail`) and are written a page at a time: an append costs no system call, and after a crash an index is
rebuilt from its log in any case. No descriptor is held open, because lookups are rare (readers that go on
where they stopped need none) and segments are many.

Invariants: an entry, once appended, never changes; readers in other threads see a consistent pair of
(entries in the file, tail), because the pair is replaced as one after the file has been written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from millrace.broker.errors import CorruptMessage
from millrace.broker.storage.disk_errors import WouldBlock, syncing

_TAIL_SIZE = 4096


class IndexFile:
    """Entries of `entry_size` bytes at `path`; the file may be missing (no entries)."""

    def __init__(self, path: Path, entry_size: int):
        self.path = path
        self._entry_size = entry_size
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            size = 0
        self.is_misaligned = size % entry_size != 0
        self._state: tuple[int, bytearray] = (size // entry_size, bytearray())
        self._last_written: tuple[int, bytes] | None = None  # how many entries the file had, and the last

    def __len__(self) -> int:
        written_count, tail = self._state
        return written_count + len(tail) // self._entry_size

    def append(self, entry: bytes) -> None:
        """Adds an entry in memory; a full page of them is written at once where that succeeds."""
        tail = self._state[1]
        tail += entry
        if len(tail) >= _TAIL_SIZE:
            try:
                self.write_tail()
            except OSError:
                # A full disk must not fail an append whose batch is safely in the log: the entries stay in
                # memory, and the next flush writes them or reports.
                return

    def write_tail(self) -> None:
        """Writes what is in memory to the file. Raises OSError; nothing is lost then."""
        written_count, tail = self._state
        if not tail:
            return
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            position = written_count * self._entry_size
            view = memoryview(bytes(tail))
            while view:
                count = os.pwrite(fd, view, position)
                position += count
                view = view[count:]
        finally:
            os.close(fd)
        self._state = (written_count + len(tail) // self._entry_size, bytearray())

    def sync(self) -> None:
        """Makes what is in the file durable. Raises SyncFailed, OSError."""
        try:
            fd = os.open(self.path, os.O_WRONLY)
        except FileNotFoundError:
            return
        try:
            with syncing():
                os.fdatasync(fd)
        finally:
            os.close(fd)

    def truncate(self, count: int) -> None:
        """Keeps the first `count` entries, in the file as well. Writes nothing: a log must be cut on a full
        disk, too."""
        written_count, tail = self._state
        kept_count = min(count, written_count)
        kept_tail = tail[: max(count - written_count, 0) * self._entry_size]
        try:
            os.truncate(self.path, kept_count * self._entry_size)
        except FileNotFoundError:
            if kept_count:
                kept_count, kept_tail = 0, bytearray()
        self._last_written = None
        self._state = (kept_count, kept_tail)
        self.is_misaligned = False

    def last(self) -> bytes | None:
        """The last entry."""
        written_count, tail = self._state
        if tail:
            return bytes(tail[-self._entry_size :])
        if written_count == 0:
            return None
        known = self._last_written
        if known is None or known[0] != written_count:
            with _Reader(self) as read:
                known = self._last_written = (written_count, read(written_count - 1))
        return known[1]

    def search(self, is_at_most: Callable[[bytes], bool], *, may_block: bool = True) -> bytes | None:
        """The last entry for which `is_at_most` holds; it must hold for a prefix of the entries. With
        `may_block=False` raises WouldBlock where the file would have to be opened: even finding its name may
        wait for the disk."""
        with _Reader(self) as read:
            low, high = 0, read.count
            if not may_block and read.written_count:
                if read.written_count == high or not is_at_most(read(read.written_count)):
                    raise WouldBlock(f"{self.path} has to be searched")
                low = read.written_count
            while low < high:
                middle = (low + high) // 2
                if is_at_most(read(middle)):
                    low = middle + 1
                else:
                    high = middle
            return read(low - 1) if low else None

    def _content(self) -> bytes:
        written_count, tail = self._state
        data = b""
        if written_count:
            data = self.path.read_bytes()[: written_count * self._entry_size]
        data += bytes(tail)
        return data[: len(data) // self._entry_size * self._entry_size]

    def entries(self) -> Iterator[bytes]:
        """Every entry in order."""
        data = self._content()
        for position in range(0, len(data), self._entry_size):
            yield data[position : position + self._entry_size]

    def is_ascending(self, fields: list[tuple[str, str]]) -> str | None:
        """The name of the first field that does not grow from entry to entry; None when all do.

        `fields` are (name, numpy type) of an entry's fields in order.
        """
        import numpy

        entries = numpy.frombuffer(self._content(), numpy.dtype(fields))
        for name, _ in fields:
            column = entries[name]
            if not (column[1:] > column[:-1]).all():
                return name
        return None


class _Reader:
    """Reads entries by number from one consistent state, with one open of the file at most."""

    def __init__(self, index: IndexFile):
        self._size = index._entry_size
        self._path = index.path
        self.written_count, self._tail = index._state
        self.count = self.written_count + len(self._tail) // self._size
        self._fd = -1

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def __call__(self, number: int) -> bytes:
        if number >= self.written_count:
            position = (number - self.written_count) * self._size
            return bytes(self._tail[position : position + self._size])
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_RDONLY)
        entry = os.pread(self._fd, self._size, number * self._size)
        if len(entry) < self._size:  # cut meanwhile
            raise CorruptMessage(f"{self._path}: there is no entry {number} any more")
        return entry
