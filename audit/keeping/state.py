"""What the audit keeps between runs: cells counted so far, how far each partition was read, the events.

    state/commits/00000007.json      one per run that learned something; the newest whole one is the state
    state/cells/<run>/…parquet       cells; only files named by a commit count
    state/events/<run>.parquet       every stream's facts as of that run (`fact_rows`)
    state/verdicts/<run>/…parquet    the rows of that run with their revisions, by day (`verdict_files`)
    state/waivers/<window>.<n>.json  what people decided to go on without (`waivers`)

A commit names *all* files and offsets, so one file is the whole state and nothing is summed over commits. It
is made whole under its number, if that is free (`state_files` says how on each file system): of two jobs that
ran at once, one commits and the other stops. Each run writes its facts and rows anew, so an audit every ten
minutes would keep them 144 times in a day: `sweep` removes commits older than an hour, all but the last two,
with what they alone name (`explain`, or a run that began before, may still read what the last hour's name).
Files of a job that died are named by no commit and go a day after the last of them was written. A commit's
content is guarded by a CRC, and Parquet's pages by theirs, which everyone who reads them looks at (Spark's
writer makes them, too): what is damaged is an error, never silently an older state.

An older state is read as it is, and the next run writes the newest version; VERSIONS says what each added. A
version that this program does not know is refused, whatever is in it.

Called by `job`, `explain`, `status` and `waivers`.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from millrace.audit.contract.event_ledger import Distrusted
from millrace.audit.contract.group_counts import Claim
from millrace.audit.keeping.state_files import Entry, LocalFiles, StateFiles, open_files
from millrace.audit.keeping.work_folder import LEFT_AFTER_S, is_in_use
from millrace.broker.errors import DataFolderNotWritable, FatalError, MillraceError
from millrace.broker.protocol.checksum import crc32c_reference

VERSIONS = {
    1: "cells, offsets, events",
    2: "verdicts, watermarks and ages",
    3: "leader epochs of what was read",
    4: "what groups claim",
    5: "the clusters' ids, and cells without a place, which older programs would take for a partition's",
    6: "verdicts as many files of rows",
    7: "how far the events were read",
    8: "what came again in a cell as sets, which older programs would not see",
    9: "producers' plain reports packed, which older programs would not see",
    10: "proven windows of days that are long over summed up, which older programs would not see",
    11: "windows at rest, which older programs would not see",
}
"""What each version of the format added."""
STATE_VERSION = max(VERSIONS)
READABLE_VERSIONS = tuple(VERSIONS)
ROOMS = ("cells", "events", "verdicts")
LEAST_COMMITS = 2  # so that one can always go back a run
COMMIT_LEFT_AFTER_S = 3_600
_LEFT_OVER = re.compile(r"\.work-.*|\.probe-.*|\..+\.(json|untrusted)\.[0-9a-f]{32}")
"""what a job that was killed leaves: working folders, and files that were to get their name"""


class StateDamaged(FatalError):
    """The state folder cannot be believed; the message says which file and what to do."""

    exit_status = 3


class CommitConflict(FatalError):
    """Another job committed first; nothing of this one was kept."""

    exit_status = 3


@dataclass(frozen=True, slots=True)
class ReadPosition:
    """How far one partition was counted, and of which topic (a re-created topic starts again).

    `epochs` are the leader epochs of what was counted, as (epoch, first offset), () where nobody told them: a
    log that was shortened since differs from them (`log_history`).
    """

    next_offset: int
    topic_id: str
    epochs: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class UnreadNote:
    """Offsets that were gone before the audit could count them. `epoch` is the newest leader epoch of the log
    that was read before it was truncated, -1 where it is not known."""

    cluster: str
    topic: str
    partition: int
    first_offset: int
    end_offset: int
    cause: str
    until_ms: int
    epoch: int = -1


@dataclass(frozen=True, slots=True)
class Resting:
    """Windows that one fold laid to rest, at `at_ms` (`runs.resting`), as paths relative to the state: the
    `rows` that a run made of them (other rows in these files are of later files), their `cells`, and in a
    `folder` what is left of their streams, their spans, and what the report needs of them."""

    at_ms: int
    folder: str
    rows: tuple[str, ...]
    cells: tuple[str, ...]

    @property
    def name(self) -> str:
        """Of the run."""
        return self.folder.rpartition("/")[2]

    @property
    def facts(self) -> str:
        return f"{self.folder}/resting-facts.parquet"

    @property
    def spans(self) -> str:
        return f"{self.folder}/resting-spans.parquet"

    @property
    def squares(self) -> str:
        return f"{self.folder}/resting-squares.parquet"

    @property
    def producers(self) -> str:
        return f"{self.folder}/resting-producers.parquet"

    @property
    def sums(self) -> str:
        return f"{self.folder}/resting-sums.json"

    def files(self) -> list[str]:
        told = (self.facts, self.spans, self.squares, self.producers, self.sums)
        return [*self.rows, *self.cells, *told]


@dataclass(slots=True)
class Commit:
    """The whole state as of one run. `cells`, `events` and `verdicts` are paths relative to the state.

    `untrusted_at` {what: when it was last added to}, so that old doubts end with `keep`. `watermarks` {topic:
    ms} are the last ones told. `folded_ms` is when the cells were last folded (`upkeep`). `claims` are
    (group, session, claim) of what members of groups committed to have told, and none of their events tells;
    `answered` (group, session, count) of what the events of sessions told that commits still speak of: they
    may be pruned. `clusters` {name: Kafka's id of the cluster} are those that were counted, as far as they
    have one. `events_read` {partition's key: position} is how far the events topics were read, `events_ways`
    what that went by, `events_doubted` (partition's key, offset, what) of them could not be believed and are
    still there (`event_reading`). `resting` are windows at rest, which were judged by `resting_by`.
    """

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
    verdicts: list[str] = field(default_factory=list)
    verdicts_digest: str = ""
    untrusted_at: dict[str, int] = field(default_factory=dict)
    watermarks: dict[str, int] = field(default_factory=dict)
    folded_ms: int = 0
    claims: list[tuple[str, str, Claim]] = field(default_factory=list)
    answered: list[tuple[str, str, int]] = field(default_factory=list)
    clusters: dict[str, str] = field(default_factory=dict)
    events_read: dict[str, ReadPosition] = field(default_factory=dict)
    events_ways: list[str] = field(default_factory=list)
    events_doubted: list[tuple[str, int, Distrusted]] = field(default_factory=list)
    resting: list[Resting] = field(default_factory=list)
    resting_by: str = ""

    def knows_as_much_as(self, other: Commit) -> bool:
        """Whether the two differ in nothing but their number, their time and the names of equal files."""
        return _content(self) == _content(other)

    def rooms(self) -> set[tuple[str, str]]:
        """(room, entry) of everything that the commit names."""
        return {(parts[0], parts[1]) for parts in (name.split("/") for name in self.files())}

    def files(self) -> list[str]:
        """Everything that the commit names."""
        resting = [name for each in self.resting for name in each.files()]
        return [name for name in (*self.cells, self.events, *self.verdicts, *resting) if name]


def _content(commit: Commit) -> dict[str, Any]:
    content = asdict(commit)
    for name in ("number", "at_ms", "events", "verdicts"):
        content.pop(name)
    return content


class StateFolder:
    """One audit's state on a file system."""

    def __init__(self, files: StateFiles) -> None:
        self.files = files

    @classmethod
    def open(cls, place: Path | str, settings: Mapping[str, str] | None = None) -> StateFolder:
        """Make the folders; raises DataFolderNotWritable, StatePlaceUnsafe.

        A URI needs a JVM, and `settings` of Spark when that does not run yet (see `hadoop_gateway`).
        """
        folder = cls(open_files(place, settings))
        folder.files.prepare(("commits", *ROOMS, "waivers"))
        return folder

    @classmethod
    def look(cls, place: Path | str, settings: Mapping[str, str] | None = None) -> StateFolder:
        """For who only reads, and may have no right to write: nothing is made.

        Raises DataFolderNotWritable, FileSystemFailed.
        """
        folder = cls(open_files(place, settings))
        try:
            folder.files.entries("commits")
        except MillraceError:
            raise
        except OSError as problem:
            why = problem.strerror or str(problem)
            raise DataFolderNotWritable(
                f"audit state folder {folder.where} cannot be read ({why})"
            ) from problem
        return folder

    @property
    def where(self) -> str:
        return self.files.where

    @property
    def local_root(self) -> Path | None:
        """The folder, when it is one of this machine that needs no JVM."""
        return self.files.root if isinstance(self.files, LocalFiles) else None

    def latest(self) -> Commit:
        """The newest commit; an empty one (number 0) when there is none. Raises StateDamaged."""
        numbers = self._numbers()
        if not numbers:
            self._require_unused()
            return Commit()
        return self.read(numbers[-1])

    def require_files(self, commit: Commit) -> None:
        """Raises StateDamaged when a file that the commit names is not there: what it tells would be missed,
        or look lost, and Spark would say so after an hour."""
        listed: dict[str, set[str]] = {}
        for name in commit.files():
            folder, _, file = name.rpartition("/")
            if folder not in listed:
                listed[folder] = {entry.name for entry in self.files.entries(folder)}
            if file not in listed[folder]:
                raise StateDamaged(
                    f"{self.where}/{name} is not there, and run {commit.number} of the audit needs it; "
                    f"{self.way_back(name)}"
                )

    def way_back(self, name: str) -> str:
        """What to do about a file that is not there, or cannot be believed: which runs need it decides."""
        needing: list[int] = []
        try:
            numbers = self._numbers()
            for number in reversed(numbers):
                if name not in self.read(number).files():
                    break
                needing.append(number)
        except (MillraceError, OSError):
            return "restore it"  # nobody knows which runs do without it
        if not needing:
            return "restore it"
        if len(needing) == len(numbers):
            return "restore it, or name another folder as state to begin anew: every run on record needs it"
        first = f"{self.where}/{_commit_name(needing[-1])}"
        if len(needing) > 1:
            return f"restore it, or move {first} and all later ones away to go back {len(needing)} runs"
        return f"restore it, or move {first} away to go back one run"

    def _require_unused(self) -> None:
        """Without any commit only a first run that died can have left files: of a later one it is a state
        whose commits are gone, and no audit begins anew on what is left of another."""
        for room in ROOMS:
            for entry in self.files.entries(room):
                run = entry.name.partition("-")[0]
                if run.isascii() and run.isdigit() and int(run) > 1:
                    raise StateDamaged(
                        f"{self.where}/commits has no commit, and {self.where}/{room}/{entry.name} is of run "
                        f"{int(run)}; restore the commits, or name another folder as state to begin anew"
                    )

    def read(self, number: int) -> Commit:
        name = _commit_name(number)
        path = f"{self.where}/{name}"
        try:
            content = self.files.read(name)
        except OSError as problem:
            raise StateDamaged(f"{path} cannot be read ({problem}); run it again") from problem
        body = guarded_body(content, "commit")
        if body is None:
            raise StateDamaged(f"{path} is not a commit file; move it away to go back one run")
        if body.get("version") not in READABLE_VERSIONS:
            raise StateDamaged(
                f"{path} has format version {body.get('version')}, this program knows {STATE_VERSION}; "
                "use the newer program or another state folder"
            )
        if not guard_fits(content, "commit"):
            raise StateDamaged(f"{path} is damaged (its CRC does not fit); move it away to go back one run")
        return _commit_of(body)

    def commit(self, commit: Commit) -> None:
        """Make the commit the newest, if its number is free. Raises CommitConflict."""
        if not self.files.create(_commit_name(commit.number), guarded("commit", _body_of(commit))):
            raise CommitConflict(
                f"another audit job has committed run {commit.number} of {self.where} meanwhile; "
                "nothing of this run was kept, run it again"
            )

    def read_table(self, name: str, wanted: pc.Expression | None = None) -> pa.Table:
        """One Parquet file of the state, whole or its `wanted` rows. Raises StateDamaged."""
        local = self.local_root
        try:
            source = local / name if local is not None else io.BytesIO(self.files.read(name))
            if wanted is None:
                return pq.ParquetFile(source, page_checksum_verification=True).read()
            return pq.read_table(source, filters=wanted, partitioning=None, page_checksum_verification=True)
        except (OSError, pa.ArrowException) as problem:
            raise StateDamaged(
                f"{self.where}/{name} cannot be read ({' '.join(str(problem).split())[:200]}); "
                f"{self.way_back(name)}"
            ) from problem

    def write_table(self, name: str, table: pa.Table) -> None:
        """A new Parquet file, durable before any commit names it."""
        buffer = io.BytesIO()
        pq.write_table(table, buffer, compression="zstd", write_page_checksum=True)
        self.files.write(name, buffer.getvalue())

    def sweep(self, commit: Commit, now_s: float | None = None) -> None:
        """Remove commits older than an hour (the last two stay) with what no younger one names, and what is a
        day old of dead runs."""
        now_s = time.time() if now_s is None else now_s
        horizon_s = now_s - LEFT_AFTER_S
        named = commit.rooms()
        left = {(room, entry.name) for room, entry in self._of_dead_runs(named, horizon_s)}
        commits = [each for each in self.files.entries("commits") if _number(each.name) is not None]
        old = [each for each in commits[:-LEAST_COMMITS] if each.modified_s <= now_s - COMMIT_LEFT_AFTER_S]
        if left or old:
            try:
                for each in commits:
                    if each not in old and _number(each.name) != commit.number:
                        named |= self._rooms_of(each)
            except StateDamaged:
                return  # nobody knows what it named
        for each in old:
            with contextlib.suppress(StateDamaged):  # then its files are as those of a dead run
                left |= self._rooms_of(each)
            self.files.remove(f"commits/{each.name}")
        for room, name in left - named:
            self.files.remove(f"{room}/{name}")
        for folder in ("", "commits", "waivers"):
            for entry in self.files.entries(folder):
                name = f"{folder}/{entry.name}" if folder else entry.name
                if not _LEFT_OVER.fullmatch(entry.name) or entry.modified_s > horizon_s:
                    continue
                if not entry.is_folder or self._is_left(name, entry, horizon_s):
                    self.files.remove(name)

    def _rooms_of(self, commit: Entry) -> set[tuple[str, str]]:
        return self.read(_number(commit.name) or 0).rooms()

    def _of_dead_runs(self, named: set[tuple[str, str]], horizon_s: float) -> list[tuple[str, Entry]]:
        """(room, entry) of what is not named. A run writes its facts once, and then cells for as long as it
        counts: nothing of it is old while anything is young."""
        unnamed = [
            (room, entry)
            for room in ROOMS
            for entry in self.files.entries(room)
            if (room, entry.name) not in named
        ]
        changed_s: dict[str, float] = {}
        for room, entry in unnamed:
            at_s = self._changed_s(f"{room}/{entry.name}", entry)
            changed_s[_run_of(entry.name)] = max(at_s, changed_s.get(_run_of(entry.name), at_s))
        return [(room, entry) for room, entry in unnamed if changed_s[_run_of(entry.name)] <= horizon_s]

    def _is_left(self, name: str, entry: Entry, horizon_s: float) -> bool:
        """Whether no run works in this folder any more."""
        if self.local_root is not None and is_in_use(self.local_root / name):
            return False
        try:
            return self._changed_s(name, entry) <= horizon_s
        except PermissionError:
            return False  # of another user, who alone may remove it

    def _changed_s(self, name: str, entry: Entry) -> float:
        """Object stores keep no time for folders: the newest of its files counts."""
        inside = self._inside(name) if entry.is_folder else ()
        return max((each.modified_s for each in inside), default=entry.modified_s)

    def size(self, commit: Commit) -> tuple[int, int]:
        """(files, bytes) of what the commit names."""
        count = size = 0
        for room, name in commit.rooms():
            is_file = name.endswith(".parquet")
            inside = self.files.entries(room) if is_file else self._inside(f"{room}/{name}")
            for entry in inside:
                if not is_file or entry.name == name:
                    count, size = count + 1, size + entry.size
        return count, size

    def files_in(self, folder: str) -> list[str]:
        """The Parquet files that Spark wrote into a folder and those that are in it. Names with an underscore
        or a dot are its own: what is in such a folder is of a task that has not committed, or never will."""
        found = []
        for entry in self.files.entries(folder):
            if entry.name.startswith(("_", ".")):
                continue
            if entry.is_folder:
                found += self.files_in(f"{folder}/{entry.name}")
            elif entry.name.endswith(".parquet"):
                found.append(f"{folder}/{entry.name}")
        return found

    def _inside(self, folder: str) -> Iterator[Entry]:
        """The files in a folder and in those that are in it."""
        for entry in self.files.entries(folder):
            if entry.is_folder:
                yield from self._inside(f"{folder}/{entry.name}")
            else:
                yield entry

    def _numbers(self) -> list[int]:
        numbers = (_number(entry.name) for entry in self.files.entries("commits"))
        return sorted(number for number in numbers if number is not None)


def _run_of(name: str) -> str:
    """The run whose file or folder it is, of `<number>-<random>`, with an ending or `-folded` behind it."""
    return "-".join(name.partition(".")[0].split("-")[:2])


def _commit_name(number: int) -> str:
    return f"commits/{number:08d}.json"


def _number(name: str) -> int | None:
    stem, dot, ending = name.partition(".")
    return int(stem) if stem.isascii() and stem.isdigit() and dot and ending == "json" else None


def guarded(kind: str, body: Mapping[str, Any]) -> bytes:
    """A JSON file with a CRC over its content, however it is spaced."""
    return json.dumps({kind: body, "crc32c": crc32c_reference(_encode(body))}).encode()


def guarded_body(content: bytes, kind: str) -> dict[str, Any] | None:
    """The content of such a file, whatever its CRC; None when it is none."""
    try:
        envelope = json.loads(content)
        body = envelope[kind]
        return body if isinstance(body, dict) and "crc32c" in envelope else None
    except (ValueError, KeyError, TypeError):
        return None


def guard_fits(content: bytes, kind: str) -> bool:
    envelope = json.loads(content)
    return bool(envelope["crc32c"] == crc32c_reference(_encode(envelope[kind])))


def _encode(body: Mapping[str, Any]) -> bytes:
    """The bytes that the CRC covers."""
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def _body_of(commit: Commit) -> dict[str, Any]:
    return {"version": STATE_VERSION, **asdict(commit)}


def _commit_of(body: Mapping[str, Any]) -> Commit:
    fields = {name: value for name, value in body.items() if name != "version"}
    fields["offsets"] = {key: _position_of(each) for key, each in fields["offsets"].items()}
    if isinstance(fields.get("verdicts"), str):  # up to version 5, one file
        fields["verdicts"] = [fields["verdicts"]] if fields["verdicts"] else []
    fields["unread"] = [UnreadNote(**each) for each in fields["unread"]]
    fields["claims"] = [(group, session, Claim(**each)) for group, session, each in fields.get("claims", ())]
    fields["answered"] = [(group, session, count) for group, session, count in fields.get("answered", ())]
    fields["events_read"] = {key: _position_of(each) for key, each in fields.get("events_read", {}).items()}
    fields["events_doubted"] = [
        (place, offset, Distrusted(**each)) for place, offset, each in fields.get("events_doubted", ())
    ]
    fields["resting"] = [
        Resting(**each | {"rows": tuple(each["rows"]), "cells": tuple(each["cells"])})
        for each in fields.get("resting", ())
    ]
    return Commit(**fields)


def _position_of(fields: Mapping[str, Any]) -> ReadPosition:
    epochs = tuple((epoch, start) for epoch, start in fields.get("epochs", ()))
    return ReadPosition(fields["next_offset"], fields["topic_id"], epochs)
