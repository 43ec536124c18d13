"""Algorithm 1 in virtual time: the real connector, rules, registry, fetching and streams of several
consumers over a virtual ZooKeeper and virtual logs.

Each history has consumers that come, leave, are killed, lose connections (answers and watches with them) and
sessions, while topics and partitions are added. What must hold, whatever happens:

- a message is handed out only by the consumer whose session holds the partition's owner znode (or by one
  whose session is over at the server without its knowing);
- every message is worked on to the end by somebody: a commit never covers what was lost with a process;
- when the faults end, every partition is owned and read exactly once, as the range rule says.

A failure prints the variables that run that history alone (`tests/seeds.py`). Breaking a rule must make some
history fail: `test_a_broken_rule_is_found`.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from millrace.broker.client.metadata import Broker, ClusterMetadata, PartitionMetadata, TopicMetadata
from millrace.broker.client.offsets import ListedOffset
from millrace.broker.client.raw_fetch import FetchedPartition, FetchPosition
from millrace.broker.coordination.zookeeper_consumer import connector as connector_module
from millrace.broker.coordination.zookeeper_consumer import fetching as fetching_module
from millrace.broker.coordination.zookeeper_consumer import rules as rules
from millrace.broker.coordination.zookeeper_consumer.connector import ConsumerConnector
from millrace.broker.coordination.zookeeper_consumer.options import ConsumerOptions
from millrace.broker.coordination.zookeeper_consumer.registry import ConsumerRegistry
from millrace.broker.coordination.zookeeper_consumer.streams import Reading, StreamQueue
from millrace.broker.protocol.records import Record, build_batch
from millrace.broker.protocol.topic_partition import TopicPartition
from tests import seeds
from tests.simulation import histories
from tests.simulation.virtual_zookeeper import VirtualLoop, VirtualSession, VirtualZooKeeper

HISTORY_COUNT = seeds.runs(30)
MUTATION_HISTORY_COUNT = 60
GROUP = "g"
SESSION_TIMEOUT_MS = 4_000
TOPICS = ("t-a", "t-b", "t-c")


# -- brokers ---------------------------------------------------------------------------------------------


class VirtualCluster:
    """The brokers' side: logs that grow, one leader for all."""

    world: World

    def __init__(self, name: str, bootstrap: Collection[str], **_: Any) -> None:
        assert list(bootstrap) == ["h:1"]

    async def metadata(self, topics: Collection[str]) -> ClusterMetadata:
        await asyncio.sleep(0.002)
        leader = PartitionMetadata(1, 0, (1,), (1,))
        found = {
            topic: TopicMetadata(
                topic,
                None,
                False,
                {key[1]: leader for key in self.world.logs if key[0] == topic},  # type: ignore[arg-type]
            )
            for topic in topics
        }
        return ClusterMetadata("c", 1, {1: Broker("h", 1)}, found)

    async def list_offsets(
        self, asked: Mapping[TopicPartition, int], read_committed: bool
    ) -> dict[TopicPartition, ListedOffset]:
        await asyncio.sleep(0.002)
        return dict.fromkeys(asked, ListedOffset(0, -1, 0))

    def invalidate(self) -> None: ...
    async def close(self) -> None: ...


async def virtual_fetch(
    cluster: VirtualCluster, node_id: int, positions: Mapping[TopicPartition, FetchPosition], **_: Any
) -> list[FetchedPartition]:
    await asyncio.sleep(0.05)
    answers = []
    for key, at in positions.items():
        end = min(cluster.world.logs[key], at.offset + 4)
        records = b""
        if at.offset < end:
            each = [Record(None, b"%d" % number) for number in range(at.offset, end)]
            records = bytes(build_batch(each, base_offset=at.offset))
        answers.append(FetchedPartition(*key, 0, end, end, 0, (), None, memoryview(records)))
    return answers


# -- a history -------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Process:
    """A consumer and the task that works on its messages."""

    connector: ConsumerConnector
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    is_dead: bool = False

    @property
    def session(self) -> VirtualSession:
        return self.connector._session  # type: ignore[return-value]


