"""What is known of holes in a partition's offsets: the file `offset-holes` (`checkpoints.HOLES_MARKER`).

That it is there says that offsets need not follow each other. What it holds are the holes between two
segments, "from to" of the offsets that no batch of either has. Compaction makes none: it keeps the last batch
of what it replaces, so a segment ends where the next one begins whatever is compacted, merged, or removed at
the log's beginning. Only a truncation that ends in a hole leaves one there. So nothing has to say which
segments there are: where one does not reach the next, below the recovery point, and the file does not tell of
it, a segment or the end of one is gone.

The file is on the disk before such a hole is made. It tells nothing, and any hole is let stand, where it is
empty (earlier versions made it so, and so may a person) and where another program may have made holes since
(`DataFolder.is_as_left`): Apache Kafka, which passes the file over, keeps no last batches, and its followers
begin a segment behind a hole.

Held by the log; made by recovery, which finds out what holes there are. One writes at a time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from millrace.broker.storage.checkpoints import HOLES_MARKER, read_holes, write_holes

Hole = tuple[int, int]


class OffsetHoles:
    """See the module."""

    def __init__(self, directory: Path, told: frozenset[Hole] | None = None, *, is_marked: bool = False):
        self._path = directory / HOLES_MARKER
        self._told = told
        """By the file; None: nothing, there may be any."""
        self._between: frozenset[Hole] = frozenset()
        """That there are between segments, or were once."""
        self._lock = threading.Lock()
        self.is_marked = is_marked
        """Whether offsets may have holes, for good."""

    @classmethod
    def load(cls, directory: Path, names: Sequence[str], notes: list[str]) -> OffsetHoles:
        """`names` are the directory's files. A file that cannot be read tells nothing, which goes to `notes`.
        Raises OSError."""
        if HOLES_MARKER not in names:
            return cls(directory)
        told = None
        try:
            told = read_holes(directory / HOLES_MARKER)
        except ValueError as error:
            notes.append(f"{error}; it tells of no hole, so any may be there")
        return cls(directory, told, is_marked=True)

    def found(self, hole: Hole, *, is_as_left: bool) -> bool:
        """A hole between two segments is there; False when none can be. `is_as_left`: no other program can
        have made it. Raises OSError."""
        if self._told is not None and hole not in self._told:
            if is_as_left:
                return False
            os.truncate(self._path, 0)  # before the folder is this program's again
            with open(self._path, "rb") as file:
                os.fsync(file.fileno())
            self._told = None
        self._between |= {hole}
        return True

    def note(self, *between: Hole) -> None:
        """Says for good that there may be holes, and that there are some between segments. To be called
        before they are made. Raises OSError."""
        with self._lock:
            known = self._between.union(between)
            if known != self._told:
                write_holes(self._path, known)
            self._between = self._told = known
            self.is_marked = True

    def cut(self, offset: int) -> None:
        """The log is about to end at `offset`, below which it is; no checkpoint calls what comes after it
        flushed. Raises OSError."""
        with self._lock:
            kept = frozenset((start, min(end, offset)) for start, end in self._between if start < offset)
            if self._told is not None and kept != self._told:
                write_holes(self._path, kept)
                self._told = kept
            self._between = kept
