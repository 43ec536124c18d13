"""`make test-mutants`: a product without one of its rules turns the tests red.

    python -m tests.mutants [--only name,name] [--list]

The rules that protect data are taken out one at a time, in a copy of the source; for each the script tells
which test of the normal suite is red without it. First the same tests must be green. Ends with 1 where a
mutant survived, no longer fits the source, or failed otherwise than by an assertion; with 2 where nothing can
be shown (tests that are red as it is, a name that is not known).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.catalogue import MUTANTS
from tests.mutants.mutant import Mutant
from tests.mutants.trial import Ran, Trial

PROJECT = Path(__file__).resolve().parents[2]
RED, SURVIVED, STALE, BROKEN = "red", "SURVIVED", "STALE", "BROKEN"
UNMUTATED_LIMIT_S = 900
NOTHING_SHOWN = 2


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a mutant: one of the four words, what to say beside it, and how long it took."""

    mutant: Mutant
    word: str
    said: str
    seconds: float = 0.0


def judge(mutant: Mutant, ran: Ran, seconds: float) -> Verdict:
    if ran.problem:
        return Verdict(mutant, BROKEN, ran.problem, seconds)
    if ran.red:
        return Verdict(mutant, RED, ", ".join(short(test) for test in ran.red), seconds)
    if ran.failed:
        test, problem = next(iter(ran.failed.items()))
        return Verdict(mutant, BROKEN, f"{short(test)} fails by no assertion: {problem}", seconds)
    return Verdict(mutant, SURVIVED, "none of " + ", ".join(mutant.red), seconds)


def short(test: str) -> str:
    """A node id without its folders."""
    file, _, name = test.partition("::")
    return f"{Path(file).name}::{name}"


def try_out(mutants: list[Mutant]) -> list[Verdict] | None:
    """A verdict for each; None where the tests are red without any mutant."""
    stale = {mutant.name: reason for mutant in mutants if (reason := mutant.staleness(PROJECT))}
    verdicts = [Verdict(mutant, STALE, stale[mutant.name]) for mutant in mutants if mutant.name in stale]
    for verdict in verdicts:
        tell(verdict)
    fitting = [mutant for mutant in mutants if mutant.name not in stale]
    if not fitting:
        return verdicts
    with tempfile.TemporaryDirectory(prefix="millrace-mutants-") as folder:
        trial = Trial(PROJECT, Path(folder))
        tests = list(dict.fromkeys(test for mutant in fitting for test in mutant.red))
        print(f"{len(fitting)} mutants; first their tests without any", flush=True)
        ran = trial.run(tests, UNMUTATED_LIMIT_S)
        if ran.problem or ran.failed:
            print(ran.printed, ran.problem or f"red without any mutant: {', '.join(ran.failed)}", sep="\n")
            return None
        for mutant in fitting:
            since = time.monotonic()
            verdicts.append(judge(mutant, trial.run_with(mutant), time.monotonic() - since))
            tell(verdicts[-1])
    return verdicts


def tell(verdict: Verdict) -> None:
    print(f"{verdict.word:8} {verdict.mutant.name} ({verdict.seconds:.0f} s): {verdict.said}", flush=True)


def table(verdicts: list[Verdict]) -> str:
    width = max(len(verdict.mutant.name) for verdict in verdicts)
    return "\n".join(
        f"{verdict.mutant.name:{width}}  {verdict.word:8}  {verdict.mutant.promise}" for verdict in verdicts
    )


def chosen(only: str) -> list[Mutant]:
    """The mutants of these names, all for "". Raises ValueError for a name that is not known."""
    names = [name for name in only.split(",") if name]
    unknown = set(names) - {mutant.name for mutant in MUTANTS}
    if unknown:
        raise ValueError(f"there is no mutant {', '.join(sorted(unknown))}; --list shows all")
    return [mutant for mutant in MUTANTS if not names or mutant.name in names]


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", metavar="NAME,NAME", help="these alone")
    parser.add_argument("--list", action="store_true", help="show names, promises and tests, run nothing")
    arguments = parser.parse_args()
    try:
        mutants = chosen(arguments.only)
    except ValueError as error:
        print(error, file=sys.stderr)
        return NOTHING_SHOWN
    if arguments.list:
        for mutant in mutants:
            print(f"{mutant.name}: {mutant.promise}", f"{mutant.file}", *mutant.red, sep="\n    ")
        return 0
    verdicts = try_out(mutants)
    if verdicts is None:
        return NOTHING_SHOWN
    red = sum(verdict.word == RED for verdict in verdicts)
    print(f"\n{table(verdicts)}\n\n{red} of {len(verdicts)} mutants turn a test red")
    return 0 if red == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
