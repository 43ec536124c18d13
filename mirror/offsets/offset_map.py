"""The offset map: which target offset each source record got, as runs, and how runs become records. Pure.

Called by `pipeline` (`add`, `restart`, `cut`), by whoever writes positions (`take_until`), and by
`translation` and `map_upkeep`, which read. Batches keep order and count on their way, so a stretch of source
offsets without holes and the target offset of its first record say it all: a *run*.

A *chunk* is one record of the map: the runs of one source partition in delta code, from one source offset
on. An assignment writes its youngest chunk again with every transaction, longer each time and under the same
key, until it has MAX_TAIL_SIZE; then it begins the next. So the topic's own compaction does the merging: what
stays is one record for some hundred runs, and where one source feeds one target partition without holes (and
without transactions, whose markers take offsets) one run for as long as the assignment lasts. `map_upkeep`
makes bigger chunks out of many, and removes those whose records the target no longer has.

The format is final:

    topic   millrace.offsets.<mirror> (`own_topics.OFFSET_MAP`); a source topic's map is in the partition that
            `map_partition` says
    key     {"source":"ewr","topic":"flights","partition":0,"from":n,"began_ms":n,"target":["flights",0]}
            `from`: the first source offset that the chunk answers for; what lies between it and the first run
            was not carried. `began_ms`: when the assignment began, but later than the position that it began
            with was dated: a later assignment has a larger one, whatever two clocks say. `target`: the target
            partition that its offsets are of, missing in chunks of older programs. A chunk that was joined
            from others has "to" as well, the end of its last run: two who join at the same time never take
            each other's key
    value   version (1 byte: 1), flags (1 byte), source topic's id (16 bytes), then varints (7 bits a byte,
            the lowest first, high bit: another follows):
            base      the target offset of the first run
            cut_from  only with flag CUT
            source    end of the last run, counted from `from`
            target    end of the last known run's target offsets, counted from base
            count     how many runs
            then the runs, each one varint (length << 2 | kind) and what its kind asks for:
              0  begins where the last one ended at the source, one offset later at the target (the marker
                 that ends a transaction stands between them)
              1  varint: source offsets left out; at the target it follows without a hole
              2  varint: source offsets left out; zigzag varint: target offsets left out. Length 0: no run,
                 the next one counts from there
              3  varint: source offsets left out; where it is at the target is not known

Invariants:
- in a chunk runs ascend at the source and at the target;
- a chunk that was written stays true for ever. Only what a source's log has taken back (truncation) is made
  void, by a chunk with CUT: older ones (by began_ms) mean nothing from `cut_from` on;
- below the position that is written with it or after it, the map is whole: an offset without a run was never
  carried.
"""

from __future__ import annotations

import binascii
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple
from uuid import UUID

from millrace.broker.errors import UnreadableRecord
from millrace.broker.protocol.foreign_json import read_json
from millrace.broker.protocol.mirror_positions import NO_TOPIC_ID, read_target
from millrace.mirror.offsets.offset_runs import ranges_of
from millrace.mirror.topics.routes import SourcePartition, TargetPartition

VERSION = 1
# Of the runs in the chunk that is written again with every transaction.
MAX_TAIL_SIZE = 256
UNKNOWN_TARGET = -1

CUT, LAST_UNKNOWN = 1, 2

_NEXT_AFTER_MARKER, _NEXT_AT_TARGET, _ANYWHERE, _UNKNOWN = 0, 1, 2, 3
_HEAD_SIZE = 18


def map_partition(partition: SourcePartition, count: int) -> int:
    """The partition, of `count`, of the offsets topic that holds the map of this source partition: the same
    for all partitions of a topic, so that a transaction writes to few."""
    return binascii.crc32(f"{partition.source}/{partition.topic}".encode()) % count


class OffsetRun(NamedTuple):
    """Source offsets `[first, end)`; `target` is that of the first, or UNKNOWN_TARGET."""

    first: int
    end: int
    target: int


class ChunkKey(NamedTuple):
    partition: SourcePartition
    from_offset: int
    began_ms: int
    to_offset: int | None = None
    target: TargetPartition | None = None


# --- writing -----------------------------------------------------------------------------------------


