"""Source offset -> target offset, from the chunks of the offset map. Pure.

Called by `translate` (a person's question) and `group_sync`. `PartitionMap` holds one source partition's
chunks; a chunk's runs are decoded only when an offset in it is asked for.

What a translation promises: reading the target on from the offset that it gives, a reader meets every record
whose source offset is at or after the one asked for and which the mirror carried. EXACT adds that it meets
nothing else of that source partition, but for copies that an at-least-once mirror made later.

An offset without a run (compacted away, a control record, aborted, skipped as a gap) is that of the next
record that was carried. The smallest target offset of all records at or after the one asked for is what is
safe; it differs from the record's own only where the target's log was made anew or cut, or copies came late.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple
from uuid import UUID

from millrace.broker.errors import UnreadableRecord
from millrace.broker.protocol.mirror_positions import NO_TOPIC_ID
from millrace.mirror.offsets.offset_map import Chunk, ChunkKey, OffsetRun, decode_runs
from millrace.mirror.topics.routes import TargetPartition

NO_LIMIT = 1 << 63


class Answer(StrEnum):
    EXACT = "exact"
    SAFE = "safe"  # the smallest position that leaves nothing out; some records may be read again
    TOO_OLD = "too_old"  # before the first offset that the map answers for
    NOT_YET = "not_yet"  # the mirror has not come so far
    NOTHING = "nothing"  # the mirror has carried nothing: where the target's log begins
    UNREADABLE = "unreadable"  # a chunk cannot be read, so what was carried is not known


@dataclass(frozen=True, slots=True)
class Translation:
    """`target` is None unless EXACT or SAFE. `bound`: with TOO_OLD the first source offset that
    the map answers for (-1: it answers for none), with NOT_YET the mirror's position. `is_end`: nothing at or
    after the offset is known to have been carried. `went_elsewhere`: too old, because records at or after the
    offset went to another target partition; `bound` is where that ended."""

    answer: Answer
    target: int | None = None
    bound: int = -1
    is_end: bool = field(default=False, compare=False)
    went_elsewhere: bool = field(default=False, compare=False)


class Scope(NamedTuple):
    """Which target partition a question is about, and which one the chunks are of that do not say it. None:
    any, and nobody knows (they may be of every one)."""

    target: TargetPartition | None = None
    untold: TargetPartition | None = None

    def is_elsewhere(self, chunk: Chunk) -> bool:
        """Whether the chunk's target offsets are certainly those of another partition."""
        of = chunk.key.target or self.untold
        return None not in (self.target, of) and of != self.target


ANYWHERE = Scope()


@dataclass(slots=True)
class _Index:
    """The chunks that count, by `from`; `limits` is where a cut makes the rest of one void.
    `elsewhere_until` is the largest source end of what went to another target partition."""

    chunks: list[Chunk]
    limits: list[int]
    furthest_end: list[int]  # the largest source end of this chunk and those before it
    least_base: list[int]  # the smallest base of this chunk and those behind it
    newest: Chunk | None  # with runs, whatever log of the source they are of
    elsewhere_until: int


