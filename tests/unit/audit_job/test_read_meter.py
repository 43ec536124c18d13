"""How far a long run is, and what a run took: on the console, in summary.json and in the metrics."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.audit.report.console import console_lines
from millrace.audit.report.metrics import failed_text, metrics_text
from millrace.audit.report.summary import Cost
from millrace.audit.spark.read_meter import ReadMeter, progress_line
from millrace.audit.spark.task_plan import OffsetRange, planned_bytes
from tests.browser.report_data import rich
from tests.waiting import patience

RUN = {"records": 3_400_000, "bytes": 1_200_000_000, "seconds": 12.5, "state_bytes": 4_100, "state_files": 7}


class Accumulator:
    """Spark's, as the driver sees it."""

    def __init__(self, value: int) -> None:
        self.value = value

    def add(self, more: int) -> None:
        self.value += more


def meter(*ranges: OffsetRange) -> ReadMeter:
    session: Any = SimpleNamespace(sparkContext=SimpleNamespace(accumulator=Accumulator))
    return ReadMeter(session, ranges)


def test_bytes_to_read_are_known_by_the_density_of_each_range():
    dense = OffsetRange("c", "c", "t", "t", 0, 0, 1000, bytes_per_offset=50.0)
    thin = OffsetRange("c", "c", "t", "t", 1, 500, 600, bytes_per_offset=10.0)
    unknown = OffsetRange("c", "c", "t", "t", 2, 0, 10)
    assert planned_bytes([dense, thin]) == pytest.approx(51_000)
    assert planned_bytes([dense, unknown]) == pytest.approx(50_500)
    assert planned_bytes([]) == 0


@pytest.mark.parametrize(
    ("read", "planned", "seconds", "line"),
    [
        (3_100_000_000, 9_800_000_000, 10, "31 % read: 3.1 GB of about 9.8 GB, 310.0 MB/s, 21.6 s left"),
        (1_000_000, 7_201_000_000, 1, "0 % read: 1.0 MB of about 7.2 GB, 1.0 MB/s, 2 h left"),
        (500, 1_000, 0, "99 % read: 500 B of about 1.0 kB, 0 B/s"),
        (9_900, 9_800, 3, "99 % read: 9.9 kB of about 9.8 kB, 3.3 kB/s"),
    ],
)
def test_a_line_tells_share_rate_and_time_left(read, planned, seconds, line):
    assert progress_line(read, planned, seconds) == line


def test_lines_come_as_tasks_end_and_end_with_the_block():
    counted = meter(OffsetRange("c", "c", "t", "t", 0, 0, 1000, bytes_per_offset=10.0))
    said: queue.Queue[str] = queue.Queue()
    now = iter(range(0, 1000, 2))
    with counted.telling(said.put, every_s=0.01, clock_s=lambda: next(now)):
        counted.add(2_000, 200)
        first = said.get(timeout=patience(60))
        counted.add(3_000, 300)
        second = said.get(timeout=patience(60))
    assert first.startswith("20 % read: 2.0 kB of about 10.0 kB") and second.startswith("50 % read:")
    assert said.empty() and (counted.bytes, counted.records) == (5_000, 500)


def test_nothing_is_said_while_nothing_ends():
    said: list[str] = []
    with meter().telling(said.append, every_s=0.001):
        pass
    assert said == []


def test_what_a_run_took_is_told_everywhere():
    summary = {**rich(3)[0], "run": RUN}
    text = metrics_text(summary)
    for name, value in (
        ("run_records", 3.4e6),
        ("run_bytes", 1.2e9),
        ("run_seconds", 12.5),
        ("state_bytes", 4100),
        ("state_files", 7),
    ):
        line = next(each for each in text.splitlines() if each.startswith(f"millrace_audit_{name} "))
        assert float(line.split()[1]) == value
        assert line in failed_text(text, 1_000)
    told = list(console_lines(summary, "index.html", "audit.yaml", 1, Cost(**RUN)))
    assert "  read         3,400,000 records, 1.2 GB, in 12.5 s; the state has 4.1 kB" in told
    assert not any(line.startswith("  read ") for line in console_lines(summary, "i", "a", 1))
