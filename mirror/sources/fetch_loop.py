"""One connection's turn of partitions: which of them are asked for next, and how much there is room for.

Held by `source`, one for each connection to each broker, which does the fetching. Each partition is first in
its turn: in a fetch session the broker sees to that, and another one is begun where somebody is passed over.
One that needs more of an answer than others is asked for alone, outside the session; those that stand get
nothing more, and leave the answers that they came in where room is short (`fetch_memory`).

A broker does not repeat what has not changed, so an idle partition costs a fetch next to nothing. What its
silence says, that all is as it was, is told now and then (`quiet`), as if it had been answered.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from millrace.broker.client.fetch_session import FetchPosition, FetchSession, LogEnds
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.mirror.config import FetchConfig
from millrace.mirror.pipeline import PartitionPipeline, State
from millrace.mirror.sources.fetch_memory import MIN_FETCH_SIZE, FetchBudget, HeldMemory
from millrace.mirror.sources.fetch_sizes import FetchSizes, fetch_sizes

# While a partition waits for room, the others' long poll is kept short: room may come at any moment.
CROWDED_WAIT_MS = 20
ANY_WAIT_MS = 1 << 31
NO_LIMIT = 1 << 31
# Between two answers for those that try, where there is no room for the first one's batches, nor for more.
FIRST_TRY_PAUSE_MS, MAX_TRY_PAUSE_MS = 1_000, 60_000
# Often enough for what is told of lag and of what lasts (`silence`).
QUIET_INTERVAL_MS = 1_000


class Way(NamedTuple):
    """A broker, and the number of a connection to it."""

    node: int
    number: int

    @property
    def purpose(self) -> str:
        return f"fetch {self.number}"


def way_number(topic: str, partition: int, connections: int) -> int:
    """Which of a broker's connections fetches a partition: those of a topic are spread evenly, and none moves
    when others come or go."""
    return (zlib.crc32(topic.encode()) + partition) % connections


class Tries:
    """Fetches for partitions that have nothing under way, so that nobody knows whether they get on, where all
    is full, the floor too: one answer at a time, with pauses that grow while what was tried before is kept
    still."""

    def __init__(self) -> None:
        self.is_full = False
        self._may_at_ms = self._pause_ms = 0
        self._size_before = 0  # what was kept before the last one

    def look(self, held_size: int, *, is_full: bool) -> None:
        self.is_full = is_full
        if not is_full or held_size <= self._size_before:
            self._may_at_ms = self._pause_ms = 0  # what was tried last got through

    def may(self, pipeline: PartitionPipeline, at_ms: int) -> bool:
        return not self.is_full or (at_ms >= self._may_at_ms and pipeline.may_get_on(at_ms))

    def tried(self, held_size: int, at_ms: int) -> None:
        if self.is_full:
            self._size_before = held_size
            self._pause_ms = min(MAX_TRY_PAUSE_MS, max(FIRST_TRY_PAUSE_MS, 2 * self._pause_ms))
            self._may_at_ms = at_ms + self._pause_ms


class FetchLoop:
    """The partitions that are fetched over one way, and what their answers keep."""

    def __init__(self, budget: FetchBudget) -> None:
        self.partitions: dict[TopicPartition, PartitionPipeline] = {}
        self.held = HeldMemory(budget)
        self.task: asyncio.Task[None] | None = None
        self.changed = asyncio.Event()  # room was made, or other partitions came
        self.tells_where_histories_part: bool | None = None
        """Whether the broker's fetches do; None while it is not known, or may have changed."""
        self.session = FetchSession()
        self._quiet_told_at_ms = 0  # by the steady clock
        self._budget = budget
        self._is_in_floor = False  # the room is what is kept for those that get on while others stand
        self._tries = Tries()
        self._turn = 0
        self._before: Mapping[TopicPartition, FetchPosition] = {}
        # Of the last positions: the most bytes of each, for how many each is behind, and how many one needs.
        self._most_of_each = NO_LIMIT
        self._behind: list[int] = []
        self._needed_size = 0
        self._was_for_one = False  # the last fetch: for a partition that needs more of an answer than others

    def room(self, at_ms: int) -> int:
        """What may be fetched now, by the steady clock. Where it is short, those that stand leave the answers
        that they came in, as far as those keep more for nothing than what is copied."""
        budget = self._budget
        moving_size = standing_size = 0
        standing: list[PartitionPipeline] = []
        for pipeline in self.partitions.values():
            size = pipeline.progress.outstanding_size
            if size and pipeline.stands(at_ms):
                standing.append(pipeline)
                standing_size += size
            else:
                moving_size += size
        room = budget.room(self.held.size, moving_size, some_stand=False)
        self._is_in_floor = room < MIN_FETCH_SIZE and (bool(standing) or not moving_size)
        self._tries.is_full = False
        if not self._is_in_floor:
            return room
        if standing_size < self.held.size // 2:
            for pipeline in standing:
                # Others may keep the answer all the same, and then the copy is one more.
                size = pipeline.progress.outstanding_size
                if standing_size <= MIN_FETCH_SIZE or size <= budget.left(self.held.size):
                    pipeline.leave_answers()
        self._tries.look(self.held.size, is_full=budget.left(self.held.size) < MIN_FETCH_SIZE)
        return budget.room(self.held.size, moving_size, some_stand=True)

    def positions(self, room: int, at_ms: int) -> tuple[dict[TopicPartition, FetchPosition], int]:
        """What to ask for now; and for how many milliseconds at most the source may hold the answer back, as
        some other partition will want to be asked for then."""
        if room < MIN_FETCH_SIZE:
            return {}, CROWDED_WAIT_MS
        cap = self._budget.most_of_a_partition
        positions: dict[TopicPartition, FetchPosition] = {}
        self._most_of_each = NO_LIMIT
        self._behind = behind = []
        before = {} if self._is_in_floor else self._before
        self._needed_size = 0
        limit_ms = ANY_WAIT_MS
        in_need: PartitionPipeline | None = None
        turns = list(self.partitions.items())
        # A source fills its answer in the order of the request: each partition is first in its turn.
        if not self._was_for_one and self.session.says_all_next:
            self._turn = (self._turn + 1) % max(1, len(turns))
        for key, pipeline in turns[self._turn :] + turns[: self._turn]:
            if (known := before.get(key)) is not None and pipeline.wants_the_same(known, at_ms):
                positions[key] = known
                if pipeline.lag.log_end > known.offset:
                    behind.append(pipeline.bytes_behind)
                continue
            progress = pipeline.progress
            tries = self._is_in_floor and not pipeline.gets_on(at_ms)
            if pipeline.wants_fetch(at_ms, cap) and not (
                tries and (progress.outstanding_size or not self._tries.may(pipeline, at_ms))
            ):
                if tries:
                    self._most_of_each = MIN_FETCH_SIZE
                if pipeline.doubt.needed_size == 0:
                    positions[key] = _position_of(pipeline)
                    behind.append(pipeline.bytes_behind)
                elif in_need is None:
                    in_need, key_in_need = pipeline, key
            elif pipeline.state is State.RUNNING:
                limit_ms = min(limit_ms, _wants_in_ms(pipeline, at_ms))
        self._before = positions
        # Alone, as others would take its part of the answer; every second time, or they would get nothing.
        self._was_for_one = in_need is not None and not (positions and self._was_for_one)
        if self._most_of_each == MIN_FETCH_SIZE:
            self._tries.tried(self.held.size, at_ms)
        if in_need is None:
            return positions, limit_ms
        if self._was_for_one:
            positions = {key_in_need: _position_of(in_need)}
            self._behind, self._needed_size = [in_need.bytes_behind], in_need.doubt.needed_size
        return positions, CROWDED_WAIT_MS

    def sizes(self, config: FetchConfig, room: int) -> FetchSizes:
        """How much to ask for of the last positions, where there is room for so much."""
        most, budget = config.behind_max_bytes, self._budget
        wanted = fetch_sizes(
            FetchSizes(config.max_bytes, config.partition_max_bytes),
            FetchSizes(most, min(most, budget.most_of_a_partition)),
            self._behind,
        )
        return FetchSizes(
            max(MIN_FETCH_SIZE, self._needed_size, min(wanted.answer, budget.most_of_a_fetch, room)),
            max(self._needed_size, min(wanted.partition, self._most_of_each)),
        )

    @property
    def is_for_one(self) -> bool:
        """Whether the last positions were those of one that is asked for alone."""
        return self._was_for_one

    def quiet(self, at_ms: int) -> dict[TopicPartition, LogEnds]:
        """Of whom, by the last answer in the session, nothing is new, where it is time to tell that: and time
        that somebody else is first, where one is passed over."""
        if at_ms - self._quiet_told_at_ms < QUIET_INTERVAL_MS:
            return {}
        self._quiet_told_at_ms = at_ms
        if self.session.passes_over:
            self.session.end()
        return self.session.quiet()

    async def until_changed(self, limit_ms: int) -> None:
        # The time limit is for what waits for a moment to come (`retry_at_ms`, the bucket).
        try:
            async with asyncio.timeout(limit_ms / 1000):
                await self.changed.wait()
        except TimeoutError:
            return


def _position_of(pipeline: PartitionPipeline) -> FetchPosition:
    progress = pipeline.progress
    return FetchPosition(progress.fetch_offset, -1, progress.fetched_leader_epoch, pipeline.origin.topic_id)


def _wants_in_ms(pipeline: PartitionPipeline, at_ms: int) -> int:
    """When one that runs, and does not want to be fetched now, may want that: at a time that is known, when
    its target takes something again, which may be long, or at any moment."""
    if (left_ms := pipeline.retry_at_ms - at_ms) > 0:
        return left_ms
    return ANY_WAIT_MS if pipeline.stands(at_ms) else CROWDED_WAIT_MS
