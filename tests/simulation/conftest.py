"""The last line of a run says how many histories it went through."""

from __future__ import annotations

import pytest

from tests.simulation import histories


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if told := histories.summary():
        terminalreporter.write_line(told)
