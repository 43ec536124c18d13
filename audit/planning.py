"""Which offsets an audit reads, and how they are shared among tasks. Pure, and light to import.

Called by `job` (which pins ranges) and `spark_source` (which cuts them into tasks).
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

TASKS_PER_CORE = 2
LEAST_TASK_RECORDS = 200_000  # about half a second's work
MOST_TASK_RECORDS = 100_000_000


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """Offsets [first_offset, end_offset) of one partition, pinned before reading.

    `topic` is the audited topic, `topic_here` its name in this cluster. `tail` marks the part that no mirror
    has passed yet: it is reconciled, but read again next time instead of being committed.
    """

    cluster: str
    tier: str
    topic: str
    topic_here: str
    partition: int
    first_offset: int
    end_offset: int
    topic_id: str = ""
    tail: bool = False

    @property
    def size(self) -> int:
        return self.end_offset - self.first_offset

    @property
    def place(self) -> str:
        return f"{self.topic_here}-{self.partition}"


def ranges_option(ranges: Sequence[OffsetRange]) -> str:
    """The value of option `ranges`."""
    return json.dumps([asdict(each) for each in ranges])


def task_count(record_count: int, core_count: int) -> int:
    """How many tasks to plan: a small read is not cut finer than it is worth, a large one into two a core (to
    even out what differs in bytes a record), and none is so long that doing it again would hurt."""
    worthwhile = max(1, record_count // LEAST_TASK_RECORDS)
    if worthwhile < TASKS_PER_CORE * core_count:
        return min(worthwhile, core_count)
    return max(TASKS_PER_CORE * core_count, -(-record_count // MOST_TASK_RECORDS))


def plan_tasks(ranges: Sequence[OffsetRange], task_count: int) -> list[tuple[OffsetRange, ...]]:
    """Cut and pack ranges into at most `task_count` tasks of even size, largest first into the emptiest."""
    ranges = [each for each in ranges if each.size > 0]
    total = sum(each.size for each in ranges)
    if not total:
        return []
    piece_size = max(1, -(-total // task_count))
    pieces = [piece for each in ranges for piece in _cut(each, piece_size)]
    pieces.sort(key=lambda piece: -piece.size)
    tasks: list[list[OffsetRange]] = [[] for _ in range(min(task_count, len(pieces)))]
    emptiest = [(0, number) for number in range(len(tasks))]
    for piece in pieces:
        size, number = heapq.heappop(emptiest)
        tasks[number].append(piece)
        heapq.heappush(emptiest, (size + piece.size, number))
    return [tuple(pieces) for pieces in tasks]


def _cut(range_: OffsetRange, piece_size: int) -> Iterator[OffsetRange]:
    """Pieces of equal size, none larger than `piece_size`."""
    count = -(-range_.size // piece_size)
    bounds = [range_.first_offset + range_.size * i // count for i in range(count + 1)]
    fields = asdict(range_)
    for first, end in itertools.pairwise(bounds):
        yield OffsetRange(**{**fields, "first_offset": first, "end_offset": end})
