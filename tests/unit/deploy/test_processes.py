"""A process is recognised by its start time; one with a reused id is never touched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.broker.errors import FatalError
from millrace.deploy import processes
from millrace.deploy.processes import ProcessFile, ProcessIdentity
from tests.waiting import patience

SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    child = processes.spawn(SLEEPER)
    yield child
    child.kill()
    child.wait()


def test_living_process_is_found_again_by_its_file(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    file = ProcessFile(tmp_path / "run" / "service.pid")
    file.write(processes.identity_of(sleeper))
    assert file.living() == processes.identity_of(sleeper)


def test_reused_process_id_is_stale_and_gets_no_signal(
    sleeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    file = ProcessFile(tmp_path / "service.pid")
    stranger = ProcessIdentity(sleeper.pid, "another time")
    file.write(stranger)
    assert file.living() is None
    assert processes.send(stranger, signal.SIGKILL) is False
    assert sleeper.poll() is None


@pytest.mark.parametrize("content", ["", "12", "{}", '{"pid": "x", "started": "1"}', "\x00\xff"])
def test_broken_pid_file_is_no_process(content: str, tmp_path: Path) -> None:
    path = tmp_path / "service.pid"
    path.write_text(content)
    assert ProcessFile(path).living() is None


def test_missing_pid_file_is_no_process(tmp_path: Path) -> None:
    assert ProcessFile(tmp_path / "none.pid").living() is None


def test_ended_child_that_nobody_waited_for_is_not_alive() -> None:
    child = processes.spawn([sys.executable, "-c", ""])
    identity = processes.identity_of(child)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and still a zombie
    assert not identity.is_alive()
    child.wait()


def test_killed_process_is_gone_when_kill_returns(sleeper: subprocess.Popen[bytes]) -> None:
    identity = processes.identity_of(sleeper)
    processes.kill(identity)
    assert not identity.is_alive()


def test_program_that_is_missing_is_named() -> None:
    with pytest.raises(FatalError, match="/no/such/program"):
        processes.spawn(["/no/such/program"])


def test_output_goes_to_the_log_and_its_end_can_be_quoted(tmp_path: Path) -> None:
    log = tmp_path / "service.log"
    log.write_text("earlier\n")
    code = "import sys; print('first'); print('last words', file=sys.stderr)"
    processes.spawn([sys.executable, "-c", code], log=log).wait()
    assert log.read_text().startswith("earlier\n")
    assert "last words" in processes.last_lines(log, 2)
    assert processes.last_lines(tmp_path / "none") == ""


def test_parent_killed_with_sigkill_takes_its_children_along() -> None:
    code = (
        "import json, sys, time\n"
        "from millrace.deploy import processes\n"
        f"child = processes.spawn({SLEEPER!r}, die_with_parent=True)\n"
        "identity = processes.identity_of(child)\n"
        "print(json.dumps([identity.pid, identity.started]), flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = ProcessIdentity(*json.loads(parent.stdout.readline()))
    assert child.is_alive()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert processes.wait_until_ended(child, patience())


def test_process_that_goes_on_is_not_reported_as_ended(sleeper: subprocess.Popen[bytes]) -> None:
    assert not processes.wait_until_ended(processes.identity_of(sleeper), 0.05)
