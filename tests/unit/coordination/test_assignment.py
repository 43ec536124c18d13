"""Replica assignment."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.broker.coordination.assignment import alternate_racks, assign_replicas
from millrace.broker.errors import InvalidPartitions, InvalidReplicationFactor


@pytest.mark.parametrize("start", range(4))
def test_leaders_and_replicas_spread_evenly(start: int) -> None:
    assignment = assign_replicas([3, 1, 2, 4], 12, 2, start=start)
    assert set(Counter(replicas[0] for replicas in assignment.values()).values()) == {3}
    assert all(len(set(replicas)) == 2 for replicas in assignment.values())
    followers_of_1 = {replicas[1] for replicas in assignment.values() if replicas[0] == 1}
    assert len(followers_of_1) > 1  # its load would not fall on one other broker


def test_added_partitions_go_on_where_the_old_ones_ended() -> None:
    whole = assign_replicas([1, 2, 3], 5, 1, start=1)
    assert assign_replicas([1, 2, 3], 2, 1, start=1, first=3) == {3: whole[3], 4: whole[4]}


def test_impossible_counts_are_refused() -> None:
    with pytest.raises(InvalidPartitions):
        assign_replicas([1], 0, 1, start=0)
    for brokers, factor in (([1], 2), ([], 1), ([1, 2], 0)):
        with pytest.raises(InvalidReplicationFactor):
            assign_replicas(brokers, 1, factor, start=0)


def test_vector_without_racks() -> None:
    """The table that Apache Kafka documents for five brokers, ten partitions and three replicas."""
    assert list(assign_replicas(range(5), 10, 3, start=0).values()) == [
        (0, 1, 2),
        (1, 2, 3),
        (2, 3, 4),
        (3, 4, 0),
        (4, 0, 1),
        (0, 2, 3),
        (1, 3, 4),
        (2, 4, 0),
        (3, 0, 1),
        (4, 1, 2),
    ]


RACKS = {0: "rack1", 1: "rack3", 2: "rack3", 3: "rack2", 4: "rack2", 5: "rack1"}


def test_vector_with_racks() -> None:
    """Apache Kafka's example of six brokers on three racks."""
    assert alternate_racks(RACKS) == [0, 3, 1, 5, 4, 2]
    assert alternate_racks({broker: rack for broker, rack in RACKS.items() if broker != 5}) == [0, 3, 1, 4, 2]
    assert list(assign_replicas(range(6), 12, 3, start=0, racks=RACKS).values()) == [
        (0, 3, 1),
        (3, 1, 5),
        (1, 5, 4),
        (5, 4, 2),
        (4, 2, 0),
        (2, 0, 3),
        (0, 4, 2),
        (3, 2, 0),
        (1, 0, 3),
        (5, 3, 1),
        (4, 1, 5),
        (2, 5, 4),
    ]


@given(
    st.dictionaries(st.integers(0, 20), st.sampled_from(["a", "b", "c", None]), min_size=1, max_size=9),
    st.integers(1, 30),
    st.data(),
)
def test_replicas_are_different_brokers_on_as_many_racks_as_can_be(
    racks: dict[int, str | None], count: int, data: st.DataObject
) -> None:
    factor = data.draw(st.integers(1, len(racks)))
    start, shift = data.draw(st.integers(0, 20)), data.draw(st.integers(0, 20))
    assignment = assign_replicas(list(racks), count, factor, start=start, shift=shift, racks=racks)
    assert sorted(assignment) == list(range(count))
    for replicas in assignment.values():
        assert len(set(replicas)) == factor
        assert len({racks[broker] for broker in replicas}) == min(factor, len(set(racks.values())))
    led = Counter(replicas[0] for replicas in assignment.values())
    assert max(led.values()) - min(led[broker] for broker in racks) <= 1


def test_racks_of_equal_size_carry_equal_load() -> None:
    assignment = assign_replicas(range(6), 36, 3, start=0, racks=RACKS)
    load = Counter(broker for replicas in assignment.values() for broker in replicas)
    assert set(load.values()) == {18}
