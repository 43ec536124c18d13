"""What counting holds does not grow with what was counted, and dense cells are small."""

from __future__ import annotations

import random

import pytest

from millrace.audit.scanning import counting
from millrace.audit.scanning.counting import CellCounter
from millrace.audit.scanning.range_reader import index_fetched
from millrace.audit.scanning.unpack import Unpacker
from millrace.audit.spark.task_reader import count_batches
from tests import seeds
from tests.benchmarks.audit.load import BatchMaker, Shape, stream_number
from tests.cells import CountedRow, rows_of

EVERYTHING = (0, 1 << 62)
START_MS = 1_356_998_400_000


def held_bytes(counter: CellCounter) -> int:
    """Of a counter: its tables, and what it knows of repeats."""
    return counter._groups.nbytes + counter._table.nbytes + counter._runs.nbytes + counter._repeats.nbytes


def counted(
    shape: Shape, record_count: int, counter: CellCounter | None = None
) -> tuple[list[CountedRow], int]:
    """(rows, most bytes held) of so many records, taken when the counter says that it is full."""
    counter = counter or CellCounter(60_000, 1 << 20)
    maker, unpacker = BatchMaker(shape, start_ms=START_MS), Unpacker()
    rows, most = [], 0
    fetch = b""
    for batch in maker.batches(record_count):
        fetch += batch
        if len(fetch) > 1 << 20:
            count_batches(counter, index_fetched(fetch), *EVERYTHING, unpacker)
            fetch = b""
            most = max(most, held_bytes(counter))
            if counter.is_full():
                rows += rows_of(counter.take())
    count_batches(counter, index_fetched(fetch), *EVERYTHING, unpacker)
    return rows + rows_of(counter.take()), max(most, held_bytes(counter))


@pytest.mark.parametrize("producers", [1, 100])
def test_memory_of_a_counter_is_the_same_for_ten_times_the_records(producers, monkeypatch):
    monkeypatch.setattr(counting, "RECORDS_PER_EMIT", 50_000)
    monkeypatch.setattr(counting, "RUNS_PER_FOLD", 1 << 14)
    shape = Shape("lz4", 200, producers, mixed=producers > 1)
    few, some = counted(shape, 75_000)
    many, most = counted(shape, 750_000)
    assert sum(row.count for row in few) == 75_000 and sum(row.count for row in many) == 750_000
    assert len(many) >= 3 * len(few) and most <= 1.1 * some


def test_a_dense_cell_takes_less_than_two_bits_a_record_whatever_the_order(build):
    rng = random.Random(seeds.given())
    lost = set(rng.sample(range(1, 20_001), 400))
    arrived = [each for each in range(1, 20_001) if each not in lost]
    for first in range(0, len(arrived), 5):  # as several requests in flight shuffle them
        part = arrived[first : first + 5]
        rng.shuffle(part)
        arrived[first : first + 5] = part
    counter = CellCounter(1 << 40, 1 << 20)
    for first in range(0, len(arrived), 500):
        records = [build.stamped(i, 1, each) for i, each in enumerate(arrived[first : first + 500])]
        count_batches(counter, index_fetched(build.batch(first, records)), *EVERYTHING)
    (row,) = rows_of(counter.take())
    assert row.count == len(arrived) and not lost & set(row.sequences)
    assert len(row.sequences.serialize()) * 8 <= 2 * row.count


def test_cells_of_the_benchmark_s_traffic_are_dense():
    rows, _ = counted(Shape("lz4", 200, 10, mixed=True), 200_000)
    assert {row.stream for row in rows} == {stream_number(0, each) for each in range(10)}
    assert {row.producer for row in rows} == {f"feed@host-{each:04d}" for each in range(10)}
    assert sum(row.count for row in rows) == 200_000
    assert all(len(row.sequences.serialize()) * 8 <= 2 * row.count for row in rows if row.count >= 10_000)
    assert any(row.count >= 10_000 for row in rows)
