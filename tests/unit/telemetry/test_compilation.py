"""The word about a start that compiles."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from millrace.broker.telemetry.compilation import COMPILING, told_when_slow
from tests.waiting import until


def test_loading_that_takes_long_is_explained_while_it_lasts() -> None:
    lines: list[str] = []
    with told_when_slow(SimpleNamespace(info=lines.append), after_s=0.0):
        until(lambda: lines == [COMPILING], "the line")


def test_loading_as_usual_says_nothing_and_leaves_no_thread() -> None:
    lines: list[str] = []
    before = threading.active_count()
    with told_when_slow(SimpleNamespace(info=lines.append), after_s=600.0):
        assert threading.active_count() == before + 1
    until(lambda: threading.active_count() == before, "the thread has ended")
    assert lines == []
