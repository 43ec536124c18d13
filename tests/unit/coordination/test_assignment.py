"""Replica assignment."""

from __future__ import annotations

from collections import Counter

import pytest

from millrace.broker.coordination.assignment import assign_replicas
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
