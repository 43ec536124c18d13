"""What a broker gives up when it comes back, and what a leaving one still holds."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from millrace.broker.coordination import paths
from millrace.broker.coordination.broker_registry import leave_in_sync_sets, restarted
from millrace.broker.coordination.controlled_shutdown import still_held
from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.coordination.paths import BrokerRegistration, TopicAssignment
from millrace.broker.coordination.session import Node, NodeMissing, VersionConflict
from millrace.broker.replication.partition import NO_LEADER, PartitionState


def state(leader: int, epoch: int, *isr: int) -> PartitionState:
    return PartitionState(leader, epoch, isr, 1)


@pytest.mark.parametrize(
    ("known", "alive", "was_clean", "expected"),
    [
        (state(1, 3, 1, 2, 3), {2, 3}, False, state(2, 4, 2, 3)),
        (state(1, 3, 1, 2, 3), {3}, False, state(3, 4, 2, 3)),
        (state(1, 3, 1, 2), set(), False, state(2, 4, 2)),
        (state(2, 3, 1, 2), {2}, False, state(2, 4, 2)),
        (state(NO_LEADER, 3, 1, 2), {2}, False, state(NO_LEADER, 4, 2)),
        (state(1, 3, 1), {2}, False, state(1, 4, 1)),
        (state(NO_LEADER, 3, 1), {2}, False, None),
        (state(2, 3, 2), {2}, False, state(2, 3, 2)),
        (state(NO_LEADER, 3, 2), {2}, False, None),
        (state(2, 3, 2), {2}, True, None),
        (state(1, 3, 1, 2), {2}, True, state(1, 4, 1, 2)),
        (state(2, 3, 1, 2), {2}, True, None),
    ],
    ids=[
        "led",
        "led, the next in line is dead",
        "led, all others dead",
        "followed",
        "no leader",
        "led alone",
        "was the last",
        "was not in sync, but may be about to be",
        "was not in sync, nor can be",
        "was not in sync, and all is there",
        "led, and all is there",
        "followed, and all is there",
    ],
)
def test_restarted_broker_leaves_in_sync_sets_that_have_another_member(
    known: PartitionState, alive: set[int], was_clean: bool, expected: PartitionState | None
) -> None:
    found = restarted(known, (1, 2, 3), 1, frozenset(alive), was_clean=was_clean)
    assert found == expected


class Znodes:
    """A session over znodes; `before_write` happens once, right before the first write."""

    def __init__(self, nodes: dict[str, bytes]) -> None:
        self.nodes = {path: Node(data, 0, 0, 0) for path, data in nodes.items()}
        self.before_write: Callable[[], None] = lambda: None

    async def get(self, path: str) -> Node:
        if path not in self.nodes:
            raise NodeMissing(path)
        return self.nodes[path]

    async def children(self, path: str) -> list[str]:
        below = {
            node.removeprefix(f"{path}/").split("/")[0] for node in self.nodes if node.startswith(f"{path}/")
        }
        if not below:
            raise NodeMissing(path)
        return list(below)

    async def set(self, path: str, data: bytes, version: int = -1) -> None:
        before, self.before_write = self.before_write, lambda: None
        before()
        known = self.nodes[path]
        if known.version != version:
            raise VersionConflict(path)
        self.nodes[path] = replace(known, data=data, version=version + 1)


@pytest.mark.safety
@pytest.mark.parametrize("was_clean", [False, True])
def test_restarted_broker_leaves_the_in_sync_sets_of_a_topic_that_nobody_can_read(was_clean: bool) -> None:
    """Once its znode is mended, membership would vouch for records that a loss of power may have taken."""
    states = {0: state(1, 3, 1, 2), 1: state(2, 3, 1, 2), 2: state(2, 3, 2), 3: state(1, 3, 1)}
    znodes = Znodes(
        {
            paths.topic_path("t"): b"no JSON",
            paths.topic_path("new"): b"no JSON either, and no states",
            paths.state_path("t", 4): b"{}",
            **{paths.state_path("t", number): paths.encode_state(known) for number, known in states.items()},
        }
    )

    def another_writes() -> None:
        path = paths.state_path("t", 0)
        znodes.nodes[path] = Node(paths.encode_state(state(1, 4, 1, 2, 3)), 7, 0, 0)

    znodes.before_write = another_writes
    cache = MetadataCache()
    cache.set_broker(BrokerRegistration(2, "h", 2))
    session: Any = znodes
    asyncio.run(leave_in_sync_sets(session, cache, 1, was_clean=was_clean))
    left = {number: paths.decode_state(znodes.nodes[paths.state_path("t", number)].data) for number in states}
    if was_clean:
        expected = [state(1, 5, 1, 2, 3), state(2, 3, 1, 2), state(2, 3, 2), state(1, 4, 1)]
    else:
        expected = [state(2, 5, 2, 3), state(2, 4, 2), state(2, 3, 2), state(1, 4, 1)]
    assert list(left.values()) == expected
    assert znodes.nodes[paths.state_path("t", 4)].data == b"{}"


def test_leaving_broker_waits_only_for_what_others_can_take_over() -> None:
    cache = MetadataCache()
    for number in (1, 2):
        cache.set_broker(BrokerRegistration(number, "h", number, leaving=number == 1))
    replicas = {0: (1, 2), 1: (1, 2), 2: (1, 3), 3: (1,), 4: (2, 1)}
    cache.set_assignment("t", TopicAssignment(uuid.uuid4(), replicas))
    for number, known in enumerate(
        (state(1, 0, 1, 2), state(1, 0, 1), state(1, 0, 1, 3), state(1, 0, 1), state(2, 0, 2, 1))
    ):
        cache.set_state("t", number, known, 0)
    assert still_held(cache, 1) == 2  # partition 0, led, and 4, followed; 3 is dead
    cache.set_state("t", 0, state(2, 1, 2), 1)
    cache.set_state("t", 4, state(2, 1, 2), 1)
    assert still_held(cache, 1) == 0
    cache.remove_broker(2)
    cache.set_broker(BrokerRegistration(1, "h", 1))
    cache.set_state("t", 0, state(1, 2, 1, 2), 2)
    assert still_held(cache, 1) == 0  # alone
