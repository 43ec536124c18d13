"""What is missing or in the way is said in one line each, with what to do."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests import ports, preflight


def test_a_machine_that_has_everything_is_not_complained_of() -> None:
    assert preflight.missing_programs(find=lambda name: f"/usr/bin/{name}") == []


@pytest.mark.parametrize("package", preflight.PROGRAMS)
def test_a_missing_program_is_named_with_the_package_that_brings_it(package: str) -> None:
    lacking = preflight.PROGRAMS[package]
    (line,) = preflight.missing_programs(find=lambda name: None if name in lacking else name)
    assert line == f"the tests need {lacking[0]}: run  sudo apt-get install {package}"


def test_java_outside_the_path_is_found() -> None:
    def find(name: str) -> str | None:
        return name if name != "java" else None

    assert preflight.missing_programs(find=find, java_homes=[Path("/opt/jdk")]) == []
    (line,) = preflight.missing_programs(find=find, java_homes=[])
    assert "Java 17" in line


def test_a_full_temporary_folder_is_said_with_the_way_out() -> None:
    assert preflight.full_disk(Path("/tmp"), preflight.LEAST_FREE_BYTES) == []
    (line,) = preflight.full_disk(Path("/tmp"), 1 << 29)
    assert line.startswith("/tmp has 0.5 GiB free") and "TMPDIR" in line


def test_ports_that_are_taken_are_said() -> None:
    every = range(10_000, 11_000)
    assert preflight.taken_ports(0.2, every) == []
    (line,) = preflight.taken_ports(0.05, every)
    assert line.startswith("of the ports 10000 to 10999 about 50 are free")


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
