"""Message sets of formats 0 and 1 (written before Apache Kafka 0.11) as record batches of today. Pure.

Called by `intake` for what `coalesce.BatchWalk` finds of them in a fetch answer, and by `placement` behind
damage (`claims`): logs that were never rewritten hold such messages, and a source gives them out as they
lie there. Every message becomes a record with its offset, key, value and timestamp (format 0 has
none: -1); what was compressed together becomes one batch of the same codec, neighbours without compression
become one, and where compaction has left holes there are several. Headers came with format 2, so there are
none.

Layout, from the protocol's guide: offset i64, size i32, then crc i32 (CRC-32 of all that follows it), magic
i8, attributes i8 (codec in bits 0-2; of format 1 bit 3: the broker's time), in format 1 the timestamp i64,
key and value each with an i32 length, -1 for null. A compressed message's value is a message set; its offset
is the last inner one's, and in format 1 the inner ones count from 0.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from millrace.broker.errors import CorruptMessage, KafkaError, RecordTooLarge
from millrace.broker.protocol.batch import parse_header
from millrace.broker.protocol.checksum import crc32
from millrace.broker.protocol.compression import GZIP, LZ4, SNAPPY, decompress
from millrace.broker.protocol.records import MAX_DECOMPRESSED_SIZE, Record, build_batch

Buffer: TypeAlias = bytes | bytearray | memoryview

MAGIC_POSITION = 16
_ATTRIBUTES_POSITION = 17
_OFFSET = struct.Struct(">q")

NO_END = (1 << 63) - 1
"""Where a log ends whose end is not known; as in `coalesce_kernels`."""

_ENTRY = struct.Struct(">qi")  # offset, size of what follows
_HEAD = struct.Struct(">IbB")  # crc, magic, attributes
_CRC_SIZE = 4
_TIMESTAMP = struct.Struct(">q")
_LENGTH = struct.Struct(">i")
_CODEC_MASK = 0x07
_APPEND_TIME_BIT = 0x08
_NO_TIMESTAMP = -1
# In a frame of LZ4: flags and block descriptor behind the magic number, with a content size where a flag says
# so, then the byte that checks them.
_LZ4_DESCRIPTOR = 4
_LZ4_HAS_CONTENT_SIZE = 0x08
_MERGED_SIZE = 128 << 10


class Unreadable(NamedTuple):
    """An entry whose checksum is right and whose content is not: fetching it again changes nothing."""

    offset: int
    reason: str
    is_too_large: bool = False
    """Unpacked, it takes more room than is given to any."""


class _Misplaced(CorruptMessage):
    """A set whose messages reach beyond the offset that it claims: so that is no end of a gap either."""


class _Message(NamedTuple):
    offset: int
    magic: int
    attributes: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None


def end_of_entry(data: Buffer, position: int) -> int | None:
    """Where the entry at `position` ends; None when the fetch has cut it off. Raises CorruptMessage for a
    size that no entry has."""
    if len(data) - position < _ENTRY.size:
        return None
    _, size = _ENTRY.unpack_from(data, position)
    if size < _HEAD.size + 2 * _LENGTH.size:
        raise CorruptMessage(f"a message of an old format claims {size} bytes")
    end = position + _ENTRY.size + int(size)
    return end if end <= len(data) else None


def end_of_entries(data: Buffer, position: int) -> int | None:
    """Where whole entries of old formats end that begin at `position`, about `_MERGED_SIZE` of them at most:
    `position` itself when the first is cut off; None when there stands something else."""
    if not _is_old(data, position):
        return None
    start = position
    while _is_old(data, position) and position - start < _MERGED_SIZE:
        try:
            end = end_of_entry(data, position)
        except CorruptMessage:
            return position if position > start else None
        if end is None:
            break
        position = end
    return position


class Claim(NamedTuple):
    """What an entry says of its place, which no checksum covers: offsets from `first` up to `following`."""

    first: int
    following: int


def claims(data: Buffer) -> Iterator[tuple[int, int, Claim | None]]:
    """Where each entry begins and ends, up to the first place where none does, and what it claims; None of
    one that cannot be read. The last one counts although the answer has cut it off: it ends behind the
    answer."""
    position = 0
    while _is_old(data, position):
        try:
            end = end_of_entry(data, position)
        except CorruptMessage:
            return
        _, size = _ENTRY.unpack_from(data, position)
        yield position, position + _ENTRY.size + int(size), _claim(data, position, end)
        if end is None:
            return
        position = end


def _claim(data: Buffer, position: int, end: int | None) -> Claim | None:
    offset = int(_ENTRY.unpack_from(data, position)[0])
    if end is None:
        return Claim(offset, offset + 1)
    try:
        outer = _read(data, position, end)
    except CorruptMessage:
        return None
    codec = outer.attributes & _CODEC_MASK
    if not codec:
        return Claim(offset, offset + 1)
    try:
        unpacked = _unpacked(outer, codec, -1)
    except _Misplaced:
        return None
    if isinstance(unpacked, Unreadable):
        return None
    return Claim(parse_header(unpacked).base_offset, offset + 1)


class Believed(NamedTuple):
    """Entries that stand where they claim to, as far as their neighbours tell: up to `end`, the last of them
    before `next_offset`. `waits`: what comes then can be told only with what the next answer has."""

    end: int
    next_offset: int
    waits: bool = False


def believed(
    data: Buffer,
    position: int,
    end: int,
    expected: int,
    behind: int,
    *,
    from_offset: int,
    log_end: int,
    trusts_hole: bool,
    trusts_place: bool,
) -> Believed:
    """Of the whole entries in `[position, end)`, by the same rules as `coalesce_kernels` has: all lie at
    `behind` or later and before `log_end`; one that does not begin at `expected` is believed by the one after
    it. Where an answer that begins at `from_offset` does not have that, the next one has both; where it has
    nothing else, it is believed with `trusts_hole`; one at `expected` with `trusts_place`."""
    at = position
    while at < end:
        offset, following = claimed_offset(data, at), end_of_entry(data, at) or end
        is_last_here = len(data) - following < _OFFSET.size and log_end < NO_END
        is_first = expected == from_offset and offset >= expected
        if is_last_here and is_first and not trusts_place:
            return Believed(at, behind, waits=True)
        if not behind <= offset < log_end:
            break
        if offset != expected or data[at + _ATTRIBUTES_POSITION] & _CODEC_MASK:
            if is_last_here:
                claim = _claim(data, at, following) if is_first and not trusts_hole else None
                is_behind_a_hole = claim is not None and claim.first > expected
                is_between = not is_first and offset >= expected and offset + 1 < log_end
                if is_behind_a_hole or is_between:
                    return Believed(at, behind, waits=True)
            elif len(data) - following >= _OFFSET.size and claimed_offset(data, following) <= offset:
                claim = _claim(data, at, following)
                if claim is None or claim.first != expected:
                    break
        behind = offset + 1
        expected = max(expected, behind)
        at = following
    return Believed(at, behind)


def claimed_offset(data: Buffer, position: int) -> int:
    """Of the entry at `position`, its last one's."""
    return int(_OFFSET.unpack_from(data, position)[0])


