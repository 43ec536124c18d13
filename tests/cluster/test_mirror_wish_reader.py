"""Wishes over a real broker: every reader hears them, early or late, and a topic made anew has none."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from millrace.broker.client.admin import delete_topic
from millrace.broker.client.cluster import Cluster
from millrace.mirror.control.wish_reader import WishReader
from millrace.mirror.control.wishes import Scope, retry_record, throttle_record
from millrace.mirror.delivery.system_records import SystemRecords
from millrace.mirror.topics.own_topics import WISHES
from millrace.mirror.topics.routes import SourcePartition
from tests.cluster.mirror_process import until
from tests.servers import BrokerProcess
from tests.waiting import patience

pytestmark = pytest.mark.java

PARTITION = SourcePartition("ewr", "flights", 0)
_names = itertools.count(1)


class Heard:
    """A reader, and what it was told in order."""

    def __init__(self, cluster: Cluster, topic: str) -> None:
        self.retries: list[Scope] = []
        self.paused: list[bool] = []
        self.rates: list[float | None] = []
        system = SystemRecords(cluster, lambda: int(time.time() * 1000), 1)
        self.reader = WishReader(cluster, topic, 1, system.write, self._changed, self.retries.append)

    def _changed(self, wishes: object) -> None:
        self.paused.append(self.reader.wishes.is_paused(PARTITION))
        self.rates.append(self.reader.wishes.rate_of("ewr"))

    async def pause(self, paused: bool) -> None:
        await self.reader.write(self.reader.wishes.pause_records(Scope("ewr"), paused=paused, at_ms=1))


@asynccontextmanager
async def reading(broker: BrokerProcess, topic: str) -> AsyncIterator[Heard]:
    async with Cluster("agg", [broker.bootstrap]) as cluster:
        heard = Heard(cluster, topic)
        task = asyncio.create_task(heard.reader.run())
        try:
            async with asyncio.timeout(patience(120)):
                await heard.reader.ready()
            yield heard
        finally:
            task.cancel()
            await asyncio.wait([task])


async def hears(heard: Heard, paused: bool) -> None:
    async def heard_it() -> bool:
        return heard.reader.wishes.is_paused(PARTITION) is paused

    await until(heard_it, lambda: f"{heard.paused}")


def test_every_reader_hears_every_wish_and_a_late_one_before_it_is_ready(broker: BrokerProcess) -> None:
    topic = WISHES.of(f"wishes-{next(_names)}")

    async def story() -> None:
        async with reading(broker, topic) as first, reading(broker, topic) as second:
            assert first.paused == second.paused == [False]
            await first.pause(True)
            await hears(second, True)
            await second.reader.write([throttle_record("ewr", 1_000, 1), retry_record(Scope("ewr"), 1)])

            async def told() -> bool:
                return first.retries == second.retries == [Scope("ewr")]

            await until(told, lambda: f"{first.retries} {second.retries}")
            async with reading(broker, topic) as late:
                # All at once, and the retry of before its time is no business of it.
                assert (late.paused, late.rates, late.retries) == ([True], [1_000], [])
            await second.pause(False)
            await hears(first, False)

    asyncio.run(story())


def test_a_topic_that_was_made_anew_has_no_wishes(broker: BrokerProcess) -> None:
    topic = WISHES.of(f"wishes-{next(_names)}")

    async def story() -> None:
        async with reading(broker, topic) as heard:
            await heard.pause(True)
            await hears(heard, True)
            async with Cluster("agg", [broker.bootstrap]) as cluster:
                await delete_topic(cluster, topic)
            await hears(heard, False)
            await heard.pause(True)
            await hears(heard, True)

    asyncio.run(story())


def test_wishes_are_heard_again_after_the_target_was_away(broker_factory: object) -> None:
    broker: BrokerProcess = broker_factory()  # type: ignore[operator]
    topic = WISHES.of("away")

    async def story() -> None:
        async with reading(broker, topic) as first, reading(broker, topic) as second:
            await first.pause(True)
            await hears(second, True)
            await asyncio.to_thread(broker.restart)
            assert second.reader.wishes.is_paused(PARTITION), "what was wished holds meanwhile"
            await first.pause(False)
            await hears(second, False)

    asyncio.run(story())
