"""Whether a log can be used: what a failed system call means for it, and who hears of that.

A full disk refuses the operation at hand; an error after which nothing on the disk can be relied on takes the
log's whole folder offline; what leaves this log alone in doubt takes this log (`disk_errors.py` tells them
apart). Something that can be made anew is passed over, unless its error says the same of everything else.

Called by the log and its parts, with the log's locks held; the log manager sets who hears. Invariants: once
`failure` is set the log takes no more appends, and whoever manages it has heard of it where he did not do it
himself, because a leader whose log is offline must not lead on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from millrace.broker.errors import KafkaStorageError
from millrace.broker.storage.disk_errors import is_beyond_trust, is_no_room


class LogHealth:
    """See the module. What was passed over goes to `notes`, the log's own."""

    def __init__(self, directory: Path, notes: list[str]) -> None:
        self.failure: str | None = None
        """Why the log takes no more appends; None while all is well."""
        self.on_disk_failure: Callable[[str], None] | None = None
        """Called, with the reason, when an error says that the folder's disk cannot be trusted."""
        self.on_failure: Callable[[str], None] | None = None
        """Called, with the reason, when this log fails alone."""
        self.on_no_room: Callable[[str], None] | None = None
        """Called, with the reason, when the disk is full. All three with the log's locks held."""
        self.on_failed_sync: Callable[[], None] | None = None
        """Called before anything else when a sync fails: what it was for may never be on the disk."""
        self._directory = directory
        self._notes = notes

    def check(self) -> None:
        """Raises KafkaStorageError once the log is offline, closed or deleted."""
        if self.failure is not None:
            raise KafkaStorageError(self.failure)

    def refused(self, what: str, error: OSError) -> KafkaStorageError:
        """The refusal that a failed system call leads to; the folder goes offline where it must."""
        reason = f"{self._directory}: {what}: {error}"
        if is_beyond_trust(error):
            self.fail(reason, error)
        else:
            self._note_no_room(reason, error)
        return KafkaStorageError(reason)

    def passed_over(self, what: str, error: OSError) -> None:
        """Something that can be made anew was not written: that does no harm, unless the error says that
        nothing else can be relied on either. Then the log is offline."""
        self._notes.append(str(self.refused(what, error)))

    def fail(self, reason: str, cause: BaseException | None, *, folder: bool = False) -> None:
        """Takes the log offline, and its folder when `folder`, or when the cause says so."""
        self.failure = reason
        self._note_no_room(reason, cause)
        folder = folder or (isinstance(cause, OSError) and is_beyond_trust(cause))
        tell = self.on_disk_failure if folder else self.on_failure
        if tell is not None:
            tell(reason)

    def end(self, reason: str) -> None:
        """The log is closed, deleted, or offline with its folder: whoever manages it knows."""
        self.failure = reason

    def sync_failed(self) -> None:
        """To be called before anything else is done about it."""
        if self.on_failed_sync is not None:
            self.on_failed_sync()

    def _note_no_room(self, reason: str, cause: BaseException | None) -> None:
        if self.on_no_room is not None and isinstance(cause, OSError) and is_no_room(cause):
            self.on_no_room(reason)
