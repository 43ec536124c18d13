"""What is in a file of a partition, row by row: for `millrace log dump`.

One function a kind of file, each yielding dicts whose keys are the names of columns; `dump` chooses by the
name. Nothing is locked and nothing written, so a broker may be at work on the file meanwhile: a batch that is
cut at the end may only be half written yet. Raises ValueError where the bytes are not what the name says.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from millrace.broker.errors import CorruptMessage, KafkaError
from millrace.broker.protocol.batch import HEADER_SIZE, BatchHeader, parse_header, verify_crc
from millrace.broker.protocol.compression import CODEC_NAMES
from millrace.broker.protocol.control_records import TYPE_NAMES, control_type
from millrace.broker.protocol.records import read_records
from millrace.broker.storage import checkpoints, producer_snapshot, transaction_index
from millrace.broker.storage.segment import (
    INDEX_SUFFIX,
    LOG_SUFFIX,
    TIME_INDEX_SUFFIX,
    TRANSACTION_INDEX_SUFFIX,
)

Row = dict[str, Any]

_WINDOW_SIZE = 1 << 20
_STATE_SUFFIXES = (".deleted", ".cleaned", ".swap")  # of files that come and go
_INDEX = struct.Struct(">II")
_TIME_INDEX = struct.Struct(">qI")


def kind_of(path: Path) -> str:
    """What the name says that a file holds: a suffix of segments, or a checkpoint's name; "" for others."""
    name = path.name
    for suffix in _STATE_SUFFIXES:
        name = name.removesuffix(suffix)
    if name.endswith(_CHECKPOINTS):
        return next(known for known in _CHECKPOINTS if name.endswith(known))
    suffix = os.path.splitext(name)[1]
    return suffix if suffix in _DUMPS else ""


def dump(path: Path, *, records: bool = False, from_offset: int = 0) -> Iterator[Row]:
    """The rows of a file, from the one that holds or follows `from_offset` on; of a log one row a batch, with
    its records under "records" if they are wanted. Raises ValueError, OSError."""
    kind = kind_of(path)
    if kind == LOG_SUFFIX:
        yield from dump_log(path, records=records, from_offset=from_offset)
        return
    if not kind:
        raise ValueError(
            f"{path.name} is none of .log, .index, .timeindex, .txnindex, .snapshot and the checkpoints"
        )
    for row in _DUMPS[kind](path):
        last_offset = row.get("last_offset", row.get("offset"))
        if last_offset is None or last_offset >= from_offset:
            yield row


def iterate_file(path: Path, position: int = 0) -> Iterator[tuple[int, BatchHeader, memoryview]]:
    """Position, header and bytes of each whole batch of a `.log` as it is now. Raises ValueError where the
    bytes are no batch or one is cut, with the byte's number."""
    with path.open("rb") as file:
        end = os.fstat(file.fileno()).st_size
        while position < end:
            window = os.pread(file.fileno(), min(_WINDOW_SIZE, end - position), position)
            try:
                size = parse_header(window).size
            except CorruptMessage as error:
                raise ValueError(f"byte {position}: {error}") from None
            if size > end - position:
                raise ValueError(f"byte {position}: a batch of {size} bytes is cut at {end - position}")
            if size > len(window):
                window = os.pread(file.fileno(), size, position)
            consumed = 0
            while len(window) - consumed >= HEADER_SIZE:
                try:
                    header = parse_header(window, consumed)
                except CorruptMessage as error:
                    raise ValueError(f"byte {position + consumed}: {error}") from None
                if header.size > len(window) - consumed:
                    break
                yield position + consumed, header, memoryview(window)[consumed : consumed + header.size]
                consumed += header.size
            if consumed == 0:
                return  # the file has become shorter
            position += consumed


def dump_log(path: Path, *, records: bool, from_offset: int) -> Iterator[Row]:
    """One row a batch."""
    for position, header, batch in iterate_file(path):
        if header.last_offset < from_offset:
            continue
        row: Row = {
            "position": position,
            "base_offset": header.base_offset,
            "last_offset": header.last_offset,
            "count": header.record_count,
            "size": header.size,
            "max_timestamp": header.max_timestamp,
            "timestamp_type": "LogAppendTime" if header.is_log_append_time else "CreateTime",
            "codec": CODEC_NAMES.get(header.compression, str(header.compression)),
            "leader_epoch": header.leader_epoch,
            "producer_id": header.producer_id,
            "producer_epoch": header.producer_epoch,
            "base_sequence": header.base_sequence,
            "last_sequence": header.last_sequence,
            "transactional": header.is_transactional,
            "control": _control(header, batch),
            "delete_horizon": header.base_timestamp if header.has_delete_horizon else None,
            "crc": f"{header.crc:08x}",
            "problem": _problem(header, batch),
        }
        if records:
            row["records"] = _records(batch, from_offset)
        yield row


