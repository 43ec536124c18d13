"""Small text files beside the logs, in Apache Kafka's formats, replaced as a whole.

    offset checkpoints     line 1 "0", line 2 the number of entries, then "topic partition offset"
    leader epochs          line 1 "0", line 2 the number of entries, then "epoch start_offset"
    partition.metadata     "version: 0", "topic_id: <base64url, 22 characters>"
    new partitions         line 1 "0", line 2 the number of entries, then "topic partition topic_id" (ours)
    offset holes           line 1 "0", line 2 the number of entries, then "from to"; or nothing at all (ours)

A file is written beside itself, optionally synced, and renamed over: a reader sees the old one or the new
one. A file that does not read as its format is reported by ValueError, never half used.

An empty file has no entries: Apache Kafka makes its files so, long before it writes to them, and reads them
so. But entries may have been lost, too, and nobody can tell. So whoever reads one at a start says so
(`known_at_start`), and goes on as if the file were not there.

Called by the log manager, the leader-epoch cache, the log and what it knows of its holes.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar
from uuid import UUID

from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.storage.disk_errors import syncing

RECOVERY_POINT_CHECKPOINT = "recovery-point-offset-checkpoint"
LOG_START_OFFSET_CHECKPOINT = "log-start-offset-checkpoint"
LEADER_EPOCH_CHECKPOINT = "leader-epoch-checkpoint"
PARTITION_METADATA = "partition.metadata"
CLEANER_CHECKPOINT = "cleaner-offset-checkpoint"
NEW_PARTITIONS = "new-partitions"
"""Topic ids of partitions whose directories need not be on the disk yet; Apache Kafka passes it over."""
HOLES_MARKER = "offset-holes"
"""A file in a partition whose offsets may have holes (`offset_holes.py`); Apache Kafka passes it over."""
CHECKPOINTS_DIGEST = "checkpoints-digest"
"""Of the checkpoints as they were written here last; Apache Kafka passes it over, and writes others."""

_VERSION = "0"
_CHUNK_SIZE = 1 << 16

_Told = TypeVar("_Told")


def sync_directory(directory: Path) -> None:
    """Makes creations, renames and removals in a directory survive a power loss. Raises SyncFailed where it
    does not, OSError where it could not be tried."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with syncing():
            os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, content: bytes, *, sync: bool) -> None:
    """Puts `content` in place of the file in one step; with `sync`, it is on the disk on return. Raises
    OSError; SyncFailed only of the directory: a file that was not synced takes no other's place."""
    temporary = path.with_name(path.name + ".tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(temporary, path)
    if sync:
        sync_directory(path.parent)


def known_at_start(
    read: Callable[[Path], dict[TopicPartition, _Told]], path: Path, notes: list[str]
) -> dict[TopicPartition, _Told]:
    """What one of these files tells a broker that starts; nothing where it is empty or damaged, which goes to
    `notes` in one line. Raises OSError."""
    try:
        told = read(path)
    except ValueError as error:
        notes.append(f"{error}; taken as if it were not there")
        return {}
    if not told and path.exists() and not path.stat().st_size:
        notes.append(f"{path} is empty; taken as if it were not there")
    return told


def write_offsets(path: Path, offsets: Mapping[TopicPartition, int]) -> None:
    """Writes an offset checkpoint, synced."""
    rows = [f"{topic} {partition} {offset}" for (topic, partition), offset in sorted(offsets.items())]
    replace_file(path, _text(rows), sync=True)


def read_offsets(path: Path) -> dict[TopicPartition, int]:
    """Reads an offset checkpoint; a missing file has no entries. Raises ValueError."""
    offsets: dict[TopicPartition, int] = {}
    for row in _rows(path):
        topic, partition, offset = row.split(" ")
        offsets[topic, int(partition)] = int(offset)
    return offsets


def write_epochs(path: Path, entries: Iterable[tuple[int, int]], *, sync: bool) -> None:
    """Writes (epoch, start offset) pairs."""
    replace_file(path, _text([f"{epoch} {offset}" for epoch, offset in entries]), sync=sync)


def read_epochs(path: Path) -> list[tuple[int, int]]:
    """Reads (epoch, start offset) pairs; a missing file has none. Raises ValueError."""
    entries = []
    for row in _rows(path):
        epoch, offset = row.split(" ")
        entries.append((int(epoch), int(offset)))
    return entries


def write_holes(path: Path, holes: Iterable[tuple[int, int]]) -> None:
    """Writes (from, to) of holes in a log's offsets, synced."""
    replace_file(path, _text([f"{start} {end}" for start, end in sorted(holes)]), sync=True)


def read_holes(path: Path) -> frozenset[tuple[int, int]] | None:
    """Reads holes in a log's offsets; None where an empty file tells of none. Raises ValueError, OSError."""
    if path.stat().st_size == 0:
        return None
    return frozenset((int(start), int(end)) for start, end in (row.split(" ") for row in _rows(path)))


def digest(*checkpoints: Mapping[TopicPartition, int]) -> bytes:
    """Of what offset checkpoints say, for `CHECKPOINTS_DIGEST`."""
    found = blake2b(digest_size=16)
    for offsets in checkpoints:
        found.update(repr(sorted(offsets.items())).encode())
    return found.hexdigest().encode()


def read_digest(folder: Path) -> bytes:
    """The digest in a data folder; nothing where there is none. Raises OSError."""
    try:
        return (folder / CHECKPOINTS_DIGEST).read_bytes()
    except FileNotFoundError:
        return b""


def write_new_partitions(path: Path, topic_ids: Mapping[TopicPartition, UUID]) -> None:
    """Writes the topic ids of new partitions, synced."""
    rows = [f"{topic} {number} {topic_id}" for (topic, number), topic_id in sorted(topic_ids.items())]
    replace_file(path, _text(rows), sync=True)


def read_new_partitions(path: Path) -> dict[TopicPartition, UUID]:
    """Reads the topic ids of new partitions; a missing file has none. Raises ValueError."""
    topic_ids: dict[TopicPartition, UUID] = {}
    for row in _rows(path):
        topic, number, topic_id = row.split(" ")
        topic_ids[topic, int(number)] = UUID(topic_id)
    return topic_ids


def write_topic_id(directory: Path, topic_id: UUID, *, sync: bool = True) -> None:
    """Writes a partition's `partition.metadata`."""
    encoded = base64.urlsafe_b64encode(topic_id.bytes).rstrip(b"=").decode()
    content = f"version: 0\ntopic_id: {encoded}\n".encode()
    replace_file(directory / PARTITION_METADATA, content, sync=sync)


def read_topic_id(directory: Path) -> UUID | None:
    """The topic id that a partition's directory was made for; None for directories without one.

    Raises ValueError when the file is there and cannot be read.
    """
    path = directory / PARTITION_METADATA
    try:
        lines = _read_text(path).split("\n")
    except FileNotFoundError:
        return None
    values = dict(line.split(": ", 1) for line in lines if ": " in line)
    if values.get("version") != "0" or "topic_id" not in values:
        raise ValueError(f"{path} is not a partition.metadata of version 0")
    return UUID(bytes=base64.urlsafe_b64decode(values["topic_id"] + "=="))


def own_topic_id(directory: Path, announced_id: UUID | None, notes: list[str]) -> UUID | None:
    """The topic id of a partition's directory; where it has none, the announced one, written now. Raises
    ValueError when it cannot be read and none was announced, OSError."""
    try:
        topic_id = read_topic_id(directory)
    except ValueError as error:
        if announced_id is None:
            raise
        notes.append(f"{error}; it was not on the disk yet, and is written anew")
        topic_id = None
    if topic_id is None and announced_id is not None:
        write_topic_id(directory, announced_id, sync=False)
        return announced_id
    return topic_id


def _read_text(path: Path) -> str:
    """A start reads two of these per partition: a file object costs more than the reading. Raises ValueError
    where it is no text, OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        content = os.read(fd, _CHUNK_SIZE)
        while len(content) % _CHUNK_SIZE == 0:
            more = os.read(fd, _CHUNK_SIZE)
            if not more:
                break
            content += more
    finally:
        os.close(fd)
    return content.decode()


def _text(rows: list[str]) -> bytes:
    return "\n".join([_VERSION, str(len(rows)), *rows, ""]).encode()


def _rows(path: Path) -> list[str]:
    try:
        text = _read_text(path)
    except FileNotFoundError:
        return []
    if not text:
        return []
    lines = text.split("\n")
    try:
        version, count, rows = lines[0], int(lines[1]), [line for line in lines[2:] if line]
    except (IndexError, ValueError):
        raise ValueError(f"{path} is not a checkpoint file") from None
    if version != _VERSION:
        raise ValueError(f"{path} has version {version!r}, only {_VERSION} is known")
    if len(rows) != count:
        raise ValueError(f"{path} announces {count} entries and has {len(rows)}")
    return rows
