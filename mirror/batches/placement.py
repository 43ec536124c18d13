"""Which batches of an answer stand where they claim to stand. Pure.

A batch's base offset is not under its checksum. In the log batches lie in the order of their offsets, so a
wrong one contradicts its neighbours; `coalesce.BatchWalk` refuses it then. Here it is found out which of them
is wrong: used by `survey` when it looks behind damage, and by the walk to begin behind a batch that is
known to be out of its place. (Apache Kafka's followers refuse such a set, too; its consumers go on wherever
the wrong offset leads.)
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from millrace.broker.errors import CorruptMessage, RecordTooLarge, UnsupportedCompressionType
from millrace.broker.protocol.batch import (
    HEADER_SIZE,
    LOG_OVERHEAD,
    MAGIC,
    BatchHeader,
    iterate_batches,
    parse_header,
    verify_crc,
)
from millrace.broker.protocol.compression import decompress
from millrace.mirror.batches.old_messages import MAGIC_POSITION, claimed_offset, claims

Buffer = bytes | bytearray | memoryview

_FIRST = struct.Struct(">qi4xb6xi")
"""Of a batch's header, where each answer is asked: base offset, length, magic, last offset delta."""

MOST_BATCHES = 200
"""Looked at of one answer: the rule below compares each with each."""


class Suspect(NamedTuple):
    """A batch, or an entry of an old format, by what it claims. `mark`: bytes of its header, by which it is
    known again. `position`: where the answer has it."""

    base_offset: int
    next_offset: int
    size: int
    mark: bytes
    position: int


class Beginning(NamedTuple):
    """The first batch that can be believed and reaches up to an offset.

    `is_vouched_for`: another that can be believed stands behind it. Alone none is, wherever it claims to
    begin. `is_behind`: one that cannot be believed stands before it. `batch`: itself; None at the log's end.
    """

    base_offset: int
    next_offset: int
    is_vouched_for: bool
    is_behind: bool
    batch: Suspect | None = None


class Start(NamedTuple):
    """Where in an answer to begin; `position` is None where the answer does not tell, and one of
    `needed_size` bytes may (0: one that holds more of what follows, None: no other would)."""

    position: int | None
    needed_size: int | None = 0


class _Batch(NamedTuple):
    base_offset: int
    next_offset: int
    place: int  # how many stand before it, whole or not
    position: int  # where it begins in the answer
    end: int  # behind the answer, where that has cut it off


def verify_batch(data: Buffer, position: int, header: BatchHeader) -> None:
    """Raises CorruptMessage unless a batch is whole, its checksum right, and its header one that a log can
    hold: what ends before it begins, or has records and claims none, would else be passed over."""
    verify_crc(data, position, header)
    if header.last_offset_delta < 0 or (header.record_count == 0 and _has_bytes(data, position, header)):
        raise CorruptMessage(
            f"record batch at offset {header.base_offset} of {header.size} bytes claims "
            f"{header.record_count} records and a last offset of {header.last_offset}"
        )


def _has_bytes(data: Buffer, position: int, header: BatchHeader) -> bool:
    """Whether there is anything behind a batch's header, also after it is decompressed: compaction may leave
    the empty stream of a codec."""
    section = memoryview(data)[position + HEADER_SIZE : position + header.size]
    if not section or not header.compression:
        return bool(section)
    try:
        return bool(decompress(header.compression, section, 1))
    except (RecordTooLarge, UnsupportedCompressionType):
        return True


def beginning_at(data: Buffer, offset: int, log_end: int) -> Beginning | None:
    """None when no batch of the answer can be believed that reaches up to `offset`."""
    batches = _entries(data) or _batches(data)
    kept = _believed(batches, log_end)
    for place, number in enumerate(kept):
        batch = batches[number]
        if batch.next_offset > offset:
            is_vouched_for = place + 1 < len(kept)
            is_behind = number > place or batch.place > number
            itself = suspect_at(data, batch.position)
            return Beginning(batch.base_offset, batch.next_offset, is_vouched_for, is_behind, itself)
    return None


