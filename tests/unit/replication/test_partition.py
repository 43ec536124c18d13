"""Rules of one replica."""

from __future__ import annotations

import pytest

from millrace.broker.errors import FencedLeaderEpoch, NotLeaderOrFollower, UnknownLeaderEpoch
from millrace.broker.replication.partition import (
    NO_LEADER,
    PartitionState,
    Replica,
    Role,
    Transition,
    high_watermark,
    may_accept_all,
)


def state(leader: int, epoch: int, *isr: int) -> PartitionState:
    return PartitionState(leader, epoch, isr or (1,), 1)


def test_leadership_comes_goes_and_comes_again_in_newer_epochs() -> None:
    replica = Replica(1)
    assert replica.apply(state(1, 0), 10) is Transition.LEAD
    assert replica.apply(state(1, 0), 10) is Transition.CONTINUE
    assert replica.apply(state(NO_LEADER, 1), 10) is Transition.FOLLOW
    assert replica.apply(state(NO_LEADER, 1), 10) is Transition.IGNORE
    assert replica.apply(state(1, 2), 10) is Transition.LEAD
    assert replica.apply(state(1, 3), 10) is Transition.LEAD


def test_news_of_an_older_epoch_change_nothing() -> None:
    replica = Replica(1)
    replica.apply(state(1, 5), 0)
    assert replica.apply(state(2, 4), 0) is Transition.IGNORE
    assert (replica.role, replica.leader, replica.leader_epoch) == (Role.LEADER, 1, 5)


def test_epoch_of_a_request_is_checked_before_leadership() -> None:
    replica = Replica(1)
    with pytest.raises(NotLeaderOrFollower):
        replica.check_leader()
    replica.apply(state(1, 5), 0)
    replica.check_leader()
    replica.check_leader(5)
    with pytest.raises(FencedLeaderEpoch):
        replica.check_leader(4)
    with pytest.raises(UnknownLeaderEpoch):
        replica.check_leader(6)


def test_high_watermark_is_the_slowest_in_sync_replicas_end_and_never_falls() -> None:
    assert high_watermark(10, {}) == 10
    assert high_watermark(10, {2: 7, 3: 9}) == 7
    replica = Replica(1)
    replica.apply(state(1, 0, 1, 2), 0)
    assert not replica.advance(10)
    replica.follower_ends[2] = 6
    assert replica.advance(10)
    replica.follower_ends[2] = 4
    assert not replica.advance(10)
    assert replica.high_watermark == 6


def test_min_insync_replicas_counts_the_leader() -> None:
    assert may_accept_all(1, 1)
    assert not may_accept_all(1, 2)
