"""`make test`, the gate: one deterministic test for each promise, in a quarter of an hour on two cores.

    python -m tests.suite

What is random, long or a matrix (markers `long` and `unstable`) is left to `make test-long`. The tests of
running servers mostly wait for elections, sessions and restarts, those on Spark for its start and its tasks;
the others mostly want a processor. So five runs of pytest go side by side (`parts`), each with servers of its
own, and end when the suite does. The first one's output comes as it is made, the others' in one piece each
after it; what is returned is not 0 when any failed.

A few failed tests are run once more, alone, when all is over (`tests/second_try.py` says which). They are
listed at the end and in `tests/unsteady.txt`, whatever came of it; `make lint` wants that file empty: each
line is to be mended, or its test to move to the long suite (tests/README.md).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from tests import ports, preflight, second_try

TESTS = Path(__file__).resolve().parent
UNSTEADY = TESTS / "unsteady.txt"
INTERRUPTED = 130
UNFIT = 2
TESTS_FAILED = 1
"""pytest's own status: it ran to its end, and some failed."""

PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
"""Looked up here: between fork and exec nothing may be."""

BUDGET_S = 840
"""What each part may take on two cores; one that takes longer says so (tests/README.md)."""
CLUSTER, SPARK, UNIT = "cluster", "spark", "unit"
MIRRORS = "test_mirror_*.py"
CLIENTS = ("test_audited_*.py", "test_client_*.py", "test_zookeeper_consumer*.py")
"""Tests of clusters that are mostly about who uses them: they go among the others."""


@dataclass(frozen=True)
class Part:
    """One run of pytest beside others: `words` are what it is to run."""

    name: str
    words: tuple[str, ...]


def parts() -> list[Part]:
    """All of the gate, each about as long as the others; the first one's output is shown as it comes."""
    folders = {path.relative_to(TESTS).parts[0] for path in TESTS.glob("*/**/test_*.py")}
    folders -= {CLUSTER, SPARK, UNIT}
    mirrors = sorted(f"tests/{path.relative_to(TESTS)}" for path in TESTS.glob(f"*/**/{MIRRORS}"))
    no_mirrors = (f"--ignore-glob=*/{MIRRORS}",)
    clients = sorted(
        f"tests/{path.relative_to(TESTS)}" for glob in CLIENTS for path in (TESTS / CLUSTER).glob(glob)
    )
    return [
        Part("mirrors", tuple(mirrors)),
        Part("clusters", (f"tests/{CLUSTER}", *no_mirrors, *(f"--ignore={path}" for path in clients))),
        Part(SPARK, (f"tests/{SPARK}", *no_mirrors)),
        Part("units", (f"tests/{UNIT}", *no_mirrors)),
        Part("all others", (*(f"tests/{folder}" for folder in sorted(folders)), *clients, *no_mirrors)),
    ]


def main() -> int:
    signal.signal(signal.SIGTERM, _interrupt)
    if obstacles := preflight.obstacles(len(parts())):
        print(*(f"millrace: {line}" for line in obstacles), sep="\n", file=sys.stderr)
        return UNFIT
    with tempfile.TemporaryDirectory(prefix="millrace-suite-") as folder:
        failed = [Path(folder, part.name) for part in parts()]
        statuses = _side_by_side(failed)
        bad = [(status, path) for status, path in zip(statuses, failed, strict=True) if status]
        if not bad:
            return 0
        failures = [failure for _, path in bad for failure in second_try.read(path)]
        if any(status != TESTS_FAILED for status, _ in bad):
            refusal: str | None = "a run did not come to its end"
        else:
            refusal = second_try.refusal(failures)
        if refusal:
            print(f"\nNo second try: {refusal}", flush=True)
            return bad[0][0]
        print("\nOnce more, alone:", *failures, sep="\n  ", flush=True)
        status = _pytest([failure.test for failure in failures]).wait()
        said = "Failed twice, or beside one that did" if status else "Passed only at the second try"
        print(f"\n{said} ({UNSTEADY.name}):", *failures, sep="\n  ", flush=True)
        UNSTEADY.write_text("".join(f"{failure}\n" for failure in failures))
        return status


def _interrupt(number: int, _frame: FrameType | None) -> None:
    """What the runs have said so far is shown to whoever ended the suite because it hung."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt(number)


def _side_by_side(failed: Sequence[Path]) -> list[int]:
    """Exit statuses; each part leaves what failed in its file."""
    begun = time.monotonic()
    took: dict[str, float] = {}
    names = [part.name for part in parts()]
    outputs = [None, *(path.with_suffix(".out").open("w+b") for path in failed[1:])]
    runs = start(failed, outputs)
    try:
        while len(took) < len(runs):
            for name, run in zip(names, runs, strict=True):
                if name not in took and run.poll() is not None:
                    took[name] = time.monotonic() - begun
            time.sleep(0.5)
        statuses = [run.wait() for run in runs]
    except KeyboardInterrupt as interrupt:
        for run in runs:
            if interrupt.args == (signal.SIGTERM,):  # a terminal would have told every run, too
                run.terminate()
        for run in runs:
            run.wait()
        statuses = [INTERRUPTED] * len(runs)
    for name, output in zip(names, outputs, strict=True):
        if output is not None:
            output.seek(0)
            print(f"\nBeside them: {name}\n", flush=True)
            sys.stdout.buffer.write(output.read())
            sys.stdout.flush()
            output.close()
    _tell_times(took)
    return statuses


def _tell_times(took: dict[str, float]) -> None:
    times = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in took.items())
    print(f"\nSide by side: {times}", flush=True)
    for name, seconds in took.items():
        if seconds > BUDGET_S:
            print(f"{name} took {seconds - BUDGET_S:.0f} s too long (tests/README.md)", flush=True)


def start(
    failed: Sequence[Path], outputs: Sequence[IO[bytes] | None], *words: str
) -> list[subprocess.Popen[bytes]]:
    """All parts side by side, with these further words for pytest; each leaves what failed in its file."""
    shares = ports.shares(len(failed))
    return [
        _pytest(
            [*words, *part.words],
            failed=path,
            output=output,
            environment=ports.environment(share),
        )
        for part, path, output, share in zip(parts(), failed, outputs, shares, strict=True)
    ]


def _pytest(
    words: Sequence[str],
    *,
    failed: Path | None = None,
    output: IO[bytes] | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    remember = [] if failed is None else ["-p", second_try.__name__, second_try.OPTION, str(failed)]
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", *remember, *words],
        cwd=TESTS.parent,
        env={**os.environ, **(environment or {}), "PYTHONUNBUFFERED": "1"},
        stdout=output,
        stderr=subprocess.STDOUT if output else None,
        preexec_fn=_end_with_the_suite,
    )


def _end_with_the_suite() -> None:
    """A run whose suite was killed ends as by Ctrl-C (conftest.py): nobody would hear what it finds."""
    if _prctl is not None:
        _prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
