"""Plans for moving partitions: even, and no more moves than needed."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.broker.coordination.move_plan import plan_moves
from millrace.broker.errors import InvalidReplicationFactor


def test_added_broker_takes_its_share_and_nothing_else_moves() -> None:
    old = {("t", number): ((1, 2), (2, 1))[number % 2] for number in range(12)}
    plan = plan_moves(old, dict.fromkeys((1, 2, 3)))
    assert Counter(broker for replicas in plan.values() for broker in replicas) == {1: 8, 2: 8, 3: 8}
    leaders = Counter(replicas[0] for replicas in plan.values())
    assert max(leaders.values()) - min(leaders.values()) <= 1
    moved = sum(len(set(replicas) - set(old[key])) for key, replicas in plan.items())
    assert moved == 8  # what broker 3 gets; nothing goes between 1 and 2


def test_broker_that_is_not_named_gives_up_everything() -> None:
    old = {("t", number): (number % 3 + 1, (number + 1) % 3 + 1) for number in range(6)}
    plan = plan_moves(old, dict.fromkeys((2, 3)))
    assert all(set(replicas) == {2, 3} for replicas in plan.values())
    assert Counter(replicas[0] for replicas in plan.values()) == {2: 3, 3: 3}


def test_even_placement_stays() -> None:
    old = {("t", 0): (1, 2), ("t", 1): (2, 3), ("t", 2): (3, 1)}
    assert plan_moves(old, dict.fromkeys((1, 2, 3))) == old


def test_impossible_factor_is_refused() -> None:
    with pytest.raises(InvalidReplicationFactor, match=r"3 replicas .* 2 brokers"):
        plan_moves({("t", 0): (1,)}, dict.fromkeys((1, 2)), 3)


@given(
    st.dictionaries(st.integers(1, 9), st.sampled_from(["a", "b", "c", None]), min_size=1, max_size=7),
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True), max_size=20),
    st.data(),
)
@settings(deadline=None)
def test_plans_are_sound(brokers: dict[int, str | None], old: list[list[int]], data: st.DataObject) -> None:
    factor = data.draw(st.integers(1, len(brokers)))
    partitions = {("t", number): tuple(replicas) for number, replicas in enumerate(old)}
    plan = plan_moves(partitions, brokers, factor)
    assert plan.keys() == partitions.keys()
    for replicas in plan.values():
        assert len(set(replicas)) == factor
        assert set(replicas) <= set(brokers)
        assert len({brokers[broker] for broker in replicas}) == min(factor, len(set(brokers.values())))
    if len(set(brokers.values())) == 1:
        load = Counter(broker for replicas in plan.values() for broker in replicas)
        assert max(load.values(), default=0) - min((load[broker] for broker in brokers), default=0) <= 1
