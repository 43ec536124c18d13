"""Which offsets an audit reads, and how they are shared among tasks. Pure, and light to import.

Called by `job` (which pins ranges) and `spark_source` (which cuts them into tasks: the job's by `plan_tasks`,
a user's by `plan_by_partition`).

The job's tasks are even in *work*, not in offsets: one partition's records may be ten times as large as
another's. Work is counted in bytes of the log, plus what a record costs however small it is; the bytes are
from `partition_sizes`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import NamedTuple

TASKS_PER_CORE = 2
LEAST_TASK_RECORDS = 200_000  # about half a second's work
ELASTIC_TASK_RECORDS = 10_000_000  # some seconds' work: what an executor is worth being started for
MOST_TASK_RECORDS = 100_000_000
RECORD_WORK = 100  # counting a record costs about as much as receiving and checking 100 bytes
USUAL_RECORD_BYTES = 200  # where nothing is known
SHUFFLED_BYTES = 16 << 20  # of Parquet in one part of a shuffle: about a million cells of one record
SHUFFLED_ROWS = 1 << 20  # rows that are much alike take few bytes in a file, and some 400 each in a shuffle
FOLDED_FILE_BYTES, FOLDED_FILE_ROWS = 64 << 20, 1 << 21  # a folded file has so much of either
ELASTIC_PARTS = 8  # to each of these where there is an executor for each part
UNEVEN = 0.05  # a task may be this much above the average, if that saves a cut


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """Offsets [first_offset, end_offset) of one partition, pinned before reading.

    `topic` is the audited topic, `topic_here` its name in this cluster. `tail` marks the part that no mirror
    has passed yet: it is reconciled, but read again next time instead of being committed.
    `bytes_per_offset` is an estimate of the log's bytes, 0 where it is not known.
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
    bytes_per_offset: float = 0.0

    @property
    def size(self) -> int:
        return self.end_offset - self.first_offset

    @property
    def place(self) -> str:
        return f"{self.topic_here}-{self.partition}"


def ranges_option(ranges: Sequence[OffsetRange]) -> str:
    """The value of option `ranges`."""
    return json.dumps([asdict(each) for each in ranges])


def planned_bytes(ranges: Sequence[OffsetRange]) -> float:
    """About how many bytes of the log the ranges are."""
    return sum(work - each.size * RECORD_WORK for each, work in _weighed(ranges, USUAL_RECORD_BYTES))


def task_count_of(ranges: Sequence[OffsetRange], core_count: int, *, elastic: bool = False) -> int:
    """How many tasks to plan: a small read is not cut finer than it is worth, a large one into two a core (to
    even out what estimates miss), and none is so long that doing it again would hurt. An `elastic` cluster
    brings cores where there are tasks: there the work decides, too."""
    work = sum(work for _, work in _weighed(ranges, USUAL_RECORD_BYTES))
    most = ELASTIC_TASK_RECORDS if elastic else MOST_TASK_RECORDS
    return _task_count(work, core_count, most)


class ParquetSize(NamedTuple):
    """Of what lies in files."""

    byte_count: int
    row_count: int


def shuffle_count_of(size: ParquetSize, least: int, *, elastic: bool = False) -> int:
    """Into how many parts what lies in files is shuffled: a worker's part stays the same however much there
    is. `least` is what Spark is set to."""
    finer = ELASTIC_PARTS if elastic else 1
    parts = max(size.byte_count * finer / SHUFFLED_BYTES, size.row_count * finer / SHUFFLED_ROWS)
    return max(least, math.ceil(parts))


def folded_files_of(size: ParquetSize) -> float:
    """How many files a fold makes of so much; one task writes each, and there is one at least."""
    return max(size.byte_count / FOLDED_FILE_BYTES, size.row_count / FOLDED_FILE_ROWS)


def _task_count(work: float, core_count: int, most_records: int) -> int:
    record_work = USUAL_RECORD_BYTES + RECORD_WORK
    worthwhile = max(1, int(work // (LEAST_TASK_RECORDS * record_work)))
    at_least = max(1, int(-(-work // (most_records * record_work))))
    if worthwhile < TASKS_PER_CORE * core_count:
        return max(min(worthwhile, core_count), at_least)
    return max(TASKS_PER_CORE * core_count, at_least)


def _weighed(ranges: Sequence[OffsetRange], usual_bytes: float = 0.0) -> list[tuple[OffsetRange, float]]:
    """(range, its work), empty ranges left out. A range of unknown bytes is taken for an average one."""
    ranges = [each for each in ranges if each.size > 0]
    known = [each for each in ranges if each.bytes_per_offset > 0]
    offsets = sum(each.size for each in known)
    average = sum(each.size * each.bytes_per_offset for each in known) / offsets if offsets else usual_bytes
    return [(each, each.size * ((each.bytes_per_offset or average) + RECORD_WORK)) for each in ranges]


def plan_tasks(ranges: Sequence[OffsetRange], task_count: int) -> list[tuple[OffsetRange, ...]]:
    """Share ranges among at most `task_count` tasks of even work.

    Tasks are filled one after the other, and a range is cut where a task is full: tasks come out even
    whatever the ranges are like, with at most one cut a task.
    """
    weighed = _weighed(ranges)
    total = sum(work for _, work in weighed)
    tasks: list[tuple[OffsetRange, ...]] = []
    task: list[OffsetRange] = []
    filled = planned = 0.0
    for whole, whole_work in weighed:
        rest, work = whole, whole_work
        while True:
            # What is left is shared anew each time, so that errors of rounding do not add up in the last one.
            share = (total - planned) / max(1, task_count - len(tasks))
            if filled + work <= share * (1 + UNEVEN) or len(tasks) == task_count - 1:
                break
            size = round((share - filled) / work * rest.size)
            if 0 < size < rest.size:
                cut = rest.first_offset + size
                task.append(replace(rest, end_offset=cut))
                filled += work * size / rest.size
                work -= work * size / rest.size
                rest = replace(rest, first_offset=cut)
            elif size >= rest.size or not task:
                break
            tasks.append(tuple(task))
            planned += filled
            task, filled = [], 0.0
        task.append(rest)
        filled += work
    if task:
        tasks.append(tuple(task))
    return tasks


def plan_by_partition(
    ranges: Sequence[OffsetRange], least_tasks: int | None, most_offsets: int | None
) -> list[OffsetRange]:
    """One task for each range, as users of Spark's Kafka connector know it: a partition's records stay in one
    task and in order. Ranges are cut into even pieces where one has more than `most_offsets`, and where
    there are fewer than `least_tasks` (then about so many, shared by work)."""
    weighed = _weighed(ranges)
    total = sum(work for _, work in weighed)
    wanted = least_tasks if least_tasks is not None and least_tasks > len(weighed) else 0
    tasks = []
    for whole, work in weighed:
        pieces = max(1, round(wanted * work / total), -(-whole.size // (most_offsets or whole.size)))
        bounds = [whole.first_offset + whole.size * n // pieces for n in range(pieces + 1)]
        tasks += [
            replace(whole, first_offset=first, end_offset=end)
            for first, end in pairwise(bounds)
            if end > first
        ]
    return tasks
