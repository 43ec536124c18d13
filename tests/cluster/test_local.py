"""`millrace local`: up, status, down, and what it does when something is in the way."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from millrace.deploy import processes
from millrace.deploy.local.sandbox import Sandbox
from millrace.deploy.local.spec import parse_spec
from millrace.deploy.processes import ProcessFile
from tests.ports import free_port
from tests.waiting import patience, until

pytestmark = pytest.mark.java

LOCAL = [sys.executable, "-m", "millrace.deploy.cli", "local"]


def free_addresses(count: int) -> list[str]:
    return [f"127.0.0.1:{free_port()}" for _ in range(count)]


@pytest.fixture
def content(tmp_path: Path) -> dict[str, Any]:
    zookeeper, source, target, control = free_addresses(4)
    return {
        "name": "two",
        "data": str(tmp_path / "sandbox"),
        "zookeeper": {"listen": zookeeper},
        "clusters": {"a": {"listen": source}, "b": {"listen": target}},
        "mirrors": [
            {
                "name": "m",
                "target": "b",
                "sources": ["a"],
                "topics": {"include": [".*"]},
                "control": [control],
            }
        ],
    }


@pytest.fixture
def file(content: dict[str, Any], tmp_path: Path) -> Iterator[Path]:
    """The sandbox file; whatever runs of it is stopped afterwards."""
    path = tmp_path / "two.yaml"
    path.write_text(yaml.safe_dump(content))
    yield path
    Sandbox(parse_spec(content, where="test")).down()


def local(command: str, file: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = [*LOCAL, command, "--file", str(file), *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=patience(120), check=False)


def complaints(answer: subprocess.CompletedProcess[str]) -> list[str]:
    """What went wrong; on a machine that is busy a start may have been called slow before."""
    return [line for line in answer.stderr.splitlines() if not line.startswith("still starting ")]


def states(file: Path) -> dict[str, str]:
    rows = json.loads(local("status", file, "-o", "json").stdout)
    return {row["service"]: row["state"] for row in rows}


def test_up_status_down_and_up_again_keeps_the_data(file: Path, content: dict[str, Any]) -> None:
    address = content["clusters"]["a"]["listen"]
    topics = [sys.executable, "-m", "millrace.deploy.cli", "topics"]
    up = local("up", file)
    assert up.returncode == 0, up.stderr
    assert [line.split()[1] for line in up.stdout.splitlines()[:4]] == [
        "zookeeper",
        "broker-a",
        "broker-b",
        "mirror-m-1",
    ]
    assert set(states(file).values()) == {"serving"}
    assert local("up", file).stdout.startswith("zookeeper ")  # nothing was started a second time
    subprocess.run([*topics, "create", "kept", "-b", address], check=True, capture_output=True)
    down = local("down", file)
    assert down.stdout.split() == [
        "stopped",
        "mirror-m-1",
        *["stopped", "broker-a", "stopped", "broker-b"],
        *["stopped", "zookeeper"],
    ]
    assert set(states(file).values()) == {"stopped"}
    assert local("status", file).returncode == 1
    assert local("down", file).stdout == f"nothing runs in {content['data']}\n"
    assert local("up", file).returncode == 0
    listed = subprocess.run([*topics, "list", "-b", address], check=True, capture_output=True, text=True)
    assert "kept" in listed.stdout
    deleted = local("down", file, "--delete")
    assert f"deleted {content['data']}" in deleted.stdout
    assert not Path(content["data"]).exists()


@pytest.mark.long
def test_drained_mirror_worker_is_shown_as_such_and_up_starts_it_again(
    file: Path, content: dict[str, Any]
) -> None:
    assert local("up", file).returncode == 0
    (control,) = content["mirrors"][0]["control"]
    words = [sys.executable, "-m", "millrace.deploy.cli", "mirror", "drain", "--url", f"http://{control}"]
    said = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    assert "no other worker is in the mirror's group: nothing is carried until one is started" in said
    shown = subprocess.run([*words[:4], "status", *words[5:]], capture_output=True, text=True, check=False)
    assert (shown.returncode, "nothing is carried" in shown.stderr) == (2, True), shown.stderr
    assert states(file)["mirror-m-1"] == "drained"
    again = local("up", file)
    assert [line for line in again.stdout.splitlines() if line.startswith("started")] == [
        "started mirror-m-1"
    ]
    assert set(states(file).values()) == {"serving"}


@pytest.mark.long
def test_killed_broker_is_shown_as_stopped_and_up_starts_it_alone(
    file: Path, content: dict[str, Any]
) -> None:
    assert local("up", file).returncode == 0
    identity = ProcessFile(Path(content["data"]) / "run" / "broker-a.pid").living()
    assert identity is not None
    processes.kill(identity)
    assert states(file)["broker-a"] == "stopped"
    again = local("up", file)
    assert [line for line in again.stdout.splitlines() if line.startswith("started")] == ["started broker-a"]
    assert set(states(file).values()) == {"serving"}


@pytest.mark.long
def test_broker_that_takes_connections_and_answers_nothing_is_not_shown_as_serving(
    file: Path, content: dict[str, Any]
) -> None:
    assert local("up", file).returncode == 0
    identity = ProcessFile(Path(content["data"]) / "run" / "broker-a.pid").living()
    assert identity is not None
    processes.send(identity, signal.SIGSTOP)
    assert states(file)["broker-a"] == "starting"
    processes.send(identity, signal.SIGCONT)
    until(lambda: states(file)["broker-a"] == "serving", "the broker goes on")


def test_taken_port_stops_what_was_started_and_says_which(file: Path, content: dict[str, Any]) -> None:
    host, _, port = content["clusters"]["b"]["listen"].rpartition(":")
    with socket.socket() as stranger:
        stranger.bind((host, int(port)))
        stranger.listen()
        answer = local("up", file)
    assert answer.returncode == 10
    assert len(complaints(answer)) == 1
    assert f"broker-b needs {host}:{port}, where something else listens" in answer.stderr
    assert set(states(file).values()) == {"stopped"}


def test_broker_that_refuses_to_start_is_quoted(file: Path, content: dict[str, Any]) -> None:
    content["clusters"]["b"]["settings"] = {"no.such.key": 1}
    file.write_text(yaml.safe_dump(content))
    answer = local("up", file)
    assert answer.returncode == 1
    assert len(complaints(answer)) == 1
    assert "broker-b ended with status 2" in answer.stderr
    assert "no.such.key" in answer.stderr
    assert set(states(file).values()) == {"stopped"}


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6")
def test_a_sandbox_may_be_at_ipv6_addresses(content: dict[str, Any]) -> None:
    there = json.loads(json.dumps(content).replace("127.0.0.1:", "[::1]:"))
    sandbox = Sandbox(parse_spec(there, where="test"))
    try:
        assert sandbox.up() == ["zookeeper", "broker-a", "broker-b", "mirror-m-1"]
        assert {row["address"].rpartition(":")[0] for row in sandbox.status()} == {"[::1]"}
        assert {row["state"] for row in sandbox.status()} == {"serving"}
    finally:
        sandbox.down()
