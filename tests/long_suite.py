"""`make test-long`: everything random, long or a matrix; as long as one asks for.

    make test-long [ONLY=faults,soak] [MINUTES=60] [RUNS=2000] [ROUNDS=20] [SEED=7] [PROCESSES=2]

The seed is drawn from the clock unless it is given, and printed first. Each part (`PARTS`) is one or more
commands; one line says what became of each, its output is kept in a folder of its own. PROCESSES (as many as
there are cores) share the simulated histories. At the end stands a table, and for each failure the one
command that does the same again. The exit status is 1 when any failed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from tests import forked, hunt, preflight, seeds
from tests.pairs import PAIRS

ROOT = Path(__file__).resolve().parents[1]
JUDGES = ("tests/cluster/test_fault_rounds.py", "tests/cluster/test_mirror_faults.py")
HDFS, YARN = "tests/spark/test_state_on_hdfs.py", "tests/spark/test_yarn.py"
OLDER_KAFKA = "tests/cluster/test_mirror_older_kafka.py"
TAIL_LINES = 25
SMALLEST_SHARE = 200
"""Histories of one process: its start is little beside so many, and all that befalls an audit is in them."""
FEW_FAILURES = "--maxfail=5"
"""One bad history in ten thousand keeps none of the others from being looked at; five say it all."""
COLUMNS = ("part", "runs", "faults", "records", "lost", "repeated", "seconds", "seed", "result")


@dataclass(frozen=True)
class Size:
    """How much of everything: None leaves it to the part."""

    seed: int
    minutes: float | None = None
    runs: int | None = None
    rounds: int | None = None
    processes: int = 1
    """At once, where a command can be divided."""

    def shares(self, runs: int) -> list[tuple[int, int]]:
        """`runs` seeds from `seed` on, divided among the processes: (first seed, how many), in order."""
        number = max(1, min(self.processes, runs // SMALLEST_SHARE))
        bounds = [runs * share // number for share in range(number + 1)]
        return [(self.seed + first, end - first) for first, end in itertools.pairwise(bounds)]


@dataclass(frozen=True)
class Command:
    """One process of a part, or several at once that do it together: `shares`, in the order of their seeds.
    `words` follow the interpreter, `environment` is set besides."""

    name: str
    words: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    seed: int | None = None
    shares: Sequence[Command] = ()

    def replay(self) -> str:
        """What does it again, from the project's folder."""
        settings = [f"{name}={value}" for name, value in self.environment.items()]
        words = [f"'{word}'" if " " in word or not word else word for word in self.words]
        return " ".join([*settings, ".venv/bin/python", *words])


@dataclass(frozen=True)
class Figures:
    """What a run's output tells of it; "" where it does not speak of that."""

    runs: str = ""
    faults: str = ""
    records: str = ""
    lost: str = ""
    repeated: str = ""


def added(each: Sequence[Figures]) -> Figures:
    """What several processes did together."""
    told = {one.name: [getattr(figures, one.name) for figures in each] for one in fields(Figures)}
    sums = {name: [int(figure) for figure in of if figure] for name, of in told.items()}
    return Figures(**{name: f"{sum(of)}" for name, of in sums.items() if of})


Commands = Callable[[Size], Iterator[Command]]
Reader = Callable[[str], Figures]


@dataclass(frozen=True)
class Part:
    name: str
    what: str
    commands: Commands
    figures: Reader
    usually: bool = True
    """Whether it belongs to a run that names no part."""


def _pytest(*words: str) -> list[str]:
    return ["-m", "pytest", "-q", *words]


def _matrix(_size: Size) -> Iterator[Command]:
    marks = "long and not unstable and not pairs"
    others = [f"--ignore={path}" for path in (*JUDGES, HDFS, YARN, OLDER_KAFKA)]
    yield Command("matrix", _pytest("tests", "-m", marks, *others))


def _pairs(_size: Size) -> Iterator[Command]:
    others = [f"--ignore={path}" for path in (*JUDGES, OLDER_KAFKA)]
    words = _pytest("-m", "pairs and not unstable", "tests/cluster", *others)
    yield Command("pairs", words, {"MILLRACE_PAIRS": "all"})


def _judges(_size: Size) -> Iterator[Command]:
    yield Command("judges", _pytest("-m", "long", *JUDGES))


