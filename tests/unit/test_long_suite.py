"""The long suite's parts, its table, and the command that does a failed part again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import hunt, long_suite
from tests.long_suite import COLUMNS, PARTS, Command, Figures, Result, Size
from tests.second_try import Failure

PROJECT = Path(__file__).resolve().parents[2]
SIZE = Size(seed=7)


def test_parts_are_chosen_by_name_and_two_only_when_they_are_named() -> None:
    usual = {part.name for part in long_suite.chosen("")}
    assert {part.name for part in PARTS} - usual == {"soak", "hunt"}
    assert [part.name for part in long_suite.chosen("soak,fuzz")] == ["soak", "fuzz"]
    with pytest.raises(ValueError, match="no such part: sok; the parts are matrix, "):
        long_suite.chosen("fuzz,sok")


def test_a_wrong_part_is_one_line_and_starts_nothing() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.long_suite", "--only", "sok"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 2
    assert ran.stderr.startswith("millrace: no such part: sok") and ran.stderr.count("\n") == 1


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_every_part_names_files_and_modules_that_are_there(part: long_suite.Part) -> None:
    commands = list(part.commands(SIZE))
    assert commands and len({command.name for command in commands}) == len(commands)
    for command in commands:
        for word in command.words:
            path = word.removeprefix("--ignore=")
            if path.startswith("tests/"):
                assert (PROJECT / path).exists(), path
        module = command.words[1]
        if module != "pytest":
            path = PROJECT / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def test_what_draws_is_told_the_seed() -> None:
    for part in PARTS:
        for command in part.commands(SIZE):
            if command.seed is not None:
                assert str(command.seed) in {*command.words, *command.environment.values()}, command.name


@pytest.mark.parametrize("runs", [1, 150, 401, 2000, 10_000])
def test_histories_are_shared_among_the_processes_each_seed_once(runs: int) -> None:
    part = next(part for part in PARTS if part.name == "histories")
    for command in part.commands(Size(seed=7, runs=runs, processes=3)):
        # The number of histories, then the first seed.
        asked = [[*map(int, one.environment.values())] for one in command.shares or [command]]
        assert len(asked) == {1: 1, 150: 1, 401: 2}.get(runs, 3)
        shares = [(first, count) for count, first in asked]
        assert [seed for first, count in shares for seed in range(first, first + count)] == [
            *range(7, 7 + runs)
        ]
        assert min(count for _, count in shares) >= min(runs, long_suite.SMALLEST_SHARE)


def test_brokers_without_a_rule_are_for_the_first_process_alone() -> None:
    part = next(part for part in PARTS if part.name == "histories")
    brokers, *_ = part.commands(Size(seed=7, runs=2000, processes=3))
    first, *others = brokers.shares
    assert first.words == brokers.words and len(others) == 2
    assert all(other.words == [*brokers.words, "-k", "every_history"] for other in others)


def test_processes_of_one_command_are_one_row_and_the_first_that_failed_is_told(tmp_path: Path) -> None:
    part = next(part for part in PARTS if part.name == "histories")

    def share(first: int, status: int) -> Command:
        work = f"import sys; print('{first}00 histories: brokers {first}00'); sys.exit({status})"
        return Command(f"x from {first}", ["-c", work], {"FIRST": str(first)}, first)

    held = Command("x", [], seed=1, shares=[share(1, 0), share(2, 0)])
    passed = long_suite.carry_out(part, held, tmp_path)
    assert passed.passed
    assert passed.row()[:2] == ("x", "300") and passed.row()[-2:] == ("1", "passed")
    broken = Command("x", [], seed=1, shares=[share(1, 0), share(2, 1), share(3, 1)])
    failed = long_suite.carry_out(part, broken, tmp_path)
    assert not failed.passed and failed.row()[1] == "600" and failed.row()[-1] == "FAILED"
    assert failed.failure().command.replay().startswith("FIRST=2 .venv/bin/python -c")
    assert failed.failure().said == "200 histories: brokers 200\n"
    assert failed.failure().output.read_text() == failed.failure().said


def test_a_command_is_replayed_by_what_a_shell_takes() -> None:
    command = Command("x", ["-m", "pytest", "-m", "long and not pairs", "-m", ""], {"A": "1"})
    assert command.replay() == "A=1 .venv/bin/python -m pytest -m 'long and not pairs' -m ''"


def test_figures_are_read_from_what_the_runs_print() -> None:
    faults = "12.0 the cluster is up: 5 acknowledged, 0 given up\n77 acknowledged, 1 given up\n"
    faults += "20 rounds of seed 7, 55 faults: every promise was kept (60 s)\n"
    assert long_suite.faults_run(faults) == Figures("20", "55", "77", "0", "0")
    mirrors = "events                 30 in 11 rounds\n  cut   3\nrecords in the aggregate     4711\n"
    mirrors += "lost      0\nduplicated      2\n"
    assert long_suite.mirror_faults_run(mirrors) == Figures("11", "30", "4711", "0", "2")
    assert long_suite.tests_run("== 3 failed, 897 passed, 2 warnings in 1 s ==").runs == "897"
    assert long_suite.tests_run("11 passed in 26.13s").runs == "11"
    told = "12 passed in 3 s\n600 histories: lanes 500, names 100\n"
    assert long_suite.histories_run(told).runs == "600"
    assert long_suite.fuzz_run("1,000,032 frames read, 0 failures, seed 1").runs == "1,000,032"


def test_the_table_has_a_row_a_run_under_its_columns() -> None:
    part = next(part for part in PARTS if part.name == "fuzz")
    command = Command("fuzz", ["-m", "tests.fuzz"], seed=7)
    passed = Result(command, part, 0, 61.4, "30,000 frames read, 0 failures", Path("x"))
    assert passed.row() == ("fuzz", "30,000", "", "", "", "", "61", "7", "passed")
    broken = Result(command, part, 1, 2.0, "", Path("x"))
    lines = long_suite.table([passed.row(), broken.row()]).splitlines()
    assert lines[0].split() == list(COLUMNS)
    assert lines[1].endswith("passed") and lines[2].endswith("FAILED")


def test_the_hunt_lists_every_test_that_was_ever_red_the_most_frequent_first() -> None:
    late = Failure("tests/cluster/test_x.py::test_late", False, "not within 60 s")
    other = Failure("tests/wire/test_y.py::test_other", False, "assert 1 == 2")
    said = hunt.report([[late], [], [other, late]])
    assert said.splitlines() == [
        "3 rounds, 2 tests were red in one or more",
        "  2 of 3: tests/cluster/test_x.py::test_late",
        "      not within 60 s",
        "  1 of 3: tests/wire/test_y.py::test_other",
        "      assert 1 == 2",
    ]


@pytest.mark.parametrize(("asked", "servers"), [(None, "millrace,kafka"), ("kafka", "kafka")])
def test_foreign_clients_are_tried_on_both_servers_unless_one_is_asked_for(
    asked: str | None, servers: str
) -> None:
    """The recipe of `make test-wire`, as a shell reads it; it once asked for the first of the two alone."""
    recipe = next(
        line.strip()
        for line in (PROJECT / "Makefile").read_text().splitlines()
        if line.startswith("\t") and "pytest tests/wire" in line
    )
    setting, _, _ = recipe.partition(" ")
    environment = {} if asked is None else {"MILLRACE_WIRE_SERVERS": asked}
    told = subprocess.run(
        ["sh", "-c", setting.replace("$$", "$") + "; echo $MILLRACE_WIRE_SERVERS"],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    assert told.stdout == f"{servers}\n"