@dataclass(slots=True)
class PartitionMap:
    """What the map says of one source partition: chunks are put in as they are read, in any order."""

    chunks: dict[ChunkKey, Chunk] = field(default_factory=dict)
    unreadable: set[ChunkKey] = field(default_factory=set)
    _indexes: dict[tuple[UUID, Scope], _Index] = field(default_factory=dict)

    def put(self, chunk: Chunk) -> None:
        self.chunks[chunk.key] = chunk
        self.unreadable.discard(chunk.key)
        self._indexes.clear()

    def put_unreadable(self, key: ChunkKey) -> None:
        """A chunk of a version that is not known here, or damaged: offsets that it speaks of must not be
        taken for ones that were never carried."""
        self.remove(key)
        self.unreadable.add(key)

    def remove(self, key: ChunkKey) -> None:
        self.unreadable.discard(key)
        if self.chunks.pop(key, None) is not None:
            self._indexes.clear()

    def translate(
        self, offset: int, position: int, topic_id: UUID = NO_TOPIC_ID, scope: Scope = ANYWHERE
    ) -> Translation:
        """Where a reader that would read `offset` next at the source goes on at the target.

        `position` is the mirror's, `topic_id` that of the log which `offset` belongs to; the position is as
        old as the map or older. A reader of one target partition misses what went to another before its
        names changed: what is asked for from before that is too old.
        """
        if self.unreadable:
            return Translation(Answer.UNREADABLE)
        try:
            return self._look_up(offset, position, topic_id, scope)
        except UnreadableRecord:
            return Translation(Answer.UNREADABLE)

    def _look_up(self, offset: int, position: int, topic_id: UUID, scope: Scope) -> Translation:
        index = self._index(topic_id, scope)
        if offset < index.elsewhere_until:
            return Translation(Answer.TOO_OLD, bound=index.elsewhere_until, went_elsewhere=True)
        if not index.chunks:
            if offset > position:
                return Translation(Answer.NOT_YET, bound=position, is_end=True)
            return Translation(Answer.NOTHING if offset == position else Answer.TOO_OLD)
        first = index.chunks[0].from_offset
        if offset < first:
            return Translation(Answer.TOO_OLD, bound=first)
        found = self._carried(index, offset)
        if found is not None:
            return self._at(index, offset, found)
        if offset > position:
            return Translation(Answer.NOT_YET, bound=position, is_end=True)
        newest = index.newest
        if newest is None:
            return Translation(Answer.NOTHING)
        answer = Answer.SAFE if newest.head.last_unknown else Answer.EXACT
        return Translation(answer, newest.target_end, is_end=True)

    def first_target(self, scope: Scope = ANYWHERE) -> int | None:
        """The smallest target offset of all that was carried."""
        return min(
            (
                chunk.head.base
                for chunk in self.chunks.values()
                if chunk.head.run_count and not scope.is_elsewhere(chunk)
            ),
            default=None,
        )

    def last_target(self, scope: Scope = ANYWHERE) -> int | None:
        """Where the target goes on behind what was carried last."""
        newest = self._index(NO_TOPIC_ID, scope).newest
        return newest.target_end if newest is not None else None

    def _at(self, index: _Index, offset: int, found: OffsetRun) -> Translation:
        """`found` is what is left, from `offset` on, of the first run that has something at or after it."""
        least = self._least_target(index, offset)
        if found.target < 0 or least < found.target:
            return Translation(Answer.SAFE, least)
        return Translation(Answer.EXACT, found.target)

    def _carried(self, index: _Index, offset: int) -> OffsetRun | None:
        """The run with the first carried record at or after `offset`, without what is before it; of several
        copies the one with the smallest target offset."""
        best: OffsetRun | None = None
        at = bisect_right(index.chunks, offset, key=lambda chunk: chunk.from_offset)
        for number in self._overlapping(index, at, offset):
            best = _better(best, _first_of(index.chunks[number], offset, index.limits[number]))
        for number in range(at, len(index.chunks)):
            chunk = index.chunks[number]
            if best is not None and chunk.from_offset > best.first:
                break
            best = _better(best, _first_of(chunk, offset, index.limits[number]))
        return best

    def _least_target(self, index: _Index, offset: int) -> int:
        """The smallest target offset of any record at or after `offset`; for a run whose target offsets are
        not known, the end of what is known before it."""
        at = bisect_right(index.chunks, offset, key=lambda chunk: chunk.from_offset)
        targets = [index.least_base[at]] if at < len(index.chunks) else []
        for number in self._overlapping(index, at, offset):
            chunk = index.chunks[number]
            run = _first_of(chunk, offset, index.limits[number])
            if run is not None:
                targets.append(run.target if run.target >= 0 else _known_end_before(chunk, offset))
        return min(targets)

    @staticmethod
    def _overlapping(index: _Index, at: int, offset: int) -> list[int]:
        """The chunks that begin at or before `offset`, which `at` of them do, and end behind it."""
        numbers = []
        for number in range(at - 1, -1, -1):
            if index.furthest_end[number] <= offset:
                break
            if min(index.chunks[number].source_end, index.limits[number]) > offset:
                numbers.append(number)
        return numbers

    def _index(self, topic_id: UUID, scope: Scope) -> _Index:
        index = self._indexes.get((topic_id, scope))
        if index is None:
            index = self._indexes[topic_id, scope] = _build(list(self.chunks.values()), topic_id, scope)
        return index


