"""How much of a run's reading is done, told while it goes on, and what it came to.

Called by `job`; `read_pinned` hands the meter to the tasks. Spark brings a task's sums to the driver when the
task has ended well, so a line comes with each that ends, not more often than every `EVERY_S`. Bytes are those
that the clusters sent, as they lie in the log; how many there are to come is an estimate (`partition_sizes`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from pyspark.sql import SparkSession

from millrace.audit.report.sentences import duration
from millrace.audit.report.text import byte_size
from millrace.audit.spark.task_plan import OffsetRange, planned_bytes

EVERY_S = 10.0


class Told(Protocol):
    """What a task says of its reading."""

    def add(self, byte_count: int, record_count: int) -> None: ...


class ReadMeter:
    """Sums over all tasks that ended well. A task that ran twice counts as often as it ended well.

    `by_records`: who reads tells the bytes of values and not those of the log (Spark's Kafka connector), so
    shares are told of records.
    """

    def __init__(
        self, spark: SparkSession, ranges: Sequence[OffsetRange], *, by_records: bool = False
    ) -> None:
        self._by_records = by_records
        self.planned = sum(each.size for each in ranges) if by_records else planned_bytes(ranges)
        self._bytes = spark.sparkContext.accumulator(0)
        self._records = spark.sparkContext.accumulator(0)

    def add(self, byte_count: int, record_count: int) -> None:
        self._bytes.add(byte_count)
        self._records.add(record_count)

    @property
    def bytes(self) -> int:
        return int(self._bytes.value)

    @property
    def records(self) -> int:
        return int(self._records.value)

    @contextlib.contextmanager
    def telling(
        self,
        say: Callable[[str], None],
        every_s: float = EVERY_S,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> Iterator[None]:
        """Say how far it is, from time to time, as long as the block lasts."""
        ended, begun_s = threading.Event(), clock_s()

        def tell() -> None:
            told = 0
            while not ended.wait(every_s):
                read = self.records if self._by_records else self.bytes
                if read != told:
                    told = read
                    size = record_count if self._by_records else byte_size
                    say(progress_line(read, self.planned, clock_s() - begun_s, size))

        thread = threading.Thread(target=tell, name="audit-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def record_count(number: float) -> str:
    return f"{number:,.0f} records"


def progress_line(read: int, planned: float, seconds: float, size: Callable[[float], str] = byte_size) -> str:
    """`31 % read: 3.1 GB of about 9.8 GB, 310.0 MB/s, 22 s left`. Pure."""
    rate = read / seconds if seconds > 0 else 0.0
    told = f"{size(read)} of about {size(planned)}, {size(rate)}/s"
    if read >= planned or not rate:
        return f"99 % read: {told}"
    return f"{int(100 * read / planned)} % read: {told}, {duration(1000 * (planned - read) / rate)} left"
