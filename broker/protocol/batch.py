"""Record batches, format version 2: the header of 61 bytes and what may be changed in it.

Byte layout (big endian), as Apache Kafka writes it on the wire and on disk:

     0  base offset            i64      27  base timestamp (ms)    i64
     8  batch length           i32      35  max timestamp (ms)     i64
    12  partition leader epoch i32      43  producer id            i64
    16  magic (2)              i8       51  producer epoch         i16
    17  CRC-32C of 21..end     u32      53  base sequence          i32
    21  attributes             i16      57  record count           i32
    23  last offset delta      i32      61  records

`batch length` counts from byte 12. Attributes: bits 0-2 compression, 3 timestamp type, 4 transactional,
5 control, 6 delete horizon. Base offset and leader epoch lie before the CRC's range on purpose: the leader
stamps them without touching the rest.

Called by storage (append, read, recovery), the client, the mirror and the audit. Pure; never looks at
records (see `records.py`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from millrace.broker.errors import CorruptMessage
from millrace.broker.protocol.checksum import Buffer, crc32c

HEADER_SIZE = 61
LOG_OVERHEAD = 12  # base offset and batch length, which batch length does not count
MAGIC = 2

NO_TIMESTAMP = -1
MAX_LEADER_EPOCH = 0x7FFFFFFF
NO_PRODUCER_ID = -1
NO_PRODUCER_EPOCH = -1
NO_SEQUENCE = -1
NO_LEADER_EPOCH = -1

COMPRESSION_MASK = 0x07
LOG_APPEND_TIME_BIT = 0x08
TRANSACTIONAL_BIT = 0x10
CONTROL_BIT = 0x20
DELETE_HORIZON_BIT = 0x40

CRC_POSITION = 17
ATTRIBUTES_POSITION = 21
MAX_TIMESTAMP_POSITION = 35

_HEADER = struct.Struct(">qiibIhiqqqhii")
_OFFSET = struct.Struct(">q")
_EPOCH = struct.Struct(">i")
_CRC = struct.Struct(">I")
_ATTRIBUTES = struct.Struct(">h")
_MAX_TIMESTAMP = struct.Struct(">q")

_MINIMUM_BATCH_LENGTH = HEADER_SIZE - LOG_OVERHEAD


class BatchHeader(NamedTuple):
    """The header's thirteen fields, in their order on the wire (a tuple: built on every append)."""

    base_offset: int
    batch_length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def size(self) -> int:
        """Size of the whole batch in bytes, header included."""
        return self.batch_length + LOG_OVERHEAD

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.last_offset_delta

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.last_offset_delta + 1

    @property
    def compression(self) -> int:
        """Codec id, 0 to 7; ids above 4 are not defined (see `compression.py`)."""
        return self.attributes & COMPRESSION_MASK

    @property
    def is_log_append_time(self) -> bool:
        return self.attributes & LOG_APPEND_TIME_BIT != 0

    @property
    def is_transactional(self) -> bool:
        return self.attributes & TRANSACTIONAL_BIT != 0

    @property
    def is_control(self) -> bool:
        return self.attributes & CONTROL_BIT != 0

    @property
    def has_delete_horizon(self) -> bool:
        """The base timestamp is then the time from which tombstones may be removed."""
        return self.attributes & DELETE_HORIZON_BIT != 0

    @property
    def last_sequence(self) -> int:
        """Sequence of the last record; sequences wrap from 2**31 - 1 to 0. -1 where there are none."""
        if self.base_sequence < 0:
            return NO_SEQUENCE
        return (self.base_sequence + self.last_offset_delta) & 0x7FFFFFFF


_new_header = tuple.__new__
_unpack_header = _HEADER.unpack_from


