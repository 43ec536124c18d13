"""Positions at least once: what a worker that lost its seat still had to write, and what it had sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.broker.client.cluster import Cluster
from millrace.broker.errors import ClusterAuthorizationFailed, UnknownMemberId
from millrace.mirror.delivery import at_least_once
from millrace.mirror.delivery.at_least_once import LATE_WRITES_MS, AtLeastOnce
from millrace.mirror.delivery.checkpoints import Positions
from millrace.mirror.delivery.lane import EXPIRATION_MS, replayed_after_ms
from millrace.mirror.delivery.positions_keeper import PositionsKeeper
from millrace.mirror.pipeline import PartitionPipeline
from millrace.mirror.topics.own_topics import POSITIONS
from tests.unit.mirror.pipeline_stage import answer, at, batch, started
from tests.unit.mirror.test_positions_keeper import CONFIG, WHERE
from tests.waiting import until_async as until

Rows = list[tuple[bytes, bytes | None]]


class Topics:
    """The mirror's own topics as one worker writes them, while `is_open`, and the map while `map_is_open`;
    `log` is the positions topic. Every write is one try."""

    def __init__(self, log: Rows) -> None:
        self.log = log
        self.is_open, self.map_is_open = asyncio.Event(), asyncio.Event()
        self.is_open.set()
        self.map_is_open.set()
        self.waiting = 0

    async def write(
        self, topic: str, records: Any, *, permit: Callable[[], None] = lambda: None, **_: object
    ) -> int:
        is_position = topic == POSITIONS.of(CONFIG.name)
        permit()
        self.waiting += 1
        await (self.is_open if is_position else self.map_is_open).wait()
        self.waiting -= 1
        if is_position:
            self.log.extend(records)
        return len(self.log)


class Owner:
    """A worker's way to the target, and the partition that it carries."""

    def __init__(self, log: Rows, interval_ms: int = 3_600_000) -> None:
        self.steady_ms = 0
        self.topics = Topics(log)
        system: Any = self.topics
        agg = Cluster("agg", ["127.0.0.1:1"])
        config = CONFIG.model_copy(update={"position_interval_ms": interval_ms})
        keeper = PositionsKeeper(config, agg, system)
        self.holds_seat = True
        self.delivery = AtLeastOnce(
            *(config, agg, keeper, system, lambda: 5, lambda: self.steady_ms),
            holds_seat=lambda: self.holds_seat,
        )
        self.pipeline, self.target, _ = started()
        self.delivery.began(self.pipeline)

    def carry(self, count: int) -> PartitionPipeline:
        self.pipeline.accept(answer(batch(self.pipeline.progress.fetch_offset, [5] * count)))
        self.target.acknowledge()
        return self.pipeline

    async def lose(self) -> None:
        """As the worker does when its seat is gone."""
        self.delivery.left(self.pipeline)
        self.pipeline.close()
        await self.delivery.lost()


def on_record(log: Rows) -> int:
    positions = Positions()
    for key, value in log:
        positions.apply(key, value)
    return positions.known[WHERE].next_offset


def test_who_lost_the_seat_writes_no_position_behind_the_new_owners() -> None:
    log: Rows = []

    async def story() -> None:
        old, new = Owner(log), Owner(log)
        old.topics.is_open.clear()  # its leader is away for this worker
        first = asyncio.create_task(old.delivery.settle([old.carry(10)]))
        await until(lambda: old.topics.waiting == 1)
        second = asyncio.create_task(old.delivery.settle([old.pipeline]))  # it waits for the first
        await asyncio.sleep(0)
        await old.lose()
        await new.delivery.settle([new.carry(500)])
        old.topics.is_open.set()
        await asyncio.gather(first, second)
        assert on_record(log) == 500
        await old.delivery.settle([old.pipeline])
        assert on_record(log) == 500

    asyncio.run(story())


def test_first_position_of_who_lost_the_seat_is_not_put_on_record() -> None:
    """It begins nothing: the new owner has said where."""
    log: Rows = []

    async def story() -> None:
        old = Owner(log)
        old.topics.is_open.clear()
        recording = asyncio.create_task(old.delivery.record_start(WHERE, at(700)))
        await until(lambda: old.topics.waiting == 1)
        await old.lose()
        old.topics.is_open.set()
        with pytest.raises(UnknownMemberId):
            await recording

    asyncio.run(story())
    assert log == []


def test_who_was_frozen_past_its_session_writes_no_position_before_it_has_heard_of_the_loss() -> None:
    """It wakes between the map and the positions, long after the new owner has written once more."""
    log: Rows = []

    async def story() -> None:
        old, new = Owner(log), Owner(log)
        old.topics.map_is_open.clear()
        frozen = asyncio.create_task(old.delivery.settle([old.carry(10)]))
        await until(lambda: old.topics.waiting == 1)
        await new.delivery.settle([new.carry(500)])
        old.holds_seat = False
        old.topics.map_is_open.set()
        await frozen
        with pytest.raises(UnknownMemberId):
            await old.delivery.record_start(WHERE, at(0))

    asyncio.run(story())
    assert on_record(log) == 500


