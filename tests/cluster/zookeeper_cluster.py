"""A cluster's coordination over a real ZooKeeper, without brokers: what tests of single steps need."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager

from millrace.broker.coordination import paths
from millrace.broker.coordination.broker_registry import prepare_cluster
from millrace.broker.coordination.controller_client import ControllerClient
from millrace.broker.coordination.controller_runner import ControllerRunner
from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.coordination.paths import BrokerRegistration, TopicAssignment
from millrace.broker.coordination.session import Create, Operation, Session
from millrace.broker.coordination.transactions import cut
from millrace.broker.replication.partition import PartitionState
from tests.servers import ZooKeeper

DEADLINE_S = 90.0
BROKER = 1


class Coordination:
    """One session, a controller, a client, and a picture of the cluster that no watcher reads: it shows what
    a test has put into it."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.cache = MetadataCache()
        self.cache.set_broker(BrokerRegistration(BROKER, "h", 1))
        self.controller = ControllerRunner(session, self.cache, BROKER, lambda: 1)
        self.client = ControllerClient(session, self.cache, lambda _config: None)

    async def make(
        self,
        topic: str,
        replicas: Mapping[int, tuple[int, ...]],
        config: Mapping[str, str] | None = None,
        *,
        state: PartitionState | None = None,
        to: tuple[int, ...] = (),
    ) -> uuid.UUID:
        """A topic as the client makes it, with states as the controller does; all partitions move to the
        brokers `to`, if any."""
        topic_id = uuid.uuid4()
        adding, removing = (dict.fromkeys(replicas, to), replicas) if to else ({}, {})
        both = {number: (*to, *brokers) for number, brokers in replicas.items()}
        data = paths.encode_topic(TopicAssignment(topic_id, both, adding, removing))
        settings = Create(paths.topic_config_path(topic), paths.encode_config(config or {}))
        await self.session.commit([Create(paths.topic_path(topic), data), settings])
        if state is not None:
            made: list[Operation] = [Create(paths.partitions_path(topic), b"")]
            for number in replicas:
                made.append(Create(paths.partition_path(topic, number), b""))
                made.append(Create(paths.state_path(topic, number), paths.encode_state(state)))
            for operations in cut(made):
                await self.session.commit(operations)
        return topic_id

    async def show(self, topic: str, state: PartitionState | None = None) -> None:
        """Put a topic into the picture as it stands now; `state` is that of all, as `make` wrote it."""
        node = await self.session.get(paths.topic_path(topic))
        assignment = paths.decode_topic(node.data)
        self.cache.set_assignment(topic, assignment, node.version)
        settings = await self.session.get(paths.topic_config_path(topic))
        self.cache.set_config(topic, paths.decode_topic_config(topic, settings.data))
        if state is not None:
            for number in assignment.partitions:
                self.cache.set_state(topic, number, state, 0)
        elif await self.session.exists(paths.partitions_path(topic)):
            read = (self.session.get(paths.state_path(topic, number)) for number in assignment.partitions)
            for number, found in zip(assignment.partitions, await asyncio.gather(*read), strict=True):
                self.cache.set_state(topic, number, paths.decode_state(found.data), found.version)

    async def settings(self, topic: str) -> dict[str, str]:
        return paths.decode_config((await self.session.get(paths.topic_config_path(topic))).data)

    async def topic_id(self, topic: str) -> uuid.UUID:
        return paths.decode_topic((await self.session.get(paths.topic_path(topic))).data).topic_id

    async def ask_for_removal(self, topic: str, topic_id: uuid.UUID) -> None:
        await self.session.create(paths.delete_topic_path(topic), paths.encode_deletion(topic_id))

    async def carry_out(self, deleting: Iterable[str]) -> None:
        """One round of the controller, whose picture shows these topics as marked."""
        self.cache.deleting = frozenset(deleting)
        if not self.controller.in_office:
            await self.controller._stand_for_election()
        await self.controller._carry_out()


@asynccontextmanager
async def coordination(zookeeper: ZooKeeper) -> AsyncIterator[Coordination]:
    session = Session(zookeeper.chroot(), session_timeout_ms=20_000, connection_timeout_ms=30_000)
    await session.start()
    try:
        await prepare_cluster(session)
        yield Coordination(session)
    finally:
        await session.stop()


def story(zookeeper: ZooKeeper, told: Callable[[Coordination], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(DEADLINE_S), coordination(zookeeper) as cluster:
            await told(cluster)

    asyncio.run(run())
