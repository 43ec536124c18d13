"""`audit watch`: runs in processes of their own, failures that are told and survived, an end when told."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from millrace.audit.watch import FILE_NAME, Watch, timed
from tests.waiting import patience, until


def script(*statuses: int) -> list[str]:
    """A run that takes its exit status from a list, by how often it has run."""
    text = (
        "import pathlib, sys; seen = pathlib.Path(sys.argv[1]); "
        "n = len(list(seen.iterdir())); (seen / str(n)).touch(); "
        f"status = {list(statuses)!r}[n]; "
        "import os, signal\n"
        "if status < 0: os.kill(os.getpid(), -status)\n"
        "sys.exit(status)"
    )
    return [sys.executable, "-c", text]


def metric(report: Path, name: str) -> float:
    for line in (report / FILE_NAME).read_text().splitlines():
        if line.startswith(f"{name} "):
            return float(line.split()[1])
    raise AssertionError(name)


def watch(tmp_path: Path, *statuses: int) -> tuple[int, list[str]]:
    runs = tmp_path / "runs"
    runs.mkdir()
    said: list[str] = []
    command = [*script(*statuses), str(runs)]
    status = Watch(command, 1, tmp_path / "report", runs=len(statuses), say=said.append).run()
    assert len(list(runs.iterdir())) == len(statuses)
    return status, said


def test_a_failed_run_is_told_and_the_next_one_goes_on(tmp_path):
    status, said = watch(tmp_path, 0, 3, 70, 2)
    assert status == 2
    assert [line.partition(";")[0] for line in said] == [
        "run 2 failed (status 3)",
        "run 3 failed (status 70)",
    ]
    report = tmp_path / "report"
    assert metric(report, "millrace_audit_watch_last_run_status") == 2
    assert metric(report, "millrace_audit_watch_runs_total") == 4
    assert metric(report, "millrace_audit_watch_failed_runs_total") == 2


def test_after_the_last_run_there_is_no_next_one(tmp_path):
    _, said = watch(tmp_path, 3, 3)
    assert "the next begins in" in said[0] and said[1] == "run 2 failed (status 3); nothing of it was kept"


def test_what_a_run_says_is_passed_on_line_by_line_whatever_it_is_written_to(tmp_path):
    text = (
        "import os; os.write(1, b'PROVEN  all\\xff\\n'); "
        "os.write(2, b'millrace: slow\\n'); os.write(1, b'end')"
    )
    lines: list[str] = []
    watching = Watch([sys.executable, "-c", text], 1, tmp_path / "report", runs=2, relay=lines.append)
    assert watching.run() == 0
    assert lines == ["PROVEN  all\ufffd", "millrace: slow", "end"] * 2
    assert timed("PROVEN", 1_357_000_000.9) == "2013-01-01T00:26:40Z PROVEN"


@pytest.mark.parametrize(
    "problem", [OSError(errno.ENOSPC, "no space"), UnicodeEncodeError("ascii", "ß", 0, 1, "no such letter")]
)
def test_a_run_does_not_wait_for_lines_that_cannot_be_passed_on(tmp_path, problem):
    """More than a pipe holds: nobody would take it, and the run would never end."""
    passed: list[str] = []

    def relay(line: str) -> None:
        if not passed:
            passed.append(line)
            raise problem
        passed.append(line)

    text = "for _ in range(3000): print('x' * 99)"
    watching = Watch([sys.executable, "-c", text], 1, tmp_path / "report", runs=1, relay=relay)
    ending = threading.Timer(30, watching.stop)
    ending.start()
    try:
        assert watching.run() == 0
    finally:
        ending.cancel()
    assert len(passed) == 3000


def test_a_run_that_was_killed_is_a_failed_one(tmp_path):
    status, said = watch(tmp_path, 1, -signal.SIGKILL)
    assert status == 3 and len(said) == 1 and "status -9" in said[0]
    assert metric(tmp_path / "report", "millrace_audit_watch_last_run_status") == 3
    assert metric(tmp_path / "report", "millrace_audit_watch_last_good_run_timestamp_seconds") > 0


def test_told_to_end_it_ends_the_run_and_keeps_the_last_finished_status(tmp_path):
    marker = tmp_path / "second"
    text = (
        "import pathlib, signal, sys, time; marker = pathlib.Path(sys.argv[1])\n"
        "if not pathlib.Path(sys.argv[2]).exists(): pathlib.Path(sys.argv[2]).touch(); sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, lambda *_: (marker.with_name('ended').touch(), sys.exit(143)))\n"
        "marker.touch()\n"
        "time.sleep(300)"
    )
    command = [sys.executable, "-c", text, str(marker), str(tmp_path / "first")]
    watching = Watch(command, 1, tmp_path / "report")
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(watching.run()))
    thread.start()
    until(marker.exists)
    watching.stop()
    thread.join(patience())
    assert found == [1] and (tmp_path / "ended").exists()


STUCK = """
import pathlib, signal, subprocess, sys, time
folder, deaf = pathlib.Path(sys.argv[1]), sys.argv[2] == "deaf"
if (folder / "begun").exists():
    sys.exit(0)
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); "
child = subprocess.Popen([sys.executable, "-c", code + "time.sleep(600)"], stdout=subprocess.PIPE)
child.stdout.readline()
(folder / "child").write_text(str(child.pid))

