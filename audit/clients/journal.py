"""The journal: what a producer knows and has not yet reported, kept through kill -9.

Called by `producer`. A memory-mapped file: what was written survives the death of the process, not of the
machine, with which the newest pages may go. So of what was written before the machine's last start, and of
what a damaged block stands in, nothing is said (`stale_because`): after their lease they are UNKNOWN.
Whatever the journal says, it errs on one side only: a sequence whose fate it did not learn is reported as
ambiguous, never as acknowledged.

Byte layout: two halves of equal size, of which the one with the highest generation is in use.

    half        magic "MRJ3", u32 CRC of what follows, u64 generation, u64 each: inode, birth, machine, boot
                (0: unknown; "MRJ2", which is read too: inode, device, machine, boot)
    then blocks u32 payload size, u32 CRC of (generation, payload), payload (JSON)

A half is closed by the first block whose CRC is wrong (bytes of an older generation, or a write cut by the
kill; a good one behind it shows that it was damaged). When a half is full, a snapshot of everything
unreported goes to the other one, whose header is written last. A snapshot that leaves little room doubles the
file and goes to its upper half; what was in use stays where it is until then, so recovery looks for headers
at the size's half, quarter, eighth, ... as well. CRCs are CRC-32C by crcmod's table, computed by hardware
(`protocol.checksum`).

Ownership: one process holds the file's lock while it lives. It is a record lock, which no child inherits,
however it was forked; such a lock goes with *any* descriptor of the file that its process closes, so nothing
here opens the file of a journal that this process has (`_held`), nor closes one of its descriptors, before
the end.

Whoever opens a *copy* must not report what it says, because the original's owner does. `FilePlace` tells: a
copied file has another inode, or by chance the same in another file system, and then another birth: the
random number that a file system gives a file when it makes it. An id inside the file would be copied with
it. A cloned machine has another machine id (where the clone was given one). The number of the device says
nothing: a volume that is attached again may have another. A copy, and a file that is no journal, is set aside
under another name. A machine that was cloned with its id looks like one that was rebooted: the auditor finds
that out, when two sessions report one stream, and its windows are UNKNOWN.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import mmap
import os
import struct
import sys
import threading
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from millrace.broker.errors import FatalError
from millrace.broker.protocol.checksum import crc32c

MAGIC, OLDER_MAGIC = b"MRJ3", b"MRJ2"
HALF_HEADER = struct.Struct("<4sIQQQQQ")
_HEADER_FIELDS = struct.Struct("<QQQQQ")
BLOCK_HEADER = struct.Struct("<II")
_FIRST_OF_BLOCK, _LAST_OF_BLOCK = b'{"', ord("}")
DEFAULT_SIZE = 4 << 20
MIN_SIZE = 1 << 13
_FS_IOC_GETVERSION = 0x8000_7601 | struct.calcsize("l") << 16

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

_held: set[tuple[int, int]] = set()
"""(device, inode) of the journals that this process writes"""
_held_lock = threading.RLock()  # a journal may be collected within it


class JournalInUse(FatalError):
    """Another living process writes this journal."""

    exit_status = 21


class JournalUnusable(FatalError):
    """The journal cannot be created, locked or mapped, or its disk has no room for it."""

    exit_status = 22


@dataclass(frozen=True, slots=True)
class FilePlace:
    """Which file it is, as 64-bit numbers; `birth` and `machine` are 0 where the system tells none."""

    inode: int
    birth: int
    machine: int

    def is_copied_to(self, place: FilePlace) -> bool:
        """Whether a file written here, now found at `place`, is a copy (or a clone) of the original."""
        if place.inode != self.inode:
            return True
        if self.birth and place.birth and place.birth != self.birth:
            return True
        return bool(self.machine and place.machine and place.machine != self.machine)


def place_of(descriptor: int) -> FilePlace:
    """The place of an open file."""
    return FilePlace(os.fstat(descriptor).st_ino, _birth(descriptor), _system_id("/etc/machine-id"))


def _birth(descriptor: int) -> int:
    """The file's generation, which ext4, XFS, Btrfs and F2FS draw at random; 0 in others."""
    told = bytearray(8)
    try:
        fcntl.ioctl(descriptor, _FS_IOC_GETVERSION, told)
    except OSError:
        return 0
    return int.from_bytes(told, sys.byteorder) & 0xFFFF_FFFF


def boot_id() -> int:
    """Of this start of the machine, as a 64-bit number; 0 where the system tells none."""
    return _system_id("/proc/sys/kernel/random/boot_id")


def _system_id(path: str) -> int:
    try:
        text = Path(path).read_bytes().strip()
    except OSError:
        return 0
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") if text else 0


