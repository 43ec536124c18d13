"""The rate of moving replicas."""

from __future__ import annotations

from millrace.broker.replication.throttle import WAITING_SECONDS, LeaderThrottle, ReplicationThrottle

MOVING, STAYING = ("t", 0), ("t", 1)


def test_rate_holds_on_the_average_and_for_chosen_partitions_alone() -> None:
    throttle = ReplicationThrottle()
    assert throttle.resumes_at(MOVING, 5.0) == 5.0
    assert throttle.set(1_000, [MOVING])
    assert not throttle.set(1_000, [MOVING])
    now, taken = 100.0, 0
    for _ in range(1_000):
        if now >= 200.0:
            break
        resumes_at = throttle.resumes_at(MOVING, now)
        if resumes_at > now:
            assert throttle.resumes_at(STAYING, now) <= now
            now = resumes_at
        throttle.consume(MOVING, 700, now, in_sync=False)
        throttle.consume(STAYING, 10**9, now, in_sync=False)
        taken += 700
    # A hundred seconds' worth, one second's of a quiet start, and the answer that overdraws.
    assert 100_000 <= taken <= 101_000 + 2 * 700


def test_another_rate_begins_anew_and_none_lifts_it() -> None:
    throttle = ReplicationThrottle()
    throttle.set(10)
    throttle.resumes_at(MOVING, 0.0)
    throttle.consume(MOVING, 10**6, 0.0, in_sync=False)
    assert throttle.resumes_at(MOVING, 1.0) > 1_000
    assert throttle.set(10**6)
    assert throttle.resumes_at(MOVING, 1.0) <= 1.0
    throttle.consume(MOVING, 10**9, 1.0, in_sync=False)
    assert throttle.set(None)
    assert throttle.resumes_at(MOVING, 1.0) == 1.0


def test_who_is_in_sync_takes_from_the_bucket_and_leaves_no_debt() -> None:
    """Hours above the rate would hold it back for hours once it falls out of sync."""
    throttle = ReplicationThrottle()
    throttle.set(1_000)
    for second in range(100, 3_700):
        throttle.consume(MOVING, 50_000, float(second), in_sync=True)
    assert throttle.resumes_at(MOVING, 3_700.0) <= 3_700.0
    throttle.consume(MOVING, 2_000, 3_700.0, in_sync=False)
    assert 3_700.5 < throttle.resumes_at(MOVING, 3_700.5) <= 3_702.0
    throttle.consume(MOVING, 10**6, 3_700.5, in_sync=True)
    assert throttle.resumes_at(MOVING, 3_700.5) <= 3_702.0, "nor does it add to another's"
    quiet = ReplicationThrottle()
    quiet.set(1_000)
    quiet.consume(MOVING, 800, 50.0, in_sync=True)
    quiet.consume(MOVING, 900, 50.0, in_sync=False)
    assert quiet.resumes_at(MOVING, 50.0) > 50.0, "what it took is not there for others"


RATE, ANSWER = 100_000, 1 << 20


def test_a_leader_gives_by_turns_to_one_that_polls_and_one_that_rests_as_long_as_it_does() -> None:
    """The one that has a rate of its own asks again at the very moment when the leader's debt is paid."""
    leader, own = LeaderThrottle(), ReplicationThrottle()
    leader.set(RATE, [MOVING])
    own.set(RATE)
    turns, asks = "", {"rests": 100.0, "polls": 100.1}
    numbers = {"rests": 2, "polls": 3}
    while len(turns) < 20:
        who = min(asks, key=lambda each: asks[each])
        now = asks[who]
        asks[who] = now + 0.5
        if leader.gives(MOVING, numbers[who], now):
            leader.consume(MOVING, ANSWER, now, in_sync=False)
            turns += who[0]
            if who == "rests":
                own.consume(MOVING, ANSWER, now, in_sync=False)
                asks[who] = own.resumes_at(MOVING, now)
    assert turns == "rp" * 10
    assert now - 100 < 19 * ANSWER / RATE + 20 * 0.5, "and its rate is not left unused"


def test_a_turn_that_is_not_taken_passes_on() -> None:
    """A follower that died while it waited, and one that lost interest."""
    leader = LeaderThrottle()
    leader.set(RATE, [MOVING])
    assert leader.gives(MOVING, 2, 100.0)
    leader.consume(MOVING, ANSWER, 100.0, in_sync=False)
    assert not leader.gives(MOVING, 3, 108.0)
    paid_back = leader.resumes_at(MOVING, 108.0) + 0.01
    assert not leader.gives(MOVING, 2, paid_back), "3 is next"
    assert leader.gives(MOVING, 2, 108.0 + WAITING_SECONDS)
    assert leader.gives(STAYING, 4, paid_back), "what is not throttled has no turns"


def test_all_that_a_follower_asks_for_is_one_turn_as_long_as_nobody_waits() -> None:
    leader = LeaderThrottle()
    leader.set(RATE)
    for key in (MOVING, STAYING):
        assert leader.gives(key, 2, 100.0)
        leader.consume(key, 1_000, 100.0, in_sync=False)
    assert leader.gives(MOVING, 3, 100.1)
