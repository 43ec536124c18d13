"""The rate of moving replicas."""

from __future__ import annotations

from millrace.broker.replication.throttle import ReplicationThrottle

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
