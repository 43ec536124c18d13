"""One segment of a log: a `.log` file of record batches, its two sparse indexes and its aborted transactions.

Files are named by the offset of the segment's first record in 20 digits. The `.log` is a run of whole
batches of format 2, nothing before, between or after them. Offsets ascend and may have holes, which
compaction and what is replicated from a compacted log leave.

Called by the log (append, read, roll) and by recovery. Invariants: bytes below `size` are whole batches;
`size` grows only after the bytes are in the file, so a reader that takes it first never sees a part; a file
whose name goes, or becomes another's, is held open first, so that a reader finishes undisturbed and nobody
opens the other in its place.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from millrace.broker.errors import CorruptMessage, KafkaStorageError
from millrace.broker.protocol.batch import (
    HEADER_SIZE,
    NO_TIMESTAMP,
    BatchHeader,
    iterate_batches,
    parse_header,
)
from millrace.broker.protocol.checksum import Buffer
from millrace.broker.storage.disk_errors import WouldBlock, syncing
from millrace.broker.storage.offset_index import ENTRY_SIZE as OFFSET_ENTRY_SIZE
from millrace.broker.storage.offset_index import OffsetIndex
from millrace.broker.storage.time_index import TimeEntry, TimeIndex
from millrace.broker.storage.transaction_index import SUFFIX as TRANSACTION_INDEX_SUFFIX
from millrace.broker.storage.transaction_index import TransactionIndex

LOG_SUFFIX = ".log"
INDEX_SUFFIX = ".index"
TIME_INDEX_SUFFIX = ".timeindex"
SIDE_SUFFIXES = (INDEX_SUFFIX, TIME_INDEX_SUFFIX, TRANSACTION_INDEX_SUFFIX)
"""Files that go with a `.log`."""
DELETED_SUFFIX = ".deleted"

LARGE_READ_SIZE = 8 << 20
"""Bytes that take too long to copy where others wait: some 1.5 ms for each MB."""

_SCAN_SIZE = 1 << 20
_SEEK_SIZE = 8192
_MAX_RELATIVE_OFFSET = 2**31 - 1


class BatchAt(NamedTuple):
    position: int
    header: BatchHeader


class _Descriptor:
    """Closed when the last one that uses it lets go."""

    __slots__ = ("number",)

    def __init__(self, number: int):
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


class LogFile:
    """A `.log` file, open while it is in use: `rest` closes it, who reads or writes next opens it again by
    its name. So whoever is about to give the name away calls `hold` first: the file stays open then, and is
    opened by name no more. A descriptor is closed when its last user lets go."""

    __slots__ = ("_descriptor", "_is_held", "_is_used", "_naming", "path")

    def __init__(self, path: Path, *, create: bool):
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        self._descriptor: _Descriptor | None = _Descriptor(os.open(path, flags, 0o644))
        self._is_held = False
        self._is_used = True
        self._naming = threading.Lock()
        """Held while the name is used, and while it changes."""
        self.path = path

    @property
    def is_open(self) -> bool:
        return self._descriptor is not None

    def was_used(self) -> bool:
        """Whether anybody has read or written since this was asked last."""
        used, self._is_used = self._is_used, False
        return used

    def rest(self) -> None:
        """Closes the file until it is used again, unless it was used since `was_used`. Who calls this has
        nothing written that is not synced: an error in writing it back would be lost with the descriptor."""
        with self._naming:
            if not self._is_held and not self._is_used:
                self._descriptor = None

    def wake(self) -> None:
        """Opens the file where it is closed, and has the page that the next write falls into in memory: an
        append waits for neither then. Raises OSError."""
        size = os.fstat(self._file().number).st_size
        self.read(max(size - 1, 0), 1)

    def hold(self) -> None:
        """The name is about to go, or to be another file's. Who reads on, reads this one."""
        with self._naming:
            if self._descriptor is None and not self._is_held:
                with suppress(OSError):  # its reader then hears that it is gone
                    self._descriptor = self._opened()
            self._is_held = True

    def rename(self, target: Path) -> None:
        """Raises OSError."""
        with self._naming:
            os.rename(self.path, target)
            self.path = target

    def _opened(self) -> _Descriptor:
        return _Descriptor(os.open(self.path, os.O_RDWR | os.O_CLOEXEC))

    def _file(self) -> _Descriptor:
        descriptor = self._descriptor
        return self._reopened() if descriptor is None else descriptor

    def _reopened(self) -> _Descriptor:
        with self._naming:
            descriptor = self._descriptor
            if descriptor is None:
                if self._is_held:
                    raise FileNotFoundError(errno.ENOENT, "the file was removed", str(self.path))
                descriptor = self._descriptor = self._opened()
            return descriptor

    def read(self, position: int, size: int) -> bytes:
        """At most `size` bytes; fewer only at the file's end."""
        self._is_used = True
        file = self._file()
        data = os.pread(file.number, size, position)
        while 0 < len(data) < size:
            more = os.pread(file.number, size - len(data), position + len(data))
            if not more:
                break
            data += more
        return data

    def read_cached(self, position: int, size: int) -> bytes | bytearray:
        """As `read`, but raises WouldBlock rather than wait for the disk, or copy more than takes no time."""
        if size > LARGE_READ_SIZE:
            raise WouldBlock(f"{size} bytes of {self.path} are to be copied")
        self._is_used = True
        file = self._descriptor
        if file is None:
            raise WouldBlock(f"{self.path} is not open")
        buffer = bytearray(size)
        try:
            count = os.preadv(file.number, [buffer], position, os.RWF_NOWAIT)
        except BlockingIOError:
            raise WouldBlock(f"{self.path} is not in the page cache at {position}") from None
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
                return self.read(position, size)  # this file system cannot tell
            raise
        if count < size:
            raise WouldBlock(f"{self.path} is not in the page cache at {position + count}")
        return buffer

    def write(self, data: Buffer, position: int) -> None:
        """All of `data` at `position`. Raises OSError, possibly after a part was written."""
        self._is_used = True
        file = self._file()
        count = os.pwrite(file.number, data, position)
        while count < len(data):
            position += count
            data = memoryview(data)[count:]
            count = os.pwrite(file.number, data, position)

    def truncate(self, size: int) -> None:
        """Raises OSError."""
        self._is_used = True
        os.ftruncate(self._file().number, size)

    def sync(self) -> None:
        """Makes what was written durable. Raises SyncFailed, OSError."""
        file = self._file()  # held: nobody closes it meanwhile
        with syncing():
            os.fdatasync(file.number)

    def stat(self) -> os.stat_result:
        """Opens nothing. Raises OSError."""
        descriptor = self._descriptor
        with self._naming:
            if descriptor is None and not self._is_held:
                return os.stat(self.path)
        return os.fstat(self._file().number)