class Runs:
    """What one assignment of a source partition has delivered and not yet written to the map.

    `add` costs the same for any batch without holes; memory is bounded by what is delivered between two
    writes, plus one chunk.
    """

    __slots__ = (
        "_ascending",
        "_chunk",
        "_owed",
        "_pending",
        "_written_once",
        "partition",
        "target",
        "topic_id",
    )

    def __init__(
        self,
        partition: SourcePartition,
        position: int,
        now_ms: int,
        topic_id: UUID = NO_TOPIC_ID,
        target: TargetPartition | None = None,
    ) -> None:
        """`position`: where the assignment goes on. `now_ms`: when it began. `target`: where it goes to."""
        self.partition = partition
        self.target = target
        self.topic_id = topic_id
        self._pending: list[tuple[int, int, int]] = []
        self._owed: list[tuple[bytes, bytes]] = []
        self._ascending = True
        self._written_once = False
        self._chunk = _OpenChunk(position, now_ms)

    @property
    def began_ms(self) -> int:
        """What its chunks are called by now: of an assignment that comes later it is larger."""
        return self._chunk.began_ms

    def add(self, source_offsets: Sequence[int], target_base: int) -> None:
        """Takes an acknowledged batch: the source offset of each record, in order, and the target offset of
        the first; UNKNOWN_TARGET where the target did not say."""
        target = target_base if target_base >= 0 else UNKNOWN_TARGET
        if isinstance(source_offsets, range) and source_offsets:  # nearly always
            self._add(source_offsets.start, source_offsets.stop, target)
            return
        for each in ranges_of(source_offsets):
            self._add(each.start, each.stop, target)
            if target >= 0:
                target += len(each)

    def take_until(self, position: int) -> list[tuple[bytes, bytes]]:
        """The records (key, value) to write before `position` is written, or with it; none when the map has
        nothing new. Each is bounded by a few times MAX_TAIL_SIZE.

        They count as written from then on. Where that fails for good (an aborted transaction), `restart`.
        """
        taken = self._take(position) if self._pending else []
        if not taken and not self._must_say_where_it_begins(position):
            return []
        full: list[_OpenChunk] = []
        for first, end, target in taken:
            if first < self._chunk.source_end:
                continue  # it was given before
            if not self._chunk.fits(first, target):
                full.append(self._chunk)
                self._chunk = self._chunk.following()
            self._chunk.append(first, end, target)
        self._written_once = True
        owed, self._owed = self._owed, []
        return owed + [self._encode(chunk) for chunk in (*full, self._chunk)]

    def restart(self, position: int, now_ms: int, topic_id: UUID) -> None:
        """Forgets all that is not known to be written: the assignment goes on at `position`, as one that
        begins."""
        self.topic_id = topic_id
        self._pending.clear()
        self._owed.clear()
        self._ascending = True
        self._written_once = False
        self._chunk = _OpenChunk(position, max(now_ms, self._chunk.began_ms + 1))

    def cut(self, position: int, now_ms: int, topic_id: UUID) -> None:
        """The source's log is another one from `position` on, or altogether (another topic id): what the map
        says of those offsets is void, whoever wrote it. All that was fetched must have been settled."""
        owed = self.take_until(sys.maxsize)
        cut_from = position if topic_id == self.topic_id else 0
        self.restart(position, now_ms, topic_id)
        self._chunk.cut_from = cut_from
        self._owed = owed

    def _must_say_where_it_begins(self, position: int) -> bool:
        """Even if nothing was carried yet; and a cut is in force from the position on that it made."""
        return not self._written_once and (
            position > self._chunk.from_offset or self._chunk.cut_from is not None
        )

    def _add(self, first: int, end: int, target: int) -> None:
        pending = self._pending
        if pending:
            last_first, last_end, last_target = pending[-1]
            if first == last_end:
                follows = last_target + (last_end - last_first)
                if target == (follows if last_target >= 0 else UNKNOWN_TARGET):
                    pending[-1] = (last_first, end, last_target)
                    return
            elif first < last_end:
                self._ascending = False  # acknowledged out of order
        pending.append((first, end, target))

    def _take(self, position: int) -> list[tuple[int, int, int]]:
        if not self._ascending:
            self._pending.sort(key=itemgetter(0))
            self._ascending = True
        taken, left = [], []
        for first, end, target in self._pending:
            if end <= position:
                taken.append((first, end, target))
            elif first >= position:
                left.append((first, end, target))
            else:
                taken.append((first, position, target))
                left.append((position, end, target + (position - first) if target >= 0 else target))
        self._pending = left
        return taken

    def _encode(self, chunk: _OpenChunk) -> tuple[bytes, bytes]:
        if not chunk.encoded_key:
            key = ChunkKey(self.partition, chunk.from_offset, chunk.began_ms, target=self.target)
            chunk.encoded_key = encode_key(key)
        return chunk.encoded_key, chunk.encode(self.topic_id)