def _faults(size: Size) -> Iterator[Command]:
    words = ["-m", "tests.cluster.faults", "--rounds", str(size.rounds or 20), "--seed", str(size.seed)]
    yield Command("faults", words, seed=size.seed)


def _mirror_faults(size: Size) -> Iterator[Command]:
    for pair in PAIRS:
        words = ["-m", "tests.cluster.mirror_faults", "--pair", pair, "--seed", str(size.seed)]
        yield Command(f"mirror-faults {pair}", [*words, "--events", str(size.runs or 30)], seed=size.seed)


def _soak(size: Size) -> Iterator[Command]:
    for pair in ("millrace-millrace", "kafka-kafka"):
        words = ["-m", "tests.cluster.mirror_faults", "--pair", pair, "--seed", str(size.seed)]
        yield Command(f"soak {pair}", [*words, "--minutes", f"{size.minutes or 60:g}"], seed=size.seed)


def _random(size: Size) -> Iterator[Command]:
    folders = ["tests/unit", "tests/properties", "tests/simulation"]
    for seed in range(size.seed, size.seed + (size.rounds or 5)):
        drawn = {seeds.VARIABLE: str(seed)}
        words = _pytest(
            *folders, f"--hypothesis-seed={seed}", "--random-order", f"--random-order-seed={seed}"
        )
        yield Command(f"random {seed}", words, drawn, seed)


def _shared(
    size: Size, name: str, words: list[str], runs_variable: str, seed_variable: str, *, histories: str = ""
) -> Command:
    """Histories whose number and whose first seed these variables say. `histories`: which tests they are (as
    for pytest's -k), where the others, which are the same whatever the seed, are for one process."""

    def some(name: str, words: list[str], seed: int, runs: int) -> Command:
        return Command(name, words, {runs_variable: str(runs), seed_variable: str(seed)}, seed)

    runs = size.runs or 2000
    rest = [*words, "-k", histories] if histories else words
    shares = [
        some(f"{name} from {first}", words if first == size.seed else rest, first, count)
        for first, count in size.shares(runs)
    ]
    whole = some(name, words, size.seed, runs)
    return replace(whole, shares=shares) if len(shares) > 1 else whole


def _histories(size: Size) -> Iterator[Command]:
    yield _shared(
        size,
        "histories of brokers",
        _pytest(FEW_FAILURES, "tests/simulation/test_cluster_histories.py"),
        "MILLRACE_SIMULATE_RUNS",
        "MILLRACE_SIMULATE_SEED",
        histories="every_history",
    )
    names = (
        *("mirror_delivery", "mirror_looks", "mirror_names", "mirror_small_batches", "mirror_transactions"),
        *("group_members", "zookeeper_consumer"),
    )
    mirrors = _pytest(FEW_FAILURES, *(f"tests/simulation/test_{name}.py" for name in names))
    yield _shared(size, "histories of mirrors and groups", mirrors, seeds.RUNS_VARIABLE, seeds.VARIABLE)
    audits = _pytest("-s", "tests/simulation/test_audit_mutations.py")
    yield _shared(size, "histories of audits", audits, "MILLRACE_AUDIT_RUNS", "MILLRACE_AUDIT_SEED_START")


def _end_to_end(size: Size) -> Iterator[Command]:
    drawn = {"MILLRACE_E2E_RUNS": str(size.runs or 20), "MILLRACE_E2E_SEED_START": str(size.seed)}
    words = _pytest("-s", "-m", "", "tests/spark/test_end_to_end.py")
    yield Command("end-to-end", words, drawn, size.seed)


def _fuzz(size: Size) -> Iterator[Command]:
    words = ["-m", "tests.fuzz", "--runs", str(size.runs or 1_000_000), "--seed", str(size.seed)]
    yield Command("fuzz", words, seed=size.seed)


def _hadoop(_size: Size) -> Iterator[Command]:
    yield Command("hdfs", _pytest("-m", "", HDFS))
    yield Command("yarn", _pytest("-m", "", YARN))


def _cluster(size: Size) -> Iterator[Command]:
    words = ["-m", "tests.proofs.real_cluster", "--records", "20k", "--seed", str(size.seed)]
    yield Command("cluster", words, seed=size.seed)


