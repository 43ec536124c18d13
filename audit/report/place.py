"""Where the report lies: a folder of this machine, or one of a Hadoop file system.

Called by `job`, `status`, `explain` and the command line. What makes and reads a report works with a folder
of this machine: for one elsewhere that is a copy, `staged` for as long as it is worked on. Then each file
that is new or has changed is replaced whole, the summary last, as it is in a folder of this machine.

No run depends on a report, so any file system does that can be written, also those on which two jobs could
both commit (`hadoop_files` has the table of what a state needs).
"""

from __future__ import annotations

import contextlib
import tempfile
import uuid
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from millrace.audit.keeping.hadoop_files import HadoopFiles
from millrace.audit.keeping.state_files import is_remote
from millrace.broker.errors import DataFolderNotWritable, MillraceError

LAST = "summary.json"


class LocalReport:
    """A folder of this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def check(self) -> None:
        """Raises DataFolderNotWritable."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            probe = self._folder / f".probe-{uuid.uuid4().hex}"
            probe.touch()
            probe.unlink()
        except OSError as problem:
            raise _not_writable(self._folder, problem.strerror or str(problem)) from problem

    @contextlib.contextmanager
    def staged(self, names: Collection[str] = ()) -> Iterator[Path]:
        self._folder.mkdir(parents=True, exist_ok=True)
        yield self._folder

    @contextlib.contextmanager
    def reading(self, names: Collection[str]) -> Iterator[Path]:
        yield self._folder

    def names(self) -> set[str]:
        """The files that are there."""
        return {path.name for path in self._folder.iterdir()} if self._folder.is_dir() else set()

    def remove(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)


class RemoteReport:
    """A folder of a Hadoop file system; `settings` are Spark's, for when it does not run."""

    def __init__(self, place: str, settings: Mapping[str, str]) -> None:
        self._files = HadoopFiles(place, settings)

    def check(self) -> None:
        """Raises DataFolderNotWritable, FileSystemAway."""
        probe = f".probe-{uuid.uuid4().hex}"
        try:
            self._files.write(probe, b"")
            self._files.remove(probe)
        except MillraceError:
            raise
        except OSError as problem:
            raise _not_writable(self._files.where, str(problem)) from problem

    @contextlib.contextmanager
    def staged(self, names: Collection[str] = ()) -> Iterator[Path]:
        """A folder with these files, as far as they are there; what has changed in it at the end is written.
        Nothing is, where the work on it fails."""
        with self.reading(names) as folder:
            before = {path.name: path.read_bytes() for path in folder.iterdir()}
            yield folder
            for path in sorted(folder.iterdir(), key=lambda each: (each.name == LAST, each.name)):
                if path.name not in before or path.read_bytes() != before[path.name]:
                    self._files.replace(path.name, path)
            for name in before:
                if not (folder / name).exists():
                    self._files.remove(name)

    @contextlib.contextmanager
    def reading(self, names: Collection[str]) -> Iterator[Path]:
        """A folder with these files, as far as they are there."""
        with tempfile.TemporaryDirectory(prefix="millrace-report-") as temporary:
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    (Path(temporary) / name).write_bytes(self._files.read(name))
            yield Path(temporary)

    def names(self) -> set[str]:
        """The files that are there."""
        return {entry.name for entry in self._files.entries("")}

    def remove(self, name: str) -> None:
        self._files.remove(name)


Report = LocalReport | RemoteReport


def report_at(place: Path | str, settings: Mapping[str, str] | None = None) -> Report:
    """Raises FileSystemFailed where the place names no file system that is known."""
    if is_remote(place):
        return RemoteReport(str(place), settings or {})
    return LocalReport(Path(place))


def _not_writable(where: object, why: str) -> DataFolderNotWritable:
    return DataFolderNotWritable(
        f"report folder {where} cannot be written ({why}); set report: to a folder this user may write"
    )
