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
from millrace.audit.spark.run_steps import RunSteps, step_line, tasks_under_way
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


def meter(*ranges: OffsetRange, by_records: bool = False) -> ReadMeter:
    session: Any = SimpleNamespace(sparkContext=SimpleNamespace(accumulator=Accumulator))
    return ReadMeter(session, ranges, by_records=by_records)


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


def test_a_reader_that_tells_bytes_of_values_alone_is_measured_by_records():
    """By them it would never be much more than half done, and then be done at once."""
    counted = meter(OffsetRange("c", "c", "t", "t", 0, 0, 1000, bytes_per_offset=200.0), by_records=True)
    said: queue.Queue[str] = queue.Queue()
    now = iter(range(0, 1000, 2))
    with counted.telling(said.put, every_s=0.01, clock_s=lambda: next(now)):
        counted.add(2_000, 500)
        line = said.get(timeout=patience(60))
    assert line == "50 % read: 500 records of about 1,000 records, 250 records/s, 2 s left"


class Watched:
    """A run's steps under a clock and a Spark of the test's; `said` waits for the next line."""

    def __init__(self, tasks: tuple[int, int] | None = None) -> None:
        self.now_s, self.lines = 0.0, queue.Queue[str]()
        self.steps = RunSteps(self.lines.put, tasks=lambda: tasks, every_s=0.001, clock_s=lambda: self.now_s)

    def said(self) -> str:
        return self.lines.get(timeout=patience(60))


def test_a_step_that_lasts_is_told_again_and_again():
    watched = Watched((60, 200))
    with watched.steps as step:
        step("reconciling")
        assert watched.said() == "reconciling"
        for seconds, line in (
            (40, "reconciling: 40 s so far, 60 of 200 tasks done"),
            (90, "reconciling: 2 min so far, 60 of 200 tasks done"),
        ):
            watched.now_s = seconds
            assert watched.said() == line
        step("writing the report")
        assert watched.said() == "writing the report"
    assert watched.lines.empty()


def test_a_step_that_speaks_for_itself_is_not_told_beside_it():
    watched = Watched()
    watched.steps("counting")
    watched.now_s = 5
    watched.steps.tell("50 % read")
    with watched.steps:
        watched.now_s = 6
        assert [watched.said() for _ in range(3)] == ["counting", "50 % read", "counting: 6 s so far"]


def test_without_stages_only_the_time_is_told():
    assert step_line("writing the report", 3.2, None) == "writing the report: 3.2 s so far"
    assert tasks_under_way() is None


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
