"""Rules of one replica: roles, the high watermark, the in-sync set."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.broker.errors import FencedLeaderEpoch, NotLeaderOrFollower, UnknownLeaderEpoch
from millrace.broker.replication.partition import (
    NO_LEADER,
    PartitionState,
    Replica,
    Role,
    Transition,
)

LAG_MS = 1_000


def state(leader: int, epoch: int, *isr: int, version: int = -1) -> PartitionState:
    return PartitionState(leader, epoch, isr or (1,), 1, version)


def leading(*isr: int, epoch: int = 0, end: int = 0, now_ms: int = 0, min_insync: int = 1) -> Replica:
    """Broker 1 leads a partition on 1, 2 and 3."""
    replica = Replica(1, max_lag_ms=LAG_MS, min_insync_replicas=min_insync)
    replica.apply(state(1, epoch, *(isr or (1, 2, 3)), version=5), end, (1, 2, 3), now_ms)
    return replica


def fetch(
    replica: Replica, follower: int, offset: int, leader_end: int, now_ms: int = 0, run: int = -1
) -> None:
    progress = replica.check_follower(follower, replica.leader_epoch, run)
    progress.fetched(offset, 0, leader_end, now_ms, run)


# -- roles -------------------------------------------------------------------------------------------


def test_leadership_comes_goes_and_comes_again_in_newer_epochs() -> None:
    replica = Replica(1)
    assert replica.apply(state(1, 0), 10) is Transition.LEAD
    assert replica.apply(state(1, 0), 10) is Transition.CONTINUE
    assert replica.apply(state(NO_LEADER, 1), 10) is Transition.FOLLOW
    assert replica.apply(state(NO_LEADER, 1), 10) is Transition.IGNORE
    assert replica.apply(state(1, 2), 10) is Transition.LEAD
    assert replica.apply(state(1, 3), 10) is Transition.LEAD


def test_news_of_an_older_epoch_or_version_change_nothing() -> None:
    replica = Replica(1)
    replica.apply(state(1, 5, 1, 2, version=3), 0)
    assert replica.apply(state(2, 4), 0) is Transition.IGNORE
    assert replica.apply(state(1, 5, 1, version=2), 0) is Transition.IGNORE
    assert (replica.role, replica.leader, replica.leader_epoch) == (Role.LEADER, 1, 5)
    assert replica.isr == (1, 2)


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


def test_only_assigned_followers_of_this_epoch_count() -> None:
    replica = leading(epoch=4)
    replica.registered = {2: 70, 3: 71}
    assert replica.check_follower(2, 4, 70) is replica.followers[2]
    with pytest.raises(UnknownLeaderEpoch):
        replica.check_follower(9, 4)
    with pytest.raises(UnknownLeaderEpoch):
        replica.check_follower(2, -1)
    with pytest.raises(FencedLeaderEpoch):
        replica.check_follower(2, 3)
    with pytest.raises(UnknownLeaderEpoch):
        replica.check_follower(2, 5)
    with pytest.raises(NotLeaderOrFollower):
        replica.check_follower(2, 4, 69)  # an earlier run of broker 2
    # One that is in sync but not assigned any more holds the high watermark; it is not served.
    replica.apply(state(1, 4, 1, 2, version=6), 0, (1, 3))
    with pytest.raises(UnknownLeaderEpoch):
        replica.check_follower(2, 4)
    assert not replica.advance(10)


# -- the high watermark ------------------------------------------------------------------------------


def test_high_watermark_is_the_slowest_in_sync_replicas_end_and_never_falls() -> None:
    replica = leading()
    assert not replica.advance(10)  # nobody has fetched yet
    fetch(replica, 2, 6, 10)
    assert not replica.advance(10)
    fetch(replica, 3, 8, 10)
    assert replica.advance(10)
    assert replica.high_watermark == 6
    fetch(replica, 2, 4, 10)
    assert not replica.advance(10)
    assert replica.high_watermark == 6


def test_high_watermark_waits_for_who_is_about_to_join_and_is_alive() -> None:
    replica = leading(1, 2)
    fetch(replica, 2, 10, 10, now_ms=100)
    fetch(replica, 3, 10, 10, now_ms=100)
    assert replica.advance(10, 100)
    fetch(replica, 2, 20, 20, now_ms=200)
    assert not replica.advance(20, 200)  # broker 3 is caught up, though not in sync yet
    replica.registered = {2: 1}
    assert replica.advance(20, 200)
    replica.registered = None
    fetch(replica, 2, 30, 30, now_ms=300)
    assert not replica.advance(30, 100 + LAG_MS)
    assert replica.advance(30, 101 + LAG_MS)


def test_nothing_new_is_shown_while_too_few_are_in_sync() -> None:
    replica = leading(1, min_insync=2)
    assert not replica.has_enough_in_sync
    assert not replica.advance(10)
    replica.min_insync_replicas = 1
    assert replica.advance(10)
    # Nobody can ask for more replicas than there are.
    alone = Replica(1, min_insync_replicas=2)
    alone.apply(state(1, 0, 1), 0, (1,))
    assert alone.has_enough_in_sync
    assert alone.advance(10)


def test_new_leader_does_not_know_the_latest_offset_until_its_epoch_is_reached() -> None:
    replica = Replica(1, max_lag_ms=LAG_MS)
    replica.apply(state(2, 0, 1, 2, version=0), 10, (1, 2))
    replica.follow(7, 10)
    replica.apply(state(1, 1, 1, 2, version=1), 10, (1, 2))
    assert (replica.high_watermark, replica.latest_is_known) == (7, False)
    fetch(replica, 2, 9, 12)
    assert replica.advance(12)
    assert not replica.latest_is_known
    fetch(replica, 2, 10, 12)
    replica.advance(12)
    assert replica.latest_is_known


def test_followers_start_is_known_before_the_low_watermark_is() -> None:
    replica = leading()
    replica.registered = {2: 1}
    assert replica.low_watermark(40) == -1
    replica.followers[2].fetched(50, 30, 50, 0)
    assert replica.low_watermark(40) == 30
    replica.followers[2].fetched(50, 45, 50, 0)
    assert replica.low_watermark(40) == 40


# -- the in-sync set ---------------------------------------------------------------------------------


def test_late_follower_is_taken_out_and_only_it() -> None:
    replica = leading(now_ms=0)
    fetch(replica, 2, 10, 10, now_ms=500)
    assert replica.shrink_due(20, LAG_MS) is None
    change = replica.shrink_due(20, LAG_MS + 1)
    assert change is not None
    assert (change.removed, change.state.isr, change.state.version) == ((3,), (1, 2), 5)
    assert change.state.leader_epoch == replica.leader_epoch
    replica.begin(change)
    assert replica.shrink_due(20, 9 * LAG_MS) is None  # one change at a time
    assert replica.written(change, 6)
    assert (replica.isr, replica.version) == ((1, 2), 6)


def test_follower_that_has_everything_is_late_only_when_its_broker_is_gone() -> None:
    replica = leading(1, 2)
    fetch(replica, 2, 10, 10, now_ms=0)
    assert replica.shrink_due(10, 100 * LAG_MS) is None
    replica.registered = {3: 1}
    assert replica.shrink_due(10, LAG_MS) is None
    change = replica.shrink_due(10, LAG_MS + 1)
    assert change is not None and change.removed == (2,)


def test_follower_that_always_fetches_just_before_the_next_append_is_caught_up() -> None:
    replica = leading(1, 2)
    end = 0
    for now_ms in range(0, 20 * LAG_MS, 100):
        fetch(replica, 2, end, end + 5, now_ms)  # five records came in just before this fetch
        end += 5
        assert replica.shrink_due(end, now_ms) is None
    assert replica.shrink_due(end, now_ms + 2 * LAG_MS) is not None


def test_follower_joins_at_the_high_watermark_and_the_start_of_the_epoch() -> None:
    replica = Replica(1, max_lag_ms=LAG_MS)
    replica.apply(state(1, 3, 1, version=5), 10, (1, 2, 3))
    replica.advance(8)
    fetch(replica, 2, 8, 10)
    assert replica.expansion_due(2) is None  # the high watermark is 8, but the epoch began at 10
    fetch(replica, 2, 10, 12)
    change = replica.expansion_due(2)
    assert change is not None
    assert (change.added, change.state.isr) == ((2,), (1, 2))
    replica.advance(12, 10 * LAG_MS)
    assert replica.expansion_due(2) is None  # readers see up to 12 now
    assert replica.expansion_due(3) is None
    assert replica.expansion_due(9) is None


def test_follower_of_an_earlier_run_does_not_join() -> None:
    replica = leading(1)
    fetch(replica, 2, 10, 10, run=70)
    replica.registered = {2: 70}
    assert replica.expansion_due(2) is not None
    replica.registered = {2: 71}
    assert replica.expansion_due(2) is None
    replica.registered = {}
    assert replica.expansion_due(2) is None


def test_what_a_member_had_is_forgotten_when_another_broker_takes_it_out() -> None:
    replica = leading(1, 2)
    fetch(replica, 2, 10, 10)
    replica.apply(state(1, 0, 1, version=6), 10, (1, 2, 3))
    assert replica.expansion_due(2) is None
    assert replica.advance(10)


def test_joining_member_holds_the_high_watermark_before_the_change_stands_and_a_leaving_one_until() -> None:
    replica = leading(1)
    fetch(replica, 2, 10, 10, now_ms=0)
    replica.advance(10, 0)
    change = replica.expansion_due(2)
    assert change is not None
    replica.begin(change)
    later = 5 * LAG_MS  # not held for being caught up any more
    assert not replica.advance(20, later)
    fetch(replica, 2, 15, 20, now_ms=later)
    assert replica.advance(20, later)
    assert replica.high_watermark == 15
    assert replica.written(change, 6)
    change = replica.shrink_due(20, 20 * LAG_MS)
    assert change is not None
    replica.begin(change)
    assert not replica.advance(20, 20 * LAG_MS)
    assert replica.written(change, 7)
    assert replica.advance(20, 20 * LAG_MS)


def test_change_ends_with_the_news_that_overtakes_it() -> None:
    replica = leading(1)
    fetch(replica, 2, 10, 10)
    change = replica.expansion_due(2)
    assert change is not None
    replica.begin(change)
    replica.apply(replace(change.state, version=5, isr=(1,)), 10, (1, 2, 3))
    assert replica.pending is change  # the same state as before, read again
    replica.apply(replace(change.state, version=6), 10, (1, 2, 3))
    assert (replica.pending, replica.isr) == (None, (1, 2))
    assert not replica.written(change, 6)
    change = replica.shrink_due(99, 99 * LAG_MS)
    assert change is not None
    replica.begin(change)
    replica.apply(state(2, 1, 2, version=7), 10, (1, 2, 3))
    assert not replica.written(change, 7)
    assert (replica.role, replica.isr) == (Role.FOLLOWER, (2,))


Event = tuple[str, int, int]
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["append", "fetch", "time", "shrink", "expand", "written", "overtaken"]),
        st.integers(2, 3),
        st.integers(0, 9),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(EVENTS)
def test_high_watermark_is_on_everyone_who_may_lead_next(events: list[Event]) -> None:
    """Whatever happens, and whichever of the two sets of a pending change stands: everyone in it has what
    readers were shown, and what they were shown never shrinks."""
    replica = leading()
    ends = {2: 0, 3: 0}
    end, now_ms, shown, version = 0, 0, 0, 5
    for kind, follower, number in events:
        pending = replica.pending
        if kind == "append":
            end += number
        elif kind == "fetch":
            ends[follower] = min(end, ends[follower] + number)
            fetch(replica, follower, ends[follower], end, now_ms)
        elif kind == "time":
            now_ms += number * LAG_MS // 4
        elif kind == "shrink":
            change = replica.shrink_due(end, now_ms)
            if change is not None:
                replica.begin(change)
        elif kind == "expand":
            change = replica.expansion_due(follower)
            if change is not None:
                replica.begin(change)
        elif pending is not None and kind == "written":
            version += 1
            assert replica.written(pending, version)
        elif pending is not None:
            version += 1
            replica.apply(state(1, 0, *replica.isr, version=version), end, (1, 2, 3), now_ms)
            assert replica.pending is None
        replica.advance(end, now_ms)
        assert shown <= replica.high_watermark <= end
        shown = replica.high_watermark
        sets = [replica.isr]
        if replica.pending is not None:
            sets.append(replica.pending.state.isr)
        for isr in sets:
            for member in isr:
                assert member == 1 or ends[member] >= shown, (isr, ends, shown)