class _OpenChunk:
    """A chunk that runs are still appended to. The last run is written anew when it grows."""

    __slots__ = (
        "_before_last",
        "_body",
        "_last",
        "_last_at",
        "base",
        "began_ms",
        "count",
        "cut_from",
        "encoded_key",
        "from_offset",
        "source_end",
        "target_end",
    )

    def __init__(self, from_offset: int, began_ms: int, base: int = 0) -> None:
        self.from_offset = from_offset
        self.began_ms = began_ms
        self.cut_from: int | None = None
        self.base = base
        self.source_end = from_offset
        self.target_end = base  # of the runs whose target offsets are known
        self.count = 0
        self.encoded_key = b""
        self._body = bytearray()
        self._last: tuple[int, int, int] | None = None
        self._last_at = 0
        self._before_last = (from_offset, base)

    def fits(self, first: int, target: int) -> bool:
        """Whether a run may be appended: targets ascend, and a full chunk takes only what its last run
        goes on with."""
        if self.count and 0 <= target < self.target_end:
            return False
        return len(self._body) < MAX_TAIL_SIZE or self._continues(first, target)

    def following(self) -> _OpenChunk:
        return _OpenChunk(self.source_end, self.began_ms, self.target_end)

    def append(self, first: int, end: int, target: int) -> None:
        if self._last is not None and self._continues(first, target):
            first, _, target = self._last
            self.count -= 1
            del self._body[self._last_at :]
            self.source_end, self.target_end = self._before_last
        if not self.count and target >= 0:
            self.base = self.target_end = target
        self._last = (first, end, target)
        self._last_at = len(self._body)
        self._before_last = (self.source_end, self.target_end)
        self._put(first - self.source_end, end - first, target)
        self.source_end = end
        if target >= 0:
            self.target_end = target + end - first
        self.count += 1

    def encode(self, topic_id: UUID) -> bytes:
        is_last_unknown = self._last is not None and self._last[2] < 0
        return encode_value(
            ChunkHead(
                topic_id,
                self.cut_from,
                self.base,
                self.source_end - self.from_offset,
                self.target_end - self.base,
                self.count,
                is_last_unknown,
            ),
            self._body,
        )

    def _continues(self, first: int, target: int) -> bool:
        if self._last is None or first != self.source_end:
            return False
        return target == self.target_end if self._last[2] >= 0 else target < 0

    def _put(self, left_out: int, length: int, target: int) -> None:
        body = self._body
        if target < 0:
            _put_varint(body, length << 2 | _UNKNOWN)
            _put_varint(body, left_out)
        elif left_out == 0 and target == self.target_end + 1:
            _put_varint(body, length << 2 | _NEXT_AFTER_MARKER)
        elif target == self.target_end:
            _put_varint(body, length << 2 | _NEXT_AT_TARGET)
            _put_varint(body, left_out)
        else:
            _put_varint(body, length << 2 | _ANYWHERE)
            _put_varint(body, left_out)
            _put_varint(body, _zigzag(target - self.target_end))


# --- the records -------------------------------------------------------------------------------------


class ChunkHead(NamedTuple):
    """What a chunk says before its runs. `source_span` and `target_span` count from the key's `from` and from
    `base`."""

    topic_id: UUID
    cut_from: int | None
    base: int
    source_span: int
    target_span: int
    run_count: int
    last_unknown: bool


@dataclass(frozen=True, slots=True)
class Chunk:
    """One record of the map, its runs still encoded."""

    key: ChunkKey
    head: ChunkHead
    body: bytes

    @property
    def from_offset(self) -> int:
        return self.key.from_offset

    @property
    def source_end(self) -> int:
        """The offset after the last run; `from_offset` where there is none."""
        return self.key.from_offset + self.head.source_span

    @property
    def target_end(self) -> int:
        return self.head.base + self.head.target_span


def encode_key(key: ChunkKey) -> bytes:
    fields: dict[str, object] = {
        "source": key.partition.source,
        "topic": key.partition.topic,
        "partition": key.partition.partition,
        "from": key.from_offset,
        "began_ms": key.began_ms,
    }
    if key.to_offset is not None:
        fields["to"] = key.to_offset
    if key.target is not None:
        fields["target"] = key.target
    return json.dumps(fields, separators=(",", ":")).encode()


