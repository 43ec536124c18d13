"""Where a read begins and ends in each partition, and into which tasks it is cut."""

from __future__ import annotations

import pytest

from millrace.audit.spark.offset_limits import EARLIEST, LATEST, NONE_SO_YOUNG, Limit, bounds_of
from millrace.audit.spark.task_plan import OffsetRange, plan_by_partition
from millrace.broker.errors import ConfigError

LOGS = {("x", 0): (10, 50), ("x", 1): (0, 7)}
START, END = Limit("startingOffsets", EARLIEST), Limit("endingOffsets", LATEST)


def test_by_default_all_that_the_logs_hold():
    assert bounds_of(LOGS, START, END, {}, {}, True) == LOGS


def test_offsets_that_are_given():
    start = Limit("startingOffsets", EARLIEST, offsets={("x", 0): 20, ("x", 1): EARLIEST})
    end = Limit("endingOffsets", LATEST, offsets={("x", 0): LATEST, ("x", 1): 5})
    assert bounds_of(LOGS, start, end, {}, {}, True) == {("x", 0): (20, 50), ("x", 1): (0, 5)}


@pytest.mark.parametrize(
    ("first", "end", "said"),
    [
        (3, 50, "option startingOffsets, x-0: got 3, expected an offset from 10 to 50"),
        (51, 60, "option startingOffsets, x-0: got 51, expected an offset from 10 to 50"),
        (10, 51, "option endingOffsets, x-0: got 51, expected an offset from 10 to 50"),
        (30, 20, "option endingOffsets, x-0: got 20, expected an offset from 30 on"),
    ],
)
def test_offsets_that_are_not_there_fail_in_one_line(first, end, said):
    start = Limit("startingOffsets", EARLIEST, offsets={("x", 0): first})
    until = Limit("endingOffsets", LATEST, offsets={("x", 0): end})
    with pytest.raises(ConfigError) as problem:
        bounds_of({("x", 0): (10, 50)}, start, until, {}, {}, True)
    assert said in str(problem.value) and "\n" not in str(problem.value)


def test_without_fail_on_data_loss_what_is_left_is_read():
    start = Limit("startingOffsets", EARLIEST, offsets={("x", 0): 3, ("x", 1): 9})
    end = Limit("endingOffsets", LATEST, offsets={("x", 0): 60, ("x", 1): 12})
    assert bounds_of(LOGS, start, end, {}, {}, False) == {("x", 0): (10, 50), ("x", 1): (7, 7)}


@pytest.mark.parametrize(
    ("offsets", "said"),
    [
        ({("x", 0): 10}, "option startingOffsets: got 'nothing for x-1', expected every partition"),
        ({("x", 0): 10, ("x", 1): 0, ("y", 0): 0}, "option startingOffsets: got 'y-0', expected none but"),
    ],
)
def test_offsets_name_every_partition_and_no_other(offsets, said):
    with pytest.raises(ConfigError) as problem:
        bounds_of(LOGS, Limit("startingOffsets", EARLIEST, offsets=offsets), END, {}, {}, True)
    assert said in str(problem.value)


def test_times_are_the_first_offset_at_or_after_them():
    start = Limit("startingTimestamp", EARLIEST, time_ms=5)
    assert start.asked_times(LOGS) == {("x", 0): 5, ("x", 1): 5}
    end = Limit("endingOffsetsByTimestamp", LATEST, times_ms={("x", 0): 9, ("x", 1): 9}, or_latest=True)
    assert end.asked_times(LOGS) == {("x", 0): 9, ("x", 1): 9}
    started = {("x", 0): 20, ("x", 1): 6}
    ended = {("x", 0): NONE_SO_YOUNG, ("x", 1): 2}  # and an end before the start is nothing to read
    assert bounds_of(LOGS, start, end, started, ended, True) == {("x", 0): (20, 50), ("x", 1): (6, 6)}


def test_a_start_after_the_last_record_is_refused_or_the_end_as_the_user_chose():
    young = {("x", 0): NONE_SO_YOUNG}
    logs = {("x", 0): (10, 50)}
    with pytest.raises(ConfigError, match=r"option startingTimestamp, x-0: got 5, expected a time that some"):
        bounds_of(logs, Limit("startingTimestamp", EARLIEST, time_ms=5), END, young, {}, True)
    start = Limit("startingTimestamp", EARLIEST, time_ms=5, or_latest=True)
    assert bounds_of(logs, start, END, young, {}, True) == {("x", 0): (50, 50)}


def ranges(*sizes: int) -> list[OffsetRange]:
    return [OffsetRange("c", "c", "x", "x", n, 100, 100 + size) for n, size in enumerate(sizes)]


def bounds(tasks: list[OffsetRange]) -> list[tuple[int, int, int]]:
    return [(each.partition, each.first_offset - 100, each.end_offset - 100) for each in tasks]


def test_a_task_is_one_partition_and_an_empty_one_is_none():
    assert bounds(plan_by_partition(ranges(10, 0, 5), None, None)) == [(0, 0, 10), (2, 0, 5)]
    assert bounds(plan_by_partition(ranges(10, 5), 2, None)) == [(0, 0, 10), (1, 0, 5)]


def test_large_partitions_are_cut_where_more_tasks_or_smaller_ones_are_wanted():
    assert bounds(plan_by_partition(ranges(90, 10), 10, None)) == [
        *((0, 10 * n, 10 * n + 10) for n in range(9)),
        (1, 0, 10),
    ]
    assert bounds(plan_by_partition(ranges(10, 3), None, 4)) == [
        (0, 0, 3),
        (0, 3, 6),
        (0, 6, 10),
        (1, 0, 3),
    ]
    assert bounds(plan_by_partition(ranges(2), 5, None)) == [(0, 0, 1), (0, 1, 2)]