def newest_timestamp(header: BatchHeader) -> int:
    """The timestamp by which a batch counts in an index: a batch without records has none."""
    return header.max_timestamp if header.record_count else NO_TIMESTAMP


def newest_timestamp_of(segment: Segment) -> int:
    """By which retention counts a segment's age: its newest record, or its file's time where records carry
    no timestamps."""
    return segment.modified_ms if segment.max_timestamp == NO_TIMESTAMP else segment.max_timestamp


class Segment:
    """See the module. `next_offset` is the offset after the last batch; times are of the batches.

    `suffix` follows every file's name while a segment is no part of its log yet (`segment_swap.py`);
    `has_aborts=False`: there is no `.txnindex`, it need not be looked for.
    """

    def __init__(
        self,
        directory: Path,
        base_offset: int,
        *,
        now_ms: int,
        create: bool = False,
        suffix: str = "",
        has_aborts: bool = True,
    ):
        stem = f"{base_offset:020d}"
        self.directory = directory
        self.base_offset = base_offset
        self.file = LogFile(directory / f"{stem}{LOG_SUFFIX}{suffix}", create=create)
        self.offset_index = OffsetIndex(directory / f"{stem}{INDEX_SUFFIX}{suffix}", base_offset)
        self.time_index = TimeIndex(directory / f"{stem}{TIME_INDEX_SUFFIX}{suffix}", base_offset)
        self.aborted = TransactionIndex(
            directory / f"{stem}{TRANSACTION_INDEX_SUFFIX}{suffix}", may_exist=has_aborts and not create
        )
        self.size = 0 if create else self.file.stat().st_size
        self.next_offset = base_offset
        self.max_timestamp = NO_TIMESTAMP
        self.max_timestamp_offset = base_offset  # last offset of the batch that holds it
        self.first_timestamp = NO_TIMESTAMP
        self.created_ms = now_ms
        self.index_size = len(self.offset_index.file) * OFFSET_ENTRY_SIZE
        self._size_since_index = 0
        self.has_unsynced_indexes = False  # of the active segment they are not relied on
        self.indexed_size = 0
        """Where `resume_below` stopped: the batches before this byte are in the counters."""

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def modified_ms(self) -> int:
        """The file's time, for segments whose records carry no timestamps."""
        return self.file.stat().st_mtime_ns // 1_000_000

    def can_hold(self, last_offset: int) -> bool:
        """Whether the offset is within 32 bits of the base, as the indexes need."""
        return last_offset - self.base_offset <= _MAX_RELATIVE_OFFSET

    def append(self, data: Buffer, header: BatchHeader, last_offset: int, interval_size: int) -> None:
        """Writes one stamped batch at the end. `header` gives the timestamps.

        Raises OSError after taking a partial write back; when that fails too, the error is
        KafkaStorageError, and the file's end must not be trusted.
        """
        position = self.size
        try:
            self.file.write(data, position)
        except OSError:
            self._take_back(position)
            raise
        size = len(data)
        self.note(newest_timestamp(header), last_offset, position, size, interval_size)
        self.size = position + size

    def note(
        self, max_timestamp: int, last_offset: int, position: int, size: int, interval_size: int
    ) -> None:
        """Takes in a batch that is in the file at `position`: times, next offset, and the indexes when an
        entry is due. `size` of the segment is the caller's to set, last."""
        if max_timestamp > self.max_timestamp:
            self.max_timestamp = max_timestamp
            self.max_timestamp_offset = last_offset
        if self.first_timestamp == NO_TIMESTAMP:
            self.first_timestamp = max_timestamp
        if self._size_since_index > interval_size:
            self.offset_index.append(last_offset, position)
            self.time_index.append_if_newer(self.max_timestamp, self.max_timestamp_offset)
            self.index_size += OFFSET_ENTRY_SIZE
            self._size_since_index = 0
        self._size_since_index += size
        self.next_offset = last_offset + 1

    def _take_back(self, size: int) -> None:
        try:
            self.file.truncate(size)
        except OSError as error:
            raise KafkaStorageError(f"{self.path}: a partial write cannot be removed: {error}") from error

    # -- reading

    def batches(self, position: int = 0, end: int | None = None) -> Iterator[BatchAt]:
        """Position and header of each batch from `position` to `end` (the size now). Raises CorruptMessage
        where the bytes are no batch or one is cut."""
        end = self.size if end is None else end
        while position < end:
            data = self.file.read(position, min(_SCAN_SIZE, end - position))
            consumed = 0
            for at, header in iterate_batches(data):
                yield BatchAt(position + at, header)
                consumed = at + header.size
            if consumed == 0:
                # A batch larger than the scan window: its header is enough to step over it.
                header = parse_header(data)
                if position + header.size > end:
                    raise CorruptMessage(f"{self.path}: the batch at byte {position} is cut")
                yield BatchAt(position, header)
                consumed = header.size
            position += consumed

    def headers(self, position: int = 0) -> Iterator[BatchAt]:
        """As `batches`, reading little more than the headers where batches are large. Raises CorruptMessage
        where the bytes are no batch or one is cut."""
        end = self.size
        window = _SEEK_SIZE
        while position < end:
            data = self.file.read(position, min(window, end - position))
            consumed = 0
            while len(data) - consumed >= HEADER_SIZE:
                header = parse_header(data, consumed)
                window = _SEEK_SIZE if header.size < _SEEK_SIZE // 4 else HEADER_SIZE
                if position + consumed + header.size > end:
                    raise CorruptMessage(f"{self.path}: the batch at byte {position + consumed} is cut")
                yield BatchAt(position + consumed, header)
                consumed += header.size
            if consumed == 0:
                raise CorruptMessage(f"{self.path}: the batch at byte {position} is cut")
            position += consumed

    def find(self, offset: int, *, use_index: bool = True, may_block: bool = True) -> BatchAt | None:
        """The first batch that ends at or after `offset`; None when all end before it.

        Raises CorruptMessage when the index and the log disagree; the log then rebuilds the index. With
        `may_block=False` raises WouldBlock rather than wait for the disk.
        """
        read = self.file.read if may_block else self.file.read_cached
        entry = self.offset_index.lookup(offset, may_block=may_block) if use_index else None
        position = 0
        if entry is not None:
            position = entry.position
            header = self._header_at(position, read)
            if header is None or header.last_offset != entry.offset:
                raise CorruptMessage(f"{self.offset_index.file.path} does not fit its log at {position}")
        end = self.size
        while position < end:
            data = read(position, min(_SEEK_SIZE, end - position))
            consumed = 0
            while len(data) - consumed >= HEADER_SIZE:
                header = parse_header(data, consumed)
                if header.last_offset >= offset:
                    return BatchAt(position + consumed, header)
                consumed += header.size
            if consumed == 0:
                raise CorruptMessage(f"{self.path}: the batch at byte {position} is cut")
            position += consumed
        return None

    def _verify(self, entry: TimeEntry) -> None:
        """Raises CorruptMessage unless the time entry is true of the batch that it names, if it does one."""
        if entry.timestamp_ms == NO_TIMESTAMP:
            return
        at = self.find(entry.offset)
        if (
            at is None
            or at.header.last_offset != entry.offset
            or at.header.max_timestamp != entry.timestamp_ms
        ):
            raise CorruptMessage(f"{self.time_index.file.path} does not fit its log at offset {entry.offset}")

    def _header_at(
        self, position: int, read: Callable[[int, int], bytes | bytearray] | None = None
    ) -> BatchHeader | None:
        if position + HEADER_SIZE > self.size:
            return None
        try:
            return parse_header((read or self.file.read)(position, HEADER_SIZE))
        except CorruptMessage:
            return None

    def find_time(self, timestamp_ms: int, from_offset: int) -> Iterator[BatchAt]:
        """Batches that end at or after `from_offset` and hold a record at least as new as `timestamp_ms`.

        Raises CorruptMessage when an index and the log disagree; the log then rebuilds both.
        """
        entry = self.time_index.lookup(timestamp_ms)
        if entry is not None:
            self._verify(entry)
            from_offset = max(from_offset, entry.offset)
        first = self.find(from_offset)
        if first is None:
            return
        for at in self.batches(first.position):
            if at.header.max_timestamp >= timestamp_ms:
                yield at

    # -- changing

    def rebuild_indexes(self, interval_size: int) -> None:
        """Empties both sparse indexes and fills them from the batches' headers. Readers in other threads find
        less of an index meanwhile, never a wrong one. Raises CorruptMessage."""
        self.has_unsynced_indexes = True
        self.reset_indexes()
        for position, header in self.batches():
            self.note(newest_timestamp(header), header.last_offset, position, header.size, interval_size)

    def reset_indexes(self) -> None:
        """Empties both sparse indexes and the counters that `note` keeps; the log file stays."""
        self.offset_index.file.truncate(0)
        self.time_index.truncate(self.base_offset)
        self.index_size = self._size_since_index = 0
        self.max_timestamp = self.first_timestamp = NO_TIMESTAMP
        self.max_timestamp_offset = self.next_offset = self.base_offset

    def truncate(self, position: int, interval_size: int) -> None:
        """Cuts the file at a batch's position, and rebuilds the indexes. Raises OSError."""
        self.size = position
        self.file.truncate(position)
        self.rebuild_indexes(interval_size)
        self.aborted.truncate_from(self.next_offset)

    def resume(self) -> None:
        """Reads the counters back from sound indexes and the batches after the last entry.

        Raises CorruptMessage when the indexes do not fit the log, or the log ends in a part of a batch.
        """
        entry = self.offset_index.last()
        time_entry = self.time_index.last()
        if time_entry is not None:
            self.max_timestamp, self.max_timestamp_offset = time_entry
        if self.size:
            first = parse_header(self.file.read(0, HEADER_SIZE))
            if first.base_offset < self.base_offset:
                raise CorruptMessage(f"{self.path} begins with offset {first.base_offset}")
            self.first_timestamp = newest_timestamp(first)
        position = 0 if entry is None else entry.position
        self._size_since_index = 0
        is_time_verified = time_entry is None
        for at in self.headers(position):
            header = at.header
            if entry is not None and at.position == entry.position and header.last_offset != entry.offset:
                raise CorruptMessage(f"{self.offset_index.file.path} does not fit its log at {position}")
            if time_entry == (header.max_timestamp, header.last_offset):
                is_time_verified = True
            if newest_timestamp(header) > self.max_timestamp:
                self.max_timestamp = header.max_timestamp
                self.max_timestamp_offset = header.last_offset
            self._size_since_index += header.size
            self.next_offset = header.next_offset
        if time_entry is not None and not is_time_verified:
            self._verify(time_entry)

    def resume_below(self, offset: int) -> bool:
        """Keeps what the sparse indexes say of batches that end below `offset`, drops the rest, and sets the
        counters by it, as if the segment ended at `indexed_size`. False when the indexes cannot be used;
        they are as they were then, and so is the log."""
        if self.offset_index.problem(self.size) or self.time_index.problem(self.size):
            return False
        entry = self.offset_index.lookup(offset - 1)
        if entry is None:
            return False
        header = self._header_at(entry.position)
        if header is None or header.last_offset != entry.offset or entry.position + header.size > self.size:
            return False
        self.offset_index.truncate(entry.position + 1)
        self.time_index.truncate(entry.offset + 1)
        newest = self.time_index.last()
        try:
            if newest is not None:
                self._verify(newest)
        except CorruptMessage:
            return False
        self.max_timestamp, self.max_timestamp_offset = newest or (NO_TIMESTAMP, self.base_offset)
        self.index_size = len(self.offset_index.file) * OFFSET_ENTRY_SIZE
        first = self._header_at(0)
        self.first_timestamp = NO_TIMESTAMP if first is None else newest_timestamp(first)
        self.next_offset = header.next_offset
        self._size_since_index = header.size
        self.indexed_size = entry.position + header.size
        return True

    @property
    def has_unsynced_sides(self) -> bool:
        """Whether a closed segment's indexes or aborted transactions need not be on the disk yet."""
        return self.has_unsynced_indexes or not self.aborted.is_synced

    def write_index_tails(self) -> None:
        """Writes what of the indexes is in memory. Raises OSError."""
        self.offset_index.file.write_tail()
        self.time_index.file.write_tail()
        self.aborted.write_tail()

    def close_indexes(self) -> None:
        """Adds the last time entry and writes both indexes. Raises OSError."""
        if self.size:
            self.time_index.append_greatest(self.max_timestamp, self.max_timestamp_offset)
        self.write_index_tails()

    def sync(self, *, with_indexes: bool) -> None:
        """Makes the batches and the aborted transactions durable, and the written part of the indexes.
        Raises OSError."""
        self.file.sync()
        self.sync_sides(with_indexes=with_indexes)

    def sync_sides(self, *, with_indexes: bool) -> None:
        """The same of all but the batches; by the names of the files. Raises OSError."""
        self.aborted.sync()
        if with_indexes:
            self.has_unsynced_indexes = False
            try:
                self.offset_index.file.sync()
                self.time_index.file.sync()
            except OSError:
                self.has_unsynced_indexes = True
                raise

    def paths(self) -> tuple[Path, Path, Path, Path]:
        """The names of its files, the log's first; those of indexes may be of files that are not there."""
        return self.path, self.offset_index.file.path, self.time_index.file.path, self.aborted.path

    def rename_indexes(self, suffix: str) -> None:
        """Gives the indexes their names with `suffix` (none: the final ones). A reader that comes between
        does not find a file and looks again (`segment_list.py`). Raises OSError."""
        for index, name in (
            (self.aborted, TRANSACTION_INDEX_SUFFIX),
            (self.offset_index.file, INDEX_SUFFIX),
            (self.time_index.file, TIME_INDEX_SUFFIX),
        ):
            target = self.directory / f"{self.base_offset:020d}{name}{suffix}"
            with suppress(FileNotFoundError):  # no entries, no file
                os.rename(index.path, target)
            index.path = target

    def rename_log(self, suffix: str) -> None:
        """Gives the `.log` its name with `suffix`. Raises OSError."""
        self.file.rename(self.directory / f"{self.base_offset:020d}{LOG_SUFFIX}{suffix}")

    def mark_deleted(self) -> list[Path]:
        """Renames the files to `*.deleted`, so that no start-up takes them for a segment; returns the new
        names, to be unlinked at leisure. Readers that hold the file go on."""
        self.file.hold()
        renamed = []
        # The log first: indexes without a log are swept away at start-up.
        for path in self.paths():
            target = path.with_name(path.name + DELETED_SUFFIX)
            try:
                os.rename(path, target)
            except FileNotFoundError:
                continue
            renamed.append(target)
        return renamed
