"""Several ZooKeepers: a list of addresses of which some are dead, and an ensemble whose leader is killed."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from millrace.deploy import zookeeper as zookeeper_server
from millrace.deploy.processes import spawn
from tests.cluster.three_brokers import Load, ThreeBrokers, eventually, read_all
from tests.conftest import BrokerFactory
from tests.ports import free_port
from tests.servers import ZooKeeper
from tests.waiting import patience, until

pytestmark = pytest.mark.java


def test_a_broker_finds_the_living_one_of_several_addresses(
    broker_factory: BrokerFactory, zookeeper: ZooKeeper
) -> None:
    cluster = ThreeBrokers(
        broker_factory, count=1, zookeeper_path=f"127.0.0.1:{free_port()},{zookeeper.chroot()}"
    )
    cluster.create("t", 1, 1)
    assert cluster.partitions("t")[0].leader_id == 1


class Ensemble:
    """Three ZooKeepers that elect a leader."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.ports = [free_port() for _ in range(3)]
        peers = [(free_port(), free_port()) for _ in range(3)]
        self._lines = [
            "initLimit=40",
            "syncLimit=20",
            *(
                f"server.{number}=127.0.0.1:{followed}:{elected}"
                for number, (followed, elected) in enumerate(peers, start=1)
            ),
        ]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def address(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self.ports)

    def start(self) -> Ensemble:
        for number, port in enumerate(self.ports, start=1):
            data = self._folder / f"zookeeper-{number}"
            command = zookeeper_server.launch_command(port, data)
            config = data / "zoo.cfg"
            config.write_text("\n".join([config.read_text(), *self._lines, ""]))
            (data / "version-2" / "myid").write_text(f"{number}\n")
            command[command.index(zookeeper_server.MAIN_CLASS)] = (
                "org.apache.zookeeper.server.quorum.QuorumPeerMain"
            )
            log = self._folder / f"zookeeper-{number}.log"
            self._processes[port] = spawn(command, log=log, die_with_parent=True)
        until(lambda: sorted(self.modes().values()) == ["follower", "follower", "leader"], "one leads")
        return self

    def modes(self) -> dict[int, str]:
        """What each that answers says it is, by port."""
        found = {}
        for port in self.ports:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
                connection.sendall(b"srvr")
                said = b"".join(iter(lambda: connection.recv(4096), b"")).decode()
                if mode := re.search(r"Mode: (\w+)", said):
                    found[port] = mode[1]
        return found

    def kill_leader(self) -> None:
        (leader,) = (port for port, mode in self.modes().items() if mode == "leader")
        process = self._processes.pop(leader)
        process.kill()
        process.wait()

    def stop(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            process.wait(patience(30))


@pytest.fixture
def ensemble(tmp_path: Path) -> Iterator[Ensemble]:
    found = Ensemble(tmp_path)
    try:
        yield found.start()
    finally:
        found.stop()


@pytest.mark.long
@pytest.mark.safety
def test_a_cluster_outlives_the_leader_of_its_ensemble(
    broker_factory: BrokerFactory, ensemble: Ensemble
) -> None:
    cluster = ThreeBrokers(broker_factory, zookeeper_path=f"{ensemble.address}/millrace")
    cluster.create("t", min_insync_replicas="2")
    with Load(cluster.bootstrap, "t") as load:
        ensemble.kill_leader()
        eventually(lambda: "leader" in ensemble.modes().values(), "another one leads")
        cluster.create_again("made-since", 3)
        led = cluster.partitions("t")[0].leader_id
        cluster.brokers[led].kill()
        cluster.wait_for("t", 0, "another one leads", lambda part: part.leader_id not in (-1, led))
        written = len(load.acknowledged)
        eventually(lambda: len(load.acknowledged) > written + 200, "the load goes on")
    assert load.errors == []
    numbers = read_all(cluster.bootstrap, "t")
    assert set(load.acknowledged) <= set(numbers)
    assert len(numbers) == len(set(numbers))
