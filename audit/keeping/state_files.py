"""Where a state's files lie: a local folder, or a Hadoop file system that Spark reaches (`hadoop_files`).

`open_files(place)` gives a `StateFiles`: whole files by name, created only if absent, listed and removed.
Called by `state`, which knows what the files mean. Names are relative, with slashes.

**Create if absent** is what a commit rests on: of two jobs one wins, and the name never shows half a file. In
a local folder the file is written aside, flushed and given its name by link(2), which fails on a name that
exists; `hadoop_files` has the table of what holds elsewhere. A folder of a server may have lost the answer
though the name was given, so whose file it is decides, and not what link said. Once the name is given the
file is made: nothing that comes after it may say otherwise.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from millrace.broker.errors import DataFolderNotWritable, FatalError

_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EINVAL, errno.EXDEV})
"""What link(2) says where a file can have one name only."""
_NO_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP})
"""What fsync(2) says of a folder where a folder has nothing to be synced."""


class StatePlaceUnsafe(FatalError):
    """On this file system two jobs could both commit, or none."""

    exit_status = 3


@dataclass(frozen=True, slots=True)
class Entry:
    """One file or folder of a listing; `name` without its folder."""

    name: str
    modified_s: float
    size: int
    is_folder: bool


class StateFiles(Protocol):
    """The seam. Errors are `OSError`s with one line: FileNotFoundError for what is not there; `DiskFull`."""

    where: str

    def uri(self, name: str) -> str:
        """The file's address for Spark."""

    def prepare(self, folders: Sequence[str]) -> None:
        """Make the folders; raises DataFolderNotWritable when nothing can be written, StatePlaceUnsafe where
        `create` cannot work."""

    def read(self, name: str) -> bytes: ...

    def source(self, name: str) -> Any:
        """What pyarrow reads a file from, a stretch at a time."""

    def at_hand(self, name: str, copy: Path) -> Path:
        """A file of this machine with what the file has: itself where it is one, or made as this copy."""

    def write(self, name: str, content: bytes) -> None:
        """A new file under a name that nobody else uses; durable when this returns."""

    def create(self, name: str, content: bytes) -> bool:
        """Make the file whole and durable, unless the name is taken: then False, and nothing is changed."""

    def entries(self, folder: str) -> list[Entry]:
        """What lies in the folder, in order of names; empty when there is none."""

    def remove(self, name: str) -> None:
        """A file, or a folder with all that is in it; nothing happens when it is gone."""

    def flush(self, names: Sequence[str]) -> None:
        """Make files durable that Spark wrote."""


def is_remote(place: Path | str) -> bool:
    """Whether the place is a URI, for which Hadoop's API (and so a JVM) is needed."""
    return isinstance(place, str)


def open_files(place: Path | str, settings: Mapping[str, str] | None = None) -> StateFiles:
    """The files at a local path, or at a URI through the JVM of this process (started when there is none,
    with those of Spark's `settings` that file systems need)."""
    if isinstance(place, Path):
        return LocalFiles(place)
    from millrace.audit.keeping.hadoop_files import HadoopFiles

    return HadoopFiles(place, settings)


class LocalFiles:
    """A local folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.where = str(root)

    def uri(self, name: str) -> str:
        """Spark takes a URI's text as it stands, unescaped."""
        return f"file://{(self.root / name).absolute()}"

    def prepare(self, folders: Sequence[str]) -> None:
        try:
            for name in folders:
                (self.root / name).mkdir(parents=True, exist_ok=True)
            self._probe(self.root / f".probe-{uuid.uuid4().hex}")
        except OSError as problem:
            raise not_writable(self.where, problem.strerror or str(problem)) from problem

    def _probe(self, path: Path) -> None:
        """Whether files can be made, and given a second name."""
        second = path.with_name(f"{path.name}-linked")
        try:
            path.touch()
            _link(path, second)
        except OSError as problem:
            if problem.errno in _NO_LINKS and path.exists():
                raise no_hard_links(self.where, problem.strerror) from problem
            raise
        finally:
            path.unlink(missing_ok=True)
            second.unlink(missing_ok=True)

    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def source(self, name: str) -> Path:
        return self.root / name

    def at_hand(self, name: str, copy: Path) -> Path:
        return self.root / name

    def write(self, name: str, content: bytes) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _write_flushed(path, content)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)

    def create(self, name: str, content: bytes) -> bool:
        path = self.root / name
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            _write_flushed(temporary, content)
            is_ours = _link(temporary, path)
        finally:
            with contextlib.suppress(OSError):  # it says nothing of the file, and is swept in a day
                temporary.unlink()
        if is_ours:
            _sync_folder(path.parent)
        return is_ours

    def entries(self, folder: str) -> list[Entry]:
        found = []
        with contextlib.suppress(FileNotFoundError):
            for path in sorted((self.root / folder).iterdir()):
                with contextlib.suppress(FileNotFoundError):  # another job's temporary file
                    stat = path.stat()
                    found.append(Entry(path.name, stat.st_mtime, stat.st_size, path.is_dir()))
        return found

    def remove(self, name: str) -> None:
        path = self.root / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def flush(self, names: Sequence[str]) -> None:
        for name in names:
            handle = os.open(self.root / name, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        folders = {folder: None for name in names for folder in list(Path(name).parents)[:-1]}
        for folder in sorted(folders, key=lambda each: -len(each.parts)):
            _sync_folder(self.root / folder)


def not_writable(where: str, why: str) -> DataFolderNotWritable:
    """The line for a folder that this user may not change, or that is none."""
    return DataFolderNotWritable(
        f"audit state folder {where} cannot be written ({why}); set state: to a folder this user may write"
    )


def no_hard_links(where: str, why: str | None) -> StatePlaceUnsafe:
    """The line for a folder of a file system on which a file has one name only."""
    return StatePlaceUnsafe(
        f"{where} cannot take the audit's state: its file system has no hard links ({why}), by which one of "
        "two jobs commits; set state: to a folder of a file system that has them"
    )


def _link(path: Path, second: Path) -> bool:
    """Give the file a second name, unless that is taken: then False."""
    try:
        os.link(path, second)
    except OSError as problem:
        if _is_one_file(path, second):
            return True
        if isinstance(problem, FileExistsError):
            return False
        raise
    return True


def _is_one_file(path: Path, second: Path) -> bool:
    try:
        return path.samefile(second)
    except FileNotFoundError:
        return False


def _write_flushed(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as problem:
        if problem.errno not in _NO_SYNC:
            raise
    finally:
        os.close(handle)
