"""Burrow, with the sarama of its time: it reads the offsets topic and the ends of logs, and serves lag."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.deploy.processes import spawn
from tests.ports import free_port
from tests.servers import ZooKeeper
from tests.waiting import patience
from tests.wire.client_face import wait_until
from tests.wire.foreign_clients import Sent
from tests.wire.subjects import Subject

PARTITIONS = 3
LOGS = ("burrow.out", "burrow.log")

CONFIG = """
[general]
pidfile = "{folder}/pid"
stdout-logfile = "{folder}/burrow.log"

[logging]
level = "info"

[zookeeper]
servers = ["{zookeeper}"]
timeout = 6
root-path = "/burrow-{port}"

[client-profile.plain]
client-id = "burrow"
kafka-version = "2.0.0"

[cluster.local]
class-name = "kafka"
servers = ["{bootstrap}"]
client-profile = "plain"
topic-refresh = 2
offset-refresh = 1

[consumer.local]
class-name = "kafka"
cluster = "local"
servers = ["{bootstrap}"]
client-profile = "plain"
start-latest = false

[httpserver.default]
address = "127.0.0.1:{port}"

[storage.default]
class-name = "inmemory"
workers = 2
intervals = 10
expire-group = 604800
min-distance = 0

[evaluator.default]
class-name = "caching"
expire-cache = 1
"""


class Burrow:
    """A running one; `folder` holds what it says."""

    def __init__(self, port: int, folder: Path) -> None:
        self._port, self._folder = port, folder

    def get(self, path: str) -> dict[str, Any]:
        """What it answers below /v3/kafka/local, {} while it knows nothing of it."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/v3/kafka/local{path}") as answer:
                return dict(json.loads(answer.read()))
        except (OSError, urllib.error.HTTPError):
            return {}

    @property
    def log(self) -> str:
        return "".join((self._folder / name).read_text(errors="replace") for name in LOGS)


@pytest.fixture
def burrow(server: Subject, zookeeper: ZooKeeper, tmp_path: Path) -> Iterator[Burrow]:
    """Its absence is a failure: a client that is not tried is not supported."""
    program = shutil.which("Burrow") or shutil.which("burrow")
    assert program, "Burrow is missing: apt-get install burrow (as root, `make test` does it)"
    port = free_port()
    config = CONFIG.format(
        folder=tmp_path, zookeeper=zookeeper.address, bootstrap=server.bootstrap, port=port
    )
    (tmp_path / "burrow.toml").write_text(config)
    for name in LOGS:
        (tmp_path / name).touch()
    process = spawn([program, "--config-dir", str(tmp_path)], log=tmp_path / LOGS[0], die_with_parent=True)
    try:
        yield Burrow(port, tmp_path)
    finally:
        process.terminate()
        process.wait(patience(30))


def test_burrow_tells_the_lag_of_a_group(server, burrow, readers, new_topic, fresh_name):
    writer = readers[0]
    topic, group = new_topic(PARTITIONS), fresh_name("group")
    writer.produce(topic, [Sent(b"%d" % number, partition=number % PARTITIONS) for number in range(90)])
    refused = server.outcome("list-offsets-0", kafka="failed to fetch offsets from broker", millrace=None)
    if refused is not None:
        wait_until(lambda: refused in burrow.log, "Burrow is told")
        return

    def lag() -> int | None:
        status = burrow.get(f"/consumer/{group}/lag").get("status", {})
        told = {each["partition"]: each["current_lag"] for each in status.get("partitions", ())}
        return sum(told.values()) if len(told) == PARTITIONS else None

    wait_until(lambda: topic in burrow.get("/topic").get("topics", ()), "Burrow sees the topic")
    for read in (10, 25):
        for partition in range(PARTITIONS):
            writer.commit(group, topic, partition, read)
        left = (30 - read) * PARTITIONS
        wait_until(lambda left=left: lag() == left, f"Burrow tells a lag of {left}")
    assert burrow.get(f"/topic/{topic}")["offsets"] == [30] * PARTITIONS
    assert group in burrow.get("/consumer")["consumers"]
    # A group that has members leaves their names in the offsets topic, too (its records' version 3, as from
    # Apache Kafka 3.9): those whom this Burrow does not understand must not keep it from the offsets.
    member = writer.member(group, topic, client_id="live", session_timeout_ms=45_000)
    wait_until(lambda: lag() == 0, "Burrow tells what a living member has read")
    member.leave()
