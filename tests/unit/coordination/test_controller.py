"""The controller's rules, one by one and then under random histories."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.broker.coordination.controller import (
    LOOKED_AT_ONCE,
    PREFERRED,
    UNCLEAN,
    ClearRequest,
    ClusterPicture,
    CompleteMoves,
    Decision,
    ElectionRequest,
    RemoveTopic,
    WriteState,
    arrive,
    decide,
    elect,
    imbalanced,
)
from millrace.broker.coordination.partition_info import PartitionInfo
from millrace.broker.replication.partition import NO_LEADER, PartitionState
from tests import seeds

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
        ((1, 2), state(1, 3, 1, 2), {1}, (1, 4, (1,))),
        ((1, 2, 3), state(1, 3, 1, 2, 3), {1, 3}, (1, 4, (1, 3))),
        ((1, 2), state(1, 3, 1, 2), {2}, (2, 4, (2,))),
        ((1, 2), state(1, 3, 1), {2}, (NO_LEADER, 4, (1,))),
        ((1, 2), state(1, 3, 1, 2), {3}, (NO_LEADER, 4, (1, 2))),
        ((1, 2), state(NO_LEADER, 4, 1), {2}, None),
        ((1, 2), state(NO_LEADER, 4, 1), {1, 2}, (1, 5, (1,))),
        ((3, 2, 1), state(9, 0, 1, 2), {1, 2}, (2, 1, (1, 2))),
        ((2, 3), state(2, 3, 2, 3, 1), {1, 2, 3}, (2, 4, (2, 3))),
        ((2, 3), state(1, 3, 1), {1, 2, 3}, None),
    ],
    ids=[
        "new partition",
        "new partition, first replica dead",
        "new partition, all dead",
        "leader alive",
        "leader alive, only follower dead",
        "leader alive, one follower dead",
        "leader dead",
        "last in-sync replica dead",
        "all in-sync replicas dead",
        "still dead",
        "returned",
        "in the order of the replicas",
        "in sync and no replica any more",
        "the only one in sync is no replica any more",
    ],
)
def test_election_follows_the_table(
    replicas: tuple[int, ...],
    known: PartitionState | None,
    live: set[int],
    expected: tuple[int, int, tuple[int, ...]] | None,
) -> None:
    elected = elect(PartitionInfo(replicas, known), frozenset(live), EPOCH)
    if expected is None:
        assert elected is None
    else:
        assert elected == PartitionState(*expected, controller_epoch=EPOCH)


@pytest.mark.parametrize(
    ("known", "live", "leaving", "expected"),
    [
        (state(1, 3, 1, 2, 3), {1, 2, 3}, {1}, (2, 4, (2, 3))),
        (state(2, 3, 1, 2, 3), {1, 2, 3}, {1}, (2, 4, (2, 3))),
        (state(1, 3, 1), {1, 2, 3}, {1}, None),
        (state(1, 3, 1, 2), {1, 3}, {1}, (1, 4, (1,))),
        (state(1, 3, 1, 2), {2, 3}, {2}, (2, 4, (2,))),
        (None, {1, 2, 3}, {1}, (2, 0, (2, 3))),
    ],
    ids=[
        "leader leaves",
        "follower leaves",
        "leader leaves and no one else is in sync",
        "leader leaves, the other member is dead",
        "leader dead, the other member leaves",
        "new partition",
    ],
)
def test_leaving_broker_hands_over_where_another_can_take_over(
    known: PartitionState | None,
    live: set[int],
    leaving: set[int],
    expected: tuple[int, int, tuple[int, ...]] | None,
) -> None:
    elected = elect(PartitionInfo((1, 2, 3), known), frozenset(live), EPOCH, leaving=frozenset(leaving))
    assert elected == (None if expected is None else PartitionState(*expected, controller_epoch=EPOCH))


def test_unclean_election_only_where_allowed_and_only_when_no_member_lives() -> None:
    partition = PartitionInfo((1, 2, 3), state(1, 3, 1))
    assert elect(partition, frozenset({2, 3}), EPOCH, unclean=True) == PartitionState(2, 4, (2,), EPOCH)
    assert elect(partition, frozenset({1, 2, 3}), EPOCH, unclean=True) is None
    topics = {"safe": {0: partition}, "available": {0: partition}, "asked": {0: partition}}
    picture = ClusterPicture(
        frozenset({3}),
        topics,
        unclean_topics=frozenset({"available"}),
        requests={UNCLEAN: ElectionRequest(frozenset({("asked", 0)}), 7)},
    )
    decisions = list(decide(picture, EPOCH))
    leaders = {one.topic: one.state.leader for one in decisions if isinstance(one, WriteState)}
    assert leaders == {"safe": NO_LEADER, "available": 3, "asked": 3}
    assert decisions[-1] == ClearRequest(UNCLEAN, 7)


def test_replica_on_a_failed_disk_counts_as_dead_for_its_partition_alone() -> None:
    partition = PartitionInfo((1, 2), state(1, 3, 1, 2), 8)
    picture = ClusterPicture(
        frozenset({1, 2}), {"t": {0: partition, 1: partition}}, offline={1: frozenset({("t", 1)})}
    )
    assert list(decide(picture, EPOCH)) == [WriteState("t", 1, PartitionState(2, 4, (2,), EPOCH), 8)]


@pytest.mark.parametrize(
    ("known", "live", "expected"),
    [
        (state(2, 3, 2, 1), {1, 2}, (1, 4, (2, 1))),
        (state(1, 3, 1, 2), {1, 2}, None),
        (state(2, 3, 2), {1, 2}, None),
        (state(2, 3, 2, 1), {2}, (2, 4, (2,))),
    ],
    ids=["in sync", "leads already", "not in sync", "dead"],
)
def test_preferred_leader_takes_over_when_in_sync(
    known: PartitionState, live: set[int], expected: tuple[int, int, tuple[int, ...]] | None
) -> None:
    elected = elect(PartitionInfo((1, 2), known), frozenset(live), EPOCH, preferred=True)
    assert elected == (None if expected is None else PartitionState(*expected, controller_epoch=EPOCH))


def test_auto_rebalance_waits_for_the_imbalance_of_a_broker() -> None:
    def picture(led_by_others: int, **options: Any) -> ClusterPicture:
        partitions = {
            number: PartitionInfo((1, 2), state(2 if number < led_by_others else 1, 0, 1, 2))
            for number in range(10)
        }
        return ClusterPicture(frozenset({1, 2}), {"t": partitions}, **options)

    assert imbalanced(picture(1), 10) == frozenset()  # 10 % are allowed
    assert imbalanced(picture(2), 10) == {("t", 0), ("t", 1)}
    assert imbalanced(picture(2, leaving=frozenset({1})), 10) == frozenset()
    due = replace(picture(2), rebalancing=imbalanced(picture(2), 10))
    assert [one.state.leader for one in decide(due, EPOCH) if isinstance(one, WriteState)] == [1, 1]


def test_move_ends_when_the_whole_target_is_in_sync() -> None:
    def picture(*isr: int, live: tuple[int, ...] = (1, 2, 3)) -> ClusterPicture:
        moving = PartitionInfo((3, 2, 1), state(1, 5, *isr), 4, adding=(3,), removing=(1,))
        return ClusterPicture(frozenset(live), {"t": {7: moving}}, topic_versions={"t": 9})

    assert list(decide(picture(1, 2), EPOCH)) == []
    arrived = PartitionState(3, 6, (2, 3), EPOCH)
    assert list(decide(picture(1, 2, 3), EPOCH)) == [
        CompleteMoves("t", {7: (3, 2)}, (WriteState("t", 7, arrived, 4),), 9)
    ]
    # A target that died on the way is no member any more: first that, and the move goes on when it is back.
    assert list(decide(picture(1, 2, 3, live=(1, 2)), EPOCH)) == [
        WriteState("t", 7, PartitionState(1, 6, (1, 2), EPOCH), 4)
    ]


def test_move_keeps_the_leader_where_it_stays() -> None:
    moving = PartitionInfo((3, 1, 2), state(1, 5, 1, 2, 3), adding=(3,), removing=(2,))
    assert arrive(moving, frozenset({1, 2, 3}), EPOCH) == PartitionState(1, 6, (1, 3), EPOCH)


def test_topic_marked_for_deletion_is_removed_and_not_elected_for() -> None:
    picture = ClusterPicture(
        frozenset({1}),
        {"going": {0: PartitionInfo((1,), None)}, "staying": {0: PartitionInfo((1,), None, -1)}},
        frozenset({"going", "gone already"}),
    )
    assert list(decide(picture, EPOCH)) == [
        RemoveTopic("going"),
        RemoveTopic("gone already"),
        WriteState("staying", 0, PartitionState(1, 0, (1,), EPOCH), -1),
    ]


def test_a_state_that_cannot_be_read_is_neither_written_over_nor_counted() -> None:
    left = PartitionInfo((1, 2), state(2, 3, 2), 4, is_unreadable=True)
    picture = ClusterPicture(
        frozenset({1}),
        {"t": {0: left}},
        unclean_topics=frozenset({"t"}),
        requests={PREFERRED: ElectionRequest(frozenset({("t", 0)}), 1)},
    )
    assert list(decide(picture, EPOCH)) == [ClearRequest(PREFERRED, 1)]
    led_by_another = replace(left, state=state(2, 3, 1, 2))
    assert imbalanced(ClusterPicture(frozenset({1, 2}), {"t": {0: led_by_another}}), 10) == frozenset()


def test_others_have_their_turn_while_a_large_cluster_is_looked_at() -> None:
    settled = PartitionInfo((1,), state(1, 0, 1))
    count = 3 * LOOKED_AT_ONCE
    picture = ClusterPicture(frozenset({1}), {"t": {**dict.fromkeys(range(count), settled)}})
    assert list(decide(picture, EPOCH)) == [None] * 3


def apply(picture: ClusterPicture, decisions: Iterable[Decision]) -> ClusterPicture:
    """The cluster after a controller has carried these out. A write with another version is refused."""
    topics = {name: dict(partitions) for name, partitions in picture.topics.items()}
    requests, versions = dict(picture.requests), dict(picture.topic_versions)
    for decision in decisions:
        match decision:
            case RemoveTopic(topic):
                topics.pop(topic, None)
            case WriteState(topic, number, new, version):
                old = topics[topic][number]
                assert version == old.state_version
                topics[topic][number] = replace(old, state=new, state_version=version + 1)
            case CompleteMoves(topic, replicas, states, version):
                assert version == versions.get(topic, -1)
                for write in states:
                    old = topics[topic][write.partition]
                    assert write.version == old.state_version
                    topics[topic][write.partition] = PartitionInfo(
                        replicas[write.partition], write.state, write.version + 1
                    )
            case ClearRequest(kind):
                del requests[kind]
    return replace(picture, topics=topics, requests=requests, topic_versions=versions, deleting=frozenset())


BROKERS = st.integers(1, 5)
BROKER_SETS = st.frozensets(BROKERS)


@st.composite
def partitions(draw: st.DrawFn) -> PartitionInfo:
    replicas = tuple(draw(st.lists(BROKERS, min_size=1, max_size=5, unique=True)))
    moving = draw(st.booleans())
    adding = tuple(broker for broker in replicas if moving and draw(st.booleans()))[: len(replicas) - 1]
    removing = tuple(
        broker for broker in replicas if moving and broker not in adding and draw(st.booleans())
    )[: len(replicas) - 1]
    if not draw(st.booleans()):
        return PartitionInfo(replicas, None, -1, adding, removing)
    isr = tuple(draw(st.lists(BROKERS, min_size=1, max_size=5, unique=True)))
    leader = draw(st.sampled_from((NO_LEADER, *isr)))
    known = PartitionState(leader, draw(st.integers(0, 9)), isr, 1)
    return PartitionInfo(replicas, known, draw(st.integers(0, 9)), adding, removing)


@st.composite
def pictures(draw: st.DrawFn) -> ClusterPicture:
    names = ("a", "b")
    keys = st.frozensets(st.tuples(st.sampled_from(names), st.integers(0, 2)))
    requests = st.builds(ElectionRequest, keys, st.integers(0, 3))
    return ClusterPicture(
        draw(BROKER_SETS),
        {name: dict(enumerate(draw(st.lists(partitions(), max_size=3)))) for name in names},
        draw(st.frozensets(st.sampled_from(names), max_size=1)),
        draw(BROKER_SETS),
        draw(st.dictionaries(BROKERS, keys)),
        draw(st.frozensets(st.sampled_from(names))),
        draw(st.dictionaries(st.sampled_from((PREFERRED, UNCLEAN)), requests)),
        draw(keys),
    )


@given(pictures())
@settings(max_examples=seeds.examples(150), deadline=None)
def test_decisions_carried_out_leave_little_to_decide(picture: ClusterPicture) -> None:
    """One round settles everything, but for moves that could not end before an election had been held."""
    settled = apply(picture, decide(picture, EPOCH))
    second = list(decide(settled, EPOCH))
    assert all(isinstance(decision, CompleteMoves) for decision in second)
    # An election that came with the first round must not be asked for by the second.
    assert list(decide(apply(settled, second), EPOCH)) == []


@given(pictures())
@settings(max_examples=seeds.examples(150), deadline=None)
def test_every_written_state_is_sound(picture: ClusterPicture) -> None:
    for decision in decide(picture, EPOCH):
        match decision:
            case WriteState():
                writes, moved = (decision,), {}
            case CompleteMoves():
                writes, moved = decision.states, decision.replicas
            case _:
                continue
        for write in writes:
            old, new = picture.topics[write.topic][write.partition], write.state
            key = (write.topic, write.partition)
            alive = picture.alive(*key, old)
            assert new.isr, "the last in-sync replica must be remembered"
            assert new.leader == NO_LEADER or (new.leader in alive and new.leader in new.isr)
            assert new.controller_epoch == EPOCH
            if old.state is None:
                continue
            assert new.leader_epoch == old.state.leader_epoch + 1
            unclean = not set(new.isr) <= set(old.state.isr)
            if unclean:
                asked = picture.requests.get(UNCLEAN)
                assert write.topic in picture.unclean_topics or (asked and key in asked.partitions)
                assert not set(old.state.isr) & alive, "no member of the in-sync set was left"
            if new.leader == NO_LEADER:
                assert new.isr == old.state.isr
            if write.partition in moved:
                assert set(moved[write.partition]) <= set(old.state.isr)
                assert new.leader in moved[write.partition]


@given(pictures())
@settings(max_examples=seeds.examples(150), deadline=None)
def test_what_is_passed_over_at_a_glance_needs_no_decision(picture: ClusterPicture) -> None:
    decided = {
        key
        for decision in decide(picture, EPOCH)
        for key in (
            [(decision.topic, decision.partition)]
            if isinstance(decision, WriteState)
            else [(decision.topic, number) for number in decision.replicas]
            if isinstance(decision, CompleteMoves)
            else []
        )
    }
    asked = picture.requests.get(PREFERRED, ElectionRequest(frozenset(), 0)).partitions
    preferred = asked | picture.rebalancing
    unclean = picture.requests.get(UNCLEAN, ElectionRequest(frozenset(), 0)).partitions
    for topic in picture.topics.keys() - picture.deleting:
        for number, partition in picture.topics[topic].items():
            key = (topic, number)
            alive = picture.alive(*key, partition)
            state = elect(
                partition,
                alive,
                EPOCH,
                leaving=picture.leaving,
                unclean=topic in picture.unclean_topics or key in unclean,
                preferred=key in preferred,
            )
            arrives = arrive(partition, alive - picture.leaving, EPOCH)
            assert (key in decided) == (state is not None or arrives is not None)


@given(pictures(), st.data())
@settings(max_examples=seeds.examples(75), deadline=None)
def test_of_two_controllers_with_the_same_picture_one_writes_a_partition(
    picture: ClusterPicture, data: st.DataObject
) -> None:
    """Znode versions alone keep them apart: whoever comes second fails, whatever it decided."""
    versions: dict[tuple[str, int], int] = {}
    accepted: set[tuple[str, int, int]] = set()
    queues = [list(decide(picture, epoch)) for epoch in (EPOCH, EPOCH + 1)]
    while any(queues):
        queue = data.draw(st.sampled_from([queue for queue in queues if queue]))
        decision = queue.pop(0)
        if not isinstance(decision, WriteState):
            continue
        key = (decision.topic, decision.partition)
        if versions.setdefault(key, decision.version) == decision.version:
            versions[key] += 1
            assert (*key, decision.state.leader_epoch) not in accepted
            accepted.add((*key, decision.state.leader_epoch))


def test_random_histories_keep_the_invariants() -> None:
    rng = random.Random(seeds.given())
    for _ in range(200):
        brokers = range(1, rng.randint(2, 6))
        partitions = {
            number: PartitionInfo(tuple(rng.sample(brokers, rng.randint(1, len(brokers)))), None)
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
                partitions[decision.partition] = PartitionInfo(old.replicas, new)
            for part in partitions.values():
                if part.state is not None and set(part.state.isr) & live:
                    assert part.state.leader in live
            assert not list(decide(ClusterPicture(frozenset(live), {"t": partitions}), epoch))
