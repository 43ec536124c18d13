"""The offset map against a plain list of what went where.

A history is a run of steps of one source partition's life: batches delivered (with holes, behind markers of
transactions, with target offsets that the target did not say), stretches dropped, positions written, workers
that die between delivery and writing, transactions that abort, a source log that is truncated or made anew, a
target log that is made anew, and the map's own upkeep. The model keeps one entry for each copy of a record,
and finds by looking at all of them where a reader has to go on. After each history every offset is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.mirror.offsets import map_upkeep, offset_map
from millrace.mirror.offsets.map_upkeep import plan_upkeep
from millrace.mirror.offsets.offset_map import Runs, decode_chunk, decode_key
from millrace.mirror.offsets.offset_runs import offsets_of
from millrace.mirror.offsets.translation import Answer, PartitionMap, Translation
from millrace.mirror.topics.routes import SourcePartition

PARTITION = SourcePartition("ewr", "flights", 3)


@dataclass(eq=False)
class Copy:
    """One copy of a source record in the target's log, delivered in the n-th assignment."""

    source: int
    target: int
    assignment: int
    is_known: bool = True
    is_void: bool = False


@dataclass
class History:
    """What the mirror does with `Runs` and the map (`stored`), and the model beside it."""

    now_ms: int = 1_000
    log: int = 1  # which log of that name the source has
    fetched: int = 0
    target_end: int = 0
    target_start: int = 0
    assignment: int = 0
    began_at: int = 0
    least_position: int = 0  # in an assignment it only goes forward
    is_new_target: bool = False
    # As written: the position, which log it is of, the copies that the map knows, where assignments began (as
    # (assignment, offset), like cuts).
    position: int = 0
    written_log: int = 1
    copies: list[Copy] = field(default_factory=list)
    beginnings: list[tuple[int, int]] = field(default_factory=list)
    # Not written.
    pending: list[Copy] = field(default_factory=list)
    owed_beginnings: list[tuple[int, int]] = field(default_factory=list)
    cuts: list[tuple[int, int]] = field(default_factory=list)
    stored: dict[bytes, bytes] = field(default_factory=dict)
    runs: Runs = field(init=False)

    def __post_init__(self) -> None:
        self.runs = Runs(PARTITION, 0, self.now_ms, UUID(int=1))

    # --- steps -----------------------------------------------------------------------------------

    def deliver(self, shape: list[tuple[int, int]], marker: int, is_known: bool) -> None:
        """A batch of stretches (holes before, records), behind `marker` target offsets of somebody else. Only
        a log that remembers an older batch of the producer takes one without saying where."""
        is_known |= not self.target_end
        self.target_end += marker
        base, ranges = self.target_end, []
        for holes, count in shape:
            first = self.fetched + holes
            ranges.append(range(first, first + count))
            self._copy(ranges[-1], is_known)
        self.runs.add(offsets_of(ranges), base if is_known else -1)

    def deliver_out_of_order(self, first: int, second: int) -> None:
        """Two batches of which the second is acknowledged first."""
        start, base = self.fetched, self.target_end
        self._copy(range(start, start + first + second), True)
        self.runs.add(range(start + first, start + first + second), base + first)
        self.runs.add(range(start, start + first), base)

    def drop(self, count: int) -> None:
        self.fetched += count

    def write(self, back: int) -> None:
        """Writes the map up to a position that may lag what was delivered, then the position."""
        position = self.least_position = max(self.least_position, self.fetched - back)
        records = self.runs.take_until(position)
        self.stored.update(records)
        written = [c for c in self.pending if c.assignment < self.assignment or c.source < position]
        self.pending = [copy for copy in self.pending if copy not in written]
        self.copies += written
        if records:
            self.beginnings += [*self.owed_beginnings, (self.assignment, self.began_at)]
            self.owed_beginnings.clear()
        for at, offset in self.cuts:
            for copy in self.copies:
                copy.is_void |= copy.assignment < at and copy.source >= offset
            self.beginnings = [each for each in self.beginnings if each[0] >= at or each[1] < offset]
        self.cuts.clear()
        self.position, self.written_log = position, self.log

    def die(self) -> None:
        """A worker ends before it has written all; the next goes on at the position."""
        self._back_to_the_position()
        self.runs = Runs(PARTITION, self.position, self.now_ms, UUID(int=self.log))

    def abort(self) -> None:
        """A transaction is aborted: its target offsets are used up, its records are nowhere."""
        self._back_to_the_position()
        self.target_end += 1
        self.runs.restart(self.position, self.now_ms, UUID(int=self.log))

    def truncate_source(self, count: int) -> None:
        self._cut(max(0, self.fetched - count), self.log)

    def make_source_anew(self, start: int) -> None:
        self._cut(start, self.log + 1)

    def make_target_anew(self) -> None:
        self.target_end, self.is_new_target = 0, True

    def upkeep(self, expired: int) -> None:
        if not self.is_new_target:
            self.target_start = min(self.target_end, self.target_start + expired)
        for batch in plan_upkeep(list(self.map().chunks.values()), {None: self.target_start}):
            for key, value in batch:
                if value is None:
                    del self.stored[key]
                else:
                    self.stored[key] = value

    def _copy(self, offsets: range, is_known: bool) -> None:
        for offset in offsets:
            self.pending.append(Copy(offset, self.target_end, self.assignment, is_known))
            self.target_end += 1
        self.fetched = offsets.stop

    def _begin(self, position: int) -> None:
        self.assignment += 1
        self.now_ms += 1
        self.fetched = self.began_at = self.least_position = position

    def _back_to_the_position(self) -> None:
        self.pending.clear()
        self.cuts.clear()
        self.owed_beginnings.clear()
        self.log = self.written_log
        self._begin(self.position)

    def _cut(self, offset: int, log: int) -> None:
        self.owed_beginnings.append((self.assignment, self.began_at))
        self._begin(offset)
        self.cuts.append((self.assignment, offset if log == self.log else 0))
        self.log = log
        self.runs.cut(offset, self.now_ms, UUID(int=log))

    # --- what comes of it ------------------------------------------------------------------------

    def map(self) -> PartitionMap:
        found = PartitionMap()
        for raw, value in self.stored.items():
            key = decode_key(raw)
            assert key is not None and key.partition == PARTITION
            found.put(decode_chunk(key, value))
        return found

    def check(self) -> None:
        found = self.map()
        for offset in range(max(self.fetched, self.position) + 3):
            answer = found.translate(offset, self.position, UUID(int=self.written_log))
            problem = self._problem(offset, answer)
            assert problem is None, f"offset {offset}: {problem}, not {answer}\n{self}"

    def _problem(self, offset: int, answer: Translation) -> str | None:
        """What the model would have said, where `answer` is something else."""
        live = [copy for copy in self.copies if not copy.is_void]
        if not self.beginnings and offset >= self.position:
            wanted = Answer.NOTHING if offset == self.position else Answer.NOT_YET
            return None if answer.answer is wanted else f"{wanted}: nothing was written"
        if all(offset < begins for _, begins in self.beginnings):
            return None if answer.answer is Answer.TOO_OLD else "the map does not reach so far back"
        coming = [copy for copy in live if copy.source >= offset]
        if coming and (offset <= self.position or any(copy.source == offset for copy in coming)):
            least = min(copy.target for copy in coming)
            next_source = min(copy.source for copy in coming)
            own = [copy.target for copy in coming if copy.source == next_source and copy.is_known]
            if answer.answer is Answer.TOO_OLD and least < self.target_start:
                return None
            if not all(copy.is_known for copy in coming):
                is_right = answer.target is not None and answer.target <= least
                is_right &= answer.answer is Answer.SAFE or min(own, default=None) == answer.target
                return None if is_right else f"at most {least}, exact only at {own}"
            wanted = Answer.EXACT if min(own) == least else Answer.SAFE
            return None if answer == Translation(wanted, least) else f"{wanted} {least}"
        if offset > self.position:
            return None if answer.answer is Answer.NOT_YET else f"not yet: the position is {self.position}"
        if not self.copies:
            return None if answer.answer is Answer.NOTHING else "nothing was carried"
        newest = [copy for copy in self.copies if copy.assignment == max(c.assignment for c in self.copies)]
        last = max(newest, key=lambda copy: copy.source)
        end = last.target + 1
        if not last.is_known:
            return (
                None if answer.answer is Answer.SAFE and (answer.target or 0) <= end else f"safe, up to {end}"
            )
        return None if answer == Translation(Answer.EXACT, end) else f"the end, {end}"


