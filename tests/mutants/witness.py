"""A pytest plugin for `trial`: checks whose product is under test, and writes down what failed, and how.

A failure counts as red only when it is the test's own word: an assertion (or a `pytest.raises` in vain) while
the test runs. Anything else may be a slip in the mutant, not a rule that is missed.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

OPTION = "--witness-to"
STOP_OPTION = "--witness-one-red"
PARTS = ("broker", "mirror", "audit", "deploy")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, type=Path, help="file for what failed, as JSON")
    parser.addoption(STOP_OPTION, action="store_true", help="end with the first test that is red")


def pytest_configure(config: pytest.Config) -> None:
    for part in PARTS:
        found = Path(importlib.import_module(f"millrace.{part}").__file__ or "")
        if not found.resolve().is_relative_to(config.rootpath.resolve()):
            raise pytest.UsageError(f"millrace.{part} is {found}, not the copy in {config.rootpath}")
    config.pluginmanager.register(Witness(config.getoption(OPTION), config.getoption(STOP_OPTION)))


def is_assertion(problem: BaseException) -> bool:
    """Hypothesis raises a group where several examples fail in different ways."""
    if isinstance(problem, BaseExceptionGroup):
        return any(is_assertion(each) for each in problem.exceptions)
    return isinstance(problem, (AssertionError, pytest.fail.Exception))


class Witness:
    """Writes {"collected": how many tests, "failed": {test: "" for an assertion, else the exception}}."""

    def __init__(self, path: Path, ends_at_red: bool) -> None:
        self._path = path
        self._ends_at_red = ends_at_red
        self._collected = 0
        self._failed: dict[str, str] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected = len(session.items)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[Any]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed and call.excinfo is not None:
            problem = call.excinfo.value
            by_assertion = report.when == "call" and is_assertion(problem)
            said = str(problem).partition("\n")[0]
            self._failed.setdefault(item.nodeid, "" if by_assertion else f"{type(problem).__name__}: {said}")
            if by_assertion and self._ends_at_red:
                item.session.shouldfail = "one is red"
        return report

    def pytest_sessionfinish(self) -> None:
        found = {"collected": self._collected, "failed": self._failed}
        self._path.write_text(json.dumps(found), encoding="utf-8")
