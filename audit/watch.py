"""`audit watch`: one run after the other, each in a process of its own.

A run of its own process, because a JVM that died or grew, a leak or a defect in one run must not end the next
ones, and because between runs nothing is held but this small process; what it costs is Spark's start, a few
CPU seconds of every run. Runs begin every `every_ms`, counted from the beginning of the last; one that takes
longer is followed at once. What a run says is passed on line by line, each with its time; a failed run is
told in a line, and the next one begins where the last good one ended. A run that hangs is ended at a limit,
it and all processes that it started; one that ended without a word of its own (killed, or by the limit) is
noted in the report folder by the watch (`report.folder`).

After each run `watch.prom` in the report folder tells how it went, beside `metrics.prom`, which is written by
good runs only:

    millrace_audit_watch_last_run_status     exit status of the last run: 0, 1, 2; 3 it failed
    millrace_audit_watch_last_run_timestamp_seconds     when it ended, Unix time
    millrace_audit_watch_last_good_run_timestamp_seconds
    millrace_audit_watch_runs_total, millrace_audit_watch_failed_runs_total    since this watch began

Called by the command line, which turns SIGTERM and SIGINT into `stop()`: the run under way is asked to end,
leaves the state as it was, and the watch ends with the status of the last finished run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from millrace.audit.config import duration_text
from millrace.audit.report.folder import note_failure

FILE_NAME = "watch.prom"
FAILED = 3
VERDICTS = (0, 1, 2)
END_TIMEOUT_S = 60.0  # after SIGTERM; then SIGKILL
LOOK_S = 1.0
LINES_TIMEOUT_S = 5.0


def timed(line: str, now_s: float | None = None) -> str:
    """The line as it stands in a log that lasts: with its time in UTC."""
    moment = datetime.fromtimestamp(time.time() if now_s is None else now_s, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%SZ} {line}"


class Watch:
    """`command` is the whole command line of one run; `say` takes lines for a person, `relay` those of the
    runs themselves. `limit_ms` is how long one run may take, None without end; `clock` tells seconds."""

    def __init__(
        self,
        command: Sequence[str],
        every_ms: int,
        report: Path,
        *,
        runs: int | None = None,
        limit_ms: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = lambda line: None,
        relay: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._relay = relay
        self._command = list(command)
        self._every_s = every_ms / 1000
        self._limit_s = None if limit_ms is None else limit_ms / 1000
        self._clock = clock
        self._overdue = False
        self._report = report
        self._runs = runs
        self._say = say
        self._stopped = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._unheard = False
        registry = self._registry = CollectorRegistry()
        self._status = Gauge(
            "millrace_audit_watch_last_run_status",
            "Exit status of the last run: 0 proven, 1 loss or duplicate, 2 unknown, 3 failed",
            registry=registry,
        )
        self._ended = Gauge(
            "millrace_audit_watch_last_run_timestamp_seconds", "When the last run ended", registry=registry
        )
        self._good = Gauge(
            "millrace_audit_watch_last_good_run_timestamp_seconds",
            "When the last run ended that did not fail",
            registry=registry,
        )
        self._count = Counter("millrace_audit_watch_runs", "Runs since the watch began", registry=registry)
        self._failed = Counter("millrace_audit_watch_failed_runs", "Runs that failed", registry=registry)

    def stop(self) -> None:
        """End after what is under way was told to end; may be called from a signal's handler."""
        self._stopped.set()
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()

    def run(self) -> int:
        """Until `runs` are done or `stop` is called; the exit status of the last finished run. Raises
        BrokenPipeError once nobody reads what is passed on."""
        last = FAILED
        number = 0
        while not self._stopped.is_set() and (self._runs is None or number < self._runs):
            number += 1
            begun = time.monotonic()
            status = self._run_once()
            if self._stopped.is_set():
                break  # it was told to end, which says nothing of the records
            last = status if status in VERDICTS else FAILED
            self._tell(last)
            wait_s = max(0.0, begun + self._every_s - time.monotonic())
            goes_on = self._runs is None or number < self._runs
            if last == FAILED:
                following = f", the next begins in {wait_s:.0f} s" if goes_on else ""
                why = f"status {status}"
                if self._overdue:
                    why = (
                        f"ended after {duration_text(int(1000 * (self._limit_s or 0)))}, the limit of one run"
                    )
                if status != FAILED:  # one that ends with it has told itself
                    note_failure(self._report, time.time_ns() // 1_000_000, f"the run failed: {why}")
                self._say(f"run {number} failed ({why}); nothing of it was kept{following}")
            if goes_on:
                self._stopped.wait(wait_s)
        if self._unheard:
            raise BrokenPipeError
        return last

    def _run_once(self) -> int:
        # A session of its own: Ctrl-C in the terminal comes to us, and we tell the run.
        process = self._process = subprocess.Popen(
            self._command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        if self._stopped.is_set():
            process.terminate()
        reading = threading.Thread(target=self._pass_on, args=(process,), name="watch-lines", daemon=True)
        reading.start()
        try:
            return self._wait(process)
        finally:
            reading.join(LINES_TIMEOUT_S)  # a process of its own that it left behind may hold the pipe
            self._process = None

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        """Until it has ended: by itself, told to by `stop`, or with all that it started at its limit."""
        self._overdue = False
        limit = None if self._limit_s is None else self._clock() + self._limit_s
        killed_at: float | None = None  # when patience ends with one that was told to end
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(
                    LOOK_S if limit is None else min(LOOK_S, max(limit - self._clock(), 0.02))
                )
                if self._overdue:
                    _signal_group(process, signal.SIGKILL)  # whoever of its processes did not listen
                return status
            now = self._clock()
            if killed_at is not None and now >= killed_at:
                _signal_group(process, signal.SIGKILL)
            elif killed_at is None and self._stopped.is_set():
                killed_at = now + END_TIMEOUT_S
            elif killed_at is None and limit is not None and now >= limit:
                self._overdue, limit = True, None
                killed_at = now + END_TIMEOUT_S
                _signal_group(process, signal.SIGTERM)

    def _pass_on(self, process: subprocess.Popen[bytes]) -> None:
        """Nobody may read our own output any more (`audit watch | head`): then the watch ends. What the run
        says is taken all the same, or it would wait for that for ever."""
        for line in process.stdout or ():
            try:
                if not self._unheard:
                    self._relay(line.decode("utf-8", "replace").rstrip())
            except BrokenPipeError:
                self._unheard = True
                self.stop()
            except (OSError, ValueError):
                continue  # a full disk, a letter that the terminal does not have: the next line may pass

    def _tell(self, status: int) -> None:
        now_s = time.time()
        self._status.set(status)
        self._ended.set(now_s)
        self._count.inc()
        if status == FAILED:
            self._failed.inc()
        else:
            self._good.set(now_s)
        path = self._report / FILE_NAME
        temporary = path.with_name(f".{FILE_NAME}.{uuid.uuid4().hex}")
        try:
            self._report.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(generate_latest(self._registry))
            temporary.replace(path)
        except OSError as problem:
            self._say(f"{path} cannot be written ({problem.strerror})")
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """To the run and everything that it started in its session: Spark's JVM too."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