def start_at(data: Buffer, offset: int, log_end: int) -> Start:
    """Where to begin in an answer whose first batch may be out of its place: at the first one that can be
    believed and reaches up to `offset`. What stands before it in the log lies before `offset`: where that
    cannot be said, it is no beginning."""
    batches = _entries(data)
    if not batches:
        if _is_first_in_place(data, offset):
            return Start(0)
        batches = _batches(data, _window(data, offset))
    kept = _believed(batches, log_end)
    for place, number in enumerate(kept):
        batch = batches[number]
        if batch.next_offset <= offset:
            continue
        following_place = batches[kept[place - 1]].place + 1 if place else 0
        if batch.base_offset > offset and batch.place > following_place:
            # `offset` may be of one between the two that is not believed.
            return Start(None, None if place + 1 < len(kept) else 0)
        if batch.end > len(data):
            return Start(None, batch.end + HEADER_SIZE)
        return Start(batch.position)
    return Start(None)


def suspect_at(data: Buffer, position: int) -> Suspect:
    """Raises CorruptMessage where neither a batch nor an entry begins."""
    for claim in _claims(data, position):
        return claim
    raise CorruptMessage(f"no batch begins in the last {len(data) - position} bytes of an answer")


def reaching(data: Buffer, offset: int) -> Suspect | None:
    """The first batch of an answer that claims to reach up to `offset`, believed or not. What is no batch
    reaches it, too."""
    position = 0
    try:
        for claim in _claims(data):
            if claim.next_offset > offset:
                return claim
            position = claim.position + claim.size
    except CorruptMessage:
        mark = bytes(data[position : position + HEADER_SIZE])
        return Suspect(offset, offset + 1, len(data) - position, mark, position)
    return None


def right_behind(data: Buffer, offset: int) -> Suspect | None:
    """What stands right behind the batch that holds `offset`, whatever it claims; None where the answer does
    not show it."""
    is_behind = False
    try:
        for claim in _claims(data):
            if is_behind:
                return claim
            if claim.next_offset > offset:
                if claim.base_offset > offset:
                    return None
                is_behind = True
    except CorruptMessage:
        pass
    return None


def hole_before(data: Buffer, offset: int) -> Suspect | None:
    """The first batch of an answer, if it is whole and claims to begin behind `offset`; of old formats that
    is not asked."""
    if len(data) < HEADER_SIZE or data[MAGIC_POSITION] != MAGIC or claimed_offset(data, 0) <= offset:
        return None
    found = suspect_at(data, 0)
    return found if found.size <= len(data) else None


def holds(data: Buffer, mark: bytes) -> bool:
    """Whether an answer has the batch with that mark."""
    try:
        return any(claim.mark == mark for claim in _claims(data))
    except CorruptMessage:
        return False


def reaches_before(data: Buffer, position: int) -> int:
    """The last offset, plus one, that any batch before `position` claims; 0: none does."""
    following = 0
    for claim in _claims(data):
        if claim.position >= position:
            break
        following = max(following, claim.next_offset)
    return following


def overlapping(data: Buffer, offset: int) -> Suspect | None:
    """The first batch of an answer that reaches up to `offset`, if it claims to begin before that and is
    whole; None also where the one behind it says otherwise, as `start_at` tells then which is right."""
    if len(data) < HEADER_SIZE or data[MAGIC_POSITION] != MAGIC or claimed_offset(data, 0) >= offset:
        return None
    found = reaching(data, offset)
    if found is None or found.base_offset >= offset or found.position + found.size > len(data):
        return None
    return None if is_first_contradicted(data) else found


def verify(data: Buffer, batch: Suspect) -> None:
    """Raises CorruptMessage unless it is whole and its checksum right."""
    if data[batch.position + MAGIC_POSITION] == MAGIC:
        verify_batch(data, batch.position, parse_header(data, batch.position))
        return
    for _, _, claim in claims(data[batch.position : batch.position + batch.size]):
        if claim is not None:
            return
        break
    raise CorruptMessage(f"the message at offset {batch.next_offset - 1} cannot be read")


def is_first_contradicted(data: Buffer) -> bool:
    """Whether the second batch of an answer says that the first one is out of its place, or the other way
    round. Of old formats that is not asked."""
    if len(data) < 2 * HEADER_SIZE:
        return False
    base_offset, length, magic, last_delta = _FIRST.unpack_from(data)
    following = length + LOG_OVERHEAD
    if magic != MAGIC or not HEADER_SIZE <= following <= len(data) - HEADER_SIZE:
        return False
    if claimed_offset(data, following) > base_offset + last_delta:
        return False
    try:
        parse_header(data, following)
    except CorruptMessage:
        return False  # the walk says so, when it comes there
    return True