class Journal:
    """An append-only log of JSON blocks in two alternating halves. Not thread-safe: the caller locks."""

    def __init__(self, path: str | Path, size: int = DEFAULT_SIZE):
        self.path = Path(path)
        self._size = max(size, MIN_SIZE)
        self._generation = 0
        self._start = 0
        self._limit = 0
        self._end = 0
        self.set_aside: Path | None = None
        self.set_aside_because = ""
        self.stale_because = ""
        """Why it may lack what was written to it."""
        self._boot = boot_id()
        self._key: tuple[int, int] | None = None
        self._file = self._open_locked()
        self._place = place_of(self._file.fileno())
        self._map = self._open_map()
        self.recovered = self._recover()

    def append(self, block: dict[str, Any]) -> bool:
        """Write one block; False when the half is full and the caller must give a snapshot."""
        payload = json.dumps(block, separators=(",", ":")).encode()
        if self._end + BLOCK_HEADER.size + len(payload) > self._limit:
            return False
        self._end = self._write_block(self._end, payload, self._generation)
        return True

    def rewrite(self, blocks: Iterable[dict[str, Any]]) -> None:
        """Start the other half with a snapshot; grows the file when that leaves too little room.

        Raises JournalUnusable, and changes nothing, where the disk has no room for that.
        """
        payloads = [json.dumps(block, separators=(",", ":")).encode() for block in blocks]
        needed = HALF_HEADER.size + sum(BLOCK_HEADER.size + len(payload) for payload in payloads)
        grown = False
        while needed > self._half_size // 2:
            self._grow()
            grown = True
        generation = self._generation + 1
        start = self._half_size if grown or self._start == 0 else 0
        self._map[start : start + len(MAGIC)] = bytes(len(MAGIC))
        position = start + HALF_HEADER.size
        for payload in payloads:
            position = self._write_block(position, payload, generation)
        self._write_half_header(start, generation)
        self._generation, self._start, self._end = generation, start, position
        self._limit = start + self._half_size

    def wipe(self) -> None:
        """Say nothing at the next start: what is here does not tell any more how far its streams came."""
        self._map[:] = bytes(self._size)  # the blocks too: generations are counted from one again

    def abandon(self) -> None:
        """In a forked child: close its descriptors and the mapping, which are the parent's."""
        self._key = None
        with contextlib.suppress(BufferError):  # another thread was writing; its memory view stays for ever
            self._map.close()
        self._file.close()

    def close(self) -> None:
        """Release the lock and the mapping."""
        self._map.close()
        self._file.close()
        self._let_go()

    def __del__(self) -> None:
        self._let_go()

    def _let_go(self) -> None:
        key, self._key = self._key, None
        if key is not None:
            with _held_lock:
                _held.discard(key)

    @property
    def _half_size(self) -> int:
        return self._size // 2

    def _open_locked(self) -> Any:
        with _held_lock:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                if self.path.exists() and _key_of(os.stat(self.path)) in _held:
                    raise self._in_use("this process has it")
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                reason = error.strerror or str(error)
                raise JournalUnusable(f"journal {self.path}: {reason}; choose a writable path") from error
            file = os.fdopen(descriptor, "r+b", buffering=0)
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                file.close()
                raise self._in_use("another process has it") from error
            self._key = _key_of(os.fstat(descriptor))
            _held.add(self._key)
            return file

    def _in_use(self, by: str) -> JournalInUse:
        return JournalInUse(f"journal {self.path} is in use ({by}); give every producer its own")

    def _open_map(self) -> mmap.mmap:
        present = os.fstat(self._file.fileno()).st_size
        try:
            if present >= MIN_SIZE:
                self._size = present - present % 2
            else:
                os.truncate(self._file.fileno(), self._size)
            self._take_room()
        except OSError as error:
            self._file.close()
            self._let_go()
            raise self._without_room(self._size, error) from error
        return mmap.mmap(self._file.fileno(), self._size)

    def _take_room(self) -> None:
        """Give all of the file its blocks on the disk: a page that finds none when it is written to kills the
        process. Where the file system cannot do that, it is left to luck."""
        try:
            os.posix_fallocate(self._file.fileno(), 0, self._size)
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise

    def _without_room(self, size: int, error: OSError) -> JournalUnusable:
        return JournalUnusable(
            f"journal {self.path}: {error.strerror} for its {size >> 10} KiB; make room, or take another disk"
        )

    def _recover(self) -> list[dict[str, Any]]:
        """The blocks of the newer half, in order; empty for a new, a foreign or a copied file."""
        best: tuple[int, int, FilePlace, int] | None = None
        for start in self._possible_starts():
            magic, checksum, *fields = HALF_HEADER.unpack_from(self._map, start)
            if magic not in (MAGIC, OLDER_MAGIC) or checksum != crc32c(_HEADER_FIELDS.pack(*fields)):
                continue
            generation, inode, birth, machine, boot = fields
            if best is None or generation > best[0]:
                place = FilePlace(inode, birth if magic == MAGIC else 0, machine)
                best = (generation, start, place, boot)
        if best is None:
            if any(
                self._map[start : start + HALF_HEADER.size].strip(b"\0") for start in (0, self._half_size)
            ):
                self._put_aside("unknown", "it is not a journal that this release can read")
            return []
        self._generation, self._start, written_at, boot = best
        if written_at.is_copied_to(self._place):
            self._put_aside("copied", "it is a copy of another producer's, which reports it")
            return []
        if boot and self._boot and boot != self._boot:
            self.stale_because = (
                "it was written before the machine's last start, which may have taken its newest pages"
            )
        return self._read_blocks(self._start + HALF_HEADER.size, self._size)

    def _possible_starts(self) -> list[int]:
        """Where a half may begin, for every size that the file may have had before it grew."""
        starts, size = [0], self._size
        while size >= MIN_SIZE:
            size //= 2
            starts.append(size)
        return starts

    def _read_blocks(self, position: int, limit: int) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = []
        while (end := self._end_of_block(position, limit)) is not None:
            blocks.append(json.loads(self._map[position + BLOCK_HEADER.size : end]))
            position = end
        if self._goes_on_behind(position, limit):
            self.stale_because = "a block in the middle of it is damaged"
        # What was recovered is only ever followed by a snapshot: nothing is appended behind a cut block.
        return blocks

    def _end_of_block(self, position: int, limit: int) -> int | None:
        """Where the good block ends that begins at `position`; None where none does."""
        start = position + BLOCK_HEADER.size
        if start > limit:
            return None
        size, checksum = BLOCK_HEADER.unpack_from(self._map, position)
        end = start + size
        if size == 0 or end > limit or self._map[end - 1] != _LAST_OF_BLOCK:
            return None
        return end if checksum == _block_checksum(self._map[start:end], self._generation) else None

    def _goes_on_behind(self, position: int, limit: int) -> bool:
        """Whether a block follows one that is none: damage. A kill cuts the last one."""
        start = self._map.find(_FIRST_OF_BLOCK, position + BLOCK_HEADER.size, limit)
        while start >= 0:
            if start - BLOCK_HEADER.size > position and self._end_of_block(start - BLOCK_HEADER.size, limit):
                return True
            start = self._map.find(_FIRST_OF_BLOCK, start + 1, limit)
        return False

    def _put_aside(self, what: str, why: str) -> None:
        """Keep the file's bytes under another name, and begin anew."""
        self.set_aside = self.path.with_name(f"{self.path.name}.{what}-{os.getpid()}")
        self.set_aside_because = why
        self.set_aside.write_bytes(self._map[:])
        self._map[:] = bytes(self._size)
        self._generation = self._start = 0

    def _write_block(self, position: int, payload: bytes, generation: int) -> int:
        """The size and CRC go last: until they are there, the log ends before this block."""
        start = position + BLOCK_HEADER.size
        self._map[start : start + len(payload)] = payload
        BLOCK_HEADER.pack_into(self._map, position, len(payload), _block_checksum(payload, generation))
        return start + len(payload)

    def _write_half_header(self, start: int, generation: int) -> None:
        fields = _HEADER_FIELDS.pack(generation, *astuple(self._place), self._boot)
        self._map[start : start + HALF_HEADER.size] = MAGIC + struct.pack("<I", crc32c(fields)) + fields

    def _grow(self) -> None:
        """Double the file; the half in use then lies within the new lower half."""
        before, self._size = self._size, 2 * self._size
        try:
            self._enlarge()
        except OSError as error:
            self._size = before
            with contextlib.suppress(OSError):
                self._map.resize(before)
            raise self._without_room(2 * before, error) from error

    def _enlarge(self) -> None:
        self._map.resize(self._size)  # and not closed and made anew: the lock would go with it
        self._take_room()


def _key_of(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _after_fork() -> None:
    """The parent's locks are the parent's, and so are its journals."""
    global _held_lock
    _held_lock = threading.RLock()
    _held.clear()


os.register_at_fork(after_in_child=_after_fork)


def _block_checksum(payload: bytes, generation: int) -> int:
    return int(crc32c(payload, crc32c(struct.pack("<Q", generation))))
