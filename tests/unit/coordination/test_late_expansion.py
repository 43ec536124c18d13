"""A leader takes a follower into the in-sync set, slowly, and meanwhile the follower is not what it was."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace
from typing import Any

import pytest

from millrace.broker.coordination import paths
from millrace.broker.coordination.broker_registry import leave_in_sync_sets
from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.coordination.partition_states import PartitionStates
from millrace.broker.coordination.paths import BrokerRegistration, TopicAssignment
from millrace.broker.coordination.reassignments import Reassignments
from millrace.broker.coordination.session import Check, Node, SessionState, SetData, VersionConflict
from millrace.broker.errors import FencedLeaderEpoch
from millrace.broker.replication.in_sync_sets import StateConflict
from millrace.broker.replication.partition import PartitionState, Replica

TOPIC_ID = uuid.uuid4()
ASSIGNMENT = TopicAssignment(TOPIC_ID, {0: (1, 2)})
STATE = paths.state_path("t", 0)


class Znodes:
    """What both brokers see."""

    def __init__(self, state: PartitionState, assignment: TopicAssignment = ASSIGNMENT) -> None:
        self.nodes = {
            paths.DELETE_TOPICS: Node(b"", 0, 0, 0),
            paths.topic_path("t"): Node(paths.encode_topic(assignment), 0, 0, 0),
            STATE: Node(paths.encode_state(state), 0, 0, 0),
        }


class ZnodesSession:
    """One broker's session. Its writes arrive while `reaches` is set."""

    state = SessionState.CONNECTED

    def __init__(self, znodes: Znodes) -> None:
        self._znodes = znodes
        self.reaches = asyncio.Event()
        self.reaches.set()

    async def get(self, path: str) -> Node:
        return self._znodes.nodes[path]

    async def children(self, path: str) -> list[str]:
        assert path == paths.TOPICS
        return ["t"]

    async def commit(self, operations: list[Any]) -> None:
        await self.reaches.wait()
        nodes = self._znodes.nodes
        for each in operations:
            if nodes[each.path].version != each.version:
                raise VersionConflict(each.path)
        for each in operations:
            if isinstance(each, SetData):
                nodes[each.path] = replace(nodes[each.path], data=each.data, version=each.version + 1)
            else:
                assert isinstance(each, Check)


def picture(znodes: Znodes) -> MetadataCache:
    cache = MetadataCache()
    for broker in (1, 2, 3):
        cache.set_broker(BrokerRegistration(broker, "h", broker))
    topic = znodes.nodes[paths.topic_path("t")]
    cache.set_assignment("t", paths.decode_topic(topic.data), topic.version)
    node = znodes.nodes[STATE]
    cache.set_state("t", 0, paths.decode_state(node.data), node.version)
    return cache


@pytest.mark.safety
@pytest.mark.parametrize("is_late", [True, False])
def test_a_follower_that_lost_power_is_not_taken_into_the_in_sync_set_for_what_it_had_before(
    is_late: bool,
) -> None:
    """Alone in sync after its leader's end it would lead, without what both had acknowledged."""

    async def run() -> None:
        znodes = Znodes(PartitionState(1, 3, (1,), 1))
        leaders, followers = ZnodesSession(znodes), ZnodesSession(znodes)
        # 2 has caught up; ZooKeeper is slow to hear of it from 1.
        leaders.reaches.clear()
        session: Any = leaders
        states = PartitionStates(session, picture(znodes), lambda: None)
        taken_in = PartitionState(1, 3, (1, 2), 1, version=0)
        writing = asyncio.ensure_future(states.write("t", TOPIC_ID, 0, taken_in))
        await asyncio.sleep(0)
        seen = picture(znodes)
        if not is_late:
            leaders.reaches.set()
            await writing
        # 2 comes back without its last records.
        session = followers
        await leave_in_sync_sets(session, seen, 2, was_clean=False)
        leaders.reaches.set()
        if is_late:
            with pytest.raises(StateConflict):
                await writing
        assert paths.decode_state(znodes.nodes[STATE].data).isr == (1,)

    asyncio.run(run())


@pytest.mark.safety
@pytest.mark.parametrize("target", [None, (1, 3)], ids=["called off", "to another"])
def test_a_replica_whose_move_was_called_off_is_not_taken_into_the_in_sync_set(
    target: tuple[int, ...] | None,
) -> None:
    """It deletes its log then. The next move to it would be over at once, and the other logs be gone, too."""

    async def run() -> None:
        moving = TopicAssignment(TOPIC_ID, {0: (2, 1)}, adding={0: (2,)}, removing={0: (1,)})
        znodes = Znodes(PartitionState(1, 3, (1,), 1), moving)
        leaders = ZnodesSession(znodes)
        leaders.reaches.clear()
        session: Any = leaders
        states = PartitionStates(session, picture(znodes), lambda: None)
        taken_in = PartitionState(1, 3, (2, 1), 1, version=0)
        writing = asyncio.ensure_future(states.write("t", TOPIC_ID, 0, taken_in))
        await asyncio.sleep(0)
        session = ZnodesSession(znodes)
        answers = await Reassignments(session, picture(znodes)).alter("t", {0: target}, 0)
        assert answers == {0: None}
        leaders.reaches.set()
        with pytest.raises(StateConflict):
            await writing
        assert paths.decode_state(znodes.nodes[STATE].data).isr == (1,)

    asyncio.run(run())


@pytest.mark.safety
def test_a_replica_that_has_left_is_not_taken_in_by_a_leader_that_has_not_heard_of_it() -> None:
    """The leader knows the newest state, and not the replicas that came with it."""

    async def run() -> None:
        znodes = Znodes(PartitionState(1, 3, (1,), 1), TopicAssignment(TOPIC_ID, {0: (1, 3)}))
        leader = Replica(1)
        leader.apply(PartitionState(1, 3, (1,), 1, version=0), 0, (1, 2, 3))
        for follower in (2, 3):
            leader.check_follower(follower, 3).fetched(0, 0, 0, 0)
        session: Any = ZnodesSession(znodes)
        states = PartitionStates(session, picture(znodes), lambda: None)
        change = leader.expansion_due(2)
        assert change is not None
        with pytest.raises(StateConflict):
            await states.write("t", TOPIC_ID, 0, change.state, change.fits)
        following = leader.expansion_due(3)
        assert following is not None and following.added == (3,)
        await states.write("t", TOPIC_ID, 0, following.state, following.fits)
        assert paths.decode_state(znodes.nodes[STATE].data).isr == (1, 3)

    asyncio.run(run())


@pytest.mark.safety
def test_what_a_replica_had_before_it_left_says_nothing_when_it_is_back() -> None:
    """Its log is deleted in between. The leader hears of both moves at once, and then of an old fetch."""

    async def run() -> None:
        moving = TopicAssignment(TOPIC_ID, {0: (2, 1)}, adding={0: (2,)})
        znodes = Znodes(PartitionState(1, 3, (1,), 1), moving)
        leader = Replica(1)
        leader.apply(PartitionState(1, 3, (1,), 1, version=0), 0, (2, 1))
        session: Any = ZnodesSession(znodes)
        for target in (None, (2, 1)):
            assert await Reassignments(session, picture(znodes)).alter("t", {0: target}, 0) == {0: None}
        known = picture(znodes).partition("t", 0)
        assert known is not None and known.state is not None and known.adding == (2,)
        leader.apply(replace(known.state, version=known.state_version), 0, known.replicas)
        with pytest.raises(FencedLeaderEpoch):
            leader.check_follower(2, 3)

    asyncio.run(run())
