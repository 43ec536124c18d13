"""The last line of a run says how many histories it went through."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.simulation import histories


@pytest.fixture(scope="package", autouse=True)
def _what_was_there_before_is_not_collected() -> Iterator[None]:
    """A history makes so many objects that all the modules would be looked through again and again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if told := histories.summary():
        terminalreporter.write_line(told)
