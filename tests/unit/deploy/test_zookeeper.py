"""What is checked before a ZooKeeper server is started."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.broker.errors import DataFolderNotWritable, FatalError, PortTaken
from millrace.deploy import zookeeper
from tests import ports

JAVA = Path("/any/bin/java")


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture
def free_port() -> int:
    return ports.free_port()


def test_taken_port_is_refused_with_its_number(taken_port: int, tmp_path: Path) -> None:
    with pytest.raises(PortTaken, match=rf"127\.0\.0\.1:{taken_port} is taken.*--port"):
        zookeeper.launch_command(taken_port, tmp_path, java=JAVA)


def test_taken_ipv6_port_is_refused_with_its_address(tmp_path: Path) -> None:
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6")
    with listener, pytest.raises(PortTaken, match=r"\[::1\]:\d+ is taken.*--port"):
        zookeeper.launch_command(listener.getsockname()[1], tmp_path, host="::1", java=JAVA)


def test_address_of_another_machine_is_refused(free_port: int, tmp_path: Path) -> None:
    with pytest.raises(FatalError, match="check --host"):
        zookeeper.launch_command(free_port, tmp_path, host="203.0.113.1", java=JAVA)


def test_data_folder_that_is_a_file_is_refused_by_name(free_port: int, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_text("in the way")
    with pytest.raises(DataFolderNotWritable, match=rf"{data}.*--data"):
        zookeeper.launch_command(free_port, data, java=JAVA)


def test_good_arguments_write_the_configuration_the_command_names(free_port: int, tmp_path: Path) -> None:
    data = tmp_path / "new" / "data"
    command = zookeeper.launch_command(free_port, data, heap_mib=64, java=JAVA)
    assert command[0] == str(JAVA)
    assert "-Xmx64m" in command
    assert command[-2:] == [zookeeper.MAIN_CLASS, str(data / "zoo.cfg")]
    config = dict(line.split("=", 1) for line in (data / "zoo.cfg").read_text().splitlines())
    assert config["clientPort"] == str(free_port)
    assert config["clientPortAddress"] == "127.0.0.1"
    assert config["admin.enableServer"] == "false"
    assert Path(config["dataDir"]).is_dir()


def test_jars_are_those_of_one_zookeeper() -> None:
    names = [jar.name for jar in zookeeper.server_jars()]
    assert sum(name.startswith("zookeeper-3") for name in names) == 1
    assert len(names) == len(set(names))


def test_silent_port_is_not_serving(taken_port: int, free_port: int) -> None:
    assert not zookeeper.is_serving(free_port)
    assert not zookeeper.is_serving(taken_port, timeout_s=0.05)
