"""What a start that takes long says meanwhile. The services are stand-ins: starting real ones is for
`tests/cluster/test_local.py`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.deploy.cli import run
from millrace.deploy.local import sandbox as sandbox_module
from millrace.deploy.local.sandbox import WHY_SLOW, Sandbox, Service
from millrace.deploy.local.spec import parse_spec

SPEC = {
    "name": "one",
    "data": "unused",
    "zookeeper": {"listen": "127.0.0.1:1"},
    "clusters": {"a": {"listen": "127.0.0.1:2"}},
}
SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def sandbox(tmp_path: Path, said: list[str]) -> Iterator[Sandbox]:
    """A broker that answers when it is asked the fourth time, after a ZooKeeper that does the second time."""
    made = Sandbox(parse_spec(SPEC, where="test"), tmp_path, say=said.append)

    def service(name: str, tier: int, answers: Iterator[bool]) -> Service:
        return Service(name, tier, f"127.0.0.1:{tier + 1}", lambda: SLEEPER, lambda: next(answers))

    made._services = {
        "zookeeper": service("zookeeper", 0, iter([False, True])),
        "broker-a": service("broker-a", 1, iter([False, False, False, True])),
    }
    yield made
    made.down()


def test_start_that_takes_long_says_once_what_it_waits_for_and_why(
    sandbox: Sandbox, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_module, "SLOW_START_S", 0.0)
    assert sandbox.up() == ["zookeeper", "broker-a"]
    assert said == [f"still starting broker-a: {WHY_SLOW}"]


def test_start_as_usual_says_nothing(
    sandbox: Sandbox, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_module, "SLOW_START_S", 600.0)
    sandbox.up()
    assert said == []


def test_command_that_stops_it_names_the_folder_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Sandbox, "up", lambda _: [])
    folder = tmp_path / "of mine"
    assert run(["local", "up", "--data", str(folder)]) == 0
    assert capsys.readouterr().out.endswith(f"stop with: millrace local down --data '{folder}'\n")
    assert run(["local", "up"]) == 0
    assert capsys.readouterr().out.endswith("stop with: millrace local down\n")
