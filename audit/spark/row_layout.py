"""How a run's verdict rows are laid out in files, so that a stretch of time is read without the rest.

Called by `spark_cells`; `keeping.verdict_files` reads them. Rows of a stretch of hours go into one file, or
each file would have some of every window, and whoever reads one window would read them all. How long a
stretch is goes by how much there is: years of a small audit are one file, since every file is a price of its
own (made durable one by one, named by the commit, opened by the next run).
"""

from __future__ import annotations

from collections.abc import Callable

from pyspark.sql import DataFrame, DataFrameWriter
from pyspark.sql import functions as f

from millrace.audit.reconciliation.spans import DAY_MS

_HOUR_MS = 3_600_000
_LAST_DAY = 2_932_896
"""of the calendar, in days since 1970"""
_BY_TIME = ("window_start_ms", "topic", "producer", "stream")
_GROUP_BYTES, _GROUP_ROWS = 8 << 20, 1 << 14
"""of a row group: what is read of a file for one of its windows. Rows that are much alike take few bytes, and
some 300 each once they are read"""


def stretch_hours(file_count: int, count_days: Callable[[], int]) -> int | None:
    """The hours that a file has, for about so many files over the days that there are; None for all time."""
    return None if file_count <= 1 else max(1, 24 * count_days() // file_count)


def spread(rows: DataFrame, hours: int | None) -> DataFrame:
    """The rows, those of a stretch together."""
    if hours is None:
        return rows.repartition(1)
    return rows.repartition(f.expr(f"floor(window_start_ms / {hours * _HOUR_MS})"))


def by_day(rows: DataFrame, hours: int | None) -> DataFrameWriter:
    """Writes rows that are spread into a folder for each day that a stretch begins on, in the order of their
    windows."""
    ordered = rows.withColumn("day", f.expr(_day(hours))).sortWithinPartitions("day", *_BY_TIME)
    written = ordered.write.partitionBy("day").option("parquet.block.size", str(_GROUP_BYTES))
    return written.option("parquet.block.row.count.limit", str(_GROUP_ROWS))


def _day(hours: int | None) -> str:
    if hours is None:
        return "'all'"
    ms = hours * _HOUR_MS
    day = f"least(greatest(floor(floor(window_start_ms / {ms}) * {ms} / {DAY_MS}), 0), {_LAST_DAY})"
    named = f"cast(date_from_unix_date(cast({day} as int)) as string)"
    return f"if(window_start_ms is null, 'none', {named})"  # `greatest` passes over what is null
