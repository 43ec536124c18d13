"""What happens to a batch between fetch and produce: pass it through, rebuild it, or drop it. Pure.

Called by `pipeline` for every batch that was fetched and by `sink` to stamp what is sent.

    pass through   v2, dense offsets, CreateTime, no unknown attribute bits, within the target's limit:
                   61 bytes of header are rewritten in place, the record bytes are the producer's own
    rebuild        anything else that holds records: the records are read, cut to what is wanted, and
                   written again with offsets 0..n-1 in the same codec; split where the target's limit asks
    drop           control batches and empty batches (compaction keeps them for the producer's sequence); the
                   pipeline drops the data of aborted transactions as well

Why dense: a producer's batch must number its records 0..n-1, a broker refuses it otherwise; compaction
leaves holes. Why CreateTime: a broker refuses a batch that claims a broker's append time, and the record
timestamps that consumers saw were the batch's maximum, not the deltas in the records.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from millrace.broker.protocol.batch import (
    ATTRIBUTES_POSITION,
    COMPRESSION_MASK,
    CONTROL_BIT,
    DELETE_HORIZON_BIT,
    LOG_APPEND_TIME_BIT,
    TRANSACTIONAL_BIT,
    BatchHeader,
    parse_header,
    seal,
    stamp_offset_and_epoch,
)
from millrace.broker.protocol.records import Record, build_batch, read_records

KNOWN_ATTRIBUTES = (
    COMPRESSION_MASK | LOG_APPEND_TIME_BIT | TRANSACTIONAL_BIT | CONTROL_BIT | DELETE_HORIZON_BIT
)

_ATTRIBUTES = struct.Struct(">h")
_PRODUCER = struct.Struct(">qhi")
_PRODUCER_POSITION = 43


class BatchPath(StrEnum):
    """The values are the label `path` of the batch counter."""

    PASS_THROUGH = "pass_through"
    REBUILD = "rebuild"
    DROP = "drop"


def choose_path(header: BatchHeader, *, from_offset: int, max_batch_size: int) -> BatchPath:
    """The path of a batch whose records from `from_offset` on are wanted."""
    if header.is_control or header.record_count == 0:
        return BatchPath.DROP
    is_plain = (
        header.last_offset_delta + 1 == header.record_count
        and not header.is_log_append_time
        and not header.attributes & ~KNOWN_ATTRIBUTES
        and header.base_offset >= from_offset
        and header.size <= max_batch_size
    )
    return BatchPath.PASS_THROUGH if is_plain else BatchPath.REBUILD


def stamp_for_target(batch: memoryview, producer_id: int, producer_epoch: int, base_sequence: int) -> None:
    """Rewrites the header in place for one idempotent producer, and the CRC with it.

    Only the codec survives of the attributes: the transactional bit would ask for a transaction that the
    target does not know, and the delete horizon is a broker's own (its base timestamp stays, the records'
    deltas count from it). The base offset is 0, as a standard broker rebuilds a compressed batch that has
    another one.
    """
    (attributes,) = _ATTRIBUTES.unpack_from(batch, ATTRIBUTES_POSITION)
    _ATTRIBUTES.pack_into(batch, ATTRIBUTES_POSITION, attributes & COMPRESSION_MASK)
    _PRODUCER.pack_into(batch, _PRODUCER_POSITION, producer_id, producer_epoch, base_sequence)
    stamp_offset_and_epoch(batch, 0, -1)
    seal(batch)


@dataclass(frozen=True, slots=True)
class Piece:
    """A dense batch that is ready to be stamped, and the source offset of each of its records. `batch` is
    None for one record that is larger than the target takes."""

    batch: memoryview | None
    offsets: Sequence[int]


def rebuild(batch: memoryview, header: BatchHeader, *, from_offset: int, max_batch_size: int) -> list[Piece]:
    """The records of `batch` from `from_offset` on as new dense batches of at most `max_batch_size`.

    Raises CorruptMessage (or another KafkaError of the codec) when the records cannot be read.
    """
    records = [record for record in read_records(batch) if record.offset >= from_offset]
    offsets = [record.offset for record in records]
    return list(_in_pieces(records, offsets, header.compression, max_batch_size)) if records else []


def split(batch: memoryview, offsets: Sequence[int]) -> list[Piece]:
    """A batch that the target refused, in two halves; empty when it holds one record only.

    `offsets` are the source offsets of its records: the batch has been stamped, its own are 0..n-1.
    """
    records = read_records(batch)
    if len(records) < 2:
        return []
    half = len(records) // 2
    codec = parse_header(batch).compression
    return [
        _piece(records[:half], offsets[:half], codec),
        _piece(records[half:], offsets[half:], codec),
    ]


def _in_pieces(
    records: Sequence[Record], offsets: Sequence[int], codec: int, max_batch_size: int
) -> Iterable[Piece]:
    piece = _piece(records, offsets, codec)
    if piece.batch is not None and len(piece.batch) <= max_batch_size:
        yield piece
    elif len(records) == 1:
        yield Piece(None, offsets)
    else:
        half = len(records) // 2
        yield from _in_pieces(records[:half], offsets[:half], codec, max_batch_size)
        yield from _in_pieces(records[half:], offsets[half:], codec, max_batch_size)


def _piece(records: Sequence[Record], offsets: Sequence[int], codec: int) -> Piece:
    return Piece(memoryview(build_batch(records, compression=codec)), offsets)