def a_step() -> st.SearchStrategy[tuple[Callable[..., None], tuple[Any, ...]]]:
    few = st.integers(0, 3)
    shape = st.lists(st.tuples(few, st.integers(1, 4)), min_size=1, max_size=4)
    marker = st.sampled_from([0, 0, 1, 1, 1, 2, 300])
    mostly = st.sampled_from([True] * 9 + [False])
    deliver = st.tuples(st.just(History.deliver), st.tuples(shape, marker, mostly))
    write = st.tuples(st.just(History.write), st.tuples(st.sampled_from([0, 0, 0, 1, 5])))
    return st.one_of(
        deliver,
        deliver,
        write,
        write,
        st.tuples(st.just(History.deliver_out_of_order), st.tuples(st.integers(1, 3), st.integers(1, 3))),
        st.tuples(st.just(History.drop), st.tuples(st.integers(1, 3))),
        st.tuples(st.sampled_from([History.die, History.abort]), st.just(())),
        st.tuples(st.just(History.upkeep), st.tuples(st.integers(0, 6))),
        st.tuples(st.just(History.truncate_source), st.tuples(st.integers(1, 8))),
        st.tuples(st.just(History.make_source_anew), st.tuples(few)),
        st.tuples(st.just(History.make_target_anew), st.just(())),
    )


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Any:
    """So that short histories fill chunks and join them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offset_map, "MAX_TAIL_SIZE", 4)
        patch.setattr(map_upkeep, "WORTH_JOINING", 2)
        patch.setattr(map_upkeep, "MAX_CHUNK_SIZE", 40)
        yield


@settings(max_examples=1000, deadline=None)
@given(st.lists(a_step(), min_size=1, max_size=40))
def test_every_offset_translates_as_the_model_says(
    steps: list[tuple[Callable[..., None], tuple[Any, ...]]],
) -> None:
    history = History()
    for step, words in steps:
        step(history, *words)
    history.check()
