"""Snapshots of the producer state: `<offset, 20 digits>.snapshot`, version 1, as Apache Kafka writes them.

    version i16 (1) · CRC-32C u32 of all that follows · number of entries i32, then each entry, 52 bytes:
    producer id i64 · epoch i16 · last sequence i32 · last offset i64 · offset delta i32 · timestamp i64
    coordinator epoch i32 · transaction start offset i64

A snapshot holds what batches below its offset left behind, of each producer the last batch only. It is
written when a segment is rolled, when the log is closed, and by a flush when much has been written since;
after a crash the batches beyond the newest one are read again. A damaged snapshot is skipped for the one
before it.

Called by the log and by recovery.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Collection, Sequence
from pathlib import Path

from millrace.broker.protocol.batch import NO_SEQUENCE
from millrace.broker.protocol.checksum import crc32c
from millrace.broker.storage.checkpoints import replace_file
from millrace.broker.storage.producer_state import ProducerEntry, ProducerState, RememberedBatch

SUFFIX = ".snapshot"
_VERSION = 1
_HEAD = struct.Struct(">hI")
_COUNT = struct.Struct(">i")
_ENTRY = struct.Struct(">qhiqiqiq")


def snapshot_path(directory: Path, offset: int) -> Path:
    return directory / f"{offset:020d}{SUFFIX}"


def encode(state: ProducerState) -> bytes:
    """The file's content."""
    body = bytearray(_COUNT.pack(len(state.entries)))
    for producer_id, entry in state.entries.items():
        last = entry.batches[-1] if entry.batches else RememberedBatch(NO_SEQUENCE, -1, 0, -1)
        body += _ENTRY.pack(
            producer_id,
            entry.epoch,
            last.last_sequence,
            last.last_offset,
            last.offset_delta,
            entry.last_timestamp_ms,
            entry.coordinator_epoch,
            entry.transaction_start_offset,
        )
    return _HEAD.pack(_VERSION, crc32c(body)) + bytes(body)


def decode(content: bytes, end_offset: int, now_ms: int) -> ProducerState:
    """The state in a file's content; every producer counts as heard of now. Raises ValueError."""
    try:
        version, crc = _HEAD.unpack_from(content)
        (count,) = _COUNT.unpack_from(content, _HEAD.size)
    except struct.error:
        raise ValueError("snapshot is too short") from None
    if version != _VERSION:
        raise ValueError(f"snapshot has version {version}, only {_VERSION} is known")
    if crc32c(content[_HEAD.size :]) != crc:
        raise ValueError("snapshot has a wrong CRC")
    if len(content) != _HEAD.size + _COUNT.size + count * _ENTRY.size:
        raise ValueError(f"snapshot announces {count} entries in {len(content)} bytes")
    entries: dict[int, ProducerEntry] = {}
    for number in range(count):
        position = _HEAD.size + _COUNT.size + number * _ENTRY.size
        producer_id, epoch, sequence, offset, delta, timestamp, coordinator_epoch, start = _ENTRY.unpack_from(
            content, position
        )
        batches = [RememberedBatch(sequence, offset, delta, timestamp)] if sequence >= 0 else []
        entries[producer_id] = ProducerEntry(epoch, batches, now_ms, timestamp, coordinator_epoch, start)
    return ProducerState(entries, end_offset)


def write(directory: Path, state: ProducerState) -> None:
    """Writes the snapshot at the state's end offset."""
    write_content(directory, state.end_offset, encode(state))


def write_content(directory: Path, offset: int, content: bytes) -> None:
    """Writes what `encode` gave for the state at `offset`."""
    # Not synced: a snapshot that a power loss took is rebuilt from the log.
    replace_file(snapshot_path(directory, offset), content, sync=False)


def offsets(directory: Path) -> list[int]:
    """Offsets of the snapshots that are there, ascending."""
    found = []
    for name in os.listdir(directory):
        if name.endswith(SUFFIX) and name[: -len(SUFFIX)].isdigit():
            found.append(int(name[: -len(SUFFIX)]))
    return sorted(found)


def load_newest(
    directory: Path, *, start_offset: int, end_offset: int, now_ms: int, known: Sequence[int] | None = None
) -> ProducerState | None:
    """The newest snapshot that reads and is not beyond `end_offset`; None when there is none. `known` is what
    `offsets` gave."""
    for offset in reversed(offsets(directory) if known is None else known):
        if not start_offset <= offset <= end_offset:
            continue
        try:
            return decode(snapshot_path(directory, offset).read_bytes(), offset, now_ms)
        except (OSError, ValueError):
            continue
    return None


def remove_between(directory: Path, offset: int, kept: Collection[int]) -> None:
    """Removes snapshots below `offset` that are not at one of the offsets `kept` (segments' bases)."""
    for found in offsets(directory):
        if found < offset and found not in kept:
            snapshot_path(directory, found).unlink(missing_ok=True)


def remove(directory: Path, *, below: int = 0, above: int | None = None) -> None:
    """Removes snapshots with an offset under `below`, and over `above` where that is given."""
    for offset in offsets(directory):
        if offset < below or (above is not None and offset > above):
            snapshot_path(directory, offset).unlink(missing_ok=True)
