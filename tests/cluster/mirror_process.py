"""A mirror as a user starts it, and the reading and writing that its tests need."""

from __future__ import annotations

import json
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.committed import committed_batches
from millrace.broker.client.offsets import LATEST
from millrace.broker.client.raw_fetch import FetchPosition, fetch
from millrace.broker.client.raw_produce import produce
from millrace.broker.errors import KafkaError, LeaderNotAvailable, error_for_code
from millrace.broker.protocol.batch import HEADER_SIZE, BatchHeader, verify_crc
from tests import forked
from tests.ports import free_port
from tests.servers import PROGRAM
from tests.waiting import HasLog, patience, source_of, until_async

T = TypeVar("T")
TIMEOUT_S = 120.0


def program_with(constants: Mapping[str, object]) -> Sequence[str]:
    """The program (`MirrorProcess.program`) in which constants of `millrace.mirror` are others:
    `{"offsets.map_keeper.INTERVAL_S": 0.2}`. For what nobody wants to wait for."""
    changes = []
    for place, value in constants.items():
        module, _, name = place.rpartition(".")
        changes.append(f"import millrace.mirror.{module} as changed; changed.{name} = {value!r}; ")
    return "-c", f"import sys; {''.join(changes)}from millrace.deploy.cli import main; sys.exit(main())"


class MirrorProcess:
    """One `millrace mirror run`. `folder` holds its config and log."""

    def __init__(
        self,
        folder: Path,
        target: str,
        sources: dict[str, str],
        *,
        topics: Sequence[str] = (".*",),
        target_name: str = "agg",
        of_target: Mapping[str, Any] | None = None,
        each_source: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.log_path = folder / "mirror.log"
        self.config_path = folder / "mirror.yaml"
        self.process: forked.Process | None = None
        self.program: Sequence[str] = PROGRAM
        self.settings = {
            "name": "aggregate",
            "target": {"cluster": target_name, "bootstrap": [target]} | dict(of_target or {}),
            "sources": [
                {"cluster": name, "bootstrap": [address], "topics": {"include": list(topics)}}
                | dict(each_source or {})
                for name, address in sources.items()
            ],
            "control": {"listen": f"127.0.0.1:{self.port}"},
            "group": {"session_timeout_ms": 6_000, "rebalance_timeout_ms": 10_000},
            "discovery_interval_ms": 500,
            **more,
        }
        self.rewrite()

    @property
    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""

    def rewrite(self) -> None:
        """The settings as they are now into the file."""
        self.config_path.write_text(yaml.safe_dump(self.settings))

    def lines_of(self, key: str) -> list[int]:
        """Numbers of the lines of the file that begin with this key."""
        lines = self.config_path.read_text().splitlines()
        return [number for number, line in enumerate(lines, 1) if line.lstrip(" -").startswith(f"{key}:")]

    def command(self) -> list[str]:
        words = [sys.executable, *self.program, "mirror", "run"]
        return [*words, "--config", str(self.config_path)]

    def start(self) -> MirrorProcess:
        self.process = forked.start(self.command(), log=self.log_path)
        return self

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(patience())

    def terminate(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(patience(90))

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.port}{path}", timeout=patience(30)
            ) as answer:
                return int(answer.status), answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def status(self) -> dict[str, Any]:
        """The /status document; {} while the port does not answer."""
        try:
            return dict(json.loads(self.get("/status")[1]))
        except OSError:
            return {}


async def until(
    condition: Callable[[], Awaitable[T]],
    describe: Callable[[], str] | None = None,
    *,
    logs_of: Iterable[HasLog | Path] = (),
) -> T:
    """Asks seldom: each look is a question to a server. `describe` says more than the condition does."""

    def what() -> str:
        return source_of(condition) if describe is None else f"{source_of(condition)}; {describe()}"

    return await until_async(condition, what, within_s=TIMEOUT_S, logs_of=logs_of, every_s=0.1)


async def send(cluster: Cluster, topic: str, partition: int, batch: bytes | bytearray) -> int:
    """Produces one batch; its base offset. Retries what is retriable."""

    async def attempt() -> int:
        view = await cluster.metadata([topic])
        leader = view.leader(topic, partition)
        if leader is None:  # of a new partition, some broker may not have heard yet
            cluster.invalidate()
            raise LeaderNotAvailable(f"{topic}-{partition}")
        outcome = (await produce(cluster, leader, {(topic, partition): batch}))[topic, partition]
        if outcome.error_code:
            raise error_for_code(outcome.error_code, outcome.error_message or "")
        return outcome.base_offset

    return await cluster.retrying(attempt)


async def end_offset(cluster: Cluster, topic: str, partition: int, *, read_committed: bool = False) -> int:
    """0 where it is not known."""
    try:
        view = await cluster.metadata([topic], max_age_ms=0)
        if topic not in view.topics:
            return 0
        asked = {(topic, partition): LATEST}
        return (await cluster.list_offsets(asked, read_committed=read_committed))[topic, partition].offset
    except KafkaError:
        return 0


async def record_bytes(cluster: Cluster, topic: str, partition: int) -> list[bytes]:
    """The records section of every committed batch of a partition, in order."""
    return [bytes(batch[HEADER_SIZE:]) async for batch, _ in committed_data(cluster, topic, partition)]


async def committed_data(
    cluster: Cluster, topic: str, partition: int, offset: int = 0
) -> AsyncIterator[tuple[memoryview, BatchHeader]]:
    """Every committed batch of a partition from `offset` on, in order; CRCs are checked."""
    async for batch, header, is_data in all_batches(cluster, topic, partition, offset):
        if is_data:
            yield batch, header


async def all_batches(
    cluster: Cluster, topic: str, partition: int, offset: int = 0
) -> AsyncIterator[tuple[memoryview, BatchHeader, bool]]:
    """Every batch of a partition from `offset` on, in order, and whether it is committed data (`committed`);
    CRCs are checked."""
    end = await end_offset(cluster, topic, partition)
    while offset < end:
        view = await cluster.metadata([topic])
        leader = view.leader(topic, partition)
        assert leader is not None
        (answer,) = await fetch(cluster, leader, {(topic, partition): FetchPosition(offset)})
        assert answer.error_code == 0
        for batch, header, is_data in committed_batches(answer.records, answer.aborted):
            verify_crc(batch, 0, header)
            assert header.base_offset == offset
            yield batch, header, is_data
            offset = header.next_offset
