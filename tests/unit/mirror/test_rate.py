"""The throttle of a source, against a reader that always has something to read."""

from __future__ import annotations

import random

import pytest

from millrace.mirror.sources.rate import TokenBucket


def test_without_a_rate_nobody_waits() -> None:
    bucket = TokenBucket()
    bucket.spend(1 << 40)
    assert bucket.wait_ms(1 << 20, 5) == 0
    assert bucket.room(5) is None


def test_a_batch_larger_than_the_bucket_is_paid_for_afterwards() -> None:
    bucket = TokenBucket()
    bucket.set_rate(1_000, 0)
    assert bucket.wait_ms(100, 0) == 101
    assert bucket.wait_ms(100, 100) == 0
    bucket.spend(5_100)
    assert bucket.room(100) == -5_000
    assert 5_100 <= bucket.wait_ms(100, 100) <= 5_101
    assert bucket.wait_ms(100, 5_201) == 0


def test_rest_is_saved_for_one_second_only() -> None:
    bucket = TokenBucket()
    bucket.set_rate(1_000, 0)
    assert bucket.room(3_600_000) == 1_000


def test_wanting_more_than_the_bucket_holds_does_not_wait_for_ever() -> None:
    bucket = TokenBucket()
    bucket.set_rate(10, 0)
    assert bucket.wait_ms(65_536, 0) <= 1_001
    assert bucket.wait_ms(65_536, 1_001) == 0


def test_another_rate_counts_from_when_it_is_set() -> None:
    bucket = TokenBucket()
    bucket.set_rate(1_000, 0)
    bucket.spend(2_000)
    bucket.set_rate(1_000_000, 1_000)
    assert bucket.room(1_000) == -1_000
    assert bucket.wait_ms(1, 1_000) == 2
    bucket.set_rate(None, 1_000)
    assert bucket.wait_ms(1 << 30, 1_000) == 0
    bucket.set_rate(5, 9_000)
    assert bucket.room(9_000) == 0


def test_a_clock_that_is_set_back_neither_fills_nor_empties() -> None:
    bucket = TokenBucket()
    bucket.set_rate(1_000, 10_000)
    assert bucket.room(10_500) == 500
    assert bucket.room(2_000) == 500
    assert bucket.room(2_100) == 600


@pytest.mark.parametrize("rate", [0, -1, float("nan")])
def test_a_rate_that_would_read_nothing_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="pause"):
        TokenBucket().set_rate(rate, 0)


def test_never_more_than_rate_and_burst_over_any_stretch() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        rate, largest = rng.choice([10, 1_000, 5_000_000]), rng.choice([1, 700, 9_000_000])
        bucket, now_ms, reads = TokenBucket(), 0, []
        bucket.set_rate(rate, 0)
        for _ in range(60):
            now_ms += bucket.wait_ms(64 << 10, now_ms) + rng.choice([0, 0, 3, 900])
            if bucket.wait_ms(64 << 10, now_ms):
                continue
            size = rng.randint(1, largest)
            bucket.spend(size)
            reads.append((now_ms, size))
        for first in range(len(reads)):
            total = 0
            for at_ms, size in reads[first:]:
                passed_s = (at_ms - reads[first][0]) / 1000
                assert total <= rate * (passed_s + 1) + largest, f"seed {seed}"
                total += size