@dataclass
class World:
    rng: random.Random
    zk: VirtualZooKeeper
    logs: dict[TopicPartition, int] = field(default_factory=dict)
    processes: list[Process] = field(default_factory=list)
    worked_on: set[tuple[TopicPartition, int]] = field(default_factory=set)
    delivered_count: int = 0
    is_growing: bool = True

    def add_topic(self, topic: str, partitions: int) -> None:
        before = sum(key[0] == topic for key in self.logs)
        for number in range(before, max(before, partitions)):
            self.logs[topic, number] = 0
        count = sum(key[0] == topic for key in self.logs)
        data = json.dumps({"version": 3, "partitions": {str(n): [1] for n in range(count)}}).encode()
        path = f"/brokers/topics/{topic}"
        if path in self.zk.nodes:
            self.zk.set(path, data)
        else:
            self.zk.create(path, data)

    async def grow(self) -> None:
        while self.is_growing:
            await asyncio.sleep(0.1)
            for key in self.logs:
                if self.rng.random() < 0.3:
                    self.logs[key] += self.rng.randint(1, 5)

    def spawn(self) -> Process:
        number = len(self.processes)
        options = ConsumerOptions(
            consumer_id=f"{self.rng.choice('abcdef')}{number}",
            zookeeper_session_timeout_ms=SESSION_TIMEOUT_MS,
            auto_offset_reset="smallest",
            auto_commit_interval_ms=self.rng.choice((200, 1_000, 60_000)),
            rebalance_max_retries=20,
            rebalance_backoff_ms=500,
        )
        process = Process(ConsumerConnector("zk", GROUP, options))
        process.connector._rng = random.Random(self.rng.random())
        self.processes.append(process)
        process.tasks.append(asyncio.get_running_loop().create_task(self._live(process)))
        return process

    async def _live(self, process: Process) -> None:
        streams = self.rng.randint(1, 2)
        if self.rng.random() < 0.5:
            subscription = rules.filter_subscription("t-.*", None, streams)
        else:
            subscription = rules.static_subscription(dict.fromkeys(TOPICS, streams))
        await process.connector.start()
        queues = await process.connector.create_streams(subscription)
        for queue in queues.values():
            process.tasks.append(asyncio.get_running_loop().create_task(self._work(process, queue)))

    async def _work(self, process: Process, queue: StreamQueue) -> None:
        while True:
            message = queue.take(queue)
            if message is None:
                await queue.wait_async()
                continue
            self.delivered_count += 1
            key = (message.topic, message.partition)
            self._check_owner(process, key)
            if self.rng.random() < 0.2:
                await asyncio.sleep(self.rng.choice((0.0, 0.02, 0.5)))
            self.worked_on.add((key, message.offset))

    def _check_owner(self, process: Process, key: TopicPartition) -> None:
        node = self.zk.nodes.get(f"/consumers/{GROUP}/owners/{key[0]}/{key[1]}")
        session = process.session
        if session.id in self.zk.live:
            assert node is not None and node.owner == session.id, (
                f"{process.connector.consumer_id} delivers {key} without owning it"
            )

    def kill(self, process: Process) -> None:
        """SIGKILL: nothing that it does reaches anyone any more."""
        process.is_dead = True
        session = process.session
        if session.id:
            session.cut(None)
        session._is_over = True
        for task in [*process.tasks, *process.connector._tasks, process.connector._fetching_task]:
            if task is not None:
                task.cancel()
        if process.connector._expiry is not None:
            process.connector._expiry.cancel()
        process.connector._closed = True

    async def leave(self, process: Process) -> None:
        process.is_dead = True
        for task in process.tasks:
            task.cancel()
        await process.connector.shutdown(None)

    @property
    def alive(self) -> list[Process]:
        return [process for process in self.processes if not process.is_dead]

    def check_nobody_failed(self) -> None:
        for process in self.alive:
            if process.connector._failure is not None:
                raise process.connector._failure
            for task in process.tasks:
                if task.done() and not task.cancelled() and task.exception() is not None:
                    raise task.exception() or AssertionError

    def problem(self) -> str:
        """Why this is not yet the end that the rules promise; an empty text when it is."""
        subscriptions = {
            process.connector.consumer_id: process.connector._subscription for process in self.alive
        }
        partitions: dict[str, list[int]] = {}
        for topic, number in self.logs:
            partitions.setdefault(topic, []).append(number)
        view = rules.GroupView(subscriptions, partitions)
        for process in self.alive:
            if process.session._is_cut:
                return f"{process.connector.consumer_id} is still cut off"
            wanted = rules.share_of(process.connector.consumer_id, view)
            if process.connector._held != wanted or set(process.connector._readings) != set(wanted):
                return f"{process.connector.consumer_id} holds {process.connector._held}, should {wanted}"
            for (topic, number), thread in wanted.items():
                node = self.zk.nodes.get(f"/consumers/{GROUP}/owners/{topic}/{number}")
                if node is None or (node.data.decode(), node.owner) != (str(thread), process.session.id):
                    return f"the owner znode of {topic}-{number} is {node}"
        missing = [
            (key, offset)
            for key, end in self.logs.items()
            for offset in range(end)
            if (key, offset) not in self.worked_on
        ]
        return f"{len(missing)} messages were never worked on, {missing[:3]}" if missing else ""


