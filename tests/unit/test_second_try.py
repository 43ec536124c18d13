"""What gets a second try in `make test`, and what a run of pytest writes down for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import second_try
from tests.second_try import MOST, Failure
from tests.suite import INTERRUPTED
from tests.waiting import patience, until

PROJECT = Path(__file__).resolve().parents[2]

WRITTEN = """
import pytest

def test_fine(): pass
def test_wrong(): assert 1 == 2, "the broker does not answer"
def test_error(): raise OSError("not within reach\\nand more")

@pytest.mark.safety
def test_lost(): assert False, "a record is lost"

@pytest.fixture
def ends_badly():
    yield
    raise OSError("the server does not stop")

def test_whose_end_fails(ends_badly): pass
def test_wrong_whose_end_fails_too(ends_badly): raise TimeoutError("not in 60 s")

@pytest.mark.parametrize("size", [1, 2])
def test_one_case(size): assert size == 1
"""


def failed(test: str = "tests/cluster/test_x.py::test_y", *, is_safety: bool = False) -> Failure:
    return Failure(test, is_safety, "AssertionError")


def test_few_failures_are_tried_again():
    assert second_try.refusal([failed()]) is None
    assert second_try.refusal([failed()] * MOST) is None


@pytest.mark.parametrize(
    ("failures", "why"),
    [
        ([], "not known"),
        (
            [failed(), failed("tests/cluster/test_z.py::test_y", is_safety=True)],
            "test_z.py::test_y guards data",
        ),
        ([failed()] * (MOST + 1), "more than"),
    ],
)
def test_everything_else_stands(failures, why):
    assert why in (second_try.refusal(failures) or "")


def test_a_run_writes_down_what_failed_first_and_what_guards_data(tmp_path):
    (tmp_path / "test_written.py").write_text(WRITTEN)
    written = tmp_path / "failed"
    words = [sys.executable, "-m", "pytest", "-q", "-p", second_try.__name__, second_try.OPTION, str(written)]
    ran = subprocess.run(
        [*words, "--rootdir", str(tmp_path), "-p", "no:cacheprovider", str(tmp_path)],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    assert ran.returncode == 1, ran.stdout + ran.stderr
    found = {each.test.partition("::")[2]: (each.is_safety, each.text) for each in second_try.read(written)}
    assert found == {
        "test_wrong": (False, "AssertionError: the broker does not answer"),
        "test_error": (False, "OSError: not within reach"),
        "test_lost": (True, "AssertionError: a record is lost"),
        "test_whose_end_fails": (False, "OSError: the server does not stop"),
        "test_wrong_whose_end_fails_too": (False, "TimeoutError: not in 60 s"),
        "test_one_case[2]": (False, "AssertionError: assert 2 == 1"),
    }


def test_a_run_that_wrote_nothing_is_not_forgiven(tmp_path):
    assert second_try.read(tmp_path / "none") == []
    assert second_try.refusal(second_try.read(tmp_path / "none")) is not None
    cut = tmp_path / "cut"
    cut.write_text("[{")
    assert second_try.read(cut) == [], "it was ended while it wrote"


FIRST_TIME_ONLY = """
from pathlib import Path
import pytest

{mark}
def test_late():
    tried = Path(__file__).with_suffix(".tried")
    again = tried.exists()
    tried.touch()
    assert again, "a record is late"

def test_fine(): pass
"""
WRONG_ONCE = FIRST_TIME_ONLY.format(mark="")
LOST_ONCE = FIRST_TIME_ONLY.format(mark="@pytest.mark.safety")
WRONG_TWICE = "def test_late(): raise TimeoutError"
DIES = "def test_dies(): import os; os._exit(1)"
ONE = "  tests/wire/test_x.py::test_late: AssertionError: a record is late\n"


@pytest.mark.parametrize(
    ("written", "status", "said", "listed"),
    [
        (WRONG_ONCE, 0, f"Passed only at the second try (unsteady.txt):\n{ONE}", "test_late: Assertion"),
        pytest.param(
            *(WRONG_TWICE, 1, "Once more, alone:\n  tests/wire/test_x.py::test_late: Timeout", "Timeout"),
            marks=pytest.mark.long,
        ),
        (LOST_ONCE, 1, "No second try: tests/wire/test_x.py::test_late guards data\n", None),
        pytest.param(
            *("import nothing_like_this", 2, "No second try: a run did not come to its end\n", None),
            marks=pytest.mark.long,
        ),
        pytest.param(*(DIES, 1, "No second try: it is not known", None), marks=pytest.mark.long),
    ],
    ids=["wrong once", "wrong twice", "lost once", "not importable", "dies"],
)
def test_the_suite_passes_with_a_test_that_failed_once_and_lists_it(tmp_path, written, status, said, listed):
    ran = suite_of(tmp_path, written)
    out, _ = ran.communicate(timeout=patience(120))
    assert ran.returncode == status, out
    assert said in out
    unsteady = tmp_path / "tests" / "unsteady.txt"
    assert (listed in unsteady.read_text()) if listed else not unsteady.exists()


LASTS = """
import os, time

def test_lasts():
    with open("{pids}", "a") as pids:
        pids.write(f"{{os.getpid()}}\\n")
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [pytest.param(signal.SIGKILL, marks=pytest.mark.long), signal.SIGTERM])
def test_the_runs_of_a_suite_that_is_ended_end_with_it(tmp_path, number):
    """And where it can, it shows what they have said so far."""
    pids = tmp_path / "pids"
    ran = suite_of(tmp_path, LASTS.format(pids=pids))
    until(lambda: pids.exists() and pids.read_text().endswith("\n"), "the test is under way")
    ran.send_signal(number)
    out, _ = ran.communicate(timeout=patience(120))
    until(lambda: not Path(f"/proc/{int(pids.read_text())}").exists(), "its run has ended")
    if number == signal.SIGTERM:
        assert ran.returncode == INTERRUPTED and "Beside them: all others" in out, out


def suite_of(folder: Path, written: str) -> subprocess.Popen[str]:
    """A run of the suite with this for one test, and a sound one in every other part."""
    tests = folder / "tests"
    for name in ("wire", "cluster", "spark", "unit/mirror"):
        (tests / name).mkdir(parents=True)
    for name in ("suite.py", "second_try.py", "preflight.py", "ports.py"):
        (tests / name).write_bytes((PROJECT / "tests" / name).read_bytes())
    (folder / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\naddopts = "--import-mode=importlib"\nmarkers = ["safety: guards data"]'
    )
    sound = ("cluster/test_a.py", "cluster/test_mirror_a.py", "spark/test_a.py", "unit/test_a.py")
    for name in (*sound, "unit/mirror/test_a.py"):
        (tests / name).write_text("def test_fine(): pass")
    (tests / "wire" / "test_x.py").write_text(written)
    return subprocess.Popen(
        [sys.executable, "-m", "tests.suite"],
        cwd=folder,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