def living(chunks: list[Chunk], topic_id: UUID) -> list[tuple[Chunk, int]]:
    """The chunks that count for this log of the source, by `from`, each with the offset from which on it is
    void (a cut that is younger)."""
    same = (NO_TOPIC_ID, topic_id)
    ours = [chunk for chunk in chunks if topic_id == NO_TOPIC_ID or chunk.head.topic_id in same]
    cuts = [(chunk.key.began_ms, chunk.head.cut_from) for chunk in ours if chunk.head.cut_from is not None]
    left: list[tuple[Chunk, int]] = []
    for chunk in ours:
        limit = min((cut for at, cut in cuts if at > chunk.key.began_ms), default=NO_LIMIT)
        if limit > chunk.from_offset:
            left.append((chunk, limit))
    left.sort(key=lambda each: (each[0].from_offset, each[0].key.began_ms))
    return left


def _build(chunks: list[Chunk], topic_id: UUID, scope: Scope) -> _Index:
    counting = living(chunks, topic_id)
    left = [(chunk, limit) for chunk, limit in counting if not scope.is_elsewhere(chunk)]
    elsewhere = [
        min(chunk.source_end, limit)
        for chunk, limit in counting
        if chunk.head.run_count and scope.is_elsewhere(chunk)
    ]
    ordered = [chunk for chunk, _ in left]
    limits = [limit for _, limit in left]
    ends = [min(chunk.source_end, limit) for chunk, limit in left]
    # An empty chunk only says where the map begins.
    bases = [
        chunk.head.base if chunk.head.run_count and _has_any_below(chunk, limit) else NO_LIMIT
        for chunk, limit in left
    ]
    return _Index(
        ordered,
        limits,
        list(accumulate(ends, max)),
        list(accumulate(reversed(bases), min))[::-1],
        max(
            (chunk for chunk in chunks if chunk.head.run_count and not scope.is_elsewhere(chunk)),
            key=lambda chunk: (chunk.key.began_ms, chunk.from_offset),
            default=None,
        ),
        max(elsewhere, default=0),
    )


def _first_of(chunk: Chunk, offset: int, limit: int) -> OffsetRun | None:
    """What is left, from `offset` on, of the chunk's first run that ends behind it."""
    runs = _runs_of(chunk)
    at = bisect_right(runs, offset, key=_end_of)
    if at == len(runs):
        return None
    run = runs[at]
    skipped = max(0, offset - run.first)
    if run.first + skipped >= limit:
        return None
    return OffsetRun(run.first + skipped, run.end, run.target + skipped if run.target >= 0 else run.target)


def _known_end_before(chunk: Chunk, offset: int) -> int:
    runs = _runs_of(chunk)
    for run in reversed(runs[: bisect_right(runs, offset, key=_end_of)]):
        if run.target >= 0:
            return run.target + run.end - run.first
    return chunk.head.base


def _has_any_below(chunk: Chunk, limit: int) -> bool:
    return limit == NO_LIMIT or _runs_of(chunk)[0].first < limit


def _end_of(run: OffsetRun) -> int:
    return run.end


def _better(one: OffsetRun | None, other: OffsetRun | None) -> OffsetRun | None:
    if one is None or other is None:
        return one or other
    if one.first != other.first:
        return one if one.first < other.first else other
    if min(one.target, other.target) < 0:
        return one if other.target < 0 else other
    return one if one.target <= other.target else other


def _runs_of(chunk: Chunk) -> tuple[OffsetRun, ...]:
    return _decoded(chunk.body, chunk.from_offset, chunk.head.base)


@lru_cache(maxsize=64)
def _decoded(body: bytes, from_offset: int, base: int) -> tuple[OffsetRun, ...]:
    return tuple(decode_runs(body, from_offset, base))