def _is_old(data: Buffer, position: int) -> bool:
    return len(data) - position > MAGIC_POSITION and data[position + MAGIC_POSITION] < 2


def as_batches(entries: Buffer, before: int = -1) -> Iterator[bytearray | Unreadable]:
    """Whole entries as batches of format 2 with the source's offsets; each piece may hold several. All stand
    behind the offset `before`.

    Raises CorruptMessage at an entry whose checksum is wrong, after all that lies before it.
    """
    plain: list[_Message] = []
    size = position = 0
    while position < len(entries):
        try:
            end = end_of_entry(entries, position) or len(entries)
            outer = _read(entries, position, end)
            if outer.offset <= before:  # which no checksum covers
                raise CorruptMessage(f"message at offset {outer.offset} stands behind offset {before}")
        except CorruptMessage:
            if plain:
                yield _built(plain, 0)
            raise
        codec = outer.attributes & _CODEC_MASK
        size += end - position
        if plain and (codec or size > _MERGED_SIZE):
            yield _built(plain, 0)
            plain, size = [], end - position
        if codec:
            yield _unpacked(outer, codec, before)
            size = 0
        else:
            plain.append(outer)
        before = outer.offset
        position = end
    if plain:
        yield _built(plain, 0)


def _unpacked(outer: _Message, codec: int, before: int) -> bytearray | Unreadable:
    try:
        return _built(_inner(outer, codec, before), codec)
    except _Misplaced:
        raise
    except RecordTooLarge as error:
        return Unreadable(outer.offset, str(error), is_too_large=True)
    except (KafkaError, struct.error, ValueError, OverflowError) as error:
        return Unreadable(outer.offset, f"a message set of an old format cannot be read: {error}")


