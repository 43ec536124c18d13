"""States that are marked while a broker starts: not read before it serves, and never forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest

from millrace.broker.coordination import cluster_watcher, paths
from millrace.broker.coordination.cluster_watcher import ClusterChanges, ClusterWatcher
from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.coordination.paths import BrokerRegistration, TopicAssignment
from millrace.broker.coordination.session import Node, NodeMissing
from millrace.broker.replication.partition import PartitionState
from tests.waiting import until_async

PARTITIONS = 3
STATE = paths.state_path("t", 0)


class Tree:
    """A session over znodes with one-shot watches; `reads` has the path of every get."""

    def __init__(self) -> None:
        self.nodes: dict[str, tuple[bytes, int]] = {}
        self.reads: list[str] = []
        self._watches: dict[str, list[Callable[[], None]]] = {}

    def on_state(self, _listener: object) -> None:
        return

    def write(self, path: str, data: bytes) -> None:
        version = self.nodes[path][1] + 1 if path in self.nodes else 0
        self.nodes[path] = (data, version)
        for watched in (path, path.rpartition("/")[0]) if version == 0 else (path,):
            for watch in self._watches.pop(watched, []):
                watch()

    async def get(self, path: str, watch: Callable[[], None] = lambda: None) -> Node:
        await asyncio.sleep(0)
        self.reads.append(path)
        if path not in self.nodes:
            raise NodeMissing(path)
        self._watches.setdefault(path, []).append(watch)
        return Node(*self.nodes[path], owner=0, created_zxid=1)

    async def exists(self, path: str, watch: Callable[[], None]) -> bool:
        self._watches.setdefault(path, []).append(watch)
        return path in self.nodes

    async def children(self, path: str, watch: Callable[[], None]) -> list[str]:
        self._watches.setdefault(path, []).append(watch)
        return [name.removeprefix(f"{path}/") for name in self.nodes if name.rpartition("/")[0] == path]


class Started:
    """A watcher that has read a topic of three partitions, and what it has told since."""

    def __init__(self) -> None:
        self.tree = Tree()
        self.cache = MetadataCache()
        self.told: list[ClusterChanges] = []
        session: Any = self.tree
        self.watcher = ClusterWatcher(session, self.cache, self.told.append)

    async def start(self, *, states_rest: bool = True) -> None:
        replicas = dict.fromkeys(range(PARTITIONS), (1, 2))
        self.tree.write(paths.topic_path("t"), paths.encode_topic(TopicAssignment(uuid4(), replicas)))
        for number in range(PARTITIONS):
            self.write_state(number, leader=1, leader_epoch=0)
        await self.watcher.start()
        assert all(self.leader(number) == 1 for number in range(PARTITIONS)), "the first reading is whole"
        await self.idle()  # a round that finds nothing follows the first reading
        self.tree.reads.clear()
        self.told.clear()
        if states_rest:
            self.watcher.rest_states()

    async def idle(self) -> None:
        """Long enough for a round of reading here, where nothing waits for a server."""
        for _ in range(50):
            await asyncio.sleep(0)

    def write_state(self, number: int, leader: int, leader_epoch: int) -> None:
        state = PartitionState(leader, leader_epoch, (leader,), 1)
        self.tree.write(paths.state_path("t", number), paths.encode_state(state))

    def leader(self, number: int) -> int:
        part = self.cache.partition("t", number)
        assert part is not None
        return part.leader

    async def until(self, holds: Callable[[], bool]) -> None:
        await until_async(holds)

    async def register(self, broker_id: int) -> None:
        """Something else that changes, and has been read when this returns."""
        node = paths.encode_broker(BrokerRegistration(broker_id, "h", 9092, None), 0)
        self.tree.write(paths.broker_path(broker_id), node)
        await self.until(lambda: broker_id in self.cache.brokers and bool(self.told))


def scenario(story: Callable[[Started], Any]) -> None:
    async def run() -> None:
        started = Started()
        try:
            await story(started)
        finally:
            await started.watcher.stop()

    asyncio.run(run())


def test_states_rest_while_everything_else_is_read_and_told() -> None:
    async def story(started: Started) -> None:
        await started.start()
        started.write_state(0, leader=1, leader_epoch=1)
        await started.register(7)
        assert STATE not in started.tree.reads
        assert started.told[0].brokers and not any(changes.topics for changes in started.told)

    scenario(story)


def test_resting_states_alone_wake_nobody() -> None:
    async def story(started: Started) -> None:
        await started.start()
        for number in range(PARTITIONS):
            started.write_state(number, leader=1, leader_epoch=1)
        await started.idle()
        assert (started.tree.reads, started.told) == ([], [])

    scenario(story)


def test_what_others_wrote_meanwhile_is_read_and_watched_when_the_rest_ends() -> None:
    async def story(started: Started) -> None:
        await started.start()
        started.write_state(0, leader=1, leader_epoch=1)  # as this broker does at its start
        started.write_state(0, leader=2, leader_epoch=2)  # as a controller may, before the first is read
        await started.register(7)  # a round of reading that passes over what rests
        started.tree.reads.clear()
        started.watcher.read_states()
        await started.until(lambda: started.leader(0) == 2)
        assert started.tree.reads == [STATE]
        await started.until(lambda: any("t" in changes.topics for changes in started.told))
        started.write_state(0, leader=1, leader_epoch=3)
        await started.until(lambda: started.leader(0) == 1)

    scenario(story)


def test_rest_ends_by_itself_where_a_start_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_watcher, "STATES_REST_S", 0.01)

    async def story(started: Started) -> None:
        await started.start()
        started.write_state(1, leader=2, leader_epoch=1)
        await started.until(lambda: started.leader(1) == 2)

    scenario(story)


def test_before_the_rest_states_are_read_at_once() -> None:
    """What a start leaves alone because of them, no version fences."""

    async def story(started: Started) -> None:
        await started.start(states_rest=False)
        started.write_state(2, leader=2, leader_epoch=1)
        await started.until(lambda: started.leader(2) == 2)

    scenario(story)
