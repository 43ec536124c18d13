"""Brokers and mirrors of the gate: processes forked from one that has loaded the product (`template.py`).

A start is mostly the loading of modules and of numba's loops, about a second of processor time; a run of the
gate starts more than five hundred brokers and mirrors, and starting was most of what they did. What is forked
is the same program with its command line, environment, files and signals, and ends as it always does. Whole
starts are what `millrace local` and `millrace demo` make, and all that is not run by pytest: benchmarks, runs
of faults. `MILLRACE_TEST_STARTS=whole` makes them here, too; the long suite sets it.

Called by `servers.py` and `cluster/mirror_process.py`; `conftest.py` turns it on.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millrace.deploy.processes import spawn

ROOT = Path(__file__).resolve().parents[1]
VARIABLE, WHOLE = "MILLRACE_TEST_STARTS", "whole"
POLL_S = 0.01


class Forked:
    """What tests use of `subprocess.Popen`, for a process whose parent is the template."""

    def __init__(self, template: Template, args: Sequence[str], pid: int) -> None:
        self.args = args
        self.pid = pid
        self.returncode: int | None = None
        self._template = template
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                self.returncode = self._template.ask(ended=self.pid)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises TimeoutExpired."""
        end = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(POLL_S)
        return status

    def send_signal(self, number: int) -> None:
        # Nobody else can have its id before it has been polled.
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Template:
    """The process that is forked; started when it is first needed. It ends with this one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def start(self, command: Sequence[str], log: Path) -> Forked:
        """`command` begins with this interpreter. The log is there when this returns."""
        log.touch()
        words, environment = list(command[1:]), dict(os.environ)
        pid = self.ask(words=words, folder=os.getcwd(), environment=environment, log=str(log.absolute()))
        return Forked(self, command, pid)

    def ask(self, **request: Any) -> Any:
        with self._lock:
            if self._process is None:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "tests.template"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    cwd=ROOT,
                    start_new_session=True,
                )
                # Leaving its context closes its standard input and waits until it has ended.
                atexit.register(self._process.__exit__, None, None, None)
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
            if not answer:
                raise RuntimeError(f"the template of servers ended with {self._process.wait()}")
            return json.loads(answer)


Process = subprocess.Popen[bytes] | Forked
_template: Template | None = None


def turn_on() -> None:
    """From now on starts of this process's children are forks, unless they were asked to be whole."""
    global _template
    if os.environ.get(VARIABLE) != WHOLE:
        _template = Template()


def start(command: Sequence[str], *, log: Path) -> Process:
    """A process in a session of its own that dies with this one; a fork where `command` is this interpreter
    with a module or a script."""
    is_ours = command[0] == sys.executable and command[1] != "-c"
    if _template is None or not is_ours:
        return spawn(command, log=log, die_with_parent=True)
    return _template.start(command, log)
