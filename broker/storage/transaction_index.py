"""Aborted transactions of a segment: the `.txnindex` file beside its `.log`, as Apache Kafka writes it.

An entry is 34 bytes, big endian: version i16 (0) · producer id i64 · first offset i64 · last offset i64 (the
marker's) · last stable offset i64 (as it was once the marker was written). Entries stand in the segment that
holds the abort marker, in the order of markers; a segment without aborts has no file.

Unlike the sparse indexes it cannot be made from its segment alone (a transaction may begin in an earlier
one), so it is made durable before the recovery point passes its markers, and what lies beyond is rebuilt by
the replay of the producer state (`recovery.py`).

Aborts are few and entries small: the content stays in memory, so that a fetch never waits for it. Called by
the segment, the log, recovery, the cleaner and `millrace log`. Whoever changes it or writes it holds the
log's lock; `sync` and look-ups need none.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from millrace.broker.storage.disk_errors import syncing

SUFFIX = ".txnindex"
ENTRY_SIZE = 34
_VERSION = 0
_ENTRY = struct.Struct(">hqqqq")
_LAST_OFFSET = struct.Struct(">q")
_LAST_OFFSET_POSITION = 18


class AbortedTransaction(NamedTuple):
    """`last_offset` is the abort marker's; `last_stable_offset` what it was after the marker."""

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


def decode(content: bytes) -> list[AbortedTransaction]:
    """The entries in a file's content. Raises ValueError for a version that is not known or a cut entry."""
    if len(content) % ENTRY_SIZE:
        raise ValueError("its size is not a multiple of an entry's")
    entries = []
    for version, *fields in _ENTRY.iter_unpack(content):
        if version < _VERSION:
            raise ValueError(f"an entry has version {version}")
        entries.append(AbortedTransaction(*fields))
    return entries


class TransactionIndex:
    """The `.txnindex` file at `path`; it may be missing (no aborts)."""

    def __init__(self, path: Path, *, may_exist: bool = True):
        self.path = path
        self._content = bytearray()
        if may_exist:
            with suppress(FileNotFoundError):
                self._content += path.read_bytes()
        self._written_size = len(self._content)
        # What the file's states are counted by: as written, and as on the disk for good. A state counts once
        # it is in the file: a sync that comes between was for the one before.
        self._written = self._synced = 0

    @property
    def is_synced(self) -> bool:
        """Whether all that was changed since the file was read is on the disk."""
        return self._written == self._synced and self._written_size == len(self._content)

    def __len__(self) -> int:
        return len(self._content) // ENTRY_SIZE

    def append(self, transaction: AbortedTransaction) -> None:
        """Adds an entry, at once to the file where that succeeds; otherwise `write_tail` tries again."""
        self._content += _ENTRY.pack(_VERSION, *transaction)
        try:
            self.write_tail()
        except OSError:
            # The marker is safely in the log; a full disk must not fail it. A flush reports.
            return

    def write_tail(self) -> None:
        """Writes what is not in the file yet. Raises OSError; nothing is lost then."""
        if self._written_size == len(self._content):
            return
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            while self._written_size < len(self._content):
                tail = bytes(self._content[self._written_size :])
                self._written_size += os.pwrite(fd, tail, self._written_size)
        finally:
            os.close(fd)
        self._written += 1

    def sync(self) -> None:
        """Makes durable what has been written, if that has changed since the last time. From any thread: what
        is written meanwhile is left to the next call. Raises SyncFailed, OSError."""
        written = self._written
        if written == self._synced:
            return
        with suppress(FileNotFoundError):  # no entries, no file
            fd = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                with syncing():
                    os.fdatasync(fd)
            finally:
                os.close(fd)
        self._synced = written

    def entries(self) -> list[AbortedTransaction]:
        """Every entry, in the order of markers."""
        return [AbortedTransaction(*fields) for _, *fields in _ENTRY.iter_unpack(bytes(self._content))]

    def truncate_from(self, offset: int) -> None:
        """Drops the entries of markers at or beyond `offset`. Raises OSError."""
        count = self._first_ending_at(offset)
        if count * ENTRY_SIZE < len(self._content):
            del self._content[count * ENTRY_SIZE :]
            self._cut_file()

    def _cut_file(self) -> None:
        if self._written_size > len(self._content):
            self._written_size = len(self._content)
            if self._content:
                os.truncate(self.path, self._written_size)
            else:
                self.path.unlink(missing_ok=True)
            self._written += 1

    def collect(self, from_offset: int, end_offset: int) -> tuple[list[AbortedTransaction], bool]:
        """Transactions that touch `from_offset` up to `end_offset`, and whether later segments can have no
        more of them: nothing that is stable at `end_offset` ends there."""
        found = []
        for number in range(self._first_ending_at(from_offset), len(self)):
            transaction = self._entry(number)
            if transaction.first_offset < end_offset:
                found.append(transaction)
            if transaction.last_stable_offset >= end_offset:
                return found, True
        return found, False

    def problem(self) -> str | None:
        """Why the index cannot be right, judged by itself; None when it can."""
        try:
            entries = decode(bytes(self._content))
        except ValueError as error:
            return str(error)
        return order_problem(entries)

    def clear(self) -> None:
        """Drops every entry and the file. Raises OSError."""
        self._content.clear()
        self._written_size = 0
        self.path.unlink(missing_ok=True)

    def _first_ending_at(self, offset: int) -> int:
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            (last,) = _LAST_OFFSET.unpack_from(self._content, middle * ENTRY_SIZE + _LAST_OFFSET_POSITION)
            if last < offset:
                low = middle + 1
            else:
                high = middle
        return low

    def _entry(self, number: int) -> AbortedTransaction:
        return AbortedTransaction(*_ENTRY.unpack_from(self._content, number * ENTRY_SIZE)[1:])


def order_problem(entries: Iterable[AbortedTransaction]) -> str | None:
    """What contradicts the order of markers in `entries`; None when nothing does."""
    previous = -1
    for entry in entries:
        if entry.last_offset <= previous:
            return "its markers' offsets do not ascend"
        if not 0 <= entry.first_offset < entry.last_offset:
            return f"a transaction runs from offset {entry.first_offset} to {entry.last_offset}"
        previous = entry.last_offset
    return None
