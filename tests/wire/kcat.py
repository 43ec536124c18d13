"""kcat, the command-line client that Debian ships: an older librdkafka than confluent-kafka's."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.waiting import patience
from tests.wire.client_face import PATIENCE_S

# How long kcat lets a transaction's requests take, in seconds.
_PATIENCE = ("-m", str(int(PATIENCE_S)))


class KcatMember:
    """kcat as a member of a group, in a process of its own, until `leave`."""

    def __init__(self, command: list[str], folder: Path, name: str) -> None:
        self._said, self._read = folder / f"{name}.said", folder / f"{name}.read"
        with self._said.open("wb") as said, self._read.open("wb") as read:
            self._process = subprocess.Popen(command, stdout=read, stderr=said)

    @property
    def rebalances(self) -> list[str]:
        """What it told of being assigned and revoked partitions."""
        return [line for line in self._said.read_text().splitlines() if "ed: " in line]

    @property
    def assigned(self) -> set[int]:
        """The partitions that it has by now."""
        held: set[int] = set()
        for line in self.rebalances:
            change, _, places = line.rpartition("ed: ")
            partitions = {int(each) for each in re.findall(r"\[(\d+)\]", places)}
            held = held | partitions if change.endswith("assign") else held - partitions
        return held

    @property
    def read(self) -> list[bytes]:
        return self._read.read_bytes().split()

    def leave(self) -> None:
        """It says goodbye to the group, unless its name is static."""
        self._process.terminate()
        self._process.wait(patience(PATIENCE_S))


class Kcat:
    """`run("-L")` runs it against the server. Its absence is a failure: who is not tried is not supported."""

    def __init__(self, bootstrap: str) -> None:
        found = shutil.which("kcat") or shutil.which("kafkacat")
        if found is None:
            pytest.fail("kcat is missing: apt-get install kcat (as root, `make test` does it)")
        self._start = [found, "-b", bootstrap, *_PATIENCE]

    def run(self, *arguments: str, given: bytes = b"") -> bytes:
        """What it prints; a failure of the test when it does not end well."""
        done = subprocess.run(
            [*self._start, *arguments],
            input=given,
            capture_output=True,
            timeout=patience(2 * PATIENCE_S),
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout

    def member(self, folder: Path, name: str, group: str, topic: str, *options: str) -> KcatMember:
        """One of the group, which reads from the beginning; its output goes to files of that name."""
        own = ("-G", group, "-u", "-X", "auto.offset.reset=earliest", "-X", "heartbeat.interval.ms=300")
        return KcatMember(
            [*self._start, *own, "-X", "session.timeout.ms=6000", *options, topic], folder, name
        )

    def begin(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Started, to be given its input bit by bit: pipes to its input and from its complaints."""
        return subprocess.Popen(
            [*self._start, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
