"""The controller's removal of topics in a real ZooKeeper: by an old picture, nothing new is deleted."""

from __future__ import annotations

import asyncio
import uuid

import pytest

from millrace.broker.coordination import paths
from millrace.broker.coordination.broker_registry import prepare_cluster
from millrace.broker.coordination.controller_runner import ControllerRunner
from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.coordination.session import Session
from millrace.broker.replication.partition import PartitionState
from tests.servers import ZooKeeper
from tests.waiting import until_async

pytestmark = pytest.mark.java

DEADLINE_S = 90.0


async def make_topic(session: Session, name: str, partitions: int) -> None:
    assignment = paths.TopicAssignment(uuid.uuid4(), dict.fromkeys(range(partitions), (1,)))
    await session.create(paths.topic_config_path(name), paths.encode_config({}))
    await session.create(paths.topic_path(name), paths.encode_topic(assignment))
    for number in range(partitions):
        await session.ensure(paths.partition_path(name, number))
        state = paths.encode_state(PartitionState(1, 0, (1,), 1))
        await session.create(paths.state_path(name, number), state)


async def until_gone(session: Session, path: str) -> None:
    async def is_gone() -> bool:
        return not await session.exists(path)

    await until_async(is_gone, f"{path} is removed", within_s=DEADLINE_S, every_s=0.02)


def test_a_topic_made_anew_survives_a_controller_that_still_sees_the_mark(zookeeper: ZooKeeper) -> None:
    async def scenario() -> None:
        session = Session(zookeeper.chroot(), session_timeout_ms=20_000, connection_timeout_ms=30_000)
        await session.start()
        cache = MetadataCache()
        # This picture is never read again: what it shows is old from the first removal on.
        cache.deleting = frozenset({"t"})
        controller = ControllerRunner(session, cache, 1, lambda: 1)
        try:
            await prepare_cluster(session)
            await make_topic(session, "t", 3)
            await session.create(paths.delete_topic_path("t"))
            controller.start()
            await until_gone(session, paths.delete_topic_path("t"))
            assert not await session.exists(paths.topic_path("t"))

            await make_topic(session, "t", 3)
            await make_topic(session, "other", 1)
            await session.create(paths.delete_topic_path("other"))
            cache.deleting = frozenset({"t", "other"})
            controller.wake()
            await until_gone(session, paths.topic_path("other"))
            # "other" comes first by name; one more round makes sure that "t" was looked at.
            await make_topic(session, "zz", 1)
            await session.create(paths.delete_topic_path("zz"))
            cache.deleting = frozenset({"t", "zz"})
            controller.wake()
            await until_gone(session, paths.topic_path("zz"))
            assert await session.exists(paths.topic_path("t")), "a topic that nobody wanted gone was deleted"
            assert len(await session.children(paths.partitions_path("t"))) == 3
        finally:
            await controller.stop()
            await session.stop()

    asyncio.run(scenario())
