"""Rates, throttle times and limits, against Apache Kafka's own arithmetic written down plainly."""

from __future__ import annotations

import random
from collections import deque

import pytest

from millrace.broker.protocol.hot_produce import encode_response
from millrace.broker.server.quotas import (
    CONSUMER_BYTE_RATE,
    DEFAULT_WINDOW,
    LONGEST_THROTTLE_MS,
    PRODUCER_BYTE_RATE,
    UNLIMITED,
    ByteQuota,
    ClientQuotas,
    Rate,
    Window,
)


class PlainRate:
    """Kafka's sampled rate as its documentation tells it: a ring of samples of one second, the full window of
    ten complete samples assumed from the start."""

    def __init__(self) -> None:
        self.samples: deque[tuple[int, int, int]] = deque()

    def record(self, size: int, now_ms: int) -> None:
        if not self.samples or now_ms >= self.samples[-1][0] + 1_000:
            self.samples.append((now_ms, now_ms, size))
        else:
            begin, _, total = self.samples.pop()
            self.samples.append((begin, now_ms, total + size))
        while len(self.samples) > 12:
            self.samples.popleft()

    def measure(self, now_ms: int) -> float:
        live = [sample for sample in self.samples if now_ms - sample[1] < 11_000]
        self.samples = deque(live)
        elapsed = now_ms - live[0][0] if live else 0
        window = elapsed + max(10 - elapsed // 1_000, 0) * 1_000
        return sum(total for _, _, total in live) / max(window, 1) * 1_000


def test_rate_is_kafkas() -> None:
    rng = random.Random(7)
    for _ in range(50):
        rate, plain, now_ms = Rate(), PlainRate(), 5_000
        for _ in range(200):
            now_ms += rng.choice([0, 3, 250, 999, 1_000, 1_700, 4_000, 12_000])
            size = rng.randrange(1_000_000)
            rate.record(size, now_ms)
            plain.record(size, now_ms)
            assert rate.measure(now_ms)[0] == pytest.approx(plain.measure(now_ms))


def test_burst_of_ten_seconds_worth_is_free_and_one_byte_more_is_not() -> None:
    quota = ByteQuota(1_000)
    assert quota.most_at_once("c") == 10_000
    assert quota.charge("c", 10_000, 0) == 0
    assert quota.charge("c", 1, 0) == 1  # 10,001 bytes over 10.001 s make 1,000 a second
    assert quota.charge("other", 10_000, 0) == 0  # each client has its own


def test_throttle_time_brings_the_rate_back_to_the_limit() -> None:
    """(O - T) / T * W: the observed rate over the window, spread over the window and the wait."""
    rng = random.Random(11)
    quota = ByteQuota(50_000)
    now_ms, sent, throttles = 1_000_000, 0, 0
    while now_ms < 1_120_000:
        size = rng.randrange(200_000)
        throttle_ms = quota.charge("c", size, now_ms)
        sent += size
        throttles += throttle_ms > 0
        now_ms += throttle_ms + rng.randrange(50)
    assert throttles > 40
    assert sent / (now_ms - 1_000_000) * 1_000 == pytest.approx(50_000, rel=0.12)


def test_shorter_window_allows_a_smaller_burst() -> None:
    quota = ByteQuota(1_000, Window(3, 500))
    assert quota.most_at_once("c") == 1_000
    assert quota.charge("c", 1_000, 0) == 0
    assert quota.charge("c", 500, 0) == 500
    assert quota.charge("c", 0, 1_500) == 0  # what was used has left the window


def test_what_is_taken_back_is_not_counted() -> None:
    quota = ByteQuota(1_000)
    quota.charge("c", 9_000, 0)
    assert quota.charge("c", 9_000, 100) == 7_900  # 18,000 bytes over 10.1 s and 7.9 s
    quota.take_back("c", 9_000, 100)
    assert quota.charge("c", 1_000, 200) == 0
    quota.take_back("stranger", 1, 0)


@pytest.mark.parametrize("client_id", [None, ""])
def test_nameless_client_has_no_limit(client_id: str | None) -> None:
    quota = ByteQuota(1)
    assert quota.charge(client_id, 10**9, 0) == 0
    assert quota.most_at_once(client_id) >= UNLIMITED
    assert len(quota) == 0


def test_names_of_silent_clients_are_forgotten() -> None:
    quota = ByteQuota(1_000_000)
    for number in range(10_000):
        quota.charge(f"client-{number}", 1, number)
    assert len(quota) <= 10_000
    quota.charge("late", 1, 10_000 + DEFAULT_WINDOW.size_ms)
    assert len(quota) == 1


def test_most_specific_limit_wins() -> None:
    quotas = ClientQuotas(producer_default=100)
    assert quotas.produce.active
    assert not quotas.fetch.active
    assert quotas.produce.limit_of("a") == 100
    quotas.apply({"a": {PRODUCER_BYTE_RATE: 7.0}, None: {PRODUCER_BYTE_RATE: 50.0, CONSUMER_BYTE_RATE: 5.0}})
    assert [quotas.produce.limit_of(name) for name in ("a", "b")] == [7, 50]
    assert [quotas.fetch.limit_of(name) for name in ("a", "b")] == [5, 5]
    quotas.apply({"a": {CONSUMER_BYTE_RATE: 9.0}})
    assert quotas.produce.limit_of("a") == 100
    assert [quotas.fetch.limit_of(name) for name in ("a", "b")] == [9, float(UNLIMITED)]
    assert quotas.fetch.active
    quotas.apply({})
    assert not quotas.fetch.active


def test_changed_limit_holds_for_what_was_used_already() -> None:
    quota = ByteQuota(UNLIMITED)
    quota.set_limits(1_000, {})
    quota.charge("c", 10_000, 0)
    quota.set_limits(500, {})
    assert quota.charge("c", 0, 0) == DEFAULT_WINDOW.full_ms
    quota.set_limits(UNLIMITED, {"d": 1.0})
    assert quota.charge("c", 10**9, 0) == 0


@pytest.mark.parametrize("limit", [1.0, 5e-324])
def test_client_that_is_all_but_shut_out_is_told_a_time_that_an_answer_can_carry(limit: float) -> None:
    """What cannot be encoded would be told as a failure of a produce that is in the log."""
    quota = ByteQuota()
    quota.set_limits(UNLIMITED, {"raw": limit})
    throttled_ms = [quota.charge("raw", 900_000, 5) for _ in range(4)]
    assert throttled_ms[-1] == LONGEST_THROTTLE_MS
    encode_response(9, 1, [], throttled_ms[-1])
