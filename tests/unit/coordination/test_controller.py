"""The controller's rules, one by one and then under random histories."""

from __future__ import annotations

import random

import pytest

from millrace.broker.coordination.controller import (
    ClusterPicture,
    PartitionPicture,
    RemoveTopic,
    WriteState,
    decide,
    elect,
)
from millrace.broker.replication.partition import NO_LEADER, PartitionState

EPOCH = 5


def state(leader: int, leader_epoch: int, *isr: int) -> PartitionState:
    return PartitionState(leader, leader_epoch, isr, controller_epoch=1)


@pytest.mark.parametrize(
    ("replicas", "known", "live", "expected"),
    [
        ((1, 2), None, {1, 2}, (1, 0, (1, 2))),
        ((1, 2), None, {2}, (2, 0, (2,))),
        ((1, 2), None, {3}, None),
        ((1, 2), state(1, 3, 1, 2), {1, 2}, None),
        ((1, 2), state(1, 3, 1, 2), {1}, None),
        ((1, 2), state(1, 3, 1, 2), {2}, (2, 4, (2,))),
        ((1, 2), state(1, 3, 1), {2}, (NO_LEADER, 4, (1,))),
        ((1, 2), state(NO_LEADER, 4, 1), {2}, None),
        ((1, 2), state(NO_LEADER, 4, 1), {1, 2}, (1, 5, (1,))),
        ((3, 2, 1), state(9, 0, 1, 2), {1, 2}, (2, 1, (1, 2))),
    ],
    ids=[
        "new partition",
        "new partition, first replica dead",
        "new partition, all dead",
        "leader alive",
        "leader alive, follower dead",
        "leader dead",
        "last in-sync replica dead",
        "still dead",
        "returned",
        "in the order of the replicas",
    ],
)
def test_election_follows_the_table(
    replicas: tuple[int, ...],
    known: PartitionState | None,
    live: set[int],
    expected: tuple[int, int, tuple[int, ...]] | None,
) -> None:
    elected = elect(PartitionPicture(replicas, known), frozenset(live), EPOCH)
    if expected is None:
        assert elected is None
    else:
        assert elected == PartitionState(*expected, controller_epoch=EPOCH)


def test_topic_marked_for_deletion_is_removed_and_not_elected_for() -> None:
    picture = ClusterPicture(
        frozenset({1}),
        {"going": {0: PartitionPicture((1,), None)}, "staying": {0: PartitionPicture((1,), None, -1)}},
        frozenset({"going", "gone already"}),
    )
    assert list(decide(picture, EPOCH)) == [
        RemoveTopic("going"),
        RemoveTopic("gone already"),
        WriteState("staying", 0, PartitionState(1, 0, (1,), EPOCH), -1),
    ]


def test_random_histories_keep_the_invariants() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(200):
        brokers = range(1, rng.randint(2, 6))
        partitions = {
            number: PartitionPicture(tuple(rng.sample(brokers, rng.randint(1, len(brokers)))), None)
            for number in range(4)
        }
        live: set[int] = set()
        for epoch in range(1, 30):
            broker = rng.choice(brokers)
            live ^= {broker}
            picture = ClusterPicture(frozenset(live), {"t": partitions})
            for decision in decide(picture, epoch):
                assert isinstance(decision, WriteState)
                old, new = partitions[decision.partition], decision.state
                if old.state is not None:
                    assert new.leader_epoch == old.state.leader_epoch + 1
                    assert new.leader == NO_LEADER or new.leader in old.state.isr
                    assert set(new.isr) <= set(old.state.isr)
                assert new.leader == NO_LEADER or new.leader in live
                assert new.leader == NO_LEADER or new.leader in new.isr
                assert new.isr, "the last in-sync replica must be remembered"
                partitions[decision.partition] = PartitionPicture(old.replicas, new)
            for part in partitions.values():
                if part.state is not None and set(part.state.isr) & live:
                    assert part.state.leader in live
            assert not list(decide(ClusterPicture(frozenset(live), {"t": partitions}), epoch))
