"""What a start that takes long says meanwhile, which folders are a sandbox's, and services that its file
names no more. The services are stand-ins: starting real ones is for `tests/cluster/test_local.py`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from millrace.broker.errors import FatalError
from millrace.deploy import processes
from millrace.deploy.cli import run
from millrace.deploy.local import sandbox as sandbox_module
from millrace.deploy.local.sandbox import DRAINED, LEFT_OVER, WHY_SLOW, Sandbox, Service
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


def test_up_waits_for_what_lives_already_too(sandbox: Sandbox) -> None:
    sandbox.up()
    answers = iter([False, False, True])
    broker = sandbox._services["broker-a"]
    sandbox._services = {"broker-a": replace(broker, answers=lambda: next(answers))}
    assert sandbox.up() == []
    assert next(answers, None) is None


def test_service_that_lives_already_and_ends_meanwhile_is_not_waited_for(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    sandbox.up()
    identity = sandbox._living("broker-a")
    assert identity is not None
    later = Sandbox(sandbox.spec, tmp_path)

    def ends() -> bool:
        processes.kill(identity)
        return False

    later._services = {"broker-a": replace(sandbox._services["broker-a"], answers=ends)}
    with pytest.raises(FatalError, match="broker-a ended: it said nothing"):
        later.up()


def test_drained_worker_is_shown_as_such_and_up_starts_it_again(sandbox: Sandbox) -> None:
    is_drained = False
    mirror = Service("mirror-m-1", 2, "127.0.0.1:3", lambda: SLEEPER, lambda: not is_drained)
    sandbox._services = {"mirror-m-1": replace(mirror, is_drained=lambda: is_drained)}

    def state() -> tuple[str, int | None]:
        (row,) = sandbox.status()
        return row["state"], row["pid"]

    assert sandbox.up() == ["mirror-m-1"]
    before = state()
    assert before[0] == "serving"
    assert sandbox.up() == []
    is_drained = True
    assert state() == (DRAINED, before[1])
    spawn = sandbox._spawn

    def spawned(service: Service) -> None:
        nonlocal is_drained
        is_drained = False
        spawn(service)

    sandbox._spawn = spawned  # type: ignore[method-assign]
    assert sandbox.up() == ["mirror-m-1"]
    assert state()[0] == "serving"
    assert state()[1] != before[1]


def test_command_that_stops_it_names_the_folder_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Sandbox, "up", lambda _: [])
    folder = tmp_path / "of mine"
    assert run(["local", "up", "--data", str(folder)]) == 0
    assert capsys.readouterr().out.endswith(f"stop with: millrace local down --data '{folder}'\n")
    assert run(["local", "up"]) == 0
    assert capsys.readouterr().out.endswith("stop with: millrace local down\n")


def test_relative_folder_of_a_file_lies_beside_the_file_wherever_a_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    for folder in (beside, elsewhere):
        folder.mkdir()
    (beside / "sandbox.yaml").write_text(yaml.safe_dump({**SPEC, "data": "run/here"}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    file = Path("project/sandbox.yaml")
    assert Sandbox.from_file(file).folder == beside / "run" / "here"
    assert Sandbox.from_file(file, Path("mine")).folder == tmp_path / "mine"
    monkeypatch.chdir(elsewhere)
    assert Sandbox.from_file(beside / "sandbox.yaml").folder == beside / "run" / "here"
    for written, folder in (("~/data", tmp_path / "data"), (str(elsewhere), elsewhere)):
        (beside / "sandbox.yaml").write_text(yaml.safe_dump({**SPEC, "data": written}))
        assert Sandbox.from_file(beside / "sandbox.yaml").folder == folder


def test_folder_that_is_not_a_sandboxs_is_never_deleted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    thesis = tmp_path / "of mine" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("years of work")
    assert run(["local", "down", "--data", str(thesis.parent), "--delete"]) == 1
    assert f"{thesis.parent} is not a sandbox's folder: nothing is deleted" in capsys.readouterr().err
    assert [*thesis.parent.iterdir()] == [thesis]
    # An earlier release left a lock wherever it was told to stop what is there.
    (thesis.parent / "run").mkdir()
    (thesis.parent / "run" / "lock").touch()
    assert run(["local", "down", "--data", str(thesis.parent), "--delete"]) == 1
    assert thesis.read_text() == "years of work"


def test_folder_with_files_of_others_is_never_made_a_sandboxs(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    thesis = tmp_path / "data" / "thesis.txt"
    thesis.write_text("years of work")
    with pytest.raises(FatalError, match="holds other files: choose an empty folder with --data"):
        Sandbox(parse_spec(SPEC, where="test"), tmp_path).up(only_tiers=())
    assert [*tmp_path.rglob("*")] == [tmp_path / "data", thesis]


def test_sandbox_of_an_earlier_release_is_deleted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "earlier"
    for name in ("config", "data/zookeeper/version-2", "data/ewr", "logs", "run"):
        (folder / name).mkdir(parents=True)
    (folder / "run" / "lock").touch()
    assert run(["local", "down", "--data", str(folder), "--delete"]) == 0
    assert capsys.readouterr().out == f"nothing runs in {folder}\ndeleted {folder}\n"
    assert not folder.exists()
    assert run(["local", "down", "--data", str(folder), "--delete"]) == 0
    assert capsys.readouterr().out == f"nothing runs in {folder}: no sandbox is there\n"
    assert not folder.exists()


def test_service_that_the_file_names_no_more_is_shown_stopped_and_in_the_way_of_deletion(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    sandbox.up()
    changed = Sandbox(
        parse_spec({**SPEC, "clusters": {"b": {"listen": "127.0.0.1:3"}}}, where="test"), tmp_path
    )
    (row,) = [row for row in changed.status() if row["service"] == "broker-a"]
    assert row["state"] == LEFT_OVER
    assert row["pid"]
    with pytest.raises(FatalError, match="zookeeper, broker-a still runs"):
        changed.delete_data()
    assert changed.down() == ["broker-a", "zookeeper"]
    assert changed.delete_data()
