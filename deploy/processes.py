"""Starts, recognises and stops the processes of a sandbox.

Called by `local.sandbox` and `demo`. A `ProcessFile` remembers a detached process across commands: it holds
the process id *and* the time that process started, because ids are reused: a file whose id now belongs to
another process is stale, and nothing is ever sent to that other process.

Processes start in a session of their own, so Ctrl-C reaches only the command that started them, which then
stops them in order. A process started with `die_with_parent` is also killed by the kernel (Linux) when the
command itself is killed with SIGKILL.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from millrace.broker.errors import FatalError

PR_SET_PDEATHSIG = 1
STOP_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process that cannot be mistaken for a later one with the same id."""

    pid: int
    started: str

    def is_alive(self) -> bool:
        return start_time(self.pid) == self.started


class ProcessFile:
    """The pid file of one service: `{"pid": …, "started": …}`."""

    def __init__(self, path: Path):
        self.path = path

    def write(self, identity: ProcessIdentity) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".new")
        temporary.write_text(json.dumps({"pid": identity.pid, "started": identity.started}), encoding="utf-8")
        temporary.replace(self.path)

    def living(self) -> ProcessIdentity | None:
        """The process, if it still runs; None when the file is missing, unreadable or stale."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            identity = ProcessIdentity(int(content["pid"]), str(content["started"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return identity if identity.is_alive() else None

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def start_time(pid: int) -> str | None:
    """When a process started, in the system's own terms; None when it does not run (or is a zombie)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        return None if sys.platform == "linux" else _start_time_from_ps(pid)
    except OSError:
        return None
    # The command name stands in parentheses and may hold spaces: the fields are counted behind it.
    state, *fields = stat[stat.rindex(")") + 1 :].split()
    return None if state in "ZX" else fields[18]


def spawn(
    command: Sequence[str],
    *,
    log: Path | None = None,
    stdout: int | None = None,
    environment: Mapping[str, str] | None = None,
    die_with_parent: bool = False,
) -> subprocess.Popen[bytes]:
    """Starts a process in a session of its own; what it says goes to `log`, except to a `stdout` given."""
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644) if log else None
    try:
        return subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=stdout if stdout is not None else sink,
            stderr=sink,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
            preexec_fn=_death_signal_setter() if die_with_parent else None,
        )
    except OSError as error:
        raise FatalError(f"cannot start {command[0]}: {error.strerror}") from error
    finally:
        if sink is not None:
            os.close(sink)


def identity_of(process: subprocess.Popen[bytes]) -> ProcessIdentity:
    """Identity of a child; a child that has ended already gets one that is never alive."""
    return ProcessIdentity(process.pid, start_time(process.pid) or "ended")


def send(identity: ProcessIdentity, signal_number: int) -> bool:
    """Signals the process, and never a later one with its id; False when it has ended."""
    if not identity.is_alive():
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(identity.pid, signal_number)
        return True
    return False


def kill(identity: ProcessIdentity) -> None:
    """SIGKILL, then waits until the process is gone."""
    send(identity, signal.SIGKILL)
    wait_until_ended(identity, 10.0)


def wait_until_ended(identity: ProcessIdentity, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while identity.is_alive():
        if time.monotonic() > deadline:
            return False
        time.sleep(STOP_POLL_S)
    return True


def last_lines(log: Path, count: int = 3) -> str:
    """The end of a log on one line, to show why a process ended."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return ""
    return " / ".join(line.strip() for line in lines[-count:] if line.strip())


def _death_signal_setter() -> Callable[[], None] | None:
    """What a child does between fork and exec; the library is loaded before, as nothing may be there."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def die_with_parent() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    return die_with_parent


def _start_time_from_ps(pid: int) -> str | None:
    answer = subprocess.run(
        ["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    state, _, started = answer.stdout.strip().partition(" ")
    return started.strip() if state and not state.startswith("Z") else None
