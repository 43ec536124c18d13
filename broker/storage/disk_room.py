"""Whether a data folder has room for what is written: since when it refuses writes, and when that is over.

A full disk refuses the write at hand and all is well once there is room (`disk_errors.py`), so nothing ends
and nobody would know. Each refusal is counted here (`refused`, from whichever thread met it, with a log's
locks held), and once a second a thread that may wait for the disk looks (`looked`): what it makes of that is
for the operator's log and the gauges.

Refusing is over when nothing was refused for `QUIET_MS`, which is longer than producers wait between two
tries, and a probe could be written: that nobody writes is no sign of room. So of a disk that is full again
and again there are two lines in that time at most.

Called by the log manager. Pure but for the lock; steady_ms is the steady clock's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

QUIET_MS = 5_000
"""librdkafka and Java's producer wait a second at most between two tries (`retry.backoff.max.ms`)."""


class RoomChange(NamedTuple):
    """A data folder began to refuse writes for want of room, or takes them again. `refusals`: how many it
    refused; `reason`: the last of them, in one line."""

    folder: Path
    is_refusing: bool
    free_bytes: int
    refusals: int
    reason: str


class DiskRoom:
    """The room of one data folder. `free_bytes` is None until it was looked at."""

    def __init__(self, folder: Path) -> None:
        self.free_bytes: int | None = None
        self.is_refusing = False
        self._folder = folder
        self._refusals = 0
        self._unseen = 0
        self._reason = ""
        self._quiet_since_ms = 0
        self._lock = threading.Lock()

    def refused(self, reason: str) -> None:
        """A write into the folder failed for want of room. From any thread."""
        with self._lock:
            self._unseen += 1
            self._reason = reason

    def looked(self, free_bytes: int, steady_ms: int, can_write: Callable[[], bool]) -> RoomChange | None:
        """What has changed since the last look. `can_write` writes the probe, and is asked only where the
        end of a refusal hangs on it."""
        self.free_bytes = free_bytes
        with self._lock:
            unseen, self._unseen = self._unseen, 0
            reason = self._reason
        if unseen:
            self._quiet_since_ms = steady_ms
            self._refusals += unseen
            if self.is_refusing:
                return None
        elif not self.is_refusing or steady_ms - self._quiet_since_ms < QUIET_MS or not can_write():
            return None
        self.is_refusing = not self.is_refusing
        change = RoomChange(self._folder, self.is_refusing, free_bytes, self._refusals, reason)
        if not self.is_refusing:
            self._refusals = 0
        return change
