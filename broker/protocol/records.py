"""Records: validation, columnar scan, building and reading.

The records section is what follows a batch's header, decompressed. `validate_records` and `scan_records`
run compiled (`record_kernels.py`, loaded when first used; `warm_kernels` loads it at a time of one's own
choosing); `build_batch` and `read_records` are plain Python for tools, tests and small system topics.

Called by storage, group and transaction logs, the client's own producer, the audit. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from millrace.broker.errors import InvalidRecord, RecordTooLarge
from millrace.broker.protocol import batch as batch_format
from millrace.broker.protocol.batch import HEADER_SIZE, NO_TIMESTAMP, BatchHeader, parse_header
from millrace.broker.protocol.checksum import Buffer
from millrace.broker.protocol.compression import compress, decompress
from millrace.broker.protocol.plain_records import iterate_records
from millrace.broker.protocol.wire import zigzag

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_DECOMPRESSED_SIZE = 64 * 1024 * 1024
"""Largest records section, in bytes after decompression, that is unpacked anywhere."""

MINIMUM_RECORD_SIZE = 7
"""A length, attributes, two deltas, two null fields and a header count: no record is smaller."""


MOST_NAMED = 10_000
"""Most records of one batch that are named to its producer as refused: what librdkafka puts into one."""

Fields = tuple[int, int, bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...]]
"""offset, timestamp in ms, key, value and headers of a record"""

Refusal = Literal["no key", "too old", "too new"]
"""Why a record that is whole is not taken."""


class RecordLike(Protocol):
    """What `build_batch` reads; `Record` is one."""

    @property
    def key(self) -> bytes | None: ...
    @property
    def value(self) -> bytes | None: ...
    @property
    def headers(self) -> Sequence[tuple[str, bytes | None]]: ...
    @property
    def timestamp_ms(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Record:
    """One record by itself. `offset` is -1 until it has a place in a partition."""

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp_ms: int = NO_TIMESTAMP
    offset: int = -1


@dataclass(frozen=True, slots=True)
class RecordColumns:
    """The records of a section as columns of one length; positions are bytes in the section.

    Sizes are -1 where a field is null. `headers_position` is the first header's, after the count.
    """

    offset_delta: NDArray[np.int32]
    timestamp_delta: NDArray[np.int64]
    key_position: NDArray[np.int64]
    key_size: NDArray[np.int32]
    value_position: NDArray[np.int64]
    value_size: NDArray[np.int32]
    headers_position: NDArray[np.int64]
    headers_count: NDArray[np.int32]


def load_compiler() -> None:
    """Imports what `warm_kernels` needs: who minds the memory can give pages back between the two."""
    import numba  # noqa: F401


def warm_kernels() -> None:
    """Loads every compiled kernel (from numba's cache, or compiles them once)."""
    _kernels()


@lru_cache(maxsize=1)
def _kernels() -> ModuleType:
    from millrace.broker.protocol import record_kernels

    return record_kernels


def validate_records(records: Buffer, record_count: int) -> tuple[int, int, int]:
    """Checks a decompressed records section as a broker must before it stores it.

    Exactly `record_count` records fill it, offset deltas are 0, 1, 2 …, every length is exact, no count is
    negative. Returns the least and the greatest timestamp delta, and how many records have no key. Raises
    InvalidRecord.
    """
    if record_count <= 0 or record_count * MINIMUM_RECORD_SIZE > len(records):
        raise InvalidRecord(f"batch announces {record_count} records in {len(records)} bytes")
    status, index, least, greatest, keyless = _validate()(_as_array(records), record_count)
    if status != 0:
        raise InvalidRecord(f"record {index}: {failure_reason(status)}")
    return least, greatest, keyless


def refused_records(
    records: Buffer, record_count: int, *, keys_required: bool, times: range, unset: int
) -> list[tuple[int, Refusal]]:
    """Which records of a section that `validate_records` has passed a topic does not take, by their place.

    A timestamp delta is taken that is in `times`, or `unset`. At most the first MOST_NAMED are found,
    whatever a hostile batch holds.
    """
    import numpy as np

    most = min(record_count, MOST_NAMED)
    found, reasons = np.empty(most, np.int32), np.empty(most, np.int32)
    kernels = _kernels()
    count = kernels.find_refused(
        _as_array(records), record_count, keys_required, times.start, times.stop - 1, unset, found, reasons
    )
    names: dict[int, Refusal] = {
        kernels.MISSING_KEY: "no key",
        kernels.TOO_OLD: "too old",
        kernels.TOO_NEW: "too new",
    }
    return [
        (place, names[reason])
        for place, reason in zip(found[:count].tolist(), reasons[:count].tolist(), strict=True)
    ]


def scan_records(records: Buffer, record_count: int) -> RecordColumns:
    """The columns of a decompressed records section. Raises InvalidRecord when it is malformed.

    Nothing is allocated for records that cannot be there, however many the header announces.
    """
    import numpy as np

    if record_count < 0 or record_count * MINIMUM_RECORD_SIZE > len(records):
        raise InvalidRecord(f"batch announces {record_count} records in {len(records)} bytes")
    columns = RecordColumns(
        offset_delta=np.empty(record_count, np.int32),
        timestamp_delta=np.empty(record_count, np.int64),
        key_position=np.empty(record_count, np.int64),
        key_size=np.empty(record_count, np.int32),
        value_position=np.empty(record_count, np.int64),
        value_size=np.empty(record_count, np.int32),
        headers_position=np.empty(record_count, np.int64),
        headers_count=np.empty(record_count, np.int32),
    )
    status, index = _kernels().scan(
        _as_array(records),
        columns.timestamp_delta,
        columns.offset_delta,
        columns.key_position,
        columns.key_size,
        columns.value_position,
        columns.value_size,
        columns.headers_position,
        columns.headers_count,
    )
    if status != 0:
        raise InvalidRecord(f"record {index}: {failure_reason(status)}")
    return columns


def whole_batches(data: Buffer, end_offset: int) -> tuple[int, int, int]:
    """See the kernel of the same name: (size of the whole batches, next offset, size of the next batch)."""
    result: tuple[int, int, int] = _kernels().whole_batches(_as_array(data), end_offset)
    return result


@lru_cache(maxsize=1)
def _validate() -> Any:
    return _kernels().validate


@lru_cache(maxsize=1)
def _frombuffer() -> Any:
    import numpy

    return numpy.frombuffer


def _as_array(data: Buffer) -> Any:
    # Read-only always: the kernels are compiled for one type of array.
    return _frombuffer()(memoryview(data).toreadonly(), "u1")


def failure_reason(status: int) -> str:
    """What a kernel's status says about a record, for people."""
    kernels = _kernels()
    return {
        kernels.BAD_VARINT: "a number is cut or too long",
        kernels.BAD_LENGTH: "a length exceeds the bytes that are there",
        kernels.BAD_OFFSET_DELTA: "its offset delta is not its place in the batch",
        kernels.BAD_HEADER_COUNT: "its number of headers is cut or negative",
        kernels.MISSING_HEADER_KEY: "a header has no key",
        kernels.TRAILING_BYTES_IN_RECORD: "its length exceeds its fields",
        kernels.TRAILING_BYTES: "bytes follow the last record",
    }[status]


def records_section(batch: Buffer, header: BatchHeader, max_size: int = MAX_DECOMPRESSED_SIZE) -> Buffer:
    """The records of one whole batch, decompressed where needed. Raises as `decompress` does."""
    section = memoryview(batch)[HEADER_SIZE : header.size]
    return decompress(header.compression, section, max_size)


def build_batch(
    records: Sequence[RecordLike],
    *,
    compression: int = 0,
    base_offset: int = 0,
    leader_epoch: int = batch_format.NO_LEADER_EPOCH,
    producer_id: int = batch_format.NO_PRODUCER_ID,
    producer_epoch: int = batch_format.NO_PRODUCER_EPOCH,
    base_sequence: int = batch_format.NO_SEQUENCE,
    transactional: bool = False,
    control: bool = False,
) -> bytearray:
    """One whole batch of records with dense offsets, its CRC in place.

    Raises ValueError for an empty sequence: a batch without records cannot be produced.
    """
    if not records:
        raise ValueError("a batch needs at least one record")
    base_timestamp = records[0].timestamp_ms
    section = bytearray()
    for offset_delta, record in enumerate(records):
        _append_record(section, record, record.timestamp_ms - base_timestamp, offset_delta)
    body = compress(compression, section) if compression else section
    attributes = compression
    if transactional:
        attributes |= batch_format.TRANSACTIONAL_BIT
    if control:
        attributes |= batch_format.CONTROL_BIT
    batch = bytearray(
        batch_format.pack_header(
            size=HEADER_SIZE + len(body),
            attributes=attributes,
            last_offset_delta=len(records) - 1,
            base_timestamp=base_timestamp,
            max_timestamp=max(record.timestamp_ms for record in records),
            record_count=len(records),
            base_offset=base_offset,
            leader_epoch=leader_epoch,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            base_sequence=base_sequence,
        )
    )
    batch += body
    batch_format.seal(batch)
    return batch


def recompress(batch: Buffer, codec: int) -> bytearray:
    """A copy of one whole batch with its records compressed by another codec; all else stays.

    Raises RecordTooLarge for plain records that no reader would decompress again."""
    header = parse_header(batch)
    section = records_section(batch, header)
    if codec and len(section) > MAX_DECOMPRESSED_SIZE:
        raise RecordTooLarge(f"{len(section)} bytes of records are too many for a compressed batch")
    body = compress(codec, section)
    copy = bytearray(
        batch_format.pack_header(
            size=HEADER_SIZE + len(body),
            attributes=header.attributes & ~batch_format.COMPRESSION_MASK | codec,
            last_offset_delta=header.last_offset_delta,
            base_timestamp=header.base_timestamp,
            max_timestamp=header.max_timestamp,
            record_count=header.record_count,
            base_offset=header.base_offset,
            leader_epoch=header.leader_epoch,
            producer_id=header.producer_id,
            producer_epoch=header.producer_epoch,
            base_sequence=header.base_sequence,
        )
    )
    copy += body
    batch_format.seal(copy)
    return copy


def read_records(batch: Buffer) -> list[Record]:
    """The records of one whole batch with their offsets and timestamps, decompressed.

    Under log append time every record has the batch's maximum timestamp. Raises CorruptMessage,
    InvalidRecord, RecordTooLarge. The CRC is not checked.
    """
    return [Record(key, value, headers, at, offset) for offset, at, key, value, headers in read_fields(batch)]


def read_fields(batch: Buffer) -> Iterator[Fields]:
    """The same of each record, without an object for it; raises after some of them, perhaps."""
    header = parse_header(batch)
    section = records_section(batch, header)
    base_ms = header.max_timestamp if header.is_log_append_time else header.base_timestamp
    for _, delta_ms, offset_delta, key, value, headers in iterate_records(section, header.record_count):
        at_ms = base_ms if header.is_log_append_time else base_ms + delta_ms
        yield header.base_offset + offset_delta, at_ms, key, value, headers


def _append_record(out: bytearray, record: RecordLike, timestamp_delta: int, offset_delta: int) -> None:
    body = bytearray(b"\x00")
    body += zigzag(timestamp_delta)
    body += zigzag(offset_delta)
    _append_nullable(body, record.key)
    _append_nullable(body, record.value)
    headers: Iterable[tuple[str, bytes | None]] = record.headers
    body += zigzag(len(record.headers))
    for name, value in headers:
        _append_nullable(body, name.encode("utf-8", "surrogateescape"))
        _append_nullable(body, value)
    out += zigzag(len(body))
    out += body


def _append_nullable(out: bytearray, field: bytes | None) -> None:
    if field is None:
        out.append(1)  # zigzag of -1
        return
    out += zigzag(len(field))
    out += field
