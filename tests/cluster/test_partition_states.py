"""In-sync sets written to a real ZooKeeper: versions, topics made anew, answers that got lost."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from millrace.broker.coordination import paths
from millrace.broker.coordination.broker_registry import prepare_cluster
from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.coordination.partition_states import PartitionStates
from millrace.broker.coordination.session import Session, SessionError
from millrace.broker.replication.in_sync_sets import StateConflict
from millrace.broker.replication.partition import PartitionState
from tests.servers import ZooKeeper
from tests.waiting import patience

pytestmark = pytest.mark.java

ID = uuid.UUID(int=7)
STATE = PartitionState(1, 0, (1, 2, 3), 1, 0)


def run(zookeeper: ZooKeeper, scenario: Callable[[Session, PartitionStates], Awaitable[None]]) -> None:
    async def main() -> None:
        session = Session(zookeeper.chroot(), session_timeout_ms=15_000, connection_timeout_ms=30_000)
        await session.start()
        cache = MetadataCache()
        try:
            await prepare_cluster(session)
            assignment = paths.TopicAssignment(ID, {0: (1, 2, 3)})
            await session.create(paths.topic_path("t"), paths.encode_topic(assignment))
            await session.ensure(paths.partition_path("t", 0))
            await session.create(paths.state_path("t", 0), paths.encode_state(STATE))
            cache.set_assignment("t", assignment)
            cache.set_state("t", 0, STATE, 0)
            await scenario(session, PartitionStates(session, cache, cache.announce))
            known = cache.partition("t", 0)
            assert known is not None
            node = await session.get(paths.state_path("t", 0))
            assert known.state == paths.decode_state(node.data) or known.state_version < node.version
        finally:
            await session.stop()

    asyncio.run(main())


def test_write_is_tied_to_the_version_it_was_based_on(zookeeper: ZooKeeper) -> None:
    async def scenario(session: Session, states: PartitionStates) -> None:
        assert await states.write("t", ID, 0, replace(STATE, isr=(1, 2))) == 1
        with pytest.raises(StateConflict):
            await states.write("t", ID, 0, replace(STATE, isr=(1,)))
        assert await states.write("t", ID, 0, replace(STATE, isr=(1,), version=1)) == 2
        node = await session.get(paths.state_path("t", 0))
        assert paths.decode_state(node.data).isr == (1,)
        with pytest.raises(StateConflict):
            await states.write("t", ID, 0, replace(STATE, version=-1))
        with pytest.raises(StateConflict):
            await states.write("gone", ID, 0, STATE)

    run(zookeeper, scenario)


def test_topic_made_anew_is_not_touched(zookeeper: ZooKeeper) -> None:
    async def scenario(session: Session, states: PartitionStates) -> None:
        other = paths.TopicAssignment(uuid.UUID(int=8), {0: (1, 2, 3)})
        await session.set(paths.topic_path("t"), paths.encode_topic(other))
        with pytest.raises(StateConflict):
            await states.write("t", ID, 0, replace(STATE, isr=(1,)))
        assert (await session.get(paths.state_path("t", 0))).version == 0

    run(zookeeper, scenario)


@pytest.mark.parametrize("happened", [True, False])
def test_lost_answer_is_made_certain(
    zookeeper: ZooKeeper, monkeypatch: pytest.MonkeyPatch, happened: bool
) -> None:
    async def scenario(session: Session, states: PartitionStates) -> None:
        commit, attempts = session.commit, 0

        async def lossy(operations: object) -> None:
            nonlocal attempts
            attempts += 1
            if attempts > 1 or happened:
                await commit(operations)  # type: ignore[arg-type]
            if attempts == 1:
                raise SessionError("the connection broke")

        monkeypatch.setattr(session, "commit", lossy)
        assert await states.write("t", ID, 0, replace(STATE, isr=(1, 3))) == 1
        assert attempts == (1 if happened else 2)
        node = await session.get(paths.state_path("t", 0))
        assert (node.version, paths.decode_state(node.data).isr) == (1, (1, 3))

    run(zookeeper, scenario)


def test_a_topic_whose_replicas_keep_changing_is_written_in_the_end(
    zookeeper: ZooKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while its partitions move one after the other. A write that gave up would stay pending for ever."""

    async def scenario(session: Session, states: PartitionStates) -> None:
        commit, changes = session.commit, 0

        async def overtaken(operations: object) -> None:
            nonlocal changes
            if changes < 12:
                changes += 1
                node = await session.get(paths.topic_path("t"))
                await session.set(paths.topic_path("t"), node.data, node.version)
            await commit(operations)  # type: ignore[arg-type]

        monkeypatch.setattr(session, "commit", overtaken)
        assert await asyncio.wait_for(states.write("t", ID, 0, replace(STATE, isr=(1, 2))), patience(90)) == 1
        assert changes == 12

    run(zookeeper, scenario)


def test_while_the_session_is_away_nothing_is_written_and_the_write_comes_after(zookeeper: ZooKeeper) -> None:
    async def scenario(session: Session, states: PartitionStates) -> None:
        zookeeper.pause()
        try:
            writing = asyncio.ensure_future(states.write("t", ID, 0, replace(STATE, isr=(1, 2))))
            done, _ = await asyncio.wait([writing], timeout=1.0)
            assert not done
        finally:
            zookeeper.resume()
        assert await asyncio.wait_for(writing, patience(90)) == 1

    run(zookeeper, scenario)


def test_what_is_not_wanted_any_more_when_the_session_is_back_is_not_written(zookeeper: ZooKeeper) -> None:
    async def scenario(session: Session, states: PartitionStates) -> None:
        is_wanted = True
        zookeeper.pause()
        try:
            new = replace(STATE, isr=(1,))
            writing = asyncio.ensure_future(states.write("t", ID, 0, new, lambda _: is_wanted))
            done, _ = await asyncio.wait([writing], timeout=1.0)
            assert not done
            is_wanted = False
        finally:
            zookeeper.resume()
        with pytest.raises(StateConflict):
            await asyncio.wait_for(writing, patience(90))
        assert (await session.get(paths.state_path("t", 0))).version == 0

    run(zookeeper, scenario)
