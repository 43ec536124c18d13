"""What is missing or in the way is said in one line each, with what to do."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.deploy.java import find_java
from tests import ports, preflight


def test_a_machine_that_has_everything_is_not_complained_of() -> None:
    assert preflight.missing_programs(find=lambda name: f"/usr/bin/{name}") == []


@pytest.mark.parametrize("package", preflight.PROGRAMS)
def test_a_missing_program_is_named_with_the_package_that_brings_it(package: str) -> None:
    lacking = preflight.PROGRAMS[package]
    (line,) = preflight.missing_programs(find=lambda name: None if name in lacking else name)
    assert line == f"the tests need {lacking[0]}: run  sudo apt-get install {package}"


def test_only_root_is_asked_for_what_only_root_can_use() -> None:
    def find(name: str) -> str | None:
        return None if name == "mkfs.ext4" else name

    assert preflight.missing_programs(find=find) == []
    assert preflight.missing_programs(find=find, is_root=True) == [
        "the tests need mkfs.ext4: run  sudo apt-get install e2fsprogs"
    ]


def test_a_java_that_is_missing_or_too_old_is_said_with_the_way_out(tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    java.chmod(0o755)

    def find(path: str) -> Callable[[], Path]:
        return lambda: find_java({"PATH": path}, tmp_path / "none")

    (line,) = preflight.missing_java(find("/nowhere"))
    assert line.startswith("the tests need Java: no Java 17") and "default-jre-headless" in line
    (line,) = preflight.missing_java(find(str(java.parent)))
    assert f"{java} is version 11" in line
    assert preflight.missing_java(lambda: java) == []


def test_a_java_that_is_not_the_first_on_the_path_is_put_there(tmp_path: Path) -> None:
    """One beside an older one, or where nobody looks but the product."""
    first, second = (tmp_path / name / "java" for name in ("first", "second"))
    for java in (first, second):
        java.parent.mkdir()
        java.touch(0o755)
    path = f"{first.parent}:/nowhere"
    assert preflight.path_to_java(first, path) == path
    assert preflight.path_to_java(second, path) == f"{second.parent}:{path}"


def test_a_full_temporary_folder_is_said_with_the_way_out() -> None:
    assert preflight.full_disk(Path("/tmp"), preflight.LEAST_FREE_BYTES) == []
    (line,) = preflight.full_disk(Path("/tmp"), 1 << 29)
    assert line.startswith("/tmp has 0.5 GiB free") and "TMPDIR" in line


def test_ports_that_are_taken_are_said() -> None:
    every = range(10_000, 15_000)
    assert preflight.taken_ports(0.2, every) == []
    (line,) = preflight.taken_ports(0.05, every)
    assert line.startswith("of the ports 10000 to 14999 about 250 are free")


def test_a_stretch_that_is_taken_is_said_of_the_run_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have all of theirs; it has none."""
    taken = ports.shares(4)[1]
    monkeypatch.setattr(ports, "is_free", lambda port: port not in taken)
    (line,) = [line for line in preflight.obstacles(4) if "ports" in line]
    assert line.startswith(f"of the ports {taken.start} to {taken.stop - 1} about 0 are free")


def test_a_temporary_folder_that_takes_no_file_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would use another one, and the programs beside it would not."""
    monkeypatch.setenv("TMPDIR", "/proc")
    monkeypatch.setattr(tempfile, "tempdir", None)
    (line,) = [line for line in preflight.obstacles() if "TMPDIR" in line]
    assert line == "/proc takes no file: make room, or set TMPDIR to another folder"


def test_what_goes_on_of_a_killed_run_is_named_and_nothing_else(tmp_path: Path) -> None:
    """A run that goes on has its process's id in its folder, one that ended in order has none."""
    living, killed, ended = (tmp_path / f"pytest-of-me/pytest-{number}" for number in (1, 2, 3))
    for run, lock in ((living, os.getpid()), (killed, 2**31 - 1), (ended, None)):
        run.mkdir(parents=True)
        if lock is not None:
            (run / ".lock").write_text(str(lock))
    processes = [
        (number, words)
        for number, run in ((10, living), (20, killed), (30, ended))
        for number, words in (
            (number + 1, ["/usr/bin/java", f"-Dlog={run}/zookeeper0/log", "Main"]),
            (number + 2, ["/home/me/.venv/bin/python", "-m", "x", "--data", f"{run}/test_y0/data"]),
            (number + 3, ["tail", "-f", f"{run}/broker0/broker.log"]),
        )
    ]
    assert preflight.left_running([(1, []), *processes], preflight.was_killed) == [
        "processes of a run that was killed go on: end them by  kill 21 22"
    ]


def test_a_port_that_somebody_listens_on_is_not_free() -> None:
    port = ports.free_port()
    assert ports.is_free(port)
    with socket.create_server(("127.0.0.1", port)):
        assert not ports.is_free(port)


def test_runs_side_by_side_have_ports_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ports.shares(2)
    assert not set(first) & set(second)
    for name, value in ports.environment(second).items():
        monkeypatch.setenv(name, value)
    assert ports.own_ports() == second
    assert ports.free_port() in second
