"""What happens to a batch between fetch and produce: its path, its stamp, its records written again. Pure.

Called by `pipeline` for every batch that was fetched and by `sink` to stamp what is sent, and to look whole
at what the target fails at.

    pass through   v2, dense offsets, CreateTime, no unknown attribute bits, within the target's limit:
                   61 bytes of header are rewritten in place, the record bytes are the producer's own
    rebuild        anything else that holds records: the records are cut to what is wanted and written again
                   with offsets 0..n-1 in the same codec
    split          a rebuild that gives several batches, because one is over the target's limit
    coalesce       small neighbours of one codec become one batch (`coalesce.py` finds them)
    drop           control batches and empty batches (compaction keeps them for the producer's sequence), and
                   the data of aborted transactions

Why dense: a producer's batch must number its records 0..n-1, a broker refuses it otherwise; compaction
leaves holes. Why CreateTime: a broker refuses a batch that claims a broker's append time, and the record
timestamps that consumers saw were the batch's maximum, not the deltas in the records.

Records are read and written by one compiled loop (`broker/protocol/rewrite.py`), never by Python. What it
makes has no CRC until it is stamped.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from millrace.broker.errors import CorruptMessage, InvalidRecord, KafkaError
from millrace.broker.protocol.batch import (
    ATTRIBUTES_POSITION,
    COMPRESSION_MASK,
    CONTROL_BIT,
    DELETE_HORIZON_BIT,
    HEADER_SIZE,
    LOG_APPEND_TIME_BIT,
    TRANSACTIONAL_BIT,
    BatchHeader,
    parse_header,
    seal,
    stamp_offset_and_epoch,
)
from millrace.broker.protocol.checksum import Buffer
from millrace.broker.protocol.compression import check_framing, decompress
from millrace.broker.protocol.records import MAX_DECOMPRESSED_SIZE
from millrace.broker.protocol.rewrite import ALL, rewrite, section_of
from millrace.mirror.batches.coalesce import section_rows
from millrace.mirror.batches.unpack import unpacked
from millrace.mirror.offsets.offset_runs import offsets_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_COALESCED_PLAIN_SIZE = 4 << 20
"""Decompressed bytes of a run of small batches that are merged at most; more are handled one by one."""


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
    SPLIT = "split"
    COALESCE = "coalesce"
    DROP = "drop"
    UNREADABLE = "unreadable"
    """Not carried: its checksum is right, and what it holds is not what it says (a gap names it)."""


NOT_CARRIED = (BatchPath.DROP, BatchPath.UNREADABLE)


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


def stamp_for_target(
    batch: memoryview,
    producer_id: int,
    producer_epoch: int,
    base_sequence: int,
    *,
    transactional: bool = False,
) -> None:
    """Rewrites the header in place for one idempotent producer, and the CRC with it.

    Only the codec survives of the source's attributes: its transactional bit spoke of a transaction that the
    target does not know (`transactional` sets it for the mirror's own), and the delete horizon is a broker's
    own (its base timestamp stays, the records' deltas count from it). The base offset is 0, as a standard
    broker rebuilds a compressed batch that has another one.
    """
    (attributes,) = _ATTRIBUTES.unpack_from(batch, ATTRIBUTES_POSITION)
    attributes &= COMPRESSION_MASK
    if transactional:
        attributes |= TRANSACTIONAL_BIT
    _ATTRIBUTES.pack_into(batch, ATTRIBUTES_POSITION, attributes)
    _PRODUCER.pack_into(batch, _PRODUCER_POSITION, producer_id, producer_epoch, base_sequence)
    stamp_offset_and_epoch(batch, 0, -1)
    seal(batch)


class Piece(NamedTuple):
    """A dense batch that is ready to be stamped, and the source offset of each of its records. `batch` is
    None for one record that is larger than the target takes."""

    batch: memoryview | None
    offsets: Sequence[int]


def rebuild(batch: memoryview, header: BatchHeader, *, from_offset: int, max_batch_size: int) -> list[Piece]:
    """The records of `batch` from `from_offset` on as new dense batches of at most `max_batch_size`.

    Raises CorruptMessage (or another KafkaError of the codec) when the records cannot be read.
    """
    records = decompress(header.compression, batch[HEADER_SIZE : header.size], MAX_DECOMPRESSED_SIZE)
    rows = section_rows([section_of(header, 0, len(records), from_offset=from_offset)])
    return _in_pieces(records, rows, header.compression, max_batch_size)


def coalesce(data: memoryview, sections: NDArray[np.int64], codec: int, max_batch_size: int) -> list[Piece]:
    """The records of several batches of one codec as one batch: several where it would be larger than
    `max_batch_size`. `sections` are rows of `BatchWalk.sections`, over the bytes of `data`.

    Raises CorruptMessage (or another KafkaError of the codec) when the records of any cannot be read.
    """
    if codec == 0:
        return _in_pieces(data, sections, codec, max_batch_size)
    # Its own small limit: what a few kilobytes claim to hold must not fill the memory.
    records, sections = unpacked(data, sections, codec, max(MAX_COALESCED_PLAIN_SIZE, max_batch_size))
    return _in_pieces(records, sections, codec, max_batch_size)


def split(batch: memoryview, offsets: Sequence[int]) -> list[Piece]:
    """A batch that the target refused, in two halves; empty when it holds one record only, or records that
    cannot be read: then the batch as a whole is what was refused.

    `offsets` are the source offsets of its records: the batch has been stamped, its own are 0..n-1.
    """
    header = parse_header(batch)
    half = header.record_count // 2
    if half == 0 or len(offsets) != header.record_count:
        return []
    codec = header.compression
    try:
        records = decompress(codec, batch[HEADER_SIZE:], MAX_DECOMPRESSED_SIZE)
        rows = section_rows([section_of(header, 0, len(records))])
        halves = (rewrite(records, rows, codec, 0, half), rewrite(records, rows, codec, half))
    except KafkaError:
        return []
    parts = (offsets[:half], offsets[half:])
    return [
        Piece(memoryview(made.batch), part)
        for made, part in zip(halves, parts, strict=True)
        if made is not None
    ]


def fault_of(batch: memoryview) -> KafkaError | None:
    """What is wrong with the records of a batch whose header and checksum are right; None where nothing is,
    or nothing that can be found out here.

    CorruptMessage: nobody can read them. InvalidRecord: they can be read, but not by Java's readers, Apache
    Kafka's brokers among them; written anew (`split`) they can be.
    """
    header = parse_header(batch)
    section = batch[HEADER_SIZE : header.size]
    try:
        records = decompress(header.compression, section, MAX_DECOMPRESSED_SIZE)
        rewrite(records, section_rows([section_of(header, 0, len(records))]), 0)
    except (CorruptMessage, InvalidRecord) as error:
        return CorruptMessage(f"its checksum is right, but {error}")
    except KafkaError:
        return None
    try:
        check_framing(header.compression, section)
    except InvalidRecord as error:
        return error
    return None


def _in_pieces(
    records: Buffer,
    sections: NDArray[np.int64],
    codec: int,
    max_batch_size: int,
    first: int = 0,
    last: int = ALL,
) -> list[Piece]:
    made = rewrite(records, sections, codec, first, last)
    if made is None:
        return []
    if len(made.batch) <= max_batch_size:
        return [Piece(memoryview(made.batch), offsets_of(made.ranges))]
    if made.record_count == 1:
        return [Piece(None, offsets_of(made.ranges))]
    # As many parts as its size asks for, of as many records each; one that is still too large is cut again.
    part_count = min(made.record_count, -(-len(made.batch) // max_batch_size))
    cuts = [first + made.record_count * number // part_count for number in range(part_count + 1)]
    return [
        piece
        for start, end in pairwise(cuts)
        for piece in _in_pieces(records, sections, codec, max_batch_size, start, end)
    ]