def told(*_):
    (folder / "told").touch()
    if not deaf:
        sys.exit(143)

signal.signal(signal.SIGTERM, told)
while not (folder / "asked").exists():  # or the limit would be counted from behind the jump
    time.sleep(0.01)
(folder / "begun").touch()
while True:
    time.sleep(600)
"""


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


@pytest.mark.parametrize("hears", ["hears", "deaf"])
def test_a_run_that_hangs_is_ended_at_the_limit_with_all_that_it_started(tmp_path, hears):
    """The clock jumps when the run hangs, and once more when it was told to end and did not."""

    def clock() -> float:
        jumps = (tmp_path / "begun").exists() + (tmp_path / "told").exists()
        (tmp_path / "asked").touch()
        return time.monotonic() + 100_000 * jumps

    said: list[str] = []
    command = [sys.executable, "-c", STUCK, str(tmp_path), hears]
    report = tmp_path / "report"
    watching = Watch(command, 1, report, runs=2, limit_ms=90_000_000, clock=clock, say=said.append)
    ending = threading.Timer(patience(120), watching.stop)
    ending.start()
    try:
        assert watching.run() == 0, "the next run went well"
    finally:
        ending.cancel()
    assert len(said) == 1 and said[0].startswith("run 1 failed (ended after 25h, the limit of one run);")
    assert metric(report, "millrace_audit_watch_failed_runs_total") == 1
    child = int((tmp_path / "child").read_text())
    until(lambda: not is_running(child), "the end of what the run had started")


def test_that_a_run_ended_without_a_word_stands_in_the_report(tmp_path):
    """The page of the last good run would call everything proven."""
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "index.html").write_text("<html><body>PROVEN</body></html>")
    watch(tmp_path, -signal.SIGKILL)
    assert "the run failed: status -9" in (tmp_path / "report" / "last_failure.json").read_text()
    assert "the run failed: status -9" in (tmp_path / "report" / "index.html").read_text()


def test_between_runs_it_ends_at_once(tmp_path):
    watching = Watch([sys.executable, "-c", ""], 3_600_000, tmp_path / "report")
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(watching.run()))
    thread.start()
    until((tmp_path / "report" / FILE_NAME).exists)
    watching.stop()
    thread.join(patience())
    assert found == [0]


def test_a_report_folder_that_cannot_be_written_ends_no_watch(tmp_path):
    (tmp_path / "report").touch()
    said: list[str] = []
    status = Watch(
        [sys.executable, "-c", ""], 1, tmp_path / "report" / "below", runs=2, say=said.append
    ).run()
    assert status == 0 and len(said) == 2 and all(FILE_NAME in line for line in said)
    assert os.listdir(tmp_path) == ["report"]


class Gone:
    """Whoever reads what is passed on takes so many lines and goes."""

    def __init__(self, lines: int) -> None:
        self.lines = lines

    def __call__(self, line: str) -> None:
        if not self.lines:
            raise BrokenPipeError
        self.lines -= 1


def test_it_ends_with_its_reader_and_leaves_no_run_waiting_for_one(tmp_path):
    """The run says more than a pipe holds: it must be read to its end, or it would wait for ever."""
    text = "import sys\nfor n in range(20_000): print('x' * 100)"
    watching = Watch([sys.executable, "-c", text], 3_600_000, tmp_path / "report", relay=Gone(1))
    found: list[BaseException] = []

    def run() -> None:
        try:
            watching.run()
        except BrokenPipeError as problem:
            found.append(problem)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(patience())
    assert len(found) == 1 and watching._process is None


def test_the_command_ends_quietly_with_its_reader(tmp_path):
    """`millrace audit watch | head -1`: as every other command, with status 141 and not a word more:
    0 would say that the last run has proven all."""
    text = (
        "import sys; from millrace.audit import watch; from millrace.deploy import cli\n"
        "watch.Watch._run_once, once = (lambda self: self._command.__setitem__("
        "slice(None), [sys.executable, '-c', 'print(1); print(2)']) or once(self)), watch.Watch._run_once\n"
        "cli.main(['audit', 'watch', '--every', '1ms', '--config', sys.argv[1]])"
    )
    config = tmp_path / "audit.yaml"
    config.write_text(
        "clusters:\n  ewr: {bootstrap: ['127.0.0.1:1'], tier: source}\n"
        f"topics: [flights]\nstate: {tmp_path}/state\nreport: {tmp_path}/report\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", text, str(config)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None and child.stderr is not None
    assert child.stdout.readline().endswith(b" 1\n")
    child.stdout.close()
    try:
        assert child.wait(patience()) == 141 and child.stderr.read() == b""
    finally:
        child.kill()
