"""Which failed tests get a second try (`tests/suite.py`); as a pytest plugin it writes down what failed.

Only lateness: a deadline that passed says as much of the machine as of the product. What came and was wrong
stands, however well the next run goes; a record that was lost once is lost. Two things tell lateness: the
exception, or that the statement which failed looks at a deadline. Where Apache Kafka alone was asked, the
product had no part in the failure.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import DeadlinePassed

OPTION = "--failed-to"
MOST = 6
"""More than these in one run of all: it was not the machine."""
KAFKA_ALONE = ("tests/wire/", "[kafka")
LATE = "not within "
"""How helpers that wait begin their complaint."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed test by its node id, and whether all that failed in it was late."""

    test: str
    late: bool

    @property
    def is_foreign(self) -> bool:
        folder, server = KAFKA_ALONE
        return self.test.startswith(folder) and (f"{server}-" in self.test or f"{server}]" in self.test)


def refusal(failures: Sequence[Failure]) -> str | None:
    """Why these failures stand, None when they get a second try."""
    if not failures:
        return "it is not known what failed"
    for failure in failures:
        if not (failure.late or failure.is_foreign):
            return f"{failure.test} was not late but wrong"
    return f"{len(failures)} tests failed, more than {MOST}" if len(failures) > MOST else None


def is_late(problem: pytest.ExceptionInfo[BaseException]) -> bool:
    if problem.errisinstance((DeadlinePassed, TimeoutError, subprocess.TimeoutExpired)):
        return True
    looks = "deadline" in str(problem.traceback[-1].statement) if problem.traceback else False
    return problem.errisinstance(AssertionError) and (looks or str(problem.value).startswith(LATE))


def read(path: Path) -> list[Failure]:
    """What a run wrote down; nothing when it did not come that far."""
    try:
        return [Failure(**each) for each in json.loads(path.read_text())]
    except FileNotFoundError:
        return []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, type=Path, help="file for the node ids of the failed tests, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder(config.getoption(OPTION)))


class Recorder:
    """Remembers failures in any phase of a test, each test once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._late: dict[str, bool] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[Any]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed:
            late = call.excinfo is not None and is_late(call.excinfo)
            self._late[item.nodeid] = late and self._late.get(item.nodeid, True)
        return report

    def pytest_sessionfinish(self) -> None:
        failures = [asdict(Failure(test, late)) for test, late in self._late.items()]
        self._path.write_text(json.dumps(failures))