def _older_kafka(_size: Size) -> Iterator[Command]:
    yield Command("older-kafka", _pytest("-m", "", OLDER_KAFKA))


def _unstable(_size: Size) -> Iterator[Command]:
    yield Command("unstable", _pytest("-m", "unstable", "tests"))


def _hunt(size: Size) -> Iterator[Command]:
    words = ["-m", hunt.__name__, "--rounds", str(size.rounds or 20), "--seed", str(size.seed)]
    yield Command("hunt", words, {forked.VARIABLE: "as in the gate"}, size.seed)


def _first(pattern: str, said: str) -> str:
    found = re.search(pattern, said, re.M)
    return found.group(1) if found else ""


def tests_run(said: str) -> Figures:
    """pytest's closing line."""
    return Figures(runs=_first(r"^=*\s*(?:\d+ failed, )?(\d+) passed", said))


def histories_run(said: str) -> Figures:
    """The line of `tests/simulation/conftest.py`."""
    return Figures(runs=_first(r"^(\d+) histories: ", said))


def faults_run(said: str) -> Figures:
    """The broker's fault run: rounds, faults in its timeline, records at its end."""
    acknowledged = re.findall(r"(\d+) acknowledged,", said)
    broken = _first(r"(\d+) promises broken", said)
    return Figures(
        runs=_first(r"^(\d+) rounds of seed", said),
        faults=_first(r"^\d+ rounds of seed \d+, (\d+) faults", said),
        records=acknowledged[-1] if acknowledged else "",
        lost=broken or "0",
        repeated=broken or "0",
    )


def mirror_faults_run(said: str) -> Figures:
    """The table of `tests/cluster/mirror_faults/summary.py`."""
    return Figures(
        runs=_first(r"^events +\d+ in (\d+) rounds", said),
        faults=_first(r"^events +(\d+) in", said),
        records=_first(r"^records in the aggregate +(\d+)", said),
        lost=_first(r"^lost +(\d+)", said),
        repeated=_first(r"^duplicated +(\d+)", said),
    )


def fuzz_run(said: str) -> Figures:
    return Figures(runs=_first(r"^([\d,]+) frames read", said))


def hunt_run(said: str) -> Figures:
    return Figures(runs=_first(r"^(\d+) rounds", said))


PARTS = (
    Part("matrix", "every codec, client, server and size that the gate leaves out", _matrix, tests_run),
    Part("pairs", "the mirror's scenarios in all four pairs", _pairs, tests_run),
    Part("histories", "simulated brokers, mirrors and audits: RUNS of each kind", _histories, histories_run),
    Part("random", "tests that draw their input: ROUNDS seeds, in random order", _random, tests_run),
    Part("end-to-end", "whole audits on Spark whose truth is known: RUNS", _end_to_end, tests_run),
    Part("faults", "three brokers through ROUNDS of kills, pauses, cuts, full disks", _faults, faults_run),
    Part(
        "mirror-faults",
        "the same for two workers, in all pairs: RUNS events",
        _mirror_faults,
        mirror_faults_run,
    ),
    Part("judges", "the fault runs' own judges, by mirrors that do harm", _judges, tests_run),
    Part("fuzz", "RUNS random and mutated frames at a broker", _fuzz, fuzz_run),
    Part("hadoop", "the audit's state on a real HDFS, and its run on a real YARN", _hadoop, tests_run),
    Part(
        "cluster", "audits on Spark's servers and HDFS apart, which are killed in turn", _cluster, tests_run
    ),
    Part("older-kafka", "from and to an Apache Kafka of before topic ids", _older_kafka, tests_run),
    Part("unstable", "tests that are red now and then (tests/README.md)", _unstable, tests_run),
    Part("soak", "mirror-faults for MINUTES", _soak, mirror_faults_run, usually=False),
    Part(
        "hunt", "the gate ROUNDS times beside two busy loops, in random order", _hunt, hunt_run, usually=False
    ),
)
NO_TESTS = 5
"""pytest's own status: nothing has the mark that was asked for."""


