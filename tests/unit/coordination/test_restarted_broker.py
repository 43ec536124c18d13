"""What a broker gives up when it comes back, and what a leaving one still holds."""

from __future__ import annotations

import uuid

import pytest

from millrace.broker.coordination.broker_registry import restarted
from millrace.broker.coordination.controlled_shutdown import still_held
from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.coordination.paths import BrokerRegistration, TopicAssignment
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
        (state(2, 3, 2), {2}, False, None),
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
        "was not in sync",
        "led, and all is there",
        "followed, and all is there",
    ],
)
def test_restarted_broker_leaves_in_sync_sets_that_have_another_member(
    known: PartitionState, alive: set[int], was_clean: bool, expected: PartitionState | None
) -> None:
    found = restarted(known, (1, 2, 3), 1, frozenset(alive), was_clean=was_clean)
    assert found == expected


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