def _claims(data: Buffer, start: int = 0) -> Iterator[Suspect]:
    """What each batch from `start` on claims, the one too that the answer cuts off. Raises CorruptMessage
    where none begins."""
    if len(data) - start > MAGIC_POSITION and data[start + MAGIC_POSITION] < MAGIC:
        for position, end, claim in claims(data[start:]):
            last = claimed_offset(data, start + position)
            first = last if claim is None else claim.first
            mark = bytes(data[start + position : start + min(end, position + HEADER_SIZE)])
            yield Suspect(first, last + 1, end - position, mark, start + position)
        return
    position = start
    while len(data) - position >= HEADER_SIZE:
        header = parse_header(data, position)
        mark = bytes(data[position : position + HEADER_SIZE])
        yield Suspect(header.base_offset, header.next_offset, header.size, mark, position)
        position += header.size


def _is_first_in_place(data: Buffer, offset: int) -> bool:
    """Whether nothing of the answer speaks against its first batch. One that is cut off is left to the walk,
    and so is what is no batch."""
    try:
        for _, header in iterate_batches(data):
            return header.base_offset <= offset and not is_first_contradicted(data)
    except CorruptMessage:
        pass
    return True


def _window(data: Buffer, offset: int) -> int:
    """Where to look for the batch that reaches up to `offset` behind a first one that is out of its place:
    with as many before it as behind it."""
    positions: list[int] = []
    try:
        for position, header in iterate_batches(data):
            if positions and header.next_offset > offset:
                break
            positions.append(position)
    except CorruptMessage:
        pass
    return positions[max(0, len(positions) - MOST_BATCHES // 2)] if positions else 0


def _entries(data: Buffer) -> list[_Batch]:
    """The same of entries of old formats; none where the answer begins with another."""
    found: list[_Batch] = []
    for place, (position, end, claim) in enumerate(claims(data)):
        if claim is not None:
            found.append(_Batch(claim.first, claim.following, place, position, end))
            if len(found) == MOST_BATCHES:
                break
    return found


def _batches(data: Buffer, start: int = 0) -> list[_Batch]:
    """Those from `start` on whose checksum is right, up to the first place where no batch begins, and the
    last one although the answer has cut it off."""
    found: list[_Batch] = []
    place, end = 0, start
    try:
        for place, (position, header) in enumerate(iterate_batches(data, start), 1):
            end = position + header.size
            try:
                verify_batch(data, position, header)
            except CorruptMessage:
                continue
            found.append(_Batch(header.base_offset, header.next_offset, place - 1, position, end))
            if len(found) == MOST_BATCHES:
                return found
        if len(data) - end >= HEADER_SIZE:
            header = parse_header(data, end)
            found.append(_Batch(header.base_offset, header.next_offset, place, end, end + header.size))
    except CorruptMessage:
        pass
    return found


def _believed(batches: list[_Batch], log_end: int) -> list[int]:
    """The numbers of those that every best explanation keeps. An explanation keeps batches in ascending order
    below `log_end`, such that between them there is room for the others, whose number of offsets is under
    their checksum; the best ones keep the most."""
    count = len(batches)
    sizes = [0]
    for batch in batches:
        sizes.append(sizes[-1] + batch.next_offset - batch.base_offset)

    def fits(before: int, after: int) -> bool:
        """Whether `after` may be the next that is kept behind `before`; -1 and `count` are the log's ends."""
        begin = 0 if before < 0 else batches[before].next_offset
        end = log_end if after == count else batches[after].base_offset
        return begin + sizes[after] - sizes[before + 1] <= end

    up_to = [0] * count  # most that are kept up to this one, itself kept; 0: it cannot be
    for number in range(count):
        most = 0 if fits(-1, number) else -1
        for before in range(number):
            if up_to[before] > most and fits(before, number):
                most = up_to[before]
        up_to[number] = most + 1
    from_on = [0] * count
    for number in reversed(range(count)):
        most = 0 if fits(number, count) else -1
        for after in range(number + 1, count):
            if from_on[after] > most and fits(number, after):
                most = from_on[after]
        from_on[number] = most + 1
    best = max(
        (up_to[each] + from_on[each] - 1 for each in range(count) if up_to[each] and from_on[each]), default=0
    )
    by_rank: dict[int, list[int]] = {}
    for number in range(count):
        if up_to[number] and from_on[number] and up_to[number] + from_on[number] - 1 == best:
            by_rank.setdefault(up_to[number], []).append(number)
    return [numbers[0] for _, numbers in sorted(by_rank.items()) if len(numbers) == 1]