def parse_header(buffer: Buffer, position: int = 0) -> BatchHeader:
    """The header at `position`. Only the header needs to be there, the records may lie beyond the buffer.

    Raises CorruptMessage when the buffer is too short for a header, the magic is not 2, or the length
    cannot hold a header.
    """
    try:
        header: BatchHeader = _new_header(BatchHeader, _unpack_header(buffer, position))
    except struct.error:
        raise CorruptMessage(
            f"record batch header needs {HEADER_SIZE} bytes, {max(0, len(buffer) - position)} are there"
        ) from None
    if header.magic != MAGIC:
        raise CorruptMessage(f"record batch has magic {header.magic}, only {MAGIC} is spoken")
    if header.batch_length < _MINIMUM_BATCH_LENGTH:
        raise CorruptMessage(f"record batch announces {header.batch_length} bytes, less than its own header")
    return header


def iterate_batches(buffer: Buffer, position: int = 0) -> Iterator[tuple[int, BatchHeader]]:
    """Position and header of each whole batch from `position` on.

    A trailing part of a batch ends the iteration without an error: a fetch may cut its last batch.
    Raises CorruptMessage when a header is wrong. CRCs are not checked.
    """
    end = len(buffer)
    while end - position >= HEADER_SIZE:
        header = parse_header(buffer, position)
        following = position + header.batch_length + LOG_OVERHEAD
        if following > end:
            return
        yield position, header
        position = following


def verify_crc(buffer: Buffer, position: int, header: BatchHeader) -> None:
    """Raises CorruptMessage unless the whole batch is in the buffer and its CRC-32C is right."""
    end = position + header.batch_length + LOG_OVERHEAD
    if end > len(buffer):
        raise CorruptMessage(f"record batch of {header.size} bytes is cut at {len(buffer) - position}")
    computed = crc32c(memoryview(buffer)[position + ATTRIBUTES_POSITION : end])
    if computed != header.crc:
        raise CorruptMessage(
            f"record batch at offset {header.base_offset} has CRC {header.crc:#010x}, "
            f"its bytes give {computed:#010x}"
        )


def stamp_offset_and_epoch(batch: bytearray | memoryview, base_offset: int, leader_epoch: int) -> None:
    """Writes the two fields a leader assigns, in place. They lie outside the CRC."""
    _OFFSET.pack_into(batch, 0, base_offset)
    _EPOCH.pack_into(batch, 12, leader_epoch)


def stamp_timestamps(batch: bytearray | memoryview, max_timestamp: int, *, log_append_time: bool) -> None:
    """Writes the maximum timestamp and the timestamp type in place, and the CRC that follows from them.

    With `log_append_time` the maximum timestamp *is* the timestamp of every record of the batch, so a
    broker can stamp a compressed batch without unpacking it.
    """
    (attributes,) = _ATTRIBUTES.unpack_from(batch, ATTRIBUTES_POSITION)
    if log_append_time:
        attributes |= LOG_APPEND_TIME_BIT
    else:
        attributes &= ~LOG_APPEND_TIME_BIT
    _ATTRIBUTES.pack_into(batch, ATTRIBUTES_POSITION, attributes)
    _MAX_TIMESTAMP.pack_into(batch, MAX_TIMESTAMP_POSITION, max_timestamp)
    seal(batch)


def seal(batch: bytearray | memoryview) -> None:
    """Writes the CRC of a whole batch over what is in it now."""
    _CRC.pack_into(batch, CRC_POSITION, crc32c(memoryview(batch)[ATTRIBUTES_POSITION:]))


def pack_header(
    *,
    size: int,
    attributes: int,
    last_offset_delta: int,
    base_timestamp: int,
    max_timestamp: int,
    record_count: int,
    base_offset: int = 0,
    leader_epoch: int = NO_LEADER_EPOCH,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = NO_PRODUCER_EPOCH,
    base_sequence: int = NO_SEQUENCE,
) -> bytes:
    """The 61 bytes of a header for a batch of `size` bytes; the CRC is zero until `seal` writes it."""
    return _HEADER.pack(
        base_offset,
        size - LOG_OVERHEAD,
        leader_epoch,
        MAGIC,
        0,
        attributes,
        last_offset_delta,
        base_timestamp,
        max_timestamp,
        producer_id,
        producer_epoch,
        base_sequence,
        record_count,
    )