def test_position_of_a_partition_that_was_given_up_is_not_tried_any_more() -> None:
    """It was not taken within the time for handing over; whoever has the partition now writes its own."""
    log: Rows = []

    async def story() -> None:
        owner = Owner(log)
        owner.topics.map_is_open.clear()
        writing = asyncio.create_task(owner.delivery.settle([owner.carry(10)]))
        await until(lambda: owner.topics.waiting == 1)
        owner.delivery.left(owner.pipeline)
        owner.pipeline.close()
        owner.topics.map_is_open.set()
        await writing
        assert log == []
        owner.pipeline, owner.target, _ = started()
        owner.delivery.began(owner.pipeline)
        await owner.delivery.settle([owner.carry(20)])

    asyncio.run(story())
    assert on_record(log) == 20


def test_a_seat_that_is_lost_ends_no_keeping_of_positions() -> None:
    """The worker takes another one, and its positions are written as before."""
    log: Rows = []

    async def story() -> None:
        owner = Owner(log, interval_ms=1)
        keeping = asyncio.create_task(owner.delivery._keep_positions())
        owner.topics.is_open.clear()
        owner.carry(10)
        await until(lambda: owner.topics.waiting == 1)
        await owner.lose()
        owner.topics.is_open.set()
        owner.pipeline, owner.target, _ = started()
        owner.delivery.began(owner.pipeline)
        owner.carry(20)
        await until(lambda: bool(log) or keeping.done())
        keeping.cancel()
        await asyncio.wait([keeping])
        assert keeping.cancelled()

    asyncio.run(story())
    assert on_record(log) == 20


def test_new_owner_writes_once_more_when_nothing_of_the_old_one_can_come() -> None:
    """What that had sent when it lost its seat is taken behind the new owner's last position, and nothing
    comes any more that would move it."""
    log: Rows = []

    async def story() -> None:
        old, new = Owner([]), Owner(log, interval_ms=1)
        await old.delivery.settle([old.carry(10)])
        new.carry(500)
        keeping = asyncio.create_task(new.delivery._keep_positions())
        await until(lambda: len(log) == 1)
        log.extend(old.topics.log)
        assert on_record(log) == 10
        new.steady_ms = LATE_WRITES_MS
        await until(lambda: on_record(log) == 500)
        written = len(log)
        new.steady_ms = 10 * LATE_WRITES_MS
        new.carry(1)
        await until(lambda: on_record(log) == 501)
        assert len(log) == written + 1, "only once"
        keeping.cancel()
        await asyncio.wait([keeping])

    asyncio.run(story())


def test_writing_that_is_given_up_for_time_is_over_when_that_is_said() -> None:
    """The worker closes what it could not write in time, and nothing of it goes on."""
    log: Rows = []

    async def story() -> None:
        owner = Owner(log)
        owner.topics.is_open.clear()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await owner.delivery.settle([owner.carry(10)])
        owner.topics.is_open.set()
        await asyncio.sleep(0)
        assert log == [] and not owner.delivery._writes

    asyncio.run(story())


def test_target_is_asked_when_it_forgets_producers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its brokers the least counts, whoever may not be asked, and again when it has changed."""
    minute = 60_000
    told: dict[int, dict[str, str | None] | Exception] = {
        1: {"producer.id.expiration.ms": str(20 * minute), "transactional.id.expiration.ms": "1"},
        2: {"producer.id.expiration.ms": str(30 * minute)},
        3: ClusterAuthorizationFailed("no"),
    }

    async def describe(_cluster: object, node_id: int, _keys: object) -> dict[str, str | None]:
        answer = told[node_id]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def metadata(*_: object, **__: object) -> Any:
        return SimpleNamespace(brokers=told)

    monkeypatch.setattr(at_least_once, "describe_broker_configs", describe)

    async def story() -> None:
        delivery = Owner([]).delivery
        monkeypatch.setattr(delivery._target, "metadata", metadata)
        (sink,) = delivery.sinks
        assert sink.replayed_after_ms == 0, "all are replayed until it is known"
        following = asyncio.create_task(delivery._follow_expirations())
        await until(lambda: sink.replayed_after_ms == 10 * minute)
        told[1] = TimeoutError()
        await delivery._ask_expirations()
        assert sink.replayed_after_ms == 10 * minute, "what it said before"
        told[1] = {"transactional.id.expiration.ms": str(6 * minute)}
        await delivery._ask_expirations()
        assert sink.replayed_after_ms == 3 * minute, "Apache Kafka before 3.4"
        del told[1], told[2]
        await delivery._ask_expirations()
        assert sink.replayed_after_ms == replayed_after_ms(EXPIRATION_MS)
        following.cancel()
        await asyncio.wait([following])

    asyncio.run(story())