def _read(data: Buffer, position: int, end: int) -> _Message:
    """The message of the entry in `[position, end)`; its checksum is looked at."""
    offset, _ = _ENTRY.unpack_from(data, position)
    start = position + _ENTRY.size
    crc, magic, attributes = _HEAD.unpack_from(data, start)
    computed = crc32(memoryview(data)[start + _CRC_SIZE : end])
    if crc != computed:
        raise CorruptMessage(f"message at offset {offset} has CRC {crc:#x}, its bytes give {computed:#x}")
    at = start + _HEAD.size
    timestamp_ms = _NO_TIMESTAMP
    if magic:
        (timestamp_ms,) = _TIMESTAMP.unpack_from(data, at)
        at += _TIMESTAMP.size
    key, at = _bytes(data, at, end)
    value, at = _bytes(data, at, end)
    if at != end:
        raise CorruptMessage(f"message at offset {offset} has {end - at} bytes more than it says")
    return _Message(offset, magic, attributes, timestamp_ms, key, value)


def _bytes(data: Buffer, at: int, end: int) -> tuple[bytes | None, int]:
    if end - at < _LENGTH.size:
        raise CorruptMessage("a message ends within a length")
    (length,) = _LENGTH.unpack_from(data, at)
    at += _LENGTH.size
    if length < 0:
        return None, at
    if length > end - at:
        raise CorruptMessage(f"a field of {length} bytes in a message that has {end - at} left")
    return bytes(data[at : at + length]), at + length


def _inner(outer: _Message, codec: int, before: int) -> list[_Message]:
    """The messages of a compressed one, with their own offsets: all behind `before`, the last the outer's.

    A source finds a set by the outer offset alone. Were the records elsewhere, they would be passed over as
    known, or what is asked for would never come.
    """
    if codec not in (GZIP, SNAPPY, LZ4) or outer.value is None:
        raise CorruptMessage(f"a compressed message of codec {codec} without what was compressed")
    packed = _with_right_check(outer.value) if codec == LZ4 and outer.magic == 0 else outer.value
    data = memoryview(decompress(codec, packed, MAX_DECOMPRESSED_SIZE))
    found: list[_Message] = []
    position = 0
    while position < len(data):
        end = end_of_entry(data, position)
        if end is None:
            raise CorruptMessage("a compressed message set ends within a message")
        found.append(_read(data, position, end))
        position = end
    if not found or any(each.attributes & _CODEC_MASK or each.magic != outer.magic for each in found):
        raise CorruptMessage("a compressed message set that is empty, or holds another one")
    if outer.magic:
        first = outer.offset - found[-1].offset
        found = [each._replace(offset=first + each.offset) for each in found]
        if outer.attributes & _APPEND_TIME_BIT:
            found = [each._replace(timestamp_ms=outer.timestamp_ms) for each in found]
    if any(after.offset <= each.offset for each, after in pairwise(found)):
        raise CorruptMessage("offsets that do not grow")
    where = (
        f"the set at offset {outer.offset}, behind offset {before}, has records at {found[0].offset} to "
        f"{found[-1].offset}"
    )
    if found[-1].offset > outer.offset:
        raise _Misplaced(where)
    if found[0].offset <= before or found[-1].offset != outer.offset:
        raise CorruptMessage(where)
    return found


def _with_right_check(frame: bytes) -> bytes:
    """Clients that wrote format 0 computed the check byte of an LZ4 frame over its magic number too
    (KAFKA-3160); readers of the frame format refuse it."""
    from xxhash import xxh32_intdigest

    end = _LZ4_DESCRIPTOR + 2
    if len(frame) > end and frame[_LZ4_DESCRIPTOR] & _LZ4_HAS_CONTENT_SIZE:
        end += 8
    if len(frame) <= end:
        return frame
    check = xxh32_intdigest(frame[_LZ4_DESCRIPTOR:end]) >> 8 & 0xFF
    return frame[:end] + bytes((check,)) + frame[end + 1 :]


def _built(messages: Sequence[_Message], codec: int) -> bytearray:
    batches = bytearray()
    for run in _runs(messages):
        records = [Record(each.key, each.value, (), each.timestamp_ms) for each in run]
        batches += build_batch(records, compression=codec, base_offset=run[0].offset)
    return batches


def _runs(messages: Sequence[_Message]) -> Iterator[Sequence[_Message]]:
    """Stretches without holes."""
    first = 0
    for number in range(1, len(messages) + 1):
        if number == len(messages) or messages[number].offset != messages[number - 1].offset + 1:
            yield messages[first:number]
            first = number
