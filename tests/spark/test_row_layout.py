"""Verdict rows in files by time: what a part of them is read from, and how few files few rows are."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest

from millrace.audit.reconciliation.spans import DAY_MS
from millrace.audit.spark.row_layout import by_day, spread, stretch_hours

pytestmark = pytest.mark.java
HOUR_MS = DAY_MS // 24
LATE_MS = 10**17  # a clock that was wrong, beyond the calendar
STARTS = [*range(0, 4 * DAY_MS, HOUR_MS), -HOUR_MS, LATE_MS, None]


def test_few_rows_are_one_file_however_many_days_they_are_of() -> None:
    def never() -> int:
        raise AssertionError("nobody needs to know")

    assert stretch_hours(1, never) is None
    assert stretch_hours(24, lambda: 10) == 10
    assert stretch_hours(1000, lambda: 10) == 1 and stretch_hours(2, lambda: 0) == 1


@pytest.mark.parametrize(
    ("hours", "days"),
    [
        (None, ["all"]),
        (1, ["1970-01-01", "1970-01-02", "1970-01-03", "1970-01-04", "9999-12-31", "none"]),
        (36, ["1970-01-01", "1970-01-02", "1970-01-04", "9999-12-31", "none"]),
    ],
)
def test_a_stretch_is_in_one_file_of_the_day_it_begins_on(spark, tmp_path, hours, days) -> None:
    rows = [(start, "flights", "AA", stream) for stream in ("01", "02") for start in STARTS]
    table = spark.createDataFrame(
        rows, "window_start_ms bigint, topic string, producer string, stream string"
    )
    by_day(spread(table, hours), hours).parquet(f"file://{tmp_path}/rows")
    assert sorted(path.name for path in (tmp_path / "rows").glob("day=*")) == [f"day={day}" for day in days]
    files = sorted((tmp_path / "rows").rglob("*.parquet"))
    found: dict[int | None, set[int]] = {}
    for number, path in enumerate(files):
        starts = pq.ParquetFile(path).read()["window_start_ms"].to_pylist()
        known = [start for start in starts if start is not None]
        assert known == sorted(known)
        for start in starts:
            stretch = start if hours is None or start is None else start // (hours * HOUR_MS)
            found.setdefault(stretch, set()).add(number)
    assert all(len(numbers) == 1 for numbers in found.values())
    assert sum(pq.read_metadata(path).num_rows for path in files) == len(rows)


def test_rows_that_are_much_alike_are_read_by_the_group_all_the_same(spark, tmp_path) -> None:
    """They take next to nothing in the file, so that its size alone would never end a group."""
    rows = spark.range(40_000).selectExpr(
        "id * 60000 as window_start_ms", "'flights' as topic", "'AA' as producer", "'01' as stream"
    )
    by_day(spread(rows, None), None).parquet(f"file://{tmp_path}/rows")
    (path,) = (tmp_path / "rows").rglob("*.parquet")
    told = pq.read_metadata(path)
    groups = [told.row_group(number).num_rows for number in range(told.num_row_groups)]
    assert sum(groups) == 40_000 and max(groups) <= 16_384
