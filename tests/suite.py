"""`make test`: every test, those of running clusters beside all others, and a second try for what was late.

    python -m tests.suite

The first (`tests/cluster`) mostly wait for elections, sessions, restarts; the others mostly want a processor.
Two runs of pytest side by side take less time than one; the second steps back (nice), so that a server under
test has the processor when it wants it. What it prints comes in one piece after the first's output; what is
returned is not 0 when either failed.

A machine that stands still misses deadlines. So the few tests that were late (`tests/second_try.py`) are run
once more, alone, when all is over; what is late twice has failed, and what was wrong has failed at once. What
needed a second try is printed last: it is a flaw all the same, in the product or in the test.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from tests import second_try

TESTS = Path(__file__).resolve().parent
WAITING = "cluster"
NICE = 10
INTERRUPTED = 130
TESTS_FAILED = 1
"""pytest's own status: it ran to its end, and some failed."""


def main() -> int:
    others = _others()
    with tempfile.TemporaryDirectory(prefix="millrace-suite-") as folder:
        failed = [Path(folder, name) for name in ("waiting", "others")]
        statuses = _both(others, failed)
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
        names = [failure.test for failure in failures]
        print("\nOnce more, alone:", *names, sep="\n  ", flush=True)
        status = _pytest(names).wait()
        if status == 0:
            print("\nPassed only at the second try:", *names, sep="\n  ", flush=True)
        return status


def _both(others: Sequence[str], failed: Sequence[Path]) -> list[int]:
    """Exit statuses of the two runs; each leaves what failed in its file."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as printed:
        beside = _pytest([f"tests/{each}" for each in others], failed=failed[1], nice=NICE, output=printed)
        first = _pytest([f"tests/{WAITING}"], failed=failed[0])
        try:
            statuses = [first.wait(), beside.wait()]
        except KeyboardInterrupt:  # the terminal has told both runs, too
            for run in (first, beside):
                run.wait()
            statuses = [INTERRUPTED, INTERRUPTED]
        printed.seek(0)
        print(f"\nBeside {WAITING}: {', '.join(others)}\n\n{printed.read()}", flush=True)
    return statuses


def _others() -> list[str]:
    """Every other folder that has tests."""
    folders = {path.relative_to(TESTS).parts[0] for path in TESTS.glob("*/**/test_*.py")}
    return sorted(folders - {WAITING})


def _pytest(
    tests: Sequence[str], *, failed: Path | None = None, nice: int = 0, output: IO[str] | None = None
) -> subprocess.Popen[bytes]:
    remember = [] if failed is None else ["-p", second_try.__name__, second_try.OPTION, str(failed)]
    return subprocess.Popen(
        ["nice", "-n", str(nice), sys.executable, "-m", "pytest", *remember, *tests],
        cwd=TESTS.parent,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=output,
        stderr=subprocess.STDOUT if output else None,
    )


if __name__ == "__main__":
    sys.exit(main())
