"""What the audit keeps between runs: cells counted so far, how far each partition was read, the events.

    state/commits/00000007.json      one per run that learned something; the newest whole one is the state
    state/cells/<run>/…parquet       cells; only files named by a commit count
    state/events/<run>.parquet       every stream's facts as of that run (`fact_rows`)

A commit names *all* files and offsets, so one file is the whole state and nothing is summed over commits. It
is written to a temporary name, flushed, and linked to its number, which fails if the number exists: of two
jobs that ran at once, one commits and the other stops. Files of a job that died are never named and are
removed by `sweep` after a day. The content is guarded by a CRC; a damaged newest commit is an error, never
silently an older state.

Called by `job` and `explain`. `StateFolder` is the seam for other file systems: everything here asks for
whole files by name, creating-if-absent, and listing.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from millrace.broker.errors import DataFolderNotWritable, FatalError
from millrace.broker.protocol.checksum import crc32c_reference

STATE_VERSION = 1
SWEEP_AGE_S = 86_400  # a run takes minutes; a day leaves no doubt that its unnamed files are left over


class StateDamaged(FatalError):
    """The state folder cannot be believed; the message says which file and what to do."""

    exit_status = 3


class CommitConflict(FatalError):
    """Another job committed first; nothing of this one was kept."""

    exit_status = 3


@dataclass(frozen=True, slots=True)
class ReadPosition:
    """How far one partition was counted, and of which topic (a re-created topic starts again)."""

    next_offset: int
    topic_id: str


@dataclass(frozen=True, slots=True)
class UnreadNote:
    """Offsets that were gone before the audit could count them."""

    cluster: str
    topic: str
    partition: int
    first_offset: int
    end_offset: int
    cause: str
    until_ms: int


@dataclass(slots=True)
class Commit:
    """The whole state as of one run. `cells` and `events` are paths relative to the state folder."""

    number: int = 0
    at_ms: int = 0
    window_ms: int = 0
    cells: list[str] = field(default_factory=list)
    events: str = ""
    events_digest: str = ""
    offsets: dict[str, ReadPosition] = field(default_factory=dict)
    unread: list[UnreadNote] = field(default_factory=list)
    gaps: list[dict[str, Any]] = field(default_factory=list)
    tiers: list[dict[str, Any]] = field(default_factory=list)
    untrusted: dict[str, int] = field(default_factory=dict)

    def knows_as_much_as(self, other: Commit) -> bool:
        """Whether the two differ in nothing but their number and time."""
        return _content(self) == _content(other)


def _content(commit: Commit) -> dict[str, Any]:
    content = asdict(commit)
    for name in ("number", "at_ms", "events"):
        content.pop(name)
    return content


class StateFolder:
    """One audit's state on a file system."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def open(cls, root: Path) -> StateFolder:
        """Make the folders; raises DataFolderNotWritable."""
        folder = cls(root)
        try:
            for name in ("commits", "cells", "events"):
                (root / name).mkdir(parents=True, exist_ok=True)
            probe = root / f".probe-{uuid.uuid4().hex}"
            probe.touch()
            probe.unlink()
        except OSError as problem:
            raise DataFolderNotWritable(
                f"audit state folder {root} cannot be written ({problem.strerror}); "
                "set state: to a folder this user may write"
            ) from problem
        return folder

    def latest(self) -> Commit:
        """The newest commit; an empty one (number 0) when there is none. Raises StateDamaged."""
        numbers = self._numbers()
        return self.read(numbers[-1]) if numbers else Commit()

    def read(self, number: int) -> Commit:
        path = self._commit_path(number)
        try:
            envelope = json.loads(path.read_bytes())
            body, guard = envelope["commit"], envelope["crc32c"]
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise StateDamaged(f"{path} is not a commit file; move it away to go back one run") from problem
        if body.get("version") != STATE_VERSION:
            raise StateDamaged(
                f"{path} has format version {body.get('version')}, this program knows {STATE_VERSION}; "
                "use the newer program or another state folder"
            )
        if guard != crc32c_reference(_encode(body)):
            raise StateDamaged(f"{path} is damaged (its CRC does not fit); move it away to go back one run")
        return _commit_of(body)

    def commit(self, commit: Commit) -> None:
        """Make the commit the newest, if its number is free. Raises CommitConflict."""
        body = _body_of(commit)
        path = self._commit_path(commit.number)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        with temporary.open("xb") as file:
            file.write(json.dumps({"commit": body, "crc32c": crc32c_reference(_encode(body))}).encode())
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError as problem:
            raise CommitConflict(
                f"another audit job has committed run {commit.number} of {self.root} meanwhile; "
                "nothing of this run was kept, run it again"
            ) from problem
        finally:
            temporary.unlink()
        _sync_folder(path.parent)

    def sweep(self, commit: Commit, now_s: float | None = None) -> None:
        """Remove files of dead runs: not named by `commit` and untouched for a day."""
        horizon_s = (time.time() if now_s is None else now_s) - SWEEP_AGE_S
        named = {Path(name).parts[1] for name in [*commit.cells, commit.events] if name}
        for room in ("cells", "events"):
            for entry in (self.root / room).iterdir():
                if entry.name in named or entry.stat().st_mtime > horizon_s:
                    continue
                if entry.is_dir():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()

    def _numbers(self) -> list[int]:
        folder = self.root / "commits"
        return sorted(int(path.stem) for path in folder.glob("*.json") if path.stem.isdigit())

    def _commit_path(self, number: int) -> Path:
        return self.root / "commits" / f"{number:08d}.json"


def _encode(body: Mapping[str, Any]) -> bytes:
    """The bytes that the CRC covers: independent of how the file was spaced."""
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def _body_of(commit: Commit) -> dict[str, Any]:
    return {"version": STATE_VERSION, **asdict(commit)}


def _commit_of(body: Mapping[str, Any]) -> Commit:
    fields = {name: value for name, value in body.items() if name != "version"}
    fields["offsets"] = {key: ReadPosition(**each) for key, each in fields["offsets"].items()}
    fields["unread"] = [UnreadNote(**each) for each in fields["unread"]]
    return Commit(**fields)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
