"""The list of `make test-mutants` is held to the source, and what counts as red there to its word."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutants.__main__ import BROKEN, RED, SURVIVED, chosen, judge
from tests.mutants.catalogue import MUTANTS
from tests.mutants.mutant import Mutant
from tests.mutants.trial import Ran, Trial
from tests.mutants.witness import PARTS

PROJECT = Path(__file__).resolve().parents[2]
MUTANT = Mutant("gone", "Two is two.", "broker/two.py", "TWO = 2", "TWO = 3", ("tests/test_two.py",))
TESTS = """
from millrace.broker.two import TWO
def test_two(): assert TWO == 2
def test_fine(): pass
def test_twice_two(): assert TWO + TWO == 4
"""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_fits_the_source(mutant: Mutant) -> None:
    assert mutant.staleness(PROJECT) == ""
    compile(mutant.applied_to((PROJECT / mutant.file).read_text()), mutant.file, "exec")


def test_cases_that_mutants_name_are_collected() -> None:
    """A file tells which tests it has; which cases they have, only pytest."""
    cases = sorted({test for mutant in MUTANTS for test in mutant.red if "[" in test})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *cases]
    collected = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert collected.returncode == 0, collected.stdout + collected.stderr


def test_names_are_given_once_and_unknown_ones_are_refused() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)
    assert [mutant.name for mutant in chosen(f"{names[3]},{names[1]}")] == [names[1], names[3]]
    with pytest.raises(ValueError, match="there is no mutant nobody"):
        chosen(f"{names[0]},nobody")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A product of one rule, and its tests."""
    for part in PARTS:
        (tmp_path / "project" / part).mkdir(parents=True)
        (tmp_path / "project" / part / "__init__.py").touch()
    made = tmp_path / "project"
    (made / "broker" / "two.py").write_text("TWO = 2\n")
    (made / "tests").mkdir()
    (made / "tests" / "test_two.py").write_text(TESTS)
    (made / "tests" / "mutants").symlink_to(PROJECT / "tests" / "mutants")
    (made / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    return made


def test_stale_mutant_says_why(project: Path) -> None:
    assert MUTANT.staleness(project) == ""
    assert "stands 0 times" in replace(MUTANT, rule="TWO = 22").staleness(project)
    assert "stands 3 times" in replace(MUTANT, rule="def ", file="tests/test_two.py").staleness(project)
    assert "there is no broker/three.py" in replace(MUTANT, file="broker/three.py").staleness(project)
    for gone in ("tests/test_three.py", "tests/test_two.py::test_three[case]"):
        assert f"there is no test {gone}" in replace(MUTANT, red=(gone,)).staleness(project)


@pytest.mark.long
def test_only_an_assertion_is_red_and_the_copy_is_as_before(project: Path, tmp_path: Path) -> None:
    trial = Trial(project, tmp_path / "trial")
    unmutated = trial.run(["tests/test_two.py"])
    assert (unmutated.problem, unmutated.failed) == ("", {}), unmutated.printed
    assert judge(MUTANT, unmutated, 0.0).word == SURVIVED
    cases = {"TWO = 3": (RED, "test_two.py::test_two"), "TWO = two": (BROKEN, "status 2")}
    for instead, (word, said) in cases.items():
        mutant = replace(MUTANT, instead=instead)
        verdict = judge(mutant, trial.run_with(mutant), 0.0)
        assert (verdict.word, said in verdict.said) == (word, True), verdict
        assert "twice_two" not in verdict.said, "one that is red is enough"
    assert judge(MUTANT, Ran("", {"test_two": "OSError: no room"}), 0.0).word == BROKEN
    assert "longer than 0 s" in trial.run(["tests/test_two.py"], 0.001).problem
    original, copied = (folder / "broker" / "two.py" for folder in (project, trial.copy))
    assert original.read_text() == copied.read_text() == "TWO = 2\n"
    assert original.stat().st_mtime_ns == copied.stat().st_mtime_ns


def test_another_product_than_the_copy_is_refused(project: Path, tmp_path: Path) -> None:
    trial = Trial(project, tmp_path / "trial")
    (trial.copy / "millrace" / "mirror").unlink()
    ran = trial.run(["tests/test_two.py"])
    assert "status 4" in ran.problem
    assert "millrace.mirror is" in ran.printed