def decode_key(key: bytes | None) -> ChunkKey | None:
    """What a key names, or None when it is no key of this format."""
    try:
        fields = read_json(key or b"")
        source, topic = fields["source"], fields["topic"]
        partition, from_offset, began_ms = fields["partition"], fields["from"], fields["began_ms"]
        to_offset = fields.get("to", from_offset)
        target = TargetPartition(*read_target(fields["target"])) if "target" in fields else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    numbers = (partition, from_offset, began_ms, to_offset)
    if not (
        isinstance(source, str) and isinstance(topic, str) and all(type(each) is int for each in numbers)
    ):
        return None
    where = SourcePartition(source, topic, partition)
    return ChunkKey(where, from_offset, began_ms, to_offset if "to" in fields else None, target)


def encode_value(head: ChunkHead, body: bytes | bytearray) -> bytes:
    flags = (CUT if head.cut_from is not None else 0) | (LAST_UNKNOWN if head.last_unknown else 0)
    value = bytearray((VERSION, flags))
    value += head.topic_id.bytes
    _put_varint(value, head.base)
    if head.cut_from is not None:
        _put_varint(value, head.cut_from)
    for number in (head.source_span, head.target_span, head.run_count):
        _put_varint(value, number)
    value += body
    return bytes(value)


def decode_chunk(key: ChunkKey, value: bytes) -> Chunk:
    """Raises UnreadableRecord when the value is not a chunk of a version known here. The runs are not looked
    at."""
    if len(value) < _HEAD_SIZE:
        raise UnreadableRecord(f"{len(value)} bytes are no chunk of the offset map")
    if value[0] != VERSION:
        raise UnreadableRecord(f"a chunk of the offset map in version {value[0]}")
    flags = value[1]
    base, at = _varint(value, _HEAD_SIZE)
    cut_from = None
    if flags & CUT:
        cut_from, at = _varint(value, at)
    source_span, at = _varint(value, at)
    target_span, at = _varint(value, at)
    count, at = _varint(value, at)
    head = ChunkHead(
        UUID(bytes=value[2:_HEAD_SIZE]),
        cut_from,
        base,
        source_span,
        target_span,
        count,
        bool(flags & LAST_UNKNOWN),
    )
    return Chunk(key, head, value[at:])


def decode_runs(body: bytes, from_offset: int, base: int) -> Iterator[OffsetRun]:
    """Raises UnreadableRecord."""
    source, target, at = from_offset, base, 0
    while at < len(body):
        head, at = _varint(body, at)
        length, kind = head >> 2, head & 3
        if kind == _NEXT_AFTER_MARKER:
            target += 1
        else:
            left_out, at = _varint(body, at)
            source += left_out
            if kind == _ANYWHERE:
                moved, at = _varint(body, at)
                target += (moved >> 1) ^ -(moved & 1)
        if length:
            yield OffsetRun(source, source + length, UNKNOWN_TARGET if kind == _UNKNOWN else target)
            source += length
            if kind != _UNKNOWN:
                target += length


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """One chunk that says what `chunks` say. They are of one target partition and follow each other: none
    begins before the last run of the one before, at the source or at the target; none makes a cut. Bytes are
    moved, runs are not looked at."""
    first, last = chunks[0], chunks[-1]
    filled = [chunk for chunk in chunks if chunk.head.run_count]
    base = filled[0].head.base if filled else first.head.base
    body = bytearray()
    source, target = first.from_offset, base
    for chunk in filled:
        left_out, moved = chunk.from_offset - source, chunk.head.base - target
        if left_out or moved:
            _put_varint(body, _ANYWHERE)
            _put_varint(body, left_out)
            _put_varint(body, _zigzag(moved))
        body += chunk.body
        source, target = chunk.source_end, chunk.target_end
    head = ChunkHead(
        last.head.topic_id,
        None,
        base,
        source - first.from_offset,
        target - base,
        sum(chunk.head.run_count for chunk in filled),
        bool(filled) and filled[-1].head.last_unknown,
    )
    began_ms = max(chunk.key.began_ms for chunk in chunks)
    key = ChunkKey(first.key.partition, first.from_offset, began_ms, source, first.key.target)
    return Chunk(key, head, bytes(body))


def _put_varint(out: bytearray, number: int) -> None:
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    try:
        while True:
            byte = data[at]
            at += 1
            number |= (byte & 127) << shift
            if byte < 128:
                return number, at
            shift += 7
    except IndexError:
        raise UnreadableRecord("a chunk of the offset map that was cut off") from None


def _zigzag(number: int) -> int:
    return number << 1 if number >= 0 else (-number << 1) - 1
