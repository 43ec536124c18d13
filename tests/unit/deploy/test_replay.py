"""The order and the times of sending, and the record of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.deploy.demo.events import Events, EventSource, Feed
from millrace.deploy.demo.replay import Replay, ReplayPlan, SentTimes
from millrace.deploy.demo.tail import Latency, TailReader

PLAN = ReplayPlan(
    source=EventSource(path="f.csv"),
    datacenter="a",
    bootstrap="127.0.0.1:1",
    window_ms=1000,
    begin_at=1000.0,
    seconds=10.0,
    sent_times="sent.npz",
)


class Numbers:
    def take(self, rows: Any) -> Any:
        return (str(row).encode() for row in rows)


class Delivered:
    """A message of which its producer says that it was acknowledged 5 ms after `produce`."""

    def latency(self) -> float:
        return 0.005


class FakeProducer:
    """Takes records until it is full, like a producer whose queue must be polled."""

    def __init__(self) -> None:
        self.taken: list[tuple[bytes, int]] = []
        self.room = 2
        self.waiting: list[Any] = []

    def produce(self, topic: str, value: bytes, key: bytes, *, timestamp: int, on_delivery: Any) -> None:
        if self.room == 0:
            raise BufferError
        self.room -= 1
        self.taken.append((value, timestamp))
        self.waiting.append(on_delivery)

    def poll(self, timeout: float) -> int:
        self.room = 2
        for report in self.waiting:
            report(None, Delivered())
        self.waiting.clear()
        return 0

    def flush(self, timeout: float) -> int:
        return self.poll(timeout)

    def close(self, timeout: float) -> bool:
        return True


def events(created: list[int] | None) -> Events:
    feeds = {
        Feed("a", "p"): np.array([0, 2, 4]),
        Feed("a", "q"): np.array([3, 1]),
        Feed("b", "r"): np.array([5]),
    }
    return Events("t", feeds, None if created is None else np.array(created), Numbers(), 1000)


def replay_with_fakes(
    plan: ReplayPlan, given: Events, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, dict[str, FakeProducer]]:
    producers: dict[str, FakeProducer] = {}
    monkeypatch.setattr(
        Replay, "_producer", lambda self, feed: producers.setdefault(feed.producer, FakeProducer())
    )
    return Replay(plan, given).run(), producers


def test_each_feed_is_sent_whole_in_its_order_with_its_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sent.npz"
    plan = ReplayPlan(**{**_fields(PLAN), "sent_times": str(path), "begin_at": 0.0, "seconds": 0.0})
    status, producers = replay_with_fakes(plan, events([10, 40, 20, 30, 50, 60]), monkeypatch)
    assert status == 0
    assert producers["p"].taken == [(b"0", 10), (b"2", 20), (b"4", 50)]
    assert producers["q"].taken == [(b"3", 30), (b"1", 40)]
    sent = SentTimes.read(path)
    for number in (1, 2, 3):
        times = sent.at("p", number)
        assert times is not None
        assert times[1] - times[0] == pytest.approx(5.0, abs=0.01)
    assert sent.at("p", 4) is None
    assert sent.at("p", 0) is None
    assert sent.at("r", 1) is None


def test_event_that_is_not_acknowledged_fails_the_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: FakeProducer, timeout: float) -> int:
        self.room = 2
        for report in self.waiting:
            report("broker is gone", None)
        self.waiting.clear()
        return 0

    monkeypatch.setattr(FakeProducer, "poll", refuse)
    plan = ReplayPlan(
        **{**_fields(PLAN), "sent_times": str(tmp_path / "s.npz"), "begin_at": 0.0, "seconds": 0.0}
    )
    status, _ = replay_with_fakes(plan, events(None), monkeypatch)
    assert status == 1
    assert "5 of 5 events were not acknowledged: broker is gone" in capsys.readouterr().err


def test_due_times_follow_creation_over_all_datacenters() -> None:
    replay = Replay(PLAN, events([0, 25, 50, 75, 90, 100]))
    assert replay._due_times(np.array([0, 2, 4])).tolist() == [1000.0, 1005.0, 1009.0]


def test_due_times_without_creation_follow_the_file() -> None:
    assert Replay(PLAN, events(None))._due_times(np.array([0, 5])).tolist() == [1000.0, 1010.0]


def test_plan_written_and_read_is_the_same(tmp_path: Path) -> None:
    PLAN.write(tmp_path / "plan.json")
    assert ReplayPlan.read(tmp_path / "plan.json") == PLAN


def test_latency_counts_only_records_whose_sending_is_known() -> None:
    reader = TailReader("127.0.0.1:1", "t")
    reader._arrivals = {("p", 1): 110.0, ("p", 2): 230.0, ("p", 3): 990.0, ("other", 1): 5.0}
    sent, acknowledged = [100.0, 200.0, 300.0], [104.0, 212.0, np.nan]
    latency = reader.latency([SentTimes({"p": np.array([sent, acknowledged])})])
    assert latency is not None
    assert (latency.count, latency.whole.mean_ms) == (2, 20.0)
    assert 10.0 < latency.whole.p99_ms <= 30.0
    assert (latency.to_source.mean_ms, latency.to_aggregate.mean_ms) == (8.0, 12.0)
    assert Latency.of([]) is None


def test_a_record_that_is_readable_before_its_answer_came_took_the_mirror_no_time() -> None:
    latency = Latency.of([(100.0, 120.0, 110.0)])
    assert latency is not None
    assert (latency.to_source.mean_ms, latency.to_aggregate.mean_ms) == (20.0, 0.0)


def _fields(plan: ReplayPlan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in ReplayPlan.__dataclass_fields__}
