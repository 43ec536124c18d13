"""How moves of partitions begin, are replaced and are called off."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.broker.coordination.controller import ClusterPicture, CompleteMoves, decide
from millrace.broker.coordination.partition_info import PartitionInfo
from millrace.broker.coordination.reassignment import PlannedMove, begin_move, cancel_move
from millrace.broker.errors import InvalidReplicaAssignment, NoReassignmentInProgress
from millrace.broker.replication.partition import PartitionState

ALIVE = frozenset(range(1, 9))


def state(leader: int, epoch: int, *isr: int) -> PartitionState:
    return PartitionState(leader, epoch, isr, 1)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ((4, 5), PlannedMove((4, 5, 1, 2), (4, 5), (1, 2))),
        ((2, 3), PlannedMove((2, 3, 1), (3,), (1,))),
        ((1, 2, 3), PlannedMove((1, 2, 3), (3,), ())),
        ((2,), PlannedMove((2, 1), (), (1,))),
        ((2, 1), PlannedMove((2, 1), (), ())),
        ((1, 2), PlannedMove((1, 2), (), ())),
    ],
    ids=["to others", "one of two", "one more", "one less", "another order", "nowhere"],
)
def test_replicas_during_a_move_are_the_target_and_the_old(
    target: tuple[int, ...], expected: PlannedMove
) -> None:
    assert begin_move(PartitionInfo((1, 2), state(1, 0, 1, 2)), target, ALIVE) == expected


def test_second_move_starts_from_where_the_first_came_from() -> None:
    moving = PartitionInfo((3, 1, 2), state(1, 5, 1, 2, 3), adding=(3,), removing=(1, 2))
    planned = begin_move(moving, (4, 1), ALIVE)
    # 3 had arrived; it is in sync no more at the same moment at which it is no replica any more.
    assert planned == PlannedMove((4, 1, 2), (4,), (2,), state(1, 6, 1, 2))


def test_called_off_move_leaves_no_trace() -> None:
    moving = PartitionInfo((3, 1, 2), state(3, 5, 1, 3), adding=(3,), removing=(2,))
    assert cancel_move(moving, ALIVE) == PlannedMove((1, 2), state=state(1, 6, 1))
    untouched = PartitionInfo((3, 1, 2), state(1, 5, 1, 2), adding=(3,), removing=(2,))
    assert cancel_move(untouched, ALIVE) == PlannedMove((1, 2), state=state(1, 6, 1, 2))
    with pytest.raises(NoReassignmentInProgress):
        cancel_move(PartitionInfo((1, 2), state(1, 5, 1, 2)), ALIVE)


def test_way_back_that_loses_data_is_refused_unless_unclean_elections_are_allowed() -> None:
    moving = PartitionInfo((3, 1, 2), state(3, 5, 3), adding=(3,), removing=(1, 2))
    with pytest.raises(InvalidReplicaAssignment):
        cancel_move(moving, ALIVE)
    with pytest.raises(InvalidReplicaAssignment):
        begin_move(moving, (4,), ALIVE)
    assert cancel_move(moving, frozenset({2}), unclean=True) == PlannedMove((1, 2), state=state(2, 6, 2))


BROKERS = st.lists(st.integers(1, 6), min_size=1, max_size=4, unique=True).map(tuple)


@given(BROKERS, BROKERS, st.data())
@settings(deadline=None)
def test_move_reaches_its_target_once_the_data_has(
    origin: tuple[int, ...], target: tuple[int, ...], data: st.DataObject
) -> None:
    isr = tuple(data.draw(st.lists(st.sampled_from(origin), min_size=1, unique=True)))
    partition = PartitionInfo(origin, state(isr[0], 0, *isr), 0)
    planned = begin_move(partition, target, ALIVE)
    assert set(planned.replicas) == set(origin) | set(target)
    moving = PartitionInfo(
        planned.replicas,
        # The followers catch up, one after the other, and join.
        state(isr[0], 0, *dict.fromkeys((*isr, *planned.replicas))),
        1,
        planned.adding,
        planned.removing,
    )
    decisions = list(decide(ClusterPicture(ALIVE, {"t": {0: moving}}, topic_versions={"t": 1}), 2))
    if not planned.adding and not planned.removing:
        assert decisions == []
        return
    (moved,) = decisions
    assert isinstance(moved, CompleteMoves)
    assert moved.replicas == {0: target}
    assert set(moved.states[0].state.isr) == set(target)
    assert moved.states[0].state.leader in target