def _control(header: BatchHeader, batch: memoryview) -> str | None:
    if not header.is_control:
        return None
    try:
        kind = control_type(batch)
    except KafkaError:
        return "EMPTY" if header.record_count == 0 else "UNKNOWN"
    return TYPE_NAMES.get(kind, str(kind))


def _problem(header: BatchHeader, batch: memoryview) -> str | None:
    try:
        verify_crc(batch, 0, header)
    except CorruptMessage:
        return "wrong CRC"
    return None


def _records(batch: memoryview, from_offset: int) -> list[Row]:
    try:
        found = read_records(batch)
    except KafkaError as error:
        return [{"problem": str(error)}]
    return [
        {
            "offset": record.offset,
            "timestamp": record.timestamp_ms,
            "key": text_of(record.key),
            "value": text_of(record.value),
            "headers": [[name, text_of(value)] for name, value in record.headers],
        }
        for record in found
        if record.offset >= from_offset
    ]


def text_of(field: bytes | None) -> str | None:
    """Bytes for people: text where they are text, otherwise `0x` and hexadecimal digits; None for null."""
    if field is None:
        return None
    try:
        text = field.decode()
    except UnicodeDecodeError:
        return "0x" + field.hex()
    return text if text.isprintable() else "0x" + field.hex()


def _base_of(path: Path) -> int:
    base = path.name[:20]
    if not base.isdigit():
        raise ValueError(f"{path.name} does not begin with an offset of 20 digits")
    return int(base)


def dump_index(path: Path) -> Iterator[Row]:
    base = _base_of(path)
    for relative, position in _INDEX.iter_unpack(_used(path, _INDEX.size)):
        yield {"offset": base + relative, "position": position}


def dump_time_index(path: Path) -> Iterator[Row]:
    base = _base_of(path)
    for timestamp, relative in _TIME_INDEX.iter_unpack(_used(path, _TIME_INDEX.size)):
        yield {"timestamp": timestamp, "offset": base + relative}


def dump_transactions(path: Path) -> Iterator[Row]:
    for entry in transaction_index.decode(path.read_bytes()):
        yield entry._asdict()


def dump_snapshot(path: Path) -> Iterator[Row]:
    state = producer_snapshot.decode(path.read_bytes(), _base_of(path), 0)
    for producer_id, entry in state.entries.items():
        last = entry.batches[-1] if entry.batches else None
        open_since = entry.transaction_start_offset
        yield {
            "producer_id": producer_id,
            "producer_epoch": entry.epoch,
            "first_sequence": None if last is None else last.first_sequence,
            "last_sequence": None if last is None else last.last_sequence,
            "last_offset": None if last is None else last.last_offset,
            "timestamp": entry.last_timestamp_ms,
            "coordinator_epoch": entry.coordinator_epoch,
            "transaction_start": None if open_since < 0 else open_since,
        }


def dump_epochs(path: Path) -> Iterator[Row]:
    for epoch, offset in checkpoints.read_epochs(path):
        yield {"leader_epoch": epoch, "start_offset": offset}


def dump_offsets(path: Path) -> Iterator[Row]:
    for (topic, partition), offset in checkpoints.read_offsets(path).items():
        yield {"topic": topic, "partition": partition, "checkpoint": offset}


def _whole(path: Path, entry_size: int) -> bytes:
    content = path.read_bytes()
    if len(content) % entry_size:
        raise ValueError(f"{len(content)} bytes are not a multiple of an entry's {entry_size}")
    return content


def _used(path: Path, entry_size: int) -> bytes:
    """An index without the room behind its entries: an Apache Kafka that is at work, or was killed, leaves
    the index that it writes to at its full size (`segment.index.bytes`), zeros behind what is used."""
    content = _whole(path, entry_size)
    used = -(-len(content.rstrip(b"\0")) // entry_size) * entry_size
    # One such entry may be the very first: the record at the segment's own offset, at its beginning.
    return content if len(content) - used <= entry_size else content[:used]


_DUMPS: dict[str, Callable[[Path], Iterator[Row]]] = {
    LOG_SUFFIX: lambda path: dump_log(path, records=False, from_offset=0),
    INDEX_SUFFIX: dump_index,
    TIME_INDEX_SUFFIX: dump_time_index,
    TRANSACTION_INDEX_SUFFIX: dump_transactions,
    producer_snapshot.SUFFIX: dump_snapshot,
    checkpoints.LEADER_EPOCH_CHECKPOINT: dump_epochs,
    "offset-checkpoint": dump_offsets,  # recovery-point-…, log-start-…, replication-…, cleaner-…
}
_CHECKPOINTS = (checkpoints.LEADER_EPOCH_CHECKPOINT, "offset-checkpoint")
