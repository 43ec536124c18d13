"""Which Python reads `format("millrace")` in a session that the user made."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.audit.spark.spark_source import MillraceDataSource, register
from millrace.broker.errors import ConfigError


@pytest.fixture
def session() -> Any:
    context = SimpleNamespace(master="local[2]", pythonExec="python3", _python_includes=[])
    registered: list[Any] = []
    source = SimpleNamespace(register=registered.append)
    return SimpleNamespace(
        _jsparkSession=None, sparkContext=context, dataSource=source, registered=registered
    )


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A Python without any package."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    return python


def test_workers_run_the_drivers_python_unless_another_is_named(session, monkeypatch):
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    register(session)
    assert (session.sparkContext.pythonExec, session.registered) == (sys.executable, [MillraceDataSource])


@pytest.mark.parametrize("missing", [False, True])
def test_named_python_without_millrace_is_one_line_that_says_what_to_set(session, bare, monkeypatch, missing):
    if missing:
        bare.unlink()
    monkeypatch.setenv("PYSPARK_PYTHON", str(bare))
    session.sparkContext.pythonExec = str(bare)
    with pytest.raises(ConfigError) as raised:
        register(session)
    line = str(raised.value)
    assert line.startswith("PYSPARK_PYTHON: got") and f"set it to {sys.executable}" in line
    assert "\n" not in line and not session.registered


@pytest.mark.parametrize("includes", [[], ["millrace.zip"]])
def test_named_python_that_has_millrace_or_is_sent_it_is_taken(session, bare, monkeypatch, includes):
    python = str(bare) if includes else sys.executable
    monkeypatch.setenv("PYSPARK_PYTHON", python)
    session.sparkContext.pythonExec, session.sparkContext._python_includes = python, includes
    register(session)
    assert (session.sparkContext.pythonExec, session.registered) == (python, [MillraceDataSource])
