"""Processes that are forked from the template behave as those that are started whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.deploy import processes
from tests import forked
from tests.forked import Forked
from tests.waiting import until

SAYS = """
import os, sys
print(__name__, sys.argv, os.getcwd(), os.environ.get("MILLRACE_TEST_WORD"), sys.path[0], flush=True)
print("an error", file=sys.stderr)
print(sys.stdin.read(), end="")
sys.exit(int(sys.argv[1]))
"""

WAITS = "import time\nprint('here', flush=True)\ntime.sleep(600)\n"

STARTER = """
import sys, time
from pathlib import Path
from tests import forked
forked.turn_on()
print(forked.start([sys.executable, sys.argv[1]], log=Path(sys.argv[2])).pid, flush=True)
time.sleep(600)
"""


_template = forked.Template()


@pytest.fixture(params=["forked", forked.WHOLE])
def is_forked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    is_forked = request.param != forked.WHOLE
    monkeypatch.setattr(forked, "_template", _template if is_forked else None)
    return is_forked


def script(folder: Path, text: str) -> Path:
    path = folder / "program.py"
    path.write_text(text)
    return path


def test_program_has_its_words_folder_environment_and_log_and_ends_with_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_forked: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MILLRACE_TEST_WORD", "one")
    program, log = script(tmp_path, SAYS), tmp_path / "log"
    log.write_text("said before\n")
    process = forked.start([sys.executable, str(program), "7"], log=log)
    assert isinstance(process, Forked) == is_forked
    assert (process.wait(60), process.poll(), process.returncode) == (7, 7, 7)
    words = [str(program), "7"]
    said = f"__main__ {words} {tmp_path} one {tmp_path}"
    assert sorted(log.read_text().splitlines()) == sorted(["said before", said, "an error"])


def test_process_that_is_killed_tells_the_signal(tmp_path: Path, is_forked: bool) -> None:
    log = tmp_path / "log"
    process = forked.start([sys.executable, str(script(tmp_path, WAITS))], log=log)
    until(lambda: "here" in log.read_text(), "it runs")
    assert os.getsid(process.pid) == process.pid
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM
    process.kill()  # it has ended: nobody gets this


def test_program_of_the_product_runs_as_a_module(tmp_path: Path, is_forked: bool) -> None:
    log = tmp_path / "log"
    process = forked.start([sys.executable, "-m", "millrace.deploy.cli", "broker", "run", "--bogus"], log=log)
    assert process.wait(60) == 64
    assert log.read_text() == ("millrace: No such option: --bogus (see: millrace broker run --help)\n")


def test_forked_processes_die_with_whoever_had_them_started(tmp_path: Path) -> None:
    program, log = script(tmp_path, WAITS), tmp_path / "log"
    environment = {key: value for key, value in os.environ.items() if key != forked.VARIABLE}
    words = [sys.executable, "-c", STARTER, str(program), str(log)]
    starter = subprocess.Popen(words, cwd=forked.ROOT, env=environment, stdout=subprocess.PIPE)
    assert starter.stdout is not None
    try:
        pid = int(starter.stdout.readline())
        until(lambda: "here" in log.read_text(), "it runs")
    finally:
        starter.kill()
        starter.communicate()
    until(lambda: processes.start_time(pid) is None, "it is gone, too")


def test_other_programs_are_started_whole(tmp_path: Path) -> None:
    for command in (["true"], [sys.executable, "-c", ""]):
        process = forked.start(command, log=tmp_path / "log")
        assert isinstance(process, subprocess.Popen) and process.wait(60) == 0