@dataclass(frozen=True)
class Result:
    """Of one process, or of the `shares` of a command, which then are all there is to tell."""

    command: Command
    part: Part
    status: int
    seconds: float
    said: str
    output: Path
    shares: Sequence[Result] = ()

    @property
    def passed(self) -> bool:
        return self.status == 0 or (self.status == NO_TESTS and self.part.name == "unstable")

    def failure(self) -> Result:
        """What to show and to do again when it has failed: the first share that has, by its seeds."""
        return next((share for share in self.shares if not share.passed), self)

    def row(self) -> tuple[str, ...]:
        """As `COLUMNS`."""
        figures = self.part.figures(self.said)
        if self.shares:
            figures = added([self.part.figures(share.said) for share in self.shares])
        seed = "" if self.command.seed is None else str(self.command.seed)
        told = (figures.runs, figures.faults, figures.records, figures.lost, figures.repeated)
        result = "passed" if self.passed else "FAILED"
        return (self.command.name, *told, f"{self.seconds:.0f}", seed, result)


def carry_out(part: Part, command: Command, folder: Path) -> Result:
    """Run it; the output of each of its processes is in a file of the folder."""
    begun = time.monotonic()
    commands = command.shares or [command]
    outputs = [folder / f"{one.name.replace(' ', '-')}.log" for one in commands]
    processes = [_start(one, output) for one, output in zip(commands, outputs, strict=True)]
    try:
        statuses = [process.wait() for process in processes]
    except KeyboardInterrupt:  # the terminal has told them, too
        for process in processes:
            process.wait()
        raise
    seconds = time.monotonic() - begun
    results = [
        Result(one, part, status, seconds, output.read_text(errors="replace"), output)
        for one, status, output in zip(commands, statuses, outputs, strict=True)
    ]
    if not command.shares:
        return results[0]
    status = next((share.status for share in results if not share.passed), 0)
    return Result(command, part, status, seconds, "", folder, results)


def _start(command: Command, output: Path) -> subprocess.Popen[bytes]:
    with output.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, *command.words],
            cwd=ROOT,
            env={
                forked.VARIABLE: forked.WHOLE,
                **os.environ,
                **command.environment,
                "PYTHONUNBUFFERED": "1",
            },
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they must be."""
    widths = [max(len(row[column]) for row in (COLUMNS, *rows)) for column in range(len(COLUMNS))]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in (COLUMNS, *rows)
    )
    return "\n".join(line.rstrip() for line in lines)


def chosen(only: str) -> list[Part]:
    """The parts with these names, or all that usually run. Raises ValueError for a name that is none."""
    names = [name for name in only.split(",") if name]
    known = {part.name: part for part in PARTS}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no such part: {', '.join(unknown)}; the parts are {', '.join(known)}")
    return [known[name] for name in names] or [part for part in PARTS if part.usually]


def main() -> int:
    parser = argparse.ArgumentParser(prog="make test-long", description=__doc__)
    parser.add_argument("--only", default="", help=", ".join(part.name for part in PARTS))
    parser.add_argument("--minutes", type=float, default=None)
    parser.add_argument("--runs", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--seed", type=int, default=None, help="from the clock when not given")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="for simulated histories")
    options = parser.parse_args()
    if obstacles := preflight.obstacles():
        print(*(f"millrace: {line}" for line in obstacles), sep="\n", file=sys.stderr)
        return 2
    try:
        parts = chosen(options.only)
    except ValueError as error:
        print(f"millrace: {error}", file=sys.stderr)
        return 2
    seed = time.time_ns() // 1_000_000 % 10**6 if options.seed is None else options.seed
    size = Size(seed, options.minutes, options.runs, options.rounds, options.processes)
    folder = Path(tempfile.mkdtemp(prefix="millrace-long-"))
    print(f"seed {seed}; outputs are in {folder}", flush=True)
    results: list[Result] = []
    try:
        for part in parts:
            print(f"{part.name}: {part.what}", flush=True)
            for command in part.commands(size):
                result = carry_out(part, command, folder)
                results.append(result)
                print(
                    f"  {command.name}: {'passed' if result.passed else 'FAILED'} in {result.seconds:.0f} s",
                    flush=True,
                )
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    print("", table([result.row() for result in results]), sep="\n", flush=True)
    failed = [result for result in results if not result.passed]
    for result in (each.failure() for each in failed):
        print(f"\n{result.command.name} failed, all of it in {result.output}:")
        print(*result.said.splitlines()[-TAIL_LINES:], sep="\n")
        print(f"again: {result.command.replay()}", flush=True)
    return 1 if failed or len(results) == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
