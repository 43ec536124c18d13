"""Which offsets are read, and by which task."""

from __future__ import annotations

import random

import pytest

from millrace.audit.config import parse_config
from millrace.audit.contract.events import EventLedger
from millrace.audit.keeping.state import Commit, ReadPosition
from millrace.audit.runs.capture import Capture, MirrorPosition
from millrace.audit.runs.partition_pins import PartitionPin
from millrace.audit.runs.reading_plan import plan_ranges
from millrace.audit.spark.task_plan import (
    FOLDED_FILE_BYTES,
    FOLDED_FILE_ROWS,
    RECORD_WORK,
    SHUFFLED_BYTES,
    SHUFFLED_ROWS,
    USUAL_RECORD_BYTES,
    OffsetRange,
    ParquetSize,
    folded_files_of,
    plan_tasks,
    shuffle_count_of,
    task_count_of,
)
from tests import seeds

CONFIG = parse_config(
    {
        "clusters": {
            "ewr": {"bootstrap": ["h:1"], "tier": "source"},
            "agg": {"bootstrap": ["h:2"], "tier": "aggregate"},
        },
        "topics": ["flights"],
    }
)


def pin(
    cluster: str = "ewr", start: int = 0, end: int = 100, topic_id: str = "t1", partition: int = 0
) -> PartitionPin:
    return PartitionPin(cluster, "flights", "flights", partition, topic_id, start, end)


def plan(pins, positions=(), offsets=None, config=CONFIG):
    captured = Capture(5, EventLedger(), pins=list(pins))
    captured.positions = [MirrorPosition("agg", "m", "ewr", "flights", p, o, "") for p, o in positions]
    before = Commit(offsets={key: ReadPosition(*value) for key, value in (offsets or {}).items()})
    ranges, unread = plan_ranges(captured, config, before)
    told = [(r.first_offset, r.end_offset, r.tail) for r in ranges if r.size]
    return told, [(u.first_offset, u.end_offset, u.cause) for u in unread]


def test_source_is_cut_at_the_mirrors_position_and_the_rest_is_tail():
    assert plan([pin()], [(0, 60)]) == ([(0, 60, False), (60, 100, True)], [])


def test_source_is_all_tail_until_its_mirror_tells_a_position():
    """What is kept before lies across each gap that is told later: a loss beside one would never be told."""
    assert plan([pin()]) == ([(0, 100, True)], [])
    assert plan([pin()], offsets={"ewr/flights/0": (40, "t1")}) == ([(40, 100, True)], [])


@pytest.mark.parametrize("mirrors", [{}, {"agg": "foreign"}, {"agg": "millrace", "hub": "foreign"}])
def test_source_whose_mirror_may_tell_no_position_is_kept_whole(mirrors):
    """Or all of it would be read by each run."""
    aggregates = {
        name: {"bootstrap": ["h:2"], "tier": "aggregate", "mirror": mirror}
        for name, mirror in mirrors.items()
    }
    source = {"ewr": {"bootstrap": ["h:1"], "tier": "source"}}
    config = parse_config({"clusters": {**source, **aggregates}, "topics": ["flights"]})
    assert plan([pin()], config=config) == ([(0, 100, False)], [])


def test_partition_that_its_mirror_has_not_begun_is_all_tail():
    assert plan([pin(), pin(partition=1)], [(0, 100)]) == ([(0, 100, False), (0, 100, True)], [])


def test_aggregate_is_never_cut():
    assert plan([pin("agg")], [(0, 60)]) == ([(0, 100, False)], [])


def test_position_beyond_the_pinned_end_reads_to_the_end():
    assert plan([pin()], [(0, 250)]) == ([(0, 100, False)], [])


def test_reading_goes_on_where_the_last_commit_ended():
    assert plan([pin()], [(0, 100)], {"ewr/flights/0": (40, "t1")}) == ([(40, 100, False)], [])


def test_retention_that_passed_the_auditor_is_noted():
    assert plan([pin(start=70)], [(0, 100)], {"ewr/flights/0": (40, "t1")}) == (
        [(70, 100, False)],
        [(40, 70, "expired")],
    )


def test_first_look_at_a_log_that_lost_its_beginning_notes_it():
    assert plan([pin(start=10)], [(0, 100)]) == ([(10, 100, False)], [(0, 10, "expired")])


def test_truncated_log_is_noted_and_not_read_twice():
    assert plan([pin(end=30)], offsets={"ewr/flights/0": (40, "t1")}) == ([], [(30, 40, "truncated")])


def test_recreated_topic_starts_again_and_is_noted():
    told, unread = plan([pin(topic_id="t2")], [(0, 100)], {"ewr/flights/0": (40, "t1")})
    assert told == [(0, 100, False)] and [cause for _, _, cause in unread] == ["recreated"]


def test_tasks_cover_every_offset_once_and_are_even():
    rng = random.Random(seeds.given())
    for _ in range(200):
        ranges = [
            OffsetRange("c", "c", "t", "t", p, first, first + rng.choice((0, 1, 10, 1000, 100_000)))
            for p, first in enumerate(rng.randrange(1000) for _ in range(rng.randrange(1, 30)))
        ]
        count = rng.randrange(1, 9)
        tasks = plan_tasks(ranges, count)
        pieces = sorted((p.partition, p.first_offset, p.end_offset) for task in tasks for p in task)
        for each in ranges:
            at = each.first_offset
            for _, first, end in (piece for piece in pieces if piece[0] == each.partition):
                assert first == at
                at = end
            assert at == each.end_offset
        total = sum(each.size for each in ranges)
        if total:
            assert len(tasks) <= count
            assert max(sum(p.size for p in task) for task in tasks) <= 1.05 * total / count + 1


