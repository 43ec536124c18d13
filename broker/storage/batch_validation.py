"""What a broker checks, and may change, in a batch before it stores it. Pure.

Called by `Log.append`, outside its lock. The order is that of cost: sizes, CRC, header, timestamps, then
the records themselves. A batch of a client must hold exactly what its header says, because everything
downstream (readers, mirrors, the audit's counting) works on headers alone.

What may change, as in Apache Kafka: under log append time the header's timestamp; a maximum timestamp that
is not the records'; the compression, where the topic fixes one. The records' bytes stay otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from millrace.broker.errors import (
    CorruptMessage,
    InvalidRecord,
    InvalidTimestamp,
    RecordListTooLarge,
    RecordTooLarge,
    UnsupportedCompressionType,
)
from millrace.broker.protocol.batch import (
    ATTRIBUTES_POSITION,
    HEADER_SIZE,
    LOG_OVERHEAD,
    NO_TIMESTAMP,
    BatchHeader,
    parse_header,
    stamp_timestamps,
    verify_crc,
)
from millrace.broker.protocol.checksum import Buffer, crc32c
from millrace.broker.protocol.compression import CODEC_IDS, ZSTD, check_framing, decompress
from millrace.broker.protocol.records import MAX_DECOMPRESSED_SIZE, recompress, validate_records
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.refused_records import refusal_of_records, takes_timestamps

Origin = Literal["client", "internal"]
Validation = Literal["full", "header"]
WritableBuffer = bytearray | memoryview

_MAGIC_POSITION = 16
_OLD_FORMATS = (0, 1)


class Budget:
    """How many bytes the compressed batches of one request may still have when they are decompressed;
    `exceeded` makes what is raised when they have more."""

    __slots__ = ("_exceeded", "left")

    def __init__(self, size: int, exceeded: Callable[[], Exception]) -> None:
        self.left = size
        self._exceeded = exceeded

    def decompress(self, codec: int, section: memoryview) -> Buffer:
        """As `compression.decompress`. One batch alone is bounded, too, and what is refused has used up what
        it was given."""
        limit = min(self.left, MAX_DECOMPRESSED_SIZE)
        if not limit:
            raise self._exceeded()
        try:
            plain = decompress(codec, section, limit)
        except RecordTooLarge:
            self.left -= limit
            if limit == MAX_DECOMPRESSED_SIZE:
                raise
            raise self._exceeded() from None
        self.left -= len(plain)
        return plain

    def charge(self, size: int) -> None:
        if size > self.left:
            self.left = 0
            raise self._exceeded()
        self.left -= size


COMPRESSING_COST = 16
"""A byte to be compressed takes as long as so many to be decompressed; gzip's are the slowest."""


class CheckedBatch(NamedTuple):
    """A batch that may be stored once it is stamped. `log_append_time_ms` is -1 under create time."""

    batch: WritableBuffer
    header: BatchHeader
    log_append_time_ms: int


def check_batch(
    batch: bytes | bytearray | memoryview,
    config: LogConfig,
    *,
    now_ms: int,
    origin: Origin = "client",
    validation: Validation = "full",
    budget: Budget | None = None,
) -> CheckedBatch:
    """Checks one batch and brings it into the form the topic wants, within the `budget` if there is one.

    Batches of internal origin (group offsets, transaction markers) are the broker's own: CRC and counts are
    checked, the rest is taken as written, of any size: one that is larger than a segment has one for itself,
    for a transaction whose marker is refused never ends (a coordinator limits what clients can make large by
    `check_size`). With `validation="header"` the records are not
    looked at. A read-only buffer is copied, any other is changed in place.

    Raises CorruptMessage, InvalidRecord, InvalidTimestamp, RecordTooLarge, RecordListTooLarge,
    UnsupportedCompressionType, and what the budget raises: then nothing has been changed.
    """
    size = len(batch)
    try:
        header = parse_header(batch)
    except CorruptMessage as error:
        raise _no_header(batch, error) from None
    if header.batch_length + LOG_OVERHEAD != size:
        raise _not_one_batch(header, size)
    if origin == "client":
        check_size(size, config)
    if isinstance(batch, bytes) or (isinstance(batch, memoryview) and batch.readonly):
        batch = bytearray(batch)
    view = batch if isinstance(batch, memoryview) else memoryview(batch)
    if crc32c(view[ATTRIBUTES_POSITION:]) != header.crc:
        verify_crc(batch, 0, header)
    if header.record_count <= 0 or header.record_count != header.last_offset_delta + 1:
        raise InvalidRecord(
            f"record batch announces {header.record_count} records and a last offset delta of "
            f"{header.last_offset_delta}"
        )
    if origin == "internal":
        return CheckedBatch(batch, header, NO_TIMESTAMP)

    _check_client_header(header)
    max_timestamp = header.max_timestamp
    least_timestamp = min(header.base_timestamp, max_timestamp)
    keeps_time = config.timestamp_type != "LogAppendTime"
    if validation == "full":
        section = view[HEADER_SIZE:]
        codec = header.compression
        if codec:
            if budget is None:
                section = memoryview(decompress(codec, section, MAX_DECOMPRESSED_SIZE))
            else:
                section = memoryview(budget.decompress(codec, section))
            check_framing(codec, view[HEADER_SIZE:])
        least, greatest, keyless = validate_records(section, header.record_count)
        least_timestamp = header.base_timestamp + least
        max_timestamp = header.base_timestamp + greatest
        if (keyless and config.is_compacted) or (
            keeps_time and not takes_timestamps(least_timestamp, max_timestamp, config, now_ms)
        ):
            raise refusal_of_records(section, header, config, now_ms)
    elif keeps_time and not takes_timestamps(least_timestamp, max_timestamp, config, now_ms):
        raise InvalidTimestamp(
            f"timestamps from {least_timestamp} to {max_timestamp} are too far from the broker's clock for "
            f"message.timestamp.before.max.ms = {config.timestamp_before_max_ms} and "
            f"message.timestamp.after.max.ms = {config.timestamp_after_max_ms}"
        )
    if config.compression_type != "producer":
        batch, header = _with_codec(batch, header, config, budget)
    if not keeps_time:
        stamp_timestamps(batch, now_ms, log_append_time=True)
        return CheckedBatch(batch, parse_header(batch), now_ms)
    if max_timestamp != header.max_timestamp:
        stamp_timestamps(batch, max_timestamp, log_append_time=False)
        header = parse_header(batch)
    return CheckedBatch(batch, header, NO_TIMESTAMP)


