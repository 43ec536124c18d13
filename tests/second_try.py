"""Which failed tests get a second try (`tests/suite.py`); as a pytest plugin it writes down what failed.

A test that guards data (marker `safety`: a record lost, repeated or out of order, a false verdict) is never
tried again: what was lost once is lost, however well the next run goes. Any other is run once more, alone:
two busy cores can make a sound product late. Whatever comes of it, it is listed with its first failure,
because a test that is red once and green again is a defect, of the product or of the test.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

OPTION = "--failed-to"
MOST = 6
"""More than these in one run of all: it was not the machine."""
SAFETY = "safety"
TEXT_LENGTH = 300


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed test by its node id, whether it guards data, and the first line of what was wrong."""

    test: str
    is_safety: bool
    text: str

    def __str__(self) -> str:
        return f"{self.test}: {self.text}"


def refusal(failures: Sequence[Failure]) -> str | None:
    """Why these failures stand, None when they get a second try."""
    if not failures:
        return "it is not known what failed"
    for failure in failures:
        if failure.is_safety:
            return f"{failure.test} guards data"
    return f"{len(failures)} tests failed, more than {MOST}" if len(failures) > MOST else None


def read(path: Path) -> list[Failure]:
    """What a run wrote down; nothing when it did not come that far, or was ended while it wrote."""
    try:
        return [Failure(**each) for each in json.loads(path.read_text())]
    except (FileNotFoundError, ValueError):
        return []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, type=Path, help="file for the node ids of the failed tests, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder(config.getoption(OPTION)))


class Recorder:
    """Remembers failures in any phase of a test, each test once, by its first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failures: dict[str, Failure] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[Any]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed:
            text = call.excinfo.exconly() if call.excinfo is not None else report.longreprtext
            line = text.strip().partition("\n")[0][:TEXT_LENGTH]
            is_safety = item.get_closest_marker(SAFETY) is not None
            self._failures.setdefault(item.nodeid, Failure(item.nodeid, is_safety, line))
        return report

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(json.dumps([asdict(failure) for failure in self._failures.values()]))
