"""`make test-long ONLY=hunt ROUNDS=20`: the gate's tests again and again, on a machine that is busy besides
and in random order, to find those whose outcome depends on luck.

    python -m tests.hunt [--rounds 20] [--seed 7]

Beside each round two loops keep both cores busy. Modules and the tests in them are shuffled by the round's
seed. At the end every test that was ever red is listed with how often and by which first lines; the exit
status is 1 when there is one. `tests/README.md` says what to do with it.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests import second_try, suite

LOOPS = 2
BUSY = "while True: pass"


@contextmanager
def busy_machine() -> Iterator[None]:
    """Two processes that compute and do nothing else, ended by their process ids."""
    loops = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(LOOPS)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def one_round(seed: int) -> list[second_try.Failure]:
    """What failed. Raises RuntimeError when a run of pytest did not come to its end."""
    with tempfile.TemporaryDirectory(prefix="millrace-hunt-") as folder, busy_machine():
        failed = [Path(folder, part.name) for part in suite.parts()]
        outputs = [path.with_suffix(".out").open("w+b") for path in failed]
        runs = suite.start(failed, outputs, "-q", "--random-order", f"--random-order-seed={seed}")
        statuses = [run.wait() for run in runs]
        failures = [failure for path in failed for failure in second_try.read(path)]
        for status, output in zip(statuses, outputs, strict=True):
            output.seek(0)
            said = output.read().decode(errors="replace")
            output.close()
            if status:
                print(said, flush=True)
            if status not in (0, suite.TESTS_FAILED):
                raise RuntimeError(f"seed {seed}: a run of pytest ended with {status}")
    return failures


def report(rounds: Sequence[Sequence[second_try.Failure]]) -> str:
    """Every test that was ever red, the most frequent first."""
    texts: dict[str, list[str]] = defaultdict(list)
    for failures in rounds:
        for failure in failures:
            texts[failure.test].append(failure.text)
    lines = [f"{len(rounds)} rounds, {len(texts)} tests were red in one or more"]
    for test, seen in sorted(texts.items(), key=lambda item: (-len(item[1]), item[0])):
        lines += [
            f"  {len(seen)} of {len(rounds)}: {test}",
            *(f"      {text}" for text in dict.fromkeys(seen)),
        ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hunt", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    first = random.randrange(10**6) if options.seed is None else options.seed
    print(f"seed {first}", flush=True)
    rounds = []
    for seed in range(first, first + options.rounds):
        begun = time.monotonic()
        rounds.append(one_round(seed))
        names = "".join(f"\n  {failure}" for failure in rounds[-1])
        print(f"seed {seed}: {time.monotonic() - begun:.0f} s, {len(rounds[-1])} red{names}", flush=True)
    print(report(rounds), flush=True)
    return 1 if any(rounds) else 0


if __name__ == "__main__":
    sys.exit(main())
