"""The launcher of faults: it refuses what it cannot wrap, and a fault that never happened fails its test."""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.deploy.cli import DEFECT_STATUS
from tests.points.fault import LAUNCHER, Fault, NeverReached, until
from tests.points.launcher import DIED, GO, REACHED, REFUSED, find, put_in
from tests.points.points import POINTS

CALLED = """
told = []

def plain(what):
    told.append(what)

class Kind:
    async def awaited(self, what):
        told.append(what)
"""


def launched(folder: Path, at: str, *command: str, act: str = "die") -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(LAUNCHER), "--at", at, "--when", "before", "--act", act]
    words += ["--folder", str(folder), "--", *command]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("at", "word"),
    [
        ("millrace.broker.storage.checkpoints:write_offset", "has no write_offset"),
        ("millrace.broker.storage.log:Log.flushed", "Log has no flushed"),
        ("millrace.broker.storage.checkpoint:write_offsets", "No module named"),
        ("millrace.broker.storage.checkpoints:NEW_PARTITIONS", "is no function"),
        ("millrace.broker.storage.checkpoints", "has no"),
    ],
)
def test_a_function_that_does_not_exist_is_refused_at_start_in_one_line(
    tmp_path: Path, at: str, word: str
) -> None:
    ended = launched(tmp_path, at, "--version")
    assert ended.returncode == REFUSED
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"launcher: no fault can be put at {at}: ") and word in line


def test_a_program_that_does_not_come_by_the_point_runs_as_it_always_does(tmp_path: Path) -> None:
    ended = launched(tmp_path, "millrace.broker.storage.checkpoints:write_offsets", "--version")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("millrace ")
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_comes_by_the_point_dies_there_and_has_told_so(tmp_path: Path) -> None:
    ended = launched(tmp_path, "typer:echo", "--version")
    assert (ended.returncode, ended.stdout) == (DIED, "")
    assert (tmp_path / REACHED).exists()


@pytest.mark.parametrize("name", POINTS)
def test_each_named_point_is_in_the_product(name: str) -> None:
    find(POINTS[name].at)


def test_a_program_that_comes_by_the_point_stands_still_until_it_may_go_on(tmp_path: Path) -> None:
    words = [sys.executable, str(LAUNCHER), "--at", "typer:echo", "--when", "before", "--act", "wait"]
    words += ["--folder", str(tmp_path), "--", "--version"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        until(lambda: (tmp_path / REACHED).exists(), "the point is reached")
        assert process.poll() is None
        (tmp_path / GO).touch()
        assert process.communicate()[0].startswith("millrace ")
    assert process.returncode == 0


def test_a_program_that_comes_by_the_point_has_the_error_that_is_asked_for(tmp_path: Path) -> None:
    ended = launched(tmp_path, "typer:echo", "--version", act="fail")
    assert ended.returncode == DEFECT_STATUS
    assert "Input/output error" in ended.stderr and ended.stdout == ""


def test_the_call_that_is_meant_and_no_other_has_the_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "called.py").write_text(CALLED)
    monkeypatch.syspath_prepend(tmp_path)
    called = importlib.import_module("called")
    put_in("called:plain", "before", 2, "^a", lambda: called.told.append("fault"))
    put_in("called:Kind.awaited", "after", 1, "", lambda: called.told.append("fault"))
    for row in ("a1", "b1", "a2", "a3"):
        called.plain(row)
    asyncio.run(called.Kind().awaited("c"))
    assert called.told == ["a1", "b1", "fault", "a2", "a3", "c", "fault"]


def test_a_call_is_held_back_while_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "held.py").write_text(CALLED)
    monkeypatch.syspath_prepend(tmp_path)
    called = importlib.import_module("held")
    is_held, may_go = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        is_held.set()
        await may_go.wait()

    put_in("held:Kind.awaited", "before", 1, "", hold)

    async def story() -> None:
        held = asyncio.create_task(called.Kind().awaited("held"))
        await is_held.wait()
        await called.Kind().awaited("not the second")
        may_go.set()
        await held

    with pytest.raises(TypeError, match="plain is no coroutine function"):
        put_in("held:plain", "before", 1, "", hold)
    asyncio.run(story())
    assert called.told == ["not the second", "held"]


def test_a_fault_that_was_never_reached_fails_its_test_with_that_word(tmp_path: Path) -> None:
    class Ended:
        program = ("-m", "millrace.deploy.cli")
        log = "what it said"
        process = subprocess.Popen([sys.executable, "-c", ""])

    Ended.process.wait()
    fault = Fault(tmp_path / "fault", "log flushed, recovery point not written")
    fault.put_before(Ended())
    for look in (fault.check, fault.wait_until_reached, fault.wait_until_died):
        with pytest.raises(NeverReached, match=r"never reached: log flushed(?s:.*)what it said"):
            look()
