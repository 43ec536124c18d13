"""Directories of logs that were taken out of service, over all data folders of a broker: deleted ones, which
are removed within a second or two, and strays, which stay until a person has decided on them.

Called by `LogManager`, by whichever thread retires a log, and by its housekeeping. The names that say what a
directory is are `log_loading`'s, which finds them again at the next start.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path
from uuid import uuid4

from millrace.broker.errors import KafkaStorageError
from millrace.broker.storage.checkpoints import sync_directory
from millrace.broker.storage.log_loading import DELETE_SUFFIX

_MAX_DIRECTORY_NAME = 255


class DepartedLogs:
    """See the module."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """The last one: nothing is waited for with it but what is in memory."""
        self._deleted: list[Path] = []
        self._in_the_way: list[Path] = []
        """Of the deleted ones, those that could not be removed."""
        self.strays: list[Path] = []

    def found(self, deleted: Iterable[Path], strays: Iterable[Path]) -> None:
        """A start has found these."""
        with self._lock:
            self._deleted += deleted
            self.strays += strays

    def rename(self, directory: Path, kind: str) -> list[Path]:
        """Gives a directory the name of its kind for good; that name, or none where nothing is there. Raises
        KafkaStorageError."""
        suffix = f".{uuid4().hex}{kind}"
        target = directory.with_name(directory.name[: _MAX_DIRECTORY_NAME - len(suffix)] + suffix)
        try:
            os.rename(directory, target)
            sync_directory(directory.parent)
        except OSError as error:
            if error.errno == errno.ENOENT:
                return []
            raise KafkaStorageError(f"{directory} cannot be renamed: {error}") from error
        with self._lock:
            (self._deleted if kind == DELETE_SUFFIX else self.strays).append(target)
        return [target]

    def remove_deleted(self) -> list[str]:
        """Removes what was deleted. What is in the way, in a line each; `purge` tries that again."""
        with self._lock:
            going, self._deleted = self._deleted, []
        notes = []
        for path in going:
            try:
                shutil.rmtree(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                notes.append(f"{path} is not removed yet: {error}")
                with self._lock:
                    self._in_the_way.append(path)
        return notes

    def purge(self) -> list[str]:
        """As `remove_deleted`, with what could not be removed before; and forgets strays that somebody has
        removed."""
        with self._lock:
            self._deleted += self._in_the_way
            self._in_the_way.clear()
            strays = list(self.strays)
        notes = self.remove_deleted()
        gone = {path for path in strays if not path.exists()}
        with self._lock:
            self.strays = [path for path in self.strays if path not in gone]
        return notes