def as_of(checked: CheckedBatch, now_ms: int) -> CheckedBatch:
    """A batch that was checked a while ago, to be appended now."""
    if checked.log_append_time_ms == NO_TIMESTAMP:
        return checked
    stamp_timestamps(checked.batch, now_ms, log_append_time=True)
    return CheckedBatch(checked.batch, parse_header(checked.batch), now_ms)


def _no_header(
    batch: bytes | bytearray | memoryview, error: CorruptMessage
) -> CorruptMessage | InvalidRecord:
    """Sending an older format again does not make it newer: the producer gets a refusal that is final."""
    if len(batch) > _MAGIC_POSITION and batch[_MAGIC_POSITION] in _OLD_FORMATS:
        return InvalidRecord(f"message format {batch[_MAGIC_POSITION]} is older than record batches")
    announced = int.from_bytes(batch[8:12], "big", signed=True) + LOG_OVERHEAD
    if len(batch) < HEADER_SIZE and (len(batch) <= _MAGIC_POSITION or announced > len(batch)):
        return InvalidRecord(f"record batch is cut at {len(batch)} bytes, before the end of its header")
    return error


def _not_one_batch(header: BatchHeader, size: int) -> InvalidRecord:
    if header.size > size:
        return InvalidRecord(f"record batch of {header.size} bytes is cut at {size}")
    return InvalidRecord("a produce request must hold exactly one record batch per partition")


def check_size(size: int, config: LogConfig) -> None:
    """Whether the topic takes a batch of so many bytes. Raises RecordTooLarge, RecordListTooLarge."""
    if size > config.max_message_bytes:
        raise RecordTooLarge(
            f"record batch of {size} bytes exceeds max.message.bytes = {config.max_message_bytes}"
        )
    if size > config.segment_bytes:
        raise RecordListTooLarge(
            f"record batch of {size} bytes exceeds segment.bytes = {config.segment_bytes}"
        )


def _check_client_header(header: BatchHeader) -> None:
    attributes = header.attributes
    if attributes == 0 and header.producer_id < 0:
        return  # nearly always: plain records of a producer without idempotence
    if header.is_control:
        raise InvalidRecord("a client may not write control batches")
    if header.is_log_append_time:
        raise InvalidTimestamp("a client may not set the timestamp type to log append time")
    if header.compression > ZSTD:
        raise UnsupportedCompressionType(f"compression codec {header.compression} is not one of 0 to 4")
    if header.producer_id >= 0 and (header.base_sequence < 0 or header.producer_epoch < 0):
        raise InvalidRecord(
            f"producer {header.producer_id} sends sequence {header.base_sequence} "
            f"in epoch {header.producer_epoch}"
        )
    if header.is_transactional and header.producer_id < 0:
        raise InvalidRecord("a transactional batch needs a producer id")


def _with_codec(
    batch: WritableBuffer, header: BatchHeader, config: LogConfig, budget: Budget | None
) -> tuple[WritableBuffer, BatchHeader]:
    wanted = "none" if config.compression_type == "uncompressed" else config.compression_type
    codec = CODEC_IDS[wanted]
    if codec == header.compression:
        return batch, header
    if budget is not None:
        budget.charge(COMPRESSING_COST * len(batch))
    changed = recompress(batch, codec)
    if len(changed) > config.max_message_bytes:
        raise RecordTooLarge(
            f"record batch of {len(changed)} bytes ({wanted}) exceeds max.message.bytes = "
            f"{config.max_message_bytes}"
        )
    return changed, parse_header(changed)
