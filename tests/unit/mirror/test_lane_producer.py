"""A lane's own records: how long a target may take for them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.broker.client.raw_produce import ProduceOutcome
from millrace.broker.errors import ClusterUnreachable, LeaderNotAvailable, NotLeaderOrFollower
from millrace.mirror.delivery import lane_producer
from millrace.mirror.delivery.lane_producer import STEP_TIMEOUT_MS, LaneProducer
from millrace.mirror.topics.routes import TargetPartition
from tests import virtual_clock

POSITIONS, MAP = TargetPartition("millrace.positions.m", 0), TargetPartition("millrace.offsets.m", 3)
ROWS = [(b"%d" % number, b"x" * 100) for number in range(8)]


def producer_over(monkeypatch: pytest.MonkeyPatch, batch_s: float, *, refuses: object = None) -> LaneProducer:
    """Its target takes so long for a batch (of two of `ROWS`), and refuses those of one partition for now."""

    async def produce(_cluster: object, _node: int, batches: Any, **_: object) -> Any:
        await asyncio.sleep(batch_s)
        code = NotLeaderOrFollower.code
        return {key: ProduceOutcome(code if TargetPartition(*key) == refuses else 0, 7) for key in batches}

    async def metadata(*_: object) -> Any:
        return SimpleNamespace(by_leader=lambda keys: {1: list(keys)})

    monkeypatch.setattr(lane_producer, "produce", produce)
    monkeypatch.setattr(lane_producer, "BATCH_SIZE", 300)
    cluster: Any = SimpleNamespace(name="agg", metadata=metadata)
    rules: Any = None
    return LaneProducer(0, "m.0", rules, cluster, "lane")


async def written(producer: LaneProducer, *targets: TargetPartition) -> float:
    """How long it took, in seconds."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        assert await producer.write(dict.fromkeys(targets, ROWS), 0) == dict.fromkeys(targets, 7)
    except (NotLeaderOrFollower, TimeoutError) as error:
        assert isinstance(error, NotLeaderOrFollower) and str(MAP) in str(error), "what it said last, and who"
        return -(loop.time() - began)
    return loop.time() - began


def test_each_batch_of_many_positions_has_the_time_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are: what is slow together is not given up as long as it goes on."""
    batch_s = STEP_TIMEOUT_MS / 1000 * 0.8
    producer = producer_over(monkeypatch, batch_s)
    assert virtual_clock.run(written(producer, POSITIONS)) == pytest.approx(4 * batch_s)


def test_write_ends_when_nothing_more_is_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_s = STEP_TIMEOUT_MS / 1000
    producer = producer_over(monkeypatch, 0.5, refuses=MAP)
    assert virtual_clock.run(written(producer, MAP)) == pytest.approx(-limit_s)
    took_s = virtual_clock.run(written(producer, MAP, POSITIONS))
    # The last of the other's four batches, with the pauses between.
    assert -(4 * 0.6 + limit_s) < took_s < -(4 * 0.5 + limit_s)


def test_write_that_nobody_answers_says_who_did_not(monkeypatch: pytest.MonkeyPatch) -> None:
    producer = producer_over(monkeypatch, 2 * STEP_TIMEOUT_MS / 1000)
    with pytest.raises(TimeoutError, match=f"no answer for 5 s from the leader of {MAP}, {POSITIONS}"):
        virtual_clock.run(producer.write(dict.fromkeys((POSITIONS, MAP), ROWS), 0))


def test_write_whose_requests_fail_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    producer = producer_over(monkeypatch, 0.5)

    async def produce(*_: object, **__: object) -> None:
        raise ClusterUnreachable("agg: connection refused")

    monkeypatch.setattr(lane_producer, "produce", produce)
    with pytest.raises(ClusterUnreachable, match="connection refused"):
        virtual_clock.run(written(producer, POSITIONS))


def test_write_to_a_partition_without_a_leader_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    producer = producer_over(monkeypatch, 0.5)

    async def metadata(*_: object) -> Any:
        return SimpleNamespace(by_leader=lambda keys: {None: list(keys)})

    cluster: Any = SimpleNamespace(name="agg", metadata=metadata, invalidate=lambda: None)
    producer._cluster = cluster
    with pytest.raises(LeaderNotAvailable, match=f"{POSITIONS}: it has no leader"):
        virtual_clock.run(written(producer, POSITIONS))