def task_count(record_count: int, core_count: int) -> int:
    """Of records of usual size."""
    return task_count_of(ranges_of((record_count, USUAL_RECORD_BYTES)), core_count)


def test_small_read_is_one_task_and_a_middling_one_fills_the_cores():
    assert [task_count(records, 2) for records in (0, 10_000, 399_999)] == [1, 1, 1]
    assert task_count(400_000, 2) == task_count(799_999, 2) == 2
    assert task_count(800_000, 2) == 4


def test_large_read_is_two_tasks_a_core_until_tasks_become_too_long():
    assert task_count(100_000_000, 2) == 4
    assert task_count(400_000_001, 2) == 5
    assert task_count(10_000_000_000, 16) == 100


def test_where_executors_come_with_tasks_the_work_decides_too():
    def count(records: int, cores: int = 2, size: float = USUAL_RECORD_BYTES) -> int:
        return task_count_of(ranges_of((records, size)), cores, elastic=True)

    assert [count(records) for records in (0, 100_000, 400_000, 10_000_000)] == [1, 1, 2, 4]
    assert count(1_000_000_000) == 100 and count(1_000_000_000, size=20_000.0) == 6_700
    assert count(100_000_000, cores=400) == 400, "those that run are not left idle"
    assert shuffle_count_of(ParquetSize(10 * SHUFFLED_BYTES, 0), 2, elastic=True) == 80
    assert shuffle_count_of(ParquetSize(0, 10 * SHUFFLED_ROWS), 2, elastic=True) == 80


def ranges_of(*sizes: tuple[int, float]) -> list[OffsetRange]:
    return [
        OffsetRange("c", "c", "t", "t", number, 0, size, bytes_per_offset=density)
        for number, (size, density) in enumerate(sizes)
    ]


def work_of(task) -> float:
    return sum(each.size * (each.bytes_per_offset + RECORD_WORK) for each in task)


def test_tasks_are_even_in_bytes_and_not_in_offsets():
    tasks = plan_tasks(ranges_of((1_000_000, 100.0), (1_000_000, 1900.0)), 4)
    loads = [work_of(task) for task in tasks]
    assert len(tasks) == 4 and max(loads) <= 1.06 * min(loads)
    assert tasks[0][0].size == 1_000_000 and tasks[0][1].partition == 1, (
        "the small records are less than a task"
    )


def test_three_like_partitions_make_two_even_tasks():
    tasks = plan_tasks(ranges_of((100, 200.0), (100, 200.0), (100, 200.0)), 2)
    assert [sum(each.size for each in task) for task in tasks] == [150, 150]


def test_a_little_more_than_even_saves_a_cut():
    tasks = plan_tasks(ranges_of((102, 200.0), (98, 200.0)), 2)
    assert [[each.size for each in task] for task in tasks] == [[102], [98]]


def test_a_range_of_unknown_bytes_is_taken_for_an_average_one():
    tasks = plan_tasks(ranges_of((100, 900.0), (100, 0.0)), 2)
    assert [[each.size for each in task] for task in tasks] == [[100], [100]]


def test_large_records_are_shared_among_more_tasks():
    assert task_count_of(ranges_of((100_000, 200.0)), 2) == 1
    assert task_count_of(ranges_of((100_000, 5000.0)), 2) == 4
    assert task_count_of(ranges_of((100_000_000, 20_000.0)), 2) == 67
    assert task_count_of(ranges_of((400_000, 0.0)), 2) == task_count(400_000, 2) == 2


def test_random_plans_cover_every_offset_once_and_are_even_in_work():
    rng = random.Random(seeds.given())
    for _ in range(200):
        ranges = ranges_of(
            *(
                (rng.choice((0, 1, 50, 3_000, 200_000)), rng.choice((20.0, 200.0, 3e4)))
                for _ in range(rng.randrange(1, 30))
            )
        )
        count = rng.randrange(1, 12)
        tasks = plan_tasks(ranges, count)
        at = {each.partition: each.first_offset for each in ranges}
        for each in (each for task in tasks for each in task):
            assert each.first_offset == at[each.partition] and each.size > 0
            at[each.partition] = each.end_offset
        assert at == {each.partition: each.end_offset for each in ranges} and len(tasks) <= count
        largest = max((each.bytes_per_offset + RECORD_WORK for each in ranges if each.size), default=0)
        assert all(work_of(task) <= 1.06 * work_of(ranges) / count + largest for task in tasks)


def test_a_shuffle_has_as_many_parts_as_its_cells_need_and_never_fewer_than_spark_is_set_to():
    def count(byte_count: int, row_count: int = 0, least: int = 2) -> int:
        return shuffle_count_of(ParquetSize(byte_count, row_count), least)

    assert count(0) == count(2 * SHUFFLED_BYTES, 2 * SHUFFLED_ROWS) == 2
    assert count(2 * SHUFFLED_BYTES + 1) == 3
    assert count(17_000_000_000, least=16) > 1000, "a day of cells of one record"
    assert count(11_000_000, 28_800_000) == 28, "cells that are much alike, which are small in a file only"


def test_a_fold_makes_files_of_so_many_bytes_or_so_many_rows():
    assert folded_files_of(ParquetSize(FOLDED_FILE_BYTES * 3, 10)) == 3
    assert folded_files_of(ParquetSize(10, FOLDED_FILE_ROWS * 3)) == 3
    assert 13 < folded_files_of(ParquetSize(11_000_000, 28_800_000)) < 14, "one task would write them all"
