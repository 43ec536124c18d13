"""What gets a second try in `make test`, and what a run of pytest writes down for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import second_try
from tests.second_try import MOST, Failure
from tests.waiting import patience

PROJECT = Path(__file__).resolve().parents[2]

WRITTEN = """
import subprocess, time
import pytest
from tests.waiting import DeadlinePassed

def test_fine(): pass
def test_wrong(): assert 1 == 2, "a record is lost"
def test_wrong_error(): raise OSError("not within reach")
def test_said_late(): raise DeadlinePassed("the cluster is not whole")
def test_timeout(): raise TimeoutError
def test_process(): subprocess.run(["sleep", "9"], timeout=0.01)

def wait(deadline):
    assert time.monotonic() < deadline, "the broker does not hear of it"

def test_deadline(): wait(0.0)
def test_complaint(): assert False, "not within 30 s: all brokers are there"

@pytest.fixture
def ends_badly():
    yield
    raise OSError("the server does not stop")

def test_whose_end_fails(ends_badly): pass
def test_late_whose_end_is_wrong(ends_badly): raise TimeoutError

@pytest.mark.parametrize("size", [1, 2])
def test_one_case(size): assert size == 1
"""


def late(test: str = "tests/cluster/test_x.py::test_y") -> Failure:
    return Failure(test, late=True)


def test_what_was_late_is_tried_again():
    assert second_try.refusal([late()]) is None
    assert second_try.refusal([late()] * MOST) is None
    for case in ("kafka", "kafka-aiokafka"):
        assert second_try.refusal([Failure(f"tests/wire/test_x.py::test_y[{case}]", late=False)]) is None


@pytest.mark.parametrize(
    ("failures", "why"),
    [
        ([], "not known"),
        ([late(), Failure("tests/cluster/test_z.py::test_y", late=False)], "wrong"),
        ([Failure("tests/wire/test_x.py::test_y[millrace-kafka-python]", late=False)], "wrong"),
        ([Failure("tests/cluster/test_x.py::test_y[kafka-kafka]", late=False)], "wrong"),
        ([late()] * (MOST + 1), "more than"),
    ],
)
def test_everything_else_stands(failures, why):
    assert why in (second_try.refusal(failures) or "")


def test_a_run_writes_down_what_failed_and_whether_it_was_late(tmp_path):
    (tmp_path / "test_written.py").write_text(WRITTEN)
    failed = tmp_path / "failed"
    words = [sys.executable, "-m", "pytest", "-q", "-p", second_try.__name__, second_try.OPTION, str(failed)]
    ran = subprocess.run(
        [*words, "--rootdir", str(tmp_path), "-p", "no:cacheprovider", str(tmp_path)],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    assert ran.returncode == 1, ran.stdout + ran.stderr
    found = {failure.test.partition("::")[2]: failure.late for failure in second_try.read(failed)}
    assert found == {
        "test_wrong": False,
        "test_wrong_error": False,
        "test_said_late": True,
        "test_timeout": True,
        "test_process": True,
        "test_deadline": True,
        "test_complaint": True,
        "test_whose_end_fails": False,
        "test_late_whose_end_is_wrong": False,
        "test_one_case[2]": False,
    }


def test_a_run_that_wrote_nothing_is_not_forgiven(tmp_path):
    assert second_try.read(tmp_path / "none") == []
    assert second_try.refusal(second_try.read(tmp_path / "none")) is not None


FIRST_TIME_ONLY = """
from pathlib import Path

def test_late():
    tried = Path(__file__).with_suffix(".tried")
    again = tried.exists()
    tried.touch()
    assert again, "{complaint}"

def test_fine(): pass
"""
LATE_ONCE = FIRST_TIME_ONLY.format(complaint="not within 30 s: the end")
WRONG_ONCE = FIRST_TIME_ONLY.format(complaint="a record is lost")
LATE_TWICE = "def test_late(): raise TimeoutError"
DIES = "def test_dies(): import os; os._exit(1)"


@pytest.mark.parametrize(
    ("written", "status", "said"),
    [
        (LATE_ONCE, 0, "Passed only at the second try:\n  tests/wire/test_x.py::test_late\n"),
        (LATE_TWICE, 1, "Once more, alone:\n  tests/wire/test_x.py::test_late\n"),
        (WRONG_ONCE, 1, "No second try: tests/wire/test_x.py::test_late was not late but wrong\n"),
        ("import nothing_like_this", 2, "No second try: a run did not come to its end\n"),
        (DIES, 1, "No second try: it is not known"),
    ],
    ids=["late once", "late twice", "wrong once", "not importable", "dies"],
)
def test_the_suite_passes_with_a_test_that_was_late_once(tmp_path, written, status, said):
    copied = tmp_path / "tests"
    for name in ("wire", "cluster"):
        (copied / name).mkdir(parents=True)
    for name in ("suite.py", "second_try.py", "waiting.py"):
        (copied / name).write_bytes((PROJECT / "tests" / name).read_bytes())
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "--import-mode=importlib"')
    (copied / "cluster" / "test_a.py").write_text("def test_fine(): pass")
    (copied / "wire" / "test_x.py").write_text(written)
    ran = subprocess.run(
        [sys.executable, "-m", "tests.suite"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    assert ran.returncode == status, ran.stdout + ran.stderr
    assert said in ran.stdout