async def _history(world: World) -> None:
    rng, zk = world.rng, world.zk
    for path in ("/brokers/ids", "/brokers/topics", "/consumers"):
        zk.ensure(path)
    zk.create("/brokers/ids/1", json.dumps({"host": "h", "port": 1, "version": 5}).encode())
    world.add_topic(TOPICS[0], rng.randint(1, 5))
    growing = asyncio.get_running_loop().create_task(world.grow())
    for _ in range(rng.randint(1, 3)):
        world.spawn()
    for _ in range(rng.randint(4, 12)):
        await asyncio.sleep(rng.choice((0.05, 0.3, 1.0, 5.0)))
        world.check_nobody_failed()
        victims = world.alive
        kind = rng.choice(("join", "join", "kill", "leave", "cut", "cut", "long cut", "topic", "grow"))
        if kind == "join" and len(victims) < 5:
            world.spawn()
        elif kind == "kill" and len(victims) > 1:
            world.kill(rng.choice(victims))
        elif kind == "leave" and len(victims) > 1:
            await world.leave(rng.choice(victims))
        elif kind == "cut" and victims:
            rng.choice(victims).session.cut(rng.uniform(0.05, 2.0))
        elif kind == "long cut" and victims:
            rng.choice(victims).session.cut(rng.uniform(3.0, 9.0))
        elif kind == "topic":
            world.add_topic(rng.choice(TOPICS), rng.randint(1, 5))
        elif kind == "grow":
            for topic in sorted({key[0] for key in world.logs}):
                world.add_topic(topic, rng.randint(1, 6))
    # No more faults: it must settle, and everything be worked on.
    world.is_growing = False
    await growing
    loop, worked_on, since = asyncio.get_running_loop(), -1, 0.0
    while problem := world.problem():
        world.check_nobody_failed()
        if len(world.worked_on) > worked_on:  # one that reads all alone takes its time
            worked_on, since = len(world.worked_on), loop.time()
        assert loop.time() < since + 60, problem
        await asyncio.sleep(0.5)
    assert world.delivered_count > 0
    for process in world.alive:
        await world.leave(process)
    await asyncio.sleep(SESSION_TIMEOUT_MS / 1000 * 2)  # those that were killed expire
    leftovers = [path for path, node in zk.nodes.items() if node.owner]
    assert not leftovers, f"left behind after shutdown: {leftovers}"


@contextmanager
def virtual(seed: int) -> Iterator[World]:
    rng = random.Random(seed)
    world = World(rng, VirtualZooKeeper(rng))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VirtualSession, "server", world.zk, raising=False)
        patch.setattr(VirtualCluster, "world", world, raising=False)
        patch.setattr(connector_module, "Session", VirtualSession)
        patch.setattr(connector_module, "Cluster", VirtualCluster)
        patch.setattr(fetching_module, "fetch", virtual_fetch)
        yield world


def run(seed: int) -> None:
    loop = VirtualLoop()
    loop.set_exception_handler(lambda *_: None)  # what failed is found by `check_nobody_failed`
    with virtual(seed) as world:
        try:
            loop.run_until_complete(_history(world))
        finally:
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(asyncio.sleep(0))
            loop.run_until_complete(asyncio.sleep(0))
            loop.close()


def test_every_partition_is_owned_once_and_every_message_worked_on() -> None:
    first_seed = seeds.given()
    for seed in range(first_seed, first_seed + HISTORY_COUNT):
        try:
            run(seed)
        except BaseException:
            print(f"{seeds.VARIABLE}={seed} {seeds.RUNS_VARIABLE}=1 fails")
            raise
        histories.went_through("consumers of the old model")


# -- the simulator itself --------------------------------------------------------------------------------


async def _claim_whatever(self: ConsumerRegistry, share: rules.Share) -> list[TopicPartition]:
    await _CLAIM(self, share)
    return []


async def _release_nothing(self: ConsumerRegistry) -> None:
    return None


def _keep_watches(self: ConsumerRegistry) -> None:
    return None


def _commit_what_is_in_hand(self: StreamQueue, reading: Reading, holder: object = None) -> int:
    return reading.delivered


def _floor_only(partitions: Collection[int], threads: list[rules.ThreadId]) -> dict[Any, tuple[int, ...]]:
    """The paper's own formula: a remainder belongs to nobody."""
    ordered, each = sorted(partitions), len(partitions) // max(1, len(threads))
    return {thread: tuple(ordered[i * each : (i + 1) * each]) for i, thread in enumerate(threads)}


def _read_on(self: ConsumerConnector) -> None:
    """Give partitions back without stopping the streams."""
    self._held = None
    self._left.update(self._readings)
    self._readings = {}


_CLAIM = ConsumerRegistry.claim


@pytest.mark.parametrize(
    ("where", "name", "broken"),
    [
        (ConsumerRegistry, "claim", _claim_whatever),
        (ConsumerRegistry, "release_all", _release_nothing),
        (ConsumerRegistry, "forget_watches", _keep_watches),
        (StreamQueue, "position", _commit_what_is_in_hand),
        (ConsumerConnector, "_halt", _read_on),
        (rules, "assign_range", _floor_only),
    ],
)
def test_a_broken_rule_is_found(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, broken: Any) -> None:
    monkeypatch.setattr(where, name, broken)
    for seed in range(MUTATION_HISTORY_COUNT):
        try:
            run(seed)
        except (AssertionError, rules.RebalanceFailed) as error:
            print(f"seed {seed}: {error}")
            return
    pytest.fail(f"no history fails without {name}")
